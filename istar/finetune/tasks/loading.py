"""Loading of a task's splits as data sets with uniform columns, from a folder, the hub or the demo generator.

A split has exactly the columns `spec.text_columns` (strings) and `spec.label_column` (int64 class ids, float64 scores),
or `id, question, context, answers` for spans. An unlabelled test set lacks the label column. Rows keep the order of the
source, because the row number identifies the example.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, NamedSplit, Value
from datasets.table import InMemoryTable

from istar.errors import UserError, shorten
from istar.files.writing import cache_folder
from istar.finetune.tasks import sources
from istar.finetune.tasks.formats import RawSplit
from istar.finetune.tasks.sources import ExampleSource
from istar.runs.tasks import Kind, TaskSpec

ROW_COLUMN = "row"
"""Column of a sample: the numbers of its rows in the split of the source, counted from 0."""
_HASH_BATCH_ROWS = 10_000


def find_source(
    spec: TaskSpec,
    data_dir: str | Path | None,
    splits: Sequence[str],
    cache_dir: str | None = None,
    stream: bool = False,
) -> ExampleSource:
    """Return the source of a task's splits: a folder, the hub (which is downloaded), or the demo generator.

    If `data_dir` is a text corpus, its documents are cached below `cache_dir`, or below the default of `cache_folder`.
    With `stream`, the training data of the hub are not downloaded. Raises a `UserError` if no suitable files are found,
    or the hub cannot be reached.
    """
    if data_dir is not None and spec.is_language_modelling:
        return sources.make_text_source(Path(data_dir).expanduser(), cache_folder(cache_dir))
    if data_dir is not None:
        return sources.make_folder_source(spec, Path(data_dir).expanduser(), splits)
    if spec.hub is None:
        return sources.make_demo_source(spec)
    return sources.make_hub_stream_source(spec, cache_folder(cache_dir)) if stream else sources.make_hub_source(spec)


def read_splits(source: ExampleSource, spec: TaskSpec, splits: Sequence[str]) -> dict[str, Dataset]:
    """Read and validate splits of a task from a source, and return them by name.

    Raises a `UserError` if a split is missing, or the data do not fit the task.
    """
    return {split: _validate_split(source.read_split(split), spec, split) for split in splits}


def count_overlap(spec: TaskSpec, train: Dataset, validation: Dataset) -> int:
    """Return how many validation examples have the same texts as some training example."""
    columns = list(spec.text_columns)
    train_texts, validation_texts = (
        dataset.select_columns(columns).with_format("arrow")[:] for dataset in (train, validation)
    )
    # Arrow builds a hash table of the right side, which is the smaller one.
    return int(train_texts.join(validation_texts, keys=columns, join_type="right semi").num_rows)


def hold_out(spec: TaskSpec, train: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """Hold out a random fraction of training data; return the remaining and the held-out rows, in their original order.

    Both have the additional column `ROW_COLUMN`. The split does not depend on the seed of a run. For spans, whole
    contexts are held out, because several questions share a context. Raises a `UserError` if there are fewer than two
    rows or contexts.
    """
    # A unit is held out as a whole: a context for spans, otherwise a row.
    unit_by_row: list[Any] = train[spec.text_columns[1]][:] if spec.kind == "span" else list(range(len(train)))
    units = list(dict.fromkeys(unit_by_row))
    if len(units) < 2:
        raise UserError(f"task.validation_fraction={fraction:g}: the training data are too few to be split")
    num_held_out_units = max(1, round(fraction * len(units)))
    held_out_units = {units[index] for index in np.random.default_rng(0).permutation(len(units))[:num_held_out_units]}
    held_out_rows = [row for row, unit in enumerate(unit_by_row) if unit in held_out_units]
    remaining_rows = [row for row, unit in enumerate(unit_by_row) if unit not in held_out_units]
    return _select_rows(train, remaining_rows), _select_rows(train, held_out_rows)


def sample_examples(dataset: Dataset, max_examples: int | None) -> Dataset:
    """Return a random sample of at most `max_examples` rows in their original order; None returns all rows.

    A sample has the additional column `ROW_COLUMN`. It does not depend on the seed of a run, and a larger sample
    contains the smaller ones. The first rows would be a biased sample, because files may be sorted: SST by label, STS-B
    by genre.
    """
    if max_examples is None or max_examples >= len(dataset):
        return dataset
    return _select_rows(dataset, np.sort(np.random.default_rng(0).permutation(len(dataset))[:max_examples]))


def _select_rows(dataset: Dataset, rows: Iterable[int]) -> Dataset:
    if ROW_COLUMN not in dataset.column_names:
        dataset = dataset.add_column(ROW_COLUMN, np.arange(len(dataset)))
    return dataset.select(rows)


def fingerprint(*splits: Dataset) -> str:
    """Return the SHA-256 digest, in hexadecimal, of the column names and the content of data sets.

    Unlike the fingerprint of `datasets`, it does not depend on where the data come from or how they are chunked. The
    column `ROW_COLUMN` is left out, because the same examples may be other rows elsewhere.
    """
    digest = hashlib.sha256()
    for split in splits:
        split = split.select_columns([name for name in split.column_names if name != ROW_COLUMN])
        digest.update(json.dumps(split.column_names).encode())
        for table in split.with_format("arrow").iter(batch_size=_HASH_BATCH_ROWS):
            for batch in table.combine_chunks().to_batches():
                digest.update(batch.serialize())
    return digest.hexdigest()


_UNLABELLED = {"-1", "-1.0", "", "None"}
"""Label values, as strings, that mean a missing label in test sets."""


def _validate_split(raw: RawSplit | Dataset, spec: TaskSpec, split: str) -> Dataset:
    """Check the texts of a split, convert its labels, and return it as a data set.

    A text corpus is returned unchanged, because its documents were checked when read.
    """
    if isinstance(raw, Dataset):
        return raw
    columns = dict(raw.columns)
    labels = columns.pop(spec.label_column, None)
    if not any(columns.values()):
        raise UserError(f"{raw.source}: no examples")
    for column, values in columns.items():
        for row, value in enumerate(values):
            if not isinstance(value, str):
                raise UserError(f"{raw.location(row)}: {column} is not a text but {shorten(repr(value))}")
    features: dict[str, Any] = dict.fromkeys(columns, Value("string"))
    if labels is not None and not (spec.is_test(split) and set(map(str, labels)) <= _UNLABELLED):
        convert_labels, features[spec.label_column] = _LABEL_CONVERSIONS[spec.kind]
        columns[spec.label_column] = convert_labels(raw, spec)
    # `Dataset.from_dict` would encode every value by itself, which takes seconds for large data.
    table = InMemoryTable.from_pydict(columns, schema=Features(features).arrow_schema)
    return Dataset(table, split=NamedSplit(split))


def _convert_class_labels(raw: RawSplit, spec: TaskSpec) -> list[int]:
    id_by_label = {key: id_ for id_, name in enumerate(spec.labels) for key in (name, str(id_), f"{id_}.0")}
    labels = raw.columns[spec.label_column]
    for row, label in enumerate(labels):
        if str(label) not in id_by_label:
            allowed = ", ".join(f"{name} ({id_})" for id_, name in enumerate(spec.labels))
            raise UserError(
                f"{raw.location(row)}: label {shorten(repr(label))} is none of task {spec.name}'s: {allowed}"
            )
    return [id_by_label[str(label)] for label in labels]


def _convert_scores(raw: RawSplit, spec: TaskSpec) -> list[float]:
    scores = []
    for row, value in enumerate(raw.columns[spec.label_column]):
        try:
            score = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            score = math.nan
        if not math.isfinite(score):
            raise UserError(
                f"{raw.location(row)}: label {shorten(repr(value))} is not a finite number, as task {spec.name} needs"
            )
        scores.append(score)
    return scores


def _convert_answers(raw: RawSplit, spec: TaskSpec) -> list[dict[str, list[Any]]]:
    id_, count = Counter(raw.columns["id"]).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"{raw.source}: id {shorten(repr(id_))} occurs {count} times; ids must be unique, because predictions are "
            "gathered by id"
        )
    answers = raw.columns[spec.label_column]
    for row, answer in enumerate(answers):
        if not _is_answer(answer):
            expected = '{"text": [texts], "answer_start": [numbers]} with at least one answer'
            raise UserError(f"{raw.location(row)}: {spec.label_column} is {shorten(repr(answer))}, not {expected}")
    return [{key: answer[key] for key in ("text", "answer_start")} for answer in answers]


def _is_answer(answer: Any) -> bool:
    match answer:
        case {"text": [_, *_] as texts, "answer_start": [*starts]} if len(texts) == len(starts):
            are_positions = all(isinstance(start, int) and 0 <= start < 2**63 for start in starts)
            return are_positions and all(isinstance(text, str) for text in texts)
    return False


_LABEL_CONVERSIONS: dict[Kind, tuple[Callable[[RawSplit, TaskSpec], list[Any]], Any]] = {
    "classification": (_convert_class_labels, Value("int64")),
    "regression": (_convert_scores, Value("float64")),
    "span": (_convert_answers, {"text": List(Value("string")), "answer_start": List(Value("int64"))}),
}
"""Function that converts the labels, and their column type, by kind of task."""
