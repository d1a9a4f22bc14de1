"""A tiny BERT of the project's own: it trains in seconds from random weights and needs no download."""

import string
from collections.abc import Iterable

from transformers import BertConfig, BertTokenizer

MAX_LENGTH = 512
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tokenizer(words: Iterable[str] = ()) -> BertTokenizer:
    """A lower-casing WordPiece tokenizer that knows `words` and spells every other word out.

    All printable ASCII has its pieces, so English text never becomes `[UNK]`
    (but for words of more than 100 characters, as in BERT).
    """
    characters = sorted(set(string.printable.lower()) - set(string.whitespace))
    continuations = [f"##{character}" for character in characters if character.isalnum()]
    pieces = dict.fromkeys([*SPECIAL, *characters, *continuations, *(word.lower() for word in words)])
    return BertTokenizer({piece: index for index, piece in enumerate(pieces)}, model_max_length=MAX_LENGTH)


def config(vocab_size: int) -> BertConfig:
    """Two narrow layers: the smallest BERT that learns `task=demo` reliably within seconds."""
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,  # BERT's 0.02 suits its width of 768; here it delays learning by epochs
    )
