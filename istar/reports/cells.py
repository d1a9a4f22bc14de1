"""Runs to cells: which runs differ in nothing but what a table or a line varies, and which configuration is shown.

A configuration is everything that names a run (see `istar.results.identity`) but the seed: settings, data and
model. Nothing here looks at anything but the validation set's headline metric.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from istar.reports.paper import TASKS
from istar.reports.run_frame import Runs
from istar.reports.statistics import Spread, spread
from istar.results import RunRecord, identity

VARIED = {"lambda": ("reg.lambda",), "zeta": ("reg.zeta",), "layers": ("reg.layers",), "method": ("reg",)}
"""What a line runs along -> the config's keys that its runs do not have in common; `reg` is the whole group."""
_GROUPS = ("task", "model", "reg", "data", "trainer", "logger", "run")
"""Groups of the config that must be there to name a run, if only empty."""


@dataclass(frozen=True)
class Cell:
    """The configuration that stands for a task, a model and a method family.

    Attributes:
        runs: its finished runs, one per seed, by seed; None where there is none.
        configurations: how many there were to choose from.
        failed: runs of this configuration that failed (of all of the family, where none finished).
        pruned: runs of the family that a search stopped early.
    """

    task: str
    model: str
    family: str
    runs: pd.DataFrame | None
    configurations: int = 0
    failed: int = 0
    pruned: int = 0

    @property
    def seeds(self) -> list[int]:
        """Of the finished runs."""
        return [] if self.runs is None else [int(seed) for seed in self.runs["seed"]]

    @property
    def metrics(self) -> list[str]:
        """The headline metric, and exact match beside SQuAD's F1."""
        if self.runs is None:
            return []
        headline = str(self.runs["metric"].iloc[0])
        exact = self.runs.get("validation.exact_match")
        return [headline, "exact_match"] if exact is not None and exact.notna().all() else [headline]

    @property
    def collapsed(self) -> int:
        """Finished runs whose predictions are constant; they count in the mean."""
        return 0 if self.runs is None else int((self.runs["collapsed"] == True).sum())  # noqa: E712

    def by_seed(self, metric: str) -> dict[int, float]:
        """The metric in percent by seed."""
        if self.runs is None:
            return {}
        column = "value" if metric == self.metrics[0] else f"validation.{metric}"
        return {
            int(seed): 100 * float(value)
            for seed, value in zip(self.runs["seed"], self.runs[column], strict=True)
            if math.isfinite(value)
        }

    def spread(self, metric: str) -> Spread:
        """Over the seeds, in percent."""
        return spread(list(self.by_seed(metric).values()))


def prepare(found: Runs) -> pd.DataFrame:
    """The runs with what groups them.

    Args:
        found: with its records.

    Returns:
        `Runs.frame` with `family` (base, cosreg, istar), `settings` (names the config but the seed, without the data,
        which a failed run does not know), `configuration` (settings, data and model) and `beside <varied>` (the
        same but for the keys of `VARIED`). Finished runs of the same configuration and seed count once:
        `repeated` marks the others.
    """
    frame = found.frame.copy()
    records = [found.records[folder] for folder in frame["folder"]]
    frame["family"] = pd.Series(map(family, records), dtype=object)
    frame["settings"] = pd.Series([signature(record, "") for record in records], dtype=object)
    prints = [record.data.get("fingerprint", "") for record in records]
    pairs = list(zip(records, prints, strict=True))
    frame["configuration"] = pd.Series([signature(*pair) for pair in pairs], dtype=object)
    for varied, keys in VARIED.items():
        frame[f"beside {varied}"] = pd.Series([signature(*pair, keys) for pair in pairs], dtype=object)
    usable = (frame["status"] == "finished") & frame["value"].map(_is_number).astype(bool)
    frame["usable"] = usable
    frame["repeated"] = usable & frame[usable].duplicated(["configuration", "seed"]).reindex(frame.index).eq(True)
    frame["usable"] &= ~frame["repeated"]
    return frame


def flaw(record: RunRecord) -> str:
    """Why a finished run's result cannot be shown, or nothing: a file may have our format and not our content."""
    if record.status != "finished":
        return ""
    try:
        int(record.config["seed"])
        layers = record.isotropy["after"].values()
        values = [*layers, record.isotropy["after"]["union"], *(record.timing.get("shrinkage") or [])]
        values += [entry["epoch"] for entry in record.epochs]
        values += [value for entry in record.epochs for value in entry["metrics"].values()]
        if not isinstance(record.headline["metric"], str) or record.headline["metric"] not in record.metrics:
            return "its headline metric is none of its metrics"
        if not all(isinstance(value, int | float) for value in (*values, *record.metrics.values())):
            return "some of its figures are no numbers"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"its result lacks what a finished run has: {error!r}"
    return ""


def family(record: RunRecord) -> str:
    """`base`, `cosreg` or `istar`; a weight of 0 is Base, to the bit."""
    reg = record.config["reg"]
    return "base" if reg["name"] == "none" or reg.get("lambda") == 0 else str(reg["name"])


def signature(record: RunRecord, fingerprint: str, without: tuple[str, ...] = ()) -> str:
    """Equal for runs that differ in nothing but the seed and the given keys (`group.key`, or a whole group)."""
    settings: dict[str, Any] = {group: {} for group in _GROUPS}
    settings.update({group: values for group, values in record.config.items() if isinstance(values, Mapping)})
    settings = {group: dict(values) for group, values in settings.items()}
    model = os.path.normpath(str(settings["model"].get("name")))
    revision = settings["model"].get("revision")
    # Weight 0 has settings of a penalty that is never computed.
    if family(record) == "base":
        settings["reg"] = {"name": "none"}
    for key in without:
        group, _, name = key.partition(".")
        if name:
            settings[group].pop(name, None)
        else:
            settings.pop(group, None)
    return identity(settings, fingerprint, f"{model}@{revision}")


