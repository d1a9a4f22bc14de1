"""Quantized linear layers in tiny random models, against torch's fake quantization in hooks."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2Model,
)

from istar.errors import UserError
from istar.finetune.quantization.linear_layers import (
    Form,
    QuantizedLinear,
    encoder_linears,
    forward_observed,
    parse_form,
    quantize_layers,
    update_largest_inputs,
)

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert(head: Any = BertForSequenceClassification, **sizes: int) -> Any:
    torch.manual_seed(0)
    config = BertConfig(**{**SIZES, "intermediate_size": 24, **sizes}, num_labels=3, initializer_range=0.3)
    return head(config).eval()


def albert() -> Any:
    torch.manual_seed(0)
    return AlbertForSequenceClassification(
        AlbertConfig(**SIZES, intermediate_size=24, embedding_size=8, initializer_range=0.3)
    ).eval()


def distilbert() -> Any:
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=24, initializer_range=0.3)
    return DistilBertForSequenceClassification(config).eval()


def make_batch(seed: int = 1) -> dict[str, Tensor]:
    """Return three texts of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 4, 5])
    mask = (torch.arange(7) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 50, (3, 7), generator=generator) * mask, "attention_mask": mask}


def calibrate_ranges(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the largest magnitude of the inputs of each linear layer."""
    largest: dict[str, Tensor] = {}
    observe = partial(update_largest_inputs, largest)
    with torch.no_grad():
        forward_observed(model, encoder_linears(model), inputs, inputs["attention_mask"], observe)
    return largest


def quantize_with_torch(model: nn.Module, form: Form, largest: dict[str, Tensor]) -> nn.Module:
    """Quantize with torch's operators: weights in place, inputs in hooks."""
    model = copy.deepcopy(model)
    weight_limit, input_limit = 2 ** (form.weight_bits - 1) - 1, 2 ** (form.activation_bits - 1) - 1

    def fake_inputs(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            points = arguments[0]
            if form.activations == "tensor":
                return (
                    torch.fake_quantize_per_tensor_affine(
                        points,
                        (largest[name] / input_limit).item(),
                        0,
                        -input_limit,
                        input_limit,
                    ),
                )
            rows = points.reshape(-1, points.shape[-1])
            scales = rows.abs().amax(1) / input_limit
            zeros = torch.zeros(len(rows), dtype=torch.int32)
            result = torch.fake_quantize_per_channel_affine(rows, scales, zeros, 0, -input_limit, input_limit)
            return (result.reshape(points.shape),)

        return hook

    for name, layer in encoder_linears(model).items():
        weight = layer.weight.detach()
        if form.weights == "tensor":
            scale = (weight.abs().max() / weight_limit).item()
            weight = torch.fake_quantize_per_tensor_affine(weight, scale, 0, -weight_limit, weight_limit)
        else:
            scales = weight.abs().amax(1) / weight_limit
            zeros = torch.zeros(len(weight), dtype=torch.int32)
            weight = torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -weight_limit, weight_limit)
        layer.weight = nn.Parameter(weight)
        layer.register_forward_pre_hook(fake_inputs(name))
    return model


@pytest.mark.parametrize("weights", ["channel", "tensor"])
@pytest.mark.parametrize("activations", ["tensor", "token"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_is_quantized_as_by_torch(weights: Any, activations: Any, bits: int) -> None:
    model, form = bert(), Form(bits, bits, weights, activations)
    largest = calibrate_ranges(model, make_batch())
    quantized = quantize_layers(model, encoder_linears(model), form, largest)
    with torch.no_grad():
        result, expected = (
            quantized(**make_batch(2)).logits,
            quantize_with_torch(model, form, largest)(**make_batch(2)).logits,
        )
        # A number on the border between two points of the grid would be rounded either way.
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        assert (result - model(**make_batch(2)).logits).abs().max() > 1e-4


@pytest.mark.parametrize(("build", "num_layers"), [(bert, 12), (distilbert, 12), (albert, 7)])
def test_the_encoder_is_quantized_and_nothing_else(build: Any, num_layers: int) -> None:
    """ALBERT shares the six linear layers of its blocks; the seventh widens the embeddings."""
    model = build()
    weights_before = {name: value.clone() for name, value in model.state_dict().items()}
    names = list(encoder_linears(model))
    assert len(names) == num_layers
    quantized = quantize_layers(model, names, Form(4, 4, activations="token"))
    quantized_names = {name for name, part in quantized.named_modules() if isinstance(part, QuantizedLinear)}
    assert quantized_names == set(names)
    weights_after = quantized.state_dict()
    assert {name for name in weights_before if not torch.equal(weights_before[name], weights_after[name])} == {
        f"{name}.weight" for name in names
    }
    assert not [name for name in names if "pooler" in name or "classifier" in name or "embedding_layer" in name]
    assert all(torch.equal(value, weights_before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert quantized(**make_batch()).logits.isfinite().all()


def test_a_question_answering_head_is_not_quantized() -> None:
    assert not [name for name in encoder_linears(bert(BertForQuestionAnswering)) if "qa_outputs" in name]


def test_more_bits_are_closer_to_the_floating_model() -> None:
    model = bert()
    largest = calibrate_ranges(model, make_batch())
    with torch.no_grad():
        expected = model(**make_batch()).logits
        errors = [
            (quantize_layers(model, largest, Form(bits, bits), largest)(**make_batch()).logits - expected)
            .abs()
            .max()
            .item()
            for bits in (3, 8, 16)
        ]
    assert errors[0] > 10 * errors[1] > 100 * errors[2]
    assert errors[2] < 1e-3


def test_padding_does_not_count() -> None:
    """The range is that of the tokens alone, and with a scale for each token padding changes no logits."""
    model, inputs = bert(), make_batch()
    lengths = enumerate((7, 4, 5))
    rows = [{name: values[row : row + 1, :length] for name, values in inputs.items()} for row, length in lengths]
    largest_by_row = [calibrate_ranges(model, row) for row in rows]
    largest = calibrate_ranges(model, inputs)
    for name, value in largest.items():
        expected = torch.stack([largest_of_row[name] for largest_of_row in largest_by_row]).max()
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=0)
    quantized = quantize_layers(model, largest, Form(8, 8, activations="token"))
    with torch.no_grad():
        logits, unpadded_logits = quantized(**inputs).logits, quantized(**rows[1]).logits
        torch.testing.assert_close(logits[1:2], unpadded_logits, rtol=1e-3, atol=1e-3)


def test_the_hooks_are_removed_after_an_error() -> None:
    model = bert()

    def fail(name: str, rows: Tensor) -> None:
        raise RuntimeError(name)

    with pytest.raises(RuntimeError):
        forward_observed(model, encoder_linears(model), make_batch(), make_batch()["attention_mask"], fail)
    assert model(**make_batch()).logits.isfinite().all()


def test_ranges_of_batches_are_those_of_one_batch() -> None:
    rows = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    largest: dict[str, Tensor] = {}
    for part in (rows[7:], rows[:0], rows[:7]):
        update_largest_inputs(largest, "a", part)
    assert largest == {"a": rows.abs().max()}


def test_wrong_forms_and_models() -> None:
    assert parse_form("w6a4", activations="token") == Form(6, 4, "channel", "token")
    for name in ("w8", "8", "w8a8x", "int8"):
        with pytest.raises(UserError, match="is not a form"):
            parse_form(name)
    with pytest.raises(UserError, match="from 2 to 16"):
        parse_form("w8a32")
    with pytest.raises(UserError, match="calibrate"):
        quantize_layers(bert(), encoder_linears(bert()), Form(8, 8))
    with pytest.raises(UserError, match=r"no torch\.nn\.Linear"):
        encoder_linears(GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20)))
