"""Files on disk -> columns of one split, spelt as the file spells them: labels and texts are checked later.

Every reader is `(path, spec, split) -> Rows`. Columns carry the hub's names whatever the file calls them, and
each row knows its place in the file, so that a later complaint can name it.
"""

import csv
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, load_from_disk

from istar.errors import UserError, shorten
from istar.tasks.specs import TaskSpec

_log = logging.getLogger(__name__)

TOLERATED = 0.01
"""Share of malformed rows that may be left out with a warning; with more, the file is broken or another's."""


@dataclass(frozen=True)
class Rows:
    """One split before it is checked.

    Attributes:
        source: the file, or whatever else a message should name.
        columns: the hub's column name -> values in the source's order.
        lines: line number of every row, where the source has lines.
    """

    source: str
    columns: Mapping[str, Sequence[Any]]
    lines: Sequence[int] = ()

    def place(self, row: int) -> str:
        """Where a row stands, counted from 1, for a message."""
        return f"{self.source}, line {self.lines[row]}" if self.lines else f"{self.source}, row {row + 1}"


def is_test(spec: TaskSpec, split: str) -> bool:
    """Whether a split is one of those that may come without labels."""
    return split in [test.name for test in spec.test]


def wanted_columns(
    spec: TaskSpec, split: str, found: Sequence[str], source: str, names: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The hub's column name -> the source's, for the columns that this split needs; `names` translates.

    Raises:
        UserError: a column is missing (a test set may lack the labels).
    """
    columns = ("id",) * (spec.kind == "span") + spec.text_columns + (spec.label_column,)
    wanted = {column: (names or {}).get(column, column) for column in columns}
    if is_test(spec, split) and wanted[spec.label_column] not in found:
        del wanted[spec.label_column]
    for name in wanted.values():
        if name not in found:
            listed = ", ".join(map(repr, found)) or "none"
            raise UserError(f"{source}: column {name!r}, which task {spec.name} needs, is missing; found: {listed}")
    return wanted


def read_tsv(path: Path, spec: TaskSpec, split: str) -> Rows:
    """The GLUE benchmark's own tab-separated files, in which quotes, `NA` and `null` are plain text."""
    assert spec.tsv is not None, spec.name
    rows = ((number, text.split("\t")) for number, text in numbered_lines(path))
    header = () if is_test(spec, split) else spec.tsv.header
    return _rectangle(path, spec, split, rows, header, spec.tsv.columns)


def read_csv(path: Path, spec: TaskSpec, split: str) -> Rows:
    """Comma-separated values with a header of the hub's column names."""
    return _rectangle(path, spec, split, _csv_records(path))


def _csv_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    # strict, or else a quote that is never closed would swallow the rest of the file without a word
    reader = csv.reader(io.StringIO(whole_text(path), newline=""), strict=True)
    first = 1
    try:
        for fields in reader:
            if fields:
                yield first, fields
            first = reader.line_num + 1  # a quoted field may span lines; the next record starts after them
    except csv.Error as error:
        raise UserError(f"{path}, line {first}: not CSV: {error}") from error


def _rectangle(
    path: Path,
    spec: TaskSpec,
    split: str,
    records: Iterator[tuple[int, list[str]]],
    header: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> Rows:
    """Rows that have as many fields as the header; the others are left out if they are few."""
    header = header or next(records, (0, []))[1]
    if not header:
        return Rows(str(path), {})
    wanted = wanted_columns(spec, split, header, str(path), names)
    positions = [header.index(name) for name in wanted.values()]
    columns: list[list[str]] = [[] for _ in wanted]
    lines, malformed = [], []
    for line, fields in records:
        if len(fields) != len(header):
            malformed.append(line)
            continue
        lines.append(line)
        for column, position in zip(columns, positions, strict=True):
            column.append(fields[position])
    if malformed:
        _complain(path, malformed, len(lines), len(header), tolerated=0 if is_test(spec, split) else TOLERATED)
    return Rows(str(path), dict(zip(wanted, columns, strict=True)), lines)


def _complain(path: Path, malformed: Sequence[int], good: int, width: int, tolerated: float) -> None:
    """Warn of rows left out, or refuse the file: a test set's may not go, submissions count its rows."""
    total = good + len(malformed)
    what = f"{len(malformed)} of {total} rows do not have {width} fields, the first on line {malformed[0]}"
    if len(malformed) > tolerated * total:
        raise UserError(f"{path}: {what}; at most {tolerated:.0%} of such rows can be left out here")
    _log.warning("%s: %s; left out", path, what)


def read_json(path: Path, spec: TaskSpec, split: str) -> Rows:
    """JSON lines, or one JSON array of objects, with the hub's column names as keys."""
    text = whole_text(path)
    if text.lstrip().startswith("["):
        lines, records = [], parse_json(text, str(path))
    else:
        numbered = [(line, text) for line, text in enumerate(text.split("\n"), start=1) if text.strip()]
        lines = [line for line, _ in numbered]
        records = [parse_json(text, f"{path}, line {line}") for line, text in numbered]
    if not records:
        return Rows(str(path), {})
    place = Rows(str(path), {}, lines).place
    for row, record in enumerate(records):
        if not isinstance(record, dict):
            raise UserError(f"{place(row)}: a JSON object was expected, not {shorten(repr(record))}")
    wanted = wanted_columns(spec, split, list(records[0]), str(path))
    for row, record in enumerate(records):
        if lacking := [key for key in wanted if key not in record]:
            raise UserError(f"{place(row)}: key {lacking[0]!r} is missing")
    return Rows(str(path), {key: [record[key] for record in records] for key in wanted}, lines)


def read_parquet(path: Path, spec: TaskSpec, split: str) -> Rows:
    """Parquet with the hub's column names; class names that `datasets` left in the schema count."""
    try:
        with pq.ParquetFile(path) as file:
            wanted = wanted_columns(spec, split, file.schema_arrow.names, str(path))
            table = file.read(columns=list(wanted))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {shorten(str(error))}") from error
    return from_dataset(Dataset(table), spec, split, str(path))


def read_saved(state: Path, spec: TaskSpec, split: str) -> Rows:
    """One split of a folder that `DatasetDict.save_to_disk` wrote, found by its `state.json`."""
    try:
        dataset = load_from_disk(str(state.parent))
    except Exception as error:  # whatever pyarrow, json or datasets make of a damaged folder
        raise UserError(f"{state.parent}: not a readable saved data set: {shorten(str(error))}") from error
    return from_dataset(dataset, spec, split, str(state.parent))


def from_dataset(dataset: Dataset, spec: TaskSpec, split: str, source: str) -> Rows:
    """A data set of any origin; ids of named classes become names, whose order may differ from the spec's."""
    wanted = wanted_columns(spec, split, dataset.column_names, source)
    table = dataset.select_columns(list(wanted)).with_format("arrow")[:]
    columns = {column: table.column(column).to_pylist() for column in wanted}
    for column in wanted:
        feature = dataset.features[column]
        if isinstance(feature, ClassLabel):
            names = dict(enumerate(feature.names))
            columns[column] = [names.get(value, value) for value in columns[column]]
    return Rows(source, columns)


def _decoded(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines with their ends. Only a line feed ends one: texts may hold Unicode's others."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in text:  # UTF-16, or what a crash left of a file; tokenizers would drop them in silence
                    raise UserError(f"{path}, line {number}: not UTF-8 text: it holds null bytes; convert the file")
                yield number, text
    except UnicodeDecodeError as error:
        what = f"byte {error.start + 1} is 0x{error.object[error.start]:02x}"
        raise UserError(f"{path}, line {number}: not UTF-8: {what}; convert the file to UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends (LF or CRLF) and without the empty ones."""
    for number, line in _decoded(path):
        if text := line.removesuffix("\n").removesuffix("\r"):
            yield number, text


def whole_text(path: Path) -> str:
    """A file at once; like all readers here it names the line that is not UTF-8."""
    return "".join(line for _, line in _decoded(path))


def parse_json(text: str, place: str) -> Any:
    """JSON, or a `UserError` that names the place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not its own one for endless digits or brackets
        raise UserError(f"{place}: not JSON: {shorten(error)}") from error
