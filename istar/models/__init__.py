"""Models and tokenizers: those of transformers, with heads for the tasks, new models, and a tiny random BERT."""

from istar.models.adapters import has_adapters
from istar.models.architectures import is_decoder
from istar.models.attention import accepts_position_ids, isolation, make_isolating_inputs
from istar.models.new_tokenizer import train_tokenizer
from istar.models.pretrained import (
    build_meta_model,
    find_file,
    get_embedding_weight,
    load_config,
    load_encoder,
    load_model,
    load_pretrained,
    load_tokenizer,
    load_weights,
    save,
)

__all__ = [
    "accepts_position_ids",
    "build_meta_model",
    "find_file",
    "get_embedding_weight",
    "has_adapters",
    "is_decoder",
    "isolation",
    "load_config",
    "load_encoder",
    "load_model",
    "load_pretrained",
    "load_tokenizer",
    "load_weights",
    "make_isolating_inputs",
    "save",
    "train_tokenizer",
]
