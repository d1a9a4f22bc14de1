"""Plots of a model's geometry, as numbers that `istar.drawing.rendering` renders."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from istar.drawing.plot import Line, Panel, Plot
from istar.drawing.spacing import evenly_spaced, need_log_axis
from istar.geometry.collect.intervals import NORMAL_QUANTILE, interval_half_width
from istar.geometry.collect.layer_outputs import FINAL_NORM
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.show.spheres import NUM_POINTS, Sphere
from istar.inputs.corpus import COMBINED
from istar.measures.catalogue import MEASURES

MEASURE_TITLES = {
    measure.name: measure.title
    for measure in MEASURES
    if measure.subject == "layers"
    and measure.name != "tokens"
    and measure.figure not in ("positions", "frequency", "scales")
    and not measure.name.endswith("_error")
}
"""Titles of the measures of a layer, in the order of the tables."""
FORM_TITLES = {"raw": "raw", "centered": "centered", "post_processed": "post-processed"}
"""Titles of the forms of an embedding matrix."""
_MAX_LABEL, _MAX_TICKS = 32, 6
"""Most characters of the label of a text in a legend, and most numbered ticks on an axis of layers."""
_LAYER_PLOTS = {
    "isotropy": ("isoscore", "isoscore_unbiased", "isoscore_by_sentence"),
    "directions": ("inter_sim", "intra_sim", "adjusted_intra_sim"),
    "dimension": ("two_nn", "effective_rank", "participation_ratio"),
    "spectrum": ("rank_me", "nesum", "alpha_req", "alpha_req_r_squared"),
    "norms": ("average_norm", "norm_ratio"),
    "outliers": ("outlier_dimensions", "largest_kurtosis", "token_kurtosis", "largest_activation_ratio"),
}
"""Measures of the plots by layer, by the plot's name."""
_TITLES_AND_CAPTIONS = {
    "isotropy": (
        "IsoScore by layer",
        "How evenly the variance is spread over all directions: 1 if it is equal in all, 0 if it is in a single one. "
        "The mean has no influence. IsoScore is biased towards 0 for few tokens. The unbiased form corrects this for "
        "tokens that are independent of each other, that by sentence also for tokens that depend on their sentence.",
    ),
    "directions": (
        "InterSim and IntraSim by layer",
        "InterSim is the mean cosine of the states of any two tokens. IntraSim is the mean cosine of two occurrences "
        "of the same token type, averaged over types. If both are near 1, all states share one direction; if IntraSim "
        "alone is, context changes the states little. Their difference is IntraSim adjusted for anisotropy: what the "
        "occurrences of a type have in common beyond what all tokens have.",
    ),
    "dimension": (
        "Intrinsic dimension and rank by layer",
        "TwoNN estimates the local dimension of the cloud from one occurrence of each token type, or of a sample of "
        "the types. Effective rank and participation ratio measure how many directions the "
        "centered spectrum spans; the first is sensitive to small singular values, the second to the largest alone.",
    ),
    "spectrum": (
        "Shape of the spectrum by layer",
        "RankMe is the effective rank of the spectrum without centering, so that a common direction lowers it. NESum "
        "is the sum of the variances of the principal components divided by the largest. alpha-ReQ is the exponent of "
        "a power law fitted to the variances of components 11 to 100: at 1 they decay as 1/n, and larger values decay "
        "faster. It means something only if R² of the fit is near 1.",
    ),
    "scales": (
        "Intrinsic dimension by scale",
        "Gride estimates the intrinsic dimension from the distances to neighbours n and 2n, so that larger n look at "
        "the cloud from farther away; n = 1 is close to TwoNN. A plateau is a dimension that does not depend on the "
        "scale. From at most 2,000 token types of all texts together; the estimates are too low above about 10.",
    ),
    "single_dimensions": (
        "Single dimensions",
        "What single dimensions of the basis contribute, over all texts together. InterSim of a sample of token types "
        "is shown as it is, without the dimensions that contribute most to it, and after z-scoring each dimension. If "
        "it falls far, a few dimensions carry the common direction. The share of InterSim is shown where InterSim is "
        "at least 0.05; it exceeds 1 if other dimensions contribute negative values. The top dimensions of each panel "
        "are those with the largest share of it.",
    ),
    "outliers": (
        "Outliers by layer",
        "Outlier dimensions have a mean above 5 median deviations. The kurtosis of a dimension, over the tokens, is "
        "large if few tokens have very large values there; the kurtosis of a token, over its dimensions, is large if "
        "few dimensions stand out in it. Both are excess kurtoses, 0 for normal values. The last panel is the largest "
        "magnitude of any activation divided by the median magnitude.",
    ),
    "positions": (
        "Norm and InterSim by position",
        "Average norm and InterSim of the tokens by their position in the model's input, counted from 0, in bins that "
        "begin at 0, 1, 2, 4, 8 and so on. All texts together. In many decoders the first token has a far larger norm "
        "than the others, and equal first tokens have equal states there.",
    ),
    "frequency": (
        "Norm and InterSim by frequency",
        "Average norm and InterSim of the tokens by how often their type occurs in the texts, in bins that begin at 1, "
        "2, 4, 8 and so on. All texts together. Bins of few frequent types are dominated by the similarity of "
        "occurrences of one type.",
    ),
    "norms": (
        "Norms by layer",
        "Average norm of the states, and the norm of their mean divided by that average: 0 for a cloud around the "
        "origin, 1 if all states are equal.",
    ),
    "spectra": (
        "Singular values of the hidden states",
        "Singular values of each layer's states, raw and centered, on the same logarithmic axes. A first value far "
        "above the others that disappears in the centered spectrum is a shift of the cloud, not a cone. The last value "
        "drops where the cloud has lost a dimension: centering takes one from n points in n or more dimensions, and a "
        "LayerNorm takes one from all states. Values below 1e-4 of the largest are rounding errors and are left out. "
        "All texts together.",
    ),
    "state_norms": (
        "Norms of the hidden states",
        "Percentage of the tokens by the norm of their state, in bins of a fortieth of a decade; each curve is scaled "
        "to its own maximum. All texts together.",
    ),
    "partition": (
        "I(W) of the embedding matrix",
        "Smallest over largest value of the partition function at the eigenvectors c of the matrix; 1 is isotropic. "
        "Signs as computed: c as the eigensolver returns it, the papers' convention, which depends on the solver's "
        "build. Both signs: over c and -c, which is reproducible and meant for comparisons.",
    ),
    "matrix_spectra": (
        "Singular values of the embedding matrix",
        "Singular values of the matrix raw, centered, and without its first components (all-but-the-top).",
    ),
    "projection": (
        "The embedding matrix in two dimensions",
        "Rows along the first two singular directions of the whole matrix, raw and centered. The dashed lines cross "
        "at the origin.",
    ),
    "row_norms": (
        "Norms of the embedding matrix's rows",
        "Number of rows by norm, in forty bins of equal width. Rows that training has hardly changed, such as those of "
        "unused tokens, often form a separate peak.",
    ),
    "spheres": (
        "How the measures differ: a sphere, and the same sphere moved",
        f"{NUM_POINTS} points on a unit sphere in three dimensions, around the origin and around another point. "
        "Moving the sphere turns average cosine and I(W) from isotropic to anisotropic. IsoScore depends on the "
        "covariance alone and does not change. The functions are those that measured the model.",
    ),
}
"""Title and caption of each plot, by the plot's name."""
STATE_ROUNDING, MATRIX_ROUNDING = 1e-4, 1e-6
"""Singular values below these fractions of the largest are rounding errors. The first is for hidden states, which have
a float32 scatter matrix, the second for embedding matrices, which are float32 points."""


