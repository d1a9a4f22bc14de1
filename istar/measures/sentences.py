r"""IsoScore from points of different sentences, for tokens that depend on the other tokens of their sentence.

The tokens of a sentence are not independent: they share a topic, a length and each other's context. Estimators that
assume independent points, such as `istar.measures.isoscore_unbiased`, mistake what the tokens of a sentence have in
common for a property of the distribution, and are far too low for few sentences. If the sentences are independent, any
points of different sentences are independent, too. The estimators here are therefore averages over tuples of points of
distinct sentences (U-statistics over sentences, with the same weight for each point).
"""

import copy
from typing import NamedTuple, Self

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.accumulator import Accumulator
from istar.measures.jackknife import ValueWithError, jackknife_error
from istar.measures.numerics import accumulation_dtype, check_finite, check_one_per_point, zero_vector


def isoscore_by_sentence(points: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Estimate the IsoScore of the distribution that the tokens of independent sentences come from.

    It is `SentenceMoments.score` of one batch, about the mean of its points. With one token in each sentence it equals
    `istar.measures.isoscore_unbiased`.

    Args:
        points: `(sentences, tokens, d)` of any floating dtype; sums are float64 (float32 on MPS).
        mask: `(sentences, tokens)`, bool or 0/1; points where the mask is 0 are ignored, and sentences without points.

    Returns:
        0-d tensor on the points' device, not clipped: it is about 1 for an isotropic distribution and may exceed 1.

    Raises:
        UserError: for fewer than 4 sentences with points, shapes or dtypes that do not match, values that are not
            finite, or a squared norm of the covariance that is estimated as 0 or less.

    >>> sentences = torch.randn(200, 3, 8, generator=torch.Generator().manual_seed(0))
    >>> round(isoscore_by_sentence(sentences).item(), 1)
    1.0
    """
    return _make_empty_moments(points, mask).update(points, mask).score()


def isoscore_by_sentence_with_error(
    points: Tensor, mask: Tensor | None = None, groups: int | None = None
) -> ValueWithError:
    r"""Compute `isoscore_by_sentence` and its standard error by the jackknife.

    The error is `istar.measures.jackknife_error` of the scores without each group of sentences. It needs no assumption
    about the tokens of a sentence. With fewer sentences than dimensions it is too large, by a factor of at most
    :math:`\sqrt 2`: the jackknife counts the part of the variance that stems from pairs of sentences twice (Efron and
    Stein, *The jackknife estimate of variance*, Annals of Statistics 9, 1981).

    Args:
        points: as in `isoscore_by_sentence`.
        mask: as in `isoscore_by_sentence`.
        groups: G, at least 2; sentence i, counted from 0 over the sentences with points, is in group i mod G. None:
            one sentence per group. The time is G times the time of a score, and the memory does not depend on G.

    Raises:
        UserError: as `isoscore_by_sentence`, or if fewer than 4 sentences remain without a group, and for a number
            of groups outside of 2 to the number of sentences.

    >>> sentences = torch.randn(200, 3, 8, generator=torch.Generator().manual_seed(0))
    >>> score, error = isoscore_by_sentence_with_error(sentences, groups=10)
    >>> abs(score - 1) < 3 * error < 0.1
    True
    """
    moments = _make_empty_moments(points, mask)
    mask = points.new_ones(points.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    points, mask = points[mask.any(1)], mask[mask.any(1)]
    score = moments.update(points, mask).score()
    groups = len(points) if groups is None else groups
    if not 2 <= groups <= len(points):
        raise UserError(f"groups is {groups}; expected 2 to {len(points)}, the number of sentences with points")
    estimates = []
    for group_index in range(groups):
        group_sentences = slice(group_index, None, groups)
        group_moments = SentenceMoments(points.shape[-1], moments.origin, points.device)
        group_moments.update(points[group_sentences], mask[group_sentences])
        # `subtract` replaces the tensors of the copy, so that `moments` keeps its own.
        estimates.append(copy.copy(moments).subtract(group_moments).score().item())
    return ValueWithError(score.item(), jackknife_error(estimates))


def _make_empty_moments(points: Tensor, mask: Tensor | None) -> "SentenceMoments":
    _check_sentences(points, mask)
    included_points = points.reshape(-1, points.shape[-1]) if mask is None else points[mask.bool()]
    origin = included_points.to(accumulation_dtype(points.device)).mean(0) if len(included_points) else None
    return SentenceMoments(points.shape[-1], origin, points.device)


class SentenceSums(NamedTuple):
    r"""Sums over the points of each of s sentences.

    Let X `(n, d)` be the points of a sentence minus the origin of the accumulator to which the sums are added,
    :math:`m = \sum_i x_i` their sum and :math:`G = X^T X` their scatter.
    """

    counts: Tensor
    """Number of points n of each sentence, `(s,)`."""
    totals: Tensor
    """m of each sentence, `(s, d)`."""
    scattered: Tensor
    """G m of each sentence, `(s, d)`."""
    squares: Tensor
    """Squared Frobenius norm of G, `(s,)`."""
    traces: Tensor
    """Trace of G, `(s,)`."""
    scatter: Tensor | None
    """Sum of G over the sentences, `(d, d)`; None if it is added to `SentenceMoments.scatter` separately."""


class SentenceMoments(Accumulator):
    r"""Accumulates what the score of `isoscore_by_sentence` depends on, over a stream of batches of sentences.

    With points x, y, z, w of four distinct sentences and the covariance S of a point,

    .. math::
        \operatorname{tr}(S^2) &= E[(x^T y)^2] - 2 E[x^T y \, y^T z] + E[x^T y \, z^T w] \\
        \operatorname{tr}(S)^2 &= E[\lVert x \rVert^2 \lVert y \rVert^2] - 2 E[\lVert x \rVert^2 y^T z]
        + E[x^T y \, z^T w].

    Each expectation is estimated by the average over all such pairs, triples or quadruples of points, which is
    unbiased. If all sentences have the same number of points, the estimates are the averages of
    :math:`((x - y)^T (z - w))^2 / 4` and :math:`\lVert x - y \rVert^2 \lVert z - w \rVert^2 / 4` over all
    quadruples.

    The sums over tuples are functions of sums over single sentences, by inclusion and exclusion. With the points
    :math:`X_s` of sentence s, their sum :math:`m_s` and their scatter :math:`G_s = X_s^T X_s`, for example,

    .. math:: \sum_{s \ne t} \sum_{x \in s, y \in t} (x^T y)^2
        = \lVert \textstyle\sum_s G_s \rVert_F^2 - \sum_s \lVert G_s \rVert_F^2.

    So the memory is :math:`O(d^2)`, and the time :math:`O(d^2)` for each point and :math:`O(t^2 d)` for a sentence of t
    points. Batches may come in any order, and accumulators with the same origin merge exactly. All points of a sentence
    must be in one batch.

    Args:
        dim: d, at least 2.
        origin: `(d,)`, subtracted from all points. The estimates are unbiased about any origin; near the mean of the
            points they vary least and lose the fewest digits. None subtracts nothing.
        device: device of the sums; points must be on the same device.

    Raises:
        UserError: for fewer than 2 dimensions, or an origin of another shape.
    """

    origin: Tensor
    counts: Tensor
    sentences: Tensor
    total: Tensor
    scatter: Tensor
    totals_scatter: Tensor
    scattered_totals: Tensor
    weighted_totals: Tensor
    trace_weighted_totals: Tensor
    scalars: Tensor

    def __init__(self, dim: int, origin: Tensor | None = None, device: torch.device | str | None = None) -> None:
        if dim < 2:
            raise UserError(f"isotropy needs at least 2 dimensions; the points have {dim}")
        zeros = zero_vector(dim, device)
        if origin is not None and origin.shape != zeros.shape:
            raise UserError(f"the origin has shape {tuple(origin.shape)}; expected ({dim},)")
        self.add_state("origin", zeros if origin is None else origin.to(zeros), "equal")
        # Sums over sentences of powers of the number of points: of n, n^2, n^3 and n^4; and the number of sentences.
        self.add_state("counts", zeros.new_zeros(4), "sum")
        self.add_state("sentences", zeros.new_zeros(()), "sum")
        self.add_state("total", zeros.clone(), "sum")  # m
        self.add_state("scatter", zeros.new_zeros(dim, dim), "sum")  # G
        self.add_state("totals_scatter", zeros.new_zeros(dim, dim), "sum")  # m m^T
        self.add_state("scattered_totals", zeros.clone(), "sum")  # G m
        self.add_state("weighted_totals", zeros.clone(), "sum")  # |m|^2 m
        self.add_state("trace_weighted_totals", zeros.clone(), "sum")  # tr(G) m
        # |G|^2, m^T G m, |m|^2, |m|^4, tr(G), tr(G)^2 and tr(G) |m|^2.
        self.add_state("scalars", zeros.new_zeros(7), "sum")

    def update(self, points: Tensor, mask: Tensor | None = None) -> Self:
        """Add sentences. Returns this accumulator.

        Args:
            points: `(sentences, tokens, d)`.
            mask: `(sentences, tokens)`, bool or 0/1; points where the mask is 0 are ignored.

        Raises:
            UserError: if shapes or dtypes do not match.
        """
        _check_sentences(points, mask)
        if points.shape[-1] != len(self.origin):
            raise UserError(f"points have {points.shape[-1]} dimensions; expected {len(self.origin)}")
        is_included = points.new_ones(points.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        # The difference has the dtype of the origin. Multiplying by the mask would keep NaN at the padding.
        centered = (points - self.origin).masked_fill_(~is_included[..., None], 0)
        counts = is_included.sum(1).to(self.origin)
        totals = centered.sum(1)
        flat_points = centered.flatten(0, 1)
        grams = centered @ centered.mT  # x^T y of all pairs of points of each sentence
        products = grams.sum(2, keepdim=True)  # x^T m of each point
        return self.add(
            SentenceSums(
                counts,
                totals,
                scattered=(centered.mT @ products)[..., 0],
                squares=grams.square().sum((1, 2)),
                traces=grams.diagonal(dim1=1, dim2=2).sum(1),
                scatter=flat_points.T @ flat_points,
            )
        )

    def add(self, sums: SentenceSums) -> Self:
        """Add sentences by their sums about the origin, in the dtype of the accumulator. Returns this accumulator."""
        counts, totals, scattered, squares, traces, scatter = sums
        squared_norms = totals.square().sum(1)
        # Out of place, so that copies of the accumulator keep their values, and gradients reach the sums.
        self.counts = self.counts + torch.stack([counts.pow(power).sum() for power in (1, 2, 3, 4)])
        self.sentences = self.sentences + counts.count_nonzero()
        self.total = self.total + totals.sum(0)
        if scatter is not None:
            self.scatter = self.scatter + scatter
        self.totals_scatter = self.totals_scatter + totals.T @ totals
        self.scattered_totals = self.scattered_totals + scattered.sum(0)
        self.weighted_totals = self.weighted_totals + squared_norms @ totals
        self.trace_weighted_totals = self.trace_weighted_totals + traces @ totals
        scalars = (
            squares,
            (totals * scattered).sum(1),
            squared_norms,
            squared_norms.square(),
            traces,
            traces.square(),
            traces * squared_norms,
        )
        self.scalars = self.scalars + torch.stack([sentence_scalars.sum() for sentence_scalars in scalars])
        return self

    def subtract(self, other: Self) -> Self:
        """Take away sentences that another accumulator with the same origin has in common. Returns this accumulator."""
        for name in self.find_names("sum"):
            setattr(self, name, getattr(self, name) - getattr(other, name).to(self.origin))
        return self

    def score(self) -> Tensor:
        """Return the estimate of IsoScore, 0-d; see `isoscore_by_sentence`.

        Raises:
            UserError: for fewer than 4 sentences, points that are not finite, or a squared norm of the covariance that
                is estimated as 0 or less.
        """
        check_finite(self.scalars, "the points")
        if self.sentences < 4:
            raise UserError(f"{int(self.sentences)} sentences have no score; expected at least 4 with points")
        score = self.unchecked_score()
        if score.isnan():
            raise UserError(
                "the squared norm of the covariance is estimated as 0, so the score is not defined; use more sentences"
            )
        return score

    def unchecked_score(self) -> Tensor:
        """Compute `score` without checks, so that the host does not wait for a GPU; NaN replaces errors."""
        squared_norm, squared_trace = self.estimates()
        # An estimate that is smaller relative to the squared mean of |x|^2 is a rounding error.
        smallest_squared_norm = 1e-12 * (self.scalars[4] / self.counts[0]).square().detach()
        squared_norm = torch.where(squared_norm.detach() > smallest_squared_norm, squared_norm, torch.nan)
        return (squared_trace / squared_norm - 1) / (len(self.origin) - 1)

    def estimates(self) -> tuple[Tensor, Tensor]:
        """Return the unbiased estimates of tr(S^2) and tr(S)^2 for the covariance S, 0-d each. Needs 4 sentences."""
        # Sums over sentences of |G|^2, m^T G m, |m|^2, |m|^4, tr(G), tr(G)^2 and tr(G) |m|^2.
        g_square, m_g_m, m_square, m_fourth, trace, trace_square, trace_m_square = self.scalars
        total = self.total
        # Sums over tuples of distinct sentences: pairs of sums m, then triples and quadruples with two products.
        pairs = total.square().sum() - m_square
        repeated_pairs = self.totals_scatter.square().sum() - m_fourth
        chains = total @ self.totals_scatter @ total - 2 * total @ self.weighted_totals + m_fourth - repeated_pairs
        quadruples = pairs.square() - 4 * chains - 2 * repeated_pairs
        squared_products = self.scatter.square().sum() - g_square
        triples = (
            total @ self.scatter @ total
            - 2 * total @ self.scattered_totals
            + 2 * m_g_m
            - (self.scatter * self.totals_scatter).sum()
        )
        trace_pairs = trace.square() - trace_square
        trace_triples = trace * pairs - 2 * total @ self.trace_weighted_totals + 2 * trace_m_square
        num_pairs, num_triples, num_quadruples = self._count_tuples()
        quadruple_mean = quadruples / num_quadruples
        return (
            squared_products / num_pairs - 2 * triples / num_triples + quadruple_mean,
            trace_pairs / num_pairs - 2 * trace_triples / num_triples + quadruple_mean,
        )

    def _count_tuples(self) -> tuple[Tensor, Tensor, Tensor]:
        # Sums over sentences of the number of points and of its powers, for inclusion and exclusion.
        n, n2, n3, n4 = self.counts
        return (
            n.square() - n2,
            n.pow(3) - 3 * n * n2 + 2 * n3,
            n.pow(4) - 6 * n.square() * n2 + 3 * n2.square() + 8 * n * n3 - 6 * n4,
        )


def _check_sentences(points: Tensor, mask: Tensor | None) -> None:
    if points.dim() != 3 or points.shape[-1] < 1:
        raise UserError(f"points have shape {tuple(points.shape)}; expected (sentences, tokens, d)")
    if not points.is_floating_point():
        raise UserError(f"points are {points.dtype}; expected a floating dtype")
    check_one_per_point(mask, "mask", points)
