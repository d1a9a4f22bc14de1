"""Dynamic int8 by torch, against integers computed in numpy."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from istar.errors import UserError
from istar.quantization.linear_layers import encoder_linears
from istar.quantization.torch_int8 import TorchInt8, quantize_by_torch
from tests.quantization.test_linear_layers import bert, make_batch


@pytest.mark.parametrize("weights", ["channel", "tensor"])
def test_the_encoder_has_torch_integer_layers(weights: Any) -> None:
    model = bert()
    weights_before = {name: value.clone() for name, value in model.state_dict().items()}
    layers = encoder_linears(model)
    quantized = quantize_by_torch(model, layers, TorchInt8(weights))
    kinds = {name: type(part).__module__ for name, part in quantized.named_modules()}
    assert {name for name, kind in kinds.items() if kind.endswith("quantized.dynamic.modules.linear")} == set(layers)
    assert type(quantized.classifier) is nn.Linear
    assert all(torch.equal(value, weights_before[name]) for name, value in model.state_dict().items())
    with torch.inference_mode():
        result, expected = quantized(**make_batch()).logits, model(**make_batch()).logits
    assert 1e-5 < (result - expected).abs().max() < 0.1 * expected.abs().max()
    for name, layer in layers.items():
        quantized_layer: Any = quantized.get_submodule(name)
        weight = layer.weight.detach().double().numpy()
        largest = abs(weight).max(axis=1, keepdims=True) if weights == "channel" else abs(weight).max()
        step = largest / 127.5
        integers = np.clip(np.round(weight / step), -128, 127)
        dequantized = quantized_layer.weight().dequantize().double().numpy()
        assert abs(dequantized - integers * step).max() <= np.max(step) * 1.001
        assert np.mean(abs(dequantized - integers * step) < 1e-6) > 0.98


def test_a_layer_is_within_the_steps_of_weights_and_inputs() -> None:
    """The inputs have at least 7 bits over the range from their minimum to their maximum, 0 included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 8))
    points = 3 * torch.randn(50, 32) + 1
    quantized = quantize_by_torch(model, ["0"], TorchInt8())
    with torch.inference_mode():
        error = (quantized(points) - model(points)).abs().max().item()
    weight = model[0].weight.detach()
    input_step = (points.max() - points.min()).item() / 127
    weight_step = weight.abs().amax(1).max().item() / 127
    bound = input_step * weight.abs().sum(1).max().item() + weight_step / 2 * points.abs().sum(1).max().item()
    assert 0 < error < bound


def test_no_warning_is_left_to_the_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_by_torch(bert(), ["bert.encoder.layer.0.output.dense"], TorchInt8())


def test_a_torch_without_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.ao.quantization.quantize_dynamic")
    with pytest.raises(UserError, match=r"has no dynamic quantization .* leave int8 out"):
        quantize_by_torch(bert(), ["bert.encoder.layer.0.output.dense"], TorchInt8())
