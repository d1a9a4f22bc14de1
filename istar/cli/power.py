"""Implements `istar power`: how many seeds a difference needs, or how small a difference so many seeds can find."""

import argparse
from pathlib import Path

import numpy as np
from rich.table import Table

from istar.drawing.terminal import make_console
from istar.errors import UserError
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
    console = make_console()
    if options.runs is not None:
        console.print(_make_spread_table(options))
    elif options.pairs is not None:
        answer = power.smallest_difference_sentence(options.sd, options.pairs, options.alpha, options.power)
        console.out(answer, highlight=False)
    else:
        answer = power.pairs_needed_sentence(options.difference, options.sd, options.alpha, options.power)
        console.out(answer, highlight=False)


def _make_spread_table(options: argparse.Namespace) -> Table:
    """Return a table of the spread of each method's differences from Base, with the answer to the question."""
    comparisons = compare_with_base(options.runs)
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
        title_justify="left",
        caption_justify="left",
    )
    for column in ("model", "task, metric", "method"):
        table.add_column(column)
    for column in ("seeds", "sd", "95% interval", answer_header):
        table.add_column(column, justify="right")
    for comparison in comparisons:
        method, differences = comparison.method, list(comparison.difference_by_seed.values())
        labels = method.model, f"{method.task}, {method.metric}", method.name, str(len(differences))
        table.add_row(*labels, *_make_spread_cells(differences, options))
    return table


def compare_with_base(folder: Path) -> list[MethodComparison]:
    """Return the comparisons of methods with Base that have a seed in common, for the runs in a folder."""
    compared_methods = compare_methods(add_selection_columns(read_runs(folder, keep_records=True)))
    comparisons = [comparison for comparison in compared_methods.comparisons if comparison.difference_by_seed]
    if not comparisons:
        raise UserError(
            f"{folder} holds no finished runs of Base and another method with the same task, model and seed; run both "
            "with the same seeds"
        )
    return comparisons


def _make_spread_cells(differences: list[float], options: argparse.Namespace) -> tuple[str, str, str]:
    if len(differences) < 2:
        return EMPTY_CELL, EMPTY_CELL, "needs 2 seeds"
    if is_constant(np.array(differences)):
        return "0", EMPTY_CELL, "all differences are equal"
    sd = float(np.std(differences, ddof=1))
    low, high = power.sd_interval(sd, len(differences))
    if options.difference is not None:
        answer = str(power.pairs_needed(options.difference, sd, options.alpha, options.power))
    else:
        pairs = len(differences) if options.pairs is None else options.pairs
        answer = f"{power.smallest_difference(sd, pairs, options.alpha, options.power):.3g}"
    return f"{sd:.3g}", f"{low:.3g} to {high:.3g}", answer
