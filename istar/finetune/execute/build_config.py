"""The transformers configuration of a run's model: loaded or new, with the values of the task."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase

from istar.errors import UserError, did_you_mean, shorten
from istar.finetune.config import ModelConfig
from istar.models import tiny
from istar.models.architectures import OUTPUTS, check_num_layers, is_decoder
from istar.models.model_files import load_checkpoint_config
from istar.runs.tasks import TaskSpec

_SET_BY_ISTAR = {
    *OUTPUTS, "architectures", "dtype", "id2label", "is_encoder_decoder", "label2id", "model_type", "num_labels",
    "problem_type", "torch_dtype", "transformers_version",
}  # fmt: skip
"""Configuration values set from the architecture or the task, not by the user."""


def build_config(config: ModelConfig, spec: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load or make the transformers configuration of a run's model, with the task's labels and the tokenizer's ids.

    Raises a `UserError` if the configuration is not found, if the model is neither a text encoder nor a decoder, or if
    the task needs the other of the two.
    """
    model_config: Any = tiny.make_tiny_config(len(tokenizer)) if config.is_tiny else make_architecture_config(config)
    check_num_layers(model_config, config.label)
    if not hasattr(model_config, "num_hidden_layers"):
        raise UserError(f"{config.label}: {model_config.model_type} models are not text encoders")
    if model_config.is_encoder_decoder:
        raise UserError(
            f"{config.label}: {model_config.model_type} models are encoder-decoders, which have two sets of "
            "hidden states; expected an encoder or a decoder"
        )
    _check_language_modelling(config, spec, model_config, tokenizer)
    if config.tokenizer is not None and not config.pretrained:
        _set_tokenizer_values(config, model_config, tokenizer)
    if is_decoder(model_config):
        # The cache of keys and values is for generation. With a cache, transformers ignores that positions restart,
        # and packed documents would attend to each other.
        model_config.use_cache = False
    if spec.kind in ("classification", "regression"):
        labels = spec.labels or ("score",)
        model_config.problem_type = "single_label_classification" if spec.labels else "regression"
        model_config.id2label = dict(enumerate(labels))
        model_config.label2id = {name: id_ for id_, name in enumerate(labels)}
        if is_decoder(model_config):
            # The heads of decoders read the last token that is not this one.
            model_config.pad_token_id = tokenizer.pad_token_id
    return model_config


def make_architecture_config(config: ModelConfig) -> Any:
    """Load or make a model's configuration with the values of `config.config`, but not yet the task's values.

    Raises a `UserError` if the configuration is not found, or a value is unknown or not allowed.
    """
    if config.architecture is not None:
        return make_config(config.architecture, config.config)
    model_config = load_checkpoint_config(config.source())
    return override_config(model_config, config.config, config.label) if config.config else model_config


def make_config(architecture: str, values: Mapping[str, Any]) -> PreTrainedConfig:
    """Make the configuration of a new model: the architecture's defaults in transformers, updated with `values`.

    Raises a `UserError` if the architecture or a value is unknown or not allowed.
    """
    if architecture not in CONFIG_MAPPING:
        hint = did_you_mean(architecture, CONFIG_MAPPING)
        raise UserError(f"model.architecture={architecture} is no model type of transformers{hint}")
    config_class, values = CONFIG_MAPPING[architecture], dict(values)
    # In some architectures, the default of `num_key_value_heads` suits only the default number of heads.
    if "num_attention_heads" in values and hasattr(config_class(), "num_key_value_heads"):
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    return _construct_config(config_class, base_values={}, values=values, label=f"model.architecture={architecture}")


def override_config(config: PreTrainedConfig, values: Mapping[str, Any], label: str) -> PreTrainedConfig:
    """Return a copy of a configuration with new `values`; values derived from them are recomputed.

    Raises a `UserError` if a value is unknown or not allowed; the message names the model by `label`.
    """
    base_values = {
        key: value for key, value in config.to_diff_dict().items() if key not in ("model_type", "architectures")
    }
    # A list with one entry per layer, which transformers derives from the number of layers if it is missing.
    if len(set(base_values.get("layer_types") or ())) == 1:
        del base_values["layer_types"]
    return _construct_config(type(config), base_values, values, label)


def _construct_config(
    config_class: Any, base_values: Mapping[str, Any], values: Mapping[str, Any], label: str
) -> PreTrainedConfig:
    try:
        known_names = {*config_class().to_dict(), *config_class.attribute_map} - _SET_BY_ISTAR
        for name in values:
            if name not in known_names:
                hint = did_you_mean(name, known_names)
                raise UserError(f"model.config.{name}: {config_class.model_type} models have no such value{hint}")
        new_values = {config_class.attribute_map.get(name, name): value for name, value in values.items()}
        config: PreTrainedConfig = config_class(**{**base_values, **new_values})
    except UserError:
        raise
    except Exception as error:  # the types depend on the architecture
        raise UserError(f"{label}: this model.config is not accepted: {shorten(error)}") from error
    return config


def _set_tokenizer_values(config: ModelConfig, model_config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    values = {"vocab_size": max(tokenizer.get_vocab().values()) + 1}
    values |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    for name, value in values.items():
        if name not in config.config:
            setattr(model_config, name, value)


def _check_language_modelling(
    config: ModelConfig, spec: TaskSpec, model_config: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    if spec.kind == "causal_lm" and not is_decoder(model_config):
        raise UserError(
            f"task={spec.name} needs a decoder, such as model=gpt2 or small_decoder, but {config.label} is an encoder "
            f"({model_config.model_type}), which sees the tokens that it should predict"
        )
    if spec.kind == "masked_lm" and is_decoder(model_config):
        raise UserError(
            f"task={spec.name} needs an encoder, such as model=bert or small_encoder, but {config.label} is a decoder "
            f"({model_config.model_type})"
        )
    if spec.kind == "masked_lm" and tokenizer.mask_token_id is None:
        raise UserError(f"task={spec.name} needs a tokenizer with a mask token, but {config.label} has one without it")
