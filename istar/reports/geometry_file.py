"""Reads a run's `geometry.json`, the geometric measures of its final model."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

from istar.errors import UserError
from istar.files.parsing import MissingFileError, read_record
from istar.records.results import GEOMETRY

_Count = Annotated[int, 0]


class _IsoScoreStarFields(TypedDict):
    zeta: float
    num_points: _Count
    union: float
    layers: dict[str, float]


class _GeometryFields(TypedDict):
    examples: _Count
    mean_activation: list[float | None]
    two_nn: list[float | None]
    isoscore_star: NotRequired[_IsoScoreStarFields]


@dataclass(frozen=True)
class IsoScoreStar:
    """IsoScore* of the states of all validation tokens; see `istar.finetune.training.final_geometry`."""

    zeta: float
    num_points: int  # points of the training data in Sigma_S, counted over the union of layers 1 to L
    union: float  # IsoScore* of the union of layers 1 to L
    layers: tuple[float, ...]  # IsoScore* of each layer (0: embeddings), with the Sigma_S of the layer


@dataclass(frozen=True)
class Geometry:
    """Measures on the validation set at the epoch with the best headline metric."""

    num_examples: int  # number of examples used for `mean_activation`
    mean_activation: tuple[float, ...]  # mean over tokens of the last layer, one value per dimension
    two_nn: tuple[float, ...]  # TwoNN dimension of the first token by layer (0: embeddings), NaN where undefined
    isoscore_star: IsoScoreStar | None = None  # None if the run did not measure it


def read_geometry(folder: Path) -> Geometry | None:
    """Read the geometry of the run in `folder`; None without a `geometry.json`.

    Raises:
        UserError: if the file cannot be read or has another structure.
    """
    path = folder / GEOMETRY
    try:
        fields: _GeometryFields = read_record(path, _GeometryFields, "a geometry")
    except MissingFileError:
        return None
    isoscore_star = None
    if (star := fields.get("isoscore_star")) is not None:
        layers = [str(layer) for layer in range(len(star["layers"]))]
        if star["layers"].keys() != set(layers):
            raise UserError(f"{path} is not a geometry: isoscore_star.layers lacks a layer")
        scores = tuple(float(star["layers"][layer]) for layer in layers)
        isoscore_star = IsoScoreStar(float(star["zeta"]), star["num_points"], float(star["union"]), scores)
    # JSON has None in place of NaN.
    mean_activation, two_nn = (
        tuple(math.nan if number is None else float(number) for number in numbers)
        for numbers in (fields["mean_activation"], fields["two_nn"])
    )
    return Geometry(fields["examples"], mean_activation, two_nn, isoscore_star)


def read_geometries(folders: Iterable[str]) -> tuple[dict[str, Geometry], dict[str, str]]:
    """Return the geometries of runs, and the error messages of broken files, both by folder."""
    geometry_by_folder, read_errors = {}, {}
    for folder in folders:
        try:
            if (geometry := read_geometry(Path(folder))) is not None:
                geometry_by_folder[folder] = geometry
        except UserError as error:
            read_errors[folder] = str(error)
    return geometry_by_folder, read_errors
