"""`istar compare`: the measures of several models side by side, from their `measures.json` files."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import pandas as pd
from rich.table import Table

from istar.errors import UserError
from istar.geometry import measure
from istar.geometry.measure import Measurements
from istar.geometry.taps import FINAL_NORM

TABLE = "comparison.csv"
SUMMARY_MEASURES = ("isoscore", "inter_sim", "intra_sim", "two_nn", "effective_rank", "average_norm")
"""Measures of the last layer that the table of all models shows."""


@dataclass(frozen=True)
class Subject:
    """A model of a comparison, with its measures."""

    label: str  # name on the page, distinct among the subjects
    measured: Measurements

    @property
    def last_layer(self) -> dict[str, float]:
        """Measures of the last layer's output, before a final normalization, over all texts together."""
        return self.layers[-1]

    @property
    def layers(self) -> list[dict[str, float]]:
        """Measures of the embeddings and of each layer's output over all texts together, without a final norm."""
        return [figures for tap, figures in self.measured.all_texts.items() if tap != FINAL_NORM]

    @property
    def final_norm(self) -> dict[str, float] | None:
        """Measures of the states after the final normalization, over all texts together; None if there is none."""
        return self.measured.all_texts.get(FINAL_NORM)

    @property
    def groups(self) -> int:
        """Number of groups of documents from which standard errors are computed; 0 for none."""
        return int(self.measured.settings.get("groups") or 0)

    @property
    def relative_depths(self) -> list[float]:
        """The depth of each of `layers`: 0 for the embeddings, 1 for the last layer."""
        last = max(1, len(self.layers) - 1)
        return [number / last for number in range(len(self.layers))]

    @property
    def matrix(self) -> str:
        """The embedding matrix nearest to the prediction: `output` if the model has one of its own, else `input`."""
        return "output" if "output" in self.measured.matrices else "input"


@dataclass(frozen=True)
class Choice:
    """A model that the command line names: a finished folder of `istar measure`, a model, or a run."""

    label: str  # name that was given to it; empty for none
    name: str  # folder or hub id
    revision: str | None = None  # revision on the hub

    @property
    def is_measured(self) -> bool:
        """Whether this is a folder that `istar measure` has finished."""
        return (Path(self.name) / measure.JSON_FILE).is_file()

    @property
    def model(self) -> str:
        """Hub id or folder of the model; for a run of train.py, its folder `model`."""
        inside = Path(self.name) / "model"
        return str(inside) if (inside / "config.json").is_file() else self.name

    @property
    def default_label(self) -> str:
        """The label, or else a name that can also name a folder."""
        return self.label or "-".join(filter(None, (PurePath(self.name).name, self.revision)))


def choices(arguments: Sequence[str]) -> list[Choice]:
    """Parse the models on the command line, each as `[label=]<folder, run or hub id>[@revision]`.

    Raises:
        UserError: if there are fewer than two, or one of them is given twice.
    """
    if len(arguments) < 2:
        raise UserError("a comparison needs two models or more; give their names, or folders of istar measure")
    return parse_models(arguments)


def parse_models(arguments: Sequence[str]) -> list[Choice]:
    """Parse one or more models as `choices` does.

    Raises:
        UserError: if one of them is given twice.
    """
    chosen = []
    for argument in arguments:
        label, _, name = argument.rpartition("=")
        revision = None
        if not Path(name).exists():
            name, _, revision = name.partition("@")
        chosen.append(Choice(label, name, revision or None))
    for number, choice in enumerate(chosen):
        if (choice.name, choice.revision) in [(other.name, other.revision) for other in chosen[:number]]:
            raise UserError(f"{arguments[number]} is given twice; give each model once")
    return chosen


def subjects(chosen: Sequence[Choice], measured: Sequence[Measurements]) -> list[Subject]:
    """Label the measurements of the chosen models.

    Without a label of its own, a model's name is its label, with its revision if there is one; labels that would be
    equal get the folder's name.

    Raises:
        UserError: if two models have the same label.
    """
    names = [choice.label or _model_name(result) for choice, result in zip(chosen, measured, strict=True)]
    repeated = _repeated(names)
    for number, choice in enumerate(chosen):
        if not choice.label and names[number] in repeated:
            names[number] = f"{names[number]} ({PurePath(choice.name).name})"
    if duplicates := sorted(_repeated(names)):
        raise UserError(f"several models are called {duplicates[0]}; give them names, as in first=<model>")
    return [Subject(name, result) for name, result in zip(names, measured, strict=True)]


