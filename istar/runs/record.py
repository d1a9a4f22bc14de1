"""The record of a run (`result.json`): its fields, what the run was made with, and functions that write and read it."""

import functools
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, Required, TypedDict

from istar.errors import UserError
from istar.files.parsing import MissingFileError, read_record
from istar.files.writing import write_text
from istar.runs.names import merit

if TYPE_CHECKING:
    import torch

RESULT = "result.json"
CONFIG = "config.yaml"
GEOMETRY = "geometry.json"
METRICS_FILE = "metrics.csv"
PROGRESS = ".istar/progress.json"
KEPT_MODELS = "models"
RECORD_FORMAT = 1
_START_COMMENT = "# The run began at "
_REPORTED_PACKAGES = ("istar", "torch", "lightning", "transformers", "datasets", "numpy", "scikit-learn")
_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
_GIT_TIMEOUT_SECONDS = 30.0
"""Timeout of git on slow network file systems."""


_Count = Annotated[int, 0]
_Scores = dict[str, float]


class _Epoch(TypedDict):
    epoch: _Count
    metrics: _Scores


class _Score(TypedDict, total=False):
    set: str
    metric: str
    value: float
    epoch: _Count


class _Isotropy(TypedDict, total=False):
    before: _Scores
    after: _Scores
    points: _Count


class _Timing(TypedDict, total=False):
    began: str | None
    total: Annotated[float, 0]
    shrinkage: list[float]


class _Data(TypedDict, total=False):
    fingerprint: str
    train: _Count
    validation: dict[str, _Count]  # by validation set


class _Named(TypedDict):
    name: str


class _Training(TypedDict):
    max_epochs: int


_Penalty = TypedDict(
    "_Penalty",
    {
        "name": Required[str], "lambda": float, "zeta": float | Literal["auto"], "estimator": str, "target": str,
        "points": str, "layers": str | list[int], "side": str, "target_score": float | str | None,
    },
    total=False,
)  # fmt: skip


class _Output(TypedDict, total=False):
    smoke: bool


class _Settings(TypedDict):
    """The keys of a run's config that readers of runs need, among many others."""

    task: _Named
    model: _Named
    reg: _Penalty
    trainer: _Training
    run: NotRequired[_Output]
    seed: _Count


@dataclass(frozen=True)
class RunRecord:
    """The outcome of a run, as stored in `result.json`; `read` checks the types that are annotated here."""

    name: str  # name of the run and of its folder; it ends with the identity hash
    status: Annotated[str, Literal["finished", "failed", "pruned"]]
    config: Annotated[dict[str, Any], _Settings]  # resolved config, with the keys of the command line
    # Name of the headline `metric`, its `value` on the validation set, and the best `epoch` (counted from 1).
    headline: Annotated[dict[str, Any], _Score] = field(default_factory=dict)
    # Choice of the best epoch: the `set` (a validation set or `held_out`), the name of the `metric`, and its `value`.
    selection: Annotated[dict[str, Any], _Score] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # all validation metrics of the best epoch, as fractions
    metrics_before: dict[str, float] = field(default_factory=dict)  # the same before training
    # The same metrics for a prediction without the input: the majority class, the mean label or the token frequencies
    # of the training set.
    baseline: dict[str, float] = field(default_factory=dict)
    collapsed: dict[str, bool] = field(default_factory=dict)  # by validation set: whether all its predictions are equal
    # IsoScore on the validation set `before` and `after` training, by layer (0 is the embedding output) and for the
    # union of layers 1 to L; `after` is measured at the headline epoch. `points` counts the tokens.
    isotropy: Annotated[dict[str, Any], _Isotropy] = field(default_factory=dict)
    epochs: Annotated[list[dict[str, Any]], list[_Epoch]] = field(default_factory=list)  # metrics and isotropy of each
    # Sizes and fingerprint of the data sets, and number of validation examples that also occur in the training data.
    data: Annotated[dict[str, Any], _Data] = field(default_factory=dict)
    skipped_steps: _Count = 0  # optimizer steps skipped because of a non-finite gradient (`trainer.nonfinite=skip`)
    # First start, `began` (UTC, ISO 8601), and durations in seconds, in `total` and by phase, in the process that
    # finished the run.
    timing: Annotated[dict[str, Any], _Timing] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # versions of istar and of the libraries
    # Hub id and commit of the model before training, or a hash of the files of a local folder; see `identity_hash`.
    model_identity: str | None = None
    # Commit of the data set on the hub. None for a local folder, for generated examples, and offline if the cache of
    # `datasets` does not name the commit.
    data_commit: str | None = None
    code_commit: str | None = None  # commit of istar's git checkout; None if istar does not run from one
    code_modified: bool | None = None  # whether tracked files of the checkout differed from its commit
    device: str | None = None  # name of the GPU, or model of the CPU
    processes: int | None = None  # number of processes
    cuda: str | None = None  # version of CUDA that torch was built with; None without CUDA
    system: str | None = None  # operating system and its version
    error: str | None = None  # one-line reason of a failure; None if the run did not fail
    format: int = RECORD_FORMAT

    @property
    def is_smoke(self) -> bool:
        """Whether the run only tests its config, so that no table or comparison counts it."""
        return bool(self.config.get("run", {}).get("smoke") or self.config.get("trainer", {}).get("fast_dev_run"))

    @property
    def selection_value(self) -> Any:
        """Value for model selection; by default the headline metric's value."""
        return self.selection.get("value", self.headline.get("value"))

    @property
    def selection_merit(self) -> float:
        """`selection_value` as a number that is higher for better runs, even if the metric is a loss."""
        metric = self.selection.get("metric", self.headline.get("metric", ""))
        return merit(metric, self.selection_value)

    @property
    def validation_examples(self) -> int:
        """Number of examples of all validation sets; 0 if unknown."""
        return sum(self.data.get("validation", {}).values())


