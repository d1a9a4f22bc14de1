"""Implements `istar power`: how many seeds a difference needs, or how small a difference so many seeds can find."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from istar.drawing.terminal import make_console, with_wide_text
from istar.errors import UserError
from istar.files.writing import to_csv
from istar.reports.configurations import add_selection_columns
from istar.reports.method_comparisons import MethodComparison, compare_methods
from istar.reports.paper_tables import EMPTY_CELL
from istar.reports.run_frame import read_runs
from istar.statistics import power
from istar.statistics.arguments import is_constant


def run(options: argparse.Namespace) -> None:
    """Answer the power question in a sentence or, with `--runs`, in a table with a row for each method and task."""
    if (options.sd is None) == (options.runs is None):
        raise UserError("istar power needs either --sd or --runs; for example istar power --sd 2.1 --difference 1.0")
    if options.difference is not None and options.pairs is not None:
        raise UserError("--difference and --pairs exclude each other: one is given, the other is the answer")
    if options.runs is None and options.difference is None and options.pairs is None:
        raise UserError("--sd needs --difference, for the number of seeds, or --pairs, for the smallest difference")
    rows = [_answer(options, options.sd)] if options.runs is None else _list_spreads(options)
    if options.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif options.runs is None:
        print(_say_answer(options))
    elif not (console := make_console()).is_terminal:
        print(to_csv(pd.DataFrame(rows), separator="\t"), end="")
    else:
        console.print(with_wide_text(_make_spread_table(options, rows)))


def _say_answer(options: argparse.Namespace) -> str:
    if options.pairs is not None:
        return power.smallest_difference_sentence(options.sd, options.pairs, options.alpha, options.power)
    return power.pairs_needed_sentence(options.difference, options.sd, options.alpha, options.power)


def _answer(options: argparse.Namespace, sd: float, num_seeds: int = 0) -> dict[str, Any]:
    """Return the seeds that `--difference` needs, or the smallest difference with `--pairs` or `num_seeds` seeds."""
    if options.difference is not None:
        return {"seeds_needed": power.pairs_needed(options.difference, sd, options.alpha, options.power)}
    pairs = num_seeds if options.pairs is None else options.pairs
    return {"smallest_difference": power.smallest_difference(sd, pairs, options.alpha, options.power)}


def _list_spreads(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the spread of each method's differences from Base, with the answer to the question or a note why not."""
    rows = []
    for comparison in compare_with_base(options.runs, options.exclude):
        method = comparison.method
        differences = list(comparison.difference_by_seed.values())
        row: dict[str, Any] = {
            "model": method.model, "task": method.task, "metric": method.metric, "method": method.name,
            "seeds": len(differences), "sd": None, "low": None, "high": None,
            "seeds_needed" if options.difference is not None else "smallest_difference": None, "note": "",
        }  # fmt: skip
        if len(differences) < 2:
            row["note"] = "needs 2 seeds"
        elif is_constant(np.array(differences)):
            row |= {"sd": 0.0, "note": "all differences are equal"}
        else:
            sd = float(np.std(differences, ddof=1))
            low, high = power.sd_interval(sd, len(differences))
            row |= {"sd": sd, "low": low, "high": high, **_answer(options, sd, len(differences))}
        rows.append(row)
    return rows


def _make_spread_table(options: argparse.Namespace, rows: list[dict[str, Any]]) -> Table:
    """Return the rows of `_list_spreads` as a table for the terminal."""
    if options.difference is not None:
        answer_header = f"seeds for a\ndifference of {options.difference:g}"
    elif options.pairs is not None:
        answer_header = f"smallest difference\nwith {options.pairs} seeds"
    else:
        answer_header = "smallest difference\nwith these seeds"
    table = Table(
        title=f"Differences from Base over the same seeds (alpha {options.alpha:g}, power {options.power:g})",
        caption="sd: standard deviation (ddof = 1) of the paired differences, with its 95% interval; in percentage "
        "points, for losses and perplexities in their own unit. The answer is for the sd itself, by the two-sided "
        "paired t-test without a correction for the number of rows.",
    )
    for column in ("model", "task, metric", "method"):
        table.add_column(column, overflow="fold")
    for column in ("seeds", "sd", "95% interval", answer_header):
        table.add_column(column, justify="right")
    for row in rows:
        sd = EMPTY_CELL if row["sd"] is None else f"{row['sd']:.3g}"
        interval = EMPTY_CELL if row["low"] is None else f"{row['low']:.3g} to {row['high']:.3g}"
        answer = row.get("seeds_needed", row.get("smallest_difference"))
        answer_text = row["note"] or (f"{answer:.3g}" if isinstance(answer, float) else str(answer))
        table.add_row(
            row["model"], f"{row['task']}, {row['metric']}", row["method"], str(row["seeds"]), sd, interval, answer_text
        )
    return table


def compare_with_base(folder: Path, left_out: Sequence[str] = ()) -> list[MethodComparison]:
    """Return the comparisons of methods with Base that have a seed in common, for the runs in a folder.

    `left_out` has patterns of the names of runs to leave out.
    """
    compared_methods = compare_methods(add_selection_columns(read_runs(folder, keep_records=True, left_out=left_out)))
    comparisons = [comparison for comparison in compared_methods.comparisons if comparison.difference_by_seed]
    if not comparisons:
        raise UserError(
            f"{folder} holds no finished runs of Base and another method with the same task, model and seed; run both "
            "with the same seeds"
        )
    return comparisons
