"""The callback by which penalties take part in transformers' `Trainer` and in its subclasses of other libraries."""

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import TrainerCallback, TrainingArguments

from istar.errors import UserError
from istar.files.writing import atomic_write
from istar.hidden_states import AttachedPenalty
from istar.integrations.loaders import iterate_in_new_order

STATE_FILE = "istar_penalty.safetensors"
"""Name of the file with the penalty's state in the folder of a checkpoint."""


class PenaltyCallback(TrainerCallback):
    """Attaches the penalty of a trainer or a loss, sets its weight, computes its Sigma_S and restores its state.

    Terms are logged by the trainer itself: in a callback's `on_log`, they would miss the trainer's log history and the
    reporters that are called earlier.

    Args:
        owner: has a method `attach_penalty`, and the attribute `resumed_checkpoint`, a folder or None. A trainer also
            has a method `check_loss`.
    """

    state_file = STATE_FILE

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.attached: Any = None
        # Whether training resumes within the next epoch, rather than at its beginning.
        self._resumes_epoch = False

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the penalty to the model, and load its state if training resumes from a checkpoint."""
        self.attached = self.owner.attach_penalty()
        if self.owner.resumed_checkpoint is not None:
            path = self.owner.resumed_checkpoint / self.state_file
            if path.exists():
                self.attached.load_state_dict(load_file(path))
            else:
                warnings.warn(f"{path} does not exist: the checkpoint has no penalty", UserWarning, stacklevel=2)
        self.attached.penalty.to(args.device)
        self._resumes_epoch = state.global_step > 0 and not float(state.epoch).is_integer()

    def on_epoch_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Compute Sigma_S if it is due, unless training resumes within an epoch."""
        self._refresh_if_due(args, state, not self._resumes_epoch, kwargs["train_dataloader"])
        self._resumes_epoch = False

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the penalty's weight, and compute Sigma_S if it is due before this optimizer step."""
        self.attached.set_weight(state.global_step, state.max_steps)
        self._refresh_if_due(args, state, False, kwargs["train_dataloader"])

    def on_pre_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the penalty is part of the loss."""
        self.owner.check_loss()

    def _refresh_if_due(self, args: TrainingArguments, state: Any, is_epoch_start: bool, loader: Any) -> None:
        # The seed depends on the step, so that resuming gives the same batches as without the interruption.
        batches = iterate_in_new_order(loader, args.seed + state.global_step)
        dtype = torch.bfloat16 if args.bf16 else torch.float16
        with torch.autocast(args.device.type, dtype, enabled=args.bf16 or args.fp16):
            self.attached.refresh_if_due(state.global_step, is_epoch_start, batches)


def save_penalty(attached: AttachedPenalty, path: Path, args: TrainingArguments) -> None:
    """Save the state of an attached penalty in a checkpoint; all processes call this together."""
    state = attached.state_dict()
    if args.should_save:
        with atomic_write(path) as file:
            file.write(save(state))


def refuse_data_parallel(args: TrainingArguments) -> None:
    """Raise a `UserError` if `Trainer` would use `nn.DataParallel`, whose replicas call hooks at the same time."""
    if args.n_gpu > 1:
        raise UserError(
            "several GPUs are visible to one process, which would use nn.DataParallel; start one process per GPU "
            "with torchrun or accelerate launch, or make one GPU visible with CUDA_VISIBLE_DEVICES"
        )
