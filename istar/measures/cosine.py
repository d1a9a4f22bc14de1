r"""Average cosine similarity of a point cloud in O(n): over all pairs (InterSim) or within token types (IntraSim).

With unit vectors :math:`\hat x = x / \lVert x \rVert` and their sum S, the sum over all pairs is
:math:`\sum_i \sum_{j \ne i} \hat x_i^T \hat x_j = \lVert S \rVert^2 - n` (*Anisotropy is Not Inherent to
Transformers*, equations 5 to 7). The accumulator therefore keeps only the count and S.

Zero vectors have no direction. InterSim and the mean direction leave them out and count them separately.
CosReg counts them, with cosine 0 to every other vector, as the penalty of the same name does.
"""

from typing import Literal, Self, get_args

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures import numerics
from istar.measures.accumulator import Accumulator
from istar.measures.point_groups import GroupedPoints

Average = Literal["types", "occurrences"]


def average_cosine(points: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Compute InterSim, the mean of :math:`\cos(x_i, x_j)` over all pairs :math:`i \ne j`.

    See *Anisotropy is Not Inherent to Transformers*, equation 5.

    Args:
        points: `(..., d)` of any floating dtype; blocks of points are converted to float64 one after the other.
        mask: `(...)`, bool or 0/1; points where the mask is 0 are ignored.

    Returns:
        0-d tensor in [-1 / (n - 1), 1], float64 (float32 on MPS), on the points' device, differentiable.
        It does not change if the cloud is rotated, or if points are scaled by different positive numbers.

    Raises:
        UserError: for fewer than 2 points other than zero, or values that are not finite.

    >>> round(average_cosine(torch.tensor([[1.0, 0.0], [0.0, 5.0], [1.0, 1.0]])).item(), 6)
    0.471405
    """
    return AverageCosine.of(points, mask).compute()


def intra_sim(
    points: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    average: Average = "types",
    min_count: int = 2,
) -> Tensor:
    """Compute IntraSim of one cloud: the average cosine between occurrences of one token type, averaged over types.

    See `IntraSim` for streams of batches.

    Args:
        points: `(..., d)`, as in `average_cosine`.
        tokens: `(...)`, token type of each point; any integers.
        mask: `(...)`, as in `average_cosine`.
        average: as in `IntraSim.compute`.
        min_count: as in `IntraSim.compute`.

    Returns:
        0-d tensor in [-1, 1], float64 (float32 on MPS). Not differentiable.

    Raises:
        UserError: as `IntraSim.update` and `IntraSim.compute`.
    """
    numerics.check_points(points)
    _check_tokens(tokens, points)
    types, type_indices = tokens.unique(return_inverse=True)
    accumulator = IntraSim(max(1, len(types)), points.shape[-1], points.device)
    return accumulator.update(points, type_indices, mask).compute(average, min_count)


def adjusted_intra_sim(
    points: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    average: Average = "types",
    min_count: int = 2,
) -> Tensor:
    r"""Compute IntraSim minus InterSim: how much more alike occurrences of one token type are than any two tokens.

    In an anisotropic layer, any two tokens have a high cosine, even if they are of different types. Ethayarajh
    (*How Contextual are Contextualized Word Representations?*, EMNLP 2019) therefore subtracts from each measure the
    average cosine of randomly sampled occurrences of words. Here, that baseline is `average_cosine`, over all pairs
    instead of a sample. Points are tokens, and are not centered.

    `intra_sim` is what Ethayarajh calls *self-similarity*: the average over all pairs of *different* occurrences of a
    type, without the pairs of an occurrence with itself, and then the average over types. It is not Ethayarajh's
    intra-sentence similarity, which compares words with the mean of their sentence.

    Near 0, two occurrences of a type are as alike as any two tokens. Differences of cosines are compressed near 1: if
    InterSim is 0.99, no value can exceed 0.01.

    The arguments are as in `intra_sim`. For streams, subtract the results of the accumulators:
    `IntraSim.compute() - AverageCosine.compute()`.

    Returns:
        0-d tensor in [-2, 2], usually in [0, 1]; float64 (float32 on MPS). Not differentiable.

    Raises:
        UserError: as `intra_sim` and `average_cosine`.

    >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> round(adjusted_intra_sim(points, torch.tensor([0, 0, 1, 1])).item(), 6)
    0.666667
    """
    return intra_sim(points, tokens, mask, average, min_count) - average_cosine(points.detach(), mask)


class AverageCosine(Accumulator):
    """Accumulates the count and the sum S of the unit vectors of a stream of batches.

    Blocks of each batch are summed separately before they are added to the total, so that the sum of 10^7 points is
    exact to twelve digits. Differentiable; detach the points of long streams.

    Args:
        dim: d, at least 1.
        device: device of the sums; points must be on the same device.

    Attributes:
        count: number of nonzero points, 0-d.
        zeros: number of zero points, 0-d.
        total: S, `(d,)`.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        total = numerics.zero_vector(dim, device)
        self.total = self.add_state("total", total, "sum")
        self.count = self.add_state("count", total.new_zeros(()), "sum")
        self.zeros = self.add_state("zeros", total.new_zeros(()), "sum")

    @classmethod
    def of(cls, points: Tensor, mask: Tensor | None = None) -> Self:
        """Create an accumulator from one batch; see `update`."""
        rows = numerics.select_rows(points, mask)
        return cls(rows.shape[1], rows.device).update(rows)

    @property
    def dim(self) -> int:
        """The number of dimensions d."""
        return self.total.shape[0]

    def update(self, points: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch: `points` `(..., d)`, `mask` `(...)`, as in `average_cosine`. Returns this accumulator.

        Raises:
            UserError: if shapes do not match, or the points are not floating.
        """
        for block in numerics.upcast_blocks(numerics.select_rows(points, mask, self.dim)):
            self._add_units(*numerics.unit_vectors(block))
        return self

    def _add_units(self, units: Tensor, is_nonzero: Tensor) -> None:
        self.total = self.total + units.sum(0)
        self.count = self.count + is_nonzero.sum()
        self.zeros = self.zeros + (~is_nonzero).sum()

    def compute(self) -> Tensor:
        r"""Return the average cosine of all pairs of different nonzero points, 0-d.

        With the sum S of the unit vectors of the n nonzero points, it is
        :math:`(\lVert S \rVert^2 - n) / (n (n - 1))`.

        Raises:
            UserError: for n < 2, or points that are not finite.
        """
        self._check_sums(min_count=2)
        return (self.total.square().sum() - self.count) / (self.count * (self.count - 1))

    def cosreg(self) -> Tensor:
        r"""Return CosReg, :math:`(\lVert S \rVert^2 - n) / M^2`, 0-d.

        S is the sum of the unit vectors, n the number of nonzero points, and M the number of all points.
        Defined in *Stable Anisotropic Regularization*, equation 1, and *Too Much in Common*, equation 12 (equation 14
        there has a misprint: the `- N` belongs inside the fraction). The range is [-1 / M, 1 - 1 / M]. Without zero
        vectors, CosReg is (n - 1) / n times `compute`.

        Raises:
            UserError: without points, or with points that are not finite.
        """
        self._check_sums(min_count=0)
        num_points = self.count + self.zeros
        if num_points == 0:
            raise UserError("0 points have no CosReg; expected at least 1")
        return (self.total.square().sum() - self.count) / num_points.square()

    def mean_direction_norm(self) -> Tensor:
        r"""Return the norm of the mean of the unit vectors of the n nonzero points, 0-d, in [0, 1].

        Its square is ((n - 1) A + 1) / n, where A is the average cosine; without zero vectors, also CosReg + 1 / n.

        Raises:
            UserError: for n < 1, or points that are not finite.
        """
        self._check_sums(min_count=1)
        norm: Tensor = torch.linalg.vector_norm(self.total)
        return norm / self.count

    def _check_sums(self, min_count: int) -> None:
        if self.count < min_count:
            raise UserError(
                f"{self.count:g} points other than zero have no average cosine or direction; "
                f"expected at least {min_count}"
            )
        numerics.check_finite(self.total, "the points")


class IntraSim(Accumulator):
    """Accumulates the average cosine between the occurrences of each token type over a stream of batches.

    *Anisotropy is Not Inherent to Transformers*, section 3.6.2, defines IntraSim(t) as equation 5 over the occurrences
    of token type t. A high value means that the context hardly changes the token, if InterSim, the average cosine of
    any two tokens, is lower. Not differentiable.

    Args:
        types: number of token types; tokens are integers from 0 to types - 1.
        dim: d, at least 1.
        device: device of the sums; points and tokens must be on the same device.

    Attributes:
        by_type: the sums of each type; see `GroupedPoints` for their memory.
    """

    def __init__(self, types: int, dim: int, device: torch.device | str | None = None) -> None:
        self.by_type = GroupedPoints(types, dim, device)

    def update(self, points: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch: `points` `(..., d)`, integer `tokens` `(...)`, `mask` `(...)`. Returns this accumulator.

        Raises:
            UserError: if shapes or dtypes do not match, or tokens are outside [0, types).
        """
        _check_tokens(tokens, points)
        self.by_type.update(points, tokens, mask)
        return self

    def compute(self, average: Average = "types", min_count: int = 2) -> Tensor:
        """Return the average of IntraSim over the types, 0-d, in [-1, 1].

        Args:
            average: "types" gives all types the same weight, as in the paper. "occurrences" weights types by their
                number of occurrences, so that frequent words dominate.
            min_count: types with fewer occurrences are left out. The default 2, the smallest value that makes a pair,
                keeps rare words, as the paper does; earlier work used 5.

        Raises:
            UserError: if no type occurs `min_count` times, an argument has another value, or a point is not finite.
        """
        if average not in get_args(Average):
            raise UserError(f"average is {average!r}; expected one of {', '.join(get_args(Average))}")
        if min_count < 2:
            raise UserError(f"min_count is {min_count}; expected at least 2, as one occurrence makes no pair")
        is_frequent = self.by_type.nonzero >= min_count
        if not is_frequent.any():
            raise UserError(f"no token type occurs {min_count} times or more: IntraSim is not defined")
        cosines, counts = self.by_type.inter_sim()[is_frequent], self.by_type.nonzero[is_frequent]
        return cosines.mean() if average == "types" else (cosines * counts).sum() / counts.sum()


def _check_tokens(tokens: Tensor, points: Tensor) -> None:
    numerics.check_one_per_point(tokens, "tokens", points)
    numerics.check_integers(tokens, "tokens")
