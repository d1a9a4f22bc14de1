"""Texts to measure on, and packing of their documents into blocks of tokens of equal length."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError
from istar.tasks.tokenizing import separator, special_tokens, tokenize

COMBINED = "combined"
"""Name of the results over several sources together."""


@dataclass(frozen=True)
class Source:
    """A corpus: a file or folder that `istar.tasks.documents.read_documents` reads."""

    name: str  # name of the source in the results
    path: Path


def sources(texts: Sequence[str]) -> list[Source]:
    """Parse the values of `--text`: `name=path`, or `path`, whose stem is then the name.

    Raises:
        UserError: if a path is missing, or two sources have the same name.
    """
    parsed = []
    for text in texts:
        name, is_named, value = text.partition("=")
        # A file whose own name contains "=" is taken as a path.
        path = Path(value if is_named and not Path(text).exists() else text)
        if not path.exists():
            raise UserError(f"--text {text}: there is no {path}; expected a file or folder of text, or name=<path>")
        parsed.append(Source(name if path != Path(text) else path.stem, path))
    names = [source.name for source in parsed]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--text: two sources are named {name}; rename one with name=<file>")
    if COMBINED in names and len(names) > 1:
        raise UserError(f"--text: {COMBINED} is the name of all texts together; rename that source with name=<file>")
    return parsed


class Packer:
    """Packs documents into blocks of exactly `length` tokens, including special tokens; the last may be shorter.

    Each document is followed by the tokenizer's `sep_token`, or else its `eos_token`, if it has either. Each block
    starts and ends with the special tokens that the tokenizer adds to a text.

    Raises:
        UserError: if the special tokens leave no room for text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self._tokenizer = tokenizer
        self._prefix, self._suffix = special_tokens(tokenizer)
        self._room = length - len(self._prefix) - len(self._suffix)
        if self._room < 1:
            raise UserError(
                f"a block of {length} tokens has no room for text beside the special tokens; choose a greater length"
            )
        end = separator(tokenizer)
        self._separator = [] if end is None else [end]

    def __call__(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the token ids of each block."""
        rest: list[int] = []
        for ids in tokenize(texts, self._tokenizer):
            rest += ids + self._separator
            whole = len(rest) // self._room * self._room
            for start in range(0, whole, self._room):
                yield [*self._prefix, *rest[start : start + self._room], *self._suffix]
            del rest[:whole]
        if rest:
            yield [*self._prefix, *rest, *self._suffix]


def batch(blocks: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Pad blocks to the longest; returns `input_ids` and `attention_mask`, `(blocks, tokens)`."""
    rows = [torch.tensor(block) for block in blocks]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}
