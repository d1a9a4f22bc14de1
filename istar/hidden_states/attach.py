"""`attach`, which adds a penalty on hidden states to the forward passes of a model."""

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from istar.errors import OptionError, UserError
from istar.hidden_states.attached_penalty import HIDDEN_STATES, NUM_POINTS, AttachedPenalty, PenaltySettings
from istar.hidden_states.embedding_penalty import EmbeddingPenalty
from istar.hidden_states.reader import HiddenStateReader
from istar.hidden_states.shrinkage import hidden_state_moments, to_covariance
from istar.measures.accumulator import sum_over_processes
from istar.regularizers.base import Penalty
from istar.regularizers.points import ALL_POINTS, Points, PointSample

DEFAULT_SETTINGS = PenaltySettings()
_attached_penalties: "weakref.WeakSet[HiddenStatePenalty]" = weakref.WeakSet()
"""The penalties of all models. The hooks of a model keep its penalty alive, even if no variable does."""


def attach(
    model: nn.Module,
    penalty: Penalty,
    modules: Sequence[str | nn.Module] | None = None,
    points: Points = ALL_POINTS,
) -> "HiddenStatePenalty":
    """Attach a penalty to a model, so that each forward pass with gradients reads the hidden states for it.

    After a forward pass, `loss()` returns the penalty, which the training loop adds to its loss. `refresh()` computes
    the shrinkage covariance of `IStar`, usually before each epoch. Two training passes in a row without `loss()` give a
    warning, except in a model that is compiled with its penalty.

    A second penalty of the same class on the same states replaces the first with a warning, for example when a notebook
    cell runs again. Penalties with other layers, points or set-points add up.

    >>> import istar, transformers
    >>> config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    >>> model = transformers.GPT2LMHeadModel(config)
    >>> batch = {"input_ids": torch.arange(40).view(4, 10), "labels": torch.arange(40).view(4, 10)}
    >>> attached = istar.attach(model, istar.IStar(weight=-1.0, zeta=0.4))
    >>> attached
    HiddenStatePenalty(GPT2LMHeadModel, IStar(weight=-1.0, zeta=0.4, layers='all'), 2 layers)
    >>> points = attached.refresh([batch])
    >>> loss = model(**batch).loss + attached.loss()
    >>> loss.backward()
    >>> attached.remove()

    Args:
        model: a transformers model, bare, with a head, or inside of PEFT, DDP, FSDP2 or another module. A compiled
            model must not have been called before. With `modules`, any module.
        penalty: `IStar`, `CosReg` or any other `Penalty`.
        modules: for models that are not transformers models, the modules that output the hidden states of layers 1 to
            L, or names or patterns of them, such as "blocks.*". The mask is the model's argument `attention_mask`, if
            it has one.
        points: which tokens are points; by default all that are not padding.

    Raises:
        UserError: if the model's hidden states cannot be read, a layer of the penalty does not exist, or the penalty
            counts padding and `points` chooses tokens. In a forward pass, if the call lacks inputs that the points
            depend on.
    """
    return HiddenStatePenalty(model, penalty, PenaltySettings(points), modules)


def attach_with_settings(
    model: nn.Module,
    penalty: Penalty,
    settings: PenaltySettings = DEFAULT_SETTINGS,
    modules: Sequence[str | nn.Module] | None = None,
) -> AttachedPenalty:
    """Attach a penalty as trainers do: to the hidden states, or to the embedding matrix named by the settings.

    `model`, `penalty` and `modules` are as in `attach`.
    """
    if isinstance(settings, PenaltySettings) and settings.target != HIDDEN_STATES:
        return EmbeddingPenalty(model, penalty, settings)
    return HiddenStatePenalty(model, penalty, settings, modules)


