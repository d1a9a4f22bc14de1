"""Figure that compares several runs by headline metric and by IsoScore of each layer."""

import io
from collections.abc import Sequence
from itertools import cycle
from statistics import fmean, stdev

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from istar.drawing.rendering import COLOURS, PNG_DPI
from istar.records.identity import label_method
from istar.records.metric_names import axis_label, displayed
from istar.records.results import RunRecord
from istar.records.run_rows import group_by_task

Configurations = Sequence[Sequence[RunRecord]]  # the runs of each configuration of a task and a model


def draw_comparison(records: Sequence[RunRecord]) -> dict[str, bytes]:
    """Draw the headline metric and IsoScore by layer, with a row of panels per task and model.

    Each configuration has a colour and shows the mean over its seeds; error bars are standard deviations.

    Returns:
        The contents of `comparison.png` and `comparison.svg` by file name.
    """
    configurations_by_task = group_by_task(records)
    num_rows = len(configurations_by_task)
    figure, panels = plt.subplots(
        num_rows, 2, figsize=(10, 4 * num_rows), layout="constrained", width_ratios=(2, 3), squeeze=False
    )
    for (metric_axes, isoscore_axes), ((task, model), configurations) in zip(
        panels, configurations_by_task.items(), strict=True
    ):
        _draw_headline_metrics(metric_axes, configurations)
        _draw_isoscore_by_layer(isoscore_axes, configurations)
        isoscore_axes.set_title(f"{task} · {model}", fontsize="medium", loc="right")
    images = {}
    for suffix in ("png", "svg"):
        file = io.BytesIO()
        figure.savefig(file, format=suffix, dpi=PNG_DPI)
        images[f"comparison.{suffix}"] = file.getvalue()
    plt.close(figure)
    return images


def _draw_headline_metrics(axes: Axes, configurations: Configurations) -> None:
    """Draw a horizontal bar with the mean headline metric of each configuration, and its standard deviation over seeds.

    A dashed line shows the score of a constant prediction if it is the same for all configurations.
    """
    for bar_index, (runs, colour) in enumerate(zip(configurations, cycle(COLOURS), strict=False)):
        scores = [displayed(run.headline["metric"], run.headline["value"]) for run in runs]
        mean, std = fmean(scores), stdev(scores) if len(scores) > 1 else 0.0
        axes.barh(bar_index, mean, color=colour, height=0.6, xerr=std or None, capsize=3)
        label_position = (max(mean + std, 0), bar_index)
        axes.annotate(f"{mean:.1f}", label_position, (4, 0), textcoords="offset points", ha="left", va="center")
    axes.set_yticks(range(len(configurations)), [label_method(runs[0].config) for runs in configurations])
    axes.invert_yaxis()
    metrics = sorted({runs[0].headline["metric"] for runs in configurations})
    axes.set_xlabel(f"{' / '.join(map(axis_label, metrics))}, on the validation set")
    axes.spines[["top", "right"]].set_visible(False)
    baselines = {runs[0].baseline.get(runs[0].headline["metric"]) for runs in configurations}
    baseline = baselines.pop() if len(baselines) == 1 else None
    if baseline is not None:
        axes.axvline(displayed(metrics[0], baseline), color="black", linestyle="--", linewidth=1)
        axes.set_title("dashed line: a constant prediction", fontsize="medium", loc="left")


def _draw_isoscore_by_layer(axes: Axes, configurations: Configurations) -> None:
    """Draw IsoScore by layer: a line per configuration after training, and a dotted line before training.

    The dotted line shows the first run of the first configuration.
    """
    score_by_layer_before = configurations[0][0].isotropy["before"]
    layer_keys = [layer_key for layer_key in score_by_layer_before if layer_key != "union"]
    layer_indices = list(map(int, layer_keys))
    for runs, colour in zip(configurations, cycle(COLOURS), strict=False):
        mean_scores = [fmean([run.isotropy["after"][layer_key] for run in runs]) for layer_key in layer_keys]
        axes.plot(layer_indices, mean_scores, marker="o", color=colour, label=label_method(runs[0].config))
    scores_before = [score_by_layer_before[layer_key] for layer_key in layer_keys]
    axes.plot(layer_indices, scores_before, color="black", linestyle=":", label="before training")
    axes.set_xticks(layer_indices)
    axes.set_xlabel("layer (0: embeddings)")
    axes.set_ylabel("IsoScore")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
