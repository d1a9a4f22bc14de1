"""A tiny BERT with random weights and its tokenizer; it trains in seconds and needs no download."""

import string
from collections.abc import Iterable

from transformers import BertConfig, BertTokenizer

MAX_LENGTH = 512
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_tokenizer(words: Iterable[str] = ()) -> BertTokenizer:
    """Return a lowercasing WordPiece tokenizer with a token for each of `words`; it splits others into characters.

    The vocabulary contains all printable ASCII characters. English text therefore never yields `[UNK]`, except for
    words of more than 100 characters, as in BERT.
    """
    characters = sorted(set(string.printable.lower()) - set(string.whitespace))
    continuations = [f"##{character}" for character in characters if character.isalnum()]
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *characters, *continuations, *(word.lower() for word in words)])
    return BertTokenizer({piece: index for index, piece in enumerate(pieces)}, model_max_length=MAX_LENGTH)


def make_tiny_config(vocab_size: int) -> BertConfig:
    """Return the configuration of a tiny BERT, the smallest that reliably learns the task `demo` within seconds."""
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,  # BERT's 0.02 suits a hidden size of 768; with 64, it would delay learning by epochs
    )
