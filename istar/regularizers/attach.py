"""How a penalty is fastened to a model: three lines in anybody's training loop."""

import warnings
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.regularizers.base import Penalty
from istar.regularizers.hidden_states import HiddenStateReader
from istar.regularizers.istar import IStar
from istar.regularizers.shrinkage import NUM_POINTS, hidden_state_moments, to_covariance


def attach(model: nn.Module, penalty: Penalty, modules: Sequence[nn.Module] | None = None) -> "Watch":
    """Fasten a penalty to a model, so that every forward pass with gradients prepares its loss.

    >>> import istar, transformers
    >>> config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    >>> model = transformers.GPT2LMHeadModel(config)
    >>> batch = {"input_ids": torch.arange(40).view(4, 10), "labels": torch.arange(40).view(4, 10)}
    >>> watch = istar.attach(model, istar.IStar(weight=-1.0, zeta=0.4))
    >>> points = watch.refresh([batch])
    >>> loss = model(**batch).loss + watch.loss()
    >>> loss.backward()
    >>> watch.remove()

    Args:
        model: a transformers model: bare, with a head, or wrapped by PEFT, DDP, FSDP2 or a module of yours. Attach
            before the first call of a compiled model. With `modules`, any module.
        penalty: `IStar`, `CosReg` or any other `Penalty`.
        modules: for a model that is not of transformers: the modules whose outputs are the hidden states of layers 1
            to L. The mask is the model's argument `attention_mask`, if it has one.

    Returns:
        A `Watch`, which is also a context manager: at its end the hooks are removed.

    Raises:
        UserError: if the model's hidden states cannot be read, or do not have the layers that the penalty names.
    """
    return Watch(model, penalty, modules)


class Watch:
    """A penalty on the forward passes of a model; see `attach`.

    The attention mask is that of the call, padded on either side; without one, all tokens count. Passes without
    gradients are not read, so that evaluation costs nothing. Under gradient checkpointing each state counts once.

    Attributes:
        penalty: the penalty, whose `last` holds the terms of the latest `loss()`.
    """

    def __init__(self, model: nn.Module, penalty: Penalty, modules: Sequence[nn.Module] | None = None) -> None:
        self.penalty = penalty
        self._model = model
        self._modules = modules
        self._reader = HiddenStateReader(model, penalty.layers, penalty.summarize, self._is_active, modules)
        self._has_warned = False

    @property
    def num_layers(self) -> int:
        """Number of layers whose hidden states the penalty reads in each pass."""
        return self._reader.num_chosen

    def loss(self) -> Tensor:
        """The weighted penalty of the latest forward pass, to be added to the task loss.

        Returns:
            0-d tensor, see `Penalty.forward`. 0 if the weight is 0, or if layerdrop skipped all chosen layers.

        Raises:
            UserError: if there was no forward pass with gradients since the last call.
        """
        if self.penalty.weight == 0:
            self._reader.discard()
            return self._zero()
        return self.combine(self.take())

    def take(self) -> list[Any]:
        """The layers' summaries of the latest pass, for a loss over several passes: see `combine`."""
        return self._reader.take()

    def combine(self, summaries: Sequence[Any]) -> Tensor:
        """The weighted penalty of the union of the layers of one or several passes, taken by `take`."""
        if not summaries:
            return self._zero()
        loss = self.penalty.combine(summaries)
        if not loss.requires_grad and torch.is_grad_enabled() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the penalty has no gradient: nothing before the chosen layers is trainable", UserWarning, stacklevel=3
            )
        return loss

    def refresh(self, loader: Iterable[Any], num_points: int | None = NUM_POINTS, momentum: float = 0.0) -> int:
        """Compute Sigma_S from batches of data, as *Stable Anisotropic Regularization* does before every epoch.

        The model runs in eval mode without gradients, in the precision of the surrounding `torch.autocast`, if any; its
        training mode and all random number generators are afterwards as they were. Does nothing for a penalty that has
        no Sigma_S.

        Args:
            loader: batches as the model takes them, labels included or not, in random order; for a progress bar, wrap
                it in one.
            num_points: points to use, counted over the chosen layers of all processes; None, or more points than
                there are, uses all batches.
            momentum: how much of the previous Sigma_S to keep, in [0, 1); 0 replaces it.

        Returns:
            The number of points used.

        Raises:
            UserError: for fewer than 2 points, points that are not finite, or a momentum outside of [0, 1).
        """
        if not isinstance(self.penalty, IStar) or not self.penalty.needs_shrinkage_covariance:
            return 0
        if not 0 <= momentum < 1:
            raise UserError(f"momentum is {momentum}; expected a number from 0 to below 1")
        penalty = self.penalty
        moments = hidden_state_moments(
            self._model,
            loader,
            num_points,
            penalty.layers,
            penalty.include_padding,
            penalty.sync,
            penalty.group,
            self._modules,
        )
        covariance, previous = to_covariance(moments), penalty.shrinkage_covariance
        if momentum > 0 and previous is not None:
            covariance = torch.lerp(covariance, previous.to(covariance), momentum)
        penalty.shrinkage_covariance = covariance
        return int(moments.count)

    def remove(self) -> None:
        """Take the hooks off the model."""
        self._reader.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _is_active(self) -> bool:
        # 0 x NaN is NaN: with weight 0 the penalty is not computed at all.
        return torch.is_grad_enabled() and self.penalty.weight != 0

    def _zero(self) -> Tensor:
        return torch.zeros((), device=next(self._model.parameters()).device)
