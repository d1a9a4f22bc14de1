"""Differences of measures between two models over the same texts, with 95% intervals."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from istar.geometry.collect.intervals import JACKKNIFE_MEASURES, t_quantile
from istar.geometry.show.compare import MeasuredModel, have_same_texts
from istar.measures import jackknife_error

ErrorMethod = Literal["paired", "independent"]
"""How the standard error of a difference is computed; see `Difference`."""
_TOKEN_SETTINGS = ("limit", "documents", "special_tokens")
"""Settings of `istar measure` that decide which tokens are measured."""


@dataclass(frozen=True)
class Difference:
    r"""A measure of one model minus the same measure of another model, with the standard error of the difference.

    - `paired`: both models have the same documents in the same G groups. The error is that of the delete-a-group
      jackknife: :func:`istar.measures.jackknife_error` of the differences between the values without each group. Texts
      that raise the measure of both models alike have no influence on it.
    - `independent`: the root of the sum of the squares of both errors. For models over the same texts this is usually
      too large, because their errors usually have a positive correlation.
    """

    value: float  # in the units of the measure
    error: float  # standard error; NaN if it is not defined
    degrees_of_freedom: int  # degrees of freedom of the error
    method: ErrorMethod

    @property
    def half_width(self) -> float:
        """Half the length of the 95% interval, from Student's t distribution."""
        return t_quantile(self.degrees_of_freedom) * self.error


def paired_difference(
    first: float, second: float, first_replicates: Sequence[float], second_replicates: Sequence[float]
) -> Difference:
    """Return `second - first` with the error of the paired delete-a-group jackknife.

    The replicates are the values of each model without each of the G groups, with the groups in the same order.
    """
    differences = [after - before for before, after in zip(first_replicates, second_replicates, strict=True)]
    return Difference(second - first, jackknife_error(differences), len(differences) - 1, "paired")


def independent_difference(
    first: float, second: float, errors: tuple[float, float], num_groups: tuple[int, int]
) -> Difference:
    """Return `second - first`, whose error is the root of the sum of the squares of both `errors`.

    The degrees of freedom are those of the error from fewer groups, a lower bound of the exact number.
    """
    return Difference(second - first, math.hypot(*errors), min(num_groups) - 1, "independent")


def have_same_tokens(first: MeasuredModel, other: MeasuredModel) -> bool:
    """Return whether two models were measured over the same tokens of the same texts."""
    return have_same_texts(first, other) and not _find_changed_token_settings(first, other)


def _find_changed_token_settings(first: MeasuredModel, other: MeasuredModel) -> list[str]:
    """Return the names of the settings that decide which tokens are measured and differ between two models."""
    first_settings, other_settings = (model.measurements.settings for model in (first, other))
    return [name for name in _TOKEN_SETTINGS if first_settings.get(name) != other_settings.get(name)]


def explain_no_differences(first: MeasuredModel, other: MeasuredModel) -> str:
    """Return a sentence on why no differences with intervals exist for two models, or an empty string if they exist."""
    sentence_start = f"Differences of {other.label} from {first.label} are not computed: "
    if not have_same_texts(first, other):
        return f"{sentence_start}they were measured over different texts."
    if changed_settings := _find_changed_token_settings(first, other):
        return f"{sentence_start}they were measured over different tokens of the texts ({', '.join(changed_settings)})."
    for model in (first, other):
        if not any(
            math.isfinite(model.last_layer_measures.get(f"{name}_error", math.nan)) for name in JACKKNIFE_MEASURES
        ):
            return (
                f"{sentence_start}{model.label} has no standard errors; measure it with --groups over at least as many "
                "documents as groups."
            )
    return ""


def choose_error_method(first: MeasuredModel, other: MeasuredModel) -> ErrorMethod:
    """Return `paired` if both models have the same documents in the same groups and the values without each group.

    The models must have been measured over the same texts. Packed documents are grouped by their blocks, which depend
    on the tokenizer. With a limit of tokens, the tokenizer decides how many documents are read; documents are taken to
    be the same only if each group has the same number of tokens.
    """
    settings = first.measurements.settings
    if first.num_groups != other.num_groups or settings.get("documents") != "separate":
        return "independent"
    # Numbers of tokens without each group.
    first_tokens, other_tokens = (_get_replicates_at(model, 0).get("tokens", []) for model in (first, other))
    has_replicates = bool(first_tokens and other_tokens)
    if not has_replicates or (settings.get("limit") is not None and first_tokens != other_tokens):
        return "independent"
    return "paired"


