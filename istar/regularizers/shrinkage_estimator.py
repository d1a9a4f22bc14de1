r"""IsoScore\* of layers and its gradient in closed form, from the means and scatter matrices of the layers.

The layer l has :math:`n_l` points with the mean :math:`m_l` and the scatter matrix :math:`M_l`. The union of all N
points has the mean m and the scatter matrix M. IsoScore\* of the shrunk covariance does not change if the covariance is
multiplied by a number, so it is computed from S:

.. math::
    M = \sum_l M_l + n_l (m_l - m)(m_l - m)^T, \qquad
    S = \Sigma_S + \frac{1 - \zeta}{\zeta (N - 1)} M.

With the ratio :math:`r = \operatorname{tr}(S) / \lVert S \rVert_F`, IsoScore\* is :math:`(r^2 - 1) / (d - 1)`, and

.. math::
    \frac{\partial r^2}{\partial S} = 2 c (I - c S), \qquad c = r / \lVert S \rVert_F.

Plain autograd would record some thirty operations on matrices `(d, d)`, which a GPU launches one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from istar.measures.accumulator import world_size
from istar.measures.batch_moments import BatchMoments, Precision, mean_and_scatter_of_layers
from istar.measures.isoscores import covariance_or_nan, unchecked_isoscore
from istar.measures.numerics import accumulation_dtype, full_precision, is_rounding
from istar.regularizers.base import Terms
from istar.regularizers.estimators import Estimator, check_dim, convert_shrinkage, has_variance, merge_layers
from istar.regularizers.points import check_same_width


class ScoreResult(NamedTuple):
    """Result of `ShrinkageEstimator.evaluate`; 0-d tensors on the device of the layers.

    Attributes:
        value: the score or the weighted penalty, differentiable, in the dtype of the scatter matrices.
        trace: tr(S), detached; it is finite if and only if all points are.
        norm: the Frobenius norm of S, detached.
        is_undefined: whether finite points have no score; None if the host knows that they have one.
        num_points: N, an integer unless only the device knows it.
        dim: d.
    """

    value: Tensor
    trace: Tensor
    norm: Tensor
    is_undefined: Tensor | None
    num_points: int | Tensor
    dim: int

    def count_points(self) -> Tensor:
        """Return N as a tensor, without a copy from the host to the device."""
        return torch.full_like(self.trace, self.num_points) if isinstance(self.num_points, int) else self.num_points

    def make_terms(self) -> Terms:
        """Return the detached terms for logs."""
        score = ((self.trace / self.norm).square() - 1) / (self.dim - 1)
        penalty = 1 - score
        if self.is_undefined is not None:
            score = score.masked_fill(self.is_undefined, torch.nan)
            penalty = penalty.masked_fill(self.is_undefined, 0)
        return Terms(penalty.to(self.value), score.to(self.value), self.count_points())


class ShrinkageEstimator(Estimator):
    r"""IsoScore\* of the paper, Algorithm 1: the covariance is (1 - zeta) Cov(X) + zeta Sigma_S.

    Args:
        zeta: weight of Sigma_S from 0 to 1.
        compute: precision of the products with the points; None for `default_precision`.
    """

    def __init__(self, zeta: float, compute: Precision | None) -> None:
        self.zeta = zeta
        # Without Sigma_S, the score is IsoScore.
        self.measure = "isoscore_star" if zeta > 0 else "isoscore"
        self._compute = compute

    def summarize(self, hidden_states: Sequence[Tensor], rows: Sequence[Tensor | None]) -> list[Any]:
        """Return the moments of stacks of layers."""
        first = hidden_states[0]
        is_autocast = torch.is_autocast_enabled(first.device.type)
        precision = self._compute or default_precision(first.device.type, first.dtype, is_autocast)
        return mean_and_scatter_of_layers(hidden_states, rows, precision)

    def estimate(
        self, summaries: Sequence[Any], shrinkage: Tensor | None, sync: bool, group: dist.ProcessGroup | None
    ) -> Terms:
        result = self.evaluate(summaries, shrinkage, sync, group)
        return Terms(1 - result.value, result.value, result.count_points(), sums=(result.trace,))

    def score(self, moments: Any, shrinkage: Tensor | None) -> tuple[Tensor, None]:
        """Return the score by plain autograd: the twin of `evaluate`, for second derivatives."""
        covariance = covariance_or_nan(moments)
        if shrinkage is None:
            return torch.where(has_variance(moments), unchecked_isoscore(covariance), torch.nan), None
        shrunk = torch.lerp(covariance, convert_shrinkage(shrinkage, covariance), self.zeta)
        return unchecked_isoscore(shrunk), None

    def evaluate(
        self,
        stacks: Sequence[BatchMoments],
        shrinkage: Tensor | None,
        sync: bool,
        group: dist.ProcessGroup | None,
        weight: float | None = None,
    ) -> ScoreResult:
        r"""Compute the score, or the penalty weight (1 - score), of the union of layers.

        The gradient is in closed form. A second derivative recomputes the score by `score`.

        Args:
            stacks: results of `summarize`.
            shrinkage: Sigma_S, `(d, d)`, or None if zeta is 0.
            sync: estimate one score from the points of all processes. They exchange sums once, in the forward pass,
                and must use the result in the same way: the gradient is that of the sum of all processes' losses.
            group: process group for `sync`; None is the default group.
            weight: weight of the penalty; None returns the score. If the points have no score, the penalty and its
                gradient are 0, and the score is NaN.
        """
        dim = stacks[0].scatter.shape[0]
        check_same_width(len(stack.scatter) for stack in stacks)
        check_dim(dim)
        means = torch.cat([stack.mean for stack in stacks]) if len(stacks) > 1 else stacks[0].mean
        scatter = stacks[0].scatter
        for stack in stacks[1:]:
            scatter = scatter + stack.scatter
        slope = 1 / (dim - 1)
        options = _Options(
            sizes=_join_sizes(stacks),
            shrinkage=convert_shrinkage(shrinkage, scatter) if shrinkage is not None and self.zeta > 0 else None,
            zeta=self.zeta,
            offset=-slope if weight is None else weight * (1 + slope),
            slope=slope if weight is None else -weight * slope,
            undefined_value=torch.nan if weight is None else 0.0,
            num_processes=world_size(group) if sync else 1,
            group=group,
        )

        def compute_plainly(means: Tensor, scatter: Tensor) -> Tensor:
            moments = merge_layers([BatchMoments(options.sizes, means, scatter)], sync, group)
            score, _ = self.score(moments, options.shrinkage)
            return options.offset + options.slope * (1 + (dim - 1) * score)

        value, trace, norm, is_undefined, num_points = _ClosedForm.apply(options, compute_plainly, means, scatter)
        return ScoreResult(value, trace, norm, is_undefined, num_points, dim)


def default_precision(device_type: str, dtype: torch.dtype, is_autocast: bool) -> Precision:
    """Return the precision of products with hidden states: float32, or TF32 for states of half precision on CUDA.

    These are states in bfloat16 or float16, and states of a model under autocast, which have the errors of its
    products. TF32 adds relative errors of 5e-7 to the score, and of 2e-4 to the gradient (emulated, for MiniLM).
    """
    is_half = is_autocast or torch.finfo(dtype).bits == 16
    return "tf32" if is_half and device_type == "cuda" else "float32"


@dataclass(frozen=True)
class _Options:
    """What `_ClosedForm` computes: offset + slope r^2, for the shrunk covariance of layers with the given sizes."""

    sizes: int | Tensor  # number of points of each layer, `(L,)` unless all have as many
    shrinkage: Tensor | None
    zeta: float
    offset: float
    slope: float
    undefined_value: float  # the result if finite points have no score
    num_processes: int
    group: dist.ProcessGroup | None


class _ClosedForm(torch.autograd.Function):
    """Autograd function of the means `(L, d)` of layers and the sum of their scatter matrices `(d, d)`.

    It returns the value of the options, tr(S), the norm of S, whether the points have no score, and their number; see
    `ScoreResult`. Only the value has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, options: _Options, compute_plainly: Callable[..., Tensor], means: Tensor, scatter: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int | Tensor]:
        with full_precision(means.device):
            union = _merge_layers(means, options.sizes, scatter)
            if options.num_processes > 1:
                union = _merge_processes(means, union, options.group)
        shrunk, scatter_weight = _shrink(union, options.zeta, options.shrinkage)
        sums_dtype = accumulation_dtype(means.device)
        trace = shrunk.diagonal().sum(dtype=sums_dtype)
        norm: Tensor = torch.linalg.vector_norm(shrunk, dtype=sums_dtype)
        ratio = trace / norm
        offset = _make_constant(options.offset, sums_dtype, means.device)
        value = torch.addcmul(offset, ratio, ratio, value=options.slope, out=shrunk.new_empty(()))
        is_undefined = _find_undefined(union, trace, options.zeta)
        if is_undefined is not None:
            value = value.masked_fill(is_undefined, options.undefined_value)
        ctx.save_for_backward(shrunk, ratio, norm, union.deviations, is_undefined, means, scatter)
        ctx.options, ctx.compute_plainly, ctx.scatter_weight = options, compute_plainly, scatter_weight
        ctx.mark_non_differentiable(trace, norm)
        ctx.set_materialize_grads(False)
        return value, trace, norm, is_undefined, union.num_points

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        shrunk, ratio, norm, deviations, is_undefined, means, scatter = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *_differentiate(ctx.compute_plainly, (means, scatter), grad, is_undefined)
        # The gradient for M is G = grad slope 2 c (I - c S) dS/dM, in which dS/dM is a number, the weight of M in S.
        c = ratio / norm
        scale = -2 * ctx.options.slope * ctx.options.num_processes
        weight: float | Tensor = ctx.scatter_weight
        known_scale = scale * weight if isinstance(weight, float) else scale
        multiplier = torch.addcmul(_make_constant(0.0, c.dtype, c.device), c, grad.to(c), value=known_scale)
        if isinstance(weight, Tensor):
            multiplier = multiplier * weight
        grad_scatter = shrunk * c
        grad_scatter.diagonal().sub_(1)
        grad_scatter.mul_(multiplier)
        if is_undefined is not None:
            grad_scatter.masked_fill_(is_undefined, 0)
        # The gradient for the mean of a layer is 2 n_l G (m_l - m).
        sizes = ctx.options.sizes
        with full_precision(grad.device):
            if isinstance(sizes, int):
                grad_means = torch.addmm(deviations, deviations, grad_scatter, beta=0, alpha=2 * sizes)
            else:
                grad_means = (2 * sizes[:, None] * deviations) @ grad_scatter
        return None, None, grad_means, grad_scatter


