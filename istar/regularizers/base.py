"""What every penalty on hidden states has in common."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from istar.errors import UserError
from istar.regularizers.points import ALL_TOKENS, Layers, Tokens, select_layers


class Terms(NamedTuple):
    """A penalty before its weight, and what it was computed from; all 0-d tensors.

    Attributes:
        value: the penalty, differentiable.
        score: the measure that the penalty pushes, such as IsoScore*.
        points: number of points in the cloud, over all processes.
        zeta: the shrinkage weight, where it is estimated from the points.
    """

    value: Tensor
    score: Tensor
    points: Tensor
    zeta: Tensor | None = None

    def detach(self) -> Self:
        """The same terms without their graph, for logs."""
        zeta = None if self.zeta is None else self.zeta.detach()
        return type(self)(self.value.detach(), self.score.detach(), self.points.detach(), zeta)


class Penalty(nn.Module, ABC):
    """A penalty on hidden states, a loss like any other: `loss = task_loss + penalty(hidden_states, attention_mask)`.

    The points of all chosen layers form one cloud. Each layer is summarized by itself, as soon as a model has computed
    it, and the score is computed from the summaries.

    Args:
        weight: lambda, any finite number. It may be changed at any time, for example by a schedule.
        layers: see `istar.regularizers.points.select_layers`.
        include_padding: count padding tokens as points.
        sync: one cloud of the points of all processes, instead of one cloud per process.
        group: the process group of that cloud; None is the default group.

    Attributes:
        last: detached terms of the last penalty, for logs; None before the first.

    Raises:
        UserError: for a weight that is not finite.
    """

    measure: str
    """Name of the score in logs."""

    def __init__(
        self,
        weight: float,
        layers: Layers,
        include_padding: bool = False,
        sync: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.layers = layers
        self.include_padding = include_padding
        self.sync = sync
        self.group = group
        self.last: Terms | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and not math.isfinite(value):
            raise UserError(f"lambda is {value}; expected a finite number")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"weight={self.weight}, layers={self.layers!r}"

    def forward(self, hidden_states: Sequence[Tensor], attention_mask: Tensor | None = None) -> Tensor:
        """The weighted penalty of a batch; its terms are in `last` afterwards.

        Args:
            hidden_states: embedding output and the output of every layer, `(batch, tokens, d)` each, as transformers'
                `output_hidden_states=True` returns them; any floating dtype, sums are float32 or wider.
            attention_mask: `(batch, tokens)`, 1 for tokens and 0 for padding; None counts all tokens.

        Returns:
            0-d tensor on the hidden states' device: float32, or float64 for float64 states. NaN where the points have
            no score: fewer than two, all equal, or not finite. With weight 0 it is 0, whatever the states hold.

        Raises:
            UserError: for shapes that do not fit, or layers that do not exist.
        """
        chosen = select_layers(hidden_states, self.layers)
        if self.weight == 0:
            return torch.zeros((), device=chosen[0].device)
        tokens = Tokens(attention_mask)
        return self.combine([self.summarize(state, tokens) for state in chosen])

    def combine(self, summaries: Sequence[Any]) -> Tensor:
        """The weighted penalty of the union of layers that `summarize` has summarized, as `forward` returns it."""
        terms = self.score(summaries)
        self.last = terms.detach()
        return self.weight * terms.value

    def summarize(self, hidden_state: Tensor, tokens: Tokens) -> Any:
        """What the score needs of one layer `(batch, tokens, d)`: sums over its points."""
        tokens = ALL_TOKENS if self.include_padding else tokens
        tokens.check(hidden_state)
        with torch.autocast(hidden_state.device.type, enabled=False):
            return self.summarize_points(hidden_state.flatten(0, -2), tokens.rows)

    @abstractmethod
    def summarize_points(self, points: Tensor, rows: Tensor | None) -> Any:
        """`summarize` of those rows of points `(n, d)` that count, all for None; outside of autocast."""

    @abstractmethod
    def score(self, summaries: Sequence[Any]) -> Terms:
        """The terms of the union of the summarized layers, over all processes if `sync` is set."""