_MEASURES_WITH_LOG_AXIS = ("average_norm", "largest_activation_ratio")
"""Measures of positive numbers of any size, which get a logarithmic axis if it is needed to tell small ones apart."""
_COUNTS_OF_DIMENSIONS = ("effective_rank", "participation_ratio", "rank_me", "nesum")
"""Measures whose range is from 1 to the number of dimensions."""
_SAMPLE_COSINE_LABELS = {
    "sample_inter_sim": "all dimensions",
    "sample_inter_sim_without_top_1": "without the top dimension",
    "sample_inter_sim_without_top_5": "without the top 5 dimensions",
    "sample_inter_sim_standardized": "z-scored",
}
"""Labels of the lines with InterSim of the sample in the figure of single dimensions, by measure."""
_SHARE_LABELS = {
    "InterSim": {"top_1_cosine_share": "top dimension", "top_5_cosine_share": "top 5 dimensions"},
    "the variance": {"largest_variance_share": "top dimension", "top_5_variance_share": "top 5 dimensions"},
}
"""Labels of the lines with shares in the figure of single dimensions: by what they are shares of, then by measure."""
_MIN_INTER_SIM_FOR_SHARES = 0.05
"""Shares of a smaller InterSim mean nothing."""


def make_panel(
    y_label: str,
    lines: Sequence[Line],
    title: str = "",
    fixed_settings: str = "",
    with_origin: bool = False,
    y_bounds: tuple[float, float] | None = None,
) -> Panel:
    """Return a panel that belongs to no task and model; `with_origin` adds dashed lines that cross at the origin."""
    origin = (0.0, "origin") if with_origin else None
    return Panel(
        "",
        title,
        tuple(lines),
        fixed_settings,
        y_label,
        horizontal_line=origin,
        vertical_line=origin,
        y_bounds=y_bounds,
    )


