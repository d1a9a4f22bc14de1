"""Sentences that say what a comparison of two methods allows to conclude, made from its numbers by fixed rules.

The words "better" and "worse" occur only where the p-value, corrected for the whole table, is below alpha, and the
interval agrees. Where the runs do not allow a comparison, the sentence has no difference and no p-value, which could be
taken for an answer.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from istar.errors import UserError
from istar.statistics.arguments import check_probability


class Verdict(Enum):
    """What a comparison allows to conclude."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference found"
    NONE = "no conclusion"


@dataclass(frozen=True)
class Comparison:
    """A method compared with a reference on a task, over the seeds that both have."""

    method: str
    task: str
    pairs: int  # number of seeds that both have
    difference: float | None = None  # mean of method minus reference over these seeds
    interval: tuple[float, float] | None = None  # of the difference, not corrected for the number of comparisons
    p_value: float | None = None  # two-sided, adjusted over the whole table (`multiple.holm`)
    # Smallest difference that so many pairs find with probability `power` (`power.smallest_difference`). For alpha
    # itself it is a lower limit; the correction for m comparisons makes it larger, at most to that for alpha / m.
    smallest_difference: float | None = None
    reference: str = "Base"
    collapsed: int = 0  # number of the method's runs on these seeds whose predictions are constant; they count
    reference_collapsed: int = 0  # the same for the reference
    unmatched: int = 0  # number of seeds that only one of the two has
    has_equal_budgets: bool = True  # whether both had the same number of trials, epochs and examples
    lower_is_better: bool = False  # whether the metric is a loss
    # Smallest adjusted p-value that so many pairs can give: that of `paired.smallest_sign_flip_p`, adjusted for a table
    # in which every test gives its smallest p-value; 0 for the t-test.
    smallest_p: float = 0.0
    power: float = 0.8
    level: float = 0.95  # confidence level of the interval
    # Number of configurations of the method from which the scores of the reported set chose; 1 if there was one, or if
    # other data chose.
    chosen_among: int = 1
    reference_chosen_among: int = 1  # the same for the reference

    def __post_init__(self) -> None:
        """Refuse numbers that are out of range.

        Raises:
            UserError: if a count is negative or larger than the number of pairs, a method was chosen among fewer than
                1 configuration, the p-value is not in [0, 1], or the interval does not contain the difference.
        """
        name = f"{self.method} on {self.task}"
        if min(self.pairs, self.unmatched) < 0:
            raise UserError(f"{name}: the number of seeds is negative; expected 0 or more")
        for count in (self.chosen_among, self.reference_chosen_among):
            if count < 1:
                raise UserError(f"{name}: chosen among {count} configurations; expected 1 or more")
        for count in (self.collapsed, self.reference_collapsed):
            if not 0 <= count <= self.pairs:
                raise UserError(f"{name}: {count} collapsed runs of {self.pairs}; expected from 0 to {self.pairs}")
        if self.p_value is not None and not 0 <= self.p_value <= 1:
            raise UserError(
                f"{name}: {self.p_value} is no p-value; expected a number in [0, 1], or None without a test"
            )
        numbers = (self.difference, self.smallest_difference, *(self.interval or ()))
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise UserError(f"{name}: a number is NaN or infinite; expected None where there is none")
        if self.interval is not None and self.difference is not None:
            low, high = self.interval
            if not low <= self.difference <= high:
                raise UserError(
                    f"{name}: the interval {low:g} to {high:g} does not contain the difference {self.difference:g}"
                )


def verdict(row: Comparison, alpha: float = 0.05) -> Verdict:
    """Return what a comparison allows to conclude; see `conclusion` for the rules.

    Raises:
        UserError: if alpha is not in (0, 1).
    """
    check_probability(alpha, "alpha")
    if _obstacle(row, alpha) or row.difference is None or row.p_value is None:
        return Verdict.NONE
    if row.p_value >= alpha:
        return Verdict.NO_DIFFERENCE
    if row.difference == 0 or (row.interval is not None and row.interval[0] <= 0 <= row.interval[1]):
        return Verdict.NONE
    return Verdict.BETTER if (row.difference > 0) != row.lower_is_better else Verdict.WORSE


def conclusion(row: Comparison, alpha: float = 0.05) -> str:
    """Return in words what a comparison allows to conclude and what not.

    The first of these rules that applies gives the sentence:

    1. Unequal budgets, no seed or one seed in common, different seeds, a test that is missing or cannot give a p-value
       below alpha with so few pairs: nothing can be concluded, and why. The sentence has no difference and no p-value.
    2. The adjusted p-value is at least alpha: no difference was found, and which differences could not have been found.
    3. The test and the interval disagree: nothing can be concluded.
    4. Otherwise the method is better or worse than the reference, by how much.

    Collapsed runs count as they are; a second sentence says how many there are. A last sentence says that a mean is
    biased if the reported set itself chose among several configurations.

    Args:
        row: the comparison.
        alpha: significance level for the adjusted p-value.

    Raises:
        UserError: if alpha is not in (0, 1).
    """
    return " ".join(filter(None, (_main_sentence(row, alpha), _collapsed_sentence(row), _choice_sentence(row))))


