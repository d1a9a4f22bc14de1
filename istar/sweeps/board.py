"""What is known of a sweep while it runs: a file that others can watch, and a table of it."""

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from istar.reports.run_frame import row
from istar.results import RunRecord
from istar.sweeps.trials import Trial

FOLDER, STATE = "sweeps", "sweep.json"
"""Below the folder of the runs, and below that in a folder for each sweep."""
FORMAT = 1
_HEARTBEAT_SECONDS = 10.0
_ENDED = ("finished", "pruned", "failed", "stopped")


@dataclass
class Entry:
    """A run of the sweep.

    Attributes:
        name: of its folder.
        overrides: that make it, as on the command line.
        task: and `model`, `method`, `seed`: what it is.
        stage: search (over the grid or by Optuna) or seeds (of the best).
        status: waiting, running, finished, pruned, failed or stopped (goes on with the same command).
        started: seconds since 1970 at which this call has started it; None if it has not.
        ended: when it did, in this call.
        epochs: that are done, of how many.
        metric: the headline's name and `value` on the validation set, a fraction.
        error: why it failed, in one line.
        log: what its processes have printed.
    """

    name: str
    overrides: Sequence[str]
    task: str
    model: str
    method: str
    seed: int
    stage: str
    status: str = "waiting"
    started: float | None = None
    ended: float | None = None
    epochs: tuple[int, int] = (0, 0)
    metric: str | None = None
    value: float | None = None
    collapsed: bool = False
    error: str | None = None
    log: str | None = None


@dataclass
class State:
    """A sweep, as `sweep.json` has it.

    Attributes:
        name: of the sweep's folder.
        command: that goes on with it.
        root: where the runs lie.
        jobs: runs at a time.
        to_come: runs that are planned but not named yet: those of the second stage, or of a search.
        begun: when this call began, seconds since 1970.
        seen: when this file was last written.
        is_over: nobody works on it any more.
        expected: seconds that a run takes, before any has ended; None where nothing is known.
    """

    name: str
    command: str
    root: str
    jobs: int
    to_come: int = 0
    begun: float = 0.0
    seen: float = 0.0
    is_over: bool = False
    expected: float | None = None
    entries: list[Entry] = field(default_factory=list)
    format: int = FORMAT


def entry(trial: Trial, stage: str) -> Entry:
    """A run that waits for its turn."""
    known = row(RunRecord(trial.name, "waiting", to_dict(trial.config)))
    epochs = (0, trial.config.trainer.max_epochs)
    named = {key: known[key] for key in ("task", "model", "method", "seed")}
    return Entry(trial.name, trial.overrides, stage=stage, epochs=epochs, **named)


class Board:
    """Keeps `sweep.json` and the screen up to date: a live table on a terminal, else a line for each run that ends.

    Args:
        folder: of the sweep.
        state: at the beginning.
        console: where it is shown.
    """

    def __init__(self, folder: Path, state: State, console: Console) -> None:
        self.folder, self.state, self.console = folder, state, console
        self._live: Live | None = None
        self._looked = 0.0

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

    def started(self, found: Entry, log: Path | None) -> None:
        found.status, found.started, found.error = "running", time.time(), None
        found.log = str(log) if log is not None else None
        self._write()

    def ended(self, found: Entry, outcome: RunRecord | UserError, status: str | None = None) -> None:
        """Note what came out of a run.

        Args:
            found: the run.
            outcome: its record, or why there is none.
            status: if it is none that the outcome tells.
        """
        if isinstance(outcome, RunRecord):
            note_record(found, outcome)
        else:
            found.status, found.error = status or "failed", str(outcome)
        found.ended = time.time()
        self._write()
        if self._live is None:
            self.console.print(line(self.state, found), highlight=False, soft_wrap=True, markup=False)

    def tick(self) -> None:
        """To be called often: brings the epochs of running runs and the screen up to date."""
        now = time.time()
        if now - self._looked > 1:
            self._looked = now
            look(self.state, Path(self.state.root))
            if self._live is not None:
                self._live.update(render(self.state), refresh=True)
            if now - self.state.seen > _HEARTBEAT_SECONDS:
                self._write()

    def _write(self) -> None:
        self.state.seen = time.time()
        write_text(self.folder / STATE, json.dumps(asdict(self.state), indent=1))

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """`tick` while the block waits for something else."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(1):
                self.tick()

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            over.set()
            ticker.join()


def look(state: State, root: Path) -> None:
    """See how far the running runs are, by their folders."""
    for found in state.entries:
        if found.status == "running":
            found.epochs = (epochs_done(root / found.name), found.epochs[1])


def note_record(found: Entry, record: RunRecord) -> None:
    """Take over what a run's result says."""
    found.status = record.status
    found.metric, found.value = record.headline.get("metric"), record.headline.get("value")
    found.collapsed, found.error = any(record.collapsed.values()), record.error
    found.epochs = (len(record.epochs), found.epochs[1])


