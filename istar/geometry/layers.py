"""All streaming measures of one layer's hidden states, and a sample of the points for those that do not stream."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

_EDGES = 241
_LARGEST_NORM = 1e4


@dataclass(frozen=True)
class Settings:
    """Of the accumulators.

    Attributes:
        dim: d.
        types: how many tokens the vocabulary has; 0 leaves IntraSim out.
        device: where the sums live.
    """

    dim: int
    types: int
    device: torch.device


class Layer:
    """Accumulates everything of one tap; batches in any order and accumulators of several processes merge exactly.

    Args:
        settings: see `Settings`.
    """

    def __init__(self, settings: Settings) -> None:
        dim, device = settings.dim, settings.device
        self.settings = settings
        self.moments = FourthMoments(dim, device)
        self.cosine = AverageCosine(dim, device)
        self.intra = IntraSim(settings.types, dim, device) if settings.types else None
        self.dimensions = DimensionMoments(dim, device)
        self.norms = Norms(dim, torch.logspace(-2, torch.tensor(_LARGEST_NORM).log10().item(), _EDGES).tolist(), device)

    def update(self, points: Tensor, tokens: Tensor) -> None:
        """Add `points` `(n, d)` and the numbers of their tokens `(n,)`; padding is out already."""
        self.moments.update(points)
        self.cosine.update(points)
        self.dimensions.update(points)
        self.norms.update(points)
        if self.intra is not None:
            self.intra.update(points, tokens)

    def merge(self, other: "Layer") -> None:
        """Add what another accumulator has seen."""
        for own, theirs in zip(self.parts().values(), other.parts().values(), strict=True):
            own.merge(theirs)

    def parts(self) -> dict[str, Any]:
        """The accumulators by name."""
        own = {"moments": self.moments, "cosine": self.cosine, "dimensions": self.dimensions, "norms": self.norms}
        return own if self.intra is None else {**own, "intra": self.intra}

    def state_dict(self) -> dict[str, Tensor]:
        """All sums, for a file."""
        return {
            f"{name}.{key}": value
            for name, part in self.parts().items()
            for key, value in vars(part).items()
            if isinstance(value, Tensor)
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from sums that `state_dict` gave."""
        for name, part in self.parts().items():
            for key, value in vars(part).items():
                if isinstance(value, Tensor):
                    setattr(part, key, state[f"{name}.{key}"].to(value))

    def measures(self) -> dict[str, float]:
        r"""Every figure by its name.

        IsoScore\* with zeta = 0 (`isoscore`) and without bias (`isoscore_unbiased`), InterSim and IntraSim, norms,
        spectrum, outliers, and TwoNN of the sample.
        """
        covariance = self.moments.covariance()
        values = singular_values(self.moments)
        variances = covariance.diagonal()
        norms = self.norms.compute()
        # A mean of many times the deviation that is common: the rogue dimensions of pretrained models.
        outliers = outlier_dimensions(self.dimensions.mean, 5, "median", reference=self.dimensions.deviation())
        kurtosis = self.dimensions.kurtosis()
        score = isoscore(self.moments)
        found: dict[str, float | Tensor] = {
            "tokens": float(self.moments.count),
            "isoscore": score,
            "isoscore_unbiased": isoscore_unbiased(self.moments),
            "inter_sim": self.cosine.compute(),
            "mean_direction_norm": self.cosine.mean_direction_norm(),
            "average_norm": norms.average,
            "mean_vector_norm": norms.mean_vector,
            "norm_ratio": norms.ratio,
            "effective_rank": effective_rank(values),
            "participation_ratio": 1 + (self.moments.dim - 1) * score,
            "largest_variance_share": variances.max() / variances.sum(),
            "outlier_dimensions": float(len(outliers)),
            "largest_kurtosis": kurtosis.nan_to_num(0).max(),
        }
        if self.intra is not None:
            found["intra_sim"] = _or_nan(self.intra)
        return {name: float(value) for name, value in found.items()}


def _or_nan(intra: IntraSim) -> float:
    return float(intra.compute()) if (intra.count >= 2).any() else float("nan")


class Sample:
    """The same random tokens of every tap: those with the smallest of numbers drawn for each token.

    The numbers depend on the seed and the block that a token is in, so that the sample is the same however the blocks
    are batched and shared among processes, and samples merge exactly.

    Args:
        names: of the taps.
        size: how many tokens are kept.
        seed: of the numbers.
    """

    def __init__(self, names: Sequence[str], size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.numbers = torch.empty(0, dtype=torch.float64)
        self.points: dict[str, Tensor] = {name: torch.empty(0) for name in names}

    def update(self, blocks: Sequence[int], lengths: Sequence[int], states: Mapping[str, Tensor]) -> None:
        """Add blocks.

        Args:
            blocks: their numbers.
            lengths: tokens in each.
            states: `(n, d)` of each tap, of all their tokens in order.
        """
        if not self.size:
            return
        numbers = torch.cat([self._draw(block, length) for block, length in zip(blocks, lengths, strict=True)])
        bound = self.numbers[-1] if len(self.numbers) == self.size else torch.inf
        near = (numbers < bound).nonzero().squeeze(1)
        if len(near):
            self._add(numbers[near], {name: state[near.to(state.device)].cpu() for name, state in states.items()})

    def merge(self, other: "Sample") -> None:
        """Add what another sample has seen."""
        self._add(other.numbers, other.points)

    def two_nn(self, name: str) -> Dimension:
        """The intrinsic dimension at a tap and its standard error; NaN where too few points are distinct."""
        try:
            return two_nn_with_error(self.points[name], seed=self.seed)
        except UserError:
            return Dimension(math.nan, math.nan)

    def _draw(self, block: int, length: int) -> Tensor:
        # torch's own generator looks at 32 bits of a seed, too few for a seed and the number of a block.
        generator = np.random.Generator(np.random.Philox(key=[self.seed, block]))
        return torch.from_numpy(generator.random(length))

    def _add(self, numbers: Tensor, points: Mapping[str, Tensor]) -> None:
        if not len(numbers):
            return
        numbers = torch.cat([self.numbers, numbers])
        kept = numbers.argsort(stable=True)[: self.size]
        self.numbers = numbers[kept]
        for name, own in self.points.items():
            joined = torch.cat([own, points[name]]) if len(own) else points[name]
            self.points[name] = joined[kept]
