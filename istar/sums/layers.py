"""What is measured of single hidden states: moments, norms, tables by position and frequency, massive activations."""

import torch
from torch import Tensor

from istar.measures import (
    DimensionMoments,
    FourthMoments,
    GroupedPoints,
    MassiveActivationsSummary,
    Norms,
    TokenKurtosisSummary,
    log2_bin_range,
    log2_bins,
)
from istar.measures.numerics import is_rounding
from istar.sums.stack_sums import NORM_EDGES, StackSums


class Layer:
    """A hidden state of a stack, and what is computed from its sums.

    Args:
        sums: the sums of a stack of states.
        state: name of one of them.
    """

    def __init__(self, sums: StackSums, state: str) -> None:
        self.sums, self.state, self._index = sums, state, sums.names.index(state)
        self.origin = sums.origins[self._index]

    @property
    def moments(self) -> FourthMoments:
        """Moments of all points, computed at each access. If all points are equal up to rounding, the scatter is 0."""
        moments = compute_moments(self.sums, slice(self._index, self._index + 1))
        state_moments = FourthMoments(1, self.origin.device)
        state_moments.load_state_dict({name: value[0] for name, value in moments.state_dict().items()})
        return state_moments

    @property
    def dimensions(self) -> DimensionMoments:
        """Moments of each dimension, computed at each access, on the CPU; 0 where points are equal up to rounding."""
        dimensions = DimensionMoments(len(self.origin))
        stacked = compute_dimensions(self.sums).state_dict()
        dimensions.load_state_dict({name: value[self._index] for name, value in stacked.items()})
        return dimensions

    @property
    def is_constant(self) -> bool:
        """Whether all points are equal up to rounding, computed at each access."""
        return not self.dimensions.m2.any()

    @property
    def norms(self) -> Norms:
        """The norms of all points."""
        sums, index = self.sums, self._index
        count, norm_total, *_ = sums.group_scalars[index].sum(0)
        norms = Norms(len(self.origin), NORM_EDGES, self.origin.device)
        norms.count, norms.norm_total = count.long(), norm_total
        norms.total = sums.powers[index, 0] + count * self.origin
        norms.smallest, norms.largest = sums.smallest_norms[index], sums.largest_norms[index]
        norms.bins = sums.norm_bins[index].long()
        return norms

    @property
    def types(self) -> GroupedPoints | None:
        """Norms and directions by token type, computed at each access; None without a vocabulary."""
        scalars = self.sums.type_scalars[self._index]
        if not len(scalars):
            return None
        types, vectors = self.sums.type_vectors.gather(self.state)
        return self._group(scalars, vectors, types)

    @property
    def positions(self) -> GroupedPoints | None:
        """Norms and directions by `log2_bins` of the position, computed at each access; None without positions."""
        scalars = self.sums.position_scalars[self._index]
        if not len(scalars):
            return None
        return self._group(
            scalars, self.sums.position_vectors[self._index], torch.arange(len(scalars), device=scalars.device)
        )

    def _group(self, scalars: Tensor, vectors: Tensor, occupied: Tensor) -> GroupedPoints:
        count, norm_total, num_nonzero, weight_total = scalars.unbind(-1)
        # By w x = w (x - o) + w o, for unit vectors w x and the origin o.
        unit_totals = vectors.addr(weight_total[occupied].to(vectors), self.origin.to(vectors))
        return GroupedPoints.of_sums(count.long(), num_nonzero.long(), norm_total, unit_totals, occupied)

    def summarize_kurtosis(self) -> TokenKurtosisSummary | None:
        """Return the kurtosis of the tokens, or None if the settings leave it out."""
        return self.sums.kurtosis[self.state].compute() if self.state in self.sums.kurtosis else None

    def find_massive_activations(self) -> MassiveActivationsSummary | None:
        """Return the massive activations, or None if the settings leave them out."""
        return self.sums.massive[self.state].compute() if self.state in self.sums.massive else None

    def summarize_by_position(self) -> dict[str, list[float]]:
        """Return the average norm and InterSim of the points in bins of their position; {} without positions."""
        positions = self.positions
        return {} if positions is None else _summarize_bins(positions)

    def summarize_by_frequency(self) -> dict[str, list[float]]:
        """Return the average norm and InterSim of tokens by how often their type occurs; {} without a vocabulary."""
        types = self.types
        return {} if types is None else _summarize_bins(types.regroup(log2_bins(types.count)))


