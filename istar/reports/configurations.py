"""Groups runs that differ only in the seed, and selects the configuration for each cell of Table 1.

Runs of a configuration have equal keys except for the seed; see `istar.runs.key.RunKey`. The selection uses only the
headline metric on the set that also chose the epoch: the validation set, or a held-out part of the training data.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import pandas as pd

from istar.reports import paper
from istar.reports.run_frame import Runs
from istar.runs.key import RunKey, flatten_settings
from istar.runs.names import BASE, scale_for_display
from istar.runs.record import RunRecord
from istar.runs.run_rows import selection_sort_key
from istar.statistics.arguments import is_finite
from istar.statistics.paired import MeanAndStd, mean_and_std

VALIDATION, HELD_OUT = "validation", "held-out"
"""Sets for choosing epochs and configurations: the validation set, which is also reported, or held-out data."""


@dataclass(frozen=True)
class Cell:
    """A cell of Table 1: the selected configuration's runs for one task, model and method family."""

    task: str
    model: str
    family: str
    runs: pd.DataFrame  # finished runs, one per seed, ordered by seed; empty if no run of the family has finished
    num_configurations: int = 0  # number of configurations that the selection compared
    num_failed: int = 0  # number of failed runs of this configuration; of the whole family if no run has finished
    num_pruned: int = 0  # number of runs of the family that a search stopped early

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
        exact_match = self.runs.get("validation.exact_match")
        return [headline, "exact_match"] if exact_match is not None and exact_match.notna().all() else [headline]

    @property
    def selection_set(self) -> str:
        """The set that chose the epoch and the configuration; empty without a finished run."""
        return str(self.first_run.get("chosen_on", ""))

    @cached_property
    def first_run(self) -> dict[str, Any]:
        """Row of the run with the lowest seed; empty without a finished run."""
        return {} if self.runs.empty else row_dicts(self.runs.head(1))[0]

    def score_by_seed(self, metric: str) -> dict[int, float]:
        """Return a metric's finite values by seed, scaled by `scale_for_display`; empty if the runs lack it."""
        if metric not in self.metrics:
            return {}
        scores = self.runs["score"] if metric == self.metrics[0] else 100 * self.runs[f"validation.{metric}"]
        return {seed: score for seed, score in zip(self.seeds, scores, strict=True) if math.isfinite(score)}

    def mean_and_std(self, metric: str) -> MeanAndStd:
        """Return mean and standard deviation of a metric over the seeds, scaled by `scale_for_display`."""
        return mean_and_std(list(self.score_by_seed(metric).values()))


@dataclass(frozen=True)
class SelectedRun:
    """A run, with the properties that decide which tables and figures show it."""

    key: RunKey
    configuration: str  # see `RunKey`
    inputs: str  # see `RunKey`
    family: str  # the method, see `RunKey`
    method_name: str  # see `RunKey`
    repeated: bool  # whether it is a second finished run of the same configuration and seed
    usable: bool  # whether it is finished, has a finite headline value and is not repeated
    chosen_on: str  # the set that chose the epoch and the shown configuration; see `get_selection_set`
    score: float  # the headline metric, scaled by `scale_for_display`; NaN if it is not finite
    validation_examples: int  # see `RunRecord`
    selection_merit: float  # see `RunRecord`; NaN without a headline metric
    has_fixed_zeta: bool  # whether it is I-STAR with the paper's shrinkage estimator and a fixed zeta
    candidate: bool  # whether a cell of Table 1 may show it; see `is_table1_candidate`


def select_runs(records: Iterable[RunRecord]) -> list[SelectedRun]:
    """Return a `SelectedRun` for each record; of repeated runs, only the first one is usable."""
    selected, finished = [], set()
    for record in records:
        key, metric = record.key, record.headline.get("metric", "")
        value: Any = record.headline.get("value")
        run = key.configuration, record.config["seed"]
        is_valid = record.status == "finished" and is_finite(value)
        is_repeated = is_valid and run in finished
        finished |= {run} if is_valid else set()
        selected.append(
            SelectedRun(
                key=key,
                configuration=key.configuration,
                inputs=key.inputs,
                family=key.method,
                method_name=key.method_name,
                repeated=is_repeated,
                usable=is_valid and not is_repeated,
                chosen_on=get_selection_set(record),
                score=scale_for_display(metric, float(value)) if is_finite(value) else math.nan,
                validation_examples=record.validation_examples,
                selection_merit=record.selection_merit if record.headline else math.nan,
                has_fixed_zeta=has_fixed_zeta(key),
                candidate=is_table1_candidate(key),
            )
        )
    return selected


