"""The LightningModule: what a step computes, and the metrics from all predictions at once."""

from collections.abc import Mapping, Sequence
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
from istar.measures.processes import sum_over_processes, world_size
from istar.regularizers import Watch
from istar.tasks.evaluation import Evaluation, Evaluator
from istar.training.nonfinite import StepGuard

Batch = dict[str, Tensor]
Outputs = dict[int, np.ndarray]
T = TypeVar("T")


class FineTuner(L.LightningModule):
    """An encoder with a head, trained on the task loss plus a weighted penalty on its hidden states.

    Args:
        model: sequence classification or question answering model.
        watch: the penalty, attached to the model; None trains on the task loss alone.
        optim: AdamW and its schedule.
        evaluators: scorer of each validation set, by the suffix of its metrics (`""` for the first).
        skip_nonfinite: leave out optimizer steps whose gradient is not finite instead of stopping.

    Attributes:
        guard: keeps gradients that are not finite from the weights.
        evaluations: metrics and predictions of the latest validation, by the same suffix.
        metrics: all metrics of the latest validation, e.g. `accuracy` and `accuracy_mismatched`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        watch: Watch | None,
        optim: OptimConfig,
        evaluators: Mapping[str, Evaluator],
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        # Not a submodule: DDP would overwrite the buffers of a penalty that is kept per process.
        self.watch = watch
        self.optim = optim
        self.evaluators = dict(evaluators)
        self.guard = StepGuard(skip_nonfinite)
        self._micro_batches: list[dict[str, Tensor]] = []
        self.evaluations: dict[str, Evaluation] = {}
        self.metrics: dict[str, float] = {}
        self._outputs: list[Outputs] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.model(**_model_inputs(batch)).loss
        logged = {"train/task_loss": loss.detach()}
        self.guard.record("task loss", loss)
        if self.watch is not None and self.watch.penalty.weight != 0:
            weighted = self.watch.loss()
            self.guard.record("penalty", weighted)
            loss = loss + weighted.to(loss.dtype)
            logged |= self._penalty_terms(weighted)
        self._micro_batches.append({"train/loss": loss.detach(), **logged})
        return loss

    def _penalty_terms(self, weighted: Tensor) -> dict[str, Tensor]:
        assert self.watch is not None
        penalty = self.watch.penalty
        terms = penalty.last
        if terms is None:
            return {}
        zeta = {} if terms.zeta is None else {"train/zeta": terms.zeta}
        score, points = {f"train/{penalty.measure}": terms.score}, {"train/points": terms.points}
        return {"train/penalty": weighted.detach(), **score, **points, **zeta}

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradient by its norm or its values; one that is not finite never reaches the weights."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            # Lightning leaves this to fused optimizers, which would unscale after the clipping.
            scaler.unscale_(optimizer)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        # A gradient scaler leaves out steps that overflow by itself: that is a part of its method.
        is_refused = self.guard.refuses(self.trainer.global_step + 1, None if scaler is not None else norm)
        if is_refused:
            # An optimizer does nothing to parameters without a gradient: no decay, no moments, no count of steps.
            optimizer.zero_grad(set_to_none=True)
        elif gradient_clip_val is not None and gradient_clip_algorithm == "value":
            clip_grad_value_(parameters, gradient_clip_val)
        elif gradient_clip_val is not None:
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)
        self._log_step({"train/grad_norm": norm, "train/lr": optimizer.param_groups[0]["lr"]})

    def _log_step(self, more: Mapping[str, Any]) -> None:
        """Log the means over the step's micro-batches and processes, every `log_every_n_steps`.

        Lightning would log after the hooks that write checkpoints, which must hold the logged step.
        """
        micro_batches, self._micro_batches = self._micro_batches, []
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            values = log_now(self.trainer, {**_means(micro_batches), **more})
            self.log_dict({name: torch.tensor(value) for name, value in values.items()}, logger=False)
            self.log("loss", torch.tensor(values["train/loss"]), prog_bar=True, logger=False)

    def on_train_start(self) -> None:
        self.guard.reset()
        self._micro_batches = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped_steps"] = self.guard.skipped

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.guard.skipped = checkpoint["skipped_steps"]

    def on_validation_epoch_start(self) -> None:
        self._outputs = [{} for _ in self.evaluators]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        # Only the first set's states are looked at.
        outputs = self.model(**_model_inputs(batch), output_hidden_states=dataloader_idx == 0)
        self._outputs[dataloader_idx] |= _logits_by_feature(batch, outputs)
        if outputs.loss is not None and dataloader_idx == 0:
            # A sum of shares: Lightning rounds the number of examples when it averages over processes.
            share = len(batch["feature_id"]) / len(self.evaluators[""].features)
            self.log("val/loss", share * outputs.loss, reduce_fx="sum", add_dataloader_idx=False, sync_dist=True)
        return {"hidden_states": outputs.hidden_states, "attention_mask": batch["attention_mask"]}

    def on_validation_epoch_end(self) -> None:
        for (suffix, evaluator), outputs in zip(self.evaluators.items(), self._outputs, strict=True):
            evaluation = evaluator(from_all_processes(outputs))
            self.evaluations[suffix] = evaluation
            for name, value in evaluation.metrics.items():
                self.metrics[f"{name}_{suffix}" if suffix else name] = value
        # Every process has scored all predictions: averaging equal values only keeps Lightning from warning.
        headline = self.evaluators[""].spec.headline
        for name, value in self.metrics.items():
            self.log(f"val/{name}", value, prog_bar=name == headline, sync_dist=True)
        self._outputs = []

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Outputs:
        return _logits_by_feature(batch, self.model(**_model_inputs(batch)))

    def hidden_states(self, batch: Batch) -> tuple[Tensor, ...]:
        """Embedding output and the output of every layer, `(batch, tokens, d)` each."""
        states: tuple[Tensor, ...] = self.model.base_model(**inputs_of(batch), output_hidden_states=True).hidden_states
        return states

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(
            parameter_groups(self.model, self.optim.weight_decay),
            lr=self.optim.lr,
            betas=(self.optim.betas[0], self.optim.betas[1]),
            eps=self.optim.eps,
            fused=True,
        )
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = round(self.optim.warmup * steps)
        name = "constant_with_warmup" if self.optim.schedule == "constant" else self.optim.schedule
        schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


_TARGETS = ("labels", "start_positions", "end_positions")


def inputs_of(batch: Batch) -> Batch:
    """What the model is given of a batch when it is asked for no loss."""
    return {key: value for key, value in _model_inputs(batch).items() if key not in _TARGETS}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters with weight decay, and those without: vectors, which are biases and gains of norms."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trainable if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def _means(micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each figure over the micro-batches of a step and over all processes."""
    names = list(micro_batches[0])
    sums = torch.stack([torch.stack([figures[name].double() for name in names]) for figures in micro_batches]).sum(0)
    means = sum_over_processes(sums) / (len(micro_batches) * world_size())
    return dict(zip(names, means.unbind(), strict=True))


def log_now(trainer: L.Trainer, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Send metrics to the loggers without delay; returns them as numbers."""
    values = {name: float(value) for name, value in metrics.items()}
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": trainer.current_epoch, **values}, step=trainer.global_step)
    return values


def merge_outputs(batches: Sequence[Outputs]) -> Outputs:
    """Logits by feature id, from any number of batches."""
    return {feature: logits for batch in batches for feature, logits in batch.items()}


def _model_inputs(batch: Batch) -> Batch:
    return {key: value for key, value in batch.items() if key != "feature_id"}


def _logits_by_feature(batch: Batch, outputs: Any) -> Outputs:
    if "logits" in outputs:
        logits = outputs.logits
    else:
        logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=1)
    arrays = logits.detach().float().cpu().numpy()
    return dict(zip(batch["feature_id"].tolist(), arrays, strict=True))


def from_all_processes(outputs: Outputs) -> Outputs:
    """Logits by feature id, gathered from all processes on each of them."""
    return merge_outputs(gathered(outputs))


def gathered(value: T) -> list[T]:
    """One value from each process, on each of them."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values
