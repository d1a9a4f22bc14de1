"""Sentences on what stands out in a training, or among several trainings, made from their measures by fixed rules.

Where a change or a difference has a 95% interval, a sentence says whether it contains 0. The interval describes other
documents of the same kind, not other training runs.
"""

import math
from collections.abc import Iterator, Sequence

from istar.geometry.collect.layer_outputs import FINAL_NORM
from istar.geometry.show import model_differences
from istar.geometry.show.compare import MeasuredModel
from istar.geometry.show.findings import describe_findings, name_layer, warn_of_too_few_tokens
from istar.geometry.show.measured_training import MeasuredTraining

_MEASURES = {"isoscore": "IsoScore", "inter_sim": "InterSim"}
"""Names of the measures of the last layer on which there are sentences."""
_MEANINGS = {
    "isoscore": ("its variance is spread less evenly over all directions", "its variance is spread more evenly"),
    "inter_sim": ("two random tokens become less alike", "two random tokens become more alike"),
}
"""Meanings of a fall and of a rise of each measure."""


def describe_training(checkpoints: Sequence[MeasuredModel]) -> list[str]:
    """Return at most seven sentences on how the hidden states of a model change over its training.

    They are on the change of IsoScore and InterSim of the last layer from the first to the last checkpoint, on a
    checkpoint in between where these measures are larger or smaller than at both ends, and on the layer whose IsoScore
    changes most. A warning follows if there are too few tokens. If there is only one checkpoint, the sentences are
    those of `findings.describe_findings` on it.

    Args:
        checkpoints: checkpoints in the order of the training, with labels as in a sentence, such as `step 1,000`.
    """
    first, last = checkpoints[0], checkpoints[-1]
    if len(checkpoints) == 1:
        only_one = f"Only one checkpoint was measured, {first.label}, so that no change can be described."
        return [f"{only_one} What stands out at this checkpoint:", *describe_findings(first.measurements)]
    sentences: list[str] = []
    for measure in _MEASURES:
        sentences += _describe_change(first, last, measure)
        sentences += _describe_extremes_in_between(checkpoints, measure)
    sentences += _find_layer_with_largest_change(first, last)
    if not sentences:
        sentences = [f"IsoScore and InterSim of the last layer are not defined at {first.label} and {last.label}."]
    return [*sentences, *warn_of_too_few_tokens(last.measurements)]


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


def _describe_change(first: MeasuredModel, last: MeasuredModel, measure: str) -> Iterator[str]:
    """Yield a sentence on the change of a measure of the last layer between two checkpoints, if it is defined."""
    before, after = _get_last(first, measure), _get_last(last, measure)
    if not math.isfinite(after - before):
        return
    subject, before_text, after_text = f"{_MEASURES[measure]} of the last layer", f"{before:.3g}", f"{after:.3g}"
    if before_text == after_text:
        yield f"{subject} is the same at {first.label} and at {last.label}, to three digits: {after_text}."
        return
    verb, meaning = ("rises" if after > before else "falls"), _MEANINGS[measure][after > before]
    size = _describe_size("change", abs(after - before), _find_half_width(first, last, measure))
    yield f"{subject} {verb} from {before_text} at {first.label} to {after_text} at {last.label}: {meaning}. {size}"


def _describe_extremes_in_between(checkpoints: Sequence[MeasuredModel], measure: str) -> Iterator[str]:
    """Yield a sentence each if the largest or smallest value of the last layer is clearly between both ends.

    This is so if the 95% intervals of its differences from the first and the last checkpoint do not contain 0, and if
    the value differs from theirs in its first three digits.
    """
    ends = (checkpoints[0], checkpoints[-1])
    defined = [checkpoint for checkpoint in checkpoints if math.isfinite(_get_last(checkpoint, measure))]
    end_texts = [f"{_get_last(end, measure):.3g}" for end in ends]
    for choose, superlative in ((max, "largest"), (min, "smallest")):
        extreme = choose(defined, key=lambda checkpoint: _get_last(checkpoint, measure), default=None)
        if extreme is None or f"{_get_last(extreme, measure):.3g}" in end_texts:
            continue
        differences = [model_differences.find_last_difference(end, extreme, measure) for end in ends]
        if all(row is not None and model_differences.excludes_zero(row) for row in differences):
            yield (
                f"In between, {_MEASURES[measure]} of the last layer is {superlative} at {extreme.label}: "
                f"{_get_last(extreme, measure):.3g}. The 95% intervals of the differences from {ends[0].label} and "
                f"from {ends[1].label} do not contain 0."
            )


