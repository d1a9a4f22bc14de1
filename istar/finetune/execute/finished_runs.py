"""Reads the record of a finished run, and checks that the run has all outputs that a config requests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from istar.errors import UserError, shorten
from istar.files.parsing import is_missing
from istar.finetune.config import Config, TrainerConfig
from istar.runs.record import GEOMETRY, KEPT_MODELS, RESULT, RunRecord, read_result


def read_finished_run(folder: Path, config: Config) -> RunRecord | None:
    """Read the record of the run in a folder; None if it is not finished, or `run.overwrite` runs it again.

    Raises a `UserError` if the record is damaged, or the run lacks a requested output, such as the submission file,
    that its name does not depend on.
    """
    if config.run.overwrite:
        return None
    try:
        if is_missing(folder / RESULT):
            return None
    except OSError as error:
        raise UserError(f"run.root={config.run.root} cannot be used: {shorten(error)}") from error
    try:
        record = read_result(folder)
    except UserError as error:
        raise UserError(f"{error}; delete {folder} to run it again") from error
    if record.status != "finished":
        return None
    if shortcoming := _describe_shortcoming(folder, record, config):
        advice = "run.overwrite=true runs it again (in a sweep, all runs)"
        raise UserError(f"{folder} is finished but {shortcoming}; {advice}")
    return record


def _describe_shortcoming(folder: Path, record: RunRecord, config: Config) -> str:
    """Describe the first requested output that a finished run lacks, and the setting to accept this; empty if none."""
    if record.is_smoke and not config.is_smoke:
        return "is a smoke run, which is never counted"
    outputs = {
        "submission/": ("task.submission", config.task.submission),
        "model/": ("run.save_model", config.run.save_model),
        GEOMETRY: ("run.geometry", config.run.geometry),
    }
    for file_name, (key, is_requested) in outputs.items():
        if is_requested and not (folder / file_name).exists():
            return f"was run without {file_name}; {key}=false accepts it"
    previous_settings = record.config.get("trainer", {})
    is_monitored = previous_settings.get("monitor_isotropy") or previous_settings.get("stop_at_inter_sim") is not None
    if config.trainer.monitor_isotropy and not is_monitored:
        return "was run without trainer.monitor_isotropy, whose measures it did not log"
    if config.trainer.nonfinite == "stop" and record.skipped_steps:
        return f"has skipped {record.skipped_steps} steps; trainer.nonfinite=skip accepts it"
    missing_measurements = _describe_missing_measurements(previous_settings, config.trainer)
    return missing_measurements or _describe_missing_models(folder, record, config)


def _describe_missing_models(folder: Path, record: RunRecord, config: Config) -> str:
    """Describe the first model of the schedule `trainer.keep_models` that a finished run lacks; empty if none."""
    if config.trainer.keep_models is None:
        return ""
    # Imported here because the import takes seconds.
    from istar.finetune.training.kept_models import find_missing_steps, model_folder_of_step

    models_folder, last_step = folder / KEPT_MODELS, record.epochs[-1]["step"]
    missing_steps = find_missing_steps(models_folder, config.trainer.keep_models, last_step)
    if not missing_steps:
        return ""
    missing_model = model_folder_of_step(models_folder, missing_steps[0]).relative_to(folder)
    schedule = config.trainer.keep_models
    return f"was run without {missing_model}/ of trainer.keep_models={schedule}; trainer.keep_models=null accepts it"


def _describe_missing_measurements(previous_settings: Mapping[str, Any], settings: TrainerConfig) -> str:
    """Describe the measurements that `settings` request and a run with `previous_settings` lacks; empty if none."""
    interval, previous_interval = settings.measure_every_n_steps, previous_settings.get("measure_every_n_steps")
    num_examples = previous_settings.get("measure_examples")
    if interval is None:
        return ""
    # The finished run has measured every requested step if the interval is a multiple of the previous one.
    if previous_interval and interval % previous_interval == 0 and num_examples == settings.measure_examples:
        return ""
    return (
        f"was run with trainer.measure_every_n_steps={previous_interval or 'null'} "
        f"trainer.measure_examples={num_examples}, which accept it"
    )