def installed_versions() -> dict[str, str]:
    """Return the installed versions of istar and of the libraries that affect results."""
    return {name: version(name) for name in _REPORTED_PACKAGES}


@functools.cache
def describe_code(package_folder: Path = _PACKAGE_FOLDER) -> dict[str, Any]:
    """Return the fields `code_commit` and `code_modified` of `RunRecord`.

    Both are None if git is not installed or does not track the modules in `package_folder`. A process keeps the first
    result, because later commits do not change the modules that it has imported.
    """
    unknown_fields = {"code_commit": None, "code_modified": None}
    # An installed istar may lie within the checkout of another project, which does not track it.
    if _run_git(package_folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return unknown_fields
    commit = _run_git(package_folder, "rev-parse", "HEAD")
    changes = _run_git(package_folder, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return {"code_commit": commit, "code_modified": None if changes is None else changes != ""}


def describe_hardware(device: "torch.device", num_processes: int) -> dict[str, Any]:
    """Return the fields `device` (of this process), `processes`, `cuda` and `system` of `RunRecord`."""
    import torch  # readers of records do without it

    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else _get_cpu_name()
    if device.type not in ("cuda", "cpu"):
        device_name = device.type
    return {
        "device": device_name,
        "processes": num_processes,
        "cuda": torch.version.cuda,
        "system": platform.platform(),
    }


def _run_git(folder: Path, *arguments: str) -> str | None:
    # A git hook sets GIT_DIR and the like to its repository, which may be another one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        completed = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() if completed.returncode == 0 else None


def _get_cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def start_comment(started_at: str) -> str:
    """Return the first line of `config.yaml`, a comment with the start time of the run."""
    return f"{_START_COMMENT}{started_at}\n"


def read_start_time(folder: Path) -> str | None:
    """Return the start time of a run from the first line of its `config.yaml`; None without such a file or line."""
    try:
        with (folder / CONFIG).open(encoding="utf-8") as file:
            first_line = file.readline()
    except (OSError, ValueError):  # the file is missing or is not UTF-8
        return None
    return first_line.removeprefix(_START_COMMENT).strip() if first_line.startswith(_START_COMMENT) else None


def write_result(record: RunRecord, folder: Path) -> None:
    """Write the record to `result.json` in the run's folder, atomically."""
    write_text(folder / RESULT, json.dumps(asdict(record), indent=2, allow_nan=True) + "\n")


def check_runs_folder(root: Path) -> None:
    """Raise a `UserError` if the folder that a command searches for runs is not a folder."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; name the folder of your runs, the run.root of istar train")


def read_result(folder: Path) -> RunRecord:
    """Read the record in a run's folder.

    Raises:
        UserError: if `result.json` is missing, unreadable, incomplete, in another format version or has wrong types.
    """
    path = folder / RESULT
    try:
        record = RunRecord(**read_record(path, RunRecord, "a result", RECORD_FORMAT))
    except MissingFileError as error:
        raise UserError(f"{folder} holds no {RESULT}: the run is not finished, or this is not a run folder") from error
    if gap := _find_gap(record):
        raise UserError(f"{path}: {gap}")
    return record


def _find_gap(record: RunRecord) -> str:
    """Return what a record lacks for its readers, or an empty string; an unfinished run may lack much."""
    reg, headline = record.config["reg"], record.headline
    if reg["name"] != "none" and "lambda" not in reg:
        return "its config lacks reg.lambda"
    if record.status != "finished":
        return ""
    before, after = (record.isotropy.get(stage, {}) for stage in ("before", "after"))
    if missing := {"metric", "value", "epoch"} - headline.keys():
        return f"its headline lacks {min(missing)}"
    if headline["metric"] not in record.metrics:
        return "its headline metric is none of its metrics"
    if not {"union"} <= after.keys() <= before.keys() or "points" not in record.isotropy:
        return "its isotropy lacks the union of the layers, or a layer before training"
    if not all(layer.isascii() and layer.isdigit() for layer in after.keys() - {"union"}):
        return "its isotropy has a layer that is not numbered"
    return "" if "total" in record.timing else "its timing lacks the total"


def read_unfinished(folder: Path) -> RunRecord:
    """Return a record with the status `unfinished` and the config of a run without a `result.json`.

    Raises:
        UserError: if `config.yaml` is missing or cannot be read, or is not the config of a run.
    """
    path = folder / CONFIG
    config = read_record(path, _Settings, "a config")
    record = RunRecord(folder.name, "unfinished", config, timing={"began": read_start_time(folder)})
    if gap := _find_gap(record):
        raise UserError(f"{path}: {gap}")
    return record


def write_predictions(path: Path, predictions: Iterable[Mapping[str, Any]]) -> None:
    """Write predictions as JSON lines, one example per line, atomically."""
    write_text(path, "".join(json.dumps(prediction, ensure_ascii=False) + "\n" for prediction in predictions))
