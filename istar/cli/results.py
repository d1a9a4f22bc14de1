"""`istar results`: every run below a folder as a row of a table."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli.console import make_console
from istar.errors import UserError, did_you_mean


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
    results = commands.add_parser("results", help="every run below a folder as a row of a table")
    results.add_argument("folder", type=Path, help="that holds the runs, as run.root")
    results.add_argument("--out", type=Path, help="also write all columns to a .csv, .parquet or .json file")
    results.add_argument("--sort", default="name", help="column to sort by, best first (default: name)")
    results.set_defaults(command=run, extra="report")


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    # Only here, so that --help need not wait for the libraries.
    from istar.reports import run_frame, run_tables

    found = run_frame.load_runs(options.folder)
    if options.sort not in found.frame:
        raise UserError(
            f"--sort {options.sort}: there is no such column{did_you_mean(options.sort, map(str, found.frame))}"
        )
    is_number = found.frame[options.sort].dtype.kind in "if"
    frame = found.frame.sort_values(options.sort, ascending=not is_number, na_position="last", kind="stable")
    console = make_console()
    console.print(run_tables.runs(frame))
    for trouble in found.read_errors.values():
        console.print(f"not read: {trouble}", highlight=False, soft_wrap=True)
    if options.out is not None:
        run_frame.export(frame, options.out)
        console.print(str(options.out), highlight=False, soft_wrap=True)