class _Union(NamedTuple):
    """The union of layers, possibly of several processes; `deviations` are m_l - m for the layers of this process."""

    num_points: int | Tensor
    mean: Tensor
    deviations: Tensor
    scatter: Tensor


def _join_sizes(stacks: Sequence[BatchMoments]) -> int | Tensor:
    """Return the number of points of each layer: an integer if the host knows that all have as many, else `(L,)`."""
    size = stacks[0].size
    if all(isinstance(stack.size, int) and stack.size == size for stack in stacks):
        return size
    return torch.cat([stack.size * torch.ones_like(stack.mean[:, 0]) for stack in stacks])


def _merge_layers(means: Tensor, sizes: int | Tensor, scatter: Tensor) -> _Union:
    """Return the union of layers: means `(L, d)`, sizes as of `_join_sizes`, and the sum of their scatter matrices."""
    if isinstance(sizes, int):
        mean = means.mean(0)
        deviations = means - mean
        scatter = torch.addmm(scatter, deviations.T, deviations, alpha=sizes)
        return _Union(sizes * len(means), mean, deviations, scatter)
    num_points = sizes.sum(dtype=accumulation_dtype(means.device))
    mean = sizes @ means / num_points.clamp(min=1).to(means)
    deviations = means - mean
    return _Union(num_points, mean, deviations, torch.addmm(scatter, sizes * deviations.T, deviations))


