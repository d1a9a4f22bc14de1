"""Computes what the penalty costs for other models and machines, and checks one figure: `python -m benchmarks.scaling`.

Prints the tables behind the last section of benchmarks/README.md: the bytes that processes exchange; the duration of a
step with I-STAR over that without, as predicted from the numbers of multiplications and as measured, for models of
different depth and width and texts of different lengths; and the cost of the paper's whole grid. The ratio is measured
as in `benchmarks.step`, in float32 on the CPU; the order of both steps rotates from round to round. The defaults take 5
minutes on two idle cores, `--no-check` a few seconds.

    OMP_NUM_THREADS=1 python -m benchmarks.scaling --embeddings       time and memory of embedding matrices; 4 minutes
    python -m benchmarks.scaling --processes           1 to 1,024 GPUs, and a check with 1, 2 and 4 processes; 2 minutes
"""

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log2
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import (
    Shape,
    comparison_table,
    make_console,
    make_penalties,
    paired_ratio,
    peak_memory_mb,
    positive_int,
    time_in_rotation,
)
from benchmarks.step import Steps
from istar.measures.matrix_forms import measure_forms
from istar.measures.spectrum import decompose_rows

MODELS = {"BERT-base": (109.5, 768), "DistilBERT": (66.4, 768), "ALBERT-base": (11.7, 768), "MiniLM-L6": (22.7, 384)}
"""Millions of parameters and width of each model."""
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
    """The number of training examples of a task, and the average number of real tokens of an example."""

    examples: int
    tokens: int


TASKS = {
    "RTE": Task(2_490, 70), "MRPC": Task(3_668, 53), "STS-B": Task(5_749, 31), "CoLA": Task(8_551, 11),
    "SST-5": Task(8_544, 25), "SST-2": Task(67_349, 13), "SQuAD": Task(88_000, 180), "QNLI": Task(104_743, 50),
    "QQP": Task(363_846, 31),
}  # fmt: skip
RUNS = {8: 234, 16: 234, 32: 234}
"""Runs of Table 1's grid for one task and one model, by batch size; 12 more seeds of the best setting are added."""
EPOCHS = 4
"""The average of the grid's 3, 4 and 5."""
DEPTH = {"BERT-base": 12, "ALBERT-base": 12, "DistilBERT": 6}
"""Layers of the grid's models."""


@dataclass(frozen=True)
class Machine:
    """The GPUs of a machine, and how fast they are assumed to train.

    Attributes:
        gpus: number of GPUs.
        tflops: dense bfloat16 peak of one GPU, from the data sheet.
        share: fraction of the peak that matrix products of this size are assumed to reach.
        launch: seconds that the host is assumed to need to start the kernels of a step of 12 layers.
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

SMALL_MATRICES = ((60_000, 256), (24_000, 512), (24_000, 1_024), (1_000, 1_024))
"""Rows and columns of the matrices that the unit costs of embedding matrices are fitted to."""
CHECKED_MATRICES = ((50_304, 1_024), (32_000, 2_048))
PREDICTED_MATRICES = ((30_522, 768), *CHECKED_MATRICES, (128_256, 4_096), (256_000, 8_192))


@dataclass(frozen=True)
class LargeModel:
    """A model on many GPUs: its parameters, layers and width, and the tokens of a process's micro-batch."""

    parameters: float
    layers: int
    width: int
    tokens: int


LARGE_MODELS = {
    "BERT-base": LargeModel(109.5e6, 12, 768, 32 * 128),
    "Pythia-1B": LargeModel(1.01e9, 16, 2_048, 8 * 2_048),
    "Pythia-12B": LargeModel(11.8e9, 36, 5_120, 4 * 2_048),
    "70B": LargeModel(70.6e9, 80, 8_192, 2 * 4_096),
}
GPU = Machine(8, 989, 0.40, 0.0)
"""A node of eight H200."""
GPU_COUNTS = (1, 8, 64, 1_024)
BANDWIDTHS, LATENCY = {"within a node": 300e9, "between nodes": 40e9}, 20e-6
"""Bytes a second that each GPU is assumed to send in an all-reduce, and seconds that each of its hops takes."""
CHECKED_SHAPE = Shape(4, 384, 8, 64)
CHECKED_PROCESSES = (1, 2, 4)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=9, help="measured rounds (default: 9)")
    parser.add_argument("--no-check", action="store_true", help="print the computed tables alone")
    parser.add_argument("--embeddings", action="store_true", help="only the table of embedding matrices")
    parser.add_argument("--processes", action="store_true", help="only the tables of several processes")
    options = parser.parse_args()
    if options.processes:
        make_console().print(make_processes_table())
        if not options.no_check:
            make_console().print(make_checked_processes_table(options.rounds))
        return
    if options.embeddings:
        make_console().print(make_embeddings_table())
        return
    make_console().print(make_bytes_table())
    if not options.no_check:
        make_console().print(make_ratio_table(options.rounds))
    make_console().print(make_grid_table())


