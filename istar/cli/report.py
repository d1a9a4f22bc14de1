"""`istar report`: the paper's tables and figures from the runs in a folder, as a page."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli.console import make_console


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
    report = commands.add_parser("report", help="the paper's tables and figures from these runs, as a page")
    report.add_argument("folder", type=Path, help="that holds the runs, as run.root")
    report.add_argument("--out", type=Path, default=Path("report"), help="folder to write (default: report)")
    report.set_defaults(command=run, extra="report")


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    from istar.reports import report

    written = report.write(options.folder, options.out, make_console(stderr=True))
    told = f"{written.page}: {written.runs} run{'s' * (written.runs != 1)}, {written.missing_rows} rows of missing ones"
    make_console().print(told, highlight=False, soft_wrap=True, markup=False)
