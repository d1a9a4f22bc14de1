"""Differences between models with intervals: the formulas, what is compared, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from istar.geometry import model_differences
from istar.geometry.compare import MeasuredModel
from istar.geometry.measures_file import Measurements

GROUPS = 10
SETTINGS = {
    "texts": {"text": "a.txt"}, "groups": GROUPS, "documents": "separate", "special_tokens": "exclude", "limit": None,
    "length": 16,
}  # fmt: skip


def subject(
    label: str = "first",
    taps: tuple[str, ...] = ("embeddings", "layer_1", "layer_2"),
    seed: int = 0,
    hashes: dict[str, str] | None = None,
    with_replicates: bool = True,
    error: float = 0.02,
    **settings: Any,
) -> MeasuredModel:
    """Return a model with IsoScore and InterSim, their errors, and their values without each group."""
    random = np.random.default_rng(seed)
    figures, replicates = {}, {}
    for tap in taps:
        isoscore, cosine = random.random(2)
        figures[tap] = {
            "tokens": 500.0, "isoscore": isoscore, "isoscore_error": error, "inter_sim": cosine,
            "inter_sim_error": 2 * error, "two_nn": 5.0, "two_nn_error": 0.1,
        }  # fmt: skip
        replicates[tap] = {
            "tokens": [450.0] * GROUPS,
            "isoscore": (isoscore + 0.01 * random.normal(size=GROUPS)).tolist(),
            "inter_sim": (cosine + 0.01 * random.normal(size=GROUPS)).tolist(),
        }
    measured = Measurements(
        model={"name": label, "revision": None},
        weights="",
        settings={**SETTINGS, **settings},
        sources={"text": figures},
        spectra={},
        matrices={},
        final_norm=None,
        replicates={"text": replicates} if with_replicates else {},
        text_hashes={"text": "0123"} if hashes is None else hashes,
    )
    return MeasuredModel(label, measured)


def test_the_paired_error_is_that_of_the_mean_of_pseudo_values() -> None:
    """Values without each group, made from group means: the jackknife of a mean is the paired t interval."""
    random = np.random.default_rng(0)
    first, second = random.normal(size=(2, 7))
    without = [(values.sum() - values) / 6 for values in (first, second)]
    found = model_differences.paired_difference(first.mean(), second.mean(), *(values.tolist() for values in without))
    test = scipy.stats.ttest_rel(second, first)
    low, high = test.confidence_interval(0.95)
    assert found.value == pytest.approx(np.mean(second - first), rel=1e-12)
    assert found.error == pytest.approx(scipy.stats.sem(second - first), rel=1e-10)
    assert found.value - found.half_width == pytest.approx(low, rel=1e-10)
    assert found.value + found.half_width == pytest.approx(high, rel=1e-10)


def test_the_paired_error_ignores_what_both_models_have_in_common() -> None:
    random = np.random.default_rng(1)
    first, second, common = random.normal(size=(3, 8))
    alone = model_differences.paired_difference(0, 1, first.tolist(), second.tolist())
    shifted = model_differences.paired_difference(0, 1, (first + common).tolist(), (second + common).tolist())
    assert shifted.error == pytest.approx(alone.error, rel=1e-10)
    same = model_differences.paired_difference(2.0, 2.0, first.tolist(), first.tolist())
    assert (same.value, same.error) == (0, 0)


def test_independent_errors_add_as_squares_and_the_smaller_number_of_groups_counts() -> None:
    found = model_differences.independent_difference(1.0, 3.0, (0.3, 0.4), (10, 4))
    assert (found.value, found.error, found.method) == (2.0, pytest.approx(0.5, rel=1e-12), "independent")
    assert found.half_width == pytest.approx(0.5 * scipy.stats.t.ppf(0.975, 3), rel=1e-12)


def test_intervals_of_paired_differences_cover_the_true_difference() -> None:
    """Two models measure the same documents, whose differences are much alike in both."""
    random = np.random.default_rng(2)
    covered = {"paired": 0, "independent": 0}
    rounds = 1_000
    for _ in range(rounds):
        common = random.normal(size=GROUPS)
        groups = np.stack([common, common + 0.5]) + 0.2 * random.normal(size=(2, GROUPS))
        without = (groups.sum(1, keepdims=True) - groups) / (GROUPS - 1)
        first, second = groups.mean(1)
        errors = tuple(map(float, scipy.stats.sem(groups, axis=1)))
        for found in (
            model_differences.paired_difference(first, second, without[0].tolist(), without[1].tolist()),
            model_differences.independent_difference(first, second, (errors[0], errors[1]), (GROUPS, GROUPS)),
        ):
            covered[found.method] += abs(found.value - 0.5) <= found.half_width
    assert 0.93 <= covered["paired"] / rounds <= 0.97
    assert covered["independent"] / rounds > 0.99


def test_rows_of_models_of_equal_depth_have_each_layer() -> None:
    first, other = subject(), subject("other", seed=1)
    rows = list(model_differences.compute_differences(first, other))
    assert [(row["layer"], row["measure"]) for row in rows] == [
        (tap, name) for tap in ("embeddings", "layer_1", "layer_2") for name in ("inter_sim", "isoscore")
    ]
    assert [row["is_last"] for row in rows] == [False] * 4 + [True] * 2
    last = rows[-1]
    after, before = (one.last_layer_measures["isoscore"] for one in (other, first))
    assert (last["value"], last["value_of_first"], last["difference"]) == (after, before, after - before)
    changes = np.subtract(*(one.measurements.replicates["text"]["layer_2"]["isoscore"] for one in (other, first)))
    error = math.sqrt((GROUPS - 1) ** 2 / GROUPS) * np.std(changes, ddof=1)
    assert last["error"] == pytest.approx(error, rel=1e-9)
    half_width = scipy.stats.t.ppf(0.975, GROUPS - 1) * error
    assert (last["low"], last["high"]) == pytest.approx(
        (after - before - half_width, after - before + half_width), rel=1e-9
    )


def test_models_of_other_depth_are_compared_at_the_last_layer_before_a_final_norm() -> None:
    other = subject("other", ("embeddings", "layer_1", "final_norm"), seed=1)
    rows = list(model_differences.compute_differences(subject(), other))
    assert {(row["layer"], row["is_last"]) for row in rows} == {("layer_1", True)}
    assert rows[0]["value_of_first"] == subject().last_layer_measures["inter_sim"]
    # Two models with a final normalization are compared there, too, but it is not the last layer.
    taps = ("embeddings", "layer_1", "final_norm")
    rows = list(model_differences.compute_differences(subject(taps=taps), other))
    assert {row["layer"]: row["is_last"] for row in rows} == {
        "embeddings": False, "layer_1": True, "final_norm": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("first", "other", "method"),
    [
        ({}, {}, "paired"),
        # Names and paths do not matter.
        ({}, {"texts": {"x": "b.txt"}, "hashes": {"x": "0123"}}, "paired"),
        ({"length": 8}, {}, "paired"),
        ({"limit": 100}, {"limit": 100}, "paired"),
        ({"with_replicates": False}, {}, "independent"),
        ({"groups": 5}, {}, "independent"),
        ({"documents": "packed"}, {"documents": "packed"}, "independent"),
    ],
)
def test_the_method_follows_from_documents_and_groups(
    first: dict[str, Any], other: dict[str, Any], method: str
) -> None:
    pair = subject(**first), subject("other", seed=1, **other)
    assert model_differences.explain_no_differences(*pair) == ""
    assert model_differences.choose_error_method(*pair) == method
    rows = list(model_differences.compute_differences(*pair))
    assert {row["method"] for row in rows} == {method}
    if method == "independent":
        assert rows[-1]["error"] == pytest.approx(math.hypot(0.02, 0.02), rel=1e-12)


def test_with_a_limit_the_groups_must_have_the_same_tokens() -> None:
    first, other = subject(limit=100), subject("other", limit=100)
    other.measurements.replicates["text"]["embeddings"]["tokens"][3] += 1
    assert model_differences.choose_error_method(first, other) == "independent"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"hashes": {"text": "4567"}}, "they were measured over different texts."),
        ({"hashes": {}, "texts": {"text": "b.txt"}}, "they were measured over different texts."),
        ({"limit": 7}, "they were measured over different tokens of the texts (limit)."),
        (
            {"special_tokens": "include", "documents": "packed"},
            "they were measured over different tokens of the texts (documents, special_tokens).",
        ),
        (
            {"error": math.nan},
            "other has no standard errors; measure it with --groups over at least as many documents as groups.",
        ),
    ],
)
def test_without_errors_or_the_same_texts_there_is_a_sentence_and_no_number(other: dict[str, Any], reason: str) -> None:
    pair = subject(), subject("other", **other)
    assert model_differences.explain_no_differences(*pair) == f"No differences between other and first: {reason}"
    assert list(model_differences.compute_differences(*pair)) == []
