"""A sweep from its overrides to its closing table; train.py comes here with `-m`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track

from istar import results
from istar.config import Config, SweepConfig, WandbConfig, schema
from istar.errors import StoppedError, UserError
from istar.files import write_text
from istar.reports import comparison, run_tables
from istar.results import RunRecord
from istar.runs import extras
from istar.runs.store import Folders, finished_run
from istar.sweeps import board, cost, pool, trials
from istar.sweeps.board import Board, Entry, State, duration
from istar.sweeps.trials import Overrides, Trial

if TYPE_CHECKING:
    from istar.sweeps.study import Study

SEARCH, SEEDS = "search", "seeds"
_COMPARED = 24
"""So many configurations fit into a table and a picture; of more, the best of each method are compared."""


class Elsewhere(Protocol):
    """Carries out runs in another place, all at once: what Hydra's launchers do."""

    def __call__(self, wanted: Sequence[Overrides]) -> Sequence[RunRecord | UserError]:
        """What came out of each."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        settings: the `sweep` keys.
        arguments: overrides.
        params: values by key that are swept over beside them (`hydra.sweeper.params`).
        command: that was called.
        root: where runs go.
        compose: from a run's overrides to its config.
        elsewhere: None carries the runs out on this machine.
        show_trace: print the stack trace of a run that fails.
    """

    settings: SweepConfig
    arguments: Sequence[str]
    params: Mapping[str, Any]
    command: str
    root: Path
    compose: Callable[[Overrides], DictConfig]
    elsewhere: Elsewhere | None = None
    show_trace: bool = False


def sweep(request: Request, console: Console) -> int:
    """Carry out what is missing of a sweep, and say what came of it.

    Returns:
        Exit code: 0 if all runs are done, 1 if some have failed or were stopped.

    Raises:
        UserError: for overrides that do not compose or cannot be searched; nothing has been started then.
        StoppedError: when a signal has stopped it.
    """
    settings = request.settings
    if settings.search == "optuna":
        extras.require("sweep.search=optuna", "sweep")
    runs = Runs(request, console)
    if settings.search == "grid":
        runs.add_all(runs.combinations(), SEARCH)
    announce(runs)
    if settings.dry_run:
        return 0
    with Board(runs.folder, runs.state, console) as shown:
        if settings.search == "grid":
            carry_out(request, Queue(runs, shown))
        else:
            search(runs, shown)
        if settings.seeds and not (settings.fail_fast and runs.failed()):
            runs.state.to_come = 0
            runs.add_all(runs.winners_with_seeds(), SEEDS)
            carry_out(request, Queue(runs, shown))
    return close(runs)


class Runs:
    """The runs of a sweep: what each of them is, and what is known of it.

    Attributes:
        folder: of the sweep.
        state: what others see.
        spaces: what is swept over.
        trials: by the names of their folders.
        entries: the same runs in `state`.
        folders: where they lie.
    """

    def __init__(self, request: Request, console: Console) -> None:
        settings = request.settings
        self.request, self.console = request, console
        self.spaces = trials.spaces(request.arguments, request.params, settings.grids or {}, settings.only)
        digits = trials.identity(self.spaces, settings.seeds, settings.search, settings.sampler_seed)
        self.folder = request.root / board.FOLDER / f"{settings.name}-{digits}"
        self.state = State(self.folder.name, request.command, str(request.root), settings.jobs)
        self.trials: dict[str, Trial] = {}
        self.entries: dict[str, Entry] = {}
        self.folders = Folders()

    def combinations(self) -> list[Overrides]:
        """Of the values of each grid."""
        return [overrides for space in self.spaces.values() for overrides in trials.combinations(space)]

    def add_all(self, wanted: Sequence[Overrides], stage: str) -> None:
        """`add` them, under a progress bar where they are many."""
        bar = track(wanted, "composing", console=self.console, transient=True, disable=len(wanted) < _MANY)
        for overrides in bar:
            self.add(overrides, stage)

    def add(self, overrides: Overrides, stage: str) -> Trial:
        """A run of the sweep; one that is there already joins the stage, one that is finished keeps its result.

        Raises:
            UserError: if the overrides do not compose.
        """
        config = schema.load(self.request.compose(overrides))
        if isinstance(config.logger, WandbConfig) and config.logger.group is None:
            config = replace(config, logger=replace(config.logger, group=self.folder.name))
        error, record = None, None
        try:
            folder = self.folders(config)
            record = None if config.run.overwrite else finished_run(folder, config)
            name = folder.name
        except UserError as mistake:
            error, name = str(mistake), f"not-started-{len(self.entries) + 1}"
        trial = self.trials.setdefault(name, Trial(overrides, config, name))
        if name not in self.entries:
            self.entries[name] = board.entry(trial, stage)
            self.state.entries.append(self.entries[name])
        entry = self.entries[name]
        entry.stage = stage
        if record is not None:
            board.note_record(entry, record)
        if error is not None:
            entry.status, entry.error = "failed", error
        return trial

    def sample(self) -> tuple[Config, int]:
        """The config of a run with the values that nobody sweeps over, and its number of training examples.

        Raises:
            UserError: if it does not compose, or its data cannot be loaded.
        """
        space = next(iter(self.spaces.values()))
        fixed = tuple(own.input_line or "" for own in space.values() if not own.is_sweep_override())
        config = schema.load(self.request.compose(fixed))
        self.folders(config)
        return config, self.folders.sizes[Folders.data_of(config)]

    def winners_with_seeds(self) -> list[Overrides]:
        """The best finished run of each task, model and method by its validation score, with each of the seeds."""
        best: dict[tuple[str, str, str], Entry] = {}
        for entry in self.state.entries:
            kind = (entry.task, entry.model, board.family(entry))
            if entry.status == "finished" and (kind not in best or (entry.value or 0) > (best[kind].value or 0)):
                best[kind] = entry
        seeds = self.request.settings.seeds
        return [trials.with_seed(tuple(entry.overrides), seed) for entry in best.values() for seed in seeds]

    def failed(self) -> list[Entry]:
        """The runs that have."""
        return [entry for entry in self.state.entries if entry.status == "failed"]

    def records(self) -> list[RunRecord]:
        """Of the finished runs."""
        names = [entry.name for entry in self.state.entries if entry.status == "finished"]
        return [results.read(self.request.root / name) for name in names]


