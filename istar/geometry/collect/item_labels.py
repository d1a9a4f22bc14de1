"""What the user says about the rows or examples of a source: their groups and their ids."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from istar.errors import UserError

if TYPE_CHECKING:
    import numpy as np

ItemLabels: TypeAlias = "Sequence[Hashable] | Tensor | np.ndarray[Any, Any]"
"""Groups or ids of the rows of a cloud, or of examples, in their order."""
ByCloud: TypeAlias = "ItemLabels | Mapping[str, ItemLabels]"
"""Groups or ids of several clouds alike, or of each by name."""


@dataclass(frozen=True)
class Labels:
    """Groups and ids of the rows of clouds, or of the examples of a model's inputs, in their order."""

    num_groups: int  # number of groups for standard errors; 0 computes none
    groups: Tensor | None = None  # group of each item, from 0, `(n,)`; None without groups and ids of the user
    ids: tuple[str, ...] = ()  # name of each item, by which two sources are compared; empty for none
    num_independent: int | None = None  # number of different groups that the user gave, of which several may be joined

    def find_groups(self, items: Tensor) -> Tensor:
        """Return the groups of items by their indices, `(n,)` each; by default, item i is in i mod `num_groups`."""
        if self.groups is None:
            return items % max(self.num_groups, 1)
        if len(items) and int(items.max()) >= len(self.groups):
            noun = "ids" if len(self.ids) == len(self.groups) else "groups"
            raise UserError(f"there are only {len(self.groups)} {noun}; expected one for each row or example")
        return self.groups[items]

    def digest(self, in_order: bool = False) -> str:
        """Return a hash of the ids with their groups, or "" without ids. Sources with the same hash can be paired.

        Their items may be in different orders, unless these count (`in_order`), as where only some items are read.
        """
        if self.groups is None or not self.ids:
            return ""
        items = list(zip(self.ids, self.groups.tolist(), strict=False))
        return hashlib.blake2b(repr(items if in_order else sorted(items)).encode()).hexdigest()[:16]

    def check_length(self, noun: str, num_items: int, is_limited: bool = False) -> None:
        """Raise a `UserError` unless there are a group and an id for each of the items that a source has."""
        lengths = {"ids": len(self.ids) or None, "groups": None if self.groups is None else len(self.groups)}
        for name, length in lengths.items():
            if length is not None and (length < num_items or (length > num_items and not is_limited)):
                raise UserError(f"there are {length} {name} for {num_items} {noun}; expected one for each")


def make_labels(num_groups: int, groups: "ByCloud | None" = None, ids: "ByCloud | None" = None) -> Labels:
    """Return labels of items. If there are more groups than `num_groups`, several are joined to one.

    Items with ids have the same groups in whatever order they are.

    Raises a `UserError` for a single group, for ids that repeat, or for a dictionary.
    """
    id_texts = tuple(map(str, _list("ids", ids) or ()))
    if len(set(id_texts)) < len(id_texts):
        [(repeated, _)] = Counter(id_texts).most_common(1)
        raise UserError(f"ids has {repeated!r} twice; expected a different id for each")
    values = _list("groups", groups)
    # Neither the order of the items nor an order in their ids, such as a period, decides on the groups.
    order = sorted(
        range(len(id_texts)), key=lambda index: (zlib.crc32(repr(id_texts[index]).encode()), id_texts[index])
    )
    if values is None:
        ranks = torch.tensor(order, dtype=torch.long, device="cpu").argsort()
        return Labels(num_groups, ranks % max(num_groups, 1) if id_texts else None, id_texts)
    ordered_values = [values[index] for index in order] if len(order) == len(values) else values
    index_by_group = {group: index for index, group in enumerate(dict.fromkeys(ordered_values))}
    if num_groups and len(index_by_group) < 2:
        raise UserError("groups are all the same; standard errors need at least 2 groups")
    num_groups = min(num_groups, len(index_by_group))
    numbers = torch.tensor([index_by_group[group] % max(num_groups, 1) for group in values], device="cpu")
    return Labels(num_groups, numbers, id_texts, len(index_by_group))


def make_labels_by_cloud(
    num_groups: int, clouds: Sequence[str], groups: "ByCloud | None" = None, ids: "ByCloud | None" = None
) -> dict[str, Labels]:
    """Return labels by the name of the cloud; groups and ids are of all clouds alike, or a dictionary by cloud.

    Raises a `UserError` as `make_labels`, or if a dictionary lacks a cloud.
    """
    columns = []
    for noun, labels in (("groups", groups), ("ids", ids)):
        by_cloud = labels if isinstance(labels, Mapping) else dict.fromkeys(clouds, _list(noun, labels))
        if missing := [cloud for cloud in clouds if cloud not in by_cloud]:
            raise UserError(f"{noun} lacks {missing[0]}; expected a key for each cloud, or one list for all")
        columns.append(by_cloud)
    return {cloud: make_labels(num_groups, *(by_cloud[cloud] for by_cloud in columns)) for cloud in clouds}


def _list(noun: str, labels: "ByCloud | None") -> list[Any] | None:
    if labels is None:
        return None
    if isinstance(labels, Mapping):
        raise UserError(f"{noun} is a dictionary; expected a list with one for each example")
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if any(isinstance(value, list) for value in values):
        raise UserError(f"{noun} has several dimensions; expected one value for each row or example")
    return values
