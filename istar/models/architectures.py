"""What transformers knows about architectures: decoder or encoder, the longest input, and values of configurations."""

from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from istar.errors import UserError

OUTPUTS = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
"""Configuration values that decide what a model returns. A configuration with attentions often cannot be saved."""
_MAX_LAYERS = 10_000
"""Most layers of a model; more are a mistake, and would take hours to build."""
_POSITIONS_START_AFTER_PADDING = {
    "altclip_text_model", "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer",
    "luke", "markuplm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
"""Models that number positions from the padding token's id plus 1."""


def is_decoder(config: PreTrainedConfig) -> bool:
    """Return whether an architecture is a decoder: its tokens attend to earlier tokens only.

    It is if transformers can load it as a causal language model but not as a masked one. Some encoders, such as BERT,
    can be loaded as both.
    """
    config_class = type(config)
    is_causal_lm = config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return is_causal_lm and config_class not in transformers.MODEL_FOR_MASKED_LM_MAPPING


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
    for name, value in OUTPUTS.items():
        setattr(config, name, value)
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            reset_outputs(part)


def find_max_input_length(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens of a model's input, or None if inputs may have any length."""
    config = config.get_text_config()
    # Falcon's config has `max_position_embeddings` even if its attention uses ALiBi and its inputs have no limit.
    if getattr(config, "alibi", False):
        return None
    # MPT and LED have other names for the limit. Models with relative positions have none, or -1.
    names = ("max_position_embeddings", "max_seq_len", "max_encoder_position_embeddings")
    limit = int(next((value for name in names if (value := getattr(config, name, None))), 0))
    if config.model_type in _POSITIONS_START_AFTER_PADDING:
        # MPNet takes 1, whatever the config says.
        limit -= 2 if config.model_type == "mpnet" else (config.pad_token_id or 0) + 1
    return limit if limit > 0 else None
