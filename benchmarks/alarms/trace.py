"""Trajectories of hidden states: what is read during a training, as rows of a CSV file."""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.measures import FourthMoments, average_cosine, effective_rank
from istar.measures.isoscores import isoscore_unbiased


class Reading(NamedTuple):
    """The measures of one hidden state before an optimizer step. They are NaN where a measure is not defined."""

    step: int  # optimizer steps before the reading
    state: str
    points: int
    inter_sim: float
    participation_ratio: float
    isoscore: float
    effective_rank: float


class Trace:
    """Measures the hidden states of a model in training mode every `every` optimizer steps.

    Hooks are registered for the due steps only. Passes in evaluation mode are ignored.

    Args:
        model: the trained model.
        every: optimizer steps between two readings; the first reading is of the first step.
        points: the highest number of points of a state that are measured, drawn at random.
        modules: names or patterns, such as "blocks.*", of modules that output states `(batch, d)` or
            `(batch, tokens, d)`. By default, those of a transformers model: its embeddings, its layers, and its
            last hidden state.
        seed: seed of the random points.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 10,
        *,
        points: int = 4096,
        modules: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.readings: list[Reading] = []
        self._model, self._every, self._points = model, every, points
        self._modules = None if modules is None else list(_find_modules(model, modules))
        self._generator = torch.Generator().manual_seed(seed)
        self._count = 0
        self._mask: Tensor | None = None
        self._rows: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._handles: list[Any] = []
        self._register()

    def step(self) -> None:
        """Count an optimizer step. If states were read before it, measure them."""
        for state, parts in self._rows.items():
            if not parts:
                continue
            rows = self._sample(torch.cat(parts))
            self.readings.append(Reading(self._count, state, len(rows), *measure(rows)))
        self.close()
        self._count += 1
        if self._count % self._every == 0:
            self._register()

    def close(self) -> None:
        """Remove the hooks and forget what they have read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._rows.clear()

    def _register(self) -> None:
        self._handles.append(self._model.register_forward_pre_hook(self._keep_mask, with_kwargs=True))
        if self._modules is not None:
            for name, module in self._modules:
                self._rows[name] = []  # states are measured in the order of the modules, not of the passes
                self._handles.append(module.register_forward_hook(self._make_hook(name)))
            return
        base: Any = getattr(self._model, getattr(self._model, "base_model_prefix", ""), self._model)
        layers = next(
            module
            for module in base.modules()
            if isinstance(module, nn.ModuleList) and len(module) == base.config.num_hidden_layers
        )
        self._handles.append(layers[0].register_forward_pre_hook(self._read_input, with_kwargs=True))
        for number, layer in enumerate(layers, 1):
            self._handles.append(layer.register_forward_hook(self._make_hook(f"layer_{number}")))
        self._handles.append(base.register_forward_hook(self._make_hook("last_hidden_state")))

    def _keep_mask(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._mask = named.get("attention_mask")

    def _read_input(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._keep("layer_0", arguments[0] if arguments else named["hidden_states"])

    def _make_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, arguments, output: self._keep(name, output)

    def _keep(self, name: str, output: Any) -> None:
        if not self._model.training:
            return
        state: Tensor = output if isinstance(output, Tensor) else output[0]
        mask = self._mask
        if mask is not None and mask.shape == state.shape[:-1]:
            rows = state.detach()[mask.bool()]
        else:
            rows = state.detach().flatten(0, -2)
        self._rows[name].append(self._sample(rows).clone())

    def _sample(self, rows: Tensor) -> Tensor:
        if len(rows) <= self._points:
            return rows
        return rows[torch.randperm(len(rows), generator=self._generator)[: self._points]]


def _find_modules(model: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose names match the patterns, in the order of the patterns."""
    for pattern in patterns:
        expression = re.escape(pattern).replace(r"\*", "[^.]+")
        found = [(name, module) for name, module in model.named_modules() if re.fullmatch(expression, name)]
        if not found:
            raise ValueError(f"no module of {type(model).__name__} is named {pattern}")
        yield from found


def measure(rows: Tensor) -> tuple[float, float, float, float]:
    """Return InterSim, participation ratio, unbiased IsoScore and effective rank of points `(n, d)`."""
    try:
        inter_sim = average_cosine(rows).item()
    except UserError:
        inter_sim = torch.nan
    try:
        moments = FourthMoments(rows.shape[1]).update(rows.double())
        isoscore = isoscore_unbiased(moments).item()
        rank = effective_rank(torch.linalg.eigvalsh(moments.covariance()).clamp(min=0).sqrt()).item()
    except (UserError, torch.linalg.LinAlgError):
        isoscore = rank = torch.nan
    return inter_sim, 1 + (rows.shape[1] - 1) * isoscore, isoscore, rank


def write_readings(path: Path, readings: Sequence[Reading]) -> None:
    """Write readings to a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Reading._fields)
        writer.writerows(readings)


def read_readings(path: Path) -> list[Reading]:
    """Return the readings of a CSV file."""
    with path.open(newline="") as file:
        return [
            Reading(
                int(row["step"]), row["state"], int(row["points"]), *(float(row[name]) for name in Reading._fields[3:])
            )
            for row in csv.DictReader(file)
        ]
