"""Sentences that say what a comparison of two methods allows to conclude, made from its numbers by fixed rules.

The words "better" and "worse" occur only where the p-value, corrected for the whole table, is below alpha, and the
interval agrees. Where the runs do not allow a comparison, the sentence omits the difference and the p-value, so that
neither is taken for an answer.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from istar.errors import UserError
from istar.statistics import ALPHA
from istar.statistics.arguments import check_probability

_MAX_NAMED_TRIALS = 3


class Verdict(Enum):
    """What a comparison allows to conclude."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference found"
    NONE = "no conclusion"


@dataclass(frozen=True)
class PairedComparison:
    """The result of comparing a method with a reference on a task, over the seeds that both have."""

    method: str
    task: str
    pairs: int  # number of seeds that both have
    difference: float | None = None  # mean of method minus reference over these seeds
    interval: tuple[float, float] | None = None  # of the difference, not corrected for the number of comparisons
    p_value: float | None = None  # two-sided, adjusted over the whole table (`multiple.holm`)
    # Minimum detectable difference: the smallest one found by so many pairs with probability `power`, see
    # `power.smallest_difference`. Computed for alpha itself, it is a lower limit. The correction for m comparisons
    # makes it larger, but not larger than the one for alpha / m.
    smallest_difference: float | None = None
    reference: str = "Base"
    collapsed: int = 0  # number of the method's runs on these seeds with constant predictions; they are included
    reference_collapsed: int = 0  # the same for the reference
    unmatched: int = 0  # number of seeds that only one of the two has
    has_equal_budgets: bool = True  # whether both had the same number of trials, epochs and examples
    unequal_trials: tuple[str, ...] = ()  # names of runs that make the budgets differ
    lower_is_better: bool = False  # whether the metric is a loss
    # Minimum attainable adjusted p-value with so many pairs: `paired.smallest_sign_flip_p`, adjusted for a table in
    # which every test gives its smallest p-value; 0 for the t-test.
    smallest_p: float = 0.0
    power: float = 0.8
    level: float = 0.95  # confidence level of the interval
    # Number of configurations among which the method's configuration was chosen by the scores of the reported set; 1 if
    # there was only one, or if it was chosen on other data.
    chosen_among: int = 1
    reference_chosen_among: int = 1  # the same for the reference
    # Clause that says why these runs cannot be compared, for reasons beyond the other attributes.
    obstacle: str = ""

    def __post_init__(self) -> None:
        name = f"{self.method} on {self.task}"
        if self.p_value is not None and not 0 <= self.p_value <= 1:
            raise UserError(
                f"{name}: {self.p_value} is no p-value; expected a number in [0, 1], or None without a test"
            )
        numbers = (self.difference, self.smallest_difference, *(self.interval or ()))
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise UserError(f"{name}: a number is NaN or infinite; expected None where there is none")
        if (
            self.interval
            and self.difference is not None
            and not self.interval[0] <= self.difference <= self.interval[1]
        ):
            raise UserError(f"{name}: the interval {self.interval} does not contain the difference {self.difference:g}")


def verdict(row: PairedComparison, alpha: float = ALPHA) -> Verdict:
    """Return what a comparison allows to conclude, by the rules that `conclusion` lists.

    `alpha` is the significance level for the adjusted p-value.

    Raises:
        UserError: if alpha is not in (0, 1).
    """
    check_probability(alpha, "alpha")
    if _find_obstacle(row, alpha) or row.difference is None or row.p_value is None:
        return Verdict.NONE
    if row.p_value >= alpha:
        return Verdict.NO_DIFFERENCE
    if row.difference == 0 or (row.interval is not None and row.interval[0] <= 0 <= row.interval[1]):
        return Verdict.NONE
    return Verdict.BETTER if (row.difference > 0) != row.lower_is_better else Verdict.WORSE


def conclusion(row: PairedComparison, alpha: float = ALPHA) -> str:
    """Return sentences that say what a comparison allows to conclude and what not.

    The first of these rules that applies gives the main sentence:

    1. An obstacle of the caller, unequal budgets, at most one seed in common, different seeds, a test that is missing
       or cannot give a p-value below alpha with so few pairs: nothing can be concluded, and why. The sentence has
       neither difference nor p-value.
    2. The adjusted p-value is at least alpha: no difference was found, and which differences could not have been found.
    3. The test and the interval disagree: nothing can be concluded.
    4. Otherwise the method is better or worse than the reference, by how much.

    Runs with constant predictions (collapsed) are included; a second sentence counts them. A last sentence says that a
    mean is biased if the configuration was chosen by scores of the reported set itself.

    `alpha` is the significance level for the adjusted p-value.

    Raises:
        UserError: if alpha is not in (0, 1).
    """
    sentences = [_make_main_sentence(row, alpha)]
    methods = (
        (row.method, row.collapsed, row.chosen_among),
        (row.reference, row.reference_collapsed, row.reference_chosen_among),
    )
    for name, collapsed, _ in methods:
        if collapsed:
            verb, count = ("has", "counts") if collapsed == 1 else ("have", "count")
            sentences.append(
                f"{collapsed} of {row.pairs} runs of {name} {verb} collapsed to constant predictions and {count}."
            )
    direction = "downwards" if row.lower_is_better else "upwards"
    for name, _, chosen_among in methods:
        if chosen_among > 1:
            sentences.append(
                f"The mean of {name} is biased {direction} by the choice among {chosen_among} configurations on the "
                "reported set."
            )
    return " ".join(sentences)


