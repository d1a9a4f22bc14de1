"""`istar quantize`: the scores of saved models in float32 and in quantized forms, computed once and kept."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import track

from istar.errors import UserError, shorten
from istar.files import write_text
from istar.quantization import saved_runs
from istar.quantization.controls import FACTOR, Control
from istar.quantization.form_scores import FormScores, score_forms, with_control
from istar.quantization.linear_layers import ActivationScales, Form, WeightScales, parse_form
from istar.quantization.saved_runs import Subject
from istar.quantization.torch_int8 import TorchInt8
from istar.reports import cells
from istar.scores import displayed, is_lower_better

JSON = "quantization.json"
"""File with the scores of all models, from which an interrupted command goes on."""
FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """What is computed for each model.

    Attributes:
        forms: forms of quantization, with different names.
        calibration: number of training examples for static scales.
        seed: seed of their choice, and of the rotation.
        control: change of the model before it is quantized, see `istar.quantization.controls`.
        outlier_factor: factor of the control `outlier`.
    """

    forms: tuple[Form | TorchInt8, ...]
    calibration: int = 256
    seed: int = 0
    control: Control = "none"
    outlier_factor: float = FACTOR

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the forms."""
        return tuple(form.name for form in self.forms)

    def identity(self) -> dict[str, Any]:
        """Return the settings as plain data; those without effect have their default."""
        values = {**asdict(self), "forms": [{"name": form.name, **asdict(form)} for form in self.forms]}
        if self.control != "outlier":
            values["outlier_factor"] = FACTOR
        return values

    def __post_init__(self) -> None:
        """Raise a `UserError` for forms of the same name."""
        names = [form.name for form in self.forms]
        if not names or len(set(names)) < len(names):
            raise UserError(f"the forms are {', '.join(names) or 'none'}; expected different ones, at least one")


@dataclass(frozen=True)
class Quantized:
    """The scores of all models.

    Attributes:
        rows: a row for each model, see `wide_row`; runs also have the columns of
            `istar.reports.cells.add_selection_columns`.
        forms: names of the forms.
        left_out: why a run was left out, by its folder.
        settings: the settings in words, for captions.
    """

    rows: pd.DataFrame
    forms: tuple[str, ...]
    left_out: dict[str, str]
    settings: str


def quantize_runs(
    folders: Sequence[Path],
    settings: Settings,
    out: Path,
    data_dir: Path | None = None,
    console: Console | None = None,
) -> Quantized:
    """Score all finished runs below some folders; those whose scores are in `out` already are not computed again.

    Args:
        folders: folders of runs, or folders that hold runs.
        settings: what to compute.
        out: output folder; `JSON` in it is written after each run.
        data_dir: replaces the runs' folders of data; only for runs of one task.
        console: shows progress; None shows none.

    Raises:
        UserError: if no run can be scored, or the models or data of one cannot be loaded.
    """
    runs = saved_runs.read_runs(folders)
    frame = cells.add_selection_columns(runs)
    rows = cells.row_dicts(frame)
    reasons = {str(row["folder"]): saved_runs.reason_left_out(row) for row in rows}
    left_out = {**runs.read_errors, **{path: reason for path, reason in reasons.items() if reason}}
    usable = [row for row in rows if not reasons[str(row["folder"])]]
    if not usable:
        path, reason = next(iter(left_out.items()), ("no folder", "there is no run"))
        raise UserError(f"no run can be quantized; {path}: {reason}")
    if data_dir is not None and len({row["task"] for row in usable}) > 1:
        raise UserError("--data-dir is for runs of one task, but these have several; call istar quantize for each task")
    subjects = [
        saved_runs.run_subject(Path(row["folder"]), runs.records[str(row["folder"])], data_dir) for row in usable
    ]
    entries = _score_all(subjects, settings, out, console)
    table = pd.DataFrame([{**row, **wide_row(entry)} for row, entry in zip(usable, entries, strict=True)])
    return Quantized(table, settings.names, left_out, in_words(settings))


def quantize_model(
    folder: Path, task: str, settings: Settings, out: Path, data_dir: Path | None = None, console: Console | None = None
) -> Quantized:
    """Score a single model that `save_pretrained` wrote, with a head for a task.

    Raises:
        UserError: if the model or the data cannot be loaded, or the model has no head for the task.
    """
    subject = saved_runs.model_subject(folder, task, data_dir)
    [entry] = _score_all([subject], settings, out, console)
    about = {
        "name": subject.name,
        "folder": str(folder),
        "task": task,
        "model": subject.name,
        "method": "",
        "seed": None,
    }
    rows = pd.DataFrame([{**about, **wide_row(entry)}])
    return Quantized(rows, settings.names, {}, in_words(settings))


