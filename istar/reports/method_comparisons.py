"""Compares every method with a reference, usually Base, over the same seeds, with one correction of all p-values.

A method is a row of the table of all methods: each λ of I-STAR is a method. Its budget is how much it was tuned: its
trials and their training limits. A trial is a configuration that was tried: all settings except the seed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd

from istar.errors import UserError
from istar.reports import configurations
from istar.runs.names import BASE_LABEL, is_lower_better
from istar.statistics import ALPHA, POWER, paired, power
from istar.statistics.arguments import is_constant, is_finite
from istar.statistics.conclusions import PairedComparison
from istar.statistics.paired import Holm

_TRIED_STATUSES = ("finished", "failed", "pruned")
"""Run statuses that count as a trial; an unfinished run may not have begun."""
_LIMIT_KEYS = ("trainer.max_epochs", "monitor.stop_at_inter_sim", "task.limit_train", "task.validation_fraction")
"""Config keys that limit the training of a run without `trainer.max_steps`."""
_LIMIT_KEYS_WITH_STEPS = (
    "trainer.max_steps", "task.limit_train", "task.validation_fraction", "data.batch_size",
    "trainer.accumulate_grad_batches", "trainer.devices", "trainer.num_nodes",
)  # fmt: skip
"""Config keys that limit the training of a run with `trainer.max_steps`."""


@dataclass(frozen=True)
class Method:
    """A method on one task with one model: a row of the report's table of all methods."""

    model: str
    task: str
    metric: str
    name: str  # with its settings
    short_name: str  # without its settings
    runs: pd.DataFrame  # finished runs of the configuration that is shown, one for each seed, ordered by seed
    trials_by_limits: dict[str, list[str]]  # a run of each trial, by the trial's training limits as text
    num_configurations: int  # number of configurations with finished runs; one of them is shown
    selection_set: str  # set that chose the shown configuration, see `configurations.get_selection_set`

    @property
    def score_by_seed(self) -> dict[int, float]:
        """The headline metric by seed, as tables show it."""
        return {int(seed): score for seed, score in zip(self.runs["seed"], self.runs["score"], strict=True)}

    @property
    def num_candidates(self) -> int:
        """Number of configurations compared by the reported scores; 1 if the choice was made on other data."""
        return self.num_configurations if self.selection_set == configurations.VALIDATION else 1

    @property
    def budget(self) -> Counter[str]:
        """How many trials the method had, by their training limits."""
        return Counter({limits: len(names) for limits, names in self.trials_by_limits.items()})

    def count_collapsed(self, seeds: Sequence[int]) -> int:
        """Return how many of the runs with these seeds have constant predictions."""
        return int(self.runs[self.runs["seed"].isin(seeds)]["collapsed"].eq(True).sum())


@dataclass(frozen=True)
class MethodComparison:
    """Comparison of a method with the reference over the seeds that both have."""

    method: Method
    reference: Method | None  # None if no run of the reference has finished
    difference_by_seed: dict[int, float]  # score of the method minus the reference's score
    unadjusted_p_value: float | None  # two-sided; None where the test is not defined
    statistics: PairedComparison  # mean difference, interval and adjusted p-value, which decide the conclusion


@dataclass(frozen=True)
class ComparedMethods:
    """All methods of a report, and the comparison of each with the reference."""

    methods: list[Method]  # by model and task; Base first, then the others by name
    reference: str  # name of the method that the others are compared with, possibly without its settings
    comparisons: list[MethodComparison]  # in the same order
    holm: Holm  # Holm's correction over all comparisons that have a test

    @property
    def strictest_level(self) -> float:
        """The smallest level that Holm's method compares a p-value with: alpha / m for m tests."""
        return ALPHA / max(1, self.holm.tests)


