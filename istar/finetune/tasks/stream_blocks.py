"""Blocks of tokens for language modelling, cut from a stream of documents while the model is trained on them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from istar.finetune.tasks.blocks import Corpus, TokenBlocks, cut_blocks, tokenize_documents
from istar.finetune.tasks.document_stream import DocumentStream
from istar.finetune.tasks.language_modelling import BlockRows, Masking
from istar.texts.tokenizing import count_text_tokens

_SAMPLED_TOKENS = 1 << 18


class StreamPosition(NamedTuple):
    """The beginning of a window: its number, and the numbers of shard, document and token in the process's order."""

    window: int = 0
    shard: int = 0
    document: int = 0
    token: int = 0


_BEGINNING = StreamPosition()


class Window(NamedTuple):
    """Consecutive blocks of a stream, and the random order in which a process trains on them."""

    start: StreamPosition
    rows: BlockRows
    order: NDArray[np.int64]


@dataclass(frozen=True)
class StreamedBlocks:
    """Blocks of the documents of a stream, equal to those that `cut_blocks` cuts from all documents of a process.

    They are shuffled within windows. A window can be cut again from its position, so that an interrupted training
    resumes exactly.
    """

    documents: DocumentStream
    tokenizer: PreTrainedTokenizerBase
    prefix: Sequence[int]  # special tokens at the beginning of each block
    suffix: Sequence[int]  # and at its end
    length: int  # number of tokens of a block, including its special tokens
    packing: bool  # whether blocks are filled across documents
    # Chooses the tokens to predict in masked language modelling; None for causal language modelling.
    masking: Masking | None
    seed: int  # seed of the order and the masks
    window_blocks: int  # number of blocks in a window

    def iterate_windows(
        self, epoch: int, rank: int = 0, world_size: int = 1, start: StreamPosition = _BEGINNING
    ) -> Iterator[Window]:
        """Yield the windows that a process has in an epoch, beginning with the one at `start`.

        The order of the shards depends on the seed and the epoch; the order of the blocks in a window and their masks
        also on the process and the window. Only the last window has fewer than `window_blocks` blocks.
        """
        documents = self.documents.iterate((self.seed, epoch), rank, world_size, start.shard, start.document)
        for position, pieces in self._fill_windows(documents, start):
            if self.packing and sum(map(len, pieces)) < self._text_length:
                return  # less than a block is left
            blocks = self._cut(pieces)
            seeds = np.random.SeedSequence((self.seed, epoch, rank, position.window))
            window_seed = int(seeds.generate_state(1, np.uint64)[0])
            order = np.random.default_rng(window_seed).permutation(len(blocks))
            yield Window(position, BlockRows(blocks, self.masking, window_seed), order)

    def sample_rows(self) -> BlockRows:
        """Return blocks with 262,144 tokens, or all if there are fewer, from the beginnings of random shards.

        This is enough for the default `reg.num_points`. Raises a `UserError` if the documents have no token or, with
        packing, less than a block.
        """
        documents = ((0, 0, text) for text in self.documents.iterate_sample())
        sample = replace(self, window_blocks=math.ceil(_SAMPLED_TOKENS / self.length))
        _, pieces = next(sample._fill_windows(documents), (None, []))
        return BlockRows(self._cut(pieces), self.masking, self.seed)

    @property
    def _text_length(self) -> int:
        return count_text_tokens(self.length, self.prefix, self.suffix)

    def _fill_windows(
        self, documents: Iterator[tuple[int, int, str]], start: StreamPosition = _BEGINNING
    ) -> Iterator[tuple[StreamPosition, list[list[int]]]]:
        """Yield the position of each window, and its tokens by document; `documents` begins with the one at `start`."""
        text_length = self._text_length
        positions, texts = itertools.tee(documents)
        token_ids = tokenize_documents((text for _, _, text in texts), self.tokenizer)
        pieces: list[list[int]] = []
        position, num_free, num_used = start, self.window_blocks * text_length, start.token
        for (shard, document, _), ids in zip(positions, token_ids, strict=True):
            while num_used < len(ids):
                pieces.append(ids[num_used : num_used + num_free])
                num_tokens = len(pieces[-1])
                num_used += num_tokens
                num_free -= num_tokens if self.packing else -(-num_tokens // text_length) * text_length
                if num_free == 0:
                    yield position, pieces
                    position = StreamPosition(position.window + 1, shard, document, num_used)
                    pieces, num_free = [], self.window_blocks * text_length
            num_used = 0
        if pieces:
            yield position, pieces

    def _cut(self, pieces: Sequence[Sequence[int]]) -> TokenBlocks:
        tokens: NDArray[Any] = np.fromiter(itertools.chain.from_iterable(pieces), np.int64)
        starts = np.cumsum([0, *map(len, pieces)])
        return cut_blocks(Corpus(tokens, starts), self.length, self.prefix, self.suffix, self.packing)
