"""Texts of any length to blocks of tokens of one length: documents are packed, so that hardly anything is padding."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError, shorten

T = TypeVar("T")
COMBINED = "combined"
"""The name of several sources together."""

_AT_ONCE = 1_000
"""Documents tokenized together; the tokenizer's threads want some to share."""


@dataclass(frozen=True)
class Source:
    """A text file: `.jsonl` with a document under `text` in each line, else a document in each line that is not empty.

    Attributes:
        name: under which its figures are told.
        path: of the file.
    """

    name: str
    path: Path


def sources(texts: Sequence[str]) -> list[Source]:
    """`name=path` or `path`, which is named by its stem.

    Raises:
        UserError: if a file is missing or two have one name.
    """
    found = []
    for text in texts:
        name, is_named, path = text.partition("=")
        place = Path(path if is_named and not Path(text).exists() else text)
        if not place.is_file():
            raise UserError(f"--text {text}: there is no file {place}; expected a text file, or name=<text file>")
        found.append(Source(name if place != Path(text) else place.stem, place))
    names = [source.name for source in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--text: two sources are named {twice}; tell them apart by name=<file>")
    if COMBINED in names and len(names) > 1:
        raise UserError(f"--text: {COMBINED} is the name of all texts together; give that one another, name=<file>")
    return found


def documents(source: Source) -> Iterator[str]:
    """The documents of a file, one by one.

    Raises:
        UserError: naming the file and the line, for what is no UTF-8 or no JSON object with a text.
    """
    try:
        with source.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text(line, f"{source.path}, line {number}") if _is_json(source) else line.strip()
    except UnicodeDecodeError as error:
        raise UserError(f"{source.path} is not UTF-8 ({shorten(error)}); convert it first") from error
    except OSError as error:
        raise UserError(f"{source.path} cannot be read: {shorten(error)}") from error


def _is_json(source: Source) -> bool:
    return source.path.suffix in (".jsonl", ".ndjson")


def _text(line: str, place: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f'{place}: expected a JSON object with a text, such as {{"text": "..."}}') from error
    if not isinstance(text, str):
        raise UserError(f"{place}: text is {type(text).__name__}; expected a string")
    return text


class Packer:
    """Documents to blocks of exactly `length` tokens, the last one shorter.

    Documents follow each other, each closed by the tokenizer's separator (`sep_token` or `eos_token`, where there is
    one); each block has the special tokens around it that the tokenizer puts around a text.

    Args:
        tokenizer: of the model.
        length: of a block, special tokens included.

    Raises:
        UserError: if a block has no room for text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = _special_tokens(tokenizer)
        self._room = length - len(self._before) - len(self._after)
        if self._room < 1:
            raise UserError(f"a block of {length} tokens has no room for text beside the special tokens; give more")
        end = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
        self._between = [] if end is None else [end]

    def __call__(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Token ids of the blocks of these documents."""
        rest: list[int] = []
        for ids in self._tokens(texts):
            rest += ids + self._between
            whole = len(rest) // self._room * self._room
            for start in range(0, whole, self._room):
                yield [*self._before, *rest[start : start + self._room], *self._after]
            del rest[:whole]
        if rest:
            yield [*self._before, *rest, *self._after]

    def _tokens(self, texts: Iterable[str]) -> Iterator[list[int]]:
        for some in chunks(texts, _AT_ONCE):
            # Not cut to the model's length, so no advice about it.
            encoded = self._tokenizer(
                some, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
            )
            yield from encoded["input_ids"]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text."""
    inner = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    at = next(place for place in range(len(whole)) if whole[place : place + len(inner)] == inner)
    return whole[:at], whole[at + len(inner) :]


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """`size` items at a time; the last ones may be fewer."""
    some: list[T] = []
    for item in items:
        some.append(item)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some


def batch(blocks: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Blocks as `input_ids` and `attention_mask` `(blocks, tokens)`, padded to the longest."""
    longest = max(map(len, blocks))
    ids = torch.full((len(blocks), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, block in enumerate(blocks):
        ids[row, : len(block)] = torch.tensor(block)
        mask[row, : len(block)] = 1
    return {"input_ids": ids, "attention_mask": mask}
