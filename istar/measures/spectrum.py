"""Singular values and summaries of the spectrum of a cloud."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures import numerics
from istar.measures.batch_moments import BatchMoments
from istar.measures.moments import Moments, merge_moments

PowerLawWeights = Literal["equal", "inverse_rank"]
_POINTS_PER_SUM = 4_096
"""Usual maximum number of points of a batch. Sums of batches are accumulated in float64."""


class PowerLaw(NamedTuple):
    """A power law that was fitted to a spectrum."""

    alpha: float
    """Exponent: the variance of rank i is about proportional to i ** -alpha."""
    r_squared: float
    """Share of the weighted variance of the log spectrum that the fit explains, in [0, 1]; NaN if it is constant."""
    first: int
    """First rank of the fit; the largest variance has rank 1."""
    last: int
    """Last rank of the fit, included."""


@torch.no_grad()
def singular_values(points: Tensor | Moments, centered: bool = True) -> Tensor:
    r"""Compute the singular values of a cloud, of its centered points by default.

    The singular values of points are exact. Those of moments are the square roots of the eigenvalues of the scatter
    matrix M, or of :math:`M + n m m^T` if not centered. Moments do not need the points in memory, but small singular
    values are lost in the rounding errors of the sums, and are returned as zeros: see `numerical_rank`.

    Args:
        points: `(n, d)` of any floating dtype, decomposed in float64 (float32 on MPS), or the moments of a cloud.
        centered: subtract the mean first, as PCA does. The squares of the singular values, divided by n - 1, are then
            the variances of the principal components. If not centered, a mean far from the origin adds one large
            singular value, which is easily mistaken for a narrow cone (*Too Much in Common*, section 4.1).

    Returns:
        `(d,)`, descending, in the units of the points; zeros beyond the numerical rank.

    Raises:
        UserError: for points of the wrong shape or dtype, moments without points, or values that are not finite.
    """
    values: Tensor
    if isinstance(points, Moments):
        if points.count < 1:
            raise UserError("0 points have no singular values; expected at least 1")
        scatter = points.scatter if centered else points.recenter(torch.zeros_like(points.mean))["scatter"]
        numerics.check_finite(scatter, "the points, or their squares,")
        return significant_roots(scatter, points, torch.linalg.eigvalsh(scatter).flip(0))
    numerics.check_matrix(points, "points")
    points = points.to(numerics.accumulation_dtype(points.device))
    values = torch.linalg.svdvals(points - points.mean(0) if centered else points)
    # The bound of rounding errors of an SVD; the last of n centered points never adds a dimension.
    rounding_error = max(points.shape) * torch.finfo(points.dtype).eps * values[0]
    is_significant = (values > rounding_error) & (torch.ones_like(values).cumsum(0) <= len(points) - centered)
    all_values: Tensor = torch.nn.functional.pad(values * is_significant, (0, points.shape[1] - len(values)))
    return all_values


class RowSpectrum(NamedTuple):
    """The singular values of the rows of a matrix minus an origin, and their right singular vectors.

    Attributes:
        origin: `(d,)`, zero for the raw rows and their mean for the centered ones.
        values: singular values, `(d,)`, descending, zeros beyond the numerical rank.
        vectors: `(d, d)`, a column for each singular value, with arbitrary signs.
    """

    origin: Tensor
    values: Tensor
    vectors: Tensor


@torch.no_grad()
def decompose_rows(matrix: Tensor, forms: Sequence[str] = ("raw", "centered")) -> dict[str, RowSpectrum]:
    """Decompose the rows of a matrix `(n, d)`, `raw` and `centered`, in float64 (float32 on MPS).

    The scatter matrix of the rows is summed once. Time O(n d^2 + d^3); memory beyond the matrix: a few matrices
    `(d, d)` and blocks of 2 MiB (32 MiB on a GPU). Raises a `UserError` unless it is finite, floating and has rows.
    """
    numerics.check_matrix(matrix, "embeddings")
    scale = numerics.power_of_two_scale(matrix)
    with numerics.full_precision(matrix.device):
        mean = numerics.mean_row(matrix) * scale
        scatter = mean.new_zeros(len(mean), len(mean))
        for block in numerics.upcast_blocks(matrix):
            centered = block * scale - mean
            scatter.addmm_(centered.T, centered)
        moments = merge_moments([BatchMoments(mean.new_tensor(float(len(matrix))), mean, scatter)])
        spectra = {}
        for form in forms:
            origin = mean if form == "centered" else torch.zeros_like(mean)
            form_scatter = moments.recenter(origin)["scatter"]
            eigenvalues, vectors = torch.linalg.eigh(form_scatter)
            values = significant_roots(form_scatter, moments, eigenvalues.flip(0))
            spectra[form] = RowSpectrum(origin / scale, values / scale, vectors.flip(1))
    return spectra


def significant_roots(scatter: Tensor, moments: Moments, eigenvalues: Tensor) -> Tensor:
    """Return the square roots of the eigenvalues of a scatter matrix, zeros beyond its `numerical_rank`.

    The arguments may have leading dimensions, for several clouds at once.
    """
    ranks = numerical_rank(scatter, moments, eigenvalues)
    is_significant = torch.arange(moments.dim, device=ranks.device) < ranks[..., None]
    return eigenvalues.clamp(min=0).sqrt() * is_significant


def numerical_rank(scatter: Tensor, moments: Moments, eigenvalues: Tensor) -> Tensor:
    r"""Return how many eigenvalues of a scatter matrix are more than rounding errors of its sums, `(...)`.

    The sum :math:`M_{ij}` over points has a rounding error in proportion to :math:`\epsilon \sqrt{M_{ii} M_{jj}}`,
    which is small where dimensions i and j are, even if other dimensions are far larger. The matrix is therefore scaled
    to the elements :math:`M_{ij} / \sqrt{M_{ii} M_{jj}}`. Its rank is the number of eigenvalues above two thresholds:
    :math:`(\sqrt d + \sqrt k) \epsilon`, about the largest eigenvalue of the errors of sums over k points, and twice
    the size of the most negative eigenvalue, because rounding makes an eigenvalue of 0 positive or negative alike.

    Squares below the smallest number of the dtype are lost, as in dimensions of pretrained models with a gain of nearly
    0. Such a dimension has :math:`M_{ij}^2 > M_{ii} M_{jj}` about the mean, and adds nothing to the rank.

    M, `(..., d, d)`, is about the mean or the origin, and its eigenvalues, `(..., d)`, descend. The sums are in
    `moments`.
    """
    sums, count = moments.scatter.detach(), moments.count.detach()
    variances = sums.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(variances > 0, variances, scatter.diagonal(dim1=-2, dim2=-1))
    scale = torch.where(scale > 0, scale, 1)
    threshold = moments.epsilon * (moments.dim**0.5 + count.clamp(max=_POINTS_PER_SUM).sqrt())
    # The worst case of what is computed in float64: the sums over batches and the eigenvalues.
    threshold = threshold + torch.finfo(torch.float64).eps * (moments.dim + count)
    # The decomposition of the scaled matrix is spared if the bounds of the scales decide alike.
    bounds = torch.stack([scale.amax(-1), scale.amin(-1)]) * threshold
    ranks: Tensor
    ranks, upper_ranks = (eigenvalues > bounds[..., None]).sum(-1)
    for index in map(tuple, (ranks != upper_ranks).nonzero().tolist()):
        ranks[index] = _find_scaled_rank(scatter[index], sums[index], scale[index], float(threshold[index]))
    return ranks


def _find_scaled_rank(scatter: Tensor, sums: Tensor, scale: Tensor, threshold: float) -> int:
    roots, variances = scale.sqrt(), sums.diagonal()
    has_lost_squares = sums.square() > 1.01 * torch.outer(variances, variances)
    is_kept = ~(has_lost_squares & (variances[:, None] <= variances)).any(1)
    relative_eigenvalues = torch.linalg.eigvalsh((scatter / roots / roots[:, None])[is_kept][:, is_kept])
    return int((relative_eigenvalues > max(threshold, -2 * float(relative_eigenvalues[0]))).sum())


def effective_rank(values: Tensor) -> Tensor:
    r"""Compute the effective rank, the exponential of the entropy of the normalized singular values.

    With :math:`p_i = \sigma_i / \sum_j \sigma_j`, it is :math:`\exp(-\sum_i p_i \log p_i)` (Roy and Vetterli, 2007).

    Args:
        values: singular values `(d,)` in any order. Variances are accepted, too; their effective rank is smaller, so
            reports should say which of the two were used.

    Returns:
        0-d float64 in [1, d]: d if all values are equal, 1 if only one is not zero. Scaling the values does not change
        it. Differentiable if no value is zero.

    Raises:
        UserError: unless the values are `(d,)`, finite, not negative and not all zero.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 0.0])).item(), 6)
    2.0
    """
    shares = variance_shares(values)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy.exp()


def participation_ratio(variances: Tensor) -> Tensor:
    r"""Compute the participation ratio :math:`(\sum_i \lambda_i)^2 / \sum_i \lambda_i^2`.

    If k variances are equal and the others are zero, it is k. For the eigenvalues of a covariance, it is
    1 + (d - 1) IsoScore.

    Args:
        variances: `(d,)` in any order, for example the eigenvalues of a covariance or squared singular values.

    Returns:
        0-d float64 in [1, d]. Scaling the variances does not change it.

    Raises:
        UserError: as `effective_rank`.

    >>> round(participation_ratio(torch.tensor([3.0, 3.0, 3.0, 0.0])).item(), 6)
    3.0
    """
    return 1 / variance_shares(variances).square().sum()


def count_dimensions(variances: Tensor, share: float = 0.95) -> int:
    """Count the fewest principal components with a share of the total variance.

    Few points lower the count, as the largest sample variances are too large and the smallest too small. For 256 equal
    variances and a share of 0.95, the count is 244; it is about 199 for a sample of 512 points and 233 for 2,560.

    Args:
        variances: `(d,)` in any order: the eigenvalues of a covariance, or the squared singular values of the centered
            points.
        share: above 0 and below 1.

    Returns:
        A number from 1 to d. Scaling the variances does not change it.

    Raises:
        UserError: as `effective_rank`, and for a share outside of (0, 1).

    >>> count_dimensions(torch.tensor([1.0, 6.0, 2.0, 1.0]), 0.8)
    2
    """
    if not 0 < share < 1:
        raise UserError(f"share is {share}; expected a number above 0 and below 1")
    cumulative_shares = variance_shares(variances).sort(descending=True).values.cumsum(0)
    # The sum of shares such as 0.6 + 0.2 is below 0.8 by rounding.
    return 1 + int((cumulative_shares < share * (1 - 1e-12)).sum())


def rank_me(values: Tensor, epsilon: float = 1e-7) -> Tensor:
    r"""Compute RankMe, a smooth rank: the exponential of the entropy of the normalized singular values plus epsilon.

    With :math:`p_k = \sigma_k / \lVert \sigma \rVert_1 + \epsilon`, it is :math:`\exp(-\sum_k p_k \log p_k)`, with
    natural logarithms (Garrido et al., *RankMe*, ICML 2023, equation 1). It differs from `effective_rank` in two
    ways:

    - Epsilon is added to each share, so that the shares sum to more than 1. RankMe differs from the effective rank by a
      relative difference of at most about :math:`d \epsilon \log(1 / \epsilon)`: 0.002 for d = 1,000.
    - The paper decomposes the points as they are. `istar measure` computes the effective rank of the *centered*
      points. If the mean of the points is far from the origin, it is one large singular value, which lowers RankMe.

    The paper computes one vector for each image, and so has independent points; the hidden states of tokens are not
    independent. RankMe does not say which directions are used, and it depends on the number of points if there are few.

    Args:
        values: `(k,)` in any order: the singular values of the raw points, `singular_values(points, centered=False)`.
            The paper's sum has k = min(n, d) terms. Zeros beyond the rank, which `singular_values` appends, add
            :math:`\epsilon \log(1 / \epsilon)` each to the entropy.
        epsilon: 1e-7, the value of the paper for float32. 0 gives the effective rank.

    Returns:
        0-d float64 (float32 on MPS), in [1, k], apart from the effect of epsilon: k if all values are equal, 1 if only
        one is not zero. Scaling the values does not change it.

    Raises:
        UserError: unless the values are `(k,)`, finite, not negative and not all zero, and epsilon is not negative.

    >>> round(rank_me(torch.tensor([2.0, 2.0, 0.0])).item(), 4)
    2.0
    """
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise UserError(f"epsilon is {epsilon}; expected a number of at least 0")
    entropy: Tensor = torch.special.entr(variance_shares(values) + epsilon).sum()
    return entropy.exp()


def nesum(variances: Tensor) -> Tensor:
    r"""Compute NESum, the sum of the variances of the principal components divided by the largest one.

    :math:`\sum_i \lambda_i / \lambda_1`, with the eigenvalues of the covariance in descending order (He and Ozay,
    *Exploring the Gap between Collapsed and Whitened Features in Self-Supervised Learning*, ICML 2022). The covariance
    belongs to centered points. NESum is the inverse of the share of the largest principal component, and the stable
    rank of the centered points. It depends on the other variances through their sum alone, so that it does not
    distinguish a flat spectrum from one that decays. It is at most the participation ratio.

    Args:
        variances: `(d,)` in any order: the eigenvalues of the covariance, or the squared singular values of the
            centered points, but not the variances of single dimensions.

    Returns:
        0-d float64 (float32 on MPS) in [1, d]: d if all variances are equal. Scaling does not change it.

    Raises:
        UserError: as `effective_rank`.

    >>> nesum(torch.tensor([4.0, 2.0, 2.0])).item()
    2.0
    """
    return 1 / variance_shares(variances).amax()


def alpha_req(variances: Tensor, first: int = 11, last: int = 100, weights: PowerLawWeights = "equal") -> PowerLaw:
    r"""Compute alpha-ReQ, the exponent of a power law fitted to the variances of the principal components.

    :math:`\alpha` is minus the slope of the straight line that fits :math:`\log \lambda_i` over :math:`\log i` by least
    squares, for the ranks i from `first` to `last` (Agrawal et al., *alpha-ReQ: Assessing Representation Quality in
    Self-Supervised Learning*, NeurIPS 2022). The base of the logarithms does not matter. The points are centered. A
    small alpha means a flat spectrum, a large one few dominant components; the paper associates values near 1 with
    representations that generalize well.

    The value depends on the range of ranks, which reports should name. The first ranks of language models are often
    rogue dimensions, and the last ones are cut off by the width of the model or by rounding, so that neither follows a
    power law. Published analyses start at rank 4 or 12 and end at rank 100. Alpha is a number for any spectrum: see
    `r_squared` for whether the spectrum is near a power law at all.

    Args:
        variances: `(d,)` in any order: the eigenvalues of the covariance, or the squared singular values of the
            centered points.
        first: first rank, at least 1; the largest variance has rank 1.
        last: last rank, included. Ranks beyond the last positive variance are left out.
        weights: "equal" gives all ranks the same weight. "inverse_rank" weights rank i by 1 / i, as the code of
            Stringer et al. (2019) does, which published analyses with alpha-ReQ use; it compensates
            for the density of the ranks on the logarithmic axis.

    Returns:
        The exponent, positive unless the variances are equal, :math:`R^2`, and the range that was used. Scaling the
        variances does not change them.

    Raises:
        UserError: as `effective_rank`, if fewer than 2 positive variances are in the range, or for other weights.

    >>> fit = alpha_req(torch.arange(1, 65).double() ** -1.5)
    >>> round(fit.alpha, 6), round(fit.r_squared, 6), fit.first, fit.last
    (1.5, 1.0, 11, 64)
    """
    if weights not in get_args(PowerLawWeights):
        raise UserError(f"weights is {weights!r}; expected one of {', '.join(get_args(PowerLawWeights))}")
    # Computed on the CPU: a fit of a few hundred numbers is not worth a GPU, and MPS lacks float64.
    shares = variance_shares(variances.detach().cpu()).sort(descending=True).values
    last = min(last, int((shares > 0).sum()))
    if not 1 <= first < last:
        raise UserError(
            f"the fit has ranks {first} to {last}, where the positive variances end; "
            "expected at least two ranks, so choose a smaller first rank"
        )
    alpha, r_squared = fit_power_law(shares, first, torch.tensor(last, device=shares.device), weights)
    return PowerLaw(float(alpha), float(r_squared), first, last)


def fit_power_law(
    variances: Tensor, first: int, last: Tensor, weights: PowerLawWeights = "equal"
) -> tuple[Tensor, Tensor]:
    """Fit `alpha_req` to descending variances `(..., d)`, from the rank `first` to the ranks `last`, `(...)`.

    Returns the exponent and R squared, `(...)`; NaN with fewer than 2 ranks, and for R squared of equal variances.
    """
    ranks = torch.arange(1, variances.shape[-1] + 1, dtype=variances.dtype, device=variances.device)
    is_fitted = (ranks >= first) & (ranks <= last[..., None])
    rank_weights = is_fitted / ranks if weights == "inverse_rank" else is_fitted.to(ranks)
    rank_weights = rank_weights / rank_weights.sum(-1, keepdim=True)
    log_ranks, log_variances = ranks.log(), torch.where(is_fitted, variances, 1).log()
    x, y = (values - (rank_weights * values).sum(-1, keepdim=True) for values in (log_ranks, log_variances))
    slope = (rank_weights * x * y).sum(-1) / (rank_weights * x.square()).sum(-1)
    total_variance = (rank_weights * y.square()).sum(-1)
    residual_variance = (rank_weights * (y - slope[..., None] * x).square()).sum(-1)
    # The variance of a constant spectrum consists of rounding errors.
    is_constant = total_variance <= torch.finfo(ranks.dtype).eps ** 2 * is_fitted.sum(-1)
    return -slope, torch.where(is_constant, torch.nan, 1 - residual_variance / total_variance)


def top_share(values: Tensor, k: int = 1) -> Tensor:
    r"""Compute the share of the k largest values in the sum of all values.

    For the variances of the dimensions (`DimensionMoments.variance`), this is the share of the variance in the k
    dimensions of the largest variance; for the eigenvalues of a covariance, the share of the first k components;
    for `CosineContributions.contributions`, the share of the average cosine that k dimensions contribute (Timkey and
    van Schijndel, *All Bark and No Bite*, EMNLP 2021).

    Args:
        values: `(d,)` in any order. Values below 0 are allowed, as contributions to a cosine may be negative.
        k: number of values, 1 to d.

    Returns:
        0-d float64 (float32 on MPS), in [k / d, 1] if no value is negative, and otherwise at least k / d without upper
        limit. NaN if the sum is not positive: the average cosine of a centered cloud is near 0, and shares of it mean
        nothing. Scaling the values does not change it.

    Raises:
        UserError: if the values are not `(d,)`, floating and finite, or k is out of range.

    >>> round(top_share(torch.tensor([1.0, 6.0, 2.0, 1.0]), k=2).item(), 6)
    0.8
    """
    values = numerics.upcast_vector(values, "the vector")
    if not 1 <= k <= len(values):
        raise UserError(f"k is {k}; expected 1 to {len(values)}, the number of values")
    return unchecked_top_share(values, k)


def unchecked_top_share(values: Tensor, k: int) -> Tensor:
    """Return the `top_share` of values `(..., d)` without checks, `(...)`."""
    # Scaling first keeps the sum of very large numbers in range.
    largest = values.detach().abs().amax(-1, keepdim=True)
    scaled = values / torch.where(largest > 0, largest, 1)
    total = scaled.sum(-1)
    return scaled.topk(k).values.sum(-1) / torch.where(total > 0, total, torch.nan)


def variance_shares(variances: Tensor) -> Tensor:
    """Return each variance divided by the sum of all, `(d,)`, float64 (float32 on MPS), in the given order.

    For the diagonal of a covariance, these are the shares of the dimensions in the total variance; for its eigenvalues,
    the shares of the principal components.

    Raises:
        UserError: as `effective_rank`.
    """
    variances = numerics.upcast_vector(variances, "the vector")
    if (variances < 0).any():
        raise UserError(f"the smallest value is {variances.min():g}; expected none below 0")
    if not variances.any():
        raise UserError("all values are zero: their shares are not defined")
    return unchecked_shares(variances)


def unchecked_shares(variances: Tensor) -> Tensor:
    """Return `variance_shares` of variances `(..., d)` without checks; NaN where all are zero."""
    # Scaling first keeps the sum of very large numbers in range.
    scaled = variances / variances.detach().amax(-1, keepdim=True)
    return scaled / scaled.sum(-1, keepdim=True)
