"""The state of a sweep: a JSON file that `istar watch` reads, and a live table on the terminal."""

import csv
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from istar.config.schema import to_dict
from istar.errors import UserError, shorten
from istar.files import write_text
from istar.reports.run_frame import record_to_row
from istar.results import METRICS, RunRecord
from istar.scores import displayed, merit
from istar.sweeps.trials import Trial

FOLDER, STATE = "sweeps", "sweep.json"  # the state of a sweep is in `<run.root>/sweeps/<sweep>/sweep.json`
FORMAT = 1
_HEARTBEAT_SECONDS = 10.0
_ENDED = ("finished", "pruned", "failed", "stopped")


@dataclass
class Entry:
    """The state of one run of a sweep; `name` is the name of its folder."""

    name: str
    overrides: Sequence[str]
    task: str
    model: str
    method: str
    seed: int
    stage: str  # `search` (over the grid or by Optuna) or `seeds` (repetitions of the best configurations)
    # `waiting`, `running`, `elsewhere` (another process executes the run), `finished`, `pruned`, `failed`, or `stopped`
    # (the same command resumes it).
    status: str = "waiting"
    started: float | None = None  # when this command started the run, in seconds since 1970; None if it did not
    ended: float | None = None  # when the run ended, in seconds since 1970; None if it has not ended under this command
    epochs: tuple[int, int] = (0, 0)  # number of completed epochs, and of all epochs
    metric: str | None = None
    value: float | None = None  # the headline metric on the validation set, as in `result.json`
    selection: float | None = None  # the value by which runs are compared, on held-out data if there are any
    collapsed: bool = False
    error: str | None = None
    log: str | None = None  # file with the output of the run's processes

    @property
    def seconds(self) -> float | None:
        """Duration including the start of the processes; None if the run has not ended under this command."""
        return self.ended - self.started if self.started and self.ended else None

    @property
    def label(self) -> str:
        """Task, model, method and seed in one line."""
        return f"{self.task} · {self.model} · {self.method} · seed {self.seed}"

    @property
    def group(self) -> tuple[str, str, str]:
        """Task, model and method without its hyperparameters (Base, I-STAR or CosReg)."""
        return self.task, self.model, self.method.split(" ")[0]

    @property
    def rank(self) -> float:
        """The number by which runs are compared, higher for better runs.

        The states of earlier versions have the headline metric only.
        """
        return merit(self.metric or "", (self.value if self.selection is None else self.selection) or 0.0)

    def apply_record(self, record: RunRecord) -> None:
        """Copy status, score and epochs from the record of the ended run."""
        self.status = record.status
        self.metric, self.value = record.headline.get("metric"), record.headline.get("value")
        self.selection = record.selection_value
        self.collapsed, self.error = any(record.collapsed.values()), record.error
        self.epochs = (len(record.epochs), self.epochs[1])


@dataclass
class SweepState:
    """The state of a sweep, as in `sweep.json`; `name` is the name of its folder, `root` the folder of the runs."""

    name: str
    command: str  # the command that resumes the sweep
    root: str
    jobs: int
    to_come: int = 0  # number of planned runs that have no entry yet: those of the second stage, or of a search
    begun: float = 0.0  # when this command began, in seconds since 1970
    seen: float = 0.0  # when the file was last written, in seconds since 1970
    is_over: bool = False
    expected: float | None = None  # estimated seconds per run, used until a run has finished; None without an estimate
    entries: list[Entry] = field(default_factory=list)
    format: int = FORMAT

    def entries_with(self, *statuses: str) -> list[Entry]:
        """The entries that have one of the statuses."""
        return [entry for entry in self.entries if entry.status in statuses]


def make_entry(trial: Trial, stage: str) -> Entry:
    """The entry of a trial that is waiting."""
    columns = record_to_row(RunRecord(trial.name, "waiting", to_dict(trial.config)))
    epochs = (0, trial.config.trainer.max_epochs)
    description = {key: columns[key] for key in ("task", "model", "method", "seed")}
    return Entry(trial.name, trial.overrides, stage=stage, epochs=epochs, **description)


