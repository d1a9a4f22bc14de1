import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from istar.errors import UserError
from istar.statistics.conclusions import PairedComparison, Verdict, conclusion, summary, verdict
from istar.statistics.paired import holm, smallest_sign_flip_p, t_interval, t_test
from istar.statistics.power import smallest_difference

ROW = PairedComparison(
    "I-STAR", "rte", pairs=5, difference=1.25, interval=(0.5, 2.0), p_value=0.012, smallest_difference=1.63
)
UNEQUAL_BUDGETS = "their budgets differ, so that a difference need not come from the method"
COMPARATIVES = re.compile(r"\b(better|worse|improve\w*|outperform\w*|beats?|higher|lower|significant\w*)\b")


def test_a_difference() -> None:
    assert conclusion(ROW) == (
        "I-STAR is better than Base on rte by 1.25 (difference +1.25, uncorrected 95% interval +0.50 to +2.00, "
        "adjusted p = 0.012, 5 seeds)."
    )
    worse_row = replace(ROW, difference=-1.25, interval=(-2.0, -0.5), p_value=0.0004, level=0.9)
    assert conclusion(worse_row) == (
        "I-STAR is worse than Base on rte by 1.25 (difference -1.25, uncorrected 90% interval -2.00 to -0.50, "
        "adjusted p < 0.001, 5 seeds)."
    )


def test_small_numbers_keep_their_digits() -> None:
    row = replace(ROW, difference=0.00123, interval=(0.0, 0.0246), p_value=0.3, smallest_difference=0.0949)
    assert "(difference +0.0012, uncorrected 95% interval 0.00 to +0.025, adjusted p = 0.3)" in conclusion(row)
    assert "a difference below 0.095 could" in conclusion(row)


def test_lower_losses_are_better() -> None:
    row = replace(ROW, lower_is_better=True, difference=-1200.4, interval=(-1300.0, -1100.0), reference="CosReg")
    assert conclusion(row).startswith("I-STAR is better than CosReg on rte by 1200 (difference -1200,")
    assert verdict(replace(ROW, lower_is_better=True)) is Verdict.WORSE


def test_no_difference() -> None:
    row = replace(ROW, p_value=0.4, interval=(-0.9, 3.4))
    assert conclusion(row) == (
        "No difference between I-STAR and Base was found on rte (difference +1.25, uncorrected 95% interval -0.90 to "
        "+3.40, adjusted p = 0.4); with 5 seeds, a difference below 1.63 could not have been found reliably (power "
        "below 0.8)."
    )
    assert conclusion(replace(row, smallest_difference=None)).endswith(
        "; it is not known how small a difference so few seeds could have found."
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pairs": 0}, "they have no seed in common"),
        ({"pairs": 1}, "they have one seed in common, and a test needs at least two"),
        ({"unmatched": 1},
         "their seeds differ, and 1 seed has a run of only one of them; run both with the same seeds"),
        ({"unmatched": 3},
         "their seeds differ, and 3 seeds have a run of only one of them; run both with the same seeds"),
        ({"obstacle": "their data differ", "pairs": 0}, "their data differ"),
        ({"has_equal_budgets": False}, UNEQUAL_BUDGETS),
        ({"has_equal_budgets": False, "pairs": 0}, UNEQUAL_BUDGETS),
        ({"smallest_p": smallest_sign_flip_p(5)},
         "they have 5 seeds in common, with which the test cannot give an adjusted p-value below 0.05; run more seeds"),
        ({"p_value": None}, "there is no test of their difference"),
        ({"difference": None, "interval": None}, "there is no test of their difference"),
    ],
)  # fmt: skip
def test_runs_that_allow_no_comparison(changes, reason: str) -> None:
    row = replace(ROW, **changes)
    assert conclusion(row) == f"Nothing can be concluded about I-STAR and Base on rte: {reason}."
    assert verdict(row) is Verdict.NONE
    # The sentence has no number that could be taken for an answer.
    assert "1.25" not in conclusion(row)
    assert "0.012" not in conclusion(row)


def test_six_pairs_are_enough_for_the_signs() -> None:
    assert verdict(replace(ROW, pairs=6, smallest_p=smallest_sign_flip_p(6))) is Verdict.BETTER
    assert verdict(replace(ROW, pairs=6, smallest_p=smallest_sign_flip_p(6)), alpha=0.02) is Verdict.NONE


def test_a_test_and_an_interval_that_disagree() -> None:
    assert "rte: the test and the interval disagree (difference +1.25," in conclusion(
        replace(ROW, interval=(-0.1, 2.6))
    )


