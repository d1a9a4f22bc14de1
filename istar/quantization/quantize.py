"""`istar quantize`: scores of saved models in float32 and under quantization schemes, computed once and kept."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from istar.drawing.page_folder import PageKind, page_output
from istar.errors import UserError
from istar.files.parsing import MissingFileError, read_record
from istar.quantization import saved_runs
from istar.quantization.equivalent_models import FACTOR, Control
from istar.quantization.form_scores import ModelScores, apply_checked_control, score_model
from istar.quantization.linear_layers import ActivationScales, Form, WeightScales, parse_form
from istar.quantization.saved_runs import SavedModel
from istar.quantization.torch_int8 import TorchInt8
from istar.records.metric_names import displayed, is_lower_better
from istar.reports import configurations

SCORES_FILE = "quantization.json"
KIND = PageKind("page of quantized models", "istar quantize", (SCORES_FILE,))
"""Name of the file with the scores of all models, from which an interrupted command resumes."""
FORMAT_VERSION = 1


class _SavedScores(TypedDict):
    entries: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class QuantizationSettings:
    """The quantization schemes under which each model is scored, and how.

    Attributes:
        forms: quantization schemes, with different names.
        calibration: number of training examples for static scales.
        seed: random seed for the choice of these examples, and for the control `rotate`.
        control: change of the model before it is quantized, see `istar.quantization.equivalent_models`.
        outlier_factor: factor of the control `outlier`.
    """

    forms: tuple[Form | TorchInt8, ...]
    calibration: int = 256
    seed: int = 0
    control: Control = "none"
    outlier_factor: float = FACTOR

    @property
    def scheme_names(self) -> tuple[str, ...]:
        """Return the names of the quantization schemes, such as `w8a8`."""
        return tuple(scheme.name for scheme in self.forms)

    def identity(self) -> dict[str, Any]:
        """Return JSON-serializable data that are equal for settings of the same effect."""
        values = {**asdict(self), "forms": [{"name": scheme.name, **asdict(scheme)} for scheme in self.forms]}
        if self.control != "outlier":
            values["outlier_factor"] = FACTOR
        return values

    def __post_init__(self) -> None:
        """Raise a `UserError` if there are no schemes, or two have the same name."""
        names = [scheme.name for scheme in self.forms]
        if not names or len(set(names)) < len(names):
            raise UserError(f"the forms are {', '.join(names) or 'none'}; expected different ones, at least one")


@dataclass(frozen=True)
class QuantizedScores:
    """The scores of all models in float32 and under each quantization scheme.

    Attributes:
        rows: a row for each model, see `make_table_row`; runs also have the columns of
            `istar.reports.configurations.add_selection_columns`.
        scheme_names: names of the quantization schemes.
        exclusion_reasons: the reason why a run was left out, by the folder of the run.
        settings_description: sentences that describe the settings, for captions.
    """

    rows: pd.DataFrame
    scheme_names: tuple[str, ...]
    exclusion_reasons: dict[str, str]
    settings_description: str


def quantize_runs(
    folders: Sequence[Path],
    settings: QuantizationSettings,
    out: Path,
    data_dir: Path | None = None,
    console: Console | None = None,
) -> QuantizedScores:
    """Score the models of all finished runs below the given folders, except for scores that `out` already holds.

    Args:
        folders: folders of runs, or folders that hold runs.
        settings: the quantization schemes and how they are applied.
        out: output folder; the file `SCORES_FILE` in it is written after each run.
        data_dir: replaces the folders of data that the runs recorded; only for runs of one task.
        console: shows progress; None shows none.

    Raises:
        UserError: if no run can be scored, or the model or the data of a run cannot be loaded.
    """
    runs = saved_runs.read_runs(folders, out)
    frame = configurations.add_selection_columns(runs)
    rows = configurations.row_dicts(frame)
    reason_by_folder = {str(row["folder"]): saved_runs.get_exclusion_reason(row) for row in rows}
    exclusion_reasons = {**runs.read_errors, **{path: reason for path, reason in reason_by_folder.items() if reason}}
    usable_rows = [row for row in rows if not reason_by_folder[str(row["folder"])]]
    if not usable_rows:
        path, reason = next(iter(exclusion_reasons.items()), ("no folder", "there is no run"))
        raise UserError(f"no run can be quantized; {path}: {reason}")
    if data_dir is not None and len({row["task"] for row in usable_rows}) > 1:
        raise UserError("--data-dir is for runs of one task, but these have several; call istar quantize for each task")
    saved_models = [
        saved_runs.saved_model_of_run(Path(row["folder"]), runs.records[str(row["folder"])], data_dir)
        for row in usable_rows
    ]
    model_scores = _score_models(saved_models, settings, out, console)
    table = pd.DataFrame(
        [{**row, **make_table_row(scores)} for row, scores in zip(usable_rows, model_scores, strict=True)]
    )
    return QuantizedScores(table, settings.scheme_names, exclusion_reasons, describe_settings(settings))


def quantize_model(
    folder: Path,
    task: str,
    settings: QuantizationSettings,
    out: Path,
    data_dir: Path | None = None,
    console: Console | None = None,
) -> QuantizedScores:
    """Score a single model that `save_pretrained` wrote, which must have a head for the task.

    Arguments are as for `quantize_runs`; `folder` is that of the model, and `task` the name of its task.

    Raises:
        UserError: if the model or the data cannot be loaded, or the model has no head for the task.
    """
    saved_model = saved_runs.saved_model_for_task(folder, task, data_dir)
    [scores] = _score_models([saved_model], settings, out, console)
    metadata = {
        "name": saved_model.name,
        "folder": str(folder),
        "task": task,
        "model": saved_model.name,
        "method": "",
        "seed": None,
    }
    rows = pd.DataFrame([{**metadata, **make_table_row(scores)}])
    return QuantizedScores(
        rows, settings.scheme_names, exclusion_reasons={}, settings_description=describe_settings(settings)
    )


def make_table_row(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table row of one model from its scores as `SCORES_FILE` holds them.

    The columns are `metric`, `recorded` (the value at the end of training, in the precision of training), `float32`,
    the measures of `ActivationGeometry`, and for each quantization scheme, such as `w8a8`: `w8a8` (the score),
    `w8a8_drop` (by how much it is worse than float32) and `w8a8_collapsed` (whether all predictions are equal). Scores
    are in the unit of `istar.records.metric_names.displayed`.
    """
    metric = scores["metric"]
    float32_score = displayed(metric, scores["floating"])
    recorded = scores["recorded"]
    row = {
        "metric": metric,
        "recorded": None if recorded is None else displayed(metric, recorded),
        "float32": float32_score,
    }
    for scheme_name, value in scores["forms"].items():
        row[scheme_name] = displayed(metric, value)
        row[f"{scheme_name}_drop"] = compute_drop(metric, scores["floating"], value)
        row[f"{scheme_name}_collapsed"] = scores["collapsed"][scheme_name]
    geometry = scores["activations"]
    return {**row, "kurtosis": geometry["kurtosis"], "largest_activation": geometry["largest"],
            "isoscore": geometry["isoscore"]}  # fmt: skip


