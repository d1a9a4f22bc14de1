"""What a sweep costs beyond the training of its runs: `python -m benchmarks.sweep`.

Each figure stands beside a peer's, measured in the same call on the same machine, the two by turns:

cost        a run of the demo task from its start to its record, less its training and first validation: forked from a
            process that has the libraries loaded, against a fresh process; with metrics.csv alone and with W&B offline
skip        the whole command for a grid of runs that are all done, against Hydra's own sweeper, which composes some of
            the same grid and hands the configs to a function that does nothing; seconds per run
throughput  the whole command for a grid of runs, `sweep.jobs` at a time, against `python train.py` once for each seed
            in a loop, of which some are done and the rest counted as if they took as long

All is written to a temporary folder. With the defaults it takes about a quarter of an hour on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.progress import track
from rich.table import Table

from istar import results
from istar.config import Config, schema
from istar.config.schema import to_dict
from istar.runs import fork_server
from istar.runs.launch import RunProcesses, Spawn, blocked_signals, spawn
from istar.runs.store import RunFolders

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = ("trainer.max_epochs=1", "task.limit_train=320", "reg.num_points=2000", "trainer.progress_bar=false")
WANDB = ("logger=wandb", "logger.mode=offline")
HYDRA = f"""
import hydra
from istar.config import schema

schema.register()

@hydra.main(version_base="1.3", config_path={str(REPOSITORY / "conf")!r}, config_name="config")
def main(config):
    pass

main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("cost", "skip", "throughput"), default=None, metavar="FIGURE")
    parser.add_argument("--rounds", type=int, default=5, help="of the first two figures (default: 5)")
    parser.add_argument("--done", type=int, default=1000, help="runs that are skipped (default: 1000)")
    parser.add_argument("--trials", type=int, default=50, help="runs of the throughput (default: 50)")
    parser.add_argument("--loop", type=int, default=5, help="of them in the peer's loop (default: 5)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument(
        "--train", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of the throughput's runs"
    )
    options = parser.parse_args()
    console = Console(width=max(100, Console().width))
    schema.register()
    figures = {"cost": cost, "skip": skip, "throughput": throughput}
    for name in options.only or figures:
        with tempfile.TemporaryDirectory(prefix="istar-sweep-") as folder, environment(Path(folder)):
            console.print(figures[name](options, Path(folder)))


