"""What the benchmarks share: models and batches, the compared penalties, measuring in rotation, paired ratios."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
)

from istar.finetune.config.penalties import PENALTIES
from istar.finetune.config.reg_config import PenaltyConfig
from istar.finetune.execute.precision import has_bfloat16
from istar.measures.numerics import keep_freed_memory
from istar.regularizers import IStar, Penalty, select_layers

Result = TypeVar("Result")


@dataclass(frozen=True)
class Shape:
    """The size of a model and of its batches: a BERT classifier, or a GPT-NeoX language model if it is a decoder."""

    layers: int
    width: int
    batch: int
    tokens: int
    heads: int = 12
    is_decoder: bool = False

    def make_model(self) -> PreTrainedModel:
        """Return a model of this size in training mode, always with the same random weights."""
        torch.manual_seed(0)
        config = make_config(self.layers, self.width, self.heads, self.is_decoder)
        model_class = GPTNeoXForCausalLM if self.is_decoder else BertForSequenceClassification
        return model_class(config).train()


def make_config(layers: int, width: int, heads: int, is_decoder: bool, vocabulary: int | None = None) -> Any:
    """Return the configuration of a BERT, or of a GPT-NeoX; by default with the vocabulary of BERT-base or Pythia."""
    config_class: Any
    config_class, default_vocabulary = (GPTNeoXConfig, 50_304) if is_decoder else (BertConfig, 30_522)
    return config_class(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=vocabulary or default_vocabulary,
    )


SHAPES = {
    "bert-base-32x128": Shape(12, 768, 32, 128),
    "bert-base-32x384": Shape(12, 768, 32, 384),
    "minilm-32x64": Shape(6, 384, 32, 64),
    "minilm-32x384": Shape(6, 384, 32, 384),
    "pythia-1b-8x512": Shape(16, 2048, 8, 512, heads=8, is_decoder=True),
    "tiny": Shape(2, 64, 8, 16, heads=2),
    "tiny-decoder": Shape(2, 64, 8, 16, heads=2, is_decoder=True),
    # Almost no arithmetic: the time is that of Python and of starting kernels, which a fast device waits for.
    "bert-calls": Shape(12, 24, 2, 8),
    "deep-calls": Shape(32, 24, 2, 8),
}


# ---- the compared penalties


class PublishedIsoScore:
    """IsoScore* as the code of the I-STAR paper computes it: all layers stacked, `torch.cov`, singular values.

    With `spectrum=False`, the score comes from the closed form, which needs no singular values.
    """

    weight = -1.0

    def __init__(self, covariance: Tensor, zeta: float, spectrum: bool = True) -> None:
        self.covariance, self.zeta, self.spectrum = covariance, zeta, spectrum

    def score(self, hidden_states: Sequence[Tensor], attention_mask: Tensor | None) -> Tensor:
        """Return the score of all layers together, without the tokens that the mask excludes."""
        stacked = torch.stack(select_layers(hidden_states, "all"))
        points = stacked.reshape(-1, stacked.shape[-1])
        if attention_mask is not None:
            points = points[attention_mask.bool().flatten().repeat(len(stacked))]
        with torch.autocast(points.device.type, enabled=False):
            covariance = (1 - self.zeta) * torch.cov(points.float().T) + self.zeta * self.covariance
            return isoscore_by_spectrum(covariance) if self.spectrum else isoscore_by_closed_form(covariance)


def isoscore_by_spectrum(covariance: Tensor) -> Tensor:
    """Return the IsoScore of a covariance by steps 5 to 9 of the I-STAR paper's Algorithm 1."""
    variances = torch.linalg.svdvals(covariance)
    d = len(variances)
    normalized = d**0.5 * variances / variances.norm()
    isotropy_defect = (normalized - 1).norm() / (2 * (d - d**0.5)) ** 0.5
    fraction_of_dimensions = (d - isotropy_defect**2 * (d - d**0.5)) ** 2 / d**2
    return (d * fraction_of_dimensions - 1) / (d - 1)


def isoscore_by_closed_form(covariance: Tensor) -> Tensor:
    """Return the IsoScore of a covariance by its closed form, (tr(S)^2 / ||S||_F^2 - 1) / (d - 1)."""
    return (covariance.trace().square() / covariance.square().sum() - 1) / (len(covariance) - 1)


