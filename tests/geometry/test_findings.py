import math
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats

from istar.geometry.collect.measures_file import Measurements
from istar.geometry.show.compare import MeasuredModel
from istar.geometry.show.comparison_findings import describe_comparison
from istar.geometry.show.findings import describe_findings
from tests.geometry.test_model_differences import make_model

USUAL_MEASURES = {
    "tokens": 10_000.0,
    "isoscore": 0.3,
    "participation_ratio": 231.0,
    "inter_sim": 0.2,
    "average_norm": 10.0,
    "largest_variance_share": 0.01,
    "largest_kurtosis": 5.0,
}


def make_measurements(
    layers: dict[str, dict[str, float]], extremes: Any = None, partition: tuple[float, float] = (0.95, 0.99)
) -> Measurements:
    """Return measurements of a model; `layers` has the measures that are unusual, by layer and name."""
    measures_by_tap = {
        tap: {**USUAL_MEASURES, **layers.get(tap, {})} for tap in ("embeddings", "layer_1", "layer_2", "final_norm")
    }
    matrix_measures = {"dimensions": 768}
    raw, centered = ({**matrix_measures, "partition_isotropy_both": value} for value in partition)
    return Measurements(
        model={"name": "model", "revision": None},
        weights="",
        settings={},
        sources={"text": measures_by_tap},
        spectra={},
        matrices={"input": {"raw": raw, "centered": centered}},
        final_norm=None,
        extremes={"text": extremes or {}},
    )


def describe_unusual(measured: Measurements) -> list[str]:
    """Return the sentences on a model without the one on all layers."""
    return [sentence for sentence in describe_findings(measured) if not sentence.startswith("In all layers")]


def test_nothing_is_unusual() -> None:
    assert describe_findings(make_measurements({"layer_2": {"isoscore": 0.4, "participation_ratio": 307.8}})) == [
        "No measure is unusual.",
        "In all layers, the variance is spread as if over 231 to 308 of 768 directions (IsoScore 0.30 to 0.40; 1 is "
        "evenly over all, 0 a single one), and two random tokens have an average cosine of 0.20.",
    ]


def test_the_sentence_on_all_layers_names_its_texts() -> None:
    measured = make_measurements({})
    [measures_by_tap] = measured.sources.values()
    other_measures = {tap: {**measures, "inter_sim": 0.9} for tap, measures in measures_by_tap.items()}
    several = replace(measured, sources={"text": measures_by_tap, "other": other_measures, "combined": measures_by_tap})
    assert "In all layers, over all texts together, the variance" in describe_findings(several)[-1]
    # The texts alone have other ranges, which the sentence does not claim to hold for.
    assert describe_findings(several)[-1].endswith("an average cosine of 0.20.")
    undefined = make_measurements({tap: {"inter_sim": math.nan} for tap in measures_by_tap})
    assert describe_findings(undefined) == ["No measure is unusual."]


def test_the_final_normalization_may_change_the_norm() -> None:
    assert describe_unusual(make_measurements({"final_norm": {"average_norm": 500.0}})) == ["No measure is unusual."]


def test_the_width_is_that_of_the_hidden_states() -> None:
    """The embeddings of some models, such as ALBERT, are narrower than their hidden states."""
    measured = make_measurements({tap: {"tokens": 7_000.0} for tap in ("embeddings", "layer_1")})
    assert "There are only 7,000 tokens for 768 dimensions" in describe_findings(measured)[-1]
    narrow = replace(measured, spectra={"text": {"layer_1": {"raw": [1.0] * 128}}})
    assert "of 128 directions" in describe_findings(narrow)[-1]


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (
            {"layer_2": {"largest_variance_share": 0.614}, "layer_1": {"largest_variance_share": 0.2}},
            "One dimension holds 61% of the variance of layer 2.",
        ),
        (
            {"final_norm": {"inter_sim": 0.934}},
            "All states of the final norm share a direction: two random tokens have an average cosine of 0.93.",
        ),
        (
            {"layer_1": {"isoscore": 0.012, "participation_ratio": 10.2}},
            "The variance of layer 1 is concentrated: IsoScore 0.012, as if it were spread over 10.2 of 768 "
            "directions.",
        ),
        (
            {"embeddings": {"average_norm": 0.5}, "layer_2": {"average_norm": 42}},
            "The average norm is 84 times as large in layer 2 as in the embeddings: 42 and 0.5.",
        ),
        (
            {"layer_1": {"largest_kurtosis": 4321.0}},
            "A dimension of layer 1 has rare, very large values: its excess kurtosis is 4,321.",
        ),
    ],
)
def test_one_unusual_measure(layers: dict[str, dict[str, float]], sentence: str) -> None:
    assert describe_unusual(make_measurements(layers)) == [sentence]


