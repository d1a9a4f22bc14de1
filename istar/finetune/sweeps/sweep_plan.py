"""The work of a sweep before it begins, and its duration, which is estimated from finished runs."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from istar.drawing.terminal import format_duration
from istar.errors import UserError
from istar.files.folders import list_visible
from istar.finetune.config import Config
from istar.finetune.sweeps.planned_runs import SweepRuns
from istar.runs.labels import shorten_model_name
from istar.runs.record import RESULT, RunRecord, read_result

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepPlan:
    """The work of a sweep before it begins."""

    num_groups: int  # number of best configurations that `sweep.seeds` repeats; 0 if unknown
    num_repetitions: int  # number of runs that `sweep.seeds` adds
    seconds_per_run: float | None  # expected mean duration of the runs; None if it is unknown or nothing is to do
    duration: str  # expected duration of the whole sweep in words; empty if nothing is to do


def make_plan(runs: SweepRuns) -> SweepPlan:
    """Return the plan of a sweep, or raise a `UserError` if the data of a search cannot be loaded."""
    settings, state = runs.request.settings, runs.state
    configs = [runs.planned[entry.name].config for entry in state.entries_with("waiting")]
    if settings.search == "optuna":
        configs = [runs.compose_sample_config()] * settings.trials
    name_by_group = {runs.selection_group(entry): entry.name for entry in state.entries} if settings.seeds else {}
    # The search has run the best configuration with its first seed already.
    num_other_seeds = len(set(settings.seeds) - {entry.seed for entry in state.entries})
    repeated = [runs.planned[name].config for name in name_by_group.values()] * num_other_seeds
    if not (configs := [*configs, *repeated]):
        # Reading the records of all finished runs takes time, so it is skipped.
        return SweepPlan(len(name_by_group), num_repetitions=0, seconds_per_run=None, duration="")
    configs_with_sizes = [(config, runs.key_maker.num_training_examples(config)) for config in configs]
    seconds, basis = estimate_duration(configs_with_sizes, read_finished_runs(runs.request.root))
    duration = f"duration unknown: {basis}"
    if seconds is not None:
        duration = f"about {format_duration(seconds / settings.jobs)}, {settings.jobs} at a time ({basis})"
    return SweepPlan(
        len(name_by_group),
        num_repetitions=len(repeated),
        seconds_per_run=None if seconds is None else seconds / len(configs),
        duration=duration,
    )


def print_plan(runs: SweepRuns, plan: SweepPlan) -> None:
    """Print the number of runs and their estimated duration; in a dry run also overrides and errors of each run."""
    settings, state = runs.request.settings, runs.state
    parts = [f"{state.name}: {len(state.entries)} runs, {len(state.entries_with('waiting'))} of them to do"]
    if settings.search == "optuna":
        parts = [f"{state.name}: a search of {settings.trials} trials"]
    if settings.seeds:
        parts.append(f"then {len(settings.seeds)} seeds of the best of each of {plan.num_groups or 'the'} methods")
    parts += [plan.duration] if plan.duration else []
    runs.console.out("; ".join(parts), highlight=False)
    if settings.dry_run:
        for entry in state.entries:
            reason = f": {entry.error}" if entry.error else ""
            runs.console.out(f"  {entry.status}: {' '.join(entry.overrides)}{reason}", highlight=False)


def read_finished_runs(root: Path) -> list[RunRecord]:
    """Read the records of the finished runs in a folder, without smoke runs; skip unreadable ones with a warning."""
    records = []
    for path in list_visible(root, f"*/{RESULT}"):
        try:
            records.append(read_result(path.parent))
        except UserError as error:
            log.warning("not read: %s", error)
    finished = [record for record in records if record.status == "finished" and not record.is_smoke]
    return [record for record in finished if record.timing.get("total")]


def estimate_duration(planned: Sequence[tuple[Config, int]], finished: Iterable[RunRecord]) -> tuple[float | None, str]:
    """Estimate the seconds that planned runs take one after another, and describe the basis of the estimate.

    The planned runs are given as configs with their numbers of training examples. Each uses the median seconds per
    training example and epoch of the finished runs with the same model, task and method; else with the same model and
    task; else with the same model. Without any, the estimate is None.
    """
    # Seconds per training example and epoch of the finished runs, by model; by model and task; and by all three names.
    rates_by_names: dict[tuple[str, ...], list[float]] = {}
    for record in finished:
        config = record.config
        names = shorten_model_name(config["model"]["name"]), config["task"]["name"], config["reg"]["name"]
        num_examples_in_epochs = record.data.get("train", 0) * config["trainer"]["max_epochs"]
        for num_names in (1, 2, 3) if num_examples_in_epochs else ():
            rates_by_names.setdefault(names[:num_names], []).append(record.timing["total"] / num_examples_in_epochs)
    total_seconds, num_equal_names = 0.0, 3
    for planned_config, num_examples in planned:
        if planned_config.task.stream:
            return None, "the length of a stream is unknown"
        names = shorten_model_name(planned_config.model.name), planned_config.task.name, planned_config.reg.name
        rates_key = next((names[:num_names] for num_names in (3, 2, 1) if names[:num_names] in rates_by_names), ())
        if not rates_key:
            return None, "no finished run of this model to estimate by"
        # The least similar of the finished runs used determines the description.
        num_equal_names = min(num_equal_names, len(rates_key))
        total_seconds += median(rates_by_names[rates_key]) * num_examples * planned_config.trainer.max_epochs
    similarity = ("model", "model and task", "model, task and method")[num_equal_names - 1]
    return total_seconds, f"by finished runs of the same {similarity}"
