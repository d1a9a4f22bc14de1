"""A single pass of a model over a corpus that accumulates all measures of all layers."""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import UserError
from istar.files import atomic_write
from istar.geometry.corpus import COMBINED, Packer, Source, batch
from istar.geometry.layers import Layer, Sample
from istar.geometry.taps import Taps
from istar.measures.moments import full_precision
from istar.tasks.documents import read_documents
from istar.tasks.tokenizing import chunks

SECONDS_BETWEEN_SAVES = 300.0


@dataclass(frozen=True)
class Pass:
    """Settings of a pass over a corpus."""

    length: int  # tokens of a block, including special tokens
    batch_size: int = 32  # blocks in a batch
    sample: int = 5_000  # number of tokens to keep for TwoNN
    seed: int = 0  # seed of that sample
    limit: int | None = None  # a source is read until it has at least so many tokens; None reads it to its end
    intra: bool = True  # whether to compute IntraSim, which needs vocabulary x width x 8 bytes for each layer


class Statistics:
    """Accumulators over a source: `layers`, by the names of the taps, and `sample`, a random sample of the tokens."""

    def __init__(self, model: PreTrainedModel, taps: Sequence[str], settings: Pass) -> None:
        config = model.config.get_text_config()
        vocabulary_size = config.vocab_size if settings.intra else 0
        self.layers = {tap: Layer(config.hidden_size, vocabulary_size, model.device) for tap in taps}
        self.sample = Sample(taps, settings.sample, settings.seed)

    def merge(self, other: "Statistics") -> None:
        """Add the tokens that other accumulators have seen."""
        for name, layer in self.layers.items():
            layer.merge(other.layers[name])
        self.sample.merge(other.sample)

    def measures(self) -> dict[str, dict[str, float]]:
        """Compute all measures by tap; TwoNN is left out if the size of the sample is 0."""
        measures = {name: layer.measures() for name, layer in self.layers.items()}
        if self.sample.size:
            for name, figures in measures.items():
                figures["two_nn"], figures["two_nn_error"] = self.sample.two_nn(name)
        return measures

    def state_dict(self) -> dict[str, Any]:
        """Return all accumulated tensors."""
        return {
            "layers": {name: layer.state_dict() for name, layer in self.layers.items()},
            "numbers": self.sample.numbers,
            "points": self.sample.points,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the tensors that `state_dict` returned."""
        for name, layer in self.layers.items():
            layer.load_state_dict(state["layers"][name])
        self.sample.numbers, self.sample.points = state["numbers"], dict(state["points"])


class Stream:
    """Runs a pass over texts, and resumes an interrupted pass from its state files.

    The processes of an initialized process group share the blocks. Their accumulators are merged exactly, and rank 0
    returns the result.

    Args:
        model: model without a head, in eval mode, on its device.
        tokenizer: tokenizer of the model.
        settings: see `Pass`.
        state: path whose name the state files start with; None saves no state.
        identity: hash of everything that the result depends on. A state file with another identity is ignored.

    Raises:
        UserError: if there are several processes and no state files, through which they exchange accumulators.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Pass,
        state: Path | None = None,
        identity: str = "",
    ) -> None:
        self.settings, self._state, self._identity = settings, state, identity
        is_distributed = dist.is_available() and dist.is_initialized()
        self._rank, self._world = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        if self._world > 1 and state is None:
            raise UserError("several processes need a state file to share a pass; give one in a folder that all see")
        self._model, self._taps = model, Taps(model)
        self._packer = Packer(tokenizer, settings.length)
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def __call__(self, sources: Sequence[Source], console: Console | None = None) -> dict[str, Statistics]:
        """Read the sources; returns the statistics by their names and, if there are several, of all as `combined`.

        Raises:
            UserError: if a source cannot be read or holds no text.
        """
        results: dict[str, Statistics] = {}
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
        disable = console is None
        with Progress(*columns, TimeElapsedColumn(), console=console, disable=disable, transient=True) as progress:
            for number, source in enumerate(sources):
                results[source.name] = self._read_source(source, number, progress)
        if len(sources) > 1:
            # `combined` is as large as a source's statistics, so it is allocated after the model has run.
            combined = self._new_statistics()
            for statistics in results.values():
                combined.merge(statistics)
            results[COMBINED] = combined
        if self._state is not None and self._rank == 0:
            for path in self._state.parent.glob(f"{self._state.name}.*"):
                path.unlink()
        return results

    def _read_source(self, source: Source, number: int, progress: Progress) -> Statistics:
        """Accumulate this rank's blocks of a source, save the state every few minutes, and merge the ranks."""
        statistics, done, tokens = self._new_statistics(), 0, 0
        saved = self._load(number, self._rank)
        if saved is not None:
            statistics.load_state_dict(saved["statistics"])
            done, tokens = saved["blocks"], saved["tokens"]
        last_save = time.monotonic()
        task = progress.add_task(source.name, total=None, status="")
        for chunk in chunks(self._rank_blocks(source, done), self.settings.batch_size):
            numbers, blocks = zip(*chunk, strict=True)
            lengths = [len(block) for block in blocks]
            # The source's number makes the samples of different sources independent.
            sample_keys = [(number << 32) + block for block in numbers]
            self._update(statistics, batch(blocks, self._pad), sample_keys, lengths)
            done, tokens = numbers[-1] + 1, tokens + sum(lengths)
            progress.advance(task, sum(lengths))
            tokens_per_second = progress.tasks[task].speed or 0
            progress.update(task, status=f"{tokens:,} tokens, {tokens_per_second:,.0f} per second")
            if time.monotonic() - last_save > SECONDS_BETWEEN_SAVES:
                self._save(number, statistics, done, tokens)
                last_save = time.monotonic()
        self._save(number, statistics, done, tokens)
        if self._world > 1:
            self._merge_ranks(number, statistics)
        return statistics

    def _rank_blocks(self, source: Source, done: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the number and the tokens of this rank's blocks, from block number `done` to the limit of tokens."""
        tokens = 0
        for number, block in enumerate(self._packer(read_documents(source.path))):
            if self.settings.limit is not None and tokens >= self.settings.limit:
                return
            tokens += len(block)
            if number >= done and number % self._world == self._rank:
                yield number, block
        if not tokens:
            # Every rank reads all blocks, so that all ranks raise this.
            raise UserError(f"{source.path} holds no text; expected at least one line that is not empty")

    def _merge_ranks(self, number: int, statistics: Statistics) -> None:
        """Merge the statistics of all ranks into those of rank 0, through their state files."""
        dist.barrier()
        if self._rank == 0:
            for rank in range(1, self._world):
                saved = self._load(number, rank)
                assert saved is not None
                other = self._new_statistics()
                other.load_state_dict(saved["statistics"])
                statistics.merge(other)
        dist.barrier()

    def _update(
        self, statistics: Statistics, inputs: Mapping[str, Tensor], sample_keys: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Run the model on a batch and add its hidden states to the statistics."""
        inputs = {name: values.to(self._model.device) for name, values in inputs.items()}
        mask = inputs["attention_mask"].bool()
        tokens = inputs["input_ids"][mask]
        with full_precision(self._model.device), torch.inference_mode():
            states = {name: state[mask] for name, state in self._taps(inputs).items()}
            for name, state in states.items():
                statistics.layers[name].update(state, tokens)
        statistics.sample.update(sample_keys, lengths, states)

    def _new_statistics(self) -> Statistics:
        return Statistics(self._model, self._taps.names, self.settings)

    def _state_file(self, number: int, rank: int) -> Path:
        assert self._state is not None
        return self._state.with_name(f"{self._state.name}.{number}.{rank}-{self._world}")

    def _save(self, number: int, statistics: Statistics, done: int, tokens: int) -> None:
        """Save this rank's state of a source, unless the pass saves no state."""
        if self._state is not None:
            state = {"identity": self._identity, "statistics": statistics.state_dict(), "blocks": done}
            with atomic_write(self._state_file(number, self._rank)) as file:
                torch.save({**state, "tokens": tokens}, file)

    def _load(self, number: int, rank: int) -> dict[str, Any] | None:
        """Load a rank's state of a source; None if there is none, it is damaged, or it belongs to another pass."""
        if self._state is None:
            return None
        try:
            state = torch.load(self._state_file(number, rank), map_location="cpu", weights_only=True)
        except Exception:  # a missing, truncated or foreign file can raise any exception
            return None
        return state if isinstance(state, dict) and state.get("identity") == self._identity else None


@contextmanager
def processes() -> Iterator[int]:
    """Join the process group that torchrun describes for as long as the block runs; yields this process's rank.

    Without torchrun there is no group, and the rank is 0.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    # The statistics travel through files. The group serves for barriers alone, so gloo is enough for GPUs too.
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def identity(*parts: object) -> str:
    """Hash the values that the result of a pass depends on; of a path, the content of the file."""
    digest = hashlib.blake2b()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()