def column_header(name: str) -> str:
    """Return the title of a measure with a line break, as the header of a column."""
    title = MEASURE_TITLES.get(name, name.replace("_", " "))
    for separator in (", ", " - ", " "):
        if separator in title:
            return title.replace(separator, f"{separator.rstrip()}\n", 1)
    return title


def measure_bounds(name: str, measurements: Iterable[Measurements]) -> tuple[float, float] | None:
    """Return the range of a measure that is limited by the number of dimensions, or None for any other measure.

    With several models, it is the range for the largest number of dimensions.
    """
    if name not in (*_COUNTS_OF_DIMENSIONS, "outlier_dimensions"):
        return None
    spectra = [forms for measured in measurements for taps in measured.spectra.values() for forms in taps.values()]
    widths = [len(forms["raw"]) for forms in spectra]
    return (0 if name == "outlier_dimensions" else 1, max(widths)) if widths else None


def make_measure_panel(name: str, lines: Sequence[Line], measurements: Iterable[Measurements]) -> Panel:
    """Return a panel of one measure of some models, with the bounds and the scale of the y axis that suit it."""
    panel = make_panel(MEASURE_TITLES[name], lines, y_bounds=measure_bounds(name, measurements))
    values = [y for line in lines for y in line.y]
    interval_ends = [y - error for line in lines if line.y_error for y, error in zip(line.y, line.y_error, strict=True)]
    # An interval that reaches 0 has no place on a logarithmic axis.
    reaches_zero = any(end <= 0 for end in interval_ends)
    return replace(panel, log_y=name in _MEASURES_WITH_LOG_AXIS and need_log_axis(values) and not reaches_zero)


def plot_layers(measured: Measurements) -> list[Plot]:
    """Return the plots of the measures by layer, with one line for each text."""
    tick_names = _make_tick_names(list(measured.all_texts))
    plots = []
    for name, measure_names in _LAYER_PLOTS.items():
        panels = [
            make_measure_panel(measure_name, lines, [measured])
            for measure_name in measure_names
            if (lines := _make_layer_lines(measured, measure_name))
        ]
        plots.append(
            Plot(
                name,
                *_TITLES_AND_CAPTIONS[name],
                "line",
                "layer",
                tuple(panels),
                share_y=name == "isotropy",
                x_names=tick_names,
                reference_label=COMBINED,
            )
        )
    return plots


def find_missing_measures(plot: Plot) -> list[str]:
    """Return the titles of the measures that are missing in a plot of `plot_layers`: no layer has a finite value."""
    plotted_titles = {panel.y_label for panel in plot.panels}
    return [
        MEASURE_TITLES[measure_name]
        for measure_name in _LAYER_PLOTS.get(plot.name, ())
        if MEASURE_TITLES[measure_name] not in plotted_titles
    ]


def format_tap_name(tap: str) -> str:
    """Return the name of a tap with spaces for underscores."""
    return tap.replace("_", " ")


def _make_layer_lines(measured: Measurements, measure_name: str) -> list[Line]:
    """Return a line over the layers for each text, with 95% intervals; texts without a finite value have none."""
    labels = _shorten_labels(list(measured.sources))
    lines = [
        make_measure_line(label, range(len(taps)), list(taps.values()), measure_name, num_document_groups(measured))
        for label, taps in zip(labels, measured.sources.values(), strict=True)
    ]
    return [line for line in lines if any(map(math.isfinite, line.y))]


def num_document_groups(measured: Measurements) -> int:
    """Return the number of groups of documents from which standard errors are computed; 0 for none."""
    return int(measured.settings.get("groups") or 0)