_MANY = 50


class Queue:
    """The runs that wait, in their order, for `istar.sweeps.pool`."""

    def __init__(self, runs: Runs, shown: Board) -> None:
        self.runs, self.shown = runs, shown

    def next(self) -> Trial | None:
        waiting = [entry for entry in self.runs.state.entries if entry.status == "waiting"]
        return self.runs.trials[waiting[0].name] if waiting else None

    def started(self, trial: Trial, log: Path | None) -> None:
        self.shown.started(self.runs.entries[trial.name], log)

    def ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None:
        self.shown.ended(self.runs.entries[trial.name], outcome, status)

    def tick(self) -> None:
        self.shown.tick()


class Searched(Queue):
    """The runs that Optuna asks for, one by one."""

    def __init__(self, runs: Runs, shown: Board, study: "Study") -> None:
        super().__init__(runs, shown)
        self._study = study
        self._numbers: dict[str, int] = {}

    def next(self) -> Trial | None:
        while (asked := self._study.ask()) is not None:
            number, overrides = asked
            trial = replace(self.runs.add(overrides, SEARCH), study=self._study.handle(number))
            self.runs.state.to_come = self._study.to_come()
            entry = self.runs.entries[trial.name]
            if entry.status in ("waiting", "stopped"):
                self._numbers[trial.name] = number
                return trial
            # The same values as before, or none that can be run.
            self._study.tell(number, self._known(entry))
        return None

    def ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None:
        number = self._numbers.pop(trial.name)
        if status == "stopped":
            self._study.leave(number)
        else:
            self._study.tell(number, outcome)
        super().ended(trial, outcome, status)

    def _known(self, entry: Entry) -> RunRecord | UserError:
        if entry.status in ("finished", "pruned"):
            return results.read(self.runs.request.root / entry.name)
        return UserError(entry.error or entry.status)


def search(runs: Runs, shown: Board) -> None:
    """Carry out what Optuna asks for, and what it has asked for before."""
    # Seconds of imports that no grid needs.
    from istar.sweeps.study import Study

    study = Study(runs.request.settings, runs.spaces, runs.folder)
    try:
        for _, overrides in study.ended_trials():
            trial = runs.add(overrides, SEARCH)
            entry = runs.entries[trial.name]
            if entry.status == "waiting":
                board.note_record(entry, results.read(runs.request.root / trial.name))
        runs.state.to_come = study.to_come()
        carry_out(runs.request, Searched(runs, shown, study))
    finally:
        study.close()


def carry_out(request: Request, queue: Queue) -> None:
    """Here, or elsewhere: all that there is to run now, until there is no more."""
    settings = request.settings
    if request.elsewhere is None:
        logs = queue.runs.folder / "logs"
        pool.carry_out(queue, pool.Settings(settings.jobs, settings.fail_fast, request.show_trace, logs))
        return
    limit = settings.jobs if isinstance(queue, Searched) else None
    while batch := _batch(queue, limit):
        wanted = [(*trial.overrides, *_told(trial)) for trial in batch]
        with queue.shown.ticking():
            outcomes = request.elsewhere(wanted)
        for trial, outcome in zip(batch, outcomes, strict=True):
            queue.ended(trial, outcome, "stopped" if isinstance(outcome, StoppedError) else None)


