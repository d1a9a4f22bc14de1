"""A sentence-transformers loss that adds a penalty to another loss, the callback of its trainer, and a monitor."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import Tensor, nn
from transformers import TrainingArguments

from istar.errors import UserError, check_one_of, check_type
from istar.hidden_states import AttachedPenalty, PenaltySettings, attach
from istar.hidden_states.attach import DEFAULT_SETTINGS
from istar.hidden_states.attached_penalty import HIDDEN_STATES, NUM_POINTS, check_penalty
from istar.hidden_states.model_layers import find_layers
from istar.integrations.monitor_callback import MonitorCallback as MonitorCallback
from istar.integrations.trainer_callback import STATE_FILE, PenaltyCallback, save_penalty
from istar.regularizers import Penalty, layer_numbers, select_layers
from istar.regularizers.points import Tokens

POINT_TYPES = ("tokens", "pooled")


class PenaltyLoss(nn.Module):
    """Adds a penalty on the hidden states or the sentence embeddings of all text columns to another loss.

        loss = PenaltyLoss(model, MultipleNegativesRankingLoss(model), istar.IStar(weight=-1.0, zeta=0.4))
        trainer = SentenceTransformerTrainer(model, args, dataset, loss=loss, callbacks=[PenaltyLossCallback(loss)])

    The trainer logs the components of the loss and `istar.AttachedPenalty.terms`, as means over the batches since the
    last log that had them. With gradient accumulation, the penalty is computed per micro-batch, and the gradient is the
    mean over the micro-batches of loss and penalty. In evaluation, without gradients, the penalty is left out.

    Args:
        model: the model that is trained.
        loss: any loss that runs the model with gradients, including a wrapper of a loss such as `MatryoshkaLoss`.
            Losses that compute embeddings again in the backward pass, such as `CachedMultipleNegativesRankingLoss`, are
            not supported.
        penalty: `IStar`, `CosReg` or any other `Penalty`.
        on: what the points are. `tokens`: the hidden states of the penalty's layers, of all columns. `pooled`: the
            sentence embeddings of all columns, one point per text.
        settings: lambda's schedule, and when Sigma_S is computed; see `istar.PenaltySettings`. Points and target cannot
            be chosen.
        suffix: appended to the logged names of the penalty and its terms, and to the name of the file with its state in
            checkpoints; the losses of several datasets need different ones.

    Attributes:
        attached: the interface through which the callback uses the penalty.
        num_layers: number of layers of each text column, 1 for sentence embeddings.

    Raises:
        UserError: if `on` has another value, or the model's hidden states cannot be read.
    """

    attached: AttachedPenalty

    def __init__(
        self,
        model: SentenceTransformer,
        loss: nn.Module,
        penalty: Penalty,
        on: str = "tokens",
        settings: PenaltySettings = DEFAULT_SETTINGS,
        suffix: str = "",
    ) -> None:
        super().__init__()
        check_type("model", model, nn.Sequential, "SentenceTransformer(name)")
        check_type("loss", loss, nn.Module, "CoSENTLoss(model)")
        check_penalty(penalty, settings)
        check_one_of("on", on, POINT_TYPES)
        if settings.target != HIDDEN_STATES or not settings.points.are_all or settings.sample is not None:
            raise UserError("PenaltyLoss has the points named by on; leave target, points and sample out of settings")
        # The trainer replaces this attribute, here and in the inner loss, by the wrapped model.
        self.model: nn.Module = model
        self.loss = loss
        self.penalty = penalty
        self.on = on
        self.settings = settings
        # The wrapped loss may be a `PenaltyLoss`, too, with other points.
        num_losses = 1 + sum(isinstance(module, PenaltyLoss) for module in loss.modules())
        self.suffix = f"_{num_losses}{suffix}" if num_losses > 1 else suffix
        # By the name of each term that was ever logged: whether it was computed since the last log.
        self.is_recent: dict[str, bool] = {}
        # The tuple keeps this reference from being a submodule, which the trainer would replace, too.
        self._model_in_tuple = (model,)
        self._collects_points = False
        # Penalty summaries of the points of all forward passes of the model for the current loss.
        self._point_summaries: list[Any] = []
        # Hidden states of these passes. `AdaptiveLayerLoss` returns them several times, but they are one cloud.
        self._collected_states: list[Any] = []
        self.num_layers = 1
        self.attached = _AttachedLoss(self)
        self._has_trained = False
        if on == "pooled":
            model[-1].register_forward_hook(self._collect_sentence_embeddings)
            return
        layers = find_layers(model)
        if not layers.returns_embeddings:
            name = type(layers.base_model).__name__
            raise UserError(f"{name} returns no embeddings as its first hidden state; expected on='pooled' for it")
        self.num_layers = len(layer_numbers(layers.num_layers, penalty.layers))
        self._argument_names = {*inspect.signature(layers.base_model.forward).parameters, "attention_mask"}
        transformers = [module for module in model.modules() if isinstance(module, Transformer)]
        if len(transformers) != 1:
            raise UserError(f"the model has {len(transformers)} transformers; expected 1, or use on='pooled'")
        # This module calls `forward` of the transformers model directly, which skips the hooks of `istar.attach`.
        transformers[0].register_forward_pre_hook(self._request_hidden_states)
        # The hooks of several losses restore the setting of the model in the opposite order.
        transformers[0].register_forward_hook(self._collect_hidden_states, always_call=True, prepend=True)

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the components of the wrapped loss (or `task_loss`), the weighted `penalty`, and its terms for logs.

        Raises:
            UserError: if the wrapped loss did not run the model with gradients, or no callback follows the schedule.
        """
        is_penalized = torch.is_grad_enabled() and self.penalty.weight != 0
        self._collects_points, self._point_summaries = is_penalized, []
        try:
            loss = self.loss(sentence_features, labels)
        finally:
            self._collects_points, self._collected_states = False, []
        components = _Components(loss if isinstance(loss, Mapping) else {"task_loss": loss})
        components.add_logged({"task_loss": torch.stack(components.values()).sum()})
        if is_penalized:
            components[f"penalty{self.suffix}"] = self.attached.loss()
            terms = {**self.attached.terms(), **self.attached.progress()}
            # The processes may disagree on whether there is this term, and the trainer would wait for all of them.
            terms.pop("undefined", None)
            terms = {f"{name}{self.suffix}": term for name, term in terms.items()}
            components.add_logged(terms)
            self.is_recent |= dict.fromkeys(terms, True)
        return components

    @property
    def citation(self) -> str:
        """The BibTeX entries of the wrapped loss and of the penalty, for the model card of sentence-transformers."""
        return "\n\n".join(filter(None, (getattr(self.loss, "citation", "").strip(), self.penalty.citation)))

    def get_config_dict(self) -> dict[str, Any]:
        """Return the wrapped loss, the penalty and its points, for the model card of sentence-transformers."""
        return {"loss": self.loss, "penalty": repr(self.penalty), "on": self.on}

    def take_summaries(self) -> list[Any]:
        """Return the penalty's summaries of the points of the latest forward pass, and forget them.

        Raises:
            UserError: if there are none, because the wrapped loss did not run the model with gradients.
        """
        summaries, self._point_summaries = self._point_summaries, []
        if not summaries:
            raise UserError(
                f"{type(self.loss).__name__} does not run the model with gradients, like all losses that compute "
                "embeddings again in the backward pass; wrap its counterpart without a cache"
            )
        return summaries

    def attach_penalty(self) -> AttachedPenalty:
        """Return the attached penalty for a new training, which begins like the first one."""
        self.attached.remove()
        if self._has_trained:
            self.penalty.reset(keep_shrinkage_covariance=not self.settings.refresh)
        self._has_trained = True
        self.attached = _AttachedLoss(self)
        return self.attached

    def refresh(self, loader: Iterable[Any], num_points: int | None = NUM_POINTS, momentum: float = 0.0) -> int:
        """Compute Sigma_S from the trainer's batches; see `istar.HiddenStatePenalty.refresh`.

        Returns:
            The number of points used.
        """
        [model] = self._model_in_tuple
        if self.on == "tokens":
            attached = attach(model, self.penalty)
        else:
            pooled_model = _SentenceEmbeddingModel(model)
            attached = attach(pooled_model, self.penalty, [pooled_model.embeddings])
        with attached:
            return attached.refresh(self._iterate_inputs_by_column(loader), num_points, momentum)

    def _should_collect(self) -> bool:
        return self._collects_points and torch.is_grad_enabled()

    def _request_hidden_states(self, module: Transformer, args: Any) -> None:
        self._previous_output_hidden_states = module.model.config.output_hidden_states
        if self._should_collect():
            module.model.config.output_hidden_states = True

    def _collect_hidden_states(self, module: Transformer, args: Any, output: dict[str, Any] | None) -> None:
        module.model.config.output_hidden_states = self._previous_output_hidden_states
        # The output is None if the pass failed.
        if not self._should_collect() or output is None:
            return
        states = output["all_layer_embeddings"]
        if any(states is collected_states for collected_states in self._collected_states):
            return
        self._collected_states.append(states)
        self._add_summaries(select_layers(states, self.penalty.layers), output.get("attention_mask"))

    def _collect_sentence_embeddings(self, module: nn.Module, args: Any, output: dict[str, Any]) -> None:
        if self._should_collect():
            self._add_summaries([output["sentence_embedding"]], None)

    def _add_summaries(self, layers: list[Tensor], mask: Tensor | None) -> None:
        # Not assigned, because a loss may call the model once per column.
        tokens = Tokens(None if self.penalty.include_padding else mask)
        self._point_summaries += self.penalty.summarize(layers, tokens)

    def _iterate_inputs_by_column(self, loader: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
        """The trainer's batches contain all columns in one mapping, with the column's name as a prefix of each key."""
        for batch in loader:
            prefixes = [name.removesuffix("input_ids") for name in batch if name.endswith("input_ids")]
            for prefix in prefixes:
                features = {name.removeprefix(prefix): batch[name] for name in batch if name.startswith(prefix)}
                if self.on == "tokens":
                    yield {name: value for name, value in features.items() if name in self._argument_names}
                else:
                    # The single positional argument of `_SentenceEmbeddingModel.forward`.
                    yield [features]


class _Components(dict[str, Tensor]):
    """The components of a loss, and further terms to log: in `items`, but not in `values`, which are added up."""

    def __init__(self, components: Mapping[str, Tensor]) -> None:
        super().__init__(components)
        self._logged = set(getattr(components, "_logged", ()))

    def add_logged(self, terms: Mapping[str, float | Tensor]) -> None:
        """Add terms that are only logged, except those that are components already."""
        device = self.values()[0].device
        for name, term in terms.items():
            if name not in self:
                self[name] = torch.as_tensor(term, device=device).detach()
                self._logged.add(name)

    def values(self) -> Any:  # a list, because the trainer makes one
        return [self[name] for name in self if name not in self._logged]

    def items(self) -> Any:  # what the trainer logs
        return [(name, _Mean(torch.stack([self[name].nansum(), ~self[name].isnan()]))) for name in self]

    def __mul__(self, factor: Any) -> NoReturn:
        """Refuse what losses around other losses do, such as `MatryoshkaLoss`: they multiply a single number."""
        raise UserError(
            "a loss around PenaltyLoss would weight the penalty several times; put PenaltyLoss around it: "
            "PenaltyLoss(model, MatryoshkaLoss(model, loss, dims), penalty)"
        )

    __rmul__ = __mul__


class _Mean(Tensor):
    """A sum and its number of terms, `(2,)`, or those of several processes one after the other.

    The trainer adds them up and divides by the number of all batches, including those with the loss of another dataset.
    """

    def __bool__(self) -> bool:
        """Answer the question of the trainer whether to replace a term that is not finite."""
        return False

    def sum(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def __truediv__(self, num_batches: Any) -> Tensor:
        numbers = self.as_subclass(Tensor)
        return numbers[::2].sum() / numbers[1::2].sum()


class _SentenceEmbeddingModel(nn.Module):
    """A wrapper with a submodule `embeddings` that outputs the sentence embeddings, for `attach` to read."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model
        self.embeddings = nn.Identity()

    def forward(self, features: dict[str, Any]) -> Tensor:
        embeddings: Tensor = self.embeddings(self.model(features)["sentence_embedding"])
        return embeddings


class _AttachedLoss(AttachedPenalty):
    """The penalty on the points that a `PenaltyLoss` has collected in its latest forward pass."""

    def __init__(self, owner: PenaltyLoss) -> None:
        super().__init__(owner.penalty, owner.settings)
        self._owner = owner
        self._has_set_weight = False

    @property
    def num_layers(self) -> int:
        return self._owner.num_layers

    def set_weight(self, step: int, num_steps: int) -> None:
        self._has_set_weight = True
        super().set_weight(step, num_steps)

    def loss(self) -> Tensor:
        if self._owner.settings.has_schedule and not self._has_set_weight:
            raise UserError(
                "the schedule of PenaltyLoss needs its callback in the trainer, which sets lambda before each step: "
                "callbacks=[PenaltyLossCallback(loss)]"
            )
        return self.penalty.combine(self._owner.take_summaries())

    def remove(self) -> None:
        if self._has_set_weight:
            super().remove()
        self._has_set_weight = False

    def refresh(self, loader: Iterable[Any], num_points: int | None = NUM_POINTS, momentum: float = 0.0) -> int:
        return self._owner.refresh(loader, num_points, momentum)


class PenaltyLossCallback(PenaltyCallback):
    """Sets the weight of a `PenaltyLoss`, computes its Sigma_S before each epoch, and saves its state in checkpoints.

    Sigma_S is computed in an additional pass over the trainer's train dataloader in a different order, which affects
    neither the batches of training nor the global random number generators.

    Args:
        loss: the trainer's loss, one of its losses for several datasets, or a `PenaltyLoss` within one.

    Raises:
        UserError: in training, if two callbacks of the trainer would use the same file.
    """

    def __init__(self, loss: PenaltyLoss) -> None:
        super().__init__(loss)
        path = Path(STATE_FILE)
        self.state_file = f"{path.stem}{loss.suffix}{path.suffix}"

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the penalty's state if training resumes from a checkpoint."""
        # The trainer has one state for each training, which all callbacks get.
        used_files = vars(state).setdefault("penalty_files", set())
        if self.state_file in used_files:
            raise UserError(
                f"two PenaltyLossCallbacks use the file {self.state_file}; expected different ones: "
                'PenaltyLoss(..., suffix="_2")'
            )
        used_files.add(self.state_file)
        self.owner.resumed_checkpoint = _checkpoint_folder(args, state) if state.global_step > 0 else None
        super().on_train_begin(args, state, control, **kwargs)

    def on_log(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the terms that no batch had since the last log, for which the trainer has logged 0."""
        logs: dict[str, float] = kwargs["logs"]
        if "loss" in logs:
            for name, is_recent in self.owner.is_recent.items():
                if not is_recent:
                    logs.pop(name, None)
                    state.log_history[-1].pop(name, None)
                self.owner.is_recent[name] = False

    def on_pre_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Check nothing, because a step may use the loss of another dataset."""

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the penalty's state in the folder of the checkpoint."""
        save_penalty(self.attached, _checkpoint_folder(args, state) / self.state_file, args)

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the weight back that a schedule has changed."""
        self.attached.remove()


def _checkpoint_folder(args: TrainingArguments, state: Any) -> Path:
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}")
