"""Implements `istar report`: a page with the papers' tables and figures, made from the runs in a folder."""

import argparse

from istar.drawing.terminal import make_console
from istar.reports.report import write_report


def run(options: argparse.Namespace) -> None:
    """Write the report, and print its path and the number of runs."""
    written = write_report(options.folder, options.out, make_console(stderr=True), options.reference)
    runs = f"{written.num_runs} run{'s' * (written.num_runs != 1)}"
    make_console().out(f"{written.page_path}: {runs}", highlight=False)