def read(path: Path) -> State:
    """Read `sweep.json`.

    Raises:
        UserError: if it is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise UserError(f"{path} has format {values['format']}; this version reads {FORMAT}")
        entries = [_entry(**found) for found in values.pop("entries")]
        return State(**values, entries=entries)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(f"{path} is not a sweep that istar wrote: {shorten(error)}") from error


def _entry(overrides: Sequence[str], epochs: Sequence[int], **values: Any) -> Entry:
    return Entry(overrides=tuple(overrides), epochs=(epochs[0], epochs[1]), **values)


def epochs_done(folder: Path) -> int:
    """Epochs that a run has validated, by its `metrics.csv`."""
    try:
        head, *rows = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return 0
    places = [place for place, name in enumerate(head.split(",")) if name.startswith("val/")]
    values = [cells for cells in (line.split(",") for line in rows) if any(cells[place] for place in places)]
    # The first validation is before any training.
    return max(0, len(values) - 1)


def seconds_left(state: State) -> float | None:
    """Until the end, if the runs to come take as long as those that this call has seen, `jobs` at a time."""
    seen = [seconds for found in _with(state, "finished") if (seconds := took(found))]
    each = sum(seen) / len(seen) if seen else state.expected
    if each is None:
        return None
    running = sum(max(0.0, each - (time.time() - (found.started or 0))) for found in _with(state, "running"))
    waiting = len(_with(state, "waiting")) + state.to_come
    return (running + waiting * each) / state.jobs


def line(state: State, found: Entry) -> str:
    """A run that has ended, in a line."""
    done = sum(other.status in _ENDED for other in state.entries)
    what = f"[{done}/{len(state.entries) + state.to_come}] {_label(found)}: "
    if found.value is not None and found.error is None:
        collapsed = ", collapsed" if found.collapsed else ""
        pruned = ", pruned" if found.status == "pruned" else ""
        return f"{what}{found.metric} {100 * found.value:.2f}{collapsed}{pruned} ({duration(took(found))})"
    if found.status == "stopped":
        return f"{what}{found.error}"
    return f"{what}{found.status}: {found.error}" + (f" ({found.log})" if found.log else "")


def took(found: Entry) -> float | None:
    """Seconds in this call, the start of its processes among them."""
    return found.ended - found.started if found.started and found.ended else None


def render(state: State) -> Group:
    """The live table: a line for the whole, a row for each task, model and method, and the runs under way."""
    table = Table()
    for column in ("task", "model", "method", "done", "running", "failed", "left", "best so far", "by"):
        table.add_column(column, justify="right" if column in ("done", "running", "failed", "left") else "left")
    for (task, model, family), group in _families(state.entries).items():
        counts = [sum(found.status in kinds for found in group) for kinds in _COLUMNS]
        scored = [found for found in group if found.value is not None and found.status == "finished"]
        best = max(scored, key=lambda found: found.value or 0.0, default=None)
        told = ("-", "-") if best is None else (f"{best.metric} {100 * (best.value or 0):.2f}", _by(best, group))
        table.add_row(task, model, family, *map(str, counts), *told)
    running = [Text(f"  {_label(found)}: {_progress(found)}") for found in _with(state, "running")]
    return Group(Text(headline(state)), table, *([Text("running:")] if running else []), *running)


_COLUMNS = (("finished", "pruned"), ("running",), ("failed",), ("waiting", "stopped"))


def headline(state: State) -> str:
    """Counts and the time to go."""
    counts = {status: len(_with(state, status)) for status in ("finished", "running", "failed", "pruned", "stopped")}
    left = len(_with(state, "waiting")) + state.to_come
    told = [f"{state.name}: {counts['finished']} of {len(state.entries) + state.to_come} runs finished"]
    told += [f"{count} {status}" for status, count in counts.items() if count and status != "finished"]
    told += [f"{left} left"] if left else []
    seconds = seconds_left(state)
    if not state.is_over and seconds is not None and left + counts["running"]:
        told.append(f"about {duration(seconds)} to go")
    return " · ".join(told)


def duration(seconds: float | None) -> str:
    """As people say it: 45 s, 12 min, 3 h 5 min, 2 d 4 h."""
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


def family(found: Entry) -> str:
    """Base, I-STAR or CosReg."""
    return found.method.split(" ")[0]


def _families(entries: Iterable[Entry]) -> Mapping[tuple[str, str, str], list[Entry]]:
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for found in entries:
        groups.setdefault((found.task, found.model, family(found)), []).append(found)
    return groups


def _with(state: State, status: str) -> list[Entry]:
    return [found for found in state.entries if found.status == status]


def _label(found: Entry) -> str:
    return f"{found.task} · {found.model} · {found.method} · seed {found.seed}"


def _by(found: Entry, group: Sequence[Entry]) -> str:
    """What tells a run from the others of its method."""
    own = [override for override in found.overrides if not all(override in other.overrides for other in group)]
    return " ".join(own) or found.method


def _progress(found: Entry) -> str:
    since = f", {duration(time.time() - found.started)}" if found.started else ""
    return f"epoch {min(found.epochs[0] + 1, found.epochs[1])} of {found.epochs[1]}{since}"
