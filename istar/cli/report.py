"""Implements `istar report`: a page with the papers' tables and figures, made from the runs in a folder."""

import argparse

from istar.drawing.terminal import make_console
from istar.reports.report import write_report


def run(options: argparse.Namespace) -> None:
    """Write the report, and print its path and the number of runs."""
    page_path, num_runs = write_report(
        options.folder, options.out, make_console(stderr=True), options.reference, options.exclude
    )
    make_console().out(f"{page_path}: {num_runs} run{'s' * (num_runs != 1)}", highlight=False)