def _make_main_sentence(row: PairedComparison, alpha: float) -> str:
    result = verdict(row, alpha)
    names = f"{row.method} and {row.reference}"
    no_conclusion = f"Nothing can be concluded about {names} on {row.task}"
    obstacle = _find_obstacle(row, alpha)
    if obstacle or row.difference is None or row.p_value is None:
        return f"{no_conclusion}: {obstacle}."
    numbers = f"difference {_format_number(row.difference, '+')}"
    if row.interval is not None:
        low, high = (_format_number(end, "+") for end in row.interval)
        numbers += f", uncorrected {100 * row.level:g}% interval {low} to {high}"
    numbers += ", adjusted p < 0.001" if row.p_value < 0.001 else f", adjusted p = {row.p_value:.3g}"
    if result is Verdict.NONE:
        return f"{no_conclusion}: the test and the interval disagree ({numbers})."
    if result is Verdict.NO_DIFFERENCE:
        limit = "it is not known how small a difference so few seeds could have found"
        if row.smallest_difference is not None:
            limit = (
                f"with {row.pairs} seeds, a difference below {_format_number(row.smallest_difference)} could not have "
                f"been found reliably (power below {row.power:g})"
            )
        return f"No difference between {names} was found on {row.task} ({numbers}); {limit}."
    size = _format_number(abs(row.difference))
    return (
        f"{row.method} is {result.value} than {row.reference} on {row.task} by {size} ({numbers}, {row.pairs} seeds)."
    )


def _name_trials(row: PairedComparison) -> str:
    if not row.unequal_trials:
        return ""
    names = ", ".join(row.unequal_trials[:_MAX_NAMED_TRIALS])
    others = len(row.unequal_trials) - _MAX_NAMED_TRIALS
    return f" by {names}{f' and {others} more' if others > 0 else ''} (istar report --exclude leaves runs out)"


def _find_obstacle(row: PairedComparison, alpha: float) -> str:
    if row.obstacle:
        return row.obstacle
    if not row.has_equal_budgets:
        return f"their budgets differ{_name_trials(row)}, so that a difference need not come from the method"
    if row.pairs == 0:
        return "they have no seed in common"
    if row.pairs == 1:
        return "they have one seed in common, and a test needs at least two"
    if row.unmatched:
        seeds = "1 seed has" if row.unmatched == 1 else f"{row.unmatched} seeds have"
        return f"their seeds differ, and {seeds} a run of only one of them; run both with the same seeds"
    if row.smallest_p >= alpha:
        return (
            f"they have {row.pairs} seeds in common, with which the test cannot give an adjusted p-value below "
            f"{alpha:g}; run more seeds"
        )
    if row.difference is None or row.p_value is None:
        return "there is no test of their difference"
    return ""


def summary(rows: Iterable[PairedComparison], alpha: float = ALPHA) -> str:
    """Return a sentence that counts the verdicts of a table's comparisons, and one that counts collapsed runs.

    `alpha` is the significance level for the adjusted p-values.

    Raises:
        UserError: if alpha is not in (0, 1).
    """
    comparisons = list(rows)
    if not comparisons:
        return "There is no comparison."
    verdicts = [verdict(row, alpha) for row in comparisons]
    phrase_by_verdict = {
        Verdict.BETTER: "the method is better",
        Verdict.WORSE: "the method is worse",
        Verdict.NO_DIFFERENCE: "no difference was found",
        Verdict.NONE: "nothing can be concluded",
    }
    phrases = [f"{text} in {verdicts.count(key)}" for key, text in phrase_by_verdict.items() if key in verdicts]
    text = f"Of {len(comparisons)} comparisons, {', '.join(phrases)}."
    if len(phrases) == 1:
        place = f"all {len(comparisons)} comparisons" if len(comparisons) > 1 else "the only comparison"
        text = f"In {place}, {phrase_by_verdict[verdicts[0]]}."
    num_collapsed = sum(row.collapsed for row in comparisons)
    return f"{text} Collapsed runs of methods: {num_collapsed}." if num_collapsed else text


def _format_number(value: float, sign: str = "") -> str:
    """Format a number with two decimals, a large one with none, and a small one with two significant digits."""
    sign = sign if value > 0 else ""
    if abs(value) >= 1000:
        return f"{value:{sign}.0f}"
    return f"{value:{sign}.2f}" if abs(value) >= 0.095 or value == 0 else f"{value:{sign}.2g}"
