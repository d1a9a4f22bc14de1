"""Plots of a model's geometry, as numbers that `istar.figures.drawing` renders."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from istar.figures.plot import Line, Panel, Plot
from istar.figures.spacing import evenly_spaced
from istar.geometry.intervals import NORMAL_QUANTILE, half_width
from istar.geometry.measure import COMBINED, Measurements
from istar.geometry.spheres import POINTS, Sphere
from istar.geometry.taps import FINAL_NORM

NAMES = {
    "isoscore": "IsoScore",
    "isoscore_unbiased": "IsoScore, unbiased",
    "isoscore_by_sentence": "IsoScore by sentence",
    "inter_sim": "InterSim",
    "intra_sim": "IntraSim",
    "adjusted_intra_sim": "IntraSim - InterSim",
    "mean_direction_norm": "norm of the mean direction",
    "two_nn": "TwoNN dimension",
    "effective_rank": "effective rank",
    "participation_ratio": "participation ratio",
    "rank_me": "RankMe",
    "nesum": "NESum",
    "alpha_req": "alpha-ReQ",
    "alpha_req_r_squared": "R² of alpha-ReQ",
    "average_norm": "average norm",
    "mean_vector_norm": "norm of the mean",
    "norm_ratio": "norm ratio",
    "largest_variance_share": "variance share, top dimension",
    "top_5_variance_share": "variance share, top 5",
    "top_1_cosine_share": "InterSim share, top dimension",
    "top_5_cosine_share": "InterSim share, top 5",
    "sample_inter_sim": "sample InterSim",
    "sample_inter_sim_without_top_1": "sample InterSim, without top dimension",
    "sample_inter_sim_without_top_5": "sample InterSim, without top 5",
    "sample_inter_sim_standardized": "sample InterSim, z-scored",
    "outlier_dimensions": "outlier dimensions",
    "largest_kurtosis": "largest kurtosis of a dimension",
    "mean_kurtosis": "mean kurtosis of the dimensions",
    "token_kurtosis": "mean kurtosis of the tokens",
    "largest_token_kurtosis": "largest kurtosis of a token",
    "massive_activations": "massive activations",
    "largest_activation_ratio": "largest activation / median",
}
"""Titles of the measures of a layer, in the order of the tables."""
FORMS = {"raw": "raw", "centered": "centered", "post_processed": "post-processed"}
_MAX_LABEL, _MAX_TICKS = 32, 6
_LAYER_PLOTS = {
    "isotropy": ("isoscore", "isoscore_unbiased", "isoscore_by_sentence"),
    "directions": ("inter_sim", "intra_sim", "adjusted_intra_sim"),
    "dimension": ("two_nn", "effective_rank", "participation_ratio"),
    "spectrum": ("rank_me", "nesum", "alpha_req", "alpha_req_r_squared"),
    "norms": ("average_norm", "norm_ratio"),
    "outliers": ("outlier_dimensions", "largest_kurtosis", "token_kurtosis", "largest_activation_ratio"),
}
"""Measures of the plots by layer, by the plot's name."""
_TEXTS = {
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
        f"{POINTS} points on a unit sphere in three dimensions, around the origin and around another point. "
        "Moving the sphere turns average cosine and I(W) from isotropic to anisotropic. IsoScore depends on the "
        "covariance alone and does not change. The functions are those that measured the model.",
    ),
}
"""Title and caption of each plot, by the plot's name."""
STATE_ROUNDING, MATRIX_ROUNDING = 1e-4, 1e-6
"""Singular values below these fractions of the largest are rounding errors: of a float32 scatter matrix (hidden states)
and of float32 points (embedding matrices)."""