def add_selection_columns(runs: Runs) -> pd.DataFrame:
    """Return a copy of the runs' data frame with the fields of `SelectedRun` and `table1_key` as further columns.

    `table1_key` is the `RunKey` of the first run in the cell of Table 1 for the row's task, model and family; None if
    the cell is empty.
    """
    selected = select_runs(runs.records[folder] for folder in runs.frame["folder"])
    columns = {field.name: [getattr(run, field.name) for run in selected] for field in fields(SelectedRun)}
    frame = runs.frame.assign(**columns)
    cells = {(cell.task, cell.model, cell.family): cell.first_run for cell in select_cells(frame)}
    frame["table1_key"] = [
        cells.get(cell, {}).get("key") for cell in zip(frame["task"], frame["model"], frame["family"], strict=True)
    ]
    # pandas stores each column of its string type by itself, and takes much longer to select rows of many such columns.
    strings = [name for name in frame if pd.api.types.is_string_dtype(frame[name])]
    return frame.astype(dict.fromkeys(strings, object)).copy()


def hash_without(runs: pd.DataFrame, key: str) -> pd.Series:
    """Return a hash that runs share if they differ at most in the seed and in a config key; see `RunKey.without`."""
    return pd.Series([run_key.without(key) for run_key in runs["key"]], runs.index, dtype=object)


def get_selection_set(record: RunRecord) -> str:
    """Return the set that chooses a run's epoch and configuration: `VALIDATION`, or `HELD_OUT` training data."""
    if record.selection:
        return HELD_OUT if record.selection.get("set") == "held_out" else VALIDATION
    return HELD_OUT if record.config["task"].get("validation_fraction") else VALIDATION


def is_table1_candidate(key: RunKey) -> bool:
    """Return whether Table 1 may show a run.

    It shows Base, I-STAR on all layers with a given zeta, and CosReg on the last layer with a positive lambda, both on
    the hidden states of all tokens. Excluded are ablations, the negative CosReg weights of Figure 4, other estimators
    of isotropy, and penalties on embedding matrices or on some of the tokens.
    """
    reg = key.settings["reg"]
    if key.method == BASE:
        return True
    if reg.get("target", "hidden_states") != "hidden_states" or reg.get("points", "all") != "all":
        return False
    is_cosreg = key.method == "cosreg" and reg.get("layers") == "last" and reg["lambda"] > 0
    return is_cosreg or (has_fixed_zeta(key) and reg.get("layers") == "all")


def has_fixed_zeta(key: RunKey) -> bool:
    """Return whether a run is of I-STAR with the paper's shrinkage estimator and a fixed zeta."""
    reg = key.settings["reg"]
    is_shrinkage = reg.get("estimator", "shrinkage") == "shrinkage"
    return key.method == "istar" and is_shrinkage and is_finite(reg.get("zeta"))


def select_cell(runs: pd.DataFrame, family: str) -> Cell:
    """Select the best configuration of a method family for one task and model, by `find_best_group`.

    `runs` are the runs of one task and model from `add_selection_columns`. If no run of the family has finished, the
    cell's `runs` are empty.
    """
    task, model = (str(runs[column].iloc[0]) for column in ("task", "model"))
    candidates = runs[(runs["family"] == family) & runs["candidate"]]
    failed_runs = candidates[candidates["status"] == "failed"]
    num_pruned = int((candidates["status"] == "pruned").sum())
    usable_runs = candidates[candidates["usable"]]
    if usable_runs.empty:
        return Cell(task, model, family, usable_runs, num_failed=len(failed_runs), num_pruned=num_pruned)
    best = find_best_group(usable_runs, "configuration")
    best_runs = usable_runs[usable_runs["configuration"] == best].sort_values("seed")
    failed_runs = failed_runs[failed_runs["configuration"] == best]
    num_configurations = usable_runs["configuration"].nunique()
    return Cell(task, model, family, best_runs, num_configurations, len(failed_runs), num_pruned)


