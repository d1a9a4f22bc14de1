"""`geometry.json`: what a run has measured of its representations beside IsoScore*."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from istar.errors import UserError, shorten

NAME = "geometry.json"


@dataclass(frozen=True)
class Geometry:
    """Of the validation set, at the headline's epoch.

    Attributes:
        mean_activation: `d` numbers: mean over tokens of the last layer.
        two_nn: TwoNN dimension of the first token's states by layer (0: embeddings), NaN where it is not defined.
    """

    mean_activation: tuple[float, ...]
    two_nn: tuple[float, ...]


def read(folder: Path) -> Geometry | None:
    """A run's geometry; None where it has none.

    Raises:
        UserError: if the file is not what a run leaves.
    """
    path = folder / NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Geometry(_numbers(values["mean_activation"]), _numbers(values["two_nn"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a geometry that istar wrote: {shorten(repr(error))}") from error


def _numbers(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise ValueError("a list of numbers was expected")
    return tuple(math.nan if value is None else float(value) for value in values)


def mean(rows: Sequence[Sequence[float]]) -> list[float]:
    """Mean of each column over the rows that have a number there; NaN where none has.

    Args:
        rows: of equal length.
    """
    known = [[value for value in column if math.isfinite(value)] for column in zip(*rows, strict=True)]
    return [math.fsum(column) / len(column) if column else math.nan for column in known]
