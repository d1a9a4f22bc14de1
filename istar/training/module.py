"""The LightningModule: what a step computes, and the metrics from all predictions at once."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel, get_scheduler

from istar.config import OptimConfig
from istar.errors import NonFiniteError
from istar.regularizers import Penalty, Regularizer
from istar.regularizers.base import world_size
from istar.tasks.evaluation import Evaluation, Evaluator

Batch = dict[str, Tensor]
Outputs = dict[int, np.ndarray]
T = TypeVar("T")

log = logging.getLogger(__name__)


class FineTuner(L.LightningModule):
    """An encoder with a head, trained on `task_loss + weight * penalty`.

    Args:
        model: sequence classification or question answering model.
        regularizer: penalty on hidden states; None trains on the task loss alone.
        optim: AdamW and its schedule.
        evaluators: scorer of each validation set, by the suffix of its metrics (`""` for the first).
        skip_nonfinite: leave out optimizer steps whose gradient is not finite instead of stopping.

    Attributes:
        skipped_steps: how many were left out.
        evaluations: metrics and predictions of the latest validation, by the same suffix.
        metrics: all metrics of the latest validation, e.g. `accuracy` and `accuracy_mismatched`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        regularizer: Regularizer | None,
        optim: OptimConfig,
        evaluators: Mapping[str, Evaluator],
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        # With weight 0 the penalty is skipped rather than multiplied: 0 x NaN is NaN.
        self.regularizer = regularizer if regularizer is not None and regularizer.weight != 0 else None
        self.optim = optim
        self.evaluators = dict(evaluators)
        self.skip_nonfinite = skip_nonfinite
        self.skipped_steps = 0
        self._logged: dict[str, Any] = {}
        self.evaluations: dict[str, Evaluation] = {}
        self.metrics: dict[str, float] = {}
        self._outputs: list[Outputs] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self.model(**_model_inputs(batch), output_hidden_states=self.regularizer is not None)
        loss = outputs.loss
        self._check_finite("task loss", loss)
        logged = {"train/task_loss": loss.detach()}
        if self.regularizer is not None:
            penalty = self._penalty(self.regularizer, outputs.hidden_states, batch["attention_mask"])
            weighted = self.regularizer.weight * penalty.value
            self._check_finite("penalty", weighted)
            loss = loss + weighted.to(loss.dtype)
            logged |= {"train/penalty": weighted.detach(), f"train/{self.regularizer.measure}": penalty.measure}
            if penalty.zeta is not None:
                logged["train/zeta"] = penalty.zeta
        self._logged = logged | {"train/loss": loss.detach()}
        self.log("loss", loss.detach(), prog_bar=True, logger=False)
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm of the whole gradient; one that is not finite never reaches the weights."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        self._log_step({"train/grad_norm": norm, "train/lr": optimizer.param_groups[0]["lr"]})
        # With 16-mixed overflow is a part of the method: the scaler leaves such steps out by itself.
        if self.trainer.precision != "16-mixed" and not norm.isfinite():
            self._refuse_gradient(optimizer, norm)
        elif gradient_clip_val is not None:
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def _log_step(self, more: Mapping[str, Any]) -> None:
        """Log a step at once: Lightning would do so behind the hooks that write checkpoints, which must hold it."""
        logged = {**self._logged, **more}
        self.log_dict(logged, logger=False)
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            log_now(self.trainer, logged)

    def _refuse_gradient(self, optimizer: Optimizer, norm: Tensor) -> None:
        """All processes see the same gradient here, so all of them skip, or all stop."""
        if not self.skip_nonfinite:
            raise NonFiniteError(f"step {self.trainer.global_step + 1}: the norm of the gradient is {norm.item():g}")
        # AdamW passes over parameters without a gradient, their decay and moments included.
        optimizer.zero_grad()
        self.skipped_steps += 1
        log.warning("step %d is skipped: the norm of its gradient is %g", self.trainer.global_step + 1, norm.item())

    def _check_finite(self, name: str, value: Tensor) -> None:
        if not self.skip_nonfinite and not value.detach().isfinite():
            raise NonFiniteError(f"step {self.trainer.global_step + 1}: the {name} is {value.item():g}")

    def _penalty(self, regularizer: Regularizer, hidden_states: Sequence[Tensor], mask: Tensor) -> Penalty:
        try:
            return regularizer.penalty(hidden_states, mask)
        except NonFiniteError as error:
            if not self.skip_nonfinite:
                raise NonFiniteError(f"step {self.trainer.global_step + 1}: no penalty: {error}") from error
            # Carries on to the gradient, where the step is skipped on all processes together.
            nan = hidden_states[-1].sum() * torch.nan
            return Penalty(nan, nan.detach())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped_steps"] = self.skipped_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.skipped_steps = checkpoint["skipped_steps"]

    def on_validation_epoch_start(self) -> None:
        self._outputs = [{} for _ in self.evaluators]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        outputs = self.model(**_model_inputs(batch), output_hidden_states=True)
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
        inputs = {key: value for key, value in _model_inputs(batch).items() if key not in _TARGETS}
        states: tuple[Tensor, ...] = self.model.base_model(**inputs, output_hidden_states=True).hidden_states
        return states

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(
            parameter_groups(self.model, self.optim.weight_decay),
            lr=self.optim.lr,
            betas=(self.optim.betas[0], self.optim.betas[1]),
            eps=self.optim.eps,
        )
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = round(self.optim.warmup * steps)
        name = "constant_with_warmup" if self.optim.schedule == "constant" else self.optim.schedule
        schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


_TARGETS = ("labels", "start_positions", "end_positions")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters with weight decay, and those without: biases and normalization layers' weights."""
    norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (kept if id(parameter) in norms or name.endswith("bias") else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def log_now(trainer: L.Trainer, metrics: Mapping[str, Any]) -> None:
    """Send metrics to the loggers without delay."""
    values = {name: float(value) for name, value in metrics.items()}
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": trainer.current_epoch, **values}, step=trainer.global_step)


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
