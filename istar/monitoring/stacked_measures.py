"""Measures of several states at once, from samples of their points, with standard errors over sequences.

States of the same shape are stacked: measured one by one, those of a small model would take longer than a step of its
training. The sums of a process are about the origin, so that one all-reduce adds the sums of all processes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from istar.measures.accumulator import world_size
from istar.measures.numerics import accumulation_dtype, full_precision, inverse_or_zero, is_rounding

SAMPLE_MEASURES_WITH_ERROR = (
    *("isoscore_unbiased", "isoscore", "participation_ratio", "inter_sim", "average_norm", "outlier_severity"),
)
"""Measures with a standard error, by the names of the table of measures."""
SAMPLE_MEASURES = (*SAMPLE_MEASURES_WITH_ERROR, "largest_activation", "effective_rank")
"""Measures that can be computed from a sample."""
_COVARIANCE_MEASURES = {"isoscore_unbiased", "isoscore", "participation_ratio", "effective_rank"}
_MAX_STACK_BYTES = 2**28
"""Maximum bytes of the points or of the sums of the states that are measured at once, unless one state has more."""


class StateSample(NamedTuple):
    """The sampled points of a state.

    Attributes:
        points: `(n, d)`, of any floating dtype.
        groups: `(n,)`, integers; points of different groups, such as sequences, are independent of each other.
    """

    points: Tensor
    groups: Tensor


@torch.no_grad()
def measure_samples(
    samples: Mapping[str, StateSample],
    names: Sequence[str],
    states: Sequence[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> dict[str, dict[str, float]]:
    r"""Compute measures of samples by state, of all processes together.

    The standard error is that of the delta method, with groups as clusters. For a measure :math:`\theta` with the
    influence :math:`\psi_i` of point i, and k groups g, it is the root of
    :math:`\frac{k}{k - 1} \frac{1}{n^2} \sum_g (\sum_{i \in g} \psi_i)^2`. It is the deviation that a new sample of
    other groups would cause, without the bias of small samples.

    Args:
        samples: at most one sample for each state. A process may lack some states, or all.
        names: names of measures, from `SAMPLE_MEASURES`.
        states: names of all states that a process may have, equal in all processes; None means those of `samples`.
        process_group: processes whose samples are measured together, with one all-reduce of maxima, one of sums, and
            one of the sums for standard errors; by default all. Wide states take several.
        device: where the sums are computed; None means the device of the first sample.

    Returns:
        For each state with points: `points` and `sequences`, the numbers of points and of groups, the measures, and
        `<measure>_error`. A measure that is not defined, or of points that are not finite, is NaN.
    """
    states = list(samples) if states is None else list(states)
    if device is None:
        device = next(iter(samples.values())).points.device
    widths, num_points, largest = _find_maxima(samples, states, process_group, device)
    needs_scatter = not _COVARIANCE_MEASURES.isdisjoint(names)
    results: dict[str, dict[str, float]] = {}
    with full_precision(device):
        for width in sorted(set(widths.values()) - {0}):
            same_width = [state for state in states if widths[state] == width]
            most_points = max(num_points[state] for state in same_width)
            bytes_of_state = 8 * width * max(width if needs_scatter else 1, most_points)
            num_states = max(_MAX_STACK_BYTES // bytes_of_state, 1)
            for start in range(0, len(same_width), num_states):
                part = same_width[start : start + num_states]
                results |= _measure_same_width(samples, part, width, names, process_group, device)
    return {
        state: _sort_values({**results[state], "largest_activation": largest[state]}, names)
        for state in states
        if state in results
    }


def _find_maxima(
    samples: Mapping[str, StateSample], states: Sequence[str], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
    """Return the largest width, number of points and absolute value of each state in any process; 0 without points.

    All processes have the same result, which decides how many states are stacked, so that they join the same sums.
    """
    maxima = torch.zeros(3, len(states), device=device)
    for index, state in enumerate(states):
        if _has_points(samples, state):
            points = samples[state].points
            largest = points.abs().amax().to(maxima)
            maxima[0, index] = points.shape[1]
            maxima[1, index] = len(points)
            maxima[2, index] = torch.where(largest.isfinite(), largest, math.inf)  # some backends ignore NaN
    if world_size(group) > 1:
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    widths, num_points, values = maxima.tolist()
    return (
        dict(zip(states, map(int, widths), strict=True)),
        dict(zip(states, map(int, num_points), strict=True)),
        dict(zip(states, values, strict=True)),
    )


def _has_points(samples: Mapping[str, StateSample], state: str) -> bool:
    return state in samples and len(samples[state].points) > 0


def _measure_same_width(
    samples: Mapping[str, StateSample],
    states: Sequence[str],
    width: int,
    names: Sequence[str],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[str, dict[str, float]]:
    needs_scatter = not _COVARIANCE_MEASURES.isdisjoint(names)
    stacks = _stack_same_rows(samples, states, device)
    # The sums are 0 for the states that this process lacks.
    local_sums = sum_points(torch.zeros(len(states), 0, width, device=device), needs_scatter)
    for stack in stacks:
        for sums_of_all, sums_of_stack in zip(local_sums, sum_points(stack.points, needs_scatter), strict=True):
            sums_of_all[stack.indices] = sums_of_stack
    sums = OriginSums(*_sum_over_processes(local_sums, group))
    moments = center(sums)
    num_points = sums.num_points[:, 0]
    columns = {"points": num_points, **compute_values(sums, moments, names)}
    with_error = [name for name in SAMPLE_MEASURES_WITH_ERROR if name in names]
    local_errors = _sum_squared_influences(stacks, sums, moments, with_error)
    squares, num_groups = _sum_over_processes(local_errors, group)
    columns["sequences"] = num_groups
    factor = num_groups / torch.where(num_groups > 1, num_groups - 1, torch.nan) / num_points.square()
    errors = (squares * factor[:, None]).sqrt().unbind(1)
    columns |= {f"{name}_error": error for name, error in zip(with_error, errors, strict=True)}
    table = torch.stack(list(columns.values()), 1).tolist()  # one transfer to the host
    rows = (dict(zip(columns, numbers, strict=True)) for numbers in table)
    return {state: row for state, row in zip(states, rows, strict=True) if row["points"] > 0}


class _Stack(NamedTuple):
    """Samples of states whose points belong to the same groups, one after the other."""

    indices: list[int]  # of the states
    points: Tensor  # `(states, n, d)`, float32 or float64
    groups: Tensor  # `(n,)`


def _stack_same_rows(samples: Mapping[str, StateSample], states: Sequence[str], device: torch.device) -> list[_Stack]:
    indices_by_rows: dict[tuple[Any, ...], list[int]] = {}
    for index, state in enumerate(states):
        if _has_points(samples, state):
            points, groups = samples[state]
            indices_by_rows.setdefault((len(points), points.dtype, id(groups)), []).append(index)
    stacks = []
    for indices in indices_by_rows.values():
        points = torch.stack([samples[states[index]].points.to(device) for index in indices])
        dtype = torch.promote_types(points.dtype, torch.float32)
        stacks.append(_Stack(indices, points.to(dtype), samples[states[indices[0]]].groups.to(device)))
    return stacks


def _sum_over_processes(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the sums of tensors over all processes, from one all-reduce."""
    if world_size(group) == 1:
        return list(tensors)
    packed = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(packed, group=group)
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


