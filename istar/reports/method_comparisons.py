"""Compares every method with Base over the same seeds, with one correction of the p-values for the whole report."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd

from istar.reports.budgets import Budget, budget
from istar.reports.cells import HELD_OUT, VALIDATION, best_group, by_model_and_task
from istar.scores import displayed, is_lower_better
from istar.statistics import multiple, paired, power
from istar.statistics.arguments import is_constant
from istar.statistics.conclusions import Comparison
from istar.statistics.multiple import Holm

ALPHA, POWER = 0.05, 0.8
"""Significance level of the adjusted p-values, and probability of finding the smallest difference that is given."""
_RESAMPLES = 99_999
"""Random patterns of signs of the test beyond `paired.MAX_EXACT_PAIRS` pairs."""


@dataclass(frozen=True)
class Method:
    """A method on one task with one model: a row of the table of all methods."""

    model: str
    task: str
    metric: str
    name: str
    runs: pd.DataFrame  # finished runs of the configuration that is shown, one for each seed, ordered by seed
    is_base: bool
    budget: Budget
    configurations: int  # number of configurations with finished runs, among which it was chosen
    chosen_on: str  # the set that chose, see `cells.chosen_on`

    @property
    def scores(self) -> dict[int, float]:
        """The headline metric by seed, as `istar.scores.displayed`."""
        return score_by_seed(self.runs)

    @property
    def chosen_among(self) -> int:
        """Number of configurations from which the reported scores chose; 1 if other data chose."""
        return self.configurations if self.chosen_on == VALIDATION else 1

    def collapsed(self, seeds: Sequence[int]) -> int:
        """Return how many of the runs with these seeds have constant predictions."""
        return int(self.runs[self.runs["seed"].isin(seeds)]["collapsed"].eq(True).sum())


@dataclass(frozen=True)
class MethodComparison:
    """A method minus Base over the seeds that both have."""

    method: Method
    base: Method | None  # None if no run of Base has finished
    differences: dict[int, float]  # by seed
    p_value: float | None  # two-sided, of the sign-flip test, not adjusted; None for fewer than two seeds
    row: Comparison  # what follows from these numbers, with the adjusted p-value


@dataclass(frozen=True)
class Comparisons:
    """All methods of a report, and the comparisons of those other than Base."""

    methods: list[Method]  # by model and task; Base first, then the others by name
    comparisons: list[MethodComparison]  # in the same order
    holm: Holm  # the correction over all comparisons that have a test

    @property
    def careful_level(self) -> float:
        """The smallest level that Holm's method compares a p-value with: alpha / m for m tests."""
        return ALPHA / max(1, self.holm.tests)


def compare_methods(frame: pd.DataFrame) -> Comparisons:
    """Compare every method of each model and task with Base, from a frame of `cells.prepare`.

    The test is the sign-flip permutation test of the paired differences, exact for up to 20 pairs. Its p-values are
    adjusted by Holm's method over all methods, tasks and models together. The interval is Student's 95% interval of the
    mean difference, not adjusted.
    """
    methods = [method for part in by_model_and_task(frame) for method in _methods(part)]
    bases: dict[tuple[str, str], Method] = {}
    for method in methods:
        if method.is_base:
            bases.setdefault((method.model, method.task), method)
    compared = [_compare(method, bases.get((method.model, method.task))) for method in methods if not method.is_base]
    return _adjust(methods, compared)


def _adjust(methods: list[Method], compared: list[MethodComparison]) -> Comparisons:
    """Return the comparisons with p-values adjusted over all of them, and with the differences that could be found."""
    holm = multiple.holm([comparison.p_value for comparison in compared])
    # The adjusted p-values if each test gave its smallest p-value: no outcome gives smaller ones.
    smallest = multiple.holm([
        None if comparison.p_value is None else _smallest_p(comparison.row.pairs) for comparison in compared
    ])  # fmt: skip
    level = ALPHA / max(1, holm.tests)
    adjusted = []
    for comparison, p_value, smallest_p in zip(compared, holm.adjusted, smallest.adjusted, strict=True):
        row = replace(
            comparison.row,
            p_value=p_value,
            smallest_p=smallest_p or 0.0,
            smallest_difference=_smallest_difference(list(comparison.differences.values()), level),
            power=POWER,
        )
        adjusted.append(replace(comparison, row=row))
    return Comparisons(methods, adjusted, holm)


