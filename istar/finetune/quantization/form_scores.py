"""`istar quantize`: scores of finished runs in float32 and in simulated low-bit forms, and the table of the drops."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

from istar.drawing.page_tables import format_mean_and_std
from istar.drawing.terminal import make_progress
from istar.errors import UserError
from istar.finetune.quantization.linear_layers import (
    Form,
    encoder_linears,
    forward_observed,
    quantize_layers,
    update_largest_inputs,
)
from istar.finetune.runs.examples import load_examples
from istar.finetune.runs.identify import find_task_spec
from istar.finetune.runs.prepare import make_collator, prepare_data
from istar.finetune.tasks.evaluation import Evaluation, Evaluator
from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.tasks.loading import fingerprint
from istar.finetune.training.data import Collate, build_evaluation_loader, sort_longest_first
from istar.finetune.training.module import inputs_without_labels, logits_by_feature, merge_outputs, token_mask
from istar.inputs import pretrained
from istar.measures import Moments, TokenKurtosis, isoscore
from istar.records import results
from istar.records.config import Config, ModelConfig
from istar.records.config.schema import load
from istar.records.identity import configuration_hash, label_method, shorten_model_name
from istar.records.metric_names import is_lower_better, scale_for_display
from istar.records.results import RunRecord
from istar.records.task_specs import TASKS

_RUN_MODEL_FOLDER = "model"
"""Name of the folder of the saved model within the folder of a run."""
MAX_EXAMPLES = 1_000
"""Maximum number of validation rows to measure activations on."""
CAPTION = (
    "Headline metric on the validation set (percent, except losses) in float32, and what each form loses of it; over "
    "seeds: mean ± standard deviation. Constant: runs whose predictions were constant at the end of training, so that "
    "they have nothing to lose."
)
_OTHER_PASSES = 3
"""Passes over the data of a model besides its forms: float32, calibration and activations."""
_TEXT_COLUMNS = ("task", "model", "method")


@dataclass(frozen=True)
class SavedModel:
    """The model of a finished run in float32 and eval mode, with the tokenized data of its task."""

    model: PreTrainedModel  # with its head
    collate: Collate  # turns a list of rows into a batch
    batch_size: int
    calibration: TokenizedRows  # training data that calibrate the ranges of activations
    validation: TokenizedRows  # the first validation set
    evaluator: Evaluator  # computes the metrics from the logits of `validation`


def explain_exclusion(folder: Path, record: RunRecord) -> str:
    """Return why the model of a run cannot be scored; an empty string if it can."""
    task = TASKS.get(record.config["task"]["name"])
    if record.status != "finished":
        return f"the run is {record.status}"
    if not math.isfinite(record.headline["value"]):
        return "its score is not finite"
    if task is None or task.is_language_modelling:
        return "language models are not supported; expected classification, regression or question answering"
    if not (folder / _RUN_MODEL_FOLDER).is_dir():
        return "the run has saved no model (run.save_model=false)"
    return ""


def load_saved_model(
    folder: Path, record: RunRecord, num_calibration: int, seed: int, data_dir: Path | None = None
) -> SavedModel:
    """Load the model of a finished run in float32, its validation data, and a random sample of its training data.

    The `num_calibration` examples of the sample calibrate the ranges of activations, and `seed` chooses them without
    replacement. `data_dir` is the folder of the task's data, if it has moved since the run.

    Raises a `UserError` if the model or the data cannot be loaded, or the data differ from the run's.
    """
    config = _load_config(folder, data_dir)
    spec = find_task_spec(config.task)
    examples = load_examples(spec, config.task, config.data.cache_dir)
    if fingerprint(examples.train, *examples.validation) != record.data.get("fingerprint"):
        raise UserError(
            f"{record.name}: the data of task {spec.name} are not those that the run was trained on; name their "
            "folder with --data-dir"
        )
    tokenizer = pretrained.load_tokenizer(config.model)
    model_config = pretrained.load_config(config.model, spec, tokenizer)
    model = pretrained.load_model(config.model, spec, model_config, tokenizer).eval()
    shuffled_indices = torch.randperm(len(examples.train), generator=torch.Generator().manual_seed(seed))
    sample = examples.train.select(sorted(shuffled_indices[:num_calibration].tolist()))
    prepared_data = prepare_data(spec, config, replace(examples, train=sample), tokenizer, model_config)
    return SavedModel(
        model=model,
        collate=make_collator(spec, config, tokenizer, model),
        batch_size=config.data.eval_batch_size,
        calibration=prepared_data.train,
        validation=prepared_data.validation[0],
        evaluator=prepared_data.evaluators[""],
    )


def _load_config(folder: Path, data_dir: Path | None) -> Config:
    """Return the config of a run, with its saved model instead of its initial model."""
    config = load(OmegaConf.load(folder / results.CONFIG))  # type: ignore[arg-type]
    task = replace(config.task, submission=False)
    if data_dir is not None:
        task = replace(task, data_dir=str(data_dir))
    return replace(config, task=task, model=ModelConfig(name=str(folder / _RUN_MODEL_FOLDER)))


def score_model(
    saved: SavedModel, forms: Sequence[Form], advance: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Score a model in float32 and in each form on the validation set of its task; the model does not change.

    Static scales are calibrated on `saved.calibration`. `advance` is called after each of the passes over data, which
    are `_OTHER_PASSES` and one for each form.

    Returns:
        `metric`, the name of the task's headline metric; its value in `float32` and in each form, such as `w8a8`;
        `w8a8_drop`, by how much the form is worse than float32; `w8a8_collapsed`, whether all its predictions are
        equal; and the measures of `measure_activations`. Scores are in the unit of `scale_for_display`.

    Raises a `UserError` if the encoder lacks linear layers, or its activations or logits are not finite.
    """
    metric = saved.evaluator.spec.headline
    layers = encoder_linears(saved.model)
    float32_score = evaluate_model(saved, saved.model, "float32").metrics[metric]
    scores: dict[str, Any] = {"metric": metric, "float32": scale_for_display(metric, float32_score)}
    advance()
    largest_inputs = calibrate_input_ranges(saved, layers)
    advance()
    for form in forms:
        evaluation = evaluate_model(saved, quantize_layers(saved.model, layers, form, largest_inputs), form.name)
        score = evaluation.metrics[metric]
        scores[form.name] = scale_for_display(metric, score)
        scores[f"{form.name}_drop"] = compute_drop(metric, float32_score, score)
        scores[f"{form.name}_collapsed"] = evaluation.collapsed
        advance()
    scores |= measure_activations(saved, layers)
    advance()
    return scores


