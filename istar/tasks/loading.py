"""A task's splits as data sets of one shape, from the hub, from a folder or generated.

Whatever the source, a split has exactly the columns `spec.text_columns` (strings) and `spec.label_column`
(int64 class ids, float64 scores), or `id, question, context, answers` for spans; a test set without labels
has no label column. Rows keep the order of their source: the row number is the example's identity.

A folder may hold, the first of these that has most of the wanted splits:

1. what `DatasetDict.save_to_disk` wrote;
2. the benchmark's own files: `train.tsv`, `dev.tsv`, ... of GLUE; the trees `train.txt`, `dev.txt`,
   `test.txt` of SST; `train-v1.1.json`, `dev-v1.1.json` of SQuAD;
3. `train.csv`, `.jsonl`, `.json` or `.parquet`, and so on, with the hub's column names and labels as ids or
   class names.

It may also be the parent of such a folder (`glue_data/` with `RTE/` inside), and is never written to.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value

from istar.errors import UserError, shorten
from istar.tasks import sources
from istar.tasks.readers import Rows, is_test
from istar.tasks.specs import Kind, TaskSpec

_HASHED_ROWS = 10_000


def load_splits(spec: TaskSpec, data_dir: str | Path | None, splits: Sequence[str]) -> dict[str, Dataset]:
    """The named splits of a task.

    Args:
        spec: the task.
        data_dir: a folder with the task's files in one of the layouts above, or the parent of that folder;
            None for the hub, or for the generator where the task is a generated one.
        splits: the hub's names, such as `train`, `validation_matched`, `test`.

    Raises:
        UserError: nothing suitable is there, the hub cannot be reached, or the data do not suit the task.
    """
    if data_dir is not None:
        read = sources.folder(spec, Path(data_dir).expanduser(), splits)
    elif spec.hub is not None:
        read = sources.hub(spec)
    else:
        read = sources.generator(spec)
    return {split: _checked(read(split), spec, split) for split in splits}


def overlap(spec: TaskSpec, train: Dataset, validation: Dataset) -> int:
    """How many validation examples stand in the training data with exactly the same texts."""
    known = set(_texts(spec, train))
    return sum(texts in known for texts in _texts(spec, validation))


def fingerprint(*splits: Dataset) -> str:
    """Hexadecimal digits that depend on the splits' columns and content alone, not on where they came from."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(json.dumps(split.column_names).encode())
        for block in split.with_format("arrow").iter(batch_size=_HASHED_ROWS):
            for batch in block.combine_chunks().to_batches():
                digest.update(batch.serialize())
    return digest.hexdigest()


def _texts(spec: TaskSpec, dataset: Dataset) -> Iterator[tuple[str, ...]]:
    table = dataset.select_columns(list(spec.text_columns)).with_format("arrow")[:]
    return zip(*(table.column(column).to_pylist() for column in spec.text_columns), strict=True)


def _checked(rows: Rows, spec: TaskSpec, split: str) -> Dataset:
    """Rows of any source -> the data set that the task promises."""
    columns = dict(rows.columns)
    labels = columns.pop(spec.label_column, None)
    if not any(columns.values()):
        raise UserError(f"{rows.source}: no examples")
    for column, values in columns.items():
        for row, value in enumerate(values):
            if not _is_text(value):
                raise UserError(f"{rows.place(row)}: {column} is not a text but {_short(value)}")
    features: dict[str, Any] = dict.fromkeys(columns, Value("string"))
    if labels is not None and not (is_test(spec, split) and set(map(str, labels)) <= _UNLABELLED):
        convert, features[spec.label_column] = _TARGETS[spec.kind]
        columns[spec.label_column] = convert(rows, spec)
    return Dataset.from_dict(columns, features=Features(features))


_UNLABELLED = {"-1", "-1.0", "", "None"}
"""How test sets spell that there is no label."""


_SURROGATE = re.compile("[\ud800-\udfff]")


def _is_text(value: Any) -> bool:
    # JSON can spell half a surrogate pair, which is no character and fits into no Arrow table
    return isinstance(value, str) and (value.isascii() or not _SURROGATE.search(value))


def _short(value: Any) -> str:
    return shorten(repr(value))


def _class_ids(rows: Rows, spec: TaskSpec) -> list[int]:
    """Class names or ids (also as text, also as the float that pandas makes of them) -> ids."""
    ids = {key: number for number, name in enumerate(spec.labels) for key in (name, str(number), f"{number}.0")}
    values = rows.columns[spec.label_column]
    known = [ids.get(str(value)) for value in values]
    if None in known:
        row = known.index(None)
        allowed = ", ".join(f"{name} ({number})" for number, name in enumerate(spec.labels))
        raise UserError(f"{rows.place(row)}: label {_short(values[row])} is none of task {spec.name}'s: {allowed}")
    return [number for number in known if number is not None]


def _scores(rows: Rows, spec: TaskSpec) -> list[float]:
    scores = []
    for row, value in enumerate(rows.columns[spec.label_column]):
        try:
            score = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            score = math.nan
        if not math.isfinite(score):
            raise UserError(
                f"{rows.place(row)}: label {_short(value)} is not a finite number, as task {spec.name} needs"
            )
        scores.append(score)
    return scores


def _answers(rows: Rows, spec: TaskSpec) -> list[dict[str, list[Any]]]:
    """Answers as they are, once they and the ids are known to be sound."""
    id_, count = Counter(rows.columns["id"]).most_common(1)[0]
    if count > 1:
        raise UserError(f"{rows.source}: id {_short(id_)} stands {count} times; predictions are gathered by id")
    answers = rows.columns[spec.label_column]
    for row, answer in enumerate(answers):
        if not _is_answer(answer):
            expected = '{"text": [texts], "answer_start": [numbers]} with one answer or more'
            raise UserError(f"{rows.place(row)}: {spec.label_column} is {_short(answer)}, not {expected}")
    return [{key: answer[key] for key in ("text", "answer_start")} for answer in answers]


def _is_answer(answer: Any) -> bool:
    if not isinstance(answer, dict):
        return False
    texts, starts = answer.get("text"), answer.get("answer_start")
    return (
        isinstance(texts, list)
        and isinstance(starts, list)
        and 0 < len(texts) == len(starts)
        and all(map(_is_text, texts))
        and all(isinstance(start, int) and 0 <= start < _INT64_END for start in starts)
    )


_INT64_END = 2**63
_ANSWERS = {"text": List(Value("string")), "answer_start": List(Value("int64"))}
_TARGETS: dict[Kind, tuple[Callable[[Rows, TaskSpec], list[Any]], Any]] = {
    "classification": (_class_ids, Value("int64")),
    "regression": (_scores, Value("float64")),
    "span": (_answers, _ANSWERS),
}
