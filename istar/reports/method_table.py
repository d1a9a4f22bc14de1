"""The report's table of all methods: each penalty with each of its settings, compared with Base over the same seeds."""

from itertools import groupby
from typing import Any

import pandas as pd

from istar.pages.sheets import Entry, Sheet
from istar.reports.cells import best_group, describe, models, row_dicts, tasks
from istar.reports.paper_tables import NONE, format_spread
from istar.reports.run_tables import format_number
from istar.reports.statistics import compare_paired, spread
from istar.scores import displayed


def methods(frame: pd.DataFrame) -> Sheet:
    """Return a row for each method of every model and task, with its difference from Base and a 95% interval.

    Table 1 has one row for I-STAR; this table has one for each lambda, zeta, and further setting in the method's name.
    `frame` is one of `cells.prepare`.
    """
    usable = frame[frame["usable"]]
    rows = [
        row
        for model in models(usable)
        for task in tasks(usable[usable["model"] == model])
        for row in _rows(usable[(usable["model"] == model) & (usable["task"] == task)])
    ]
    return Sheet(
        "methods",
        "All methods",
        "Headline metric on the validation set (percent, except losses and perplexities), mean ± standard deviation "
        "(ddof = 1) over seeds. Minus Base: mean difference over the seeds that both have, with its 95% interval by "
        "Student's t, not corrected for the number of rows. IsoScore: layers 1 to L before → after training.",
        ("task, metric", "method", "mean ± std", "seeds", "minus\nBase", "95% interval", "collapsed", "IsoScore",
         "settings"),
        {model: [_entries(row) for row in group] for model, group in groupby(rows, key=lambda row: str(row["model"]))},
        pd.DataFrame(rows),
        ("Each method is shown with the settings that have the most seeds, among equals with the best mean.",),
        row_headers=2,
    )  # fmt: skip


def _rows(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of one model and task: Base first, then the other methods by name."""
    chosen = chosen_runs(runs)
    base = next((group for group in chosen.values() if is_base(group)), runs.head(0))
    return [_row(name, group, base) for name, group in chosen.items()]


def chosen_runs(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the runs of each method of one model and task, by seed: Base first, then the other methods by name.

    The runs of a method have one configuration: of those tried, the one with the most seeds, among equals with the best
    mean.
    """
    chosen = {
        str(name): group[group["config_hash"] == best_group(group, "config_hash")].sort_values("seed")
        for name, group in runs.groupby("method")
    }
    return dict(sorted(chosen.items(), key=lambda item: (not is_base(item[1]), item[0])))


def is_base(runs: pd.DataFrame) -> bool:
    """Return whether the runs of a method are those of Base."""
    return bool(runs["family"].iloc[0] == "base")


def _row(name: str, runs: pd.DataFrame, base: pd.DataFrame) -> dict[str, Any]:
    """Return the row of a method, whose runs differ only in the seed."""
    first = row_dicts(runs.head(1))[0]
    scores = score_by_seed(runs)
    average = spread(list(scores.values()))
    row = {
        "model": first["model"],
        "task": first["task"],
        "metric": first["metric"],
        "method": name,
        "mean": average.mean,
        "std": average.std,
        "seeds": average.count,
        "minus_base": None,
        "low": None,
        "high": None,
        "collapsed": int(runs["collapsed"].eq(True).sum()),
        "isoscore_before": float(runs["isoscore_before"].mean()),
        "isoscore_after": float(runs["isoscore_after"].mean()),
        "settings": describe(first),
    }
    if first["family"] != "base" and not base.empty:
        comparison = compare_paired(scores, score_by_seed(base))
        row["minus_base"] = comparison.difference
        row["low"], row["high"] = comparison.interval or (None, None)
    return row


def score_by_seed(runs: pd.DataFrame) -> dict[int, float]:
    """Return the headline metric of each run, as `istar.scores.displayed` gives it, by seed."""
    triples = zip(runs["seed"], runs["metric"], runs["value"].astype(float), strict=True)
    return {int(seed): displayed(metric, value) for seed, metric, value in triples}


def _entries(row: dict[str, Any]) -> list[Entry]:
    interval = NONE if row["low"] is None else f"{row['low']:+.2f} to {row['high']:+.2f}"
    numbers = [
        format_spread(row["mean"], row["std"]),
        str(row["seeds"]),
        format_number(row["minus_base"], "+.2f"),
        interval,
        str(row["collapsed"]) if row["collapsed"] else NONE,
        f"{row['isoscore_before']:.3f} → {row['isoscore_after']:.3f}",
    ]
    return [
        Entry(f"{row['task']}, {row['metric']}"),
        Entry(row["method"]),
        *(Entry(number, number=True) for number in numbers),
        Entry(row["settings"]),
    ]
