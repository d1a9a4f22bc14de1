"""`istar measure --revisions` and `--checkpoints`: measures of a model at several checkpoints of its training."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pandas as pd
from rich.console import Console
from safetensors.torch import save_file

from istar.drawing import page_folder
from istar.drawing.terminal import make_console
from istar.errors import UserError, shorten
from istar.files.outputs import Output
from istar.files.writing import unescape_cell
from istar.geometry.collect import measure, measures_file
from istar.geometry.collect.measures_file import Measurements, ModelName, OtherModelError
from istar.geometry.collect.trajectory_file import TRAINING_KIND, Trajectory, TrajectoryPlan, make_csv
from istar.models.archives import load_archive
from istar.models.model_source import ModelSource
from istar.models.saved_checkpoints import Checkpoint
from istar.texts.readers import iterate_csv


class PartialFailure(UserError):  # noqa: N818
    """Raised at the end if some checkpoints could not be measured; the others were."""

    exit_code = 1


def read_steps(path: Path) -> dict[str, int]:
    """Read the step of each checkpoint from a CSV file with the columns `checkpoint` and `step`.

    Raises a `UserError` if the file cannot be read, lacks a column, repeats a checkpoint, or has a step that is not a
    whole number.
    """
    header, *rows = [[field.strip() for field in fields] for _, fields in iterate_csv(path)] or [[]]
    steps: dict[str, int] = {}
    for fields in rows:
        row = dict(zip(header, fields, strict=False))
        name, step_text = row.get("checkpoint", ""), row.get("step", "")
        if not name or not step_text.isdecimal():
            raise UserError(
                f"--steps {path}: a row has the checkpoint {name!r} and the step {step_text!r}; expected the columns "
                "checkpoint and step, a name and a whole number in each row"
            )
        if name in steps:
            raise UserError(f"--steps {path}: {name} has two rows; expected one for each checkpoint")
        steps[name] = int(step_text)
    return steps


def measure_checkpoints(plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint], console: Console) -> Trajectory:
    """Measure each checkpoint into a separate folder, and write `trajectory.csv` after each one.

    A checkpoint that an earlier call has measured with the same texts and settings is read from its folder. A
    checkpoint that is the same model as an earlier one gets a copy of its measurements. Errors are recorded, and the
    next checkpoint is measured. The console shows progress, warnings and errors.

    Raises an `OtherModelError` if a checkpoint's folder contains the measures of another model.
    """
    trajectory, output = Trajectory(), Output(plan.out, TRAINING_KIND.noun)
    for position, checkpoint in enumerate(checkpoints, start=1):
        _print_line(console, f"{position} of {len(checkpoints)}: {checkpoint.label}")
        try:
            measured = _measure_checkpoint(checkpoint, plan, trajectory, console)
        except OtherModelError:
            raise
        # Running out of memory is a RuntimeError; the next checkpoint may be smaller.
        except (UserError, OSError, RuntimeError) as error:
            trajectory.failures[checkpoint.label] = shorten(error)
            _print_line(console, f"not measured: {checkpoint.label}: {shorten(error)}")
            continue
        trajectory.measurements[checkpoint.label] = measured
        output.write({measures_file.TRAJECTORY_FILE: make_csv(plan, checkpoints, trajectory)})
    return trajectory


def _print_line(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def check_training_folder(plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse an output folder with another page or the table of another model, before anything is measured.

    Measurements of further checkpoints of the same model are kept, so that they need not be measured again.

    Raises an `OtherModelError` for the table of another model, and a `UserError` if the table cannot be read, or as
    `istar.drawing.page_folder.check` does.
    """
    inputs: list[str | Path] = [*(checkpoint.name for checkpoint in checkpoints), *(text.path for text in plan.texts)]
    page_folder.check(plan.out, TRAINING_KIND, inputs)
    for checkpoint in checkpoints:
        _checkpoint_output(plan, checkpoint).check((measures_file.JSON_FILE, measures_file.CSV_FILE), inputs)
    path = plan.out / measures_file.TRAJECTORY_FILE
    if path.is_file():
        try:
            models = pd.read_csv(path, usecols=["model"], dtype=str)["model"].map(unescape_cell).unique()
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is no trajectory: {shorten(error)}; name a new folder with --out") from error
        for model in models:
            if model != plan.model:
                raise OtherModelError(plan.out, ModelName(model), ModelName(plan.model))


def _measure_checkpoint(
    checkpoint: Checkpoint, plan: TrajectoryPlan, earlier: Trajectory, console: Console
) -> Measurements:
    """Return a checkpoint's measurements, written to its folder; warn if an earlier one has the same weights."""
    output = _checkpoint_output(plan, checkpoint)
    with _prepare_source(checkpoint, output) as source:
        model = measure.open_model(source, plan.dtype, plan.device, checkpoint.name)
        text_pass = measure.plan_pass(model, plan.texts, plan.settings)
        collected = measure.measure_texts(
            text_pass, output.folder, make_console(stderr=True), earlier=earlier.measurements.values()
        )
    measured = replace(collected.measurements, command=plan.command)
    same_weights = (label for label, other in earlier.measurements.items() if other.weights == measured.weights)
    if label := next(same_weights, ""):
        _print_line(console, f"warning: {checkpoint.label} has the same weights as {label}")
    output.write({name: text.encode() for name, text in measures_file.file_contents(measured).items()})
    measures_file.discard_state(output.folder)
    return measured


def _checkpoint_output(plan: TrajectoryPlan, checkpoint: Checkpoint) -> Output:
    return Output(plan.out / checkpoint.folder, "checkpoint's measures")


@contextmanager
def _prepare_source(checkpoint: Checkpoint, output: Output) -> Iterator[ModelSource]:
    """Yield the source of a checkpoint's model.

    A `.ckpt` file is converted to a model in the hidden folder of `output`, which is deleted when the block ends.
    """
    if Path(checkpoint.name).suffix != ".ckpt":
        yield ModelSource(checkpoint.name, checkpoint.revision)
        return
    converted = output.open_state("weights")
    shutil.rmtree(converted, ignore_errors=True)
    try:
        _convert_checkpoint(Path(checkpoint.name), converted)
        yield ModelSource(str(converted))
    finally:
        shutil.rmtree(converted, ignore_errors=True)


def _convert_checkpoint(path: Path, folder: Path) -> None:
    """Convert a `.ckpt` file of train.py to a folder for `from_pretrained`, with the run's config and tokenizer."""
    model_folder = path.parent.parent / "model"
    if not (model_folder / "config.json").is_file():
        raise UserError(f"{path}: its run has no model folder; expected one with the config and the tokenizer")
    try:
        state_dict = load_archive(path)["state_dict"]
        # Tied weights are one tensor under two names, which safetensors refuses; the clones share no memory.
        weights = {
            name.removeprefix("model."): tensor.clone().contiguous()
            for name, tensor in state_dict.items()
            if name.startswith("model.")
        }
    except Exception as error:  # a damaged file can raise any exception
        raise UserError(f"{path} is not a readable checkpoint: {shorten(error)}") from error
    ignore_weights = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "*.bin")
    shutil.copytree(model_folder, folder, ignore=ignore_weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def raise_on_failures(trajectory: Trajectory) -> None:
    """Raise `PartialFailure` if a checkpoint could not be measured."""
    if trajectory.failures:
        failures = "; ".join(f"{label} ({reason})" for label, reason in trajectory.failures.items())
        total = len(trajectory.failures) + len(trajectory.measurements)
        raise PartialFailure(f"{len(trajectory.failures)} of {total} not measured: {shorten(failures, 500)}")
