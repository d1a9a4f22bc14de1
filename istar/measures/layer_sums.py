"""Measures of a layer that are cheap enough to compute during training, from one accumulator."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from istar.measures.accumulator import Accumulator
from istar.measures.cosine import AverageCosine
from istar.measures.dimension_moments import DimensionMoments
from istar.measures.isoscores import isoscore
from istar.measures.moments import Moments
from istar.measures.norms import Norms
from istar.measures.spectrum import effective_rank, singular_values


class LayerSums(Accumulator):
    """Accumulates what some measures of the table of all measures are computed from."""

    def __init__(self, dim: int, device: torch.device) -> None:
        self.moments, self.cosine = Moments(dim, device), AverageCosine(dim, device)
        self.dimensions, self.norms = DimensionMoments(dim, device), Norms(dim, device=device)

    def update(self, points: Tensor, mask: Tensor | None = None) -> None:
        """Add the points `(..., d)`, only those where the mask `(...)` is not 0 if there is one."""
        points = points if mask is None else points[mask.bool()]
        for sums in (self.moments, self.cosine, self.dimensions, self.norms):
            sums.update(points)

    def compute(self, names: Sequence[str]) -> dict[str, float]:
        """Return some measures by name."""
        functions: dict[str, Callable[[], float | Tensor]] = {
            "isoscore": lambda: isoscore(self.moments),
            "inter_sim": self.cosine.compute,
            "average_norm": lambda: self.norms.compute().average,
            "norm_ratio": lambda: self.norms.compute().ratio,
            "effective_rank": lambda: effective_rank(singular_values(self.moments)),
            "participation_ratio": lambda: 1 + (self.moments.dim - 1) * isoscore(self.moments),
            "mean_kurtosis": lambda: self.dimensions.kurtosis().nanmean(),
        }
        return {name: float(functions[name]()) for name in names}
