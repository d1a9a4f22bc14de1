r"""Simulated quantization: numbers rounded to a grid of integers, and linear layers with such weights and inputs.

With the limit :math:`q = 2^{b - 1} - 1` and a scale s, a number becomes

.. math::
    Q(x) = s \cdot \operatorname{clip}(\operatorname{round}(x / s), -q, q), \qquad s = \frac{\max |x|}{q}

(Jacob et al., *Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference*, CVPR
2018, section 2.1, with the zero-point 0; Krishnamoorthi, *Quantizing deep convolutional networks for efficient
inference*, 2018, section 2.2). The grid is symmetric, so the integer :math:`-2^{b - 1}` is not used. Halves are rounded
to the even integer. The granularity says what the maximum is taken over: the whole tensor, an output channel of a
weight, or a token.

All functions keep dtype and device. The gradient of rounding is 0.

The weights and the inputs of every `torch.nn.Linear` of the encoder are quantized: the projections of the attention and
the two matrices of the feed-forward layer. All else stays in floating point: embeddings, biases, layer normalization,
softmax and the products of queries, keys and values, the pooler, and the head of the task. The outputs of the linear
layers are floating, too, as hardware keeps the sums of the integer products in 32 bits. The pooler counts as part of
the head, because many models train both from scratch.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from istar.errors import NonFiniteError, UserError

MIN_BITS, MAX_BITS = 2, 16
"""Smallest and largest bit width. With 1 bit, a symmetric grid would contain only 0."""


def integer_limit(bits: int) -> int:
    """Return the largest integer q of a symmetric grid, 2^(bits - 1) - 1; the smallest one is -q.

    Raises:
        UserError: if the bit width is not from `MIN_BITS` to `MAX_BITS`.

    >>> [integer_limit(bits) for bits in (8, 6, 4)]
    [127, 31, 7]
    """
    if not MIN_BITS <= bits <= MAX_BITS:
        raise UserError(f"{bits} bits cannot be simulated; expected a number from {MIN_BITS} to {MAX_BITS}")
    return int(2 ** (bits - 1) - 1)


def scale_for(largest: Tensor, bits: int) -> Tensor:
    """Return the quantization scale s = largest / q, which makes the largest magnitude the last point of the grid.

    Args:
        largest: largest magnitudes, `(...)`, floating and at least 0.
        bits: number of bits b.

    Returns:
        `(...)`, in the dtype and on the device of `largest`. It is 1 where the largest magnitude is 0, because any
        scale represents zeros exactly. A magnitude so small that the scale would underflow counts as 0.

    Raises:
        UserError: if the number of bits is out of range, or the dtype is not floating.
        NonFiniteError: if a magnitude is NaN or infinite.
    """
    if not largest.is_floating_point():
        raise UserError(f"the numbers to quantize are {largest.dtype}; expected a floating dtype")
    if not torch.isfinite(largest).all():
        raise NonFiniteError("the numbers to quantize are not finite; look for NaN or infinite values in them")
    scale = largest / integer_limit(bits)
    return torch.where(scale >= torch.finfo(scale.dtype).tiny, scale, torch.ones_like(scale))


def round_to_grid(values: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Round values to the nearest point of the grid with the given scale; values beyond its ends are clipped.

    Within the range of the grid, no value moves by more than half a scale.

    Args:
        values: `(...)`, any floating dtype.
        scale: distance between neighbouring points of the grid, positive; 0-d, or of a shape that broadcasts with the
            values.
        bits: number of bits b.

    Raises:
        UserError: if the number of bits is out of range.

    >>> round_to_grid(torch.tensor([-9.0, -0.6, 0.2, 1.5, 2.5]), torch.tensor(1.0), bits=4).tolist()
    [-7.0, -1.0, 0.0, 2.0, 2.0]
    """
    limit = integer_limit(bits)
    scale = scale.to(values.dtype)
    return torch.round(values / scale).clamp(-limit, limit) * scale