_COUNTS_OF_DIMENSIONS = ("effective_rank", "participation_ratio", "rank_me", "nesum")
"""Measures from 1 to the number of dimensions."""
_CHANGES = {
    "sample_inter_sim": "all dimensions",
    "sample_inter_sim_without_top_1": "without the top dimension",
    "sample_inter_sim_without_top_5": "without the top 5 dimensions",
    "sample_inter_sim_standardized": "z-scored",
}
_SHARES = {
    "InterSim": {"top_1_cosine_share": "top dimension", "top_5_cosine_share": "top 5 dimensions"},
    "the variance": {"largest_variance_share": "top dimension", "top_5_variance_share": "top 5 dimensions"},
}
"""Labels of the lines in the figure of single dimensions, by measure; shares by what they are shares of."""
_LEAST_INTER_SIM = 0.05
"""Shares of a smaller InterSim mean nothing."""


def panel(
    y_label: str,
    lines: Sequence[Line],
    title: str = "",
    fixed_settings: str = "",
    with_origin: bool = False,
    y_bounds: tuple[float, float] | None = None,
) -> Panel:
    """Return a panel that belongs to no task; `with_origin` adds dashed lines that cross at the origin."""
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
    """Return the title of a measure with line breaks, as the header of a column."""
    title = NAMES.get(name, name.replace("_", " "))
    for separator in (", ", " - ", " "):
        if separator in title:
            return title.replace(separator, f"{separator.rstrip()}\n", 1)
    return title


def bounds_of(name: str, measurements: Iterable[Measurements]) -> tuple[float, float] | None:
    """Return the range of a measure that cannot exceed the number of dimensions, over several models; or None."""
    if name not in (*_COUNTS_OF_DIMENSIONS, "outlier_dimensions"):
        return None
    spectra = [forms for measured in measurements for taps in measured.spectra.values() for forms in taps.values()]
    widths = [len(forms["raw"]) for forms in spectra]
    return (0 if name == "outlier_dimensions" else 1, max(widths)) if widths else None


def layer_plots(measured: Measurements) -> list[Plot]:
    """Return plots of the measures by layer, with one line for each text."""
    tick_names = _tick_names(list(measured.all_texts))
    plots = []
    for name, keys in _LAYER_PLOTS.items():
        panels = [
            panel(NAMES[key], lines, y_bounds=bounds_of(key, [measured]))
            for key in keys
            if (lines := _layer_lines(measured, key))
        ]
        plots.append(
            Plot(name, *_TEXTS[name], "line", "layer", tuple(panels), x_names=tick_names, reference_label=COMBINED)
        )
    return plots


def missing_measures(plot: Plot) -> list[str]:
    """Return the titles of the measures that a plot by layer lacks because no layer has a finite value."""
    plotted = {panel.y_label for panel in plot.panels}
    return [NAMES[key] for key in _LAYER_PLOTS.get(plot.name, ()) if NAMES[key] not in plotted]


def tap_name(tap: str) -> str:
    """Return the name of a tap with spaces for underscores."""
    return tap.replace("_", " ")


def _layer_lines(measured: Measurements, key: str) -> list[Line]:
    """Return a line over the layers for each text in which the measure is finite somewhere, with 95% intervals."""
    labels = _labels(list(measured.sources))
    lines = [
        measure_line(label, range(len(taps)), list(taps.values()), key, groups(measured))
        for label, taps in zip(labels, measured.sources.values(), strict=True)
    ]
    return [line for line in lines if any(map(math.isfinite, line.y))]


def groups(measured: Measurements) -> int:
    """Return the number of groups of documents from which standard errors are computed; 0 for none."""
    return int(measured.settings.get("groups") or 0)


def measure_line(
    label: str, xs: Iterable[float], figures: Sequence[Mapping[str, float]], name: str, groups: int
) -> Line:
    """Return a line of one measure, whose errors are halves of the lengths of 95% intervals, where it has any.

    Args:
        label: label of the line.
        xs: position of each point.
        figures: measures at each point.
        name: name of the measure.
        groups: number of groups of documents from which standard errors are computed.
    """
    ys = tuple(values.get(name, math.nan) for values in figures)
    widths = tuple(half_width(values, name, groups) for values in figures)
    return Line(label, tuple(xs), ys, y_error=widths if any(map(math.isfinite, widths)) else ())


