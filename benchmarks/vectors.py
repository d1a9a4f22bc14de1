"""Measures what `istar.measure` takes for vectors in a .npy file: `python -m benchmarks.vectors`.

Each call is in a new interpreter, after `import torch` and `import istar`. The first table has its seconds; the seconds
of a first result, which include `import istar` and all that it loads; and, from one more process, the live memory
beyond the points. This is the highest anonymous memory during the call minus the one before it, after a first call that
has loaded the modules. Pages of the mapped file do not count, and malloc returns freed blocks at once, which makes this
process slower. The second table compares the search for the ten nearest neighbours of every row with scikit-learn's
brute force, in rotation and in this process; both have the same threads, and the distances must be equal. Prints the
number of threads and the load of the machine: two threads on two busy cores may take ten times as long as one.

    python -m benchmarks.vectors                            3 rounds, 3 minutes on two idle cores
    OMP_NUM_THREADS=1 python -m benchmarks.vectors          one thread
    python -m benchmarks.vectors --share 0.01 --rounds 1    a hundredth of the rows, to try it
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table
from sklearn.neighbors import NearestNeighbors

from benchmarks.common import comparison_table, make_console, paired_ratio, positive_int, time_in_rotation
from istar.measures import find_neighbours

PEER = "scikit-learn, brute force"
NUM_NEIGHBOURS = 10
MEASURE = """
import json, sys, time
import torch
start = time.perf_counter()
import istar
measure = istar.measure
called = time.perf_counter()
measure(sys.argv[1], measures=sys.argv[2])
end = time.perf_counter()
print(json.dumps({"call": end - called, "first result": end - start}))
"""
MEASURE_MEMORY = """
import json, sys, threading
import torch
import istar

def read_anonymous_mb():
    [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024

istar.measure(torch.randn(100, 8), measures="all")
before = read_anonymous_mb()
readings, ended = [before], threading.Event()

def watch():
    while not ended.wait(0.002):
        readings.append(read_anonymous_mb())

thread = threading.Thread(target=watch)
thread.start()
istar.measure(sys.argv[1], measures=sys.argv[2])
ended.set()
thread.join()
print(json.dumps(max(readings) - before))
"""


class Case(NamedTuple):
    """Rows and width of a cloud, which measures are computed, and the goal in seconds."""

    num_rows: int
    width: int
    measures: str
    goal: float


CASES = (Case(10_000, 384, "basic", 2), Case(10_000, 384, "all", 3), Case(100_000, 768, "all", 20))


def main() -> None:
    """Print both tables."""
    options = make_parser().parse_args()
    console = make_console()
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    console.print(f"{torch.get_num_threads()} threads, {os.cpu_count()} cores, load of the machine {load}")
    with tempfile.TemporaryDirectory() as folder:
        console.print(compare_cases(Path(folder), options.share, options.rounds))
    console.print(compare_neighbours(round(options.share * 10_000), options.rounds))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=3, help="measured rounds (default: 3)")
    parser.add_argument("--share", type=float, default=1.0, help="share of the rows of each cloud (default: 1)")
    return parser


def make_points(num_rows: int, width: int) -> torch.Tensor:
    """Return float32 points with a common direction, and with variances that fall as 1 / i."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(num_rows, width, generator=generator)
    points *= torch.arange(1, width + 1) ** -0.5
    return points + torch.randn(width, generator=generator) / 4


def compare_cases(folder: Path, share: float, rounds: int) -> Table:
    """Return the table of all cases: seconds, lowest and highest, seconds of a first result, and live memory."""
    table = Table("cloud", "measures", title=f"istar.measure of a .npy file, {rounds} rounds")
    for column in ("seconds (median)", "lowest", "highest", "goal", "first result", "live MB"):
        table.add_column(column, justify="right")
    for num_rows, width, measures, goal in CASES:
        path = folder / f"{num_rows}_{width}.npy"
        num_rows = round(share * num_rows)
        if not path.is_file():
            np.save(path, make_points(num_rows, width).numpy())
        results = [run_python(MEASURE, str(path), measures) for _ in range(rounds)]
        calls, firsts = ([result[name] for result in results] for name in ("call", "first result"))
        # By its threshold, glibc maps each larger block by itself and returns it when it is freed.
        live_mb = run_python(MEASURE_MEMORY, str(path), measures, MALLOC_MMAP_THRESHOLD_="1000000")
        seconds = [f"{pick(calls):.2f}" for pick in (median, min, max)]
        cloud = f"{num_rows:,} x {width}"
        table.add_row(cloud, measures, *seconds, f"{goal:g}", f"{median(firsts):.2f}", f"{live_mb:.0f}")
    return table


def run_python(code: str, *arguments: str, **variables: str) -> Any:
    """Run code in a new interpreter with further environment variables, and return its output, parsed as JSON."""
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout)


def compare_neighbours(num_rows: int, rounds: int) -> Table:
    """Return the table of the search for neighbours by istar and by scikit-learn."""
    points = make_points(num_rows, 384)
    array = points.numpy()
    found = find_neighbours(points, NUM_NEIGHBOURS).distances
    expected, _ = find_by_peer(array)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3)
    calls: dict[str, Callable[[], object]] = {
        "istar": partial(find_neighbours, points, NUM_NEIGHBOURS),
        PEER: partial(find_by_peer, array),
    }
    seconds = time_in_rotation(calls, rounds, torch.device("cpu"))
    title = f"{NUM_NEIGHBOURS} nearest neighbours of {num_rows:,} x 384, {rounds} rounds"
    table = comparison_table(title, ("seconds (median)", f"ratio to {PEER}"), rounds)
    for name, values in seconds.items():
        table.add_row(name, f"{median(values):.2f}", paired_ratio(seconds, name, PEER))
    return table


def find_by_peer(array: np.ndarray) -> Sequence[np.ndarray]:
    """Return distances and indices of the nearest neighbours of each row, without itself."""
    nearest = NearestNeighbors(n_neighbors=NUM_NEIGHBOURS, algorithm="brute").fit(array)
    return nearest.kneighbors()


if __name__ == "__main__":
    main()