def make_bytes_table() -> Table:
    """Return the table of the megabytes that processes exchange in each step for the gradient and the penalty."""
    table = Table(title="bytes all-reduced per optimizer step")
    for column in ("", "gradient, MB", "penalty, MB", "share"):
        table.add_column(column)
    for name, (millions, width) in MODELS.items():
        penalty = count_penalty_bytes(width) / 1e6
        table.add_row(name, f"{4 * millions:.1f}", f"{penalty:.2f}", f"{penalty / (4 * millions):.1%}")
    return table


def count_penalty_bytes(width: int) -> int:
    """Return the bytes of the penalty's all-reduces in a micro-batch, forward and backward, without the padding.

    In each direction these are the mean and the scatter matrix of all points, 1 + d + d^2 numbers in float64.
    """
    return 2 * 8 * (1 + width + width**2)


def predict_all_reduce_seconds(num_bytes: float, num_gpus: int) -> float:
    """Return the seconds of an all-reduce: each GPU sends 2 (W - 1) / W times the bytes, up and down a tree."""
    bandwidth = BANDWIDTHS["within a node" if num_gpus <= GPU.gpus else "between nodes"]
    return 2 * (num_gpus - 1) / num_gpus * num_bytes / bandwidth + 2 * ceil(log2(num_gpus)) * LATENCY


def make_processes_table() -> Table:
    """Return the table of predicted seconds of a step on 1 to 1,024 GPUs, and the penalty's share of it.

    The products of the model take 6 operations for each parameter and token, and the penalty 4 d^2 for each token and
    layer. The gradient, 4 bytes a parameter, is reduced while the backward pass goes on, the penalty's matrices
    while everything waits.
    """
    table = Table(title="a step with I-STAR on all layers, by arithmetic")
    for column in (
        "",
        "GPUs",
        "products, ms",
        "gradient, ms",
        "penalty's products",
        "penalty's all-reduce, ms",
        "share",
    ):
        table.add_column(column)
    for name, model in LARGE_MODELS.items():
        for num_gpus in GPU_COUNTS:
            flops = GPU.tflops * 1e12 * GPU.share
            products = 6 * model.parameters * model.tokens / flops
            gradient = predict_all_reduce_seconds(4 * model.parameters, num_gpus)
            penalty_products = 4 * model.width**2 * model.tokens * model.layers / flops
            reduced = 2 * predict_all_reduce_seconds(count_penalty_bytes(model.width) / 2, num_gpus)
            step = max(products, gradient) + penalty_products + reduced
            milliseconds = (f"{1e3 * seconds:.3g}" for seconds in (products, gradient, penalty_products, reduced))
            table.add_row(name, f"{num_gpus:,}", *milliseconds, f"{reduced / step:.2%}")
    return table


def make_checked_processes_table(rounds: int) -> Table:
    """Return the table of a step's seconds with gloo processes on this machine, predicted and measured.

    Predicted is the sum of a step without any exchange, while as many processes compute at the same time, and of the
    all-reduces of the gradient and of the penalty's matrices alone.
    """
    shape = CHECKED_SHAPE
    title = (
        f"a step of {shape.layers} layers of {shape.width}, {shape.batch} x {shape.tokens} tokens a process, seconds"
    )
    table = Table(title=f"{title}, medians of {rounds} rounds")
    for column in ("processes", "penalty", "without exchange", "all-reduces", "predicted", "measured", "MB reduced"):
        table.add_column(column)
    for num_processes in CHECKED_PROCESSES:
        with tempfile.TemporaryDirectory() as folder:
            spawn(time_process, (num_processes, folder, rounds), num_processes)
            results = torch.load(Path(folder) / "seconds.pt")
        for kind in ("none", "I-STAR"):
            apart, exchange, together, num_bytes = results[kind]
            seconds = (f"{value:.3f}" for value in (apart, exchange, apart + exchange, together))
            table.add_row(str(num_processes), kind, *seconds, f"{num_bytes / 1e6:.1f}")
    return table


