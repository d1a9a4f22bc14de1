"""How much a method was tuned: its trials, how long each trial was allowed to train, and the examples that it saw.

A trial is a configuration of a method that was tried: all its settings except the seed. A method is what one row of the
table of all methods shows. Each λ of I-STAR is therefore a method with trials of its own, and a learning rate is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from istar.reports.configurations import is_finite, row_dicts

_TRIED_STATUSES = ("finished", "failed", "pruned")
"""Statuses of a run whose configuration counts as tried; an unfinished run may not have begun."""
_LIMIT_KEYS: tuple[str, ...] = (
    "trainer.max_epochs",
    "trainer.stop_at_inter_sim",
    "task.limit_train",
    "task.validation_fraction",
)
"""Config keys that limit the training of a run without `trainer.max_steps`."""
_BATCH_SIZE_FACTORS: tuple[str, ...] = (
    "data.batch_size", "trainer.accumulate_grad_batches", "trainer.devices", "trainer.num_nodes",
)  # fmt: skip
"""Config keys whose product is the number of examples of an optimizer step."""
_LIMIT_KEYS_WITH_STEPS = ("trainer.max_steps", "task.limit_train", "task.validation_fraction", *_BATCH_SIZE_FACTORS)
"""Config keys that limit the training of a run with `trainer.max_steps`."""


@dataclass(frozen=True)
class Budget:
    """What was spent on tuning and training a method, on one task with one model."""

    # How long each trial was allowed to train, in words, sorted. Training that early stopping or a pruner saved is not
    # subtracted.
    trial_limits: tuple[str, ...]
    finished_epochs: float  # epochs that its finished runs trained, all trials and seeds together; NaN if unknown
    finished_examples: float  # training examples that the finished runs saw, with repetitions; NaN if unknown

    @property
    def num_trials(self) -> int:
        """Number of configurations that were tried."""
        return len(self.trial_limits)

    def is_equal_to(self, other: "Budget") -> bool:
        """Return whether both budgets have as many trials, with the same limits of epochs (or steps) and examples."""
        return self.trial_limits == other.trial_limits


def compute_budget(runs: pd.DataFrame) -> Budget:
    """Return the budget of a method from all its runs on one task with one model, finished or not.

    `runs` has the columns of `configurations.add_selection_columns`.
    """
    trials = runs[runs["status"].isin(_TRIED_STATUSES)].drop_duplicates("settings_hash")
    finished_runs = row_dicts(runs[runs["usable"]])
    examples_by_run = [_count_examples(run) for run in finished_runs]
    epochs_by_run = [
        num_examples / float(run["train_examples"])
        for num_examples, run in zip(examples_by_run, finished_runs, strict=True)
    ]
    return Budget(tuple(sorted(map(_describe_limit, row_dicts(trials)))), sum(epochs_by_run), sum(examples_by_run))


def _describe_limit(run: Mapping[str, Any]) -> str:
    """Return in words how long a run was allowed to train, and on which part of the training data."""
    max_steps = run.get("trainer.max_steps")
    # A number of steps replaces the number of epochs as the limit.
    has_max_steps = is_finite(max_steps) and float(str(max_steps)) > 0
    limit_keys = _LIMIT_KEYS_WITH_STEPS if has_max_steps else _LIMIT_KEYS
    return ", ".join(f"{key}={_format_value(run.get(key))}" for key in limit_keys)


def _format_value(value: Any) -> str:
    """Return a setting as text: `-` if it is missing, and an integer that pandas made a float without decimals."""
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "-"
    return f"{value:g}" if is_finite(value) else str(value)


def _count_examples(run: Mapping[str, Any]) -> float:
    """Return the number of examples that a finished run saw: steps times examples per step; NaN if unknown."""
    num_examples = float(run["steps"])
    for key in _BATCH_SIZE_FACTORS:
        factor = run.get(key)
        # `trainer.devices` may be a word, which counts as 1.
        num_examples *= float(str(factor)) if is_finite(factor) else 1.0
    return num_examples
