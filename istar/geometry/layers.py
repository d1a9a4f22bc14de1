"""Accumulators for all streaming measures of one layer, and their standard errors from groups of documents."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from istar.errors import UserError
from istar.geometry.grouped_moments import GroupedMoments, GroupedSentences, set_tensors, tensors
from istar.measures import (
    CosineContributions,
    DimensionMoments,
    FourthMoments,
    GroupedPoints,
    MassiveActivations,
    MassiveActivationsSummary,
    Norms,
    PowerLaw,
    SentenceMoments,
    TokenKurtosis,
    alpha_req,
    effective_rank,
    isoscore,
    isoscore_unbiased,
    jackknife_error,
    log2_bin_range,
    log2_bins,
    nesum,
    outlier_dimensions,
    rank_me,
    singular_values,
    top_share,
)
from istar.measures.point_groups import NUM_LOG2_BINS
from istar.measures.rows import norms_and_units, upcast_blocks

MeasureSet = Literal["basic", "all"]
"""Which measures to compute: `basic` leaves out those that take most time, see `LayerSettings`."""
_NORM_EDGES = torch.logspace(-2, 4, 241).tolist()
"""Edges of the bins of the norms' histogram."""

WITH_ERROR = ("inter_sim", "average_norm")
"""Measures whose standard error needs O(d) numbers for each group of documents."""
WITH_ERROR_FROM_SCATTER = (
    *("isoscore", "isoscore_unbiased", "effective_rank", "participation_ratio"),
    *("mean_vector_norm", "norm_ratio"),
)
"""Measures whose standard error is computed from the moments of each group of documents, O(d^2) numbers."""
BY_SENTENCE = "isoscore_by_sentence"
"""The measure whose sentences are documents. Its standard error needs 2 d^2 numbers for each group of documents."""


@dataclass(frozen=True)
class LayerSettings:
    """What a `Layer` accumulates."""

    # Whether to add the kurtosis of tokens, massive activations and the score by sentence, which take more time than
    # the other measures.
    measures: MeasureSet = "basic"
    groups: int = 0  # number of groups of documents for standard errors; 0 computes none
    # Whether to keep moments, d^2 numbers, for each group; without, `WITH_ERROR_FROM_SCATTER` and the score by sentence
    # have no error.
    scatter_by_group: bool = True
    by_sentence: bool = True  # whether `all` contains the score by sentence, which needs separate documents

    @property
    def has_score_by_sentence(self) -> bool:
        """Whether the measures contain `BY_SENTENCE`."""
        return self.measures == "all" and self.by_sentence


