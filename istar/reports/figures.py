"""Figures of several runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from istar.reports.tables import by_task, method
from istar.results import RunRecord

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's, told apart by colour-blind readers."""


def comparison(records: Sequence[RunRecord], path: Path) -> None:
    r"""The headline metric, and IsoScore\* layer by layer: a row of panels per task and model, a colour per run.

    PNG or SVG by the path's suffix.
    """
    groups = by_task(records)
    figure, panels = plt.subplots(
        len(groups), 2, figsize=(10, 4 * len(groups)), layout="constrained", width_ratios=(2, 3), squeeze=False
    )
    for (left, right), ((task, model), group) in zip(panels, groups.items(), strict=True):
        for number, record in enumerate(group):
            colour = COLOURS[number % len(COLOURS)]
            _headline_bar(left, number, record, colour)
            _layer_line(right, record, colour)
        _finish_headlines(left, group)
        _finish_layers(right, group)
        right.set_title(f"{task} · {model}", fontsize="medium", loc="right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _headline_bar(axes: Axes, number: int, record: RunRecord, colour: str) -> None:
    value = 100 * record.headline["value"]
    axes.barh(number, value, color=colour, height=0.6)
    place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "ha": "left", "va": "center"}
    axes.annotate(f"{value:.1f}", (max(value, 0), number), **place)


def _layer_line(axes: Axes, record: RunRecord, colour: str) -> None:
    scores = {int(layer): score for layer, score in record.isotropy["after"].items() if layer != "union"}
    axes.plot(list(scores), list(scores.values()), marker="o", color=colour, label=method(record))


def _finish_headlines(axes: Axes, records: Sequence[RunRecord]) -> None:
    axes.set_yticks(range(len(records)), [method(record) for record in records])
    axes.invert_yaxis()
    metrics = sorted({record.headline["metric"] for record in records})
    axes.set_xlabel(f"{' / '.join(metrics)} on the validation set, percent")
    axes.spines[["top", "right"]].set_visible(False)
    baselines = {record.baseline.get(record.headline["metric"]) for record in records}
    if len(baselines) == 1 and None not in baselines:
        axes.axvline(100 * baselines.pop(), color="black", linestyle="--", linewidth=1)  # type: ignore[operator]
        axes.set_title("dashed: a constant prediction", fontsize="medium", loc="left")


def _finish_layers(axes: Axes, records: Sequence[RunRecord]) -> None:
    before = {int(layer): score for layer, score in records[0].isotropy["before"].items() if layer != "union"}
    axes.plot(list(before), list(before.values()), color="black", linestyle=":", label="before training")
    axes.set_xticks(list(before))
    axes.set_xlabel("layer (0: embeddings)")
    axes.set_ylabel("IsoScore*")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