def are_all_collapsed(runs: pd.DataFrame) -> bool:
    """Return whether all runs of a configuration have constant predictions; False without a run.

    A run counts as collapsed if its record says so. A run that scores like a constant prediction also counts if there
    are two or more runs, or if its record does not say whether it has collapsed.
    """
    if runs.empty:
        return False
    is_recorded_as_collapsed = runs["collapsed"].eq(True)
    minus_constant = runs["value"].astype(float) - pd.to_numeric(runs["constant"], errors="coerce").astype(float)
    # Scores of the same predictions may differ by rounding errors.
    has_constant_score = (minus_constant.abs() < 1e-9) & ((len(runs) > 1) | runs["collapsed"].isna())
    return bool((is_recorded_as_collapsed | has_constant_score).all())


def find_best_group(runs: pd.DataFrame, column: str) -> str:
    """Return the value of `column` with the best runs, by `istar.runs.run_rows.selection_sort_key`.

    Among equals, the alphabetically first run name decides.
    """
    runs_by_group: dict[str, list[Any]] = {}
    columns = [column, "selection_merit", "validation_examples"]
    for run in runs.sort_values("name")[columns].itertuples(index=False):
        runs_by_group.setdefault(run[0], []).append(run)
    return max(runs_by_group, key=lambda group: selection_sort_key(runs_by_group[group]))


def select_cells(all_runs: pd.DataFrame) -> list[Cell]:
    """Return a cell for each method family of every model and task with a run of any status."""
    return [select_cell(runs, family) for runs in by_model_and_task(all_runs) for family in paper.FAMILIES]


def by_model_and_task(runs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the runs of each model and task: models by name, and the paper's tasks before others by name."""
    for _, model_runs in runs.groupby("model"):
        tasks = set(model_runs["task"])
        for task in [name for name in paper.PAPER_TASKS if name in tasks] + sorted(tasks - set(paper.PAPER_TASKS)):
            yield model_runs[model_runs["task"] == task]


def row_dicts(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dictionaries with string keys; missing values may be NaN."""
    names = list(map(str, frame))
    return [dict(zip(names, row, strict=True)) for row in frame.to_numpy(dtype=object)]


_TEMPLATE_BY_KEY = {
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


def describe_hyperparameters(run: Mapping[str, Any]) -> str:
    """Return the main hyperparameters of a run in words, e.g. `lr 3e-05, batch 32, epochs 3, bf16-mixed`."""
    parts = []
    max_steps: Any = run.get("trainer.max_steps")
    has_max_steps = is_finite(max_steps) and max_steps > 0
    for key, template in _TEMPLATE_BY_KEY.items():
        value = run.get(key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            continue
        if key in ("trainer.devices", "trainer.accumulate_grad_batches") and value in (1, "1"):
            continue
        # A number of steps replaces the number of epochs as the limit.
        if key == ("trainer.max_epochs" if has_max_steps else "trainer.max_steps"):
            continue
        # pandas converts a column of integers with missing values to floats.
        is_integer = isinstance(value, float) and key != "optim.lr"
        parts.append(template.format(int(value) if is_integer else value))
    return ", ".join(parts)


def have_same_inputs(runs: pd.DataFrame, other_runs: pd.DataFrame) -> bool:
    """Return whether two groups of runs start from the same models, and are trained and evaluated on the same data."""
    return set(runs["inputs"]) == set(other_runs["inputs"])


def find_differing_keys(first: RunKey, second: RunKey) -> list[str]:
    """Return the config keys in which two runs differ, except the seed, the task and the penalty."""
    settings, other_settings = flatten_settings(first.settings), flatten_settings(second.settings)
    return [
        key
        for key in settings | other_settings
        if "." in key
        and not key.startswith(("reg.", "task.name"))
        and str(settings.get(key)) != str(other_settings.get(key))
    ]
