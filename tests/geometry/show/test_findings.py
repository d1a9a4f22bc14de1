"""The lines with which a page begins: flags of a model, and differences between models and checkpoints."""

import math
import re
from typing import Any

import numpy as np
import pytest
import scipy.stats

import istar
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.show.compare import MeasuredModel
from istar.geometry.show.findings import describe_findings, find_flags
from istar.geometry.show.measured_training import MeasuredTraining, list_last_checkpoints
from istar.measures.catalogue import MEASURES
from tests.geometry.show.test_axis_figures import make_training
from tests.geometry.synthetic import TAPS, make_measurements

T_QUANTILE = scipy.stats.t.ppf(0.975, 9)
USUAL_MEASURES = {
    "points": 10_000.0, "isoscore": 0.3, "participation_ratio": 7.9, "inter_sim": 0.2, "average_norm": 10.0,
    "largest_variance_share": 0.01, "largest_kurtosis": 5.0, "sample_inter_sim": 0.5,
    "sample_inter_sim_without_top_5": 0.3, "outlier_dimensions": 0.0, "massive_activations": 0.0,
    "largest_activation_ratio": 20.0,
}  # fmt: skip


def make_usual(layers: dict[str, dict[str, float]] | None = None, partition: tuple[float, float] = (0.95, 0.99),
               **fields: Any) -> Measurements:  # fmt: skip
    """Return measurements of a model; `layers` has the measures that are unusual, by layer and name."""
    source = {tap: {**USUAL_MEASURES, **(layers or {}).get(tap, {})} for tap in TAPS}
    raw, centered = ({**make_measurements().matrices["input"]["raw"], "partition_isotropy_both": x} for x in partition)
    matrices = {"input": {"raw": raw, "centered": centered}}
    return make_measurements(**{"sources": {"text": source}, "matrices": matrices, "by_position": {}, **fields})


def describe_single(measured: Measurements) -> list[str]:
    return describe_findings([MeasuredModel("m", measured)])


def describe_over(trainings: list[MeasuredTraining]) -> list[str]:
    return describe_findings(list_last_checkpoints(trainings), trainings)


def test_a_usual_model() -> None:
    assert describe_single(make_usual()) == [
        "No measure is unusual.",
        "In all layers, the variance is spread as if over 8 of 24 directions (IsoScore 0.30; 1 is evenly over all, 0 a "
        "single one), and two random tokens have an average cosine of 0.20.",
    ]
    # What normalizes is there to change the norm.
    states = {"block": 10.0, "block.norm2": 500.0, "encoder.LayerNorm": 0.1, "final_norm": 500.0, "pooled": 1.0}
    norms = {state: {**USUAL_MEASURES, "average_norm": norm} for state, norm in states.items()}
    assert find_flags(make_usual(sources={"text": norms}, spectra={}, kind="places")) == []
    undefined = dict.fromkeys(USUAL_MEASURES, math.nan) | {"points": 10_000.0}
    assert describe_single(make_usual(dict.fromkeys(TAPS, undefined))) == ["No measure is unusual."]


