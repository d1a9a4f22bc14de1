"""Encoders, heads and tokenizers of transformers, and the tiny random model."""

from istar.models.pretrained import (
    file_of,
    load_config,
    load_encoder,
    load_model,
    load_pretrained,
    load_tokenizer,
    save,
    skeleton,
)

__all__ = [
    "file_of",
    "load_config",
    "load_encoder",
    "load_model",
    "load_pretrained",
    "load_tokenizer",
    "save",
    "skeleton",
]
