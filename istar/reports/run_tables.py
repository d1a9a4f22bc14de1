"""Tables of one run and of several."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from rich.table import Table

from istar.files import write_text
from istar.results import RunRecord

if TYPE_CHECKING:
    import pandas as pd


def summary(record: RunRecord) -> Table:
    r"""One run: its headline metric, and IsoScore\* per layer before and after training."""
    headline = record.headline
    title = f"{record.config['task']['name']} · {method(record)} · {Path(record.config['model']['name']).name}"
    table = Table(title=title, title_justify="left", caption=_caption(record), caption_justify="left")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row(f"{headline['metric']} (epoch {headline['epoch']})", "", f"{100 * headline['value']:.2f}", "")
    for name, value in record.metrics.items():
        if name not in (headline["metric"], "loss"):
            table.add_row(name, "", f"{100 * value:.2f}", "")
    table.add_section()
    before, after = record.isotropy["before"], record.isotropy["after"]
    for layer in after:
        change = after[layer] - before[layer]
        table.add_row(_layer_name(layer), f"{before[layer]:.4f}", f"{after[layer]:.4f}", f"{change:+.4f}")
    return table


COLUMNS = ("task", "model", "method", "seed", "value", "constant", "epoch", "IsoScore*", "seconds")
_TITLED = (0, 1, 3)
"""Columns that go into the title where all runs agree on them."""


def comparison(records: Sequence[RunRecord]) -> Table:
    """Several runs, a row for each configuration; what they have in common stands in the title."""
    groups = [[comparison_row(runs) for runs in group] for group in by_task(records).values()]
    rows = [row for group in groups for row in group]
    common = [number for number in _TITLED if len({row[number] for row in rows}) == 1]
    title = " · ".join(f"{'seed ' * (COLUMNS[number] == 'seed')}{rows[0][number]}" for number in common)
    table = Table(title=title, title_justify="left", caption=_COMPARISON_CAPTION, caption_justify="left")
    shown = [number for number in range(len(COLUMNS)) if number not in common]
    for number in shown:
        table.add_column(COLUMNS[number], justify="left" if number < 3 else "right")
    for group in groups:
        for row in group:
            table.add_row(*(row[number] for number in shown))
        table.add_section()
    return table


_COMPARISON_CAPTION = (
    "Metrics in percent, beside those of a constant prediction; IsoScore* of layers 1 to L before → after training."
    " Over seeds: mean ± standard deviation."
)


def comparison_row(runs: Sequence[RunRecord]) -> list[str]:
    """The cells, under `COLUMNS`, of runs that differ in nothing but the seed; metrics in percent, means ± std."""
    first = runs[0]
    metric = first.headline["metric"]
    baseline = first.baseline.get(metric)
    before, after = (fmean([run.isotropy[when]["union"] for run in runs]) for when in ("before", "after"))
    collapsed = sum(any(run.collapsed.values()) for run in runs)
    number = f"{collapsed} " if len(runs) > 1 else ""
    epochs = sorted({run.headline["epoch"] for run in runs})
    return [
        f"{first.config['task']['name']}, {metric}",
        Path(first.config["model"]["name"]).name,
        method(first),
        ",".join(str(run.config["seed"]) for run in runs),
        spread([100 * run.headline["value"] for run in runs]) + (f" ({number}collapsed)" if collapsed else ""),
        "-" if baseline is None else f"{100 * baseline:.2f}",
        "-".join(map(str, (epochs[0], epochs[-1]) if len(epochs) > 1 else epochs)),
        f"{before:.4f} → {after:.4f}",
        f"{fmean([run.timing['total'] for run in runs]):.0f}",
    ]


def spread(values: Sequence[float]) -> str:
    """`62.53 ± 0.70`, the deviation with n - 1; one value alone."""
    return f"{values[0]:.2f}" if len(values) == 1 else f"{fmean(values):.2f} ± {stdev(values):.2f}"


def runs(frame: "pd.DataFrame") -> Table:
    """The most important columns of `istar.reports.run_frame.Runs.frame`; values are those of the validation set."""
    counts = frame["status"].value_counts()
    title = f"{len(frame)} runs: " + ", ".join(f"{count} {status}" for status, count in counts.items())
    table = Table(title=title, title_justify="left", caption=_COMPARISON_CAPTION, caption_justify="left")
    for column in ("task", "model", "method", "seed", "value", "constant", "epoch", "IsoScore*", "seconds", "status"):
        table.add_column(column, justify="left" if column in ("task", "model", "method", "status") else "right")
    # pandas says NaN for whatever is missing, of which a text would make a word.
    for run in frame.astype(object).where(frame.notna(), None).to_dict("records"):
        collapsed = " (collapsed)" if run["collapsed"] is True else ""
        metric = f", {run['metric']}" if run["metric"] else ""
        table.add_row(
            f"{run['task']}{metric}",
            run["model"],
            run["method"],
            str(run["seed"]),
            _shown(run["value"], 100, ".2f") + collapsed,
            _shown(run["constant"], 100, ".2f"),
            _shown(run["epoch"], 1, ".0f"),
            f"{_shown(run['isoscore_before'], 1, '.4f')} → {_shown(run['isoscore_after'], 1, '.4f')}",
            _shown(run["seconds"], 1, ".0f"),
            run["status"] if not run["error"] else f"{run['status']}: {run['error']}",
        )
    return table


def _shown(value: float | None, scale: float, form: str) -> str:
    return "-" if value is None else format(scale * value, form)


def by_task(records: Sequence[RunRecord]) -> dict[tuple[str, str], list[list[RunRecord]]]:
    """Runs by task and model, and those that differ in nothing but the seed together, all in order of appearance."""
    groups: dict[tuple[str, str], dict[str, list[RunRecord]]] = {}
    for record in records:
        key = (record.config["task"]["name"], Path(record.config["model"]["name"]).name)
        groups.setdefault(key, {}).setdefault(_without_seed(record), []).append(record)
    return {key: list(group.values()) for key, group in groups.items()}


def _without_seed(record: RunRecord) -> str:
    own = {key: value for key, value in record.config.items() if key not in ("seed", "logger", "run")}
    return json.dumps(own, sort_keys=True)


def markdown(records: Sequence[RunRecord]) -> str:
    """`comparison` as a Markdown table."""
    ordered = [runs for group in by_task(records).values() for runs in group]
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *map(comparison_row, ordered)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_markdown(records: Sequence[RunRecord], path: Path) -> None:
    """Write `markdown`."""
    write_text(path, markdown(records))


def method(record: RunRecord) -> str:
    """How a run regularizes, in the paper's words: Base, I-STAR λ=-1 ζ=0.4, CosReg λ=1."""
    reg = record.config["reg"]
    if reg["name"] == "none":
        return "Base"
    parts = ["I-STAR" if reg["name"] == "istar" else "CosReg", f"λ={reg['lambda']:g}"]
    if reg.get("estimator") == "unbiased":
        parts.append("unbiased")
    elif "zeta" in reg:
        parts.append("ζ=auto" if reg["zeta"] == "auto" else f"ζ={reg['zeta']:g}")
    parts += ["padding counted"] if reg["include_padding"] else []
    return " ".join(parts)


def _caption(record: RunRecord) -> str:
    metric = record.headline["metric"]
    lines = []
    if metric in record.baseline:
        lines.append(f"A constant prediction has {metric} {100 * record.baseline[metric]:.2f}.")
    collapsed = [name for name, is_so in record.collapsed.items() if is_so]
    lines += [f"Collapsed on {name}: all predictions are the same." for name in collapsed]
    lines.append(f"IsoScore* of {record.isotropy['points']} validation tokens; metrics in percent.")
    return "\n".join(lines)


def _layer_name(layer: str) -> str:
    return {"0": "IsoScore* embeddings", "union": "IsoScore* layers 1 to L"}.get(layer, f"IsoScore* layer {layer}")