def compute_differences(first: MeasuredModel, other: MeasuredModel) -> Iterator[dict[str, Any]]:
    """Yield a row for each layer and measure, with the difference `other - first` and its 95% interval.

    There are no rows if the models cannot be compared; see `explain_no_differences`. Models with the same number of
    layers are compared layer by layer, and at the final normalization if both have one. Other models are compared at
    their last layers, before a final normalization.
    """
    if explain_no_differences(first, other):
        return
    error_method = choose_error_method(first, other)
    layer_names = list(other.measurements.all_texts)
    last_index = len(other.layer_measures) - 1
    if len(first.layer_measures) == len(other.layer_measures):
        # The final normalization follows the layers.
        index_pairs = [(index, index) for index in range(min(len(first.measurements.all_texts), len(layer_names)))]
    else:
        index_pairs = [(len(first.layer_measures) - 1, last_index)]
    for first_index, other_index in index_pairs:
        for name in JACKKNIFE_MEASURES:
            difference = _compare_measure(first, other, first_index, other_index, name, error_method)
            if difference is None:
                continue
            yield {
                "model": other.label,
                "first": first.label,
                "layer": layer_names[other_index],
                "is_last": other_index == last_index,
                "measure": name,
                "value": _get_measures_at(other, other_index)[name],
                "value_of_first": _get_measures_at(first, first_index)[name],
                "difference": difference.value,
                "error": difference.error,
                "low": difference.value - difference.half_width,
                "high": difference.value + difference.half_width,
                "method": difference.method,
            }


def find_last_difference(first: MeasuredModel, other: MeasuredModel, measure: str) -> dict[str, Any] | None:
    """Return the difference of a measure between the last layers of two models, as a row of `compute_differences`.

    The result is None if the difference or its error is undefined.
    """
    rows = compute_differences(first, other)
    return next((row for row in rows if row["is_last"] and row["measure"] == measure), None)


def excludes_zero(row: Mapping[str, Any]) -> bool:
    """Return whether the 95% interval of a difference, a row of `compute_differences`, does not contain 0."""
    return bool(row["low"] > 0 or row["high"] < 0)


def compute_all_differences(models: Sequence[MeasuredModel]) -> list[dict[str, Any]]:
    """Return the differences of each other model from the first one, as rows of `compute_differences`."""
    first, *others = models
    return [row for other in others for row in compute_differences(first, other)]


def _compare_measure(
    first: MeasuredModel, other: MeasuredModel, first_index: int, other_index: int, name: str, error_method: ErrorMethod
) -> Difference | None:
    """Return a measure at a layer of `other` minus that at a layer of `first`, or None if it or its error is undefined.

    The indices count the embeddings, the layers and the final normalization of each model.
    """
    first_measures, other_measures = _get_measures_at(first, first_index), _get_measures_at(other, other_index)
    values = first_measures.get(name, math.nan), other_measures.get(name, math.nan)
    if error_method == "paired":
        replicates = (
            _get_replicates_at(first, first_index).get(name, []),
            _get_replicates_at(other, other_index).get(name, []),
        )
        difference = paired_difference(*values, *replicates) if all(replicates) else None
    else:
        errors = first_measures.get(f"{name}_error", math.nan), other_measures.get(f"{name}_error", math.nan)
        difference = independent_difference(*values, errors, (first.num_groups, other.num_groups))
    if difference is None or not (math.isfinite(difference.value) and math.isfinite(difference.half_width)):
        return None
    return difference


def _get_measures_at(model: MeasuredModel, index: int) -> Mapping[str, float]:
    """Return the measures at one layer of a model, over all texts together, by the index of the layer."""
    return list(model.measurements.all_texts.values())[index]


def _get_replicates_at(model: MeasuredModel, index: int) -> Mapping[str, list[float]]:
    """Return the values without each group by measure, at the layer with this index; empty if they are not stored."""
    replicates_by_layer = model.measurements.replicates.get(model.measurements.combined_key, {})
    return replicates_by_layer.get(list(model.measurements.all_texts)[index], {})