def get_group_sums(sums: StackSums, states: slice) -> list[Tensor]:
    """Return the sums of each group of some states, `(states, groups, ...)`, as `make_moments` takes them."""
    scalars, vectors = sums.group_scalars[states], sums.group_vectors[states]
    return [scalars[..., 0], vectors[:, 0], sums.scatters[states], vectors[:, 1], scalars[..., 5]]


def make_moments(sums: StackSums, states: slice, parts: list[Tensor]) -> FourthMoments:
    """Return moments of some states from sums about their origins; they have the leading dimensions of the sums.

    The sums are those of `FourthMoments.about_mean`, with packed scatter matrices. If all points are equal up to
    rounding, the scatter matrix is 0.
    """
    count, total, packed_scatters, third, fourth = parts
    ones = [1] * (count.dim() - 1)
    origins, epsilons = sums.origins[states].view(-1, *ones, total.shape[-1]), sums.epsilons[states].view(-1, *ones)
    unpacked = [count, total, sums.panels.unpack(packed_scatters), third, fourth]
    moments = FourthMoments.about_mean(origins, unpacked, epsilons)
    variances = moments.scatter.diagonal(dim1=-2, dim2=-1).sum(-1) / (count - 1)
    # The sums are rounded, too.
    squares = moments.mean.square() + (moments.mean - origins).square() / epsilons[..., None]
    is_constant = is_rounding(variances, squares.sum(-1), epsilons)
    moments.scatter.masked_fill_(is_constant[..., None, None], 0)
    return moments


def compute_moments(sums: StackSums, states: slice) -> FourthMoments:
    """Return the moments of all points of some states, with a leading dimension for the states."""
    return make_moments(sums, states, [values.sum(1) for values in get_group_sums(sums, states)])


def compute_dimensions(sums: StackSums) -> DimensionMoments:
    """Return the moments of each dimension of all states, `(states, d)`, on the CPU.

    They are 0 where points are equal up to rounding.
    """
    origins, epsilons = sums.origins.cpu(), sums.epsilons.cpu()[:, None]
    counts = sums.group_scalars[..., 0].sum(1).cpu()
    dimensions = DimensionMoments.about_mean(origins, counts, sums.powers.cpu())
    variances, mean = dimensions.m2 / counts[:, None], dimensions.mean
    squares = mean.square() + (mean - origins).square() / epsilons  # the sums are rounded, too
    is_constant = is_rounding(variances, squares, epsilons)
    is_constant |= is_rounding(variances.sum(1, keepdim=True), squares.sum(1, keepdim=True), epsilons)
    for values in (dimensions.m2, dimensions.m3, dimensions.m4):
        values.masked_fill_(is_constant, 0)
    return dimensions


def _summarize_bins(groups: GroupedPoints) -> dict[str, list[float]]:
    """Return a table, as lists by column, with a row for each bin of `log2_bins` that contains points.

    The columns are the bin's smallest and largest value, `first` and `last`, the number of `points`, their average
    `norm`, and `inter_sim`, NaN for a single point.
    """
    bins = [(*log2_bin_range(index), summary) for index, summary in enumerate(groups.compute()) if summary.count]
    return {
        "first": [first for first, _, _ in bins],
        "last": [last for _, last, _ in bins],
        "points": [summary.count for *_, summary in bins],
        "norm": [summary.average_norm for *_, summary in bins],
        "inter_sim": [summary.inter_sim for *_, summary in bins],
    }
