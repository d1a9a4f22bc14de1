"""Sums of one layer's hidden states, for its measures and their standard errors over groups of documents."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from istar.errors import float_or_nan
from istar.measures import (
    Accumulator,
    CosineContributions,
    DimensionMoments,
    FourthMoments,
    GroupedPoints,
    MassiveActivations,
    MassiveActivationsSummary,
    Norms,
    PowerLaw,
    TokenKurtosis,
    alpha_req,
    count_dimensions,
    effective_rank,
    isoscore_unbiased,
    jackknife_bias_correction,
    jackknife_error,
    log2_bin_range,
    log2_bins,
    nesum,
    outlier_dimensions,
    outlier_severity,
    participation_ratio,
    rank_me,
    singular_values,
    top_share,
)
from istar.measures.activations import row_kurtosis
from istar.measures.catalogue import MEASURES_WITH_ERROR
from istar.measures.isoscores import unchecked_isoscore_unbiased
from istar.measures.numerics import accumulation_dtype, full_precision, inverse_or_zero, is_rounding, row_norms
from istar.measures.point_groups import NUM_LOG2_BINS
from istar.measures.spectrum import significant_roots
from istar.sums.grouped_moments import GroupedMoments, sum_over_points
from istar.sums.rows import Rows

MeasureSet = Literal["basic", "all"]
"""Which measures to compute: all, or all but the slowest."""
_FLOAT32_RANGE = (1e-5, 1e8)
"""Norms and deviations of dimensions in this range have fourth powers within float32's range and precision."""
_NORM_EDGES = torch.logspace(-2, 4, 241, device="cpu").tolist()
"""Edges of the bins of the histogram of norms."""
_FIRST_FITTED_RANK, _LAST_FITTED_RANK, _MIN_FITTED_RANKS = 11, 100, 10
"""Ranks of the variances, from 1, that alpha-ReQ fits a power law to, and their smallest number: any line fits few."""


@dataclass(frozen=True)
class LayerSettings:
    """What a `Layer` accumulates."""

    measures: MeasureSet = "basic"  # `all` adds the kurtosis of tokens and massive activations, the slowest measures
    num_groups: int = 0  # number of groups of documents for standard errors; 0 computes none
    scatter_by_group: bool = True  # whether measures of the covariance get standard errors: d^2 numbers by group
    has_positions: bool = True  # whether points have a position in their example, as tokens in a text