Method = Penalty | PublishedIsoScore | None
"""A penalty of a benchmark; None is a step without one."""
OTHER_PENALTIES = {
    name: kind for name, kind in PENALTIES.items() if issubclass(kind, PenaltyConfig) and name != "istar"
}
"""The configs of the penalties besides I-STAR, which are compared with their defaults: most are on the last layer."""


def make_penalties(width: int, device: torch.device, names: Sequence[str]) -> dict[str, Method]:
    """Return the penalties with these names. All that use a shrinkage covariance have the same."""
    covariance = torch.eye(width, device=device)
    penalty_by_name: dict[str, Method] = {
        "no penalty": None,
        "published": PublishedIsoScore(covariance, 0.4),
        "closed form, autograd": PublishedIsoScore(covariance, 0.4, spectrum=False),
    }
    for compute in ("float32", "bf16"):
        istar = IStar(-1.0, 0.4, compute=compute)
        istar.shrinkage_covariance = covariance
        penalty_by_name[f"istar, {compute}"] = istar
    for name, kind in OTHER_PENALTIES.items():
        penalty = kind().make()
        if penalty.needs_shrinkage_covariance:
            penalty.shrinkage_covariance = covariance
        penalty_by_name[name] = penalty
    return {name: penalty_by_name[name] for name in names}


def random_batch(shape: Shape, device: torch.device, real_share: float = 1.0) -> dict[str, Tensor]:
    """Return random tokens and labels: classes, or for a decoder the tokens themselves.

    `real_share` is the share of tokens that are not padding, in every text but the first, which has no padding.
    """
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.tokens)
    mask = torch.zeros(size, dtype=torch.long)
    mask[:, : max(1, round(real_share * shape.tokens))] = 1
    mask[0] = 1
    inputs = {
        "input_ids": torch.randint(5, 30_000, size, generator=generator),
        "attention_mask": mask,
        "labels": torch.randint(2, (shape.batch,), generator=generator),
    }
    if shape.is_decoder:
        inputs["labels"] = inputs["input_ids"].masked_fill(mask == 0, -100)  # cross-entropy ignores -100
    return {name: value.to(device) for name, value in inputs.items()}


# ---- measuring


def run_in_rotation(calls: Mapping[str, Callable[[int], Result]], rounds: int) -> dict[str, list[Result]]:
    """Call each contender once per round, and return what each returned, by name and in the order of the rounds.

    Every call gets the number of its round, from 1. The contenders of a round meet the machine in nearly the same
    state, so that their results can be compared in pairs. Each round starts with the next contender, so that none is
    always the first.
    """
    names = list(calls)
    results: dict[str, list[Result]] = {name: [] for name in names}
    for round_number in range(1, rounds + 1):
        first = (round_number - 1) % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(calls[name](round_number))
    return results


