"""Figure that compares several runs by headline metric and by IsoScore of each layer."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean, stdev

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from istar.figures.drawing import COLOURS, PNG_DPI
from istar.reports.run_tables import by_task, method
from istar.results import RunRecord
from istar.scores import axis_label, displayed

Configurations = Sequence[Sequence[RunRecord]]  # the runs of each configuration of a task and a model


def comparison(records: Sequence[RunRecord], path: Path) -> None:
    """Draw the headline metric and IsoScore by layer, with a row of panels per task and model, and save the figure.

    Each configuration has a colour and shows the mean over its seeds; whiskers are standard deviations. The suffix of
    `path` decides between PNG and SVG.
    """
    groups = by_task(records)
    figure, panels = plt.subplots(
        len(groups), 2, figsize=(10, 4 * len(groups)), layout="constrained", width_ratios=(2, 3), squeeze=False
    )
    for (left, right), ((task, model), configurations) in zip(panels, groups.items(), strict=True):
        _draw_headline_metrics(left, configurations)
        _draw_layers(right, configurations)
        right.set_title(f"{task} · {model}", fontsize="medium", loc="right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=PNG_DPI)
    plt.close(figure)


def _draw_headline_metrics(axes: Axes, configurations: Configurations) -> None:
    """Draw a bar per configuration, and the score of a constant prediction if it is the same for all of them."""
    for number, (runs, colour) in enumerate(zip(configurations, cycle(COLOURS), strict=False)):
        values = [displayed(run.headline["metric"], run.headline["value"]) for run in runs]
        value, deviation = fmean(values), stdev(values) if len(values) > 1 else 0.0
        axes.barh(number, value, color=colour, height=0.6, xerr=deviation or None, capsize=3)
        label_at = (max(value + deviation, 0), number)
        axes.annotate(f"{value:.1f}", label_at, (4, 0), textcoords="offset points", ha="left", va="center")
    axes.set_yticks(range(len(configurations)), [method(runs[0]) for runs in configurations])
    axes.invert_yaxis()
    metrics = sorted({runs[0].headline["metric"] for runs in configurations})
    axes.set_xlabel(f"{' / '.join(map(axis_label, metrics))}, on the validation set")
    axes.spines[["top", "right"]].set_visible(False)
    baselines = {runs[0].baseline.get(runs[0].headline["metric"]) for runs in configurations}
    baseline = baselines.pop() if len(baselines) == 1 else None
    if baseline is not None:
        axes.axvline(displayed(metrics[0], baseline), color="black", linestyle="--", linewidth=1)
        axes.set_title("dashed: a constant prediction", fontsize="medium", loc="left")


def _draw_layers(axes: Axes, configurations: Configurations) -> None:
    """Draw IsoScore by layer after training for each configuration, and a dotted line for the time before it."""
    before = configurations[0][0].isotropy["before"]
    layers = [layer for layer in before if layer != "union"]
    numbers = list(map(int, layers))
    for runs, colour in zip(configurations, cycle(COLOURS), strict=False):
        scores = [fmean([run.isotropy["after"][layer] for run in runs]) for layer in layers]
        axes.plot(numbers, scores, marker="o", color=colour, label=method(runs[0]))
    axes.plot(numbers, [before[layer] for layer in layers], color="black", linestyle=":", label="before training")
    axes.set_xticks(numbers)
    axes.set_xlabel("layer (0: embeddings)")
    axes.set_ylabel("IsoScore")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
