"""Kill a real run at random moments, send its command again until it ends, and compare it with an undisturbed one.

    python -m benchmarks.chaos --kills 50
    python -m benchmarks.chaos --sweep --kills 20
    python -m benchmarks.chaos --task demo_sentence --kills 4 trainer.keep_models=log monitor.every=5

Every kill is a SIGKILL, to all processes of the run at once or (where there are several) to one of them, at a random
moment: one in four while it loads, the others while it trains, validates, writes or closes. Equal means: weights,
predictions, geometry, logged metrics and `result.json` byte for byte, durations and paths aside.

With `--sweep`, the command is a sweep with two runs at a time. A kill is for all of its processes, as when a machine
loses power, or for the sweep alone, whose runs then stop by themselves while the same command has already been sent
again. All runs of the sweep must be equal to those of an undisturbed sweep.
"""

import argparse
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
SETTINGS = (
    "task.limit_train=600", "task.limit_validation=100", "data.batch_size=8", "seed=7",
    "trainer.accumulate_grad_batches=2", "trainer.max_epochs=6", "trainer.early_stopping=6", "trainer.accelerator=cpu",
    "trainer.checkpoint_every_n_steps=5", "trainer.log_every_n_steps=5", "trainer.progress_bar=false",
    "optim.schedule=linear", "optim.warmup=0.1",
)  # fmt: skip
"""Settings of the run: I-STAR on the demo task, 38 steps an epoch, a schedule and a checkpoint every five steps."""
SWEEP = ("-m", "seed=1,2,3,4", "sweep.jobs=2")
"""Arguments that make the run a sweep of four."""


@dataclass
class Tally:
    """What happened to the killed runs or sweeps of one kind."""

    kind: str  # for example "2 processes"
    loading: float = 0.0  # seconds that an undisturbed run takes until it is ready to train
    training: float = 0.0  # seconds that it takes from then on
    kills: int = 0
    runs: int = 0  # runs that have ended, each killed several times
    identical: int = 0  # runs that are equal to the undisturbed one
    lost: int = 0  # runs that could not be resumed
    moments: Counter[str] = field(default_factory=Counter)  # kills by what the run was doing
    failures: list[str] = field(default_factory=list)  # a line for each run that was lost or is not identical


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; return 1 if a run was lost or is not equal to the undisturbed one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="kills in all, at least (default: 50)")
    parser.add_argument("--processes", default="1,2", help="numbers of processes of a run (default: 1,2)")
    parser.add_argument("--sweep", action="store_true", help="kill a sweep instead of single runs")
    parser.add_argument("--task", default="demo", help="option of the group task (default: demo)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments (default: 0)")
    parser.add_argument("overrides", nargs="*", help="settings of the run, as for train.py, e.g. reg=cosreg")
    options = parser.parse_args(arguments)
    console = Console()
    generator = random.Random(options.seed)
    overrides = [f"task={options.task}", *options.overrides]
    if options.sweep:
        commands = {"sweep": _sweep_command(overrides)}
    else:
        process_counts = [int(count) for count in options.processes.split(",")]
        commands = {
            "one process" if count == 1 else f"{count} processes": _run_command(count, overrides)
            for count in process_counts
        }
    tallies: list[Tally] = []
    # Ctrl-C ends the benchmark early, with the table of what it has seen.
    with (
        suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="istar-chaos-") as temporary_folder,
        Progress(console=console) as progress,
    ):
        progress_bar = progress.add_task("kills", total=options.kills)
        for index, (kind, command) in enumerate(commands.items()):
            num_kills = (options.kills - sum(tally.kills for tally in tallies)) // (len(commands) - index)
            folder = Path(temporary_folder) / kind.replace(" ", "-")
            tallies.append(Tally(kind))
            kill_runs(folder, command, tallies[-1], num_kills, generator, lambda: progress.advance(progress_bar))
    console.print(make_table(tallies))
    for tally in tallies:
        for failure in tally.failures:
            console.print(failure, highlight=False)
    return int(any(tally.lost or tally.identical < tally.runs for tally in tallies))


