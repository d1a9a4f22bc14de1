"""`istar results`, `istar report` and `istar watch`: what lies in a folder of runs. Training is started by train.py."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from istar.errors import UserError, did_you_mean


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `istar`; returns its exit code."""
    parser = argparse.ArgumentParser(prog="istar", description="Look at runs that train.py has left.")
    commands = parser.add_subparsers(required=True, metavar="command")
    results = commands.add_parser("results", help="every run below a folder as a row of a table")
    results.add_argument("folder", type=Path, help="that holds the runs, as run.root")
    results.add_argument("--out", type=Path, help="also write all columns to a .csv, .parquet or .json file")
    results.add_argument("--sort", default="name", help="column to sort by, best first (default: name)")
    results.set_defaults(command=_results)
    report = commands.add_parser("report", help="the paper's tables and figures from these runs, as a page")
    report.add_argument("folder", type=Path, help="that holds the runs, as run.root")
    report.add_argument("--out", type=Path, default=Path("report"), help="folder to write (default: report)")
    report.set_defaults(command=_report)
    watch = commands.add_parser("watch", help="the live table of the sweeps that run in a folder, here or elsewhere")
    watch.add_argument("folder", type=Path, help="that holds the runs, as run.root")
    watch.add_argument("--sweep", help="name of one; default: those that are not over, else the latest")
    watch.add_argument("--once", action="store_true", help="show it as it is now, and leave")
    watch.set_defaults(command=_watch)
    options = parser.parse_args(arguments)
    try:
        options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _results(options: argparse.Namespace) -> None:
    # Only here, so that --help need not wait for the libraries.
    from istar.reports import runs, tables

    found = runs.load_runs(options.folder)
    if options.sort not in found.frame:
        raise UserError(
            f"--sort {options.sort}: there is no such column{did_you_mean(options.sort, map(str, found.frame))}"
        )
    is_number = found.frame[options.sort].dtype.kind in "if"
    frame = found.frame.sort_values(options.sort, ascending=not is_number, na_position="last", kind="stable")
    console = Console()
    console.print(tables.runs(frame))
    for trouble in found.troubles.values():
        console.print(f"not read: {trouble}", highlight=False, soft_wrap=True)
    if options.out is not None:
        runs.export(frame, options.out)
        console.print(str(options.out), highlight=False, soft_wrap=True)


def _report(options: argparse.Namespace) -> None:
    from istar.reports import report

    written = report.write(options.folder, options.out, Console(stderr=True))
    told = f"{written.page}: {written.runs} run{'s' * (written.runs != 1)}, {written.holes} rows of missing ones"
    Console().print(told, highlight=False, soft_wrap=True, markup=False)


def _watch(options: argparse.Namespace) -> None:
    from istar.sweeps.watch import watch

    watch(options.folder, Console(), options.sweep, options.once)


if __name__ == "__main__":
    sys.exit(main())
