"""Differences of several geometries from the first, for notebooks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from istar.drawing.page_tables import number_entry
from istar.errors import UserError
from istar.geometry.geometry import Geometry, draw_measures, load, make_html
from istar.geometry.show import compare_page, findings, terminal_tables
from istar.geometry.show.compare import (
    SUMMARY_MEASURES,
    MeasuredModel,
    compute_all_differences,
    describe_other_settings,
    pair_layers,
)
from istar.geometry.show.measured_training import MeasuredTraining, list_last_checkpoints
from istar.geometry.show.model_figures import MEASURE_TITLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from istar.geometry.collect.mean_states import Similarity

_KEYS, _ROW_KEYS = ["label", "state", "measure"], ("model", "layer", "measure")
"""What identifies a difference: columns of `Comparison.table`, and keys of `compute_all_differences`."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Differences of several geometries from the first, as `istar.compare` returns them.

    Args:
        models: the geometries with their labels; the first is the one that the others are compared with.
        similarities: CKA of all pairs of states, for each pair of geometries that has common examples.
        trainings: the trainings, if all geometries are of one; the models are then their last measures.
    """

    models: tuple[MeasuredModel, ...]
    similarities: tuple[Similarity, ...] = ()
    trainings: tuple[MeasuredTraining, ...] = ()

    @cached_property
    def _table(self) -> pd.DataFrame:
        intervals = {tuple(row[key] for key in _ROW_KEYS): row for row in compute_all_differences(self.models)}
        first, *others = self.models
        rows = []
        for other in others:
            for first_state, state in pair_layers(first, other):
                before, after = first.measurements.all_texts[first_state], other.measurements.all_texts[state]
                for name in [name for name in MEASURE_TITLES if name in before and name in after]:
                    row = intervals.get((other.label, state, name), {"low": math.nan, "high": math.nan, "method": ""})
                    values = (before[name], after[name], after[name] - before[name])
                    rows.append((other.label, state, name, *values, row["low"], row["high"], row["method"]))
        return pd.DataFrame(rows, columns=[*_KEYS, "first", "other", "difference", "low", "high", "method"])

    @property
    def table(self) -> pd.DataFrame:
        """A row for each other geometry, state and measure, as a new data frame at each access.

        The columns are `label`, `state`, `measure`, `first` and `other` (the two values), their `difference`, the ends
        `low` and `high` of its 95% interval, and `method`: `paired` if both have the same examples in the same groups,
        else `independent`. Without an interval, low and high are NaN, and the method is empty. Clouds are paired by
        name, models with the same number of layers layer by layer, and other models at their last layers.
        """
        return self._table.copy()

    @property
    def similarity(self) -> Mapping[tuple[str, str], pd.DataFrame]:
        """CKA by pair of labels: the states of the first are the index, and those of the second the columns."""
        return {
            (pair.first, pair.second): pd.DataFrame(pair.values, pair.first_taps, pair.second_taps)
            for pair in self.similarities
        }

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """Sentences on the largest differences and unusual values, on other settings, and on the intervals."""
        if self.trainings:
            return tuple(findings.describe_findings(list_last_checkpoints(self.trainings), self.trainings))
        return (
            *findings.describe_findings(self.models),
            *describe_other_settings(self.models),
            *compare_page.describe_error_methods(self.models),
        )

    def plot(self, *measures: str) -> Figure:
        """Draw a panel for each measure, with a line for each geometry over the relative depth; see `Geometry.plot`.

        Trainings have lines over the steps: of the last layer, of the state after a final norm, and of embeddings.
        """
        return draw_measures(self.models, measures, self.trainings)

    def save(self, folder: str | Path) -> Path:
        """Write what `istar compare` writes: index.html with its figures and tables, and the measures as CSV.

        Returns:
            The path of the page.

        Raises:
            UserError: if the folder cannot be written, or has files of another origin in their places.
        """
        if self.trainings:
            return compare_page.write_trainings(self.trainings, Path(folder))
        return compare_page.write_comparison(self.models, Path(folder), self.similarities)

    @property
    def _title(self) -> str:
        return f"Differences from {self.models[0].label}, with 95% intervals"

    @cached_property
    def _summary(self) -> pd.DataFrame:
        """The main measures of the last state of each model, or of each cloud, as texts."""
        last = {model.label: [model.last_layer] if model.is_ordered else model.layers for model in self.models}
        rows = self._table[self._table["measure"].isin(SUMMARY_MEASURES)]
        rows = rows[[state in last[label] for label, state in zip(rows["label"], rows["state"], strict=True)]]
        half_widths = (rows["high"] - rows["low"]) / 2
        differences = [number_entry(*cell).text for cell in zip(rows["difference"], half_widths, strict=True)]
        values = rows[["first", "other"]].map(lambda value: number_entry(value).text)
        return rows[_KEYS].assign(**values, difference=differences, method=rows["method"])

    def __repr__(self) -> str:
        frame = self._summary.drop(columns="method")
        table = terminal_tables.text_table(self._title, list(map(str, frame)), frame.to_numpy().tolist(), num_labels=3)
        return terminal_tables.to_plain_text(table)

    def _repr_html_(self) -> str:
        return make_html(self._title, self._summary, self.findings)


def compare(geometries: Mapping[str, Geometry | str | Path], /, *, similarity: bool | None = None) -> Comparison:
    """Compare two geometries or more with the first.

    >>> import istar
    >>> comparison = istar.compare({"base": "geometry/base", "tuned": "geometry/tuned"})  # doctest: +SKIP
    >>> comparison.table.query("measure == 'isoscore'")  # doctest: +SKIP

    Args:
        geometries: by label, as objects, as the folders of `istar measure`, or as the files of `istar.Monitor`. Measure
            models first.
        similarity: whether to compute CKA of the mean states of the examples with equal ids, for every state with every
            state of each pair. None: where examples were kept and at least 4 ids are equal.

    Returns:
        The differences with their 95% intervals. They are paired, by the jackknife over the same groups, if both were
        measured over the same examples: over equal texts, or with equal `ids`, in any order. Otherwise the squares of
        the errors are added, and a finding says so.

    Raises:
        UserError: for fewer than two geometries, clouds with models, no common state, and with `similarity=True` for
            examples that were not kept or have other ids.
    """
    if not isinstance(geometries, Mapping):
        raise UserError(
            f"geometries are a {type(geometries).__name__}; expected them by label: {{'a': first, 'b': other}}"
        )
    if len(geometries) < 2:
        raise UserError(f"{len(geometries)} geometries cannot be compared; expected two or more, by label")
    for label, value in geometries.items():
        if not isinstance(value, Geometry | str | Path):
            raise UserError(
                f"{label} is a {type(value).__name__}; expected a Geometry, as istar.measure returns, or its folder"
            )
    loaded = {label: value if isinstance(value, Geometry) else load(value) for label, value in geometries.items()}
    models = tuple(MeasuredModel(label, geometry.measurements) for label, geometry in loaded.items())
    for model in models[1:]:
        if model.is_ordered != models[0].is_ordered:
            kinds = f"{models[0].label} has {models[0].words['states']}, {model.label} has {model.words['states']}"
            raise UserError(f"{kinds}; expected geometries of the same kind")
        if not pair_layers(models[0], model):
            names = ", ".join(loaded[model.label].states)
            raise UserError(f"{model.label} ({names}) has no state of {models[0].label}; expected equal names")
    pairs = itertools.combinations(loaded.items(), 2)
    similarities = tuple(_compare_examples(pairs, similarity)) if similarity is not False else ()
    trainings = [
        replace(geometry.training, label=label) for label, geometry in loaded.items() if geometry.training is not None
    ]
    return Comparison(models, similarities, tuple(trainings) if len(trainings) == len(models) else ())


def _compare_examples(
    pairs: Iterator[tuple[tuple[str, Geometry], tuple[str, Geometry]]], similarity: bool | None
) -> Iterator[Similarity]:
    for (first_label, first), (second_label, second) in pairs:
        if first.examples is None or second.examples is None:
            if similarity:
                label = first_label if first.examples is None else second_label
                raise UserError(f"{label} has no mean states of examples; measure again, and save with examples=True")
            continue
        from istar.geometry.collect.mean_states import MIN_EXAMPLES, compare_examples  # loads torch

        if similarity or len(set(first.examples.ids) & set(second.examples.ids)) >= MIN_EXAMPLES:
            yield compare_examples(first_label, first.examples, second_label, second.examples)
