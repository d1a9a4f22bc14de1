"""Blocks of tokens for language modelling, cut from a memory-mapped file of tokenized documents."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from istar.errors import UserError
from istar.files import atomic_write, write_text

TOKENS, STARTS, FORMAT = "tokens.bin", "starts.npy", "format.json"
_WRITE_TOKENS = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """The tokens of all documents of a corpus, one document after the other.

    Attributes:
        tokens: token ids, (tokens,), unsigned integers; usually a memory-mapped file.
        starts: position of the first token of each document, and the number of all tokens, (documents + 1,) int64.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1


def write_corpus(documents: Iterable[Sequence[int]], vocabulary: int, folder: Path) -> Corpus:
    """Write the tokens of documents to a folder and return them memory-mapped; needs little memory itself.

    Documents without tokens are left out. The tokens take two bytes each if the vocabulary allows it, else four. A
    folder that was not written to its end is not a corpus for `open_corpus`.

    Args:
        documents: token ids of each document.
        vocabulary: number of token ids, which is larger than each id.
        folder: folder for the files, created if absent.
    """
    dtype = np.uint16 if vocabulary <= np.iinfo(np.uint16).max + 1 else np.uint32
    starts, pending, size = [0], [], 0
    with atomic_write(folder / TOKENS) as file:
        for ids in documents:
            if len(ids):
                starts.append(starts[-1] + len(ids))
                pending.append(np.asarray(ids, dtype=dtype))
                size += len(ids)
            if size >= _WRITE_TOKENS:
                file.write(np.concatenate(pending).tobytes())
                pending, size = [], 0
        file.write(b"".join(part.tobytes() for part in pending))
        # From here on, until the new description is written, the folder holds no corpus.
        (folder / FORMAT).unlink(missing_ok=True)
    with atomic_write(folder / STARTS) as file:
        np.save(file, np.array(starts, dtype=np.int64))
    write_text(folder / FORMAT, json.dumps({"dtype": np.dtype(dtype).name, "tokens": starts[-1]}))
    corpus = open_corpus(folder)
    assert corpus is not None
    return corpus


def open_corpus(folder: Path) -> Corpus | None:
    """Return the corpus that `write_corpus` wrote to a folder, memory-mapped, or None if there is no whole one."""
    try:
        description = json.loads((folder / FORMAT).read_text())
        starts = np.load(folder / STARTS)
        dtype, count = np.dtype(description["dtype"]), int(description["tokens"])
        if (folder / TOKENS).stat().st_size != count * dtype.itemsize or starts[-1] != count:
            return None
        # An empty file cannot be mapped.
        tokens = np.memmap(folder / TOKENS, dtype, "r") if count else np.empty(0, dtype)
        return Corpus(tokens, starts)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


@dataclass(frozen=True)
class Blocks:
    """Blocks of a corpus: slices of its tokens between special tokens.

    A block may hold the end of one document and the beginning of the next if documents are packed, else it is a part
    of one document.

    Attributes:
        corpus: the tokens.
        spans: first token of each block and the token behind its last one, (blocks, 2) int64.
        prefix: special tokens at the beginning of each block.
        suffix: special tokens at its end.
    """

    corpus: Corpus
    spans: NDArray[np.int64]
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each block with its special tokens."""
        return np.diff(self.spans)[:, 0] + len(self.prefix) + len(self.suffix)

    def input_ids(self, block: int) -> NDArray[np.int64]:
        """Return the token ids of a block with its special tokens."""
        first, end = self.spans[block]
        return np.concatenate([self.prefix, self.corpus.tokens[first:end], self.suffix]).astype(np.int64)

    def documents(self, block: int) -> NDArray[np.int64]:
        """Return for each token of a block the number of its document within the block, from 0, (tokens,).

        The special tokens at the beginning belong to the first document, those at the end to the last.
        """
        first, end = self.spans[block]
        document = np.searchsorted(self.corpus.starts, np.arange(first, end), side="right")
        return np.pad(document - document[0], (len(self.prefix), len(self.suffix)), mode="edge")


def packed(corpus: Corpus, length: int, prefix: Sequence[int] = (), suffix: Sequence[int] = ()) -> Blocks:
    """Cut a corpus into blocks of `length` tokens with their special tokens, across the ends of documents.

    The last block, if it is shorter, is left out unless it is the only one.

    Raises:
        UserError: if the special tokens leave no room, or the corpus has no token.
    """
    room = _room(corpus, length, prefix, suffix)
    total = int(corpus.starts[-1])
    first = np.arange(0, max(total - room, 0) + 1, room)
    return Blocks(corpus, np.stack([first, np.minimum(first + room, total)], axis=1), prefix, suffix)


def separate(corpus: Corpus, length: int, prefix: Sequence[int] = (), suffix: Sequence[int] = ()) -> Blocks:
    """Cut each document into blocks of at most `length` tokens with their special tokens.

    Raises:
        UserError: if the special tokens leave no room, or the corpus has no token.
    """
    room = _room(corpus, length, prefix, suffix)
    counts = -(-np.diff(corpus.starts) // room)  # blocks of each document
    document = np.repeat(np.arange(len(corpus)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a block in its document
    first = corpus.starts[document] + number * room
    return Blocks(corpus, np.stack([first, np.minimum(first + room, corpus.starts[document + 1])], 1), prefix, suffix)


def _room(corpus: Corpus, length: int, prefix: Sequence[int], suffix: Sequence[int]) -> int:
    """Return the number of tokens of text in a block."""
    room = length - len(prefix) - len(suffix)
    if room < 1:
        raise UserError(
            f"a block of {length} tokens has no room for text beside the special tokens; choose a greater length"
        )
    if not corpus.starts[-1]:
        raise UserError("the text is empty: it has no token")
    return room


def with_separator(documents: Iterable[list[int]], separator: int | None) -> Iterator[list[int]]:
    """Yield the token ids of each document, followed by the token that separates packed documents, if there is one."""
    for ids in documents:
        yield ids if separator is None or not ids else [*ids, separator]
