"""Groups runs that differ only in the seed, and selects the configuration for each cell of Table 1.

A configuration is everything that identifies a run (see `istar.results.identity_hash`) except the seed: settings, data
and model. The selection uses the headline metric on the set that chose the epoch, which is the validation set or a
held-out part of the training data, and no other result.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from istar.reports import paper
from istar.reports.run_frame import Runs
from istar.reports.run_tables import selection_rank
from istar.reports.statistics import Spread, spread
from istar.results import RunRecord, identity_hash
from istar.scores import displayed, merit

VARIED = {"lambda": "reg.lambda", "zeta": "reg.zeta", "layers": "reg.layers", "method": "reg"}
"""What a figure varies -> the config key in which its runs may differ; `reg` is the whole group."""
VALIDATION, HELD_OUT = "validation", "held-out"
"""Sets that choose epochs and configurations: the validation set, which is also reported, or other data."""
_HELD_OUT_SET = "held_out"
"""Name of the second of them in the record of a run."""


@dataclass(frozen=True)
class Cell:
    """The selected configuration of a task, a model and a method family."""

    task: str
    model: str
    family: str
    runs: pd.DataFrame  # finished runs, one per seed, ordered by seed; empty if no run of the family has finished
    configurations: int = 0  # number of configurations among which it was selected
    failed: int = 0  # number of failed runs of this configuration; of the whole family if no run has finished
    pruned: int = 0  # number of runs of the family that a search stopped early

    @property
    def seeds(self) -> list[int]:
        """Seeds of the finished runs."""
        return [int(seed) for seed in self.runs["seed"]]

    @property
    def metrics(self) -> list[str]:
        """The headline metric, and for SQuAD exact match as well; empty without a finished run."""
        if self.runs.empty:
            return []
        headline = str(self.runs["metric"].iloc[0])
        exact = self.runs.get("validation.exact_match")
        return [headline, "exact_match"] if exact is not None and exact.notna().all() else [headline]

    @property
    def collapsed(self) -> int:
        """Number of finished runs whose predictions are constant; the mean includes them."""
        return int(self.runs["collapsed"].eq(True).sum())

    @property
    def all_collapsed(self) -> bool:
        """Whether the predictions of all finished runs are constant; see `all_collapsed`."""
        return all_collapsed(self.runs)

    @property
    def chosen_on(self) -> str:
        """The set that chose the epoch and the configuration; empty without a finished run."""
        return str(self.first_run.get("chosen_on", ""))

    @property
    def first_run(self) -> dict[str, Any]:
        """Row of the run with the lowest seed; empty without a finished run."""
        return {} if self.runs.empty else row_dicts(self.runs.head(1))[0]

    def by_seed(self, metric: str) -> dict[int, float]:
        """Return the metric as `istar.scores.displayed` by seed; empty if the runs do not have this metric."""
        if metric not in self.metrics:
            return {}
        values = self.runs["value" if metric == self.metrics[0] else f"validation.{metric}"]
        return {
            seed: displayed(metric, float(value))
            for seed, value in zip(self.seeds, values, strict=True)
            if math.isfinite(value)
        }

    def spread(self, metric: str) -> Spread:
        """Return mean and standard deviation over the seeds of the metric as `istar.scores.displayed`."""
        return spread(list(self.by_seed(metric).values()))


def prepare(runs: Runs) -> pd.DataFrame:
    """Return `Runs.frame` with the columns that group and select runs.

    The new columns are:
        family: `base`, `cosreg` or `istar`.
        settings_hash: equal for runs with the same model and the same settings except the seed.
        config_hash: like `settings_hash`, but also covers the data, whose fingerprint a failed run may not have.
        hash_without_<varied>: `config_hash` without the config key in `VARIED`.
        repeated: a second finished run of the same configuration and seed.
        usable: a finished run with a finite headline value that is not repeated.
        chosen_on: the set that chose the epoch and, among several configurations, the one to show; see `chosen_on`.
        train_examples: number of training examples; NaN if unknown.
        steps: optimizer steps until the last validation; NaN if unknown.
        candidate: see `is_candidate`.
    """
    frame = runs.frame.copy()
    records = [runs.records[folder] for folder in frame["folder"]]
    frame["family"] = [method_family(record) for record in records]
    frame["settings_hash"] = [config_hash(record, with_data=False) for record in records]
    frame["config_hash"] = [config_hash(record) for record in records]
    for varied, key in VARIED.items():
        frame[f"hash_without_{varied}"] = [config_hash(record, key) for record in records]
    valid = (frame["status"] == "finished") & frame["value"].map(is_finite).astype(bool)
    frame["repeated"] = frame[valid].duplicated(["config_hash", "seed"]).reindex(frame.index).eq(True)
    frame["usable"] = valid & ~frame["repeated"]
    frame["candidate"] = is_candidate(frame)
    frame["chosen_on"] = [chosen_on(record) for record in records]
    frame["train_examples"] = [_number(record.data.get("train")) for record in records]
    frame["steps"] = [_number(record.epochs[-1].get("step")) if record.epochs else math.nan for record in records]
    return frame


def chosen_on(record: RunRecord) -> str:
    """Return which set chose the epoch of a run and compares configurations: `VALIDATION` or `HELD_OUT`.

    `HELD_OUT` is a part of the training data, see `task.validation_fraction`.
    """
    if record.selection:
        return HELD_OUT if record.selection.get("set") == _HELD_OUT_SET else VALIDATION
    return HELD_OUT if record.config["task"].get("validation_fraction") else VALIDATION


def content_error(record: RunRecord) -> str:
    """Return why a finished run's `result.json` is incomplete or has values of a wrong type; empty if it is valid."""
    if record.status != "finished":
        return ""
    try:
        int(record.config["seed"])
        after = record.isotropy["after"]
        values = [*after.values(), after["union"], *(record.timing.get("shrinkage") or []), *record.metrics.values()]
        for layers in record.class_isotropy.values():
            values += [value for layer in layers.values() for value in layer.values() if value is not None]
        for entry in record.epochs:
            values += [entry["epoch"], *entry["metrics"].values()]
        if not isinstance(record.headline["metric"], str) or record.headline["metric"] not in record.metrics:
            return "its headline metric is none of its metrics"
        if not all(isinstance(value, int | float) for value in values):
            return "some of its figures are no numbers"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"its result lacks what a finished run has: {error!r}"
    return ""


