"""Compares a refresh of Sigma_S with the bare forward pass over the same batches: `python -m benchmarks.refresh`.

The contenders are the forward pass of the model in inference mode, to which all ratios refer; istar's refresh, which is
the callback `istar.finetune.training.refresh.ShrinkageCovariance` without a progress bar; and the approach of the
paper's code: request all hidden states, move every point to main memory, keep it, and call `np.cov` at the end. The
order of the contenders rotates from round to round. The memory of each is the peak of one call in a new process, minus
the peak of the bare forward pass; on a GPU, the peak of one more call in this process.

    python -m benchmarks.refresh                   MiniLM, 250,000 points, both precisions; 8 minutes on two idle cores
    python -m benchmarks.refresh --shape bert-base-32x128 --precision bf16 --rounds 6
    OMP_NUM_THREADS=1 python -m benchmarks.refresh --precision 32 --rounds 10 --points 60000 --processor-time
"""

import argparse
import json
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import lightning as L
import numpy as np
import torch
from datasets import Dataset
from rich.table import Table
from torch import Tensor

from benchmarks.common import (
    SHAPES,
    add_processor_time_option,
    comparison_table,
    json_from_new_process,
    make_console,
    make_parser,
    measure_gpu_peaks_mb,
    note_emulated_bfloat16,
    paired_ratio,
    parse_options,
    peak_memory_mb,
    positive_int,
    time_in_rotation,
)
from istar.finetune.config import TrainerConfig
from istar.finetune.tasks.features import FeatureRows
from istar.finetune.training.data import build_evaluation_loader
from istar.finetune.training.refresh import ShrinkageCovariance
from istar.finetune.training.trainer import build_bare_trainer
from istar.hidden_states import HiddenStatePenalty, PenaltySettings
from istar.measures.isoscores import unchecked_isoscore
from istar.regularizers import IStar

PEER = "bare forward"
METHODS = (PEER, "istar", "published")
PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed"}


class Refresh:
    """A model and a sample of its training data, with a method for each contender."""

    def __init__(self, shape_name: str, precision: str, points: int, device: torch.device) -> None:
        shape = SHAPES[shape_name]
        accelerator = "gpu" if device.type == "cuda" else "cpu"
        settings = TrainerConfig(precision=PRECISIONS[precision], accelerator=accelerator, devices=1)
        self.trainer: L.Trainer = build_bare_trainer(settings)
        self.device = device
        compute = "bf16" if precision == "bf16" else "float32"
        with device:  # a GPU draws the random weights much faster
            self.model: Any = shape.make_model().eval()
        self.penalty = IStar(-1.0, 0.4, compute=compute)
        attached = HiddenStatePenalty(self.model, self.penalty, PenaltySettings(num_points=points))
        rows = FeatureRows(random_texts(points // shape.layers, shape.tokens))
        batch_size = 2 * shape.batch
        self.callback = ShrinkageCovariance(attached, rows, collate, batch_size, 0)
        self.sample = self.callback.sample_examples(epoch=0)
        self.loader = lambda: build_evaluation_loader(rows, collate, batch_size, self.sample)

    def bare_forward(self) -> None:
        """Execute the forward pass over all batches."""
        for inputs in self._batches():
            with torch.inference_mode(), self.trainer.precision_plugin.val_step_context():
                self.model.base_model(**inputs)

    def istar(self) -> Tensor:
        """Return Sigma_S as istar computes it."""
        self.callback.refresh(self.trainer, self.sample)
        assert self.penalty.shrinkage_covariance is not None
        return self.penalty.shrinkage_covariance

    def published(self) -> Tensor:
        """Return Sigma_S as the paper's code computes it."""
        points = []
        for inputs in self._batches():
            with torch.inference_mode(), self.trainer.precision_plugin.val_step_context():
                states = self.model.base_model(**inputs, output_hidden_states=True).hidden_states
            mask = inputs["attention_mask"].bool()
            points += [state[mask].float().cpu() for state in states[1:]]
        return torch.from_numpy(np.cov(torch.cat(points).numpy().T))

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the inputs of the model, batch by batch, on the device."""
        for rows in self.loader():
            yield {name: rows[name].to(self.device) for name in ("input_ids", "attention_mask")}


def random_texts(num_tokens: int, max_length: int) -> Dataset:
    """Return texts of random tokens, about twice as many tokens as requested.

    Their lengths vary like those of sentence pairs, up to `longest` tokens.
    """
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(max_length / 2.5), 0.5, 2 + 6 * num_tokens // max_length)
    lengths = np.clip(lengths, 4, max_length).astype(int)
    rows = [generator.integers(5, 30_000, length).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": rows, "length": lengths.tolist()})


def collate(rows: Any) -> dict[str, Tensor]:
    """Return the rows as a batch, padded to the longest of them."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row["input_ids"])] = torch.tensor(row["input_ids"])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def main() -> None:
    """Print a table for each precision."""
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--shape", choices=SHAPES, default="minilm-32x64", help="default: minilm-32x64")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="default: both")
    parser.add_argument("--points", type=positive_int, default=250_000, help="points of Sigma_S (default: 250000)")
    add_processor_time_option(parser)
    options = parse_options(parser)
    if not options.peak_of and "bf16" in options.precision:
        note_emulated_bfloat16(options.device.type)
    for precision in options.precision:
        refresh = Refresh(options.shape, precision, options.points, options.device)
        calls = dict(zip(METHODS, (refresh.bare_forward, refresh.istar, refresh.published), strict=True))
        if options.peak_of:
            calls[options.peak_of]()
            print(json.dumps(peak_memory_mb(options.device)))
            return
        make_console().print(make_table(calls, precision, options))


def make_table(calls: dict[str, Callable[[], Any]], precision: str, options: argparse.Namespace) -> Table:
    """Measure all contenders in this precision, and return the table."""
    seconds = time_in_rotation(calls, options.rounds, options.device, options.clock)
    if options.device.type == "cuda":
        peaks = measure_gpu_peaks_mb(calls, options.device)
    else:
        peaks = {name: peak_in_new_process(name, precision, options) for name in METHODS}
    table = comparison_table(
        f"{options.points:,} points, {options.shape}, {precision}, {options.device}, {options.rounds} rounds",
        ("seconds (median)", f"ratio to the {PEER}", f"MB above the {PEER}"),
        options.rounds,
    )
    for name in METHODS:
        extra_mb = f"{peaks[name] - peaks[PEER]:.0f}"
        table.add_row(name, f"{median(seconds[name]):.2f}", paired_ratio(seconds, name, PEER), extra_mb)
    # Unchecked, because rounding in bfloat16 can leave a covariance with slightly negative eigenvalues.
    istar_score, published_score = (float(unchecked_isoscore(calls[name]())) for name in ("istar", "published"))
    table.caption = f"{table.caption} IsoScore of Sigma_S: istar {istar_score:.6f}, published {published_score:.6f}."
    return table


def peak_in_new_process(method: str, precision: str, options: argparse.Namespace) -> float:
    """Return the peak memory in MB of a new process that calls one contender."""
    arguments = ["--shape", options.shape, "--precision", precision, "--points", str(options.points)]
    arguments += ["--device", str(options.device), "--peak-of", method]
    return float(json_from_new_process("benchmarks.refresh", *arguments))


if __name__ == "__main__":
    main()
