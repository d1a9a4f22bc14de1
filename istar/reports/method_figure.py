"""The report's figure of all methods: the isotropy after training against the headline metric."""

from itertools import groupby

from istar.drawing.plot import Panel, Plot
from istar.records.metric_names import axis_label
from istar.reports.method_comparisons import ComparedMethods
from istar.reports.run_figures import MARKER_LEGEND, build_mean_point


def build_all_methods_plot(compared_methods: ComparedMethods) -> Plot:
    """Return the figure of IsoScore against the headline metric: a panel per model and task, a point per method.

    Unlike Figure 3 of the paper, it shows every method in the settings of the table of all methods, which may differ in
    more than lambda. Models and tasks with a single method have no panel.
    """
    panels = []
    methods_by_task = groupby(compared_methods.methods, lambda method: (method.model, method.task, method.metric))
    for (model, task, metric), methods in methods_by_task:
        points = tuple(
            build_mean_point(method.name, method.runs, method.runs.set_index("folder")["isoscore_after"])
            for method in methods
        )
        if len(points) > 1:
            panels.append(Panel(model, task, points, fixed_settings="", y_label=axis_label(metric)))
    return Plot(
        name="all_methods",
        title="All methods: isotropy and performance",
        caption="The figure below the table shows IsoScore of layers 1 to L on the validation set after training "
        "against the headline metric: a point per method in the settings of the table, mean over seeds; error bars are "
        f"standard deviations. {MARKER_LEGEND}",
        kind="points",
        x_label="IsoScore",
        panels=tuple(panels),
    )
