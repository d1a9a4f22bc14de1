"""Expands the lists of values in sweep files and on the command line into the trials of a sweep."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override

from istar.errors import UserError
from istar.finetune.config import Config
from istar.finetune.config.schema import OPTIONS_BY_GROUP
from istar.finetune.sweeps.live_table import SweepEntry
from istar.runs.key import RunKey
from istar.runs.record import RunRecord

_IGNORED_KEY_PREFIXES = ("run.", "logger")  # prefixes of keys that do not change the results of a run

_OF_OPTIONS = re.compile(rf"({'|'.join(OPTIONS_BY_GROUP)})[.=]")  # an override of such a group

Overrides = tuple[str, ...]
SearchSpace = dict[str, Override]  # the search space of one grid: an override for each key, with one value or several


@dataclass
class Trial:
    """One run of a sweep, which may have ended."""

    config: Config  # the config that its overrides compose
    entry: SweepEntry  # its entry in the sweep's state, with its name and its overrides
    key: RunKey | None = None  # None if its data cannot be loaded
    record: RunRecord | None = None  # if the run was finished when it was added
    optuna_trial: str | None = None  # address of the trial in an Optuna search, see `Study.trial_address`

    @property
    def name(self) -> str:
        return self.entry.name


def make_search_spaces(
    arguments: Sequence[str],
    params: Mapping[str, Any],
    grids: Mapping[str, Mapping[str, Any]],
    only: Sequence[str],
    config_loader: ConfigLoader | None = None,
) -> dict[str, SearchSpace]:
    """Return the search space of each grid: the keys common to all grids, the keys of the grid, and the command line.

    The command line takes precedence over a grid, except that several values do not replace the single value of a
    grid, which is fixed on purpose. A key that only other grids have is ignored, because the config of this grid may
    not have it.

    Args:
        arguments: overrides of the command line; `sweep.` keys are ignored.
        params: values by key, common to all grids.
        grids: values by key for each grid; an empty mapping means one grid without keys.
        only: names of the grids to use; empty means all.
        config_loader: Hydra's loader, which lists the options of a config group; needed only for `glob(*)`.

    Raises a `UserError` if command line and grids choose the option of the same config group, a `glob` matches no
    option, or a range or an interval is empty, and Hydra's error if an override cannot be parsed.
    """
    parser = OverridesParser.create(config_loader)
    overrides = parser.parse_overrides(list(arguments))
    command_line = {
        override.key_or_group: override for override in overrides if not override.key_or_group.startswith("sweep.")
    }
    grid_keys = {key for grid in grids.values() for key in grid}
    for key in sorted(command_line.keys() & grid_keys):
        if not sets_value(key):
            grid_names = f"[{','.join(grids)}]"
            raise UserError(f"{key} is what the grids of this sweep differ by; choose with sweep.only={grid_names}")
    space_by_grid = {}
    for name, grid in (grids or {"": {}}).items():
        if only and name not in only:
            continue
        override_texts = [f"{key}={_format_override_value(value)}" for key, value in {**params, **grid}.items()]
        space = {override.key_or_group: override for override in parser.parse_overrides(override_texts)}
        for key, override in command_line.items():
            is_fixed = key in grid and override.is_sweep_override() and not space[key].is_sweep_override()
            if (key in grid and not is_fixed) or key not in grid_keys:
                space[key] = override
        for override in space.values():
            _check_is_not_empty(override)
        space_by_grid[name] = space
    return space_by_grid


def _check_is_not_empty(override: Override) -> None:
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        is_empty = (sweep.start or 0) > (sweep.end or 0)
    else:
        is_empty = override.is_sweep_override() and next(override.sweep_string_iterator(), None) is None
    if not is_empty:
        return
    if override.is_choice_sweep():
        raise UserError(f"{override.input_line}: no option matches; glob(...) chooses options of a config group")
    raise UserError(f"{override.input_line} is empty; expected bounds in order, such as range(1,4) or interval(1,4)")


def _format_override_value(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_format_override_value, value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def list_combinations(space: SearchSpace) -> list[Overrides]:
    """List the overrides of all combinations of a search space's values, the last key fastest, without duplicates.

    Raises a `UserError` if a key has a continuous interval instead of a list of values.
    """
    choices_by_key = []
    for override in space.values():
        if not override.is_sweep_override():
            choices_by_key.append([override.input_line or ""])
        elif override.is_discrete_sweep():
            choices_by_key.append(
                [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            )
        else:
            message = "an interval is for sweep.search=optuna; a grid needs a list of values"
            raise UserError(f"{override.input_line}: {message}")
    return list(dict.fromkeys(itertools.product(*choices_by_key)))


def sets_value(override: str) -> bool:
    """Return whether an override, or its key alone, sets a value rather than choosing an option of a config group."""
    key = override.partition("=")[0]
    return "." in key or key == "seed"


def allow_options_without_key(arguments: Sequence[str]) -> list[str]:
    """Write each single value for a swept group as a list of one value: `reg=none,vicreg reg.gamma=choice(2)`.

    Hydra composes a config from the single values and the default options before the sweep begins. It would refuse
    `reg.gamma=2`, because the default of `reg` lacks the key `gamma`.
    """
    parser = OverridesParser.create()
    grouped = {text: parser.parse_override(text) for text in arguments if _OF_OPTIONS.match(text)}
    swept_keys = {override.key_or_group for override in grouped.values() if override.is_sweep_override()}
    fixed_values = {
        text: f"{override.key_or_group}=choice({text.partition('=')[2]})"
        for text, override in grouped.items()
        if override.key_or_group.partition(".")[0] in swept_keys and not override.is_sweep_override()
    }
    return [fixed_values.get(text, text) for text in arguments]


def replace_seed(overrides: Overrides, seed: int) -> Overrides:
    """Replace the seed in the overrides of a run, or add it."""
    return (*(override for override in overrides if not override.startswith("seed=")), f"seed={seed}")


def sweep_hash(space_by_grid: Mapping[str, SearchSpace], *settings: Any) -> str:
    """Return six hexadecimal digits that identify search spaces and settings.

    They are part of the name of the sweep's folder, so that a repeated command resumes its sweep.
    """
    overrides_by_grid = [
        [override.input_line for key, override in space.items() if not key.startswith(_IGNORED_KEY_PREFIXES)]
        for space in space_by_grid.values()
    ]
    return hashlib.sha256(json.dumps([overrides_by_grid, *settings]).encode()).hexdigest()[:6]
