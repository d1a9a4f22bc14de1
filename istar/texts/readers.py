"""The only reader of table rows: CSV, TSV, JSON and Parquet files and saved data sets."""

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features, IterableDataset, Value, load_from_disk

from istar.errors import UserError, shorten
from istar.files.parsing import parse_json
from istar.files.writing import refuse_special_file

# The default limit of a field, 131,072 characters, guards against an unclosed quote, which `strict` refuses anyway.
csv.field_size_limit(2**31 - 1)

_BATCH_ROWS = 1_000
_PARQUET_BUFFER_BYTES = 2**20
"""Number of bytes of a Parquet column to read at once. By default, Arrow reads whole row groups, which may be large."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Arrow's names of compressions by the suffix of a file."""

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
    """Open values with a header, separated as in `iterate_csv`."""
    return _make_delimited_table(path, iterate_csv(path))


def read_tsv(path: Path, header: Sequence[str] = ()) -> Table:
    """Open tab-separated values; quotes are plain text. Without `header`, the first line names the columns."""
    records = ((line, text.split("\t")) for line, text in numbered_lines(path))
    return _make_delimited_table(path, records, header)


def iterate_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of each record of comma-separated values, the header included.

    Semicolons or tabs separate instead if they alone are in the header, or if Excel's first line is `sep=;`.
    """
    text = read_text(path)
    header = next(re.finditer(r'(?:"[^"]*"|[^"\r\n])+', text), [""])[0]
    excel_line = re.fullmatch('"?sep=(.)"?', header, re.IGNORECASE)
    separators = [separator for separator in ",;\t" if separator in re.sub('"[^"]*"', "", header)]
    separator = excel_line[1] if excel_line else separators[0] if len(separators) == 1 else ","
    # Without `strict`, an unclosed quote would silently absorb the rest of the file.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    line = 1
    try:
        for fields in reader:
            if fields and not (excel_line and line == 1):
                yield line, fields
            line = reader.line_num + 1  # quoted fields may span several lines
    except csv.Error as error:
        raise UserError(f"{path}, line {line}: not CSV: {error}") from error


def _make_delimited_table(path: Path, records: Iterator[tuple[int, list[str]]], header: Sequence[str] = ()) -> Table:
    header = header or next(records, (0, []))[1]

    def read_rows(names: Sequence[str]) -> Iterator[Row]:
        _refuse_repeated_columns(str(path), header, names)
        indices = [header.index(name) for name in names]
        for line, fields in records:
            yield line, [fields[index] for index in indices] if len(fields) == len(header) else None

    return Table(str(path), header, read_rows)


def _refuse_repeated_columns(source: str, columns: Sequence[str], names: Sequence[str]) -> None:
    for name in names:
        positions = [str(position) for position, column in enumerate(columns, start=1) if column == name]
        if len(positions) > 1:
            places = ", ".join(positions)
            raise UserError(f"{source}: column {name!r} occurs at positions {places}; rename or remove all but one")


def read_json_table(path: Path) -> Table:
    """Open JSON lines, or the array in a `.json` file, of objects keyed by column names."""
    lines = (text for _, text in numbered_lines(path) if not text.isspace())
    is_array = find_suffix(path) == ".json" and next(lines, "").lstrip().startswith("[")
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
            with pq.ParquetFile(path, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False) as file:
                yield from file.iter_batches(_BATCH_ROWS, columns=list(names))
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a readable Parquet file: {shorten(error)}") from error

    return _make_arrow_table(str(path), schema.names, _read_class_names(schema, path), read_batches)


def _read_class_names(schema: pa.Schema, path: Path) -> dict[str, list[str]]:
    """Return the names of the classes by column, from the metadata that datasets writes.

    `Features.from_arrow_schema` would raise an error if any column had a type that datasets lacks.
    """
    metadata = (schema.metadata or {}).get(b"huggingface", b"{}").decode(errors="replace")
    class_names: dict[str, list[str]] = {}
    match parse_json(metadata, f"{path}, metadata"):
        case {"info": {"features": dict(features)}}:
            for field in schema:
                match features.get(field.name):
                    case {"_type": "ClassLabel", "names": [*names]} if pa.types.is_integer(field.type):
                        class_names[field.name] = names
    return class_names


def open_saved_dataset(folder: Path) -> Dataset:
    """Open one split of a data set that `save_to_disk` wrote to a folder."""
    try:
        return load_from_disk(str(folder), keep_in_memory=False)
    except Exception as error:  # pyarrow, json and datasets raise many types for damaged folders
        raise UserError(f"{folder}: not a readable saved data set: {shorten(error)}") from error


def make_table(dataset: Dataset | IterableDataset, source: str) -> Table:
    """Return a data set as a table. Class ids become names, because a task may order the classes differently."""
    # A stream may not know its columns before its first row.
    features = dataset.features or Features(dict.fromkeys(next(iter(dataset), {}), Value("null")))

    def read_batches(names: Sequence[str]) -> Iterable[Any]:
        return dataset.select_columns(list(names)).with_format("arrow").iter(batch_size=_BATCH_ROWS)

    class_names = {name: feature.names for name, feature in features.items() if isinstance(feature, ClassLabel)}
    return _make_arrow_table(source, list(features), class_names, read_batches)


def _make_arrow_table(
    source: str,
    columns: Sequence[str],
    class_names: Mapping[str, Sequence[str]],
    read_batches: Callable[[Sequence[str]], Iterable[Any]],
) -> Table:
    def read_rows(names: Sequence[str]) -> Iterator[Row]:
        _refuse_repeated_columns(source, columns, names)
        first_number = 1
        for batch in read_batches(names):
            try:
                values = [batch[name].to_pylist() for name in names]
            except UnicodeDecodeError as error:  # Arrow does not check what others wrote
                raise UserError(f"{source}: a text is not UTF-8: {shorten(error)}") from error
            for index, name in enumerate(names):
                if name in class_names:
                    class_name_by_id = dict(enumerate(class_names[name]))
                    values[index] = [class_name_by_id.get(value, value) for value in values[index]]
            yield from enumerate(zip(*values, strict=True), start=first_number)
            first_number += len(batch)

    return Table(source, columns, read_rows, "row")


READERS: Mapping[str, Callable[[Path], Table]] = {
    ".jsonl": read_json_table,
    ".ndjson": read_json_table,
    ".json": read_json_table,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}


def find_suffix(path: Path) -> str:
    """Return the suffix of a file in lower case, and of a compressed file the one before: `.jsonl` of `a.jsonl.gz`."""
    uncompressed = Path(path.stem) if path.suffix.lower() in _COMPRESSIONS else path
    return (uncompressed.suffix or path.suffix).lower()


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line of a UTF-8 file that is not empty, without the line end.

    The file is read, and decompressed, line by line. Only a line feed ends a line, because texts may contain other line
    separators. Raises a `UserError` as `read_text`.
    """
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if text := _decode(line, path, number).removesuffix("\n").removesuffix("\r"):
                yield number, text


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file; raise a `UserError`, with the line, if it is not UTF-8 or cannot be read."""
    with _open(path) as file:
        return _decode(file.read(), path)


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading and decompress it; raise a `UserError` if it cannot be read, also within the block."""
    try:
        refuse_special_file(path)
        compression = _COMPRESSIONS.get(path.suffix.lower())
        with path.open("rb") if compression is None else pa.input_stream(str(path), compression) as file:
            yield file if compression is None else io.BufferedReader(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or shorten(error)}") from error


def _decode(content: bytes, path: Path, first_line: int = 1) -> str:
    """Decode lines of a file from a line on; the first line of the file may begin with a byte order mark."""
    try:
        text = content.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        # The positions in the error do not count a byte order mark.
        content = error.object
        line = first_line + content.count(b"\n", 0, error.start)
        column = error.start - content.rfind(b"\n", 0, error.start)
        detail = f"byte {column} is 0x{content[error.start]:02x}"
        raise UserError(f"{path}, line {line}: not UTF-8: {detail}; convert the file to UTF-8") from error
    # Null bytes indicate UTF-16 or a file damaged by a crash. Tokenizers would drop them silently.
    if "\0" in text:
        line = first_line + text.count("\n", 0, text.index("\0"))
        raise UserError(f"{path}, line {line}: not UTF-8 text: it holds null bytes; convert the file")
    return text
