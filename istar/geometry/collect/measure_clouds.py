"""Measures clouds of points that exist: arrays, tensors and files of vectors."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from istar.drawing.terminal import make_progress
from istar.errors import NonFiniteError, UserError, shorten
from istar.geometry.collect.item_labels import Labels
from istar.geometry.collect.measures_file import SOURCE_FIELDS, Measurements, arrange_by_source, describe_model
from istar.geometry.collect.summaries import Collected, join_examples, summarize_source
from istar.measures import alignment
from istar.measures.numerics import accumulation_dtype
from istar.sums.rows import Rows
from istar.sums.source_sums import UPDATE_POINTS, SourceSums, SumSettings
from istar.vectors.clouds import MIN_CLOUD_POINTS, Cloud, check_finite_rows

CLOUDS = "points"
"""Name of the source of all clouds."""
ORIGIN_ROWS = 1_024
"""Maximum number of rows, spread over a cloud, whose mean is the origin of its sums."""
MAX_WHOLE_ROWS = 20_000
"""Largest number of rows among which all neighbours are found. Of a larger cloud, only those within the sample are."""


def sum_cloud(
    cloud: Cloud,
    index: int,
    settings: SumSettings,
    labels: Labels,
    *,
    num_examples: int = 0,
    device: str | None = None,
    console: Console | None = None,
) -> tuple[SourceSums, torch.dtype]:
    """Return the sums over the rows of a cloud, and the dtype of its points; see `measure_clouds`.

    The index makes the sample of the cloud independent of those of other clouds.
    """
    spread_rows = cloud.read_spread_rows(ORIGIN_ROWS)
    try:
        sum_device = spread_rows.device if device is None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device={device} cannot be used: {shorten(error, 80)}; expected such as cpu or cuda"
        ) from error
    finite_rows = spread_rows[spread_rows.isfinite().all(1)]
    if not len(finite_rows):
        check_finite_rows(cloud)
    is_whole = cloud.num_points is not None and cloud.num_points <= MAX_WHOLE_ROWS
    takes_all = is_whole and settings.sample and settings.measures == "all"
    sums = SourceSums(
        replace(settings, groups=labels.num_groups),
        {cloud.name: finite_rows.to(sum_device, accumulation_dtype(sum_device)).mean(0)},
        has_positions=False,
        sample_size=MAX_WHOLE_ROWS if takes_all else settings.sample,
        num_examples=num_examples if labels.ids else 0,
    )
    num_rows = 0
    with make_progress(console) as progress:
        task = progress.add_task(escape(cloud.name), total=settings.limit or cloud.num_points)
        for block in cloud.read_blocks(UPDATE_POINTS):
            points = block[: None if settings.limit is None else settings.limit - num_rows].to(sum_device)
            numbers = torch.arange(num_rows, num_rows + len(points), device="cpu")
            groups = _spread(numbers, labels.num_groups) if labels.groups is None else labels.find_groups(numbers)
            rows = Rows.of(groups, positions=numbers, examples=numbers if labels.ids else None)
            key = (index << 32) + num_rows // UPDATE_POINTS
            try:
                sums.update({cloud.name: points[rows.order.to(sum_device)]}, rows, [key], [len(points)])
            except NonFiniteError:
                check_finite_rows(cloud)
                raise
            num_rows += len(points)
            progress.update(task, completed=num_rows)
            if num_rows == settings.limit:
                break
    if num_rows < MIN_CLOUD_POINTS:
        raise UserError(f"{cloud.name} has {num_rows} rows; expected at least {MIN_CLOUD_POINTS}")
    if sums.layers[cloud.name].is_constant:
        raise UserError(f"{cloud.name}: all {num_rows} rows are equal; expected points that differ")
    labels.check_length(f"rows of {cloud.name}", num_rows, settings.limit is not None)
    return sums, spread_rows.dtype


def _spread(numbers: Tensor, num_groups: int) -> Tensor:
    """Return groups of independent rows: consecutive rows are in all groups, in an order that changes.

    A fixed order would make the groups differ in a file that is sorted in a period.
    """
    num_groups = max(num_groups, 1)
    shifts = numbers // num_groups * 2_654_435_761 // 2**16  # a multiplicative hash
    return (numbers + shifts) % num_groups


def measure_clouds(
    clouds: Sequence[Cloud],
    settings: SumSettings,
    labels: Mapping[str, Labels],
    source: str,
    pairs: bool = False,
    device: str | None = None,
    num_examples: int = 0,
    console: Console | None = None,
) -> Collected:
    """Measure each cloud in one pass over its rows.

    `labels` are by the name of the cloud, and `source` says where the clouds are from. With `pairs`, row i of each
    cloud belongs together, and their alignment is measured, too. Sums are on `device`, or else where the points are.
    The first `num_examples` rows are kept for comparisons if they have ids. A console shows a progress bar.

    Raises a `UserError` if rows are too few, all equal, or do not fit the labels or each other, and a `NonFiniteError`.
    """
    start = time.monotonic()
    if pairs and len(clouds) < 2:
        raise UserError("pairs are rows of two clouds; expected a dictionary of clouds with as many rows")
    dtypes, devices = set[torch.dtype](), set[torch.device]()
    means: dict[str, Tensor] = {}
    summary: dict[str, dict[str, Any]] = {field: {} for field in (*SOURCE_FIELDS, "examples")}
    for index, cloud in enumerate(clouds):
        sums, dtype = sum_cloud(
            cloud, index, settings, labels[cloud.name], num_examples=num_examples, device=device, console=console
        )
        summary_of_cloud = summarize_source(sums)
        for field, values in summary.items():
            values.update(summary_of_cloud[field])
        mean = sums.layers[cloud.name].moments.mean
        means[cloud.name] = mean.cpu()
        dtypes.add(dtype)
        devices.add(mean.device)
        del sums  # free them before those of the next cloud are allocated
    num_groups = min(cloud_labels.num_groups for cloud_labels in labels.values())
    measurements = Measurements(
        model=describe_model(source, dtypes, devices),
        weights="",
        identity="",
        settings={**asdict(settings), "groups": num_groups, "source": source},
        matrices={},
        final_norm=None,
        text_hashes={
            name: cloud_labels.digest(in_order=settings.limit is not None)
            for name, cloud_labels in labels.items()
            if cloud_labels.ids
        },
        groups={
            name: labels[name].num_independent or int(measures["points"])
            for name, measures in summary["sources"].items()
        },
        gaps=measure_gaps(clouds, means, pairs, settings.limit),
        seconds=time.monotonic() - start,
        kind="points",
        **arrange_by_source({CLOUDS: summary}),
    )
    digests = {cloud_labels.digest(in_order=True) for cloud_labels in labels.values()}
    if "" in digests or len(digests) > 1:
        return Collected(measurements)
    return Collected(measurements, join_examples({CLOUDS: summary["examples"]}, labels[clouds[0].name]))


def measure_gaps(
    clouds: Sequence[Cloud], means: Mapping[str, Tensor], pairs: bool, limit: int | None = None
) -> list[dict[str, Any]]:
    """Return the distance and the cosine of the means of each two clouds of the same width.

    With `pairs`, also the alignment of their rows, at most the first `limit`.

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
                gap["alignment"] = _measure_alignment(first, second, limit)
            gaps.append(gap)
    return gaps


def _measure_alignment(first: Cloud, second: Cloud, limit: int | None) -> float:
    total, count = 0.0, 0
    for block, other_block in zip(first.read_blocks(UPDATE_POINTS), second.read_blocks(UPDATE_POINTS), strict=True):
        end = len(block) if limit is None else min(len(block), limit - count)
        if end == 0:
            break
        total += float(alignment(block[:end], other_block[:end].to(block.device))) * end
        count += end
    return total / count
