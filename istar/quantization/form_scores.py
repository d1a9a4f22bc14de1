"""Scores of one model under each quantization scheme, and the geometry of its activations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.finetune.tasks.evaluation import Evaluation
from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.training.data import build_evaluation_loader, sort_longest_first
from istar.finetune.training.module import inputs_without_labels, logits_by_feature, merge_outputs, token_mask
from istar.measures import Moments, TokenKurtosis, isoscore
from istar.quantization.equivalent_models import Control, apply_control
from istar.quantization.linear_layers import Form, InputRanges, encoder_linears, forward_observed, quantize_layers
from istar.quantization.saved_runs import LoadedModel
from istar.quantization.torch_int8 import TorchInt8, quantize_by_torch

MAX_EXAMPLES = 1_000
"""Maximum number of validation rows whose activations are measured."""

ProgressWrapper = Callable[[Iterable[Any], str], Iterable[Any]]
"""A function that wraps the batches of a pass, for example in a progress bar with the given description."""


def _without_progress(batches: Iterable[Any], description: str) -> Iterable[Any]:
    return batches


@dataclass(frozen=True)
class ActivationGeometry:
    """The geometry of a float32 model's activations on validation data, without padding.

    Attributes:
        kurtosis: mean excess kurtosis of the tokens' vectors (`istar.measures.TokenKurtosis`), averaged over the inputs
            of all linear layers that are quantized. It is large if a few coordinates are large.
        largest: largest absolute activation among these inputs.
        isoscore: IsoScore of the last hidden states; None if they are all equal.
    """

    kurtosis: float
    largest: float
    isoscore: float | None


@dataclass(frozen=True)
class ModelScores:
    """Validation scores of one model in float32 and under each quantization scheme.

    Attributes:
        metric: name of the headline metric of the task.
        floating: its value in float32.
        forms: its value under each quantization scheme, by the name of the scheme.
        collapsed: whether all predictions under a scheme are equal, by the name of the scheme.
        activations: geometry of the float32 model's activations.
    """

    metric: str
    floating: float
    forms: dict[str, float]
    collapsed: dict[str, bool]
    activations: ActivationGeometry


def score_model(
    loaded: LoadedModel, schemes: Sequence[Form | TorchInt8], with_progress: ProgressWrapper = _without_progress
) -> ModelScores:
    """Score a model in float32 and under each quantization scheme, on the validation set of its task.

    Static scales are calibrated on `loaded.calibration`. The loaded model does not change.

    Raises:
        UserError: if the encoder has no linear layers, or its activations or logits are not finite.
    """
    model, metric = loaded.model, loaded.evaluator.spec.headline
    layers = encoder_linears(model)
    float32_evaluation = evaluate_model(loaded, model, with_progress, "float32")
    largest_inputs = calibrate_input_ranges(loaded, layers, with_progress)
    activations = measure_activation_geometry(loaded, layers, with_progress)
    scores, collapsed = {}, {}
    for scheme in schemes:
        if isinstance(scheme, TorchInt8):
            quantized_model = quantize_by_torch(model, layers, scheme)
        else:
            quantized_model = quantize_layers(model, layers, scheme, largest_inputs)
        evaluation = evaluate_model(loaded, quantized_model, with_progress, scheme.name)
        scores[scheme.name], collapsed[scheme.name] = evaluation.metrics[metric], evaluation.collapsed
    return ModelScores(metric, float32_evaluation.metrics[metric], scores, collapsed, activations)


def apply_checked_control(loaded: LoadedModel, control: Control, factor: float, seed: int) -> LoadedModel:
    """Apply a control of `equivalent_models` and check on one batch that it leaves the logits as they are.

    Args:
        loaded: the model and its data, which do not change.
        control: the control; `none` returns `loaded` itself.
        factor: factor of the control `outlier`.
        seed: random seed of the control `rotate`.

    Raises:
        UserError: if the control is not possible, or changes the logits by more than a thousandth of the largest.
    """
    if control == "none":
        return loaded
    model = apply_control(loaded.model, encoder_linears(loaded.model), control, factor, seed)
    batch = next(iter(_make_loader(loaded, loaded.validation)))
    with torch.inference_mode():
        logits_before = np.stack(_compute_logits(batch, loaded.model))
        logits_after = np.stack(_compute_logits(batch, model))
    max_change = float(np.abs(logits_after - logits_before).max())
    max_logit = float(np.abs(logits_before).max())
    if not max_change <= 1e-3 * max_logit:
        raise UserError(
            f"--control {control} changes the logits of {type(model).__name__} by {max_change:.2g} (the largest is "
            f"{max_logit:.2g}); expected rounding errors at most, so that the control does not suit this architecture"
        )
    return replace(loaded, model=model)


def _compute_logits(batch: Any, model: nn.Module) -> list[np.ndarray]:
    """Return a model's logits for each example of a batch."""
    return list(logits_by_feature(batch, model(**inputs_without_labels(batch))).values())