def _main_sentence(row: Comparison, alpha: float) -> str:
    result = verdict(row, alpha)
    names = f"{row.method} and {row.reference}"
    nothing = f"Nothing can be concluded about {names} on {row.task}"
    if obstacle := _obstacle(row, alpha):
        return f"{nothing}: {obstacle}."
    assert row.difference is not None  # else there is an obstacle
    assert row.p_value is not None
    numbers = _numbers(row)
    if result is Verdict.NONE:
        return f"{nothing}: the test and the interval disagree ({numbers})."
    if result is Verdict.NO_DIFFERENCE:
        limit = (
            "it is not known how small a difference so few seeds could have found"
            if row.smallest_difference is None
            else f"with {row.pairs} seeds, a difference below {_number(row.smallest_difference)} could not have been "
            f"found reliably (power below {row.power:g})"
        )
        return f"No difference between {names} was found on {row.task} ({numbers}); {limit}."
    size = _number(abs(row.difference))
    return (
        f"{row.method} is {result.value} than {row.reference} on {row.task} by {size} ({numbers}, {row.pairs} seeds)."
    )


def _obstacle(row: Comparison, alpha: float) -> str:
    """Return why the comparison allows no conclusion, whatever its numbers are; empty if it does."""
    if not row.has_equal_budgets:
        return "their budgets differ, so that a difference need not come from the method"
    if row.pairs == 0:
        return "they have no seed in common"
    if row.pairs == 1:
        return "they have one seed in common, and a test needs at least two"
    if row.unmatched:
        runs = "1 seed has" if row.unmatched == 1 else f"{row.unmatched} seeds have"
        return f"their seeds differ, and {runs} a run of only one of them; run both with the same seeds"
    if row.smallest_p >= alpha:
        return (
            f"they have {row.pairs} seeds in common, with which the test cannot give an adjusted p-value "
            f"below {alpha:g}; "
            "run more seeds"
        )
    if row.difference is None or row.p_value is None:
        return "there is no test of their difference"
    return ""


def _numbers(row: Comparison) -> str:
    assert row.difference is not None
    assert row.p_value is not None
    parts = [f"difference {_signed(row.difference)}"]
    if row.interval is not None:
        low, high = (_signed(end) for end in row.interval)
        parts.append(f"uncorrected {100 * row.level:g}% interval {low} to {high}")
    parts.append("adjusted p < 0.001" if row.p_value < 0.001 else f"adjusted p = {row.p_value:.3g}")
    return ", ".join(parts)


def _collapsed_sentence(row: Comparison) -> str:
    """Return how many of the compared runs have constant predictions; empty if none has."""
    if not row.collapsed and not row.reference_collapsed:
        return ""
    counts = [
        f"{count} of {row.pairs} runs of {name}"
        for name, count in ((row.method, row.collapsed), (row.reference, row.reference_collapsed))
        if count
    ]
    is_one = row.collapsed + row.reference_collapsed == 1
    verb = "has" if is_one else "have"
    return f"{' and '.join(counts)} {verb} collapsed to constant predictions and {'counts' if is_one else 'count'}."


def _choice_sentence(row: Comparison) -> str:
    """Return which means are biased because the reported set chose among configurations; empty if none is."""
    counts = [(row.method, row.chosen_among), (row.reference, row.reference_chosen_among)]
    chosen = [(name, count) for name, count in counts if count > 1]
    if not chosen:
        return ""
    direction = "downwards" if row.lower_is_better else "upwards"
    (name, count), *others = chosen
    text = f"The mean of {name} is biased {direction} by the choice among {count} configurations on the reported set"
    return "".join([text, *(f", that of {other} by the choice among {more}" for other, more in others), "."])


def summary(rows: Iterable[Comparison], alpha: float = 0.05) -> str:
    """Return in one sentence how many comparisons of a table end in which way, and how many runs have collapsed.

    Raises:
        UserError: if alpha is not in (0, 1).
    """
    listed = list(rows)
    if not listed:
        return "There is no comparison."
    verdicts = [verdict(row, alpha) for row in listed]
    phrases = {
        Verdict.BETTER: "the method is better",
        Verdict.WORSE: "the method is worse",
        Verdict.NO_DIFFERENCE: "no difference was found",
        Verdict.NONE: "nothing can be concluded",
    }
    counts = {result: verdicts.count(result) for result in phrases}
    parts = [f"{phrases[result]} in {count}" for result, count in counts.items() if count]
    text = f"Of {len(listed)} comparison{'s' * (len(listed) != 1)}, {_listing(parts)}."
    collapsed = sum(row.collapsed for row in listed)
    verb = "run of a method has" if collapsed == 1 else "runs of methods have"
    return f"{text} {collapsed} {verb} collapsed." if collapsed else text


def _listing(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _number(value: float) -> str:
    """Return a number with two decimals; large ones with none, and small ones with two significant digits."""
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 0.095 or value == 0 else f"{value:.2g}"


def _signed(value: float) -> str:
    text = _number(value)
    return text if text.startswith("-") or value == 0 else f"+{text}"
