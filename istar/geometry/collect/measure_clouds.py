"""Measures clouds of points that exist: arrays, tensors and files of vectors."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor

from istar.drawing.terminal import make_progress
from istar.errors import NonFiniteError, UserError
from istar.geometry.collect.item_labels import Labels
from istar.geometry.collect.measures_file import SOURCE_FIELDS, Measurements
from istar.geometry.collect.pass_settings import PassOptions
from istar.geometry.collect.rows import Rows
from istar.geometry.collect.source_sums import UPDATE_POINTS, SourceSums
from istar.geometry.collect.summaries import Collected, join_examples, summarize_source
from istar.measures import alignment
from istar.measures.numerics import accumulation_dtype
from istar.vectors.clouds import Cloud, check_finite_rows

CLOUDS = "points"
"""Name of the source of all clouds."""
ORIGIN_ROWS = 1_024
"""Maximum number of rows, spread over a cloud, whose mean is the origin of its sums."""
MAX_WHOLE_ROWS = 20_000
"""Largest number of rows among which all neighbours are found. Of a larger cloud, only those within the sample are."""


class CloudPass:
    """A pass over clouds, one after the other.

    Args:
        options: settings; only rows with ids are kept as examples.
        labels: groups and ids of the rows by the name of the cloud.
        device: device of the sums; None for the one where the points are.

    Attributes:
        devices: devices of the sums.
        dtypes: dtypes of the points.
    """

    def __init__(self, options: PassOptions, labels: Mapping[str, Labels], device: str | None = None) -> None:
        self._settings, self._labels, self._limit = options.settings, labels, options.limit
        self._console, self._device, self._num_examples = options.console, device, options.num_examples
        self.devices: set[torch.device] = set()
        self.dtypes: set[torch.dtype] = set()

    def sum_cloud(self, cloud: Cloud, index: int) -> SourceSums:
        """Return the sums over the rows of a cloud; its index makes its sample independent of those of other clouds.

        Raises a `UserError` if the rows are too few, or not as many as the labels, and a `NonFiniteError`.
        """
        sums, num_rows = None, 0
        with make_progress(self._console) as progress:
            task = progress.add_task(escape(cloud.name), total=self._limit or cloud.num_points)
            for points in self._read_blocks(cloud):
                sums = sums or self._create_sums(cloud, points.device)
                try:
                    self._add(sums, cloud.name, points, num_rows, index)
                except NonFiniteError:
                    check_finite_rows(cloud)
                    raise
                num_rows += len(points)
                progress.update(task, advance=len(points))
        if sums is None or num_rows < 4:
            raise UserError(f"{cloud.name} has {num_rows} rows; expected at least 4")
        if sums.layers[cloud.name].is_constant:
            raise UserError(f"{cloud.name}: all {num_rows} rows are equal; expected points that differ")
        self._labels[cloud.name].check_length(f"rows of {cloud.name}", num_rows, self._limit is not None)
        return sums

    def _read_blocks(self, cloud: Cloud) -> Iterator[Tensor]:
        num_rows = 0
        for block in cloud.read_blocks(UPDATE_POINTS):
            block = block if self._limit is None else block[: self._limit - num_rows]
            self.dtypes.add(block.dtype)
            self.devices.add(block.device if self._device is None else torch.device(self._device))
            yield block if self._device is None else block.to(self._device)
            num_rows += len(block)
            if num_rows == self._limit:
                return

    def _create_sums(self, cloud: Cloud, device: torch.device) -> SourceSums:
        origin = cloud.read_spread_rows(ORIGIN_ROWS).to(device, accumulation_dtype(device)).mean(0)
        if not origin.isfinite().all():
            check_finite_rows(cloud)
        is_whole = cloud.num_points is not None and cloud.num_points <= MAX_WHOLE_ROWS
        size = self._settings.sample
        return SourceSums(
            replace(self._settings, groups=self._labels[cloud.name].num_groups),
            {cloud.name: origin},
            has_positions=False,
            sample_size=MAX_WHOLE_ROWS if is_whole and size and self._settings.measures == "all" else size,
            num_examples=self._num_examples if self._labels[cloud.name].ids else 0,
        )

    def _add(self, sums: SourceSums, name: str, points: Tensor, first_row: int, cloud_index: int) -> None:
        numbers = torch.arange(first_row, first_row + len(points))
        labels = self._labels[name]
        groups = _spread(numbers, labels.num_groups) if labels.groups is None else labels.find_groups(numbers)
        rows = Rows.of(groups, positions=numbers, examples=numbers if labels.ids else None)
        key = (cloud_index << 32) + first_row // UPDATE_POINTS
        sums.update({name: points[rows.order.to(points.device)]}, rows, [key], [len(points)])


def _spread(numbers: Tensor, num_groups: int) -> Tensor:
    """Return groups of independent rows: consecutive rows are in all groups, in an order that changes.

    A fixed order would make the groups differ in a file that is sorted in a period.
    """
    num_groups = max(num_groups, 1)
    shifts = numbers // num_groups * 2_654_435_761 // 2**16  # a multiplicative hash
    return (numbers + shifts) % num_groups


def measure_clouds(
    clouds: Sequence[Cloud],
    options: PassOptions,
    labels: Mapping[str, Labels],
    source: str,
    *,
    pairs: bool = False,
    device: str | None = None,
) -> Collected:
    """Measure each cloud in one pass over its rows; see `CloudPass`.

    `source` says where the clouds are from, and `labels` are by the name of the cloud. With `pairs`, row i of each
    cloud belongs together, and their alignment is measured, too.

    Raises a `UserError` if all rows are equal, or rows and labels do not fit together, and a `NonFiniteError` for rows
    that are not finite.
    """
    start = time.monotonic()
    if pairs and len(clouds) < 2:
        raise UserError("pairs are rows of two clouds; expected a dictionary of clouds with as many rows")
    cloud_pass, all_labels = CloudPass(options, labels, device), list(labels.values())
    summaries: dict[str, dict[str, Any]] = {}
    means: dict[str, Tensor] = {}
    for index, cloud in enumerate(clouds):
        sums = cloud_pass.sum_cloud(cloud, index)
        summaries[cloud.name] = summarize_source(sums)
        means[cloud.name] = sums.layers[cloud.name].moments.mean.cpu()
        del sums  # free them before those of the next cloud are allocated
    by_source: dict[str, Any] = {
        field: {CLOUDS: {name: summary[field][name] for name, summary in summaries.items() if name in summary[field]}}
        for field in SOURCE_FIELDS
    }
    measurements = Measurements(
        model={
            "name": source,
            "revision": None,
            "dtype": ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in cloud_pass.dtypes)),
            "type": None,
            "device": ", ".join(sorted(map(str, cloud_pass.devices))),
        },
        weights="",
        identity="",
        settings={
            **asdict(options.settings),
            "groups": min(cloud_labels.num_groups for cloud_labels in all_labels),
            "limit": options.limit,
        },
        matrices={},
        final_norm=None,
        text_hashes={name: cloud_labels.digest for name, cloud_labels in labels.items() if cloud_labels.ids},
        groups={
            name: labels[name].num_independent or int(summary["sources"][name]["points"])
            for name, summary in summaries.items()
        },
        gaps=measure_gaps(clouds, means, pairs),
        seconds=time.monotonic() - start,
        kind="points",
        **by_source,
    )
    if not all_labels[0].ids or len({cloud_labels.digest for cloud_labels in all_labels}) > 1:
        return Collected(measurements)
    examples = {name: summary["examples"][name] for name, summary in summaries.items()}
    return Collected(measurements, join_examples({CLOUDS: examples}, all_labels[0]))


def measure_gaps(clouds: Sequence[Cloud], means: Mapping[str, Tensor], pairs: bool) -> list[dict[str, Any]]:
    """Return the distance and the cosine of the means of each two clouds of the same width, and with `pairs` alignment.

    Raises a `UserError` for pairs in clouds of different shapes.
    """
    gaps = []
    for first, second in combinations(clouds, 2):
        if pairs and (first.num_points, first.dim) != (second.num_points, second.dim):
            raise UserError(
                f"{first.name} and {second.name} have different shapes; pairs need as many rows of one width"
            )
        if first.dim == second.dim:
            mean, other_mean = means[first.name], means[second.name]
            gap: dict[str, Any] = {
                "first": first.name,
                "second": second.name,
                "distance": float((mean - other_mean).norm()),
                "cosine": float(torch.nn.functional.cosine_similarity(mean, other_mean, dim=0, eps=0)),
            }
            if pairs:
                gap["alignment"] = _measure_alignment(first, second)
            gaps.append(gap)
    return gaps


def _measure_alignment(first: Cloud, second: Cloud) -> float:
    total, count = 0.0, 0
    for block, other_block in zip(first.read_blocks(UPDATE_POINTS), second.read_blocks(UPDATE_POINTS), strict=True):
        total += float(alignment(block, other_block.to(block.device))) * len(block)
        count += len(block)
    return total / count
