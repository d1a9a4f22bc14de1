"""Differences of measures between two models over the same texts, with 95% intervals."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from istar.geometry.compare import Subject, have_same_texts
from istar.geometry.intervals import JACKKNIFE_MEASURES, t_quantile
from istar.measures import jackknife_error

Method = Literal["paired", "independent"]
"""How the error of a difference is computed; see `Difference`."""
_SETTINGS = ("limit", "documents", "special_tokens")
"""Settings of a pass that decide which tokens are measured."""


@dataclass(frozen=True)
class Difference:
    r"""A measure of a model minus that of another model, with its standard error.

    - `paired`: both models have the same documents in the same G groups. The error is that of the delete-a-group
      jackknife of the difference: :func:`istar.measures.jackknife_error` of the differences of the values without each
      group. Texts that raise the measure of both models alike have no influence on it.
    - `independent`: the root of the sum of the squares of both errors. For models over the same texts it is rather too
      large than too small, because their errors usually have a positive correlation.
    """

    value: float  # in the units of the measure
    error: float  # standard error; NaN if it is not defined
    degrees: int  # degrees of freedom of the error
    method: Method

    @property
    def half_width(self) -> float:
        """Half of the length of the 95% interval, from Student's t distribution."""
        return t_quantile(self.degrees) * self.error


def paired(first: float, second: float, first_values: Sequence[float], second_values: Sequence[float]) -> Difference:
    """Return `second - first`; the sequences are the values without each group, in the same order, G each."""
    differences = [after - before for before, after in zip(first_values, second_values, strict=True)]
    return Difference(second - first, jackknife_error(differences), len(differences) - 1, "paired")


def independent(first: float, second: float, errors: tuple[float, float], groups: tuple[int, int]) -> Difference:
    """Return `second - first` with the root of the sum of the squares of `errors`.

    The degrees of freedom are those of the error from fewer `groups`, a lower bound of the exact number.
    """
    return Difference(second - first, math.hypot(*errors), min(groups) - 1, "independent")


def refusal(first: Subject, other: Subject) -> str:
    """Return a sentence that says why two models have no differences with intervals; empty if they have."""
    start = f"No differences between {other.label} and {first.label}: "
    if not have_same_texts(first, other):
        return f"{start}they were measured over different texts."
    settings = [subject.measured.settings for subject in (first, other)]
    changed = [name for name in _SETTINGS if settings[0].get(name) != settings[1].get(name)]
    if changed:
        return f"{start}they were measured over different tokens of the texts ({', '.join(changed)})."
    for subject in (first, other):
        if not any(math.isfinite(subject.last_layer.get(f"{name}_error", math.nan)) for name in JACKKNIFE_MEASURES):
            return (
                f"{start}{subject.label} has no standard errors; measure it with --groups over at least as many "
                "documents as groups."
            )
    return ""


def method(first: Subject, other: Subject) -> Method:
    """Return `paired` if both models have the same documents in the same groups and the values without each group.

    The texts of both models must be the same; see `refusal`. Packed documents are grouped by their blocks, which depend
    on the tokenizer. With a limit of tokens, the tokenizer decides how many documents are read; documents are taken to
    be the same only if each group has the same number of tokens.
    """
    settings = [subject.measured.settings for subject in (first, other)]
    if first.groups != other.groups or settings[0].get("documents") != "separate":
        return "independent"
    tokens = [_replicates(subject, 0).get("tokens", []) for subject in (first, other)]
    if not all(tokens) or (settings[0].get("limit") is not None and tokens[0] != tokens[1]):
        return "independent"
    return "paired"


def differences(first: Subject, other: Subject) -> Iterator[dict[str, Any]]:
    """Yield a row for each layer and measure with a difference; none if `refusal` has a reason.

    Models with the same number of layers are compared layer by layer, also at the final normalization if both have one;
    others at their last layers, before a final normalization.
    """
    if refusal(first, other):
        return
    error_method = method(first, other)
    taps = list(other.measured.all_texts)
    last = len(other.layers) - 1
    if len(first.layers) == len(other.layers):
        # The final normalization is behind the layers.
        pairs = [(number, number) for number in range(min(len(first.measured.all_texts), len(taps)))]
    else:
        pairs = [(len(first.layers) - 1, last)]
    for before, after in pairs:
        for name in JACKKNIFE_MEASURES:
            difference = _difference(first, other, before, after, name, error_method)
            if difference is None:
                continue
            figures, others = _figures(first, before), _figures(other, after)
            yield {
                "model": other.label,
                "first": first.label,
                "layer": taps[after],
                "is_last": after == last,
                "measure": name,
                "value": others[name],
                "value_of_first": figures[name],
                "difference": difference.value,
                "error": difference.error,
                "low": difference.value - difference.half_width,
                "high": difference.value + difference.half_width,
                "method": difference.method,
            }


def rows(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Return the rows of `differences` of all models from the first one."""
    first, *others = subjects
    return [row for other in others for row in differences(first, other)]


def _difference(
    first: Subject, other: Subject, before: int, after: int, name: str, error_method: Method
) -> Difference | None:
    """Return the difference of a measure between tap `after` of `other` and tap `before` of `first`.

    The result is None if the difference or its error is not defined.
    """
    figures, others = _figures(first, before), _figures(other, after)
    values = figures.get(name, math.nan), others.get(name, math.nan)
    if error_method == "paired":
        replicates = _replicates(first, before).get(name, []), _replicates(other, after).get(name, [])
        difference = paired(*values, *replicates) if all(replicates) else None
    else:
        errors = figures.get(f"{name}_error", math.nan), others.get(f"{name}_error", math.nan)
        difference = independent(*values, errors, (first.groups, other.groups))
    if difference is None or not (math.isfinite(difference.value) and math.isfinite(difference.half_width)):
        return None
    return difference


def _figures(subject: Subject, number: int) -> Mapping[str, float]:
    """Return the measures of a tap by its number."""
    return list(subject.measured.all_texts.values())[number]


def _replicates(subject: Subject, number: int) -> Mapping[str, list[float]]:
    """Return the measures without each group at a tap by its number; empty if they are not stored."""
    by_tap = subject.measured.replicates.get(subject.measured.combined_key, {})
    return by_tap.get(list(subject.measured.all_texts)[number], {})
