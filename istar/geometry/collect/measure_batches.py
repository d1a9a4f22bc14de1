"""Measures the states of a model in memory over batches of any modality."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from istar.drawing.terminal import make_progress
from istar.errors import UserError
from istar.geometry.collect.batch_reader import Places
from istar.geometry.collect.item_labels import Labels
from istar.geometry.collect.matrices import measure_final_norm
from istar.geometry.collect.measures_file import SOURCE_FIELDS, Measurements
from istar.geometry.collect.pass_settings import PassOptions, SpecialTokens, SumSettings
from istar.geometry.collect.rows import Rows
from istar.geometry.collect.source_sums import UPDATE_BYTES, UPDATE_POINTS, SourceSums
from istar.geometry.collect.summaries import Collected, join_examples, summarize_source
from istar.measures.numerics import accumulation_dtype
from istar.runs.names import FINAL_NORM

BATCHES = "batches"
"""Name of the source of all batches."""


class StateReader(Protocol):
    """Reads the states of a model on a batch: `BatchReader` or `SentenceReader`."""

    names: tuple[str, ...]
    norm: nn.Module | None

    def read(self, batch: Any) -> tuple[dict[str, Places], Tensor | None]:
        """Return the places of each state, and the token ids `(batch, places)` if the batch has them."""


class PlaceRows(NamedTuple):
    """Which places of states with equal shape and mask are rows, and what is known about these."""

    indices: Tensor  # of the rows in the flattened places, `(n,)`, on the CPU
    examples: Tensor  # of each row, `(n,)`, counted over all batches
    positions: Tensor  # of each row in its example, `(n,)`
    types: Tensor | None  # token id of each row, `(n,)`


def find_rows(places: Places, first_example: int | Tensor, token_ids: Tensor | None) -> PlaceRows:
    """Return the rows among the places of a batch; `first_example` is the number of its first example, or of each."""
    num_examples, num_places = places.values.shape[:2]
    mask = torch.ones(num_examples, num_places, dtype=torch.bool) if places.mask is None else places.mask.cpu()
    examples, positions = mask.nonzero(as_tuple=True)
    has_ids = token_ids is not None and token_ids.shape == mask.shape
    types = token_ids.cpu()[examples, positions] if has_ids and token_ids is not None else None
    numbers = torch.arange(num_examples) + first_example if isinstance(first_example, int) else first_example
    return PlaceRows(examples * num_places + positions, numbers[examples], positions, types)


@dataclass
class _Waiting:
    """Rows of a state that wait for being added to its sums."""

    points: list[Tensor]
    rows: list[PlaceRows]


class BatchSums:
    """Adds the states of batches to the sums of each state, thousands of rows at a time.

    Args:
        settings: which measures, groups and sample.
        labels: groups and ids of the examples.
        num_types: size of the model's vocabulary; 0 for a model without one.
        num_examples: number of examples, from the first one on, whose mean states are kept.
    """

    def __init__(self, settings: SumSettings, labels: Labels, num_types: int = 0, num_examples: int = 0) -> None:
        self._settings, self._labels = replace(settings, groups=labels.num_groups), labels
        self._num_types, self._num_examples = num_types, num_examples
        self._sums: SourceSums | None = None
        self._waiting: dict[str, _Waiting] = {}

    def add(self, places_by_state: Mapping[str, Places], numbers: int | Tensor, token_ids: Tensor | None) -> int:
        """Add a batch, and return the number of its rows; `numbers` is the first number of its examples, or all."""
        found: dict[tuple[Any, ...], PlaceRows] = {}
        for state, places in places_by_state.items():
            key = (*places.values.shape[:2], id(places.mask))
            rows = found.setdefault(key, find_rows(places, numbers, token_ids))
            points = places.values.flatten(0, 1)
            points = points if len(rows.indices) == len(points) else points[rows.indices.to(points.device)]
            waiting = self._waiting.setdefault(state, _Waiting([], []))
            waiting.points.append(points)
            waiting.rows.append(rows)
        if self._sums is None:
            self._sums = self._create_sums(token_ids is not None)
        num_waiting = max(sum(map(len, waiting.points)) for waiting in self._waiting.values())
        num_bytes = sum(part.numel() * 4 for waiting in self._waiting.values() for part in waiting.points)
        if num_waiting >= UPDATE_POINTS or num_bytes >= UPDATE_BYTES:
            self._update(self._sums)
        return max(len(rows.indices) for rows in found.values())

    def finish(self) -> SourceSums:
        """Add what still waits, and return the sums. Raises a `UserError` without batches."""
        if self._sums is None:
            raise UserError("there are no batches; expected at least one")
        self._update(self._sums)
        return self._sums

    def _create_sums(self, has_types: bool) -> SourceSums:
        origins = {}
        for state, waiting in self._waiting.items():
            points = waiting.points[0]
            if not len(points):
                raise UserError(f"the mask leaves no places of {state} in the first batch; expected at least one")
            origins[state] = points.to(accumulation_dtype(points.device)).mean(0)
        has_positions = any(bool((waiting.rows[0].positions > 0).any()) for waiting in self._waiting.values())
        num_types = self._num_types if has_types else 0
        return SourceSums(
            self._settings,
            origins,
            num_types=num_types,
            has_positions=has_positions,
            sample_size=min(self._settings.sample, num_types or self._settings.sample),
            num_examples=self._num_examples,
            row_sets=[[state] for state in origins],
        )

    def _update(self, sums: SourceSums) -> None:
        rows_by_parts: dict[tuple[int, ...], tuple[Rows, Tensor]] = {}
        for state, waiting in self._waiting.items():
            if not waiting.points:
                continue
            key = tuple(map(id, waiting.rows))
            if key not in rows_by_parts:
                rows_by_parts[key] = self._sort(waiting.rows)
            rows, examples = rows_by_parts[key]
            points = torch.cat(waiting.points)[rows.order.to(waiting.points[0].device)]
            # Each example is a part with its own random numbers.
            numbers, lengths = examples.unique_consecutive(return_counts=True)
            sums.update({state: points}, rows, numbers.tolist(), lengths.tolist())
        self._waiting = {state: _Waiting([], []) for state in self._waiting}

    def _sort(self, parts: list[PlaceRows]) -> tuple[Rows, Tensor]:
        """Return the rows of several batches, sorted, and the example of each in the order of the batches."""
        examples, positions = (torch.cat([getattr(part, name) for part in parts]) for name in ("examples", "positions"))
        types = None if parts[0].types is None else torch.cat([part.types for part in parts if part.types is not None])
        kept = examples if self._num_examples else None
        return Rows.of(self._labels.find_groups(examples), types, positions, kept), examples


def measure_batches(
    reader: StateReader,
    batches: Iterable[tuple[Any, Tensor | None]],
    options: PassOptions,
    model: nn.Module,
    special_tokens: SpecialTokens,
) -> Collected:
    """Measure the states of a model over batches in one pass.

    A batch comes with the numbers of its examples, or with None if they follow those of the batch before. The reader
    was made for the model and for `special_tokens`. The pass ends once the state with most rows has `options.limit`.

    Raises a `UserError` without batches, or for groups and ids that do not fit the examples, and a `NonFiniteError` for
    states that are not finite.
    """
    start, limit, labels = time.monotonic(), options.limit, options.labels
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else None
    num_types = getattr(text_config, "vocab_size", None) or 0
    sums, num_seen, num_rows = BatchSums(options.settings, labels, num_types, options.num_examples), 0, 0
    with make_progress(options.console) as progress:
        task = progress.add_task("reading batches", total=limit)
        for batch, numbers in batches:
            places_by_state, token_ids = reader.read(batch)
            num_new = sums.add(places_by_state, num_seen if numbers is None else numbers, token_ids)
            num_seen += len(next(iter(places_by_state.values())).values)
            num_rows += num_new
            progress.update(task, advance=num_new)
            if limit is not None and num_rows >= limit:
                break
    labels.check_length("examples", num_seen, limit is not None)
    statistics = sums.finish()
    summary = summarize_source(statistics)
    devices = {str(layer.power_sums.device) for layer in statistics.layers.values()}
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in model.parameters() if weight.is_floating_point()}
    by_source: dict[str, Any] = {field: {BATCHES: summary[field]} for field in SOURCE_FIELDS}
    measurements = Measurements(
        model={
            "name": type(model).__name__,
            "revision": None,
            "dtype": ", ".join(sorted(dtypes)),
            "type": getattr(config, "model_type", None),
            "device": ", ".join(sorted(devices)),
        },
        weights="",
        identity="",
        settings={
            **asdict(options.settings), "groups": labels.num_groups, "limit": limit,
            "special_tokens": special_tokens,
        },
        matrices={},
        final_norm=measure_final_norm(reader.norm, len(summary["spectra"][FINAL_NORM]["raw"])) if reader.norm else None,
        text_hashes={BATCHES: labels.digest} if labels.ids else {},
        groups=dict.fromkeys(statistics.layers, labels.num_independent or num_seen),
        seconds=time.monotonic() - start,
        kind="places",
        **by_source,
    )  # fmt: skip
    return Collected(measurements, join_examples({labels.digest or BATCHES: summary["examples"]}, labels))