def _repeated(names: Iterable[str]) -> set[str]:
    """Return the names that occur more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


def _model_name(measured: Measurements) -> str:
    """Return the last part of a model's name, with its revision; of a run's `model/`, the run's name."""
    path = PurePath(measured.model["name"])
    name = path.parent.name if path.name == "model" and path.parent.name else path.name
    revision = measured.model.get("revision")
    return f"{name} at {revision}" if revision else name


def have_same_texts(first: Subject, other: Subject) -> bool:
    """Whether two models were measured over texts of the same content, whatever the files are called.

    Files of earlier versions hold no hashes of the content; then names and paths are compared.
    """
    hashes = [sorted(subject.measured.text_hashes.values()) for subject in (first, other)]
    if all(hashes):
        return hashes[0] == hashes[1]
    return bool(first.measured.settings["texts"] == other.measured.settings["texts"])


def differences(subjects: Sequence[Subject]) -> list[str]:
    """Return sentences on what makes the figures of these models incomparable: other texts or other settings."""
    sentences = []
    first = subjects[0]
    for other in subjects[1:]:
        settings, others = (dict(subject.measured.settings) for subject in (first, other))
        del settings["texts"], others["texts"]
        if not have_same_texts(first, other):
            sentences.append(f"{other.label} was measured over other texts than {first.label}.")
        changed = sorted(key for key in settings.keys() | others.keys() if settings.get(key) != others.get(key))
        if changed:
            values = "; ".join(f"{key} {others.get(key)} instead of {settings.get(key)}" for key in changed)
            sentences.append(f"{other.label} was measured with other settings than {first.label}: {values}.")
    return sentences


def rows(subjects: Sequence[Subject]) -> Iterator[dict[str, Any]]:
    """Yield a row for each layer of each model, with its relative depth and all measures.

    A final normalization, which is behind the last layer, has no relative depth.
    """
    for subject in subjects:
        for number, (tap, figures) in enumerate(subject.measured.all_texts.items()):
            depth = math.nan if tap == FINAL_NORM else subject.relative_depths[number]
            yield {"model": subject.label, "layer": tap, "relative_depth": depth, **figures}


def frame(subjects: Sequence[Subject]) -> pd.DataFrame:
    """Return `rows` as a data frame."""
    return pd.DataFrame(rows(subjects))


def summary(subjects: Sequence[Subject]) -> pd.DataFrame:
    """Return one row for each model: its size, measures of its last layer, I(W) by form, and its final normalization.

    I(W) is that of the matrix nearest to the prediction, with both signs of the eigenvectors, which is the convention
    that is comparable between models.
    """
    return pd.DataFrame(_summary_row(subject) for subject in subjects)


def _summary_row(subject: Subject) -> dict[str, Any]:
    measured = subject.measured
    matrix: Mapping[str, Mapping[str, Any]] = measured.matrices[subject.matrix]
    norm = measured.final_norm or {}
    return {
        "model": subject.label,
        "type": measured.model["type"],
        "layers": len(subject.layers) - 1,
        "dimensions": matrix["raw"]["dimensions"],
        "tokens": subject.last_layer["tokens"],
        **{name: subject.last_layer.get(name, math.nan) for name in SUMMARY_MEASURES},
        "matrix": subject.matrix,
        **{f"partition_{form}": figures["partition_isotropy_both"] for form, figures in matrix.items()},
        "norm_ratio": matrix["raw"]["norm_ratio"],
        "gain": norm.get("gain", math.nan),
        "bias": norm.get("bias", math.nan),
        "weights": measured.weights,
    }


def table(subjects: Sequence[Subject]) -> Table:
    """Return the terminal table: the last layer of each model, and I(W)."""
    shown = summary(subjects)
    names = (*SUMMARY_MEASURES, "partition_raw")
    labels = [measure.TABLE_HEADERS[name] for name in SUMMARY_MEASURES] + ["I(W)"]
    values = {str(row["model"]): [float(row[name]) for name in names] for row in shown.to_dict("records")}
    return measure.number_table("The last layer of each model, and I(W) by both signs", "model", labels, values)