def compute_drop(metric: str, float32_score: float, quantized_score: float) -> float:
    """Return by how much a quantized model scores worse than in float32, in the unit of `displayed`.

    The drop is negative if the quantized model is better, whether the metric is a score or a loss.

    >>> compute_drop("accuracy", 0.9, 0.875), compute_drop("perplexity", 30.0, 31.0)
    (2.5, 1.0)
    """
    difference = displayed(metric, float32_score) - displayed(metric, quantized_score)
    return -difference if is_lower_better(metric) else difference


def parse_schemes(
    names: str, weights: WeightScales = "channel", activations: ActivationScales = "tensor"
) -> tuple[Form | TorchInt8, ...]:
    """Return the quantization schemes whose names are given, separated by commas, such as `w8a8,int8`.

    `weights` and `activations` are the granularity of all schemes, see `Form`.

    Raises:
        UserError: if a name does not stand for a scheme.
    """
    split_names = [name.strip() for name in names.split(",")]
    return tuple(
        TorchInt8(weights) if name == "int8" else parse_form(name, weights, activations) for name in split_names
    )


def describe_settings(settings: QuantizationSettings) -> str:
    """Return sentences that describe the granularity, the calibration and the control, for captions."""
    sentences = []
    weight_granularity = {"channel": "each output channel", "tensor": "the whole matrix"}[settings.forms[0].weights]
    sentences.append(f"Weights have a scale for {weight_granularity}.")
    simulated = [scheme for scheme in settings.forms if isinstance(scheme, Form)]
    if simulated and simulated[0].activations == "token":
        sentences.append("Activations have a scale for each token (dynamic).")
    elif simulated:
        examples = f"{settings.calibration} training examples"
        sentences.append(f"Activations have a scale for the whole tensor, calibrated on {examples} (static).")
    if "int8" in settings.scheme_names:
        sentences.append("int8 is torch's dynamic quantization, with a scale for all activations of a batch.")
    if settings.control == "rotate":
        sentences.append("Control: inputs and weights of the linear layers were rotated at random before.")
    elif settings.control == "outlier":
        factor = f"{settings.outlier_factor:g}"
        sentences.append(
            f"Control: one input of each output projection of attention was multiplied by {factor} before."
        )
    return " ".join(sentences)


