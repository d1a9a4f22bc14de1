"""`istar compare`: the measures of several models side by side, from their `measures.json` files."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import pandas as pd
from rich.table import Table

from istar.errors import UserError
from istar.geometry.collect import measures_file
from istar.geometry.collect.layer_outputs import FINAL_NORM
from istar.geometry.collect.measures_file import Measurements
from istar.measures.catalogue import MEASURES

SUMMARY_MEASURES = tuple(measure.name for measure in MEASURES if measure.summary)
"""Measures of the last layer that the table of all models shows."""
_SETTINGS_WITHOUT_EFFECT = ("batch_tokens",)
"""Settings of a pass that do not change its measures."""
SETTING_NAMES = {"limit": "max_tokens", "intra": "intra_sim"}
"""Names on pages of the settings whose names in `measures.json` are not those of their options."""


@dataclass(frozen=True)
class MeasuredModel:
    """A model of a comparison, with its measures."""

    label: str  # name on the page, distinct among the compared models
    measurements: Measurements

    @property
    def last_layer_measures(self) -> dict[str, float]:
        """Measures of the last layer's output, before a final normalization, over all texts together."""
        return self.layer_measures[-1]

    @property
    def layer_measures(self) -> list[dict[str, float]]:
        """Measures of the embeddings and of each layer's output over all texts together.

        The states after a final normalization are left out.
        """
        return [measures for tap, measures in self.measurements.all_texts.items() if tap != FINAL_NORM]

    @property
    def final_norm_measures(self) -> dict[str, float] | None:
        """Measures of the states after the final normalization, over all texts together; None if there is none."""
        return self.measurements.all_texts.get(FINAL_NORM)

    @property
    def num_groups(self) -> int:
        """Number of groups of documents from which standard errors are computed; 0 for none."""
        return int(self.measurements.settings.get("groups") or 0)

    @property
    def relative_depths(self) -> list[float]:
        """Depth of the embeddings and of each layer, from 0 for the embeddings to 1 for the last layer."""
        num_layers = max(1, len(self.layer_measures) - 1)
        return [index / num_layers for index in range(len(self.layer_measures))]

    @property
    def prediction_matrix(self) -> str:
        """Name of the embedding matrix nearest to the prediction: `output` if the model has its own, else `input`."""
        return "output" if "output" in self.measurements.matrices else "input"


@dataclass(frozen=True)
class ModelArgument:
    """A model that the command line names: a finished folder of `istar measure`, a model, or a run."""

    label: str  # label given on the command line; empty for none
    name: str  # folder or hub id
    revision: str | None = None  # revision on the hub

    @property
    def is_measured(self) -> bool:
        """Whether this is a folder that `istar measure` has finished."""
        return (Path(self.name) / measures_file.JSON_FILE).is_file()

    @property
    def has_trajectory(self) -> bool:
        """Whether this is a folder that `istar measure` has written for the checkpoints or revisions of a training."""
        return (Path(self.name) / measures_file.TRAJECTORY_FILE).is_file()

    @property
    def model_name(self) -> str:
        """Hub id or folder of the model; for a run of train.py, its folder `model`."""
        model_folder = Path(self.name) / "model"
        return str(model_folder) if (model_folder / "config.json").is_file() else self.name

    @property
    def default_label(self) -> str:
        """The given label, or else the last part of the name with the revision, which can also name a folder."""
        return self.label or "-".join(filter(None, (PurePath(self.name).name, self.revision)))


def parse_compared_models(arguments: Sequence[str]) -> list[ModelArgument]:
    """Parse the models of a comparison, each written as `[label=]<folder, run or hub id>[@revision]`.

    Raises:
        UserError: if there are fewer than two, or one of them is given twice.
    """
    if len(arguments) < 2:
        raise UserError("a comparison needs two models or more; give their names, or folders of istar measure")
    return parse_models(arguments)


def parse_models(arguments: Sequence[str]) -> list[ModelArgument]:
    """Parse one or more models, each written as `[label=]<folder, run or hub id>[@revision]`.

    Raises:
        UserError: if one of them is given twice.
    """
    models: list[ModelArgument] = []
    for argument in arguments:
        label, _, name = argument.rpartition("=")
        revision = None
        if not Path(name).exists():
            name, _, revision = name.partition("@")
        models.append(ModelArgument(label, name, revision or None))
    for index, model in enumerate(models):
        if (model.name, model.revision) in [(other.name, other.revision) for other in models[:index]]:
            raise UserError(f"{arguments[index]} is given twice; give each model once")
    return models


def label_models(arguments: Sequence[ModelArgument], measurements: Sequence[Measurements]) -> list[MeasuredModel]:
    """Give the measurements of each model a distinct label.

    A model without a label on the command line is labelled by its name and its revision, if it has one. If several
    models have the same name, the folder's name is added.

    Raises:
        UserError: if two models have the same label.
    """
    labels = [
        argument.label or _name_model(model_measurements)
        for argument, model_measurements in zip(arguments, measurements, strict=True)
    ]
    repeated_labels = _find_repeated(labels)
    for index, argument in enumerate(arguments):
        if not argument.label and labels[index] in repeated_labels:
            labels[index] = f"{labels[index]} ({PurePath(argument.name).name})"
    if remaining_duplicates := sorted(_find_repeated(labels)):
        raise UserError(f"several models are called {remaining_duplicates[0]}; give them names, as in first=<model>")
    return [
        MeasuredModel(label, model_measurements) for label, model_measurements in zip(labels, measurements, strict=True)
    ]