def make_measure_line(
    label: str, xs: Iterable[float], measures: Sequence[Mapping[str, float]], name: str, num_groups: int
) -> Line:
    """Return a line of one measure; its errors are the half-widths of 95% intervals, if it has any.

    Args:
        label: label of the line.
        xs: position of each point.
        measures: measures by name at each point.
        name: name of the measure.
        num_groups: number of groups of documents from which standard errors are computed.
    """
    ys = tuple(measures_at_point.get(name, math.nan) for measures_at_point in measures)
    half_widths = tuple(interval_half_width(measures_at_point, name, num_groups) for measures_at_point in measures)
    return Line(label, tuple(xs), ys, y_error=half_widths if any(map(math.isfinite, half_widths)) else ())


def plot_single_dimensions(measured: Measurements) -> Plot:
    """Return a plot of what single dimensions contribute over all texts, by layer.

    Its panels are InterSim without the dimensions that contribute most, and the shares of the top dimensions of
    InterSim and of the variance.
    """
    # Shares of an InterSim that is near 0, or NaN, mean nothing.
    shown_measures = [
        {name: value for name, value in measures.items() if "cosine_share" not in name}
        if not measures.get("inter_sim", math.nan) >= _MIN_INTER_SIM_FOR_SHARES
        else measures
        for measures in measured.all_texts.values()
    ]
    share_labels = {f"share of {total}": labels for total, labels in _SHARE_LABELS.items()}
    panels = []
    for y_label, labels in {"InterSim of the sample": _SAMPLE_COSINE_LABELS, **share_labels}.items():
        lines = [
            make_measure_line(label, range(len(shown_measures)), shown_measures, name, num_groups=0)
            for name, label in labels.items()
        ]
        if lines := [line for line in lines if any(map(math.isfinite, line.y))]:
            panels.append(make_panel(y_label, lines))
    tick_names = _make_tick_names(list(measured.all_texts))
    return Plot(
        "single_dimensions",
        *_TITLES_AND_CAPTIONS["single_dimensions"],
        "line",
        "layer",
        tuple(panels),
        x_names=tick_names,
        reference_label="",
    )


def plot_positions(measured: Measurements) -> Plot:
    """Return a plot of norm and InterSim of the tokens by position over all texts, with a line for each layer."""
    return _plot_bins("positions", "position of the token", measured.by_position.get(measured.combined_key, {}))


def plot_frequency(measured: Measurements) -> Plot:
    """Return a plot of norm and InterSim of the tokens by frequency over all texts, with a line for each layer."""
    x_label = "occurrences of the token's type"
    return _plot_bins("frequency", x_label, measured.by_frequency.get(measured.combined_key, {}))


def _plot_bins(name: str, x_label: str, columns_by_tap: Mapping[str, Mapping[str, Sequence[float]]]) -> Plot:
    """Return a plot of norm and InterSim of the tokens by bin, with a line for each layer.

    A bin is at its smallest value on the x axis. `columns_by_tap` has the results of `Layer.summarize_by_position` or
    `Layer.summarize_by_frequency`.
    """
    panels = []
    for column, y_label in (("norm", MEASURE_TITLES["average_norm"]), ("inter_sim", MEASURE_TITLES["inter_sim"])):
        lines = [
            Line(format_tap_name(tap), tuple(columns_by_tap[tap]["first"]), tuple(columns_by_tap[tap][column]))
            for tap in evenly_spaced(list(columns_by_tap))
        ]
        if lines := [line for line in lines if any(map(math.isfinite, line.y))]:
            log_y = column == "norm" and need_log_axis(y for line in lines for y in line.y)
            panels.append(replace(make_panel(y_label, lines), log_y=log_y))
    return Plot(name, *_TITLES_AND_CAPTIONS[name], "line", x_label, tuple(panels), log_x=True, ordered=True)


def plot_scales(measured: Measurements) -> Plot:
    """Return a plot of the intrinsic dimension over all texts by scale, a line with 95% intervals for each layer."""
    scales_by_tap = measured.gride.get(measured.combined_key, {})
    lines = []
    for tap in evenly_spaced([tap for tap, scales in scales_by_tap.items() if scales]):
        columns = {name: [scale[name] for scale in scales_by_tap[tap]] for name in ("n1", "value", "error")}
        half_widths = tuple(NORMAL_QUANTILE * error for error in columns["error"])
        lines.append(Line(format_tap_name(tap), tuple(columns["n1"]), tuple(columns["value"]), y_error=half_widths))
    panels = (make_panel("Gride dimension", lines),) if lines else ()
    x_label = "number n of the nearer neighbour"
    return Plot("scales", *_TITLES_AND_CAPTIONS["scales"], "line", x_label, panels, log_x=True, ordered=True)