def time_process(rank: int, num_processes: int, folder: str, rounds: int) -> None:
    """Time steps with and without exchange, and the exchange alone, as one of several processes; rank 0 saves them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_processes)
    device, results = torch.device("cpu"), {}

    def take_median(call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return median(seconds[1:])

    for kind in ("none", "I-STAR"):
        steps = Steps(CHECKED_SHAPE, "32", 1.0, device)
        num_parameters = sum(parameter.numel() for parameter in steps.model.parameters())
        penalty: Any = None
        if kind != "none":
            [penalty] = make_penalties(CHECKED_SHAPE.width, device, ["istar, float32"]).values()
            penalty.sync = False
        steps.prepare(penalty)
        apart = take_median(partial(steps, penalty))
        steps.model = DistributedDataParallel(steps.model)
        if penalty is not None:
            penalty.sync = True
        steps.prepare(penalty)
        together = take_median(partial(steps, penalty))
        buffers = [torch.zeros(num_parameters)]
        if penalty is not None:
            numbers = count_penalty_bytes(CHECKED_SHAPE.width) // 16
            buffers += [torch.zeros(numbers, dtype=torch.float64) for _ in range(2)]
        exchange = sum(take_median(partial(dist.all_reduce, buffer)) for buffer in buffers)
        results[kind] = (apart, exchange, together, sum(buffer.nbytes for buffer in buffers))
    if rank == 0:
        torch.save(results, Path(folder) / "seconds.pt")
    dist.barrier()
    # The process group may abort in the shutdown of the interpreter.
    os._exit(0)


def predicted_ratio(shape: Shape) -> float:
    """Return the number of multiplications of a step with a penalty divided by that of the step without.

    A layer of the model takes 12 d^2 + 2 n d for each token of a text of n tokens, three times in all for the forward
    and the backward pass. The penalty takes d^2 in each of both passes.
    """
    width = shape.width
    return 1 + 2 * width**2 / (3 * (12 * width**2 + 2 * shape.tokens * width))


def make_ratio_table(rounds: int) -> Table:
    """Measure steps with and without a penalty for each shape. Return the table of predicted and measured ratios."""
    title = f"a step with I-STAR over the step without, float32, {rounds} rounds"
    table = comparison_table(title, ("by arithmetic", "measured"), rounds)
    device = torch.device("cpu")
    for name, shape in VARIED.items():
        steps = Steps(shape, "32", 1.0, device)
        [penalty] = make_penalties(shape.width, device, ["istar, float32"]).values()
        calls = {"with": partial(steps, penalty), "without": partial(steps, None)}
        preparations = {"with": partial(steps.prepare, penalty), "without": partial(steps.prepare, None)}
        seconds = time_in_rotation(calls, rounds, device, preparations=preparations)
        table.add_row(name, f"{predicted_ratio(shape):.3f}", paired_ratio(seconds, "with", "without"))
    return table


def make_grid_table() -> Table:
    """Return the table of the days that each machine needs for the paper's grid."""
    table = Table(title="the paper's grid for Table 1: 714 runs for each task and each of three models, days")
    for column in ("", "steps, millions", "PFLOP", *MACHINES, "bound by, one H200"):
        table.add_column(column)
    total_days = dict.fromkeys(MACHINES, 0.0)
    total_product_days = dict.fromkeys(MACHINES, 0.0)
    for name, task in TASKS.items():
        steps = len(DEPTH) * sum(num_runs * EPOCHS * ceil(task.examples / size) for size, num_runs in RUNS.items())
        num_operations = sum(count_operations(task, depth) for depth in DEPTH.values())
        days, product_days = {}, {}
        for machine in MACHINES:
            durations = [launch_and_product_seconds(task, depth, machine) for depth in DEPTH.values()]
            days[machine] = sum(max(launch, products) for launch, products in durations) / 86_400
            product_days[machine] = sum(products for _, products in durations) / 86_400
            total_days[machine] += days[machine]
            total_product_days[machine] += product_days[machine]
        bound = "kernel launches" if days["one H200"] > product_days["one H200"] else "products"
        table.add_row(
            name, f"{steps / 1e6:.1f}", f"{num_operations / 1e15:,.0f}", *(f"{days[m]:.1f}" for m in MACHINES), bound
        )
    table.add_row("all nine", "", "", *(f"{total:.0f}" for total in total_days.values()), "")
    table.add_row("products alone", "", "", *(f"{total:.1f}" for total in total_product_days.values()), "")
    return table


