"""Lightning callbacks that attach a penalty to a LightningModule, and that watch the geometry of its states."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from istar.errors import UserError
from istar.hidden_states import AttachedPenalty, PenaltySettings, attach_with_settings
from istar.hidden_states.attach import DEFAULT_SETTINGS
from istar.hidden_states.attached_penalty import check_penalty
from istar.integrations.loaders import iterate_in_new_order
from istar.integrations.monitor_owner import MonitorOptions, MonitorOwner, Probe, describe_reading
from istar.regularizers import Penalty

FindModel = str | Callable[[L.LightningModule], nn.Module]
"""Name of a LightningModule's attribute with the model, or a function that returns the model for a LightningModule."""


class PenaltyCallback(L.Callback):
    """Attaches a penalty to the model of a LightningModule, computes its Sigma_S, and logs and saves the penalty.

    Callbacks cannot change the loss, so `training_step` must add the penalty:

        def training_step(self, batch, batch_idx):
            return self.model(**batch).loss + self.penalty.loss()

    On the trainer's logging steps, the callback logs `istar.AttachedPenalty.terms` and `progress` as `train/task_loss`
    (missing in manual optimization), `train/penalty` and so on. With gradient accumulation, the penalty is computed per
    micro-batch, and the gradient is the mean over the micro-batches of task loss and penalty. In manual optimization,
    the steps of lambda's schedule and of `refresh_every_n_steps` are batches, however many optimizers step in them.

    Checkpoints contain the penalty's state, such as Sigma_S. With `sync=False`, each process has its state, so that all
    processes must save together, as Lightning's checkpointing does.

    Args:
        penalty: `IStar`, `CosReg` or any other `Penalty`.
        settings: what is penalized, lambda's schedule, and when Sigma_S is computed; see `istar.PenaltySettings`.
        model: see `FindModel` and `istar.attach`.
        loader: batches for Sigma_S in random order, see `istar.HiddenStatePenalty.refresh`. By default, an additional
            pass over the trainer's train dataloader in a different order, which affects neither the batches of training
            nor the global random number generators.
        modules: for models that are not transformers models, a function that returns, for a LightningModule, the
            modules that output the hidden states.
        suffix: appended to the logged names and to `state_key`; several callbacks of one trainer need different ones.
    """

    def __init__(
        self,
        penalty: Penalty,
        settings: PenaltySettings = DEFAULT_SETTINGS,
        model: FindModel = "model",
        loader: Iterable[Any] | None = None,
        modules: Callable[[L.LightningModule], Sequence[nn.Module]] | None = None,
        suffix: str = "",
    ) -> None:
        check_penalty(penalty, settings)
        self.penalty = penalty
        self.settings = settings
        self.model = model
        self.loader = loader
        self.modules = modules
        self.suffix = suffix
        self._attached: AttachedPenalty | None = None  # while a training runs
        self._detached: AttachedPenalty | None = None  # the attachment of the previous training
        self._loaded_state: dict[str, Tensor] = {}
        self._has_fitted = False
        self._loss_was_called = False
        self._no_terms: dict[str, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        # `save_hyperparameters` puts the callback into checkpoints, which contain the model already. Lightning sets two
        # methods of the LightningModule on its callbacks, again for each training.
        state = {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}
        return {**state, "_attached": None, "_detached": None}

    @property
    def state_key(self) -> str:
        """The key of the penalty's state in checkpoints."""
        return f"{super().state_key}{self.suffix}"

    def loss(self) -> Tensor:
        """Compute the weighted penalty of the latest forward pass, for `training_step`.

        Returns:
            0-d tensor. It is 0 if gradients are disabled, so that training and validation steps can share code, and if
            the weight is 0 and the penalty is attached to no model.

        Raises:
            UserError: if the trainer does not have this callback, or there was no forward pass since the last call.
        """
        if not torch.is_grad_enabled() or (self._attached is None and self.penalty.weight == 0):
            return torch.zeros((), device="cpu")
        if self._attached is None:
            raise UserError(
                "the PenaltyCallback is attached to no model: Trainer(callbacks=[penalty_callback]). Lightning's Tuner "
                "and its finders run without callbacks: set penalty.weight = 0 for them"
            )
        self._loss_was_called = True
        return self._attached.loss()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Attach the penalty to the model of the LightningModule."""
        self._detach()
        self._loss_was_called = False
        # If the previous training goes on, the penalty keeps its state. A new or a resumed training resets it.
        if self._has_fitted and (_count_steps(trainer, pl_module) == 0 or trainer.ckpt_path is not None):
            self.penalty.reset(keep_shrinkage_covariance=not self.settings.refresh)
            self._detached = None
        self._has_fitted = True
        modules = None if self.modules is None else self.modules(pl_module)
        self._attached = attach_with_settings(find_model(pl_module, self.model), self.penalty, self.settings, modules)
        if self._detached is not None:
            self._attached.load_sampler_state(self._detached.sampler_state())
        if self._loaded_state:
            self._attached.load_state_dict(self._loaded_state)
            self._loaded_state = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move the penalty to the model's device, because the state of a checkpoint is on the CPU."""
        self.penalty.to(pl_module.device)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the penalty's weight by the schedule, and compute Sigma_S if it is due before this batch."""
        assert self._attached is not None
        step = _count_steps(trainer, pl_module)
        if self.settings.has_schedule:
            self._attached.set_weight(*_measure_progress(trainer, step))
        with trainer.precision_plugin.train_step_context():
            self._attached.refresh_if_due(step, batch_idx == 0, self._iterate_covariance_batches(trainer, step))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the penalty and its terms.

        Raises:
            UserError: if `training_step` did not add the penalty to its loss.
        """
        assert self._attached is not None
        if self.penalty.weight != 0 and not self._loss_was_called:
            raise UserError("training_step did not call loss() of the PenaltyCallback; add it to the task loss")
        # Tensors are logged rather than numbers, so that the host does not wait for the device in each step.
        # For a batch without terms, as with lambda 0, Lightning would log the latest ones again.
        terms: dict[str, float | Tensor] = {**self._no_terms, **self._attached.terms(), **self._attached.progress()}
        self._no_terms = dict.fromkeys(terms, torch.nan)
        if pl_module.automatic_optimization and outputs and outputs["loss"] is not None:
            # Lightning has divided the loss by the number of micro-batches.
            terms["task_loss"] = outputs["loss"] * trainer.accumulate_grad_batches
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, PenaltyCallback) and callback._attached is not None:
                    terms["task_loss"] = terms["task_loss"] - callback._attached.terms().get("penalty", 0)
        pl_module.log_dict({f"train/{name}{self.suffix}": value for name, value in terms.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the penalty's state; see `istar.AttachedPenalty.state_dict`."""
        attached = self._attached or self._detached
        return {} if attached is None else attached.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the penalty's state from a checkpoint; see `istar.AttachedPenalty.load_state_dict`."""
        if self._attached is None:
            self._loaded_state = state_dict
        else:
            self._attached.load_state_dict(state_dict)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._detach()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._detach()

    def _iterate_covariance_batches(self, trainer: L.Trainer, step: int) -> Iterator[Any]:
        loader = trainer.train_dataloader if self.loader is None else self.loader
        if self.loader is None and has_several_loaders(loader):
            raise UserError("there are several train dataloaders; name one for Sigma_S: PenaltyCallback(loader=...)")
        for batch in iterate_in_new_order(loader, step):
            yield trainer.precision_plugin.convert_input(batch)

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.remove()
            self._attached, self._detached = None, self._attached


def _count_steps(trainer: L.Trainer, pl_module: L.LightningModule) -> int:
    if pl_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.epoch_loop.batch_progress.total.completed


def _measure_progress(trainer: L.Trainer, step: int) -> tuple[int, int]:
    """Return the numbers of completed and of all steps of the training, by the limit that ends it first."""
    limits = [(trainer.global_step, trainer.max_steps)] if trainer.max_steps != -1 else []
    if trainer.num_training_batches != math.inf and trainer.max_epochs not in (None, -1):
        accumulation = [trainer.accumulate_grad_batches] * trainer.max_epochs
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler):
                accumulation = list(map(callback.get_accumulate_grad_batches, range(trainer.max_epochs)))
        limits.append((step, sum(math.ceil(trainer.num_training_batches / batches) for batches in accumulation)))
    if not limits:
        raise UserError("the schedule of lambda needs the length of the training; limit it: Trainer(max_steps=...)")
    return max(limits, key=lambda limit: (limit[0] / limit[1], -limit[1]))


