"""What transformers knows about architectures: decoder or encoder, heads for tasks, and configs of new models."""

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from istar.errors import UserError, did_you_mean, shorten
from istar.tasks.specs import Kind

_SET_BY_ISTAR = {
    "architectures", "dtype", "id2label", "is_encoder_decoder", "label2id", "model_type", "num_labels", "problem_type",
    "torch_dtype", "transformers_version",
}  # fmt: skip
"""Values of a configuration that follow from the architecture or from the task."""
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
"""The class that loads a model with the head for a kind of task, and the architectures that have such a head."""
_KIND_NAMES: dict[Kind, str] = {
    "classification": "sequence classification",
    "regression": "regression",
    "span": "extractive question answering",
    "causal_lm": "causal language modelling",
    "masked_lm": "masked language modelling",
}


def is_decoder(config: PreTrainedConfig) -> bool:
    """Return whether an architecture is a decoder, whose tokens attend to earlier tokens only.

    transformers can load some encoders, such as BERT, as causal language models, but none of the decoders as masked
    language models.
    """
    kind = type(config)
    is_causal_lm = kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return is_causal_lm and kind not in transformers.MODEL_FOR_MASKED_LM_MAPPING


def auto_class(config: PreTrainedConfig, kind: Kind, label: str) -> Any:
    """Return the `AutoModelFor...` class that loads an architecture with the head for a kind of task.

    `label` names the model in the message.

    Raises:
        UserError: if transformers has no such head for the architecture.
    """
    loader, architectures = _HEADS[kind]
    if type(config) not in architectures:
        raise UserError(
            f"{label}: transformers has no head for {_KIND_NAMES[kind]} for {config.model_type} models; choose another "
            "model or another task"
        )
    return loader


def saved_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that wrote a checkpoint with this configuration, or None if it names none."""
    return getattr(transformers, (config.architectures or [""])[0], None)


def new_config(architecture: str, values: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the configuration of a new model of an architecture, with transformers' defaults except for `values`.

    Raises:
        UserError: if the architecture or a value is unknown or not allowed.
    """
    if architecture not in CONFIG_MAPPING:
        hint = did_you_mean(architecture, CONFIG_MAPPING)
        raise UserError(f"model.architecture={architecture} is no model type of transformers{hint}")
    kind, values = CONFIG_MAPPING[architecture], dict(values)
    # The default of some architectures suits only their default number of heads.
    if "num_attention_heads" in values and hasattr(kind(), "num_key_value_heads"):
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    return _build(kind, {}, values, f"model.architecture={architecture}")


def override(config: PreTrainedConfig, values: Mapping[str, Any], label: str) -> PreTrainedConfig:
    """Return a copy of a configuration with other values, from which the dependent values are computed again.

    `label` names the model in messages.

    Raises:
        UserError: if a value is unknown or not allowed.
    """
    before = {key: value for key, value in config.to_diff_dict().items() if key not in ("model_type", "architectures")}
    # A list with one entry for each layer, which transformers derives from the number of layers.
    if len(set(before.get("layer_types") or ())) == 1:
        del before["layer_types"]
    return _build(type(config), before, values, label)


def _build(kind: Any, before: Mapping[str, Any], values: Mapping[str, Any], label: str) -> PreTrainedConfig:
    """Build a configuration of the class `kind` from the values `before`, replaced by `values`."""
    try:
        known = {*kind().to_dict(), *kind.attribute_map} - _SET_BY_ISTAR
        for name in values:
            if name not in known:
                hint = did_you_mean(name, known)
                raise UserError(f"model.config.{name}: {kind.model_type} models have no such value{hint}")
        replaced = {kind.attribute_map.get(name, name): value for name, value in values.items()}
        config: PreTrainedConfig = kind(**{**before, **replaced})
    except UserError:
        raise
    except Exception as error:  # the types depend on the architecture
        raise UserError(f"{label}: this model.config is not accepted: {shorten(error)}") from error
    return config