class OriginSums(NamedTuple):
    """Sums over the points x of S states, about the origin; the sums of several samples are added."""

    num_points: Tensor  # number of points, `(S, 1)`
    total: Tensor  # sum of x, `(S, d)`
    unit_total: Tensor  # sum of x / |x|, without zero points, `(S, d)`
    num_nonzero: Tensor  # number of points that are not zero, `(S, 1)`
    norm_total: Tensor  # sum of |x|, `(S, 1)`
    square_total: Tensor  # sum of |x|^2, `(S, 1)`
    epsilon: Tensor  # number of points times the machine epsilon of their dtype, `(S, 1)`
    # The following are empty, `(S, 0, 0)` and `(S, 0)`, if no measure needs them.
    scatter: Tensor  # sum of x x^T, `(S, d, d)`
    third: Tensor  # sum of |x|^2 x, `(S, d)`
    fourth: Tensor  # sum of |x|^4, `(S, 1)`


class CenteredMoments(NamedTuple):
    """Moments of S states about their mean m, with y = x - m."""

    mean: Tensor  # `(S, d)`
    trace: Tensor  # sum of |y|^2, `(S,)`; NaN if all points are equal up to rounding
    normalized: Tensor  # sum of y y^T, divided by its trace, `(S, d, d)`, or `(S, 0, 0)`
    fourth: Tensor  # sum of |y|^4, `(S,)`, or 0 without scatter


