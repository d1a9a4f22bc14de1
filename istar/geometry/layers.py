"""Accumulators for all streaming measures of one layer, and a random sample of points for TwoNN."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures import (
    AverageCosine,
    Dimension,
    DimensionMoments,
    FourthMoments,
    IntraSim,
    Norms,
    effective_rank,
    isoscore,
    isoscore_unbiased,
    outlier_dimensions,
    singular_values,
    two_nn_with_error,
)

_NORM_EDGES = torch.logspace(-2, 4, 241).tolist()
"""Edges of the bins of the norms' histogram."""


class Layer:
    """Accumulates the streaming measures of one tap.

    Batches may come in any order, and the accumulators of several processes merge exactly. `dim` is the width d of the
    hidden states. A `vocabulary_size` of 0 leaves IntraSim out.
    """

    def __init__(self, dim: int, vocabulary_size: int, device: torch.device) -> None:
        self.moments = FourthMoments(dim, device)
        self.cosine = AverageCosine(dim, device)
        self.intra = IntraSim(vocabulary_size, dim, device) if vocabulary_size else None
        self.dimensions = DimensionMoments(dim, device)
        self.norms = Norms(dim, _NORM_EDGES, device)

    def update(self, points: Tensor, tokens: Tensor) -> None:
        """Add hidden states `points`, `(n, d)`, and their token ids `tokens`, `(n,)`, without padding."""
        for part in (self.moments, self.cosine, self.dimensions, self.norms):
            part.update(points)
        if self.intra is not None:
            self.intra.update(points, tokens)

    def merge(self, other: "Layer") -> None:
        """Add the points that another accumulator has seen."""
        for name, part in self._parts().items():
            part.merge(other._parts()[name])

    def _parts(self) -> dict[str, Any]:
        """Return the accumulators by name."""
        return {name: part for name, part in vars(self).items() if part is not None}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of all accumulators, keyed by accumulator and attribute."""
        return {
            f"{name}.{key}": value
            for name, part in self._parts().items()
            for key, value in vars(part).items()
            if isinstance(value, Tensor)
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the tensors that `state_dict` returned."""
        parts = self._parts()
        for key, value in state.items():
            name, attribute = key.split(".")
            setattr(parts[name], attribute, value.to(getattr(parts[name], attribute)))

    def measures(self) -> dict[str, float]:
        r"""Compute all measures by name.

        `isoscore` is IsoScore\* with zeta = 0. The kurtoses are the largest and the mean excess kurtosis of the
        dimensions; the mean leaves out dimensions in which all points are equal.
        """
        variances = self.moments.covariance().diagonal()
        norms = self.norms.compute()
        # Rogue dimensions of pretrained models: the mean is many times the median deviation of all dimensions.
        outliers = outlier_dimensions(self.dimensions.mean, 5, "median", reference=self.dimensions.deviation())
        score, kurtosis = isoscore(self.moments), self.dimensions.kurtosis()
        measures: dict[str, float | Tensor] = {
            "tokens": float(self.moments.count),
            "isoscore": score,
            "isoscore_unbiased": isoscore_unbiased(self.moments),
            "inter_sim": self.cosine.compute(),
            "mean_direction_norm": self.cosine.mean_direction_norm(),
            "average_norm": norms.average,
            "mean_vector_norm": norms.mean_vector,
            "norm_ratio": norms.ratio,
            "effective_rank": effective_rank(singular_values(self.moments)),
            "participation_ratio": 1 + (self.moments.dim - 1) * score,
            "largest_variance_share": variances.max() / variances.sum(),
            "outlier_dimensions": float(len(outliers)),
            "largest_kurtosis": kurtosis.nan_to_num(0).max(),
            "mean_kurtosis": kurtosis.nanmean(),
        }
        if self.intra is not None:
            has_pairs = bool((self.intra.count >= 2).any())
            measures["intra_sim"] = self.intra.compute() if has_pairs else math.nan
        return {name: float(value) for name, value in measures.items()}


class Sample:
    """A random sample of tokens, with their hidden states at every tap.

    A random number is drawn for each token, and the tokens with the smallest numbers are kept. The numbers depend only
    on the seed and the token's block. The sample is therefore the same however blocks are batched and shared among
    processes, and samples merge exactly.
    """

    def __init__(self, names: Sequence[str], size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.numbers = torch.empty(0, dtype=torch.float64)
        self.points: dict[str, Tensor] = {name: torch.empty(0) for name in names}

    def update(self, blocks: Sequence[int], lengths: Sequence[int], states: Mapping[str, Tensor]) -> None:
        """Add the tokens of blocks with these numbers and lengths; `states` has their states `(n, d)` by tap."""
        if not self.size:
            return
        # torch's generator uses 32 bits of its seed, too few to hold the seed and the number of a block.
        generators = [np.random.Generator(np.random.Philox(key=[self.seed, block])) for block in blocks]
        draws = [generator.random(length) for generator, length in zip(generators, lengths, strict=True)]
        numbers = torch.from_numpy(np.concatenate(draws))
        bound = self.numbers[-1] if len(self.numbers) == self.size else torch.inf
        candidates = (numbers < bound).nonzero().squeeze(1)
        if len(candidates):
            points = {name: state[candidates.to(state.device)].cpu() for name, state in states.items()}
            self._add(numbers[candidates], points)

    def merge(self, other: "Sample") -> None:
        """Add the tokens of another sample."""
        self._add(other.numbers, other.points)

    def two_nn(self, name: str) -> Dimension:
        """Estimate the intrinsic dimension at a tap and its standard error; NaN if too few points are distinct."""
        try:
            return two_nn_with_error(self.points[name], seed=self.seed)
        except UserError:
            return Dimension(math.nan, math.nan)

    def _add(self, numbers: Tensor, points: Mapping[str, Tensor]) -> None:
        """Add tokens with their random numbers, and keep the `size` tokens with the smallest numbers."""
        numbers = torch.cat([self.numbers, numbers])
        kept = numbers.argsort(stable=True)[: self.size]
        self.numbers = numbers[kept]
        self.points = {name: torch.cat([previous, points[name]])[kept] for name, previous in self.points.items()}
