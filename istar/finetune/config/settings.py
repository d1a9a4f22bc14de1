"""The settings of a run that change its outcome, as the metadata of the config's fields say."""

from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # its groups use this module
    from istar.finetune.config.groups import Config

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


def settings_of(config: "Config") -> dict[str, Any]:
    """Return what decides the outcome of a run besides its data and its model, as plain data.

    Configs with equal settings describe the same run. The groups and keys are those of the command line. Fields that
    never matter are left out, and a value without an effect is replaced by the one that counts; the metadata of each
    field says which, see `matters`. A penalty of weight 0 counts as `reg=none`. Raises a `UserError` if
    `find_task_spec` refuses the task.
    """
    return _select_settings(config, config)


def _select_settings(group: Any, config: "Config") -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for option in fields(group):
        is_used, find_value = option.metadata.get("matters_if"), option.metadata.get("matters_as")
        if "never_matters" in option.metadata:
            continue
        if find_value is not None:
            value = find_value(config)
        else:
            value = getattr(group, option.name) if is_used is None or is_used(config) else option.default
        if collects_further_keys(option):
            settings |= value
        else:
            settings[key_of(option)] = _select_settings(value, config) if is_dataclass(value) else value
    return settings


def collects_further_keys(option: "Field[Any]") -> bool:
    """Return whether a field collects the keys of its group that have no field."""
    return "further_keys" in option.metadata


def key_of(option: "Field[Any]") -> str:
    """Return the key of a field on the command line. It differs for `lambda`, which is a Python keyword."""
    return str(option.metadata.get("key", option.name))
