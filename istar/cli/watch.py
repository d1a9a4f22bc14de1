"""`istar watch`: the live table of the sweeps that run in a folder, here or elsewhere."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli.console import make_console


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
    watch = commands.add_parser("watch", help="the live table of the sweeps that run in a folder, here or elsewhere")
    watch.add_argument("folder", type=Path, help="that holds the runs, as run.root")
    watch.add_argument("--sweep", help="name of one; default: those that are not over, else the latest")
    watch.add_argument("--once", action="store_true", help="show it as it is now, and leave")
    watch.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    from istar.sweeps.watch import watch

    watch(options.folder, make_console(), options.sweep, options.once)