def _compare(method: Method, base: Method | None) -> MethodComparison:
    """Compare a method with Base over the seeds that both have; the p-value is not adjusted yet."""
    scores, references = method.scores, base.scores if base else {}
    seeds = sorted(scores.keys() & references.keys())
    by_seed = {seed: scores[seed] - references[seed] for seed in seeds}
    differences = np.array(list(by_seed.values()))
    has_interval = len(seeds) > 1 and not is_constant(differences)
    row = Comparison(
        method.name,
        method.task,
        pairs=len(seeds),
        difference=float(differences.mean()) if seeds else None,
        interval=paired.t_interval(differences) if has_interval else None,
        collapsed=method.collapsed(seeds),
        reference_collapsed=base.collapsed(seeds) if base else 0,
        unmatched=len(scores.keys() ^ references.keys()),
        has_equal_budgets=base is None or method.budget.is_equal_to(base.budget),
        lower_is_better=is_lower_better(method.metric),
        chosen_among=method.chosen_among,
        reference_chosen_among=base.chosen_among if base else 1,
    )
    p_value = paired.sign_flip_test(differences, _RESAMPLES).p_value if len(seeds) > 1 else None
    return MethodComparison(method, base, by_seed, p_value, row)


def _smallest_p(pairs: int) -> float:
    """Return the smallest p-value that `paired.sign_flip_test` can give for this number of pairs."""
    return paired.smallest_sign_flip_p(pairs) if pairs <= paired.MAX_EXACT_PAIRS else 1 / (_RESAMPLES + 1)


def _smallest_difference(differences: Sequence[float], level: float) -> float | None:
    """Return the smallest difference that so many pairs find at this level; None if it cannot be known.

    It is that of the paired t-test, for the standard deviation of these differences. None stands for fewer than two
    differences, equal ones, and so few that the sign-flip test does not reach the level.
    """
    values = np.array(differences)
    if len(values) < 2 or is_constant(values) or _smallest_p(len(values)) >= level:
        return None
    return _unit_difference(len(values), level) * float(values.std(ddof=1))


@cache
def _unit_difference(pairs: int, level: float) -> float:
    return power.smallest_difference(1.0, pairs, level, POWER)


def _methods(runs: pd.DataFrame) -> list[Method]:
    """Return the methods of one model and task of which a run has finished: Base first, then the others by name."""
    # Runs with a penalty of weight 0 are trials of Base, whatever their name.
    base_runs = runs[runs["family"] == "base"]
    methods = []
    for name, chosen in chosen_runs(runs[runs["usable"]]).items():
        of_method = base_runs if is_base(chosen) else runs[runs["method"] == name]
        finished = of_method[of_method["usable"]]
        model, task, metric = (str(chosen[column].iloc[0]) for column in ("model", "task", "metric"))
        # The reported set has chosen also if other data chose the epochs of some of the configurations.
        chosen_on = HELD_OUT if finished["chosen_on"].eq(HELD_OUT).all() else VALIDATION
        configurations = int(finished["config_hash"].nunique())
        method = Method(
            model, task, metric, name, chosen, is_base(chosen), budget(of_method), configurations, chosen_on
        )
        methods.append(method)
    return methods


def chosen_runs(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the runs of each method of one model and task, by seed: Base first, then the other methods by name.

    `runs` are usable ones. The runs of a method have one configuration: of those tried, the one with the most seeds,
    among equals with the best mean on the set that chose the epochs.
    """
    chosen = {
        str(name): group[group["config_hash"] == best_group(group, "config_hash")].sort_values("seed")
        for name, group in runs.groupby("method")
    }
    return dict(sorted(chosen.items(), key=lambda item: (not is_base(item[1]), item[0])))


def is_base(runs: pd.DataFrame) -> bool:
    """Return whether the runs of a method are those of Base."""
    return bool(runs["family"].iloc[0] == "base")


def score_by_seed(runs: pd.DataFrame) -> dict[int, float]:
    """Return the headline metric of each run, as `istar.scores.displayed` gives it, by seed."""
    triples = zip(runs["seed"], runs["metric"], runs["value"].astype(float), strict=True)
    return {int(seed): displayed(metric, value) for seed, metric, value in triples}