def sum_points(points: Tensor, needs_scatter: bool) -> OriginSums:
    """Sum stacked points `(S, n, d)`, float32 or float64.

    The products are computed about the mean in the dtype of the points, and moved to the origin in float64 (float32 on
    MPS).
    """
    num_states, num_points, dim = points.shape
    wide = accumulation_dtype(points.device)
    norms = torch.linalg.vector_norm(points, dim=-1)
    mean = points.mean(1) if num_points else points.new_zeros(num_states, dim)
    y = points - mean[:, None]
    squared_norms = y.square().sum(-1)
    mean = mean.to(wide)
    count = mean.new_full((num_states, 1), num_points)
    squared_mean, square_total = mean.square().sum(1, keepdim=True), squared_norms.sum(1, keepdim=True).to(wide)
    scatter, third, fourth = mean.new_zeros(num_states, 0, 0), mean[:, :0], mean[:, :0]
    if needs_scatter:
        scatter = torch.bmm(y.mT, y).to(wide)
        third = torch.bmm(squared_norms[:, None], y)[:, 0].to(wide)
        fourth = squared_norms.to(wide).square().sum(1, keepdim=True)
        along_mean = torch.bmm(scatter, mean[..., None])[..., 0]  # sum of y y^T m
        fourth = fourth + (4 * (third + along_mean) * mean).sum(1, keepdim=True)
        fourth = fourth + squared_mean * (2 * square_total + count * squared_mean)
        third = third + 2 * along_mean + (square_total + count * squared_mean) * mean
        scatter = scatter + count[..., None] * mean[:, :, None] * mean[:, None]
    return OriginSums(
        num_points=count,
        total=count * mean,
        unit_total=torch.bmm(inverse_or_zero(norms)[:, None], points)[:, 0].to(wide),
        num_nonzero=norms.count_nonzero(1)[:, None].to(wide),
        norm_total=norms.sum(1, keepdim=True).to(wide),
        square_total=square_total + count * squared_mean,
        epsilon=count * torch.finfo(points.dtype).eps,
        scatter=scatter,
        third=third,
        fourth=fourth,
    )


def center(sums: OriginSums) -> CenteredMoments:
    """Return the moments about the mean."""
    count = sums.num_points
    mean = sums.total / count
    squared_mean = mean.square().sum(1, keepdim=True)
    trace = sums.square_total - count * squared_mean
    is_constant = is_rounding(trace / count, squared_mean, sums.epsilon / count)
    trace = torch.where(is_constant, torch.nan, trace)
    if not sums.scatter.numel():
        return CenteredMoments(mean, trace[:, 0], sums.scatter, torch.zeros_like(trace[:, 0]))
    scatter = sums.scatter - count[..., None] * mean[:, :, None] * mean[:, None]
    along_mean = torch.bmm(sums.scatter, mean[..., None])[..., 0]
    fourth = sums.fourth + (4 * (along_mean - sums.third) * mean).sum(1, keepdim=True)
    fourth = fourth + squared_mean * (2 * sums.square_total - 3 * count * squared_mean)
    return CenteredMoments(mean, trace[:, 0], scatter / trace[..., None], fourth[:, 0])


def compute_values(sums: OriginSums, moments: CenteredMoments, names: Sequence[str]) -> dict[str, Tensor]:
    """Compute measures, `(S,)` by name, apart from the largest activation."""
    functions: dict[str, Callable[[], Tensor]] = {
        "isoscore_unbiased": lambda: _isoscore_unbiased(sums, moments),
        "isoscore": lambda: (_participation_ratio(moments) - 1) / (moments.mean.shape[1] - 1),
        "participation_ratio": lambda: _participation_ratio(moments),
        "inter_sim": lambda: _inter_sim(sums),
        "average_norm": lambda: (sums.norm_total / sums.num_points)[:, 0],
        "outlier_severity": lambda: _outlier_severity(sums, moments),
        "effective_rank": lambda: _effective_rank(sums, moments),
    }
    return {name: functions[name]() for name in names if name in functions}


def _participation_ratio(moments: CenteredMoments) -> Tensor:
    return 1 / moments.normalized.square().sum((1, 2))


def _isoscore_unbiased(sums: OriginSums, moments: CenteredMoments) -> Tensor:
    """Compute `istar.isoscore_unbiased`."""
    count = torch.where(sums.num_points[:, 0] < 4, torch.nan, sums.num_points[:, 0])
    norm = moments.normalized.square().sum((1, 2))
    fourth_term = count * (count - 1) * moments.fourth / moments.trace.square()
    uncorrected_norm = (count - 1) * (count - 2) * norm + 1
    squared_norm = uncorrected_norm - fourth_term
    squared_trace = 2 * norm + count.square() - 3 * count + 1 - fourth_term
    # A smaller estimate may be nothing but a rounding error.
    squared_norm = torch.where(squared_norm > 1e-6 * uncorrected_norm, squared_norm, torch.nan)
    return (squared_trace / squared_norm - 1) / (moments.mean.shape[1] - 1)


def _inter_sim(sums: OriginSums) -> Tensor:
    num_pairs = sums.num_nonzero * (sums.num_nonzero - 1)
    squares = sums.unit_total.square().sum(1, keepdim=True) - sums.num_nonzero
    return (squares / torch.where(num_pairs > 0, num_pairs, torch.nan))[:, 0]


