"""Mean states of examples, such as documents, and CKA between the states of two models that have read the same ones."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from istar.errors import UserError, shorten
from istar.measures.jackknife import ValueWithError
from istar.measures.kernel_alignment import cka, cka_with_error
from istar.measures.numerics import is_rounding

MIN_EXAMPLES = 4
"""Fewest examples for which CKA is defined."""


@dataclass(frozen=True)
class Examples:
    """The first examples that were measured, such as documents, images or rows, and their mean states."""

    ids: tuple[str, ...]  # name of each example; geometries are compared at their common ids
    groups: tuple[str, ...]  # the group of each example, which standard errors leave out as a whole
    states: Mapping[str, Tensor]  # mean state of each example, `(examples, d)`, float32 on the CPU, by state

    def to_bytes(self) -> bytes:
        """Return the content of a `.safetensors` file, which `read_examples` reads."""
        metadata = {
            "ids": json.dumps(self.ids),
            "groups": json.dumps(self.groups),
            "states": json.dumps([*self.states]),
        }
        return save({name: states.contiguous() for name, states in self.states.items()}, metadata)


def read_examples(path: Path) -> Examples:
    """Read a file of `Examples.to_bytes`.

    Raises:
        UserError: if the file cannot be read or is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            ids, groups, names = (json.loads(file.metadata()[name]) for name in ("ids", "groups", "states"))
            return Examples(tuple(ids), tuple(groups), {name: file.get_tensor(name) for name in names})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of examples: {shorten(error)}; measure again, and save it") from error


@dataclass(frozen=True)
class Similarity:
    """CKA of every layer of one model with every layer of another."""

    first: str  # label of the first model
    second: str  # label of the second model
    first_taps: tuple[str, ...]  # names of the places in the first model where hidden states were read
    second_taps: tuple[str, ...]  # the same for the second model
    # CKA: a row for each tap of the first model, a column for each of the second; NaN where `cka` is undefined.
    values: tuple[tuple[float, ...], ...]
    # Standard error of the largest value of each row, by the jackknife over groups of examples; NaN if a group would
    # have fewer than two examples, or CKA without a group is undefined.
    errors_of_largest: tuple[float, ...]
    num_groups: int  # number of these groups
    documents: int  # number of examples


def compare_examples(first_label: str, first: Examples, second_label: str, second: Examples) -> Similarity:
    """Compute CKA of every state of one model with every state of another, over their common examples.

    The standard errors leave out the groups of the first model.

    Raises:
        UserError: if fewer than 4 examples have the same id.
    """
    positions = {name: position for position, name in enumerate(second.ids)}
    pairs = [(index, positions[name]) for index, name in enumerate(first.ids) if name in positions]
    if len(pairs) < MIN_EXAMPLES:
        missing = [name for name in first.ids if name not in positions]
        raise UserError(
            f"{len(missing)} of the {len(first.ids)} examples of {first_label} are not in {second_label}, the first is "
            f"{shorten(missing[0] if missing else '-', 60)}; CKA needs at least {MIN_EXAMPLES} with equal ids"
        )
    first_rows, second_rows = torch.tensor(pairs, device="cpu").T
    number_by_group = {group: number for number, group in enumerate(dict.fromkeys(first.groups))}
    groups = torch.tensor([number_by_group[first.groups[index]] for index, _ in pairs], device="cpu")
    num_groups = len(groups.unique())
    second_states = {name: states[second_rows] for name, states in second.states.items()}
    values, errors_of_largest = [], []
    for states in first.states.values():
        states = states[first_rows]
        row = [_compute_cka(states, other_states).value for other_states in second_states.values()]
        index = max(range(len(row)), key=lambda index: -math.inf if math.isnan(row[index]) else row[index])
        most_similar, has_error = list(second_states.values())[index], len(pairs) >= 2 * num_groups >= 4
        values.append(tuple(row))
        errors_of_largest.append(_compute_cka(states, most_similar, groups if has_error else None).error)
    return Similarity(
        first=first_label,
        second=second_label,
        first_taps=tuple(first.states),
        second_taps=tuple(second.states),
        values=tuple(values),
        errors_of_largest=tuple(errors_of_largest),
        num_groups=num_groups,
        documents=len(pairs),
    )


def _compute_cka(first: Tensor, second: Tensor, groups: Tensor | None = None) -> ValueWithError:
    """Return CKA, with its standard error if groups are given; NaN where `cka` is undefined, or states are constant."""
    if any(is_rounding(x.double().var(0).sum(), x.double().mean(0).square().sum()) for x in (first, second)):
        return ValueWithError(math.nan, math.nan)
    try:
        if groups is None:
            return ValueWithError(cka(first, second), math.nan)
        return cka_with_error(first, second, groups)
    except UserError:
        return ValueWithError(math.nan, math.nan)
