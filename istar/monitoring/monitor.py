"""`istar.Monitor`: measures the geometry of a model's hidden states while a user trains it."""

import inspect
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from istar.errors import UserError, check_at_least, check_one_of, shorten
from istar.hidden_states.call_arguments import map_tensors
from istar.hidden_states.model_modes import eval_mode, preserve_rng_states
from istar.hidden_states.offloading import find_input_device
from istar.measures.accumulator import world_size
from istar.monitoring.alarms import DEFAULT_ALARMS, Alarm, Collapse
from istar.monitoring.sampling import PointSampler
from istar.monitoring.stacked_measures import SAMPLE_MEASURES, StateSample, measure_samples
from istar.monitoring.watched_states import PassArguments, StateWatcher
from istar.runs.names import GRADIENT_NORM, PROBE, TRAINING, reading_key

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DEFAULT_MEASURES = (
    *("isoscore_unbiased", "inter_sim", "participation_ratio", "average_norm", "outlier_severity"),
    "largest_activation",
)
"""Measures of a monitor by default, by the names of the table of measures."""
MAX_PASSES = 1_000
"""Maximum number of passes in a step; after more, the reading is given up, because nobody seems to call `step`."""
_MAX_DUMP_BYTES = 2**30
"""Maximum size of the file with the points of a reading."""

_monitors: WeakKeyDictionary[nn.Module, "Monitor"] = WeakKeyDictionary()


class Reading(NamedTuple):
    """The geometry of all states at one step.

    Attributes:
        step: number of optimizer steps before the passes that were read.
        source: `training` for passes of the training, or `probe` for batches given to `Monitor.measure`.
        values: by state `points` and `sequences`, the numbers of sampled points and of their sequences; the measures by
            name; and `<measure>_error`, their standard errors.
    """

    step: int
    source: str
    values: dict[str, dict[str, float]]

    def flatten(self) -> dict[str, float]:
        """Return the values by the keys of a log, such as `geometry/layer_1/inter_sim`."""
        return {
            reading_key(self.source, state, name): value
            for state, values in self.values.items()
            for name, value in values.items()
        }


