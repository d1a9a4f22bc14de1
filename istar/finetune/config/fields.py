"""Metadata of the fields of a run's config: their keys on the command line, and when a value matters to the outcome."""

from collections.abc import Callable, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

FURTHER_KEYS = {"further_keys": True}
"""Metadata of a field that contains all keys of its group without a field, as a dictionary."""
NEVER_MATTERS = {"never_matters": True}
"""Metadata of a field that does not change the outcome of a run, or only through its data or its model."""


def matters(*, if_: Callable[[Any], bool] | None = None, as_: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Return the metadata of a field with a value that does not always matter to the outcome of a run.

    Args:
        if_: takes the `Config` of a run, and returns whether the value matters. If it does not, the default counts.
        as_: takes the `Config` of a run, and returns the value that counts, the same for all values with one effect.
    """
    return {"matters_if": if_, "matters_as": as_}


def values_that_count(group: Any, config: Any) -> dict[str, Any]:
    """Return the values that count in a group, or in the whole `Config`, by key; see `matters`."""
    settings: dict[str, Any] = {}
    for option in fields(group):
        is_used = option.metadata.get("matters_if")
        find_value = option.metadata.get("matters_as")
        if "never_matters" in option.metadata:
            continue
        if find_value is not None:
            value = find_value(config)
        else:
            value = getattr(group, option.name) if is_used is None or is_used(config) else option.default
        if collects_further_keys(option):
            settings |= value
        else:
            settings[key_of(option)] = values_that_count(value, config) if is_dataclass(value) else value
    return settings


def collects_further_keys(option: "Field[Any]") -> bool:
    """Return whether a field collects all other keys of its group."""
    return "further_keys" in option.metadata


def key_of(option: "Field[Any]") -> str:
    """Return the key of a field on the command line. It differs for `lambda`, which is a Python keyword."""
    return str(option.metadata.get("key", option.name))


def format_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as they are written on the command line.

    >>> format_settings({"monitor.every": None, "monitor.measures": ["inter_sim", "isoscore"]})
    'monitor.every=null monitor.measures=[inter_sim,isoscore]'
    """

    def format_value(value: Any) -> str:
        return f"[{','.join(value)}]" if isinstance(value, list) else "null" if value is None else str(value)

    return " ".join(f"{key}={format_value(value)}" for key, value in settings.items())
