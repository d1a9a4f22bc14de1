"""Synthetic run folders with the files that training writes, for the tests of `istar.reports`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from istar.runs.record import KEY, RESULT, RunRecord, format_key
from tests.finished_runs import make_plain_key

METRICS = {"rte": "accuracy", "cola": "matthews_correlation", "squad": "f1", "stsb": "pearson", "clm": "perplexity"}
LAYERS = 4
BASE: dict[str, Any] = {"name": "none"}


def istar(weight: float = -1.0, zeta: float = 0.4, layers: Any = "all", **fields: Any) -> dict[str, Any]:
    reg = {"name": "istar", "lambda": weight, "layers": layers, "include_padding": False, "sync": True}
    return {**reg, "zeta": zeta, "num_points": 250_000, **fields}


def cosreg(weight: float = 1.0, layers: Any = "last") -> dict[str, Any]:
    return {"name": "cosreg", "lambda": weight, "layers": layers, "include_padding": False, "sync": True}


def config(task: str, model: str, reg: Mapping[str, Any], seed: int, **keys: Any) -> dict[str, Any]:
    """Return a resolved config; `keys` are overrides such as `optim__lr=1e-5`."""
    values: dict[str, Any] = {
        "task": {"name": task, "data_dir": None, "limit_train": None, "limit_validation": None, "submission": False},
        "model": {"name": model, "pretrained": True, "revision": None}, "reg": dict(reg),
        "data": {"batch_size": 32, "eval_batch_size": 64, "cache_dir": None, "num_workers": 0},
        "optim": {"lr": 3e-5, "weight_decay": 0.01, "schedule": "constant", "warmup": 0.0},
        "trainer": {"max_epochs": 3, "accumulate_grad_batches": 2, "devices": 1, "precision": "32-true"},
        "logger": {"name": "csv"}, "run": {"root": "runs", "overwrite": False, "save_model": True}, "seed": seed,
    }  # fmt: skip
    for key, value in keys.items():
        group, name = key.split("__")
        values[group][name] = value
    return values


def record(
    task: str, model: str, reg: Mapping[str, Any], seed: int, value: float = 0.5, status: str = "finished",
    name: str | None = None, changes: Mapping[str, Any] | None = None, data: str = "", weights: str | None = None,
    **keys: Any,
) -> RunRecord:  # fmt: skip
    """Return the record of a run with plausible results.

    Args:
        value: headline metric, a fraction.
        changes: fields of the record to replace.
        data: fingerprint of the data; by default all runs of a task have the same data.
        weights: identity of the model; by default its name and revision.
        keys: as in `config`.
    """
    settings = config(task, model, reg, seed, **keys)
    digest = hashlib.sha256(json.dumps([settings, status], sort_keys=True).encode()).hexdigest()[:12]
    key = make_plain_key(settings, data or f"data-{task}", weights)
    name = name or f"{task}-{Path(model).name}-{reg['name']}-{digest}"
    if status in ("failed", "unfinished"):
        return RunRecord(name, status, settings, key, error="loss is NaN at step 7" if status == "failed" else None)
    metric = METRICS.get(task, "accuracy")
    random = np.random.default_rng(seed)
    weight = reg.get("lambda", 0.0) or 0.0
    score = 1 / (1 + np.exp(-(weight / 2 - 1.5))) + random.normal(0, 0.01)
    after = {str(layer): float(abs(score * (0.4 + 0.1 * layer))) for layer in range(LAYERS + 1)}
    metrics = {metric: value, "loss": 0.6}
    if metric == "f1":
        metrics["exact_match"] = 0.9 * value
    epochs = [
        {
            "epoch": epoch,
            "step": 10 * epoch,
            "metrics": {metric: value * (0.8 + 0.1 * (epoch - 1)), "loss": 0.7 / epoch + random.normal(0, 0.01)},
            "isotropy": {**after, "union": after["1"]},
        }
        for epoch in (1, 2, 3)
    ]
    refreshes = [1.5, 1.5, 1.5] if reg["name"] == "istar" else []
    values: dict[str, Any] = {
        "headline": {"metric": metric, "value": value, "epoch": 3}, "metrics": metrics, "baseline": {metric: 0.5},
        "collapsed": {"validation": False},
        "isotropy": {"before": {**after, "union": 0.1}, "after": {**after, "union": after["1"]}, "points": 999},
        "epochs": epochs, "data": {"train": 100, "validation": {"validation": 50}},
        "timing": {"total": 60.0 + seed, "shrinkage": refreshes}, **(changes or {}),
    }  # fmt: skip
    return RunRecord(name, status, settings, key, **values)


def save(run: RunRecord, root: Path, geometry: bool = True) -> Path:
    """Write and return a run's folder; only a finished run has a `geometry.json`."""
    folder = root / run.name
    if run.status == "unfinished":
        folder.mkdir(parents=True)
        (folder / KEY).write_text(format_key(run.key))
        (folder / "config.yaml").write_text(json.dumps(run.config))
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    # `istar.runs.record.write_result` would wait for the disk.
    (folder / RESULT).write_text(json.dumps(asdict(run), indent=2) + "\n")
    if geometry and run.status == "finished":
        (folder / "geometry.json").write_text(json.dumps(make_geometry(run)))
    return folder


