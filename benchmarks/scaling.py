"""What the penalty costs by arithmetic, and what one machine can check of that: `python -m benchmarks.scaling`.

Prints the tables of benchmarks/SCALING.md: bytes that processes exchange, the penalty's share of a step predicted and
measured for models of other depth, width and length of text, and what the paper's whole grid costs. The share is
measured as in `benchmarks.step`, in float32 and by turns.
"""

import argparse
from dataclasses import dataclass, replace
from math import ceil

import torch
from rich.table import Table

from benchmarks.common import SHAPES, Shape, console, in_turns, penalties, ratios
from benchmarks.step import Steps

MODELS = {"BERT-base": (109.5, 768), "DistilBERT": (66.4, 768), "ALBERT-base": (11.7, 768), "MiniLM-L6": (22.7, 384)}
"""Millions of parameters, and width."""
BASE = Shape(4, 384, 32, 64)
VARIED = {
    "L = 2": replace(BASE, layers=2),
    "L = 4, d = 384, 32 x 64": BASE,
    "L = 8": replace(BASE, layers=8),
    "d = 192": replace(BASE, width=192),
    "d = 768": replace(BASE, width=768),
    "64 x 32 tokens": replace(BASE, batch=64, tokens=32),
    "8 x 256 tokens": replace(BASE, batch=8, tokens=256),
    "2 x 64 tokens": replace(BASE, batch=2),
}


@dataclass(frozen=True)
class Task:
    """Training examples, and real tokens of one on average."""

    examples: int
    tokens: int


TASKS = {
    "RTE": Task(2_490, 70), "MRPC": Task(3_668, 53), "STS-B": Task(5_749, 31), "CoLA": Task(8_551, 11),
    "SST-5": Task(8_544, 25), "SST-2": Task(67_349, 13), "SQuAD": Task(88_000, 180), "QNLI": Task(104_743, 50),
    "QQP": Task(363_846, 31),
}  # fmt: skip
RUNS = {8: 234, 16: 234, 32: 234}
"""Runs of Table 1's grid for a task and a model, by batch size; 12 seeds of the best come on top."""
EPOCHS = 4
"""3, 4 and 5, on average."""
DEPTH = {"BERT-base": 12, "ALBERT-base": 12, "DistilBERT": 6}


@dataclass(frozen=True)
class Machine:
    """GPUs, and the part of their peak that matrix products of this size are assumed to reach.

    Attributes:
        tflops: bfloat16, dense, from the data sheet.
        launch: seconds that the host needs to start the kernels of a step of 12 layers, assumed.
    """

    gpus: int
    tflops: float
    share: float
    launch: float


MACHINES = {
    "two RTX 3090": Machine(2, 71, 0.40, 0.030),
    "one H200": Machine(1, 989, 0.40, 0.022),
    "eight H200": Machine(8, 989, 0.40, 0.022),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-check", action="store_true", help="the arithmetic alone")
    options = parser.parse_args()
    console().print(exchanged())
    if not options.no_check:
        console().print(shares(options.rounds))
    console().print(grid())


def exchanged() -> Table:
    table = Table(title="bytes all-reduced per optimizer step")
    for column in ("", "gradient, MB", "penalty, MB", "share"):
        table.add_column(column)
    for name, (millions, width) in MODELS.items():
        penalty = 8 * (1 + width + width**2) / 1e6
        table.add_row(name, f"{4 * millions:.1f}", f"{penalty:.2f}", f"{penalty / (4 * millions):.1%}")
    return table


def predicted(shape: Shape) -> float:
    """The step with a penalty over that without, by multiplications alone.

    A layer of the model takes 12 d^2 + 2 n d for each token of a text of n, three times over for forward and backward.
    The penalty takes d^2 on the way forward and d^2 on the way back.
    """
    width = shape.width
    return 1 + 2 * width**2 / (3 * (12 * width**2 + 2 * shape.tokens * width))


def shares(rounds: int) -> Table:
    table = Table(title=f"a step with I-STAR over the step without, float32, {rounds} rounds")
    for column in ("", "by arithmetic", "measured"):
        table.add_column(column)
    device = torch.device("cpu")
    for name, shape in VARIED.items():
        SHAPES[name] = shape
        steps = Steps(name, "32", 1.0, device)
        [own] = penalties(shape.width, device, ["istar, float32"]).values()
        seconds = in_turns({"with": lambda s=steps, o=own: s(o), "without": lambda s=steps: s(None)}, rounds, device)  # type: ignore[misc]
        table.add_row(name, f"{predicted(shape):.3f}", ratios(seconds["with"], seconds["without"]))
    return table


def grid() -> Table:
    table = Table(title="the paper's grid for Table 1: 714 runs for each task and each of three models, days")
    for column in ("", "steps, millions", "PFLOP", *MACHINES, "bound by, one H200"):
        table.add_column(column)
    totals = {machine: [0.0, 0.0] for machine in MACHINES}
    for name, task in TASKS.items():
        steps = len(DEPTH) * sum(number * EPOCHS * ceil(task.examples / size) for size, number in RUNS.items())
        flops = sum(operations(task, depth) for depth in DEPTH.values())
        days = {}
        for machine in MACHINES:
            parts = [seconds(task, depth, machine) for depth in DEPTH.values()]
            products = sum(part[1] for part in parts) / 86_400
            days[machine] = sum(max(part) for part in parts) / 86_400
            totals[machine] = [totals[machine][0] + days[machine], totals[machine][1] + products]
        bound = "kernel launches" if days["one H200"] > products else "products"
        table.add_row(name, f"{steps / 1e6:.1f}", f"{flops / 1e15:,.0f}", *(f"{days[m]:.1f}" for m in MACHINES), bound)
    table.add_row("all nine", "", "", *(f"{both[0]:.0f}" for both in totals.values()), "")
    table.add_row("products alone", "", "", *(f"{both[1]:.1f}" for both in totals.values()), "")
    return table


def operations(task: Task, depth: int) -> float:
    """Of all runs of a task on one model: 2 x 36 d^2 a token and layer, the penalty's 4.3% and refreshes."""
    training = 72 * 768**2 * depth * task.examples * task.tokens * 1.043
    refresh = 24 * 768**2 * depth * min(250_000 / depth, task.examples * task.tokens)
    return (training + refresh) * EPOCHS * (sum(RUNS.values()) + 12)


def seconds(task: Task, depth: int, name: str) -> tuple[float, float]:
    """Of all runs of a task on one model: what the host needs to start kernels, and the products."""
    machine = MACHINES[name]
    steps = sum(number * EPOCHS * ceil(task.examples / size) for size, number in RUNS.items())
    launch = steps * machine.launch * depth / 12 / machine.gpus
    return launch, operations(task, depth) / (machine.tflops * 1e12 * machine.share) / machine.gpus


if __name__ == "__main__":
    main()
