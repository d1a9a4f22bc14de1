"""Runs on disk: what a finished run leaves, what names it, and how it is written and read."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from istar.errors import UserError, shorten
from istar.files import write_text

RESULT = "result.json"
CONFIG = "config.yaml"
FORMAT = 1
_VERSIONS = ("istar", "torch", "lightning", "transformers", "datasets", "numpy", "scikit-learn")


@dataclass(frozen=True)
class RunRecord:
    """A run's `result.json`.

    Attributes:
        name: of the run and its folder; ends with the identity's hash.
        status: `finished` or `failed`.
        config: the resolved config, keys as on the command line.
        headline: `metric`, `value` and the `epoch` it came from (counted from 1).
        metrics: all validation metrics of that epoch, as fractions.
        baseline: the same metrics for the majority class or the mean of the training labels.
        collapsed: the predictions of that epoch are constant, per validation set.
        isotropy: IsoScore* on the validation set by layer (0: embeddings) and of the union of layers 1 to L, `before`
            training and `after` it (at the headline's epoch), with the number of tokens behind each.
        epochs: metrics and isotropy of every epoch.
        data: sizes, the content's fingerprint, and how many validation examples stand in the training data.
        skipped_steps: optimizer steps left out because their gradient was not finite (`trainer.nonfinite=skip`).
        timing: seconds, in all and by part, of the process that finished the run.
        versions: of the libraries.
        error: why it failed, in one line.
    """

    name: str
    status: str
    config: dict[str, Any]
    headline: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    collapsed: dict[str, bool] = field(default_factory=dict)
    isotropy: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    skipped_steps: int = 0
    timing: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    format: int = FORMAT


def identity(config: Mapping[str, Any], data: str, model: str) -> str:
    """Twelve hexadecimal digits that name a run: equal configs on equal data and weights, wherever they lie.

    Args:
        config: resolved config; where things lie and what is logged does not count, nor does the hardware, but for
            the number of processes, which multiplies the batch.
        data: fingerprint of the training and validation examples.
        model: hub id and revision, or the fingerprint of a local folder.
    """
    config = {group: dict(values) if isinstance(values, Mapping) else values for group, values in config.items()}
    for group, keys in _NOT_IDENTITY.items():
        for key in keys or tuple(config[group]):
            config[group].pop(key, None)
    for group, later in _LATER.items():
        for key, value in later.items():
            if isinstance(config.get(group), dict) and config[group].get(key) == value:
                config[group].pop(key, None)
    told = json.dumps({"format": FORMAT, "config": config, "data": data, "model": model}, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


_NOT_IDENTITY: dict[str, tuple[str, ...]] = {
    "task": ("data_dir", "submission"),
    "model": ("name", "revision"),
    "data": ("cache_dir", "num_workers"),
    "trainer": (
        "accelerator",
        "strategy",
        "progress_bar",
        "log_every_n_steps",
        "checkpoint_every_n_steps",
        # A run that finishes with stop has met nothing to skip.
        "checkpoint_every_n_minutes",
        "nonfinite",
        "monitor_isotropy",
    ),
    "logger": (),
    "run": (),
}

_LATER: dict[str, dict[str, Any]] = {
    "reg": {"estimator": "shrinkage", "compute": "float32"},
    "trainer": {"stop_at_inter_sim": None, "inter_sim_patience": 2},
}
"""Keys that are younger than the first runs, with what those runs did: at that value they do not count."""


def versions() -> dict[str, str]:
    """Installed versions of what a result depends on."""
    return {name: version(name) for name in _VERSIONS}


def write(record: RunRecord, folder: Path) -> None:
    """Write `result.json`, whole or not at all."""
    write_text(folder / RESULT, json.dumps(asdict(record), indent=2, allow_nan=True) + "\n")


def read(folder: Path) -> RunRecord:
    """Read a run's `result.json`.

    Raises:
        UserError: if there is none, or it is not one that this version wrote.
    """
    path = folder / RESULT
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        written = values.get("format") if isinstance(values, dict) else None
        if isinstance(written, int) and written != FORMAT:
            raise UserError(f"{path} has format {written}; this version reads {FORMAT}")
        return RunRecord(**values)
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no {RESULT}: the run is not finished, or this is no run folder") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not a result that istar wrote: {shorten(error)}") from error


def write_predictions(path: Path, predictions: Iterable[Mapping[str, Any]]) -> None:
    """Predictions as JSON lines, one example each."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in predictions))
