"""Implements `istar watch`: a live table of the sweeps in a folder."""

import argparse

from istar.drawing.terminal import make_console
from istar.finetune.sweeps.live_table import watch_sweeps
from istar.runs.record import check_runs_folder


def run(options: argparse.Namespace) -> None:
    """Show the live table until the sweeps are over or, with `--once`, show it once."""
    check_runs_folder(options.folder)
    watch_sweeps(options.folder, make_console(), options.sweep, options.once)
