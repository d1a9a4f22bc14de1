"""Implements `istar correlate`: correlates measures of the geometry with task scores over the course of a training."""

import argparse
from pathlib import Path
from typing import Any

from istar.cli import shared_options
from istar.drawing.terminal import make_console


def add_parser(commands: Any) -> None:
    """Register `istar correlate`."""
    parser = commands.add_parser(
        "correlate", help="correlate measures of the geometry with task scores over the course of a training"
    )
    add = parser.add_argument
    add("geometry", type=Path, help="trajectory.csv, or another table with a row per revision or step")
    scores_help = (
        "CSV with a column revision or step, and a column for each task; or results of lm-evaluation-harness or MTEB"
    )
    add("scores", type=Path, help=f"{scores_help}, as a .json file or a folder of such files")
    shared_options.add_output(parser, "correlation")
    shared_options.add_figures(parser)
    shared_options.add_list(parser, "--measure", "measures to use")
    shared_options.add_list(parser, "--task", "tasks to use, or beginnings of their names")
    shared_options.add_list(parser, "--omit", "revisions or steps to leave out")
    add("--model", default="", help="model of all scores, if they name it differently from the measures, or not at all")
    parser.set_defaults(command=run, extra="train")


def run(options: argparse.Namespace) -> None:
    """Compute the correlations, write them and a figure of the scores to the output folder, and print them."""
    from istar.drawing import page_folder
    from istar.geometry.correlation import correlate, correlation_tables

    page_folder.check(options.out, correlation_tables.CORRELATION_KIND, (options.geometry, options.scores))
    selection = correlate.Selection(options.measure, options.task, options.omit, options.model)
    results = correlate.correlate(options.geometry, options.scores, selection)
    table = correlation_tables.make_paper_table(results, has_selection=bool(options.measure))
    paths = correlation_tables.write_results(results, table, options.out)
    if options.json:
        shared_options.print_json({"correlations": table})
    else:
        make_console().print(correlation_tables.make_correlation_table(table))
    console = make_console(stderr=options.json)
    for line in (*correlation_tables.describe_undefined(table), *results.remarks, ", ".join(map(str, paths))):
        console.out(line, highlight=False)
