"""Scores of one model in each form, and the geometry of its activations beside them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.measures import Moments, TokenKurtosis, isoscore
from istar.quantization.controls import Control, apply_control
from istar.quantization.linear_layers import Form, InputRanges, encoder_linears, forward_observed, quantize_layers
from istar.quantization.saved_runs import Loaded
from istar.quantization.torch_int8 import TorchInt8, quantize_by_torch
from istar.tasks.evaluation import Evaluation
from istar.tasks.features import Rows
from istar.training.data import build_evaluation_loader, sort_longest_first
from istar.training.module import inputs_without_labels, logits_by_feature, merge_outputs, token_mask

MAX_EXAMPLES = 1_000
"""Maximum number of validation rows whose activations are measured."""

Watcher = Callable[[Iterable[Any], str], Iterable[Any]]
"""Wraps the batches of a pass, described by a text, for example to show a progress bar."""


def _unwatched(batches: Iterable[Any], description: str) -> Iterable[Any]:
    return batches


@dataclass(frozen=True)
class Activations:
    """The geometry of a floating model on validation data, without padding.

    Attributes:
        kurtosis: mean excess kurtosis of the tokens' vectors (`istar.measures.TokenKurtosis`), averaged over the inputs
            of all quantized linear layers; large if a few coordinates are large.
        largest: largest absolute activation among these inputs.
        isoscore: IsoScore of the last hidden states; None if they are all equal.
    """

    kurtosis: float
    largest: float
    isoscore: float | None


@dataclass(frozen=True)
class FormScores:
    """Scores of one model.

    Attributes:
        metric: name of the headline metric of the task.
        floating: its value in float32 on the validation set.
        forms: its value in each form, by the form's name.
        collapsed: whether all predictions of a form are equal, by the form's name.
        activations: geometry of the floating model.
    """

    metric: str
    floating: float
    forms: dict[str, float]
    collapsed: dict[str, bool]
    activations: Activations


def score_forms(loaded: Loaded, forms: Sequence[Form | TorchInt8], watch: Watcher = _unwatched) -> FormScores:
    """Score a model in float32 and in each form, on the validation set of its task.

    Static scales are calibrated on `loaded.calibration`. The loaded model does not change.

    Raises:
        UserError: if the encoder has no linear layers, or its activations or logits are not finite.
    """
    model, metric = loaded.model, loaded.evaluator.spec.headline
    layers = encoder_linears(model)
    floating = evaluate(loaded, model, watch, "float32")
    ranges = calibrate(loaded, layers, watch)
    activations = measure_activations(loaded, layers, watch)
    scores, collapsed = {}, {}
    for form in forms:
        if isinstance(form, TorchInt8):
            quantized = quantize_by_torch(model, layers, form)
        else:
            quantized = quantize_layers(model, layers, form, ranges)
        evaluation = evaluate(loaded, quantized, watch, form.name)
        scores[form.name], collapsed[form.name] = evaluation.metrics[metric], evaluation.collapsed
    return FormScores(metric, floating.metrics[metric], scores, collapsed, activations)


def with_control(loaded: Loaded, control: Control, factor: float, seed: int) -> Loaded:
    """Return the model with a control of `istar.quantization.controls`, whose outputs are compared on one batch.

    Raises:
        UserError: if the control is not possible, or changes the logits by more than a thousandth of the largest.
    """
    if control == "none":
        return loaded
    model = apply_control(loaded.model, encoder_linears(loaded.model), control, factor, seed)
    batch = next(iter(_batches(loaded, loaded.validation)))
    with torch.inference_mode():
        before, after = (np.stack(_first_logits(batch, part)) for part in (loaded.model, model))
    change, largest = float(np.abs(after - before).max()), float(np.abs(before).max())
    if not change <= 1e-3 * largest:
        raise UserError(
            f"--control {control} changes the logits of {type(model).__name__} by {change:.2g} (the largest is "
            f"{largest:.2g}); expected rounding errors at most, so that the control does not suit this architecture"
        )
    return replace(loaded, model=model)


def _first_logits(batch: Any, model: nn.Module) -> list[np.ndarray]:
    return list(logits_by_feature(batch, model(**inputs_without_labels(batch))).values())


@torch.inference_mode()
def evaluate(loaded: Loaded, model: nn.Module, watch: Watcher = _unwatched, name: str = "") -> Evaluation:
    """Evaluate a model on the whole validation set; the model may be a quantized copy.

    Raises:
        UserError: if its logits are not finite, or the validation set has no labels.
    """
    outputs: list[dict[int, np.ndarray]] = []
    for batch in watch(_batches(loaded, loaded.validation), name):
        outputs.append(logits_by_feature(batch, model(**inputs_without_labels(batch))))
    merged = merge_outputs(outputs)
    if not all(np.isfinite(logits).all() for logits in merged.values()):
        raise UserError(f"the logits in the form {name} are not finite; the model has diverged")
    evaluation: Evaluation = loaded.evaluator(merged)
    if not evaluation.metrics:
        raise UserError(f"the validation set of task {loaded.evaluator.spec.name} has no labels to score against")
    return evaluation


@torch.inference_mode()
def calibrate(loaded: Loaded, layers: Mapping[str, nn.Module], watch: Watcher = _unwatched) -> dict[str, Tensor]:
    """Return the largest magnitude of the inputs of each layer over the calibration data, without padding."""
    ranges = InputRanges()
    for batch in watch(_batches(loaded, loaded.calibration), "calibration"):
        forward_observed(loaded.model, layers, inputs_without_labels(batch), token_mask(batch), ranges.update)
    return ranges.largest


@torch.inference_mode()
def measure_activations(loaded: Loaded, layers: Mapping[str, nn.Linear], watch: Watcher = _unwatched) -> Activations:
    """Measure the floating model on at most `MAX_EXAMPLES` validation rows."""
    ranges = InputRanges()
    kurtosis = {name: TokenKurtosis(layer.in_features) for name, layer in layers.items()}
    states = Moments(loaded.model.config.hidden_size)

    def observe(name: str, rows: Tensor) -> None:
        ranges.update(name, rows)
        kurtosis[name].update(rows)

    for batch in watch(_batches(loaded, loaded.validation, MAX_EXAMPLES), "activations"):
        mask = token_mask(batch)
        inputs = {**inputs_without_labels(batch), "output_hidden_states": True}
        outputs = forward_observed(loaded.model, layers, inputs, mask, observe)
        states.update(outputs.hidden_states[-1], mask)
    try:
        score = float(isoscore(states))
    except UserError:
        score = None
    averages = [accumulator.compute().average for accumulator in kurtosis.values()]
    return Activations(
        float(np.nanmean(averages)), float(max(value.item() for value in ranges.largest.values())), score
    )


def _batches(loaded: Loaded, rows: Rows, limit: int | None = None) -> Any:
    """Return a loader over the first `limit` rows, the longest first."""
    order = [row for row in sort_longest_first(rows) if limit is None or row < limit]
    return build_evaluation_loader(rows, loaded.collate, loaded.batch_size, order)
