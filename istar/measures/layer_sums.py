"""Measures of a layer that are cheap enough to compute during training, from one accumulator."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import float_or_nan
from istar.measures.accumulator import Accumulator, world_size
from istar.measures.cosine import AverageCosine
from istar.measures.dimension_moments import DimensionMoments
from istar.measures.isoscores import isoscore
from istar.measures.moments import Moments
from istar.measures.norms import Norms
from istar.measures.spectrum import effective_rank, singular_values

TRAINING_MEASURES = (
    *("isoscore", "inter_sim", "average_norm", "norm_ratio", "effective_rank", "participation_ratio"),
    "mean_kurtosis",
)
"""Names of the measures, as in the table of all measures."""


class LayerSums(Accumulator):
    """Accumulates what the measures in `TRAINING_MEASURES` are computed from."""

    def __init__(self, dim: int, device: torch.device) -> None:
        self.moments, self.cosine = Moments(dim, device), AverageCosine(dim, device)
        self.dimensions, self.norms = DimensionMoments(dim, device), Norms(dim, device=device)

    def update(self, points: Tensor, mask: Tensor | None = None) -> None:
        """Add the points `(..., d)`, only those where the mask `(...)` is not 0 if there is one."""
        points = points if mask is None else points[mask.bool()]
        for sums in (self.moments, self.cosine, self.dimensions, self.norms):
            sums.update(points)

    def _get_functions(self) -> dict[str, Callable[[], float | Tensor]]:
        return {
            "isoscore": lambda: isoscore(self.moments),
            "inter_sim": self.cosine.compute,
            "average_norm": lambda: self.norms.compute().average,
            "norm_ratio": lambda: self.norms.compute().ratio,
            "effective_rank": lambda: effective_rank(singular_values(self.moments)),
            "participation_ratio": lambda: 1 + (self.moments.dim - 1) * isoscore(self.moments),
            "mean_kurtosis": lambda: self.dimensions.kurtosis().nanmean(),
        }

    def compute(self, names: Sequence[str]) -> dict[str, float]:
        """Return some measures by name."""
        functions = self._get_functions()
        return {name: float(functions[name]()) for name in names}

    def compute_defined(self, names: Sequence[str]) -> dict[str, float]:
        """Return some measures by name; those that are not defined, for example after a divergence, are NaN."""
        functions = self._get_functions()
        return {name: float_or_nan(functions[name]) for name in names}


def sum_all_points(sums: LayerSums | None, device: torch.device) -> LayerSums | None:
    """Return the sums over the points of all processes; `sums` is None in a process without points."""
    if world_size() > 1:
        # A process without points needs the width to take part.
        width = torch.tensor(0 if sums is None else sums.moments.dim, device=device)
        dist.all_reduce(width, dist.ReduceOp.MAX)
        sums = (sums or LayerSums(int(width), device)).all_reduce() if width > 0 else None
    return sums
