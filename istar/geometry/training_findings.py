"""Sentences on what stands out among several trainings, made from their measures by fixed rules."""

import math
from collections.abc import Iterator, Sequence

from istar.geometry import model_differences
from istar.geometry.compare import MeasuredModel
from istar.geometry.measured_training import MeasuredTraining

_MEASURES = {"isoscore": "IsoScore", "inter_sim": "InterSim"}
"""Names of the measures of the last layer on which there are sentences."""


def describe_trainings(trainings: Sequence[MeasuredTraining]) -> list[str]:
    """Return a few sentences on IsoScore and InterSim of the last layers of several trainings.

    They name the training in which the measure changes most from the first to the last checkpoint and, if all trainings
    were measured over the same tokens, those that end with its largest and its smallest value.
    """
    sentences: list[str] = []
    for measure, name in _MEASURES.items():
        sentences += _describe_largest_change(trainings, measure, name)
        if _have_same_tokens(trainings):
            sentences += _describe_last_values(trainings, measure, name)
    return sentences or ["IsoScore and InterSim of the last layer do not change in any of these trainings."]


def _describe_largest_change(trainings: Sequence[MeasuredTraining], measure: str, name: str) -> Iterator[str]:
    """Yield a sentence on the training whose last layer changes most between its first and last checkpoint."""
    changes = [
        (abs(values[-1] - values[0]), training, values)
        for training in trainings
        if math.isfinite((values := training.values_by_step(training.last_layer, measure))[-1] - values[0])
    ]
    size, training, values = max(changes, key=lambda change: change[0], default=(0.0, None, []))
    if training is None or size == 0:
        return
    half_widths = training.half_widths_by_step(training.last_layer, measure)
    steps = training.steps
    yield (
        f"{name} of the last layer changes most in {training.label}: from {values[0]:.3g} at step {steps[0]:,} to "
        f"{values[-1]:.3g} at step {steps[-1]:,}. {_describe_size('change', size, half_widths[0], half_widths[-1])}"
    )


def _describe_last_values(trainings: Sequence[MeasuredTraining], measure: str, name: str) -> Iterator[str]:
    """Yield a sentence on the trainings whose last checkpoints have the largest and the smallest value."""
    value_and_training = [
        (training.values_by_step(training.last_layer, measure)[-1], training) for training in trainings
    ]
    defined = [(value, training) for value, training in value_and_training if math.isfinite(value)]
    if not defined:
        return
    (low, low_training), (high, high_training) = (choose(defined, key=lambda pair: pair[0]) for choose in (min, max))
    if low == high:
        return
    half_widths = [
        training.half_widths_by_step(training.last_layer, measure)[-1] for training in (low_training, high_training)
    ]
    superlatives = ("larger", "smaller") if len(defined) == 2 else ("largest", "smallest")
    yield (
        f"At the last checkpoint, {name} of the last layer is {superlatives[0]} in {high_training.label} ({high:.3g}) "
        f"and {superlatives[1]} in {low_training.label} ({low:.3g}). "
        f"{_describe_size('difference', high - low, *half_widths)}"
    )


def _describe_size(noun: str, size: float, *half_widths: float) -> str:
    """Return a sentence on whether the 95% interval of a difference of two values contains 0.

    The interval's half-width is the root of the sum of the squares of both values' half-widths. It is rather too large
    than too small, because both values are of the same documents.
    """
    half_width = math.hypot(*half_widths)
    if not math.isfinite(half_width):
        return f"The {noun} has no interval."
    interval = f"The 95% interval of the {noun}, {size:.3g} ± {half_width:.2g},"
    if size > half_width:
        return f"{interval} does not contain 0, so that the choice of the documents does not explain it."
    return f"{interval} contains 0, so that the choice of the documents may explain it."


def _have_same_tokens(trainings: Sequence[MeasuredTraining]) -> bool:
    """Return whether the last checkpoints of all trainings are known to be measured over the same tokens."""
    last_models = [
        MeasuredModel(training.label, training.last_measurements)
        for training in trainings
        if training.last_measurements is not None
    ]
    return len(last_models) == len(trainings) and all(
        model_differences.have_same_tokens(last_models[0], model) for model in last_models[1:]
    )
