"""`trajectory.csv`: the measures of a model at several checkpoints of its training, as a table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from istar.drawing.page_folder import PageKind
from istar.files.writing import to_csv
from istar.geometry.collect.measures_file import TRAJECTORY_FILE, Measurements
from istar.models.saved_checkpoints import Checkpoint

if TYPE_CHECKING:
    from istar.geometry.collect.pass_settings import MeasureSettings
    from istar.texts.corpus import Source

TRAINING_KIND = PageKind("trajectory", "istar measure, over a training", (TRAJECTORY_FILE,))


@dataclass(frozen=True)
class TrajectoryPlan:
    """What to measure at each checkpoint of a training, and where to write the results; see `measure.measure_texts`."""

    model: str  # name of the model in the table
    texts: Sequence["Source"]  # texts to measure the model over
    settings: "MeasureSettings"  # how the texts are read
    out: Path  # folder for the table and for one folder per checkpoint
    dtype: str = "float32"  # dtype of the weights
    device: str = "auto"  # device of the model
    command: str = ""  # command line that the page shows


@dataclass
class Trajectory:
    """Measurements of checkpoints, and error messages of failed checkpoints, by checkpoint label."""

    measurements: dict[str, Measurements] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def make_trajectory_table(
    plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint], trajectory: Trajectory
) -> pd.DataFrame:
    """Return the table in `trajectory.csv`: the rows of `make_rows` for all checkpoints that were measured."""
    rows = []
    for checkpoint in checkpoints:
        if checkpoint.label in trajectory.measurements:
            measured = trajectory.measurements[checkpoint.label]
            keys = {"model": plan.model, "revision": checkpoint.label, "step": checkpoint.step}
            rows += [{**keys, "weights": measured.weights, **row} for row in make_rows(measured)]
    return pd.DataFrame(rows).convert_dtypes()


def make_csv(plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint], trajectory: Trajectory) -> bytes:
    """Return the content of `trajectory.csv`."""
    return to_csv(make_trajectory_table(plan, checkpoints, trajectory)).encode()


def make_rows(measured: Measurements) -> Iterator[dict[str, Any]]:
    """Yield a checkpoint's rows of `trajectory.csv`, without the columns that identify the checkpoint.

    There is one row per text and layer, one per embedding matrix, and one for a final normalization.
    """
    for source, measures_by_layer in measured.sources.items():
        for layer, measures in measures_by_layer.items():
            yield {"source": source, "layer": layer, **measures}
    for matrix, measures_by_form in measured.matrices.items():
        row: dict[str, Any] = {"source": None, "layer": f"{matrix}_embeddings"}
        for form, measures in measures_by_form.items():
            prefix = "" if form == "raw" else f"{form}_"
            row |= {f"{prefix}{name}": value for name, value in measures.items() if isinstance(value, float)}
        yield row
    if measured.final_norm is not None:
        names = ("gain", "bias", "ratio", "bias_over_gain")
        columns = {f"layer_norm_{name}": measured.final_norm[name] for name in names}
        yield {"source": None, "layer": "final_norm_parameters", **columns}
