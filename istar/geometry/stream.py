"""One pass of a model over a corpus, in which all measures of all layers are taken."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from istar.geometry.corpus import COMBINED, Packer, Source, batch, chunks, documents
from istar.geometry.layers import Layer, Sample, Settings
from istar.geometry.taps import Taps
from istar.measures.moments import full_precision

SECONDS_BETWEEN_SAVES = 300.0


@dataclass(frozen=True)
class Pass:
    """How a corpus is read.

    Attributes:
        length: tokens of a block.
        batch_size: blocks at a time.
        sample: tokens kept for TwoNN.
        seed: of the sample.
        limit: tokens of each source at most; None reads it all.
        intra: also take IntraSim, whose memory is vocabulary x width x 8 bytes for each layer.
    """

    length: int
    batch_size: int = 32
    sample: int = 5_000
    seed: int = 0
    limit: int | None = None
    intra: bool = True


class Statistics:
    """What is known of each tap.

    Attributes:
        layers: by the tap's name.
        sample: of the points.
    """

    def __init__(self, names: Sequence[str], settings: Settings, sample: int, seed: int) -> None:
        self.layers = {name: Layer(settings) for name in names}
        self.sample = Sample(names, sample, seed)

    def merge(self, other: "Statistics") -> None:
        """Add what others have seen."""
        for name, layer in self.layers.items():
            layer.merge(other.layers[name])
        self.sample.merge(other.sample)

    def measures(self) -> dict[str, dict[str, float]]:
        """Figures by tap."""
        own = {name: layer.measures() for name, layer in self.layers.items()}
        if self.sample.size:
            for name, figures in own.items():
                figures["two_nn"], figures["two_nn_error"] = self.sample.two_nn(name)
        return own

    def state_dict(self) -> dict[str, Any]:
        return {
            "layers": {name: layer.state_dict() for name, layer in self.layers.items()},
            "numbers": self.sample.numbers,
            "points": self.sample.points,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, layer in self.layers.items():
            layer.load_state_dict(state["layers"][name])
        self.sample.numbers, self.sample.points = state["numbers"], dict(state["points"])


class Stream:
    """The pass itself, which goes on where it was if it is started again with the same state file.

    Several processes of an initialized process group share the blocks; what they find is merged exactly, and the
    first one has it.

    Args:
        model: without a head, in eval mode, on its device.
        tokenizer: its own.
        how: see `Pass`.
        state: file in which a pass that is broken off is kept; None keeps nothing.
        identity: what the state must have been made with: hashes of the model and the texts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        how: Pass,
        state: Path | None = None,
        identity: str = "",
    ) -> None:
        self.how, self._state, self._identity = how, state, identity
        together = dist.is_available() and dist.is_initialized()
        self._rank, self._world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        if self._world > 1 and state is None:
            raise UserError("several processes share a pass by its state file; give one that all of them see")
        self._model = model
        self.taps = Taps(model)
        self._packer = Packer(tokenizer, how.length)
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        text = model.config.get_text_config()
        types = text.vocab_size if how.intra else 0
        self._settings = Settings(text.hidden_size, types, model.device)

    def __call__(self, found: Sequence[Source], console: Console | None = None) -> dict[str, Statistics]:
        """Statistics of each source, by its name, and of all together as `combined` where there are several.

        Raises:
            UserError: for a source that cannot be read or holds no text.
        """
        results: dict[str, Statistics] = {}
        with _Bar(console) as told:
            for number, source in enumerate(found):
                results[source.name] = self._source(source, number, told)
        if len(found) > 1:
            # Last, so that its sums, as large as those of a source, are not there while the model runs.
            results[COMBINED] = self._new()
            for source in found:
                results[COMBINED].merge(results[source.name])
        if self._state is not None and self._rank == 0:
            for path in self._state.parent.glob(f"{self._state.name}.*"):
                path.unlink()
        return results

    def _source(self, source: Source, number: int, told: Callable[[str, int], None]) -> Statistics:
        own, done, tokens = self._new(), 0, 0
        kept = self._load(number)
        if kept is not None:
            own.load_state_dict(kept["statistics"])
            done, tokens = kept["blocks"], kept["tokens"]
        saved = time.monotonic()
        for some in chunks(self._own_blocks(source, done), self.how.batch_size):
            numbers, blocks = zip(*some, strict=True)
            lengths = [len(block) for block in blocks]
            # Sources have blocks of the same numbers, but not the same draws.
            self._update(own, batch(blocks, self._pad), [(number << 32) + block for block in numbers], lengths)
            done, tokens = numbers[-1] + 1, tokens + sum(lengths)
            told(source.name, tokens)
            if self._state is not None and time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                self._save(number, own, done, tokens)
                saved = time.monotonic()
        if self._state is not None:
            self._save(number, own, done, tokens)
        self._merge_processes(number, own)
        return own

    def _own_blocks(self, source: Source, done: int) -> Iterator[tuple[int, list[int]]]:
        """Number and tokens of the blocks that are this process's and not done."""
        number = -1
        for number, block in enumerate(self._limited(self._packer(documents(source)))):
            if number >= done and number % self._world == self._rank:
                yield number, block
        if number < 0:
            # All processes see it.
            raise UserError(f"{source.path} holds no text")

    def _merge_processes(self, number: int, own: Statistics) -> None:
        """Add what the other processes have found, by their state files; the first process has it all then."""
        if self._world == 1:
            return
        dist.barrier()
        if self._rank == 0:
            for rank in range(1, self._world):
                other = self._new()
                kept = self._load(number, rank)
                assert kept is not None
                other.load_state_dict(kept["statistics"])
                own.merge(other)
        dist.barrier()

    def _update(
        self, own: Statistics, inputs: Mapping[str, Tensor], numbers: Sequence[int], lengths: Sequence[int]
    ) -> None:
        inputs = {name: values.to(self._model.device) for name, values in inputs.items()}
        real = inputs["attention_mask"].bool()
        tokens = inputs["input_ids"][real]
        with full_precision(self._model.device), torch.inference_mode():
            states = {name: state[real] for name, state in self.taps(inputs).items()}
            for name, state in states.items():
                own.layers[name].update(state, tokens)
        own.sample.update(numbers, lengths, states)

    def _limited(self, blocks: Iterator[list[int]]) -> Iterator[list[int]]:
        tokens = 0
        for block in blocks:
            if self.how.limit is not None and tokens >= self.how.limit:
                return
            tokens += len(block)
            yield block

    def _new(self) -> Statistics:
        return Statistics(self.taps.names, self._settings, self.how.sample, self.how.seed)

    def _place(self, number: int, rank: int) -> Path:
        assert self._state is not None
        return self._state.with_name(f"{self._state.name}.{number}.{rank}-{self._world}")

    def _save(self, number: int, own: Statistics, done: int, tokens: int) -> None:
        state = {"identity": self._identity, "statistics": own.state_dict(), "blocks": done, "tokens": tokens}
        with atomic_write(self._place(number, self._rank)) as file:
            torch.save(state, file)

    def _load(self, number: int, rank: int | None = None) -> dict[str, Any] | None:
        """What an earlier call or another process has left of a source; nothing if it is of another pass or damaged."""
        if self._state is None:
            return None
        place = self._place(number, self._rank if rank is None else rank)
        try:
            state = torch.load(place, map_location="cpu", weights_only=True)
        except Exception:  # none, half a file, or none of ours
            return None
        return state if isinstance(state, dict) and state.get("identity") == self._identity else None


@contextmanager
def processes() -> Iterator[int]:
    """The group of the processes that torchrun has started, and this one's rank in it; 0 where it is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    # The sums travel by files; what the group does is wait.
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def identity(*parts: object) -> str:
    """A hash of what decides about a pass; of files their content."""
    digest = hashlib.blake2b()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


class _Bar:
    """A bar with tokens per second; silent without a console."""

    def __init__(self, console: Console | None) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=console is None, transient=True)

    def __enter__(self) -> Callable[[str, int], None]:
        self._bar.__enter__()
        self._started: dict[str, tuple[Any, float, int]] = {}
        return self._tell

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(None, None, None)

    def _tell(self, source: str, tokens: int) -> None:
        if source not in self._started:
            task = self._bar.add_task(source, total=None, told="")
            self._started[source] = task, time.monotonic(), tokens
        task, since, before = self._started[source]
        rate = (tokens - before) / max(time.monotonic() - since, 1e-3)
        self._bar.update(task, told=f"{tokens:,} tokens, {rate:,.0f} a second")
