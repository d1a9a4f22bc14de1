"""Reads a run's `geometry.json`, the geometric measures of its final model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

from istar.errors import UserError
from istar.files.parsing import MissingFileError, read_record
from istar.runs.record import GEOMETRY

_Count = Annotated[int, 0]


class IsoScoreStar(TypedDict):
    """IsoScore* of the states of all validation tokens; see `istar.finetune.training.final_geometry`."""

    zeta: float
    num_points: _Count  # points of the training data in Sigma_S, counted over the union of layers 1 to L
    union: float | None  # IsoScore* of the union of layers 1 to L
    layers: dict[str, float | None]  # IsoScore* by layer (0: embeddings), with the Sigma_S of the layer


class RunGeometry(TypedDict):
    """Measures on the validation set at the epoch with the best headline metric; None where they are undefined."""

    examples: _Count  # number of examples used for `mean_activation`
    mean_activation: list[float | None]  # mean over tokens of the last layer, one value per dimension
    two_nn: list[float | None]  # TwoNN dimension of the first token by layer (0: embeddings)
    isoscore_star: NotRequired[IsoScoreStar]


def read_geometry(folder: Path) -> RunGeometry | None:
    """Read the geometry of the run in `folder`; None without a `geometry.json`.

    Raises:
        UserError: if the file cannot be read or has another structure.
    """
    path = folder / GEOMETRY
    try:
        geometry: RunGeometry = read_record(path, RunGeometry, "a geometry")
    except MissingFileError:
        return None
    layers = geometry["isoscore_star"]["layers"] if "isoscore_star" in geometry else {}
    if layers.keys() != set(map(str, range(len(layers)))):
        raise UserError(f"{path} is not a geometry: isoscore_star.layers lacks a layer")
    return geometry


def read_geometries(folders: Iterable[str]) -> tuple[dict[str, RunGeometry], dict[str, str]]:
    """Return the geometries of runs, and the error messages of broken files, both by folder."""
    geometry_by_folder, read_errors = {}, {}
    for folder in folders:
        try:
            if (geometry := read_geometry(Path(folder))) is not None:
                geometry_by_folder[folder] = geometry
        except UserError as error:
            read_errors[folder] = str(error)
    return geometry_by_folder, read_errors
