"""The documents of a text corpus, read one at a time: text files, JSON lines, Parquet and saved data sets."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, load_from_disk

from istar.errors import UserError, shorten
from istar.files.parsing import parse_json
from istar.files.writing import atomic_write, refuse_special_file
from istar.inputs.readers import RawSplit, iterate_csv, numbered_lines, read_json_objects, read_text
from istar.inputs.tokenizing import chunks

TEXT_COLUMN = "text"
"""Name of the column, or of the key in JSON lines, that contains the documents."""

_BATCH_ROWS = 1_000


def read_documents(path: Path) -> Iterator[str]:
    """Yield the documents of a text file, data file or folder one at a time, so that they need not fit into memory.

    - `.jsonl`, `.ndjson`: each line is a JSON object with a document under `text`;
    - `.json`: the same, or one array of such objects; read as a whole, as are the next two;
    - `.csv`, `.tsv`: a header with the column `text`, and a document in each row; in `.tsv`, quotes are plain text;
    - `.parquet`: a column `text` with a document in each row;
    - a folder that `Dataset.save_to_disk` wrote: a column `text` with a document in each row;
    - another folder: the documents of its files with these suffixes, except `.json`, in alphabetical order;
    - `.txt`, `.text`, `.md`, `.raw`, `.tokens` or no suffix: each line is one document, for example a paragraph.

    Upper and lower case in suffixes are alike. In a folder, plain text has the suffix `.txt`.

    Documents that contain only whitespace are left out. In plain text, whitespace around a line is removed.

    Raises:
        UserError: if the path cannot be read, is no such file or folder, or text is not UTF-8; the line names the file.
    """
    if (path / "state.json").is_file():
        yield from _drop_blank_documents(_read_saved_dataset(path))
    elif path.is_dir():
        # A `.json` file in a folder usually describes the others.
        files = sorted(file for file in path.iterdir() if is_corpus_file(file) and file.suffix.lower() != ".json")
        if not files:
            raise UserError(f"{path} holds no text: expected .txt, .jsonl or .parquet files, or a saved data set")
        for file in files:
            yield from read_documents(file)
    else:
        reader = _READERS.get(path.suffix.lower(), _read_lines if path.suffix.lower() in _TEXT_SUFFIXES else None)
        if reader is None:
            accepted = ", ".join(("plain text as .txt", *_READERS))
            raise UserError(f"{path}: files of the kind {path.suffix} are not read as text; expected {accepted}")
        yield from _drop_blank_documents(reader(path))


def is_corpus_file(path: Path) -> bool:
    """Return whether a file in a folder is part of a corpus by its suffix."""
    return path.suffix.lower() in (".txt", *_READERS)


def cache_documents(documents: Iterable[str], folder: Path, digest: str) -> Dataset:
    """Write documents to a cache folder, unless it contains them, and return them as a memory-mapped data set.

    The data set has one column, `text`.

    Args:
        documents: the documents. They are not read if an earlier call has written them.
        folder: cache folder, created if absent.
        digest: digest of the files that contain the documents, which becomes the name of the cached file.

    Raises:
        UserError: if the file cannot be written.
    """
    path = folder / f"{digest}.arrow"
    if not path.exists():
        schema = pa.schema({TEXT_COLUMN: pa.large_string()})
        try:
            with atomic_write(path) as file, pa.ipc.new_stream(file, schema) as stream:
                for batch in chunks(documents, _BATCH_ROWS):
                    stream.write_batch(pa.record_batch([pa.array(batch, pa.large_string())], schema))
        except OSError as error:
            raise UserError(
                f"the documents cannot be cached: {shorten(error)}; name another folder with data.cache_dir"
            ) from error
    return Dataset.from_file(str(path))


def compute_content_digest(path: Path) -> str:
    """Return a SHA-256 digest of the content of a file, or of the names and contents of all files below a folder."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"{file.relative_to(path)}\0".encode() if file != path else file.suffix.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _drop_blank_documents(documents: Iterator[str]) -> Iterator[str]:
    """Yield the documents that contain more than white space."""
    return (document for document in documents if document and not document.isspace())


