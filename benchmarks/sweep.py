"""Compares istar's sweeps with other programs that execute the same runs: `python -m benchmarks.sweep`.

It measures three figures (`--only` chooses), each against a peer that executes the same number of runs in the same
rounds, in an order that rotates from round to round:

cost        the seconds that a small run takes beyond its training and its first validation: forked from a process that
            has the libraries loaded, as in a sweep, against a new Python interpreter; with metrics.csv alone and with
            W&B offline; 3 minutes
skip        the whole command of a sweep whose runs are all finished, against Hydra's basic sweeper, which composes the
            same configs and calls an empty function with each; and istar alone for more runs; 4 minutes
throughput  the runs per minute of a sweep with `sweep.jobs=2`, against a loop that executes `python train.py` once for
            each seed of the sweep; 10 minutes

The minutes are for the defaults on two idle cores. All files are written to a temporary folder.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import comparison_table, paired_ratio, positive_int, run_in_rotation
from istar.finetune.config import Config, schema
from istar.finetune.execute.identify import KeyMaker, name_run
from istar.finetune.processes.forking import ForkedProcess
from istar.finetune.processes.launch import RunProcesses, Spawn, spawn
from istar.finetune.processes.process_signals import blocked_signals
from istar.runs.record import GEOMETRY, read_result, write_result

REPOSITORY = Path(__file__).resolve().parents[1]
ROUNDS = {"cost": 6, "skip": 2, "throughput": 2}
"""Default number of rounds of each figure."""
SMALL = ("trainer.max_epochs=1", "task.limit_train=320", "reg.num_points=2000", "trainer.progress_bar=false")
"""Settings of a run of the demo task that takes a few seconds."""
LOGGERS = {"metrics.csv": (), "W&B offline": ("logger=wandb", "logger.mode=offline")}
EMPTY_FUNCTION = f"""
import hydra
from istar.finetune.config import schema

schema.register()

@hydra.main(version_base="1.3", config_path={str(REPOSITORY / "conf")!r}, config_name="config")
def main(config):
    pass

main()
"""


def main() -> None:
    """Measure and print the chosen figures."""
    options = make_parser().parse_args()
    console = Console(width=max(100, Console().width))
    schema.register()
    function_by_figure = {"cost": measure_cost, "skip": measure_skip, "throughput": measure_throughput}
    for name in options.only or function_by_figure:
        chosen = argparse.Namespace(**{**vars(options), "rounds": options.rounds or ROUNDS[name]})
        with tempfile.TemporaryDirectory(prefix="istar-sweep-") as folder, isolated_environment(Path(folder)):
            console.print(function_by_figure[name](chosen, Path(folder)))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROUNDS, metavar="FIGURE", help=f"of {', '.join(ROUNDS)}")
    rounds = ", ".join(f"{count} for {name}" for name, count in ROUNDS.items())
    parser.add_argument("--rounds", type=positive_int, help=f"measured rounds (default: {rounds})")
    parser.add_argument("--done", type=positive_int, default=100, help="skip: finished runs of both (default: 100)")
    parser.add_argument("--many", type=positive_int, default=1000, help="skip: runs of istar alone (default: 1000)")
    parser.add_argument(
        "--trials", type=positive_int, default=8, help="throughput: runs of each contender (default: 8)"
    )
    parser.add_argument("--jobs", type=positive_int, default=2, help="throughput: concurrent runs (default: 2)")
    parser.add_argument("--train", nargs="+", default=[], metavar="KEY=VALUE", help="throughput: settings of the runs")
    return parser


@contextmanager
def isolated_environment(folder: Path) -> Iterator[None]:
    """Set environment variables for an empty cache and no network; restore the environment at the end."""
    previous_environment = dict(os.environ)
    os.environ.update(ISTAR_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1", WANDB_SILENT="true")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous_environment)


def measure_cost(options: argparse.Namespace, folder: Path) -> Table:
    """Compare the cost of a forked run with that of a run in a new Python interpreter."""
    calls: dict[str, Callable[[int], float]] = {}
    starts: dict[str, Spawn] = {"forked": ForkedProcess, "new interpreter": spawn}
    for logger, overrides in LOGGERS.items():
        for name, start in starts.items():
            runs = folder / f"runs-{len(calls)}"
            calls[f"{name}, {logger}"] = partial(seconds_beyond_training, runs, overrides, start)
    for call in calls.values():
        call(0)  # Starts the fork server and fills the cache.
    seconds = run_in_rotation(calls, options.rounds)
    table = make_table("a run beyond its training", "s", options.rounds)
    for logger in LOGGERS:
        peer = f"new interpreter, {logger}"
        add_row(table, seconds, f"forked, {logger}", peer)
        add_row(table, seconds, peer, peer)
    return table


def seconds_beyond_training(runs: Path, overrides: Sequence[str], start: Spawn, seed: int) -> float:
    """Execute a small run, and return its seconds from start to record without training and first validation."""
    config = compose_config(f"run.root={runs}", f"seed={seed}", *SMALL, *overrides)
    started_at = time.perf_counter()
    with blocked_signals():
        run = RunProcesses(config, 1, None, {"OMP_NUM_THREADS": "1"}, runs.with_suffix(".log"), start)
    while not run.has_ended():
        time.sleep(0.01)
    timing = run.read_record([]).timing
    return time.perf_counter() - started_at - timing["fit"] - timing["first_validation"]


def measure_skip(options: argparse.Namespace, folder: Path) -> Table:
    """Compare a sweep of finished runs with Hydra's basic sweeper over the same configs and an empty function."""
    write_finished_runs(max(options.done, options.many), folder)
    script = folder / "empty_function.py"
    script.write_text(EMPTY_FUNCTION)

    def time_istar(count: int, _: int) -> float:
        """Return the seconds that a sweep over `count` finished runs takes."""
        return run_command("train.py", "-m", f"seed=range(1,{count + 1})", f"run.root={folder / 'runs'}")

    def time_hydra(_: int) -> float:
        """Return the seconds that Hydra's basic sweeper takes for as many calls of an empty function."""
        seeds = f"seed=range(1,{options.done + 1})"
        return run_command(str(script), "-m", seeds, "hydra/sweeper=basic", f"run.root={folder / 'runs'}")

    name = f"istar, {options.done:,} finished runs"
    peer = f"Hydra's sweeper, {options.done:,} calls of an empty function"
    many_name = f"istar, {options.many:,} finished runs"
    calls: dict[str, Callable[[int], float]] = {
        name: partial(time_istar, options.done),
        peer: time_hydra,
        many_name: partial(time_istar, options.many),
    }
    calls[many_name](0)  # Warm-up: the first command reads its libraries and the finished runs from the disk.
    seconds = run_in_rotation(calls, options.rounds)
    table = make_table("skipping finished runs: the whole command", "s", options.rounds)
    add_row(table, seconds, name, peer)
    add_row(table, seconds, peer, peer)
    add_row(table, seconds, many_name, None)
    return table


