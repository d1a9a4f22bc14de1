"""The measures of a model during its training: at checkpoints, with their folders, or in the readings of a monitor."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from istar.errors import UserError, shorten
from istar.files.writing import unescape_cell
from istar.geometry.collect import measures_file, trajectory_file
from istar.geometry.collect.measures_file import Measurements, interval_half_width
from istar.geometry.show import compare
from istar.geometry.show.compare import MeasuredModel
from istar.models.saved_checkpoints import Checkpoint, ModelArgument
from istar.runs.labels import shorten_model_name
from istar.runs.names import COMBINED, TRAINING, TRAJECTORY_KEYS

ASSUMED_GROUPS = 10
"""Number of groups of documents for errors of a training with lost settings: the default of `istar measure`."""


@dataclass(frozen=True)
class MeasuredTraining:
    """A model's measures at the checkpoints of its training, or in the readings of a monitor."""

    label: str  # name on the page, distinct among the trainings
    table: pd.DataFrame  # rows of `trajectory.csv` by ascending step: one per checkpoint, text and layer
    # Checkpoints with all their measures, by ascending step; for a comparison of trainings the first and the last one,
    # or none if their folders were deleted, and none of a monitor.
    checkpoints: Sequence[MeasuredModel] = ()
    has_steps: bool = True  # whether the column `step` has optimizer steps, and not positions in the given order

    @property
    def steps(self) -> list[int]:
        """Optimizer steps or positions of the checkpoints, in ascending order."""
        return sorted(map(int, self.table["step"].unique()))

    @property
    def is_monitored(self) -> bool:
        """Whether the measures are readings of `istar.Monitor`, which have no checkpoints."""
        return "sequences" in self.table

    @property
    def num_groups(self) -> int:
        """Number of independent groups for standard errors: of documents, `ASSUMED_GROUPS` if unknown, or sequences."""
        if self.is_monitored:
            return int(self.table["sequences"].min())
        return self.checkpoints[-1].num_groups if self.checkpoints else ASSUMED_GROUPS

    @property
    def last_layer(self) -> str:
        """Name of the last layer, before a final normalization, or of the last state; empty if there is none."""
        indices = self.table["layer"].str.extract(r"^layer_(\d+)$", expand=False).dropna().astype(int)
        return f"layer_{indices.max()}" if len(indices) else next(reversed(self.states), "")

    @property
    def states(self) -> list[str]:
        """Names of the states, from the input to the output."""
        return list(dict.fromkeys(self.table.dropna(subset="source")["layer"]))

    def select_layer(self, layer: str) -> pd.DataFrame:
        """Return the rows of a layer, a matrix or the final normalization's parameters, over all texts together."""
        sources = self.table["source"]
        texts = sources.dropna().unique()
        source = next((name for name in (COMBINED, TRAINING) if name in texts), next(iter(texts), None))
        # Embedding matrices and the gain of the final normalization do not depend on a text.
        return self.table[(self.table["layer"] == layer) & (sources.isna() | (sources == source))]

    def values_by_step(self, layer: str, measure: str) -> list[float]:
        """Return the values of a measure of a layer at each step, over all texts together; NaN where there is none."""
        rows = self.select_layer(layer)
        value_by_step = dict(zip(rows["step"], rows[measure], strict=True)) if measure in rows else {}
        return [float(value_by_step.get(step, math.nan)) for step in self.steps]

    def half_widths_by_step(self, layer: str, measure: str) -> list[float]:
        """Return the half-widths of the 95% intervals of a measure of a layer at each step; NaN where there is none."""
        errors = self.values_by_step(layer, f"{measure}_error")
        return [interval_half_width(measure, error, self.num_groups) for error in errors]

    def half_width_of_change(self, measure: str) -> float:
        """Return half the length of the 95% interval of the change of the last layer from the first to the last step.

        Without the folders of both checkpoints, it is the root of the sum of the squares of both values' half-widths.
        This tends to be too large, because both values are of the same documents.
        """
        if self.checkpoints:
            row = compare.find_last_difference(self.checkpoints[0], self.checkpoints[-1], measure)
            return math.nan if row is None else (row["high"] - row["low"]) / 2
        half_widths = self.half_widths_by_step(self.last_layer, measure)
        return math.hypot(half_widths[0], half_widths[-1])


