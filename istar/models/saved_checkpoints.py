"""Models named on a command line, and the checkpoints of one training with their optimizer steps."""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from istar.errors import UserError
from istar.files.folders import is_model_folder, list_visible, split_label, to_file_name
from istar.files.parsing import MissingFileError, read_json
from istar.files.writing import write_text
from istar.models.archives import load_archive
from istar.models.model_source import ModelSource, split_revision
from istar.runs.labels import shorten_model_name
from istar.runs.record import KEPT_MODELS, RESULT

STEP_FILE = "training_step.json"
"""File in a model's folder with its optimizer step, as `{"global_step": 512}`."""
_CHECKPOINT_FOLDER = "checkpoints"
"""Folder of a run of train.py with its `.ckpt` files."""
_TRAINER_STATE_FILE = "trainer_state.json"
"""File with the step of a checkpoint, written by transformers' Trainer."""
_STEP_PATTERN = re.compile(r"(?<![A-Za-z])step[-_]?(\d+)(?!\d)")
_RESERVED_NAMES = ("trajectory.csv", "index.html", "figures", "tables")
"""Names in the output folder that are not allowed for a checkpoint's folder."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelArgument:
    """A model on the command line: a folder, a run of train.py, or a hub model."""

    label: str  # label given on the command line; empty for none
    name: str  # folder or hub id
    revision: str | None = None  # revision on the hub

    @property
    def source(self) -> ModelSource:
        """Source of the model, for a run of train.py its folder `model`; raises a `UserError` as `ModelSource`."""
        folder = Path(self.name)
        model_folder = folder / "model"
        if folder.is_dir() and not is_model_folder(folder) and not is_model_folder(model_folder):
            if (folder / RESULT).exists():
                raise UserError(f"{folder} is a run without a saved model; train it with run.save_model=true")
            if runs := sorted(path.parent for path in folder.glob(f"*/{RESULT}")):
                raise UserError(f"{folder} is a folder of {len(runs)} runs; name one or several, such as {runs[0]}")
        return ModelSource(str(model_folder) if is_model_folder(model_folder) else self.name, self.revision)

    @property
    def default_label(self) -> str:
        """The given label, or else the last part of the name with the revision; also usable as a folder's name."""
        # Relative paths such as `..` do not end with the name of their folder.
        name = os.path.abspath(self.name) if PurePath(self.name).name in ("", "..") else self.name  # noqa: PTH100
        return to_file_name(self.label or "-".join(filter(None, (shorten_model_name(name), self.revision))))


def parse_models(arguments: Sequence[str]) -> list[ModelArgument]:
    """Parse models, each `[label=]<hub id, folder or run>[@revision]`; folders do not have revisions.

    Raises a `UserError` if a model is given twice, or a label cannot name a folder.
    """
    models: list[ModelArgument] = []
    for argument in arguments:
        label, name = split_label(argument)
        name, revision = split_revision(name)
        if (name, revision) in [(model.name, model.revision) for model in models]:
            raise UserError(f"{argument} is given twice; give each model once")
        models.append(ModelArgument(label, name, revision))
    return models


def check_distinct_labels(labels: Sequence[str], noun: str = "models") -> None:
    """Raise a `UserError` if two models, trainings or benchmarks have the same label."""
    for label, count in Counter(labels).items():
        if count > 1:
            raise UserError(f"several {noun} are called {label}; give them names, as in first=<path or id>")


@dataclass(frozen=True)
class Checkpoint:
    """A revision on the hub or a checkpoint on disk."""

    label: str  # the revision, or the part of the checkpoint's path that differs from the other checkpoints
    name: str  # hub id, folder, or `.ckpt` file
    revision: str | None = None  # revision on the hub; None for a folder or a file
    step: int | None = None  # optimizer step at which it was saved; None if unknown

    @property
    def folder(self) -> str:
        """Name of the folder for this checkpoint's measures."""
        return to_file_name(self.label)


@dataclass(frozen=True)
class _FoundCheckpoint:
    """A checkpoint that was found on disk, before it has a label."""

    path: Path  # path that matches the pattern
    model: Path  # folder of the model, or `.ckpt` file
    training: Path  # folder of the training that the checkpoint belongs to
    step: int | None  # step that the checkpoint records, if any
    is_readable: bool = True  # False for a damaged `.ckpt` file; its error is reported when it is measured


def step_from_name(label: str) -> int | None:
    """Return the step in a revision's name such as `step1000`; None without a step or with several."""
    steps = set(_STEP_PATTERN.findall(label))
    return int(steps.pop()) if len(steps) == 1 else None


