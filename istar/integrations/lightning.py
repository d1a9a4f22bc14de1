"""A Lightning callback that attaches a penalty to the model of any LightningModule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn

from istar.errors import UserError
from istar.hidden_states import EmbeddingWatch, Watch, attach_to_target
from istar.hidden_states.embedding_watch import HIDDEN_STATES
from istar.hidden_states.shrinkage import NUM_POINTS
from istar.integrations.loaders import check_first_batch, iterate_in_new_order
from istar.measures.processes import world_size
from istar.regularizers import IStar, Penalty, Points
from istar.regularizers.points import ALL_POINTS


class PenaltyCallback(L.Callback):
    """Attaches a penalty to the model of a LightningModule, computes its Sigma_S, and logs and saves the penalty.

    Callbacks cannot change the loss, so `training_step` must add the penalty:

    >>> import istar, lightning, torch, transformers
    >>> class Classifier(lightning.LightningModule):
    ...     def __init__(self, penalty):
    ...         super().__init__()
    ...         self.penalty = penalty
    ...         config = transformers.BertConfig(
    ...             hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
    ...         )
    ...         self.model = transformers.BertForSequenceClassification(config)
    ...
    ...     def training_step(self, batch, batch_idx):
    ...         return self.model(**batch).loss + self.penalty.loss()
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.AdamW(self.parameters(), lr=1e-3)
    >>> penalty = PenaltyCallback(istar.IStar(weight=-1.0, zeta=0.4))
    >>> rows = [{"input_ids": torch.randint(50, (12,)), "labels": torch.tensor(i % 2)} for i in range(16)]
    >>> loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    >>> quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    >>> trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[penalty], **quiet)
    >>> trainer.fit(Classifier(penalty), loader)
    >>> sorted(trainer.callback_metrics)
    ['train/isoscore_star', 'train/penalty', 'train/points']

    On the trainer's logging steps, the callback logs `train/penalty` (weighted, as in the loss), the score,
    `train/points` (the number of points), `train/points_left_out` if the points have a `max_norm_ratio`, `train/zeta`
    if zeta is estimated, `train/lambda` if there is a schedule, and `train/undefined` once micro-batches had no score:
    their number so far. They add 0 to the loss. With gradient accumulation, the penalty is computed per micro-batch,
    and the gradient is the mean over the micro-batches of task loss and penalty.
    Checkpoints contain Sigma_S. With `sync=False`, they contain one Sigma_S per process, so that all processes must
    save together, as Lightning's checkpointing does.

    Args:
        penalty: `IStar`, `CosReg` or any other `Penalty`.
        model: name of the LightningModule's attribute that holds the model, or a function that returns the model for a
            LightningModule; see `istar.attach`.
        loader: batches for Sigma_S in random order, see `istar.Watch.refresh`. By default, an additional pass over the
            trainer's train dataloader in a different order, which affects neither the batches of training nor the
            global random number generators.
        refresh: when to compute Sigma_S: `epoch`, before each epoch; a number n, every n optimizer steps; None, never,
            so that `penalty.shrinkage_covariance` must be set before. Sigma_S is not computed if the penalty does not
            use it: `CosReg`, zeta 0 or lambda 0.
        num_points: number of points in Sigma_S.
        momentum: weight of the previous Sigma_S in the new one, in [0, 1).
        weight_schedule: function that returns lambda for the number of completed optimizer steps, such as
            `lambda step: istar.weight_at(step, 1000, -1.0, "cosine", warmup=0.1)`.
        modules: for models that are not transformers models, a function that returns, for a LightningModule, the
            modules whose outputs are the hidden states.
        points: which tokens are points, see `istar.Points`.
        target: `hidden_states`, `input_embeddings` or `output_embeddings`; see `istar.EmbeddingWatch`.
        rows: number of rows of the embedding matrix that are sampled for each micro-batch; None uses all rows.
            Checkpoints contain the state of their generator.
        seed: seed of the samples of rows.

    Raises:
        UserError: if `refresh` has another value.
    """

    def __init__(
        self,
        penalty: Penalty,
        model: str | Callable[[L.LightningModule], nn.Module] = "model",
        loader: Iterable[Any] | None = None,
        refresh: str | int | None = "epoch",
        num_points: int = NUM_POINTS,
        momentum: float = 0.0,
        weight_schedule: Callable[[int], float] | None = None,
        modules: Callable[[L.LightningModule], Sequence[nn.Module]] | None = None,
        points: Points = ALL_POINTS,
        target: str = HIDDEN_STATES,
        rows: int | None = None,
        seed: int = 0,
    ) -> None:
        if not (refresh in ("epoch", None) or (type(refresh) is int and refresh > 0)):
            raise UserError(f"refresh is {refresh!r}; expected 'epoch', a number of optimizer steps, or None")
        self.penalty = penalty
        self.model = model
        self.loader = loader
        self.refresh = refresh
        self.num_points = num_points
        self.momentum = momentum
        self.weight_schedule = weight_schedule
        self.modules = modules
        self.points = points
        self.target = target
        self.rows = rows
        self.seed = seed
        # Reads the hidden states and computes the penalty; None while the penalty is attached to no model.
        self._watch: Watch | EmbeddingWatch | None = None
        # State of the generator that samples rows, while the penalty is attached to no model.
        self._row_sampler_state: dict[str, Tensor] = {}
        self._last_refresh_step: int | None = None
        self._has_fitted = False

    def __getstate__(self) -> dict[str, Any]:
        # `save_hyperparameters` puts the callback into checkpoints, which contain the model already. Lightning sets two
        # methods of the LightningModule on its callbacks, again for each training.
        state = {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}
        return {**state, "_watch": None}

    def loss(self) -> Tensor:
        """Compute the weighted penalty of the latest forward pass, for `training_step`; see `istar.Watch.loss`.

        Returns:
            0-d tensor. It is 0 if gradients are disabled, so that training and validation steps can share code, and if
            the weight is 0 and the penalty is attached to no model.

        Raises:
            UserError: if the trainer does not have this callback, or there was no forward pass since the last call.
        """
        if not torch.is_grad_enabled() or (self._watch is None and self.penalty.weight == 0):
            return torch.zeros(())
        if self._watch is None:
            raise UserError(
                "the PenaltyCallback is attached to no model: Trainer(callbacks=[penalty_callback]). Lightning's Tuner "
                "and its finders run without callbacks: set penalty.weight = 0 for them"
            )
        return self._watch.loss()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Attach the penalty to the model of the LightningModule."""
        self._detach()
        # A trainer that goes on, or resumes from a checkpoint, continues with the penalty's state.
        if self._has_fitted and trainer.global_step == 0 and trainer.ckpt_path is None:
            self.penalty.reset()
            if isinstance(self.penalty, IStar) and self.refresh is not None:
                self.penalty.shrinkage_covariance = None
        self._has_fitted = True
        self._last_refresh_step = None
        modules = None if self.modules is None else self.modules(pl_module)
        model = self._find_model(pl_module)
        self._watch = attach_to_target(model, self.penalty, self.target, self.points, self.rows, self.seed, modules)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move the penalty to the model's device, and restore the state of the generator that samples rows."""
        # A Sigma_S that was loaded from a checkpoint is on the CPU.
        self.penalty.to(pl_module.device)
        if isinstance(self._watch, EmbeddingWatch):
            self._watch.load_state_dict(self._row_sampler_state)
        check_first_batch(self._watch, trainer.train_dataloader)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the penalty's weight by the schedule, and compute Sigma_S if it is due before this batch."""
        step = trainer.global_step
        if self.weight_schedule is not None:
            self.penalty.weight = self.weight_schedule(step)
        if self._is_refresh_due(step, batch_idx):
            self._last_refresh_step = step
            self._refresh_covariance(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the penalty and its terms.

        Raises:
            UserError: if `training_step` did not add the penalty to its loss.
        """
        if self.weight_schedule is not None:
            pl_module.log("train/lambda", self.penalty.weight)
        if self.penalty.weight == 0:
            return
        terms = self.penalty.last
        if terms is None:
            raise UserError("training_step did not call loss() of the PenaltyCallback; add it to the task loss")
        # Log tensors rather than numbers, so that the host does not wait for the device in each step.
        terms_by_name = {"penalty": self.penalty.factor * terms.value, **terms.named(self.penalty.measure)}
        if self.penalty.undefined.seen > 0:
            terms_by_name["undefined"] = self.penalty.undefined.total.float()
        pl_module.log_dict({f"train/{name}": value for name, value in terms_by_name.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds: `penalties` and `rows`.

        `penalties` is a list of the penalty's state or, if the processes have different ones, of the state of each
        process. `rows` is the state of the generator that samples rows of an embedding matrix.
        """
        state = {name: value.cpu() for name, value in self.penalty.state_dict().items()}
        states: list[Any] = [state]
        is_per_process = world_size() > 1 and (not self.penalty.sync or self.penalty.group is not None)
        if is_per_process:
            states = [None] * world_size()
            dist.all_gather_object(states, state)
        watch = self._watch
        row_sampler_state = watch.state_dict() if isinstance(watch, EmbeddingWatch) else self._row_sampler_state
        return {"penalties": states, "rows": row_sampler_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the penalty's state from a checkpoint.

        Raises:
            UserError: if the checkpoint was saved with a different number of processes and has a state for each.
        """
        self._row_sampler_state = state_dict.get("rows", {})
        states = state_dict["penalties"]
        if len(states) not in (1, world_size()):
            raise UserError(
                f"the checkpoint holds a penalty's state for each of {len(states)} processes; expected "
                f"{world_size()}: resume with as many processes as before"
            )
        self.penalty.load_state_dict(states[0] if len(states) == 1 else states[dist.get_rank()])

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remove the penalty's hooks from the model."""
        self._detach()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remove the penalty's hooks from the model."""
        self._detach()

    def _find_model(self, pl_module: L.LightningModule) -> nn.Module:
        """Return the model within the LightningModule that the penalty is attached to.

        Raises:
            UserError: if the LightningModule has no module of the given name.
        """
        if not isinstance(self.model, str):
            return self.model(pl_module)
        try:
            return pl_module.get_submodule(self.model)
        except AttributeError as error:
            raise UserError(
                f"{type(pl_module).__name__} has no module {self.model!r}; name the attribute with the model: "
                "PenaltyCallback(penalty, model=...)"
            ) from error

    def _is_refresh_due(self, step: int, batch_idx: int) -> bool:
        """Return whether Sigma_S must be computed before this batch."""
        penalty = self.penalty
        is_needed = isinstance(penalty, IStar) and penalty.needs_shrinkage_covariance
        if self.refresh is None or not is_needed or (penalty.weight == 0 and self.weight_schedule is None):
            return False
        if penalty.shrinkage_covariance is None:
            return True
        if self.refresh == "epoch":
            return batch_idx == 0
        # All micro-batches of an optimizer step have the same step number; refresh before the first one only.
        return step % int(self.refresh) == 0 and step != self._last_refresh_step

    def _refresh_covariance(self, trainer: L.Trainer) -> None:
        """Compute Sigma_S in the precision of training."""
        assert self._watch is not None
        with trainer.precision_plugin.train_step_context():
            self._watch.refresh(self._iterate_covariance_batches(trainer), self.num_points, self.momentum)

    def _iterate_covariance_batches(self, trainer: L.Trainer) -> Iterator[Any]:
        """Yield the batches for Sigma_S, converted to the precision of training.

        Raises:
            UserError: if there are several train dataloaders and `loader` does not choose one.
        """
        loader = trainer.train_dataloader if self.loader is None else self.loader
        if self.loader is None and isinstance(loader, Mapping | list | tuple | CombinedLoader):
            raise UserError("there are several train dataloaders; name one for Sigma_S: PenaltyCallback(loader=...)")
        for batch in iterate_in_new_order(loader, trainer.global_step):
            yield trainer.precision_plugin.convert_input(batch)

    def _detach(self) -> None:
        """Remove the hooks from the model, if there are any, and keep the state of the generator that samples rows."""
        if isinstance(self._watch, EmbeddingWatch):
            self._row_sampler_state = self._watch.state_dict()
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