def _outlier_severity(sums: OriginSums, moments: CenteredMoments) -> Tensor:
    return (moments.mean.square().sum(1) * sums.num_points[:, 0] / moments.trace).sqrt()


def _effective_rank(sums: OriginSums, moments: CenteredMoments) -> Tensor:
    """Compute `istar.measures.effective_rank` of the singular values that are more than rounding errors of the sums."""
    is_finite = moments.normalized.isfinite().all(-1).all(-1)
    matrices = torch.where(is_finite[:, None, None], moments.normalized, 0)  # LAPACK refuses NaN
    eigenvalues = torch.linalg.eigvalsh(matrices)
    rounding = (matrices.shape[1] ** 0.5 + sums.num_points.sqrt()) * sums.epsilon / sums.num_points
    is_significant = eigenvalues > eigenvalues[:, -1:] * rounding
    roots = torch.where(is_significant, eigenvalues, 0).sqrt()
    entropy = torch.special.entr(roots / roots.sum(1, keepdim=True)).sum(1)
    return torch.where(is_finite, entropy.exp(), torch.nan)


def compute_influences(
    points: Tensor, sums: OriginSums, moments: CenteredMoments, names: Sequence[str]
) -> dict[str, Tensor]:
    """Compute the influence of each point on each measure, `(S, n)` in float64 by name.

    If the weight of a point grew by a small share s of the weight of all points, the measure would grow by s times the
    influence. The mean of the influences is 0.
    """
    wide = sums.num_points.dtype
    norms = torch.linalg.vector_norm(points, dim=-1)
    mean = moments.mean.to(points.dtype)
    y = points - mean[:, None]
    # |y|^2, divided by its mean.
    relative_squares = y.square().sum(-1).to(wide) * (sums.num_points / moments.trace[:, None])
    influences: dict[str, Tensor] = {}
    if not _COVARIANCE_MEASURES.isdisjoint(names):
        # With P = S / tr S: y^T P y / tr S, for the covariance S.
        forms = (torch.bmm(y, moments.normalized.to(points.dtype)) * y).sum(-1).to(wide)
        forms = forms * (sums.num_points / moments.trace[:, None])
        ratio = _participation_ratio(moments)[:, None]
        influences["participation_ratio"] = 2 * ratio * (relative_squares - ratio * forms)
        influences["isoscore"] = influences["participation_ratio"] / (points.shape[2] - 1)
        influences["isoscore_unbiased"] = influences["isoscore"]
    if "inter_sim" in names:
        mean_direction = sums.unit_total / sums.num_nonzero
        cosines = torch.bmm(points, mean_direction[..., None].to(points.dtype))[..., 0] * inverse_or_zero(norms)
        influences["inter_sim"] = 2 * (cosines.to(wide) - mean_direction.square().sum(1, keepdim=True))
    influences["average_norm"] = norms.to(wide) - sums.norm_total / sums.num_points
    if "outlier_severity" in names:
        # The derivative of log(|m|^2 / tr S) / 2, for the mean m and the covariance S, times the severity.
        along_mean = torch.bmm(y, mean[..., None])[..., 0].to(wide) / moments.mean.square().sum(1, keepdim=True)
        severity = _outlier_severity(sums, moments)[:, None]
        influences["outlier_severity"] = severity * (along_mean - (relative_squares - 1) / 2)
    return {name: influences[name] for name in names}


def _sum_squared_influences(
    stacks: Sequence[_Stack], sums: OriginSums, moments: CenteredMoments, names: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return the sums over groups of the squared influences of each measure, `(S, names)`, and the groups, `(S,)`."""
    num_groups = sums.num_points.new_zeros(len(sums.num_points))
    squares = num_groups.new_zeros(len(num_groups), len(names))
    for stack in stacks:
        unique, numbers = stack.groups.unique(return_inverse=True)
        num_groups[stack.indices] = len(unique)
        stack_sums = OriginSums(*(values[stack.indices] for values in sums))
        stack_moments = CenteredMoments(*(values[stack.indices] for values in moments))
        influences = compute_influences(stack.points, stack_sums, stack_moments, names)
        for column, influence in enumerate(influences.values()):
            totals = influence.new_zeros(len(influence), len(unique)).index_add_(1, numbers, influence)
            squares[stack.indices, column] = totals.square().sum(1)
    return squares, num_groups


def _sort_values(values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the values in the order of the columns of a table: numbers, measures, errors; NaN if not finite."""
    errors = [f"{name}_error" for name in names]
    known = {name: values[name] for name in ("points", "sequences", *names, *errors) if name in values}
    return {name: value if math.isfinite(value) else math.nan for name, value in known.items()}
