"""The report's figure of all methods: the isotropy after the training against the headline metric."""

from itertools import groupby

from istar.figures.plot import Panel, Plot
from istar.reports.method_comparisons import Comparisons
from istar.reports.run_figures import MARKS, mean_point
from istar.scores import axis_label


def plot(compared: Comparisons) -> Plot:
    """Return a figure with a panel for each model and task, and in it a point for each method.

    Unlike Figure 3 of the paper, it shows every method in the settings of the table of all methods, which may differ in
    more than lambda. A panel needs two methods.
    """
    panels = []
    by_task = groupby(compared.methods, lambda method: (method.model, method.task, method.metric))
    for (model, task, metric), group in by_task:
        points = tuple(
            mean_point(method.name, method.runs, method.runs.set_index("folder")["isoscore_after"]) for method in group
        )
        if len(points) > 1:
            panels.append(Panel(model, task, points, "", axis_label(metric)))
    return Plot(
        "all_methods",
        "All methods: isotropy and performance",
        "The figure below the table shows IsoScore of layers 1 to L on the validation set after the training against "
        "the headline metric: a point per method in the settings of the table, mean over seeds; bars are standard "
        f"deviations. {MARKS}",
        "points",
        "IsoScore",
        tuple(panels),
    )
