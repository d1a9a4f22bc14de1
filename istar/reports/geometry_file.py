"""Reader of a run's `geometry.json`, which holds geometric measures of its final model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from istar.errors import UserError, shorten
from istar.results import GEOMETRY


@dataclass(frozen=True)
class IsoScoreStar:
    """IsoScore* of the states of all validation tokens; see `istar.training.validation_isoscore_star`."""

    zeta: float
    num_points: int  # points of the training data in Sigma_S, counted over the union of layers 1 to L
    union: float  # IsoScore* of the union of layers 1 to L
    layers: tuple[float, ...]  # IsoScore* of each layer (0: embeddings), with the Sigma_S of the layer


@dataclass(frozen=True)
class Geometry:
    """Measures on the validation set at the epoch with the best headline metric."""

    num_examples: int  # examples whose tokens `mean_activation` is computed from
    mean_activation: tuple[float, ...]  # mean over tokens of the last layer, one value per dimension
    two_nn: tuple[float, ...]  # TwoNN dimension of the first token by layer (0: embeddings), NaN where undefined
    isoscore_star: IsoScoreStar | None = None  # None if the run did not measure it


def read_geometry(folder: Path) -> Geometry | None:
    """Read the geometry of the run in `folder`; return None if the run has no `geometry.json`.

    Raises:
        UserError: if the file cannot be read or has another structure.
    """
    path = folder / GEOMETRY
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        # NumPy turns None, which JSON has in place of NaN, into NaN.
        mean_activation, two_nn = (np.array(fields[name], dtype=float) for name in ("mean_activation", "two_nn"))
        isoscore_star = _parse_isoscore_star(fields["isoscore_star"]) if "isoscore_star" in fields else None
        return Geometry(int(fields["examples"]), tuple(mean_activation.tolist()), tuple(two_nn.tolist()), isoscore_star)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a geometry that istar wrote: {shorten(repr(error))}") from error


def _parse_isoscore_star(fields: Mapping[str, Any]) -> IsoScoreStar:
    """Return the IsoScore* of a run from its fields in `geometry.json`."""
    score_by_layer = fields["layers"]
    scores = tuple(float(score_by_layer[str(layer)]) for layer in range(len(score_by_layer)))
    return IsoScoreStar(float(fields["zeta"]), int(fields["num_points"]), float(fields["union"]), scores)
