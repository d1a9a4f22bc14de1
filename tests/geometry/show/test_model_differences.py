"""Differences between models with intervals: the formulas, what is compared, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from istar.geometry.show import compare
from istar.geometry.show.compare import MeasuredModel
from tests.geometry.synthetic import make_measurements

GROUPS = 10
SETTINGS = {
    "texts": {"text": "a.txt"}, "groups": GROUPS, "documents": "separate", "special_tokens": "exclude", "limit": None,
    "length": 16,
}  # fmt: skip


def make_model(
    label: str = "first", taps: tuple[str, ...] = ("embeddings", "layer_1", "layer_2"), seed: int = 0,
    hashes: dict[str, str] | None = None, with_replicates: bool = True, error: float = 0.02, **settings: Any,
) -> MeasuredModel:  # fmt: skip
    """Return a model with random IsoScore and InterSim, their errors, and their values without each group."""
    random = np.random.default_rng(seed)
    measures_by_tap, replicates_by_tap = {}, {}
    for tap in taps:
        isoscore, inter_sim = random.random(2)
        measures_by_tap[tap] = {
            "points": 500.0, "isoscore": isoscore, "isoscore_error": error, "inter_sim": inter_sim,
            "inter_sim_error": 2 * error, "two_nn": 5.0, "two_nn_error": 0.1,
        }  # fmt: skip
        replicates_by_tap[tap] = {
            "points": [450.0] * GROUPS,
            "isoscore": (isoscore + 0.01 * random.normal(size=GROUPS)).tolist(),
            "inter_sim": (inter_sim + 0.01 * random.normal(size=GROUPS)).tolist(),
        }
    measurements = make_measurements(
        model={"name": label, "revision": None}, settings={**SETTINGS, **settings}, sources={"text": measures_by_tap},
        replicates={"text": replicates_by_tap} if with_replicates else {},
        text_hashes={"text": "0123"} if hashes is None else hashes,
    )  # fmt: skip
    return MeasuredModel(label, measurements)


def find_difference(values: Any, errors: tuple[float, float], replicates: Any = None) -> dict[str, Any]:
    """Return the difference of IsoScore of two last layers with these values, errors, and values without each group."""
    num_groups = len(replicates[0]) if replicates else GROUPS
    models = []
    for index, name in enumerate(("first", "other")):
        model = make_model(name, with_replicates=replicates is not None, groups=num_groups)
        model.last_layer_measures.update(isoscore=values[index], isoscore_error=errors[index])
        if replicates:
            model.measurements.replicates["text"]["layer_2"]["isoscore"] = replicates[index]
        models.append(model)
    row = compare.find_last_difference(models[0], models[1], "isoscore")
    assert row is not None
    return row


def test_the_paired_error_is_that_of_the_mean_of_pseudo_values() -> None:
    """The replicates are computed from group means; the jackknife error of a mean is that of the paired t-test."""
    random = np.random.default_rng(0)
    first, second, common = random.normal(size=(3, 7))
    replicates = [((values.sum() - values) / 6).tolist() for values in (first, second)]
    row = find_difference((0.1, 0.4), (1.0, 1.0), replicates)
    assert row["error"] == pytest.approx(scipy.stats.sem(second - first), rel=1e-10)
    assert row["high"] - row["difference"] == pytest.approx(scipy.stats.t.ppf(0.975, 6) * row["error"], rel=1e-10)
    # What both models have in common has no influence.
    shared = [(np.array(values) + common).tolist() for values in replicates]
    assert find_difference((0.1, 0.4), (1.0, 1.0), shared)["error"] == pytest.approx(row["error"], rel=1e-10)
    assert find_difference((0.1, 0.4), (1.0, 1.0), [replicates[0]] * 2)["error"] == 0


def test_independent_errors_add_as_squares_and_the_smaller_number_of_groups_counts() -> None:
    models = make_model(error=0.3), make_model("other", groups=4, error=0.4)
    row = compare.find_last_difference(*models, "isoscore")
    assert row is not None
    assert row["error"] == pytest.approx(0.5, rel=1e-12)
    assert row["high"] - row["difference"] == pytest.approx(scipy.stats.t.ppf(0.975, 3) * 0.5, rel=1e-10)


@pytest.mark.slow
def test_intervals_of_paired_differences_cover_the_true_difference() -> None:
    """Both models read the same documents, so that the groups differ in nearly the same way for both."""
    random = np.random.default_rng(2)
    num_covered = [0, 0]
    num_rounds = 1_000
    for _ in range(num_rounds):
        common_part = random.normal(size=GROUPS)
        group_means = np.stack([common_part, common_part + 0.5]) + 0.2 * random.normal(size=(2, GROUPS))
        replicates = (group_means.sum(1, keepdims=True) - group_means) / (GROUPS - 1)
        errors = scipy.stats.sem(group_means, axis=1).tolist()
        for index, stored in enumerate((replicates.tolist(), None)):
            row = find_difference(group_means.mean(1), errors, stored)
            num_covered[index] += row["low"] <= 0.5 <= row["high"]
    assert 0.93 <= num_covered[0] / num_rounds <= 0.97
    assert num_covered[1] / num_rounds > 0.99


def test_rows_of_models_of_equal_depth_have_each_layer() -> None:
    first, other = make_model(), make_model("other", seed=1)
    rows = list(compare.compute_differences(first, other))
    assert [(row["layer"], row["measure"]) for row in rows] == [
        (tap, name) for tap in ("embeddings", "layer_1", "layer_2") for name in ("inter_sim", "isoscore")
    ]
    assert [row["is_last"] for row in rows] == [False] * 4 + [True] * 2
    last_row = rows[-1]
    other_value, first_value = (model.last_layer_measures["isoscore"] for model in (other, first))
    assert (last_row["value"], last_row["value_of_first"], last_row["difference"]) == (
        other_value, first_value, other_value - first_value,
    )  # fmt: skip
    replicate_differences = np.subtract(
        *(model.measurements.replicates["text"]["layer_2"]["isoscore"] for model in (other, first))
    )
    expected_error = math.sqrt((GROUPS - 1) ** 2 / GROUPS) * np.std(replicate_differences, ddof=1)
    assert last_row["error"] == pytest.approx(expected_error, rel=1e-9)
    half_width = scipy.stats.t.ppf(0.975, GROUPS - 1) * expected_error
    assert (last_row["low"], last_row["high"]) == pytest.approx(
        (other_value - first_value - half_width, other_value - first_value + half_width), rel=1e-9
    )


def test_models_of_other_depth_are_compared_at_the_last_layer_before_a_final_norm() -> None:
    other = make_model("other", ("embeddings", "layer_1", "final_norm"), seed=1)
    rows = list(compare.compute_differences(make_model(), other))
    assert {(row["layer"], row["is_last"]) for row in rows} == {("layer_1", True)}
    assert rows[0]["value_of_first"] == make_model().last_layer_measures["inter_sim"]
    # If both models have a final normalization, they are compared there, too, but it is not the last layer.
    taps = ("embeddings", "layer_1", "final_norm")
    rows = list(compare.compute_differences(make_model(taps=taps), other))
    assert {row["layer"]: row["is_last"] for row in rows} == {
        "embeddings": False, "layer_1": True, "final_norm": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("first", "other", "method"),
    [
        ({}, {}, "paired"),
        # The names and the paths of the texts do not matter.
        ({}, {"texts": {"x": "b.txt"}, "hashes": {"x": "0123"}}, "paired"),
        ({"length": 8}, {}, "paired"),
        ({"limit": 100}, {"limit": 100}, "paired"),
        ({"with_replicates": False}, {}, "independent"),
        ({"groups": 5}, {}, "independent"),
        ({"documents": "packed"}, {"documents": "packed"}, "independent"),
    ],
)
def test_the_method_depends_on_documents_and_groups(first: dict[str, Any], other: dict[str, Any], method: str) -> None:
    models = make_model(**first), make_model("other", seed=1, **other)
    assert compare.explain_no_differences(*models) == ""
    assert compare.choose_error_method(*models) == method
    rows = list(compare.compute_differences(*models))
    assert {row["method"] for row in rows} == {method}
    if method == "independent":
        assert rows[-1]["error"] == pytest.approx(math.hypot(0.02, 0.02), rel=1e-12)


def test_documents_shuffled_otherwise_are_not_paired() -> None:
    first, other = make_model(shuffle_buffer=8), make_model("other", seed=1, shuffle_buffer=8)
    assert compare.choose_error_method(first, other) == "paired"
    other.measurements.settings["seed"] = 1
    assert compare.choose_error_method(first, other) == "independent"
    assert "(shuffle_buffer)" in compare.explain_no_differences(first, make_model("third", shuffle_buffer=9))


def test_with_a_limit_the_groups_must_have_the_same_tokens() -> None:
    first, other = make_model(limit=100), make_model("other", limit=100)
    other.measurements.replicates["text"]["embeddings"]["points"][3] += 1
    assert compare.choose_error_method(first, other) == "independent"


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
            "other has no standard errors; measure it with groups, over at least as many documents as groups.",
        ),
    ],
)
def test_without_errors_or_the_same_texts_there_is_a_sentence_and_no_number(other: dict[str, Any], reason: str) -> None:
    models = make_model(), make_model("other", **other)
    assert compare.explain_no_differences(*models) == f"Differences of other from first are not computed: {reason}"
    assert list(compare.compute_differences(*models)) == []
