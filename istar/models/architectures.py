"""What transformers knows about architectures: decoder or encoder, heads for tasks, and configs of new models."""

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from istar.errors import UserError, did_you_mean, shorten
from istar.runs.tasks import Kind

_OUTPUTS = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
"""Configuration values that decide what a model returns. A configuration with attentions often cannot be saved."""
_SET_BY_ISTAR = {
    *_OUTPUTS, "architectures", "dtype", "id2label", "is_encoder_decoder", "label2id", "model_type", "num_labels",
    "problem_type", "torch_dtype", "transformers_version",
}  # fmt: skip
"""Configuration values set from the architecture or the task, not by the user."""
_MAX_LAYERS = 10_000
"""Most layers of a model; more are a mistake, and would take hours to build."""
_HEADS: dict[Kind, tuple[Any, Any]] = {
    "classification": (
        transformers.AutoModelForSequenceClassification, transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    ),
    "regression": (
        transformers.AutoModelForSequenceClassification, transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    ),
    "span": (transformers.AutoModelForQuestionAnswering, transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING),
    "causal_lm": (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    "masked_lm": (transformers.AutoModelForMaskedLM, transformers.MODEL_FOR_MASKED_LM_MAPPING),
}  # fmt: skip
"""By kind of task: the class that loads a model with its head, and the architectures with such a head."""


def is_decoder(config: PreTrainedConfig) -> bool:
    """Return whether an architecture is a decoder: its tokens attend to earlier tokens only.

    It is if transformers can load it as a causal language model but not as a masked one. Some encoders, such as BERT,
    can be loaded as both.
    """
    config_class = type(config)
    is_causal_lm = config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return is_causal_lm and config_class not in transformers.MODEL_FOR_MASKED_LM_MAPPING


def get_auto_class(config: PreTrainedConfig, kind: Kind, label: str) -> Any:
    """Return the `AutoModelFor...` class that loads an architecture with the head for a kind of task.

    Raises a `UserError` if transformers lacks such a head; the message names the model by `label`.
    """
    auto_class, architectures = _HEADS[kind]
    if type(config) not in architectures:
        raise UserError(
            f"{label}: transformers has no {auto_class.__name__} for {config.model_type} models; choose another model "
            "or another task"
        )
    return auto_class


def get_checkpoint_class(config: PreTrainedConfig) -> Any:
    """Return the transformers class that a checkpoint's configuration names, or None."""
    names = config.architectures
    name = names[0] if isinstance(names, list) and names else None
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    return model_class if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel) else None


def check_num_layers(config: Any, label: str) -> None:
    """Raise a `UserError` if a configuration has an impossible number of layers; `label` is the name of the model."""
    num_layers = getattr(config, "num_hidden_layers", 1)
    if isinstance(num_layers, int) and not 1 <= num_layers <= _MAX_LAYERS:
        raise UserError(f"{label}: num_hidden_layers is {num_layers} in its config; expected 1 to {_MAX_LAYERS:,}")


def reset_outputs(config: PreTrainedConfig) -> None:
    """Let a model return what it does by default, whatever its configuration and the ones inside it say."""
    for name, value in _OUTPUTS.items():
        setattr(config, name, value)
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            reset_outputs(part)


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
    return _build_config(config_class, base_values={}, values=values, label=f"model.architecture={architecture}")


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
    return _build_config(type(config), base_values, values, label)


def _build_config(
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