def _batch(queue: Queue, limit: int | None) -> list[Trial]:
    batch: list[Trial] = []
    while (limit is None or len(batch) < limit) and (trial := queue.next()) is not None:
        queue.started(trial, None)
        batch.append(trial)
    return batch


def _told(trial: Trial) -> list[str]:
    """What a run elsewhere has to know beside its overrides."""
    logger = trial.config.logger
    told = [f"logger.group={logger.group}"] if isinstance(logger, WandbConfig) else []
    return told + ([f"sweep.trial='{trial.study}'"] if trial.study else [])


def announce(runs: Runs) -> None:
    """Say how many runs there are, and what they may cost; in a dry run also which ones."""
    settings, state = runs.request.settings, runs.state
    waiting = [entry for entry in state.entries if entry.status == "waiting"]
    wanted = [_priced(runs, entry.name) for entry in waiting]
    kinds = {(entry.task, entry.model, board.family(entry)): entry.name for entry in state.entries}
    told = [f"{state.name}: {len(state.entries)} runs, {len(waiting)} of them to do"]
    if settings.search == "optuna":
        told = [f"{state.name}: a search of {settings.trials} trials"]
        wanted = [runs.sample()] * settings.trials
    if settings.seeds:
        told.append(f"then {len(settings.seeds)} seeds of the best of each of {len(kinds) or 'the'} methods")
        # The best has been run with its own seed.
        others = set(settings.seeds) - {entry.seed for entry in state.entries}
        wanted += [_priced(runs, name) for name in kinds.values() for _ in others]
        state.to_come = len(kinds) * len(others)
    # Every result of the folder is read for it.
    expected = cost.estimate(wanted, cost.finished_runs(runs.request.root) if wanted else ())
    if expected.seconds is not None and wanted:
        state.expected = expected.seconds / len(wanted)
        told.append(f"about {duration(expected.seconds / settings.jobs)}, {settings.jobs} at a time ({expected.basis})")
    elif wanted:
        told.append(f"duration unknown: {expected.basis}")
    runs.console.print("; ".join(told), highlight=False, soft_wrap=True, markup=False)
    for entry in state.entries if settings.dry_run else ():
        runs.console.print(
            f"  {entry.status}: {' '.join(entry.overrides)}", highlight=False, soft_wrap=True, markup=False
        )


def _priced(runs: Runs, name: str) -> tuple[Config, int]:
    config = runs.trials[name].config
    return config, runs.folders.sizes.get(Folders.data_of(config), 0)


def close(runs: Runs) -> int:
    """Compare the runs, name those that failed, and return the exit code."""
    console, records = runs.console, runs.records()
    if records:
        many = sum(map(len, run_tables.by_task(records).values())) > _COMPARED
        shown = best_of_each(records) if many or runs.request.settings.seeds else records
        write_text(runs.folder / "comparison.md", run_tables.markdown(shown))
        for suffix in ("png", "svg"):
            comparison.comparison(shown, runs.folder / f"comparison.{suffix}")
        console.print(run_tables.comparison(shown))
        console.print(f"{runs.folder / 'comparison.png'} and .svg, .md", highlight=False, soft_wrap=True)
    failed = runs.failed()
    if failed:
        console.print(f"{len(failed)} of {len(runs.state.entries)} runs failed; the same command runs them again:")
        for entry in failed:
            told = f"  {' '.join(entry.overrides)}: {entry.error}"
            console.print(told, highlight=False, soft_wrap=True, markup=False)
    stopped = [entry for entry in runs.state.entries if entry.status in ("waiting", "stopped")]
    if stopped and not failed:
        console.print(
            f"{len(stopped)} of {len(runs.state.entries)} runs are not done; the same command goes on with them"
        )
    return 1 if failed or stopped else 0


def best_of_each(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The configuration of each task, model and kind of penalty that Table 1 would show, with all its seeds.

    Configurations are ranked by `istar.reports.run_tables.selection_rank`.
    """
    best: dict[tuple[str, str, str], list[RunRecord]] = {}
    for (task, model), group in run_tables.by_task(records).items():
        for runs in group:
            kind = (task, model, runs[0].config["reg"]["name"])
            if kind not in best or _rank(runs) > _rank(best[kind]):
                best[kind] = runs
    return [record for runs in best.values() for record in runs]


def _rank(runs: Sequence[RunRecord]) -> tuple[int, float]:
    return run_tables.selection_rank([run.headline["value"] for run in runs])
