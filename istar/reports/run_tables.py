"""Tables for the terminal and Markdown: the results of one run, and a comparison of several runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from rich.table import Table

from istar.results import RunRecord
from istar.scores import displayed, is_lower_better

if TYPE_CHECKING:
    import pandas as pd


def summary(record: RunRecord) -> Table:
    """Return a table of one finished run: its metrics, and IsoScore per layer before and after training."""
    headline = record.headline
    title = f"{record.config['task']['name']} · {method(record)} · {Path(record.config['model']['name']).name}"
    table = Table(title=title, title_justify="left", caption=_caption(record), caption_justify="left")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="left" if not column else "right")
    metric = headline["metric"]
    others = [name for name in record.metrics if name not in (metric, "loss")]
    for name, label in [(metric, f"{metric} (epoch {headline['epoch']})"), *((name, name) for name in others)]:
        value = headline["value"] if name == metric else record.metrics[name]
        # A head with random weights has no metric of interest; a language model has.
        before = _format(name, record.metrics_before.get(name)) if is_lower_better(metric) else ""
        table.add_row(label, before, _format(name, value), "")
    table.add_section()
    before, after = record.isotropy["before"], record.isotropy["after"]
    names = {"0": "embeddings", "union": "layers 1 to L"}
    for layer in after:
        change = after[layer] - before[layer]
        name = f"IsoScore {names.get(layer, f'layer {layer}')}"
        table.add_row(name, f"{before[layer]:.4f}", f"{after[layer]:.4f}", f"{change:+.4f}")
    return table


COLUMNS = ("task", "model", "method", "seed", "value", "constant", "epoch", "IsoScore", "seconds")
_TITLE_COLUMNS = (0, 1, 3)  # columns that move into the title if they have the same value in all rows


def comparison(records: Sequence[RunRecord]) -> Table:
    """Return a table with one row per configuration; the title names the task, model and seed that all rows share."""
    groups = [[comparison_row(runs) for runs in group] for group in by_task(records).values()]
    rows = [row for group in groups for row in group]
    common = [number for number in _TITLE_COLUMNS if len({row[number] for row in rows}) == 1]
    title = " · ".join(f"{'seed ' * (COLUMNS[number] == 'seed')}{rows[0][number]}" for number in common)
    table = Table(title=title, title_justify="left", caption=_COMPARISON_CAPTION, caption_justify="left")
    columns = [number for number in range(len(COLUMNS)) if number not in common]
    for number in columns:
        table.add_column(COLUMNS[number], justify="left" if number < 3 else "right")
    for group in groups:
        for row in group:
            table.add_row(*(row[number] for number in columns))
        table.add_section()
    return table


_COMPARISON_CAPTION = (
    "Metrics in percent, beside those of a constant prediction; IsoScore of layers 1 to L before → after training."
    " Over seeds: mean ± standard deviation."
)


def comparison_row(runs: Sequence[RunRecord]) -> list[str]:
    """Return the row, with the columns `COLUMNS`, for runs that differ only in the seed.

    Metrics are in percent; the headline metric is the mean ± standard deviation over the seeds.
    """
    first = runs[0]
    metric = first.headline["metric"]
    values = [displayed(metric, run.headline["value"]) for run in runs]
    score = f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(runs) > 1 else "")
    collapsed = sum(any(run.collapsed.values()) for run in runs)
    if collapsed:
        score += f" ({collapsed} collapsed)" if len(runs) > 1 else " (collapsed)"
    before, after = (fmean([run.isotropy[when]["union"] for run in runs]) for when in ("before", "after"))
    epochs = sorted({run.headline["epoch"] for run in runs})
    return [
        f"{first.config['task']['name']}, {metric}",
        Path(first.config["model"]["name"]).name,
        method(first),
        ",".join(str(run.config["seed"]) for run in runs),
        score,
        _format(metric, first.baseline.get(metric)),
        str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]}-{epochs[-1]}",
        f"{before:.4f} → {after:.4f}",
        f"{fmean([run.timing['total'] for run in runs]):.0f}",
    ]


def runs(frame: "pd.DataFrame") -> Table:
    """Return a table with one row per run and the main columns of `istar.reports.run_frame.Runs.frame`."""
    counts = frame["status"].value_counts()
    title = f"{len(frame)} run{'s' * (len(frame) != 1)}: " + ", ".join(
        f"{count} {status}" for status, count in counts.items()
    )
    table = Table(title=title, title_justify="left", caption=_COMPARISON_CAPTION, caption_justify="left")
    for column in (*COLUMNS, "status"):
        table.add_column(column, justify="left" if column in ("task", "model", "method", "status") else "right")
    # pandas marks missing values as NaN, which would be printed as a word.
    for run in frame.astype(object).where(frame.notna(), None).to_dict("records"):
        collapsed = " (collapsed)" if run["collapsed"] is True else ""
        metric = f", {run['metric']}" if run["metric"] else ""
        table.add_row(
            f"{run['task']}{metric}",
            run["model"],
            run["method"],
            str(run["seed"]),
            _format(run["metric"], run["value"]) + collapsed,
            _format(run["metric"], run["constant"]),
            format_number(run["epoch"], ".0f"),
            f"{format_number(run['isoscore_before'], '.4f')} → {format_number(run['isoscore_after'], '.4f')}",
            format_number(run["seconds"], ".0f"),
            run["status"] if not run["error"] else f"{run['status']}: {run['error']}",
        )
    return table


def format_number(value: float | None, format_spec: str) -> str:
    """Format a number, or None as a dash; a negative number that rounds to zero becomes `+0.00`, not `-0.00`."""
    if value is None:
        return "-"
    text = format(value, format_spec)
    return text.replace("-", "+", 1) if "+" in format_spec and not text.strip("-0.") else text


def _format(metric: str, value: float | None) -> str:
    """Format the value of a metric as `istar.scores.displayed` does, or None as a dash."""
    return "-" if value is None else f"{displayed(metric, value):.2f}"


def by_task(records: Sequence[RunRecord]) -> dict[tuple[str, str], list[list[RunRecord]]]:
    """Group runs by task and model, and within these by configuration (all settings except the seed).

    Groups and runs keep the order of `records`.
    """
    groups: dict[tuple[str, str], dict[str, list[RunRecord]]] = {}
    for record in records:
        key = (record.config["task"]["name"], Path(record.config["model"]["name"]).name)
        settings = {name: value for name, value in record.config.items() if name not in ("seed", "logger", "run")}
        groups.setdefault(key, {}).setdefault(json.dumps(settings, sort_keys=True), []).append(record)
    return {key: list(group.values()) for key, group in groups.items()}


def selection_rank(merits: Sequence[float]) -> tuple[int, float]:
    """Return the rank of a configuration, from `selection_merit` by seed: most seeds first, then the highest mean."""
    return len(merits), fmean(merits)


def markdown(records: Sequence[RunRecord]) -> str:
    """Return the rows of `comparison` as a Markdown table."""
    ordered = [runs for group in by_task(records).values() for runs in group]
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *map(comparison_row, ordered)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


_METHOD_NAMES = {
    "istar": "I-STAR",
    "cosreg": "CosReg",
    "vicreg": "VICReg",
    "decorrelation": "decorrelation",
    "gor": "GOR",
    "uniformity": "uniformity",
    "kurtosis": "kurtosis",
    "simctg": "SimCTG",
    "sigreg": "SIGReg",
    "spectrum": "spectrum control",
    "random_direction": "random direction",
    "weight_decay": "weight decay",
}


def method(record: RunRecord) -> str:
    """Return the method of a run as the paper names it, e.g. `Base`, `I-STAR λ=-1 ζ=0.4` or `CosReg λ=1`.

    Settings of the penalty that the paper does not have follow, such as `on output embeddings` or `content tokens`.
    """
    reg = record.config["reg"]
    if reg["name"] == "none":
        return "Base"
    parts = [_METHOD_NAMES.get(reg["name"], reg["name"]), f"λ={reg['lambda']:g}"]
    if (estimator := reg.get("estimator", "shrinkage")) != "shrinkage":
        parts.append(estimator.replace("_", " "))
    elif "zeta" in reg:
        parts.append("ζ=auto" if reg["zeta"] == "auto" else f"ζ={reg['zeta']:g}")
    parts += ["padding counted"] if reg.get("include_padding") else []
    if reg.get("target_score") is not None:
        side = "" if reg.get("side", "both") == "both" else f" if {reg['side']}"
        parts.append(f"to {reg['target_score']}{side}")
    if (target := reg.get("target", "hidden_states")) != "hidden_states":
        parts.append(f"on {target.replace('_', ' ')}")
    if (points := reg.get("points", "all")) != "all":
        parts.append(f"{points} tokens")
    if reg.get("within") is not None:
        parts.append("within classes")
    return " ".join(parts)


def _caption(record: RunRecord) -> str:
    """Return the lines below the summary of a run: its baseline, collapsed sets and number of tokens."""
    metric = record.headline["metric"]
    lines = []
    if metric in record.baseline:
        peer = "The frequency of each token alone" if is_lower_better(metric) else "A constant prediction"
        lines.append(f"{peer} has {metric} {_format(metric, record.baseline[metric])}.")
    if record.selection.get("metric", metric) != metric:
        chosen_by = record.selection["metric"]
        lines.append(f"The epoch was chosen by {chosen_by} {_format(chosen_by, record.selection['value'])}.")
    collapsed = [name for name, is_collapsed in record.collapsed.items() if is_collapsed]
    lines += [f"Collapsed on {name}: all predictions are the same." for name in collapsed]
    unit = "" if is_lower_better(metric) else "; metrics in percent"
    lines.append(f"IsoScore of {record.isotropy['points']} validation tokens{unit}.")
    return "\n".join(lines)
