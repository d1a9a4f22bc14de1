"""Figures of single layers, of embedding matrices, and of differences between models, as numbers."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from istar.drawing.plot import (
    Line,
    Panel,
    Plot,
    evenly_spaced,
    make_projection_panels,
    make_spectrum_line,
    need_log_axis,
)
from istar.geometry.collect.measures_file import NORMAL_QUANTILE, Measurements
from istar.geometry.show import compare
from istar.geometry.show.compare import SUMMARY_MEASURES, MeasuredModel
from istar.measures.catalogue import FIGURES, MEASURES, Measure, find_measure

if TYPE_CHECKING:
    from istar.geometry.collect.mean_states import Similarity

_BINNED = ("positions", "frequency", "scales")
"""Figures of measures that have several numbers for each layer."""
LAYER_MEASURES = [
    measure
    for measure in MEASURES
    if measure.subject == "layers"
    and measure.name != "points"
    and measure.figure not in _BINNED
    and not measure.name.endswith("_error")
]
"""Measures with one number for each layer."""
MEASURE_TITLES = {measure.name: measure.title for measure in LAYER_MEASURES}
"""Titles of the measures of a layer, in the order of the tables."""
FORM_TITLES = {"raw": "raw", "centered": "centered", "post_processed": "post-processed"}
"""Titles of the forms of an embedding matrix."""
_MAX_LABEL = 32
"""Most characters of the label of a text or a cloud in a legend."""
STATE_ROUNDING, MATRIX_ROUNDING = 1e-4, 1e-6
"""Singular values below these fractions of the largest are rounding errors. Hidden states, the first, have a float32
scatter matrix; embedding matrices, the second, are float32 points."""


def find_missing_measures(plot: Plot) -> list[str]:
    """Return the titles of the measures that are missing in a plot of `plot_measures`: no layer has a finite value."""
    titles = {", ".join(filter(None, (panel.y_label, line.variant))) for panel in plot.panels for line in panel.lines}
    measures = [measure for measure in LAYER_MEASURES if measure.figure == plot.name]
    return [measure.title for measure in measures if measure.title not in titles]


def make_measure_panel(measure: Measure, lines: Sequence[Line], width: int, title: str = "") -> Panel:
    """Return a panel of a measure, with the bounds and the scale of the y axis that suit it."""
    values = [y for line in lines for y in line.y]
    bounds = None
    if measure.bounds is not None:
        low, high = measure.bounds
        # Cosines that are not negative need no axis from -1 on.
        high = max([width, *filter(math.isfinite, values)]) if high == "d" else high  # a width of 0 is not known
        bounds = (low if any(y < 0 for y in values) else max(low, 0), float(high))
    low_ends = [y - error for line in lines if line.y_error for y, error in zip(line.y, line.y_error, strict=True)]
    # A logarithmic axis cannot show an interval that reaches 0.
    log_y = measure.log and need_log_axis(values) and not any(low_end <= 0 for low_end in low_ends)
    return replace(Panel(measure.title, lines, title, y_bounds=bounds), log_y=log_y)


def name_tap(tap: str) -> str:
    """Return the name of a place of a model with spaces, such as `layer 3`."""
    return tap.replace("_", " ")


def shorten_labels(names: Sequence[str]) -> list[str]:
    """Return different labels of texts or clouds for a legend, on one line and not too long."""
    labels: list[str] = []
    for name in names:
        label = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split()) or "text"
        label = label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"
        # matplotlib leaves labels with a leading underscore out of the legend.
        label = f" {label}" if label.startswith("_") else label
        labels.append(f"{label} ({len(labels) + 1})" if label in labels else label)
    return labels


@dataclass(frozen=True)
class States:
    """The hidden states at one place of a model, which are a line of the figures below."""

    label: str
    measurements: Measurements
    tap: str

    def find(self, field_name: str) -> Any:
        """Return the entry of a field of the measurements for these states over all texts together, or None."""
        values = getattr(self.measurements, field_name).get(self.measurements.combined_key, {})
        return values.get(self.tap)


def _choose_states(models: Sequence[MeasuredModel]) -> list[States]:
    if models and not models[0].is_ordered:
        several = len(models) > 1
        return [
            States(f"{model.label}, {name}" if several else name, model.measurements, cloud)
            for model in models
            for cloud, name in zip(model.layers, shorten_labels(list(model.layers)), strict=True)
        ]
    if len(models) == 1:
        measured = models[0].measurements
        return [States(name_tap(tap), measured, tap) for tap in evenly_spaced(list(measured.all_texts))]
    return [States(model.label, model.measurements, model.last_layer) for model in models]


def plot_states(models: Sequence[MeasuredModel], ordered: bool = False) -> list[Plot]:
    """Return the figures of some layers of the only model, or of the last layers of several models.

    They are the spectra, the intrinsic dimension by scale, the norms, and the measures by position and frequency.
    With `ordered`, several models are checkpoints, and a colour scale shows their order.
    """
    states = _choose_states(models)
    words = models[0].words if models else compare.TEXTS["words"]["tokens"]
    has_order = ordered or (len(models) == 1 and models[0].is_ordered)
    options: dict[str, Any] = {"log_x": True, "ordered": has_order, "reference_label": "", "words": words}
    if not has_order:
        options["labels"] = tuple(state.label for state in states)
    spectra, scales, norms = [], [], []
    for form in ("raw", "centered"):
        lines = []
        for state in states:
            root = math.sqrt(state.measurements.all_texts[state.tap]["points"])
            values = [value / root for value in (state.find("spectra") or {}).get(form, [])]
            lines.append(make_spectrum_line(state.label, values, STATE_ROUNDING))
        if any(line.y for line in lines):
            spectra.append(Panel("root mean square", [line for line in lines if line.y], FORM_TITLES[form]))
    for state in states:
        if gride := state.find("gride"):
            half_widths = tuple(NORMAL_QUANTILE * scale["error"] for scale in gride)
            xs, ys = tuple(scale["n1"] for scale in gride), tuple(scale["value"] for scale in gride)
            scales.append(Line(state.label, xs, ys, y_error=half_widths))
        if (histogram := state.find("norms")) and histogram["counts"]:
            norms.append(_make_norm_line(state.label, histogram))
    scale_panels = [Panel("Gride dimension", scales)] if scales else []
    norm_panels = [Panel(f"{words['units']}, percent", norms)] if norms else []
    return [
        make_figure("spectra", spectra, "number of the singular value", **options, log_y=True, share_axes=True),
        make_figure("scales", scale_panels, "number n of the nearer neighbour", **options),
        make_figure("state_norms", norm_panels, "norm", "ridges", **options),
        make_figure("positions", _make_bin_panels(states, "by_position"), "position in the input", **options),
        make_figure(
            "frequency", _make_bin_panels(states, "by_frequency"), "occurrences of the token's type", **options
        ),
    ]


def make_figure(
    name: str,
    panels: Sequence[Panel],
    x_label: str,
    kind: str = "line",
    words: Mapping[str, object] | None = None,
    **options: Any,
) -> Plot:
    """Return a plot with the title and the caption of the table of measures, with `words` for the names in braces."""
    figure = FIGURES[name]
    title, caption, x_label = (text.format_map(words or {}) for text in (figure.title, figure.caption, x_label))
    return Plot(name, title, caption, kind, x_label, tuple(panels), **options)


def _make_norm_line(label: str, histogram: Mapping[str, Sequence[float]]) -> Line:
    num_tokens = sum(histogram["counts"]) + sum(histogram.get("outside", ()))
    middles = [math.sqrt(low * high) for low, high in itertools.pairwise(histogram["edges"])]
    # An empty bin on either side lets the line start and end at zero.
    factor = histogram["edges"][1] / histogram["edges"][0]
    xs = (middles[0] / factor, *middles, middles[-1] * factor)
    return Line(label, xs, (0.0, *(100 * count / num_tokens for count in histogram["counts"]), 0.0))


def _make_bin_panels(states: Sequence[States], field_name: str) -> list[Panel]:
    """Return panels of norm and InterSim of the tokens by bin. A bin is at its smallest value on the x axis."""
    panels = []
    for column, name in (("norm", "average_norm"), ("inter_sim", "inter_sim")):
        lines = []
        for state in states:
            bins = state.find(field_name) or {"first": [], column: []}
            if any(map(math.isfinite, bins[column])):
                lines.append(Line(state.label, tuple(bins["first"]), tuple(bins[column])))
        if lines:
            panels.append(make_measure_panel(find_measure(name), lines, width=0))
    return panels


def plot_matrices(measured: Measurements) -> list[Plot]:
    """Return the figures of a model's embedding matrices: singular values, projections and norms of the rows."""
    spectra, projections, norms, explanation = [], [], [], ""
    for side, forms in measured.matrices.items():
        lines = [
            make_spectrum_line(FORM_TITLES[form], measures["singular_values"], MATRIX_ROUNDING)
            for form, measures in forms.items()
        ]
        if lines := [line for line in lines if line.y]:
            spectra.append(Panel("singular value", lines, f"{side} embeddings"))
    for side, rows in measured.rows.items():
        panels, explanation = make_projection_panels(rows, rows.get("counts"), f"{side} embeddings")
        projections += panels
        edges, counts = rows["norms"]["edges"], rows["norms"]["counts"]
        width = edges[1] - edges[0]
        # An empty bin on either side lets the line start and end at zero.
        middles = tuple(low + width / 2 for low in (edges[0] - width, *edges))
        norms.append(Panel("rows", [Line("rows", middles, (0.0, *counts, 0.0))], f"{side} embeddings"))
    projection = make_figure("projection", projections, "first direction", "scatter", ordered=True)
    return [
        make_figure("matrix_spectra", spectra, "number of the singular value", log_x=True, log_y=True, share_axes=True),
        replace(projection, caption=f"{projection.caption} {explanation}."),
        make_figure("row_norms", norms, "norm", "histogram"),
    ]


