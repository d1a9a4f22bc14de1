"""The LightningModule for fine-tuning with a penalty on the hidden states."""

import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from istar.errors import NonFiniteError, UserError
from istar.finetune.config import OptimConfig
from istar.finetune.tasks.evaluation import Evaluation
from istar.finetune.training.optimizers import make_optimizer
from istar.finetune.training.sharded_training import ShardingStrategy, shard
from istar.hidden_states import AttachedPenalty
from istar.hidden_states.reader import HiddenStateReader
from istar.hidden_states.sharding import is_sharded_module, is_sharded_tensor
from istar.measures.accumulator import sum_over_processes, world_size

Batch = dict[str, Tensor]
Outputs = dict[int, np.ndarray]
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class StepGuard:
    """Skip optimizer steps with a gradient that is not finite, or stop the training at the first one.

    The gradient norm is equal on all processes, so all of them skip the same steps.
    """

    skip_nonfinite: bool  # whether to skip such steps; False stops the training
    num_skipped: int = field(default=0, init=False)  # number of skipped steps

    def must_skip(self, step: int, micro_batches: Sequence[Mapping[str, Tensor]], gradient_norm: Tensor | None) -> bool:
        """Return whether to skip an optimizer step; a message names the first loss that is not finite.

        Args:
            step: number of the step, counted from 1.
            micro_batches: logged metrics of the step's micro-batches, with the losses.
            gradient_norm: the global norm; None if a gradient scaler already skips steps that overflow.

        Raises a `NonFiniteError` if `skip_nonfinite` is False and a loss or the norm is not finite.
        """
        names = {"task loss": "train/task_loss", "penalty": "train/penalty"}
        named_values = [(name, batch[key]) for batch in micro_batches for name, key in names.items() if key in batch]
        if gradient_norm is not None:
            named_values.append(("norm of the gradient", gradient_norm))
        if self.skip_nonfinite:
            if gradient_norm is None or torch.isfinite(gradient_norm):
                return False
        elif torch.stack([value.double() for _, value in named_values]).isfinite().all():
            return False
        name, value = next((name, value) for name, value in named_values if not torch.isfinite(value))
        if not self.skip_nonfinite:
            raise NonFiniteError(f"step {step}: the {name} is {value:g}")
        self.num_skipped += 1
        log.warning("step %d is skipped: the %s is %g", step, name, value)
        return True