def wide_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of one model from its entry in `JSON`.

    The columns are `metric`, its `recorded` value (of the training, in its precision) and `float32`, each form, the
    drop of each form as `<form>_drop`, `<form>_collapsed`, and the measures of `Activations`. Scores are as
    `istar.scores.displayed` gives them. A drop is positive if the form is worse than float32 of the same model.
    """
    metric = entry["metric"]
    floating = displayed(metric, entry["floating"])
    recorded = entry["recorded"]
    row = {"metric": metric, "recorded": None if recorded is None else displayed(metric, recorded), "float32": floating}
    for name, value in entry["forms"].items():
        row[name] = displayed(metric, value)
        row[f"{name}_drop"] = drop(metric, entry["floating"], value)
        row[f"{name}_collapsed"] = entry["collapsed"][name]
    measures = entry["activations"]
    return {**row, "kurtosis": measures["kurtosis"], "largest_activation": measures["largest"],
            "isoscore": measures["isoscore"]}  # fmt: skip


def drop(metric: str, floating: float, quantized: float) -> float:
    """Return by how much a form is worse than float32, in the unit of `istar.scores.displayed`; negative if better.

    >>> drop("accuracy", 0.9, 0.875), drop("perplexity", 30.0, 31.0)
    (2.5, 1.0)
    """
    difference = displayed(metric, floating) - displayed(metric, quantized)
    return -difference if is_lower_better(metric) else difference


def parse_forms(
    names: str, weights: WeightScales = "channel", activations: ActivationScales = "tensor"
) -> tuple[Form | TorchInt8, ...]:
    """Return the forms of names separated by commas, such as `w8a8,int8`.

    Raises:
        UserError: if a name is none of a form.
    """
    listed = [name.strip() for name in names.split(",")]
    return tuple(TorchInt8(weights) if name == "int8" else parse_form(name, weights, activations) for name in listed)


def in_words(settings: Settings) -> str:
    """Return the settings in sentences."""
    sentences = []
    weights = {"channel": "each output channel", "tensor": "the whole matrix"}[settings.forms[0].weights]
    sentences.append(f"Weights have a scale for {weights}.")
    simulated = [form for form in settings.forms if isinstance(form, Form)]
    if simulated and simulated[0].activations == "token":
        sentences.append("Activations have a scale for each token (dynamic).")
    elif simulated:
        examples = f"{settings.calibration} training examples"
        sentences.append(f"Activations have a scale for the whole tensor, calibrated on {examples} (static).")
    if "int8" in settings.names:
        sentences.append("int8 is torch's dynamic quantization, with a scale for all activations of a batch.")
    if settings.control == "rotate":
        sentences.append("Control: inputs and weights of the linear layers were rotated at random before.")
    elif settings.control == "outlier":
        factor = f"{settings.outlier_factor:g}"
        sentences.append(
            f"Control: one input of each output projection of attention was multiplied by {factor} before."
        )
    return " ".join(sentences)


def _score_all(
    subjects: Sequence[Subject], settings: Settings, out: Path, console: Console | None
) -> list[dict[str, Any]]:
    """Return the entry of each subject, and keep all of them in `JSON` after each one that is computed."""
    kept = read_entries(out / JSON)
    entries: list[dict[str, Any]] = []
    for number, subject in enumerate(subjects, 1):
        key = _identity(subject, settings)
        entry = kept.get(key)
        if entry is None:
            if console is not None:
                text = f"{number} of {len(subjects)}: {subject.name}"
                console.print(text, highlight=False, soft_wrap=True, markup=False)
            loaded = saved_runs.load(subject, settings.calibration, settings.seed)
            loaded = with_control(loaded, settings.control, settings.outlier_factor, settings.seed)
            entry = _entry(subject, score_forms(loaded, settings.forms, _watcher(console)))
            kept[key] = entry
            _write_entries(out / JSON, kept)
        entries.append(entry)
    return entries


def _entry(subject: Subject, scores: FormScores) -> dict[str, Any]:
    recorded = None if subject.record is None else subject.record.metrics.get(scores.metric)
    return {"name": subject.name, "recorded": recorded, **asdict(scores)}


def _watcher(console: Console | None) -> Callable[[Iterable[Any], str], Iterable[Any]]:
    """Return a function that shows a progress bar for the batches of a pass, if the console is a terminal."""
    is_hidden = console is None or not console.is_terminal

    def watch(batches: Iterable[Any], description: str) -> Iterable[Any]:
        return track(batches, description, console=console, transient=True, disable=is_hidden)

    return watch


def _identity(subject: Subject, settings: Settings) -> str:
    """Return a hash of all that determines a model's entry: weights, data, settings and the version of torch."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    values = {"format": FORMAT, "subject": subject.identity(), "settings": settings.identity(), "versions": versions}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """Read the entries of an earlier command by their identity; none if there is no file.

    Raises:
        UserError: if the file is damaged, or of another format.
    """
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise UserError(f"{path} has format {values['format']}; this version reads {FORMAT}; name another --out")
        return dict(values["entries"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no scores of istar quantize: {shorten(error)}; name another --out") from error


def _write_entries(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    try:
        write_text(path, json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {shorten(error)}; name another --out") from error
