"""The record of a run (`result.json`): its fields, and the functions that write and read it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from istar.errors import UserError
from istar.files.parsing import MissingFileError, read_record
from istar.files.writing import write_text
from istar.runs.key import RECORD_FORMAT, RunKey
from istar.runs.names import merit

RESULT = "result.json"
CONFIG = "config.yaml"
GEOMETRY = "geometry.json"
METRICS_FILE = "metrics.csv"
KEY = "key.json"
PROGRESS = ".istar/progress.json"
KEPT_MODELS = "models"
_START_COMMENT = "# The run began at "

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


class _KeySettings(TypedDict):
    """The settings in a run's key that readers of runs need, among many others."""

    task: _Named
    model: dict[str, Any]
    reg: _Penalty
    seed: _Count


class _Key(TypedDict):
    settings: _KeySettings
    data: str
    model: str


@dataclass(frozen=True)
class RunRecord:
    """The outcome of a run, as stored in `result.json`; `read` checks the types that are annotated here."""

    name: str  # name of the run and of its folder; it ends with the hash of the key
    status: Annotated[str, Literal["finished", "failed", "pruned"]]
    config: Annotated[dict[str, Any], _Settings]  # resolved config, with the keys of the command line
    key: Annotated[RunKey, _Key]  # identifies the run, and tells which runs are equal to it or repeat it
    # Name of the headline `metric`, its `value` on the validation set, and the best `epoch` (counted from 1).
    headline: Annotated[dict[str, Any], _Score] = field(default_factory=dict)
    # Choice of the best epoch: the `set` (a validation set or `held_out`), the name of the `metric`, and its `value`.
    selection: Annotated[dict[str, Any], _Score] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # all validation metrics of the best epoch, as fractions
    metrics_before: dict[str, float] = field(default_factory=dict)  # all validation metrics before training
    # All validation metrics of a prediction that ignores the input: the majority class, the mean label or the token
    # frequencies of the training set.
    baseline: dict[str, float] = field(default_factory=dict)
    collapsed: dict[str, bool] = field(default_factory=dict)  # by validation set: whether all its predictions are equal
    # IsoScore on the validation set `before` and `after` training, by layer (0 is the embedding output) and for the
    # union of layers 1 to L; `after` is measured at the headline epoch. `points` counts the tokens.
    isotropy: Annotated[dict[str, Any], _Isotropy] = field(default_factory=dict)
    epochs: Annotated[list[dict[str, Any]], list[_Epoch]] = field(default_factory=list)  # metrics and isotropy of each
    # Sizes of the data sets, and numbers of validation examples that also occur in the training data.
    data: Annotated[dict[str, Any], _Data] = field(default_factory=dict)
    skipped_steps: _Count = 0  # optimizer steps skipped because of a non-finite gradient (`trainer.nonfinite=skip`)
    # Time of the first start, `began` (UTC, ISO 8601), and seconds that the process that finished the run took: in
    # `total`, and by phase.
    timing: Annotated[dict[str, Any], _Timing] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # versions of istar and of the libraries
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


def format_key(key: RunKey) -> str:
    """Return the content of `key.json`, from which `read_unfinished` reads the key of a run without a record."""
    return json.dumps(asdict(key), indent=2) + "\n"


def _make_key(values: Mapping[str, Any]) -> RunKey:
    return RunKey(values["settings"], values["data"], values["model"])


def check_runs_folder(root: Path) -> None:
    """Raise a `UserError` if the folder that a command searches for runs is not a folder."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; name the folder of your runs, the run.root of istar train")


def read_result(folder: Path) -> RunRecord:
    """Read the record in a run's folder.

    Raises a `UserError` if `result.json` is missing, unreadable, incomplete, in another format version or has wrong
    types.
    """
    path = folder / RESULT
    try:
        values = read_record(path, RunRecord, "a result", RECORD_FORMAT)
    except MissingFileError as error:
        raise UserError(f"{folder} holds no {RESULT}: the run is not finished, or this is not a run folder") from error
    record = RunRecord(**values | {"key": _make_key(values["key"])})
    if gap := _find_gap(record):
        raise UserError(f"{path}: {gap}")
    return record


def _find_gap(record: RunRecord) -> str:
    """Return in words what a record lacks, or an empty string; only a finished run must have results."""
    headline = record.headline
    for settings in (record.config, record.key.settings):
        if settings["reg"]["name"] != "none" and "lambda" not in settings["reg"]:
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
    """Return a record for a run without a `result.json`: its config and its key, with the status `unfinished`.

    Raises a `UserError` if `config.yaml` or `key.json` is missing, cannot be read, or is not from a run.
    """
    path = folder / CONFIG
    config = read_record(path, _Settings, "a config")
    key = _make_key(read_record(folder / KEY, _Key, "a key"))
    record = RunRecord(folder.name, "unfinished", config, key, timing={"began": read_start_time(folder)})
    if gap := _find_gap(record):
        raise UserError(f"{path}: {gap}")
    return record


def write_predictions(path: Path, predictions: Iterable[Mapping[str, Any]]) -> None:
    """Write predictions as JSON lines, one example per line, atomically."""
    write_text(path, "".join(json.dumps(prediction, ensure_ascii=False) + "\n" for prediction in predictions))
