"""Texts to measure a model on, and their division into blocks of tokens."""

import hashlib
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor

from istar.errors import UserError, shorten
from istar.files.folders import split_label
from istar.models.hub import load_dataset_split, open_dataset_stream
from istar.models.special_tokens import find_separator_id, special_tokens
from istar.runs.names import COMBINED
from istar.texts.documents import (
    BEGINNING_BYTES,
    TEXT_COLUMN,
    compute_content_digest,
    is_corpus_file,
    read_dataset_documents,
    read_documents,
)
from istar.texts.tokenizing import TextPart, chunks, count_text_tokens, tokenize_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW_SIZE = 4_096
"""Number of blocks that are read ahead and sorted by length."""
BATCH_TOKENS = 2_048
"""Default number of tokens per batch on a CPU; the hidden states of a small model then fit into the cache."""
BATCH_TOKENS_ON_DEVICES = 16_384
"""Default number of tokens per batch on other devices; small batches would leave them idle."""
RUN_LENGTH = 4
"""Number of consecutive blocks of packed documents that count as one document; see `MeasureSettings.groups`."""

T = TypeVar("T")
_SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*\s+(?=["'“‘(\[]*[^\W_a-z])|[。！？]|\n""")  # noqa: RUF001
_HUB_TEXT = re.compile(
    r"(?P<stream>hf://)?(?P<id>[\w-][\w.-]*/[\w.-]+)"
    r"(?::(?P<configuration>[^:@]*))?(?::(?P<split>(?:[^:@\[]|\[[^\]]*\])*))?(?::(?P<column>[^:@]+))?(?:@(?P<revision>.+))?"
)
"""A data set of the hub, as `parse_sources` reads it."""
Documents = Literal["separate", "packed"]
"""Whether the model sees each document alone; see `Blocks`."""


@dataclass(frozen=True)
class Source:
    """A corpus: a file or folder, a data set of the hub, or documents in memory."""

    name: str  # name of the source in the results
    path: Path  # file or folder; for a data set of the hub, its name as given; in memory, the name of the source
    dataset: Dataset | IterableDataset | None = None  # data set of the hub
    commit: str = ""  # commit of this data set
    documents: tuple[str, ...] | None = None  # documents in memory
    column: str = TEXT_COLUMN  # column of the file or data set that has the documents

    def read_documents(self, shuffle_buffer: int = 0, seed: int = 0) -> Iterator[str]:
        """Read the documents as `istar.texts.documents.read_documents`, and shuffle them: see `shuffle_documents`."""
        documents: Iterable[str]
        if self.documents is not None:
            documents = self.documents
        elif self.dataset is None:
            documents = read_documents(self.path, self.column)
        else:
            documents = read_dataset_documents(self.dataset, str(self.path), self.column)
        return shuffle_documents(documents, shuffle_buffer, seed)

    @property
    def is_stream(self) -> bool:
        """Whether each pass reads the documents from the hub."""
        return isinstance(self.dataset, IterableDataset)

    def identify(self, limit: int | None = None) -> tuple[str, ...]:
        """Return what identifies the documents: a digest of them or of the files, or the data set with its commit.

        With a limit of tokens, only the first `BEGINNING_BYTES` are read, and the rest counts by the files' sizes.
        """
        if self.dataset is not None:
            return str(self.path), self.commit
        if self.documents is not None:
            return (hashlib.blake2b("\0".join(self.documents).encode()).hexdigest(),)
        digest = compute_content_digest(self.path, sys.maxsize if limit is None else BEGINNING_BYTES)
        return (digest,) if self.column == TEXT_COLUMN else (digest, self.column)


def open_texts(texts: str | Path | Iterable[str] | Mapping[str, str | Path | Iterable[str]]) -> list[Source]:
    """Return the sources of a text, or of several by name: a value of `parse_sources`, or documents in memory.

    Raises a `UserError` as `parse_sources`, or for documents that are not strings.
    """
    sources = []
    for name, text in texts.items() if isinstance(texts, Mapping) else [("", texts)]:
        if isinstance(text, str | Path):
            if not os.path.exists(text) and not _HUB_TEXT.fullmatch(str(text)):  # noqa: PTH110
                raise UserError(
                    f"{shorten(text, 60)!r} is no file, folder or data set of the hub; expected one of these, or an "
                    "iterable of strings, such as [text]"
                )
            sources += parse_sources([f"{name}={text}" if name else str(text)])
            continue
        documents = tuple(text)
        for document in documents:
            if not isinstance(document, str):
                kind = type(document).__name__
                raise UserError(f"{name or 'texts'}: a text is a {kind}; expected strings; batches need no tokenizer")
        sources.append(Source(name or "texts", Path(name or "texts"), documents=documents))
    if len(sources) > 1 and COMBINED in {source.name for source in sources}:
        raise UserError(f"{COMBINED} is the name of all texts together; expected another name for a text")
    return sources


def shuffle_documents(documents: Iterable[str], buffer_size: int, seed: int) -> Iterator[str]:
    """Yield documents in random order by a reservoir buffer; a buffer of size 0 keeps the order.

    The buffer is filled with the first documents. Then one at a random place is yielded, and the next document takes
    this place. A document therefore comes at most `buffer_size` places earlier, but may come much later.
    """
    iterator, generator = iter(documents), random.Random(seed)
    buffer = list(islice(iterator, buffer_size))
    for document in iterator:
        if buffer:
            place = generator.randrange(buffer_size)
            document, buffer[place] = buffer[place], document
        yield document
    generator.shuffle(buffer)
    yield from buffer


def parse_sources(texts: Sequence[str]) -> list[Source]:
    """Parse the values of `--text`, each `[name=]<file or folder>[:column]` or `[name=]<data set of the hub>`.

    A data set is `owner/name[:configuration[:split[:column]]][@revision]`, with the split `train` and the column `text`
    by default. It is downloaded, unless it begins with `hf://`: then it is a stream, which is read from the hub in each
    pass. The default name of a source is the stem of its path, or the name of the data set without its owner, and
    `-<column>` if a column is given. Raises a `UserError` if a text
    does not exist, two sources have the same name, or one of several is named `combined`.
    """
    sources = []
    for text in texts:
        name, location = split_label(text)
        path = Path(location)
        file_name, _, column = location.rpartition(":")
        if not os.path.exists(path) and file_name and os.path.exists(file_name):  # noqa: PTH110
            sources.append(Source(name or f"{Path(file_name).stem}-{column}", Path(file_name), column=column))
            continue
        if os.path.exists(path):  # noqa: PTH110  Path.exists raises an error if the name is too long
            sources.append(Source(name or Path(os.path.abspath(path)).stem, path))  # noqa: PTH100
            continue
        match = _HUB_TEXT.fullmatch(location)
        if match is None or (is_corpus_file(path) and not match["stream"]):
            raise UserError(
                f"--text {text}: there is no {location}; expected a file or folder of text, or a data set of the hub "
                "as [hf://]owner/name[:configuration[:split[:column]]], or name=<text>"
            )
        try:
            read = open_dataset_stream if match["stream"] else load_dataset_split
            dataset, commit = read(
                match["id"], match["configuration"] or None, match["split"] or "train", match["revision"]
            )
        except UserError as error:
            reason = "" if match["stream"] else f"there is no file or folder {path}, and "
            raise UserError(f"--text {text}: {reason}{error}") from error
        # The same rows are the same text, whether or not they are a stream.
        path = Path(location.removeprefix("hf://"))
        default_name = "-".join(filter(None, [PurePath(match["id"]).name, match["column"]]))
        column = match["column"] or TEXT_COLUMN
        sources.append(Source(name or default_name, path, dataset, commit, column=column))
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--text: two sources are named {name}; rename one with name=<text>")
    if COMBINED in names and len(names) > 1:
        raise UserError(f"--text: {COMBINED} is the name of all texts together; rename that source with name=<text>")
    return sources


@dataclass
class ReadCounts:
    """How much of a text has been read, and how long it has taken."""

    documents: int = 0  # documents read; a limit of tokens may end the pass within the last one
    characters: int = 0  # characters of these documents; of the last one only the parts read, see `tokenize_parts`
    sentences: int = 0  # sentences of these documents, see `count_sentences`; one that is cut counts in both parts
    bytes: int = 0  # UTF-8 bytes of these documents, without separators such as line ends
    tokens: int = 0  # tokens that the statistics include
    seconds: float = 0.0  # time from the first block to the last one
    forward_seconds: float = 0.0  # time of the model's forward passes alone, summed over all processes

    def add(self, other: "ReadCounts") -> None:
        """Add the counts and times of another text."""
        for field_name, amount in vars(other).items():
            setattr(self, field_name, getattr(self, field_name) + amount)


def count_sentences(text: str) -> int:
    """Estimate the number of sentences in a text by a simple rule that needs no language model.

    A sentence ends at a line break, at the end marks of Chinese and Japanese, or at one of . ! ? … followed by white
    space and anything but a lowercase letter from a to z. Parts without a letter or a digit do not count. An
    abbreviation before a name, as in "Dr. Smith", counts as the end of a sentence.
    """
    return sum(1 for part in _SENTENCE_END.split(text) if any(map(str.isalnum, part)))


class Block(NamedTuple):
    """The tokens of one row of the model's input."""

    tokens: list[int]
    is_special: bytes  # for each token 1 if it was added to the text (special token or separator), else 0
    document_index: int = 0  # index of the document; for packed documents, index of the run of `RUN_LENGTH` blocks

    @property
    def num_text_tokens(self) -> int:
        """Number of tokens that belong to the text."""
        return self.is_special.count(0)


class Blocks:
    """Splits documents into blocks of at most `length` tokens, including special tokens, when called on texts.

    Each block starts and ends with the special tokens that the tokenizer adds to a text.

    - `separate` documents: a block contains one document, so the model sees each document alone. A longer document is
      cut into pieces; all except the last are full. Documents without tokens are left out.
    - `packed` documents: the documents are joined and cut into blocks; all except the last are full. Each document is
      followed by the tokenizer's `sep_token`, or else its `eos_token`, if it has either. The model sees several
      unrelated documents in one block.

    Raises a `UserError` if the special tokens leave no room for text, or `documents` has another value.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", length: int, documents: Documents = "separate") -> None:
        if documents not in get_args(Documents):
            raise UserError(f"documents is {documents!r}; expected one of {', '.join(get_args(Documents))}")
        self._tokenizer, self._documents = tokenizer, documents
        self._prefix, self._suffix = special_tokens(tokenizer)
        self._text_length = count_text_tokens(length, self._prefix, self._suffix)
        separator_id = find_separator_id(tokenizer)
        self._separator = [] if separator_id is None else [separator_id]

    def __call__(self, texts: Iterable[str], reading: ReadCounts | None = None) -> Iterator[Block]:
        """Yield the blocks in document order, and add the documents read to `reading`."""
        is_packed, size = self._documents == "packed", self._text_length
        tokens: list[int] = []
        is_special = b""
        num_documents = num_blocks = 0

        def make_block(text: slice) -> Block:
            return Block(
                [*self._prefix, *tokens[text], *self._suffix],
                b"\1" * len(self._prefix) + is_special[text] + b"\1" * len(self._suffix),
                num_blocks // RUN_LENGTH if is_packed else num_documents,
            )

        for part in self._tokenize_documents(texts, ReadCounts() if reading is None else reading):
            separator = self._separator if is_packed and part.is_last else []
            tokens += [*part.token_ids, *separator]
            is_special += bytes(len(part.token_ids)) + b"\1" * len(separator)
            # Tokens that fill no block wait for the next part.
            end = len(tokens) if part.is_last and not is_packed else len(tokens) // size * size
            for start in range(0, end, size):
                yield make_block(slice(start, start + size))
                num_blocks += 1
            tokens, is_special = tokens[end:], is_special[end:]
            num_documents += part.is_last
        if tokens:
            yield make_block(slice(None))

    def _tokenize_documents(self, texts: Iterable[str], reading: ReadCounts) -> Iterator[TextPart]:
        is_first = True
        for part in tokenize_parts(texts, self._tokenizer):
            reading.documents += is_first
            reading.characters += len(part.text)
            reading.sentences += count_sentences(part.text)
            reading.bytes += len(part.text.encode())
            yield part
            is_first = part.is_last


def sorted_windows(blocks: Iterable[T], block_length: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield windows of `WINDOW_SIZE` blocks, each sorted by length, so that batches need little padding.

    The longest blocks come first in a window; blocks of equal length keep their order.
    """
    for window in chunks(blocks, WINDOW_SIZE):
        yield sorted(window, key=block_length, reverse=True)


def split_into_batches(
    blocks: Iterable[T],
    block_length: Callable[[T], int],
    device: torch.device,
    num_tokens: int | None = None,
    has_padding: bool = True,
) -> Iterator[list[T]]:
    """Yield batches of consecutive blocks: at most `num_tokens` tokens with padding, or a single block.

    `block_length` returns the number of tokens of a block. Neighbours should have similar lengths, and without padding
    have the same. The default of `num_tokens` is `BATCH_TOKENS` on a CPU, else `BATCH_TOKENS_ON_DEVICES`.
    """
    if num_tokens is None:
        num_tokens = BATCH_TOKENS if device.type == "cpu" else BATCH_TOKENS_ON_DEVICES
    batch: list[T] = []
    longest = 0
    for block in blocks:
        needs_padding = bool(batch) and block_length(block) != longest
        longest = max(longest, block_length(block))
        if batch and (longest * (len(batch) + 1) > num_tokens or (needs_padding and not has_padding)):
            yield batch
            batch, longest = [], block_length(block)
        batch.append(block)
    if batch:
        yield batch


class PaddedBatch(NamedTuple):
    """Blocks that are padded to the longest; tensors `(blocks, tokens)` on the CPU."""

    input_ids: Tensor
    attention_mask: Tensor
    is_included: Tensor  # False for padding, and for special tokens if they are left out


def pad_batch(blocks: Sequence[Block], pad_id: int, has_special_tokens: bool = True) -> PaddedBatch:
    """Pad the tokens of blocks; `has_special_tokens` says whether special tokens are included."""
    lengths = np.array([len(block.tokens) for block in blocks])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(is_token.shape, pad_id, np.int64)
    ids[is_token] = np.fromiter(chain.from_iterable(block.tokens for block in blocks), np.int64, lengths.sum())
    is_included = is_token.copy()
    if not has_special_tokens:
        is_included[is_token] = np.frombuffer(b"".join(block.is_special for block in blocks), np.uint8) == 0
    return PaddedBatch(*map(torch.from_numpy, (ids, is_token.astype(np.int64), is_included)))
