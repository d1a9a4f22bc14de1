"""Figures 1 to 6 of *Too Much in Common* from measured embedding matrices, as numbers."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import scipy.stats
import torch

from istar.drawing.plot import Line, Panel, Plot
from istar.embeddings import published_embeddings, unused_tokens
from istar.embeddings.embed_models import ModelEmbeddings
from istar.measures import singular_values
from istar.statistics.arguments import is_constant

_BEFORE_AND_AFTER = {"before centering": "raw", "after centering": "centered"}
"""Forms in Figures 1 and 6 by their labels."""
_ROUNDING = 1e-6
"""Singular values below this fraction of the largest are rounding errors of float32 points."""
_SPHERE_POINTS, _SPHERE_SHIFTS = 500, (0.0, 1.0, 2.0)
"""Number of points on the spheres of Figure 2, and the distances of their centers from the origin."""
_DENSITY_POINTS = 200
"""Number of points at which a density is computed."""
_MAX_RANK_POINTS = 200
"""Largest number of points of a line over ranks."""
_RANK_BINS = 30
"""Largest number of bins in the plot of norms by rank of frequency."""


def make_plots(models: Sequence[ModelEmbeddings], words: pd.DataFrame) -> list[Plot]:
    """Return the plots of Figures 1 to 6 of *Too Much in Common*, and of norms by frequency.

    Args:
        models: the measured embedding matrices.
        words: frequencies of the texts' words; empty without texts.
    """
    return [
        make_projection_plot(models),
        make_singular_value_plot(models),
        *make_sphere_plots(),
        make_unused_plot(models),
        make_frequency_plot(models, words),
        make_norm_plot(models),
        make_centering_plot(models),
        make_frequency_norm_plot(models),
    ]


def make_projection_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of each matrix's rows along its first two singular directions, raw and centered.

    It is Figure 1 (a, b, d, e) of *Too Much in Common*.
    """
    panels: list[Panel] = []
    for model in models:
        groups, explanation = _group_rows(model)
        for form in ("raw", "centered"):
            if len(model.projection[form]) < 2:  # a matrix of one dimension
                continue
            x, y = (np.array(axis) for axis in model.projection[form])
            lines = [Line(label, tuple(x[rows].tolist()), tuple(y[rows].tolist())) for label, rows in groups.items()]
            # The explanation of the colours is listed once, with the first panel.
            settings = explanation if form == "raw" else ""
            panels.append(
                _make_panel(
                    "second direction", lines, f"{model.label}, {form}", model.label, settings, with_origin=True
                )
            )
    return Plot(
        "figure1_projection",
        "Figure 1, projections",
        "Rows of the embedding matrix along the first two singular directions of the whole matrix, before and after "
        "the mean of the rows is subtracted. The dashed lines cross at the origin.",
        "scatter",
        "first direction",
        tuple(panels),
        ordered=True,
    )


def _group_rows(model: ModelEmbeddings) -> tuple[Mapping[str, np.ndarray], str]:
    """Group projected rows by their tokens' frequencies, or by ids if most of the tokens do not occur in the texts.

    Returns:
        Indices of the rows by the group's label, and an explanation of the colours.
    """
    ids, counts = model.projection["ids"], model.projection_counts
    explanation = f"{len(ids):,} rows, evenly spaced by token id; the colour is the"
    if counts is not None and (num_occurring := np.count_nonzero(counts)) >= len(ids) / 2:
        by_frequency = np.argsort(-counts, kind="stable")
        labels = ("most frequent quarter", "second", "third", "rarest quarter")
        groups = dict(zip(labels, np.array_split(by_frequency[:num_occurring], 4), strict=True))
        if num_occurring < len(ids):
            groups["not in the texts"] = by_frequency[num_occurring:]
        return groups, f"{explanation} token's frequency in these texts"
    fifths = [fifth for fifth in np.array_split(np.arange(len(ids)), 5) if len(fifth)]
    return {f"ids {ids[fifth[0]]:,} to {ids[fifth[-1]]:,}": fifth for fifth in fifths}, (
        f"{explanation} id, which stands for the rank by frequency: most tokenizers number tokens in the order in "
        "which they learned them, frequent ones first"
    )