def method_family(record: RunRecord) -> str:
    """Return `base`, `cosreg` or `istar`; a run with a penalty of weight 0 equals Base and counts as such."""
    reg = record.config["reg"]
    return "base" if reg["name"] == "none" or reg.get("lambda") == 0 else str(reg["name"])


def config_hash(record: RunRecord, ignored_key: str = "", with_data: bool = True) -> str:
    """Return a hash that is equal for runs that differ only in the seed and the ignored key (`group.key` or `group`).

    Unless `with_data` is False, it covers the fingerprint of the run's data.
    """
    settings = {group: dict(values) for group, values in record.config.items() if isinstance(values, Mapping)}
    model = os.path.normpath(str(settings["model"].get("name")))
    revision = settings["model"].get("revision")
    # With weight 0 the penalty's other settings have no effect.
    if method_family(record) == "base":
        settings["reg"] = {"name": "none"}
    group, _, key = ignored_key.partition(".")
    if key:
        settings[group].pop(key, None)
    else:
        settings.pop(group, None)
    fingerprint = record.data.get("fingerprint", "") if with_data else ""
    return identity_hash(settings, fingerprint, f"{model}@{revision}")


def is_candidate(frame: pd.DataFrame) -> pd.Series:
    """Mark the runs that a cell of Table 1 may show: the methods as the paper compares them.

    These are Base, I-STAR on all layers with a given zeta, and CosReg on the last layer with a positive lambda, both on
    the hidden states of all tokens. Runs of ablations, the negative CosReg weights of Figure 4, other estimators of
    isotropy and penalties on embedding matrices, on some of the tokens or within classes are not candidates.
    """
    layers = _column(frame, "reg.layers")
    weight = pd.to_numeric(_column(frame, "reg.lambda"), errors="coerce")
    is_istar = (frame["family"] == "istar") & layers.eq("all") & has_zeta(frame)
    is_cosreg = (frame["family"] == "cosreg") & layers.eq("last") & (weight > 0)
    # Runs of earlier versions have none of these keys.
    of_all_states = _column(frame, "reg.target").fillna("hidden_states").eq("hidden_states")
    of_all_states &= _column(frame, "reg.points").fillna("all").eq("all") & _column(frame, "reg.within").isna()
    return (frame["family"] == "base") | ((is_istar | is_cosreg) & of_all_states)


def has_zeta(frame: pd.DataFrame) -> pd.Series:
    """Mark the runs of I-STAR that use the paper's shrinkage estimator with a fixed zeta."""
    # Runs of earlier versions have no estimator.
    is_shrinkage = _column(frame, "reg.estimator").fillna("shrinkage").eq("shrinkage")
    return _column(frame, "reg.zeta").map(is_finite).astype(bool) & is_shrinkage


def select_cell(frame: pd.DataFrame, task: str, model: str, family: str) -> Cell:
    """Select the configuration of a task, model and method family, by `best_group`, from a frame of `prepare`."""
    runs = frame[(frame["task"] == task) & (frame["model"] == model) & (frame["family"] == family) & frame["candidate"]]
    failed = runs[runs["status"] == "failed"]
    pruned = int((runs["status"] == "pruned").sum())
    usable = runs[runs["usable"]]
    if usable.empty:
        return Cell(task, model, family, usable, 0, len(failed), pruned)
    selected = usable[usable["config_hash"] == best_group(usable, "config_hash")].sort_values("seed")
    failed = failed[failed["settings_hash"] == selected["settings_hash"].iloc[0]]
    return Cell(task, model, family, selected, usable["config_hash"].nunique(), len(failed), pruned)


