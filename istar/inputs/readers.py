"""The only reader of table rows: CSV, TSV, JSON and Parquet files and saved data sets."""

import csv
import gzip
import io
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features, load_from_disk

from istar.errors import UserError, shorten
from istar.files.parsing import parse_json
from istar.files.writing import refuse_special_file

# The default limit of a field, 131,072 characters, guards against an unclosed quote, which `strict` refuses anyway.
csv.field_size_limit(2**31 - 1)

_BATCH_ROWS = 1_000

Row = tuple[int, Sequence[Any] | None]
"""Number of a row, and its values in the order of the requested columns, or None if it has a wrong number of fields."""


@dataclass(frozen=True)
class Table:
    """The rows of a file or a data set.

    Attributes:
        source: file or other origin, named in error messages.
        columns: names of the columns; empty for an empty file.
        read_rows: yields the rows, with the values of the named columns.
        unit: what row numbers count: `line` or `row`, both from 1.
    """

    source: str
    columns: Sequence[str]
    read_rows: Callable[[Sequence[str]], Iterator[Row]]
    unit: str = "line"

    def location(self, number: int) -> str:
        """Return the source and a row's number, for error messages."""
        return f"{self.source}, {self.unit} {number}"


def read_csv(path: Path) -> Table:
    """Open comma-separated values with a header."""
    return _make_delimited_table(path, iterate_csv(path))


def read_tsv(path: Path, header: Sequence[str] = ()) -> Table:
    """Open tab-separated values; quotes are plain text. Without `header`, the first line names the columns."""
    records = ((line, text.split("\t")) for line, text in numbered_lines(path))
    return _make_delimited_table(path, records, header)


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


def _make_delimited_table(path: Path, records: Iterator[tuple[int, list[str]]], header: Sequence[str] = ()) -> Table:
    header = header or next(records, (0, []))[1]

    def read_rows(names: Sequence[str]) -> Iterator[Row]:
        indices = [header.index(name) for name in names]
        for line, fields in records:
            yield line, [fields[index] for index in indices] if len(fields) == len(header) else None

    return Table(str(path), header, read_rows)


def read_json_table(path: Path) -> Table:
    """Open JSON lines, or the array in a `.json` file, of objects keyed by column names."""
    is_array = path.suffix.lower() == ".json" and read_text(path).lstrip().startswith("[")
    unit = "row" if is_array else "line"
    objects = _iterate_objects(path, is_array, unit)
    first = next(objects, None)
    if first is None:
        return Table(str(path), (), lambda names: iter(()))

    def read_rows(names: Sequence[str]) -> Iterator[Row]:
        for number, values in itertools.chain([first], objects):
            for key in names:
                if key not in values:
                    raise UserError(f"{path}, {unit} {number}: key {key!r} is missing")
            yield number, [values[key] for key in names]

    return Table(str(path), list(first[1]), read_rows, unit)


def _iterate_objects(path: Path, is_array: bool, unit: str) -> Iterator[tuple[int, dict[str, Any]]]:
    numbered_values: Iterable[tuple[int, Any]]
    if is_array:
        numbered_values = enumerate(parse_json(read_text(path), str(path)), start=1)
    else:
        lines = ((line, text) for line, text in numbered_lines(path) if not text.isspace())
        numbered_values = ((line, parse_json(text, f"{path}, line {line}")) for line, text in lines)
    for number, value in numbered_values:
        if not isinstance(value, dict):
            raise UserError(f"{path}, {unit} {number}: a JSON object was expected, not {shorten(repr(value))}")
        yield number, value


def read_parquet(path: Path) -> Table:
    """Open a Parquet file. Class ids become the class names stored in its schema."""
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {shorten(error)}") from error

    def read_batches(names: Sequence[str]) -> Iterator[Any]:
        try:
            with pq.ParquetFile(path) as file:
                yield from file.iter_batches(_BATCH_ROWS, columns=list(names))
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a readable Parquet file: {shorten(error)}") from error

    return _make_arrow_table(str(path), Features.from_arrow_schema(schema), read_batches)


def read_saved_dataset(folder: Path) -> Table:
    """Open one split of a data set that `save_to_disk` wrote to a folder."""
    try:
        dataset = load_from_disk(str(folder))
    except Exception as error:  # pyarrow, json and datasets raise many types for damaged folders
        raise UserError(f"{folder}: not a readable saved data set: {shorten(error)}") from error
    return make_table(dataset, str(folder))


def make_table(dataset: Dataset, source: str) -> Table:
    """Return a data set as a table. Class ids become names, because a task may order the classes differently."""

    def read_batches(names: Sequence[str]) -> Iterable[Any]:
        return dataset.select_columns(list(names)).with_format("arrow").iter(batch_size=_BATCH_ROWS)

    return _make_arrow_table(source, dataset.features, read_batches)


def _make_arrow_table(source: str, features: Features, read_batches: Callable[[Sequence[str]], Iterable[Any]]) -> Table:
    def read_rows(names: Sequence[str]) -> Iterator[Row]:
        first_number = 1
        for batch in read_batches(names):
            try:
                columns = [batch[name].to_pylist() for name in names]
            except UnicodeDecodeError as error:  # Arrow does not check what others wrote
                raise UserError(f"{source}: a text is not UTF-8: {shorten(error)}") from error
            for index, name in enumerate(names):
                if isinstance(feature := features[name], ClassLabel):
                    class_name_by_id = dict(enumerate(feature.names))
                    columns[index] = [class_name_by_id.get(value, value) for value in columns[index]]
            yield from enumerate(zip(*columns, strict=True), start=first_number)
            first_number += len(batch)

    return Table(source, list(features), read_rows, "row")


READERS: Mapping[str, Callable[[Path], Table]] = {
    ".jsonl": read_json_table,
    ".ndjson": read_json_table,
    ".json": read_json_table,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}
"""Readers by file suffix."""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line of a UTF-8 file that is not empty, without the line end.

    The file, which gzip has compressed if its suffix is `.gz`, is read line by line. Only a line feed ends a line,
    because texts may contain other line separators. Raises a `UserError` as `read_text`.
    """
    try:
        refuse_special_file(path)
        open_file: Any = gzip.open if path.suffix.lower() == ".gz" else open
        with open_file(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if "\0" in line:
                    read_text(path)  # raises the error that names the line
                if text := line.removesuffix("\n").removesuffix("\r"):
                    yield number, text
    except (UnicodeDecodeError, OSError, EOFError, zlib.error):
        read_text(path)


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file; raise a `UserError`, with the line, if it is not UTF-8 or cannot be read."""
    try:
        refuse_special_file(path)
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix.lower() == ".gz" else content
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The positions in the error do not count a byte order mark.
        content = error.object
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        detail = f"byte {column} is 0x{content[error.start]:02x}"
        raise UserError(f"{path}, line {line}: not UTF-8: {detail}; convert the file to UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or shorten(error)}") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be decompressed: {shorten(error)}") from error
    # Null bytes indicate UTF-16 or a file damaged by a crash. Tokenizers would drop them silently.
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{path}, line {line}: not UTF-8 text: it holds null bytes; convert the file")
    return text
