"""Blocks of tokens for language modelling, cut from a memory-mapped file of tokenized documents."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from istar.errors import UserError
from istar.files.parsing import read_json
from istar.files.writing import atomic_write, write_text

TOKENS_FILE, STARTS_FILE, FORMAT_FILE = "tokens.bin", "starts.npy", "format.json"
_TOKENS_PER_WRITE = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """The tokens of all documents of a corpus, one document after the other.

    Attributes:
        tokens: token ids, (tokens,), unsigned integers; usually a memory-mapped file.
        starts: position of the first token of each document, then the number of all tokens, (documents + 1,) int64.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.starts) - 1


def write_corpus(documents: Iterable[Sequence[int]], vocabulary_size: int, folder: Path) -> Corpus:
    """Write the tokens of documents to files in a folder, in small parts, and return them memory-mapped.

    Documents without tokens are left out. Each token takes two bytes if the vocabulary size allows it, and four
    otherwise. If writing is interrupted, `open_corpus` finds no corpus in the folder.

    Args:
        documents: token ids of each document.
        vocabulary_size: number of token ids; each id must be smaller.
        folder: folder for the files, created if absent.
    """
    dtype = np.uint16 if vocabulary_size <= np.iinfo(np.uint16).max + 1 else np.uint32
    starts, pending_parts, num_pending_tokens = [0], [], 0
    with atomic_write(folder / TOKENS_FILE) as file:
        for token_ids in documents:
            if len(token_ids):
                starts.append(starts[-1] + len(token_ids))
                pending_parts.append(np.asarray(token_ids, dtype=dtype))
                num_pending_tokens += len(token_ids)
            if num_pending_tokens >= _TOKENS_PER_WRITE:
                file.write(np.concatenate(pending_parts).tobytes())
                pending_parts, num_pending_tokens = [], 0
        file.write(b"".join(part.tobytes() for part in pending_parts))
        # From here on, until the new format file is written, the folder contains no corpus.
        (folder / FORMAT_FILE).unlink(missing_ok=True)
    with atomic_write(folder / STARTS_FILE) as file:
        np.save(file, np.array(starts, dtype=np.int64))
    write_text(folder / FORMAT_FILE, json.dumps({"dtype": np.dtype(dtype).name, "tokens": starts[-1]}))
    corpus = open_corpus(folder)
    assert corpus is not None
    return corpus


def open_corpus(folder: Path) -> Corpus | None:
    """Return the memory-mapped corpus that `write_corpus` wrote to a folder, or None if it is missing or incomplete."""
    try:
        description = read_json(folder / FORMAT_FILE)
        starts = np.load(folder / STARTS_FILE)
        dtype, num_tokens = np.dtype(description["dtype"]), int(description["tokens"])
        if (folder / TOKENS_FILE).stat().st_size != num_tokens * dtype.itemsize or starts[-1] != num_tokens:
            return None
        # An empty file cannot be mapped.
        tokens = np.memmap(folder / TOKENS_FILE, dtype, "r") if num_tokens else np.empty(0, dtype)
        return Corpus(tokens, starts)
    except (UserError, OSError, ValueError, LookupError, TypeError):  # a file is missing, incomplete or damaged
        return None


@dataclass(frozen=True)
class TokenBlocks:
    """Blocks of a corpus: slices of its tokens, with special tokens before and after.

    If documents are packed, a block may contain the end of one document and the beginning of the next. Otherwise it is
    a part of one document.

    Attributes:
        corpus: the tokens.
        spans: positions in the corpus of the first token of each block and of the token after its last one, (blocks, 2)
            int64.
        prefix: special tokens at the beginning of each block.
        suffix: special tokens at the end of each block.
    """

    corpus: Corpus
    spans: NDArray[np.int64]
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each block, including its special tokens, (blocks,)."""
        return np.diff(self.spans)[:, 0] + len(self.prefix) + len(self.suffix)

    def input_ids(self, index: int) -> NDArray[np.int64]:
        """Return the token ids of a block, including its special tokens, (tokens,)."""
        start, end = self.spans[index]
        return np.concatenate([self.prefix, self.corpus.tokens[start:end], self.suffix]).astype(np.int64)

    def document_numbers(self, index: int) -> NDArray[np.int64]:
        """Return the document of each token of a block, numbered from 0 within the block, (tokens,).

        The special tokens at the beginning belong to the first document, and those at the end to the last one.
        """
        start, end = self.spans[index]
        document_indices = np.searchsorted(self.corpus.starts, np.arange(start, end), side="right")
        return np.pad(document_indices - document_indices[0], (len(self.prefix), len(self.suffix)), mode="edge")


def cut_packed_blocks(
    corpus: Corpus, length: int, prefix: Sequence[int] = (), suffix: Sequence[int] = ()
) -> TokenBlocks:
    """Cut a corpus into blocks of `length` tokens, including special tokens, regardless of where documents end.

    If the last block is shorter, it is left out unless it is the only one.

    Raises:
        UserError: if the special tokens leave no room for text, or the corpus has no token.
    """
    text_length = _count_text_tokens(corpus, length, prefix, suffix)
    num_tokens = int(corpus.starts[-1])
    block_starts = np.arange(0, max(num_tokens - text_length, 0) + 1, text_length)
    return TokenBlocks(
        corpus, np.stack([block_starts, np.minimum(block_starts + text_length, num_tokens)], axis=1), prefix, suffix
    )


def cut_separate_blocks(
    corpus: Corpus, length: int, prefix: Sequence[int] = (), suffix: Sequence[int] = ()
) -> TokenBlocks:
    """Cut each document of a corpus into blocks of at most `length` tokens, including special tokens.

    Raises:
        UserError: if the special tokens leave no room for text, or the corpus has no token.
    """
    text_length = _count_text_tokens(corpus, length, prefix, suffix)
    num_blocks = -(-np.diff(corpus.starts) // text_length)  # number of blocks of each document, rounded up
    document_indices = np.repeat(np.arange(len(corpus)), num_blocks)
    index_in_document = np.arange(len(document_indices)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    block_starts = corpus.starts[document_indices] + index_in_document * text_length
    return TokenBlocks(
        corpus,
        np.stack([block_starts, np.minimum(block_starts + text_length, corpus.starts[document_indices + 1])], 1),
        prefix,
        suffix,
    )


def _count_text_tokens(corpus: Corpus, length: int, prefix: Sequence[int], suffix: Sequence[int]) -> int:
    text_length = length - len(prefix) - len(suffix)
    if text_length < 1:
        raise UserError(
            f"a block of {length} tokens has no room for text beside the special tokens; choose a greater length"
        )
    if not corpus.starts[-1]:
        raise UserError("the text is empty: it has no token")
    return text_length


def append_separator(documents: Iterable[list[int]], separator_id: int | None) -> Iterator[list[int]]:
    """Yield the token ids of each document, followed by the separator unless it is None or the document is empty."""
    for token_ids in documents:
        yield token_ids if separator_id is None or not token_ids else [*token_ids, separator_id]
