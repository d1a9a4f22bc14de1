"""Tokenization of documents without special tokens, and the special tokens of a tokenizer."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_TOKENIZER_BATCH = 1_000
"""Number of documents tokenized in one call, enough for the tokenizer's threads to share."""


def tokenize(texts: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> Iterator[list[int]]:
    """Yield the token ids of each text, without special tokens."""
    for chunk in chunks(texts, _TOKENIZER_BATCH):
        # `verbose=False` silences the warning about texts that are longer than the model's input.
        encoded = tokenizer(
            chunk, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        yield from encoded["input_ids"]


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the ids of the special tokens that a tokenizer adds before and after a text."""
    text_ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    all_ids = tokenizer("a")["input_ids"]
    start = next(index for index in range(len(all_ids)) if all_ids[index : index + len(text_ids)] == text_ids)
    return all_ids[:start], all_ids[start + len(text_ids) :]


def find_separator_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id of the token that ends a document: of `sep_token`, else of `eos_token`, or None without either."""
    return tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Split items into consecutive lists of `size` items, of which the last may be shorter, and yield the lists."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