def count_operations(task: Task, depth: int) -> float:
    """Return the number of floating-point operations of all runs of a task on a model of this depth and width 768.

    Training takes 2 x 36 d^2 per token and layer and 4.3% more for the penalty; each epoch has a refresh of Sigma_S.
    """
    training = 72 * 768**2 * depth * task.examples * task.tokens * 1.043
    refresh = 24 * 768**2 * depth * min(250_000 / depth, task.examples * task.tokens)
    return (training + refresh) * EPOCHS * (sum(RUNS.values()) + 12)


def launch_and_product_seconds(task: Task, depth: int, name: str) -> tuple[float, float]:
    """Return the seconds that the host needs to start the kernels of all runs of a task, and those of the products."""
    machine = MACHINES[name]
    steps = sum(num_runs * EPOCHS * ceil(task.examples / size) for size, num_runs in RUNS.items())
    launch = steps * machine.launch * depth / 12 / machine.gpus
    return launch, count_operations(task, depth) / (machine.tflops * 1e12 * machine.share) / machine.gpus


def make_embeddings_table() -> Table:
    """Return the table of CPU seconds and additional memory for embedding matrices, predicted and measured.

    Predicted seconds are the sum of V d, V d^2 and d^3 for V rows of d numbers, each times a cost that is fitted to the
    least seconds of small matrices in three rounds. Predicted memory is nine matrices of d x d float64 numbers.
    """
    least = [min(measure_embeddings(*shape)[0] for _ in range(3)) for shape in SMALL_MATRICES]
    measured = {shape: measure_embeddings(*shape) for shape in CHECKED_MATRICES}
    seconds = torch.tensor(least, dtype=torch.float64)
    terms = torch.tensor([count_terms(*shape) for shape in SMALL_MATRICES], dtype=torch.float64)
    # Least squares of the relative errors.
    ones = torch.ones_like(seconds)[:, None]
    costs = torch.linalg.lstsq(terms / seconds[:, None], ones).solution.flatten()
    units = ", ".join(f"{cost * 1e9:.3g} ns {name}" for cost, name in zip(costs, ("V d", "V d^2", "d^3"), strict=True))
    table = Table(title=f"embedding matrices in float32 on one core: {units}")
    for column in ("V x d", "seconds predicted", "measured", "the matrix, MB", "more MB predicted", "measured"):
        table.add_column(column)
    for shape in PREDICTED_MATRICES:
        predicted_mb = 9 * 8 * shape[1] ** 2 / 2**20
        checked = [f"{value:.3g}" for value in measured[shape]] if shape in measured else ["", ""]
        predicted_seconds = float(torch.tensor(count_terms(*shape), dtype=torch.float64) @ costs)
        matrix_mb = 4 * shape[0] * shape[1] / 2**20
        table.add_row(
            f"{shape[0]:,} x {shape[1]:,}",
            *(f"{predicted_seconds:.3g}", checked[0], f"{matrix_mb:,.0f}", f"{predicted_mb:,.0f}", checked[1]),
        )
    return table


def count_terms(rows: int, width: int) -> tuple[float, float, float]:
    """Return V d, V d^2 and d^3: elementwise work, matrix products and eigendecompositions."""
    return float(rows * width), float(rows * width**2), float(width**3)


def measure_embeddings(rows: int, width: int) -> tuple[float, float]:
    """Return the CPU seconds and the additional peak memory in MB of all measures of a random embedding matrix."""
    matrix = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    device = torch.device("cpu")
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present memory
    memory_before, start = peak_memory_mb(device), time.process_time()
    measure_forms(matrix, decompose_rows(matrix))
    return time.process_time() - start, peak_memory_mb(device) - memory_before


if __name__ == "__main__":
    main()
