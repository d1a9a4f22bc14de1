"""The mean states of the first examples of a source, by which the layers of two models are compared."""

import torch
from torch import Tensor

from istar.measures import Accumulator
from istar.measures.point_groups import RowsByGroup


class ExampleSums(Accumulator):
    """Accumulates the sum of the points of each of the examples 0 to `num_examples` - 1 at a state.

    Sums are about the `origin`, `(d,)`, in its dtype, so that the mean of equal points is equal to them up to rounding.
    """

    def __init__(self, num_examples: int, origin: Tensor) -> None:
        self._origin = origin
        self.counts = self.add_state("counts", origin.new_zeros(num_examples), "sum")
        self.totals = self.add_state("totals", origin.new_zeros(num_examples, len(origin), dtype=torch.float32), "sum")

    def update(self, points: Tensor, rows: RowsByGroup) -> None:
        """Add points `(n, d)`; the groups of `rows` are the examples, and those beyond the last one are left out."""
        is_kept = rows.groups < len(self.counts)
        if not is_kept.any():
            return
        centered = points.to(torch.promote_types(points.dtype, torch.float32)) - self._origin.to(points.device).float()
        sums = rows.sum_rows(centered)[is_kept]
        self.totals.index_add_(0, rows.groups[is_kept], sums.float())
        self.counts.index_add_(0, rows.groups[is_kept], rows.counts[is_kept].to(self.counts))

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the number of points of each example, `(examples,)`, and their mean, `(examples, d)`, on the CPU.

        The mean is float32, and NaN for an example without points.
        """
        counts = self.counts.cpu()
        return counts, (self.totals.cpu() / counts[:, None] + self._origin.cpu()).float()
