"""What the benchmarks of the penalty share: shapes, peers, clocks."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from istar.regularizers import IStar, select_layers
from istar.training.memory import keep_freed_memory


@dataclass(frozen=True)
class Shape:
    """A model and its batches."""

    layers: int
    width: int
    batch: int
    tokens: int
    heads: int = 12

    def model(self) -> BertForSequenceClassification:
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
        )
        return BertForSequenceClassification(config).train()


SHAPES = {
    "bert-base-32x128": Shape(12, 768, 32, 128),
    "bert-base-32x384": Shape(12, 768, 32, 384),
    "minilm-32x64": Shape(6, 384, 32, 64),
    "minilm-32x384": Shape(6, 384, 32, 384),
    "tiny": Shape(2, 64, 8, 16, heads=2),
    # Next to no arithmetic: what is left is Python and the calls of kernels, all that a fast device waits for.
    "bert-calls": Shape(12, 24, 2, 8),
}


class Published:
    """The score as the paper's code computes it: all layers side by side, `torch.cov`, singular values."""

    weight = -1.0

    def __init__(self, covariance: Tensor, zeta: float, spectrum: bool = True) -> None:
        self.covariance, self.zeta, self.spectrum = covariance, zeta, spectrum

    def score(self, hidden_states: Sequence[Tensor], attention_mask: Tensor | None) -> Tensor:
        stacked = torch.stack(select_layers(hidden_states, "all"))
        points = stacked.reshape(-1, stacked.shape[-1])
        if attention_mask is not None:
            points = points[attention_mask.bool().flatten().repeat(len(stacked))]
        with torch.autocast(points.device.type, enabled=False):
            covariance = (1 - self.zeta) * torch.cov(points.float().T) + self.zeta * self.covariance
            return by_spectrum(covariance) if self.spectrum else by_closed_form(covariance)


def by_spectrum(covariance: Tensor) -> Tensor:
    """Algorithm 1, steps 5 to 9."""
    variances = torch.linalg.svdvals(covariance)
    d = len(variances)
    normalized = d**0.5 * variances / variances.norm()
    defect = (normalized - 1).norm() / (2 * (d - d**0.5)) ** 0.5
    share = (d - defect**2 * (d - d**0.5)) ** 2 / d**2
    return (d * share - 1) / (d - 1)


def by_closed_form(covariance: Tensor) -> Tensor:
    """The same by plain autograd without a spectrum."""
    return (covariance.trace().square() / covariance.square().sum() - 1) / (len(covariance) - 1)


Method = IStar | Published | None


def penalties(width: int, device: torch.device, names: Sequence[str]) -> dict[str, Method]:
    """By name, all with the same Sigma_S and zeta."""
    covariance = torch.eye(width, device=device)
    built: dict[str, Method] = {
        "no penalty": None,
        "published": Published(covariance, 0.4),
        "closed form, autograd": Published(covariance, 0.4, spectrum=False),
    }
    for compute in ("float32", "bfloat16"):
        istar = IStar(-1.0, 0.4, compute=compute)
        istar.shrinkage_covariance = covariance
        built[f"istar, {compute}"] = istar
    return {name: built[name] for name in names}


def batch(shape: Shape, device: torch.device, real: float = 1.0) -> dict[str, Tensor]:
    """Random tokens; all texts but the first hold this share of real ones."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.tokens)
    mask = torch.zeros(size, dtype=torch.long)
    mask[:, : max(1, round(real * shape.tokens))] = 1
    mask[0] = 1
    inputs = {
        "input_ids": torch.randint(5, 30_000, size, generator=generator),
        "attention_mask": mask,
        "labels": torch.randint(2, (shape.batch,), generator=generator),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call in each round, after one round that warms up.

    The calls take turns, so that all meet the same machine, and every round begins with the next of them, so that none
    always follows the same other one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls.items())
    for number in range(rounds + 1):
        order = [*order[1:], order[0]]
        for name, call in order:
            synchronize(device)
            start = clock()
            call()
            synchronize(device)
            if number:
                seconds[name].append(clock() - start)
    return seconds


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratios(seconds: Sequence[float], peer: Sequence[float]) -> str:
    """Median of the rounds' ratios with the middle half of them."""
    values = sorted(own / other for own, other in zip(seconds, peer, strict=True))
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def peak_mb(device: torch.device) -> float:
    """Most memory that this process has held; on Linux."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Not getrusage, whose figure starts from that of the process that started this one.
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def in_fresh_process(module: str, *arguments: str) -> Any:
    """What `python -m module arguments` prints last, as JSON: memory is measured where nothing else has been."""
    # glibc then gives the memory of a tensor back at once; gaps would add a hundred MB or two, now here, now there.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**18)}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def console() -> Console:
    """Wide enough for the tables where the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120)


def parser(description: str | None, rounds: int, methods: Sequence[str]) -> argparse.ArgumentParser:
    """With the options that all of them have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--device", type=torch.device, help="cpu or cuda (default: a GPU if there is one)")
    made.add_argument("--peak-of", choices=methods, help=argparse.SUPPRESS)
    made.set_defaults(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return made


def parsed(options: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line's, in a process made ready for them."""
    found = options.parse_args()
    if not found.peak_of:
        # Where memory is measured it would be that of the allocator's gaps.
        keep_freed_memory()
    return found