def _find_layer_with_largest_change(first: MeasuredModel, last: MeasuredModel) -> Iterator[str]:
    """Yield a sentence on the layer whose IsoScore changes most between two checkpoints of a model.

    There is no sentence if the first three digits of IsoScore change in no layer.
    """
    first_layers, last_layers = first.measurements.all_texts, last.measurements.all_texts
    values_by_tap = {
        tap: (first_layers[tap].get("isoscore", math.nan), measures.get("isoscore", math.nan))
        for tap, measures in last_layers.items()
        if tap != FINAL_NORM and tap in first_layers
    }
    defined = {tap: values for tap, values in values_by_tap.items() if math.isfinite(values[1] - values[0])}
    if len(defined) < 2:
        return
    tap = max(defined, key=lambda tap: abs(defined[tap][1] - defined[tap][0]))
    before, after = defined[tap]
    if f"{before:.3g}" == f"{after:.3g}":
        return
    if tap == list(values_by_tap)[-1]:
        yield f"Of all layers, IsoScore changes most in the last one, {name_layer(tap)}."
        return
    rows = model_differences.compute_differences(first, last)
    row = next((row for row in rows if row["layer"] == tap and row["measure"] == "isoscore"), None)
    half_width = math.nan if row is None else (row["high"] - row["low"]) / 2
    yield (
        f"Of all layers, IsoScore changes most in {name_layer(tap)}: from {before:.3g} at {first.label} to "
        f"{after:.3g} at {last.label}. {_describe_size('change', abs(after - before), half_width)}"
    )


def _get_last(checkpoint: MeasuredModel, measure: str) -> float:
    """Return a measure of the last layer at a checkpoint; NaN if it is not defined."""
    return checkpoint.last_layer_measures.get(measure, math.nan)


def _find_half_width(first: MeasuredModel, last: MeasuredModel, measure: str) -> float:
    """Return half the length of the 95% interval of the change of a measure of the last layer; NaN if there is none."""
    row = model_differences.find_last_difference(first, last, measure)
    return math.nan if row is None else (row["high"] - row["low"]) / 2


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
    steps = training.steps
    yield (
        f"{name} of the last layer changes most in {training.label}: from {values[0]:.3g} at step {steps[0]:,} to "
        f"{values[-1]:.3g} at step {steps[-1]:,}. "
        f"{_describe_size('change', size, _find_half_width_of_training(training, measure))}"
    )


def _find_half_width_of_training(training: MeasuredTraining, measure: str) -> float:
    """Return half the length of the 95% interval of the change between the first and last checkpoint of a training.

    It is that of `describe_training` if the folders of both checkpoints are there. Otherwise it is the root of the sum
    of the squares of both values' half-widths, which is rather too large than too small, because both values are of the
    same documents.
    """
    first, last = training.first_measurements, training.last_measurements
    if first is not None and last is not None:
        return _find_half_width(MeasuredModel("first", first), MeasuredModel("last", last), measure)
    half_widths = training.half_widths_by_step(training.last_layer, measure)
    return math.hypot(half_widths[0], half_widths[-1])


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
        f"{_describe_size('difference', high - low, math.hypot(*half_widths))}"
    )


def _describe_size(noun: str, size: float, half_width: float) -> str:
    """Return a sentence on whether the 95% interval of a change or a difference contains 0.

    Args:
        noun: `change` or `difference`.
        size: size of the difference, without its sign.
        half_width: half the length of the interval; NaN if there is none.
    """
    if not math.isfinite(half_width):
        return f"The {noun} has no interval."
    interval = f"The 95% interval of the {noun}, {size:.3g} ± {half_width:.2g},"
    if size > half_width:
        return f"{interval} does not contain 0, so that the choice of the documents does not explain it."
    return f"{interval} contains 0, so that the choice of the documents may explain it."


def _have_same_tokens(trainings: Sequence[MeasuredTraining]) -> bool:
    last_models = [
        MeasuredModel(training.label, training.last_measurements)
        for training in trainings
        if training.last_measurements is not None
    ]
    return len(last_models) == len(trainings) and all(
        model_differences.have_same_tokens(last_models[0], model) for model in last_models[1:]
    )
