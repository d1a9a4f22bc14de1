"""Metadata of the fields of a run's config: their keys on the command line, and when a value matters to the outcome."""

from collections.abc import Callable
from dataclasses import Field
from typing import Any

FURTHER_KEYS = {"further_keys": True}
"""Metadata of a field that collects the group's keys without a field, by name."""
NEVER_MATTERS = {"never_matters": True}
"""Metadata of a field that does not change the outcome of a run, or only through its data or its model."""


def matters(*, if_: Callable[[Any], bool] | None = None, as_: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Return the metadata of a field with a value that does not always matter to the outcome of a run.

    Args:
        if_: whether the value matters, given the `Config` of a run. If it does not, the default counts.
        as_: the value that counts, given the `Config` of a run. Values with the same effect have the same one.
    """
    return {"matters_if": if_, "matters_as": as_}


def value_that_counts(option: "Field[Any]", group: Any, config: Any) -> Any:
    """Return the value of a field of a group of a `Config`, or the one that counts instead, see `matters`."""
    is_used, find_value = option.metadata.get("matters_if"), option.metadata.get("matters_as")
    if find_value is not None:
        return find_value(config)
    return getattr(group, option.name) if is_used is None or is_used(config) else option.default


def never_matters(option: "Field[Any]") -> bool:
    """Return whether a field does not change the outcome of a run, or only through its data or its model."""
    return "never_matters" in option.metadata


def collects_further_keys(option: "Field[Any]") -> bool:
    """Return whether a field collects the keys of its group that have no field."""
    return "further_keys" in option.metadata


def key_of(option: "Field[Any]") -> str:
    """Return the key of a field on the command line. It differs for `lambda`, which is a Python keyword."""
    return str(option.metadata.get("key", option.name))