def compare_methods(all_runs: pd.DataFrame, reference: str = BASE_LABEL) -> ComparedMethods:
    """Compare every method of each model and task with a reference, such as Base or a placebo.

    The p-values of the paired sign-flip tests are adjusted by Holm's method over all methods, tasks and models
    together. The interval is Student's 95% interval of the mean difference, not adjusted.

    Args:
        all_runs: result of `configurations.add_selection_columns`.
        reference: name of a method, such as `random direction λ=1 ζ=0.4`. The settings at its end may be left out
            where only one method has the rest of the name.

    Raises:
        UserError: if no method has the name of the reference, or several of a model and task have it.
    """
    methods = [method for runs in configurations.by_model_and_task(all_runs) for method in _collect_methods(runs)]
    reference_by_task = _find_references(methods, reference)
    comparisons = [
        _compare_with_reference(method, reference_method, reference)
        for method in methods
        if method is not (reference_method := reference_by_task.get((method.model, method.task)))
    ]
    adjusted_comparisons, holm = _adjust_p_values(comparisons)
    return ComparedMethods(methods=methods, reference=reference, comparisons=adjusted_comparisons, holm=holm)


def _find_references(methods: list[Method], name: str) -> dict[tuple[str, str], Method]:
    reference_by_task: dict[tuple[str, str], Method] = {}
    for method in sorted(methods, key=lambda method: method.name != name):  # full names before shortened ones
        if name not in (method.name, method.short_name):
            continue
        other = reference_by_task.setdefault((method.model, method.task), method)
        if other is not method and other.name != name:
            raise UserError(
                f"the reference {name!r} may be {other.name!r} or {method.name!r} on {method.task}; expected the full "
                "name of one"
            )
    if not reference_by_task and name != BASE_LABEL:
        available_names = ", ".join(repr(other_name) for other_name in sorted({method.name for method in methods}))
        raise UserError(f"no finished run is of the method {name!r}; expected one of {available_names or 'none'}")
    return reference_by_task


def _adjust_p_values(comparisons: list[MethodComparison]) -> tuple[list[MethodComparison], Holm]:
    """Return the comparisons with adjusted p-values and, at Holm's strictest level, minimum detectable differences."""
    holm = paired.holm([comparison.unadjusted_p_value for comparison in comparisons])
    # Lower bounds of the adjusted p-values: what they would be if every test gave its minimum attainable p-value.
    minimum_holm = paired.holm([
        None if comparison.unadjusted_p_value is None else _compute_minimum_p(comparison.statistics.pairs)
        for comparison in comparisons
    ])  # fmt: skip
    strictest_level = ALPHA / max(1, holm.tests)
    adjusted_comparisons = []
    for comparison, p_value, minimum_adjusted_p in zip(comparisons, holm.adjusted, minimum_holm.adjusted, strict=True):
        differences = np.array(list(comparison.difference_by_seed.values()))
        statistics = replace(
            comparison.statistics,
            p_value=p_value,
            smallest_p=minimum_adjusted_p or 0.0,
            smallest_difference=_compute_minimum_detectable_difference(differences, strictest_level),
            power=POWER,
        )
        adjusted_comparisons.append(replace(comparison, statistics=statistics))
    return adjusted_comparisons, holm


def _compare_with_reference(method: Method, reference: Method | None, reference_name: str) -> MethodComparison:
    scores, reference_scores = method.score_by_seed, reference.score_by_seed if reference else {}
    has_same_inputs = reference is None or configurations.have_same_inputs(method.runs, reference.runs)
    seeds = sorted(scores.keys() & reference_scores.keys()) if has_same_inputs else []
    difference_by_seed = {seed: scores[seed] - reference_scores[seed] for seed in seeds}
    differences = np.array(list(difference_by_seed.values()))
    has_interval = len(seeds) > 1 and not is_constant(differences)
    statistics = PairedComparison(
        method.name,
        method.task,
        pairs=len(seeds),
        difference=float(differences.mean()) if seeds else None,
        interval=paired.t_interval(differences) if has_interval else None,
        reference=reference.name if reference else reference_name,
        collapsed=method.count_collapsed(seeds),
        reference_collapsed=reference.count_collapsed(seeds) if reference else 0,
        unmatched=len(scores.keys() ^ reference_scores.keys()),
        has_equal_budgets=reference is None or method.budget == reference.budget,
        unequal_trials=() if reference is None else _list_unequal_trials(method, reference),
        lower_is_better=is_lower_better(method.metric),
        chosen_among=method.num_candidates,
        reference_chosen_among=reference.num_candidates if reference else 1,
        obstacle="" if has_same_inputs else "their models or their data differ, so that no score can be compared",
    )
    p_value = paired.compute_p_value(list(difference_by_seed.values()), "sign-flip")
    return MethodComparison(method, reference, difference_by_seed, p_value, statistics)