class Board:
    """Keeps `sweep.json` and the screen up to date: a live table on a terminal, else one line for each ended run.

    The board changes `state`; `folder` is the folder of the sweep.
    """

    def __init__(self, folder: Path, state: SweepState, console: Console) -> None:
        self.folder, self.state, self.console = folder, state, console
        self._live: Live | None = None
        self._updated = 0.0

    def __enter__(self) -> "Board":
        self.state.begun = time.time()
        if self.console.is_terminal:
            self._live = Live(render(self.state), console=self.console, auto_refresh=False)
            self._live.__enter__()
        self._write()
        return self

    def __exit__(self, *error: Any) -> None:
        self.state.is_over = True
        self._write()
        if self._live is not None:
            self._live.update(render(self.state), refresh=True)
            self._live.__exit__(None, None, None)

    def started(self, entry: Entry, log: Path | None) -> None:
        """Record that a run has started."""
        entry.status, entry.started, entry.error = "running", time.time(), None
        entry.log = str(log) if log is not None else None
        self._write()

    def set_status(self, entry: Entry, status: str) -> None:
        """Record that a run is executed by another process (`elsewhere`), or no longer is (`waiting`)."""
        entry.status, entry.started, entry.error = status, None, None
        self._write()

    def ended(self, entry: Entry, outcome: RunRecord | UserError, status: str | None = None) -> None:
        """Record the outcome of a run; after an error, its status is `status`, by default `failed`."""
        if isinstance(outcome, RunRecord):
            entry.apply_record(outcome)
        else:
            entry.status, entry.error = status or "failed", str(outcome)
        entry.ended = time.time()
        self._write()
        if self._live is None:
            self.console.out(result_line(self.state, entry), highlight=False)

    def tick(self) -> None:
        """Update epochs, screen and file, each only if its interval has passed; call this many times a second."""
        now = time.time()
        if now - self._updated > 1:
            self._updated = now
            update_epochs(self.state, Path(self.state.root))
            if self._live is not None:
                self._live.update(render(self.state), refresh=True)
            if now - self.state.seen > _HEARTBEAT_SECONDS:
                self._write()

    def _write(self) -> None:
        self.state.seen = time.time()
        write_text(self.folder / STATE, json.dumps(asdict(self.state), indent=1))

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Call `tick` from a thread every second during a block that waits for something else."""
        is_over = threading.Event()

        def tick() -> None:
            while not is_over.wait(1):
                self.tick()

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            is_over.set()
            ticker.join()


def update_epochs(state: SweepState, root: Path) -> None:
    """Update the completed epochs of running runs from their folders, here and elsewhere."""
    for entry in state.entries_with("running", "elsewhere"):
        entry.epochs = (epochs_done(root / entry.name), entry.epochs[1])


def read(path: Path) -> SweepState:
    """Read a `sweep.json`.

    Raises:
        UserError: if the file cannot be read or istar did not write it.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise UserError(f"{path} has format {values['format']}; this version reads {FORMAT}")
        for entry in values["entries"]:
            entry |= {"overrides": tuple(entry["overrides"]), "epochs": tuple(entry["epochs"])}
        return SweepState(**values | {"entries": [Entry(**entry) for entry in values["entries"]]})
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(f"{path} is not a sweep that istar wrote: {shorten(error)}") from error


def epochs_done(folder: Path) -> int:
    """The number of epochs that a run has validated, from its `metrics.csv`."""
    try:
        with (folder / METRICS).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            metrics = [name for name in reader.fieldnames or () if name.startswith("val/")]
            validations = [row for row in reader if any(row[name] for name in metrics)]
    except (OSError, ValueError):
        return 0
    # The first validation takes place before the training.
    return max(0, len(validations) - 1)


