"""`istar measure --revisions` and `--checkpoints`: measures of a model at several checkpoints of its training."""

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from istar.errors import UserError, shorten
from istar.files import write_text
from istar.geometry import measure, stream
from istar.geometry.corpus import Source
from istar.geometry.measure import Measurements
from istar.geometry.same_model import ModelName, load_and_hash_weights, refuse_other_model
from istar.geometry.saved_checkpoints import Checkpoint
from istar.geometry.stream import Pass

TABLE = "trajectory.csv"
KEYS = ("model", "revision", "step", "weights", "source", "layer")
"""Columns of the table that identify a row; all other columns are measures."""
_FINGERPRINT = ".asked"
"""File in a checkpoint's folder with the hash of the settings and texts that its measures were taken with."""


class PartialFailure(UserError):  # noqa: N818
    """Some checkpoints could not be measured; the others were."""

    exit_code = 1


@dataclass(frozen=True)
class Plan:
    """Settings that all checkpoints of a trajectory share; see `measure.measure_model`."""

    model: str  # name of the model in the table
    texts: Sequence[Source]  # texts to measure the model over
    settings: Pass  # how the texts are read
    out: Path  # folder for the table and for one folder per checkpoint
    dtype: str = "float32"  # dtype of the weights
    device: str = "auto"  # device of the model
    command: str = ""  # command line that the page shows


@dataclass
class Trajectory:
    """Measurements and error messages by the checkpoints' labels."""

    measured: dict[str, Measurements] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def follow(plan: Plan, checkpoints: Sequence[Checkpoint], console: Console) -> Trajectory:
    """Measure each checkpoint into a folder of its own, and write the table after each one.

    A checkpoint that an earlier call has measured with the same texts, settings and weights is read from its folder. A
    checkpoint with the weights of an earlier one gets a copy of its measurements. An error at one checkpoint is
    recorded, and the next one is measured. The console shows progress, warnings and errors.
    """
    trajectory = Trajectory()
    names = [source.name for source in plan.texts]
    fingerprint = stream.compute_identity(plan.settings, plan.dtype, names, *(source.path for source in plan.texts))
    for number, checkpoint in enumerate(checkpoints, start=1):
        _print_line(console, f"{number} of {len(checkpoints)}: {checkpoint.label}")
        try:
            measured, message = _measure(checkpoint, plan, fingerprint, trajectory)
        # Running out of memory is a RuntimeError; the next checkpoint may be smaller.
        except (UserError, OSError, RuntimeError) as error:
            trajectory.failures[checkpoint.label] = shorten(error)
            _print_line(console, f"not measured: {checkpoint.label}: {shorten(error)}")
            continue
        _print_line(console, message)
        trajectory.measured[checkpoint.label] = measured
        write(plan, checkpoints, trajectory)
    return trajectory


