"""The measures of a model at the checkpoints of its training, from the files of `istar measure`."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from istar.errors import UserError
from istar.geometry.collect import measures_file
from istar.geometry.collect.intervals import interval_half_width
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.show.model_figures import num_document_groups
from istar.inputs.corpus import COMBINED
from istar.inputs.saved_checkpoints import Checkpoint

ASSUMED_GROUPS = 10
"""Number of groups of documents for errors of a training whose settings are gone: the default of `istar measure`."""


@dataclass(frozen=True)
class MeasuredTraining:
    """A model's measures at the checkpoints of its training."""

    label: str  # name on the page, distinct among the trainings
    folder: Path  # folder that `istar measure` wrote
    measures: pd.DataFrame  # rows of `trajectory.csv`: one per checkpoint, text and layer, by ascending step

    @property
    def steps(self) -> list[int]:
        """Optimizer steps of the checkpoints, in ascending order."""
        return sorted(map(int, self.measures["step"].unique()))

    @property
    def last_layer(self) -> str:
        """Name of the last layer, before a final normalization; empty if no layer was measured."""
        indices = self.measures["layer"].str.extract(r"^layer_(\d+)$", expand=False).dropna().astype(int)
        return f"layer_{indices.max()}" if len(indices) else ""

    @cached_property
    def first_measurements(self) -> Measurements | None:
        """Measurements of the first checkpoint; None if its folder has been deleted."""
        return self._read_checkpoint(0)

    @cached_property
    def last_measurements(self) -> Measurements | None:
        """Measurements of the last checkpoint; None if its folder has been deleted."""
        return self._read_checkpoint(-1)

    def _read_checkpoint(self, row_index: int) -> Measurements | None:
        """Read the measurements of the checkpoint in this row of the table; return None if they cannot be read."""
        checkpoint = Checkpoint(str(self.measures["revision"].iloc[row_index]), name="")
        try:
            return measures_file.read(self.folder / checkpoint.folder / measures_file.JSON_FILE)
        except UserError:
            return None

    def half_widths_by_step(self, layer: str, measure_name: str) -> list[float]:
        """Return the half-widths of the 95% intervals of a measure of a layer at each step; NaN where there is none.

        If the number of groups of documents is unknown, it is assumed to be `ASSUMED_GROUPS`.
        """
        last = self.last_measurements
        num_groups = ASSUMED_GROUPS if last is None else num_document_groups(last)
        error_name = f"{measure_name}_error"
        errors = self.values_by_step(layer, error_name)
        return [interval_half_width({error_name: error}, measure_name, num_groups) for error in errors]

    def values_by_step(self, layer: str, measure_name: str) -> list[float]:
        """Return the values of a measure of a layer at each step, over all texts together; NaN where there is none."""
        if measure_name not in self.measures:
            return [math.nan] * len(self.steps)
        sources = self.measures["source"]
        texts = sources.dropna().unique()
        source = COMBINED if COMBINED in texts else next(iter(texts), None)
        # Embedding matrices and the gain of the final normalization do not depend on a text.
        rows = self.measures[(self.measures["layer"] == layer) & (sources.isna() | (sources == source))]
        value_by_step = dict(zip(rows["step"], rows[measure_name], strict=True))
        return [float(value_by_step.get(step, math.nan)) for step in self.steps]