def single_dimensions(measured: Measurements) -> Plot:
    """Plot InterSim without single dimensions, and their shares of InterSim and of the variance, over all texts."""
    figures = list(measured.all_texts.values())
    # Shares of an InterSim near 0 mean nothing.
    shown = [
        {name: value for name, value in values.items() if "cosine_share" not in name}
        if not values.get("inter_sim", math.nan) >= _LEAST_INTER_SIM
        else values
        for values in figures
    ]
    names = {"InterSim of the sample": _CHANGES, **{f"share of {whole}": names for whole, names in _SHARES.items()}}
    panels = []
    for y_label, labels in names.items():
        lines = [measure_line(label, range(len(shown)), shown, name, 0) for name, label in labels.items()]
        if lines := [line for line in lines if any(map(math.isfinite, line.y))]:
            panels.append(panel(y_label, lines))
    tick_names = _tick_names(list(measured.all_texts))
    return Plot(
        "single_dimensions",
        *_TEXTS["single_dimensions"],
        "line",
        "layer",
        tuple(panels),
        x_names=tick_names,
        reference_label="",
    )


def positions(measured: Measurements) -> Plot:
    """Plot norm and InterSim of the tokens by position over all texts, with a line for each layer."""
    return _by_bin("positions", "position of the token", measured.by_position.get(measured.combined_key, {}))


def frequency(measured: Measurements) -> Plot:
    """Plot norm and InterSim of the tokens by frequency over all texts, with a line for each layer."""
    x_label = "occurrences of the token's type"
    return _by_bin("frequency", x_label, measured.by_frequency.get(measured.combined_key, {}))


def _by_bin(name: str, x_label: str, by_tap: Mapping[str, Mapping[str, Sequence[float]]]) -> Plot:
    """Plot columns of `Layer.by_position` or `Layer.by_frequency`; a bin is at its smallest value."""
    panels = []
    for column, y_label in (("norm", NAMES["average_norm"]), ("inter_sim", NAMES["inter_sim"])):
        lines = [
            Line(tap_name(tap), tuple(by_tap[tap]["first"]), tuple(by_tap[tap][column]))
            for tap in evenly_spaced(list(by_tap))
        ]
        if lines := [line for line in lines if any(map(math.isfinite, line.y))]:
            panels.append(panel(y_label, lines))
    return Plot(name, *_TEXTS[name], "line", x_label, tuple(panels), log_x=True, ordered=True)


def scales(measured: Measurements) -> Plot:
    """Plot Gride by scale over all texts, with a line for each layer and 95% intervals."""
    by_tap = measured.gride.get(measured.combined_key, {})
    lines = []
    for tap in evenly_spaced([tap for tap, scales in by_tap.items() if scales]):
        columns = {name: [scale[name] for scale in by_tap[tap]] for name in ("n1", "value", "error")}
        widths = tuple(NORMAL_QUANTILE * error for error in columns["error"])
        lines.append(Line(tap_name(tap), tuple(columns["n1"]), tuple(columns["value"]), y_error=widths))
    panels = (panel("Gride dimension", lines),) if lines else ()
    x_label = "number n of the nearer neighbour"
    return Plot("scales", *_TEXTS["scales"], "line", x_label, panels, log_x=True, ordered=True)


def _labels(names: Sequence[str]) -> list[str]:
    """Shorten the names of texts to distinct, printable labels that fit in a legend."""
    labels: list[str] = []
    for name in names:
        label = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split()) or "text"
        label = label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"
        # matplotlib leaves labels with a leading underscore out of the legend.
        label = f" {label}" if label.startswith("_") else label
        labels.append(f"{label} ({len(labels) + 1})" if label in labels else label)
    return labels


