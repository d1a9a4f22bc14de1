"""Estimates the duration of planned runs from the durations of finished runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from istar.config import Config
from istar.errors import UserError
from istar.results import RESULT, RunRecord, read


@dataclass(frozen=True)
class Estimate:
    """The estimated duration of a number of runs."""

    seconds: float | None  # duration of all runs one after another; None if no finished run is similar enough
    basis: str  # the finished runs behind the estimate, in words


def finished_runs(root: Path) -> list[RunRecord]:
    """The records of the finished runs in a folder; unreadable records are skipped."""
    records = []
    for path in sorted(root.glob(f"*/{RESULT}")):
        try:
            records.append(read(path.parent))
        except UserError:
            continue
    return [record for record in records if record.status == "finished" and record.timing.get("total")]


def estimate(planned: Sequence[tuple[Config, int]], finished: Iterable[RunRecord]) -> Estimate:
    """Estimate the duration of planned runs, given as configs with their numbers of training examples.

    Each planned run uses the median of the seconds per training example and epoch of the finished runs with the same
    model, task and method; if there are none, of those with the same model and task, or else with the same model.
    """
    rates: dict[tuple[str, ...], dict[int, float]] = {}
    for number, record in enumerate(finished):
        config = record.config
        examples = record.data.get("train", 0) * config["trainer"]["max_epochs"]
        if examples:
            for key in _similarity_keys(config["model"]["name"], config["task"]["name"], config["reg"]["name"]):
                rates.setdefault(key, {})[number] = record.timing["total"] / examples
    total, used = 0.0, set()
    for planned_config, size in planned:
        names = planned_config.model.name, planned_config.task.name, planned_config.reg.name
        similar = [key for key in _similarity_keys(*names) if key in rates]
        if not similar:
            return Estimate(None, "no finished run of this model to estimate by")
        used.add(similar[0])
        total += median(rates[similar[0]].values()) * size * planned_config.trainer.max_epochs
    count = len({number for key in used for number in rates[key]})
    similarity = {3: "model, task and method", 2: "model and task", 1: "model"}[min(map(len, used), default=3)]
    return Estimate(total, f"by {count} finished run{'s' if count != 1 else ''} of the same {similarity}")


def _similarity_keys(model: str, task: str, reg: str) -> list[tuple[str, ...]]:
    """What two similar runs have in common, from the most similar to the least."""
    name = Path(model).name
    return [(name, task, reg), (name, task), (name,)]
