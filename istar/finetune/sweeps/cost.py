"""Estimates the duration of planned runs from the durations of finished runs."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from istar.errors import UserError
from istar.records.config import Config
from istar.records.results import RESULT, RunRecord, read

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DurationEstimate:
    """The estimated total duration of several runs, and what the estimate is based on."""

    seconds: float | None  # duration of all runs one after another; None if no finished run is similar enough
    basis: str  # description of the finished runs that the estimate is based on


def read_finished_runs(root: Path) -> list[RunRecord]:
    """Read the records of the finished runs in a folder; each record that cannot be read is skipped with a warning."""
    records = []
    for path in sorted(root.glob(f"*/{RESULT}")):
        try:
            records.append(read(path.parent))
        except UserError as error:
            log.warning("not read: %s", error)
    return [record for record in records if record.status == "finished" and record.timing.get("total")]


def estimate_duration(planned: Sequence[tuple[Config, int]], finished: Iterable[RunRecord]) -> DurationEstimate:
    """Estimate the duration of planned runs, given as configs with their numbers of training examples.

    Each planned run uses the median of the seconds per training example and epoch of the finished runs with the same
    model, task and method; if there are none, of those with the same model and task, or else with the same model.
    """
    # Seconds per training example and epoch, by the index of the finished run, for each similarity key.
    rates_by_key: dict[tuple[str, ...], dict[int, float]] = {}
    for run_index, record in enumerate(finished):
        config = record.config
        num_examples_in_epochs = record.data.get("train", 0) * config["trainer"]["max_epochs"]
        if num_examples_in_epochs:
            for key in _make_similarity_keys(config["model"]["name"], config["task"]["name"], config["reg"]["name"]):
                rates_by_key.setdefault(key, {})[run_index] = record.timing["total"] / num_examples_in_epochs
    total_seconds, used_keys = 0.0, set()
    for planned_config, num_examples in planned:
        names = planned_config.model.name, planned_config.task.name, planned_config.reg.name
        shared_keys = [key for key in _make_similarity_keys(*names) if key in rates_by_key]
        if not shared_keys:
            return DurationEstimate(None, "no finished run of this model to estimate by")
        used_keys.add(shared_keys[0])
        total_seconds += (
            median(rates_by_key[shared_keys[0]].values()) * num_examples * planned_config.trainer.max_epochs
        )
    num_runs = len({run_index for key in used_keys for run_index in rates_by_key[key]})
    # The least similar of the finished runs used determines the description; the keys have one to three parts.
    similarity = {3: "model, task and method", 2: "model and task", 1: "model"}[min(map(len, used_keys), default=3)]
    return DurationEstimate(
        total_seconds, f"by {num_runs} finished run{'s' if num_runs != 1 else ''} of the same {similarity}"
    )


def _make_similarity_keys(model: str, task: str, method: str) -> list[tuple[str, ...]]:
    """Return three keys of a run, the most specific first: model, task and method; model and task; model.

    Two runs are the more similar, the more of these keys they share.
    """
    model_name = Path(model).name
    return [(model_name, task, method), (model_name, task), (model_name,)]
