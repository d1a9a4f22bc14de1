"""Figures 1 to 6 of *Too Much in Common* from measured embedding matrices, as numbers."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from istar.drawing.plot import Line, Panel, Plot
from istar.embeddings import embed, published_embeddings
from istar.embeddings.density import estimate_density
from istar.embeddings.embed_models import ModelEmbeddings
from istar.geometry.show.model_figures import MATRIX_ROUNDING, make_panel, make_projection_panels, make_spectrum_line
from istar.geometry.show.spheres import NUM_POINTS, Spectrum

_MAX_RANK_POINTS = 200
"""Largest number of points of a line over ranks."""
_RANK_BINS = 30
"""Largest number of bins in the plot of norms by rank of frequency."""
_BEFORE_CENTERING, _AFTER_CENTERING = "before centering", "after centering"


def make_plots(models: Sequence[ModelEmbeddings], words: pd.DataFrame, spheres: Sequence[Spectrum]) -> list[Plot]:
    """Return the plots of Figures 1 to 6 of *Too Much in Common*, and of norms by frequency.

    Args:
        models: the measured embedding matrices.
        words: frequencies of the texts' words; empty without texts.
        spheres: spheres at several distances from the origin.
    """
    return [
        make_projection_plot(models),
        make_singular_value_plot(models),
        make_sphere_plot(spheres),
        make_sphere_spectrum_plot(spheres),
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
        model_panels, explanation = make_projection_panels(model.projected_rows, model.label)
        # The explanation of the colours is listed once, with the first panel.
        panels += [
            replace(panel, model=model.label, fixed_settings=explanation.removesuffix("."))
            for panel in model_panels[:1]
        ]
        panels += [replace(panel, model=model.label) for panel in model_panels[1:]]
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


def make_singular_value_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the singular values of each matrix before and after centering.

    It is Figure 1 (c, f) of *Too Much in Common*.
    """
    panels = []
    for model in models:
        lines = [
            make_spectrum_line(label, model.measures_by_form[form]["singular_values"], MATRIX_ROUNDING)
            for label, form in ((_BEFORE_CENTERING, "raw"), (_AFTER_CENTERING, "centered"))
        ]
        panels.append(make_panel("singular value", lines, model.label))
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


def make_sphere_plot(spheres: Sequence[Spectrum]) -> Plot:
    """Return a plot of the points of spheres at several distances from the origin.

    It is Figure 2 (a) of *Too Much in Common*.
    """
    lines = [Line(_make_sphere_label(sphere), sphere.x, sphere.y) for sphere in spheres]
    return Plot(
        "figure2_spheres",
        "Figure 2, spheres",
        f"{NUM_POINTS} points on a unit sphere in three dimensions, and the same points moved away from the origin.",
        "scatter",
        "first coordinate",
        (make_panel("second coordinate", lines, with_origin=True),),
        ordered=True,
    )


def make_sphere_spectrum_plot(spheres: Sequence[Spectrum]) -> Plot:
    """Return a plot of the singular values of the points of spheres at several distances from the origin.

    It is Figure 2 (b) of *Too Much in Common*.
    """
    lines = [Line(_make_sphere_label(sphere), (1.0, 2.0, 3.0), sphere.singular_values) for sphere in spheres]
    return Plot(
        "figure2_singular_values",
        "Figure 2, singular values",
        "Singular values of these points: the farther the sphere is from the origin, the larger is the first one, "
        "although the points have the same shape.",
        "line",
        "number of the singular value",
        (make_panel("singular value", lines),),
        ordered=True,
    )


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
                    indices = tuple((bins["first"].astype(int) // embed.BIN_SIZE).astype(float))
                    lines.append(Line(model.label, indices, tuple(bins["cosine_raw"])))
        if lines:
            label = _get_only_label(lines)
            panels.append(make_panel("mean cosine", lines, f"{label}, {title}" if label else title))
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
        f"number of the bin of {embed.BIN_SIZE:,} tokens",
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
            ranks = _spread_ranks(len(frequencies))
            percentages = 100 * frequencies["share"].to_numpy()
            lines.append(Line(label, tuple(map(float, ranks)), tuple(percentages[ranks - 1])))
    return Plot(
        "figure4_frequencies",
        "Figure 4, frequencies of words and tokens",
        "Share of the texts' words and tokens by their rank of frequency. A word is a run of letters and digits; other "
        "signs are words by themselves.",
        "line",
        "rank",
        (make_panel("share of the text, percent", lines),) if lines else (),
        log_x=True,
        log_y=True,
        reference_label="words",
    )


def make_norm_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the density of the norms of each matrix's rows (Figure 5 of *Too Much in Common*)."""
    lines = [line for model in models if (line := _make_density_line(model.label, model.row_norms["raw"]))]
    return Plot(
        "figure5_norms",
        "Figure 5, norms",
        "Kernel density estimate, with Gaussian kernels and Scott's bandwidth, of the norms of the matrix's rows; each "
        "curve is scaled to its own maximum.",
        "ridges",
        "norm",
        (make_panel("density", lines, _get_only_label(lines)),) if lines else (),
    )


def make_centering_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the density of the norms of each matrix's rows before and after centering.

    It is Figure 6 of *Too Much in Common*.
    """
    panels = []
    for model in models:
        labels = ((_BEFORE_CENTERING, "raw"), (_AFTER_CENTERING, "centered"))
        lines = [line for label, form in labels if (line := _make_density_line(label, model.row_norms[form]))]
        if lines:
            panels.append(make_panel("density", lines, model.label))
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
        (make_panel("average norm", lines, _get_only_label(lines)),) if lines else (),
        log_x=True,
    )


def _make_sphere_label(sphere: Spectrum) -> str:
    """Return the label of a sphere, which states how far its center is from the origin."""
    return f"center at {sphere.shift:g}"


def _get_only_label(lines: Sequence[Line]) -> str:
    """Return the label of a line that is the only one and so has no legend; empty for several lines."""
    return lines[0].label if len(lines) == 1 else ""


def _spread_ranks(num_ranks: int) -> np.ndarray:
    """Return at most 200 of the ranks 1 to `num_ranks`, evenly spaced on a logarithmic axis up to rounding."""
    return np.unique(np.geomspace(1, num_ranks, _MAX_RANK_POINTS).round().astype(int))


def _make_density_line(label: str, norms: np.ndarray) -> Line | None:
    """Return a line with the estimate of `estimate_density` for norms, or None if the norms have no estimate."""
    estimate = estimate_density(norms)
    if estimate is None:
        return None
    positions, densities = estimate
    return Line(label, tuple(positions.tolist()), tuple(densities.tolist()))
