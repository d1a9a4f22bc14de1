"""Models and tokenizers: those of transformers, with heads for the tasks, new models, and a tiny random BERT."""

from istar.models.architectures import is_decoder
from istar.models.attention import isolating_inputs, isolation, takes_positions
from istar.models.new_tokenizer import train_tokenizer
from istar.models.pretrained import (
    find_file,
    load_config,
    load_encoder,
    load_model,
    load_pretrained,
    load_tokenizer,
    meta_model,
    save,
)

__all__ = [
    "find_file",
    "is_decoder",
    "isolating_inputs",
    "isolation",
    "load_config",
    "load_encoder",
    "load_model",
    "load_pretrained",
    "load_tokenizer",
    "meta_model",
    "save",
    "takes_positions",
    "train_tokenizer",
]