def compute_drop(metric: str, float32_score: float, quantized_score: float) -> float:
    """Return by how much a quantized model scores worse than in float32, in the unit of `scale_for_display`.

    The drop is negative if the quantized model is better, whether the metric is a score or a loss.

    >>> compute_drop("accuracy", 0.9, 0.875), compute_drop("perplexity", 30.0, 31.0)
    (2.5, 1.0)
    """
    difference = scale_for_display(metric, float32_score) - scale_for_display(metric, quantized_score)
    return -difference if is_lower_better(metric) else difference


@torch.inference_mode()
def evaluate_model(saved: SavedModel, model: nn.Module, form_name: str) -> Evaluation:
    """Evaluate `saved.model`, or a quantized copy of it, on the validation set.

    Raises a `UserError` if its logits are not finite, or the validation set is unlabelled.
    """
    loader = _make_loader(saved, saved.validation)
    outputs = merge_outputs([logits_by_feature(batch, model(**inputs_without_labels(batch))) for batch in loader])
    if not all(np.isfinite(logits).all() for logits in outputs.values()):
        raise UserError(f"the logits in the form {form_name} are not finite; the model has diverged")
    evaluation = saved.evaluator(outputs)
    if not evaluation.metrics:
        raise UserError(f"the validation set of task {saved.evaluator.spec.name} has no labels to score against")
    return evaluation


