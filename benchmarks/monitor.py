"""Compares a training step that `istar.Monitor` reads with a step without a monitor: `python -m benchmarks.monitor`.

A step is forward pass, backward pass and fused AdamW on random tokens, in float32. The contenders are the step without
a monitor; a step between two readings; and steps that are read, with the default measures and with the effective rank
too. The share of a training is the additional time of a step that is read, divided by 50 steps without a monitor, as a
monitor reads every 50th step by default.

    python -m benchmarks.monitor                   MiniLM, and a small model in which the time of launches counts
    python -m benchmarks.monitor --shape tiny-decoder --rounds 30 --processor-time
"""

import argparse
from functools import partial
from statistics import median
from typing import Any

from rich.table import Table

import istar
from benchmarks.common import (
    SHAPES,
    add_processor_time_option,
    add_shape_option,
    comparison_table,
    make_console,
    make_parser,
    paired_ratio,
    parse_options,
    time_in_rotation,
)
from benchmarks.step import Steps
from istar.monitoring.monitor import DEFAULT_MEASURES

PEER, BETWEEN = "no monitor", "between readings"
READINGS: dict[str, tuple[str, ...]] = {
    "read": DEFAULT_MEASURES,
    "read, with rank": (*DEFAULT_MEASURES, "effective_rank"),
}
EVERY = 50
"""Number of steps from one reading to the next by default."""
_NEVER = 10**9


def main() -> None:
    """Print a table for each shape."""
    parser = make_parser(__doc__, rounds=20)
    add_shape_option(parser)
    parser.add_argument("--real", type=float, default=0.8, help="share of real tokens in the batch (default: 0.8)")
    add_processor_time_option(parser)
    options = parse_options(parser)
    for shape in options.shape:
        make_console().print(make_table(shape, options))


def make_table(shape: str, options: argparse.Namespace) -> Table:
    """Measure all contenders with this shape, and return the table."""
    steps = Steps(SHAPES[shape], "32", options.real, options.device)
    monitors: dict[str, Any] = {}

    def prepare(name: str) -> None:
        """Close the monitor of the previous contender, and create one that reads the next step, or none."""
        for monitor in monitors.values():
            monitor.close()
        monitors.clear()
        if name != PEER:
            measures = READINGS.get(name, DEFAULT_MEASURES)
            monitors[name] = istar.Monitor(steps.model, every=_NEVER, measures=measures, alarms=())
        if name == BETWEEN:
            steps(None)
            monitors[name].step()

    def run(name: str) -> None:
        steps(None)
        if name != PEER:
            monitors[name].step()

    names = [PEER, BETWEEN, *READINGS]
    calls = {name: partial(run, name) for name in names}
    preparations = {name: partial(prepare, name) for name in names}
    seconds = time_in_rotation(calls, options.rounds, options.device, options.clock, preparations)
    title = f"{shape}, float32, {options.real:.0%} real tokens, {options.device}, {options.rounds} rounds"
    columns = ("ms a step (median)", f"ratio to {PEER}", f"share of a training, every {EVERY}")
    table = comparison_table(title, columns, options.rounds)
    for name in names:
        shares = [(read - plain) / plain / EVERY for read, plain in zip(seconds[name], seconds[PEER], strict=True)]
        share = f"{median(shares):.2%}" if name in READINGS else ""
        table.add_row(name, f"{1e3 * median(seconds[name]):.1f}", paired_ratio(seconds, name, PEER), share)
    return table


if __name__ == "__main__":
    main()