def _score_models(
    saved_models: Sequence[SavedModel], settings: QuantizationSettings, out: Path, console: Console | None
) -> list[dict[str, Any]]:
    """Return the scores of each model as `SCORES_FILE` holds them.

    Scores that the file already holds are reused. Missing ones are computed, and the file is written after each model.
    """
    scores_by_key = read_saved_scores(out / SCORES_FILE)
    model_scores: list[dict[str, Any]] = []
    for position, saved_model in enumerate(saved_models, 1):
        key = _make_cache_key(saved_model, settings)
        scores = scores_by_key.get(key)
        if scores is None:
            if console is not None:
                message = f"{position} of {len(saved_models)}: {saved_model.name}"
                console.print(message, highlight=False, soft_wrap=True, markup=False)
            loaded = saved_runs.load_model_and_data(saved_model, settings.calibration, settings.seed)
            loaded = apply_checked_control(loaded, settings.control, settings.outlier_factor, settings.seed)
            with_progress = _make_progress_wrapper(console)
            scores = _to_saved_scores(saved_model, score_model(loaded, settings.forms, with_progress))
            scores_by_key[key] = scores
            page_output(out, KIND).write({SCORES_FILE: _encode_scores(scores_by_key)})
        model_scores.append(scores)
    return model_scores


def _to_saved_scores(saved_model: SavedModel, scores: ModelScores) -> dict[str, Any]:
    """Return the scores of a model as `SCORES_FILE` holds them, with its name and the score that its run recorded."""
    recorded = None if saved_model.record is None else saved_model.record.metrics.get(scores.metric)
    return {"name": saved_model.name, "recorded": recorded, **asdict(scores)}


def _make_progress_wrapper(console: Console | None) -> Callable[[Iterable[Any], str], Iterable[Any]]:
    """Return a function that wraps batches in a progress bar with a description, if the console is a terminal."""
    is_hidden = console is None or not console.is_terminal

    def with_progress(batches: Iterable[Any], description: str) -> Iterable[Any]:
        return track(batches, escape(description), console=console, transient=True, disable=is_hidden)

    return with_progress


def _make_cache_key(saved_model: SavedModel, settings: QuantizationSettings) -> str:
    """Return a hash of all that determines a model's scores: weights, data, settings and versions of the libraries."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    key_data = {
        "format": FORMAT_VERSION,
        "subject": saved_model.identity(),
        "settings": settings.identity(),
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(key_data, sort_keys=True).encode()).hexdigest()[:16]


def read_saved_scores(path: Path) -> dict[str, dict[str, Any]]:
    """Read the scores of each model that an earlier command saved, by cache key; empty if there is no file.

    Raises:
        UserError: if the file is damaged, or has another format version.
    """
    try:
        return dict(read_record(path, _SavedScores, "a file of scores", FORMAT_VERSION)["entries"])
    except MissingFileError:
        return {}
    except UserError as error:
        raise UserError(f"{error}; name another --out") from error


def _encode_scores(scores_by_key: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return the content of `SCORES_FILE`, the scores of each model by cache key."""
    return (json.dumps({"format": FORMAT_VERSION, "entries": scores_by_key}, indent=1) + "\n").encode()