def kill_runs(
    folder: Path,
    command: Sequence[str],
    tally: Tally,
    kills: int,
    generator: random.Random,
    on_kill: Callable[[], None],
) -> None:
    """Execute the command once undisturbed, then kill and resume it in new folders until enough kills are made.

    Args:
        folder: folder for all runs.
        command: the command of a run or a sweep, without `run.root`.
        tally: counts what happens.
        kills: number of kills.
        generator: source of the random moments and victims.
        on_kill: called after each kill.
    """
    started_at = time.time()
    if start(folder / "undisturbed", command).wait() != 0:
        raise SystemExit(f"the undisturbed run failed: {last_line(folder / 'undisturbed')}")
    ready = ready_time(folder / "undisturbed", started_at)
    tally.loading, tally.training = ready - started_at, time.time() - ready
    expected = outcomes(folder / "undisturbed")
    while tally.kills < kills:
        root = folder / f"run-{tally.runs}"
        failure = _kill_until_done(root, command, tally, kills, generator, on_kill)
        tally.runs += 1
        if failure is None:
            unequal = unequal_parts(outcomes(root), expected)
            tally.identical += not unequal
            failure = f"{root.name} differs in {', '.join(unequal)}" if unequal else None
        else:
            tally.lost += 1
        if failure is not None:
            tally.failures.append(f"{tally.kind}, {failure}")
        shutil.rmtree(root)


def _kill_until_done(
    root: Path,
    command: Sequence[str],
    tally: Tally,
    kills: int,
    generator: random.Random,
    on_kill: Callable[[], None],
) -> str | None:
    """Kill and resume one run until it has finished. Return None, or why it cannot finish."""
    while True:
        started_at = time.time()
        process = start(root, command)
        if tally.kills < kills:
            _wait_for_random_moment(process, root, started_at, tally, generator)
        else:
            process.wait()
        if process.poll() is None:
            kill = _kill_sweep if tally.kind == "sweep" else _kill_run
            tally.moments[kill(process, root, generator)] += 1
            tally.kills += 1
            on_kill()
        elif process.returncode == 0:
            return None
        else:
            return f"{root.name} ended with exit code {process.returncode}: {last_line(root)}"


def _wait_for_random_moment(
    process: "subprocess.Popen[bytes]", root: Path, started_at: float, tally: Tally, generator: random.Random
) -> None:
    """Wait for a random moment: in one of four cases while the run loads, otherwise while it trains and writes."""
    while_loading = generator.random() < 0.25
    delay = generator.uniform(0, tally.loading if while_loading else tally.training)
    reference_time = started_at if while_loading else float("inf")
    while process.poll() is None and time.time() - reference_time < delay:
        time.sleep(0.005)
        if reference_time == float("inf"):
            reference_time = ready_time(root, started_at)


def ready_time(root: Path, started_at: float) -> float:
    """Return the time when a run that started at `started_at`, or the first run of a sweep, was ready to train.

    That is when it wrote its config. Infinity if it is not ready yet.
    """
    write_times = [path.stat().st_mtime for path in root.glob("*/config.yaml")]
    return min((seconds for seconds in write_times if seconds > started_at), default=float("inf"))


def _kill_run(process: "subprocess.Popen[bytes]", root: Path, generator: random.Random) -> str:
    """Send SIGKILL to all processes of a run or to one of them. Return what the run was doing."""
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    pids = [process.pid, *children]
    for victim in pids if generator.random() < 0.5 else [generator.choice(pids)]:
        os.kill(victim, signal.SIGKILL)
    process.wait()
    temporary_files = [path for path in root.rglob(".*") if path.parent.name != root.name and path.name != ".locks"]
    if temporary_files:
        return "writing a file"
    if not any(root.glob("*/config.yaml")):
        return "loading"
    if any(root.glob("*/model")):
        return "closing"
    return "training" if any(root.glob("*/checkpoints/step-*.ckpt")) else "before a checkpoint"


def _kill_sweep(process: "subprocess.Popen[bytes]", root: Path, generator: random.Random) -> str:
    """Send SIGKILL to all processes of a sweep or to the sweep alone. Return how many runs were finished, in words."""
    victims = descendants(process.pid) if generator.random() < 0.5 else []
    for victim in [process.pid, *victims]:
        # A run may have ended in the meantime.
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    process.wait()
    return f"{len(list(root.glob('*/result.json')))} runs finished"


