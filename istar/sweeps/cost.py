"""What runs that are not started yet will cost, by those that are finished."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from istar.config import Config
from istar.errors import UserError
from istar.results import RESULT, RunRecord, read


@dataclass(frozen=True)
class Estimate:
    """Of a number of runs.

    Attributes:
        seconds: of all of them, one after another; None where nothing is known.
        basis: what it was estimated by.
    """

    seconds: float | None
    basis: str


def finished_runs(root: Path) -> list[RunRecord]:
    """The finished runs that lie in a folder."""
    records = []
    for path in sorted(root.glob(f"*/{RESULT}")):
        try:
            records.append(read(path.parent))
        except UserError:
            continue
    return [record for record in records if record.status == "finished" and record.timing.get("total")]


def estimate(wanted: Sequence[tuple[Config, int]], known: Iterable[RunRecord]) -> Estimate:
    """Seconds per training example and epoch of finished runs, the most alike that there are, times what is wanted.

    Args:
        wanted: configs with their number of training examples.
        known: finished runs.
    """
    rates: dict[tuple[str, ...], dict[int, float]] = {}
    for number, record in enumerate(known):
        said = record.config
        work = record.data.get("train", 0) * said["trainer"]["max_epochs"]
        if work:
            for kind in _kinds(said["model"]["name"], said["task"]["name"], said["reg"]["name"]):
                rates.setdefault(kind, {})[number] = record.timing["total"] / work
    total, used = 0.0, set()
    for config, examples in wanted:
        kinds = _kinds(config.model.name, config.task.name, config.reg.name)
        alike = [kind for kind in kinds if kind in rates]
        if not alike:
            return Estimate(None, "no finished run of this model to estimate by")
        used.add(alike[0])
        total += median(rates[alike[0]].values()) * examples * config.trainer.max_epochs
    count = len({number for kind in used for number in rates[kind]})
    what = {3: "model, task and method", 2: "model and task", 1: "model"}[min(map(len, used), default=3)]
    return Estimate(total, f"by {count} finished run{'s' if count != 1 else ''} of the same {what}")


def _kinds(model: str, task: str, reg: str) -> list[tuple[str, ...]]:
    """From the most alike to the least."""
    name = Path(model).name
    return [(name, task, reg), (name, task), (name,)]