def _find_repeated(names: Iterable[str]) -> set[str]:
    """Return the names that occur more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


def _name_model(measurements: Measurements) -> str:
    """Return the short name of a measured model, with its revision if it has one."""
    name, revision = shorten_model_name(measurements.model["name"]), measurements.model.get("revision")
    return f"{name} at {revision}" if revision else name


def shorten_model_name(name: str) -> str:
    """Return the last part of a hub id or folder, or of a folder `model` the name of the folder that holds it."""
    path = PurePath(name)
    return (path.parent.name if path.name == "model" and path.parent.name else path.name) or name


def have_same_texts(first: MeasuredModel, other: MeasuredModel) -> bool:
    """Return whether two models were measured over texts of the same content, whatever the files are called."""
    hashes = [sorted(model.measurements.text_hashes.values()) for model in (first, other)]
    return hashes[0] == hashes[1]


def describe_differences(models: Sequence[MeasuredModel]) -> list[str]:
    """Return sentences on the models whose texts or settings differ from those of the first model.

    The values of such models cannot be compared. Models that differ in the same way share a sentence.
    """
    labels_by_difference: dict[str, list[str]] = {}
    first_model = models[0]
    for other_model in models[1:]:
        first_settings, settings = (dict(model.measurements.settings) for model in (first_model, other_model))
        for name in ("texts", *_SETTINGS_WITHOUT_EFFECT):
            first_settings.pop(name, None)
            settings.pop(name, None)
        if not have_same_texts(first_model, other_model):
            difference = f"measured over other texts than {first_model.label}"
            labels_by_difference.setdefault(difference, []).append(other_model.label)
        setting_names = sorted(first_settings.keys() | settings.keys())
        changed_settings = [key for key in setting_names if first_settings.get(key) != settings.get(key)]
        if changed_settings:
            changes = "; ".join(
                f"{SETTING_NAMES.get(key, key)} {settings.get(key)} instead of {first_settings.get(key)}"
                for key in changed_settings
            )
            difference = f"measured with other settings than {first_model.label}: {changes}"
            labels_by_difference.setdefault(difference, []).append(other_model.label)
    return [
        f"{list_names(labels)} {'was' if len(labels) == 1 else 'were'} {difference}."
        for difference, labels in labels_by_difference.items()
    ]


def list_names(names: Sequence[str]) -> str:
    """Join names as in a sentence: `a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def join_names(names: Sequence[str]) -> str:
    """Join names as in a title: all of up to three names, otherwise the first two and the number of the others."""
    if len(names) > 3:
        return f"{names[0]}, {names[1]} and {len(names) - 2} others"
    return list_names(names)


def make_layer_rows(models: Sequence[MeasuredModel]) -> Iterator[dict[str, Any]]:
    """Yield a row for each layer of each model, with its relative depth and all measures.

    A final normalization, which follows the last layer, has no relative depth.
    """
    for model in models:
        for tap_index, (tap, measures) in enumerate(model.measurements.all_texts.items()):
            depth = math.nan if tap == FINAL_NORM else model.relative_depths[tap_index]
            yield {"model": model.label, "layer": tap, "relative_depth": depth, **measures}


def summarize_models(models: Sequence[MeasuredModel]) -> pd.DataFrame:
    """Return one row for each model: its size, measures of its last layer, I(W) by form, and its final normalization.

    I(W) is that of the matrix nearest to the prediction. It is taken over both signs of the eigenvectors, because only
    this convention is comparable between models.
    """
    rows = []
    for model in models:
        measurements = model.measurements
        measures_by_form = measurements.matrices[model.prediction_matrix]
        final_norm = measurements.final_norm or {}
        row = {
            "model": model.label,
            "type": measurements.model["type"],
            "layers": len(model.layer_measures) - 1,
            "dimensions": measurements.width,
            "tokens": model.last_layer_measures["tokens"],
            **{name: model.last_layer_measures.get(name, math.nan) for name in SUMMARY_MEASURES},
            "matrix": model.prediction_matrix,
        }
        row |= {f"partition_{form}": measures["partition_isotropy_both"] for form, measures in measures_by_form.items()}
        row |= {
            "norm_ratio": measures_by_form["raw"]["norm_ratio"],
            "gain": final_norm.get("gain", math.nan),
            "bias": final_norm.get("bias", math.nan),
            "weights": measurements.weights,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def make_terminal_table(models: Sequence[MeasuredModel]) -> Table:
    """Return a table for the terminal, with measures of the last layer and I(W) of each model."""
    summary = summarize_models(models)
    columns = (*SUMMARY_MEASURES, "partition_raw")
    headers = [measures_file.TABLE_HEADERS[name] for name in SUMMARY_MEASURES] + ["I(W)"]
    values_by_model = {str(row["model"]): [float(row[name]) for name in columns] for row in summary.to_dict("records")}
    title = "The last layer of each model, and I(W) by both signs"
    return measures_file.number_table(title, "model", headers, values_by_model)
