r"""Average cosines of a cloud in O(n): InterSim over all points, IntraSim over the occurrences of each token.

With unit vectors :math:`\hat x = x / \lVert x \rVert` and their sum S, the double sum over pairs is a norm:
:math:`\sum_i \sum_{j \ne i} \hat x_i^T \hat x_j = \lVert S \rVert^2 - n` (*Anisotropy is Not Inherent to
Transformers*, equations 5 to 7). So count and S are all that is kept of a stream.

A zero vector has no direction. It is left out of InterSim, IntraSim and the mean direction, and counted apart;
CosReg alone counts it, with cosine 0 to every other, as the penalty of that name does.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures.rows import check_beside, check_dim, directions, select_rows, split_rows, wide_blocks, wide_dtype

Average = Literal["types", "occurrences"]


def average_cosine(points: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""InterSim: the mean of :math:`\cos(x_i, x_j)` over all pairs :math:`i \ne j` (equation 5).

    Args:
        points: `(..., d)` of any floating dtype; unit vectors and their sums are float64, a block at a time.
        mask: `(...)`, bool or 0/1; points where it is 0 are left out.

    Returns:
        0-d tensor in [-1 / (n - 1), 1], float64 (float32 on MPS), on the points' device, differentiable.
        Unchanged by rotation and by scaling each point by a positive number of its own.

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
    """IntraSim of one cloud, averaged over its token types; see `IntraSim`, which streams.

    Args:
        points: as in `average_cosine`.
        tokens: `(...)`, integers: which type each point is an occurrence of; any numbers.
        mask: as in `average_cosine`.
        average: as in `IntraSim.compute`.
        min_count: as in `IntraSim.compute`.

    Returns:
        0-d tensor in [-1, 1], float64 (float32 on MPS). Not differentiable.

    Raises:
        UserError: as `IntraSim.update` and `IntraSim.compute`.
    """
    _check_tokens(tokens, points, mask)
    kept = tokens if mask is None else tokens[mask.bool()]
    types, numbered = kept.reshape(-1).unique(return_inverse=True)
    rows = select_rows(points, mask)
    return IntraSim(max(1, len(types)), rows.shape[1], rows.device).update(rows, numbered).compute(average, min_count)


class AverageCosine:
    """Accumulates the unit vectors' number and sum over any number of batches; merges.

    Each block of a batch is summed by itself and then added, so that 10^7 points keep twelve digits.
    Differentiable; detach the points for long streams.

    Args:
        dim: d, at least 1.
        device: where the sums live; points must be on the same device.

    Attributes:
        count: points that have a direction, 0-d. zeros: points that have none, 0-d. total: S, `(d,)`.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        check_dim(dim)
        device = torch.device(device or "cpu")
        self.count = torch.zeros((), dtype=wide_dtype(device), device=device)
        self.zeros = torch.zeros_like(self.count)
        self.total = torch.zeros(dim, dtype=wide_dtype(device), device=device)

    @classmethod
    def of(cls, points: Tensor, mask: Tensor | None = None) -> "AverageCosine":
        """The sums of one batch; see `update`."""
        rows = select_rows(points, mask)
        return cls(rows.shape[1], rows.device).update(rows)

    @property
    def dim(self) -> int:
        return self.total.shape[0]

    def update(self, points: Tensor, mask: Tensor | None = None) -> "AverageCosine":
        """Add a batch: `points` `(..., d)`, `mask` `(...)`, as in `average_cosine`. Returns itself.

        Raises:
            UserError: on shapes that do not fit or points that are not floating.
        """
        for block in wide_blocks(select_rows(points, mask, self.dim)):
            units, exists = directions(block)
            self.total = self.total + units.sum(0)
            self.count = self.count + exists.sum()
            self.zeros = self.zeros + (~exists).sum()
        return self

    def merge(self, other: "AverageCosine") -> "AverageCosine":
        """Add what another accumulator has seen. Returns itself."""
        if other.dim != self.dim:
            raise UserError(f"cannot merge cosines of {other.dim} dimensions into cosines of {self.dim}")
        self.total = self.total + other.total.to(self.total)
        self.count = self.count + other.count.to(self.count)
        self.zeros = self.zeros + other.zeros.to(self.zeros)
        return self

    def compute(self) -> Tensor:
        r""":math:`(\lVert S \rVert^2 - n) / (n (n - 1))` over the n points that have a direction, 0-d.

        Raises:
            UserError: for n < 2, or points that were not finite.
        """
        self._check(2)
        return (self.total.square().sum() - self.count) / (self.count * (self.count - 1))

    def cosreg(self) -> Tensor:
        r""":math:`(\lVert S \rVert^2 - n) / M^2` over all M points, zero vectors too; 0-d, in [-1 / M, 1 - 1 / M].

        *Stable Anisotropic Regularization*, equation 1; *Too Much in Common*, equation 12 (in 14 the `- N` belongs
        inside the fraction). Without zero vectors it is (n - 1) / n times `compute`.

        Raises:
            UserError: without any point, or with points that were not finite.
        """
        self._check(0)
        points = self.count + self.zeros
        if points == 0:
            raise UserError("0 points have no CosReg; expected at least 1")
        return (self.total.square().sum() - self.count) / points.square()

    def mean_direction_norm(self) -> Tensor:
        r""":math:`\lVert S \rVert / n`, 0-d, in [0, 1].

        Squared it is ((n - 1) A + 1) / n, A the average cosine, and without zero vectors CosReg + 1 / n.

        Raises:
            UserError: for n < 1, or points that were not finite.
        """
        self._check(1)
        norm: Tensor = torch.linalg.vector_norm(self.total)
        return norm / self.count

    def _check(self, needed: int) -> None:
        if self.count < needed:
            raise UserError(
                f"{self.count:g} points other than zero have no average cosine or direction; expected at least {needed}"
            )
        if not self.total.detach().isfinite().all():
            raise NonFiniteError("the points are not finite; look for NaN or infinite values in them")


