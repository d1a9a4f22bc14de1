"""Expands the lists of values in sweep files and on the command line into the trials of a sweep."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from istar.config import Config
from istar.errors import UserError

_NOT_SWEPT = ("run.", "logger")  # prefixes of the keys that do not change the results of a run

Overrides = tuple[str, ...]
Space = dict[str, Override]  # the search space of one grid: an override for each key, with one value or several


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    overrides: Overrides  # the overrides of the run, as on the command line
    config: Config  # the config that the overrides compose
    name: str  # the name of the run's folder
    study: str | None = None  # the trial of an Optuna search, as `istar.training.pruning` reads it; None in a grid


def spaces(
    arguments: Sequence[str],
    params: Mapping[str, Any],
    grids: Mapping[str, Mapping[str, Any]],
    only: Sequence[str],
    config_loader: ConfigLoader | None = None,
) -> dict[str, Space]:
    """The search space of each grid: the keys common to all grids, then the grid's keys, then the command line.

    A key that both a grid and the command line name takes the values of the command line. Grids without such a key
    ignore it, because their config may not have it.

    Args:
        arguments: overrides of the command line; those of `sweep.` keys are ignored.
        params: values by key, common to all grids.
        grids: values by key for each grid; an empty mapping means one grid without keys.
        only: names of the grids to use; empty means all.
        config_loader: lists the options of a config group for `glob(*)`, which cannot be used without it.

    Raises:
        UserError: if the command line chooses the option of a config group that the grids choose, too, or if a
            `glob` matches no option.
        HydraException: if an override cannot be parsed.
    """
    parser = OverridesParser.create(config_loader)
    parsed = parser.parse_overrides(list(arguments))
    command_line = {item.key_or_group: item for item in parsed if not item.key_or_group.startswith("sweep.")}
    grid_keys = {key for grid in grids.values() for key in grid}
    for key in sorted(command_line.keys() & grid_keys):
        if "." not in key and key != "seed":
            names = f"[{','.join(grids)}]"
            raise UserError(f"{key} is what the grids of this sweep differ by; choose with sweep.only={names}")
    result = {}
    for name, grid in (grids or {"": {}}).items():
        if only and name not in only:
            continue
        texts = [f"{key}={_override_value(value)}" for key, value in {**params, **grid}.items()]
        space = {override.key_or_group: override for override in parser.parse_overrides(texts)}
        space |= {key: override for key, override in command_line.items() if key not in grid_keys or key in grid}
        for override in space.values():
            if override.is_choice_sweep() and not list(override.sweep_string_iterator()):
                raise UserError(
                    f"{override.input_line}: no option matches; glob(...) chooses options of a config group"
                )
        result[name] = space
    return result


def _override_value(value: Any) -> str:
    """A value of a YAML file in the syntax of Hydra's command line; a list becomes several values to sweep over."""
    if isinstance(value, list):
        return ",".join(map(_override_value, value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def combinations(space: Space) -> list[Overrides]:
    """All combinations of a space's values without duplicates; the last key changes fastest.

    Raises a `UserError` if a key has a continuous interval instead of a list of values.
    """
    choices = []
    for override in space.values():
        if not override.is_sweep_override():
            choices.append([override.input_line or ""])
        elif override.is_discrete_sweep():
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            message = "an interval is for sweep.search=optuna; a grid needs a list of values"
            raise UserError(f"{override.input_line}: {message}")
    return list(dict.fromkeys(itertools.product(*choices)))


def with_seed(overrides: Overrides, seed: int) -> Overrides:
    """Replace the seed in the overrides of a run, or add it."""
    return (*(override for override in overrides if not override.startswith("seed=")), f"seed={seed}")


def identity(grids: Mapping[str, Space], *settings: Any) -> str:
    """Six hexadecimal digits that identify spaces and settings, so that a repeated command resumes its sweep."""
    overrides = []
    for space in grids.values():
        overrides.append([override.input_line for key, override in space.items() if not key.startswith(_NOT_SWEPT)])
    return hashlib.sha256(json.dumps([overrides, *settings]).encode()).hexdigest()[:6]