def _read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file without the white space around them; refuse JSON lines under another suffix."""
    lines = (line.strip() for line in _read_raw_lines(path))
    first_line = next(filter(None, lines), "")
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(json.loads(first_line), dict):
            raise UserError(f"{path}: JSON objects in the lines of a text file; expected the suffix .jsonl")
    yield first_line
    yield from lines


def _read_json_lines(path: Path) -> Iterator[str]:
    """Yield the field `text` of the JSON object in each line that is not blank."""
    for number, line in enumerate(_read_raw_lines(path), start=1):
        if not line.isspace():
            yield _get_text(parse_json(line, f"{path}, line {number}"), f"{path}, line {number}")


def _read_json(path: Path) -> Iterator[str]:
    """Yield the field `text` of each object in a file of JSON lines or of one JSON array."""
    records, lines = read_json_objects(path)
    location = RawSplit(str(path), {}, lines).location
    return (_get_text(record, location(row)) for row, record in enumerate(records))


def _get_text(record: Any, location: str) -> str:
    """Return the document of a JSON object; raise a `UserError` that names its location if it has none."""
    if not isinstance(record, dict) or TEXT_COLUMN not in record:
        raise UserError(f'{location}: expected a JSON object with a text, such as {{"text": "..."}}')
    text = record[TEXT_COLUMN]
    if not isinstance(text, str):
        raise UserError(f"{location}: text is {shorten(repr(text), 60)}; expected a string")
    return text


def _read_table(path: Path, records: Iterator[tuple[int, list[str]]]) -> Iterator[str]:
    """Yield the field `text` of the records of a table, given by line number and fields; the first is a header."""
    _, header = next(records, (0, []))
    _check_text_column(path, header)
    for line, fields in records:
        if len(fields) != len(header):
            raise UserError(f"{path}, line {line}: {len(fields)} fields; expected {len(header)} as in the header")
        yield fields[header.index(TEXT_COLUMN)]


def _read_tsv(path: Path) -> Iterator[str]:
    """Yield the field `text` of tab-separated values."""
    return _read_table(path, ((line, text.split("\t")) for line, text in numbered_lines(path)))


def _read_raw_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line ends."""
    try:
        refuse_special_file(path)
        with path.open(encoding="utf-8-sig") as file:
            for line in file:
                if "\0" in line:
                    read_text(path)  # raises the error that names the line
                yield line
    except UnicodeDecodeError:
        read_text(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {shorten(error)}; expected a text file") from error


def _read_parquet(path: Path) -> Iterator[str]:
    """Yield the column `text` of a Parquet file."""
    try:
        with pq.ParquetFile(path) as file:
            _check_text_column(path, file.schema_arrow.names)
            for batch in file.iter_batches(_BATCH_ROWS, columns=[TEXT_COLUMN]):
                yield from _iterate_strings(path, batch[TEXT_COLUMN])
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {shorten(error)}") from error


def _read_saved_dataset(path: Path) -> Iterator[str]:
    """Yield the column `text` of a data set that `Dataset.save_to_disk` wrote to a folder."""
    try:
        dataset = load_from_disk(str(path))
    except Exception as error:  # pyarrow, json and datasets raise many types for damaged folders
        raise UserError(f"{path}: not a readable saved data set: {shorten(error)}") from error
    return iterate_texts(dataset, str(path))


def iterate_texts(dataset: Dataset, source: str) -> Iterator[str]:
    """Yield the values of a data set's column `text`. `source` names the data set in error messages.

    Raises:
        UserError: if there is no such column, or a value in it is not a string.
    """
    _check_text_column(source, dataset.column_names)
    for table in dataset.select_columns([TEXT_COLUMN]).with_format("arrow").iter(batch_size=_BATCH_ROWS):
        yield from _iterate_strings(source, table[TEXT_COLUMN])


def _check_text_column(source: object, columns: list[str]) -> None:
    """Raise a `UserError` if there is no column `text`."""
    if TEXT_COLUMN not in columns:
        names = ", ".join(map(repr, columns)) or "none"
        raise UserError(f"{source}: there is no column {TEXT_COLUMN!r}; found: {names}")


def _iterate_strings(source: object, column: "pa.Array | pa.ChunkedArray") -> Iterator[str]:
    """Return an iterator over the strings of an Arrow column without nulls; raise a `UserError` for another type."""
    if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
        raise UserError(f"{source}: the column {TEXT_COLUMN!r} holds {column.type}; expected strings")
    try:
        return (text for text in column.to_pylist() if text is not None)
    except UnicodeDecodeError as error:  # Arrow does not check what others wrote
        raise UserError(f"{source}: a text in the column {TEXT_COLUMN!r} is not UTF-8: {shorten(error)}") from error


_READERS: Mapping[str, Callable[[Path], Iterator[str]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": lambda path: _read_table(path, iterate_csv(path)),
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
"""Readers by file suffix."""
_TEXT_SUFFIXES = ("", ".txt", ".text", ".md", ".raw", ".tokens")
"""Suffixes of plain text."""