class FineTuner(L.LightningModule):
    """Train an encoder with a task head on the task loss plus a weighted penalty on its hidden states.

    Metrics are computed from all predictions of a validation set at once, not averaged over batches.

    Args:
        penalty: penalty attached to the model, from `istar.attach`; None trains on the task loss alone.
        optim: settings of the optimizer and of the learning rate schedule.
        evaluators: evaluator of each validation set, by the suffix of its metrics' names (`""` for the first).
        skip_nonfinite: skip optimizer steps with a gradient that is not finite instead of stopping the training.
        max_steps: number of optimizer steps before training stops, which the schedules then depend on; None for no
            limit besides the epochs.
        is_streamed: whether the length of the training data is unknown, so that schedules depend on `max_steps` alone.

    Attributes:
        evaluations: metrics and predictions of the latest validation, by the metric suffix of the validation set.
        metrics: all metrics of the latest validation, e.g. `accuracy` and `accuracy_mismatched`.
        batch_metrics: metrics of the latest micro-batch of this process.
        step_metrics: metrics of the latest logged step, as in `metrics.csv`.
        total_steps: number of optimizer steps of the whole training.
        adds_to_loss: whether the task loss includes what the model itself adds to the loss of its labels.
    """

    adds_to_loss = False  # no model of transformers has a head for labels or spans that does

    def __init__(
        self,
        model: PreTrainedModel,
        penalty: AttachedPenalty | None,
        optim: OptimConfig,
        evaluators: Mapping[str, Any],
        skip_nonfinite: bool = False,
        max_steps: int | None = None,
        is_streamed: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._reader = HiddenStateReader(model)
        # The penalty is not a submodule: DDP would overwrite the buffers that differ between processes without sync.
        self.penalty = penalty
        self.optim = optim
        self.max_steps = max_steps
        self.is_streamed = is_streamed
        self.evaluators = dict(evaluators)
        self.step_guard = StepGuard(skip_nonfinite)
        self.total_steps = 0
        self.batch_metrics: dict[str, Tensor] = {}
        self.step_metrics: dict[str, float] = {}
        self._micro_batches: list[dict[str, Tensor]] = []
        self._num_tokens: Any = 0  # number of tokens, without padding, since `_interval_start`
        self._interval_start: Any = None  # time of the latest logged step, or of the first batch after a validation
        self.evaluations: dict[str, Evaluation] = {}
        self.metrics: dict[str, float] = {}
        self._outputs: list[Outputs] = []

    def task_loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(**inputs_with_labels(batch)).loss
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.task_loss(batch)
        terms = {"task_loss": loss.detach()}
        # With weight 0, the loss equals the task loss bit for bit.
        if self.penalty is not None and self.penalty.penalty.weight != 0:
            weighted_penalty = self.penalty.loss()
            terms = self.penalty.terms(loss)
            loss = loss + weighted_penalty.to(loss.dtype)
        self.batch_metrics = {"train/loss": loss.detach(), **{f"train/{name}": term for name, term in terms.items()}}
        self._micro_batches.append(self.batch_metrics)
        return loss

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradient by norm or by value. If it is not finite, drop it, or raise a `NonFiniteError`."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and optimizer.defaults.get("fused"):
            # With fused optimizers Lightning does not unscale gradients before clipping, so it is done here.
            scaler.unscale_(optimizer)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        gradient_norm: Any = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if is_sharded_tensor(gradient_norm):
            gradient_norm = gradient_norm.full_tensor()
        # A gradient scaler skips steps that overflow by design, so its norm is not checked.
        checked_norm = None if scaler is not None else gradient_norm
        if self.step_guard.must_skip(self.trainer.global_step + 1, self._micro_batches, checked_norm):
            # Without a gradient, optimizers leave a parameter, its weight decay, its moments and its step count alone.
            optimizer.zero_grad(set_to_none=True)
        elif gradient_clip_val is not None and gradient_clip_algorithm == "value":
            clip_grad_value_(parameters, gradient_clip_val)
        elif gradient_clip_val is not None:
            clip_grads_with_norm_(parameters, gradient_clip_val, gradient_norm)
        step_metrics = {"train/grad_norm": gradient_norm, "train/lr": optimizer.param_groups[0]["lr"]}
        if self.penalty is not None:
            step_metrics |= {f"train/{name}": value for name, value in self.penalty.progress().items()}
        self._log_step(step_metrics)

    def _log_step(self, step_metrics: Mapping[str, Any]) -> None:
        """Log a step's metrics and the means of its micro-batches' metrics, every `log_every_n_steps` steps.

        They are sent to the loggers immediately, because the checkpoint of a step must contain them. Lightning would
        send them only after the hooks that write checkpoints.
        """
        micro_batches, self._micro_batches = self._micro_batches, []
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            num_tokens, now = float(sum_over_processes(self._num_tokens.double())), time.perf_counter()
            step_metrics = {**step_metrics, "train/tokens_per_second": num_tokens / (now - self._interval_start)}
            self._num_tokens, self._interval_start = 0, now
            self.step_metrics = log_immediately(self.trainer, {**_average_metrics(micro_batches), **step_metrics})

    def on_train_start(self) -> None:
        """Discard the metrics of an unfinished step, and move a restored penalty to the device."""
        self._micro_batches, self._interval_start = [], None
        if self.penalty is not None:
            self.penalty.penalty.to(self.device)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self.penalty is not None:
            self.penalty.set_weight(self.trainer.global_step, self.total_steps)
        if self._interval_start is None:
            self._num_tokens, self._interval_start = 0, time.perf_counter()
        self._num_tokens += token_mask(batch).sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped_steps"] = self.step_guard.num_skipped
        if self.penalty is not None:
            checkpoint["penalty"] = self.penalty.state_dict()
        if "callbacks" not in checkpoint:  # only the weights are saved, after the validation of the best epoch
            checkpoint["evaluations"] = {suffix: vars(evaluation) for suffix, evaluation in self.evaluations.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the penalty and the number of skipped steps; refuse skipped steps unless they are allowed."""
        if self.penalty is not None:
            self.penalty.load_state_dict(checkpoint["penalty"])
        self.step_guard.num_skipped = checkpoint["skipped_steps"]
        if self.step_guard.num_skipped and not self.step_guard.skip_nonfinite:
            raise UserError(
                f"the interrupted run has skipped {self.step_guard.num_skipped} steps; trainer.nonfinite=skip goes on "
                "with it, run.overwrite=true starts again"
            )

    def on_validation_epoch_start(self) -> None:
        self._outputs = [{} for _ in self.evaluators]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Collect a batch's logits, log its loss, and return its hidden states and token mask for the callbacks."""
        # Callbacks measure the hidden states of the first validation set only.
        outputs, states = self.run_model(self.model, inputs_with_labels(batch), reads_states=dataloader_idx == 0)
        self._outputs[dataloader_idx] |= logits_by_feature(batch, outputs)
        if outputs.loss is not None and dataloader_idx == 0:
            # The mean is logged as a weighted sum: Lightning's own mean over processes rounds the number of examples.
            weight = len(batch["feature_id"]) / len(self.evaluators[""].features)
            self.log("val/loss", weight * outputs.loss, reduce_fx="sum", add_dataloader_idx=False, sync_dist=True)
        return {"hidden_states": states, "attention_mask": token_mask(batch)}

    def on_validation_epoch_end(self) -> None:
        for (suffix, evaluator), outputs in zip(self.evaluators.items(), self._outputs, strict=True):
            with naming_step("validation", self.trainer):
                evaluation = evaluator(merge_outputs(all_gather_object(outputs)))
            self.evaluations[suffix] = evaluation
            for name, value in evaluation.metrics.items():
                self.metrics[f"{name}_{suffix}" if suffix else name] = value
        # All processes compute the same values; sync_dist avoids a warning of Lightning and does not change them.
        for name, value in self.metrics.items():
            self.log(f"val/{name}", value, sync_dist=True)
        self._outputs, self._interval_start = [], None

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Outputs:
        return logits_by_feature(batch, self.model(**inputs_with_labels(batch)))

    def run_model(self, module: nn.Module, inputs: Batch, reads_states: bool) -> tuple[Any, dict[str, Tensor]]:
        """Call the model or its base model; return the output and, if wanted, the hidden states by layer.

        The layers are `0`, the embeddings, `1` to `L`, and `final_norm` if there is a norm after layer L.
        """
        if not reads_states:
            return module(**inputs), {}
        output, states = self._reader.call(module, **inputs)
        return output, {name.replace("embeddings", "0").removeprefix("layer_"): state for name, state in states.items()}

    def hidden_states(self, batch: Batch) -> dict[str, Tensor]:
        """Return the hidden states of a batch by layer, `(batch, tokens, d)` each; see `run_model`."""
        # Only the whole model gathers the weights of one that is sharded.
        module = self.model if is_sharded_module(self.model) else self.model.base_model
        return self.run_model(module, inputs_without_labels(batch), reads_states=True)[1]

    def configure_model(self) -> None:
        """Shard the model over the processes, if this is the strategy. Lightning calls this before any use."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardingStrategy) and not is_sharded_module(self.model):
            shard(self.model, strategy.precision)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model, self.optim)
        num_steps = self.max_steps or sys.maxsize
        if not self.is_streamed:
            num_steps = min(int(self.trainer.estimated_stepping_batches), num_steps)
            if self.max_steps is not None and num_steps < self.max_steps:
                log.warning(
                    f"the training ends after {num_steps} of trainer.max_steps={self.max_steps} steps, because "
                    f"trainer.max_epochs={self.trainer.max_epochs} comes first; raise trainer.max_epochs for more"
                )
        self.total_steps = num_steps
        num_warmup_steps = count_warmup_steps(self.optim.warmup, num_steps)
        scale = partial(scale_learning_rate, self.optim.schedule, num_warmup_steps, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, scale), "interval": "step"}}


def scale_learning_rate(schedule: str, num_warmup_steps: int, num_steps: int, step: int) -> float:
    """Return the factor of the learning rate at a step, as in the schedules of transformers with the same names.

    The functions of transformers are not used, because their import brings peft and takes tenths of a second.
    """
    if step < num_warmup_steps:
        return step / num_warmup_steps
    num_decay_steps = max(1, num_steps - num_warmup_steps)
    if schedule == "linear":
        return max(0.0, (num_steps - step) / num_decay_steps)
    if schedule == "cosine":
        return max(0.0, 0.5 * (1 + math.cos(math.pi * ((step - num_warmup_steps) / num_decay_steps))))
    return 1.0


def count_warmup_steps(warmup: float, num_steps: int) -> int:
    """Return the number of warmup steps in a training of `num_steps` optimizer steps.

    `warmup` is a fraction of the steps if it is at most 1, and a number of steps otherwise. Raises a `UserError` if the
    training has fewer steps than the warmup.
    """
    if warmup <= 1:
        return round(warmup * num_steps)
    if warmup > num_steps:
        raise UserError(f"optim.warmup={warmup:g}: the training has only {num_steps} optimizer steps")
    return int(warmup)


def inputs_without_labels(batch: Batch) -> Batch:
    """Return the model inputs of a batch without its labels."""
    targets = ("labels", "start_positions", "end_positions")
    return {key: value for key, value in inputs_with_labels(batch).items() if key not in targets}


def token_mask(batch: Batch) -> Tensor:
    """Return the mask of a batch, `(batch, tokens)`: 1 for tokens and 0 for padding.

    It is the diagonal of an attention mask `(batch, 1, tokens, tokens)`, which keeps packed documents apart. Without an
    attention mask, all tokens count.
    """
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones_like(batch["input_ids"])
    return mask.diagonal(dim1=-2, dim2=-1)[:, 0] if mask.dim() == 4 else mask


def _average_metrics(micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each metric over a step's micro-batches and all processes; the first metric is the loss."""
    names = list(dict.fromkeys(name for metrics in micro_batches for name in metrics))
    nan = micro_batches[0][names[0]].new_tensor(torch.nan)
    values = torch.stack([torch.stack([row.get(name, nan).double() for name in names]) for row in micro_batches])
    # If the loss is finite, NaN is the value of a micro-batch without one, and the mean is over the others.
    has_value = ~(values.isnan() & values[:, :1].isfinite())
    sums, counts = sum_over_processes(torch.stack([torch.where(has_value, values, 0).sum(0), has_value.sum(0)]))
    return dict(zip(names, (sums / counts).unbind(), strict=True))


def log_immediately(trainer: L.Trainer, metrics: Mapping[str, Any], step: int | None = None) -> dict[str, float]:
    """Send metrics of a step, by default the current one, to the trainer's loggers; return them as floats."""
    value_by_name = {name: float(value) for name, value in metrics.items()}
    for logger in trainer.loggers:
        logger.log_metrics(
            {"epoch": trainer.current_epoch, **value_by_name}, step=trainer.global_step if step is None else step
        )
    return value_by_name


@contextmanager
def on_training_device(trainer: L.Trainer, module: FineTuner) -> Iterator[None]:
    """Within the `with` block, keep a module on the trainer's device, unless it is sharded.

    Lightning moves the module to the CPU after training.
    """
    previous_device = module.device
    is_sharded = is_sharded_module(module.model)
    if not is_sharded:
        module.to(trainer.strategy.root_device)
    try:
        yield
    finally:
        if not is_sharded:
            module.to(previous_device)


@contextmanager
def naming_step(context: str, trainer: L.Trainer) -> Iterator[None]:
    """Within the `with` block, say in a `NonFiniteError` what was measured, and after which step."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{context} after step {trainer.global_step}: {error}") from error


def merge_outputs(batches: Sequence[Outputs]) -> Outputs:
    """Merge the logits by feature id of several batches or processes into one mapping."""
    return {feature_id: logits for batch in batches for feature_id, logits in batch.items()}


def inputs_with_labels(batch: Batch) -> Batch:
    """Return the model inputs of a batch with its labels."""
    return {key: value for key, value in batch.items() if key != "feature_id"}


def logits_by_feature(batch: Batch, outputs: Any) -> Outputs:
    """Return the logits of a batch by feature id.

    For answer spans, they are the start and end logits of the tokens without padding, `(2, tokens)`.
    """
    if "logits" in outputs:
        arrays = list(outputs.logits.detach().float().cpu().numpy())
    else:
        logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=1).detach().float().cpu()
        masks = token_mask(batch).bool().cpu()
        arrays = [span_logits[:, mask].numpy() for span_logits, mask in zip(logits, masks, strict=True)]
    return dict(zip(batch["feature_id"].tolist(), arrays, strict=True))


def all_gather_object(value: T) -> list[T]:
    """Return, on every process, the values of all processes in the order of their ranks."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values
