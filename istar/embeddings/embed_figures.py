"""Figures 1 to 6 of *Too Much in Common* from measured embedding matrices, as numbers."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import torch

from istar.drawing.page_folder import read_page_texts
from istar.drawing.plot import ORIGIN, Line, Panel, Plot, make_projection_panels, make_spectrum_line
from istar.embeddings import embed_tables, token_frequencies
from istar.embeddings.embed_models import ModelEmbeddings
from istar.measures import singular_values
from istar.statistics.arguments import is_constant

FIGURE_TEXTS = read_page_texts("istar.embeddings")["figures"]
"""Title, caption and reason for absence of each figure, by its name."""
_BEFORE_AND_AFTER = {"before centering": "raw", "after centering": "centered"}
"""Forms in Figures 1 and 6 by their labels."""
_ROUNDING = 1e-6
"""Singular values below this fraction of the largest are rounding errors of float32 points."""
_SPHERE_POINTS, _SPHERE_SHIFTS = 500, (0.0, 1.0, 2.0)
"""Number of points on the spheres of Figure 2, and the distances of their centers from the origin."""
_DENSITY_POINTS = 200
_MAX_RANK_POINTS = 200
_RANK_BINS = 30


def make_plots(models: Sequence[ModelEmbeddings], words: pd.DataFrame) -> list[Plot]:
    """Return the plots of Figures 1 to 6 of *Too Much in Common*, and of norms by frequency.

    Figure 2, which is not about any model, needs a model of the paper.
    """
    return [
        make_projection_plot(models),
        make_singular_value_plot(models),
        *(make_sphere_plots() if any(map(embed_tables.find_paper_model, models)) else ()),
        make_unused_plot(models),
        make_frequency_plot(models, words),
        make_norm_plot(models),
        make_centering_plot(models),
        make_frequency_norm_plot(models),
    ]


def _make_embedding_plot(name: str, panels: Sequence[Panel], x_label: str, kind: str = "line", **options: Any) -> Plot:
    texts = FIGURE_TEXTS[name]
    return Plot(name, texts["title"], texts["caption"], kind, x_label, tuple(panels), **options)


def make_projection_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of each matrix's rows along its first two singular directions: Figure 1 (a, b, d, e)."""
    panels: list[Panel] = []
    for model in models:
        model_panels, explanation = make_projection_panels(
            model.projection, model.projection_counts, model.label, model.label
        )
        # The explanation of the colours is listed once, with the first panel.
        panels += [replace(panel, fixed_settings=explanation) for panel in model_panels[:1]] + model_panels[1:]
    return _make_embedding_plot("figure1_projection", panels, "first direction", "scatter", ordered=True)


