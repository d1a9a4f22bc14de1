"""Figures over the layers of a model, the relative depth of several models, or the steps of trainings, as numbers.

All pages have these figures. The table of measures has titles and captions, and names the figure of each measure.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from istar.drawing.plot import Line, Panel, Plot, are_log_spaced, evenly_spaced
from istar.geometry.collect.measures_file import interval_half_width
from istar.geometry.show import model_figures
from istar.geometry.show.compare import MeasuredModel, make_layer_rows
from istar.geometry.show.measured_training import MeasuredTraining
from istar.measures.catalogue import FIGURES, Measure, find_measure
from istar.runs.names import COMBINED, FINAL_NORM, POOLED

_FINAL_NORM_DEPTH = 1.15
"""Position of the final normalization on the axis of the relative depth, beyond the last layer."""
_MAX_TICKS = 6
"""Most numbered ticks on an axis of layers."""
_MAX_NAME = 6
"""Most characters of the name of a state on a tick."""


@dataclass(frozen=True)
class Axis:
    """What a page has on the x axes of its figures, and the points of its lines."""

    name: str  # such as `layer`, for titles
    # A row for each point, with its measures and their errors: `panel` is the title of its panel, `line` the label of
    # its line, `segment` tells apart the parts of a line that are not connected, and `groups` is the number of groups
    # of documents of its errors.
    points: pd.DataFrame
    tick_names: Mapping[float, str] = field(default_factory=dict)
    log: bool = False
    kind: str = "line"  # kind of the plots over this axis
    ordered: bool = False  # whether the lines have an order, which a colour scale shows
    labels: tuple[str, ...] = ()  # labels that have the same colours in all figures
    reference: str = ""  # label of the line that is drawn in black

    @property
    def label(self) -> str:
        """Label of the x axis."""
        return f"{self.name} (logarithmic)" if self.log else self.name

    def make_plot(self, name: str, panels: Sequence[Panel], caption: str = "", **options: Any) -> Plot:
        """Return a line plot over this axis, with the title of the table of measures."""
        options = {
            "x_names": self.tick_names,
            "log_x": self.log,
            "ordered": self.ordered,
            "labels": self.labels,
            "reference_label": self.reference,
            **options,
        }
        figure = FIGURES[name]
        title = f"{figure.title} by {self.name}"
        return Plot(name, title, caption or figure.caption, self.kind, self.label, tuple(panels), **options)


def make_layer_axis(models: Sequence[MeasuredModel]) -> Axis:
    """Return the axis of the layers: of one model with a line for each text, of several over their relative depth.

    Clouds, which have no order, are bars; several models have bars next to each other.
    """
    if not models[0].is_ordered:
        return _make_cloud_axis(models)
    if len(models) == 1:
        [model] = models
        text_labels = model_figures.shorten_labels(list(model.measurements.sources))
        points = [
            {"panel": "", "line": label, "segment": 0, "x": float(index), "groups": model.num_groups, **measures}
            for label, taps in zip(text_labels, model.measurements.sources.values(), strict=True)
            for index, measures in enumerate(taps.values())
        ]
        ticks = _make_tick_names(list(model.measurements.all_texts))
        return Axis(model.words["state"], pd.DataFrame(points), ticks, reference=COMBINED)
    frame = pd.DataFrame(make_layer_rows(models))
    depths, groups = frame["relative_depth"], {model.label: model.num_groups for model in models}
    frame = frame.assign(panel="", line=frame["model"], groups=frame["model"].map(groups))
    frame = frame.assign(segment=depths.isna().astype(int), x=depths.fillna(_FINAL_NORM_DEPTH))
    ticks = {0.0: "0", 0.25: "0.25", 0.5: "0.5", 0.75: "0.75", 1.0: "1", _FINAL_NORM_DEPTH: "final\nnorm"}
    labels = tuple(model.label for model in models)
    return Axis("relative depth", frame, ticks if frame["segment"].any() else {}, labels=labels)


def _make_cloud_axis(models: Sequence[MeasuredModel]) -> Axis:
    clouds = list(dict.fromkeys(cloud for model in models for cloud in model.measurements.all_texts))
    names = model_figures.shorten_labels(clouds)
    is_single = len(models) == 1  # the legend names its clouds
    points = []
    for model in models:
        for cloud, measures in model.measurements.all_texts.items():
            index = clouds.index(cloud)
            place = {"line": names[index], "x": 0.0} if is_single else {"line": model.label, "x": float(index)}
            points.append({"panel": "", "segment": 0, "groups": model.num_groups, **place, **measures})
    ticks = {0.0: ""} if is_single else {float(index): name for index, name in enumerate(names)}
    labels = tuple(names) if is_single else tuple(model.label for model in models)
    return Axis("cloud", pd.DataFrame(points), ticks, kind="columns", labels=labels)


def make_step_axis(trainings: Sequence[MeasuredTraining]) -> Axis:
    """Return the axis of the steps: of one training with a line for some layers, of several with one for each."""
    first = trainings[0]
    if len(trainings) == 1:
        layers = evenly_spaced(first.states, kept=[POOLED])
        lines = [("", model_figures.name_tap(layer), first, layer) for layer in layers]
    else:
        lines = [("last layer", training.label, training, training.last_layer) for training in trainings]
        lines += [("final normalization", training.label, training, FINAL_NORM) for training in trainings]
        lines += [("pooled", training.label, training, POOLED) for training in trainings]
    rows = [
        training.select_layer(layer).assign(panel=panel, line=line, groups=training.num_groups, segment=0)
        for panel, line, training, layer in lines
    ]
    points = pd.concat(rows).rename(columns={"step": "x"})
    if len(trainings) > 1:
        is_log = any(are_log_spaced(training.steps) for training in trainings)
        return Axis("step", points, log=is_log, labels=tuple(training.label for training in trainings))
    name = "step" if first.has_steps else "checkpoint, in the given order"
    return Axis(name, points, log=first.has_steps and are_log_spaced(first.steps), ordered=True)


def plot_measures(axis: Axis, width: int) -> list[Plot]:
    """Return the figures of the measures of layers, with a panel for each measure of the figure.

    `width` is the largest number of dimensions of the models.
    """
    plots = []
    for name in FIGURES:
        measures = [measure for measure in model_figures.LAYER_MEASURES if measure.figure == name]
        if not measures:
            continue
        twins = [measure for measure in measures if _is_with_twin(axis, measure)]
        panels_by_measure = {
            measure: make_axis_panels(axis, measure, width, [twin for twin in twins if twin.twin == measure.name])
            for measure in measures
            if measure not in twins
        }
        shown = [measure for measure in measures if measure in twins or panels_by_measure[measure]] or measures
        caption = " ".join(measure.meaning for measure in shown if measure.meaning)
        panels = list(itertools.chain.from_iterable(panels_by_measure.values()))
        share_y = FIGURES[name].same_y
        plots.append(axis.make_plot(name, panels, caption, share_y=share_y, share_y_by_label=True))
    return plots


def make_axis_panels(axis: Axis, measure: Measure, width: int, twins: Sequence[Measure] = ()) -> list[Panel]:
    """Return the panels of a measure over an axis: one, or one for each panel of the axis; [] without finite values.

    The panels also have the `twins`, as dashed lines. `width` is as for `plot_measures`.
    """
    panels = []
    for title, points in axis.points.groupby("panel", sort=False):
        lines = _make_lines(points, measure.name, measure.needs_inter_sim)
        for twin in twins:
            variant = twin.title.removeprefix(f"{measure.title}, ")
            lines += [replace(line, variant=variant) for line in _make_lines(points, twin.name)]
        if lines:
            panels.append(model_figures.make_measure_panel(measure, lines, width, str(title)))
    return panels


def _is_with_twin(axis: Axis, measure: Measure) -> bool:
    """Return whether the panel of its twin also shows a measure; bars cannot be dashed."""
    is_measured = axis.points.reindex(columns=[measure.name, measure.twin]).notna().any()
    return bool(measure.twin) and axis.kind == "line" and bool(is_measured.all())


def _make_lines(points: pd.DataFrame, name: str, needs_inter_sim: float | None = None) -> list[Line]:
    lines: list[Line] = []
    if name not in points:
        return lines
    for (label, _), rows in points.groupby(["line", "segment"], sort=False):
        values = rows[name].astype(float)
        if needs_inter_sim is not None:
            inter_sims = rows.get("inter_sim", pd.Series(math.nan, rows.index))
            values = values.where(inter_sims >= needs_inter_sim)
        errors = rows.get(f"{name}_error", pd.Series(math.nan, rows.index))
        half_widths = [
            interval_half_width(name, error, groups) for error, groups in zip(errors, rows["groups"], strict=True)
        ]
        if np.isfinite(values).any():
            y_error = tuple(half_widths) if np.isfinite(half_widths).any() else ()
            lines.append(Line(str(label), tuple(rows["x"].astype(float)), tuple(values), y_error=y_error))
    return lines


def _make_tick_names(taps: Sequence[str]) -> dict[float, str]:
    """Return tick labels by position: the embeddings, the final normalization, and at most six layer numbers.

    Other states than the layers of a transformer have their names if these are short, or are numbered from 1.
    """
    if taps[0] != "embeddings":
        labels = taps if max(map(len, taps)) <= _MAX_NAME else list(map(str, range(1, len(taps) + 1)))
        return {float(index): labels[index] for index in range(0, len(taps), math.ceil(len(taps) / _MAX_TICKS))}
    end = len(taps) - 1 if taps[-1] == FINAL_NORM else len(taps)
    step = math.ceil((end - 1) / _MAX_TICKS) or 1
    # The label of the final normalization needs the space of a step.
    last_layer = end - step if taps[-1] == FINAL_NORM else end - 1
    names: dict[float, str] = {0: "emb."}
    for layer in range(step, last_layer + 1, step):
        names[layer] = str(layer)
    if taps[-1] == FINAL_NORM:
        names[end] = "final\nnorm"
    return names


def plot_parameters(models: Sequence[MeasuredModel], trainings: Sequence[MeasuredTraining], axis: Axis) -> list[Plot]:
    """Return the figures of I(W) and of the final normalization: bars for models, lines for trainings."""
    partition = []
    for matrix, signs in itertools.product(("input", "output"), ("as_computed", "both")):
        measure = find_measure(f"partition_isotropy_{signs}", "matrices")
        if trainings:
            lines = _make_parameter_lines(trainings, f"{matrix}_embeddings", measure.name)
        else:
            forms = {model.label: model.measurements.matrices.get(matrix, {}) for model in models}
            lines = [
                _make_bars(label, [measures[measure.name] for measures in measures_by_form.values()])
                for label, measures_by_form in forms.items()
                if measures_by_form
            ]
        if lines:
            partition.append(model_figures.make_measure_panel(measure, lines, 0, f"{matrix} embeddings"))
    options: dict[str, Any] = {"labels": axis.labels, "reference_label": ""}
    if trainings:
        final_norm = [
            Panel("norm", lines, name)
            for name in ("gain", "bias")
            if (lines := _make_parameter_lines(trainings, "final_norm_parameters", f"layer_norm_{name}"))
        ]
        return [
            axis.make_plot("partition", partition, share_y_by_label=True, ordered=False, **options),
            axis.make_plot("final_norm", final_norm, ordered=False, **options),
        ]
    norms = [(model.label, model.measurements.final_norm) for model in models]
    lines = [_make_bars(label, [norm["gain"], norm["bias"]]) for label, norm in norms if norm is not None]
    final_norm = [Panel("norm", lines)] if lines else []
    form_ticks = {float(position): form for position, form in enumerate(model_figures.FORM_TITLES.values())}
    return [
        model_figures.make_figure("partition", partition, "", "columns", x_names=form_ticks, **options),
        model_figures.make_figure(
            "final_norm", final_norm, "", "columns", x_names={0.0: "gain", 1.0: "bias"}, **options
        ),
    ]


def _make_bars(label: str, values: Sequence[float]) -> Line:
    return Line(label, tuple(map(float, range(len(values)))), tuple(values))


def _make_parameter_lines(trainings: Sequence[MeasuredTraining], layer: str, column: str) -> list[Line]:
    lines = [
        Line(training.label, tuple(map(float, training.steps)), tuple(training.values_by_step(layer, column)))
        for training in trainings
    ]
    return [line for line in lines if any(map(math.isfinite, line.y))]