def make_training(
    label: str, checkpoints: Sequence[Checkpoint], measured: Mapping[str, Measurements]
) -> MeasuredTraining:
    """Return the training of checkpoints that were measured, with their measurements by label.

    If the steps of all of them are known, they are sorted by step, and a checkpoint is called `step 1,000`, or by its
    name if several have the same step. Otherwise they keep their order, and are called by name and position.
    """
    checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.label in measured]
    counts = Counter(checkpoint.step for checkpoint in checkpoints)
    has_steps = None not in counts
    if has_steps:
        checkpoints = sorted(checkpoints, key=lambda checkpoint: checkpoint.step or 0)
    models, rows = [], []
    for position, checkpoint in enumerate(checkpoints, start=1):
        step = checkpoint.step if has_steps else position
        name = f"step {checkpoint.step:,}" if has_steps else f"{checkpoint.label} ({position} of {len(checkpoints)})"
        if has_steps and counts[checkpoint.step] > 1:
            name = f"{checkpoint.label} ({name})"
        models.append(MeasuredModel(name, measured[checkpoint.label]))
        keys = {"revision": checkpoint.label, "step": step}
        rows += [{**keys, **row} for row in trajectory_file.make_rows(measured[checkpoint.label])]
    return MeasuredTraining(label, pd.DataFrame(rows), models, has_steps)


def list_last_checkpoints(trainings: Sequence[MeasuredTraining]) -> list[MeasuredModel]:
    """Return the last checkpoints with existing folders, each with the label of its training."""
    return [
        MeasuredModel(training.label, training.checkpoints[-1].measurements)
        for training in trainings
        if training.checkpoints
    ]


def find_trajectory(path: str | Path) -> Path | None:
    """Return the file of a training's measures: the path of a CSV file, or `trajectory.csv` in a folder; else None."""
    path = Path(path)
    file = path if path.suffix == ".csv" else path / measures_file.TRAJECTORY_FILE
    return file if file.is_file() else None


def read_trainings(arguments: Sequence[ModelArgument]) -> list[MeasuredTraining]:
    """Read the measures of several trainings from the folders or the files that the command line names.

    A training without a label on the command line is labelled by its model, or by the file of a monitor; see
    `compare.choose_labels`.

    Raises a `UserError` if a folder lacks measures of a training, a checkpoint a step, or two trainings share a label.
    """
    tables = [_read_table(argument) for argument in arguments]
    names = [
        Path(argument.name).stem if "sequences" in table else shorten_model_name(table["model"].iloc[0])
        for argument, table in zip(arguments, tables, strict=True)
    ]
    labels = compare.choose_labels(arguments, names, "trainings")
    return [
        MeasuredTraining(label, table, _read_ends(argument, table))
        for argument, table, label in zip(arguments, tables, labels, strict=True)
    ]


def summarize_last_reading(training: MeasuredTraining) -> Measurements:
    """Return the measures in the last reading of a monitor's passes, as those of a model of which no more is known."""
    rows = pd.concat([training.select_layer(state) for state in training.states])
    rows = rows[rows["step"] == rows["step"].max()]
    measures = rows.set_index("layer").drop(columns=list(TRAJECTORY_KEYS), errors="ignore")
    return Measurements(
        model={"name": str(rows["model"].iloc[0]), "revision": None},
        weights="",
        identity="",
        settings={"step": int(rows["step"].iloc[0]), "groups": training.num_groups},
        sources={str(rows["source"].iloc[0]): measures.to_dict("index")},
        spectra={},
        matrices={},
        final_norm=None,
        kind="places",
    )


def _read_ends(argument: ModelArgument, table: pd.DataFrame) -> list[MeasuredModel]:
    path = find_trajectory(argument.name)
    assert path is not None
    folder, ends = path.parent, []
    for _, row in table.iloc[[0, -1]].iterrows():
        checkpoint = Checkpoint(str(row["revision"]), name="")
        try:
            measured = measures_file.read_measurement(folder / checkpoint.folder / measures_file.JSON_FILE)
        except UserError:
            return []
        ends.append(MeasuredModel(f"step {int(row['step']):,}", measured))
    return ends


def _read_table(argument: ModelArgument) -> pd.DataFrame:
    path = find_trajectory(argument.name)
    if path is None:
        if not Path(argument.name).exists():
            raise UserError(f"{argument.name}: there is no such file or folder; expected the measures of a training")
        raise UserError(
            f"{argument.name} holds no {measures_file.TRAJECTORY_FILE}; expected folders of istar measure --revisions "
            "or --checkpoints and files of istar.Monitor alone, or models alone"
        )
    text_columns = [name for name in TRAJECTORY_KEYS if name != "step"]
    try:
        dtypes = defaultdict[str, type](lambda: float)
        dtypes.update(dict.fromkeys(text_columns, str))
        rows = pd.read_csv(path, dtype=dtypes, keep_default_na=False, na_values=[""])
        rows[text_columns] = rows[text_columns].map(unescape_cell)
        without_step = rows.loc[rows["step"].isna(), "revision"]
        if rows.empty:
            raise ValueError("it has no rows")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read: {shorten(error)}; measure the training again") from error
    if len(without_step):
        raise UserError(
            f"{path}: {without_step.iloc[0]} has no step; measure the training with --steps, a table of the steps"
        )
    return rows.sort_values("step", kind="stable")
