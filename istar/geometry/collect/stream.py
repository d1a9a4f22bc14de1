"""A single pass of a model over a corpus that accumulates all measures of all layers."""

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import UserError
from istar.files.writing import atomic_write
from istar.geometry.collect.layer_outputs import Taps
from istar.geometry.collect.layers import (
    COVARIANCE_MEASURES_WITH_ERROR,
    SCORE_BY_SENTENCE,
    Layer,
    LayerSettings,
    MeasureSet,
)
from istar.geometry.collect.sample import Sample
from istar.geometry.collect.token_batch import TokenBatch
from istar.inputs.corpus import (
    COMBINED,
    Block,
    Blocks,
    Documents,
    Reading,
    Source,
    pad_batch,
    sorted_windows,
    split_into_batches,
)
from istar.inputs.documents import read_documents
from istar.measures import Accumulator, ScaleDimension
from istar.measures.numerics import accumulation_dtype, full_precision

SECONDS_BETWEEN_SAVES = 300.0
MAX_GROUP_BYTES = 2**30
"""Most memory for the scatter matrices of all groups and layers; above it, covariance measures have no error."""
_BYTES_OF_SCATTER = 8 + 4
"""Bytes for each number of a scatter matrix: the accumulated one in float64, and the recent one in float32."""
UPDATE_TOKENS = 16_384
"""Maximum number of tokens whose hidden states are added to the statistics at once, unless a batch has more. Adding
many tokens at once takes less time for each, but a model on a CPU is faster with small batches."""
UPDATE_BYTES = 2**28
"""Maximum memory of these hidden states in float32, over all taps, unless a batch has more."""
ORIGIN_BLOCKS = 4
"""Number of blocks from the beginning of each source whose mean hidden state is the origin of the sums of a layer."""
_STATE_FORMAT = 5
"""Number of the layout of a state file, increased when the layout changes. Files with another number are ignored."""

T = TypeVar("T")
SpecialTokens = Literal["include", "exclude"]
"""Whether statistics include the hidden states of special tokens; see `Pass`."""


@dataclass(frozen=True)
class Pass:
    """Settings of a pass over a corpus."""

    length: int  # maximum number of tokens of a block, including special tokens
    # Maximum number of tokens of a batch, with padding; see `corpus.split_into_batches` for the default.
    batch_tokens: int | None = None
    sample: int = 5_000  # maximum number of token types to keep for TwoNN, with one occurrence of each
    seed: int = 0  # seed of that sample
    # A source is read until the statistics have at least this number of its tokens; None reads it to its end.
    limit: int | None = None
    intra: bool = True  # whether to compute IntraSim, whose sums may need gigabytes; see `GroupedPoints`
    documents: Documents = "separate"  # whether the model sees each document alone; see `corpus.Blocks`
    # Whether the statistics include the hidden states of special tokens and separators, which the model always sees.
    special_tokens: SpecialTokens = "exclude"
    measures: MeasureSet = "basic"  # `all` adds the measures that take the most time
    # Number of groups of documents for standard errors; 0 computes none. Document i, counted from 0, is in group
    # i mod `groups`. Of packed documents, each run of `corpus.RUN_LENGTH` consecutive blocks counts as one document.
    groups: int = 10

    def keeps_scatter_by_group(self, dim: int, num_layers: int) -> bool:
        """Return whether the scatter matrices `(dim, dim)` of all groups and layers take at most `MAX_GROUP_BYTES`."""
        return self.groups * num_layers * dim**2 * _BYTES_OF_SCATTER <= MAX_GROUP_BYTES

    def layer_settings(self, dim: int, num_layers: int) -> LayerSettings:
        """Return the settings of each layer's accumulators for a model with `num_layers` layers of width `dim`."""
        return LayerSettings(
            measures=self.measures,
            num_groups=self.groups,
            scatter_by_group=self.keeps_scatter_by_group(dim, num_layers),
            has_separate_documents=self.documents == "separate",
        )


