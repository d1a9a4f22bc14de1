"""What stands out in a training, from measures whose changes and intervals are known."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from istar.geometry.show.compare import MeasuredModel
from istar.geometry.show.findings import describe_findings
from istar.geometry.show.training_findings import describe_training
from tests.geometry.test_model_differences import GROUPS, make_model

TAPS = ("embeddings", "layer_1", "layer_2")
COMMON_NOISE = np.random.default_rng(0).normal(size=GROUPS)
"""Noise that the groups of documents add to the measures of all checkpoints alike."""


def make_noise(label: str) -> np.ndarray:
    """Return noise that the groups of documents add to a single checkpoint."""
    return 0.001 * np.random.default_rng(len(label)).normal(size=GROUPS)


def make_checkpoint(
    label: str, *isoscores: float, inter_sim: float = 0.5, has_errors: bool = True, tokens: float = 500
) -> MeasuredModel:
    """Return a checkpoint with an IsoScore for the embeddings and each of two layers, and the same InterSim in all."""
    model = make_model(label, TAPS, error=0.1 if has_errors else math.nan, with_replicates=has_errors)
    measurements = replace(model.measurements, spectra={"text": {"layer_1": {"raw": [1.0] * 16}}})
    for tap, isoscore in zip(TAPS, isoscores, strict=True):
        measurements.all_texts[tap] |= {"isoscore": isoscore, "inter_sim": inter_sim, "tokens": tokens}
        if has_errors:
            for measure, value in (("isoscore", isoscore), ("inter_sim", inter_sim)):
                replicates = value + 0.05 * COMMON_NOISE + make_noise(label)
                measurements.replicates["text"][tap][measure] = replicates.tolist()
    return MeasuredModel(label, measurements)


def compute_half_width(first: str, last: str) -> float:
    """Return half the length of the paired t interval of the pseudo-values, which the common noise does not enter."""
    pseudo_values = -(GROUPS - 1) * (make_noise(last) - make_noise(first))
    return float(scipy.stats.t.ppf(0.975, GROUPS - 1) * scipy.stats.sem(pseudo_values))


def test_changes_have_paired_intervals() -> None:
    first, last = (
        make_checkpoint("step 0", 0.2, 0.6, 0.25, inter_sim=0.1),
        make_checkpoint("step 1,000", 0.21, 0.1, 0.45, inter_sim=0.05),
    )
    half_width = compute_half_width("step 0", "step 1,000")
    # The measures of each checkpoint by itself have much wider intervals, because the documents differ.
    assert half_width < 0.02 < 0.1
    cause = "does not contain 0, so that the choice of the documents does not explain it."
    assert describe_training([first, last]) == [
        "IsoScore of the last layer rises from 0.25 at step 0 to 0.45 at step 1,000: its variance is spread more "
        f"evenly. The 95% interval of the change, 0.2 ± {half_width:.2g}, {cause}",
        "InterSim of the last layer falls from 0.1 at step 0 to 0.05 at step 1,000: two random tokens become less "
        f"alike. The 95% interval of the change, 0.05 ± {half_width:.2g}, {cause}",
        "Of all layers, IsoScore changes most in layer 1: from 0.6 at step 0 to 0.1 at step 1,000. The 95% interval of "
        f"the change, 0.5 ± {half_width:.2g}, {cause}",
    ]


def test_a_change_within_its_interval() -> None:
    first, last = make_checkpoint("step 0", 0.2, 0.3, 0.25), make_checkpoint("step 1,000", 0.2, 0.3, 0.248)
    half_width = compute_half_width("step 0", "step 1,000")
    assert half_width > 0.002
    assert describe_training([first, last]) == [
        "IsoScore of the last layer falls from 0.25 at step 0 to 0.248 at step 1,000: its variance is spread less "
        f"evenly over all directions. The 95% interval of the change, 0.002 ± {half_width:.2g}, contains 0, so that "
        "the choice of the documents may explain it.",
        "InterSim of the last layer is the same at step 0 and at step 1,000, to three digits: 0.5.",
        "Of all layers, IsoScore changes most in the last one, layer 2.",
    ]


def test_an_extreme_in_between_must_differ_from_both_ends() -> None:
    first, last = make_checkpoint("step 0", 0.2, 0.3, 0.25), make_checkpoint("step 1,000", 0.2, 0.3, 0.45)
    peak, dip = make_checkpoint("step 1", 0.2, 0.3, 0.6), make_checkpoint("step 10", 0.2, 0.3, 0.1)
    sentences = describe_training([first, peak, dip, last])
    assert [sentence for sentence in sentences if sentence.startswith("In between")] == [
        f"In between, IsoScore of the last layer is {extreme}. The 95% intervals of the differences from step 0 and "
        "from step 1,000 do not contain 0."
        for extreme in ("largest at step 1: 0.6", "smallest at step 10: 0.1")
    ]
    # The difference from one end is not clear, or nothing is larger than the ends, or there are no intervals.
    for value in (0.451, 0.3, math.nan):
        middle = make_checkpoint("step 1", 0.2, 0.3, value)
        assert not any("In between" in sentence for sentence in describe_training([first, middle, last]))
    without_errors = [
        make_checkpoint(f"step {step}", 0.2, 0.3, value, has_errors=False)
        for step, value in ((0, 0.25), (1, 0.9), (2, 0.45))
    ]
    sentences = describe_training(without_errors)
    assert [sentence.endswith("The change has no interval.") for sentence in sentences] == [True, False, False]
    assert not any("In between" in sentence for sentence in sentences)


def test_a_single_checkpoint_has_its_own_findings() -> None:
    only = make_checkpoint("checkpoint base", 0.2, 0.3, 0.25, inter_sim=0.2)
    for measures in only.measurements.all_texts.values():
        measures["participation_ratio"] = 4.0
    sentences = describe_training([only])
    assert sentences[0] == (
        "Only one checkpoint was measured, checkpoint base, so that no change can be described. What stands out at "
        "this checkpoint:"
    )
    assert sentences[1:] == describe_findings(only.measurements)
    assert "No measure is unusual." in sentences


def test_undefined_measures_and_few_tokens() -> None:
    first, last = (
        make_checkpoint(label, *[math.nan] * 3, inter_sim=math.nan, tokens=100) for label in ("step 0", "step 9")
    )
    assert describe_training([first, last]) == [
        "IsoScore and InterSim of the last layer are not defined at step 0 and step 9.",
        "There are only 100 tokens for 16 dimensions: IsoScore and the ranks are too low; measure longer texts.",
    ]
    # A measure of the embeddings alone is no finding about layers.
    first.measurements.all_texts["embeddings"]["isoscore"] = 0.5
    assert len(describe_training([first, last])) == 2


def test_the_final_normalization_is_not_the_last_layer() -> None:
    first, last = make_checkpoint("step 0", 0.2, 0.3, 0.25), make_checkpoint("step 9", 0.2, 0.3, 0.35)
    for checkpoint, isoscore in ((first, 0.9), (last, 0.1)):
        layers = checkpoint.measurements.all_texts
        layers["final_norm"] = {**layers["layer_2"], "isoscore": isoscore}
    change, _, layer = describe_training([first, last])
    assert change.startswith("IsoScore of the last layer rises from 0.25 at step 0 to 0.35 at step 9")
    assert layer == "Of all layers, IsoScore changes most in the last one, layer 2."


@pytest.mark.parametrize("position", [0, 1])
def test_a_measure_that_is_undefined_at_one_end_has_no_sentence(position: int) -> None:
    checkpoints = [make_checkpoint("step 0", 0.2, 0.3, 0.25), make_checkpoint("step 9", 0.2, 0.3, 0.35)]
    checkpoints[position].measurements.all_texts["layer_2"]["isoscore"] = math.nan
    middle = make_checkpoint("step 5", 0.2, 0.3, 0.9)
    assert describe_training([checkpoints[0], middle, checkpoints[1]]) == [
        "InterSim of the last layer is the same at step 0 and at step 9, to three digits: 0.5."
    ]
