"""Replacement of settings whose meaning depends on the machine or the moment by the values that they have now.

Large libraries are imported within the functions, because their import takes seconds and many configs need none.
"""

from dataclasses import replace

from istar.config import Config, ModelConfig


def resolve(config: Config) -> Config:
    """Replace `trainer.precision=auto` by a precision, and the branch of a hub model by its commit.

    The name of a run contains both, and all its processes must use the same.

    Raises:
        UserError: if `resolve_model` fails.
    """
    config = resolve_precision(config)
    return replace(config, model=resolve_model(config.model))


def resolve_precision(config: Config) -> Config:
    """Replace `trainer.precision=auto` by the precision that is fast on this machine.

    A warning is logged if the requested precision is slow on this machine.
    """
    if config.trainer.precision in ("32-true", "16-mixed"):
        return config
    from istar.training import precision

    return replace(config, trainer=precision.resolve_precision(config.trainer))


def resolve_model(config: ModelConfig) -> ModelConfig:
    """Replace the branch or tag in the config of a hub model by its commit, by which all files are then loaded.

    A tokenizer of the hub becomes `<hub id>@<commit>`. Everything else is returned unchanged.

    Raises:
        UserError: if `istar.tasks.hub.find_commit` does not find the commit.
    """
    if config.is_tiny:
        return config
    from istar.tasks.hub import find_commit, is_hub_id

    if config.architecture is None and is_hub_id(config.name):
        config = replace(config, revision=find_commit(config.name, config.revision, "model"))
    if config.tokenizer is not None and not config.trains_tokenizer:
        name, _, revision = config.tokenizer.partition("@")
        if is_hub_id(name):
            config = replace(config, tokenizer=f"{name}@{find_commit(name, revision or None, 'model')}")
    return config
