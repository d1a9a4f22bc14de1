"""Penalties and a monitor for transformers' `Trainer` and its subclasses, such as trl's `SFTTrainer`."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from istar.errors import UserError
from istar.hidden_states import AttachedPenalty, PenaltySettings, attach_with_settings
from istar.hidden_states.attach import DEFAULT_SETTINGS
from istar.hidden_states.attached_penalty import check_penalty
from istar.hidden_states.model_modes import eval_mode, preserve_rng_states
from istar.integrations.monitor_callback import MonitorCallback as MonitorCallback
from istar.integrations.trainer_callback import STATE_FILE, PenaltyCallback, refuse_data_parallel, save_penalty
from istar.regularizers import Penalty

if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object


class PenaltyMixin(_TrainerBase):
    """Adds a penalty on hidden states to the loss of a `Trainer`: `class MyTrainer(PenaltyMixin, Trainer)`.

    The mixin comes first among the base classes. It works with any trainer that calls the model once with gradients in
    `compute_loss`. A `compute_loss` of the class itself must call `super().compute_loss()`, or be moved to a base class
    after the mixin. Hooks read the hidden states while `train` runs. Therefore trl's `SFTTrainer` is supported,
    although its fused head returns no hidden states. For that trainer, declare that it normalizes its loss:

        class PenaltySFTTrainer(PenaltyMixin, SFTTrainer):
            task_loss_is_normalized = True

    **Gradient accumulation.** The gradient of an optimizer step is the mean, over the step's micro-batches, of the
    gradients of task loss and weighted penalty. With several processes, each penalty is computed from the union of
    their micro-batches. There is an exception: for models that accept `num_items_in_batch` but do not use it (currently
    including sequence classification and question answering), `Trainer` sums the task loss over the micro-batches
    instead of averaging it, and over the processes if `average_tokens_across_devices` is set. The penalty is then
    summed in the same way, so that lambda keeps its meaning relative to the task loss.

    **Shrinkage covariance.** Sigma_S is computed from batches of the training data, in eval mode and in the precision
    of training, without changing the random numbers of training. Checkpoints contain the penalty's state, and
    training that resumes from a checkpoint loads it. If a checkpoint lacks this state, training warns and goes on with
    the current state.

    **Logs.** The logged `loss` includes the penalty. The trainer also logs `istar.AttachedPenalty.terms`, as means over
    the micro-batches since the last log, and `progress`. Micro-batches without a score add 0 to the loss, and are not
    part of the score's mean. Evaluation losses do not include the penalty.

    `nn.DataParallel` is not supported, nor are losses of several forward passes with gradients: only the last pass
    would count. DeepSpeed and tensor, context and sequence parallelism are not tested.

    Args:
        penalty: `istar.IStar`, `istar.CosReg` or any other `Penalty`.
        settings: what is penalized, lambda's schedule, and when Sigma_S is computed; see `istar.PenaltySettings`. The
            seed of sampled rows is the trainer's.

    All other arguments are passed to the trainer.

    Attributes:
        task_loss_is_normalized: whether `compute_loss` divides the task loss by `num_items_in_batch`, the number of
            items in all micro-batches of a step. With None, the default, the mixin detects this when necessary, by
            computing the task loss of one micro-batch two or three times in eval mode. Set the attribute for trainers
            with side effects in `compute_loss`, such as `SFTTrainer`, which collects metrics in it.

    Raises:
        UserError: if `Trainer` would use `nn.DataParallel`, and for another `penalty` or `settings` than described. In
            the first step, if the loss does not have the penalty.
    """

    task_loss_is_normalized: bool | None = None

    def __init__(
        self,
        *args: Any,
        penalty: Penalty,
        settings: PenaltySettings = DEFAULT_SETTINGS,
        **kwargs: Any,
    ) -> None:
        check_penalty(penalty, settings)
        super().__init__(*args, **kwargs)
        refuse_data_parallel(self.args)
        self.penalty = penalty
        self.settings = replace(settings, seed=self.args.seed)
        # None while the penalty is attached to no model.
        self._attached: AttachedPenalty | None = None
        self.resumed_checkpoint: Path | None = None
        self._has_trained = False
        # Whether `compute_loss` has added the penalty since the last optimizer step.
        self._is_penalized = False
        # Factor of the penalty that compensates for averaging over processes, if the task loss is not normalized.
        self._unnormalized_loss_factor = 1
        # Sums of the penalty's terms since the last log, and the number of penalties with each term.
        self._term_sums: dict[str, Tensor] = {}
        self.add_callback(PenaltyCallback(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Call `Trainer.train`, and remove the hooks from the model at the end.

        A second training, such as the next trial of `hyperparameter_search` or the next attempt of
        `auto_find_batch_size`, begins like the first one. Only a Sigma_S that is never refreshed is kept.
        """
        folder = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        self.resumed_checkpoint = Path(folder) if folder else None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.detach_penalty()

    def attach_penalty(self) -> AttachedPenalty:
        """Attach the penalty to the model. Called when training starts."""
        self.detach_penalty()
        if self._has_trained:
            self.penalty.reset(keep_shrinkage_covariance=not self.settings.refresh)
        self._has_trained = True
        assert isinstance(self.model, nn.Module)
        self._attached = attach_with_settings(self.model, self.penalty, self.settings)
        return self._attached

    def detach_penalty(self) -> None:
        """Remove the hooks from the model, if there are any. Called when training ends or fails."""
        if self._attached is not None:
            self._attached.remove()
        self._attached, self._term_sums, self._is_penalized = None, {}, False

    def check_loss(self) -> None:
        """Check that the penalty is part of the loss. Called before each optimizer step.

        Raises:
            UserError: if the trainer has not called `compute_loss` of this class since the last step, although the
                penalty's weight is not 0.
        """
        if self.penalty.weight != 0 and not self._is_penalized:
            name = type(self).__name__
            raise UserError(
                f"{name} trains without the penalty, because it does not call compute_loss of PenaltyMixin: call "
                "super().compute_loss() in your own compute_loss, or move yours to another class, as in "
                f"class {name}(PenaltyMixin, WeightedTrainer)"
            )
        self._is_penalized = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the trainer's loss and, in training, add the weighted penalty, scaled as described in the class."""
        kwargs.update(return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if self._attached is None or not torch.is_grad_enabled():
            return super().compute_loss(model, inputs, **kwargs)
        scale = self._compute_penalty_scale(model, inputs, num_items_in_batch)
        result: Any = super().compute_loss(model, inputs, **kwargs)
        loss, outputs = result if return_outputs else (result, None)
        task_loss, loss = loss / scale, loss + scale * self._attached.loss().to(loss.device)
        self._is_penalized = True
        self._accumulate_terms(self._attached.terms(task_loss))
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Call `Trainer.log`, with the means of the penalty's terms added to logs of the training loss."""
        if "loss" in logs and self._attached is not None:
            logs.update(self._pop_mean_terms())
            logs.update({name: float(value) for name, value in self._attached.progress().items()})
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Call `Trainer.save_model` and, during training, save the penalty's state in the same folder."""
        super().save_model(output_dir, *args, **kwargs)
        if self._attached is not None:
            save_penalty(self._attached, Path(str(output_dir or self.args.output_dir), STATE_FILE), self.args)

    def _compute_penalty_scale(self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None) -> float:
        """The conditions are those under which `Trainer.training_step` divides by the number of micro-batches."""
        num_micro_batches = self.current_gradient_accumulation_steps
        # Trainer has this attribute since transformers 5.19; older versions ignore a model's setting.
        is_declared_scaled = self.loss_is_scaled_for_ga if hasattr(Trainer, "loss_is_scaled_for_ga") else None
        if is_declared_scaled is not None:
            return 1 / num_micro_batches if is_declared_scaled else 1.0
        if num_items is None or not (self.model_accepts_loss_kwargs or self.compute_loss_func is not None):
            # Trainer treats penalty and task loss alike: it averages their sum over the micro-batches, or adds it up.
            return 1.0
        if num_micro_batches == 1 and self.args.world_size == 1:
            return 1.0
        if self.task_loss_is_normalized is None:
            self._detect_normalization(model, inputs, num_items)
        if self.task_loss_is_normalized is False:
            return float(self._unnormalized_loss_factor)
        return 1 / num_micro_batches

    def _detect_normalization(self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int) -> None:
        """Detect whether `compute_loss` divides the task loss by the number of items in the batch.

        The task loss is computed for the true number of items and for twice that number. If it does not change, the
        ratio of the task losses with and without a number gives the factor that compensates for averaging over
        processes. If the task loss is 0 or not finite, the next micro-batch is tried.
        """

        def compute_total_loss(num_items_in_batch: Tensor | int | None) -> float:
            loss: Any = super(PenaltyMixin, self).compute_loss(
                model, dict(inputs), num_items_in_batch=num_items_in_batch
            )
            return float(self.accelerator.reduce(loss.detach().to(self.args.device, torch.float32), "sum"))

        with preserve_rng_states(self.args.device), eval_mode(model), torch.no_grad():
            loss, loss_of_double = compute_total_loss(num_items), compute_total_loss(2 * num_items)
            if loss == 0 or not (math.isfinite(loss) and math.isfinite(loss_of_double)):
                return
            # The ratio is about 1/2 for a normalized loss, and about 1 otherwise.
            self.task_loss_is_normalized = loss_of_double / loss < 0.75
            if not self.task_loss_is_normalized:
                self._unnormalized_loss_factor = max(round(loss / compute_total_loss(None)), 1)

    def _accumulate_terms(self, terms: dict[str, Tensor]) -> None:
        """Add the terms of a micro-batch to the sums for the next log, without making the host wait for a GPU."""
        last = self.penalty.last
        is_undefined = False if last is None else last.is_undefined
        for name, term in terms.items():
            # The means leave out the NaN terms of points without a score.
            has_term = ~(term.isnan() & is_undefined)
            sum_and_count = torch.stack([torch.where(has_term, term, 0), has_term]).float()
            self._term_sums[name] = self._term_sums.get(name, 0) + sum_and_count

    def _pop_mean_terms(self) -> dict[str, float]:
        if not self._term_sums:
            return {}
        names = list(self._term_sums)
        sums_and_counts = torch.stack([self._term_sums[name].to(self.args.device) for name in names])
        sums_and_counts = self.accelerator.reduce(sums_and_counts, "sum")
        self._term_sums = {}
        means = sums_and_counts[:, 0] / sums_and_counts[:, 1]
        return dict(zip(names, means.tolist(), strict=True))


class PenaltyTrainer(PenaltyMixin, Trainer):
    """transformers' `Trainer` with a penalty on hidden states; see `PenaltyMixin` for the arguments."""
