"""Compares istar's penalty alone, without a model, with other formulations: `python -m benchmarks.penalty`.

All contenders compute the score of the same random hidden states and its gradient: istar, with products in float32 and
in bfloat16; the formulation of the paper's code (layers stacked, `torch.cov`, `svdvals`), to which all ratios refer;
and the closed form by plain autograd. The layers differ in their means and in the deviations of their dimensions. The
order of the contenders rotates from round to round.

The error of a score is relative to the score in float64; that of a gradient is the norm of its difference from the
gradient in float64, divided by the norm of the latter. The memory is the peak of one call in a new process above the
memory before the call, and includes the gradients.

    python -m benchmarks.penalty                   two models with full and with padded batches; 6 minutes on two cores
    python -m benchmarks.penalty --shape minilm-32x64 --real 0.25
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.common import (
    SHAPES,
    Method,
    Shape,
    add_shape_option,
    comparison_table,
    json_from_new_process,
    make_console,
    make_parser,
    make_penalties,
    note_emulated_bfloat16,
    paired_ratio,
    parse_options,
    peak_memory_mb,
    random_batch,
    time_in_rotation,
)
from istar.regularizers import IStar, Penalty

PEER = "published"
METHODS = (PEER, "closed form, autograd", "istar, float32", "istar, bf16")


class HiddenStates:
    """Random hidden states of a batch; a call returns the score of a penalty and its gradient by each layer."""

    def __init__(self, shape: Shape, real_share: float, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        deviations = torch.logspace(0, -2, shape.width)
        self.states = [
            (
                torch.randn(shape.batch, shape.tokens, shape.width, generator=generator) * deviations
                + torch.randn(shape.width, generator=generator)
            ).to(device)
            for _ in range(shape.layers + 1)
        ]
        mask = random_batch(shape, torch.device("cpu"), real_share)["attention_mask"]
        self.mask = None if mask.all() else mask.to(device)

    def __call__(self, penalty: Method, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
        """Return the score of the hidden states by a penalty, and its gradient by each layer."""
        assert penalty is not None
        states = [state.detach().to(dtype).requires_grad_() for state in self.states]
        if isinstance(penalty, Penalty):
            penalty.weight = 1.0
            score = 1 - penalty(states, self.mask)
        else:
            score = penalty.score(states, self.mask)
        return score.detach(), list(torch.autograd.grad(score, states[1:]))


def main() -> None:
    """Print a table for each shape and each share of real tokens."""
    parser = make_parser(__doc__, rounds=7)
    add_shape_option(parser)
    real_help = "shares of real tokens in the batch, a table for each (default: 1 0.25)"
    parser.add_argument("--real", nargs="+", type=float, default=[1.0, 0.25], help=real_help)
    options = parse_options(parser)
    if options.peak_of:
        print(json.dumps(measure_peak_mb(options)))
        return
    note_emulated_bfloat16(options.device.type)
    for shape in options.shape:
        for real_share in options.real:
            make_console().print(make_table(shape, real_share, options.rounds, options.device))


def make_table(shape: str, real_share: float, rounds: int, device: torch.device) -> Table:
    """Measure all contenders on hidden states of this shape, and return the table."""
    hidden_states = HiddenStates(SHAPES[shape], real_share, device)
    penalties = make_penalties(SHAPES[shape].width, device, METHODS)
    calls = {name: partial(hidden_states, penalty) for name, penalty in penalties.items()}
    seconds = time_in_rotation(calls, rounds, device)
    exact_score, exact_gradients = hidden_states(in_float64(penalties["istar, float32"]), torch.float64)
    columns = ("ms (median)", f"ratio to {PEER}", "MB", "error of the score", "of the gradient")
    title = f"{shape}, {real_share:.0%} real tokens, {device}, {rounds} rounds"
    table = comparison_table(title, columns, rounds)
    for name, penalty in penalties.items():
        score, gradients = hidden_states(penalty)
        table.add_row(
            name,
            f"{1e3 * median(seconds[name]):.1f}",
            paired_ratio(seconds, name, PEER),
            f"{peak_in_new_process(shape, real_share, name, device):.0f}",
            f"{abs(score.item() / exact_score.item() - 1):.0e}",
            f"{relative_error(gradients, exact_gradients):.0e}",
        )
    return table


def in_float64(penalty: Method) -> IStar:
    """Return a copy of an I-STAR penalty with Sigma_S in float64, for hidden states in float64."""
    assert isinstance(penalty, IStar)
    assert penalty.shrinkage_covariance is not None
    exact = IStar(penalty.weight, penalty.zeta)
    exact.shrinkage_covariance = penalty.shrinkage_covariance.double()
    return exact


def relative_error(gradients: list[Tensor], exact: list[Tensor]) -> float:
    """Return the norm of the difference between two gradients divided by the norm of the exact one."""
    pairs = list(zip(gradients, exact, strict=True))
    difference = sum(float((gradient.double() - exact_gradient).square().sum()) for gradient, exact_gradient in pairs)
    return float(difference / sum(float(exact_gradient.square().sum()) for exact_gradient in exact)) ** 0.5


def measure_peak_mb(options: argparse.Namespace) -> float:
    """Return the additional memory in MB that one call with the method `options.peak_of` takes."""
    device = options.device

    def prepare(shape: Shape, real_share: float) -> Callable[[], object]:
        """Return a function that calls the penalty on random hidden states."""
        [penalty] = make_penalties(shape.width, device, [options.peak_of]).values()
        return partial(HiddenStates(shape, real_share, device), penalty)

    prepare(SHAPES["tiny"], 1.0)()  # The first call loads kernels, which are not to be counted.
    call = prepare(SHAPES[options.shape[0]], options.real[0])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    memory_before = peak_memory_mb(device)
    call()
    return peak_memory_mb(device) - memory_before


def peak_in_new_process(shape: str, real_share: float, method: str, device: torch.device) -> float:
    """Return the result of `measure_peak_mb` for a method, measured in a new process."""
    arguments = ["--shape", shape, "--real", str(real_share), "--device", str(device), "--peak-of", method]
    return float(json_from_new_process("benchmarks.penalty", *arguments))


if __name__ == "__main__":
    main()