def _list_unequal_trials(method: Method, reference: Method) -> tuple[str, ...]:
    """Return a run of each trial with training limits that only one of the two methods has."""
    return tuple(
        name
        for tried, compared in ((method, reference), (reference, method))
        for limits, names in tried.trials_by_limits.items()
        if limits not in compared.trials_by_limits
        for name in names
    )


def _compute_minimum_p(num_pairs: int) -> float:
    is_exact = num_pairs <= paired.MAX_EXACT_PAIRS
    return paired.smallest_sign_flip_p(num_pairs) if is_exact else 1 / (paired.RESAMPLES + 1)


def _compute_minimum_detectable_difference(differences: np.ndarray, level: float) -> float | None:
    """Return the minimum detectable difference of the paired t-test at a level, with the power `POWER`."""
    num_pairs = len(differences)
    if num_pairs < 2 or is_constant(differences) or _compute_minimum_p(num_pairs) >= level:
        return None
    return _compute_minimum_detectable_effect_size(num_pairs, level) * float(differences.std(ddof=1))


@cache
def _compute_minimum_detectable_effect_size(num_pairs: int, level: float) -> float:
    return power.smallest_difference(1.0, num_pairs, level, POWER)


def _collect_methods(runs: pd.DataFrame) -> list[Method]:
    """Return the methods of one model and task with finished runs: Base first, then the others by name.

    `configurations.find_best_group` chooses the configuration that is shown.
    """
    methods = []
    for name, method_runs in runs.groupby("method"):
        finished_runs = method_runs[method_runs["usable"]]
        if finished_runs.empty:
            continue
        best = configurations.find_best_group(finished_runs, "configuration")
        chosen_runs = finished_runs[finished_runs["configuration"] == best].sort_values("seed")
        first_run = chosen_runs.iloc[0]
        # If only some of the configurations have held-out data, the choice among all of them uses the reported set.
        is_held_out = finished_runs["chosen_on"].eq(configurations.HELD_OUT).all()
        methods.append(
            Method(
                model=str(first_run["model"]),
                task=str(first_run["task"]),
                metric=str(first_run["metric"]),
                name=str(name),
                short_name=str(first_run["method_name"]),
                runs=chosen_runs,
                trials_by_limits=_find_trials_by_limits(method_runs),
                num_configurations=int(finished_runs["configuration"].nunique()),
                selection_set=configurations.HELD_OUT if is_held_out else configurations.VALIDATION,
            )
        )
    return sorted(methods, key=lambda method: (method.name != BASE_LABEL, method.name))


def _find_trials_by_limits(runs: pd.DataFrame) -> dict[str, list[str]]:
    """Return a run of each trial by its training limits, from all runs of a method on one task with one model.

    Early stopping and pruning do not lower them.
    """
    trials = runs[runs["status"].isin(_TRIED_STATUSES)].drop_duplicates("configuration")
    limits = trials.reindex(columns=sorted({*_LIMIT_KEYS, *_LIMIT_KEYS_WITH_STEPS})).astype(object)
    trials_by_limits: dict[str, list[str]] = {}
    for name, run in zip(trials["name"], configurations.row_dicts(limits.where(limits.notna(), None)), strict=True):
        # A number of steps replaces the number of epochs as the limit.
        has_max_steps = is_finite(run["trainer.max_steps"]) and run["trainer.max_steps"] > 0
        values = [run[key] for key in (_LIMIT_KEYS_WITH_STEPS if has_max_steps else _LIMIT_KEYS)]
        trials_by_limits.setdefault(str(values), []).append(str(name))
    return trials_by_limits
