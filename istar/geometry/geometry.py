"""What was measured, as an object for notebooks: tables, findings, figures, verdicts and files."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from istar.errors import UserError, check_names
from istar.geometry import checks
from istar.geometry.checks import Bounds, Violation
from istar.geometry.collect.measures_file import (
    EXAMPLES_FILE,
    JSON_FILE,
    TRAJECTORY_FILE,
    Measurements,
    read_measurement,
)
from istar.geometry.show import axis_figures, compare_page, findings, model_figures, terminal_tables
from istar.geometry.show.compare import SUMMARY_MEASURES, MeasuredModel, describe_points, name_measured
from istar.geometry.show.measured_training import MeasuredTraining, read_trainings, summarize_last_reading
from istar.geometry.show.model_tables import number_with_interval
from istar.measures.catalogue import MEASURES, find_measure, suggest_measure
from istar.models.saved_checkpoints import ModelArgument
from istar.runs.names import GRADIENT_NORM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from istar.geometry.collect.mean_states import Examples

_COLUMNS = [*(measure.name for measure in MEASURES if measure.subject == "layers"), GRADIENT_NORM]


@dataclass(frozen=True, eq=False, repr=False)
class Geometry:
    """What was measured: a row for each state, a column for each measure. It does not change.

    `istar.load` reads one from a folder of `istar measure`.

    Args:
        measurements: the measures and their settings.
        examples: mean states of the first examples, for CKA; None if they were not kept.
        training: the measures at the checkpoints of a training, of which `measurements` are the last ones.
    """

    measurements: Measurements
    examples: Examples | None = None
    training: MeasuredTraining | None = None

    @property
    def label(self) -> str:
        """Short name of what was measured."""
        return name_measured(self.measurements)

    @cached_property
    def _model(self) -> MeasuredModel:
        return MeasuredModel(self.label, self.measurements)

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states, from the input to the output, or of the clouds."""
        return tuple(self.measurements.all_texts)

    @cached_property
    def _table(self) -> pd.DataFrame:
        if self.training is not None:
            rows = self.training.table.dropna(subset="source").astype({"step": int})
            rows = rows.rename(columns={"source": "text", "layer": "state"})
        else:
            sources = self.measurements.sources
            rows = pd.DataFrame(
                {"text": text, "state": state, **measures}
                for text, measures_by_state in sources.items()
                for state, measures in measures_by_state.items()
            )
        keys = ["step"] if self.training is not None else []
        keys += ["text", "state"] if rows["text"].nunique() > 1 else ["state"]
        names = dict.fromkeys([*_COLUMNS, *(f"{name}_error" for name in _COLUMNS)])
        columns = sorted(
            (name for name in names if name in rows), key=lambda name: name.endswith("_error")
        )  # the sort is stable
        return rows.set_index(keys)[columns]

    @property
    def table(self) -> pd.DataFrame:
        """The measures as a data frame, a new one at each access.

        The index is `state`; with several texts `text` and `state`, and of a training `step` comes first. The columns
        are the measures in the order of the table of measures, and then `<measure>_error` for those with a standard
        error. `points` is the number of points. Undefined values are NaN.
        """
        return self._table.copy()

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """At most five sentences on what is unusual, as the page begins with."""
        trainings = [] if self.training is None else [self.training]
        models = [] if trainings and not trainings[0].checkpoints else [self._model]
        return tuple(findings.describe_findings(models, trainings))

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides the values: the model or the source of points, its dtype and device, the seed and so on."""
        name = "source" if self.measurements.kind == "points" else "model"
        model = {key: value for key, value in self.measurements.model.items() if key != "name" and value is not None}
        return MappingProxyType({name: self.measurements.model["name"], **model, **self.measurements.settings})

    @cached_property
    def spectra(self) -> Mapping[str, np.ndarray]:
        """Singular values of the centered points by state, `(d,)`, float64, descending, over all texts together."""
        spectra = self.measurements.spectra.get(self.measurements.combined_key, {})
        arrays = {state: np.array(forms["centered"]) for state, forms in spectra.items()}
        for array in arrays.values():
            array.setflags(write=False)
        return MappingProxyType(arrays)

    @property
    def gaps(self) -> pd.DataFrame:
        """Distance and cosine of the means of each two clouds, and with `pairs=True` their alignment, a row a pair."""
        return pd.DataFrame(self.measurements.gaps)

    def __getitem__(self, measure: str) -> pd.Series:
        """Return the values of a measure by state. An unknown name is a KeyError that suggests a similar one."""
        if measure not in self._table:
            hint = suggest_measure(measure, map(str, self._table)) or "; expected a column of geometry.table"
            raise KeyError(f"{measure!r} was not measured{hint}")
        return self._table[measure].copy()

    def interval(self, measure: str) -> pd.DataFrame:
        """Return the columns `value`, `low` and `high` by state: the 95% interval of a measure.

        Low and high are NaN without a standard error. An unknown measure is a KeyError, as for `geometry[measure]`.
        """
        self[measure]
        return checks.make_intervals(self._table, measure, self._model.num_groups)

    def check(
        self,
        bounds: Mapping[str, Bounds] | Mapping[str, Mapping[str, Bounds]] = MappingProxyType({}),
        /,
        *,
        states: str | Sequence[str] = "*",
        **more: Bounds,
    ) -> list[Violation]:
        """Return the measures that are beyond their bounds.

        A bound trips only if the whole 95% interval is beyond it; without a standard error, if the value is. An
        undefined value always trips. `str(violation)` is a line that says so.

        >>> istar.load("geometry").check(isoscore=(0.05, None), states="layer_*")  # doctest: +SKIP

        Args:
            bounds: smallest and largest value by measure, with None for no bound; or the result of
                `istar.geometry.checks.read_checks`, which has them by pattern of states.
            states: names of states, or patterns in which `*` stands for any characters.
            more: bounds by measure.

        Raises:
            UserError: if a measure was not measured, no state matches a pattern, or bounds are not a pair of numbers.
        """
        by_pattern: Any = bounds
        if not any(isinstance(value, Mapping) for value in bounds.values()):
            patterns = [states] if isinstance(states, str) else states
            by_pattern = {pattern: {**bounds, **more} for pattern in patterns}
        elif more or states != "*":
            raise UserError("bounds by state do not go with other bounds or states=; expected one of both")
        return list(checks.find_violations(self._table, self._model.num_groups, by_pattern))

    def plot(self, *measures: str) -> Figure:
        """Draw a panel for each measure with its 95% intervals, as on the page: lines over layers or bars for clouds.

        By default, the measures are those that compare models. `"spectrum"`, alone, draws the singular values. The
        figure is not registered with pyplot, so that a notebook shows it once.

        Raises:
            UserError: for an unknown measure, one without a finite value, or `"spectrum"` with others.
        """
        return draw_measures([self._model], measures, [] if self.training is None else [self.training])

    def save(self, folder: str | Path, *, examples: bool = False) -> Path:
        """Write what `istar measure` writes: index.html with its figures and tables, measures.csv and measures.json.

        Each file is replaced atomically.

        Args:
            folder: folder, which is created if needed. Files of other origin in it stay.
            examples: whether to write the mean states of the examples, too, which `istar.compare` needs for CKA.

        Returns:
            The path of the page.

        Raises:
            UserError: if the folder has other measures or cannot be written, or `examples` were not kept.
        """
        if self.training is not None:
            raise UserError("the measures of a training are in the folder that they were loaded from; copy it")
        if examples and self.examples is None:
            raise UserError("no mean states of examples were kept; expected examples=False, or to measure again")
        content = self.examples.to_bytes() if examples and self.examples is not None else None
        return compare_page.write_model(self.measurements, Path(folder), examples=content)

    def __repr__(self) -> str:
        return terminal_tables.to_plain_text(terminal_tables.make_model_table(self.label, self.measurements))

    def _repr_html_(self) -> str:
        headers = terminal_tables.choose_main_measures(self.measurements)
        rows = [
            [state, *(number_with_interval(measures, name, self._model.num_groups).text for name in headers)]
            for state, measures in self.measurements.all_texts.items()
        ]
        frame = pd.DataFrame(rows, columns=[self._model.words["state"], *headers.values()])
        return make_html(
            terminal_tables.make_title(self._model), frame, [*self.findings, *describe_points(self.measurements)]
        )


def draw_measures(
    models: Sequence[MeasuredModel], measures: Sequence[str], trainings: Sequence[MeasuredTraining] = ()
) -> Figure:
    """Draw measures of models, or of trainings over their steps; see `Geometry.plot`."""
    from istar.drawing import rendering  # loads matplotlib

    check_names("plot", measures)
    if "spectrum" in measures:
        if len(measures) > 1:
            raise UserError("spectrum has another axis than the other measures; expected it alone")
        [spectra] = [plot for plot in model_figures.plot_states(models) if plot.name == "spectra"]
        if not spectra.panels:
            raise UserError("there is no spectrum with finite values; expected another measure")
        return rendering.draw(spectra)
    axis = axis_figures.make_step_axis(trainings) if trainings else axis_figures.make_layer_axis(models)
    width = max(model.measurements.width for model in models)
    panels = []
    has_few = any(training.is_monitored for training in trainings)
    defaults = model_figures.MEASURE_TITLES if has_few else SUMMARY_MEASURES
    for name in measures or [name for name in defaults if name in axis.points]:
        panel = axis_figures.make_axis_panels(axis, find_measure(name), width)
        if not panel and measures:
            raise UserError(f"{name} has no finite value; expected another measure")
        panels += panel
    if not panels:
        raise UserError("no measure has a finite value; expected points that differ from each other")
    return rendering.draw(axis.make_plot("isotropy", panels))


def make_html(title: str, frame: pd.DataFrame, notes: Iterable[str]) -> str:
    """Return a table with a title, and sentences below it, as HTML for a notebook."""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<p>{html.escape(title)}</p>{frame.to_html(index=False, border=0)}<ul>{items}</ul>"


def load(path: str | Path) -> Geometry:
    """Return what `Geometry.save` or `istar measure` wrote to a folder, or `Monitor.save` to a file.

    A folder with the checkpoints of a training, and the file of a monitor, give a table with the index `step`, `state`.
    `istar.load_runs` reads training runs.

    >>> import istar
    >>> geometry = istar.load("geometry")  # doctest: +SKIP
    >>> geometry.table.loc["layer_3", "isoscore"]  # doctest: +SKIP

    Args:
        path: the folder or its measures.json, or the CSV file of a monitor.

    Raises:
        UserError: if there are no measures, a file is damaged, or it has another version.
    """
    folder = Path(path).parent if Path(path).name == JSON_FILE else Path(path)
    if folder.is_file() and folder.suffix != ".csv":
        raise UserError(
            f"{folder} is a file; expected a folder of istar measure or Geometry.save, or a CSV file of a monitor; "
            "istar.measure reads files of vectors"
        )
    if folder.suffix == ".csv" or ((folder / TRAJECTORY_FILE).is_file() and not (folder / JSON_FILE).is_file()):
        [training] = read_trainings([ModelArgument("", str(folder))])
        if training.is_monitored:
            return Geometry(summarize_last_reading(training), training=training)
        if not training.checkpoints:
            raise UserError(f"{folder} lacks the folders of its first or last checkpoint; measure the training again")
        return Geometry(training.checkpoints[-1].measurements, training=training)
    measurements = read_measurement(folder / JSON_FILE)
    if not (folder / EXAMPLES_FILE).is_file():
        return Geometry(measurements)
    from istar.geometry.collect.mean_states import read_examples  # loads torch

    return Geometry(measurements, read_examples(folder / EXAMPLES_FILE))
