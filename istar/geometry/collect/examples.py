"""The mean states of the first examples of a source, by which the layers of two models are compared."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from istar.geometry.collect.labels import Labels
from istar.geometry.collect.mean_states import Examples
from istar.geometry.collect.measures_file import Measurements
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


class Collected(NamedTuple):
    """What was measured."""

    measurements: Measurements
    examples: Examples | None = None  # None if no examples were kept


def join_examples(sums_by_source: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]], labels: Labels) -> Examples:
    """Return the examples of all sources together, without those that lack points.

    `sums_by_source` has results of `SourceSums.compute_examples` by what identifies the source. An example's id is the
    source and its label, or else its index there.
    """
    ids: list[str] = []
    groups: list[str] = []
    means: dict[str, list[Tensor]] = {}
    for source, sums_by_state in sums_by_source.items():
        counts, _ = next(iter(sums_by_state.values()))
        kept = counts.nonzero().squeeze(1)
        ids += [f"{source}:{labels.ids[index] if labels.ids else index}" for index in kept.tolist()]
        groups += map(str, labels.find_groups(kept).tolist())
        for state, (_, state_means) in sums_by_state.items():
            means.setdefault(state, []).append(state_means[kept])
    return Examples(tuple(ids), tuple(groups), {state: torch.cat(parts) for state, parts in means.items()})
