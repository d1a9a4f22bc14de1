"""Measures of all states of a stack from their sums, and their jackknife replicates."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from istar.measures import FourthMoments, jackknife_bias_correction, jackknife_error
from istar.measures.catalogue import MEASURES_WITH_ERROR
from istar.measures.isoscores import unchecked_isoscore_unbiased
from istar.measures.numerics import is_rounding, row_norms
from istar.measures.spectrum import fit_power_law, significant_roots, unchecked_shares, unchecked_top_share
from istar.sums.layers import Layer, compute_dimensions, compute_moments, get_group_sums, make_moments
from istar.sums.stack_sums import StackSums

_FIRST_FITTED_RANK, _LAST_FITTED_RANK, _MIN_FITTED_RANKS = 11, 100, 10
"""Ranks of the variances, from 1, that alpha-ReQ fits a power law to, and their smallest number: any line fits few."""
_MAX_MATRIX_BYTES = 2**25
"""Maximum bytes of the scatter matrices that are decomposed at once, unless one has more."""


@torch.no_grad()
def compute_spectra(sums: StackSums) -> dict[str, dict[str, Tensor]]:
    """Compute the singular values of each state, `raw` and `centered`, `(d,)`, descending, on the CPU."""
    spectra = {}
    for states in _split(sums, len(sums.names)):
        moments = compute_moments(sums, states)
        origin_shift = (moments.count[:, None] * moments.mean)[..., None]
        raw_scatter = torch.addcmul(moments.scatter, origin_shift, moments.mean[:, None])
        values_by_form = {
            form: _compute_singular_values(scatter, moments).cpu()
            for form, scatter in (("raw", raw_scatter), ("centered", moments.scatter))
        }
        for index, state in enumerate(sums.names[states]):
            spectra[state] = {form: values[index] for form, values in values_by_form.items()}
    return spectra


@torch.no_grad()
def compute_measures(
    sums: StackSums, spectra: Mapping[str, Mapping[str, Tensor]], replicates: Mapping[str, Mapping[str, list[float]]]
) -> dict[str, dict[str, float]]:
    """Compute all measures of each state by name, and standard errors of some as `<name>_error`; NaN if undefined.

    `isoscore` has no shrinkage. `mean_kurtosis` leaves out dimensions where all points are equal. `spectra` and
    `replicates` are results of `compute_spectra` and `compute_replicates`.
    """
    dim = sums.origins.shape[1]
    dimensions = compute_dimensions(sums)
    variances, deviations, kurtosis = dimensions.variance(), dimensions.deviation(), dimensions.kurtosis()
    typical_deviation = deviations.quantile(0.5, dim=-1)
    squared_mean, total_variance = dimensions.mean.square().sum(-1), dimensions.variance(correction=0).sum(-1)
    is_constant = is_rounding(total_variance, squared_mean, torch.finfo(squared_mean.dtype).eps)
    raw, centered = (torch.stack([spectra[state][form] for state in sums.names]) for form in ("raw", "centered"))
    unbiased_scores = [
        unchecked_isoscore_unbiased(compute_moments(sums, states)).cpu() for states in _split(sums, len(sums.names))
    ]
    covariance_measures = _compute_covariance_measures(torch.cat(unbiased_scores), centered)
    cumulative_shares = unchecked_shares(centered.square()).cumsum(-1)
    scalars, origins, powers = sums.group_scalars.sum(1).cpu(), sums.origins.cpu(), sums.powers.cpu()
    count, norm_total, num_nonzero, _, squared_weights, _ = scalars.unbind(-1)
    unit_total = _compute_unit_totals(sums).sum(1).cpu()
    inter_sim, num_pairs = _compute_inter_sim(unit_total, num_nonzero)
    weighted, weighted_squares = sums.weighted_squares.cpu().unbind(1)
    # By (w x)^2 = w^2 y^2 + 2 w^2 y o + w^2 o^2, for y = x - o.
    unit_squares = weighted_squares + (2 * weighted + squared_weights[:, None] * origins) * origins
    contributions = (unit_total.square() - unit_squares) / num_pairs[:, None]
    average_norm, mean_norm = norm_total / count, row_norms(powers[:, 0] / count[:, None] + origins)
    largest_kurtosis = kurtosis.nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf).amax(-1)
    columns = {
        "points": count,
        **covariance_measures,
        **{
            # The sum of shares such as 0.6 + 0.2 is below 0.8 by rounding.
            f"dimensions_{percent}": torch.where(
                cumulative_shares[:, -1].isnan(),
                math.nan,
                1 + (cumulative_shares < percent / 100 * (1 - 1e-12)).sum(-1),
            )
            for percent in (90, 95, 99)
        },
        "outlier_severity": (squared_mean / total_variance.masked_fill(is_constant, math.nan)).sqrt(),
        "inter_sim": inter_sim,
        "mean_direction_norm": unit_total.norm(dim=-1) / num_nonzero,
        "average_norm": average_norm,
        "mean_vector_norm": mean_norm,
        "norm_ratio": _divide_norms(mean_norm, average_norm),
        "rank_me": torch.special.entr(unchecked_shares(raw) + 1e-7).sum(-1).exp(),
        "largest_variance_share": unchecked_top_share(variances, 1),
        "top_5_variance_share": unchecked_top_share(variances, min(5, dim)),
        "top_1_cosine_share": unchecked_top_share(contributions, 1),
        "top_5_cosine_share": unchecked_top_share(contributions, min(5, dim)),
        # Rogue dimensions of pretrained models: the mean is many times the median deviation of all dimensions.
        "outlier_dimensions": torch.where(
            typical_deviation > 0, (dimensions.mean.abs() > 5 * typical_deviation[:, None]).sum(-1), math.nan
        ),
        "largest_kurtosis": torch.where(largest_kurtosis > -math.inf, largest_kurtosis, math.nan),
        "mean_kurtosis": kurtosis.nanmean(-1),
        "participation_ratio_unbiased": 1 + (dim - 1) * covariance_measures["isoscore_unbiased"],
    }
    rows = torch.stack([column.double() for column in columns.values()], 1).tolist()
    return {
        state: _complete_measures(Layer(sums, state), dict(zip(columns, row, strict=True)), replicates[state])
        for state, row in zip(sums.names, rows, strict=True)
    }


def _complete_measures(
    layer: Layer, measures: dict[str, float], replicates: Mapping[str, list[float]]
) -> dict[str, float]:
    """Return the measures of a state with those by type and token, and with what follows from the replicates."""
    if (types := layer.types) is not None:
        # IntraSim is the mean over the types that occur at least twice; NaN if there is none.
        measures["intra_sim"] = types.inter_sim().nanmean().item()
        measures["adjusted_intra_sim"] = measures["intra_sim"] - measures["inter_sim"]
    kurtosis, massive = layer.summarize_kurtosis(), layer.find_massive_activations()
    if kurtosis is not None and massive is not None:
        measures |= {"token_kurtosis": kurtosis.average, "largest_token_kurtosis": kurtosis.largest}
        measures |= {"massive_activations": massive.count, "largest_activation": massive.largest}
        measures["largest_activation_ratio"] = massive.largest_ratio
    # Below two points a dimension, the correction is wrong by more than a few percent.
    has_points = measures["points"] >= 2 * len(layer.origin)
    ranks_without_groups = replicates.get("effective_rank", []) if has_points else []
    measures["effective_rank_unbiased"] = jackknife_bias_correction(measures["effective_rank"], ranks_without_groups)
    errors = {f"{name}_error": jackknife_error(values) for name, values in replicates.items() if name != "points"}
    return measures | errors


@torch.no_grad()
def compute_replicates(sums: StackSums) -> dict[str, dict[str, list[float]]]:
    """Compute the jackknife replicates of each state: measures with a standard error, without each group of documents.

    The result has a list by measure, with a value for each group that is left out, and under `points` the numbers of
    points without each group. A list is empty if a group has no points, or if the measure is undefined without one of
    the groups. Without groups, the result of a state is empty.
    """
    num_groups, has_scatter = sums.settings.num_groups, sums.settings.scatter_by_group
    if not num_groups:
        return {state: {} for state in sums.names}
    names = [name for name, needs in MEASURES_WITH_ERROR.items() if needs == "points" or has_scatter]
    count, norm_total, num_nonzero, *_ = _sum_others(sums.group_scalars).unbind(-1)
    inter_sim, _ = _compute_inter_sim(_sum_others(_compute_unit_totals(sums)), num_nonzero)
    columns = {"points": count, "inter_sim": inter_sim, "average_norm": norm_total / count}
    if has_scatter:
        parts = [_compute_replicates_of(sums, index) for index in range(len(sums.names))]
        columns |= {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        columns["norm_ratio"] = _divide_norms(columns["mean_vector_norm"], columns["average_norm"])
    is_empty = (sums.group_scalars[..., 0] == 0).any(1)
    table = torch.stack([columns[name] for name in ("points", *names)], 1)
    table = table.masked_fill(is_empty[:, None, None], math.nan)
    # A measure is NaN if it is not defined, such as the power law of few dimensions.
    return {
        state: {
            name: values if all(map(math.isfinite, values)) else []
            for name, values in zip(("points", *names), rows, strict=True)
        }
        for state, rows in zip(sums.names, table.tolist(), strict=True)
    }


def _compute_replicates_of(sums: StackSums, index: int) -> dict[str, Tensor]:
    """Compute the replicates of a state that need scatter matrices, `(1, groups)` by measure."""
    state, parts = slice(index, index + 1), []
    group_sums = get_group_sums(sums, state)
    for groups in _split(sums, sums.settings.num_groups):
        others = [values.sum(1, keepdim=True) - values[:, groups] for values in group_sums]
        moments = make_moments(sums, state, others)
        spectra = _compute_singular_values(moments.scatter, moments)
        measures = _compute_covariance_measures(unchecked_isoscore_unbiased(moments), spectra)
        parts.append({**measures, "mean_vector_norm": moments.mean.norm(dim=-1)})
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def _compute_covariance_measures(unbiased_scores: Tensor, spectra: Tensor) -> dict[str, Tensor]:
    """Return measures `(...)` by name from the unbiased IsoScore, `(...)`, and the centered spectrum, `(..., d)`."""
    variances, dim = spectra.square(), spectra.shape[-1]
    shares = unchecked_shares(variances)
    participation_ratio = 1 / shares.square().sum(-1)
    # The last variance is left out: layer normalization makes it a rounding error.
    last_ranks = (variances > 0).sum(-1).clamp(max=min(_LAST_FITTED_RANK, dim - 1))
    is_fitted = last_ranks - _FIRST_FITTED_RANK + 1 >= _MIN_FITTED_RANKS
    alpha, r_squared = fit_power_law(variances, _FIRST_FITTED_RANK, last_ranks)
    return {
        "isoscore": (participation_ratio - 1) / (dim - 1),
        "isoscore_unbiased": unbiased_scores,
        "effective_rank": torch.special.entr(unchecked_shares(spectra)).sum(-1).exp(),
        "participation_ratio": participation_ratio,
        "nesum": 1 / shares.amax(-1),
        "alpha_req": torch.where(is_fitted, alpha, math.nan),
        "alpha_req_r_squared": torch.where(is_fitted, r_squared, math.nan),
    }


def _compute_singular_values(scatter: Tensor, moments: FourthMoments) -> Tensor:
    """Return the singular values `(..., d)`, descending, of scatter matrices about the mean or about 0."""
    return significant_roots(scatter, moments, torch.linalg.eigvalsh(scatter).flip(-1))


def _compute_unit_totals(sums: StackSums) -> Tensor:
    """Return the sum of the unit vectors of each group, `(states, groups, d)`."""
    # By w x = w (x - o) + w o, for unit vectors w x and the origin o.
    return sums.group_vectors[:, 2] + sums.group_scalars[..., 3, None] * sums.origins[:, None]


def _compute_inter_sim(unit_totals: Tensor, num_nonzero: Tensor) -> tuple[Tensor, Tensor]:
    """Return the average cosine of all pairs and their number, `(...)`; NaN with fewer than 2 nonzero points."""
    n = torch.where(num_nonzero > 1, num_nonzero, math.nan)
    return (unit_totals.square().sum(-1) - n) / (n * (n - 1)), n * (n - 1)


def _divide_norms(mean_norm: Tensor, average_norm: Tensor) -> Tensor:
    """Return the norm ratio; 0 if all points are zero."""
    # If all points have the same direction, rounding can lift the ratio above 1.
    return torch.where(average_norm > 0, mean_norm / average_norm, 0).clamp(max=1)


def _sum_others(values: Tensor) -> Tensor:
    """Return the sums over all other groups of values `(states, groups, ...)`."""
    return values.sum(1, keepdim=True) - values


def _split(sums: StackSums, number: int) -> Iterator[slice]:
    """Yield slices of a number of states or groups whose scatter matrices are computed at once."""
    length = max(_MAX_MATRIX_BYTES // (8 * sums.origins.shape[1] ** 2), 1)
    for start in range(0, number, length):
        yield slice(start, start + length)
