"""Implements `istar results`: a table of the runs in a folder."""

import argparse

from istar.drawing.terminal import make_console, with_wide_text
from istar.errors import UserError, did_you_mean
from istar.files.writing import to_csv
from istar.reports import run_frame


def run(options: argparse.Namespace) -> None:
    """Print the runs as a table, as tab-separated values outside of a terminal, or as JSON; write a file with `--out`.

    Outside of a terminal and in files, values are unrounded, and no column is left out.
    """
    if options.out is not None:
        run_frame.check_export(options.out)
    runs = run_frame.read_runs(options.folder, left_out=options.exclude)
    frame = runs.frame
    for option, name in (("--sort", options.sort), *(("--columns", column) for column in options.columns)):
        if name not in frame:
            hint = did_you_mean(name, map(str, frame)) or f"; the main ones are {', '.join(run_frame.MAIN_COLUMNS)}"
            raise UserError(f"{option} {name}: unknown column{hint}")
    frame = run_frame.sort_runs(frame, options.sort)
    console = make_console()
    defaults = run_frame.list_default_columns(frame, runs.settings_that_matter)
    printed_frame = frame[options.columns or defaults]
    # pandas stores integers as floats if some runs have no value.
    integer_columns = [
        name
        for name, values in printed_frame.items()
        if "." in str(name) and values.dtype == float and (values.dropna() % 1 == 0).all()
    ]
    printed_frame = printed_frame.astype(dict.fromkeys(integer_columns, "Int64"))
    if options.json:
        print(printed_frame.to_json(orient="records", indent=2, force_ascii=False))
    elif not console.is_terminal:
        print(to_csv(printed_frame, separator="\t"), end="")  # a console would expand the tabs
    else:
        table, dropped = run_frame.build_runs_table(frame, options.columns, console.width, defaults)
        console.print(with_wide_text(table))
        if dropped:
            hint = f"too narrow for {', '.join(dropped)}; --columns name,{dropped[0]} or --json shows them"
            make_console(stderr=True).print(hint)
    if options.out is not None:
        run_frame.export_frame(frame, options.out)
        make_console(stderr=True).out(str(options.out), highlight=False)