@contextmanager
def environment(folder: Path) -> Iterator[None]:
    """A cache that nobody has filled, no network, and no more threads than a run of several gets."""
    before = dict(os.environ)
    os.environ.update(ISTAR_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1", WANDB_SILENT="true")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cost(options: argparse.Namespace, folder: Path) -> Table:
    """Of a run, beyond its training."""
    ways: dict[str, Callable[[int], float]] = {}
    with fork_server.ServerPool(folder / "server.log") as servers:
        for kind, more in (("metrics.csv", ()), ("W&B offline", WANDB)):
            for name, start in (("forked", servers.spawn), ("fresh process", spawn)):
                # Not `lambda`, which would see the last values of all.
                ways[f"{name}, {kind}"] = Trial(folder, more, start, f"{name[:2]}{kind[:1]}")
        for way in ways.values():
            way(0)
        seconds = by_turns(ways, options.rounds)
    table = figure(f"a run beyond its training, {options.rounds} rounds", "s")
    for kind in ("metrics.csv", "W&B offline"):
        compare(table, seconds, f"forked, {kind}", f"fresh process, {kind}")
    return table


class Trial:
    """A small run in a folder of its own: seconds from its start to its record, without those of its training."""

    def __init__(self, folder: Path, overrides: tuple[str, ...], start: Spawn, name: str) -> None:
        self._folder, self._overrides, self._start, self._name = folder, overrides, start, name

    def __call__(self, seed: int) -> float:
        config = composed(f"run.root={self._folder / self._name}", f"seed={seed}", *SMALL, *self._overrides)
        begun = time.perf_counter()
        with blocked_signals():
            run = RunProcesses(config, 1, None, {"OMP_NUM_THREADS": "1"}, self._folder / "log", self._start)
        while not run.has_ended():
            time.sleep(0.01)
        timing = run.record([]).timing
        return time.perf_counter() - begun - timing["fit"] - timing["first_validation"]


def skip(options: argparse.Namespace, folder: Path) -> Table:
    """Runs that are done, per run of the whole command."""
    count, few = options.done, max(2, options.done // 20)
    write_done(count, folder)
    (folder / "hydra_app.py").write_text(HYDRA)
    own = ["train.py", "-m", f"seed=range(1,{count + 1})", f"run.root={folder / 'runs'}"]
    peer = [str(folder / "hydra_app.py"), "-m", f"seed=range(1,{few + 1})", "hydra/sweeper=basic",
            f"run.root={folder / 'runs'}"]  # fmt: skip
    name, other = f"istar, {count} runs that are done", f"Hydra's sweeper, {few} runs of an empty function"
    seconds = by_turns({name: lambda _: called(own) / count * 1000, other: lambda _: called(peer) / few * 1000},
                       min(options.rounds, 3))  # fmt: skip
    whole = median(seconds[name]) * count / 1000
    table = figure(f"skipping: {count} runs in {whole:.1f} s, the start of the process among them", "ms a run")
    compare(table, seconds, name, other)
    return table


def write_done(count: int, folder: Path) -> None:
    """A finished run for each seed: the record of a real one under the name and config of the others."""
    called(["train.py", "seed=1", *SMALL, f"run.root={folder / 'one'}"])
    [path] = (folder / "one").glob("demo-*/result.json")
    record, base, folders = results.read(path.parent), composed(f"run.root={folder / 'runs'}"), RunFolders()
    for seed in track(range(1, count + 1), "writing what is done", transient=True):
        config = replace(base, seed=seed)
        place = folders(config)
        results.write(replace(record, name=place.name, config=to_dict(config)), place)
        (place / "model").mkdir()


def throughput(options: argparse.Namespace, folder: Path) -> Table:
    """Runs a minute."""
    shared = ["trainer.progress_bar=false", *options.train]
    looped: list[float] = []
    for seed in range(1, options.loop + 1):
        looped.append(called(["train.py", f"seed={seed}", f"run.root={folder / 'loop'}", *shared]))
    seeds = f"seed=range(1,{options.trials + 1})"
    whole = called(["train.py", "-m", seeds, f"sweep.jobs={options.jobs}", f"run.root={folder / 'sweep'}", *shared])
    each = [json.loads(path.read_text())["timing"]["total"] for path in (folder / "sweep").glob("demo-*/result.json")]
    assert len(each) == options.trials
    table = figure(f"{options.trials} runs of the demo task, whole: sweep {whole:.0f} s", "s a run")
    name, other = f"sweep.jobs={options.jobs}", f"a loop of python train.py ({options.loop} of them)"
    add(table, name, [whole / options.trials], f"{median(looped) * options.trials / whole:.2f} x the loop's runs")
    add(table, "  of it in a run's own process", each, "")
    add(table, other, looped, "")
    return table


def called(arguments: list[str]) -> float:
    """Seconds that a command takes, from the start of its process to its end."""
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - begun


def composed(*overrides: str) -> Config:
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return schema.load(compose("config", overrides=list(overrides)))


def by_turns(ways: dict[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, rounds + 1):
        for name, way in ways.items():
            seconds[name].append(way(number))
    return seconds


def figure(title: str, unit: str) -> Table:
    table = Table(title=title)
    for column in ("", f"{unit} (median)", "lowest", "highest", "ratio"):
        table.add_column(column, justify="left" if column == "" else "right")
    return table


def compare(table: Table, seconds: dict[str, list[float]], name: str, peer: str) -> None:
    add(table, name, seconds[name], f"{median(seconds[name]) / median(seconds[peer]):.3f} of the peer's")
    add(table, peer, seconds[peer], "")


def add(table: Table, name: str, seconds: list[float], ratio: str) -> None:
    table.add_row(name, *(f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds))), ratio)


if __name__ == "__main__":
    main()