class Layer(Accumulator):
    """Accumulates what the measures of one layer's hidden states need.

    Batches may come in any order, and the accumulators of several processes merge exactly. Elementwise operations and
    the sums over a batch are float32, or float64 if the hidden states are float64 or leave the range where float32
    keeps its digits. Sums are accumulated in float64 (float32 on MPS), except the sums of unit vectors by type, which
    are float32.

    Args:
        vocabulary_size: number of token types. 0 leaves out IntraSim and the measures by frequency.
        origin: a point near the mean, `(d,)`, on the device of the hidden states. Powers are summed about it, so that a
            large mean costs no digits. Accumulators to merge need the same origin and settings.
        settings: what is accumulated.

    Attributes:
        types: norms and directions by token type, or None.
        positions: norms and directions by `log2_bins` of the position, or None.
    """

    def __init__(self, vocabulary_size: int, origin: Tensor, settings: LayerSettings | None = None) -> None:
        self.settings = settings or LayerSettings()
        # The same number in float32 and in float64, so that sums in both are about the same point.
        self._origin = origin.float().to(accumulation_dtype(origin.device))
        dim, device, num_groups = len(origin), origin.device, self.settings.num_groups
        num_moments = num_groups if num_groups and self.settings.scatter_by_group else 1
        self._moments = GroupedMoments(num_moments, self._origin)
        self._groups = GroupedPoints(num_groups, dim, device) if num_groups else None
        self.cosine = CosineContributions(dim, device)
        self.norms = Norms(dim, _NORM_EDGES, device)
        # Sums of the first to the fourth powers of the differences from the origin in each dimension, `(4, d)`.
        self.power_sums = self.add_state("power_sums", self._origin.new_zeros(4, dim), "sum")
        # float32 halves the largest sums of a layer. It changes IntraSim by 3e-10, and the value of one type by 9e-8.
        self.types = GroupedPoints(vocabulary_size, dim, device, torch.float32) if vocabulary_size else None
        self.positions = GroupedPoints(NUM_LOG2_BINS, dim, device) if self.settings.has_positions else None
        has_all_measures = self.settings.measures == "all"
        self._kurtosis = TokenKurtosis(dim, device=device) if has_all_measures else None
        self._massive = MassiveActivations(dim, device=device) if has_all_measures else None

    @torch.no_grad()
    def update(self, points: Tensor, rows: Rows) -> None:
        """Add points `(n, d)`, without padding, in the order of `rows`. An unknown type or position is -1."""
        if not len(points):
            return
        if self._massive is not None:
            unknown = torch.full((len(points),), -1, device=points.device)
            columns = (unknown if column is None else column for column in (rows.type_ids, rows.positions))
            self._massive.update(points, *columns)
        with full_precision(points.device):
            if not self._add(points.to(torch.promote_types(points.dtype, torch.float32)), rows):
                self._add(points.double(), rows)

    def _add(self, points: Tensor, rows: Rows) -> bool:
        """Add points, float32 or float64, in the order of `rows`, and return True.

        If the points need float64 and the device has it, add nothing and return False.
        """
        norms = row_norms(points)
        inverse_norms = inverse_or_zero(norms)
        sums = sum_over_points(points, self._origin, inverse_norms)
        can_be_wider = points.dtype == torch.float32 and self._origin.dtype == torch.float64
        if can_be_wider:
            low, high = _FLOAT32_RANGE
            deviations = (sums.powers[1] / len(points)).sqrt()
            nonzero_norms = torch.where(norms == 0, 1, norms)
            extremes = torch.stack([*nonzero_norms.aminmax(), *deviations.aminmax()]).tolist()
            smallest_norm, largest_norm, smallest_deviation, largest_deviation = extremes
            # The comparisons are false for NaN.
            if not (low < smallest_norm and largest_norm < high and largest_deviation < high):
                return False
            if smallest_deviation < low:  # as in layers of pretrained models with normalization gains of nearly 0
                small = (deviations < low).nonzero().squeeze(1)
                differences = points[:, small].to(self._origin) - self._origin[small]
                sums.powers[:, small] = torch.stack([differences.pow(power).sum(0) for power in range(1, 5)])
        self.power_sums = self.power_sums + sums.powers
        self._moments.update(sums.centered, sums.squared_distances, rows)
        wide_norms, wide_inverse_norms = norms.to(self._origin), inverse_norms.to(self._origin)
        self.norms.add_norms(wide_norms, sums.powers[0] + len(points) * self._origin)
        self._add_cosines(wide_inverse_norms, sums.weighted)
        values = torch.stack([wide_norms, wide_inverse_norms, (norms != 0).to(wide_norms)])
        for grouped_points, grouped_rows in (
            (self._groups, rows.groups),
            (self.positions, rows.position_bins),
            (self.types, rows.types),
        ):
            if grouped_points is not None and grouped_rows is not None:
                # By w x = w (x - o) + w o, for unit vectors w x and the origin o.
                weighted = grouped_rows.sum_rows(sums.centered, inverse_norms).to(grouped_points.dtype)
                norm_totals, weight_totals, num_nonzero = grouped_rows.sum_values(values)
                unit_totals = weighted.addr_(weight_totals.to(weighted), self._origin.to(weighted))
                grouped_points.add_rows(grouped_rows, unit_totals, norm_totals, num_nonzero)
        if self._kurtosis is not None:
            self._kurtosis.add_kurtoses(*row_kurtosis(points))
        return True

    def _add_cosines(self, inverse_norms: Tensor, sums: Tensor) -> None:
        """Add points x to the cosines, with y = x - o for the origin o, and w = 1 / |x|, or 0 for a zero point.

        `inverse_norms` are the w, `(n,)`. `sums` are the sums of w y, w^2 y and w^2 y^2, `(3, d)`, in the same dtype.
        """
        weighted, squared_weighted, weighted_squares = sums
        squared_total = inverse_norms.square().sum()
        # By w x = w y + w o and (w x)^2 = w^2 y^2 + 2 w^2 y o + w^2 o^2.
        total = weighted + inverse_norms.sum() * self._origin
        squares = weighted_squares + (2 * squared_weighted + squared_total * self._origin) * self._origin
        num_nonzero = inverse_norms.count_nonzero()
        self.cosine.add_sums(total, squares, num_nonzero, len(inverse_norms) - num_nonzero)

    @property
    def moments(self) -> FourthMoments:
        """Moments of all points, computed at each access. If all points are equal up to rounding, the scatter is 0."""
        return _clear_rounding_errors(self._moments.compute_moments(), self._origin)

    @property
    def dimensions(self) -> DimensionMoments:
        """Moments of each dimension, computed at each access, on the CPU; 0 where points are equal up to rounding."""
        origin, epsilon = self._origin.cpu(), self._moments.epsilon.cpu()
        count = self._moments.counts.sum().cpu()
        dimensions = DimensionMoments.about_mean(origin, count, self.power_sums.cpu())
        variances, mean = dimensions.m2 / count, dimensions.mean
        squares = mean.square() + (mean - origin).square() / epsilon  # the sums are rounded, too
        is_constant = is_rounding(variances, squares, epsilon) | is_rounding(variances.sum(), squares.sum(), epsilon)
        for sums in (dimensions.m2, dimensions.m3, dimensions.m4):
            sums.masked_fill_(is_constant, 0)
        return dimensions

    @property
    def is_constant(self) -> bool:
        """Whether all points are equal up to rounding, computed at each access."""
        return not self.dimensions.m2.any()

    def compute_spectra(self) -> dict[str, Tensor]:
        """Compute the singular values of the hidden states, `raw` and `centered`, `(d,)`, descending, on the CPU."""
        moments = self.moments
        return {form: singular_values(moments, centered=form == "centered").cpu() for form in ("raw", "centered")}

    def compute_measures(
        self, spectra: Mapping[str, Tensor] | None = None, replicates: Mapping[str, list[float]] | None = None
    ) -> dict[str, float]:
        """Compute all measures by name, and standard errors of some as `<name>_error`; NaN if undefined.

        `isoscore` has no shrinkage. `mean_kurtosis` leaves out dimensions where all points are equal. `spectra` and
        `replicates` are results of `compute_spectra` and `compute_replicates`; None computes them.
        """
        spectra = self.compute_spectra() if spectra is None else spectra
        moments, dimensions, dim = self.moments, self.dimensions, len(self._origin)
        variances, deviations, kurtosis = dimensions.variance(), dimensions.deviation(), dimensions.kurtosis()
        # Rogue dimensions of pretrained models: the mean is many times the median deviation of all dimensions.
        outliers = outlier_dimensions(dimensions.mean, 5, "median", reference=deviations)
        norms = self.norms.compute()
        principal_variances = spectra["centered"].square()
        measures: dict[str, float | Tensor] = {
            "points": float(moments.count),
            **_compute_covariance_measures(float_or_nan(lambda: isoscore_unbiased(moments)), spectra["centered"]),
            **{
                f"dimensions_{percent}": float_or_nan(partial(count_dimensions, principal_variances, percent / 100))
                for percent in (90, 95, 99)
            },
            "outlier_severity": float_or_nan(lambda: outlier_severity(dimensions)),
            "inter_sim": float_or_nan(self.cosine.compute),
            "mean_direction_norm": float_or_nan(self.cosine.mean_direction_norm),
            "average_norm": norms.average,
            "mean_vector_norm": norms.mean_vector,
            "norm_ratio": norms.ratio,
            "rank_me": float_or_nan(lambda: rank_me(spectra["raw"])),
            "alpha_req_r_squared": _fit_power_law(principal_variances).r_squared,
            "largest_variance_share": top_share(variances),
            "top_5_variance_share": top_share(variances, min(5, dim)),
            "top_1_cosine_share": float_or_nan(lambda: top_share(self.cosine.contributions())),
            "top_5_cosine_share": float_or_nan(lambda: top_share(self.cosine.contributions(), min(5, dim))),
            "outlier_dimensions": len(outliers) if deviations.quantile(0.5) > 0 else math.nan,
            "largest_kurtosis": kurtosis.nanquantile(1),
            "mean_kurtosis": kurtosis.nanmean(),
        }
        if self.types is not None:
            # IntraSim is the mean over the types that occur at least twice; NaN if there is none.
            measures["intra_sim"] = self.types.inter_sim().nanmean()
            measures["adjusted_intra_sim"] = measures["intra_sim"] - measures["inter_sim"]
        if self._kurtosis is not None:
            token_kurtosis = self._kurtosis.compute()
            measures |= {"token_kurtosis": token_kurtosis.average, "largest_token_kurtosis": token_kurtosis.largest}
        massive = self.find_massive_activations()
        if massive is not None:
            measures |= {"massive_activations": massive.count, "largest_activation": massive.largest}
            measures["largest_activation_ratio"] = massive.largest_ratio
        replicates = self.compute_replicates() if replicates is None else replicates
        measures["participation_ratio_unbiased"] = 1 + (dim - 1) * measures["isoscore_unbiased"]
        # Below two points a dimension, the correction is wrong by more than a few percent.
        ranks_without_groups = replicates.get("effective_rank", []) if moments.count >= 2 * dim else []
        measures["effective_rank_unbiased"] = jackknife_bias_correction(
            float(measures["effective_rank"]), ranks_without_groups
        )
        errors = {f"{name}_error": jackknife_error(values) for name, values in replicates.items() if name != "points"}
        return {**{name: float(value) for name, value in measures.items()}, **errors}

    def find_massive_activations(self) -> MassiveActivationsSummary | None:
        """Return the massive activations, or None if the settings leave them out."""
        return None if self._massive is None else self._massive.compute()

    def summarize_by_position(self) -> dict[str, list[float]]:
        """Return the average norm and InterSim of the points in bins of their position; {} without positions."""
        return {} if self.positions is None else _summarize_bins(self.positions)

    def summarize_by_frequency(self) -> dict[str, list[float]]:
        """Return the average norm and InterSim of tokens by how often their type occurs; {} without a vocabulary."""
        return {} if self.types is None else _summarize_bins(self.types.regroup(log2_bins(self.types.count)))

    def compute_replicates(self) -> dict[str, list[float]]:
        """Compute the jackknife replicates: measures with a standard error, computed without each group of documents.

        The result has a list by measure, with a value for each group that is left out, and under `points` the numbers
        of points without each group. A list is empty if a group has no points, or if the measure is undefined without
        one of the groups. Without groups, the result is empty.
        """
        if self._groups is None:
            return {}
        has_scatter = self.settings.scatter_by_group
        names = [name for name, needs in MEASURES_WITH_ERROR.items() if needs == "points" or has_scatter]
        estimates = self._compute_without_each_group(self._groups) if (self._groups.count > 0).all() else []
        replicates = {name: [measures[name] for measures in estimates] for name in ("points", *names)}
        # A measure is NaN if it is not defined, such as the power law of few dimensions.
        return {name: values if all(map(math.isfinite, values)) else [] for name, values in replicates.items()}

    def _compute_without_each_group(self, groups: GroupedPoints) -> list[dict[str, float]]:
        """Compute, for each group, the measures that have a standard error from the points of all other groups."""
        estimates: list[dict[str, float]] = [
            {"points": float(others.count), "inter_sim": others.inter_sim, "average_norm": others.average_norm}
            for others in groups.merge_others().compute()
        ]
        if not self.settings.scatter_by_group:
            return estimates
        for measures, sums in zip(estimates, self._moments.sum_without_each_group(), strict=True):
            about_mean = FourthMoments.about_mean(self._origin, sums, self._moments.epsilon)
            moments = _clear_rounding_errors(about_mean, self._origin)
            eigenvalues = torch.linalg.eigvalsh(moments.scatter).flip(0)
            spectrum = significant_roots(moments.scatter, moments, eigenvalues).cpu()
            measures |= _compute_covariance_measures(unchecked_isoscore_unbiased(moments).item(), spectrum)
            mean_vector, norm = moments.mean.norm().item(), measures["average_norm"]
            measures |= {"mean_vector_norm": mean_vector, "norm_ratio": mean_vector / norm if norm else 0.0}
        return estimates


