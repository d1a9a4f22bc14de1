"""A training step with I-STAR over all layers against the same step without: `python -m benchmarks.step`.

The step is forward, backward and fused AdamW on random tokens, in the given precision (bf16 is autocast). The peer is
the step without a penalty; beside istar stand the formulation of the paper's code (layers stacked, `torch.cov`,
`svdvals`) and the closed form by plain autograd. All take turns in an order that rotates; the ratio is that of each
round, and its median and the middle half of the rounds are printed. Peak memory is that of two steps in a process of
its own, above that of the process without a penalty.

    python -m benchmarks.step
    python -m benchmarks.step --shape minilm-32x64 --precision bf16 --rounds 30 --only "istar, bfloat16"
    python -m benchmarks.step --real 0.25          # three quarters of the batch are padding
"""

import argparse
import json
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from statistics import median
from tempfile import mkdtemp

import torch
from rich.table import Table
from torch import Tensor
from transformers import TrainingArguments

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
    penalties,
    ratios,
)  # fmt: skip
from istar.integrations.transformers import PenaltyTrainer
from istar.regularizers import IStar, attach

METHODS = ("no penalty", "published", "closed form, autograd", "istar, float32", "istar, bfloat16")
TRAINER = "PenaltyTrainer, "
"""Before the name of a method of istar: the same penalty in a step of transformers' Trainer."""
TRAINED = tuple(f"{TRAINER}{name}" for name in METHODS if name.startswith("istar"))


class Steps:
    """Steps of one model with any of the penalties."""

    def __init__(self, shape: str, precision: str, real: float, device: torch.device) -> None:
        self.device, self.autocast = device, precision == "bf16"
        self.model = SHAPES[shape].model().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.inputs = batch(SHAPES[shape], device, real)
        self.is_padded = real < 1

    def in_trainer(self, penalty: IStar) -> Callable[[], None]:
        """A step of transformers' Trainer with this penalty, on a copy of the model."""
        args = TrainingArguments(
            mkdtemp(), use_cpu=self.device.type == "cpu", bf16=self.autocast, report_to="none", disable_tqdm=True
        )
        model = deepcopy(self.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        trainer = PenaltyTrainer(model=model, args=args, penalty=penalty)
        # As `train` does; accelerate puts the model's forward under autocast.
        trainer.current_gradient_accumulation_steps = 1
        model = trainer.accelerator.prepare_model(model)

        def step() -> None:
            trainer.attach_penalty()
            trainer.training_step(model, dict(self.inputs))
            trainer.detach_penalty()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def __call__(self, penalty: Method) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            self._loss(penalty).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, penalty: Method) -> Tensor:
        loss: Tensor
        if isinstance(penalty, IStar):
            with attach(self.model, penalty) as watch:
                loss = self.model(**self.inputs).loss + watch.loss()
            return loss
        outputs = self.model(**self.inputs, output_hidden_states=penalty is not None)
        loss = outputs.loss
        if penalty is not None:
            score = penalty.score(outputs.hidden_states, self.inputs["attention_mask"] if self.is_padded else None)
            loss = loss + penalty.weight * (1 - score)
        return loss


def main() -> None:
    known = parser(__doc__, 7, METHODS)
    known.add_argument("--shape", nargs="+", choices=SHAPES, default=["bert-base-32x128", "minilm-32x64"])
    known.add_argument("--precision", nargs="+", choices=("32", "bf16"), default=["32", "bf16"])
    known.add_argument("--real", type=float, default=1.0, help="share of real tokens in the batch (default: 1)")
    known.add_argument("--only", nargs="+", choices=(*METHODS[1:], *TRAINED), default=list(METHODS[1:]))
    known.add_argument("--no-memory", action="store_true", help="measure time alone")
    known.add_argument(
        "--processor-time",
        action="store_true",
        help="processor time instead of wall time: for a machine that others use, with OMP_NUM_THREADS=1",
    )
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
    names = [METHODS[0], *options.only]
    made = penalties(SHAPES[shape].width, device, [name.removeprefix(TRAINER) for name in names])
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        penalty = made[name.removeprefix(TRAINER)]
        if name.startswith(TRAINER):
            assert isinstance(penalty, IStar)
            calls[name] = steps.in_trainer(penalty)
        else:
            calls[name] = partial(steps, penalty)
    clock = time.process_time if options.processor_time else time.perf_counter
    seconds = in_turns(calls, options.rounds, device, clock)
    measured = [] if options.no_memory else [name for name in names if name in METHODS]
    peaks = {name: fresh_peak(shape, precision, name, options) for name in measured}
    title = f"{shape}, {precision}, {options.real:.0%} real tokens, {device}, {options.rounds} rounds"
    printed = Table(title=title)
    for column in ("", "ms a step (median)", "ratio to no penalty", "MB above no penalty"):
        printed.add_column(column)
    for name in names:
        above = f"{peaks[name] - peaks[METHODS[0]]:.0f}" if name in peaks else ""
        printed.add_row(name, f"{1e3 * median(seconds[name]):.1f}", ratios(seconds[name], seconds[METHODS[0]]), above)
    return printed


def peak(shape: str, precision: str, options: argparse.Namespace) -> float:
    device = options.device
    steps = Steps(shape, precision, options.real, device)
    [penalty] = penalties(SHAPES[shape].width, device, [options.peak_of]).values()
    for _ in range(2):
        steps(penalty)
    return peak_mb(device)


def fresh_peak(shape: str, precision: str, method: str, options: argparse.Namespace) -> float:
    arguments = ["--shape", shape, "--precision", precision, "--real", str(options.real)]
    return float(in_fresh_process("benchmarks.step", *arguments, "--device", str(options.device), "--peak-of", method))


if __name__ == "__main__":
    main()
