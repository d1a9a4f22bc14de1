"""Sums over all points of a source, such as a text, for all measures of all states, and their settings."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from istar.measures import Accumulator, NeighbourMeasures, ScaleDimension
from istar.measures.catalogue import MEASURES_WITH_ERROR
from istar.sums.layers import Layer
from istar.sums.rows import Rows
from istar.sums.sample import Sample
from istar.sums.stack_measures import compute_measures, compute_replicates, compute_spectra
from istar.sums.stack_sums import LayerSettings, MeasureSet, StackSums

T = TypeVar("T")

UPDATE_POINTS = 8_192
"""Maximum number of points to add to the sums at once, unless a batch has more. A model on a CPU is fastest with small
batches, and the sums with many points, so several batches are added at once."""
UPDATE_BYTES = 2**28
"""Maximum bytes, in float32, of all states of the points that are added at once, unless a batch has more."""
MAX_GROUP_BYTES = 2**30
"""Maximum bytes of the scatter matrices of all groups and layers; above it, covariance measures get no error."""
_BYTES_OF_SCATTER = 8
"""Bytes for each number of a scatter matrix."""


@dataclass(frozen=True, kw_only=True)
class SumSettings:
    """Settings of the sums over any source."""

    measures: MeasureSet = "basic"  # `all` adds the measures that take the most time
    groups: int = 10  # number of groups of examples for standard errors; example i is in group i mod `groups`
    sample: int = 5_000  # maximum number of points for measures of pairs; 0 leaves these measures out
    seed: int = 0  # seed of the sample
    limit: int | None = None  # tokens of a text, or rows of a cloud, after which reading ends with the batch; None: all

    def make_layer_settings(self, dims: Iterable[int], has_positions: bool = True) -> LayerSettings:
        """Return the settings of the accumulators of states of the given widths."""
        scatter_bytes = self.groups * sum(dim**2 for dim in dims) * _BYTES_OF_SCATTER
        return LayerSettings(
            measures=self.measures,
            num_groups=self.groups,
            scatter_by_group=scatter_bytes <= MAX_GROUP_BYTES,
            has_positions=has_positions,
        )

    def describe_missing_errors(self, dims: Iterable[int]) -> str | None:
        """Return why some measures of states of these widths get no standard errors, or None if all get them."""
        if self.make_layer_settings(dims).scatter_by_group:
            return None
        names = ", ".join(name for name, needs in MEASURES_WITH_ERROR.items() if needs == "covariance")
        return (
            f"{names} get no standard errors, because the sums of {self.groups} groups would take more than "
            f"{MAX_GROUP_BYTES / 2**30:g} GiB; choose fewer groups"
        )


class ExampleSums(Accumulator):
    """Accumulates the mean of one state over the points of each example, from 0 to `num_examples` - 1.

    Layers of two models are compared by these means. The sums are about the `origin`, `(d,)`, so that the mean of equal
    points is equal to them up to rounding.
    """

    def __init__(self, num_examples: int, origin: Tensor) -> None:
        self._origin = origin
        self.counts = self.add_state("counts", origin.new_zeros(num_examples), "sum")
        self.totals = self.add_state("totals", origin.new_zeros(num_examples, len(origin), dtype=torch.float32), "sum")

    def update(self, points: Tensor, rows: Rows) -> None:
        """Add points `(n, d)`. Examples after the last one, and rows without examples, are ignored."""
        if rows.examples is None:
            return
        centered = points.to(torch.promote_types(points.dtype, torch.float32)) - self._origin.float()
        is_kept = rows.examples.groups < len(self.counts)
        examples = rows.examples.groups.clamp(max=len(self.counts) - 1)
        self.totals.index_add_(0, examples, rows.examples.sum_rows(centered).float() * is_kept[:, None])
        self.counts.index_add_(0, examples, (rows.examples.counts * is_kept).to(self.counts))

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the number of points of each example, `(examples,)`, and their mean, `(examples, d)`, on the CPU.

        The mean is float32, and NaN for an example without points.
        """
        counts = self.counts.cpu()
        return counts, (self.totals.cpu() / counts[:, None] + self._origin.cpu()).float()


