"""Measures of one layer's hidden states, and their standard errors over groups of documents, from sums."""

import math
from collections.abc import Mapping
from functools import cached_property, partial

import torch
from torch import Tensor

from istar.errors import float_or_nan
from istar.measures import (
    CosineContributions,
    DimensionMoments,
    FourthMoments,
    GroupedPoints,
    MassiveActivationsSummary,
    Norms,
    PowerLaw,
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
from istar.measures.catalogue import MEASURES_WITH_ERROR
from istar.measures.isoscores import unchecked_isoscore_unbiased
from istar.measures.numerics import is_rounding
from istar.measures.spectrum import significant_roots
from istar.sums.stack_sums import NORM_EDGES, SCALARS, StackSums

_FIRST_FITTED_RANK, _LAST_FITTED_RANK, _MIN_FITTED_RANKS = 11, 100, 10
"""Ranks of the variances, from 1, that alpha-ReQ fits a power law to, and their smallest number: any line fits few."""


class Layer:
    """The measures of one layer's hidden states, from the sums of a stack at a time; later updates may change them.

    Args:
        sums: the sums of a stack of states.
        state: name of one of them.
    """

    def __init__(self, sums: StackSums, state: str) -> None:
        self._sums, self._state, self._index = sums, state, sums.names.index(state)
        self._origin, self._epsilon = sums.origins[self._index], sums.epsilons[self._index]
        self._group_scalars = dict(zip(SCALARS, sums.group_scalars[self._index].T, strict=True))
        self._scalars = {name: values.sum() for name, values in self._group_scalars.items()}

    @property
    def device(self) -> torch.device:
        """The device of the sums."""
        return self._origin.device

    @cached_property
    def cosine(self) -> CosineContributions:
        """The sums of unit vectors of all points."""
        weighted_sums, weighted_squares = self._sums.weighted_squares[self._index]
        weight_total = self._scalars["squared_weights"]
        cosine = CosineContributions(len(self._origin), self.device)
        cosine.total = self._unit_totals.sum(0)
        # By (w x)^2 = w^2 y^2 + 2 w^2 y o + w^2 o^2, for y = x - o.
        cosine.squares = weighted_squares + (2 * weighted_sums + weight_total * self._origin) * self._origin
        cosine.count = self._scalars["is_nonzero"]
        cosine.zeros = self._scalars["ones"] - cosine.count
        return cosine

    @cached_property
    def norms(self) -> Norms:
        """The norms of all points."""
        norms = Norms(len(self._origin), NORM_EDGES, self.device)
        norms.count, norms.norm_total = self._scalars["ones"].long(), self._scalars["norms"]
        norms.total = self._sums.powers[self._index, 0] + self._scalars["ones"] * self._origin
        norms.smallest, norms.largest = self._sums.smallest_norms[self._index], self._sums.largest_norms[self._index]
        norms.bins = self._sums.norm_bins[self._index].long()
        return norms

    @cached_property
    def types(self) -> GroupedPoints | None:
        """Norms and directions by token type, or None without a vocabulary."""
        scalars = self._sums.type_scalars[self._index]
        if not len(scalars):
            return None
        counts, norm_totals, num_nonzero, weights = scalars.unbind(-1)
        types, vectors = self._sums.type_vectors.gather(self._state)
        unit_totals = vectors.addr(weights[types].to(vectors), self._origin.to(vectors))
        return GroupedPoints.of_sums(counts.long(), num_nonzero.long(), norm_totals, unit_totals, types)

    @cached_property
    def positions(self) -> GroupedPoints | None:
        """Norms and directions by `log2_bins` of the position, or None without positions."""
        scalars = self._sums.position_scalars[self._index]
        if not len(scalars):
            return None
        counts, norm_totals, num_nonzero, weight_totals = scalars.unbind(-1)
        # By w x = w (x - o) + w o, for unit vectors w x and the origin o.
        unit_totals = self._sums.position_vectors[self._index] + weight_totals[:, None] * self._origin
        return GroupedPoints.of_sums(counts.long(), num_nonzero.long(), norm_totals, unit_totals)

    @property
    def _groups(self) -> GroupedPoints | None:
        """Norms and directions by group of documents, or None without groups."""
        if not self._sums.settings.num_groups:
            return None
        counts, num_nonzero = (self._group_scalars[name].long() for name in ("ones", "is_nonzero"))
        return GroupedPoints.of_sums(counts, num_nonzero, self._group_scalars["norms"], self._unit_totals)

    @property
    def _unit_totals(self) -> Tensor:
        """Sums of the unit vectors of each group, `(groups, d)`."""
        weight_totals = self._group_scalars["weights"]
        unit_totals: Tensor = self._sums.group_vectors[self._index, 2] + weight_totals[:, None] * self._origin
        return unit_totals

    @property
    def moments(self) -> FourthMoments:
        """Moments of all points, computed at each access. If all points are equal up to rounding, the scatter is 0."""
        return self._make_moments([sums.sum(0) for sums in self._group_sums])

    @property
    def dimensions(self) -> DimensionMoments:
        """Moments of each dimension, computed at each access, on the CPU; 0 where points are equal up to rounding."""
        origin, epsilon, count = self._origin.cpu(), self._epsilon.cpu(), self._scalars["ones"].cpu()
        dimensions = DimensionMoments.about_mean(origin, count, self._sums.powers[self._index].cpu())
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
        if self._state in self._sums.kurtosis:
            token_kurtosis = self._sums.kurtosis[self._state].compute()
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
        return self._sums.massive[self._state].compute() if self._state in self._sums.massive else None

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
        groups = self._groups
        if groups is None:
            return {}
        has_scatter = self._sums.settings.scatter_by_group
        names = [name for name, needs in MEASURES_WITH_ERROR.items() if needs == "points" or has_scatter]
        estimates = self._compute_without_each_group(groups) if (groups.count > 0).all() else []
        replicates = {name: [measures[name] for measures in estimates] for name in ("points", *names)}
        # A measure is NaN if it is not defined, such as the power law of few dimensions.
        return {name: values if all(map(math.isfinite, values)) else [] for name, values in replicates.items()}

    def _compute_without_each_group(self, groups: GroupedPoints) -> list[dict[str, float]]:
        """Compute, for each group, the measures that have a standard error from the points of all other groups."""
        estimates: list[dict[str, float]] = [
            {"points": float(others.count), "inter_sim": others.inter_sim, "average_norm": others.average_norm}
            for others in groups.merge_others().compute()
        ]
        if not self._sums.settings.scatter_by_group:
            return estimates
        group_sums = self._group_sums
        totals = [sums.sum(0) for sums in group_sums]
        for measures, *one_group in zip(estimates, *group_sums, strict=True):
            moments = self._make_moments([total - sums for total, sums in zip(totals, one_group, strict=True)])
            eigenvalues = torch.linalg.eigvalsh(moments.scatter).flip(0)
            spectrum = significant_roots(moments.scatter, moments, eigenvalues).cpu()
            measures |= _compute_covariance_measures(unchecked_isoscore_unbiased(moments).item(), spectrum)
            mean_vector, norm = moments.mean.norm().item(), measures["average_norm"]
            measures |= {"mean_vector_norm": mean_vector, "norm_ratio": mean_vector / norm if norm else 0.0}
        return estimates

    @property
    def _group_sums(self) -> list[Tensor]:
        """The sums of each group as `FourthMoments.about_mean` takes them, with packed scatter matrices."""
        sums, index = self._sums, self._index
        totals, thirds, _ = sums.group_vectors[index]
        counts, fourths = (self._group_scalars[name] for name in ("ones", "fourth_powers"))
        return [counts, totals, sums.scatters[index], thirds, fourths]

    def _make_moments(self, sums: list[Tensor]) -> FourthMoments:
        count, total, packed_scatter, third, fourth = sums
        unpacked = [count, total, self._sums.panels.unpack(packed_scatter), third, fourth]
        moments = FourthMoments.about_mean(self._origin, unpacked, self._epsilon)
        return _clear_rounding_errors(moments, self._origin)


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
