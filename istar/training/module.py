"""The LightningModule: what a step computes, and the metrics from all predictions at once."""

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
from istar.regularizers import Regularizer
from istar.regularizers.base import world_size
from istar.regularizers.points import token_index
from istar.tasks.evaluation import Evaluation, Evaluator
from istar.training.nonfinite import StepGuard, leave_out, spoil
from istar.training.taps import Taps, find_taps, forward_with_penalty

Batch = dict[str, Tensor]
Outputs = dict[int, np.ndarray]
T = TypeVar("T")


class FineTuner(L.LightningModule):
    """An encoder with a head, trained on `task_loss + weight * penalty`.

    Args:
        model: sequence classification or question answering model.
        regularizer: penalty on hidden states; None trains on the task loss alone.
        optim: AdamW and its schedule.
        evaluators: scorer of each validation set, by the suffix of its metrics (`""` for the first).
        skip_nonfinite: leave out optimizer steps whose gradient is not finite instead of stopping.

    Attributes:
        guard: keeps steps that are not finite from the weights.
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
        self.guard = StepGuard(skip_nonfinite)
        self._taps: tuple[Taps | None, ...] = ()
        self._logged: dict[str, Any] = {}
        self.evaluations: dict[str, Evaluation] = {}
        self.metrics: dict[str, float] = {}
        self._outputs: list[Outputs] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, penalty = _model_inputs(batch), None
        if self.regularizer is None:
            outputs = self.model(**inputs)
        else:
            index = batch["token_index"] if "token_index" in batch else token_index(batch["attention_mask"])
            outputs, penalty = forward_with_penalty(self.model, inputs, self.regularizer, index, self.taps(inputs))
        loss = outputs.loss
        self._check_finite("task loss", loss)
        logged = {"train/task_loss": loss.detach()}
        if self.regularizer is not None and penalty is not None:
            weighted = self.regularizer.weight * penalty.value
            self._check_finite("penalty", weighted)
            loss = loss + weighted.to(loss.dtype)
            logged |= {"train/penalty": weighted.detach(), f"train/{self.regularizer.measure}": penalty.measure}
            if penalty.zeta is not None:
                logged["train/zeta"] = penalty.zeta
        self._logged = logged | {"train/loss": loss.detach()}
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm of the whole gradient; one that is not finite never reaches the weights."""
        step, scaler = self.trainer.global_step + 1, getattr(self.trainer.precision_plugin, "scaler", None)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if scaler is not None:
            # Overflow is a part of the method: the scaler leaves out what it finds in the gradient.
            spoil(gradients, self.guard.close(step, None))
            # Lightning leaves this to fused optimizers, which would do so behind the clipping.
            scaler.unscale_(optimizer)
        norm = get_total_norm(gradients)
        if scaler is None:
            leave_out(optimizer, self.guard.close(step, norm))
        if gradient_clip_val is not None:
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)
        self._log_step({"train/grad_norm": norm, "train/lr": optimizer.param_groups[0]["lr"]})
        self.guard.tell()

    def _log_step(self, more: Mapping[str, Any]) -> None:
        """Log a step at once: Lightning would do so behind the hooks that write checkpoints, which must hold it.

        Only here the host waits for the device, every `log_every_n_steps`. What it reads goes to the progress bar as
        well: left to Lightning, that would read a figure of every batch from the device.
        """
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            values = log_now(self.trainer, {**self._logged, **more})
            self.log_dict({name: torch.tensor(value) for name, value in values.items()}, logger=False)
            self.log("loss", torch.tensor(values["train/loss"]), prog_bar=True, logger=False)

    def _check_finite(self, name: str, value: Tensor) -> None:
        self.guard.see(name, value)

    def on_train_start(self) -> None:
        self.guard.begin()

    def on_validation_start(self) -> None:
        if self.trainer.state.fn == "fit":
            self.guard.tell(everything=True)

    def on_train_epoch_end(self) -> None:
        self.guard.tell(everything=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # No state is kept that has a step behind it of which the host does not know.
        self.guard.tell(everything=True)
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

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Look for the real tokens while the mask is on the host: a device would make it wait for the answer."""
        if self.regularizer is not None and self.trainer.training:
            batch["token_index"] = token_index(batch["attention_mask"])
        return batch

    def taps(self, inputs: Batch) -> Taps | None:
        """Where the model's hidden states come about; found by the first example of the first inputs."""
        if self._taps == ():
            self._taps = (find_taps(self.model, {name: value[:1] for name, value in inputs.items()}),)
        return self._taps[0]

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
            # It leaves out steps by itself; on a device for which torch has none, the first step says so.
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
    return {key: value for key, value in batch.items() if key not in ("feature_id", "token_index")}


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
