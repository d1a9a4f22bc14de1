"""A training step with I-STAR over all layers against the same step without: `python -m benchmarks.step`.

The step is forward, backward and fused AdamW on random tokens, in the given precision (bf16 is autocast). The peer is
the step without a penalty; beside istar stand the formulation of the paper's code (layers stacked, `torch.cov`,
`svdvals`) and the closed form by plain autograd. All take turns, the ratio is that of each round, and its median and
the middle half of the rounds are printed. Peak memory is that of two steps in a process of its own, above that of the
process without a penalty.

    python -m benchmarks.step
    python -m benchmarks.step --shape minilm-32x64 --precision bf16 --rounds 30 --only "istar, bfloat16"
    python -m benchmarks.step --real 0.25          # three quarters of the batch are padding
"""

import argparse
import json
from collections.abc import Callable
from statistics import median

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.common import (
    SHAPES,
    Method,
    batch,
    console,
    in_fresh_process,
    in_turns,
    parsed,
    parser,
    peak_mb,
    ratios,
    regularizers,
)  # fmt: skip
from istar.regularizers import IStar
from istar.regularizers.points import token_index
from istar.training.taps import Taps, find_taps, forward_with_penalty

METHODS = ("no penalty", "published", "closed form, autograd", "istar, float32", "istar, bfloat16")


class Steps:
    """Steps of one model with any of the penalties."""

    def __init__(self, shape: str, precision: str, real: float, device: torch.device) -> None:
        self.device, self.autocast = device, precision == "bf16"
        self.model = SHAPES[shape].model().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.inputs = batch(SHAPES[shape], device, real)
        self.taps: Taps | None = find_taps(self.model, self.inputs)
        # On the host, as in training.
        index = token_index(self.inputs["attention_mask"].cpu())
        self.index = None if index is None else index.to(device)

    def __call__(self, regularizer: Method) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            self._loss(regularizer).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, regularizer: Method) -> Tensor:
        loss: Tensor
        if isinstance(regularizer, IStar):
            outputs, penalty = forward_with_penalty(self.model, self.inputs, regularizer, self.index, self.taps)
            loss = outputs.loss + regularizer.weight * penalty.value
            return loss
        outputs = self.model(**self.inputs, output_hidden_states=regularizer is not None)
        loss = outputs.loss
        if regularizer is not None:
            mask = None if self.index is None else self.inputs["attention_mask"]
            loss = loss + regularizer.weight * regularizer.penalty(outputs.hidden_states, mask).value
        return loss


def main() -> None:
    known = parser(__doc__, 7, METHODS)
    known.add_argument("--shape", nargs="+", choices=SHAPES, default=["bert-base-32x128", "minilm-32x64"])
    known.add_argument("--precision", nargs="+", choices=("32", "bf16"), default=["32", "bf16"])
    known.add_argument("--real", type=float, default=1.0, help="share of real tokens in the batch (default: 1)")
    known.add_argument("--only", nargs="+", choices=METHODS[1:], default=list(METHODS[1:]), help="these alone")
    known.add_argument("--no-memory", action="store_true", help="measure time alone")
    options = parsed(known)
    if options.peak_of:
        print(json.dumps(peak(options.shape[0], options.precision[0], options)))
        return
    for shape in options.shape:
        for precision in options.precision:
            console().print(table(shape, precision, options))


def table(shape: str, precision: str, options: argparse.Namespace) -> Table:
    device = options.device
    steps = Steps(shape, precision, options.real, device)
    made = regularizers(SHAPES[shape].width, device, [METHODS[0], *options.only])
    calls: dict[str, Callable[[], object]] = {name: lambda made=made[name]: steps(made) for name in made}  # type: ignore[misc]
    seconds = in_turns(calls, options.rounds, device)
    peaks = {} if options.no_memory else {name: fresh_peak(shape, precision, name, options) for name in made}
    title = f"{shape}, {precision}, {options.real:.0%} real tokens, {device}, {options.rounds} rounds"
    printed = Table(title=title)
    for column in ("", "ms a step (median)", "ratio to no penalty", "MB above no penalty"):
        printed.add_column(column)
    for name in made:
        above = f"{peaks[name] - peaks[METHODS[0]]:.0f}" if peaks else ""
        printed.add_row(name, f"{1e3 * median(seconds[name]):.1f}", ratios(seconds[name], seconds[METHODS[0]]), above)
    return printed


def peak(shape: str, precision: str, options: argparse.Namespace) -> float:
    device = options.device
    steps = Steps(shape, precision, options.real, device)
    [regularizer] = regularizers(SHAPES[shape].width, device, [options.peak_of]).values()
    for _ in range(2):
        steps(regularizer)
    return peak_mb(device)


def fresh_peak(shape: str, precision: str, method: str, options: argparse.Namespace) -> float:
    arguments = ["--shape", shape, "--precision", precision, "--real", str(options.real)]
    return float(in_fresh_process("benchmarks.step", *arguments, "--device", str(options.device), "--peak-of", method))


if __name__ == "__main__":
    main()