@torch.inference_mode()
def evaluate_model(
    loaded: LoadedModel, model: nn.Module, with_progress: ProgressWrapper = _without_progress, scheme_name: str = ""
) -> Evaluation:
    """Evaluate a model on the validation set.

    Args:
        loaded: the float32 model with its data.
        model: the model to evaluate: `loaded.model`, or a quantized copy.
        with_progress: wraps the batches.
        scheme_name: name of the quantization scheme, for messages and the progress bar.

    Raises:
        UserError: if its logits are not finite, or the validation set has no labels.
    """
    batch_logits: list[dict[int, np.ndarray]] = []
    for batch in with_progress(_make_loader(loaded, loaded.validation), scheme_name):
        batch_logits.append(logits_by_feature(batch, model(**inputs_without_labels(batch))))
    merged = merge_outputs(batch_logits)
    if not all(np.isfinite(logits).all() for logits in merged.values()):
        raise UserError(f"the logits in the form {scheme_name} are not finite; the model has diverged")
    evaluation: Evaluation = loaded.evaluator(merged)
    if not evaluation.metrics:
        raise UserError(f"the validation set of task {loaded.evaluator.spec.name} has no labels to score against")
    return evaluation


@torch.inference_mode()
def calibrate_input_ranges(
    loaded: LoadedModel, layers: Mapping[str, nn.Module], with_progress: ProgressWrapper = _without_progress
) -> dict[str, Tensor]:
    """Return the largest magnitude of the inputs of each layer on the calibration data, without padding.

    Args:
        loaded: the float32 model with its data.
        layers: linear layers of the model by name.
        with_progress: wraps the batches.

    Returns:
        0-d tensors by the name of the layer.
    """
    ranges = InputRanges()
    for batch in with_progress(_make_loader(loaded, loaded.calibration), "calibration"):
        forward_observed(loaded.model, layers, inputs_without_labels(batch), token_mask(batch), ranges.update)
    return ranges.largest


@torch.inference_mode()
def measure_activation_geometry(
    loaded: LoadedModel, layers: Mapping[str, nn.Linear], with_progress: ProgressWrapper = _without_progress
) -> ActivationGeometry:
    """Measure the activations of the float32 model on at most `MAX_EXAMPLES` validation rows.

    Args:
        loaded: the float32 model with its data.
        layers: linear layers of the model by name, whose inputs are measured.
        with_progress: wraps the batches.
    """
    ranges = InputRanges()
    kurtosis_by_layer = {name: TokenKurtosis(layer.in_features) for name, layer in layers.items()}
    last_states = Moments(loaded.model.config.hidden_size)

    def observe(name: str, rows: Tensor) -> None:
        """Add inputs of a layer to its range and to its kurtosis."""
        ranges.update(name, rows)
        kurtosis_by_layer[name].update(rows)

    for batch in with_progress(_make_loader(loaded, loaded.validation, MAX_EXAMPLES), "activations"):
        mask = token_mask(batch)
        inputs = {**inputs_without_labels(batch), "output_hidden_states": True}
        outputs = forward_observed(loaded.model, layers, inputs, mask, observe)
        last_states.update(outputs.hidden_states[-1], mask)
    try:
        isoscore_value = float(isoscore(last_states))
    except UserError:
        # All last hidden states are equal.
        isoscore_value = None
    kurtosis_averages = [accumulator.compute().average for accumulator in kurtosis_by_layer.values()]
    return ActivationGeometry(
        float(np.nanmean(kurtosis_averages)),
        float(max(magnitude.item() for magnitude in ranges.largest.values())),
        isoscore_value,
    )


def _make_loader(loaded: LoadedModel, rows: TokenizedRows, max_rows: int | None = None) -> Any:
    """Return a loader of batches of the first `max_rows` rows, or of all rows, in order of decreasing length."""
    order = [index for index in sort_longest_first(rows) if max_rows is None or index < max_rows]
    return build_evaluation_loader(rows, loaded.collate, loaded.batch_size, order)
