"""Texts to measure on, and the division of their documents into blocks of tokens."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError
from istar.tasks.tokenizing import chunks, find_separator_id, special_tokens, tokenize

COMBINED = "combined"
"""Name of the results over several sources together."""
WINDOW = 4_096
"""Number of blocks that are read ahead and sorted by length."""
RUN = 4
"""Number of consecutive blocks of packed documents that belong to the same group; see `Pass.groups` in `stream`."""

T = TypeVar("T")
_SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*\s+(?=["'“‘(\[]*[^\W_a-z])|[。！？]|\n""")  # noqa: RUF001
Documents = Literal["separate", "packed"]
"""Whether the model sees each document alone; see `Blocks`."""


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


@dataclass
class Reading:
    """How much of a text has been read, and how long it has taken."""

    documents: int = 0  # documents that were begun; a limit of tokens may end the pass within the last one
    characters: int = 0  # characters of these documents
    sentences: int = 0  # their sentences, see `count_sentences`
    bytes: int = 0  # their bytes in UTF-8, without what stands around them in the file, such as line ends
    tokens: int = 0  # tokens that the statistics include
    seconds: float = 0.0  # time from the first block to the last one
    forward_seconds: float = 0.0  # time of the model's forward passes alone, summed over all processes

    def add(self, other: "Reading") -> None:
        """Add what has been read of another text."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def count_sentences(text: str) -> int:
    """Return the number of sentences in a text by a rule of thumb that needs no model of the language.

    A sentence ends at a line break, at the end marks of Chinese and Japanese, or at one of . ! ? … if white space
    follows and then anything but a small letter of a to z. Parts without a letter or a digit do not count. An
    abbreviation before a name, as in "Dr. Smith", counts as an end.
    """
    return sum(1 for part in _SENTENCE_END.split(text) if any(map(str.isalnum, part)))


class Block(NamedTuple):
    """The tokens of one row of the model's input."""

    tokens: list[int]
    is_special: list[bool]  # whether a token was added to the text: a special token of the tokenizer, or a separator
    run: int = 0  # number of the document in the text; of packed documents, number of the run of `RUN` blocks
    piece: int = 0  # number of the piece within its document, from 0; of packed documents always 0

    @property
    def num_text_tokens(self) -> int:
        """Number of tokens that belong to the text."""
        return len(self.tokens) - sum(self.is_special)


class Blocks:
    """Divides documents into blocks of at most `length` tokens, including special tokens.

    Each block starts and ends with the special tokens that the tokenizer adds to a text.

    - `separate` documents: a block holds one document, so that the model sees each document alone. A longer document is
      cut into pieces, all of them full except the last. Documents without tokens are left out.
    - `packed` documents: the documents are joined, each followed by the tokenizer's `sep_token`, or else its
      `eos_token`, if it has either, and cut into blocks that are all full except the last. The model sees several
      unrelated documents in one block.

    Raises:
        UserError: if the special tokens leave no room for text, or `documents` has another value.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int, documents: Documents = "separate") -> None:
        if documents not in get_args(Documents):
            raise UserError(f"documents is {documents!r}; expected one of {', '.join(get_args(Documents))}")
        self._tokenizer, self._documents = tokenizer, documents
        self._prefix, self._suffix = special_tokens(tokenizer)
        self._room = length - len(self._prefix) - len(self._suffix)
        if self._room < 1:
            raise UserError(
                f"a block of {length} tokens has no room for text beside the special tokens; choose a greater length"
            )
        end = find_separator_id(tokenizer)
        self._separator = [] if end is None else [end]

    def __call__(self, texts: Iterable[str], reading: Reading | None = None) -> Iterator[Block]:
        """Yield the blocks of the documents in their order, and count the documents that they are from in `reading`."""
        documents = self._tokenized(texts, Reading() if reading is None else reading)
        pieces = self._pack(documents) if self._documents == "packed" else self._cut(documents)
        before, after = [True] * len(self._prefix), [True] * len(self._suffix)
        for tokens, is_special, run, number in pieces:
            yield Block([*self._prefix, *tokens, *self._suffix], [*before, *is_special, *after], run, number)

    def _tokenized(self, texts: Iterable[str], reading: Reading) -> Iterator[Block]:
        """Yield the tokens of each document, and count the document."""
        # The tokenizer reads ahead.
        sizes: deque[tuple[int, int, int]] = deque()

        def measured() -> Iterator[str]:
            for text in texts:
                sizes.append((len(text), count_sentences(text), len(text.encode())))
                yield text

        for number, ids in enumerate(tokenize(measured(), self._tokenizer)):
            characters, sentences, size = sizes.popleft()
            reading.documents += 1
            reading.characters += characters
            reading.sentences += sentences
            reading.bytes += size
            yield Block(ids, [False] * len(ids), number)

    def _cut(self, documents: Iterable[Block]) -> Iterator[Block]:
        """Cut each document by itself."""
        for tokens, is_special, run, _ in documents:
            for number, start in enumerate(range(0, len(tokens), self._room)):
                piece = slice(start, start + self._room)
                yield Block(tokens[piece], is_special[piece], run, number)

    def _pack(self, documents: Iterable[Block]) -> Iterator[Block]:
        """Number the runs of the joined documents' blocks."""
        for number, (tokens, is_special, *_) in enumerate(self._join(documents)):
            yield Block(tokens, is_special, number // RUN)

    def _join(self, documents: Iterable[Block]) -> Iterator[Block]:
        """Join the documents with separators, and cut the result."""
        rest = Block([], [])
        for tokens, is_special, *_ in documents:
            rest.tokens.extend([*tokens, *self._separator])
            rest.is_special.extend([*is_special, *[True] * len(self._separator)])
            whole = len(rest.tokens) // self._room * self._room
            yield from self._cut([Block(rest.tokens[:whole], rest.is_special[:whole])])
            del rest.tokens[:whole], rest.is_special[:whole]
        yield from self._cut([rest])


def longest_first(blocks: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield windows of `WINDOW` blocks, each sorted by length, so that batches need little padding.

    The longest blocks come first in a window; blocks of equal length keep their order.
    """
    for window in chunks(blocks, WINDOW):
        yield sorted(window, key=length, reverse=True)


def batch(blocks: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Pad blocks to the longest; returns `input_ids` and `attention_mask`, `(blocks, tokens)`."""
    rows = [torch.tensor(block) for block in blocks]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}
