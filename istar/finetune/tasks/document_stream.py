"""Training documents that are read while they are used, shard by shard: from files, or from a data set of the hub."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from datasets import IterableDataset

from istar.errors import UserError, shorten
from istar.inputs.documents import TEXT_COLUMN, list_corpus_files, read_documents

_DIGEST_BYTES = 1 << 20  # bytes of each file that its digest covers
_SAMPLED_SHARDS = 16  # number of shards that a sample of documents comes from
_SAMPLE_SEED = 0


@dataclass(frozen=True)
class DocumentStream:
    """Documents in shards, such as files, which are read in a random order of the shards.

    Attributes:
        shards: functions that return an iterator over the documents of one shard, always in the same order.
        digest: identifies the documents in the hash of a run.
    """

    shards: Sequence[Callable[[], Iterator[str]]]
    digest: str

    def iterate(
        self, seed: Sequence[int], rank: int = 0, world_size: int = 1, shard: int = 0, document: int = 0
    ) -> Iterator[tuple[int, int, str]]:
        """Yield the documents that one of several processes reads, each with its shard's and its own number.

        If the number of processes divides the number of shards, each process reads its own shards. Otherwise all
        processes read all shards and take turns with the documents.

        Args:
            seed: seed of the order of the shards.
            shard: number of the shard to begin with, in the process's order.
            document: number of the document to begin with in this shard.
        """
        order = np.random.default_rng(seed).permutation(len(self.shards))
        has_own_shards = len(order) % world_size == 0
        if has_own_shards:
            order = order[rank::world_size]
        for shard_number in range(shard, len(order)):
            documents = enumerate(self.shards[order[shard_number]]())
            first_document = document if shard_number == shard else 0
            for document_number, text in itertools.islice(documents, first_document, None):
                if has_own_shards or (shard_number + document_number) % world_size == rank:
                    yield shard_number, document_number, text

    def iterate_sample(self) -> Iterator[str]:
        """Yield the documents of up to 16 random shards in turn, from the beginning of each."""
        order = np.random.default_rng(_SAMPLE_SEED).permutation(len(self.shards))[:_SAMPLED_SHARDS]
        for documents in itertools.zip_longest(*(self.shards[shard]() for shard in order)):
            yield from (document for document in documents if document is not None)


def open_file_stream(paths: Sequence[Path], root: Path) -> DocumentStream:
    """Return the documents of files, and of the files in folders, as a stream with a shard for each file.

    Its digest covers the names below the folder `root`, the sizes and the first MiB of the files, because reading all
    of a large corpus takes hours. Raises a `UserError` if a file cannot be read, or a folder contains no text.
    """
    digest = hashlib.sha256()
    shard_paths = [file for path in paths for file in list_corpus_files(path)]
    for path in shard_paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:  # a saved data set is a folder
            if file.is_file():
                digest.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
                digest.update(hashlib.sha256(_read_beginning(file)).digest())
    return DocumentStream([partial(read_documents, path) for path in shard_paths], digest.hexdigest())


def _read_beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_DIGEST_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def make_hub_stream(rows: IterableDataset, source: str, commit: str) -> DocumentStream:
    """Return the documents of a data set on the hub as a stream; `source` names the data set in error messages."""
    num_shards = rows.num_shards
    if TEXT_COLUMN in (rows.column_names or ()):
        rows = rows.select_columns([TEXT_COLUMN])  # the others need not be converted
    shards = [rows.shard(num_shards=num_shards, index=index) for index in range(num_shards)]
    return DocumentStream([partial(iterate_hub_texts, shard, source) for shard in shards], f"{source} {commit}")


def iterate_hub_texts(rows: IterableDataset, source: str) -> Iterator[str]:
    """Yield the values in the column `text` of a stream that are not blank.

    Raises a `UserError` if the column is missing, a value in it is not a string, or the hub does not deliver the rows.
    """
    iterator = iter(rows)
    for number in itertools.count(1):
        try:
            row = next(iterator, None)
        except Exception as error:  # `datasets` and the libraries below it raise many types
            raise UserError(
                f"{source}: the hub does not deliver row {number} ({shorten(f'{type(error).__name__}: {error}')})"
            ) from error
        if row is None:
            return
        if TEXT_COLUMN not in row:
            raise UserError(f"{source}: there is no column {TEXT_COLUMN!r}; found: {', '.join(map(repr, row))}")
        text = row[TEXT_COLUMN]
        if text is not None and not isinstance(text, str):
            raise UserError(f"{source}, row {number}: {TEXT_COLUMN} is {shorten(repr(text), 60)}; expected a string")
        if text and not text.isspace():
            yield text
