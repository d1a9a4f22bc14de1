"""Readers of TSV, CSV, JSON, Parquet and saved data sets.

Each reader is a function `(path, spec, split) -> RawSplit`. It returns the columns under their names on the hub, with
values as they are in the file; `istar.finetune.tasks.loading` validates and converts them.
"""

import csv
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, load_from_disk

from istar.errors import UserError, shorten
from istar.files.parsing import parse_json
from istar.files.writing import refuse_special_file
from istar.records.task_specs import TaskSpec

_log = logging.getLogger(__name__)

# The default limit of a field, 131,072 characters, guards against an unclosed quote, which `strict` refuses anyway.
csv.field_size_limit(2**31 - 1)

MAX_MALFORMED_SHARE = 0.01
"""Largest share of malformed rows to skip with a warning. A file with more is damaged or has another format."""


@dataclass(frozen=True)
class RawSplit:
    """Columns of a split as they are in a file or another source, before they are validated.

    Attributes:
        source: file or other origin, for error messages.
        columns: values of each column by its name on the hub.
        lines: line number of each row, for error messages; empty if unknown.
    """

    source: str
    columns: Mapping[str, Sequence[Any]]
    lines: Sequence[int] = ()

    def location(self, row: int) -> str:
        """Return the source and the line or row number of a row, counted from 1, for error messages."""
        return f"{self.source}, line {self.lines[row]}" if self.lines else f"{self.source}, row {row + 1}"