class Layer:
    """Accumulates the streaming measures of one tap.

    Batches may come in any order, and the accumulators of several processes merge exactly. `dim` is the width d of the
    hidden states. A `vocabulary_size` of 0 leaves out IntraSim and the measures by frequency. The settings are those of
    all layers that are merged, and so is the `origin` `(d,)` of the score by sentence, see `SentenceMoments`.

    Attributes:
        types: norms and directions by token type; None without a vocabulary.
        positions: norms and directions by `log2_bins` of the position.
        dimensions: moments of each dimension.
    """

    def __init__(
        self,
        dim: int,
        vocabulary_size: int,
        device: torch.device,
        settings: LayerSettings | None = None,
        origin: Tensor | None = None,
    ) -> None:
        self.settings = settings or LayerSettings()
        groups = self.settings.groups
        parts = groups if groups and self.settings.scatter_by_group else 1
        self._moments = GroupedMoments(parts, dim, device)
        has_sentences = self.settings.has_score_by_sentence
        self._sentences = GroupedSentences(parts, dim, device, origin) if has_sentences else None
        self._groups = GroupedPoints(groups, dim, device) if groups else None
        self.cosine = CosineContributions(dim, device)
        self.norms = Norms(dim, _NORM_EDGES, device)
        self.dimensions = DimensionMoments(dim, device)
        self.types = GroupedPoints(vocabulary_size, dim, device) if vocabulary_size else None
        self.positions = GroupedPoints(NUM_LOG2_BINS, dim, device)
        is_complete = self.settings.measures == "all"
        self._kurtosis = TokenKurtosis(dim, device=device) if is_complete else None
        self._massive = MassiveActivations(dim, device=device) if is_complete else None

    def update(
        self,
        points: Tensor,
        tokens: Tensor,
        positions: Tensor,
        groups: Tensor | None = None,
        sentences: Tensor | None = None,
    ) -> None:
        """Add hidden states.

        Args:
            points: hidden states `(n, d)`, without padding.
            tokens: token ids, `(n,)`.
            positions: positions of the tokens in the model's input, from 0, `(n,)`.
            groups: groups of the tokens' documents, from 0 to the number of groups - 1, `(n,)` on the CPU. None puts
                all of them into group 0.
            sentences: numbers of the sentences of the score by sentence, `(n,)` on the CPU, see `GroupedSentences`.
                None leaves out all points.
        """
        groups = torch.zeros(len(points), dtype=torch.int64) if groups is None else groups
        self._moments.update(points, groups)
        if self._sentences is not None and sentences is not None:
            self._sentences.update(points, groups, sentences)
        device_groups = groups.to(points.device)
        if self._massive is not None:
            self._massive.update(points, tokens, positions)
        position_bins = log2_bins(positions)
        start = 0
        # Norms and unit vectors are computed once for all accumulators that need them.
        for block in upcast_blocks(points) if len(points) else ():
            rows = slice(start, start + len(block))
            norms, units, is_nonzero = norms_and_units(block)
            self.cosine.add_units(units, is_nonzero)
            self.norms.add_norms(block, norms)
            if self._groups is not None:
                self._groups.add_units(norms, units, is_nonzero, device_groups[rows])
            self.positions.add_units(norms, units, is_nonzero, position_bins[rows])
            if self.types is not None:
                self.types.add_units(norms, units, is_nonzero, tokens[rows])
            self.dimensions.update(block)
            if self._kurtosis is not None:
                self._kurtosis.update(block)
            start += len(block)

    def merge(self, other: "Layer") -> None:
        """Add the points that another accumulator has seen, group by group."""
        for name, part in self._parts().items():
            part.merge(other._parts()[name])

    @property
    def moments(self) -> FourthMoments:
        """Moments of all points, merged from those of the groups at each call."""
        return self._moments.total()

    def _parts(self) -> dict[str, Any]:
        """Return the accumulators by name."""
        return {name: part for name, part in vars(self).items() if name != "settings" and part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors of all accumulators by accumulator."""
        return {
            name: part.state_dict() if isinstance(part, GroupedMoments | GroupedSentences) else tensors(part)
            for name, part in self._parts().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the tensors that `state_dict` returned."""
        for name, part in self._parts().items():
            if isinstance(part, GroupedMoments | GroupedSentences):
                part.load_state_dict(state[name])
            else:
                set_tensors(part, state[name])

    def spectra(self) -> dict[str, Tensor]:
        """Compute the singular values of the hidden states, `raw` and `centered`, `(d,)` each, descending."""
        moments = self.moments
        return {form: singular_values(moments, centered=form == "centered") for form in ("raw", "centered")}

    def measures(
        self, spectra: Mapping[str, Tensor] | None = None, replicates: Mapping[str, list[float]] | None = None
    ) -> dict[str, float]:
        """Compute all measures by name, and the standard errors of those that have one as `<name>_error`.

        `isoscore` is IsoScore, without shrinkage. The kurtoses are the largest and the mean excess kurtosis of the
        dimensions; the mean leaves out dimensions in which all points are equal. A measure is NaN if it is not defined.

        Args:
            spectra: result of `spectra`, if it is known.
            replicates: result of `replicates`, if it is known.
        """
        spectra = self.spectra() if spectra is None else spectra
        moments, dim = self.moments, len(self.dimensions.mean)
        variances, contributions = self.dimensions.variance(), self.cosine.contributions()
        # Rogue dimensions of pretrained models: the mean is many times the median deviation of all dimensions.
        outliers = outlier_dimensions(self.dimensions.mean, 5, "median", reference=self.dimensions.deviation())
        kurtosis, power_law = self.dimensions.kurtosis(), _power_law(spectra["centered"].square())
        norms = self.norms.compute()
        measures: dict[str, float | Tensor] = {
            "tokens": float(moments.count),
            **_covariance_measures(moments, spectra["centered"]),
            "inter_sim": self.cosine.compute(),
            "mean_direction_norm": self.cosine.mean_direction_norm(),
            "average_norm": norms.average,
            "mean_vector_norm": norms.mean_vector,
            "norm_ratio": norms.ratio,
            "rank_me": rank_me(spectra["raw"]),
            "nesum": nesum(spectra["centered"].square()),
            "alpha_req": power_law.alpha,
            "alpha_req_r_squared": power_law.r_squared,
            "largest_variance_share": top_share(variances),
            "top_5_variance_share": top_share(variances, min(5, dim)),
            "top_1_cosine_share": top_share(contributions),
            "top_5_cosine_share": top_share(contributions, min(5, dim)),
            "outlier_dimensions": float(len(outliers)),
            "largest_kurtosis": kurtosis.nan_to_num(0).max(),
            "mean_kurtosis": kurtosis.nanmean(),
        }
        if self.types is not None:
            # IntraSim is the mean of the types that occur at least twice; NaN if there is none.
            measures["intra_sim"] = self.types.inter_sim().nanmean()
            measures["adjusted_intra_sim"] = measures["intra_sim"] - measures["inter_sim"]
        if self._sentences is not None:
            measures[BY_SENTENCE] = _score_or_nan(self._sentences.total())
        if self._kurtosis is not None:
            summary = self._kurtosis.compute()
            measures |= {"token_kurtosis": summary.average, "largest_token_kurtosis": summary.largest}
        massive = self.massive_activations()
        if massive is not None:
            measures |= {"massive_activations": massive.count, "largest_activation_ratio": massive.largest_ratio}
        replicates = self.replicates() if replicates is None else replicates
        return {**{name: float(value) for name, value in measures.items()}, **_errors(replicates)}

    def massive_activations(self) -> MassiveActivationsSummary | None:
        """Return the massive activations; None if the settings leave them out."""
        return None if self._massive is None else self._massive.compute()

    def by_position(self) -> dict[str, list[float]]:
        """Return the norm and InterSim of tokens by position; see `_by_bin`."""
        return _by_bin(self.positions)

    def by_frequency(self) -> dict[str, list[float]]:
        """Return the norm and InterSim of tokens by the number of occurrences of their type; see `_by_bin`."""
        return {} if self.types is None else _by_bin(self.types.regroup(log2_bins(self.types.count)))

    def replicates(self) -> dict[str, list[float]]:
        """Compute what the jackknife needs: each measure that has a standard error, without each group of documents.

        Returns:
            The values of each measure in the order of the groups that are left out, and under `tokens` the numbers of
            tokens. The lists are empty if a group has no points, or if a measure is not defined without one of the
            groups. Without groups, there are no lists.
        """
        if self._groups is None:
            return {}
        names = ["tokens", *WITH_ERROR, *(WITH_ERROR_FROM_SCATTER if self.settings.scatter_by_group else ())]
        try:
            estimates = list(self._without_each_group()) if (self._groups.count > 0).all() else []
        except UserError:
            estimates = []
        replicates = {name: [values[name] for values in estimates] for name in names}
        if self._sentences is not None and self.settings.scatter_by_group:
            scores = [_score_or_nan(moments) for moments in self._sentences.without_each()]
            has_empty_group = any(part.sentences == 0 for part in self._sentences.parts())
            is_defined = not has_empty_group and all(map(math.isfinite, scores))
            replicates[BY_SENTENCE] = scores if is_defined else []
        return replicates

    def _without_each_group(self) -> Iterator[dict[str, float]]:
        """Yield, for each group, the measures that have a standard error, computed from all other groups."""
        assert self._groups is not None
        numbers = torch.arange(self._groups.groups)
        without_each = self._moments.without_each() if self.settings.scatter_by_group else itertools.repeat(None)
        for number, moments in zip(numbers, without_each, strict=False):
            rest = self._groups.regroup((numbers == number).long(), 2).compute()[0]
            measures: dict[str, float | Tensor] = {
                "tokens": rest.count,
                "inter_sim": rest.inter_sim,
                "average_norm": rest.average_norm,
            }
            if moments is not None:
                mean_vector = torch.linalg.vector_norm(moments.mean)
                measures |= _covariance_measures(moments, singular_values(moments))
                measures |= {"mean_vector_norm": mean_vector, "norm_ratio": mean_vector / rest.average_norm}
            yield {name: float(value) for name, value in measures.items()}


def _errors(replicates: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the standard errors by the jackknife as `<name>_error`; NaN where `replicates` has no values."""
    return {f"{name}_error": jackknife_error(values) for name, values in replicates.items() if name != "tokens"}


def _covariance_measures(moments: FourthMoments, singular: Tensor) -> dict[str, Tensor | float]:
    """Compute measures of the covariance; `singular` are the singular values of the centered points, `(d,)`."""
    score = isoscore(moments)
    return {
        "isoscore": score,
        "isoscore_unbiased": isoscore_unbiased(moments),
        "effective_rank": effective_rank(singular),
        "participation_ratio": 1 + (moments.dim - 1) * score,
    }


def _score_or_nan(moments: SentenceMoments) -> float:
    """Return the score by sentence; NaN if there are too few sentences."""
    try:
        return moments.score().item()
    except UserError:
        return math.nan


def _power_law(variances: Tensor) -> PowerLaw:
    """Return the result of `alpha_req`; NaN if there are too few variances, as in very small models."""
    # Smaller variances are rounding errors, as sums of float32 points have seven or eight digits.
    significant = variances.masked_fill(variances < 1e-8 * variances.max(), 0)
    try:
        # Layer normalization removes the variance of one direction, whose value is a rounding error, too.
        return alpha_req(significant, last=min(100, len(variances) - 1))
    except UserError:
        return PowerLaw(math.nan, math.nan, 0, 0)


def _by_bin(groups: GroupedPoints) -> dict[str, list[float]]:
    """Return columns with a row for each bin of `log2_bins` that holds points.

    The columns are the bin's smallest and largest value, `first` and `last`, the number of `tokens`, their average
    `norm`, and `inter_sim`, which is NaN for a single token.
    """
    bins = [(log2_bin_range(index), summary) for index, summary in enumerate(groups.compute()) if summary.count]
    return {
        "first": [limits[0] for limits, _ in bins],
        "last": [limits[1] for limits, _ in bins],
        "tokens": [summary.count for _, summary in bins],
        "norm": [summary.average_norm for _, summary in bins],
        "inter_sim": [summary.inter_sim for _, summary in bins],
    }
