"""Compares a training step with I-STAR over all layers with the same step without: `python -m benchmarks.step`.

A step is forward pass, backward pass and fused AdamW on random tokens; bf16 is autocast. The contenders are the step
without a penalty, to which all ratios refer; istar, with products in float32 and in bfloat16; the formulation of the
paper's code (layers stacked, `torch.cov`, `svdvals`); and the closed form by plain autograd. `--only` also takes the
penalties of other papers, with the defaults of `reg`. The order of the contenders rotates from round to round. The
memory of each is the peak of two steps in a new process, minus the peak without a penalty; on a GPU, the peak of a
step in this process. With `--compile`, each contender has its own model, compiled by `torch.compile` after the penalty
is attached, and torch compiles models of one class separately if their hooks differ.

    python -m benchmarks.step                      both models in both precisions; half an hour on two idle cores
    python -m benchmarks.step --shape minilm-32x64 --precision bf16 --rounds 50 --no-memory --only "istar, bf16"
    python -m benchmarks.step --real 0.25          three quarters of the batch are padding
    python -m benchmarks.step --device cuda --shape pythia-1b-8x512 --precision bf16 --compile --only "istar, bf16"

A step without a penalty takes about 1 s for MiniLM 32 x 64 and 17 s for BERT-base 32 x 128 in float32 on two cores, and
about half of that in bf16 if the processor has instructions for it.
"""

import argparse
import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from statistics import median
from tempfile import mkdtemp
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import TrainingArguments

from benchmarks.common import (
    OTHER_PENALTIES,
    SHAPES,
    Method,
    Shape,
    add_processor_time_option,
    add_shape_option,
    comparison_table,
    json_from_new_process,
    make_console,
    make_parser,
    make_penalties,
    measure_gpu_peaks_mb,
    note_emulated_bfloat16,
    paired_ratio,
    parse_options,
    peak_memory_mb,
    random_batch,
    time_in_rotation,
)
from istar.hidden_states import AttachedPenalty, PenaltySettings
from istar.hidden_states.attach import attach_with_settings
from istar.integrations.transformers import PenaltyTrainer
from istar.regularizers import IStar, Penalty, Points, Uniformity

PEER = "no penalty"
METHODS = ("published", "closed form, autograd", "istar, float32", "istar, bf16")
TRAINER = "PenaltyTrainer, "
"""Prefix of a method of istar: the same penalty in a training step of transformers' Trainer."""
TRAINER_METHODS = tuple(f"{TRAINER}{name}" for name in METHODS if name.startswith("istar"))


class Steps:
    """Training steps of one model on one batch; each call executes a step with the penalty that it gets."""

    def __init__(
        self, shape: Shape, precision: str, real_share: float, device: torch.device, sample: float | None = None
    ) -> None:
        self.sample = sample
        self.device, self.autocast = device, precision == "bf16"
        with device:  # a GPU draws the random weights much faster
            self.model: Any = shape.make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.inputs = random_batch(shape, device, real_share)
        self.is_padded = real_share < 1
        self.attached: AttachedPenalty | None = None

    def prepare(self, penalty: Method) -> None:
        """Attach the penalty in place of the previous one, as a training does once before its steps."""
        if self.attached is not None:
            self.attached.remove()
        # Uniformity is meant for one point of each sequence, because it compares all pairs.
        points = Points("last") if isinstance(penalty, Uniformity) else Points()
        self.attached = None
        if isinstance(penalty, Penalty):
            self.attached = attach_with_settings(self.model, penalty, PenaltySettings(points, sample=self.sample))

    def __call__(self, penalty: Method) -> None:
        """Execute a training step with the penalty, which `prepare` has attached."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            self._loss(penalty).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, penalty: Method) -> Tensor:
        """Return the loss of the task plus the weighted penalty."""
        loss: Tensor
        if isinstance(penalty, Penalty):
            assert self.attached is not None
            loss = self.model(**self.inputs).loss + self.attached.loss()
            return loss
        outputs = self.model(**self.inputs, output_hidden_states=penalty is not None)
        loss = outputs.loss
        if penalty is not None:
            score = penalty.score(outputs.hidden_states, self.inputs["attention_mask"] if self.is_padded else None)
            loss = loss + penalty.weight * (1 - score)
        return loss

    def make_trainer_step(self, penalty: IStar) -> Callable[[], None]:
        """Return a function that executes a step of transformers' Trainer with the penalty on a copy of the model."""
        args = TrainingArguments(
            mkdtemp(), use_cpu=self.device.type == "cpu", bf16=self.autocast, report_to="none", disable_tqdm=True
        )
        model = deepcopy(self.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        trainer = PenaltyTrainer(model=model, args=args, penalty=penalty)
        # `Trainer.train` does the same before its first step; accelerate wraps the forward pass in autocast.
        trainer.current_gradient_accumulation_steps = 1
        model = trainer.accelerator.prepare_model(model)

        def step() -> None:
            """Execute a training step and an optimizer step."""
            trainer.attach_penalty()
            trainer.training_step(model, dict(self.inputs))
            trainer.detach_penalty()
            optimizer.step()
            optimizer.zero_grad()

        return step


def main() -> None:
    """Print a table for each shape and precision."""
    parser = make_parser(__doc__, rounds=7)
    add_shape_option(parser)
    parser.add_argument("--precision", nargs="+", choices=("32", "bf16"), default=["32", "bf16"], help="default: both")
    parser.add_argument("--real", type=float, default=1.0, help="share of real tokens in the batch (default: 1)")
    parser.add_argument("--sample", type=float, help="sampled share of the points of each step (default: all)")
    methods = ", ".join(f'"{name}"' for name in (*METHODS, *TRAINER_METHODS, *OTHER_PENALTIES))
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*METHODS, *TRAINER_METHODS, *OTHER_PENALTIES),
        default=list(METHODS),
        metavar="METHOD",
        help=f"contenders besides the step without a penalty: {methods} (default: the first {len(METHODS)})",
    )
    parser.add_argument("--no-memory", action="store_true", help="measure time alone")
    parser.add_argument("--compile", action="store_true", help="compile all models with torch.compile")
    add_processor_time_option(parser)
    options = parse_options(parser)
    if options.compile and (trainer_methods := [name for name in options.only if name in TRAINER_METHODS]):
        parser.error(f"--compile is not for {', '.join(trainer_methods)}")
    if options.peak_of:
        print(json.dumps(measure_peak_mb(options.shape[0], options.precision[0], options)))
        return
    if "bf16" in options.precision or any("bf16" in name for name in options.only):
        note_emulated_bfloat16(options.device.type)
    for shape in options.shape:
        for precision in options.precision:
            make_console().print(make_table(shape, precision, options))