def _tick_names(taps: Sequence[str]) -> dict[float, str]:
    """Label the embeddings and the final normalization by name, and at most six layers between them by number."""
    end = len(taps) - 1 if taps[-1] == FINAL_NORM else len(taps)
    step = math.ceil((end - 1) / _MAX_TICKS) or 1
    # The label of the final normalization needs the room of a step.
    last_number = end - step if taps[-1] == FINAL_NORM else end - 1
    names: dict[float, str] = {0: "emb."}
    for number in range(step, last_number + 1, step):
        names[number] = str(number)
    if taps[-1] == FINAL_NORM:
        names[end] = "final\nnorm"
    return names


def spectra(measured: Measurements) -> Plot:
    """Plot the singular values of the hidden states over all texts, raw and centered, with a line for each layer."""
    by_tap = measured.spectra.get(measured.combined_key, {})
    panels = []
    for form in ("raw", "centered"):
        lines = [decay(tap_name(tap), by_tap[tap][form], STATE_ROUNDING) for tap in evenly_spaced(list(by_tap))]
        if lines:
            panels.append(panel("singular value", lines, FORMS[form]))
    return Plot(
        "spectra",
        *_TEXTS["spectra"],
        "line",
        "number of the singular value",
        tuple(panels),
        log_x=True,
        log_y=True,
        ordered=True,
        share_axes=True,
    )


def matrix_spectra(measured: Measurements) -> Plot:
    """Plot the singular values of the embedding matrices, with a line for each form."""
    panels = []
    for which, forms in measured.matrices.items():
        lines = [decay(FORMS[form], figures["singular_values"], MATRIX_ROUNDING) for form, figures in forms.items()]
        panels.append(panel("singular value", lines, f"{which} embeddings"))
    x_label = "number of the singular value"
    return Plot("matrix_spectra", *_TEXTS["matrix_spectra"], "line", x_label, tuple(panels), log_x=True, log_y=True)


def decay(label: str, values: Sequence[float], rounding: float) -> Line:
    """Return a line of the singular values, without those that are rounding errors."""
    largest = max(values, default=0.0)
    ys = tuple(value for value in values if value > rounding * largest)
    return Line(label, tuple(range(1, len(ys) + 1)), ys)


def partition(measured: Measurements) -> Plot:
    """Plot I(W) of the embedding matrices by form, for both conventions of the signs."""
    panels = []
    for which, forms in measured.matrices.items():
        xs = tuple(range(len(forms)))
        as_computed, both = (
            tuple(figures[f"partition_isotropy_{signs}"] for figures in forms.values())
            for signs in ("as_computed", "both")
        )
        lines = [Line("signs as computed", xs, as_computed), Line("both signs", xs, both)]
        panels.append(panel("I(W)", lines, f"{which} embeddings"))
    form_names = {float(number): name for number, name in enumerate(FORMS.values())}
    return Plot("partition", *_TEXTS["partition"], "columns", "", tuple(panels), x_names=form_names)


def projection(measured: Measurements) -> Plot:
    """Plot rows of the embedding matrices in two dimensions."""
    panels, explanation = [], ""
    for which, rows in measured.rows.items():
        added, explanation = projection_panels(rows, f"{which} embeddings")
        panels += added
    title, caption = _TEXTS["projection"]
    caption = f"{caption} {explanation}"
    return Plot("projection", title, caption, "scatter", "first direction", tuple(panels), ordered=True)


def projection_panels(rows: Mapping[str, Any], title: str) -> tuple[list[Panel], str]:
    """Return the panels of one matrix, raw and centered, and an explanation of the colours.

    `rows` is of `arrays.summarize_rows`. A matrix of one dimension has no panels.
    """
    panels = []
    groups, explanation = _colour_groups(rows)
    for form in ("raw", "centered"):
        if len(rows[form]) < 2:
            continue
        x, y = rows[form]
        lines = [
            Line(label, tuple(x[index] for index in indices), tuple(y[index] for index in indices))
            for label, indices in groups.items()
        ]
        panels.append(panel("second direction", lines, f"{title}, {form}", with_origin=True))
    return panels, explanation