def _shorten_labels(names: Sequence[str]) -> list[str]:
    """Shorten the names of texts to distinct, printable labels that fit in a legend."""
    labels: list[str] = []
    for name in names:
        label = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split()) or "text"
        label = label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"
        # matplotlib leaves labels with a leading underscore out of the legend.
        label = f" {label}" if label.startswith("_") else label
        labels.append(f"{label} ({len(labels) + 1})" if label in labels else label)
    return labels


def _make_tick_names(taps: Sequence[str]) -> dict[float, str]:
    """Return tick labels by position: the names of the embeddings and the final normalization, and some layer numbers.

    At most six layers have a label.
    """
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


def plot_spectra(measured: Measurements) -> Plot:
    """Return a plot of the singular values of the hidden states over all texts, raw and centered, by layer."""
    spectra_by_tap = measured.spectra.get(measured.combined_key, {})
    panels = []
    for form in ("raw", "centered"):
        lines = [
            make_spectrum_line(format_tap_name(tap), spectra_by_tap[tap][form], STATE_ROUNDING)
            for tap in evenly_spaced(list(spectra_by_tap))
        ]
        if lines:
            panels.append(make_panel("singular value", lines, FORM_TITLES[form]))
    return Plot(
        "spectra",
        *_TITLES_AND_CAPTIONS["spectra"],
        "line",
        "number of the singular value",
        tuple(panels),
        log_x=True,
        log_y=True,
        ordered=True,
        share_axes=True,
    )


def plot_matrix_spectra(measured: Measurements) -> Plot:
    """Return a plot of the singular values of the embedding matrices, with a line for each form."""
    panels = []
    for side, forms in measured.matrices.items():
        lines = [
            make_spectrum_line(FORM_TITLES[form], measures["singular_values"], MATRIX_ROUNDING)
            for form, measures in forms.items()
        ]
        panels.append(make_panel("singular value", lines, f"{side} embeddings"))
    x_label = "number of the singular value"
    return Plot(
        "matrix_spectra",
        *_TITLES_AND_CAPTIONS["matrix_spectra"],
        "line",
        x_label,
        tuple(panels),
        log_x=True,
        log_y=True,
        share_axes=True,
    )


def make_spectrum_line(label: str, values: Sequence[float], rounding: float) -> Line:
    """Return a line of singular values, without those below the fraction `rounding` of the largest."""
    largest = max(values, default=0.0)
    ys = tuple(value for value in values if value > rounding * largest)
    return Line(label, tuple(range(1, len(ys) + 1)), ys)


def plot_partition(measured: Measurements) -> Plot:
    """Return a plot of I(W) of the embedding matrices by form, for both conventions of the signs."""
    panels = []
    for side, forms in measured.matrices.items():
        xs = tuple(range(len(forms)))
        as_computed, both = (
            tuple(measures[f"partition_isotropy_{signs}"] for measures in forms.values())
            for signs in ("as_computed", "both")
        )
        lines = [Line("signs as computed", xs, as_computed), Line("both signs", xs, both)]
        panels.append(make_panel("I(W)", lines, f"{side} embeddings"))
    form_names = {float(index): name for index, name in enumerate(FORM_TITLES.values())}
    return Plot("partition", *_TITLES_AND_CAPTIONS["partition"], "columns", "", tuple(panels), x_names=form_names)


def plot_projection(measured: Measurements) -> Plot:
    """Return a plot of rows of the embedding matrices in two dimensions."""
    panels, explanation = [], ""
    for side, rows in measured.rows.items():
        matrix_panels, explanation = make_projection_panels(rows, f"{side} embeddings")
        panels += matrix_panels
    title, caption = _TITLES_AND_CAPTIONS["projection"]
    caption = f"{caption} {explanation}"
    return Plot("projection", title, caption, "scatter", "first direction", tuple(panels), ordered=True)


def make_projection_panels(rows: Mapping[str, Any], title: str) -> tuple[list[Panel], str]:
    """Return scatter plots of the rows of one matrix, raw and centered, and an explanation of the colours.

    `rows` is what `figure_data.summarize_rows` returns. For a matrix with one dimension, the plot has no panels.
    """
    panels = []
    groups, explanation = _group_by_colour(rows)
    for form in ("raw", "centered"):
        if len(rows[form]) < 2:
            continue
        x, y = rows[form]
        lines = [
            Line(label, tuple(x[index] for index in indices), tuple(y[index] for index in indices))
            for label, indices in groups.items()
        ]
        panels.append(make_panel("second direction", lines, f"{title}, {form}", with_origin=True))
    return panels, explanation