def record_step(folder: Path, step: int) -> None:
    """Write a model's optimizer step to a JSON file in its folder, for `find_checkpoints`."""
    write_text(folder / STEP_FILE, json.dumps({"global_step": step}) + "\n")


def find_revisions(model: str, names: Sequence[str], steps: Mapping[str, int] | None = None) -> list[Checkpoint]:
    """Return revisions of a hub model as its checkpoints, in the given order.

    `steps` gives the step of each revision. Without it, the step comes from a name such as `step1000`; otherwise it is
    None. Raises a `UserError` if all `names` are empty, the model is a folder, or `steps` names other revisions.
    """
    if Path(model).is_dir():
        raise UserError(f"--revisions needs a model on the hub, but {model} is a folder; use --checkpoints for folders")
    labels = list(dict.fromkeys(filter(None, names)))
    if not labels:
        raise UserError("--revisions is empty; expected names separated by commas, such as step1000,step2000")
    step_by_label = {label: step_from_name(label) for label in labels}
    if steps is not None:
        step_by_label = _match_steps(steps, labels, paths=labels)
    return _check_folder_names([Checkpoint(label, model, label, step_by_label[label]) for label in labels])


def find_checkpoints(pattern: str, steps: Mapping[str, int] | None = None) -> list[Checkpoint]:
    """Find the checkpoints of one training that match a glob pattern, and sort them by step.

    They are folders of `save_pretrained`, including checkpoints of transformers' Trainer, also with adapters alone, and
    kept models of a run of train.py, or `.ckpt` files of such a run. A pattern, or its beginning, that is the name of
    something existing is taken literally. A pattern that matches a single folder means the models in it. For a run,
    these are the models in `models/`, or else its final model; for the output folder of a Trainer, its checkpoints,
    even if the final model is there too.

    A checkpoint's step is recorded as `global_step` in a `.ckpt` file, `trainer_state.json` or `training_step.json`.
    For the final model of a run, it is the step of its best epoch. `steps`, keyed by label, path or last part of the
    path, replaces these steps; the checkpoints then count as one training. Raises a `UserError` if the pattern matches
    no model, or checkpoints of different trainings, or if a step is unknown, or if the table and the checkpoints do
    not match.
    """
    paths = _expand_pattern(Path(pattern)) if pattern else []
    paths = _find_models_in(paths[0]) or paths if len(paths) == 1 else paths
    found_checkpoints = [checkpoint for path in paths if (checkpoint := _inspect_path(path)) is not None]
    if not found_checkpoints:
        raise UserError(
            f"--checkpoints {pattern} matches no model; expected folders that save_pretrained wrote, runs of "
            "train.py, or their models/ or checkpoints/*.ckpt"
        )
    absolute_paths = [Path(os.path.abspath(checkpoint.path)) for checkpoint in found_checkpoints]  # noqa: PTH100
    common_folder = os.path.commonpath([path.parent for path in absolute_paths])
    labels = [path.relative_to(common_folder).as_posix().removesuffix(".ckpt") for path in absolute_paths]
    if steps is None:
        _check_same_training(pattern, found_checkpoints)
        step_by_label = {label: checkpoint.step for label, checkpoint in zip(labels, found_checkpoints, strict=True)}
    else:
        step_by_label = _match_steps(steps, labels, [str(checkpoint.path) for checkpoint in found_checkpoints])
    checkpoints = [
        Checkpoint(label, str(checkpoint.model), step=step_by_label[label])
        for label, checkpoint in zip(labels, found_checkpoints, strict=True)
    ]
    checkpoints.sort(key=lambda checkpoint: (checkpoint.step is None, checkpoint.step, checkpoint.label))
    return _check_folder_names(checkpoints)


def _expand_pattern(pattern: Path) -> list[Path]:
    """Return the paths that match a glob pattern, sorted; what exists by the name of the pattern is no pattern."""
    if os.path.lexists(pattern):
        return [pattern]
    paths = [parent / pattern.name for parent in _expand_pattern(pattern.parent)]
    matches = ([path] if os.path.lexists(path) else list_visible(path.parent, path.name) for path in paths)
    return list(chain.from_iterable(matches))


def common_name(checkpoints: Sequence[Checkpoint]) -> str:
    """Return a name for the model of checkpoints on disk: the name of their deepest common folder.

    For checkpoints in the folder `models/` or `checkpoints/` of a run, this is the name of the run.
    """
    folder = Path(os.path.commonpath([Path(checkpoint.name).absolute().parent for checkpoint in checkpoints]))
    return folder.parent.name if folder.name in (KEPT_MODELS, _CHECKPOINT_FOLDER) else folder.name


