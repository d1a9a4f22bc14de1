"""`istar correlate`: measures over a training with the scores of tasks over it."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli.console import make_console, make_folder
from istar.errors import UserError


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `istar`."""
    correlate = commands.add_parser("correlate", help="measures over a training with the scores of tasks over it")
    correlate.add_argument("geometry", type=Path, help="trajectory.csv, or another table by revision or step")
    correlate.add_argument("scores", type=Path, help="CSV: revision or step, and a column for each task")
    correlate.add_argument(
        "--out", type=Path, default=Path("correlation"), help="folder to write (default: correlation)"
    )
    correlate.add_argument("--by", choices=("revision", "step"), help="column to join by (default: what both have)")
    for name in ("measure", "layer", "source"):
        correlate.add_argument(f"--{name}", action="append", default=[], help="only this one; repeatable")
    correlate.add_argument("--omit", action="append", default=[], help="revision or step to leave out; repeatable")
    correlate.add_argument("--resamples", type=int, default=2_000, help="of the bootstrap (default: 2000)")
    correlate.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    correlate.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    for name, least in (("resamples", 100), ("seed", 0)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} {getattr(options, name)} is too small; expected {least} or more")
    from istar.geometry import correlate

    selection = correlate.Selection(
        options.by,
        tuple(options.measure),
        tuple(options.layer),
        tuple(options.source),
        tuple(options.omit),
        options.resamples,
        options.seed,
    )
    found = correlate.correlate(options.geometry, options.scores, selection)
    shown = correlate.sheet(found, selection)
    make_folder(options.out)
    written = correlate.write(found, shown, options.out)
    console = make_console()
    for table in correlate.tables(shown):
        console.print(table)
    for line in (*correlate.reasons(shown), *found.remarks, ", ".join(map(str, written))):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