def _merge_processes(means: Tensor, union: _Union, group: dist.ProcessGroup | None) -> _Union:
    r"""Return the union of the unions of all processes, with one all-reduce.

    The processes add up :math:`M + N m m^T` in float64, in which subtracting :math:`N m m^T` of the union costs no
    digits of float32.
    """
    dim, sums_dtype = len(union.mean), accumulation_dtype(means.device)
    mean = union.mean.to(sums_dtype)
    total = mean * union.num_points
    second_moment = torch.addr(union.scatter.to(sums_dtype), total, mean)
    count = torch.ones_like(mean[:1]) * union.num_points
    packed = torch.cat([count, total, second_moment.flatten()])
    dist.all_reduce(packed, group=group)
    count, total, second_moment = packed.split([1, dim, dim * dim])
    mean = total / count.clamp(min=1)
    scatter = torch.addr(second_moment.view(dim, dim), total, mean, alpha=-1).to(means.dtype)
    return _Union(count.squeeze(0), mean, means - mean.to(means.dtype), scatter)


def _shrink(union: _Union, zeta: float, shrinkage: Tensor | None) -> tuple[Tensor, float | Tensor]:
    """Return S and the weight of M in it; without Sigma_S, S is M."""
    if shrinkage is None:
        return union.scatter, 1.0
    ratio = (1 - zeta) / zeta
    if isinstance(union.num_points, int):
        weight = ratio / max(union.num_points - 1, 1)
        return torch.add(shrinkage, union.scatter, alpha=weight), weight
    weight_on_device = ratio / (union.num_points - 1).clamp(min=1)
    return torch.addcmul(shrinkage, union.scatter, weight_on_device.to(shrinkage)), weight_on_device


def _find_undefined(union: _Union, trace: Tensor, zeta: float) -> Tensor | None:
    """Return whether finite points have no score, 0-d, bool; None if the host knows that they have one.

    Points have no score if there are fewer than 2 or, without Sigma_S, if all are equal up to rounding.
    """
    num_points = union.num_points
    if isinstance(num_points, int):
        if num_points >= 2 and zeta > 0:
            return None
        num_points = torch.full_like(trace, num_points)
    is_undefined = num_points < 2
    if zeta == 0:
        is_undefined = is_undefined | is_rounding(trace, num_points * union.mean.to(trace).square().sum())
    return is_undefined & trace.isfinite()


def _differentiate(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor, is_undefined: Tensor | None
) -> Sequence[Tensor | None]:
    """Return the gradients of a function, times `grad`, with the graph for further derivatives."""
    if is_undefined is not None and is_undefined:
        return [0 * tensor for tensor in tensors]
    return torch.autograd.grad(function(*tensors), tensors, grad, create_graph=True)


@lru_cache(maxsize=64)
def _make_constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a 0-d tensor, made once, because a copy or a fill would be a further operation of each step."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)
