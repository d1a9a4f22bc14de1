"""The fourth step of a run: claims its folder, trains the model, and says after an error how the run continues."""

import logging
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.trainer.states import TrainerFn

from istar.errors import NonFiniteError, UserError, shorten
from istar.files.outputs import run_output
from istar.files.writing import remove_temporary_files
from istar.finetune.config.schema import to_dict
from istar.finetune.execute.assemble import CHECKPOINTS_FOLDER, Job
from istar.finetune.execute.identify import read_finished_run
from istar.finetune.training.checkpoints import find_resumable_checkpoint, read_checkpoint
from istar.finetune.training.sharded_training import ShardingStrategy, scatter_weights
from istar.hidden_states.sharding import is_sharded_module
from istar.runs.key import RunKey
from istar.runs.record import CONFIG, KEPT_MODELS, KEY, RunRecord, format_key, read_start_time, start_comment

_MODEL_FOLDERS = ("model", KEPT_MODELS)

log = logging.getLogger(__name__)
_ISOTROPIC = 0.2
"""Models with a higher IsoScore of layers 1 to L before training collapsed in docs/study.md, others did not."""
_HARMFUL_LAMBDA = -1.0
"""The weight with which they collapsed."""


def claim_folder(job: Job) -> tuple[RunRecord | None, Path | None]:
    """Write `config.yaml` into the run folder, and find the checkpoint to resume from.

    Returns:
        The record and None if another process has finished the run; then nothing is written. Otherwise None and the
        checkpoint, which is None if none exists.

    Raises a `UserError` if the folder cannot be written, or a model that is sharded now was not when it was saved.
    """
    folder, config = job.identity.folder, job.identity.config
    try:
        if config.run.overwrite:
            _rename_existing_folder(folder)
        # Another process may have finished the run while this one was loading.
        elif (finished_record := read_finished_run(folder, config)) is not None:
            return finished_record, None
        output = run_output(folder)
        output.check(_MODEL_FOLDERS if output.has_manifest else output.list_names())
        remove_temporary_files(folder)
        checkpoint = None
        if job.tracks.checkpoints is not None:
            checkpoint = find_resumable_checkpoint(
                folder / CHECKPOINTS_FOLDER, folder.name, is_sharded=isinstance(job.trainer.strategy, ShardingStrategy)
            )
        if checkpoint is not None:
            log.warning("%s was interrupted; it resumes from %s", folder, checkpoint.name)
        started_at = None if checkpoint is None else read_start_time(folder)
        first_line = start_comment(started_at or datetime.now(UTC).isoformat(timespec="seconds"))
        config_text = first_line + yaml.safe_dump(to_dict(config), sort_keys=False)
        # A folder with a config is a run, so the key is there before.
        output.write({KEY: format_key(job.identity.key).encode(), CONFIG: config_text.encode()})
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {shorten(error)}") from error
    return None, checkpoint


def _rename_existing_folder(folder: Path) -> None:
    """Rename a run folder that is not empty to `<name>.old-1`, or to the first such name that is free."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    suffix = 1
    while (old_folder := folder.with_name(f"{folder.name}.old-{suffix}")).exists():
        suffix += 1
    folder.rename(old_folder)
    log.warning("%s held another run of the same config; it is kept as %s", folder, old_folder)


def train(job: Job, checkpoint: Path | None) -> dict[str, Any]:
    """Train the model, load the weights of the best epoch, and return the durations of the phases in seconds."""
    started_at = time.perf_counter()
    if checkpoint is None:
        job.trainer.validate(job.module, datamodule=job.data_module, verbose=False)
        if advice := advise_on_lambda(job.identity.key, job.tracks.history.before_training["isotropy"]["union"]):
            log.warning(advice)
    validated_at = time.perf_counter()
    job.trainer.fit(job.module, datamodule=job.data_module, ckpt_path=checkpoint, weights_only=True)
    fitted_at = time.perf_counter()
    if not job.tracks.history.epochs:
        raise UserError("the training has ended before its first step; raise trainer.max_time")
    if job.tracks.checkpoints is not None:
        weights = read_checkpoint(job.tracks.checkpoints.best_weights_path())["state_dict"]
        if is_sharded_module(job.module.model):
            scatter_weights(job.module, weights)
        else:
            job.module.load_state_dict(weights)
    covariance_seconds = job.tracks.covariance.seconds if job.tracks.covariance is not None else []
    return {
        "first_validation": validated_at - started_at,
        "fit": fitted_at - validated_at,
        "shrinkage": covariance_seconds,
    }


def advise_on_lambda(key: RunKey, isoscore: float) -> str:
    """Return a line if lambda is known to harm a model with this IsoScore of layers 1 to L before training, or ""."""
    reg = key.settings["reg"]
    if key.method != "istar" or reg.get("target_score") is not None:
        return ""
    if reg["lambda"] > _HARMFUL_LAMBDA or not isoscore > _ISOTROPIC:
        return ""
    return (
        f"IsoScore of layers 1 to L is {isoscore:.3f} before training. Above {_ISOTROPIC}, "
        f"reg.lambda={reg['lambda']:g} has made models predict one class only (docs/study.md); begin with "
        "reg.lambda=-0.1, or with reg.lambda=10 reg.target_score=keep"
    )


def add_advice(error: Exception, job: Job) -> Exception:
    """Return a new error that also says how to continue the run, or the same error without such advice."""
    last_checkpoint = None if job.tracks.checkpoints is None else job.tracks.checkpoints.newest_path()
    checkpoint_note = f"the last good state is {last_checkpoint}" if last_checkpoint else "there is no checkpoint yet"
    effect_of_restart = "resumes from there" if last_checkpoint else "starts again"
    if isinstance(error, NonFiniteError):
        advice = "lower optim.lr or reg.lambda"
        if job.trainer.state.fn == TrainerFn.VALIDATING:
            advice = "the model is so before training; try trainer.precision=32-true and model.load_in=float32"
        elif job.identity.config.trainer.nonfinite != "skip":
            advice += ", or skip such steps with trainer.nonfinite=skip"
        return NonFiniteError(f"{error}; {checkpoint_note}; {advice}")
    if isinstance(error, OSError):
        return UserError(
            f"{shorten(error)}; {checkpoint_note}; mend it and send the same command, which {effect_of_restart}"
        )
    if job.identity.config.model.compile:
        error.add_note("model.compile=false trains without compiling the model")
    return error