def test_words_of_comparison_need_a_small_p_value() -> None:
    verdicts = set()
    for p, (low, high), is_loss, pairs, unmatched, has_equal_budgets, smallest_p, collapsed in itertools.product(
        (None, 0.0, 0.049, 0.05, 0.051, 1.0), ((0.5, 2.0), (-0.5, 3.0), (-2.0, -0.5)), (True, False), (0, 1, 2, 9),
        (0, 2), (True, False), (0.0, 0.2), (0, 1),
    ):  # fmt: skip
        row = PairedComparison(
            "A", "rte", pairs, (low + high) / 2, (low, high), p, 0.7, unmatched=unmatched,
            has_equal_budgets=has_equal_budgets, lower_is_better=is_loss, smallest_p=smallest_p,
            collapsed=min(collapsed, pairs),
        )  # fmt: skip
        text = conclusion(row)
        may_compare = p is not None and p < 0.05 and low * high > 0
        may_compare = may_compare and pairs >= 2 and not unmatched and has_equal_budgets and not smallest_p
        assert bool(COMPARATIVES.search(text)) == may_compare, text
        if may_compare:
            assert ("better" in text) == ((low > 0) != is_loss)
        assert ("collapsed" in text) == (row.collapsed > 0)
        verdicts.add(verdict(row))
    assert verdicts == set(Verdict)


def test_collapsed_runs_and_a_choice_on_the_reported_set_end_every_sentence() -> None:
    for row in (ROW, replace(ROW, p_value=0.3), replace(ROW, unmatched=1)):
        collapsed = replace(row, collapsed=2, reference_collapsed=1)
        assert conclusion(collapsed) == (
            f"{conclusion(row)} 2 of 5 runs of I-STAR have collapsed to constant predictions and count. 1 of 5 runs of "
            "Base has collapsed to constant predictions and counts."
        )
        chosen = replace(row, chosen_among=9, reference_chosen_among=3)
        assert conclusion(chosen) == (
            f"{conclusion(row)} The mean of I-STAR is biased upwards by the choice among 9 configurations on the "
            "reported set. The mean of Base is biased upwards by the choice among 3 configurations on the reported set."
        )
        assert verdict(collapsed) is verdict(chosen) is verdict(row)
        is_loss = replace(row, chosen_among=2, lower_is_better=True)
        assert "I-STAR is biased downwards by the choice among 2" in conclusion(is_loss)


def test_the_summary() -> None:
    rows = [ROW, replace(ROW, p_value=0.5, collapsed=2), replace(ROW, p_value=0.9), replace(ROW, pairs=1, collapsed=1)]
    assert summary(rows) == (
        "Of 4 comparisons, the method is better in 1, no difference was found in 2, nothing can be concluded in 1. "
        "Collapsed runs of methods: 3."
    )
    assert "worse" in summary([replace(ROW, difference=-1.0, interval=(-2.0, -0.1))])
    assert not COMPARATIVES.search(summary(rows[1:]))
    assert summary([]) == "There is no comparison."
    assert summary(rows[1:3]).startswith("In all 2 comparisons, no difference was found. Collapsed")
    assert summary([replace(ROW, pairs=1)]) == "In the only comparison, nothing can be concluded."


def test_a_table_from_scores_to_sentences() -> None:
    """Of three methods without an effect and one with a large effect, only the last one is better after correction."""
    random = np.random.default_rng(11)
    base = random.normal(60, 1, 8)
    scores = {name: base + random.normal(shift, 1, 8) for name, shift in (("A", 0), ("B", 0), ("C", 0), ("D", 4))}
    differences = {name: values - base for name, values in scores.items()}
    adjusted = holm([t_test(values) for values in differences.values()]).adjusted
    rows = [
        PairedComparison(
            name, "rte", 8, float(values.mean()), t_interval(values), p,
            smallest_difference(float(values.std(ddof=1)), 8),
        )
        for (name, values), p in zip(differences.items(), adjusted, strict=True)
    ]  # fmt: skip
    assert [verdict(row) for row in rows] == [Verdict.NO_DIFFERENCE] * 3 + [Verdict.BETTER]


@pytest.mark.parametrize(
    "changes", [{"p_value": 1.2}, {"p_value": math.nan}, {"difference": math.nan}, {"interval": (2.0, 3.0)}]
)
def test_numbers_out_of_range(changes) -> None:
    with pytest.raises(UserError, match="I-STAR on rte: "):
        replace(ROW, **changes)


def test_alpha_out_of_range() -> None:
    with pytest.raises(UserError, match="alpha is 5"):
        conclusion(ROW, alpha=5)
