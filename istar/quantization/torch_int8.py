"""Dynamic int8 quantization by torch's own operators, as a check of the simulation on real integer arithmetic.

torch 2.13 has `torch.ao.quantization.quantize_dynamic`, which works on CPUs and warns that it is deprecated in favour
of the separate package torchao. A version of torch without it, or a CPU without a quantization engine, is an error
here, never a silent change of method.

It differs from the simulated `w8a8` with a scale for each token: the activations have one scale and one zero-point for
the whole tensor, computed in each forward pass from its minimum and maximum. A score therefore depends on the examples
of a batch, padding included. torch asks for a range of 7 of the 8 bits of activations (`reduce_range`), so that sums of
products do not overflow on x86.
"""

import importlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from istar.errors import UserError
from istar.quantization.linear_layers import WeightScales

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class TorchInt8:
    """The quantization scheme `int8`: dynamic quantization by torch's own operators.

    Attributes:
        weights: granularity of the weights: one scale for each output `channel`, or one for the whole `tensor`.
    """

    weights: WeightScales = "channel"

    @property
    def name(self) -> str:
        """Return the name of the scheme."""
        return "int8"


def quantize_by_torch(model: Model, names: Iterable[str], form: TorchInt8) -> Model:
    """Return a copy of a model in which torch has quantized the named linear layers; the model itself does not change.

    Args:
        model: a model on the CPU in float32.
        names: names of `torch.nn.Linear` modules, as `istar.quantization.linear_layers.encoder_linears` returns them.
        form: the quantization scheme, which sets the granularity of the weights.

    Raises:
        UserError: if this torch has no dynamic quantization or no engine for it, or the model is not on the CPU.
    """
    package: Any = _import_torch_quantization()
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise UserError(f"the form int8 needs a model on the CPU; it is on {', '.join(sorted(devices))}")
    per_channel, per_tensor = package.per_channel_dynamic_qconfig, package.default_dynamic_qconfig
    config_by_layer = dict.fromkeys(names, per_channel if form.weights == "channel" else per_tensor)
    with warnings.catch_warnings():
        # The deprecation is known, see the module's docstring; other warnings are about torch's own code.
        warnings.filterwarnings("ignore", message=r"torch\.ao\.quantization is deprecated", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
        quantized: Model = package.quantize_dynamic(model, config_by_layer, dtype=torch.qint8)
    return quantized


def _import_torch_quantization() -> Any:
    """Return the module `torch.ao.quantization`.

    Raises:
        UserError: if this torch has no dynamic quantization, or no engine for int8 on this CPU.
    """
    advice = "leave int8 out of --forms"
    try:
        package: Any = importlib.import_module("torch.ao.quantization")
        package.quantize_dynamic, package.per_channel_dynamic_qconfig, package.default_dynamic_qconfig  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"torch {torch.__version__} has no dynamic quantization (torch.ao.quantization.quantize_dynamic); {advice}"
        ) from error
    engines = [engine for engine in torch.backends.quantized.supported_engines if engine != "none"]
    if not engines:
        raise UserError(f"torch has no engine for int8 on this CPU; {advice}")
    return package
