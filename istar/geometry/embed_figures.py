"""Figures 1 to 6 of *Too Much in Common* from measured embedding matrices, as numbers."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from istar.figures.plot import Line, Panel, Plot
from istar.geometry import embed
from istar.geometry.density import estimate_density
from istar.geometry.embed_models import ModelEmbeddings
from istar.geometry.model_figures import MATRIX_ROUNDING, make_panel, make_projection_panels, make_spectrum_line
from istar.geometry.spheres import NUM_POINTS, Spectrum

_MAX_RANKS = 200
"""Most points of a line over ranks."""
_RANK_BINS = 30
_BEFORE, _AFTER = "before centering", "after centering"


def plots(subjects: Sequence[ModelEmbeddings], words: pd.DataFrame, spheres: Sequence[Spectrum]) -> list[Plot]:
    """Return all plots in the order of the paper."""
    return [
        projection(subjects),
        singular_values(subjects),
        sphere_points(spheres),
        sphere_spectra(spheres),
        unused(subjects),
        frequencies(subjects, words),
        norms(subjects),
        centering(subjects),
        frequency_norms(subjects),
    ]


def projection(subjects: Sequence[ModelEmbeddings]) -> Plot:
    """Plot rows of each matrix along its first two singular directions, raw and centered (Figure 1, a, b, d, e)."""
    panels: list[Panel] = []
    for subject in subjects:
        added, explanation = make_projection_panels(subject.rows, subject.label)
        panels += [
            replace(panel, model=subject.label, fixed_settings=explanation.removesuffix(".")) for panel in added[:1]
        ]
        panels += [replace(panel, model=subject.label) for panel in added[1:]]
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


def singular_values(subjects: Sequence[ModelEmbeddings]) -> Plot:
    """Plot the singular values of each matrix before and after centering (Figure 1, c and f)."""
    panels = []
    for subject in subjects:
        lines = [
            make_spectrum_line(label, subject.figures[form]["singular_values"], MATRIX_ROUNDING)
            for label, form in ((_BEFORE, "raw"), (_AFTER, "centered"))
        ]
        panels.append(make_panel("singular value", lines, subject.label))
    return Plot(
        "figure1_singular_values",
        "Figure 1, singular values",
        "Singular values of the embedding matrix before and after the mean of the rows is subtracted.",
        "line",
        "number of the singular value",
        tuple(panels),
        log_x=True,
        log_y=True,
    )


def sphere_points(spheres: Sequence[Spectrum]) -> Plot:
    """Plot the points of spheres at several distances from the origin (Figure 2, a)."""
    lines = [Line(_center(sphere), sphere.x, sphere.y) for sphere in spheres]
    return Plot(
        "figure2_spheres",
        "Figure 2, spheres",
        f"{NUM_POINTS} points on a unit sphere in three dimensions, and the same points moved away from the origin.",
        "scatter",
        "first coordinate",
        (make_panel("second coordinate", lines, with_origin=True),),
        ordered=True,
    )


def sphere_spectra(spheres: Sequence[Spectrum]) -> Plot:
    """Plot the singular values of these points (Figure 2, b)."""
    numbers = tuple(float(number) for number in range(1, 4))
    lines = [Line(_center(sphere), numbers, sphere.singular_values) for sphere in spheres]
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


def unused(subjects: Sequence[ModelEmbeddings]) -> Plot:
    """Plot the mean cosine of unused tokens with the other tokens (Figure 3)."""
    orders = {"index": "by token id", "frequency": "by frequency in the texts"}
    panels = []
    for order, title in orders.items():
        lines = []
        for subject in subjects:
            if not subject.unused.empty:
                bins = subject.unused[subject.unused["order"] == order]
                if len(bins):
                    numbers = tuple((bins["first"].astype(int) // embed.BIN).astype(float))
                    lines.append(Line(subject.label, numbers, tuple(bins["cosine_raw"])))
        if lines:
            single = _only_label(lines)
            panels.append(make_panel("mean cosine", lines, f"{single}, {title}" if single else title))
    return Plot(
        "figure3_unused",
        "Figure 3, unused tokens",
        "Mean cosine of the unused tokens with the other tokens in bins of 1,000, by token id, which in vocabularies "
        "such as BERT's stands for the rank by frequency, and by frequency in the texts. Unused tokens are "
        "placeholders such as [unused0] or, in vocabularies without them, the last 1,000 tokens.",
        "line",
        f"number of the bin of {embed.BIN:,} tokens",
        tuple(panels),
    )


def frequencies(subjects: Sequence[ModelEmbeddings], words: pd.DataFrame) -> Plot:
    """Plot the share of words and tokens in the texts by their rank (Figure 4)."""
    frames = {"words": words} | {f"tokens of {subject.label}": subject.frequency for subject in subjects}
    lines = []
    for label, frame in frames.items():
        if not frame.empty:
            ranks = _spread_ranks(len(frame))
            shares = 100 * frame["share"].to_numpy()
            lines.append(Line(label, tuple(map(float, ranks)), tuple(shares[ranks - 1])))
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


def norms(subjects: Sequence[ModelEmbeddings]) -> Plot:
    """Plot the density of the norms of each matrix's rows (Figure 5)."""
    lines = [line for subject in subjects if (line := _density_line(subject.label, subject.norms["raw"]))]
    return Plot(
        "figure5_norms",
        "Figure 5, norms",
        "Kernel density estimate, with Gaussian kernels and Scott's bandwidth, of the norms of the matrix's rows; each "
        "curve is scaled to its own maximum.",
        "ridges",
        "norm",
        (make_panel("density", lines, _only_label(lines)),) if lines else (),
    )