def make_singular_value_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the singular values of each matrix before and after centering: Figure 1 (c, f)."""
    panels = []
    for model in models:
        lines = [
            make_spectrum_line(label, model.measures_by_form[form]["singular_values"], _ROUNDING)
            for label, form in _BEFORE_AND_AFTER.items()
        ]
        if lines := [line for line in lines if line.y]:
            panels.append(Panel("singular value", lines, model.label))
    options: dict[str, Any] = {"log_x": True, "log_y": True, "share_axes": True}
    return _make_embedding_plot("figure1_singular_values", panels, "number of the singular value", **options)


def make_sphere_plots() -> tuple[Plot, Plot]:
    """Return Figure 2 (a, b): points on spheres at several distances from the origin, and their singular values."""
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
    panel = Panel("second coordinate", point_lines, horizontal_line=ORIGIN, vertical_line=ORIGIN)
    points_plot = _make_embedding_plot("figure2_spheres", [panel], "first coordinate", "scatter", ordered=True)
    points_plot = replace(points_plot, caption=points_plot.caption.format(points=_SPHERE_POINTS))
    panel = Panel("singular value", value_lines)
    number = "number of the singular value"
    return points_plot, _make_embedding_plot("figure2_singular_values", [panel], number, ordered=True)


def make_unused_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the mean cosine of unused tokens with the other tokens, by bins of tokens: Figure 3."""
    title_by_order = {"index": "by token id", "frequency": "by frequency in the texts"}
    panels = []
    for order, title in title_by_order.items():
        lines = []
        for model in models:
            bins = model.unused_similarity[model.unused_similarity["order"] == order]
            if len(bins):
                indices = tuple((bins["first"].astype(int) // token_frequencies.BIN_SIZE).astype(float))
                lines.append(Line(model.label, indices, tuple(bins["cosine_raw"])))
        if lines:
            label = _get_only_label(lines)
            panels.append(Panel("mean cosine", lines, f"{label}, {title}" if label else title))
    published = [f"{cosine:.2f} for the token ids {ids}" for ids, cosine in embed_tables.UNUSED_COSINE_BY_IDS.items()]
    x_label = f"number of the bin of {token_frequencies.BIN_SIZE:,} tokens"
    plot = _make_embedding_plot("figure3_unused", panels, x_label, share_y=True)
    return replace(plot, caption=plot.caption.format(published=" and ".join(published)))


def make_frequency_plot(models: Sequence[ModelEmbeddings], words: pd.DataFrame) -> Plot:
    """Return a plot of the share of words and tokens in the texts by their rank of frequency: Figure 4."""
    frequencies_by_label = {"words": words} | {f"tokens of {model.label}": model.token_frequencies for model in models}
    lines = []
    for label, frequencies in frequencies_by_label.items():
        if not frequencies.empty:
            ranks = np.unique(np.geomspace(1, len(frequencies), _MAX_RANK_POINTS).round().astype(int))
            percentages = 100 * frequencies["share"].to_numpy()
            lines.append(Line(label, tuple(map(float, ranks)), tuple(percentages[ranks - 1])))
    panels = [Panel("share of the text, percent", lines)] if lines else []
    options: dict[str, Any] = {"log_x": True, "log_y": True, "reference_label": "words"}
    return _make_embedding_plot("figure4_frequencies", panels, "rank", **options)


def make_norm_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the density of the norms of each matrix's rows: Figure 5."""
    lines = _make_density_lines({model.label: model.row_norms["raw"] for model in models})
    panels = [Panel("density", lines, _get_only_label(lines))] if lines else []
    return _make_embedding_plot("figure5_norms", panels, "norm", "ridges")


def make_centering_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the density of the norms of each matrix's rows before and after centering: Figure 6."""
    panels = []
    for model in models:
        lines = _make_density_lines({label: model.row_norms[form] for label, form in _BEFORE_AND_AFTER.items()})
        if lines:
            panels.append(Panel("density", lines, model.label))
    return _make_embedding_plot("figure6_centering", panels, "norm")


def make_frequency_norm_plot(models: Sequence[ModelEmbeddings]) -> Plot:
    """Return a plot of the average norm of the tokens' rows by rank of frequency; see section 5.2 of the paper."""
    lines = []
    for model in models:
        if not model.token_frequencies.empty:
            norms = model.token_frequencies["norm"].to_numpy()
            edges = np.unique(np.geomspace(1, len(norms) + 1, _RANK_BINS + 1).round().astype(int))
            rank_bins = list(itertools.pairwise(edges))
            middles = tuple(float(np.sqrt(low * (high - 1))) for low, high in rank_bins)
            means = tuple(float(norms[low - 1 : high - 1].mean()) for low, high in rank_bins)
            lines.append(Line(model.label, middles, means))
    panels = [Panel("average norm", lines, _get_only_label(lines))] if lines else []
    plot = _make_embedding_plot("frequency_norms", panels, "rank", log_x=True)
    return replace(plot, caption=plot.caption.format(bins=_RANK_BINS))


def _get_only_label(lines: Sequence[Line]) -> str:
    return lines[0].label if len(lines) == 1 else ""


def _make_density_lines(norms_by_label: dict[str, np.ndarray]) -> list[Line]:
    """Return lines with the densities of norms; skip norms that are all equal or fewer than 2."""
    lines = []
    for label, norms in norms_by_label.items():
        if len(norms) >= 2 and not is_constant(norms):
            kernel = scipy.stats.gaussian_kde(norms)  # with Scott's bandwidth
            margin = 3 * float(np.sqrt(kernel.covariance[0, 0]))
            positions = np.linspace(max(0.0, norms.min() - margin), norms.max() + margin, _DENSITY_POINTS)
            lines.append(Line(label, tuple(positions.tolist()), tuple(kernel(positions).tolist())))
    return lines