def test_rogue_dimensions() -> None:
    cosines = {
        "layer_1": {"sample_inter_sim": 0.95, "sample_inter_sim_without_top_5": 0.8},
        "layer_2": {"sample_inter_sim": 0.62, "sample_inter_sim_without_top_5": 0.11},
    }
    assert describe_unusual(make_measurements(cosines)) == [
        "Five dimensions carry much of the common direction of layer 2: without them, the average cosine of a sample "
        "of tokens falls from 0.62 to 0.11."
    ]
    cosines["layer_2"]["sample_inter_sim_without_top_5"] = 0.4
    assert "No measure is unusual." in describe_unusual(make_measurements(cosines))[0]


def test_massive_activations() -> None:
    def make_activation(value: float, ratio: float | None) -> dict[str, Any]:
        return {"value": value, "dimension": 1415, "token": 1, "position": 0, "ratio": ratio, "text": "x"}

    massive = {
        "text": {
            "layer_1": [make_activation(400, 1_100)],
            "layer_2": [make_activation(-2_446, 8_765)],
            "final_norm": [],
        }
    }
    assert describe_unusual(replace(make_measurements({}), massive=massive)) == [
        "Layer 2 has massive activations: -2,446 in dimension 1415 at position 0 is 8,765 times the median magnitude."
    ]


def test_the_first_position() -> None:
    def make_columns(first_norm: float, first_position: int = 0) -> dict[str, list[float]]:
        return {
            "first": [first_position, 1, 2],
            "last": [first_position, 1, 3],
            "tokens": [10, 10, 30],
            "norm": [first_norm, 8.0, 4.0],
        }

    # The tokens at the other positions have an average norm of 5.
    by_position = {"text": {"layer_1": make_columns(12), "layer_2": make_columns(200)}}
    assert describe_unusual(replace(make_measurements({}), by_position=by_position)) == [
        "The first token of the model's input has 40 times the average norm of the others in layer 2."
    ]
    # There is no finding if position 0 is not measured, as when it holds a special token.
    without_position_0 = {"text": {"layer_1": make_columns(200, first_position=1)}}
    assert (
        "No measure is unusual." in describe_unusual(replace(make_measurements({}), by_position=without_position_0))[0]
    )


def test_a_dimension_far_from_zero() -> None:
    def make_extreme(dimension: int, offset: float) -> dict[str, float]:
        return {"dimension": dimension, "mean_by_typical_deviation": offset}

    extremes = {
        "layer_1": [make_extreme(3, 12.0), make_extreme(4, float("nan"))],
        "layer_2": [make_extreme(308, -42.4)],
    }
    # The page counts dimensions from 5 deviations on as outliers.
    for offset, is_outlier in ((4.9, False), (5.1, True)):
        [sentence] = describe_unusual(make_measurements({}, {"layer_1": [make_extreme(3, offset)]}))
        assert ("Dimension 3 of layer 1 is an outlier" in sentence) == is_outlier
    assert describe_unusual(make_measurements({}, extremes)) == [
        "Dimension 308 of layer 2 is an outlier: its mean is 42 typical standard deviations from 0."
    ]


def test_embeddings_with_a_common_shift() -> None:
    assert describe_unusual(make_measurements({}, partition=(0.12, 0.98))) == [
        "The input embeddings are isotropic but for a common shift: centering raises I(W) from 0.12 to 0.98."
    ]
    # Embeddings that stay anisotropic are not only shifted.
    assert describe_unusual(make_measurements({}, partition=(0.12, 0.5))) == [
        "The input embeddings are anisotropic: I(W), which is at most 1, is 0.12, and 0.50 after centering."
    ]
    assert describe_unusual(make_measurements({}, partition=(0.6, 0.98))) == ["No measure is unusual."]


def test_the_most_unusual_come_first_and_tokens_last() -> None:
    unusual_measures = {
        "largest_variance_share": 0.9,
        "inter_sim": 0.6,
        "isoscore": 0.04,
        "participation_ratio": 31.0,
        "largest_kurtosis": 200.0,
        "average_norm": 1000.0,
    }
    tokens_by_tap = {tap: {"tokens": 7679.0} for tap in ("embeddings", "layer_2", "final_norm")}
    findings = describe_unusual(make_measurements({**tokens_by_tap, "layer_1": {**unusual_measures, "tokens": 7679.0}}))
    # They are 10, 9, 1.41, 1.25 and 1.2 times the thresholds; only the first four findings are shown.
    assert [line.split()[0:3] for line in findings] == [
        ["The", "average", "norm"],
        ["One", "dimension", "holds"],
        ["A", "dimension", "of"],
        ["The", "variance", "of"],
        ["There", "are", "only"],
    ]
    assert findings[-1].startswith("There are only 7,679 tokens for 768 dimensions")
    assert len(describe_unusual(make_measurements({tap: {"tokens": 7680.0} for tap in tokens_by_tap}))) == 1


