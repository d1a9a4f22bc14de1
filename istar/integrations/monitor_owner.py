"""What the monitor callbacks of all trainers share: the options of their monitor, its steps and its probe."""

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
"""Number of batches from the beginning of the evaluation set, or batches for the model, or None for no probe."""
_NUM_MEASURES_IN_LINE = 3
_ERRORS_OF_CALLS = (TypeError, KeyError, ValueError, AttributeError)
"""What a model raises if a batch is not what it takes."""


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
    """Base class of the monitor callbacks.

    Attributes:
        monitor: the monitor of the latest training or evaluation. It is closed at the end, and its readings stay.
    """

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
        self.monitor, self._watched_model = Monitor(model, **self.options), model
        return self.monitor

    def close_monitor(self) -> None:
        """Remove the hooks from the model, if there are any."""
        if self.monitor is not None:
            self.monitor.close()

    def take_step(self) -> tuple[Reading | None, str]:
        """Return the reading that an optimizer step completes, if any, and the message of a collapse or ""."""
        assert self.monitor is not None
        try:
            return self.monitor.step(), ""
        except Collapse as collapse:
            return self.monitor.readings[-1], str(collapse)

    def measure_probe(self, model: nn.Module, batches: Iterable[Any]) -> Reading:
        """Measure batches with the monitor of the training, or outside of one with a monitor that reads nothing else.

        Raises:
            UserError: if the model cannot be called with the batches.
        """
        if self.monitor is None or self._watched_model is not model:
            self.start_monitor(model)
            self.close_monitor()
        assert self.monitor is not None
        try:
            return self.monitor.measure(batches)
        except _ERRORS_OF_CALLS as error:
            raise UserError(
                f"{type(model).__name__} does not take the batches of the probe: {type(error).__name__}: "
                f"{shorten(error)}; give it batches with its arguments: probe=[...]"
            ) from error

    def list_probe_batches(self, loader: Any) -> Iterable[Any]:
        """Return the batches of the probe. Those of the evaluation set are read without side effects on its loader."""
        if isinstance(self.probe, int):
            return islice(iterate_in_new_order(loader, seed=0), self.probe)
        assert self.probe is not None
        return self.probe

    def name_values(self, reading: Reading, separator: str) -> dict[str, float]:
        """Return the measures of a reading by names such as `layer_6_inter_sim`, and their means over the layers."""
        named = {
            f"{state}{separator}{measure}": values[measure]
            for state, values in reading.values.items()
            for measure in self.measures
        }
        layers = [values for state, values in reading.values.items() if state.startswith("layer_")]
        means = {name: sum(values[name] for values in layers) / len(layers) for name in self.measures if layers}
        return named | means


def describe_reading(reading: Reading, measures: Sequence[str]) -> str:
    """Return a line with the ranges of the first measures over the states.

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
