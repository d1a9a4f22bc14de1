"""The LightningModule for fine-tuning with a penalty on the hidden states."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel, get_scheduler

from istar.config import OptimConfig
from istar.errors import UserError
from istar.measures.processes import sum_over_processes, world_size
from istar.regularizers import EmbeddingWatch, IStar, Watch
from istar.tasks.evaluation import Evaluation
from istar.training.nonfinite import StepGuard

Batch = dict[str, Tensor]
Outputs = dict[int, np.ndarray]
T = TypeVar("T")


class FineTuner(L.LightningModule):
    """Train an encoder with a task head on the task loss plus a weighted penalty on its hidden states.

    Metrics are computed from all predictions of a validation set at once, not averaged over batches.

    Args:
        model: sequence classification or question answering model.
        watch: penalty that is attached to the model; None trains on the task loss alone.
        optim: settings of AdamW and of the learning rate schedule.
        evaluators: evaluator of each validation set, by the suffix of its metrics (`""` for the first).
        skip_nonfinite: skip optimizer steps whose gradient is not finite instead of stopping the training.
        max_steps: number of optimizer steps of a training that stops within its epochs, for the schedules.
        weight_schedule: function of the completed optimizer steps and their total number that returns lambda; None
            keeps the penalty's weight.

    Attributes:
        evaluations: metrics and predictions of the latest validation, by suffix of the validation set.
        metrics: all metrics of the latest validation, e.g. `accuracy` and `accuracy_mismatched`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        watch: Watch | EmbeddingWatch | None,
        optim: OptimConfig,
        evaluators: Mapping[str, Any],
        skip_nonfinite: bool = False,
        max_steps: int | None = None,
        weight_schedule: Callable[[int, int], float] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        # The penalty is not a submodule: DDP would overwrite the buffers that differ between processes without sync.
        self.watch = watch
        self.optim = optim
        self.max_steps = max_steps
        self.weight_schedule = weight_schedule
        self.evaluators = dict(evaluators)
        self.guard = StepGuard(skip_nonfinite)
        self._total_steps = 0
        self._micro_batches: list[dict[str, Tensor]] = []
        self.evaluations: dict[str, Evaluation] = {}
        self.metrics: dict[str, float] = {}
        self._outputs: list[Outputs] = []

    def task_loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch of the task, a scalar."""
        loss: Tensor = self.model(**model_inputs(batch)).loss
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.task_loss(batch)
        logged = {"train/task_loss": loss.detach()}
        self.guard.record("task loss", loss)
        if self.watch is not None and self.weight_schedule is not None:
            weight = self.watch.penalty.weight
            logged["train/lambda"] = torch.tensor(weight, dtype=torch.float64, device=loss.device)
        if self.watch is not None and self.watch.penalty.weight != 0:
            penalty = self.watch.loss()
            self.guard.record("penalty", penalty)
            loss = loss + penalty.to(loss.dtype)
            terms = self.watch.penalty.last
            if terms is not None:
                named = terms.named(self.watch.penalty.measure)
                logged |= {"train/penalty": penalty.detach(), "train/points": terms.points}
                logged |= {f"train/{name}": term for name, term in named.items()}
        self._micro_batches.append({"train/loss": loss.detach(), **logged})
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradient by norm or by value, or drop it if it is not finite and such steps are skipped."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            # With fused optimizers Lightning does not unscale gradients before clipping, so it is done here.
            scaler.unscale_(optimizer)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        # A gradient scaler skips steps that overflow by design, so its norm is not checked.
        if self.guard.must_skip(self.trainer.global_step + 1, None if scaler is not None else norm):
            # Without a gradient, AdamW leaves a parameter, its weight decay, its moments and its step count alone.
            optimizer.zero_grad(set_to_none=True)
        elif gradient_clip_val is not None and gradient_clip_algorithm == "value":
            clip_grad_value_(parameters, gradient_clip_val)
        elif gradient_clip_val is not None:
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)
        self._log_step({"train/grad_norm": norm, "train/lr": optimizer.param_groups[0]["lr"]})

    def _log_step(self, step_metrics: Mapping[str, Any]) -> None:
        """Log the step's metrics and the means of those of its micro-batches, every `log_every_n_steps`.

        The metrics are sent to the loggers at once. Lightning would send them after the hooks that write checkpoints,
        and a checkpoint must contain the metrics of its step.
        """
        micro_batches, self._micro_batches = self._micro_batches, []
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            values = log_now(self.trainer, {**_means(micro_batches), **step_metrics})
            self.log_dict({name: torch.tensor(value) for name, value in values.items()}, logger=False)
            self.log("loss", torch.tensor(values["train/loss"]), prog_bar=True, logger=False)

    def on_train_start(self) -> None:
        self.guard.reset()
        self._micro_batches = []

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self.watch is not None and self.weight_schedule is not None:
            self.watch.penalty.weight = self.weight_schedule(self.trainer.global_step, self._total_steps)

    @property
    def _saves_penalty(self) -> bool:
        """Whether the penalty has a state that `ShrinkageCovariance` does not save."""
        if self.watch is None or not self.watch.penalty.state_dict():
            return False
        penalty = self.watch.penalty
        return not (isinstance(penalty, IStar) and penalty.needs_shrinkage_covariance)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped_steps"] = self.guard.skipped
        if isinstance(self.watch, EmbeddingWatch):
            checkpoint["embedding_rows"] = self.watch.state_dict()
        if self._saves_penalty:
            assert self.watch is not None
            penalty = self.watch.penalty
            state = {name: value.cpu() for name, value in penalty.state_dict().items()}
            checkpoint["penalties"] = [state] if penalty.sync else all_gather_object(state)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if isinstance(self.watch, EmbeddingWatch):
            self.watch.load_state_dict(checkpoint["embedding_rows"])
        if self._saves_penalty:
            assert self.watch is not None
            states = checkpoint["penalties"]
            self.watch.penalty.load_state_dict(states[self.global_rank if len(states) > 1 else 0])
        self.guard.skipped = checkpoint["skipped_steps"]
        if self.guard.skipped and not self.guard.skip:
            raise UserError(
                f"the interrupted run has skipped {self.guard.skipped} steps; trainer.nonfinite=skip goes on with it, "
                "run.overwrite=true starts again"
            )

    def on_validation_epoch_start(self) -> None:
        self._outputs = [{} for _ in self.evaluators]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        # Callbacks measure the hidden states of the first validation set only.
        outputs = self.model(**model_inputs(batch), output_hidden_states=dataloader_idx == 0)
        self._outputs[dataloader_idx] |= logits_by_feature(batch, outputs)
        if outputs.loss is not None and dataloader_idx == 0:
            # The mean is logged as a weighted sum: Lightning's own mean over processes rounds the number of examples.
            weight = len(batch["feature_id"]) / len(self.evaluators[""].features)
            self.log("val/loss", weight * outputs.loss, reduce_fx="sum", add_dataloader_idx=False, sync_dist=True)
        return {"hidden_states": outputs.hidden_states, "attention_mask": token_mask(batch)}

    def on_validation_epoch_end(self) -> None:
        for (suffix, evaluator), outputs in zip(self.evaluators.items(), self._outputs, strict=True):
            evaluation = evaluator(merge_outputs(all_gather_object(outputs)))
            self.evaluations[suffix] = evaluation
            for name, value in evaluation.metrics.items():
                self.metrics[f"{name}_{suffix}" if suffix else name] = value
        # All processes compute the same values; sync_dist avoids a warning of Lightning and does not change them.
        headline = self.evaluators[""].spec.headline
        for name, value in self.metrics.items():
            self.log(f"val/{name}", value, prog_bar=name == headline, sync_dist=True)
        self._outputs = []

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Outputs:
        return logits_by_feature(batch, self.model(**model_inputs(batch)))

    def hidden_states(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the embedding output and the output of every layer, each of shape `(batch, tokens, d)`."""
        outputs = self.model.base_model(**inputs_of(batch), output_hidden_states=True)
        return tuple(outputs.hidden_states)

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(
            parameter_groups(self.model, self.optim.weight_decay),
            lr=self.optim.lr,
            betas=(self.optim.betas[0], self.optim.betas[1]),
            eps=self.optim.eps,
            fused=True,
        )
        steps = min(int(self.trainer.estimated_stepping_batches), self.max_steps or sys.maxsize)
        self._total_steps = steps
        warmup = warmup_steps(self.optim.warmup, steps)
        name = "constant_with_warmup" if self.optim.schedule == "constant" else self.optim.schedule
        schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warmup_steps(warmup: float, steps: int) -> int:
    """Return the number of warmup steps of a training; `warmup` is a fraction in [0, 1] or a number of steps above 1.

    Raises:
        UserError: if the training has fewer steps.
    """
    if warmup <= 1:
        return round(warmup * steps)
    if warmup > steps:
        raise UserError(f"optim.warmup={warmup:g}: the training has only {steps} optimizer steps")
    return int(warmup)


