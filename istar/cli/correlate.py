"""Implements `istar correlate`: correlates geometry with task scores over the course of a training."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli.console import make_console, make_folder
from istar.errors import UserError


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
    parser = commands.add_parser(
        "correlate", help="correlate measures of the geometry with task scores over the course of a training"
    )
    parser.add_argument("geometry", type=Path, help="trajectory.csv, or another table with a row per revision or step")
    parser.add_argument("scores", type=Path, help="CSV with a column revision or step, and a column for each task")
    parser.add_argument("--out", type=Path, default=Path("correlation"), help="output folder (default: correlation)")
    parser.add_argument(
        "--by", choices=("revision", "step"), help="column that joins the tables (default: the one that both have)"
    )
    for name in ("measure", "layer", "source"):
        parser.add_argument(f"--{name}", action="append", default=[], help=f"use only this {name}; repeatable")
    parser.add_argument("--omit", action="append", default=[], help="leave out this revision or step; repeatable")
    parser.add_argument("--resamples", type=int, default=2_000, help="number of bootstrap resamples (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default: 0)")
    parser.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Compute the correlations, write them to the output folder and print them."""
    for name, minimum in (("resamples", 100), ("seed", 0)):
        if getattr(options, name) < minimum:
            raise UserError(f"--{name} {getattr(options, name)} is too small; expected {minimum} or more")
    from istar.geometry import correlate

    selection = correlate.Selection(
        options.by,
        tuple(options.measure),
        tuple(options.layer),
        tuple(options.source),
        tuple(options.omit),
        options.resamples,
        options.seed,
    )
    correlations = correlate.correlate(options.geometry, options.scores, selection)
    sheet = correlate.sheet(correlations, selection)
    make_folder(options.out)
    paths = correlate.write(correlations, sheet, options.out)
    console = make_console()
    for table in correlate.tables(sheet):
        console.print(table)
    for line in (*correlate.reasons(sheet), *correlations.remarks, ", ".join(map(str, paths))):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