def descendants(pid: int) -> list[int]:
    """Return the PIDs of all descendants of a process."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(process for child in children for process in descendants(child))]


def _run_command(num_processes: int, overrides: Sequence[str]) -> list[str]:
    """Return the command of a run in `num_processes` processes."""
    processes = ["trainer=ddp", f"trainer.devices={num_processes}"] if num_processes > 1 else []
    return [sys.executable, str(REPOSITORY / "train.py"), *processes, *SETTINGS, *overrides]


def _sweep_command(overrides: Sequence[str]) -> list[str]:
    """Return the command of a sweep with two runs at a time."""
    settings = [setting for setting in SETTINGS if not setting.startswith("seed=")]
    return [sys.executable, str(REPOSITORY / "train.py"), *SWEEP, *settings, *overrides]


def start(root: Path, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start a command whose runs go below the folder `root`; its output goes to a file beside the folder."""
    root.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "ISTAR_CACHE": str(root.parent / "cache"), "OMP_NUM_THREADS": "1"}
    with root.with_suffix(".log").open("wb") as log:
        return subprocess.Popen([*command, f"run.root={root}"], env=environment, stdout=log, stderr=log)


def last_line(root: Path) -> str:
    """Return the last line of the output of the command whose runs are below a folder."""
    lines = root.with_suffix(".log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def run_folders(root: Path) -> list[Path]:
    """Return the folders of the runs below a folder."""
    return [path for path in root.iterdir() if path.name not in (".locks", "sweeps")]


def only_run(root: Path) -> Path:
    """Return the folder of the only run below a folder."""
    [folder] = run_folders(root)
    return folder


def outcomes(root: Path) -> dict[str, dict[str, Any]]:
    """Return the outcomes of the runs below a folder by the names of the runs, which are equal for equal configs."""
    return {folder.name: outcome(folder) for folder in run_folders(root)}


def unequal_parts(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> list[str]:
    """Return the runs that only one side has, and the parts in which the others differ."""
    missing = [f"{name}, which is missing" for name in theirs.keys() - ours.keys()]
    further = [f"{name}, which is not expected" for name in ours.keys() - theirs.keys()]
    unequal = [
        f"{part} of {name}" for name in theirs.keys() & ours.keys() for part in differences(ours[name], theirs[name])
    ]
    return [*missing, *further, *unequal]


def outcome(folder: Path) -> dict[str, Any]:
    """Return what must be equal for equal runs: everything but durations and paths."""
    result = json.loads((folder / "result.json").read_text())
    # A commit between two runs changes the record of the code.
    del result["timing"], result["code_commit"], result["code_modified"], result["config"]["run"]
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [{name: value for name, value in row.items() if "second" not in name} for row in csv.DictReader(file)]
    return {
        "result.json": result,
        "metrics.csv": rows,
        # Language models have no file of predictions.
        "predictions": [path.read_bytes() for path in sorted(folder.glob("predictions*.jsonl"))],
        "geometry.json": (folder / "geometry.json").read_bytes(),
        "model": (folder / "model" / "model.safetensors").read_bytes(),
        "models": {path.parent.name: path.read_bytes() for path in folder.glob("models/*/model.safetensors")},
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".refused"),
    }


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the names of the parts in which two outcomes differ."""
    return [part for part in theirs if ours[part] != theirs[part]]


def make_table(tallies: Sequence[Tally]) -> Table:
    """Return the table to print, with a row for each kind of runs."""
    columns = ("killed", "kills survived", "times", "identical", "results lost", "moments")
    table = Table(*columns, title="chaos")
    for tally in tallies:
        moments = ", ".join(f"{moment} {count}" for moment, count in sorted(tally.moments.items()))
        survived = tally.kills - tally.lost
        cells = (tally.kind, f"{survived} of {tally.kills}", tally.runs, tally.identical, tally.lost)
        table.add_row(*map(str, cells), moments)
    return table


if __name__ == "__main__":
    sys.exit(main())
