"""Implements `istar correlate`: correlates measures of the geometry with task scores over the course of a training."""

import argparse

from istar.drawing import page_folder
from istar.drawing.page_tables import print_json
from istar.drawing.terminal import make_console, with_wide_text
from istar.geometry.correlation import correlate, correlation_tables


def run(options: argparse.Namespace) -> None:
    """Compute the correlations, write them and a figure of the scores to the output folder, and print them."""
    page_folder.check(options.out, correlation_tables.CORRELATION_KIND, (options.geometry, options.scores))
    results = correlate.correlate(
        options.geometry, options.scores, options.measure, options.task, options.omit, options.model
    )
    table = correlation_tables.make_paper_table(results, has_selection=bool(options.measure))
    paths = correlation_tables.write_results(results, table, options.out)
    if options.json:
        print_json({"correlations": table})
    else:
        make_console().print(with_wide_text(correlation_tables.make_correlation_table(table)))
    console = make_console(stderr=options.json)
    for line in (*correlation_tables.describe_undefined(table), *results.remarks, ", ".join(map(str, paths))):
        console.out(line, highlight=False)