def plot_differences(models: Sequence[MeasuredModel]) -> Plot:
    """Return a plot of the differences of each model's last layer from the first model, with 95% intervals."""
    first, *others = models
    differences = list(filter(itemgetter("is_last"), compare.compute_all_differences(models)))
    clouds = [] if first.is_ordered else list(dict.fromkeys(row["layer"] for row in differences))
    panels = []
    for name in SUMMARY_MEASURES:
        # A point at 0 puts the first model into the legend, which then names all models.
        lines = [Line(first.label, (0.0,), (0.0,))] if first.is_ordered else []
        for position, model in enumerate(others, start=1):
            rows = [row for row in differences if (row["model"], row["measure"]) == (model.label, name)]
            # The models of a cloud are next to each other.
            xs = [clouds.index(row["layer"]) + position / (2 * len(models)) if clouds else position for row in rows]
            half_widths = tuple((row["high"] - row["low"]) / 2 for row in rows)
            values = tuple(row["difference"] for row in rows)
            if rows:
                lines.append(Line(model.label, tuple(map(float, xs)), values, y_error=half_widths))
        if len(lines) > first.is_ordered:
            panel = Panel(f"difference of {MEASURE_TITLES[name]}", lines)
            panels.append(replace(panel, horizontal_line=(0.0, "no difference")))
    no_ticks = dict.fromkeys(map(float, range(len(models))), "")
    ticks = {index + 0.25: cloud for index, cloud in enumerate(clouds)} or no_ticks
    labels = tuple(model.label for model in models)
    words = {**first.words, "first": first.label}
    return make_figure("differences", panels, "", "points", words, x_names=ticks, labels=labels, reference_label="")


def plot_similarity(similarities: Sequence["Similarity"], words: Mapping[str, str]) -> Plot:
    """Return heatmaps of CKA between the layers of two models, with a panel for each pair of models."""
    panels = []
    for similarity in similarities:
        rows = zip(similarity.first_taps, similarity.values, strict=True)
        lines = [Line(name_tap(tap), tuple(map(float, range(len(values)))), values) for tap, values in rows]
        panel = Panel(f"{similarity.first} (rows)", lines, f"{similarity.second} (columns)")
        panels.append(replace(panel, column_names=tuple(map(name_tap, similarity.second_taps))))
    count = f"{similarities[0].documents:,}" if similarities else "some"
    return make_figure("similarity", panels, "", "heatmap", {**words, "count": count})
