"""Reader of a run's `geometry.json`, which holds geometric measures of its representations other than IsoScore."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from istar.errors import UserError, shorten
from istar.results import GEOMETRY


@dataclass(frozen=True)
class Geometry:
    """Measures on the validation set at the epoch with the best headline metric."""

    mean_activation: tuple[float, ...]  # mean over tokens of the last layer, one value per dimension
    two_nn: tuple[float, ...]  # TwoNN dimension of the first token by layer (0: embeddings), NaN where undefined


def read(folder: Path) -> Geometry | None:
    """Read the geometry of the run in `folder`; return None if the run has no such file.

    Raises:
        UserError: if the file cannot be read or has another structure.
    """
    path = folder / GEOMETRY
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        # NumPy turns None, which JSON has in place of NaN, into NaN.
        mean_activation, two_nn = (np.array(values[name], dtype=float) for name in ("mean_activation", "two_nn"))
        return Geometry(tuple(mean_activation.tolist()), tuple(two_nn.tolist()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a geometry that istar wrote: {shorten(repr(error))}") from error
