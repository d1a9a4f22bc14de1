"""Sigma_S of 250,000 points against the bare forward pass over the same batches: `python -m benchmarks.refresh`.

istar's refresh is its callback's own (`istar.training.ShrinkageCovariance`), progress bar aside. The peers are the
model's forward over the same batches in inference mode, and the published way: hidden states asked for, every point
moved to the host and kept, `np.cov` at the end. They take turns; the ratio is that of each round, and its median and
the middle half of the rounds are printed. Peak memory is that of one refresh in a process of its own, above that of
the bare forward.

    python -m benchmarks.refresh
    python -m benchmarks.refresh --shape bert-base-32x128 --precision bf16 --rounds 3
"""

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import lightning as L
import numpy as np
import torch
from datasets import Dataset
from rich.table import Table
from torch import Tensor

from benchmarks.common import SHAPES, console, in_fresh_process, in_turns, parsed, parser, peak_mb, ratios
from istar.config import TrainerConfig
from istar.measures.isoscore import unchecked_isoscore
from istar.regularizers import IStar, attach
from istar.training import ShrinkageCovariance
from istar.training.data import evaluation_loader
from istar.training.trainer import bare_trainer

METHODS = ("bare forward", "istar", "published")
PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed"}


class Refresh:
    """One model, one sample of its training data, three ways through it."""

    def __init__(self, shape: str, precision: str, points: int, device: torch.device) -> None:
        of = SHAPES[shape]
        accelerator = "gpu" if device.type == "cuda" else "cpu"
        settings = TrainerConfig(precision=PRECISIONS[precision], accelerator=accelerator, devices=1)
        self.trainer: L.Trainer = bare_trainer(settings)
        self.device, self.layers = device, of.layers
        compute = "bfloat16" if precision == "bf16" else "float32"
        self.model = of.model().to(device).eval()
        self.penalty = IStar(-1.0, 0.4, compute=compute)
        watch = attach(self.model, self.penalty)
        features, batch_size = texts(points // of.layers, of.tokens), 2 * of.batch
        self.callback = ShrinkageCovariance(watch, features, collate, points, batch_size, 0, progress_bar=False)
        self.sample = self.callback.sample(of.layers, 0)
        self.loader = lambda: evaluation_loader(features, collate, batch_size, self.sample)

    def bare_forward(self) -> None:
        for inputs in self._batches():
            with torch.inference_mode(), self.trainer.precision_plugin.val_step_context():
                self.model.base_model(**inputs)

    def istar(self) -> Tensor:
        self.callback.refresh(self.trainer, self.sample)
        assert self.penalty.shrinkage_covariance is not None
        return self.penalty.shrinkage_covariance

    def published(self) -> Tensor:
        points = []
        for inputs in self._batches():
            with torch.inference_mode(), self.trainer.precision_plugin.val_step_context():
                states = self.model.base_model(**inputs, output_hidden_states=True).hidden_states
            mask = inputs["attention_mask"].bool()
            points += [state[mask].float().cpu() for state in states[1:]]
        return torch.from_numpy(np.cov(torch.cat(points).numpy().T))

    def _batches(self) -> Any:
        for rows in self.loader():
            yield {name: rows[name].to(self.device) for name in ("input_ids", "attention_mask")}


def texts(tokens: int, longest: int) -> Dataset:
    """Random tokens in texts whose lengths vary as those of sentence pairs do, twice as many tokens as asked for."""
    generator = np.random.default_rng(0)
    drawn = generator.lognormal(np.log(longest / 2.5), 0.5, 2 + 6 * tokens // longest)
    lengths = np.clip(drawn, 4, longest).astype(int)
    rows = [generator.integers(5, 30_000, length).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": rows, "length": lengths.tolist()})


def collate(rows: Any) -> dict[str, Tensor]:
    """Padded to the longest."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row["input_ids"])] = torch.tensor(row["input_ids"])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def main() -> None:
    known = parser(__doc__, 5, METHODS)
    known.add_argument("--shape", choices=SHAPES, default="minilm-32x64")
    known.add_argument("--precision", nargs="+", choices=("32", "bf16"), default=["32", "bf16"])
    known.add_argument("--points", type=int, default=250_000)
    options = parsed(known)
    for precision in options.precision:
        refresh = Refresh(options.shape, precision, options.points, options.device)
        calls = dict(zip(METHODS, (refresh.bare_forward, refresh.istar, refresh.published), strict=True))
        if options.peak_of:
            calls[options.peak_of]()
            print(json.dumps(peak_mb(options.device)))
            return
        console().print(table(refresh, calls, precision, options))


def table(refresh: Refresh, calls: dict[str, Callable[[], Any]], precision: str, options: argparse.Namespace) -> Table:
    seconds = in_turns(calls, options.rounds, refresh.device)
    peaks = {name: fresh_peak(name, precision, options) for name in METHODS}
    printed = Table(
        title=f"{options.points:,} points, {options.shape.rpartition('-')[0]}, {precision}, {refresh.device}, "
        f"{options.rounds} rounds"
    )
    for column in ("", "seconds (median)", "ratio to the bare forward", "MB above it"):
        printed.add_column(column)
    for name in METHODS:
        above = f"{peaks[name] - peaks[METHODS[0]]:.0f}"
        printed.add_row(name, f"{median(seconds[name]):.2f}", ratios(seconds[name], seconds[METHODS[0]]), above)
    # Products in bfloat16 leave no covariance that is positive semi-definite to the last digit.
    own, published = (float(unchecked_isoscore(calls[name]())) for name in ("istar", "published"))
    printed.caption = f"IsoScore of Sigma_S: {own:.6f} and, published, {published:.6f}"
    return printed


def fresh_peak(method: str, precision: str, options: argparse.Namespace) -> float:
    arguments = ["--shape", options.shape, "--precision", precision, "--points", str(options.points)]
    return float(
        in_fresh_process("benchmarks.refresh", *arguments, "--device", str(options.device), "--peak-of", method)
    )


if __name__ == "__main__":
    main()