def _colour_groups(rows: Mapping[str, Any]) -> tuple[dict[str, list[int]], str]:
    """Group projected rows by the frequency of their tokens, or by id if too few of the tokens occur in the texts.

    Returns:
        Indices of the rows by the group's label, and an explanation of the colours for the caption.
    """
    ids, counts = rows["ids"], np.array(rows.get("counts") or [])
    caption = f"{len(ids):,} rows, evenly spaced by token id; the colour is the"
    occurring = np.count_nonzero(counts)
    if len(counts) and occurring >= len(ids) / 2:
        labels = ("most frequent quarter", "second", "third", "rarest quarter")
        by_frequency = np.argsort(-counts, kind="stable")
        quarters = np.array_split(by_frequency[:occurring], 4)
        groups = {label: quarter.tolist() for label, quarter in zip(labels, quarters, strict=True)}
        if occurring < len(ids):
            groups["not in the texts"] = by_frequency[occurring:].tolist()
        return groups, f"{caption} token's frequency in these texts."
    fifths = [part.tolist() for part in np.array_split(np.arange(len(ids)), 5) if len(part)]
    groups = {f"ids {ids[part[0]]:,} to {ids[part[-1]]:,}": part for part in fifths}
    return groups, (
        f"{caption} id, which stands for the rank by frequency: most tokenizers number tokens in the order in which "
        "they learned them, frequent ones first."
    )


def state_norms(measured: Measurements) -> Plot:
    """Plot the distribution of the hidden states' norms over all texts, with a line for each layer."""
    by_tap = measured.norms.get(measured.combined_key, {})
    lines = []
    for tap in evenly_spaced(list(by_tap)):
        edges, counts = by_tap[tap]["edges"], by_tap[tap]["counts"]
        if counts:
            total = sum(counts) + sum(by_tap[tap].get("outside", ()))
            # An empty bin on either side lets the line start and end at zero.
            factor = edges[1] / edges[0]
            middles = [math.sqrt(low * high) for low, high in itertools.pairwise(edges)]
            xs = (middles[0] / factor, *middles, middles[-1] * factor)
            lines.append(Line(tap_name(tap), xs, (0.0, *(100 * count / total for count in counts), 0.0)))
    panels = (panel("tokens, percent", lines),) if lines else ()
    return Plot("state_norms", *_TEXTS["state_norms"], "ridges", "norm", panels, log_x=True, ordered=True)


def row_norms(measured: Measurements) -> Plot:
    """Plot the distribution of the norms of the embedding matrices' rows."""
    panels = []
    for which, rows in measured.rows.items():
        edges, counts = rows["norms"]["edges"], rows["norms"]["counts"]
        width = edges[1] - edges[0]
        # An empty bin on either side lets the line start and end at zero.
        middles = tuple(low + width / 2 for low in (edges[0] - width, *edges))
        line = Line("rows", middles, (0.0, *counts, 0.0))
        panels.append(panel("rows of the matrix", [line], f"{which} embeddings"))
    return Plot("row_norms", *_TEXTS["row_norms"], "histogram", "norm", tuple(panels))


def sphere_plot(spheres: Sequence[Sphere]) -> Plot:
    """Plot the toy example of two spheres with their measures."""
    panels = []
    for sphere in spheres:
        figures = (
            f"average cosine {sphere.inter_sim:.3f}, IsoScore {sphere.isoscore:.3f}, I(W) "
            f"{sphere.partition_as_computed:.3f} with signs as computed and {sphere.partition_both:.3f} with both"
        )
        line = Line("points", sphere.x, sphere.y)
        panels.append(panel("second coordinate", [line], sphere.name, figures, with_origin=True))
    return Plot("spheres", *_TEXTS["spheres"], "scatter", "first coordinate", tuple(panels), share_axes=True)