def inputs_of(batch: Batch) -> Batch:
    """Return the model inputs of a batch without its labels."""
    targets = ("labels", "start_positions", "end_positions")
    return {key: value for key, value in model_inputs(batch).items() if key not in targets}


def token_mask(batch: Batch) -> Tensor:
    """Return which tokens of a batch are not padding, `(batch, tokens)`.

    A mask `(batch, 1, tokens, tokens)`, with which packed documents do not attend to each other, has 1 on its diagonal
    for these tokens. Without a mask, all tokens count.
    """
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones_like(batch["input_ids"])
    return mask.diagonal(dim1=-2, dim2=-1)[:, 0] if mask.dim() == 4 else mask


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into a group with weight decay and a group without, for biases and gains."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trainable if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def _means(micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each metric over the micro-batches of a step and over all processes."""
    names = list(micro_batches[0])
    sums = torch.stack([torch.stack([metrics[name].double() for name in names]) for metrics in micro_batches]).sum(0)
    means = sum_over_processes(sums) / (len(micro_batches) * world_size())
    return dict(zip(names, means.unbind(), strict=True))


def log_now(trainer: L.Trainer, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Send metrics to the loggers immediately and return them as floats."""
    values = {name: float(value) for name, value in metrics.items()}
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": trainer.current_epoch, **values}, step=trainer.global_step)
    return values


def merge_outputs(batches: Sequence[Outputs]) -> Outputs:
    """Merge the logits of several batches or processes into one mapping from feature id to logits."""
    return {feature: logits for batch in batches for feature, logits in batch.items()}


def model_inputs(batch: Batch) -> Batch:
    """Return the arguments of the model's `forward` in a batch, with its labels."""
    return {key: value for key, value in batch.items() if key != "feature_id"}


def logits_by_feature(batch: Batch, outputs: Any) -> Outputs:
    """Return the logits of a batch by feature id; for spans, the start and end logits stacked to `(2, tokens)`."""
    if "logits" in outputs:
        logits = outputs.logits
    else:
        logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=1)
    arrays = logits.detach().float().cpu().numpy()
    return dict(zip(batch["feature_id"].tolist(), arrays, strict=True))


def all_gather_object(value: T) -> list[T]:
    """Return the values of all processes, in the order of their ranks, on every process."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values
