"""Training documents that are read while they are used, shard by shard: from files, or from a data set of the hub."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from datasets import IterableDataset

from istar.errors import UserError
from istar.texts.documents import (
    BEGINNING_BYTES,
    compute_content_digest,
    list_corpus_files,
    read_dataset_documents,
    read_documents,
)

_SAMPLED_SHARDS = 16  # number of shards that a sample of documents comes from
_SAMPLE_SEED = 0


@dataclass(frozen=True)
class DocumentStream:
    """Documents in shards, such as files, which are read in a random order of the shards."""

    # Functions that return an iterator over the documents of one shard, always in the same order.
    shards: Sequence[Callable[[], Iterator[str]]]
    digest: str  # identifies the documents in the hash of a run

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


def open_file_stream(paths: Sequence[Path]) -> DocumentStream:
    """Return the documents of files, and of the files in folders, as a stream with a shard for each file.

    Its digest covers names, sizes and the first 64 MiB, because reading all of a large corpus takes hours. Raises a
    `UserError` if a file cannot be read, or a folder contains no text.
    """
    shards = [partial(read_documents, file) for path in paths for file in list_corpus_files(path)]
    try:
        digests = [compute_content_digest(path, BEGINNING_BYTES) for path in paths]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return DocumentStream(shards, " ".join(digests))


def make_hub_stream(rows: IterableDataset, source: str, commit: str) -> DocumentStream:
    """Return the documents of a data set on the hub as a stream; `source` names the data set in error messages."""
    count = rows.num_shards
    shards = [rows.shard(num_shards=count, index=index) for index in range(count)]
    return DocumentStream([partial(read_dataset_documents, shard, source) for shard in shards], f"{source} {commit}")