def time_in_rotation(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    preparations: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds that each call takes in each round, by name, after one round of warm-up.

    A call's preparation, if it has one, is executed before it and not timed.
    """

    def make_timed_call(name: str, call: Callable[[], object]) -> Callable[[int], float]:
        """Return a function that executes the call and returns its seconds."""
        prepare = (preparations or {}).get(name)

        def timed_call(_: int) -> float:
            """Execute the call and return its seconds; the number of the round is ignored."""
            if prepare is not None:
                prepare()
            synchronize(device)
            start = clock()
            call()
            synchronize(device)
            return clock() - start

        return timed_call

    contenders = {name: make_timed_call(name, call) for name, call in calls.items()}
    run_in_rotation(contenders, 1)
    return run_in_rotation(contenders, rounds)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of this process in MB: allocated on a GPU, or resident in main memory (Linux only)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # `getrusage` would not do: its peak includes that of the parent process at the time of the fork.
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def measure_gpu_peaks_mb(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    preparations: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, float]:
    """Execute each call once more, and return its peak of the memory allocated on the GPU in MB, by name.

    The peak of a GPU can be reset, so no new process is needed. Preparations are as in `time_in_rotation`.
    """
    peaks = {}
    for name, call in calls.items():
        if preparations and name in preparations:
            preparations[name]()
        torch.cuda.reset_peak_memory_stats(device)
        call()
        peaks[name] = peak_memory_mb(device)
    return peaks


def json_from_new_process(module: str, *arguments: str) -> Any:
    """Run `python -m <module> <arguments>`, and return the last line of its output, parsed as JSON.

    Peak memory is measured in a new process, because in this one it would include all that ran before.
    """
    # glibc returns the memory of each large tensor at once; otherwise gaps add up to 200 MB, differently each time.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**18)}
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} ended with exit code {process.returncode}")
    return json.loads(process.stdout.splitlines()[-1])


# ---- comparing and printing


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return a 95% confidence interval of the median of the distribution that the values were drawn from.

    The interval reaches from the k-th smallest to the k-th largest value and assumes nothing about the distribution:
    it misses the median only if fewer than k values lie below or above the median, and each of these numbers is
    binomial with probability 1/2. k is the largest rank for which this happens in at most 5% of all samples. Returns
    None for fewer than six values, where even the interval from the lowest to the highest misses the median more often.
    """
    n, ordered = len(values), sorted(values)
    k = samples_below = 0  # `samples_below` / 2^n is the probability of fewer than k values below the median.
    while 2 * (samples_below + comb(n, k)) <= 0.05 * 2**n:
        samples_below += comb(n, k)
        k += 1
    return (ordered[k - 1], ordered[n - k]) if k else None


def paired_ratio(values: Mapping[str, Sequence[float]], name: str, peer: str) -> str:
    """Return the median of a contender's ratios to its peer in the same round, with its range in brackets.

    The range is the 95% confidence interval of the median, or, for fewer than six rounds, from the lowest to the
    highest ratio; `ratio_note` says which. The ratio of the peer to itself is "1".
    """
    if name == peer:
        return "1"
    ratios = [value / peer_value for value, peer_value in zip(values[name], values[peer], strict=True)]
    if len(ratios) == 1:
        return f"{ratios[0]:.3f}"
    low, high = median_interval(ratios) or (min(ratios), max(ratios))
    return f"{median(ratios):.3f} ({low:.3f} to {high:.3f})"


def ratio_note(rounds: int) -> str:
    """Return the sentence that explains the ratios of `paired_ratio` below a table."""
    if rounds == 1:
        return "Ratios of a single round: their spread is unknown."
    range_text = "the lowest and the highest of them (a confidence interval needs 6 rounds)"
    interval_text = range_text if median_interval(range(rounds)) is None else "its 95% confidence interval"
    return f"Ratios: median of the paired ratios of {rounds} rounds; in brackets {interval_text}."


def comparison_table(title: str, columns: Sequence[str], rounds: int) -> Table:
    """Return an empty table with a column of names, these columns, and the note on the ratios as its caption."""
    table = Table("", title=title, caption=ratio_note(rounds))
    for column in columns:
        table.add_column(column, justify="right")
    return table


def note_emulated_bfloat16(device_type: str) -> None:
    """Print a note if the device, `cpu` or `cuda`, only emulates bfloat16."""
    if not has_bfloat16(device_type == "cuda"):
        print("Note: this machine has no instructions for bfloat16, and emulates it slowly.", flush=True)


def make_console() -> Console:
    """Return a console for the tables, 132 columns wide if the output is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 132)


# ---- command lines


def positive_int(text: str) -> int:
    """Convert a command-line argument to a positive integer, as a `type` of argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, not {text!r}")
    return int(text)


def make_parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks of the penalty have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=rounds, help=f"measured rounds (default: {rounds})")
    add_device_option(parser)
    # The name of the method whose peak memory this process measures and prints, for `json_from_new_process`.
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    return parser


def add_processor_time_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--processor-time`. It sets `options.clock` to `time.process_time` instead of `perf_counter`."""
    parser.add_argument(
        "--processor-time",
        action="store_const",
        dest="clock",
        const=time.process_time,
        default=time.perf_counter,
        help="processor time instead of wall time: for a machine that others use, with OMP_NUM_THREADS=1",
    )


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device`."""
    parser.add_argument("--device", type=torch.device, help="cpu or cuda (default: a GPU if there is one)")
    parser.set_defaults(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def add_shape_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--shape` for the shapes that are measured one after the other."""
    default = ["bert-base-32x128", "minilm-32x64"]
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=default, help=f"default: {' '.join(default)}")


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and prepare the memory allocator for measuring time."""
    options = parser.parse_args()
    if not options.peak_of:
        # A process that measures its peak memory must return freed memory instead.
        keep_freed_memory()
    return options
