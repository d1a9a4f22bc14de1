"""The fourth step of a run: trains the model, and says after an error how the run continues."""

import time
from pathlib import Path
from typing import Any

from istar.errors import NonFiniteError, UserError, shorten
from istar.finetune.runs.assemble import Job
from istar.finetune.runs.private_names import is_compile_error
from istar.finetune.training.checkpoints import read_checkpoint


def train(job: Job, checkpoint: Path | None) -> dict[str, Any]:
    """Train the model, load the weights of the best epoch, and return the durations of the phases in seconds."""
    started_at = time.perf_counter()
    if checkpoint is None:
        job.trainer.validate(job.module, datamodule=job.data_module, verbose=False)
    validated_at = time.perf_counter()
    job.trainer.fit(job.module, datamodule=job.data_module, ckpt_path=checkpoint, weights_only=True)
    fitted_at = time.perf_counter()
    if not job.history.epochs:
        raise UserError(
            "the training has ended before its first validation; lower trainer.check_val_every_n_epoch, or set it to "
            "null to validate every trainer.val_check_interval batches"
        )
    if job.checkpoints is not None:
        job.module.load_state_dict(read_checkpoint(job.checkpoints.best_weights_path())["state_dict"])
    covariance_seconds = job.covariance_callback.seconds if job.covariance_callback is not None else []
    return {
        "first_validation": validated_at - started_at,
        "fit": fitted_at - validated_at,
        "shrinkage": covariance_seconds,
    }


def add_advice(error: Exception, job: Job) -> Exception:
    """Return a new error that also says how to continue the run, or the same error if there is no such advice."""
    last_checkpoint = None if job.checkpoints is None else job.checkpoints.newest_path()
    checkpoint_note = f"the last good state is {last_checkpoint}" if last_checkpoint else "there is no checkpoint yet"
    effect_of_restart = "resumes from there" if last_checkpoint else "starts anew"
    if isinstance(error, NonFiniteError):
        advice = "lower optim.lr or reg.lambda, or skip such steps with trainer.nonfinite=skip"
        return NonFiniteError(f"{error}; {checkpoint_note}; {advice}")
    if isinstance(error, OSError):
        return UserError(
            f"{shorten(error)}; {checkpoint_note}; mend it and send the same command, which {effect_of_restart}"
        )
    if job.config.model.compile and is_compile_error(error):
        return UserError(f"model.compile=true: the model cannot be compiled here: {shorten(error)}")
    return error
