"""How much a method was tuned: its trials, how long each trial was allowed to train, and the examples that it saw.

A trial is a configuration of a method that was tried: all its settings except the seed. A method is what one row of the
table of all methods shows. Each λ of I-STAR is therefore a method with trials of its own, and a learning rate is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from istar.reports.cells import is_finite, row_dicts

_TRIED = ("finished", "failed", "pruned")
"""Statuses of a run whose configuration counts as tried; an unfinished run may not have begun."""
_LIMITS: tuple[str, ...] = (
    "trainer.max_epochs",
    "trainer.stop_at_inter_sim",
    "task.limit_train",
    "task.validation_fraction",
)
_FACTORS: tuple[str, ...] = (
    "data.batch_size", "trainer.accumulate_grad_batches", "trainer.devices", "trainer.num_nodes",
)  # fmt: skip
"""Config keys whose product is the number of examples of an optimizer step."""
_LIMITS_OF_STEPS = ("trainer.max_steps", "task.limit_train", "task.validation_fraction", *_FACTORS)


@dataclass(frozen=True)
class Budget:
    """What was spent on a method, on one task with one model."""

    # How long each trial was allowed to train, in words and in alphabetical order; what early stopping or a pruner
    # saves does not count.
    limits: tuple[str, ...]
    epochs: float  # epochs that its finished runs trained, all trials and seeds together; NaN if unknown
    examples: float  # training examples that they saw, with repetitions; NaN if unknown

    @property
    def trials(self) -> int:
        """Number of configurations that were tried."""
        return len(self.limits)

    def is_equal_to(self, other: "Budget") -> bool:
        """Return whether both have as many trials, and the trials as many epochs (or steps) and examples."""
        return self.limits == other.limits


def budget(runs: pd.DataFrame) -> Budget:
    """Return the budget of a method from all its runs, finished or not, of one task and model.

    `runs` is a part of a frame of `cells.prepare`.
    """
    tried = runs[runs["status"].isin(_TRIED)].drop_duplicates("settings_hash")
    finished = row_dicts(runs[runs["usable"]])
    examples = [_examples(run) for run in finished]
    epochs = [seen / float(run["train_examples"]) for seen, run in zip(examples, finished, strict=True)]
    return Budget(tuple(sorted(map(_limit, row_dicts(tried)))), sum(epochs), sum(examples))


def _limit(run: Mapping[str, Any]) -> str:
    """Return in words how long a run was allowed to train, and on which part of the training data."""
    steps = run.get("trainer.max_steps")
    # The number of epochs does not limit a training that has a number of steps.
    has_steps = is_finite(steps) and float(str(steps)) > 0
    keys = _LIMITS_OF_STEPS if has_steps else _LIMITS
    return ", ".join(f"{key}={_text(run.get(key))}" for key in keys)


def _text(value: Any) -> str:
    """Return a value as text: integers that pandas has made floats as integers, and a missing value as `-`."""
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "-"
    return f"{value:g}" if is_finite(value) else str(value)


def _examples(run: Mapping[str, Any]) -> float:
    """Return the examples that a finished run saw: optimizer steps times examples of a step; NaN if unknown."""
    product = float(run["steps"])
    for key in _FACTORS:
        value = run.get(key)
        # Runs of earlier versions lack some keys, and `trainer.devices` may be a word; one device is the default.
        product *= float(str(value)) if is_finite(value) else 1.0
    return product