def write_finished_runs(count: int, folder: Path) -> None:
    """Execute one run, and write its result under the name and with the config of each of the seeds 1 to `count`.

    The sweep accepts these folders as finished, although their folder for the model is empty.
    """
    run_command("train.py", "seed=1", *SMALL, f"run.root={folder / 'template'}")
    [path] = (folder / "template").glob("demo-*/result.json")
    template = path.parent
    record, config, key_maker = read_result(template), compose_config(f"run.root={folder / 'runs'}"), KeyMaker()
    for seed in track(range(1, count + 1), "writing finished runs", transient=True):
        seeded = replace(config, seed=seed)
        key = key_maker.make(seeded)
        run_folder = folder / "runs" / name_run(seeded, key)
        write_result(replace(record, name=run_folder.name, config=schema.to_dict(seeded), key=key), run_folder)
        shutil.copy(template / GEOMETRY, run_folder)
        (run_folder / "model").mkdir()


def measure_throughput(options: argparse.Namespace, folder: Path) -> Table:
    """Compare the runs per minute of a sweep with those of a loop over the same seeds."""
    settings = ("trainer.progress_bar=false", *options.train)

    def sweep_rate(round_number: int) -> float:
        """Return the runs per minute of a sweep."""
        seeds, jobs = f"seed=range(1,{options.trials + 1})", f"sweep.jobs={options.jobs}"
        seconds = run_command("train.py", "-m", seeds, jobs, f"run.root={folder / f'sweep-{round_number}'}", *settings)
        return 60 * options.trials / seconds

    def loop_rate(round_number: int) -> float:
        """Return the runs per minute of a loop that starts each run by itself."""
        root = f"run.root={folder / f'loop-{round_number}'}"
        seconds = sum(run_command("train.py", f"seed={seed}", root, *settings) for seed in range(1, options.trials + 1))
        return 60 * options.trials / seconds

    # Fills the cache of tokenized data, which the first contender would otherwise fill for all.
    run_command("train.py", "trainer.fast_dev_run=true", f"run.root={folder / 'warm-up'}", *settings)
    name, peer = f"one sweep, sweep.jobs={options.jobs}", "a loop of python train.py"
    rates = run_in_rotation({name: sweep_rate, peer: loop_rate}, options.rounds)
    table = make_table(
        f"throughput: {options.trials} runs of each contender per round", "runs a minute", options.rounds
    )
    add_row(table, rates, name, peer)
    add_row(table, rates, peer, peer)
    return table


def run_command(*arguments: str) -> float:
    """Run Python with these arguments in the repository, and return the seconds from start to end of the process."""
    started_at = time.perf_counter()
    process = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if process.returncode:
        output = process.stdout[-2000:] + process.stderr[-2000:]
        sys.exit(f"{' '.join(arguments)} ended with exit code {process.returncode}:\n{output}")
    return time.perf_counter() - started_at


def compose_config(*overrides: str) -> Config:
    """Return the config of `python train.py` with these overrides."""
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return schema.load(compose("config", overrides=list(overrides)))


def make_table(title: str, unit: str, rounds: int) -> Table:
    """Return an empty table for a comparison in this unit."""
    return comparison_table(
        f"{title}, {rounds} rounds", (f"{unit} (median)", "lowest", "highest", "ratio to the peer"), rounds
    )


def add_row(table: Table, values: Mapping[str, Sequence[float]], name: str, peer: str | None) -> None:
    """Add a row with the values of a contender, and their ratio to those of the peer if there is one."""
    low, middle, high = (f"{pick(values[name]):.2f}" for pick in (min, median, max))
    table.add_row(name, middle, low, high, "" if peer is None else paired_ratio(values, name, peer))


if __name__ == "__main__":
    main()
