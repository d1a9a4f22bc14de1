"""The documents of a text corpus, read one at a time: text files, JSON lines, Parquet and saved data sets."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from datasets import Dataset

from istar.errors import UserError, shorten
from istar.files.writing import atomic_write
from istar.inputs.readers import READERS, Table, make_table, numbered_lines, read_saved_dataset
from istar.inputs.tokenizing import chunks

TEXT_COLUMN = "text"
"""Column, or key in JSON lines, that contains the documents."""

_BATCH_ROWS = 1_000


def read_documents(path: Path) -> Iterator[str]:
    """Return an iterator over the documents of a text file, data file or folder, which need not fit into memory.

    - `.jsonl`, `.ndjson`: each line is a JSON object with a document under `text`;
    - `.json`: the same, or one array of such objects; read as a whole, as are `.csv` files;
    - `.csv`, `.tsv`: a header with the column `text`, and a document in each row; in `.tsv`, quotes are plain text;
    - `.parquet`: a column `text` with a document in each row;
    - a folder that `Dataset.save_to_disk` wrote: a column `text` with a document in each row;
    - another folder: the documents of its files with these suffixes, except `.json`, in alphabetical order;
    - `.txt`, `.text`, `.md`, `.raw`, `.tokens` or no suffix: each line is one document, for example a paragraph;
    - `.jsonl.gz`, `.ndjson.gz`, `.txt.gz`: the same, compressed by gzip.

    The case of suffixes is ignored. In a folder, plain text has the suffix `.txt`.

    Documents that contain only whitespace are left out. In plain text, whitespace around a line is removed. Raises a
    `UserError` if the path cannot be read or is not one of these, or text is not UTF-8; the message names the file.
    """
    suffix = _find_format_suffix(path)
    documents: Iterator[str]
    if (path / "state.json").is_file():
        documents = _iterate_column(read_saved_dataset(path))
    elif path.is_dir():
        documents = (document for file in list_corpus_files(path) for document in read_documents(file))
    elif suffix in READERS:
        documents = _iterate_column(READERS[suffix](path))
    elif suffix in _TEXT_SUFFIXES:
        documents = _iterate_lines(path)
    else:
        accepted = ", ".join(("plain text as .txt", *READERS))
        raise UserError(f"{path}: files of the kind {path.suffix} are not read as text; expected {accepted}")
    return (document for document in documents if document and not document.isspace())


def list_corpus_files(path: Path) -> list[Path]:
    """Return the files of a folder that contain its documents, in alphabetical order; a file or saved data set itself.

    Raises a `UserError` if the folder has no such file.
    """
    if not path.is_dir() or (path / "state.json").is_file():
        return [path]
    # A `.json` file in a folder usually describes the others.
    files = sorted(file for file in path.iterdir() if is_corpus_file(file) and file.suffix.lower() != ".json")
    if not files:
        raise UserError(f"{path} holds no text: expected .txt, .jsonl or .parquet files, or a saved data set")
    return files


def is_corpus_file(path: Path) -> bool:
    """Return whether a file in a folder is part of a corpus by its suffix."""
    return _find_format_suffix(path) in (".txt", *READERS)


def _find_format_suffix(path: Path) -> str:
    """Return the suffix of a file in lower case, without the `.gz` of a compressed file that is read line by line."""
    name = path.name.lower()
    is_compressed = name.endswith(tuple(f"{suffix}.gz" for suffix in _COMPRESSED_SUFFIXES))
    return Path(name.removesuffix(".gz") if is_compressed else name).suffix


def cache_documents(documents: Iterable[str], folder: Path, digest: str) -> Dataset:
    """Write documents to a cache folder, created if absent; return them as a memory-mapped data set.

    The data set has one column, `text`. `digest`, of the files that contain the documents, names the cached file. If
    this file exists, the documents are not read. Raises a `UserError` if the file cannot be written.
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


def iterate_texts(dataset: Dataset, source: str) -> Iterator[str]:
    """Yield the values of a data set's column `text`; `source` names the data set in error messages.

    Raises a `UserError` if the column is missing, or a value in it is not a string.
    """
    return _iterate_column(make_table(dataset, source))


def _iterate_column(table: Table) -> Iterator[str]:
    """Yield the values in the column `text`, without missing values."""
    if TEXT_COLUMN not in table.columns:
        names = ", ".join(map(repr, table.columns)) or "none"
        raise UserError(f"{table.source}: there is no column {TEXT_COLUMN!r}; found: {names}")
    for number, values in table.read_rows([TEXT_COLUMN]):
        if values is None:
            raise UserError(f"{table.location(number)}: expected {len(table.columns)} fields as in the header")
        [text] = values
        if isinstance(text, str):
            yield text
        elif text is not None:
            raise UserError(f"{table.location(number)}: {TEXT_COLUMN} is {shorten(repr(text), 60)}; expected a string")


def _iterate_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file without the white space around them; refuse JSON lines under another suffix."""
    lines = (text.strip() for _, text in numbered_lines(path))
    first_line = next(filter(None, lines), "")
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(json.loads(first_line), dict):
            raise UserError(f"{path}: JSON objects in the lines of a text file; expected the suffix .jsonl")
    yield first_line
    yield from lines


_TEXT_SUFFIXES = ("", ".txt", ".text", ".md", ".raw", ".tokens")
"""Suffixes of plain text."""
_COMPRESSED_SUFFIXES = (".txt", ".jsonl", ".ndjson")
"""Suffixes of files that may be compressed, with a further suffix `.gz`."""