def centering(subjects: Sequence[ModelEmbeddings]) -> Plot:
    """Plot the density of the norms before and after centering (Figure 6)."""
    panels = []
    for subject in subjects:
        pairs = ((_BEFORE, "raw"), (_AFTER, "centered"))
        lines = [line for label, form in pairs if (line := _density_line(label, subject.norms[form]))]
        if lines:
            panels.append(make_panel("density", lines, subject.label))
    return Plot(
        "figure6_centering",
        "Figure 6, norms before and after centering",
        "Kernel density estimate of the norms of the matrix's rows, before and after the mean of the rows is "
        "subtracted.",
        "line",
        "norm",
        tuple(panels),
    )


def frequency_norms(subjects: Sequence[ModelEmbeddings]) -> Plot:
    """Plot the average norm of the tokens' rows by rank of frequency, which section 5.2 describes without a figure."""
    lines = []
    for subject in subjects:
        if not subject.frequency.empty:
            values = subject.frequency["norm"].to_numpy()
            edges = np.unique(np.geomspace(1, len(values) + 1, _RANK_BINS + 1).round().astype(int))
            bins = list(itertools.pairwise(edges))
            xs = tuple(float(np.sqrt(low * (high - 1))) for low, high in bins)
            lines.append(Line(subject.label, xs, tuple(float(values[low - 1 : high - 1].mean()) for low, high in bins)))
    return Plot(
        "frequency_norms",
        "Norms by frequency",
        f"Average norm of the rows of the tokens that occur in the texts, in at most {_RANK_BINS} bins of ranks whose "
        "ends have equal ratios. The paper states in section 5.2, without a figure, that frequent words tend to have "
        "smaller norms.",
        "line",
        "rank",
        (make_panel("average norm", lines, _only_label(lines)),) if lines else (),
        log_x=True,
    )


def _center(sphere: Spectrum) -> str:
    return f"center at {sphere.shift:g}"


def _only_label(lines: Sequence[Line]) -> str:
    """Return the label of a single line, which has no legend; empty for several lines."""
    return lines[0].label if len(lines) == 1 else ""


def _spread_ranks(count: int) -> np.ndarray:
    """Return at most `_MAX_RANKS` of the ranks 1 to `count`, with equal ratios as far as whole numbers allow."""
    return np.unique(np.geomspace(1, count, _MAX_RANKS).round().astype(int))


def _density_line(label: str, values: np.ndarray) -> Line | None:
    """Return the density of norms as a line; None if all norms are equal."""
    estimate = estimate_density(values)
    return None if estimate is None else Line(label, tuple(estimate[0].tolist()), tuple(estimate[1].tolist()))
