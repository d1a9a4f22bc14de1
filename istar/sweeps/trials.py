"""Which runs a sweep asks for: from lists of values, in the sweep's file and on the command line, to overrides."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from istar.config import Config
from istar.errors import UserError

_NOT_SWEPT = ("run.", "logger")
"""Beginnings of the keys that change nothing about which runs these are."""

Overrides = tuple[str, ...]
Space = dict[str, Override]
"""What one grid spans: an override for each key, with one value or several."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        overrides: as on the command line.
        config: what they compose.
        name: of the run's folder.
        study: the trial of a search that it is, as `istar.training.pruning` reads it.
    """

    overrides: Overrides
    config: Config
    name: str
    study: str | None = None


def spaces(
    arguments: Sequence[str], params: Mapping[str, Any], grids: Mapping[str, Mapping[str, Any]], only: Sequence[str]
) -> dict[str, Space]:
    """What each grid spans: its own keys, those common to all, and on top those of the command line.

    A key that some grid names and the command line too takes the command line's values in the grids that name it, and
    is left out of the others, which may not have such a key.

    Args:
        arguments: overrides of the command line; the `sweep` keys say how, not what, and are left out.
        params: values by key, for all grids.
        grids: values by key, for each grid by its name; none is one grid without keys of its own.
        only: names of the grids that count; none for all.

    Raises:
        UserError: if the command line chooses the option of a group by which the grids differ.
        HydraException: for an override that cannot be parsed.
    """
    parser = OverridesParser.create()
    parsed = parser.parse_overrides(list(arguments))
    given = {own.key_or_group: own for own in parsed if not own.key_or_group.startswith("sweep.")}
    named = {key for grid in grids.values() for key in grid}
    for key in sorted(given.keys() & named):
        if "." not in key and key != "seed":
            raise UserError(f"{key} is what the grids of this sweep differ by; choose with sweep.only={_listed(grids)}")
    chosen = {name: grid for name, grid in (grids or {"": {}}).items() if not only or name in only}
    found = {}
    for name, grid in chosen.items():
        own = parser.parse_overrides([f"{key}={_values(value)}" for key, value in {**params, **grid}.items()])
        space = {override.key_or_group: override for override in own}
        space |= {key: override for key, override in given.items() if key not in named or key in grid}
        found[name] = space
    return found


def _listed(grids: Mapping[str, Any]) -> str:
    return f"[{','.join(grids)}]"


def _values(value: Any) -> str:
    """A value of a YAML file as Hydra's command line has it; a list is a list of values to sweep over."""
    if isinstance(value, list):
        return ",".join(map(_values, value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def combinations(space: Space) -> list[Overrides]:
    """All combinations of a space's values; the last key changes fastest.

    Raises:
        UserError: for a continuous interval.
    """
    choices = []
    for override in space.values():
        if not override.is_sweep_override():
            choices.append([override.input_line or ""])
        elif override.is_discrete_sweep():
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            raise UserError(
                f"{override.input_line}: an interval is for sweep.search=optuna; a grid needs a list of values"
            )
    return list(dict.fromkeys(itertools.product(*choices)))


def with_seed(overrides: Overrides, seed: int) -> Overrides:
    """The same run with another seed."""
    return (*(override for override in overrides if not override.startswith("seed=")), f"seed={seed}")


def identity(found: Mapping[str, Space], *settings: Any) -> str:
    """Six hexadecimal digits for what is swept over: the same command finds the sweep that it has begun."""
    told = [
        [override.input_line for key, override in space.items() if not key.startswith(_NOT_SWEPT)]
        for space in found.values()
    ]
    return hashlib.sha256(json.dumps([told, *settings]).encode()).hexdigest()[:6]
