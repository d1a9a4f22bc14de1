"""Implements `istar watch`: a live table of the sweeps in a folder."""

import argparse
from typing import Any

from istar.cli import shared_options
from istar.drawing.terminal import make_console


def add_parser(commands: Any) -> None:
    """Register `istar watch`."""
    parser = commands.add_parser("watch", help="show a live table of the sweeps in a folder, also of other machines")
    shared_options.add_runs_folder(parser)
    parser.add_argument("--sweep", help="name of a sweep (default: all that are not over, or else the latest)")
    parser.add_argument("--once", action="store_true", help="show the current state and exit")
    parser.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Show the live table until the sweeps are over or, with `--once`, show it once."""
    from istar.finetune.sweeps.live_table import watch_sweeps
    from istar.runs.record import check_runs_folder

    check_runs_folder(options.folder)
    watch_sweeps(options.folder, make_console(), options.sweep, options.once)