def _group_by_colour(rows: Mapping[str, Any]) -> tuple[dict[str, list[int]], str]:
    """Group projected rows by their tokens' frequencies, or by ids if most of the tokens do not occur in the texts.

    Returns:
        Indices of the rows by the group's label, and an explanation of the colours for the caption.
    """
    ids, counts = rows["ids"], np.array(rows.get("counts") or [])
    caption_start = f"{len(ids):,} rows, evenly spaced by token id; the colour is the"
    num_occurring = np.count_nonzero(counts)
    if len(counts) and num_occurring >= len(ids) / 2:
        labels = ("most frequent quarter", "second", "third", "rarest quarter")
        by_frequency = np.argsort(-counts, kind="stable")
        quarters = np.array_split(by_frequency[:num_occurring], 4)
        groups = {label: quarter.tolist() for label, quarter in zip(labels, quarters, strict=True)}
        if num_occurring < len(ids):
            groups["not in the texts"] = by_frequency[num_occurring:].tolist()
        return groups, f"{caption_start} token's frequency in these texts."
    fifths = [fifth.tolist() for fifth in np.array_split(np.arange(len(ids)), 5) if len(fifth)]
    groups = {f"ids {ids[fifth[0]]:,} to {ids[fifth[-1]]:,}": fifth for fifth in fifths}
    return groups, (
        f"{caption_start} id, which stands for the rank by frequency: most tokenizers number tokens in the order in "
        "which they learned them, frequent ones first."
    )


def plot_state_norms(measured: Measurements) -> Plot:
    """Return a plot of the distribution of the hidden states' norms over all texts, with a line for each layer."""
    histogram_by_tap = measured.norms.get(measured.combined_key, {})
    lines = []
    for tap in evenly_spaced(list(histogram_by_tap)):
        edges, counts = histogram_by_tap[tap]["edges"], histogram_by_tap[tap]["counts"]
        if counts:
            num_tokens = sum(counts) + sum(histogram_by_tap[tap].get("outside", ()))
            # An empty bin on either side lets the line start and end at zero.
            factor = edges[1] / edges[0]
            middles = [math.sqrt(low * high) for low, high in itertools.pairwise(edges)]
            xs = (middles[0] / factor, *middles, middles[-1] * factor)
            lines.append(Line(format_tap_name(tap), xs, (0.0, *(100 * count / num_tokens for count in counts), 0.0)))
    panels = (make_panel("tokens, percent", lines),) if lines else ()
    return Plot("state_norms", *_TITLES_AND_CAPTIONS["state_norms"], "ridges", "norm", panels, log_x=True, ordered=True)


def plot_row_norms(measured: Measurements) -> Plot:
    """Return a plot of the distribution of the norms of the embedding matrices' rows."""
    panels = []
    for side, rows in measured.rows.items():
        edges, counts = rows["norms"]["edges"], rows["norms"]["counts"]
        width = edges[1] - edges[0]
        # An empty bin on either side lets the line start and end at zero.
        middles = tuple(low + width / 2 for low in (edges[0] - width, *edges))
        line = Line("rows", middles, (0.0, *counts, 0.0))
        panels.append(make_panel("rows of the matrix", [line], f"{side} embeddings"))
    return Plot("row_norms", *_TITLES_AND_CAPTIONS["row_norms"], "histogram", "norm", tuple(panels))


def plot_spheres(spheres: Sequence[Sphere]) -> Plot:
    """Return a plot of the toy example of two spheres with their measures."""
    panels = []
    for sphere in spheres:
        measures = (
            f"average cosine {sphere.inter_sim:.3f}, IsoScore {sphere.isoscore:.3f}, I(W) "
            f"{sphere.partition_as_computed:.3f} with signs as computed and {sphere.partition_both:.3f} with both"
        )
        line = Line("points", sphere.x, sphere.y)
        panels.append(make_panel("second coordinate", [line], sphere.name, measures, with_origin=True))
    return Plot(
        "spheres", *_TITLES_AND_CAPTIONS["spheres"], "scatter", "first coordinate", tuple(panels), share_axes=True
    )