@torch.inference_mode()
def calibrate_input_ranges(saved: SavedModel, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the largest magnitude of the inputs of each layer on the calibration data, 0-d, without padding."""
    largest_inputs: dict[str, Tensor] = {}
    observe = partial(update_largest_inputs, largest_inputs)
    for batch in _make_loader(saved, saved.calibration):
        forward_observed(saved.model, layers, inputs_without_labels(batch), token_mask(batch), observe)
    return largest_inputs


@torch.inference_mode()
def measure_activations(saved: SavedModel, layers: Mapping[str, nn.Linear]) -> dict[str, float | None]:
    """Measure the activations of the float32 model on at most `MAX_EXAMPLES` validation rows, without padding.

    Returns:
        `isoscore` of the last hidden states (None if they are all equal); `kurtosis`, the mean excess kurtosis of the
        tokens' vectors averaged over the inputs of the layers, which is large if a few coordinates are; and
        `largest_activation` among these inputs.
    """
    largest_inputs: dict[str, Tensor] = {}
    kurtosis_by_layer = {name: TokenKurtosis(layer.in_features) for name, layer in layers.items()}
    last_states = Moments(saved.model.config.hidden_size)

    def observe(name: str, rows: Tensor) -> None:
        update_largest_inputs(largest_inputs, name, rows)
        kurtosis_by_layer[name].update(rows)

    for batch in _make_loader(saved, saved.validation, MAX_EXAMPLES):
        mask = token_mask(batch)
        inputs = {**inputs_without_labels(batch), "output_hidden_states": True}
        outputs = forward_observed(saved.model, layers, inputs, mask, observe)
        last_states.update(outputs.hidden_states[-1], mask)
    try:
        isoscore_value = float(isoscore(last_states))
    except UserError:
        # All last hidden states are equal.
        isoscore_value = None
    kurtosis_averages = [accumulator.compute().average for accumulator in kurtosis_by_layer.values()]
    return {
        "isoscore": isoscore_value,
        "kurtosis": float(np.nanmean(kurtosis_averages)),
        "largest_activation": max(magnitude.item() for magnitude in largest_inputs.values()),
    }


def _make_loader(saved: SavedModel, rows: TokenizedRows, max_rows: int | None = None) -> Any:
    """Return a loader of the first `max_rows` rows, or of all, longest first."""
    order = [index for index in sort_longest_first(rows) if max_rows is None or index < max_rows]
    return build_evaluation_loader(rows, saved.collate, saved.batch_size, order)


@dataclass(frozen=True)
class QuantizationSettings:
    """The forms to score each model in."""

    forms: tuple[Form, ...]  # with different names
    calibration: int = 256  # number of training examples for static scales
    seed: int = 0  # random seed for the choice of these examples
    data_dir: Path | None = None  # folder of the task's data, if it has moved since the runs

    def __post_init__(self) -> None:
        """Raise a `UserError` if two forms have the same name."""
        names = [form.name for form in self.forms]
        if len(set(names)) < len(names):
            raise UserError(f"the forms are {', '.join(names)}; expected different ones")


def score_runs(records: Mapping[Path, RunRecord], settings: QuantizationSettings, console: Console) -> pd.DataFrame:
    """Score the models of finished runs, and return one row for each.

    Of runs with the same name, the first one counts. The console shows a progress bar, and a line for each run that is
    left out.

    Returns:
        The columns `name`, `folder`, `task`, `model`, `method`, `configuration` (equal for runs that differ only in the
        seed), `seed`, `recorded` (the score at the end of training, in its precision), `constant` (whether the
        predictions were constant then), and the results of `score_model`.

    Raises a `UserError` if no run can be scored, or the model or the data of a run cannot be loaded.
    """
    record_by_folder: dict[Path, RunRecord] = {}
    for folder, record in records.items():
        if reason := explain_exclusion(folder, record):
            console.out(f"left out: {folder}: {reason}", highlight=False)
        elif record.name not in {other.name for other in record_by_folder.values()}:
            record_by_folder[folder] = record
    if not record_by_folder:
        raise UserError("no run can be quantized; expected finished runs with run.save_model=true")
    tasks = {record.config["task"]["name"] for record in record_by_folder.values()}
    if settings.data_dir is not None and len(tasks) > 1:
        raise UserError("--data-dir is for runs of one task, but these have several; call istar quantize for each task")
    rows = []
    num_passes = len(settings.forms) + _OTHER_PASSES
    with make_progress(console) as progress:
        task = progress.add_task("", total=len(record_by_folder) * num_passes)
        for position, (folder, record) in enumerate(record_by_folder.items(), 1):
            progress.update(task, description=f"run {position} of {len(record_by_folder)}")
            saved = load_saved_model(folder, record, settings.calibration, settings.seed, settings.data_dir)
            scores = score_model(saved, settings.forms, lambda: progress.advance(task))
            rows.append(_describe_run(folder, record) | scores)
    return pd.DataFrame(rows).sort_values(["task", "model", "method", "seed"], kind="stable", ignore_index=True)


def _describe_run(folder: Path, record: RunRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "folder": str(folder),
        "task": record.config["task"]["name"],
        "model": shorten_model_name(record.config["model"]["name"]),
        "method": label_method(record.config),
        "configuration": configuration_hash(record.config, record.data.get("fingerprint", ""), record.model_identity),
        "seed": record.config["seed"],
        "recorded": scale_for_display(record.headline["metric"], record.headline["value"]),
        "constant": any(record.collapsed.values()),
    }


def summarize_configurations(scores: pd.DataFrame, forms: Sequence[Form]) -> pd.DataFrame:
    """Format the result of `score_runs`: for each configuration, its float32 score and the drop in each form."""
    rows = []
    for _, runs in scores.groupby("configuration", sort=False):
        first_run = runs.iloc[0]
        rows.append({
            "task": f"{first_run['task']}, {first_run['metric']}",
            "model": first_run["model"],
            "method": first_run["method"],
            "seeds": str(len(runs)),
            "constant": str(runs["constant"].sum()),
            "float32": _format_mean_and_std(runs["float32"]),
            **{form.name: _format_mean_and_std(runs[f"{form.name}_drop"]) for form in forms},
        })  # fmt: skip
    return pd.DataFrame(rows)


def _format_mean_and_std(values: pd.Series) -> str:
    # A mean of -0.001 is printed as 0.00.
    return format_mean_and_std(round(values.mean(), 2) + 0.0, values.std())


def build_terminal_table(summary: pd.DataFrame) -> Table:
    """Return the result of `summarize_configurations` as a table; a task or model common to all rows is its title."""
    shared_columns = [column for column in ("task", "model") if summary[column].nunique() == 1]
    title = " · ".join(summary[column].iloc[0] for column in shared_columns)
    table = Table(title=escape(title), title_justify="left", caption=CAPTION, caption_justify="left")
    shown = summary.drop(columns=shared_columns)
    for column in shown:
        table.add_column(str(column), justify="left" if column in _TEXT_COLUMNS else "right")
    for row in shown.itertuples(index=False):
        table.add_row(*map(escape, row))
    return table


def format_latex(summary: pd.DataFrame) -> str:
    """Return the result of `summarize_configurations` as a LaTeX table, for the package booktabs."""
    column_format = "".join("l" if column in _TEXT_COLUMNS else "r" for column in summary)
    table = str(summary.to_latex(index=False, escape=True, column_format=column_format, caption=CAPTION))
    for symbol, command in {"±": "pm", "λ": "lambda", "ζ": "zeta"}.items():
        table = table.replace(symbol, rf"$\{command}$")
    return table
