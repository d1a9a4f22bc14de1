"""Keeps the state of a sweep in a JSON file, which `istar watch` reads, and shows it as a live table."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from istar.drawing.terminal import format_duration
from istar.errors import UserError
from istar.files.folders import list_visible
from istar.files.parsing import read_json, read_record
from istar.files.writing import write_text
from istar.runs.key import LABELLED_SETTINGS
from istar.runs.names import format_metric
from istar.runs.record import PROGRESS, RunRecord
from istar.runs.run_rows import selection_sort_key

SWEEPS_FOLDER, STATE_FILE = "sweeps", "sweep.json"  # the state of a sweep is in `<run.root>/sweeps/<sweep>/sweep.json`
STATE_FORMAT = 1
_HEARTBEAT_SECONDS = 10.0
_END_STATUSES = ("finished", "pruned", "failed", "stopped")


@dataclass
class SweepEntry:
    """The state of one run of a sweep, as an entry of `sweep.json`; `name` is the name of the run's folder."""

    name: str
    overrides: list[str]
    task: str  # label of the task among all runs of the sweep; see `label_inputs`
    model: str  # label of the model
    method: str  # with its settings
    seed: Annotated[int, 0]
    method_name: str  # the method without its settings
    configuration: str  # see `RunKey`; of a run whose key is unknown, its name
    # `waiting`, `running`, `elsewhere` (another process executes the run), `finished`, `pruned`, `failed`, or `stopped`
    # (the same command resumes it).
    status: str = "waiting"
    started: float | None = None  # when this command started the run, in seconds since 1970; None if it did not
    ended: float | None = None  # when the run ended under this command, in seconds since 1970; else None
    progress: str = ""  # what a running run does, such as `epoch 2/3 · validating`
    metric: str | None = None
    value: float | None = None  # the headline metric on the validation set, as in `result.json`
    selection_merit: float = 0.0  # value used for model selection, negated for losses so that higher is better
    validation_examples: int = 0  # number of examples of all validation sets
    collapsed: bool = False
    error: str | None = None
    log: str | None = None  # file with the output of the run's processes

    @property
    def seconds(self) -> float | None:
        """Duration in seconds, including the start of the processes; None unless this command has executed the run."""
        return self.ended - self.started if self.started and self.ended else None

    @property
    def label(self) -> str:
        """Task, model, method and seed, which runs may share that differ in other settings."""
        return f"{self.task} · {self.model} · {self.method} · seed {self.seed}"

    @property
    def group(self) -> tuple[str, str, str]:
        """Task, model and method without its settings, such as Base, I-STAR or weight decay."""
        return self.task, self.model, self.method_name

    def apply_record(self, record: RunRecord) -> None:
        """Copy status, score and error from the record of the run."""
        self.status = record.status
        self.metric, self.value = record.headline.get("metric"), record.headline.get("value")
        self.selection_merit = record.selection_merit if record.headline else 0.0
        self.validation_examples = record.validation_examples
        self.collapsed, self.error = any(record.collapsed.values()), record.error


@dataclass
class SweepState:
    """The state of a sweep, as in `sweep.json`; `name` is the name of its folder, `root` the folder of the runs."""

    name: str
    command: str  # the command that resumes the sweep
    root: str
    jobs: Annotated[int, 1]
    # Number of planned runs without an entry yet, in the second stage or in a search.
    to_come: Annotated[int, 0] = 0
    seen: float = 0.0  # when the file was last written, in seconds since 1970
    is_over: bool = False
    expected: float | None = None  # estimated seconds per run, used until a run has finished; None without an estimate
    searched: list[str] = field(default_factory=list)  # keys that a search varies
    entries: list[SweepEntry] = field(default_factory=list)
    format: int = STATE_FORMAT

    def entries_with(self, *statuses: str) -> list[SweepEntry]:
        return [entry for entry in self.entries if entry.status in statuses]

    def describe(self, entry: SweepEntry) -> str:
        """Return one line that names a run: its label, and the settings in which it differs from the others."""
        return " · ".join([entry.label, *self.list_distinctive_overrides(entry)])

    def list_distinctive_overrides(self, entry: SweepEntry) -> list[str]:
        """Return the searched overrides of a run, and those that not all runs of its task, model and method have.

        The seed and the settings in the label of the method are left out.
        """
        others = [other for other in self.entries if other.group == entry.group]
        return [
            override
            for override in entry.overrides
            if (key := override.partition("=")[0].lstrip("+")) not in ("seed", "reg", *LABELLED_SETTINGS)
            and (key in self.searched or not all(override in other.overrides for other in others))
        ]