def make_table(shape: str, precision: str, options: argparse.Namespace) -> Table:
    """Measure all contenders with this shape and precision, and return the table."""
    device = options.device
    shared_steps = (
        None if options.compile else Steps(SHAPES[shape], precision, options.real, options.device, options.sample)
    )
    names = [PEER, *options.only]
    penalties = make_penalties(SHAPES[shape].width, device, [name.removeprefix(TRAINER) for name in names])
    if options.compile:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
    calls: dict[str, Callable[[], object]] = {}
    preparations: dict[str, Callable[[], object]] = {}
    for name in names:
        penalty = penalties[name.removeprefix(TRAINER)]
        steps = shared_steps or Steps(SHAPES[shape], precision, options.real, options.device, options.sample)
        if name.startswith(TRAINER):
            assert isinstance(penalty, IStar)
            calls[name] = steps.make_trainer_step(penalty)
        elif options.compile:
            steps.prepare(penalty)
            steps.model.compile()
            calls[name] = partial(steps, penalty)
        else:
            calls[name] = partial(steps, penalty)
            preparations[name] = partial(steps.prepare, penalty)
    for call in calls.values() if options.compile else ():
        call()  # transformers sets an option of the config in the first call, and the second one compiles again
    seconds = time_in_rotation(calls, options.rounds, device, options.clock, preparations)
    measured_names = [] if options.no_memory else [name for name in names if name not in TRAINER_METHODS]
    if device.type == "cuda":
        peaks = measure_gpu_peaks_mb({name: calls[name] for name in measured_names}, device, preparations)
    else:
        peaks = {name: peak_in_new_process(shape, precision, name, options) for name in measured_names}
    compiled = ", compiled" if options.compile else ""
    sampled = f", {options.sample:.0%} of the points sampled" if options.sample is not None else ""
    title = (
        f"{shape}, {precision}{compiled}, {options.real:.0%} real tokens{sampled}, {device}, {options.rounds} rounds"
    )
    columns = ("ms a step (median)", f"ratio to {PEER}", f"MB above {PEER}")
    table = comparison_table(title, columns, options.rounds)
    for name in names:
        extra_mb = f"{peaks[name] - peaks[PEER]:.0f}" if name in peaks else ""
        table.add_row(name, f"{1e3 * median(seconds[name]):.1f}", paired_ratio(seconds, name, PEER), extra_mb)
    return table


def measure_peak_mb(shape: str, precision: str, options: argparse.Namespace) -> float:
    """Return the peak memory of this process in MB after two steps with the method `options.peak_of`."""
    steps = Steps(SHAPES[shape], precision, options.real, options.device, options.sample)
    [penalty] = make_penalties(SHAPES[shape].width, options.device, [options.peak_of]).values()
    steps.prepare(penalty)
    if options.compile:
        steps.model.compile()
    for _ in range(2):
        steps(penalty)
    return peak_memory_mb(options.device)


def peak_in_new_process(shape: str, precision: str, method: str, options: argparse.Namespace) -> float:
    """Return the result of `measure_peak_mb` for a method, measured in a new process."""
    arguments = ["--shape", shape, "--precision", precision, "--real", str(options.real)]
    arguments += ["--device", str(options.device), "--peak-of", method, *(["--compile"] if options.compile else [])]
    arguments += ["--sample", str(options.sample)] if options.sample is not None else []
    return float(json_from_new_process("benchmarks.step", *arguments))


if __name__ == "__main__":
    main()