class HiddenStatePenalty(AttachedPenalty):
    """A penalty attached to the hidden states of a model; returned by `attach`.

    The attention mask is the argument of the model's forward pass; without one, all tokens count. It may have four
    dimensions, `(batch, 1, tokens, tokens)`, as for packed documents: a token that may attend to itself counts. Forward
    passes without gradients are not read, so evaluation is as fast as before. Activation checkpointing, enabled before
    or after attaching, does not change the gradient.

    A copy or pickle of an attached penalty, or of an object that contains it and the model, such as a LightningModule,
    is attached to its copy of the model. A copy of the model alone comes without a penalty.
    """

    def __init__(
        self,
        model: nn.Module,
        penalty: Penalty,
        settings: PenaltySettings = DEFAULT_SETTINGS,
        modules: Sequence[str | nn.Module] | None = None,
    ) -> None:
        super().__init__(penalty, settings)
        points = settings.points
        points.check_include_padding(penalty.include_padding)
        if settings.sample is not None and penalty.include_padding:
            raise OptionError(f"sample={settings.sample:g} leaves out tokens; include_padding=true counts all of them")
        self.needs_token_labels = points.need_labels
        self._model = model
        self._modules = modules
        self._reader = HiddenStateReader(
            model,
            penalty.layers,
            penalty.summarize,
            self._is_active,
            modules=modules,
            points=points,
            include_padding=penalty.include_padding,
            draw_sample=self._draw_sample,
            is_traceable=penalty.is_traceable and points.are_all and settings.sample is None,
        )
        self._purpose = self._reader.base_model, type(penalty), self._reader.names, points, penalty.set_point
        for earlier in list(_attached_penalties):
            if earlier._is_removed or earlier._purpose != self._purpose:
                continue
            earlier.remove()
            message = f"{self} replaces {earlier}: the earlier penalty of these states is removed"
            warnings.warn(message, UserWarning, stacklevel=3)
        _attached_penalties.add(self)

    def __repr__(self) -> str:
        return f"HiddenStatePenalty({type(self._model).__name__}, {self.penalty}, {self.num_layers} layers)"

    @property
    def num_layers(self) -> int:
        """Number of layers that the penalty reads in each pass."""
        return len(self._reader.names)

    def loss(self) -> Tensor:
        """Compute the weighted penalty of the latest forward pass, to be added to the task loss.

        Returns:
            0-d tensor, see `Penalty.forward`. It is 0 if the weight is 0, or if layerdrop skipped all selected layers.

        Raises:
            UserError: unless a forward pass with gradients ran since the last call, and after `remove`.
        """
        self._check_not_removed()
        penalty = self.penalty
        if penalty.weight == 0:
            self._reader.discard()
        summaries = self._reader.take() if penalty.weight != 0 else []
        if not summaries:
            penalty.last = None
            return torch.zeros((), device=next(self._model.parameters()).device)
        loss = penalty.combine(summaries)
        self._warn_if_no_gradient(loss, "nothing before the chosen layers is trainable")
        if self.settings.points.max_norm_ratio is not None and penalty.last is not None:
            num_left_out = torch.tensor(float(self._reader.num_left_out), device=loss.device)
            if penalty.sync:
                num_left_out = sum_over_processes(num_left_out, penalty.group)
            penalty.last = penalty.last._replace(left_out=num_left_out)
        return loss

    def refresh(self, loader: Iterable[Any], num_points: int | None = NUM_POINTS, momentum: float = 0.0) -> int:
        """Compute the shrinkage covariance Sigma_S of an `IStar` penalty from batches of data.

        *Stable Anisotropic Regularization* does this before every epoch. The model runs as in `shrinkage_covariance`;
        its training mode and the random number generators are restored. Does nothing for penalties without Sigma_S.

        Args:
            loader: batches in random order that the model accepts. Labels are ignored, unless the points depend on
                them: Sigma_S is computed from the same points as the penalty.
            num_points: number of points to use, see `shrinkage_covariance`; None uses all batches.
            momentum: weight of the previous Sigma_S in the new one, in [0, 1).

        Returns:
            The number of points used.

        Raises:
            UserError: as `shrinkage_covariance`, and for a momentum outside [0, 1).
        """
        penalty = self.penalty
        if not penalty.needs_shrinkage_covariance:
            return 0
        if not 0 <= momentum < 1:
            raise UserError(f"momentum is {momentum}; expected a number from 0 to below 1")
        options = penalty.layers, penalty.include_padding, penalty.sync, penalty.group
        moments = hidden_state_moments(self._model, loader, num_points, *options, self._modules, self.settings.points)
        covariance, previous = to_covariance(moments), penalty.shrinkage_covariance
        if momentum > 0 and previous is not None:
            covariance = torch.lerp(covariance, previous.to(covariance), momentum)
        penalty.shrinkage_covariance = covariance
        return int(moments.count)

    def check_batch_size(self, num_sequences: int) -> None:
        """Raise `UserError` if no micro-batch can have a score.

        `num_sequences` is the largest number of sequences (documents) in a micro-batch, over all processes that compute
        one penalty.
        """
        which, penalty = self.settings.points.which, self.penalty
        if which not in ("first", "last") or penalty.weight == 0:
            return
        # Each sequence has one point in each layer.
        if num_sequences * self.num_layers < penalty.min_points or penalty.min_points_per_sequence > 1:
            raise UserError(
                f"a micro-batch of {num_sequences} sequences with points={which} in {self.num_layers} layers has no "
                f"{penalty.measure}: choose a larger batch size, more layers or points=all"
            )

    def remove(self) -> None:
        """Remove the hooks from the model; see `AttachedPenalty.remove`."""
        super().remove()
        self._reader.remove()

    def __getstate__(self) -> dict[str, Any]:
        # The hooks of a copied model call a copied reader without attributes; `__setstate__` restores them.
        return {**self.__dict__, "reader_state": self._reader.copied_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        reader_state = state.pop("reader_state")
        self.__dict__.update(state)
        self._reader.__dict__.update(reader_state)
        _attached_penalties.add(self)

    def _draw_sample(self) -> PointSample | None:
        """Return the sample of the points of the next pass: one random number a pass, on all processes alike."""
        if self.settings.sample is None:
            return None
        return PointSample(self.settings.sample, int(torch.randint(2**62, (), generator=self._generator, device="cpu")))

    def _is_active(self) -> bool:
        # With weight 0 the penalty is skipped, because 0 times a NaN penalty would be NaN.
        return torch.is_grad_enabled() and not self.penalty.is_skipped