def quantize_per_tensor(values: Tensor, bits: int) -> Tensor:
    """Quantize floating values `(...)` to `bits` bits with one scale, from their largest magnitude.

    Raises:
        UserError: if the number of bits is out of range.
        NonFiniteError: if a value is NaN or infinite.
    """
    return round_to_grid(values, scale_for(values.detach().abs().amax(), bits), bits)


def quantize_per_row(values: Tensor, bits: int) -> Tensor:
    """Quantize each row of floating values `(..., d)`, d >= 1, to `bits` bits with a separate scale.

    For a weight `(out_features, in_features)` of `torch.nn.Linear`, a row is an output channel. For activations
    `(batch, tokens, d)`, a row is a token, and its result depends on no other token (dynamic quantization per token, as
    in Yao et al., *ZeroQuant*, NeurIPS 2022).

    Raises:
        UserError: if the number of bits is out of range.
        NonFiniteError: if a value is NaN or infinite.
    """
    return round_to_grid(values, scale_for(values.detach().abs().amax(-1, keepdim=True), bits), bits)


WeightScales = Literal["channel", "tensor"]
ActivationScales = Literal["tensor", "token"]
Model = TypeVar("Model", bound=nn.Module)

_POOLER = "pooler"
"""Part of the name of the pooler's layers in every architecture that has a pooler."""


@dataclass(frozen=True)
class Form:
    """A scheme of simulated quantization: the bit widths and the granularity of weights and activations.

    Attributes:
        weight_bits: bit width of the weights.
        activation_bits: bit width of the inputs of linear layers.
        weights: granularity of the weights: one scale for each output `channel`, or one for the whole `tensor`.
        activations: granularity of the inputs: one scale for the whole `tensor`, calibrated in advance (static), or one
            for each `token`, computed in the forward pass (dynamic).
    """

    weight_bits: int
    activation_bits: int
    weights: WeightScales = "channel"
    activations: ActivationScales = "tensor"

    def __post_init__(self) -> None:
        """Raise a `UserError` if a bit width is out of range."""
        for bits in (self.weight_bits, self.activation_bits):
            integer_limit(bits)

    @property
    def name(self) -> str:
        """Return the bit widths of weights and activations as a name such as `w8a8`."""
        return f"w{self.weight_bits}a{self.activation_bits}"


def parse_form(name: str, weights: WeightScales = "channel", activations: ActivationScales = "tensor") -> Form:
    """Return the quantization scheme of a name `w<bits of weights>a<bits of activations>`, with the given granularity.

    Raises a `UserError` if the name does not match this pattern, or a bit width is out of range.
    """
    match = re.fullmatch(r"w(\d{1,3})a(\d{1,3})", name)
    if match is None:
        raise UserError(f"{name!r} is not a form; expected w<bits of weights>a<bits of activations>, such as w8a8")
    return Form(int(match[1]), int(match[2]), weights, activations)


