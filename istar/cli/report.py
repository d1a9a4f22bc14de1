"""Implements `istar report`: a page with the papers' tables and figures, made from the runs in a folder."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli import shared_options
from istar.drawing.terminal import make_console


def add_parser(commands: Any) -> None:
    """Register `istar report`."""
    parser = commands.add_parser("report", help="make a page with the papers' tables and figures from runs")
    shared_options.add_runs_folder(parser)
    parser.add_argument("--out", type=Path, default=Path("report"), help="output folder (default: report)")
    shared_options.add_figures(parser)
    reference_help = (
        "method with which the others are compared, such as a placebo, by its name in the table of all methods; "
        "settings at its end may be left out if that is unique (default: Base)"
    )
    parser.add_argument("--reference", default="Base", metavar="METHOD", help=reference_help)
    parser.set_defaults(command=run, extra="report")


def run(options: argparse.Namespace) -> None:
    """Write the report, and print its path and the number of runs."""
    from istar.reports import report

    written = report.write_report(options.folder, options.out, make_console(stderr=True), options.reference)
    runs = f"{written.num_runs} run{'s' * (written.num_runs != 1)}"
    make_console().out(f"{written.page_path}: {runs}", highlight=False)