def _print_line(console: Console, line: str) -> None:
    """Print a line as it is, if it is not empty."""
    if line:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def refuse_other_checkpoints(plan: Plan, checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse to replace the table of another model, or the measures of checkpoints from elsewhere with other weights.

    Raises:
        UserError: if `plan.out` holds such a table or such measures.
    """
    path = plan.out / TABLE
    if path.is_file():
        try:
            models = pd.read_csv(path, usecols=["model"], dtype=str)["model"].unique()
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is no trajectory: {shorten(error)}; name a new folder with --out") from error
        for model in models:
            refuse_other_model(plan.out, ModelName(model), ModelName(plan.model), lambda: False)
    for checkpoint in checkpoints:
        try:
            earlier = measure.read(plan.out / checkpoint.folder / measure.JSON_FILE)
        except UserError:  # missing or damaged
            continue
        names = [
            ModelName(str(Path(name).absolute()) if revision is None else name, revision)
            for name, revision in (
                (earlier.model["name"], earlier.model["revision"]),
                (checkpoint.name, checkpoint.revision),
            )
        ]
        refuse_other_model(plan.out, names[0], names[1], lambda: _has_weights(checkpoint, plan, earlier))  # noqa: B023


def _has_weights(checkpoint: Checkpoint, plan: Plan, earlier: Measurements) -> bool:
    """Return whether a checkpoint has the weights that were measured earlier; True if it cannot be loaded."""
    try:
        with _loadable(checkpoint, plan.out / checkpoint.folder) as name:
            weights = load_and_hash_weights(ModelName(name, checkpoint.revision), earlier.model["dtype"])
    except (UserError, OSError, RuntimeError):  # reported when it is measured
        return True
    return weights == earlier.weights


def _measure(checkpoint: Checkpoint, plan: Plan, fingerprint: str, earlier: Trajectory) -> tuple[Measurements, str]:
    """Read, copy or take the measurements of a checkpoint, and write them to its folder.

    The second value is a message for the user, which may be empty.
    """
    folder = plan.out / checkpoint.folder
    with _loadable(checkpoint, folder) as name:
        weights = load_and_hash_weights(ModelName(name, checkpoint.revision), plan.dtype)
        twin = next((label for label, other in earlier.measured.items() if other.weights == weights), None)
        message = "" if twin is None else f"warning: {checkpoint.label} has the same weights as {twin}"
        cached = _read_cached(folder, fingerprint)
        if cached is not None and cached.weights == weights:
            return cached, message or "measured before"
        if twin is not None:
            measured, message = earlier.measured[twin], f"{message}; its figures are copied"
        else:
            progress = Console(stderr=True)
            measured = measure.measure_model(
                name, plan.texts, plan.settings, folder, checkpoint.revision, plan.dtype, plan.device, progress,
                plan.command,
            )  # fmt: skip
    measured = replace(measured, model={**measured.model, "name": checkpoint.name, "revision": checkpoint.revision})
    # The fingerprint is written last: after a call that is killed before, the checkpoint is measured again.
    (folder / _FINGERPRINT).unlink(missing_ok=True)
    measure.write(measured, folder)
    write_text(folder / _FINGERPRINT, fingerprint)
    return measured, message


def _read_cached(folder: Path, fingerprint: str) -> Measurements | None:
    """Return the measurements of an earlier call with the same fingerprint, if there are any."""
    try:
        is_same = (folder / _FINGERPRINT).read_text(encoding="utf-8") == fingerprint
        return measure.read(folder / measure.JSON_FILE) if is_same else None
    except (OSError, ValueError, UserError):  # missing or damaged
        return None


@contextmanager
def _loadable(checkpoint: Checkpoint, folder: Path) -> Iterator[str]:
    """Yield a name that from_pretrained accepts; a `.ckpt` file is unpacked for as long as the block runs."""
    if Path(checkpoint.name).suffix != ".ckpt":
        yield checkpoint.name
        return
    unpacked = folder / ".weights"
    shutil.rmtree(unpacked, ignore_errors=True)
    try:
        _unpack(Path(checkpoint.name), unpacked)
        yield str(unpacked)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def _unpack(path: Path, folder: Path) -> None:
    """Convert a checkpoint of train.py to a folder of save_pretrained, with the config and tokenizer of its run."""
    model = path.parent.parent / "model"
    if not (model / "config.json").is_file():
        raise UserError(f"{path}: its run has no model folder; expected one with the config and the tokenizer")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        # Tied weights are one tensor under two names, which safetensors refuses; the clones share no memory.
        weights = {
            name.removeprefix("model."): values.clone().contiguous()
            for name, values in state.items()
            if name.startswith("model.")
        }
    except Exception as error:  # a damaged file can raise any exception
        raise UserError(f"{path} is not a readable checkpoint: {shorten(error)}") from error
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "*.bin"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write(plan: Plan, checkpoints: Sequence[Checkpoint], trajectory: Trajectory) -> None:
    """Write `trajectory.csv`: for each checkpoint one row per source and layer and one per embedding matrix."""
    rows = []
    for checkpoint in checkpoints:
        if checkpoint.label in trajectory.measured:
            measured = trajectory.measured[checkpoint.label]
            keys = {"model": plan.model, "revision": checkpoint.label, "step": checkpoint.step}
            rows += [{**keys, "weights": measured.weights, **row} for row in table_rows(measured)]
    write_text(plan.out / TABLE, pd.DataFrame(rows).convert_dtypes().to_csv(index=False))


def table_rows(measured: Measurements) -> Iterator[dict[str, Any]]:
    """Yield the table's rows of one checkpoint: layers, embedding matrices, and the final normalization."""
    for source, taps in measured.sources.items():
        for tap, figures in taps.items():
            yield {"source": source, "layer": tap, **figures}
    for which, forms in measured.matrices.items():
        row: dict[str, Any] = {"source": None, "layer": f"{which}_embeddings"}
        for form, figures in forms.items():
            prefix = "" if form == "raw" else f"{form}_"
            row |= {f"{prefix}{name}": value for name, value in figures.items() if isinstance(value, float)}
        yield row
    if measured.final_norm is not None:
        names = ("gain", "bias", "ratio", "bias_over_gain")
        columns = {f"layer_norm_{name}": measured.final_norm[name] for name in names}
        yield {"source": None, "layer": "final_norm_parameters", **columns}


def table(plan: Plan, checkpoints: Sequence[Checkpoint], trajectory: Trajectory) -> Table:
    """Return the terminal table: the last layer over all texts, and I(W) of the matrix nearest to the output.

    I(W) is over both signs of the eigenvectors.
    """
    measures = ("isoscore", "inter_sim", "intra_sim", "two_nn", "effective_rank")
    rows = {}
    for checkpoint in checkpoints:
        rows[checkpoint.label] = [math.nan] * (len(measures) + 1)
        if checkpoint.label in trajectory.measured:
            measured = trajectory.measured[checkpoint.label]
            last_layer = list(measured.all_texts.values())[-1]
            matrix = measured.matrices.get("output") or measured.matrices["input"]
            numbers = [last_layer.get(name, math.nan) for name in measures]
            # The value over both signs can be compared between matrices; the papers' depends on the eigensolver.
            rows[checkpoint.label] = [*numbers, matrix["raw"]["partition_isotropy_both"]]
    columns = [name.replace("_", " ") for name in (*measures, "I(W), both signs")]
    return measure.number_table(f"{plan.model}: the last layer, and I(W)", "revision", columns, rows)


def check(trajectory: Trajectory) -> None:
    """Raise `PartialFailure` if a checkpoint could not be measured."""
    if trajectory.failures:
        failures = "; ".join(f"{label} ({reason})" for label, reason in trajectory.failures.items())
        total = len(trajectory.failures) + len(trajectory.measured)
        raise PartialFailure(f"{len(trajectory.failures)} of {total} not measured: {shorten(failures, 500)}")