class Statistics(Accumulator):
    """Accumulates all measures of all taps over a source.

    Args:
        model: model whose hidden states are measured.
        taps: names of the taps.
        settings: settings of the pass.
        origins: a point near the mean of the hidden states, `(d,)` by tap, on the device of the model.

    Attributes:
        layers: accumulator of each tap, by tap.
        sample: one occurrence of each of a random sample of token types.
        has_all_measures: whether to compute all measures, not only the basic ones.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        taps: Sequence[str],
        settings: Pass,
        origins: Mapping[str, Tensor],
    ) -> None:
        config = model.config.get_text_config()
        vocabulary_size = config.vocab_size if settings.intra else 0
        layer_settings = settings.layer_settings(config.hidden_size, len(taps))
        self.layers = {tap: Layer(vocabulary_size, origins[tap], layer_settings) for tap in taps}
        self.has_all_measures = settings.measures == "all"
        self.sample = Sample(taps, min(settings.sample, config.vocab_size), settings.seed)

    def compute_measures(
        self,
        spectra: Mapping[str, Mapping[str, Tensor]] | None = None,
        replicates: Mapping[str, Mapping[str, list[float]]] | None = None,
    ) -> dict[str, dict[str, float]]:
        """Compute all measures, by tap and name. Those of the sample are left out if its size is 0.

        Args:
            spectra: results of `Layer.compute_spectra` by tap; computed if None.
            replicates: results of `Layer.compute_replicates` by tap; computed if None.
        """
        measures_by_tap = {
            tap: layer.compute_measures(spectra[tap] if spectra else None, replicates[tap] if replicates else None)
            for tap, layer in self.layers.items()
        }
        if self.sample.size:
            for tap, measures in measures_by_tap.items():
                measures["two_nn"], measures["two_nn_error"] = self.sample.estimate_two_nn(tap)
                if self.has_all_measures:
                    measures |= self.sample.compute_cosines(tap)
        return measures_by_tap

    def estimate_gride(self) -> dict[str, list[ScaleDimension]]:
        """Estimate the intrinsic dimension by scale at each tap; empty without a sample, or with the basic measures."""
        is_computed = self.sample.size and self.has_all_measures
        return {tap: self.sample.estimate_gride(tap) for tap in self.layers} if is_computed else {}


class Stream:
    """Runs a pass of a model over texts, and resumes an interrupted pass from its state files.

    The blocks of a text are sorted by length within windows of `corpus.WINDOW_SIZE` blocks, so that a batch holds
    blocks of similar length. The processes of an initialized process group share the blocks of each window. Their
    accumulators are merged exactly, and rank 0 returns the result.

    Args:
        model: model without a head, in eval mode, on its device.
        tokenizer: tokenizer of the model.
        settings: settings of the pass.
        state_path: path of the state files, whose names start with its name; None saves no state.
        identity: hash of everything that the result depends on. A state file with another identity is ignored.

    Attributes:
        taps: reads the model's hidden states.
        readings: how much of each source has been read, and how long it took, by the sources' names; with several
            sources also for `combined`. The seconds are those of rank 0, including interrupted calls.
        earlier_seconds: how many of these seconds belong to interrupted calls.

    Raises:
        UserError: if there are several processes but no state files, through which they exchange accumulators.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Pass,
        state_path: Path | None = None,
        identity: str = "",
    ) -> None:
        self.settings, self._state_path, self._identity = settings, state_path, identity
        is_distributed = dist.is_available() and dist.is_initialized()
        self._rank, self._world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        if self._world_size > 1 and state_path is None:
            raise UserError("several processes need a state file to share a pass; give one in a folder that all see")
        self._model, self.taps = model, Taps(model)
        self._blocks = Blocks(tokenizer, settings.length, settings.documents)
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self._sees_padding = self.taps.see_padding(self._pad_id)
        self._origins: dict[str, Tensor] = {}
        self.readings: dict[str, Reading] = {}
        self.earlier_seconds = 0.0
        self._forward_seconds = 0.0

    @property
    def num_processes(self) -> int:
        """Number of processes that share the pass."""
        return self._world_size

    def __call__(
        self, sources: Sequence[Source], summarize: Callable[[Statistics], T], console: Console | None = None
    ) -> dict[str, T]:
        """Read the sources, and return a summary of the statistics of each by the sources' names.

        With several sources, the key `combined` has the summary of all of them together. Only rank 0 returns summaries;
        the result of the other ranks is empty.

        Args:
            sources: texts.
            summarize: computes the summary from the statistics. It must not keep the statistics, which are large: once
                it has returned, those of a source are merged into those of all sources.
            console: console for a progress bar and warnings; None shows none.

        Raises:
            UserError: if a source cannot be read or holds no text.
        """
        self._warn_of_missing_measures(console)
        self._origins = self._find_origins(sources)
        results: dict[str, T] = {}
        combined: Statistics | None = None
        texts = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[status]"))
        columns = SpinnerColumn(), next(texts), BarColumn(), next(texts)
        disable = console is None
        with Progress(*columns, TimeElapsedColumn(), console=console, disable=disable, transient=True) as progress:
            for source_index, source in enumerate(sources):
                statistics = self._read_source(source, source_index, progress)
                if self._rank == 0:
                    results[source.name] = summarize(statistics)
                    if combined is None:
                        combined = statistics
                    else:
                        combined.merge(statistics)
                # Free these statistics before those of the next source are allocated.
                del statistics
        if combined is not None and len(sources) > 1:
            results[COMBINED] = summarize(combined)
            combined_reading = Reading()
            for reading in self.readings.values():
                combined_reading.add(reading)
            self.readings[COMBINED] = combined_reading
        if self._state_path is not None and self._rank == 0:
            for path in self._state_path.parent.glob(f"{self._state_path.name}.*"):
                path.unlink()
        return results

    def _read_source(self, source: Source, source_index: int, progress: Progress) -> Statistics:
        """Accumulate and return the statistics of a source.

        Each rank reads its share of the blocks and saves its state every few minutes. At the end, rank 0 merges the
        statistics of all ranks.
        """
        statistics, num_blocks_done, num_tokens_done = self._create_statistics(), 0, 0
        reading = self.readings[source.name] = Reading()
        earlier_seconds, self._forward_seconds = 0.0, 0.0
        saved_state = self._load_state(source_index, self._rank)
        if saved_state is not None:
            statistics.load_state_dict(saved_state["statistics"])
            num_blocks_done, num_tokens_done = saved_state["blocks"], saved_state["tokens"]
            earlier_seconds, self._forward_seconds = (
                saved_state.get("seconds", 0.0),
                saved_state.get("forward_seconds", 0.0),
            )
            self.earlier_seconds += earlier_seconds
            del saved_state
        start = last_save = time.monotonic()
        task = progress.add_task(source.name, total=None, status="")
        rank_batches = self._iterate_rank_batches(source, num_blocks_done, reading)
        for batches in _join_batches(rank_batches, self._compute_max_update_tokens()):
            numbered_blocks = [numbered_block for batch in batches for numbered_block in batch]
            # The source's index makes the samples of different sources independent.
            block_keys = [(source_index << 32) + index for _, index, _ in numbered_blocks]
            self._update_statistics(statistics, [[block for *_, block in batch] for batch in batches], block_keys)
            num_batch_tokens = sum(self._count_tokens(block) for *_, block in numbered_blocks)
            num_blocks_done = numbered_blocks[-1].position + 1
            num_tokens_done += num_batch_tokens
            progress.advance(task, num_batch_tokens)
            tokens_per_second = progress.tasks[task].speed or 0
            progress.update(task, status=f"{num_tokens_done:,} tokens, {tokens_per_second:,.0f} per second")
            if time.monotonic() - last_save > SECONDS_BETWEEN_SAVES:
                seconds = earlier_seconds + time.monotonic() - start
                self._save_state(source_index, statistics, num_blocks_done, num_tokens_done, seconds)
                last_save = time.monotonic()
        reading.seconds = earlier_seconds + time.monotonic() - start
        self._save_state(source_index, statistics, num_blocks_done, num_tokens_done, reading.seconds)
        if self._world_size > 1:
            self._merge_ranks(source_index, statistics)
        reading.forward_seconds = self._forward_seconds
        return statistics

    def _iterate_rank_batches(
        self, source: Source, first_position: int, reading: Reading
    ) -> Iterator[list["_NumberedBlock"]]:
        """Yield this rank's batches of a source, from a position at which a batch of an earlier call may have ended."""
        start = 0
        indexed_blocks = enumerate(self._read_limited_blocks(source, reading))
        for window in sorted_windows(indexed_blocks, _count_block_tokens):
            rank_blocks = [
                _NumberedBlock(position, index, block)
                for position, (index, block) in enumerate(window, start)
                if position >= first_position and position % self._world_size == self._rank
            ]
            yield from self._split_into_batches(rank_blocks, _count_block_tokens)
            start += len(window)

    def _split_into_batches(self, blocks: Iterable[T], block_length: Callable[[T], int]) -> Iterator[list[T]]:
        """Yield consecutive blocks in batches; `block_length` returns the number of tokens of a block."""
        return split_into_batches(
            blocks, block_length, self._model.device, self.settings.batch_tokens, has_padding=not self._sees_padding
        )

    def _read_limited_blocks(self, source: Source, reading: Reading) -> Iterator[Block]:
        """Yield the blocks of a source in order, up to the limit of tokens, and count in `reading` what is read."""
        for block in self._blocks(read_documents(source.path), reading):
            reading.tokens += self._count_tokens(block)
            yield block
            # The next block, which may be of another document, is not read.
            if self.settings.limit is not None and reading.tokens >= self.settings.limit:
                return
        if not reading.tokens:
            # Every rank reads all blocks, so that all ranks raise this.
            raise UserError(f"{source.path} holds no text; expected at least one line that is not empty")

    def _get_group_index(self, block: Block) -> int:
        return block.document_index % self.settings.groups if self.settings.groups else 0

    def _count_tokens(self, block: Block) -> int:
        """Return the number of tokens of a block that the statistics include."""
        return len(block.tokens) if self.settings.special_tokens == "include" else block.num_text_tokens

    def _merge_ranks(self, source_index: int, statistics: Statistics) -> None:
        dist.barrier()
        if self._rank == 0:
            for rank in range(1, self._world_size):
                saved_state = self._load_state(source_index, rank)
                assert saved_state is not None
                rank_statistics = self._create_statistics()
                rank_statistics.load_state_dict(saved_state["statistics"])
                statistics.merge(rank_statistics)
                self._forward_seconds += saved_state["forward_seconds"]
        dist.barrier()

    def _update_statistics(
        self, statistics: Statistics, batches: Sequence[Sequence[Block]], block_keys: Sequence[int]
    ) -> None:
        """Run the model on some batches of blocks, and add the hidden states to the statistics.

        The keys of the blocks are unique over all sources; see `Sample.update`.
        """
        blocks = [block for batch in batches for block in batch]
        inputs, masks = zip(*map(self._make_inputs, batches), strict=True)
        token_ids = torch.cat(
            [batch_inputs["input_ids"][mask] for batch_inputs, mask in zip(inputs, masks, strict=True)]
        )
        positions = torch.cat([mask.nonzero()[:, 1] for mask in masks])
        num_tokens = torch.cat([mask.sum(1) for mask in masks])
        groups = torch.tensor([self._get_group_index(block) for block in blocks])
        # The pieces of a document may be in different batches and are not independent, so only the first one counts.
        sentences = torch.tensor([-1 if block.piece_index else number for number, block in enumerate(blocks)])
        tokens = TokenBatch.of(
            token_ids,
            positions,
            groups.repeat_interleave(num_tokens),
            sentences.repeat_interleave(num_tokens),
            num_groups=max(self.settings.groups, 1),
            device=self._model.device,
        )
        rows = tokens.find_rows()
        states = self._compute_hidden_states(inputs, masks, rows)
        for tap, tap_states in states.items():
            statistics.layers[tap].update(tap_states, tokens)
        statistics.sample.update(block_keys, num_tokens.tolist(), token_ids, states, rows)

    def _compute_max_update_tokens(self) -> int:
        """Return the maximum number of tokens whose hidden states are added to the statistics at once."""
        bytes_of_token = 4 * len(self.taps.names) * self._model.config.get_text_config().hidden_size
        return min(UPDATE_TOKENS, UPDATE_BYTES // bytes_of_token)

    def _make_inputs(self, blocks: Sequence[Block]) -> tuple[dict[str, Tensor], Tensor]:
        """Return a batch of blocks as inputs of the model, and the mask of the tokens that the statistics include.

        All tensors are on the CPU. The mask is `(blocks, tokens)`.
        """
        inputs = pad_batch([block.tokens for block in blocks], self._pad_id)
        is_included = inputs["attention_mask"].bool()
        if self.settings.special_tokens == "exclude":
            is_special = [torch.tensor(block.is_special) for block in blocks]
            is_included &= ~pad_sequence(is_special, batch_first=True, padding_value=True)
        return inputs, is_included

    def _compute_hidden_states(
        self, inputs: Sequence[Mapping[str, Tensor]], masks: Sequence[Tensor], rows: Tensor
    ) -> dict[str, Tensor]:
        """Run the model on some batches.

        Args:
            inputs: the model's inputs of each batch, from `_make_inputs`.
            masks: the included tokens of each batch, from `_make_inputs`.
            rows: row of each included token in the result, `(n,)`: the numbers from 0 to n - 1 in any order.

        Returns:
            The hidden states of the included tokens, `(n, d)` by tap.
        """
        device, num_tokens = self._model.device, len(rows)
        points: dict[str, Tensor] = {}
        rows_by_batch = rows.split([int(mask.sum()) for mask in masks])
        with full_precision(device), torch.inference_mode():
            for batch_inputs, mask, batch_rows in zip(inputs, masks, rows_by_batch, strict=True):
                device_inputs = {name: values.to(device) for name, values in batch_inputs.items()}
                start = self._read_synchronized_time()
                states = self.taps(device_inputs)
                self._forward_seconds += self._read_synchronized_time() - start
                # The states of all other tokens share a last row, which is left out of the result.
                all_rows = torch.full(mask.shape, num_tokens).masked_scatter_(mask, batch_rows).flatten().to(device)
                for tap, tap_states in states.items():
                    if tap not in points:
                        points[tap] = tap_states.new_empty(num_tokens + 1, tap_states.shape[-1])
                    points[tap].index_copy_(0, all_rows, tap_states.flatten(0, 1))
        return {tap: tap_points[:num_tokens] for tap, tap_points in points.items()}

    def _read_synchronized_time(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.monotonic()

    def _find_origins(self, sources: Sequence[Source]) -> dict[str, Tensor]:
        """Compute the origins of the sums of each layer, `(d,)` by tap: means over the beginnings of all sources.

        All accumulators that are merged need the same origin, so it must not depend on batches and processes.
        """
        num_tokens, sum_by_tap = 0, dict.fromkeys(self.taps.names, torch.zeros(()))
        for source in sources:
            first_blocks = itertools.islice(self._read_limited_blocks(source, Reading()), ORIGIN_BLOCKS)
            for blocks in self._split_into_batches(first_blocks, lambda block: len(block.tokens)):
                inputs, is_included = self._make_inputs(blocks)
                num_batch_tokens = int(is_included.sum())
                states = self._compute_hidden_states([inputs], [is_included], torch.arange(num_batch_tokens))
                num_tokens += num_batch_tokens
                for tap, tap_states in states.items():
                    sum_by_tap[tap] = sum_by_tap[tap] + tap_states.cpu().sum(0, dtype=torch.float64)
        origins = {tap: tap_sum / max(num_tokens, 1) for tap, tap_sum in sum_by_tap.items()}
        if self._world_size > 1:
            for origin in origins.values():
                dist.broadcast(origin, 0)
        device = self._model.device
        return {tap: origin.to(device, accumulation_dtype(device)) for tap, origin in origins.items()}

    @property
    def _layer_settings(self) -> LayerSettings:
        return self.settings.layer_settings(self._model.config.get_text_config().hidden_size, len(self.taps.names))

    def _warn_of_missing_measures(self, console: Console | None) -> None:
        if console is None:
            return
        settings, warnings = self._layer_settings, []
        if not settings.scatter_by_group:
            names = [*COVARIANCE_MEASURES_WITH_ERROR, *([SCORE_BY_SENTENCE] if settings.has_score_by_sentence else [])]
            warnings.append(
                f"{', '.join(names)} get no standard errors, because the sums of "
                f"{self.settings.groups} groups would take more than {MAX_GROUP_BYTES / 2**30:g} GiB; "
                "choose fewer --groups"
            )
        if settings.measures == "all" and not settings.has_separate_documents:
            warnings.append(
                f"{SCORE_BY_SENTENCE} is left out, because packed documents do not show which tokens belong to the "
                "same document; choose --documents separate"
            )
        for warning in warnings:
            console.print(f"warning: {warning}", highlight=False, soft_wrap=True)

    def _create_statistics(self) -> Statistics:
        return Statistics(self._model, self.taps.names, self.settings, self._origins)

    def _get_state_path(self, source_index: int, rank: int) -> Path:
        assert self._state_path is not None
        return self._state_path.with_name(f"{self._state_path.name}.{source_index}.{rank}-{self._world_size}")

    def _save_state(
        self, source_index: int, statistics: Statistics, num_blocks_done: int, num_tokens_done: int, seconds: float
    ) -> None:
        """Save this rank's state of a source after `num_blocks_done` blocks, unless the pass saves no state."""
        if self._state_path is not None:
            state = {
                "format": _STATE_FORMAT,
                "identity": self._identity,
                "statistics": statistics.state_dict(),
                "blocks": num_blocks_done,
                "tokens": num_tokens_done,
                "seconds": seconds,
                "forward_seconds": self._forward_seconds,
            }
            with atomic_write(self._get_state_path(source_index, self._rank)) as file:
                torch.save(state, file)

    def _load_state(self, source_index: int, rank: int) -> dict[str, Any] | None:
        """Load a rank's state of a source, or return None if it is missing, damaged, or of another pass or format."""
        if self._state_path is None:
            return None
        try:
            state = torch.load(self._get_state_path(source_index, rank), map_location="cpu", weights_only=True)
        except Exception:  # a missing, truncated or foreign file can raise any exception
            return None
        is_usable = (
            isinstance(state, dict) and state.get("format") == _STATE_FORMAT and state.get("identity") == self._identity
        )
        return state if is_usable else None


class _NumberedBlock(NamedTuple):
    """A block with its place in a source."""

    position: int  # place in the order of the sorted windows
    text_index: int  # place in the order of the text
    block: Block


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
    *_, block = numbered_block
    return len(block.tokens)


@contextmanager
def join_process_group() -> Iterator[int]:
    """Join the process group of torchrun within a `with` block, and yield the rank of this process.

    Without torchrun there is no group, and the rank is 0.
    """
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


def compute_identity(*parts: object) -> str:
    """Return a hash of the values that the result of a pass depends on.

    A `Path` counts by the content of its file or of all files in its folder, and any other value by its `repr`.
    """
    digest = hashlib.blake2b()
    for part in parts:
        if isinstance(part, Path):
            files = sorted(path for path in part.rglob("*") if path.is_file()) if part.is_dir() else [part]
            for path in files:
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "blake2b").digest())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()