def test_undefined_measures_are_passed_over() -> None:
    nan = float("nan")
    measures_by_tap = {tap: {"inter_sim": nan, "largest_kurtosis": nan} for tap in ("embeddings", "layer_1", "layer_2")}
    assert describe_unusual(make_measurements({**measures_by_tap, "layer_1": {"largest_variance_share": 0.5}})) == [
        "One dimension holds 50% of the variance of layer 1."
    ]


def make_compared_model(
    label: str, *isoscores: float, error: float = 0.01, outliers: float = 0.0, **options: Any
) -> MeasuredModel:
    """Return a model with an IsoScore for the embeddings and each layer, and 1 - IsoScore as its InterSim."""
    taps = ("embeddings", *(f"layer_{index}" for index in range(1, len(isoscores))))
    model = make_model(label, taps, with_replicates=False, error=error, **options)
    for measures, isoscore in zip(model.measurements.all_texts.values(), isoscores, strict=True):
        measures |= {"isoscore": isoscore, "inter_sim": 1 - isoscore, "outlier_dimensions": 0.0}
    model.measurements.all_texts[taps[-1]]["outlier_dimensions"] = outliers
    return model


def test_models_are_ranked_and_compared_layer_by_layer() -> None:
    first, second, deep = (
        make_compared_model("first", 0.2, 0.5, 0.30),
        make_compared_model("second", 0.25, 0.1, 0.31, outliers=3),
        make_compared_model("deep", 0.2, 0.9, 0.9, 0.8, outliers=1),
    )
    # The error of a difference is that of both models, and Student's distribution has 9 degrees of freedom.
    half_width = scipy.stats.t.ppf(0.975, 9) * math.sqrt(2) * 0.01
    sentences = describe_comparison([first, second, deep])
    assert sentences == [
        "Of all last layers, the variance is spread most evenly in that of deep and least evenly in that of first: "
        f"IsoScore is 0.8 and 0.3. The 95% interval of the difference, {0.5 - half_width:.3g} to "
        f"{0.5 + half_width:.3g}, does not contain 0, so that the choice of the documents does not explain it.",
        "Of all last layers, two random tokens are most alike in that of first and least alike in that of deep: their "
        "average cosine, InterSim, is 0.7 and 0.2. The 95% interval of the difference, "
        f"{0.5 - 2 * half_width:.3g} to {0.5 + 2 * half_width:.3g}, does not contain 0, so that the choice of the "
        "documents does not explain it.",
        # The deep model has other layers than the first.
        "Compared with first layer by layer, the largest difference of IsoScore whose 95% interval does not contain 0 "
        f"is in layer 1 of second: 0.1 instead of 0.5 (interval: {-0.4 - half_width:.3g} to {-0.4 + half_width:.3g}).",
        "second (at most 3, in layer 2) and deep (at most 1, in layer 3) have outlier dimensions, whose mean is more "
        "than 5 typical standard deviations from 0; first has none.",
    ]


def test_a_difference_within_its_interval_is_no_finding() -> None:
    first, second = make_compared_model("first", 0.2, 0.3), make_compared_model("second", 0.21, 0.31)
    scores, cosines, layers, outliers = describe_comparison([first, second])
    assert scores.startswith("The variance of the last layer is spread more evenly in second than in first: IsoScore")
    assert cosines.startswith("Two random tokens of the last layer are more alike in first than in second")
    for sentence in (scores, cosines):
        assert sentence.endswith("contains 0, so that the choice of the documents may explain it.")
    assert layers == (
        "In no layer does IsoScore of second differ from that of first by more than the choice of the documents may "
        "explain: all 95% intervals of the differences contain 0."
    )
    assert outliers.startswith("No model has outlier dimensions")


def test_without_errors_there_is_no_interval() -> None:
    models = [make_compared_model(label, 0.2, score, error=math.nan) for label, score in (("a", 0.3), ("b", 0.4))]
    sentences = describe_comparison(models)
    assert [sentence.endswith("The difference has no interval.") for sentence in sentences] == [True, True, False]


def test_models_of_other_tokens_are_not_ranked() -> None:
    first, second = make_compared_model("first", 0.2, 0.3), make_compared_model("second", 0.2, 0.3)
    other_tokens = make_compared_model("other", 0.9, 0.9, limit=100)
    other_texts = make_compared_model("texts", 0.9, 0.9, hashes={"text": "4567"})
    sentences = describe_comparison([first, second, other_tokens, other_texts])
    assert sentences[-1] == ("other and texts are not compared here with first, because other tokens were measured.")
    assert not any("other" in sentence or "evenly" in sentence for sentence in sentences[:-1])
    alone = describe_comparison([first, other_tokens])
    assert len(alone) == 2
    assert alone[-1] == "other is not compared here with first, because other tokens were measured."
