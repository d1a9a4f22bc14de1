"""A single pass of a model over a corpus that accumulates all measures of all layers."""

import itertools
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from torch import Tensor

from istar.drawing.terminal import make_console, make_progress
from istar.errors import UserError, shorten
from istar.files.writing import atomic_write
from istar.geometry.collect.item_labels import Labels
from istar.geometry.collect.layer_outputs import BlockReader
from istar.geometry.collect.pass_settings import MeasureSettings
from istar.measures.numerics import accumulation_dtype, check_finite
from istar.models.archives import load_archive
from istar.runs.names import COMBINED
from istar.sums.rows import Rows
from istar.sums.source_sums import UPDATE_BYTES, UPDATE_POINTS, SourceSums
from istar.texts.corpus import Block, Blocks, PaddedBatch, ReadCounts, Source, sorted_windows, split_into_batches
from istar.texts.read_ahead import read_ahead

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SECONDS_BETWEEN_SAVES = 300.0
MIN_TOKENS = 4
"""Minimum number of tokens in a text. The unbiased IsoScore is not defined for fewer points."""
ORIGIN_BLOCKS = 4
"""Number of blocks at the beginning of each source to average for the origin of a layer's sums."""
SECONDS_TO_WAIT_FOR_FILES = 120.0
"""Longest time until a network disk shows a file that another process has written."""
_STATE_FORMAT = 9
"""Version of the layout of a state file. Files of other versions are ignored."""

T = TypeVar("T")