def make_geometry(run: RunRecord, dimensions: int = 64) -> dict[str, Any]:
    random = np.random.default_rng(run.config["seed"])
    weight = run.config["reg"].get("lambda", 0.0)
    mean = random.normal(0, 0.2, dimensions)
    mean[7] = -3 * (1 - weight / 2)
    two_nn: list[float | None] = [12 + weight - 1.5 * layer for layer in range(LAYERS + 1)]
    return {"examples": 50, "tokens": 999, "mean_activation": mean.tolist(), "two_nn": [None, *two_nn[1:]]}


def write_fifty_runs(root: Path, models: Sequence[str] = ("google-bert/bert-base-cased", "mine/minilm")) -> None:
    """Write fifty runs, some of them missing, failed or collapsed, two folders without a run, and a sweep's folder."""
    random = np.random.default_rng(0)
    bert, other_model = models

    def add(task: str, model: str, reg: Mapping[str, Any], seed: int, level: float, **options: Any) -> None:
        save(record(task, model, reg, seed, level + float(random.normal(0, 0.006)), **options), root)

    for seed in range(1, 6):
        add("rte", bert, BASE, seed, 0.622)
        add("rte", bert, istar(-1, 0.8), seed, 0.631)
        add("rte", bert, cosreg(), seed, 0.615)
    for seed in (1, 2, 3):
        add("rte", other_model, BASE, seed, 0.56)
        add("rte", other_model, istar(-1), seed, 0.51, changes={"collapsed": {"validation": seed == 2}})
        add("squad", bert, BASE, seed, 0.87)
        add("squad", bert, istar(-3, 0.6), seed, 0.88)
    for index, weight in enumerate((-5, -3, 1, 3, 5)):
        for seed in (1, 2):
            add("rte", bert, istar(weight, 0.8), seed, 0.625 - 0.01 * index)
    for zeta in (0.0, 0.2, 0.6):
        add("rte", bert, istar(-1, zeta), 1, 0.6 + zeta / 20)
    for layer in (1, 2, 3):
        add("rte", bert, istar(-1, 0.8, [layer]), 1, 0.6 + layer / 100)
    add("rte", bert, cosreg(-1), 1, 0.6)
    for seed in (4, 5):
        add("squad", bert, istar(-3, 0.6), seed, 0, status="failed")
        add("squad", bert, BASE, seed, 0, status="unfinished")
    for seed in (1, 2):
        add("rte", bert, istar(4, 0.8), seed, 0.4, status="pruned")
    (root / "sweeps" / "table1").mkdir(parents=True)
    (root / "notes").mkdir()
    (root / "foreign").mkdir()
    (root / "foreign" / "result.json").write_text("{}")
