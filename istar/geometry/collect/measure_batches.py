"""Measures the states of a model in memory over batches of any modality."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from istar.drawing.terminal import make_progress
from istar.errors import UserError
from istar.geometry.collect.batch_reader import BatchReader, Places
from istar.geometry.collect.item_labels import Labels
from istar.geometry.collect.matrices import measure_final_norm
from istar.geometry.collect.measures_file import Measurements, arrange_by_source, describe_model
from istar.geometry.collect.summaries import Collected, join_examples, summarize_source
from istar.measures.numerics import accumulation_dtype
from istar.runs.names import FINAL_NORM
from istar.sums.rows import Rows
from istar.sums.source_sums import UPDATE_BYTES, UPDATE_POINTS, SourceSums, SumSettings
from istar.vectors.clouds import MIN_CLOUD_POINTS

BATCHES = "batches"
"""Name of the source of all batches."""


class PlaceRows(NamedTuple):
    """Places of a batch that count, in states that have the same ones, and what is known about them."""

    states: dict[str, Tensor]  # points `(n, d)` by state, on the device of the state
    examples: Tensor  # number of each point's example among those of all batches, `(n,)`, on the CPU
    positions: Tensor  # position of each point in its example, `(n,)`, on the CPU
    types: Tensor | None  # token id of each point, `(n,)`, on the CPU


def select_places(
    places_by_state: Mapping[str, Places], example_numbers: Tensor, token_ids: Tensor | None
) -> list[PlaceRows]:
    """Return the places of a batch that count, of all states with the same ones together."""
    sets: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    for state, (values, mask) in places_by_state.items():
        sets.setdefault((values.shape[:2], id(mask)), {})[state] = values
    selected = []
    for (shape, _), values_by_state in sets.items():
        mask = places_by_state[next(iter(values_by_state))].mask
        mask = torch.ones(shape, dtype=torch.bool, device="cpu") if mask is None else mask.cpu()
        examples, positions = mask.nonzero(as_tuple=True)
        types = None
        if token_ids is not None and token_ids.shape == shape:
            types = token_ids.cpu()[examples, positions]
        indices = examples * shape[1] + positions
        points = {state: values.flatten(0, 1)[indices.to(values.device)] for state, values in values_by_state.items()}
        selected.append(PlaceRows(points, example_numbers[examples], positions, types))
    return selected


class BatchSums:
    """Adds the states of batches to the sums of each state, thousands of rows at a time.

    The origins of the sums are the means of the first batch with rows. `num_types` is the size of the model's
    vocabulary, or 0, and `num_points` the number of rows by state. The mean states of the first `num_examples` examples
    are kept.
    """

    def __init__(self, settings: SumSettings, labels: Labels, num_types: int = 0, num_examples: int = 0) -> None:
        self._settings, self._labels = settings, labels
        self._num_types, self._num_examples = num_types, num_examples
        self._sums: SourceSums | None = None
        self._waiting: dict[tuple[str, ...], list[PlaceRows]] = {}  # by the states that have the same rows
        self.num_points = Counter[str]()

    def add(self, batch: Iterable[PlaceRows]) -> None:
        """Add the rows of a batch."""
        for rows in batch:
            self._waiting.setdefault(tuple(rows.states), []).append(rows)
            self.num_points.update(dict.fromkeys(rows.states, len(rows.examples)))
        num_waiting = max(sum(len(rows.examples) for rows in parts) for parts in self._waiting.values())
        waiting_points = (part for parts in self._waiting.values() for rows in parts for part in rows.states.values())
        is_full = num_waiting >= UPDATE_POINTS or sum(points.numel() * 4 for points in waiting_points) >= UPDATE_BYTES
        if is_full and all(self.num_points.values()):  # an origin needs a row
            self._update()

    def finish(self) -> SourceSums:
        """Add the rows that still wait, and return the sums. Raises a `UserError` for a state with too few rows."""
        for state, number in self.num_points.items():
            if number < MIN_CLOUD_POINTS:
                raise UserError(f"{state} has {number} places that count; expected at least {MIN_CLOUD_POINTS}")
        return self._update()

    def _update(self) -> SourceSums:
        sums = self._sums = self._sums or self._create_sums()
        for states, parts in self._waiting.items():
            examples = torch.cat([part.examples for part in parts])
            if not len(examples):
                continue
            types = [part.types for part in parts if part.types is not None]
            rows = Rows.of(
                self._labels.find_groups(examples),
                torch.cat(types) if len(types) == len(parts) else None,
                torch.cat([part.positions for part in parts]),
                examples if self._num_examples else None,
            )
            points = {state: torch.cat([part.states[state] for part in parts]) for state in states}
            sorted_points = {state: values[rows.order.to(values.device)] for state, values in points.items()}
            # Each example is a part with its own random numbers.
            numbers, lengths = examples.unique_consecutive(return_counts=True)
            sums.update(sorted_points, rows, numbers.tolist(), lengths.tolist())
        self._waiting = {}
        return sums

    def _create_sums(self) -> SourceSums:
        waiting = [rows for parts in self._waiting.values() for rows in parts]
        origins = {}
        for state in self.num_points:
            points = next(rows.states[state] for rows in waiting if state in rows.states and len(rows.examples))
            origins[state] = points.to(accumulation_dtype(points.device)).mean(0)
        num_types = self._num_types if any(rows.types is not None for rows in waiting) else 0
        return SourceSums(
            self._settings,
            origins,
            num_types=num_types,
            has_positions=any(bool((rows.positions > 0).any()) for rows in waiting),
            sample_size=min(self._settings.sample, num_types or self._settings.sample),
            num_examples=self._num_examples,
            have_same_rows=False,
        )


def measure_batches(
    reader: BatchReader,
    batches: Iterable[tuple[Any, Tensor | None]],
    settings: SumSettings,
    labels: Labels,
    num_examples: int = 0,
    console: Console | None = None,
) -> Collected:
    """Measure the states of a model over batches in one pass.

    A batch comes with the numbers of its examples, or with None if they follow those of the batch before. `labels` has
    the groups and ids of the examples. The pass ends once the state with most rows has `settings.limit`.

    Raises a `UserError` for a state with too few rows, or for groups and ids that do not fit the examples, and a
    `NonFiniteError` for states that are not finite.
    """
    start, limit, model = time.monotonic(), settings.limit, reader.model
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else None
    num_types = getattr(text_config, "vocab_size", None) or 0
    sums, num_seen = BatchSums(settings, labels, num_types, num_examples), 0
    with make_progress(console) as progress:
        task = progress.add_task("reading batches", total=limit)
        for batch, numbers in batches:
            places_by_state, token_ids = reader.read(batch)
            end = num_seen + len(next(iter(places_by_state.values())).values)
            new_numbers = torch.arange(num_seen, end, device="cpu") if numbers is None else numbers
            sums.add(select_places(places_by_state, new_numbers, token_ids))
            num_seen, num_rows = end, max(sums.num_points.values())
            progress.update(task, completed=num_rows)
            if limit is not None and num_rows >= limit:
                break
    labels.check_length("examples", num_seen, limit is not None)
    digest = labels.digest(in_order=limit is not None)
    statistics = sums.finish()
    summary = summarize_source(statistics)
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    devices = {layer.origin.device for layer in statistics.layers.values()}
    measurements = Measurements(
        model=describe_model(type(model).__name__, dtypes, devices, getattr(config, "model_type", None)),
        weights="",
        identity="",
        settings={**asdict(settings), "special_tokens": reader.special_tokens},
        matrices={},
        final_norm=measure_final_norm(reader.norm, len(summary["spectra"][FINAL_NORM]["raw"])) if reader.norm else None,
        text_hashes={BATCHES: digest} if digest else {},
        groups=dict.fromkeys(statistics.layers, labels.num_independent or num_seen),
        seconds=time.monotonic() - start,
        kind="places",
        **arrange_by_source({BATCHES: summary}),
    )
    return Collected(measurements, join_examples({digest or BATCHES: summary["examples"]}, labels))
