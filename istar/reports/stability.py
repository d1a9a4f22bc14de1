r"""Mini-batch stability of IsoScore\* and the unbiased score on a synthetic Gaussian cloud (the paper's Figure 2)."""

import math
from dataclasses import replace
from importlib.resources import files

import pandas as pd

from istar.drawing.plot import Line, Panel, Plot

TRUE_SCORE = 0.86734
"""IsoScore of the distribution itself."""


def build_minibatch_stability_plot() -> Plot:
    """Return the paper's Figure 2: IsoScore* of batches of a synthetic Gaussian cloud against the batch size.

    The scores do not depend on any run, and are in `stability.csv`, which `python -m tests.reports.simulated_stability`
    writes.
    """
    with files("istar.reports").joinpath("stability.csv").open(encoding="utf-8") as file:
        scores = pd.read_csv(file)
    lines = []
    for label, rows in scores.groupby("line", sort=False):
        points, means, deviations = (tuple(rows[column].astype(float)) for column in ("points", "mean", "std"))
        line = Line(str(label), points, means, y_error=deviations)
        zeta = float(rows["zeta"].iloc[0])  # NaN for a line without a fixed zeta
        lines.append(line if math.isnan(zeta) else replace(line, colour_scale="sequential", scale_position=zeta))
    panel = Panel("IsoScore*", lines, y_bounds=(0, 1), horizontal_line=(TRUE_SCORE, f"truth ({TRUE_SCORE:.2f})"))
    return Plot(
        name="figure2",
        title="Figure 2: mini-batch stability",
        caption="IsoScore* of batches of a synthetic Gaussian cloud in 768 dimensions, variances 10, 6, 4, 4, 1, ..., "
        "1, by batch size and ζ; Σ_S is the covariance of 75,000 other points. In addition to the paper: ζ = auto, "
        "estimated from each batch, and the unbiased IsoScore, which needs no Σ_S. Mean and "
        "standard deviation of three batches each; dashed line: the score of the distribution itself. This figure "
        "needs no run.",
        kind="line",
        x_label="points in the batch",
        panels=(panel,),
        log_x=True,
    )
