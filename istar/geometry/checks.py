"""Bounds of measures, as of `istar measure --check`, and what is beyond them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd

from istar.errors import UserError, did_you_mean, shorten
from istar.files.parsing import find_mismatch, read_yaml
from istar.geometry.collect.measures_file import interval_half_width
from istar.measures.catalogue import find_measure, suggest_measure

Bounds = tuple[float | None, float | None]
"""Smallest and largest value that is accepted; None for no bound."""
Checks = Mapping[str, Mapping[str, Bounds]]
"""Bounds by pattern of states and by measure."""


@dataclass(frozen=True)
class Violation:
    """A measure beyond its bounds. `str()` is a line that says so."""

    measure: str
    state: str  # name of the state; with several steps or texts, "step, text, state"
    value: float  # NaN if the measure is undefined
    low: float  # ends of the 95% interval; NaN without a standard error
    high: float
    bounds: Bounds

    def __str__(self) -> str:
        smallest, largest = self.bounds
        limits = [f"at least {smallest:g}"] if smallest is not None else []
        limits += [f"at most {largest:g}"] if largest is not None else []
        value = f"{self.value:.4g}, without a standard error"
        if math.isnan(self.value):
            value = "undefined"
        elif math.isfinite(self.low):
            value = f"{self.value:.4g}, with a 95% interval from {self.low:.4g} to {self.high:.4g}"
        return f"{self.measure} of {self.state} is {value}; expected {' and '.join(limits)}"


def read_checks(path: str | Path) -> dict[str, dict[str, Bounds]]:
    """Read a YAML file of bounds, and return them by pattern of states and by measure.

    The file has a list of the smallest and the largest value for each measure, with null for no bound:

        layer_*:
          isoscore: [0.05, null]
          inter_sim: [null, 0.5]

    Raises:
        UserError: if the file cannot be read, a measure is unknown, or its bounds are not two numbers or null.
    """
    content = read_yaml(Path(path))
    if mismatch := find_mismatch(content, dict[str, dict[str, list[float | None]]], "the content"):
        raise UserError(f"{path}: {mismatch}, such as layer_*: {{isoscore: [0.05, null]}}")
    try:
        return {
            str(pattern): {
                find_measure(str(name)).name: parse_bounds(str(name), bounds) for name, bounds in by_name.items()
            }
            for pattern, by_name in content.items()
        }
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def parse_bounds(name: str, bounds: Any) -> Bounds:
    """Return the bounds of a measure as a pair of floats or None; raise a `UserError` for anything else."""
    is_pair = isinstance(bounds, list | tuple) and len(bounds) == 2
    limits = [limit for limit in bounds if limit is not None] if is_pair else []
    are_numbers = all(isinstance(limit, int | float) for limit in limits) and not any(map(math.isnan, limits))
    if not (limits and are_numbers and limits == sorted(limits)):
        raise UserError(
            f"the bounds of {name} are {shorten(bounds, 60)}; expected the smallest and the largest value, with None "
            "(null in YAML) for one without a bound"
        )
    low, high = (None if limit is None else float(limit) for limit in bounds)
    return low, high


def find_violations(table: pd.DataFrame, num_groups: int, checks: Checks) -> Iterator[Violation]:
    """Yield the values of a table that are beyond their bounds; see `istar.geometry.geometry.Geometry.check`.

    Args:
        table: as `Geometry.table`.
        num_groups: number of groups for standard errors.
        checks: bounds by pattern of states and by measure; see `read_checks`.

    Raises:
        UserError: if the table lacks a measure, or no state matches a pattern.
    """
    states = list(map(str, table.index.get_level_values("state")))
    measures = [name for name in map(str, table) if not name.endswith("_error")]
    for pattern, bounds_by_measure in checks.items():
        rows = table[[state == pattern or fnmatchcase(state, pattern) for state in states]]
        if rows.empty:
            known = ", ".join(dict.fromkeys(states))
            raise UserError(f"no state matches {pattern!r}{did_you_mean(pattern, states)}; expected one of {known}")
        for name, bounds in bounds_by_measure.items():
            if name not in measures:
                hint = suggest_measure(name, measures) or f"; expected one of {', '.join(measures)}"
                raise UserError(f"{name} was not measured{hint}")
            intervals = make_intervals(rows, name, num_groups)
            smallest, largest = parse_bounds(name, bounds)
            for index, (value, low, high) in zip(rows.index, intervals.itertuples(index=False), strict=True):
                low_end = low if math.isfinite(low) else value
                high_end = high if math.isfinite(low) else value
                # NaN is within no bounds.
                is_within = (smallest is None or high_end >= smallest) and (largest is None or low_end <= largest)
                if not is_within:
                    state = ", ".join(map(str, index)) if isinstance(index, tuple) else str(index)
                    yield Violation(name, state, value, low, high, (smallest, largest))


def make_intervals(table: pd.DataFrame, measure: str, num_groups: int) -> pd.DataFrame:
    """Return the columns `value`, `low` and `high` of a measure: its 95% interval, NaN without a standard error."""
    values = table[measure].astype(float)
    errors = table.get(f"{measure}_error", pd.Series(math.nan, table.index))
    half_widths = errors.astype(float).map(lambda error: interval_half_width(measure, error, num_groups))
    return pd.DataFrame({"value": values, "low": values - half_widths, "high": values + half_widths})