def _match_steps(steps: Mapping[str, int], labels: Sequence[str], paths: Sequence[str]) -> dict[str, int | None]:
    aliases = {
        label: (label, path, Path(path).name, Path(path).stem) for label, path in zip(labels, paths, strict=True)
    }
    matches_by_name = {name: [label for label in labels if name in aliases[label]] for name in steps}
    for name, matches in matches_by_name.items():
        if len(matches) != 1:
            reason = "no checkpoint" if not matches else f"{len(matches)} checkpoints"
            raise UserError(f"--steps: {name} names {reason}; expected one of {', '.join(labels[:5])}")
    step_by_label: dict[str, int | None] = {matches[0]: steps[name] for name, matches in matches_by_name.items()}
    for label in labels:
        if label not in step_by_label:
            raise UserError(f"--steps has no row for {label}; expected a step for each checkpoint")
    return step_by_label


def _find_models_in(folder: Path) -> list[Path]:
    if kept_models := list(filter(is_model_folder, list_visible(folder / KEPT_MODELS))):
        return kept_models
    models = [] if is_model_folder(folder / "model") else list(filter(is_model_folder, list_visible(folder)))
    if not is_model_folder(folder):
        return models
    # Other subfolders of a model can have a config.json too, such as the modules of sentence-transformers.
    return [path for path in models if (path / _TRAINER_STATE_FILE).is_file()]


def _inspect_path(path: Path) -> _FoundCheckpoint | None:
    if path.suffix == ".ckpt":
        run = path.parent.parent if path.parent.name == _CHECKPOINT_FOLDER else path.parent
        try:
            state = load_archive(path, mmap=True)
        except Exception:  # a damaged file can raise any exception
            return _FoundCheckpoint(path, path, run, None, is_readable=False)
        return _FoundCheckpoint(path, path, run, _get_step(state, "global_step"))
    if is_model_folder(path / "model"):  # a run of train.py
        return _FoundCheckpoint(path, path / "model", path, _read_best_step(path))
    if not is_model_folder(path):
        return None
    if (path / STEP_FILE).is_file():
        parent = path.parent
        training = parent.parent if parent.name == KEPT_MODELS else parent
        return _FoundCheckpoint(path, path, training, _get_step(_read_json(path / STEP_FILE), "global_step"))
    if (path / _TRAINER_STATE_FILE).is_file():
        step = _get_step(_read_json(path / _TRAINER_STATE_FILE), "global_step")
        # The output folder of a Trainer has a state too, and is a separate training.
        return _FoundCheckpoint(path, path, path.parent if path.name == f"checkpoint-{step}" else path, step)
    return _FoundCheckpoint(path, path, path.parent, None)


def _read_best_step(run: Path) -> int | None:
    result = _read_json(run / RESULT)
    try:
        best_epoch = result["headline"]["epoch"]
        return next(_get_step(record, "step") for record in result["epochs"] if record["epoch"] == best_epoch)
    except (KeyError, TypeError, StopIteration):
        return None


def _read_json(path: Path) -> Any:
    try:
        return read_json(path)
    except MissingFileError:
        return None
    except UserError as error:
        log.warning("not read: %s", error)
        return None


def _get_step(record: Any, key: str) -> int | None:
    step = record.get(key) if isinstance(record, Mapping) else None
    return step if isinstance(step, int) else None


def _check_same_training(pattern: str, checkpoints: Sequence[_FoundCheckpoint]) -> None:
    trainings = [str(training) for training in dict.fromkeys(checkpoint.training for checkpoint in checkpoints)]
    if len(trainings) > 1:
        raise UserError(
            f"--checkpoints {pattern} matches {len(trainings)} trainings: {_join_first(trainings)}; expected "
            f"checkpoints of one, such as --checkpoints {trainings[0]}; measure final models separately: istar measure "
            "<folder>"
        )
    paths_without_step = [
        str(checkpoint.path) for checkpoint in checkpoints if checkpoint.step is None and checkpoint.is_readable
    ]
    if paths_without_step and len(checkpoints) > 1:
        raise UserError(
            f"--checkpoints {pattern}: no training step is recorded in {_join_first(paths_without_step)}; give the "
            "steps in a table: --steps steps.csv, with the columns checkpoint and step"
        )


def _join_first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_folder_names(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    folders = [checkpoint.folder for checkpoint in checkpoints]
    for checkpoint in checkpoints:
        if folders.count(checkpoint.folder) > 1 or checkpoint.folder in _RESERVED_NAMES:
            raise UserError(f"{checkpoint.label} cannot name a folder for its results; measure it separately")
    return checkpoints
