"""Loading of a task's splits as data sets with uniform columns, from a folder, the hub or the demo generator.

A split has exactly the columns `spec.text_columns` (strings) and `spec.label_column` (int64 class ids, float64 scores),
or `id, question, context, answers` for spans. A test set without labels has no label column. Rows keep the order of the
source, because the row number identifies the example.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from datasets.table import InMemoryTable

from istar.errors import UserError, shorten
from istar.files import cache_folder
from istar.tasks import sources
from istar.tasks.readers import RawSplit
from istar.tasks.sources import Source
from istar.tasks.specs import Kind, TaskSpec

_HASH_BATCH_ROWS = 10_000


def load_splits(spec: TaskSpec, data_dir: str | Path | None, splits: Sequence[str]) -> dict[str, Dataset]:
    """Load and validate splits of a task, such as `train` or `validation_matched`, and return them by name.

    The folder `data_dir` has a layout of `istar.tasks.sources`. Without it, splits are loaded from the hub or, for demo
    tasks, generated.

    Raises:
        UserError: if no suitable files are found, the hub cannot be reached, or the data do not fit the task.
    """
    return read_splits(find_source(spec, data_dir, splits), spec, splits)


def find_source(
    spec: TaskSpec, data_dir: str | Path | None, splits: Sequence[str], cache_dir: str | None = None
) -> Source:
    """Return the source of a task's splits, as `load_splits` chooses it; a data set of the hub is downloaded.

    The documents of a text corpus are cached in a folder below `cache_dir`; None is the default of `cache_folder`.

    Raises:
        UserError: if no suitable files are found, or the hub cannot be reached.
    """
    if data_dir is not None and spec.is_language_modelling:
        return sources.from_text(Path(data_dir).expanduser(), cache_folder(cache_dir))
    if data_dir is not None:
        return sources.from_folder(spec, Path(data_dir).expanduser(), splits)
    return sources.from_generator(spec) if spec.hub is None else sources.from_hub(spec)


def read_splits(source: Source, spec: TaskSpec, splits: Sequence[str]) -> dict[str, Dataset]:
    """Read and validate splits of a task from a source, and return them by name.

    Raises:
        UserError: if a split is missing, or the data do not fit the task.
    """
    return {split: _validated(source.read(split), spec, split) for split in splits}


def overlap(spec: TaskSpec, train: Dataset, validation: Dataset) -> int:
    """Return the number of validation examples whose texts all equal those of a training example."""
    columns = list(spec.text_columns)
    train_texts, texts = (dataset.select_columns(columns).with_format("arrow")[:] for dataset in (train, validation))
    # Arrow builds a hash table of the right side, which is the smaller one.
    return int(train_texts.join(texts, keys=columns, join_type="right semi").num_rows)


def hold_out(spec: TaskSpec, train: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """Split training data at random into the rest and a held-out fraction; the order of the rows is kept.

    The split depends on nothing but the number of rows, so it is the same for all seeds of a run. For spans, whole
    contexts are held out, because several questions share a context.

    Raises:
        UserError: if the data are too few to be split.
    """
    rows: list[Any] = train[spec.text_columns[1]][:] if spec.kind == "span" else list(range(len(train)))
    units = list(dict.fromkeys(rows))
    if len(units) < 2:
        raise UserError(f"task.validation_fraction={fraction:g}: the training data are too few to be split")
    count = max(1, round(fraction * len(units)))
    chosen = {units[number] for number in np.random.default_rng(0).permutation(len(units))[:count]}
    held_out = [number for number, unit in enumerate(rows) if unit in chosen]
    rest = [number for number, unit in enumerate(rows) if unit not in chosen]
    return train.select(rest), train.select(held_out)


def fingerprint(*splits: Dataset) -> str:
    """Return a SHA-256 digest, in hexadecimal, of the columns and content of data sets.

    Unlike `Dataset`'s own fingerprint, it does not depend on where the data come from or how they are chunked.
    """
    digest = hashlib.sha256()
    for split in splits:
        digest.update(json.dumps(split.column_names).encode())
        for table in split.with_format("arrow").iter(batch_size=_HASH_BATCH_ROWS):
            for batch in table.combine_chunks().to_batches():
                digest.update(batch.serialize())
    return digest.hexdigest()


# --- validation ---------------------------------------------------------------------------------------------

_UNLABELLED = {"-1", "-1.0", "", "None"}
"""Label values, as strings, that mean "no label" in test sets."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def _validated(raw: RawSplit | Dataset, spec: TaskSpec, split: str) -> Dataset:
    """Check the texts, convert the labels and return the data set; documents of a corpus were checked when read."""
    if isinstance(raw, Dataset):
        return raw
    columns = dict(raw.columns)
    labels = columns.pop(spec.label_column, None)
    if not any(columns.values()):
        raise UserError(f"{raw.source}: no examples")
    for column, values in columns.items():
        for row, value in enumerate(values):
            if not _is_text(value):
                raise UserError(f"{raw.location(row)}: {column} is not a text but {shorten(repr(value))}")
    features: dict[str, Any] = dict.fromkeys(columns, Value("string"))
    if labels is not None and not (spec.is_test(split) and set(map(str, labels)) <= _UNLABELLED):
        convert, features[spec.label_column] = _LABELS[spec.kind]
        columns[spec.label_column] = convert(raw, spec)
    # `Dataset.from_dict` would encode every value by itself, which takes seconds for large data.
    return Dataset(InMemoryTable.from_pydict(columns, schema=Features(features).arrow_schema))


def _is_text(value: Any) -> bool:
    # JSON can encode lone surrogates, which Arrow does not accept.
    return isinstance(value, str) and (value.isascii() or not _SURROGATE.search(value))


def _class_ids(raw: RawSplit, spec: TaskSpec) -> list[int]:
    """Convert class names or ids to ids. Ids may be numbers or strings, and floats such as `1.0` as in pandas."""
    ids = {key: id_ for id_, name in enumerate(spec.labels) for key in (name, str(id_), f"{id_}.0")}
    labels = raw.columns[spec.label_column]
    for row, label in enumerate(labels):
        if str(label) not in ids:
            allowed = ", ".join(f"{name} ({id_})" for id_, name in enumerate(spec.labels))
            raise UserError(
                f"{raw.location(row)}: label {shorten(repr(label))} is none of task {spec.name}'s: {allowed}"
            )
    return [ids[str(label)] for label in labels]


def _scores(raw: RawSplit, spec: TaskSpec) -> list[float]:
    """Convert labels to finite numbers."""
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


def _answers(raw: RawSplit, spec: TaskSpec) -> list[dict[str, list[Any]]]:
    """Check that ids are unique and answers are well-formed; return the answers' texts and positions."""
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
    """Return whether a value has the form `{"text": [texts], "answer_start": [numbers]}`, with at least one answer."""
    match answer:
        case {"text": [_, *_] as texts, "answer_start": [*starts]} if len(texts) == len(starts):
            are_positions = all(isinstance(start, int) and 0 <= start < 2**63 for start in starts)
            return are_positions and all(map(_is_text, texts))
    return False


_LABELS: dict[Kind, tuple[Callable[[RawSplit, TaskSpec], list[Any]], Any]] = {
    "classification": (_class_ids, Value("int64")),
    "regression": (_scores, Value("float64")),
    "span": (_answers, {"text": List(Value("string")), "answer_start": List(Value("int64"))}),
}
"""Conversion and column type of the labels, by kind of task."""
