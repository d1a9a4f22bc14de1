"""Implements `istar results`: a table of the runs in a folder."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli import shared_options
from istar.drawing.terminal import make_console
from istar.errors import UserError, did_you_mean
from istar.files.writing import to_csv


def add_parser(commands: Any) -> None:
    """Register `istar results`."""
    parser = commands.add_parser("results", help="show the runs in a folder as a table")
    shared_options.add_runs_folder(parser)
    parser.add_argument("--out", type=Path, help="also write all columns to a .csv, .parquet or .json file")
    parser.add_argument("--sort", default="name", help="column to sort by, best first (default: name)")
    shared_options.add_list(parser, "--columns", "columns to print, such as name,value,optim.lr")
    parser.add_argument("--json", action="store_true", help="print the columns as JSON, with fractions, not percent")
    parser.set_defaults(command=run, extra="report")


def run(options: argparse.Namespace) -> None:
    """Print the runs as a table, as tab-separated values outside of a terminal, or as JSON; write a file with `--out`.

    Outside of a terminal and in files, values are unrounded, and no column is left out.
    """
    # Imported here so that `istar --help` does not wait for pandas.
    from istar.reports import run_frame

    if options.out is not None:
        run_frame.check_export(options.out)
    runs = run_frame.read_runs(options.folder)
    frame = runs.frame
    for option, name in (("--sort", options.sort), *(("--columns", column) for column in options.columns)):
        if name not in frame:
            hint = did_you_mean(name, map(str, frame)) or f"; the main ones are {', '.join(run_frame.MAIN_COLUMNS)}"
            raise UserError(f"{option} {name}: unknown column{hint}")
    frame = run_frame.sort_runs(frame, options.sort)
    console = make_console()
    defaults = run_frame.list_default_columns(frame, runs.settings_that_matter)
    printed_frame = frame[options.columns or defaults]
    if options.json:
        print(printed_frame.to_json(orient="records", indent=2, force_ascii=False))
    elif not console.is_terminal:
        print(to_csv(printed_frame, separator="\t"), end="")  # a console would expand the tabs
    else:
        table, dropped = run_frame.build_runs_table(frame, options.columns, console.width, defaults)
        console.print(table)
        if dropped:
            hint = f"too narrow for {', '.join(dropped)}; --columns name,{dropped[0]} or --json shows them"
            make_console(stderr=True).print(hint)
    if options.out is not None:
        run_frame.export_frame(frame, options.out)
        make_console(stderr=True).out(str(options.out), highlight=False)