def encoder_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of the encoder `model.base_model`, without pooler and head, by their names in the model.

    `model` is a model of the transformers library, with or without a head. Raises a `UserError` if the encoder lacks a
    `torch.nn.Linear`.
    """
    encoder: Any = getattr(model, "base_model", model)
    encoder_ids = {id(module) for module in encoder.modules()}
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and id(module) in encoder_ids and _POOLER not in name
    }
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no torch.nn.Linear in its encoder (GPT-2, for example, has another kind of "
            "layer); expected an encoder such as BERT"
        )
    return layers


def forward_observed(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    inputs: Mapping[str, Any],
    mask: Tensor,
    observe: Callable[[str, Tensor], object],
) -> Any:
    """Run a forward pass, call `observe(name, rows)` with the input of each layer, and return the model's output.

    Args:
        layers: modules of the model by name; each has one tensor `(..., d)` as its input.
        inputs: keyword arguments of the model.
        mask: attention mask, `(batch, tokens)`, bool or 0/1. Rows of masked tokens are left out of inputs of the shape
            `(batch, tokens, d)` or `(batch * tokens, d)`. Inputs of other shapes, such as DeBERTa's position
            embeddings, are without padding and observed whole.
        observe: called with the name of a layer and its input, `(n, d)`.
    """
    token_shapes = (tuple(mask.shape), (mask.numel(),))

    def make_hook(name: str) -> Callable[..., None]:
        def observe_input(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            layer_input = arguments[0]
            rows = layer_input.reshape(-1, layer_input.shape[-1])
            has_row_per_token = tuple(layer_input.shape[:-1]) in token_shapes
            observe(name, rows[mask.reshape(-1).bool()] if has_row_per_token else rows)

        return observe_input

    handles = [layer.register_forward_pre_hook(make_hook(name)) for name, layer in layers.items()]
    try:
        return model(**inputs)
    finally:
        for handle in handles:
            handle.remove()


def update_largest_inputs(largest: dict[str, Tensor], name: str, rows: Tensor) -> None:
    """Update the largest magnitudes, 0-d by the name of the layer, with inputs `(n, d)` of a layer; n may be 0."""
    if rows.numel():
        magnitude = rows.detach().abs().amax()
        largest[name] = torch.maximum(largest.get(name, magnitude), magnitude)


class QuantizedLinear(nn.Module):
    r"""A linear layer with quantized weights and inputs, :math:`y = Q_a(x) \, Q_w(W)^T + b`.

    Args:
        layer: the floating layer, which is not changed.
        form: the quantization scheme.
        largest_input: largest magnitude of the inputs on calibration data, 0-d; needed if `form.activations` is
            `tensor`.

    Attributes:
        weight: quantized weight, `(out_features, in_features)`.
        bias: `(out_features,)` or None, not quantized.
        scale: static scale of the inputs, 0-d; None if each token has a separate scale.

    Raises a `UserError` if the calibrated magnitude is missing.
    """

    bias: Tensor | None
    scale: Tensor | None

    def __init__(self, layer: nn.Linear, form: Form, largest_input: Tensor | None = None) -> None:
        super().__init__()
        self.form = form
        self.in_features, self.out_features = layer.in_features, layer.out_features
        quantize_weight = quantize_per_row if form.weights == "channel" else quantize_per_tensor
        self.weight = nn.Parameter(quantize_weight(layer.weight.detach(), form.weight_bits), requires_grad=False)
        bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        self.register_parameter("bias", bias)
        scale = None
        if form.activations == "tensor":
            if largest_input is None:
                raise UserError(
                    "a static scale needs the range of the inputs; calibrate on data that reach every linear layer, or "
                    "use one scale for each token"
                )
            scale = scale_for(largest_input, form.activation_bits)
        self.register_buffer("scale", scale)

    def forward(self, points: Tensor) -> Tensor:
        """Quantize the inputs `(..., in_features)` and return the layer's outputs, `(..., out_features)`."""
        bits = self.form.activation_bits
        if self.scale is None:
            quantized_points = quantize_per_row(points, bits)
        else:
            quantized_points = round_to_grid(points, self.scale, bits)
        return functional.linear(quantized_points, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.form}"


def quantize_layers(
    model: Model, names: Iterable[str], form: Form, largest_inputs: Mapping[str, Tensor] | None = None
) -> Model:
    """Return a copy of a model with the named linear layers quantized; the model itself does not change.

    Args:
        names: names of `torch.nn.Linear` modules, as `encoder_linears` returns them.
        largest_inputs: what `update_largest_inputs` has gathered on calibration data; needed if `form.activations` is
            `tensor`.

    Raises a `UserError` if the largest input of a layer is needed and missing.
    """
    copied_model = copy.deepcopy(model)
    for name in names:
        layer: Any = copied_model.get_submodule(name)
        copied_model.set_submodule(name, QuantizedLinear(layer, form, (largest_inputs or {}).get(name)))
    return copied_model
