"""How often the alarms of `istar.Monitor` fire in healthy trainings, and in trainings that collapse.

    python -m benchmarks.alarms train --folder alarms --seeds 3
    python -m benchmarks.alarms count --folder alarms

`train` executes tiny trainings of many kinds, each on one core in about a minute at most, and writes for each a CSV
file with the geometry of all states every ten steps, and a line of `outcomes.csv` with its skill on held-out data.
A training that already has a line is not repeated. `count` applies the alarms to these files at two cadences: readings
every 10 steps and every 50 steps. Healthy trainings that did not learn their task, and collapsing ones that learned
something, are listed and not counted.
"""

import argparse
import csv
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.alarms.rates import CADENCES, print_rates
from benchmarks.alarms.trainings import KINDS, train

FIRST_SEED = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute trainings, or count alarms."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.alarms", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("train", "count"))
    parser.add_argument("--folder", type=Path, default=Path("alarms"), help="folder of the CSV files (default: alarms)")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="kinds to train (default: all)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help=f"first seed (default: {FIRST_SEED})")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each kind (default: 3)")
    options = parser.parse_args(arguments)
    if options.action == "count":
        print_rates(options.folder)
        return 0
    unknown = set(options.only or ()) - KINDS.keys()
    if unknown:
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; expected some of: {', '.join(KINDS)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in options.only or KINDS:
            train_once(options.folder, name, seed)
    return 0


def train_once(folder: Path, name: str, seed: int) -> None:
    """Train one kind with one seed, unless `outcomes.csv` already has a line of it."""
    outcomes = folder / "outcomes.csv"
    if outcomes.exists():
        with outcomes.open(newline="") as file:
            if any(row["kind"] == name and int(row["seed"]) == seed for row in csv.DictReader(file)):
                return
    else:
        outcomes.write_text("kind,seed,group,steps,loss,skill,outcome,seconds,file\n")
    kind, start = KINDS[name], time.perf_counter()
    loss, skill, monitor = train(kind, seed, every=CADENCES[0])
    seconds = time.perf_counter() - start
    path = folder / f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{seed}.csv"
    monitor.save(path)
    row = (name, seed, kind.group, kind.steps, f"{loss:.4g}", f"{skill:.3f}", kind.judge(skill), f"{seconds:.0f}")
    with outcomes.open("a", newline="") as file:
        csv.writer(file).writerow((*row, path.name))
    print(*row, sep=" | ", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    raise SystemExit(main())
