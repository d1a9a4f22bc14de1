"""Implements `istar results`: a table of the runs in a folder."""

import argparse
from pathlib import Path
from typing import Any

from istar.drawing.terminal import make_console
from istar.errors import UserError, did_you_mean


def add_parser(commands: Any) -> None:
    """Register `istar results`."""
    parser = commands.add_parser("results", help="show the runs in a folder as a table")
    parser.add_argument("folder", type=Path, help="folder that holds the runs, as run.root")
    parser.add_argument("--out", type=Path, help="also write all columns to a .csv, .parquet or .json file")
    parser.add_argument("--sort", default="name", help="column to sort by, best first (default: name)")
    parser.set_defaults(command=run, extra="report")


def run(options: argparse.Namespace) -> None:
    """Print the table of runs, and write it to a file with `--out`."""
    # Imported here so that `istar --help` does not wait for pandas.
    from istar.reports import run_frame

    if options.out is not None:
        run_frame.check_export(options.out)
    runs = run_frame.load_runs(options.folder)
    if options.sort not in runs.frame:
        hint = did_you_mean(options.sort, map(str, runs.frame))
        raise UserError(f"--sort {options.sort}: there is no such column{hint}")
    is_numeric = runs.frame[options.sort].dtype.kind in "if"
    sorted_frame = runs.frame.sort_values(options.sort, ascending=not is_numeric, na_position="last", kind="stable")
    console = make_console()
    console.print(run_frame.build_runs_table(sorted_frame))
    if options.out is not None:
        run_frame.export_frame(sorted_frame, options.out)
        console.out(str(options.out), highlight=False)
