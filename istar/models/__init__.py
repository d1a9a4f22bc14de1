"""Models and tokenizers: those of transformers, with heads for the tasks, and a tiny random BERT."""

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
    "load_config",
    "load_encoder",
    "load_model",
    "load_pretrained",
    "load_tokenizer",
    "meta_model",
    "save",
]
