"""Implements `istar correlate`: correlates measures of the geometry with task scores over the course of a training."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli.console import check_minima
from istar.drawing.terminal import make_console
from istar.errors import UserError


def add_parser(commands: Any) -> None:
    """Add the command `istar correlate` to `commands`, the subparsers of the parser of `istar`."""
    parser = commands.add_parser(
        "correlate", help="correlate measures of the geometry with task scores over the course of a training"
    )
    add = parser.add_argument
    add("geometry", type=Path, help="trajectory.csv, or another table with a row per revision or step")
    scores_help = (
        "CSV with a column revision or step, and a column for each task; or results of lm-evaluation-harness or MTEB"
    )
    add("scores", type=Path, help=f"{scores_help}, as a .json file or a folder of such files")
    add("--out", type=Path, default=Path("correlation"), help="output folder (default: correlation)")
    add("--by", choices=("revision", "step"), help="column that joins the tables (default: the one that both have)")
    for name in ("measure", "layer", "source"):
        add(f"--{name}", action="append", default=[], help=f"use only this {name}; repeatable")
    add("--task", action="append", default=[], help="use only this task, or those that begin with it; repeatable")
    add("--omit", action="append", default=[], help="leave out this revision or step; repeatable")
    given_help = (
        "columns of either table to hold constant in partial correlations, separated by commas, such as step,lr"
    )
    add("--given", default="", help=f"{given_help}; of the same name in both, that of the measures counts")
    add("--model", default="", help="model of all scores, if they name it differently from the measures, or not at all")
    add("--pool", action="store_true", help="correlate over the checkpoints of all models together")
    blocks_help = "intervals from blocks of so many neighbouring checkpoints, or auto; for checkpoints of one training"
    add("--blocks", help=f"{blocks_help} (default: single checkpoints)")
    add("--resamples", type=int, default=2_000, help="number of bootstrap resamples (default: 2000)")
    add("--seed", type=int, default=0, help="seed of the bootstrap (default: 0)")
    parser.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Compute the correlations, write them and a figure of the scores to the output folder, and print them."""
    check_minima(options, resamples=100, seed=0)
    from istar.geometry.correlation import correlate, correlation_tables
    from istar.geometry.correlation.score_join import Selection

    selection = Selection(
        by=options.by,
        measures=tuple(options.measure),
        layers=tuple(options.layer),
        sources=tuple(options.source),
        tasks=tuple(options.task),
        omit=tuple(options.omit),
        model=options.model,
        covariates=tuple(dict.fromkeys(name.strip() for name in options.given.split(",") if name.strip())),
        pool=options.pool,
        resamples=options.resamples,
        seed=options.seed,
        block_length=_parse_block_length(options.blocks),
    )
    inputs = options.geometry, options.scores
    correlation_tables.make_output(options.out).check(correlation_tables.FILES, inputs)
    correlations = correlate.correlate(options.geometry, options.scores, selection)
    sheet = correlation_tables.make_sheet(correlations, selection)
    paths = correlation_tables.write_results(correlations, sheet, options.out)
    console = make_console()
    for table in correlation_tables.make_terminal_tables(sheet):
        console.print(table)
    shown_row_notes = correlation_tables.describe_shown_rows(correlations, selection)
    for line in (
        *shown_row_notes,
        *correlation_tables.describe_undefined(sheet),
        *correlations.remarks,
        ", ".join(map(str, paths)),
    ):
        console.out(line, highlight=False)


def _parse_block_length(text: str | None) -> int | None:
    """Parse the value of `--blocks`: a number of checkpoints, 0 for `auto`, or None if the option is not given."""
    if text is None or text == "auto":
        return None if text is None else 0
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--blocks {text} is no length; expected auto, or a number of checkpoints from 1 on")
    return int(text)