class MonitorCallback(MonitorOwner, L.Callback):
    """Watches the geometry of the states while a LightningModule trains, with an `istar.Monitor`.

        trainer = L.Trainer(callbacks=[MonitorCallback(every=50)])
        trainer.fit(module, loader)

    Each reading is printed as one line, and sent to all loggers under the names of `Reading.flatten`, such as
    `geometry/layer_6/inter_sim`. Its step is the number of optimizer steps before it. In manual optimization, a batch
    with steps of several optimizers counts once in `every`.

    An alarm with `action="stop"` warns, and ends the training as early stopping does, not before `min_epochs` and
    `min_steps`. Checkpoints contain the readings, and a resumed training continues them.

    With a probe, each validation, also outside of `fit`, measures its batches and logs the measures as
    `val/<state>/<measure>`, for example `val/layer_6/isoscore_unbiased`, and their means over the layers as
    `val/<measure>`. `ModelCheckpoint` and `EarlyStopping` can monitor one. The sanity check is not measured.

    Args:
        model: see `FindModel`.
        probe: number of batches from the beginning of the validation set, in each process, or batches for the model, or
            None. A LightningModule whose batches are not arguments of its model needs batches.
        options: arguments of `istar.Monitor`; see `istar.integrations.monitor_owner.MonitorOptions`.

    Attributes:
        monitor: the monitor of the latest training or validation. It is closed at the end, and its readings stay.

    Raises:
        UserError: for an unknown option. When training begins, for other mistakes in the options, and for a model that
            is not found or cannot be watched. In a validation, if the model does not take the batches of the probe.
    """

    def __init__(self, model: FindModel = "model", *, probe: Probe = None, **options: Unpack[MonitorOptions]) -> None:
        super().__init__(probe, **options)
        self.model = model
        self._loaded_state: dict[str, Any] = {}
        self._global_step = 0  # of the trainer after the latest step that the monitor counted

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Create the monitor."""
        if trainer.ckpt_path is None:
            # A trainer that goes on has the readings of its previous training.
            goes_on = trainer.global_step > 0 and self.monitor is not None
            self._loaded_state = self.state_dict() if goes_on else {}
        self.start_monitor(find_model(pl_module, self.model))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Continue from the steps and the readings of a checkpoint or of a previous training."""
        assert self.monitor is not None
        self._global_step = trainer.global_step
        if self._global_step > 0:
            self.monitor.load_state_dict(self._loaded_state or {"step": self._global_step, "readings": []})
        self._loaded_state = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count an optimizer step, report a reading, and end the training after a collapse."""
        if trainer.global_step == self._global_step:
            return
        step_of_reading, self._global_step = self._global_step, trainer.global_step
        reading, collapse = self.take_step()
        if reading is not None:
            for logger in trainer.loggers:
                logger.log_metrics(reading.flatten(), step=step_of_reading)
            rank_zero_info(describe_reading(reading, self.measures))
        if collapse:
            rank_zero_warn(collapse)
            trainer.should_stop = True

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the probe, and log the measures."""
        if self.probe is None or trainer.sanity_checking:
            return
        loader = trainer.val_dataloaders
        if isinstance(self.probe, int) and has_several_loaders(loader):
            raise UserError("there are several validation sets; give the batches of the probe: probe=[...]")
        batches = (trainer.precision_plugin.convert_input(batch) for batch in self.list_probe_batches(loader))
        with trainer.precision_plugin.val_step_context():
            reading = self.measure_probe(find_model(pl_module, self.model), batches)
        values = self.name_values(reading, "/")
        pl_module.log_dict({f"val/{name}": value for name, value in values.items()}, sync_dist=True)
        rank_zero_info(describe_reading(reading, self.measures))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the readings; see `istar.Monitor.state_dict`."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until training starts."""
        self._loaded_state = state_dict

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.close_monitor()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.close_monitor()


def has_several_loaders(loaders: Any) -> bool:
    """Return whether Lightning was given a collection of dataloaders instead of one."""
    return isinstance(loaders, Mapping | list | tuple | CombinedLoader)


def find_model(pl_module: L.LightningModule, model: FindModel) -> nn.Module:
    """Return the model that a LightningModule has by this name, or that the function returns for it.

    Raises:
        UserError: if the LightningModule has no such attribute.
    """
    if not isinstance(model, str):
        return model(pl_module)
    try:
        return pl_module.get_submodule(model)
    except AttributeError as error:
        name = f"{type(pl_module).__name__}.{model}"
        raise UserError(f"{name} was not found; name the attribute with the model: model=...") from error
