"""A score of the union of several layers' points, with its gradient, as the layers come.

Plain autograd would keep the points of all layers side by side, take the products with both X and X^T in backward, and
add each layer's share of the gradient in a pass of its own. Here each layer is an identity that the model computes
through: on the way forward it adds its points to the sums, on the way back its share to the gradient that is passing.
Where all that takes no time, but calling it does, the layers are taken together at the end.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from istar.measures import FourthMoments, Moments
from istar.measures.moments import full_precision
from istar.measures.products import slices, times_transposed
from istar.measures.union import UnionPoints, UnionSums, are_few
from istar.regularizers.base import world_size
from istar.regularizers.points import gather_points


class Scored(NamedTuple):
    """A score, the zeta in it, and its derivatives by the covariance and, if that is in it, by the fourth-order sum.

    That sum's own gradient needs the third-order one.
    """

    value: Tensor
    zeta: Tensor
    by_covariance: Tensor
    by_fourth: Tensor | None = None
    third: Tensor | None = None


class Estimator(Protocol):
    """From the moments of the union to the score and its derivatives."""

    @property
    def needs_fourth(self) -> bool:
        """Whether they must be `FourthMoments`; the products are then those of the sums."""

    def check(self, moments: Moments) -> None:
        """Refuse moments that have no score."""

    def __call__(self, moments: Moments) -> Scored:
        """NaN where there is no score."""


class UnionScore:
    """The score of the union of layers, each of which passes through `add` on its way through the model.

    Args:
        estimator: of the score.
        index: which points count, see `istar.regularizers.points.token_index`.
        sync: over the union of all processes' points.
        products: dtype of the products with the points; None takes that of the sums.
        checked: let the estimator look at the moments first, which makes the host wait for a device.
    """

    def __init__(
        self,
        estimator: Estimator,
        index: Tensor | None,
        sync: bool,
        products: torch.dtype | None = None,
        checked: bool = False,
    ) -> None:
        self._pass = _Pass(estimator, index, sync, products, checked)
        self._links: list[Tensor] = []
        self._states: list[Tensor] = []  # few points: of all layers, to be taken together

    def add(self, hidden_state: Tensor) -> Tensor:
        """Take in a layer's points `(batch, tokens, d)`.

        Returns:
            The same numbers. What is computed from them hands its gradient back through this layer's share, which
            costs less than adding both; but what is computed from the tensor given gets the same gradient.
        """
        if self._states or (not self._links and self._pass.is_for_few(hidden_state)):
            self._states.append(hidden_state)
            return hidden_state
        hidden_state, link = _Layer.apply(self._pass, hidden_state)
        self._links.append(link)
        return hidden_state

    def score(self) -> tuple[Tensor, Tensor]:
        """The score, differentiable, at least float32, and the zeta in it, detached; both 0-d."""
        # Not kept: the links hold the graph, which holds the pass.
        links, states, self._links, self._states = self._links, self._states, [], []
        score, zeta = _Together.apply(self._pass, *states) if states else _Score.apply(self._pass, *links)
        return score, zeta


@dataclass(frozen=True)
class _Gradient:
    """Of the points x, `y G` and, with `cubic = (c, t / n)`, `c (||y||^2 y - t / n)` on top, for y = x - mean.

    Attributes:
        linear: G. rounded: G in the dtype of the products.
    """

    mean: Tensor
    linear: Tensor
    rounded: Tensor
    cubic: tuple[Tensor, Tensor] | None

    def exact(self, points: Tensor) -> Tensor:
        centered = points - self.mean.to(self.linear.dtype)
        rows = times_transposed(centered, self.linear)
        if self.cubic is not None:
            factor, offset = self.cubic
            # Wide until they are multiplied: cubes leave float32 where the gradient does not.
            squares = centered.square().sum(-1, keepdim=True).to(factor.dtype)
            rows = rows.addcmul_((factor * squares).to(rows.dtype), centered).sub_((factor * offset).to(rows.dtype))
        return rows

    def of_centered(self, points: Tensor, shift: Tensor) -> Tensor:
        """Of points `(..., n, d)` about a shift `(..., d)`, whose product is in their dtype.

        What the shift misses of the mean is exact.
        """
        missed = (shift - self.mean.to(shift.dtype)) @ self.linear
        return missed[..., None, :] + points @ self.rounded


@dataclass
class _Pass:
    """What the layers and the score of one pass share."""

    estimator: Estimator
    index: Tensor | None
    sync: bool
    products: torch.dtype | None
    checked: bool
    sums: UnionSums | FourthMoments | None = None
    gradient: _Gradient | None = field(default=None, repr=False)

    def is_for_few(self, states: Tensor) -> bool:
        """Whether layers like this one are better taken together."""
        if self.estimator.needs_fourth:
            return False
        count = states[..., 0].numel() if self.index is None else len(self.index)
        return are_few(count, states.shape[-1], self.products or states.dtype, states.device)

    def add(self, states: Tensor, keep: bool) -> tuple[Tensor, Tensor] | None:
        """Sum the points; returns them about a shift if backward shall use that, as it takes less memory."""
        if self.sums is None:
            fourth = self.estimator.needs_fourth
            self.sums = FourthMoments(states.shape[-1], states.device) if fourth else UnionSums(self.products)
        if isinstance(self.sums, FourthMoments):
            self.sums.update(gather_points(states, self.index))
            return None
        is_smaller = self.products is not None and self.products.itemsize < states.dtype.itemsize
        return self.sums.add(states, self.index, keep and is_smaller)

    def score(self, moments: Moments) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """The score, the zeta in it, and what `differentiate` needs."""
        if self.sync:
            moments.all_reduce()
        if self.checked:
            self.estimator.check(moments)
        scored = self.estimator(moments)
        return scored.value, scored.zeta, (moments.count, moments.mean, *scored[2:])

    def differentiate(
        self,
        grad_score: Tensor,
        count: Tensor,
        mean: Tensor,
        by_covariance: Tensor,
        by_fourth: Tensor | None,
        third: Tensor | None,
    ) -> _Gradient:
        """By the points, from the gradient by the score."""
        scale = grad_score * (world_size() if self.sync else 1)
        linear = (by_covariance * (2 * scale / (count - 1))).to(grad_score.dtype)
        cubic = None
        if by_fourth is not None and third is not None:
            cubic = (4 * scale * by_fourth, third / count)
        return _Gradient(mean, linear, linear.to(self.products or linear.dtype), cubic)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: _Pass, states: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        kept = shared.add(states, ctx.needs_input_grad[1])
        ctx.shared, ctx.like = shared, (states.shape, states.dtype)
        ctx.save_for_backward(*(kept or (states, None)))
        return states, states.new_zeros((), dtype=torch.promote_types(states.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, link: Tensor | None) -> tuple[None, Tensor | None]:
        if link is None:
            return None, grad
        shape, dtype = ctx.like
        index, gradient, (points, shift) = ctx.shared.index, ctx.shared.gradient, ctx.saved_tensors
        points = points.reshape(-1, shape[-1])
        is_gathered = index is None or shift is not None
        if grad is None or index is None:
            total = points.new_zeros(shape, dtype=dtype) if grad is None else torch.empty_like(grad)
        else:
            total = grad.clone()
        flat, passing = total.view(-1, shape[-1]), None if grad is None else grad.reshape(-1, shape[-1])
        with full_precision(points.device):
            count = len(points) if is_gathered else len(index)
            for chosen in slices(count, shape[-1], gradient.rounded.dtype, points.device):
                block = points[chosen] if is_gathered else points.index_select(0, index[chosen])
                rows = gradient.exact(block) if shift is None else gradient.of_centered(block, shift)
                if index is not None:
                    flat.index_add_(0, index[chosen], rows.to(dtype))
                elif passing is not None:
                    torch.add(passing[chosen], rows, out=flat[chosen])
                else:
                    flat[chosen] = rows
        return None, total


class _Score(torch.autograd.Function):
    """Of layers that have passed."""

    @staticmethod
    def forward(ctx: Any, shared: _Pass, *links: Tensor) -> tuple[Tensor, Tensor]:
        assert shared.sums is not None
        moments = shared.sums.moments() if isinstance(shared.sums, UnionSums) else shared.sums
        value, zeta, needed = shared.score(moments)
        ctx.shared = shared
        ctx.save_for_backward(*needed)
        ctx.mark_non_differentiable(zeta)
        return value.to(links[0].dtype), zeta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_score: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # The layers' backward comes behind this one: it needs the gradient of their links.
        ctx.shared.gradient = ctx.shared.differentiate(grad_score, *ctx.saved_tensors)
        return None, *(grad_score if needed else None for needed in ctx.needs_input_grad[1:])


class _Together(torch.autograd.Function):
    """The score of layers that are taken at once."""

    @staticmethod
    def forward(ctx: Any, shared: _Pass, *states: Tensor) -> tuple[Tensor, Tensor]:
        union = UnionPoints(states, shared.index, shared.products)
        value, zeta, needed = shared.score(union.moments())
        ctx.shared, ctx.like = shared, (states[0].shape, states[0].dtype)
        ctx.save_for_backward(union.points, union.shifts, *needed)
        ctx.mark_non_differentiable(zeta)
        return value.to(union.shifts.dtype), zeta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_score: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        points, shifts, *needed = ctx.saved_tensors
        shape, dtype = ctx.like
        gradient, index = ctx.shared.differentiate(grad_score, *needed), ctx.shared.index
        with full_precision(points.device):
            rows = gradient.of_centered(points, shifts).to(dtype)
        if index is not None:
            padded = rows.new_zeros(len(points), shape.numel() // shape[-1], shape[-1])
            rows = padded.index_copy_(1, index, rows)
        layers = rows.view(-1, *shape).unbind()
        return None, *(own if needed else None for own, needed in zip(layers, ctx.needs_input_grad[1:], strict=True))
