"""Implements `istar power`: how many seeds a difference needs, or how small a difference so many seeds can find."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.drawing.terminal import make_console
from istar.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table


def add_parser(commands: Any) -> None:
    """Add the command `istar power` to `commands`, the subparsers of the parser of `istar`."""
    parser = commands.add_parser(
        "power",
        help="how many seeds a comparison needs: istar power --sd 2.1 --difference 1.0",
        description="Say how many seeds two methods need for a difference to be found by the paired t-test, or, with "
        "--pairs, the smallest difference that so many seeds can find.",
    )
    parser.add_argument("--sd", type=float, help="standard deviation of the paired differences, in the metric's unit")
    parser.add_argument("--runs", type=Path, help="folder of runs from which the standard deviations are estimated")
    parser.add_argument("--difference", type=float, help="difference that is to be found, in the metric's unit")
    parser.add_argument("--pairs", type=int, help="number of seeds that both methods have")
    parser.add_argument("--alpha", type=float, default=0.05, help="two-sided significance level (default: 0.05)")
    parser.add_argument("--power", type=float, default=0.8, help="probability of finding the difference (default: 0.8)")
    parser.set_defaults(command=run, extra="report")


def run(options: argparse.Namespace) -> None:
    """Answer the power question in a sentence or, with `--runs`, in a table with a row for each method and task."""
    if (options.sd is None) == (options.runs is None):
        raise UserError("istar power needs either --sd or --runs; for example istar power --sd 2.1 --difference 1.0")
    if options.difference is not None and options.pairs is not None:
        raise UserError("--difference and --pairs exclude each other: one is given, the other is the answer")
    if options.runs is None and options.difference is None and options.pairs is None:
        raise UserError("--sd needs --difference, for the number of seeds, or --pairs, for the smallest difference")
    # Imported here so that `istar --help` does not wait for SciPy and pandas.
    from istar.statistics import power

    console = make_console()
    if options.runs is not None:
        console.print(_make_spread_table(options))
    elif options.pairs is not None:
        answer = power.smallest_difference_sentence(options.sd, options.pairs, options.alpha, options.power)
        console.out(answer, highlight=False)
    else:
        answer = power.pairs_needed_sentence(options.difference, options.sd, options.alpha, options.power)
        console.out(answer, highlight=False)


def _make_spread_table(options: argparse.Namespace) -> "Table":
    """Return a table of the standard deviation of each method's differences from Base, with the answer to the question.

    With `--difference`, the answer is the number of seeds that this difference needs. Otherwise it is the minimum
    detectable difference, for the number of seeds in `--pairs` or for those of the runs.
    """
    from rich.table import Table

    from istar.reports.paired_differences import compute_differences_from_base
    from istar.statistics import power
    from istar.statistics.arguments import check_positive

    # Called only to refuse wrong options before the runs are read.
    power.smallest_difference(1.0, 2 if options.pairs is None else options.pairs, options.alpha, options.power)
    if options.difference is not None:
        check_positive(abs(options.difference), "the size of the difference")
    method_differences = compute_differences_from_base(options.runs)
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
    for seed_differences in method_differences:
        cells = _make_spread_cells(list(seed_differences.by_seed.values()), options)
        table.add_row(
            seed_differences.model,
            f"{seed_differences.task}, {seed_differences.metric}",
            seed_differences.method,
            str(len(seed_differences.by_seed)),
            *cells,
        )
    return table


def _make_spread_cells(differences: list[float], options: argparse.Namespace) -> tuple[str, str, str]:
    """Return the table cells of a method: the standard deviation of its differences, its interval, and the answer."""
    import numpy as np

    from istar.reports.paper_tables import EMPTY_CELL
    from istar.statistics import power
    from istar.statistics.arguments import is_constant

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
