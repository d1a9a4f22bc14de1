"""The documents of a text corpus, read one at a time: text files, JSON lines, Parquet and saved data sets."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, load_from_disk

from istar.errors import UserError, shorten
from istar.files import atomic_write
from istar.tasks.tokenizing import chunks

TEXT = "text"
"""Name of the column, or of the key in JSON lines, that holds the documents."""

_BATCH_ROWS = 1_000


def read_documents(path: Path) -> Iterator[str]:
    """Yield the documents of a file or folder, one at a time, so that the corpus need not fit into memory.

    - `.jsonl`, `.ndjson`: each line is a JSON object with a document under `text`;
    - `.parquet`: a column `text` with a document in each row;
    - a folder that `Dataset.save_to_disk` wrote: likewise;
    - another folder: the documents of its `.txt`, `.jsonl`, `.ndjson` and `.parquet` files, in alphabetical order;
    - any other file: each line is a document, which may be a paragraph.

    Documents that are empty but for white space are left out, as are line ends and white space around a line of text.

    Raises:
        UserError: if the path cannot be read, holds no documents of these forms, or text is not UTF-8.
    """
    if (path / "state.json").is_file():
        yield from _not_blank(_saved(path))
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".txt", *_READERS))
        if not files:
            raise UserError(f"{path} holds no text: expected .txt, .jsonl or .parquet files, or a saved data set")
        for file in files:
            yield from read_documents(file)
    else:
        yield from _not_blank(_READERS.get(path.suffix, _lines)(path))


def document_dataset(documents: Iterable[str], folder: Path, content: str) -> Dataset:
    """Return documents as a memory-mapped data set with the column `text`, written to the folder only once.

    Args:
        documents: the documents; not read if an earlier call has written them.
        folder: folder of the file, created if absent.
        content: digest of what the documents are read from, which names the file.

    Raises:
        UserError: if the file cannot be written.
    """
    path = folder / f"{content}.arrow"
    if not path.exists():
        schema = pa.schema({TEXT: pa.large_string()})
        try:
            with atomic_write(path) as file, pa.ipc.new_stream(file, schema) as stream:
                for rows in chunks(documents, _BATCH_ROWS):
                    stream.write_batch(pa.record_batch([pa.array(rows, pa.large_string())], schema))
        except OSError as error:
            raise UserError(
                f"the documents cannot be cached: {shorten(error)}; name another folder with data.cache_dir"
            ) from error
    return Dataset.from_file(str(path))


def content_digest(path: Path) -> str:
    """Return a digest of the content of a file, or of all files below a folder with their names."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"{file.relative_to(path)}\0".encode() if file != path else file.suffix.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _not_blank(documents: Iterator[str]) -> Iterator[str]:
    return (document for document in documents if document and not document.isspace())


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file without the white space around them."""
    return (line.strip() for line in _raw_lines(path))


def _json_lines(path: Path) -> Iterator[str]:
    """Yield the field `text` of the JSON object in each line that is not empty."""
    for number, line in enumerate(_raw_lines(path), start=1):
        if line.isspace():
            continue
        try:
            text = json.loads(line)[TEXT]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f'{path}, line {number}: expected a JSON object with a text, such as {{"text": "..."}}'
            ) from error
        if not isinstance(text, str):
            raise UserError(f"{path}, line {number}: text is {type(text).__name__}; expected a string")
        yield text


def _raw_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line ends."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({shorten(error)}); convert the file to UTF-8") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {shorten(error)}; expected a text file") from error


def _parquet(path: Path) -> Iterator[str]:
    try:
        with pq.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow.names)
            for batch in file.iter_batches(_BATCH_ROWS, columns=[TEXT]):
                yield from _texts(path, batch[TEXT])
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {shorten(error)}") from error


def _saved(path: Path) -> Iterator[str]:
    try:
        dataset = load_from_disk(str(path))
    except Exception as error:  # pyarrow, json and datasets raise many types for damaged folders
        raise UserError(f"{path}: not a readable saved data set: {shorten(error)}") from error
    return documents_of(dataset, str(path))


def documents_of(dataset: Dataset, source: str) -> Iterator[str]:
    """Yield the column `text` of a data set; `source` names the data set in error messages.

    Raises:
        UserError: if there is no such column, or a value in it is not a string.
    """
    _check_column(source, dataset.column_names)
    for table in dataset.select_columns([TEXT]).with_format("arrow").iter(batch_size=_BATCH_ROWS):
        yield from _texts(source, table[TEXT])


def _check_column(source: object, columns: list[str]) -> None:
    if TEXT not in columns:
        raise UserError(f"{source}: there is no column {TEXT!r}; found: {', '.join(map(repr, columns)) or 'none'}")


def _texts(source: object, column: "pa.Array | pa.ChunkedArray") -> Iterator[str]:
    if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
        raise UserError(f"{source}: the column {TEXT!r} holds {column.type}; expected strings")
    return (text for text in column.to_pylist() if text is not None)


_READERS: Mapping[str, Callable[[Path], Iterator[str]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}
"""Readers by suffix of the file; files with another suffix are plain text."""
