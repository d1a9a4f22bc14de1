"""Tokenization of documents without special tokens, and the special tokens of a tokenizer."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_TOKENIZER_BATCH = 1_000
"""Documents tokenized in one call, enough for the tokenizer's threads to share."""


def tokenize(texts: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> Iterator[list[int]]:
    """Yield the token ids of each text, without special tokens."""
    for chunk in chunks(texts, _TOKENIZER_BATCH):
        # `verbose=False` silences the warning about texts that are longer than the model's input.
        encoded = tokenizer(
            chunk, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        yield from encoded["input_ids"]


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer adds before and behind a text."""
    inner = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next(index for index in range(len(whole)) if whole[index : index + len(inner)] == inner)
    return whole[:start], whole[start + len(inner) :]


def separator(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the token that ends a document: `sep_token`, or else `eos_token`, or None if there is neither."""
    return tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items; the last list may be shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
