"""Implements `istar measure --list`: the table of measures."""

import argparse
from dataclasses import asdict

from istar.drawing.terminal import make_console
from istar.errors import UserError
from istar.measures.catalogue import MEASURES, suggest_measure


def run(options: argparse.Namespace) -> None:
    """Print a line for each measure, or with a name all that is known about the measures of this name."""
    name = options.list
    chosen = [measure for measure in MEASURES if name == measure.name]
    if name and not chosen:
        hint = suggest_measure(name, [measure.name for measure in MEASURES])
        raise UserError(f"--list {name}: unknown measure{hint}; istar measure --list shows all")
    console = make_console()
    for measure in chosen:
        console.print("\n".join(f"{key}: {value}" for key, value in asdict(measure).items() if value), soft_wrap=True)
    for subject in () if name else ("layers", "matrices", "final_norm"):
        console.out(f"{subject.replace('_', ' ')}:")
        for measure in MEASURES:
            if measure.subject == subject and not measure.name.endswith("_error"):
                line = f"  {measure.name:31}{measure.title}: {measure.range}"
                console.print(line, no_wrap=True, overflow="ellipsis")