class IntraSim:
    r"""Average cosine between the occurrences of each token type, streamed: one count and one sum per type.

    *Anisotropy is Not Inherent to Transformers*, section 3.6.2: IntraSim(t) is equation 5 over the occurrences of t.
    High values mean that context hardly changes a token; they are read beside InterSim, the value for any two tokens.

    Memory: types x d float64; 0.3 GB for 50,000 types of 768 dimensions. On CUDA the order of the additions, and so
    the last digits, may differ from run to run unless torch's deterministic algorithms are on. Not differentiable.

    Args:
        types: how many types there are; tokens are numbers below it.
        dim: d, at least 1.
        device: where the sums live; points and tokens must be on the same device.

    Attributes:
        count: occurrences that have a direction, `(types,)`. total: sums of unit vectors, `(types, d)`.
        zeros: points that have no direction, 0-d.
    """

    def __init__(self, types: int, dim: int, device: torch.device | str | None = None) -> None:
        check_dim(dim)
        if types < 1:
            raise UserError(f"there are {types} token types; expected at least 1")
        device = torch.device(device or "cpu")
        self.count = torch.zeros(types, dtype=wide_dtype(device), device=device)
        self.zeros = torch.zeros((), dtype=wide_dtype(device), device=device)
        self.total = torch.zeros(types, dim, dtype=wide_dtype(device), device=device)

    @torch.no_grad()
    def update(self, points: Tensor, tokens: Tensor, mask: Tensor | None = None) -> "IntraSim":
        """Add a batch: `points` `(..., d)`, `tokens` `(...)` integers, `mask` `(...)`. Returns itself.

        Raises:
            UserError: on shapes or dtypes that do not fit, or tokens outside [0, types).
        """
        _check_tokens(tokens, points, mask)
        rows = select_rows(points, mask, self.total.shape[1])
        tokens = (tokens if mask is None else tokens[mask.bool()]).reshape(-1).long()
        types = self.count.shape[0]
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= types):
            raise UserError(f"tokens are {tokens.min():d} to {tokens.max():d}; expected 0 to {types - 1}")
        start = 0
        for block in wide_blocks(rows):
            units, exists = directions(block)
            numbers = tokens[start : start + len(block)]
            self.total.index_add_(0, numbers, units)
            self.count.index_add_(0, numbers, exists.to(self.count))
            self.zeros += (~exists).sum()
            start += len(block)
        return self

    def merge(self, other: "IntraSim") -> "IntraSim":
        """Add what another accumulator has seen. Returns itself."""
        if other.total.shape != self.total.shape:
            raise UserError(
                f"cannot merge sums of (types, dimensions) = {tuple(other.total.shape)} into {tuple(self.total.shape)}"
            )
        self.total += other.total.to(self.total)
        self.count += other.count.to(self.count)
        self.zeros += other.zeros.to(self.zeros)
        return self

    def per_type(self) -> Tensor:
        """IntraSim of each type, `(types,)`; NaN for types with fewer than 2 occurrences.

        Raises:
            UserError: if any point was not finite.
        """
        squares = torch.cat([block.square().sum(1) for block in split_rows(self.total)])
        if not squares.isfinite().all():
            raise NonFiniteError("the points are not finite; look for NaN or infinite values in them")
        pairs = self.count * (self.count - 1)
        return ((squares - self.count) / pairs).masked_fill(pairs <= 0, torch.nan)

    def compute(self, average: Average = "types", min_count: int = 2) -> Tensor:
        """The average of `per_type`, 0-d, in [-1, 1].

        Args:
            average: "types", as in the paper: each type counts once, however rare. "occurrences": each counts as
                often as it occurs, so that frequent words decide.
            min_count: occurrences that a type needs to count; 2, the fewest that make a pair, keeps the rare words
                as the paper does. Earlier work took 5.

        Raises:
            UserError: if no type occurs often enough, an argument is not one of these, or any point was not finite.
        """
        if average not in get_args(Average):
            raise UserError(f"average is {average!r}; expected one of {', '.join(get_args(Average))}")
        if min_count < 2:
            raise UserError(f"min_count is {min_count}; expected at least 2, as one occurrence makes no pair")
        kept = self.count >= min_count
        if not kept.any():
            raise UserError(f"no token type occurs {min_count} times or more: IntraSim is not defined")
        values, counts = self.per_type()[kept], self.count[kept]
        return values.mean() if average == "types" else (values * counts).sum() / counts.sum()


def _check_tokens(tokens: Tensor, points: Tensor, mask: Tensor | None) -> None:
    check_beside(tokens, "tokens", points)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise UserError(f"tokens are {tokens.dtype}; expected integers")
    if mask is not None:
        check_beside(mask, "mask", points)
