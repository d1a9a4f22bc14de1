r"""Two changes of a model that leave its outputs in floating point and change what quantization does to it.

`rotate_inputs` spreads outliers over all coordinates. For the input x of a linear layer with the weight W and an
orthogonal matrix R, :math:`W x = (W R)(R^T x)`. Each quantized linear layer thus gets the rotated input and the rotated
weight, as in QuaRot (Ashkboos et al., 2024) and SpinQuant (Liu et al., 2024). There the rotation is merged into the
preceding weights where layer normalization does not center; here it is a product of its own before each layer, which is
exact for every architecture, as rounding sees the same numbers.

`add_outlier` makes one coordinate large. The output of attention before its output projection is an average of the
values of the tokens, so that a dimension j of the values passes to the input of the projection linearly. Row j of the
value projection and its bias are multiplied by k, and column j of the output projection is divided by k. This place is
exact; the gain of a layer normalization, for example, is none in BERT, as its output also goes into the residual sum.
"""

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.quantization.linear_layers import replace_layers

Model = TypeVar("Model", bound=nn.Module)
Control = Literal["none", "rotate", "outlier"]

FACTOR = 128.0
"""Default factor of an outlier. A power of 2 changes no bit of the outputs."""
_VALUE_AND_OUTPUT_SUFFIXES = (
    ("attention.self.value", "attention.output.dense"),  # BERT, RoBERTa, ELECTRA
    ("attention.self.value_proj", "attention.output.dense"),  # DeBERTa-v2 and -v3
    ("attention.value", "attention.dense"),  # ALBERT
    ("attention.v_lin", "attention.out_lin"),  # DistilBERT
    ("self_attn.v_proj", "self_attn.o_proj"),  # Llama and its relatives
    ("self_attn.v_proj", "self_attn.out_proj"),  # OPT
)
"""Name suffixes of a value projection and of the output projection that reads its averages."""


class Rotation(nn.Module):
    """A layer that multiplies its inputs by an orthogonal matrix, :math:`x R`.

    Args:
        matrix: the orthogonal matrix R, `(d, d)`.
    """

    matrix: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)

    def forward(self, points: Tensor) -> Tensor:
        """Return the rotated points, `(..., d)`."""
        return points @ self.matrix


def random_orthogonal(dim: int, seed: int) -> Tensor:
    """Return an orthogonal matrix `(dim, dim)` from the uniform (Haar) distribution, in float64 on the CPU.

    It is the factor Q of a Gaussian matrix, with the signs that make the diagonal of R positive (Mezzadri, *How to
    Generate Random Matrices from the Classical Compact Groups*, 2007).
    """
    gaussian = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


def rotate_inputs(model: Model, names: Iterable[str], seed: int = 0) -> Model:
    """Return a copy of a model in which the input and the weight of each named layer are rotated at random.

    The outputs of the layers stay the same up to rounding. Layers with inputs of the same width share a rotation. The
    module `<name>` becomes a sequence of a `Rotation` and the layer with the rotated weight, `<name>.1`.

    Args:
        model: the floating model, which does not change.
        names: names of `torch.nn.Linear` modules.
        seed: random seed of the rotations.
    """
    rotation_by_width: dict[int, Tensor] = {}

    def rotate_layer(name: str, layer: nn.Linear) -> nn.Module:
        """Return a module that rotates the input and then applies the layer, whose weight is rotated as well."""
        width = layer.in_features
        if width not in rotation_by_width:
            rotation_by_width[width] = random_orthogonal(width, seed)
        weight = layer.weight.detach()
        matrix = rotation_by_width[width].to(weight.device)
        layer.weight = nn.Parameter((weight.double() @ matrix).to(weight.dtype), requires_grad=False)
        return nn.Sequential(Rotation(matrix.to(weight.dtype)), layer)

    return replace_layers(model, names, rotate_layer)


def add_outlier(model: Model, names: Iterable[str], factor: float = FACTOR, dimension: int = 0) -> Model:
    """Return a copy of a model in which one input of each output projection of attention is `factor` times as large.

    The outputs of the model stay the same up to rounding, because the weights of this input are divided by `factor`.

    Args:
        model: the floating model, which does not change.
        names: names of the linear layers of the encoder, among them the value and output projections.
        factor: the factor k, a finite number above 0.
        dimension: index j of the dimension of the values that becomes the outlier.

    Raises:
        UserError: if the factor is out of range, the architecture is not known, or several heads share their values
            (grouped queries).
    """
    if not 0 < factor < float("inf"):
        raise UserError(f"the factor of an outlier is {factor:g}; expected a finite number above 0")
    output_by_value = _match_value_and_output(set(names))
    if not output_by_value:
        raise UserError(
            f"--control outlier does not know where {type(model).__name__} computes values and reads their averages; "
            "expected BERT, RoBERTa, ELECTRA, DeBERTa-v2 or -v3, ALBERT, DistilBERT, Llama or OPT"
        )
    role_by_name: dict[str, str] = {}
    for value_name, output_name in output_by_value.items():
        role_by_name |= {value_name: "value", output_name: "output"}
        value_layer: Any = model.get_submodule(value_name)
        output_layer: Any = model.get_submodule(output_name)
        if value_layer.out_features != output_layer.in_features or not 0 <= dimension < value_layer.out_features:
            raise UserError(
                f"--control outlier: {value_name} has {value_layer.out_features} outputs, and {output_name} reads "
                f"{output_layer.in_features}; expected as many of each, and more than {dimension}"
            )

    def scale_dimension(name: str, layer: nn.Linear) -> nn.Module:
        """Scale the dimension in a value projection up, or in an output projection down; return the changed layer."""
        with torch.no_grad():
            if role_by_name[name] == "output":
                layer.weight[:, dimension] /= factor
            else:
                layer.weight[dimension] *= factor
                if layer.bias is not None:
                    layer.bias[dimension] *= factor
        return layer

    return replace_layers(model, role_by_name, scale_dimension)


def apply_control(model: Model, names: Iterable[str], control: Control, factor: float, seed: int) -> Model:
    """Return a copy of a model to which a control is applied, or the model itself if the control is `none`.

    Args:
        model: the floating model, which does not change.
        names: names of the linear layers of the encoder.
        control: which control: random rotation, outlier, or none.
        factor: factor of the outlier.
        seed: random seed of the rotation.
    """
    if control == "rotate":
        return rotate_inputs(model, names, seed)
    return add_outlier(model, names, factor) if control == "outlier" else model


def _match_value_and_output(names: set[str]) -> dict[str, str]:
    output_by_value = {}
    for name in sorted(names):
        for value_suffix, output_suffix in _VALUE_AND_OUTPUT_SUFFIXES:
            output_name = name.removesuffix(value_suffix) + output_suffix
            if name.endswith(value_suffix) and output_name in names:
                output_by_value[name] = output_name
    return output_by_value
