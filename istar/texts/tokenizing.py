"""Tokenization of documents without special tokens."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from istar.errors import UserError, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_TOKENIZER_BATCH = 1_000
"""Maximum number of documents to tokenize in one call, enough for the tokenizer's threads to share."""
_TOKENIZER_CHARACTERS = 1_000_000
"""Maximum number of characters in one call, because a tokenizer needs some 240 bytes for each."""

_TRIAL_CHARACTERS = 1_000
"""Number of characters of the trial before each call; see `_encode`."""


class TextPart(NamedTuple):
    """A part of a text with its token ids; see `tokenize_parts`."""

    text: str
    token_ids: list[int]
    is_last: bool  # whether the text ends with this part


def tokenize(texts: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> Iterator[list[int]]:
    """Yield the token ids of each text, without special tokens; long texts are cut as by `tokenize_parts`."""
    token_ids: list[int] = []
    for part in tokenize_parts(texts, tokenizer):
        token_ids += part.token_ids
        if part.is_last:
            yield token_ids
            token_ids = []


def tokenize_parts(texts: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> Iterator[TextPart]:
    """Yield the parts of each text with their token ids, without special tokens.

    A text of at most 1,000,000 characters has one part. A longer one is cut before white space, or after 1,000,000
    characters without any. Parts are tokenized only as they are needed, so that the memory does not grow with the
    length of a text. The token ids are those of the whole text, except perhaps next to the cuts.
    """
    for chunk in _split_into_calls(texts):
        part_texts, are_last = zip(*chunk, strict=True)
        with convert_tokenizer_errors():
            token_ids = _encode(part_texts, tokenizer)
        yield from map(TextPart, part_texts, token_ids, are_last)


def _encode(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Return the token ids of each text, without special tokens."""
    # `verbose=False` silences the warning about texts that are longer than the model's input.
    names = ("add_special_tokens", "return_attention_mask", "return_token_type_ids", "verbose")
    options = dict.fromkeys(names, False)
    # The backend of a fast tokenizer takes less time, because it can leave out the places of the tokens in the text. A
    # trial shows whether a subclass changes texts. Its call also ends a truncation or padding by the backend.
    trial = [texts[0][:_TRIAL_CHARACTERS]]
    trial_ids = tokenizer(trial, **options)["input_ids"]
    if tokenizer.is_fast:
        encode = partial(tokenizer.backend_tokenizer.encode_batch_fast, add_special_tokens=False)
        if [encoding.ids for encoding in encode(trial)] == trial_ids:
            return [encoding.ids for encoding in encode(texts)]
    ids: list[list[int]] = tokenizer(list(texts), **options)["input_ids"]
    return ids


@contextmanager
def convert_tokenizer_errors() -> Iterator[None]:
    """Convert the error of a fast tokenizer for text that it has no token for, not even an unknown one."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:  # tokenizers raises plain exceptions
            raise
        raise UserError(f"the tokenizer has no token for a part of the text: {shorten(error)}") from error


def _split_into_calls(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    chunk: list[tuple[str, bool]] = []
    num_characters = 0
    for part_text, is_last in (part for text in texts for part in _split_text(text)):
        num_characters += len(part_text)
        if chunk and (len(chunk) == _TOKENIZER_BATCH or num_characters > _TOKENIZER_CHARACTERS):
            yield chunk
            chunk, num_characters = [], len(part_text)
        chunk.append((part_text, is_last))
    if chunk:
        yield chunk


def _split_text(text: str) -> Iterator[tuple[str, bool]]:
    if len(text) <= _TOKENIZER_CHARACTERS:
        yield text, True
        return
    limit = _TOKENIZER_CHARACTERS
    for match in re.finditer(rf"(?s).{{1,{limit}}}(?=\s|\Z)|.{{{limit}}}", text):
        yield match[0], match.end() == len(text)


def count_text_tokens(length: int, prefix: Sequence[int], suffix: Sequence[int]) -> int:
    """Return how many tokens of a text fit into a block with the special tokens; raise a `UserError` if none do."""
    num_text_tokens = length - len(prefix) - len(suffix)
    if num_text_tokens < 1:
        raise UserError(f"a block of {length} tokens has no room for more than special tokens; choose a greater length")
    return num_text_tokens


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield consecutive lists of `size` items; the last may be shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
