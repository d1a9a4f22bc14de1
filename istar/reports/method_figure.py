"""The report's figure of all methods: the isotropy after the training against the headline metric."""

from itertools import groupby

import numpy as np

from istar.figures.plot import Line, Panel, Plot
from istar.reports.cells import all_collapsed
from istar.reports.method_comparisons import Comparisons, Method
from istar.reports.run_figures import MARKS
from istar.scores import axis_label


def plot(compared: Comparisons) -> Plot:
    """Return a figure with a panel for each model and task, and in it a point for each method.

    Unlike Figure 3 of the paper, it shows every method in the settings of the table of all methods, which may differ in
    more than lambda. A panel needs two methods.
    """
    panels = []
    by_task = groupby(compared.methods, lambda method: (method.model, method.task, method.metric))
    for (model, task, metric), group in by_task:
        points = tuple(_point(method) for method in group)
        if len(points) > 1:
            panels.append(Panel(model, task, points, "", axis_label(metric)))
    return Plot(
        "all_methods",
        "All methods: isotropy and performance",
        "IsoScore of layers 1 to L on the validation set after the training, against the headline metric: a point per "
        "method in the settings of the table of all methods, mean over seeds, bars: standard deviations. "
        f"{MARKS}",
        "points",
        "IsoScore",
        tuple(panels),
    )


def _point(method: Method) -> Line:
    """Return the mean isotropy and the mean headline metric of a method, with their standard deviations."""
    isotropy, scores = method.runs["isoscore_after"].astype(float), list(method.scores.values())
    # A single run has no standard deviation.
    errors = np.nan_to_num([isotropy.std(), np.std(scores, ddof=1) if len(scores) > 1 else 0.0])
    return Line(
        method.name,
        (float(isotropy.mean()),),
        (float(np.mean(scores)),),
        (float(errors[0]),),
        (float(errors[1]),),
        tuple(method.scores),
        (len(method.runs),),
        (all_collapsed(method.runs),),
    )
