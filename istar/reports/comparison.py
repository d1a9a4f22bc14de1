r"""Figure that compares several runs by headline metric and by IsoScore\* of each layer."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from istar.figures.drawing import COLOURS
from istar.reports.run_tables import by_task, method
from istar.results import RunRecord


def comparison(records: Sequence[RunRecord], path: Path) -> None:
    r"""Draw the headline metric and IsoScore\* by layer, with a row of panels per task and model, and save the figure.

    Each configuration has a colour and shows the mean over its seeds; whiskers are standard deviations. The suffix of
    `path` decides between PNG and SVG.
    """
    groups = by_task(records)
    figure, panels = plt.subplots(
        len(groups), 2, figsize=(10, 4 * len(groups)), layout="constrained", width_ratios=(2, 3), squeeze=False
    )
    for (left, right), ((task, model), group) in zip(panels, groups.items(), strict=True):
        for number, runs in enumerate(group):
            colour = COLOURS[number % len(COLOURS)]
            _draw_headline_bar(left, number, runs, colour)
            _draw_layer_line(right, runs, colour)
        _label_headline_panel(left, group)
        _label_layer_panel(right, group)
        right.set_title(f"{task} · {model}", fontsize="medium", loc="right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_headline_bar(axes: Axes, number: int, runs: Sequence[RunRecord], colour: str) -> None:
    values = [100 * run.headline["value"] for run in runs]
    value, deviation = fmean(values), stdev(values) if len(values) > 1 else 0.0
    axes.barh(number, value, color=colour, height=0.6, xerr=deviation or None, capsize=3)
    label_at = (max(value + deviation, 0), number)
    axes.annotate(f"{value:.1f}", label_at, (4, 0), textcoords="offset points", ha="left", va="center")


def _draw_layer_line(axes: Axes, runs: Sequence[RunRecord], colour: str) -> None:
    layers = [layer for layer in runs[0].isotropy["after"] if layer != "union"]
    scores = [fmean([run.isotropy["after"][layer] for run in runs]) for layer in layers]
    axes.plot(list(map(int, layers)), scores, marker="o", color=colour, label=method(runs[0]))


def _label_headline_panel(axes: Axes, group: Sequence[Sequence[RunRecord]]) -> None:
    """Label the axes; draw the score of a constant prediction if it is the same for all runs."""
    axes.set_yticks(range(len(group)), [method(runs[0]) for runs in group])
    axes.invert_yaxis()
    metrics = sorted({runs[0].headline["metric"] for runs in group})
    axes.set_xlabel(f"{' / '.join(metrics)} on the validation set, percent")
    axes.spines[["top", "right"]].set_visible(False)
    baselines = {runs[0].baseline.get(runs[0].headline["metric"]) for runs in group}
    baseline = baselines.pop() if len(baselines) == 1 else None
    if baseline is not None:
        axes.axvline(100 * baseline, color="black", linestyle="--", linewidth=1)
        axes.set_title("dashed: a constant prediction", fontsize="medium", loc="left")


def _label_layer_panel(axes: Axes, group: Sequence[Sequence[RunRecord]]) -> None:
    r"""Label the axes and add a dotted line for IsoScore\* before training."""
    before = {int(layer): score for layer, score in group[0][0].isotropy["before"].items() if layer != "union"}
    axes.plot(list(before), list(before.values()), color="black", linestyle=":", label="before training")
    axes.set_xticks(list(before))
    axes.set_xlabel("layer (0: embeddings)")
    axes.set_ylabel("IsoScore*")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