def make_singular_value_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the singular values of each matrix before and after centering.

    It is Figure 1 (c, f) of *Too Much in Common*.
    """
    panels = []
    for model in models:
        lines = []
        for label, form in _BEFORE_AND_AFTER.items():
            values = model.measures_by_form[form]["singular_values"]
            values = tuple(value for value in values if value > _ROUNDING * max(values))
            lines.append(Line(label, tuple(range(1, len(values) + 1)), values))
        panels.append(_make_panel("singular value", lines, model.label))
    return Plot(
        "figure1_singular_values",
        "Figure 1, singular values",
        "Singular values of the embedding matrix before and after the mean of the rows is subtracted.",
        "line",
        "number of the singular value",
        tuple(panels),
        log_x=True,
        log_y=True,
        share_axes=True,
    )


def make_sphere_plots() -> tuple[Plot, Plot]:
    """Return plots of points on spheres at several distances from the origin, and of their singular values.

    They are Figure 2 (a, b) of *Too Much in Common*.
    """
    # Each point has an opposite one, so that the mean is exactly the center.
    half_of_points = np.random.Generator(np.random.Philox(0)).standard_normal((_SPHERE_POINTS // 2, 3))
    half_of_points /= np.linalg.norm(half_of_points, axis=1, keepdims=True)
    sphere = torch.from_numpy(np.concatenate([half_of_points, -half_of_points]))
    point_lines, value_lines = [], []
    for shift in _SPHERE_SHIFTS:
        points = sphere + torch.tensor([shift, 0, 0])
        x, y, _ = points.T.tolist()
        label = f"center at {shift:g}"
        point_lines.append(Line(label, tuple(x), tuple(y)))
        value_lines.append(Line(label, (1.0, 2.0, 3.0), tuple(singular_values(points, centered=False).tolist())))
    points_plot = Plot(
        "figure2_spheres",
        "Figure 2, spheres",
        f"{_SPHERE_POINTS} points on a unit sphere in three dimensions, and the same points moved away from the "
        "origin.",
        "scatter",
        "first coordinate",
        (_make_panel("second coordinate", point_lines, with_origin=True),),
        ordered=True,
    )
    values_plot = Plot(
        "figure2_singular_values",
        "Figure 2, singular values",
        "Singular values of these points: the farther the sphere is from the origin, the larger is the first one, "
        "although the points have the same shape.",
        "line",
        "number of the singular value",
        (_make_panel("singular value", value_lines),),
        ordered=True,
    )
    return points_plot, values_plot


def make_unused_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the mean cosine of unused tokens with the other tokens, by bins of tokens.

    It is Figure 3 of *Too Much in Common*.
    """
    title_by_order = {"index": "by token id", "frequency": "by frequency in the texts"}
    panels = []
    for order, title in title_by_order.items():
        lines = []
        for model in models:
            if not model.unused_similarity.empty:
                bins = model.unused_similarity[model.unused_similarity["order"] == order]
                if len(bins):
                    indices = tuple((bins["first"].astype(int) // unused_tokens.BIN_SIZE).astype(float))
                    lines.append(Line(model.label, indices, tuple(bins["cosine_raw"])))
        if lines:
            label = _get_only_label(lines)
            panels.append(_make_panel("mean cosine", lines, f"{label}, {title}" if label else title))
    published_texts = [
        f"{cosine:.2f} for the token ids {ids}" for ids, cosine in published_embeddings.UNUSED_COSINE_BY_IDS.items()
    ]
    return Plot(
        "figure3_unused",
        "Figure 3, unused tokens",
        "Mean cosine of the unused tokens with the other tokens in bins of 1,000, by token id, which in vocabularies "
        "such as BERT's stands for the rank by frequency, and by frequency in the texts. Unused tokens are "
        "placeholders such as [unused0] or, in vocabularies without them, the last 1,000 tokens. The paper has, for "
        f"bert-base-cased, {' and '.join(published_texts)}.",
        "line",
        f"number of the bin of {unused_tokens.BIN_SIZE:,} tokens",
        tuple(panels),
        share_y=True,
    )


def make_frequency_plot(models: Sequence[ModelEmbeddings], words: pd.DataFrame) -> Plot:
    """Return a plot of the share of words and tokens in the texts by their rank of frequency.

    It is Figure 4 of *Too Much in Common*.
    """
    frequencies_by_label = {"words": words} | {f"tokens of {model.label}": model.token_frequencies for model in models}
    lines = []
    for label, frequencies in frequencies_by_label.items():
        if not frequencies.empty:
            ranks = np.unique(np.geomspace(1, len(frequencies), _MAX_RANK_POINTS).round().astype(int))
            percentages = 100 * frequencies["share"].to_numpy()
            lines.append(Line(label, tuple(map(float, ranks)), tuple(percentages[ranks - 1])))
    return Plot(
        "figure4_frequencies",
        "Figure 4, frequencies of words and tokens",
        "Share of the texts' words and tokens by their rank of frequency. A word is a run of letters and digits; other "
        "signs are words by themselves.",
        "line",
        "rank",
        (_make_panel("share of the text, percent", lines),) if lines else (),
        log_x=True,
        log_y=True,
        reference_label="words",
    )


def make_norm_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the density of the norms of each matrix's rows (Figure 5 of *Too Much in Common*)."""
    densities = [_make_density_line(model.label, model.row_norms["raw"]) for model in models]
    lines = [line for line in densities if line is not None]
    return Plot(
        "figure5_norms",
        "Figure 5, norms",
        "Kernel density estimate, with Gaussian kernels and Scott's bandwidth, of the norms of the matrix's rows; each "
        "curve is scaled to its own maximum.",
        "ridges",
        "norm",
        (_make_panel("density", lines, _get_only_label(lines)),) if lines else (),
    )


def make_centering_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the density of the norms of each matrix's rows before and after centering.

    It is Figure 6 of *Too Much in Common*.
    """
    panels = []
    for model in models:
        densities = [_make_density_line(label, model.row_norms[form]) for label, form in _BEFORE_AND_AFTER.items()]
        lines = [line for line in densities if line is not None]
        if lines:
            panels.append(_make_panel("density", lines, model.label))
    return Plot(
        "figure6_centering",
        "Figure 6, norms before and after centering",
        "Kernel density estimate of the norms of the matrix's rows, before and after the mean of the rows is "
        "subtracted.",
        "line",
        "norm",
        tuple(panels),
    )


def make_frequency_norm_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the average norm of the tokens' rows by rank of frequency.

    Section 5.2 of *Too Much in Common* describes it without a figure.
    """
    lines = []
    for model in models:
        if not model.token_frequencies.empty:
            norms = model.token_frequencies["norm"].to_numpy()
            edges = np.unique(np.geomspace(1, len(norms) + 1, _RANK_BINS + 1).round().astype(int))
            rank_bins = list(itertools.pairwise(edges))
            middles = tuple(float(np.sqrt(low * (high - 1))) for low, high in rank_bins)
            means = tuple(float(norms[low - 1 : high - 1].mean()) for low, high in rank_bins)
            lines.append(Line(model.label, middles, means))
    return Plot(
        "frequency_norms",
        "Norms by frequency",
        f"Average norm of the rows of the tokens that occur in the texts, in at most {_RANK_BINS} bins of ranks whose "
        "ends have equal ratios. The paper states in section 5.2, without a figure, that frequent words tend to have "
        "smaller norms.",
        "line",
        "rank",
        (_make_panel("average norm", lines, _get_only_label(lines)),) if lines else (),
        log_x=True,
    )


def _make_panel(
    y_label: str,
    lines: Sequence[Line],
    title: str = "",
    model: str = "",
    settings: str = "",
    with_origin: bool = False,
) -> Panel:
    """Return a panel; `with_origin` adds dashed lines that cross at the origin."""
    origin = (0.0, "origin") if with_origin else None
    return Panel(model, title, tuple(lines), settings, y_label, horizontal_line=origin, vertical_line=origin)


def _get_only_label(lines: Sequence[Line]) -> str:
    """Return the label of a line that is the only one and so has no legend; empty for several lines."""
    return lines[0].label if len(lines) == 1 else ""


def _make_density_line(label: str, norms: np.ndarray) -> Line | None:
    """Return a line with the density of norms; None if all are equal, or there are fewer than 2."""
    if len(norms) < 2 or is_constant(norms):
        return None
    positions, density = estimate_density(norms)
    return Line(label, tuple(positions.tolist()), tuple(density.tolist()))


def estimate_density(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    r"""Estimate the density of nonnegative numbers by Gaussian kernels.

    .. math:: \hat f(x) = \frac{1}{n h} \sum_i \varphi\left(\frac{x - v_i}{h}\right), \quad h = s n^{-1/5},

    where :math:`\varphi` is the standard normal density and s the standard deviation (ddof = 1): Scott's bandwidth.

    Args:
        values: `(n,)`, for example norms, not all equal.

    Returns:
        Evenly spaced positions from three bandwidths below the smallest value, but not below 0, to three above the
        largest, and the density at each, per unit of the values.
    """
    kernel = scipy.stats.gaussian_kde(values)
    margin = 3 * float(np.sqrt(kernel.covariance[0, 0]))
    positions = np.linspace(max(0.0, values.min() - margin), values.max() + margin, _DENSITY_POINTS)
    return positions, kernel(positions)