class Stream:
    """Runs a pass of a model over texts, and resumes an interrupted pass from its state files.

    The blocks of a text are sorted by length within windows of `corpus.WINDOW_SIZE` blocks, so that a batch contains
    blocks of similar length. The processes of an initialized process group share the blocks of each window. Their
    accumulators are merged exactly, and rank 0 returns the result.

    The model must be without a head, in eval mode, and on its devices. Statistics are where the hidden states are. The
    names of the state files start with the name of `state_path`; None saves no state. `identity` is a hash of
    everything that the result depends on; a file with another identity is not used. The caller deletes the files. The
    mean states of the first `num_examples` documents of each source are kept. `labels` has the groups of the documents;
    by default, document i is in group i mod `settings.groups`.

    Attributes:
        taps: the `BlockReader` of the model, which returns hidden states by name.
        num_processes: number of processes that share the pass.
        readings: how much of each source has been read, and how long it took on rank 0, including interrupted calls, by
            the sources' names; with several sources also for `combined`.
        earlier_seconds: time of interrupted calls.

    Raises a `UserError` if there are several processes but no state files, through which they exchange accumulators.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        settings: MeasureSettings,
        state_path: Path | None = None,
        identity: str = "",
        num_examples: int = 0,
        labels: Labels | None = None,
    ) -> None:
        self.settings, self._identity, self._num_examples = settings, identity, num_examples
        self._labels = labels or Labels(settings.groups)
        self._saves_state, self._state_path = state_path is not None, state_path or Path("state")
        is_distributed = dist.is_available() and dist.is_initialized()
        self._rank, self.num_processes = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        if self.num_processes > 1 and state_path is None:
            raise UserError("several processes need a state file to share a pass; give one in a folder that all see")
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self._config = model.config.get_text_config()
        self.taps = BlockReader(model, pad_id, settings.special_tokens == "include")
        self._sees_padding = self.taps.sees_padding()
        self._blocks = Blocks(tokenizer, settings.length, settings.documents)
        self._origins: dict[str, Tensor] = {}
        self.readings: dict[str, ReadCounts] = {}
        self.earlier_seconds = 0.0

    def __call__(
        self, sources: Sequence[Source], summarize: Callable[[SourceSums], T], console: Console | None = None
    ) -> dict[str, T]:
        """Read the sources, and return a summary of each by its name; on ranks other than 0, return {}.

        With several sources, `combined` is the summary of all of them. `summarize` must not keep the statistics, which
        are large: once it has returned, they are merged into the statistics of all sources. The console shows a
        progress bar and warnings. Raises a `UserError` if a source cannot be read or contains no text.
        """
        warning = self.settings.describe_missing_errors([self._config.hidden_size] * len(self.taps.names))
        if console is not None and warning is not None:
            console.print(f"warning: {warning}", highlight=False, soft_wrap=True)
        self._origins = self._find_origins(sources)
        results: dict[str, T] = {}
        combined: SourceSums | None = None
        with make_progress(console) as progress:
            for source_index, source in enumerate(sources):
                statistics = self._read_source(source, source_index, progress)
                num_tokens, limit = self.readings[source.name].tokens, self.settings.limit
                if console is not None and limit is not None and num_tokens < limit:
                    line = f"{source.name} has {num_tokens:,} tokens, fewer than the limit of {limit:,}"
                    console.print(line, highlight=False, soft_wrap=True)
                if self._rank == 0:
                    results[source.name] = summarize(statistics)
                    combined = statistics if combined is None else combined.merge(statistics)
                # Free these statistics before the next source allocates its own.
                del statistics
        if combined is not None and len(sources) > 1:
            results[COMBINED] = summarize(combined)
            combined_reading = ReadCounts()
            for reading in self.readings.values():
                combined_reading.add(reading)
            self.readings[COMBINED] = combined_reading
        return results

    def _read_source(self, source: Source, source_index: int, progress: Progress) -> SourceSums:
        """Accumulate and return the statistics of a source.

        Each rank reads its share of the blocks and saves its state every few minutes. At the end, rank 0 merges all.
        """
        statistics, num_blocks_done, num_tokens_done = self._create_statistics(), 0, 0
        reading = self.readings[source.name] = ReadCounts()
        earlier_seconds, self.taps.forward_seconds = 0.0, 0.0
        path = self._find_state_path(source_index, self._rank)
        if (saved_state := self._load_state(path)) is not None:
            statistics.load_state_dict(saved_state["statistics"])
            num_blocks_done, num_tokens_done = saved_state["blocks"], saved_state["tokens"]
            earlier_seconds, self.taps.forward_seconds = saved_state["seconds"], saved_state["forward_seconds"]
            self.earlier_seconds += earlier_seconds
            del saved_state
        start = last_save = time.monotonic()

        def save_state() -> None:
            if self._saves_state:
                state = {
                    "format": _STATE_FORMAT,
                    "identity": self._identity,
                    "statistics": statistics.state_dict(),
                    "blocks": num_blocks_done,
                    "tokens": num_tokens_done,
                    "seconds": earlier_seconds + time.monotonic() - start,
                    "forward_seconds": self.taps.forward_seconds,
                }
                with atomic_write(path) as file:
                    torch.save(state, file)

        task = progress.add_task(escape(source.name), total=None, completed=num_tokens_done)
        # The whole text is read for its length only if a bar needs it, and it is on this machine.
        is_counted = self.settings.limit is None and not progress.disable and not source.is_stream
        num_characters = sum(map(len, source.read_documents())) if is_counted else 0

        # The next blocks are tokenized, sorted and padded in a thread, so that a GPU does not wait for them.
        with closing(read_ahead(self._make_updates(source, source_index, num_blocks_done, reading))) as updates:
            for update in updates:
                self._update_statistics(statistics, update)
                num_blocks_done = update.end
                num_tokens_done += sum(update.num_tokens)
                total = self.settings.limit or reading.tokens * num_characters / max(reading.characters, 1)
                progress.update(task, completed=num_tokens_done, total=total / self.num_processes or None)
                if time.monotonic() - last_save > SECONDS_BETWEEN_SAVES:
                    save_state()
                    last_save = time.monotonic()
        reading.seconds = earlier_seconds + time.monotonic() - start
        save_state()
        if self.num_processes > 1:
            self._merge_ranks(source_index, statistics, num_blocks_done)
        reading.forward_seconds = self.taps.forward_seconds
        # The text may have fewer tokens than the limit.
        description = f"computing the measures of {escape(source.name)}"
        progress.update(task, description=description, total=num_tokens_done, completed=num_tokens_done)
        return statistics

    def _make_updates(
        self, source: Source, source_index: int, first_position: int, reading: ReadCounts
    ) -> Generator["_Update"]:
        """Yield this rank's batches of a source from a position on, as many together as are added at once."""
        max_tokens = min(UPDATE_POINTS, UPDATE_BYTES // (4 * len(self.taps.names) * self._config.hidden_size))
        for batches in _join_batches(self._iterate_rank_batches(source, first_position, reading), max_tokens):
            blocks = [block for batch in batches for block in batch]
            padded_batches = [self.taps.make_batch([block for *_, block in batch]) for batch in batches]
            masks = [batch.is_included for batch in padded_batches]
            num_tokens = torch.cat([mask.sum(1) for mask in masks])
            documents = torch.tensor([block.document_index for *_, block in blocks], device="cpu")
            documents = documents.repeat_interleave(num_tokens)
            rows = Rows.of(
                self._labels.find_groups(documents),
                torch.cat([batch.input_ids[batch.is_included] for batch in padded_batches]),
                torch.cat([mask.nonzero()[:, 1] for mask in masks]),
                documents if self._num_examples else None,
            )
            # The source's index makes the samples of different sources independent.
            block_keys = [(source_index << 32) + block.text_index for block in blocks]
            yield _Update(padded_batches, rows, block_keys, num_tokens.tolist(), blocks[-1].position + 1)

    def _iterate_rank_batches(
        self, source: Source, first_position: int, reading: ReadCounts
    ) -> Iterator[list["_NumberedBlock"]]:
        """Yield this rank's batches of a source from a position on; a batch of an earlier call may have ended there."""
        start = 0
        indexed_blocks = enumerate(self._read_limited_blocks(source, reading))
        for window in sorted_windows(indexed_blocks, _count_block_tokens):
            rank_blocks = [
                _NumberedBlock(position, index, block)
                for position, (index, block) in enumerate(window, start)
                if position >= first_position and position % self.num_processes == self._rank
            ]
            yield from self._split_into_batches(rank_blocks, _count_block_tokens)
            start += len(window)

    def _split_into_batches(self, blocks: Iterable[T], block_length: Callable[[T], int]) -> Iterator[list[T]]:
        return split_into_batches(
            blocks, block_length, self.taps.device, self.settings.batch_tokens, has_padding=not self._sees_padding
        )

    def _read_limited_blocks(self, source: Source, reading: ReadCounts) -> Iterator[Block]:
        """Yield the blocks of a source in order, up to the limit of tokens, and count in `reading` what is read."""
        documents = source.read_documents(self.settings.shuffle_buffer, self.settings.seed)
        for block in self._blocks(documents, reading):
            reading.tokens += self._count_tokens(block)
            yield block
            # The next block, which may be of another document, is not read.
            if self.settings.limit is not None and reading.tokens >= self.settings.limit:
                break
        # Every rank reads all blocks, so that all ranks raise this.
        if not reading.tokens:
            unit = "line" if source.documents is None else "string"
            raise UserError(f"{source.path} holds no text; expected at least one {unit} that is not empty")
        if reading.tokens < MIN_TOKENS:
            tokens = "1 token is" if reading.tokens == 1 else f"{reading.tokens} tokens are"
            raise UserError(f"{source.path}: {tokens} too few to measure; expected at least {MIN_TOKENS}")

    def _count_tokens(self, block: Block) -> int:
        return len(block.tokens) if self.settings.special_tokens == "include" else block.num_text_tokens

    def _merge_ranks(self, source_index: int, statistics: SourceSums, num_blocks_done: int) -> None:
        blocks_by_rank = torch.arange(self.num_processes, device="cpu").eq(self._rank) * num_blocks_done
        dist.all_reduce(blocks_by_rank)
        if self._rank == 0:
            for rank in range(1, self.num_processes):
                saved_state = self._wait_for_state(self._find_state_path(source_index, rank), int(blocks_by_rank[rank]))
                rank_statistics = self._create_statistics()
                rank_statistics.load_state_dict(saved_state["statistics"])
                statistics.merge(rank_statistics)
                self.taps.forward_seconds += saved_state["forward_seconds"]
        dist.barrier()

    def _update_statistics(self, statistics: SourceSums, update: "_Update") -> None:
        """Run the model and add its hidden states."""
        states = self.taps.compute_states(update.batches, update.rows.row_of_point)
        statistics.update(states, update.rows, update.block_keys, update.num_tokens)
        self.taps.add_forward_seconds()

    def _find_origins(self, sources: Sequence[Source]) -> dict[str, Tensor]:
        """Compute the origin of each hidden state's sums, `(d,)` by name: its mean over the beginnings of all sources.

        Only accumulators with the same origin can be merged, so it must not depend on batches and processes.
        """
        num_tokens, sum_by_tap = 0, dict.fromkeys(self.taps.names, torch.zeros((), device="cpu"))
        for source in sources:
            first_blocks = itertools.islice(self._read_limited_blocks(source, ReadCounts()), ORIGIN_BLOCKS)
            for blocks in self._split_into_batches(first_blocks, lambda block: len(block.tokens)):
                batch = self.taps.make_batch(blocks)
                rows = torch.arange(int(batch.is_included.sum()), device="cpu")
                states = self.taps.compute_states([batch], rows)
                num_tokens += len(rows)
                for tap, tap_states in states.items():
                    check_finite(tap_states, f"the hidden states at {tap}")
                    sum_by_tap[tap] = sum_by_tap[tap] + tap_states.cpu().sum(0, dtype=torch.float64)
        origins = {tap: tap_sum / max(num_tokens, 1) for tap, tap_sum in sum_by_tap.items()}
        if self.num_processes > 1:
            for origin in origins.values():
                dist.broadcast(origin, 0)
        devices = self.taps.devices
        return {tap: origin.to(devices[tap], accumulation_dtype(devices[tap])) for tap, origin in origins.items()}

    def _create_statistics(self) -> SourceSums:
        return SourceSums(
            self.settings,
            self._origins,
            num_types=self._config.vocab_size if self.settings.intra else 0,
            sample_size=min(self.settings.sample, self._config.vocab_size),
            num_examples=self._num_examples,
        )

    def _find_state_path(self, source_index: int, rank: int) -> Path:
        return self._state_path.with_name(f"{self._state_path.name}.{source_index}.{rank}-{self.num_processes}")

    def _load_state(self, path: Path) -> dict[str, Any] | None:
        try:
            return self._read_state(path) if self._saves_state and path.exists() else None
        except UserError as error:
            make_console(stderr=True).print(f"warning: the text is read from its beginning: {error}", soft_wrap=True)
            return None

    def _read_state(self, path: Path, num_blocks: int | None = None) -> dict[str, Any]:
        """Read a state of this pass, after `num_blocks` if given; raise a `UserError` if the file lacks it."""
        try:
            state = load_archive(path)
        except Exception as error:  # a missing, truncated or foreign file can raise any exception
            raise UserError(f"{path} cannot be read: {shorten(error) or type(error).__name__}") from error
        if not isinstance(state, dict) or state.get("format") != _STATE_FORMAT:
            raise UserError(f"{path} is of another version of istar")
        if state.get("identity") != self._identity or num_blocks not in (None, state["blocks"]):
            raise UserError(f"{path} is of another model, text, setting, device or time")
        return state

    def _wait_for_state(self, path: Path, num_blocks: int) -> dict[str, Any]:
        """Read what another process has saved; a network disk may show it late."""
        deadline = time.monotonic() + SECONDS_TO_WAIT_FOR_FILES
        while True:
            try:
                return self._read_state(path, num_blocks)
            except UserError as error:
                if time.monotonic() >= deadline:
                    raise UserError(f"{error}; expected a folder that all processes see; call istar again") from error
            time.sleep(1.0)


class _NumberedBlock(NamedTuple):
    """A block with its place in a source."""

    position: int  # place in the order of the sorted windows
    text_index: int  # place in the order of the text
    block: Block


class _Update(NamedTuple):
    """Batches for the model, and what is known about the points that they give."""

    batches: list[PaddedBatch]
    rows: Rows
    block_keys: list[int]  # unique over all sources, see `Sample.update`
    num_tokens: list[int]  # number of included tokens of each block
    end: int  # position after the last block


def _join_batches(batches: Iterable[list[_NumberedBlock]], max_tokens: int) -> Iterator[list[list[_NumberedBlock]]]:
    """Yield lists of consecutive batches that have at most `max_tokens` tokens together, or of a single batch."""
    joined_batches: list[list[_NumberedBlock]] = []
    num_joined_tokens = 0
    for batch in batches:
        num_tokens = sum(map(_count_block_tokens, batch))
        if joined_batches and num_joined_tokens + num_tokens > max_tokens:
            yield joined_batches
            joined_batches, num_joined_tokens = [], 0
        joined_batches.append(batch)
        num_joined_tokens += num_tokens
    if joined_batches:
        yield joined_batches


def _count_block_tokens(numbered_block: tuple[Any, ...]) -> int:
    """Return the number of tokens of a block, including special tokens; the block is the last element of a tuple."""
    return len(numbered_block[-1].tokens)


@contextmanager
def join_process_group() -> Iterator[int]:
    """Join torchrun's process group within a `with` block, and yield this process's rank: 0 without torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    # The processes exchange their statistics through files, so gloo is enough, with GPUs too.
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def wait_for_all_processes() -> None:
    """Wait until all processes of torchrun have called this function."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