def is_candidate(frame: pd.DataFrame) -> pd.Series:
    """Which runs a cell of Table 1 may be filled with: finished ones of the methods as the paper compares them.

    I-STAR on all layers with a given zeta, CosReg on the last one with a positive lambda; ablations, the CosReg of
    Figure 4 and other estimators of isotropy are not.
    """
    layers = _column(frame, "reg.layers")
    weight = pd.to_numeric(_column(frame, "reg.lambda"), errors="coerce")
    fits = {
        "base": pd.Series(True, frame.index),
        "istar": layers.map(lambda value: value == "all").astype(bool) & has_zeta(frame),
        "cosreg": layers.map(lambda value: value == "last").astype(bool) & (weight > 0),
    }
    allowed = pd.Series(False, frame.index)
    for name, rule in fits.items():
        allowed |= (frame["family"] == name) & rule
    return allowed


def has_zeta(frame: pd.DataFrame) -> pd.Series:
    """Which runs of I-STAR have the paper's estimator with a zeta that was given."""
    return _column(frame, "reg.zeta").map(_is_number).astype(bool) & (_column(frame, "reg.estimator") != "unbiased")


def cell(frame: pd.DataFrame, task: str, model: str, family: str) -> Cell:
    """The configuration with the most seeds, among equals the one with the highest mean of the headline metric.

    Args:
        frame: as `prepare` gives it.
    """
    own = frame[(frame["task"] == task) & (frame["model"] == model) & (frame["family"] == family) & is_candidate(frame)]
    pruned = int((own["status"] == "pruned").sum())
    usable = own[own["usable"]]
    if usable.empty:
        return Cell(task, model, family, None, 0, int((own["status"] == "failed").sum()), pruned)
    best = choose(usable, "configuration")
    runs = usable[usable["configuration"] == best].sort_values("seed")
    failed = own[(own["status"] == "failed") & (own["settings"] == runs["settings"].iloc[0])]
    return Cell(task, model, family, runs, usable["configuration"].nunique(), len(failed), pruned)


def choose(usable: pd.DataFrame, column: str) -> str:
    """The group of runs with the most runs, then the highest mean of `value`, then the first by its runs' names."""
    groups: dict[str, list[tuple[float, str]]] = {}
    for key, value, name in zip(usable[column], usable["value"], usable["name"], strict=True):
        groups.setdefault(key, []).append((float(value), name))

    def rank(key: str) -> tuple[float, float, str]:
        values = [value for value, _ in groups[key]]
        return -len(values), -math.fsum(values) / len(values), min(name for _, name in groups[key])

    return min(groups, key=rank)


def cells(frame: pd.DataFrame) -> list[Cell]:
    """A cell for each model, task and family: models and tasks that have a run, whatever became of it."""
    return [
        cell(frame, task, model, name)
        for model in models(frame)
        for task in tasks(frame[frame["model"] == model])
        for name in ("base", "cosreg", "istar")
    ]


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows by the columns' names; what is missing may be NaN, as pandas has it."""
    columns = [frame[name].tolist() for name in frame]
    return [dict(zip(map(str, frame), values, strict=True)) for values in zip(*columns, strict=True)]


def models(frame: pd.DataFrame) -> list[str]:
    """Found models, by name."""
    return sorted(frame["model"].unique())


def tasks(frame: pd.DataFrame) -> list[str]:
    """Found tasks, the paper's first and in its order."""
    order = {name: number for number, name in enumerate(TASKS)}
    return sorted(frame["task"].unique(), key=lambda name: (order.get(name, len(order)), name))


_SHOWN = {
    "optim.lr": "lr {:g}",
    "data.batch_size": "batch {}",
    "trainer.accumulate_grad_batches": "accumulated {}",
    "trainer.devices": "devices {}",
    "trainer.max_epochs": "epochs {}",
    "trainer.precision": "{}",
}
_IGNORED = ("reg.", "logger.", "run.", "validation.", "task.name", "model.name", "task.data_dir", "beside ")


def describe(run: Mapping[str, Any]) -> str:
    """The hyperparameters of a row that a reader asks for first: learning rate, batch, epochs, precision."""
    parts = []
    for key, form in _SHOWN.items():
        value = run.get(key)
        if value is None or (key in ("trainer.devices", "trainer.accumulate_grad_batches") and value in (1, "1")):
            continue
        if isinstance(value, float) and math.isnan(value):
            continue
        parts.append(form.format(int(value) if isinstance(value, float) and key != "optim.lr" else value))
    limits = [f"{key.removeprefix('task.')}={run[key]:g}" for key in _LIMITS if _is_number(run.get(key))]
    return ", ".join([*parts, *limits])


_LIMITS = ("task.limit_train", "task.limit_validation")


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Keys of the config, but those of the penalty, in which two rows differ and that could matter."""
    return [
        key
        for key in first
        if "." in key
        and not key.startswith(_IGNORED)
        and key not in _HARMLESS
        and str(first[key]) != str(second.get(key))
    ]


_HARMLESS = {
    "data.cache_dir", "data.num_workers", "data.eval_batch_size", "trainer.accelerator", "trainer.strategy",
    "trainer.progress_bar", "trainer.log_every_n_steps", "trainer.checkpoint_every_n_steps",
    "trainer.checkpoint_every_n_minutes", "trainer.nonfinite", "trainer.checkpoints", "task.submission",
}  # fmt: skip


def _column(frame: pd.DataFrame, name: str) -> pd.Series:
    return frame[name] if name in frame else pd.Series(None, frame.index, dtype=object)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