def _clear_rounding_errors(moments: FourthMoments, origin: Tensor) -> FourthMoments:
    """Set the scatter matrix to 0 if points, summed about an origin, are equal up to rounding; return the moments."""
    variance, epsilon = moments.scatter.trace() / (moments.count - 1), moments.epsilon
    squares = moments.mean.square() + (moments.mean - origin).square() / epsilon  # the sums are rounded, too
    moments.scatter = torch.where(is_rounding(variance, squares.sum(), epsilon), 0, moments.scatter)
    return moments


def _compute_covariance_measures(unbiased_score: float, centered_spectrum: Tensor) -> dict[str, float]:
    variances = centered_spectrum.square()
    return {
        "isoscore": float_or_nan(lambda: (participation_ratio(variances) - 1) / (len(variances) - 1)),
        "isoscore_unbiased": unbiased_score,
        "effective_rank": float_or_nan(lambda: effective_rank(centered_spectrum)),
        "participation_ratio": float_or_nan(lambda: participation_ratio(variances)),
        "nesum": float_or_nan(lambda: nesum(variances)),
        "alpha_req": _fit_power_law(variances).alpha,
    }


def _fit_power_law(variances: Tensor) -> PowerLaw:
    # The last variance is left out: layer normalization makes it a rounding error.
    last = min(_LAST_FITTED_RANK, len(variances) - 1, int((variances > 0).sum()))
    if last - _FIRST_FITTED_RANK + 1 < _MIN_FITTED_RANKS:
        return PowerLaw(math.nan, math.nan, 0, 0)
    return alpha_req(variances, _FIRST_FITTED_RANK, last)


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
