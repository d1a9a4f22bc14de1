"""The settings of a run that change its outcome."""

from dataclasses import fields, is_dataclass
from typing import Any

from istar.finetune.config.fields import collects_further_keys, key_of, never_matters, value_that_counts
from istar.finetune.config.groups import Config


def settings_of(config: Config) -> dict[str, Any]:
    """Return what decides the outcome of a run besides its data and its model, as plain data.

    Configs with equal settings describe the same run. The groups and keys are those of the command line. Fields that
    never matter are left out, and a value without an effect is replaced by the one that counts; the metadata of each
    field says which, see `istar.finetune.config.fields.matters`. A penalty of weight 0 counts as `reg=none`.

    Raises:
        UserError: if `find_task_spec` refuses the task.
    """
    return _select_settings(config, config)


def _select_settings(group: Any, config: Config) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for option in fields(group):
        if never_matters(option):
            continue
        value = value_that_counts(option, group, config)
        if collects_further_keys(option):
            settings |= value
        else:
            settings[key_of(option)] = _select_settings(value, config) if is_dataclass(value) else value
    return settings