class SourceSums(Accumulator):
    """Accumulates all measures of all states over a source, and a sample of the points for measures of pairs.

    If the points have types, such as tokens, the sample contains at most one point of each type.

    Args:
        settings: which measures, groups and sample.
        origins: for each state by name, a point near its mean, `(d,)`, on the device of the state.
        num_types: number of types of points, such as the size of a vocabulary; 0 leaves out IntraSim.
        has_positions: whether points have a position in their example.
        sample_size: maximum number of points in the sample. Only measures of neighbours use more than
            `settings.sample` points.
        num_examples: number of examples, from the first one on, whose mean states are kept.
        have_same_rows: whether all states have the same rows in each batch, and therefore share one sample.
    """

    def __init__(
        self,
        settings: SumSettings,
        origins: Mapping[str, Tensor],
        *,
        num_types: int = 0,
        has_positions: bool = True,
        sample_size: int | None = None,
        num_examples: int = 0,
        have_same_rows: bool = True,
    ) -> None:
        layer_settings = settings.make_layer_settings(map(len, origins.values()), has_positions)
        stacks: dict[str, dict[str, Tensor]] = {}
        for state, origin in origins.items():
            stacks.setdefault(f"{len(origin)} on {origin.device}", {})[state] = origin
        self.stacks = {name: StackSums(stack, num_types, layer_settings) for name, stack in stacks.items()}
        self._states, self._num_examples = tuple(origins), num_examples
        self.examples = {state: ExampleSums(num_examples, origin) for state, origin in origins.items() if num_examples}
        self._has_all_measures = settings.measures == "all"
        size = settings.sample if sample_size is None else sample_size
        devices = {state: origin.device for state, origin in origins.items()}
        sampled = [devices] if have_same_rows else [{state: device} for state, device in devices.items()]
        self.samples = {next(iter(states)): Sample(states, size, settings.seed, settings.sample) for states in sampled}

    @property
    def layers(self) -> dict[str, Layer]:
        """What is measured of each state, by its name."""
        return self._sort({state: Layer(stack, state) for state in stack.names} for stack in self.stacks.values())

    def get_sample(self, state: str) -> Sample:
        """Return the sample with the points of a state."""
        return self.samples.get(state) or next(iter(self.samples.values()))

    def update(
        self, states: Mapping[str, Tensor], rows: Rows, part_keys: Sequence[int], part_lengths: Sequence[int]
    ) -> None:
        """Add the points `(n, d)` of states with the same rows, in the order of `rows`.

        The points are divided into parts, such as blocks of a text. The key of a part is unique in all sources, and
        decides which of its points are sampled; see `Sample.update`.

        Raises:
            NonFiniteError: if a point is not finite.
        """
        rows_by_device = {device: rows.to(device) for device in {points.device for points in states.values()}}
        for stack in self.stacks.values():
            stack.update(states, rows_by_device.get(stack.origins.device, rows))
        for state, points in states.items() if rows.has_example_below(self._num_examples) else ():
            self.examples[state].update(points, rows_by_device[points.device])
        row_of_point = rows.row_of_point
        types = None if rows.type_ids is None else rows.type_ids[row_of_point]
        for first_state, sample in self.samples.items():
            if first_state in states:
                points_by_state = {state: states[state] for state in sample.states}
                sample.update(part_keys, part_lengths, types, points_by_state, row_of_point)

    def compute_spectra(self) -> dict[str, dict[str, Tensor]]:
        """Compute the singular values by state and form, `raw` and `centered`, `(d,)`, descending, on the CPU."""
        return self._sort([compute_spectra(stack) for stack in self.stacks.values()])

    def compute_replicates(self) -> dict[str, dict[str, list[float]]]:
        """Compute measures without each group of examples, by state and name; see `stack_measures`."""
        return self._sort([compute_replicates(stack) for stack in self.stacks.values()])

    def compute_measures(
        self,
        spectra: Mapping[str, Mapping[str, Tensor]] | None = None,
        replicates: Mapping[str, Mapping[str, list[float]]] | None = None,
    ) -> dict[str, dict[str, float]]:
        """Compute all measures, by state and name. A sample of size 0 leaves out the measures that need it.

        `spectra` and `replicates` are results of `compute_spectra` and `compute_replicates`; None computes them.
        """
        spectra = self.compute_spectra() if spectra is None else spectra
        replicates = self.compute_replicates() if replicates is None else replicates
        measures_by_state = self._sort([compute_measures(stack, spectra, replicates) for stack in self.stacks.values()])
        for state, measures in measures_by_state.items():
            sample = self.get_sample(state)
            if sample.size:
                measures["two_nn"], measures["two_nn_error"] = sample.estimate_two_nn(state)
                if self._has_all_measures:
                    measures |= sample.compute_cosines(state) | sample.compute_neighbour_measures(state)
                if math.isnan(measures["outlier_severity"]):  # points are equal, and their distances rounding errors
                    names = {"two_nn", "two_nn_error", "sample_inter_sim_standardized", "uniformity"}
                    names.update(NeighbourMeasures._fields)
                    measures |= dict.fromkeys(measures.keys() & names, math.nan)
        return measures_by_state

    def _sort(self, results: Iterable[Mapping[str, T]]) -> dict[str, T]:
        """Return results of the stacks in the order of the states."""
        by_state = {state: result for results_of_stack in results for state, result in results_of_stack.items()}
        return {state: by_state[state] for state in self._states}

    def estimate_gride(self) -> dict[str, list[ScaleDimension]]:
        """Estimate the intrinsic dimension by state and scale; empty without a sample, or with the basic measures."""
        return {
            state: [] if layer.is_constant else self.get_sample(state).estimate_gride(state)
            for state, layer in self.layers.items()
            if self._has_all_measures and self.get_sample(state).size
        }