def find_source_columns(
    spec: TaskSpec, split: str, available: Sequence[str], source: str, renamed: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the names in a source of the columns that a split needs, by their names on the hub.

    Args:
        spec: specification of the task.
        split: name of the split. A test set does not need labels.
        available: names of the columns in the source.
        source: file or other origin, for error messages.
        renamed: names in the source, by names on the hub, where they differ.

    Raises:
        UserError: if a column is missing.
    """
    ids = ("id",) if spec.kind == "span" else ()
    columns = {name: (renamed or {}).get(name, name) for name in (*ids, *spec.text_columns, spec.label_column)}
    if spec.is_test(split) and columns[spec.label_column] not in available:
        del columns[spec.label_column]
    for name in columns.values():
        if name not in available:
            names = ", ".join(map(repr, available)) or "none"
            raise UserError(f"{source}: column {name!r}, which task {spec.name} needs, is missing; found: {names}")
    return columns


def read_tsv(path: Path, spec: TaskSpec, split: str) -> RawSplit:
    """Read a tab-separated file of the GLUE benchmark, in which quotes, `NA` and `null` are plain text."""
    records = ((line, text.split("\t")) for line, text in numbered_lines(path))
    header = () if spec.is_test(split) else spec.tsv_header
    return _read_table(path, spec, split, records, header, spec.tsv_columns)


def read_csv(path: Path, spec: TaskSpec, split: str) -> RawSplit:
    """Read a file of comma-separated values with a header of the hub's column names."""
    return _read_table(path, spec, split, iterate_csv(path))


def iterate_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of each record of comma-separated values, the header included."""
    # Without `strict`, an unclosed quote would silently absorb the rest of the file.
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1  # quoted fields may span several lines
    except csv.Error as error:
        raise UserError(f"{path}, line {line}: not CSV: {error}") from error


def _read_table(
    path: Path,
    spec: TaskSpec,
    split: str,
    records: Iterator[tuple[int, list[str]]],
    header: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
) -> RawSplit:
    """Select the columns of a split from the records of a table, and skip a few records of wrong length with a warning.

    Test sets must be complete, because a submission must have a prediction for each row.

    Args:
        path: file of the table.
        spec: specification of the task.
        split: name of the split.
        records: line number and fields of each record.
        header: names of the fields; by default the first record.
        renamed: see `find_source_columns`.

    Raises:
        UserError: if a column is missing, or too many records have a wrong length.
    """
    header = header or next(records, (0, []))[1]
    if not header:
        return RawSplit(str(path), {})
    source_names = find_source_columns(spec, split, header, str(path), renamed)
    field_indices = [header.index(source_name) for source_name in source_names.values()]
    columns: dict[str, list[str]] = {name: [] for name in source_names}
    columns_with_indices = list(zip(columns.values(), field_indices, strict=True))
    lines, malformed_lines = [], []
    for line, fields in records:
        if len(fields) == len(header):
            for column_values, field_index in columns_with_indices:
                column_values.append(fields[field_index])
            lines.append(line)
        else:
            malformed_lines.append(line)
    if malformed_lines:
        num_records = len(lines) + len(malformed_lines)
        problem = (
            f"{len(malformed_lines)} of {num_records} rows do not have {len(header)} fields, the first on line "
            f"{malformed_lines[0]}"
        )
        max_share = 0.0 if spec.is_test(split) else MAX_MALFORMED_SHARE
        if len(malformed_lines) > max_share * num_records:
            raise UserError(f"{path}: {problem}; at most {max_share:.0%} of the rows of this split may be malformed")
        _log.warning("%s: %s; these rows are skipped", path, problem)
    return RawSplit(str(path), columns, lines)


def read_json_split(path: Path, spec: TaskSpec, split: str) -> RawSplit:
    """Read a file of JSON lines, or of one JSON array of objects, with the hub's column names as keys."""
    if spec.files == "squad" and re.match(r'\s*\{\s*"(data|version)"', read_text(path)):
        raise UserError(f"{path}: SQuAD's own JSON was expected as train-v1.1.json and dev-v1.1.json; rename the files")
    records, lines = read_json_objects(path)
    if not records:
        return RawSplit(str(path), {})
    columns = find_source_columns(spec, split, list(records[0]), str(path))
    location = RawSplit(str(path), {}, lines).location
    for row, record in enumerate(records):
        for key in columns:
            if key not in record:
                raise UserError(f"{location(row)}: key {key!r} is missing")
    return RawSplit(str(path), {key: [record[key] for record in records] for key in columns}, lines)


def read_json_objects(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the objects in a file of JSON lines, or of one JSON array, and their lines; none for an array."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        lines, records = [], parse_json(text, str(path))
    else:
        text_by_line = {line: text for line, text in enumerate(text.split("\n"), start=1) if text.strip()}
        lines = list(text_by_line)
        records = [parse_json(text, f"{path}, line {line}") for line, text in text_by_line.items()]
    location = RawSplit(str(path), {}, lines).location
    for row, record in enumerate(records):
        if not isinstance(record, dict):
            raise UserError(f"{location(row)}: a JSON object was expected, not {shorten(repr(record))}")
    return records, lines


def read_parquet(path: Path, spec: TaskSpec, split: str) -> RawSplit:
    """Read a Parquet file with the hub's column names. Class ids become the class names stored in its schema."""
    try:
        with pq.ParquetFile(path) as file:
            columns = find_source_columns(spec, split, file.schema_arrow.names, str(path))
            table = file.read(columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {shorten(str(error))}") from error
    return read_dataset(Dataset(table), spec, split, str(path))


def read_saved_dataset(state_path: Path, spec: TaskSpec, split: str) -> RawSplit:
    """Read one split of a folder that `DatasetDict.save_to_disk` wrote, given the path of its `state.json`."""
    try:
        dataset = load_from_disk(str(state_path.parent))
    except Exception as error:  # pyarrow, json and datasets raise many types for damaged folders
        raise UserError(f"{state_path.parent}: not a readable saved data set: {shorten(str(error))}") from error
    return read_dataset(dataset, spec, split, str(state_path.parent))


def read_dataset(dataset: Dataset, spec: TaskSpec, split: str, source: str) -> RawSplit:
    """Select the columns of a split from a data set.

    Class ids of a `ClassLabel` column become class names, because the spec may order the classes differently.
    """
    names = list(find_source_columns(spec, split, dataset.column_names, source))
    try:
        columns = dataset.select_columns(names).with_format("arrow")[:].to_pydict()
    except UnicodeDecodeError as error:  # Arrow does not check what others wrote
        raise UserError(f"{source}: a text is not UTF-8: {shorten(error)}") from error
    for name, column_values in columns.items():
        feature = dataset.features[name]
        if isinstance(feature, ClassLabel):
            class_name_by_id = dict(enumerate(feature.names))
            columns[name] = [class_name_by_id.get(value, value) for value in column_values]
    return RawSplit(source, columns)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line of a UTF-8 file that is not empty, without the line end.

    Only a line feed ends a line, because texts may contain other Unicode line separators.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if text := line.removesuffix("\r"):
            yield number, text


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file.

    Raises:
        UserError: if the file cannot be read, or is not UTF-8 text; the message names the line.
    """
    try:
        refuse_special_file(path)
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The positions in the error do not count a byte order mark.
        content = error.object
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        detail = f"byte {column} is 0x{content[error.start]:02x}"
        raise UserError(f"{path}, line {line}: not UTF-8: {detail}; convert the file to UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    # Null bytes indicate UTF-16 or a file damaged by a crash. Tokenizers would drop them silently.
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{path}, line {line}: not UTF-8 text: it holds null bytes; convert the file")
    return text
