"""The penalty alone, forward and backward over given hidden states: `python -m benchmarks.penalty`.

Time, memory and error of istar's penalty against the formulation of the paper's code (layers stacked, `torch.cov`,
`svdvals`) and the closed form by plain autograd. All take turns on the same random states, whose layers differ in mean
and in the deviations of their dimensions; the ratio is to the published formulation, in each round. The error is that
of the score, and of the norm of the gradient's difference, against the same in float64. Memory is the peak of one call
in a process of its own above that before the call, the gradients themselves included.

    python -m benchmarks.penalty
    python -m benchmarks.penalty --shape minilm-32x64 --real 0.25
"""

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.common import (
    SHAPES,
    Published,
    Shape,
    batch,
    console,
    in_fresh_process,
    in_turns,
    parsed,
    parser,
    peak_mb,
    penalties,
    ratios,
)
from istar.regularizers import IStar

METHODS = ("published", "closed form, autograd", "istar, float32", "istar, bfloat16")


class Cloud:
    """Hidden states of a batch, and the penalty's gradient by them."""

    def __init__(self, shape: Shape, real: float, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        deviations = torch.logspace(0, -2, shape.width)
        self.states = [
            (
                torch.randn(shape.batch, shape.tokens, shape.width, generator=generator) * deviations
                + torch.randn(shape.width, generator=generator)
            ).to(device)
            for _ in range(shape.layers + 1)
        ]
        mask = batch(shape, torch.device("cpu"), real)["attention_mask"]
        self.mask = None if mask.all() else mask.to(device)

    def __call__(self, penalty: IStar | Published, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
        states = [state.detach().to(dtype).requires_grad_() for state in self.states]
        if isinstance(penalty, IStar):
            penalty.weight = 1.0
            score = 1 - penalty(states, self.mask)
        else:
            score = penalty.score(states, self.mask)
        return score.detach(), list(torch.autograd.grad(score, states[1:]))


def main() -> None:
    known = parser(__doc__, 7, METHODS)
    known.add_argument("--shape", nargs="+", choices=SHAPES, default=["bert-base-32x128", "minilm-32x64"])
    known.add_argument("--real", nargs="+", type=float, default=[1.0, 0.25], help="share of real tokens in the batch")
    options = parsed(known)
    if options.peak_of:
        print(json.dumps(peak(options)))
        return
    for shape in options.shape:
        for real in options.real:
            console().print(table(shape, real, options.rounds, options.device))


def table(shape: str, real: float, rounds: int, device: torch.device) -> Table:
    cloud = Cloud(SHAPES[shape], real, device)
    made = penalties(SHAPES[shape].width, device, METHODS)
    calls: dict[str, Callable[[], object]] = {name: lambda one=made[name]: cloud(one) for name in made}  # type: ignore[misc]
    seconds = in_turns(calls, rounds, device)
    exact = cloud(IStarInFull(made["istar, float32"]), torch.float64)
    printed = Table(title=f"{shape}, {real:.0%} real tokens, {device}, {rounds} rounds")
    for column in ("", "ms (median)", "ratio to published", "MB", "error of the score", "of the gradient"):
        printed.add_column(column)
    for name, one in made.items():
        assert one is not None
        score, gradients = cloud(one)
        told = fresh_peak(shape, real, name, device)
        printed.add_row(
            name,
            f"{1e3 * median(seconds[name]):.1f}",
            ratios(seconds[name], seconds["published"]),
            f"{told:.0f}",
            f"{abs(score.item() / exact[0].item() - 1):.0e}",
            f"{distance(gradients, exact[1]):.0e}",
        )
    return printed


class IStarInFull(IStar):
    """The same penalty of float64 states."""

    def __init__(self, other: Any) -> None:
        super().__init__(other.weight, other.zeta)
        self.shrinkage_covariance = other.shrinkage_covariance.double()


def distance(gradients: list[Tensor], exact: list[Tensor]) -> float:
    """Norm of the difference over that of the exact one."""
    pairs = list(zip(gradients, exact, strict=True))
    difference = sum(float((own.double() - other).square().sum()) for own, other in pairs)
    return float(difference / sum(float(other.square().sum()) for other in exact)) ** 0.5


def peak(options: argparse.Namespace) -> float:
    shape, device = SHAPES[options.shape[0]], options.device
    cloud = Cloud(shape, options.real[0], device)
    [penalty] = penalties(shape.width, device, [options.peak_of]).values()
    assert penalty is not None
    # Libraries load their kernels at the first call.
    Cloud(SHAPES["tiny"], 1.0, device)(penalties(SHAPES["tiny"].width, device, [options.peak_of])[options.peak_of])  # type: ignore[arg-type]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = peak_mb(device)
    cloud(penalty)
    return peak_mb(device) - before


def fresh_peak(shape: str, real: float, method: str, device: torch.device) -> float:
    arguments = ["--shape", shape, "--real", str(real), "--device", str(device), "--peak-of", method]
    return float(in_fresh_process("benchmarks.penalty", *arguments))


if __name__ == "__main__":
    main()
