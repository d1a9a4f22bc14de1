"""A single pass of a model over a corpus that accumulates all measures of all layers."""

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import UserError
from istar.files import atomic_write
from istar.geometry.corpus import (
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
from istar.geometry.layers import COVARIANCE_MEASURES_WITH_ERROR, SCORE_BY_SENTENCE, Layer, LayerSettings, MeasureSet
from istar.geometry.sample import Sample
from istar.geometry.taps import Taps
from istar.geometry.token_batch import TokenBatch
from istar.measures import ScaleDimension
from istar.measures.moments import full_precision
from istar.measures.rows import accumulation_dtype
from istar.tasks.documents import read_documents

SECONDS_BETWEEN_SAVES = 300.0
MAX_GROUP_BYTES = 2**30
"""Most memory for the scatter matrices of all groups and layers; above it, covariance measures have no error."""
_BYTES_OF_SCATTER = 8 + 4
"""Bytes for each number of a scatter matrix: the accumulated one in float64, and the recent one in float32."""
ORIGIN_BLOCKS = 4
"""Number of blocks from the beginning of each source whose mean hidden state is the origin of the sums of a layer."""
_STATE_FORMAT = 3
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
    intra: bool = True  # whether to compute IntraSim, which needs vocabulary x width x 8 bytes for each layer
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


class Statistics:
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

    def merge(self, other: "Statistics") -> None:
        """Add the tokens of other accumulators."""
        for tap, layer in self.layers.items():
            layer.merge(other.layers[tap])
        self.sample.merge(other.sample)

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

    def state_dict(self) -> dict[str, Any]:
        """Return all accumulated tensors."""
        return {
            "layers": {tap: layer.state_dict() for tap, layer in self.layers.items()},
            "sample": self.sample.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the tensors that `state_dict` returned."""
        for tap, layer in self.layers.items():
            layer.load_state_dict(state["layers"][tap])
        self.sample.load_state_dict(state["sample"])


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
        self._model, self._taps = model, Taps(model)
        self._blocks = Blocks(tokenizer, settings.length, settings.documents)
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
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
            summarize: computes the summary from the statistics. It must not keep the statistics, which are as large as
                the vocabulary times the width times the number of taps: once it has returned, those of a source are
                merged into those of all sources.
            console: console for a progress bar and warnings; None shows none.

        Raises:
            UserError: if a source cannot be read or holds no text.
        """
        self._warn_of_missing_measures(console)
        self._origins = self._find_origins(sources)
        results: dict[str, T] = {}
        combined: Statistics | None = None
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
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
        for positions, block_indices, blocks in self._iterate_rank_batches(source, num_blocks_done, reading):
            # The source's index makes the samples of different sources independent.
            self._update_statistics(statistics, blocks, [(source_index << 32) + index for index in block_indices])
            num_batch_tokens = sum(map(self._count_tokens, blocks))
            num_blocks_done, num_tokens_done = positions[-1] + 1, num_tokens_done + num_batch_tokens
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
    ) -> Iterator[tuple[list[int], list[int], list[Block]]]:
        """Yield this rank's batches of a source, from a position at which a batch of an earlier call may have ended.

        A batch is three lists: the positions of its blocks in the order of the sorted windows, their indices in the
        order of the text, and the blocks.
        """
        start = 0
        indexed_blocks = enumerate(self._read_limited_blocks(source, reading))
        for window in sorted_windows(indexed_blocks, _count_block_tokens):
            rank_blocks = [
                (position, index, block)
                for position, (index, block) in enumerate(window, start)
                if position >= first_position and position % self._world_size == self._rank
            ]
            for batch in self._split_into_batches(rank_blocks, _count_block_tokens):
                positions, indices, blocks = zip(*batch, strict=True)
                yield list(positions), list(indices), list(blocks)
            start += len(window)

    def _split_into_batches(self, blocks: Iterable[T], block_length: Callable[[T], int]) -> Iterator[list[T]]:
        """Yield consecutive blocks in batches; `block_length` returns the number of tokens of a block."""
        return split_into_batches(blocks, block_length, self._model.device, self.settings.batch_tokens)

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
        """Return the index of the group of documents that a block belongs to."""
        return block.document_index % self.settings.groups if self.settings.groups else 0

    def _count_tokens(self, block: Block) -> int:
        """Return the number of tokens of a block that the statistics include."""
        return len(block.tokens) if self.settings.special_tokens == "include" else block.num_text_tokens

    def _merge_ranks(self, source_index: int, statistics: Statistics) -> None:
        """Merge the statistics of all ranks into those of rank 0, through their state files."""
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

    def _update_statistics(self, statistics: Statistics, blocks: Sequence[Block], block_keys: Sequence[int]) -> None:
        """Run the model on a batch of blocks, and add the hidden states to the statistics.

        The keys of the blocks are unique over all sources; see `Sample.update`.
        """
        # In this order, the tokens are sorted as a `TokenBatch` needs them, so that no hidden states have to be moved.
        keyed_blocks = sorted(
            zip(blocks, block_keys, strict=True),
            key=lambda item: (item[0].piece_index > 0, self._get_group_index(item[0])),
        )
        blocks, block_keys = zip(*keyed_blocks, strict=True)
        is_included, token_ids, states = self._compute_hidden_states(blocks)
        included_token_ids = token_ids[is_included]
        rows, positions = is_included.nonzero().T
        groups = torch.tensor([self._get_group_index(block) for block in blocks])[rows]
        # The pieces of a document may be in different batches and are not independent, so only the first one counts.
        sentences = torch.tensor([-1 if block.piece_index else row for row, block in enumerate(blocks)])[rows]
        num_groups = max(self.settings.groups, 1)
        batch = TokenBatch.of(included_token_ids, positions, groups, sentences, num_groups, self._model.device)
        for tap, tap_states in states.items():
            statistics.layers[tap].update(tap_states, batch)
        statistics.sample.update(block_keys, is_included.sum(1).tolist(), included_token_ids, states)

    def _compute_hidden_states(self, blocks: Sequence[Block]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Run the model on a batch of blocks.

        Returns:
            The mask of the tokens that the statistics include and the token ids, `(blocks, tokens)` on the CPU, and the
            hidden states of the included tokens, `(n, d)` by tap.
        """
        inputs = pad_batch([block.tokens for block in blocks], self._pad_id)
        token_ids, is_included = inputs["input_ids"], inputs["attention_mask"].bool()
        if self.settings.special_tokens == "exclude":
            rows = [torch.tensor(block.is_special) for block in blocks]
            is_included &= ~pad_sequence(rows, batch_first=True, padding_value=True)
        inputs = {name: values.to(self._model.device) for name, values in inputs.items()}
        included_rows = is_included.flatten().nonzero().squeeze(1).to(self._model.device)
        with full_precision(self._model.device), torch.inference_mode():
            start = self._read_synchronized_time()
            states = self._taps(inputs)
            self._forward_seconds += self._read_synchronized_time() - start
            included_states = {
                tap: tap_states.flatten(0, 1).index_select(0, included_rows) for tap, tap_states in states.items()
            }
            return is_included, token_ids, included_states

    def _read_synchronized_time(self) -> float:
        """Wait until the device has finished its work, and return the time in seconds."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.monotonic()

    def _find_origins(self, sources: Sequence[Source]) -> dict[str, Tensor]:
        """Compute the origins of the sums of each layer, `(d,)` by tap: means over the beginnings of all sources.

        All accumulators that are merged need the same origin, so it must not depend on batches and processes.
        """
        num_tokens, sum_by_tap = 0, dict.fromkeys(self._taps.names, torch.zeros(()))
        for source in sources:
            first_blocks = itertools.islice(self._read_limited_blocks(source, Reading()), ORIGIN_BLOCKS)
            for blocks in self._split_into_batches(first_blocks, lambda block: len(block.tokens)):
                is_included, _, states = self._compute_hidden_states(blocks)
                num_tokens += int(is_included.sum())
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
        """Settings of the accumulators of each layer."""
        return self.settings.layer_settings(self._model.config.get_text_config().hidden_size, len(self._taps.names))

    def _warn_of_missing_measures(self, console: Console | None) -> None:
        """Print a warning if the standard errors of some measures need too much memory, or a measure is left out."""
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
        """Return empty statistics for this pass."""
        return Statistics(self._model, self._taps.names, self.settings, self._origins)

    def _get_state_path(self, source_index: int, rank: int) -> Path:
        """Return the path of a rank's state file of a source."""
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