UNUSUAL = {
    "largest_variance_share": ({"largest_variance_share": 0.61}, "One dimension has 61% of the variance of layer 2."),
    "inter_sim": ({"inter_sim": 0.71}, "All hidden states of layer 2 share a direction: .* an average cosine of 0.71."),
    "isoscore": ({"isoscore": 0.01, "participation_ratio": 1.23}, "The variance of layer 2 .* over 1.2 of 24 direct"),
    "average_norm": ({"average_norm": 120.0}, "The average norm is 12 times as large in layer 2 as in the layer"),
    "largest_kurtosis": ({"largest_kurtosis": 2_345.0}, "A dimension of layer 2 .* its excess kurtosis is 2,345."),
    "sample_inter_sim_without_top_5": ({"sample_inter_sim_without_top_5": 0.1}, "Five .* from 0.50 to 0.10."),
    "outlier_dimensions": ({"outlier_dimensions": 3.0}, "3 of 24 dimensions of layer 2 have a mean far from 0: more"),
    "massive_activations": (
        {"massive_activations": 4.0, "largest_activation_ratio": 2_000.0}, "Layer 2 .* 2,000 times the median magnitude"
    ),
    "near_duplicates": ({"near_duplicates": 0.2}, "20% of the compared tokens of layer 2 have a near duplicate"),
    "hubness": ({"hubness": 60.0}, "A few tokens of layer 2 are near neighbours of very many .*: the hubness is 60."),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_one_unusual_measure(name: str) -> None:
    measures, line = UNUSUAL[name]
    [flag] = find_flags(make_usual({"layer_2": measures}))
    assert re.match(line, flag)


def test_one_dimension_is_singular() -> None:
    [flag] = find_flags(make_usual({"layer_2": {"outlier_dimensions": 1.0}}))
    assert flag.startswith("One dimension of layer 2 has a mean far from 0: more than 5 times the typical")


def test_the_first_token_and_the_embedding_matrices() -> None:
    columns = {"first": [0, 1, 2], "norm": [9.0, 2.0, 1.0], "points": [5, 5, 15]}
    ratio = 9.0 / ((5 * 2.0 + 15 * 1.0) / 20)
    assert find_flags(make_usual(by_position={"text": {"layer_1": columns}})) == [
        f"The first token of each input has {ratio:.0f} times the average norm of the others in layer 1."
    ]
    # Without tokens at position 0, or at other positions, there is nothing to compare.
    for other in ({**columns, "first": [1, 2, 4]}, {"first": [0], "norm": [9.0], "points": [5]}):
        assert find_flags(make_usual(by_position={"text": {"layer_1": other}})) == []
    assert find_flags(make_usual(partition=(0.42, 0.97))) == [
        "The input embeddings are anisotropic: I(W), which is at most 1, is 0.42, and 0.97 after centering."
    ]
    # Every flag of the table is tested.
    assert {measure.name for measure in MEASURES if measure.flag} == {
        *UNUSUAL, "norm_by_position", "partition_isotropy_both",
    }  # fmt: skip


def test_the_most_unusual_come_first_and_there_are_five_lines() -> None:
    layers = {"layer_1": {"inter_sim": 0.6}, "layer_2": {name: v for m, _ in UNUSUAL.values() for name, v in m.items()}}
    measured = make_usual(layers)
    measured.all_texts["embeddings"]["points"] = 100.0
    flags = find_flags(measured)
    names = ("largest_variance_share", "largest_kurtosis", "outlier_dimensions")
    excesses = {
        UNUSUAL[measure.name][1]: UNUSUAL[measure.name][0][measure.name] / measure.flag_at_least
        for measure in MEASURES
        if measure.name in names and measure.flag_at_least
    }
    assert len(flags) == len(UNUSUAL)
    patterns = [pattern for line in flags for pattern in excesses if re.match(pattern, line)]
    assert patterns == sorted(excesses, key=excesses.__getitem__, reverse=True)
    lines = describe_single(measured)
    assert len(lines) == 5
    assert lines[:3] == flags[:3]
    assert lines[4].startswith("There are only 100 tokens for 24 dimensions")


def make_compared(label: str, isoscore: float, inter_sim: float = 0.2, **fields: Any) -> MeasuredModel:
    measures = {"isoscore": isoscore, "inter_sim": inter_sim, "isoscore_error": 0.01}
    return MeasuredModel(label, make_usual({"layer_2": measures, "final_norm": {"isoscore": 0.9}}, **fields))


def test_models_are_ranked_by_their_last_layers_with_intervals() -> None:
    first, second, third = (make_compared(*pair) for pair in (("first", 0.3), ("second", 0.31), ("third", 0.8)))
    half_width = T_QUANTILE * math.sqrt(2) * 0.01
    assert describe_findings([first, second, third]) == [
        "IsoScore of the last layer is largest in third (0.8) and smallest in first (0.3). The 95% interval of the "
        f"difference, 0.5 ± {half_width:.2g}, does not contain 0, so that the choice of the documents does not explain "
        "it."
    ]
    [line] = describe_findings([first, second])
    assert "contains 0, so that the choice of the documents may explain it." in line
    unusual = make_compared("unusual", 0.3, 0.7)
    assert describe_findings([first, unusual])[1:] == [
        "unusual: All hidden states of layer 2 share a direction: two random tokens have an average cosine of 0.70."
    ]
    assert "The difference has no interval." in describe_findings([first, unusual])[0]
    other = make_compared("other", 0.9, text_hashes={"other": "23"})
    note = "other read other tokens than first, so that they are not compared."
    assert describe_findings([first, second, other])[1] == note
    # What is not compared is never the first line.
    assert describe_findings([first, other]) == ["No measure is unusual.", note]
    assert describe_findings([first, first]) == ["No measure is unusual."]


def test_changes_over_a_training() -> None:
    training = make_training()
    lines = describe_over([training])
    first, last = training.values_by_step("layer_2", "isoscore")[0], training.values_by_step("layer_2", "isoscore")[-1]
    half_width = T_QUANTILE * math.sqrt(2) * 0.01
    assert lines[0] == (
        f"IsoScore of the last layer rises from {first:.3g} at step 0 to {last:.3g} at step 8. The 95% interval of the "
        f"change, 4 ± {half_width:.2g}, does not contain 0, so that the choice of the documents does not explain it."
    )
    assert lines[1].startswith("InterSim of the last layer is the same at step 0 and at step 8, to three digits: 0.3")
    assert len(lines) <= 5
    # The interval is about as wide if the folders of the checkpoints were deleted.
    without_folders = type(training)("m", training.table)
    assert describe_over([without_folders])[0] == lines[0]
    lines = describe_over([training, make_training("shorter", (0, 5))])
    assert lines[0].startswith("IsoScore of the last layer changes most in m: it rises")
    assert lines[2].startswith("At the last checkpoint: IsoScore of the last layer is largest in m")
    # One checkpoint is a model.
    single = make_training(steps=(7,))
    assert describe_over([single]) == describe_single(single.checkpoints[0].measurements)


def test_planted_faults_of_a_cloud_are_found() -> None:
    random = np.random.default_rng(0)
    points = random.normal(size=(1_000, 32))
    copies = istar.measure(np.concatenate([points, points[:50]]), measures="all").findings
    assert any(line.startswith("10% of the compared points of the cloud have a near duplicate") for line in copies)
    units = points / np.linalg.norm(points, axis=1, keepdims=True)
    units[7] = units.mean(0)
    hub = istar.measure(units, measures="all").findings
    assert any("near neighbours of very many others" in line for line in hub)
    usual = istar.measure(random.normal(size=(2_000, 3)), measures="all").findings
    assert usual[0] == "No measure is unusual."


def test_a_difference_of_rounding_errors_is_no_finding() -> None:
    points = np.random.default_rng(0).normal(size=(500, 16))
    ids = range(500)
    comparison = istar.compare({"a": istar.measure(points, ids=ids), "b": istar.measure(2 * points, ids=ids)})
    assert not [line for line in comparison.findings if line.startswith(("IsoScore is largest", "InterSim is largest"))]
