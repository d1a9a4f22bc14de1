"""Blocks of tokens for language modelling, cut from a memory-mapped file of tokenized documents."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from datasets.utils import tqdm
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError, shorten
from istar.files.writing import atomic_folder
from istar.finetune.tasks.features import describe_tokenizer
from istar.finetune.tasks.loading import fingerprint
from istar.models.special_tokens import find_separator_id
from istar.texts.documents import iterate_texts
from istar.texts.tokenizing import count_text_tokens, tokenize

STARTS_FILE = "starts.npy"


@dataclass(frozen=True)
class Corpus:
    """The tokens of all documents of a corpus, one document after the other."""

    tokens: NDArray[Any]  # token ids, (tokens,), unsigned integers; usually a memory-mapped file
    # Position of the first token of each document, then the number of all tokens, (documents + 1,) int64.
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1


def load_or_tokenize_corpus(documents: Dataset, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> Corpus:
    """Return the memory-mapped tokens of all documents from the cache; if they are missing, tokenize and cache them.

    Each document ends with the tokenizer's separator token, if there is one. If several processes write the same corpus
    at the same time, the files of the first to finish are kept. Raises a `UserError` if the cache cannot be written.
    """
    description = [describe_tokenizer(tokenizer), fingerprint(documents)]
    folder = cache_dir / "tokens" / hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    if (corpus := open_corpus(folder)) is not None:
        return corpus
    texts = tqdm(
        iterate_texts(documents, "the text"),
        total=len(documents),
        desc="Tokenizing",
        unit=" documents",
        delay=1.0,
        disable=None,
    )
    token_ids = filter(None, tokenize_documents(texts, tokenizer))
    try:
        with atomic_folder(folder) as temporary_folder:
            write_corpus(token_ids, max(tokenizer.get_vocab().values()) + 1, temporary_folder)
            # Opened before others see the folder, because they may replace it.
            corpus = open_corpus(temporary_folder)
            if open_corpus(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)  # it is damaged, or missing
    except OSError as error:
        raise UserError(f"the tokens cannot be cached: {shorten(error)}; set another data.cache_dir") from error
    assert corpus is not None
    return corpus


def tokenize_documents(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the token ids of each document, followed by the tokenizer's separator token, if it has one.

    For a document without tokens, the list is empty.
    """
    separator_id = find_separator_id(tokenizer)
    separator = [] if separator_id is None else [separator_id]
    for token_ids in tokenize(texts, tokenizer):
        yield token_ids + separator if token_ids else token_ids


def write_corpus(documents: Iterable[Sequence[int]], vocabulary_size: int, folder: Path) -> None:
    """Write the token ids of documents to an empty folder, one document after the other.

    The suffix of the file of tokens is their type: each takes two bytes if the vocabulary size allows it, else four.
    """
    dtype = np.dtype(np.uint16 if vocabulary_size <= np.iinfo(np.uint16).max + 1 else np.uint32)
    starts = [0]
    with (folder / f"tokens.{dtype.name}").open("wb") as file:
        for token_ids in documents:
            file.write(np.asarray(token_ids, dtype).tobytes())
            starts.append(starts[-1] + len(token_ids))
    np.save(folder / STARTS_FILE, np.array(starts, dtype=np.int64))


def open_corpus(folder: Path) -> Corpus | None:
    """Return the memory-mapped corpus that `write_corpus` wrote to a folder, or None if it is missing or incomplete."""
    try:
        [path] = folder.glob("tokens.*")
        starts, dtype = np.load(folder / STARTS_FILE), np.dtype(path.suffix.removeprefix("."))
        if path.stat().st_size != starts[-1] * dtype.itemsize:
            return None
        # An empty file cannot be mapped.
        return Corpus(np.memmap(path, dtype, "r") if starts[-1] else np.empty(0, dtype), starts)
    except (OSError, ValueError, TypeError):  # a file is missing or damaged
        return None


@dataclass(frozen=True)
class TokenBlocks:
    """Blocks of a corpus: slices of its tokens, with special tokens before and after.

    If documents are packed, a block may contain the end of one document and the beginning of the next. Otherwise it is
    a part of one document.
    """

    corpus: Corpus
    # Positions in the corpus of the first token of each block and of the token after its last one, (blocks, 2)
    # int64.
    spans: NDArray[np.int64]
    prefix: Sequence[int] = ()  # special tokens at the beginning of each block
    suffix: Sequence[int] = ()  # and at its end

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


def cut_blocks(
    corpus: Corpus, length: int, prefix: Sequence[int] = (), suffix: Sequence[int] = (), packing: bool = True
) -> TokenBlocks:
    """Cut a corpus into blocks of at most `length` tokens, including special tokens.

    With `packing`, all blocks have `length` tokens and may contain parts of several documents; tokens after the last
    full block are left out. Otherwise each block is a part of one document. Raises a `UserError` if special tokens
    leave no room, the corpus is empty, or a packed corpus is shorter than a block.
    """
    text_length = count_text_tokens(length, prefix, suffix)
    num_tokens = int(corpus.starts[-1])
    if not num_tokens:
        raise UserError("the text is empty: it has no token")
    if packing and num_tokens < text_length:
        raise UserError(
            f"the text has {num_tokens} tokens, which is less than one block of {length}; give more text, a smaller "
            "task.max_length, or task.packing=false"
        )
    if packing:
        starts = np.arange(num_tokens // text_length) * text_length
        ends = starts + text_length
    else:
        num_blocks = -(-np.diff(corpus.starts) // text_length)  # number of blocks of each document, rounded up
        document_indices = np.repeat(np.arange(len(corpus)), num_blocks)
        index_in_document = np.arange(len(document_indices)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
        starts = corpus.starts[document_indices] + index_in_document * text_length
        ends = np.minimum(starts + text_length, corpus.starts[document_indices + 1])
    return TokenBlocks(corpus, np.stack([starts, ends], axis=1), prefix, suffix)