class Board:
    """Keeps `sweep.json` in `folder` and the screen up to date: a live table on a terminal, or a line per ended run.

    The board updates `state` in place.
    """

    def __init__(self, folder: Path, state: SweepState, console: Console) -> None:
        self.folder, self.state, self.console = folder, state, console
        self._live: Live | None = None
        self._updated_at = 0.0

    def __enter__(self) -> "Board":
        if self.console.is_terminal:
            self._live = Live(render_sweep(self.state), console=self.console, auto_refresh=False)
            self._live.__enter__()
        self._write()
        return self

    def __exit__(self, *error: Any) -> None:
        self.state.is_over = True
        self._write()
        if self._live is not None:
            self._live.update(render_sweep(self.state), refresh=True)
            self._live.__exit__(None, None, None)

    def record_start(self, entry: SweepEntry, log: Path | None) -> None:
        entry.status, entry.started, entry.error = "running", time.time(), None
        entry.log = str(log) if log is not None else None
        self._write()

    def set_status(self, entry: SweepEntry, status: str) -> None:
        """Record that another process executes a run (`elsewhere`), or no longer does (`waiting`)."""
        entry.status, entry.started, entry.error = status, None, None
        self._write()

    def record_end(self, entry: SweepEntry, outcome: RunRecord | UserError, status: str | None = None) -> None:
        """Record the outcome of a run; after an error, its status is `status`, by default `failed`."""
        if isinstance(outcome, RunRecord):
            entry.apply_record(outcome)
        else:
            entry.status, entry.error = status or "failed", str(outcome)
        entry.ended = time.time()
        self._write()
        if self._live is None:
            self.console.out(format_result_line(self.state, entry), highlight=False)

    def tick(self) -> None:
        """Update phases and screen once a second, and the file every ten seconds; call this many times a second."""
        now = time.time()
        if now - self._updated_at > 1:
            self._updated_at = now
            update_progress(self.state, Path(self.state.root))
            if self._live is not None:
                self._live.update(render_sweep(self.state), refresh=True)
            if now - self.state.seen > _HEARTBEAT_SECONDS:
                self._write()

    def _write(self) -> None:
        self.state.seen = time.time()
        # Not indented, which would take ten times as long for many runs.
        state = {**vars(self.state), "entries": list(map(vars, self.state.entries))}
        write_text(self.folder / STATE_FILE, json.dumps(state))

    @contextmanager
    def ticking(self, on_tick: Callable[[], None]) -> Iterator[None]:
        """Call `on_tick` and `tick` every second from a thread while the `with` block waits for something else."""
        is_over = threading.Event()

        def tick_every_second() -> None:
            while not is_over.wait(1):
                on_tick()
                self.tick()

        ticker = threading.Thread(target=tick_every_second, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            is_over.set()
            ticker.join()


def update_progress(state: SweepState, root: Path) -> None:
    """Read from its folder what each running run does, even for runs in other processes."""
    for entry in state.entries_with("running", "elsewhere"):
        with suppress(UserError):  # the run has not started to train, or its file is damaged
            entry.progress = str(read_json(root / entry.name / PROGRESS))


def read_state(path: Path) -> SweepState:
    """Read a `sweep.json`, or raise a `UserError` if the file cannot be read or istar did not write it."""
    content = read_record(path, SweepState, "a sweep", STATE_FORMAT)
    return SweepState(**content | {"entries": [SweepEntry(**entry) for entry in content["entries"]]})


def estimate_seconds_left(state: SweepState) -> float | None:
    """Estimate the seconds until all runs are done, from those of finished runs or `state.expected`; else None."""
    durations = [entry.seconds for entry in state.entries_with("finished") if entry.seconds]
    mean_seconds = sum(durations) / len(durations) if durations else state.expected
    if mean_seconds is None:
        return None
    running = state.entries_with("running")
    running_seconds = sum(max(0.0, mean_seconds - (time.time() - (entry.started or 0))) for entry in running)
    num_waiting = len(state.entries_with("waiting")) + state.to_come
    return (running_seconds + num_waiting * mean_seconds) / state.jobs


def format_result_line(state: SweepState, entry: SweepEntry) -> str:
    """Return a line about a run that has ended: how many have ended, which run it is, and its score or error."""
    num_ended = len(state.entries_with(*_END_STATUSES))
    prefix = f"[{num_ended}/{len(state.entries) + state.to_come}] {state.describe(entry)}: "
    if entry.value is not None and entry.error is None:
        collapsed = ", collapsed" if entry.collapsed else ""
        pruned = ", pruned" if entry.status == "pruned" else ""
        origin = "by another process" if entry.started is None else format_duration(entry.seconds)
        return f"{prefix}{entry.metric} {format_metric(entry.metric or '', entry.value)}{collapsed}{pruned} ({origin})"
    if entry.status == "stopped":
        return f"{prefix}{entry.error}"
    return f"{prefix}{entry.status}: {entry.error}" + (f" ({entry.log})" if entry.log else "")


_STATUSES_BY_COLUMN = {
    "done": ("finished", "pruned"),
    "running": ("running", "elsewhere"),
    "failed": ("failed",),
    "left": ("waiting", "stopped"),
}
"""The columns of the live table that count runs, with the statuses that each counts."""


def render_sweep(state: SweepState) -> Group:
    """Render a status line, a row for each task, model and method, their best configurations, and the running runs.

    The column "running" also counts runs that other processes execute.
    """
    table = Table("task", "model", "method")
    for column in _STATUSES_BY_COLUMN:
        table.add_column(column, justify="right")
    lines: list[str] = []
    entries_by_group: dict[tuple[str, str, str], list[SweepEntry]] = {}
    for entry in state.entries:
        entries_by_group.setdefault(entry.group, []).append(entry)
    for group_key, group_entries in entries_by_group.items():
        group_statuses = [entry.status for entry in group_entries]
        counts = [sum(map(group_statuses.count, statuses)) for statuses in _STATUSES_BY_COLUMN.values()]
        table.add_row(*group_key, *map(str, counts))
        if best_entries := find_best_configuration(group_entries):
            lines.append(f"  {format_best_line(state, best_entries)}")
    lines = ["best so far:", *lines] if lines else []
    for status, title in _RUNNING_TITLES.items():
        entries = state.entries_with(status)
        lines += [f"{title}:", *(_format_progress_line(state, entry) for entry in entries)] if entries else []
    return Group(Text(format_status_line(state)), table, *map(Text, lines))


def format_best_line(state: SweepState, best_entries: Sequence[SweepEntry]) -> str:
    """Return a line about a configuration, with its mean score over its runs, one for each seed."""
    best, mean = best_entries[0], fmean(entry.value or 0 for entry in best_entries)
    seeds = "1 seed" if len(best_entries) == 1 else f"{len(best_entries)} seeds"
    score = f"{best.metric} {format_metric(best.metric or '', mean)} ({seeds})"
    settings = [score, *state.list_distinctive_overrides(best)]
    return f"{best.task} · {best.model} · {best.method}: {', '.join(settings)}"


def find_best_configuration(entries: Sequence[SweepEntry]) -> list[SweepEntry]:
    """Return the finished runs, one for each seed, of the best configuration, by `selection_sort_key`."""
    entries_by_configuration: dict[str, list[SweepEntry]] = {}
    for entry in entries:
        if entry.value is not None and entry.status == "finished":
            entries_by_configuration.setdefault(entry.configuration, []).append(entry)
    return max(entries_by_configuration.values(), key=selection_sort_key, default=[])


_RUNNING_TITLES = {"running": "running", "elsewhere": "running elsewhere"}
"""Titles of the statuses of runs that are in progress."""


def _format_progress_line(state: SweepState, entry: SweepEntry) -> str:
    elapsed = f", {format_duration(time.time() - entry.started)}" if entry.started else ""
    return f"  {state.describe(entry)}: {entry.progress or 'starting'}{elapsed}"


def format_status_line(state: SweepState) -> str:
    """Return a line with the number of runs by status and the estimated time left."""
    statuses = ("finished", "running", "elsewhere", "failed", "pruned", "stopped")
    count_by_status = {status: len(state.entries_with(status)) for status in statuses}
    num_left = len(state.entries_with("waiting")) + state.to_come
    parts = [f"{state.name}: {count_by_status['finished']} of {len(state.entries) + state.to_come} runs finished"]
    other_counts = [(status, count) for status, count in count_by_status.items() if count and status != "finished"]
    parts += [f"{count} {_RUNNING_TITLES.get(status, status)}" for status, count in other_counts]
    parts += [f"{num_left} left"] if num_left else []
    seconds = estimate_seconds_left(state)
    if not state.is_over and seconds is not None and num_left + count_by_status["running"]:
        parts.append(f"about {format_duration(seconds)} to go")
    return " · ".join(parts)


_MAX_SILENT_SECONDS = 60.0
"""A sweep writes its state every ten seconds; after this time without an update, it has probably died."""


def watch_sweeps(root: Path, console: Console, name: str | None = None, once: bool = False) -> None:
    """Show the sweeps in a folder of runs until all of them are over; Ctrl-C ends the display, not the sweeps.

    Args:
        root: folder that contains the runs.
        name: name of the sweep to show; None shows all sweeps that are not over, or else the latest.
        once: whether to show only the current state, as always if the console is not a terminal.

    Raises a `UserError` if no such sweep exists.
    """
    states, errors = find_sweeps(root, name)
    if once or not console.is_terminal:
        console.print(render_sweeps(states, errors))
        return
    with Live(render_sweeps(states, errors), console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while not all(state.is_over for state in states):
            time.sleep(2)
            states, errors = find_sweeps(root, name)
            live.update(render_sweeps(states, errors), refresh=True)


def find_sweeps(root: Path, name: str | None = None) -> tuple[list[SweepState], list[str]]:
    """Read the sweep `name`; if it is None, the sweeps that are not over, or else only the latest one.

    Returns:
        The states of the sweeps, and a message for each sweep that cannot be read.

    Raises a `UserError` if no such sweep exists.
    """
    folder = root / SWEEPS_FOLDER
    paths = sorted(list_visible(folder, f"*/{STATE_FILE}"), key=lambda path: path.stat().st_mtime)
    state_paths = [path for path in paths if not name or path.parent.name == name]
    if not state_paths:
        sweep_names = sorted(path.parent.name for path in paths)
        finding = f"no sweep {name}; there are {', '.join(sweep_names)}" if name and sweep_names else "no sweep"
        raise UserError(f"{folder} holds {finding}; name the folder that holds the runs, as run.root does")
    states, errors = [], []
    for path in state_paths:
        try:
            states.append(read_state(path))
        except UserError as error:
            errors.append(str(error))
    selected_states = [state for state in states if not state.is_over] or states[-1:]
    for state in selected_states:
        update_progress(state, root)
    return selected_states, errors


def render_sweeps(states: list[SweepState], errors: list[str]) -> Group:
    """Render the tables of several sweeps, a note below each sweep that seems to have died, and the errors."""
    renderables: list[Group | Text] = []
    for state in states:
        renderables.append(render_sweep(state))
        silent_seconds = time.time() - state.seen
        if not state.is_over and silent_seconds > _MAX_SILENT_SECONDS:
            note = f"no update for {format_duration(silent_seconds)}; if the sweep was killed, this command resumes it:"
            renderables.append(Text(f"{note} {state.command}"))
    return Group(*renderables, *(Text(f"not read: {error}") for error in errors))
