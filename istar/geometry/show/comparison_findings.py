"""Sentences on what stands out among several models, made from their measures by fixed rules.

Differences are between measures over the same tokens. Where they have a 95% interval, the sentences say whether it
contains 0. The interval describes other documents of the same kind, not other training runs.
"""

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from istar.geometry.collect.layer_outputs import FINAL_NORM
from istar.geometry.show import model_differences
from istar.geometry.show.compare import MeasuredModel, list_names
from istar.geometry.show.findings import name_layer

_RANKINGS = {
    "isoscore": (
        "The variance of the last layer is spread more evenly in {high} than in {low}: IsoScore is {high_value} and "
        "{low_value}.",
        "Of all last layers, the variance is spread most evenly in that of {high} and least evenly in that of {low}: "
        "IsoScore is {high_value} and {low_value}.",
    ),
    "inter_sim": (
        "Two random tokens of the last layer are more alike in {high} than in {low}: their average cosine, InterSim, "
        "is {high_value} and {low_value}.",
        "Of all last layers, two random tokens are most alike in that of {high} and least alike in that of {low}: "
        "their average cosine, InterSim, is {high_value} and {low_value}.",
    ),
}
"""Sentences on the models with the largest and the smallest value of a measure: of two models, and of more."""
_OUTLIERS = "outlier_dimensions"


def describe_comparison(models: Sequence[MeasuredModel]) -> list[str]:
    """Return a few sentences on several models, over all their texts together.

    They are on the largest and smallest IsoScore and InterSim of the last layers, on the layer with the largest clear
    difference from the first model among those with as many layers, on outlier dimensions, and on models that are left
    out because they read other tokens than the first model.
    """
    first_model = models[0]
    compared_models = [model for model in models if model_differences.have_same_tokens(first_model, model)]
    sentences = [
        *_rank_last_layers(compared_models),
        *_find_layer_with_largest_difference(compared_models),
        *_describe_outlier_dimensions(models),
    ]
    if left_out := [model.label for model in models if model not in compared_models]:
        verb = "is" if len(left_out) == 1 else "are"
        sentences.append(
            f"{list_names(left_out)} {verb} not compared here with {first_model.label}, because other tokens were "
            "measured."
        )
    return sentences or ["No measure differs between these models."]


def _rank_last_layers(models: Sequence[MeasuredModel]) -> Iterator[str]:
    """Yield a sentence for each ranked measure on the models whose last layers have its largest and smallest value.

    There is no sentence on a measure that is the same in all models, or is defined in fewer than two.
    """
    for measure, (text_of_two, text_of_several) in _RANKINGS.items():
        defined = [model for model in models if math.isfinite(_get_last(model, measure))]
        if not defined:
            continue
        low, high = (choose(defined, key=lambda model: _get_last(model, measure)) for choose in (min, max))
        low_value, high_value = _get_last(low, measure), _get_last(high, measure)
        if low_value == high_value:
            continue
        text = (text_of_two if len(defined) == 2 else text_of_several).format(
            high=high.label, low=low.label, high_value=f"{high_value:.3g}", low_value=f"{low_value:.3g}"
        )
        yield f"{text} {_describe_interval(model_differences.find_last_difference(low, high, measure))}"


def _get_last(model: MeasuredModel, measure: str) -> float:
    """Return a measure of a model's last layer; NaN if it is not defined."""
    return model.last_layer_measures.get(measure, math.nan)


def _describe_interval(row: dict[str, Any] | None) -> str:
    """Return a sentence on the interval of a difference, a row of `compute_differences` or None for none."""
    if row is None:
        return "The difference has no interval."
    interval = f"The 95% interval of the difference, {row['low']:.3g} to {row['high']:.3g},"
    if model_differences.excludes_zero(row):
        return f"{interval} does not contain 0, so that the choice of the documents does not explain it."
    return f"{interval} contains 0, so that the choice of the documents may explain it."


def _find_layer_with_largest_difference(models: Sequence[MeasuredModel]) -> Iterator[str]:
    """Yield a sentence on the layer with the largest difference of IsoScore from the same layer of the first model.

    Only models with as many layers as the first count, and only differences whose interval does not contain 0.
    """
    first, *others = models
    num_layers = len(first.layer_measures)
    equally_deep = [model for model in others if len(model.layer_measures) == num_layers]
    rows = [
        row
        for model in equally_deep
        for row in model_differences.compute_differences(first, model)
        if row["measure"] == "isoscore" and row["layer"] != FINAL_NORM
    ]
    if not rows:
        return
    if clear_rows := list(filter(model_differences.excludes_zero, rows)):
        row = max(clear_rows, key=lambda row: abs(row["difference"]))
        yield (
            f"Compared with {first.label} layer by layer, the largest difference of IsoScore whose 95% interval does "
            f"not contain 0 is in {name_layer(row['layer'])} of {row['model']}: {row['value']:.3g} instead of "
            f"{row['value_of_first']:.3g} (interval: {row['low']:.3g} to {row['high']:.3g})."
        )
    else:
        names = list_names(list(dict.fromkeys(map(itemgetter("model"), rows))))
        yield (
            f"In no layer does IsoScore of {names} differ from that of {first.label} by more than the choice of the "
            "documents may explain: all 95% intervals of the differences contain 0."
        )


def _describe_outlier_dimensions(models: Sequence[MeasuredModel]) -> Iterator[str]:
    """Yield a sentence on which models have outlier dimensions, and in which layer they have most of them."""
    with_outliers, without_outliers = [], []
    for model in models:
        counts = {
            tap: measures.get(_OUTLIERS, math.nan)
            for tap, measures in model.measurements.all_texts.items()
            if tap != FINAL_NORM and math.isfinite(measures.get(_OUTLIERS, math.nan))
        }
        if not counts:
            continue
        tap = max(counts, key=lambda tap: counts[tap])
        if counts[tap] > 0:
            with_outliers.append(f"{model.label} (at most {counts[tap]:,.0f}, in {name_layer(tap)})")
        else:
            without_outliers.append(model.label)
    meaning = "outlier dimensions, whose mean is more than 5 typical standard deviations from 0"
    if with_outliers:
        verb = "has" if len(with_outliers) == 1 else "have"
        rest = "no other model has any" if len(without_outliers) > 1 else f"{''.join(without_outliers)} has none"
        yield f"{list_names(with_outliers)} {verb} {meaning}{f'; {rest}' if without_outliers else ''}."
    elif without_outliers:
        yield f"No model has {meaning}."