def all_collapsed(runs: pd.DataFrame) -> bool:
    """Return whether the predictions of all runs of a configuration are constant; False without a run.

    Besides runs that record it, these are two or more runs of which each has exactly the score of a constant
    prediction, and single ones that do not record whether they have collapsed.
    """
    if runs.empty:
        return False
    recorded = runs["collapsed"].eq(True)
    difference = runs["value"].astype(float) - pd.to_numeric(runs["constant"], errors="coerce").astype(float)
    is_constant = (difference.abs() < 1e-9) & ((len(runs) > 1) | runs["collapsed"].isna())
    return bool((recorded | is_constant).all())


def best_group(runs: pd.DataFrame, column: str) -> str:
    """Return the value of `column` whose runs rank highest by `selection_rank`; ties go to the first run name."""
    groups = runs.groupby(column)
    metric = runs["metric"].iloc[0]
    merits = runs.assign(merit=[merit(metric, value) for value in runs["selection"]]).groupby(column)["merit"].agg(list)
    by_first_name = groups["name"].min().sort_values().index
    return max(by_first_name, key=lambda key: selection_rank(merits[key]))


def select_cells(frame: pd.DataFrame) -> list[Cell]:
    """Return a cell for each method family of every model and task that has a run of any status."""
    return [
        select_cell(frame, task, model, name)
        for model in models(frame)
        for task in tasks(frame[frame["model"] == model])
        for name in paper.FAMILIES
    ]


def by_model_and_task(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the rows of each model and task, in the order of `models` and `tasks`."""
    for model in models(frame):
        of_model = frame[frame["model"] == model]
        for task in tasks(of_model):
            yield of_model[of_model["task"] == task]


def row_dicts(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dictionaries with string keys; missing values may be NaN."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def models(frame: pd.DataFrame) -> list[str]:
    """Return the models in the frame, sorted by name."""
    return sorted(frame["model"].unique())


def tasks(frame: pd.DataFrame) -> list[str]:
    """Return the tasks in the frame: the paper's in the order of Table 1, then the others by name."""
    names = set(frame["task"])
    return [name for name in paper.TASKS if name in names] + sorted(names - set(paper.TASKS))


_DESCRIBED = {
    "optim.lr": "lr {:g}",
    "data.batch_size": "batch {}",
    "trainer.accumulate_grad_batches": "accumulated {}",
    "trainer.devices": "devices {}",
    "trainer.max_epochs": "epochs {}",
    "trainer.max_steps": "steps {}",
    "trainer.precision": "{}",
    "task.limit_train": "limit_train={}",
    "task.limit_validation": "limit_validation={}",
}


def describe(run: Mapping[str, Any]) -> str:
    """Return the main hyperparameters of a run in words, such as learning rate, batch size and precision."""
    parts = []
    max_steps: Any = run.get("trainer.max_steps")
    has_steps = is_finite(max_steps) and max_steps > 0
    for key, template in _DESCRIBED.items():
        value = run.get(key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            continue
        if key in ("trainer.devices", "trainer.accumulate_grad_batches") and value in (1, "1"):
            continue
        # The number of epochs does not limit a training that has a number of steps.
        if key == ("trainer.max_epochs" if has_steps else "trainer.max_steps"):
            continue
        # pandas turns a column of integers with gaps into floats.
        is_integer = isinstance(value, float) and key != "optim.lr"
        parts.append(template.format(int(value) if is_integer else value))
    return ", ".join(parts)


_IRRELEVANT_PREFIXES = ("reg.", "logger.", "run.", "validation.", "task.name", "model.name", "task.data_dir")
_IRRELEVANT_KEYS = {
    "data.cache_dir", "data.num_workers", "data.eval_batch_size", "trainer.accelerator", "trainer.strategy",
    "trainer.progress_bar", "trainer.log_every_n_steps", "trainer.checkpoint_every_n_steps",
    "trainer.checkpoint_every_n_minutes", "trainer.nonfinite", "trainer.checkpoints", "task.submission",
}  # fmt: skip


def differing_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the config keys, outside the penalty's, in which two runs differ and that can affect the result."""
    return [
        key
        for key in first
        if "." in key
        and not key.startswith(_IRRELEVANT_PREFIXES)
        and key not in _IRRELEVANT_KEYS
        and str(first[key]) != str(second.get(key))
    ]


def _column(frame: pd.DataFrame, name: str) -> pd.Series:
    """Return a column of the frame, or an empty one if no run has this config key."""
    return frame[name] if name in frame else pd.Series(None, frame.index, dtype=object)


def _number(value: Any) -> float:
    return float(value) if is_finite(value) else math.nan


def is_finite(value: Any) -> bool:
    """Return whether the value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
