"""Base class of the callbacks that watch a training of Lightning or transformers with an `istar.Monitor`."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, Unpack

from torch import nn

from istar.errors import UserError, check_at_least, check_one_of, shorten
from istar.integrations.loaders import iterate_in_new_order
from istar.monitoring.alarms import Alarm, Collapse
from istar.monitoring.monitor import DEFAULT_MEASURES, Monitor, Reading

Probe = int | Iterable[Any] | None
"""Batches that each evaluation measures: a number of the first ones of its data, or a list; None for no probe."""
_NUM_MEASURES_IN_LINE = 3


class MonitorOptions(TypedDict, total=False):
    """Arguments of `istar.Monitor` that a callback takes. The trainer counts the steps and knows the processes."""

    every: int
    points: int
    modules: Sequence[str | nn.Module]
    measures: Sequence[str]
    alarms: Sequence[Alarm]
    seed: int
    gradients: bool
    dump: str | Path


class MonitorOwner:
    """Creates a monitor for each training, counts its steps, and measures its probe."""

    def __init__(self, probe: Probe, **options: Unpack[MonitorOptions]) -> None:
        for name in options:
            check_one_of("option", name, tuple(MonitorOptions.__annotations__))
        if isinstance(probe, int):
            check_at_least(1, "probe", probe)
        elif isinstance(probe, Iterator):
            raise UserError("probe= is an iterator, which is empty after the first evaluation; give it as a list")
        self.probe = probe
        self.options = options
        self.measures = tuple(options.get("measures", DEFAULT_MEASURES))
        self.monitor: Monitor | None = None
        self._watched_model: nn.Module | None = None

    def start_monitor(self, model: nn.Module) -> Monitor:
        """Close the previous monitor, and return a new one of this model."""
        self.close_monitor()
        self.monitor = Monitor(model, **self.options)
        self._watched_model = model
        return self.monitor

    def close_monitor(self) -> None:
        """Remove the hooks from the model; the readings stay."""
        if self.monitor is not None:
            self.monitor.close()

    def take_step(self) -> tuple[Reading | None, str]:
        """Count an optimizer step. Return its reading, if there is one, and the message of a collapse or ""."""
        assert self.monitor is not None
        try:
            return self.monitor.step(), ""
        except Collapse as collapse:
            return self.monitor.readings[-1], str(collapse)

    def measure_probe(self, model: nn.Module, batches: Iterable[Any]) -> Reading:
        """Measure batches with the monitor of the training or, outside a training, with a new one.

        Raises:
            UserError: if the model cannot be called with the batches.
        """
        monitor = self.monitor
        if monitor is None or self._watched_model is not model:
            monitor = self.start_monitor(model)
            monitor.close()  # a closed monitor can still measure a probe
        try:
            return monitor.measure(batches)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise UserError(
                f"{type(model).__name__} does not take the batches of the probe: {type(error).__name__}: "
                f"{shorten(error)}; give it batches with its arguments: probe=[...]"
            ) from error

    def list_probe_batches(self, loader: Any) -> Iterable[Any]:
        """Return the batches of the probe. Reading the first ones of a loader does not change its next iteration."""
        if isinstance(self.probe, int):
            return islice(iterate_in_new_order(loader, seed=0), self.probe)
        assert self.probe is not None
        return self.probe

    def name_values(self, reading: Reading, separator: str) -> dict[str, float]:
        """Return the measures by names such as `layer_6_inter_sim`, and their means over the layers as `inter_sim`."""
        named = {
            f"{state}{separator}{measure}": values[measure]
            for state, values in reading.values.items()
            for measure in self.measures
        }
        layers = [values for state, values in reading.values.items() if state.startswith("layer_")]
        means = {name: sum(values[name] for values in layers) / len(layers) for name in self.measures if layers}
        return named | means


def describe_reading(reading: Reading, measures: Sequence[str]) -> str:
    """Return a line with the ranges of the first three measures over the states.

    >>> values = {"layer_1": {"inter_sim": 0.12}, "layer_2": {"inter_sim": 0.31}}
    >>> describe_reading(Reading(50, "training", values), ["inter_sim"])
    'step 50: inter_sim 0.12 to 0.31 over 2 states'
    """
    ranges = []
    for measure in measures[:_NUM_MEASURES_IN_LINE]:
        numbers = [values[measure] for values in reading.values.values()]
        finite = [number for number in numbers if math.isfinite(number)] or [math.nan]
        ranges.append(f"{measure} {min(finite):.3g} to {max(finite):.3g}")
    num_states = len(reading.values)
    source = "" if reading.source == "training" else f", {reading.source}"
    return f"step {reading.step}{source}: {', '.join(ranges)} over {num_states} state{'s' if num_states != 1 else ''}"
