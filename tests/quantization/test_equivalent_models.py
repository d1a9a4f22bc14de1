"""The rotation and the outlier change the errors of quantization, but not the outputs of the model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DebertaConfig, DebertaForSequenceClassification, LlamaConfig, LlamaModel

from istar.errors import UserError
from istar.measures import isoscore, token_kurtosis
from istar.quantization.equivalent_models import add_outlier, random_orthogonal, rotate_inputs
from istar.quantization.linear_layers import Form, encoder_linears, forward_observed, quantize_layers
from istar.quantization.torch_int8 import TorchInt8, quantize_by_torch
from tests.quantization.architectures import ARCHITECTURES, FEED_FORWARD, RELATIVE, make_random_model
from tests.quantization.test_linear_layers import bert, calibrate_ranges, make_batch


def logits(model: Any, seed: int = 2) -> Tensor:
    with torch.no_grad():
        return model(**make_batch(seed)).logits


def compute_error(model: Any, expected: Tensor, form: Form) -> float:
    """Return the root mean squared error of the quantized logits, calibrated on the same texts, so without clipping."""
    layers = encoder_linears(model)
    quantized = quantize_layers(model, layers, form, calibrate_ranges(model, make_batch(2)))
    return float((logits(quantized) - expected).square().mean().sqrt())


def collect_input_points(model: Any, suffix: str) -> Tensor:
    """Return the inputs of all layers whose names have a suffix."""
    observed_rows: list[Tensor] = []
    matching_layers = {name: layer for name, layer in encoder_linears(model).items() if name.endswith(suffix)}
    assert matching_layers
    with torch.no_grad():
        forward_observed(
            model,
            matching_layers,
            make_batch(),
            make_batch()["attention_mask"],
            lambda name, rows: observed_rows.append(rows),
        )
    return torch.cat(observed_rows)


def deberta() -> Any:
    """Return the first version of DeBERTa, which computes queries, keys and values in one linear layer."""
    return make_random_model(DebertaForSequenceClassification, DebertaConfig(**FEED_FORWARD, **RELATIVE))


@pytest.mark.parametrize("build", [*ARCHITECTURES.values(), deberta], ids=[*ARCHITECTURES, "deberta"])
def test_a_rotation_leaves_the_outputs(build: Any) -> None:
    model = build()
    weights_before = {name: value.clone() for name, value in model.state_dict().items()}
    rotated = rotate_inputs(model, encoder_linears(model), seed=3)
    torch.testing.assert_close(logits(rotated), logits(model), rtol=1e-5, atol=1e-5)
    assert len(encoder_linears(rotated)) == len(encoder_linears(model))
    assert all(torch.equal(value, weights_before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("build", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("factor", [128.0, 100.0])
def test_an_outlier_leaves_the_outputs_and_costs_precision(build: Any, factor: float) -> None:
    model = build()
    weights_before = {name: value.clone() for name, value in model.state_dict().items()}
    model_with_outlier = add_outlier(model, encoder_linears(model), factor)
    expected = logits(model)
    torch.testing.assert_close(logits(model_with_outlier), expected, rtol=0 if factor == 128 else 1e-5, atol=1e-5)
    assert all(torch.equal(value, weights_before[name]) for name, value in model.state_dict().items())
    assert compute_error(model_with_outlier, expected, Form(8, 8)) > 2 * compute_error(model, expected, Form(8, 8))


def test_a_rotation_makes_an_outlier_cheaper() -> None:
    """With a scale for each token, where nothing is clipped."""
    model, form = bert(hidden_size=64), Form(8, 8, activations="token")
    expected = logits(model)
    model_with_outlier = add_outlier(model, encoder_linears(model), 128.0)
    rotated = rotate_inputs(model_with_outlier, encoder_linears(model_with_outlier))
    torch.testing.assert_close(logits(rotated), expected, rtol=1e-4, atol=1e-4)
    assert (
        compute_error(model, expected, form)
        < compute_error(rotated, expected, form)
        < 0.7 * compute_error(model_with_outlier, expected, form)
    )


def test_the_outlier_is_where_it_should_be() -> None:
    model = bert()
    model_with_outlier = add_outlier(model, encoder_linears(model), 64.0, dimension=5)
    suffix = "attention.output.dense"
    points_before, points_after = collect_input_points(model, suffix), collect_input_points(model_with_outlier, suffix)
    factors = torch.ones(16)
    factors[5] = 64.0
    torch.testing.assert_close(points_after, points_before * factors, rtol=1e-5, atol=1e-6)
    assert token_kurtosis(points_after).mean() > token_kurtosis(points_before).mean()
    for other_suffix in ("query", "intermediate.dense"):
        torch.testing.assert_close(
            collect_input_points(model_with_outlier, other_suffix),
            collect_input_points(model, other_suffix),
            rtol=1e-5,
            atol=1e-6,
        )


def test_a_rotation_keeps_isoscore_and_spreads_coordinates() -> None:
    model = bert()
    model_with_outlier = add_outlier(model, encoder_linears(model), 128.0)
    rotated = rotate_inputs(model_with_outlier, encoder_linears(model_with_outlier))
    points_before, points_after = (
        collect_input_points(model_with_outlier, "attention.output.dense"),
        collect_input_points(rotated, "attention.output.dense.1"),
    )
    torch.testing.assert_close(isoscore(points_after), isoscore(points_before), rtol=1e-4, atol=1e-6)
    assert token_kurtosis(points_after).mean() < token_kurtosis(points_before).mean()


def test_torch_quantizes_a_rotated_model_too() -> None:
    model = bert()
    rotated = rotate_inputs(model, encoder_linears(model))
    quantized = quantize_by_torch(rotated, encoder_linears(rotated), TorchInt8())
    assert (logits(quantized) - logits(model)).abs().max() < 0.1 * logits(model).abs().max()


def test_random_rotations_are_orthogonal_and_differ() -> None:
    first, second = random_orthogonal(12, 0), random_orthogonal(12, 1)
    torch.testing.assert_close(first @ first.T, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(first, random_orthogonal(12, 0))
    assert not torch.equal(first, second)
    # Both signs of the determinant occur, and no entry has a preferred sign.
    matrices = torch.stack([random_orthogonal(4, seed) for seed in range(200)])
    assert 60 < (torch.linalg.det(matrices) > 0).sum() < 140
    assert matrices.mean(0).abs().max() < 0.15


def test_where_an_outlier_is_not_possible() -> None:
    with pytest.raises(UserError, match="factor"):
        add_outlier(bert(), encoder_linears(bert()), 0.0)
    with pytest.raises(UserError, match="does not know where Sequential"):
        add_outlier(nn.Sequential(nn.Linear(2, 2)), ["0"])
    with pytest.raises(UserError, match="does not know where DebertaForSequenceClassification"):
        add_outlier(deberta(), encoder_linears(deberta()))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    grouped_query_model = LlamaModel(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=20))
    with pytest.raises(UserError, match="8 outputs"):
        add_outlier(grouped_query_model, encoder_linears(grouped_query_model))
