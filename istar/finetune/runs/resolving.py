"""Replaces settings that depend on the machine or the time, such as the branch of a hub model, by fixed values.

Large libraries are imported within the functions, because their import takes seconds and many configs need none.
"""

from dataclasses import replace

from istar.records.config import Config, ModelConfig


def resolve_config(config: Config) -> Config:
    """Return the config with `trainer.precision=auto` replaced by a precision and a hub model's branch by its commit.

    Both are part of the hash in the run's name, and all processes of the run must use the same values.

    Raises:
        UserError: if `resolve_model` fails.
    """
    config = resolve_precision(config)
    return replace(config, model=resolve_model(config.model))


def resolve_precision(config: Config) -> Config:
    """Return the config with `trainer.precision=auto` replaced by a precision that is fast on this machine.

    A warning is logged if another precision is requested that is slow on this machine.
    """
    if config.trainer.precision in ("32-true", "16-mixed"):
        return config
    from istar.finetune.training import precision

    return replace(config, trainer=precision.choose_precision(config.trainer))


def resolve_model(config: ModelConfig) -> ModelConfig:
    """Return the config of a hub model with its branch or tag replaced by the commit.

    All files of the model are then of the same version. A tokenizer from the hub becomes `<hub id>@<commit>`. Other
    models and tokenizers are left unchanged.

    Raises:
        UserError: if `istar.inputs.hub.find_commit` does not find the commit.
    """
    if config.is_tiny:
        return config
    from istar.inputs.hub import find_commit, is_hub_id

    if config.architecture is None and is_hub_id(config.name):
        config = replace(config, revision=find_commit(config.name, config.revision, "model"))
    if config.tokenizer is not None and not config.trains_tokenizer:
        name, _, revision = config.tokenizer.partition("@")
        if is_hub_id(name):
            config = replace(config, tokenizer=f"{name}@{find_commit(name, revision or None, 'model')}")
    return config
