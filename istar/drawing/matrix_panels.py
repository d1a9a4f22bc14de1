"""Panels on the rows of a matrix: singular values, and projections onto the first two singular directions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from istar.drawing.plot import Line, Panel


def make_panel(
    y_label: str,
    lines: Sequence[Line],
    title: str = "",
    model: str = "",
    settings: str = "",
    with_origin: bool = False,
    y_bounds: tuple[float, float] | None = None,
) -> Panel:
    """Return a panel; `with_origin` adds dashed lines that cross at the origin."""
    origin = (0.0, "origin") if with_origin else None
    return Panel(
        model,
        title,
        tuple(lines),
        settings,
        y_label,
        horizontal_line=origin,
        vertical_line=origin,
        y_bounds=y_bounds,
    )


def make_spectrum_line(label: str, values: Sequence[float], rounding: float) -> Line:
    """Return a line of singular values, without those below the fraction `rounding` of the largest."""
    largest = max(values, default=0.0)
    ys = tuple(value for value in values if value > rounding * largest)
    return Line(label, tuple(range(1, len(ys) + 1)), ys)


def make_projection_panels(
    rows: Mapping[str, Any], counts: Sequence[float] | np.ndarray | None, title: str, model: str = ""
) -> tuple[list[Panel], str]:
    """Return scatter plots of the rows of a matrix, raw and centered, and an explanation of the colours.

    For a matrix with one dimension, there are no panels.

    Args:
        rows: what `istar.measures.partition.project_rows` returns: `ids`, and coordinates `raw` and `centered`.
        counts: occurrences of each row's token in texts; None or empty if unknown.
        title: title of the panels, to which the form is added.
        model: model of the panels; empty for none.
    """
    panels = []
    groups, explanation = group_rows(rows["ids"], counts)
    for form in ("raw", "centered"):
        if len(rows[form]) == 2:
            x, y = (np.array(axis) for axis in rows[form])
            lines = [
                Line(label, tuple(x[indices].tolist()), tuple(y[indices].tolist())) for label, indices in groups.items()
            ]
            panels.append(make_panel("second direction", lines, f"{title}, {form}", model, with_origin=True))
    return panels, explanation


def group_rows(ids: Sequence[int], counts: Sequence[float] | np.ndarray | None) -> tuple[dict[str, np.ndarray], str]:
    """Group rows by their tokens' frequencies, or by ids if most of the tokens do not occur in the texts.

    Returns:
        Indices of the rows by the group's label, and an explanation of the colours.
    """
    explanation = f"{len(ids):,} rows, evenly spaced by token id; the colour is the"
    frequencies = np.array(counts if counts is not None else [])
    num_occurring = np.count_nonzero(frequencies)
    if len(frequencies) and num_occurring >= len(ids) / 2:
        by_frequency = np.argsort(-frequencies, kind="stable")
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