def seconds_left(state: SweepState) -> float | None:
    """Estimate the seconds until all runs are done, from the mean duration of the finished runs.

    Without any finished run, the mean is `state.expected`; without an expectation, the result is None.
    """
    durations = [entry.seconds for entry in state.entries_with("finished") if entry.seconds]
    mean = sum(durations) / len(durations) if durations else state.expected
    if mean is None:
        return None
    running = sum(max(0.0, mean - (time.time() - (entry.started or 0))) for entry in state.entries_with("running"))
    waiting = len(state.entries_with("waiting")) + state.to_come
    return (running + waiting * mean) / state.jobs


def result_line(state: SweepState, entry: Entry) -> str:
    """One line on a run that has ended: how many have ended, what the run is, and its score or error."""
    prefix = f"[{len(state.entries_with(*_ENDED))}/{len(state.entries) + state.to_come}] {entry.label}: "
    if entry.value is not None and entry.error is None:
        collapsed = ", collapsed" if entry.collapsed else ""
        pruned = ", pruned" if entry.status == "pruned" else ""
        origin = "by another process" if entry.started is None else duration(entry.seconds)
        return f"{prefix}{entry.metric} {displayed(entry.metric or '', entry.value):.2f}{collapsed}{pruned} ({origin})"
    if entry.status == "stopped":
        return f"{prefix}{entry.error}"
    return f"{prefix}{entry.status}: {entry.error}" + (f" ({entry.log})" if entry.log else "")


_COLUMNS = {
    "done": ("finished", "pruned"),
    "running": ("running", "elsewhere"),
    "failed": ("failed",),
    "left": ("waiting", "stopped"),
}
"""Columns of the live table that count runs by their status."""


def render(state: SweepState) -> Group:
    """The live table: a headline, one row for each task, model and method, and one line for each running run.

    The column of the running runs includes those that other processes execute.
    """
    table = Table("task", "model", "method")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("best so far")
    table.add_column("by")
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in state.entries:
        groups.setdefault(entry.group, []).append(entry)
    for names, group in groups.items():
        counts = [str(sum(entry.status in statuses for entry in group)) for statuses in _COLUMNS.values()]
        scored = [entry for entry in group if entry.value is not None and entry.status == "finished"]
        best = max(scored, key=lambda entry: entry.rank, default=None)
        score, origin = "-", "-"
        if best is not None:
            score = f"{best.metric} {displayed(best.metric or '', best.value or 0):.2f}"
            distinctive = [text for text in best.overrides if not all(text in entry.overrides for entry in group)]
            origin = " ".join(distinctive) or best.method
        table.add_row(*names, *counts, score, origin)
    lines = []
    for status, title in _RUNNING.items():
        entries = state.entries_with(status)
        lines += [f"{title}:", *map(_progress, entries)] if entries else []
    return Group(Text(headline(state)), table, *map(Text, lines))


_RUNNING = {"running": "running", "elsewhere": "running elsewhere"}
"""The statuses of runs that are under way, in words."""


def _progress(entry: Entry) -> str:
    """One line with the epoch of a run that is under way and, if this sweep has started it, the time since then."""
    epoch = f"epoch {min(entry.epochs[0] + 1, entry.epochs[1])} of {entry.epochs[1]}"
    elapsed = f", {duration(time.time() - entry.started)}" if entry.started else ""
    return f"  {entry.label}: {epoch}{elapsed}"


def headline(state: SweepState) -> str:
    """One line with the number of runs by status and the estimated time left."""
    statuses = ("finished", "running", "elsewhere", "failed", "pruned", "stopped")
    counts = {status: len(state.entries_with(status)) for status in statuses}
    left = len(state.entries_with("waiting")) + state.to_come
    parts = [f"{state.name}: {counts['finished']} of {len(state.entries) + state.to_come} runs finished"]
    others = [(status, count) for status, count in counts.items() if count and status != "finished"]
    parts += [f"{count} {_RUNNING.get(status, status)}" for status, count in others]
    parts += [f"{left} left"] if left else []
    seconds = seconds_left(state)
    if not state.is_over and seconds is not None and left + counts["running"]:
        parts.append(f"about {duration(seconds)} to go")
    return " · ".join(parts)


def duration(seconds: float | None) -> str:
    """Format a duration in the two largest units: 45 s, 12 min, 3 h 5 min, 2 d 4 h; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