class Monitor:
    r"""Watches the geometry of a model's states during any training.

        monitor = istar.Monitor(model, every=50)
        for batch in loader:
            loss = model(**batch).loss
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            monitor.step()

    Every `every` optimizer steps, the passes of the training itself are read: at most `points` tokens of each state,
    the same in all states, chosen at random among those that are not padding. Special tokens count. Passes without
    gradients, such as those of an evaluation, are not read. The measures are those of `istar.measure` on the same
    points. Their standard errors take the sequences as independent of each other, see
    `istar.monitoring.stacked_measures.measure_samples`. A reading that fails warns, and never stops the training.

    Between readings, a model in eager mode has no hooks. A model that is compiled has an operator in its graph, and
    must be called for the first time after the monitor is created. During a step that is read, the monitor holds up to
    `3 * points * d` numbers of each state, in the dtype of the states, and d^2 numbers while it computes.

    Several processes are measured together, each with its share of the points; all of them call `step`.

    Args:
        model: a transformers model of text, bare, with a head, compiled, or inside of wrappers such as DDP, PEFT and
            sentence-transformers. With `modules`, any module.
        every: number of optimizer steps from one reading to the next; the first reading is of the first step.
        points: maximum number of points of each state in a reading.
        modules: names, patterns such as "blocks.*", or modules, whose outputs `(batch, d)` or `(batch, places, d)` are
            the states. By default, the states of `istar.measure`: `embeddings`, `layer_1` to `layer_L` before a final
            norm, and `final_norm`; and `pooled`, the embeddings of sentence-transformers.
        measures: names of measures. The default ones are `isoscore_unbiased`, `inter_sim`, `participation_ratio`,
            `average_norm`, `outlier_severity` and `largest_activation`; there are also `isoscore` and `effective_rank`.
            The effective rank takes as long as all others together. With fewer than 10 d points it is several percent
            too small, and has no error.
        alarms: list of `istar.Alarm`. The default ones, `istar.monitoring.alarms.DEFAULT_ALARMS`, warn of a collapse.
        optimizer: its steps are counted; then do not call `step` yourself.
        seed: seed of the random choice of points.
        gradients: whether to add the norm of the gradient with respect to each state, over all of its tokens. The loss
            is the one that `backward` gets, with any scaling. Compiled models have no such norm.
        dump: file (.safetensors) for the sampled points of the reading that sets off an alarm, for `istar.measure`.
        process_group: processes that are measured together; by default all.

    Attributes:
        count: number of optimizer steps so far.
        readings: all readings, in their order.

    Raises:
        UserError: if the states cannot be found, and for unknown measures, options or states of alarms.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        *,
        points: int = 4096,
        modules: Sequence[str | nn.Module] | None = None,
        measures: Sequence[str] = DEFAULT_MEASURES,
        alarms: Sequence[Alarm] = DEFAULT_ALARMS,
        optimizer: torch.optim.Optimizer | None = None,
        seed: int = 0,
        gradients: bool = False,
        dump: str | Path | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
        for name, value in (("modules", modules), ("measures", measures), ("alarms", alarms)):
            if isinstance(value, str | Alarm):
                raise UserError(f"{name} is a {type(value).__name__}; expected a list, even of one: {name}=[...]")
        check_at_least(1, "every", every)
        check_at_least(2, "points", points)
        for measure in measures:
            check_one_of("measure", measure, SAMPLE_MEASURES)
        for alarm in alarms:
            if not isinstance(alarm, Alarm):
                raise UserError(f"alarms has a {type(alarm).__name__}; expected istar.Alarm(...)")
            if alarms is not DEFAULT_ALARMS and alarm.measure not in measures:
                raise UserError(f"an alarm needs {alarm.measure}, which is not among the measures; add it to measures=")
        if dump is not None and Path(dump).suffix != ".safetensors":
            raise UserError(f"dump={dump}; expected a file with the ending .safetensors, which istar.measure reads")
        # accelerate and Lightning wrap the optimizer, and skip its steps while gradients accumulate.
        while hasattr(optimizer, "optimizer"):
            optimizer = cast(Any, optimizer).optimizer
        if not isinstance(optimizer, torch.optim.Optimizer | None):
            raise UserError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        self.every = every
        self.count = 0
        self.readings: list[Reading] = []
        self.is_closed = False
        self._model = model
        self._points = points
        self._measures = tuple(measures)
        self._has_named_modules = modules is not None
        self._alarms = [alarm for alarm in alarms if alarm.measure in measures]
        self._seed = seed
        self._has_gradients = gradients
        self._dump = None if dump is None else Path(dump)
        self._group = process_group
        self._warned_reasons: set[str] = set()
        self._fired: set[tuple[Alarm, str]] = set()  # alarms that went off, and for which state
        self._sampler = self._make_sampler()
        self._watcher = StateWatcher(model, self._receive, modules, self._receive_gradient if gradients else None)
        for alarm in self._alarms:
            alarm.check_states(self.states)
        previous = _monitors.get(self._watcher.base_model)
        if previous is not None and not previous.is_closed:
            self._warn("the model had another Monitor, which is closed now; call close() on one that is not needed")
            previous.close()
        _monitors[self._watcher.base_model] = self
        self._optimizer_hook: Any = None
        if optimizer is not None:
            self._optimizer_hook = optimizer.register_step_post_hook(self._count_optimizer_step)
        self._arm()

    @property
    def states(self) -> list[str]:
        """Names of the states that may be read, from the input to the output."""
        return list(self._watcher.names)

    def step(self) -> Reading | None:
        """Count an optimizer step. If its passes were read, measure them and look at the alarms.

        Call it once after each optimizer step, in all processes.

        Returns:
            The reading, or None if none was due or nothing was read. A reading that fails warns once and does not stop
            the training.

        Raises:
            Collapse: if an alarm with `action="stop"` goes off.
        """
        if self.is_closed:
            return None
        reading, samples = None, {}
        if self._is_due:
            samples = self._take_samples()
            reading = self._make_reading(TRAINING, samples)
            if reading is not None and self._has_named_modules and self.count == 0:
                self._warn_of_missing_states(reading)
        self.count += 1
        self._arm()
        if reading is not None:
            self._sound_alarms(samples)
        return reading

    def measure(self, batches: Iterable[Any]) -> Reading:
        """Measure the states on batches, a probe, in eval mode and without gradients; the training does not change.

        At most `points` points of each state are measured, the same ones at each step. All processes call this, each
        with its batches.

        Args:
            batches: keyword arguments of the model as mappings, its arguments as tuples, or tensors. Tensors are moved
                to the model's device.

        Returns:
            The reading, with the source `probe`. It is also added to `readings`.

        Raises:
            UserError: if the batches have no points, or if a single batch is given.
        """
        if isinstance(batches, Mapping | Tensor):
            raise UserError(f"batches is a {type(batches).__name__}; expected a list, even of one: measure([batch])")
        device = find_input_device(self._model)
        training_sampler = self._sampler
        self._sampler = self._make_sampler(is_probe=True)
        try:
            with preserve_rng_states(device), eval_mode(self._model), torch.no_grad(), self._watcher.watch_probe():
                for batch in batches:
                    _call(self._model, map_tensors(batch, lambda tensor: tensor.to(device)))
                failure = self._watcher.failure
            samples = self._sampler.take()
        finally:
            self._sampler = training_sampler
        reading = self._make_reading(PROBE, samples)
        if reading is None:
            raise UserError(
                f"the batches gave no points{f': {failure}' if failure else ''}; expected at least one batch"
            )
        return reading

    @property
    def table(self) -> "pd.DataFrame":
        """All readings as a data frame, a new one at each access: a row for each reading and state.

        The columns are `step`, `source`, `state`, `points`, `sequences`, a column for each measure, and
        `<measure>_error` for those with a standard error.
        """
        import pandas as pd

        rows = [
            {"step": reading.step, "source": reading.source, "state": state, **values}
            for reading in self.readings
            for state, values in reading.values.items()
        ]
        columns = ["step", "source", "state", "points", "sequences", *self._measures]
        columns += [GRADIENT_NORM] if self._has_gradients else []
        columns += [f"{name}_error" for name in self._measures if any(f"{name}_error" in row for row in rows)]
        return pd.DataFrame(rows, columns=columns).astype({"points": int, "sequences": int})

    def plot(self, *measures: str) -> "Figure":
        """Draw a panel for each measure, by default for all, over the steps, with a line for at most five states.

        The figure is not registered with pyplot.

        Raises:
            UserError: for an unknown measure, or if there is no reading.
        """
        from istar.monitoring.readings_output import draw_trajectory

        return draw_trajectory(self.table, measures or self._measures)

    def save(self, path: str | Path) -> None:
        """Write all readings to a CSV file, which `istar.load` and `istar compare` read as a trajectory.

        Raises:
            UserError: if the file cannot be written, or has another ending than .csv.
        """
        from istar.monitoring.readings_output import write_trajectory

        write_trajectory(self.table, type(self._model).__name__, Path(path))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the readings as plain Python objects, for a checkpoint."""
        return {"step": self.count, "readings": [[step, source, values] for step, source, values in self.readings]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the steps and readings of `state_dict`, as if the training had not been interrupted.

        Raises:
            UserError: if the state is not one that `state_dict()` returned.
        """
        if not {"step", "readings"} <= state_dict.keys():
            raise UserError("the state has no readings of a monitor; expected what state_dict() returned")
        self.count = state_dict["step"]
        self.readings = [Reading(*reading) for reading in state_dict["readings"]]
        self._fired = set()
        history = self._list_history()
        for length in range(1, len(history) + 1):
            self._find_fired(history[:length])
        self._arm(keeps_hooks=True)

    def close(self) -> None:
        """Remove all hooks; `step` then does nothing. The readings stay."""
        self._watcher.close()
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copied or saved monitor has: it is closed, and keeps the readings."""
        return {**vars(self), "is_closed": True, "_optimizer_hook": None}

    def _count_optimizer_step(self, *_: Any) -> None:
        self.step()

    def _arm(self, keeps_hooks: bool = False) -> None:
        """Forget the previous passes. Read the next ones if their step is due."""
        self._is_due = self.count % self.every == 0
        self._sampler = self._make_sampler()
        self._squared_gradient_norms: dict[str, Tensor] = {}
        self._watcher.arm(self._is_due, keeps_hooks)

    def _make_sampler(self, is_probe: bool = False) -> PointSampler:
        num_processes = world_size(self._group)
        step = 0 if is_probe else self.count  # the points of a probe are the same at each step
        return PointSampler(math.ceil(self._points / num_processes), (self._seed, step, self._rank, is_probe))

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._group) if world_size(self._group) > 1 else 0

    def _receive(self, state: str, values: Tensor, arguments: PassArguments) -> None:
        if arguments.number >= MAX_PASSES:
            message = (
                f"the model was called {MAX_PASSES} times without a step(): call monitor.step() after each "
                "optimizer step, or create it with optimizer="
            )
            self._warn(message)
            raise UserError(message)
        self._sampler.add(state, values, arguments)

    def _receive_gradient(self, state: str, gradient: Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.promote_types(gradient.dtype, torch.float32))
        squares = self._squared_gradient_norms
        squares[state] = squares.get(state, 0) + norm.double().square()

    def _take_samples(self) -> dict[str, StateSample]:
        """Return the samples of the passes since the last step; none if one could not be read."""
        if not self._watcher.failure:
            try:
                return self._sampler.take()
            except Exception as error:  # such as passes whose states have different widths
                self._watcher.failure = shorten(error) or type(error).__name__
        failure = self._watcher.failure
        self._warn(f"the passes of step {self.count} were not read: {failure}", failure)
        return {}

    def _make_reading(self, source: str, samples: Mapping[str, StateSample]) -> Reading | None:
        """Measure the samples of all processes together, and add the reading; None if there is nothing to measure."""
        devices = (sample.points.device for sample in samples.values())
        device = next(devices, None) or find_input_device(self._model)
        try:
            values = measure_samples(samples, self._measures, self.states, self._group, device)
            if self._has_gradients and source == TRAINING:
                self._add_gradient_norms(values, device)
        except Exception as error:
            reason = shorten(error) or type(error).__name__
            self._warn(f"the reading of step {self.count} failed: {reason}", reason)
            return None
        if not values:
            if source == TRAINING and not self._watcher.failure:
                self._warn(
                    f"nothing was read at step {self.count}: the model was not called with gradients since the last "
                    "step(); or it uses the compiled code of another model of its class; or it replays CUDA graphs",
                    "nothing was read",
                )
            return None
        reading = Reading(self.count, source, values)
        self.readings.append(reading)
        return reading

    def _warn_of_missing_states(self, reading: Reading) -> None:
        missing = [state for state in self.states if state not in reading.values]
        if missing:
            self._warn(f"{', '.join(missing)}: not called in step {reading.step}, so not in its reading")

    def _add_gradient_norms(self, values: Mapping[str, dict[str, float]], device: torch.device) -> None:
        local_squares = [torch.as_tensor(self._squared_gradient_norms.get(state, 0.0)) for state in values]
        squares = torch.stack([square.to(device, torch.float64) for square in local_squares])
        if world_size(self._group) > 1:
            dist.all_reduce(squares, group=self._group)
        for state, square in zip(values, squares.tolist(), strict=True):
            values[state][GRADIENT_NORM] = math.sqrt(square) if square > 0 else math.nan

    def _list_history(self) -> list[dict[str, dict[str, float]]]:
        return [reading.values for reading in self.readings if reading.source == TRAINING]

    def _find_fired(self, history: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[Alarm, list[str]]:
        """Return the alarms that go off at the last reading, each with the states for which it did not before."""
        fired = {}
        for alarm in self._alarms:
            states = [state for state in alarm.find_states(history) if (alarm, state) not in self._fired]
            self._fired.update((alarm, state) for state in states)
            if states:
                fired[alarm] = states
        return fired

    def _sound_alarms(self, samples: Mapping[str, StateSample]) -> None:
        history = self._list_history()
        fired = self._find_fired(history)
        stops = []
        suffix = f"; its points are in {self._dump}" if fired and self._write_dump(samples) else ""
        for alarm, states in fired.items():
            message = alarm.describe(states, history, self.readings[-1].step) + suffix
            if callable(alarm.action):
                alarm.action(message)
            elif alarm.action == "stop":
                stops.append(message)
            else:
                self._warn(message)
        if stops:
            raise Collapse(stops[0])

    def _write_dump(self, samples: Mapping[str, StateSample]) -> bool:
        """Write the points of a reading for `istar.measure`, and return whether that was done."""
        if self._dump is None or not samples:
            return False
        num_bytes = sum(sample.points.nbytes for sample in samples.values())
        if num_bytes > _MAX_DUMP_BYTES:
            self._warn(f"{self._dump} was not written: the points have {num_bytes / 2**30:.1f} GiB; lower points=")
            return False
        from safetensors.torch import save

        from istar.files.writing import atomic_write

        try:
            with atomic_write(self._dump) as file:
                file.write(save({state: sample.points.contiguous().cpu() for state, sample in samples.items()}))
        except (OSError, UserError) as error:
            self._warn(f"{self._dump} was not written: {shorten(error)}")
            return False
        return True

    def _warn(self, message: str, reason: str = "") -> None:
        """Warn on the first process, and only once for the same reason, which is by default the whole message."""
        if (reason or message) not in self._warned_reasons and self._rank == 0:
            warnings.warn(message, UserWarning, stacklevel=4)
        self._warned_reasons.add(reason or message)


def _call(model: nn.Module, batch: Any) -> None:
    """Call a model with keyword arguments from a mapping, arguments from a list or tuple, or else the batch itself."""
    args, kwargs = [batch], {}
    if isinstance(batch, list | tuple):
        args = list(batch)
    elif isinstance(batch, Mapping):
        with suppress(TypeError):  # a model of sentence-transformers takes the mapping itself
            inspect.signature(model.forward).bind(**batch)
            args, kwargs = [], dict(batch)
    model(*args, **kwargs)
