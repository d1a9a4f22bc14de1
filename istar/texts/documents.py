"""The documents of a text corpus, read one at a time: text files, JSON lines, Parquet and saved data sets."""

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, IterableDataset

from istar.errors import UserError, shorten
from istar.files.folders import describe_saved_splits, list_visible
from istar.files.writing import atomic_write
from istar.texts.readers import READERS, Table, find_suffix, make_table, numbered_lines, open_saved_dataset
from istar.texts.tokenizing import chunks

BEGINNING_BYTES = 2**26
"""Number of bytes that the digest of a large text covers, because reading all of it may take hours."""
TEXT_COLUMN = "text"
"""Column, or key in JSON lines, that contains the documents."""

_BATCH_ROWS = 1_000
_DIGEST_BLOCK = 2**20


def read_documents(path: Path, column: str = TEXT_COLUMN) -> Iterator[str]:
    """Return an iterator over the documents of a text file, data file or folder, which need not fit into memory.

    - `.jsonl`, `.ndjson`: each line is a JSON object with a document under `text`;
    - `.json`: the same, or one array of such objects, which is read as a whole, as are `.csv` files;
    - `.csv`, `.tsv`: a header with the column `text`, and a document in each row; in `.tsv`, quotes are plain text;
    - `.parquet`: a column `text` with a document in each row;
    - a folder that `Dataset.save_to_disk` wrote: a column `text` with a document in each row;
    - another folder: its files with these suffixes, except `.json` and hidden ones, in alphabetical order;
    - `.txt`, `.text`, `.md`, `.raw`, `.tokens` or no suffix: each line is one document, for example a paragraph;
    - these suffixes followed by `.gz` or `.zst`, such as `.jsonl.gz`, except of Parquet: the same, compressed.

    `column` is the column, or the key of JSON objects, to read instead of `text`; plain text has none.

    The case of suffixes is ignored. In a folder, plain text has the suffix `.txt`.

    Documents that contain only whitespace are left out. In plain text, whitespace around a line is removed. Raises a
    `UserError` if the path cannot be read or is not one of these, or text is not UTF-8; the message names the file.
    """
    suffix = find_suffix(path)
    documents: Iterator[str]
    if (path / "state.json").is_file():
        documents = iterate_texts(open_saved_dataset(path), str(path), column)
    elif path.is_dir():
        documents = (document for file in list_corpus_files(path) for document in read_documents(file, column))
    elif suffix in READERS:
        documents = _iterate_column(READERS[suffix](path), column)
    elif suffix in _TEXT_SUFFIXES and column != TEXT_COLUMN:
        raise UserError(f"{path}: plain text has no column {column!r}; expected one of {', '.join(READERS)}")
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
    files = [file for file in list_visible(path) if is_corpus_file(file) and file.suffix.lower() != ".json"]
    if not files:
        expected = f".txt, .jsonl or .parquet files, or a saved data set{describe_saved_splits(path)}"
        raise UserError(f"{path} holds no text: expected {expected}")
    return [file for path in files for file in list_corpus_files(path)]


def is_corpus_file(path: Path) -> bool:
    """Return whether a file in a folder is part of a corpus by its suffix."""
    return find_suffix(path) in (".txt", *READERS)


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
            raise UserError(f"the documents cannot be cached: {shorten(error)}; set another data.cache_dir") from error
    return Dataset.from_file(str(path))


def compute_content_digest(path: Path, max_bytes: int = sys.maxsize) -> str:
    """Return a SHA-256 digest of the content of a file, or of a folder's files that contain documents and their names.

    Reading stops after `max_bytes`; what follows counts by the sizes of the files. Raises a `UserError` if a folder
    contains no documents.
    """
    digest = hashlib.sha256()
    for file in chain.from_iterable(map(_list_data_files, list_corpus_files(path))):
        if file.is_file():  # reading refuses a pipe or a link without a target
            name = file.relative_to(path) if file != path else file.suffix
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while content := stream.read(min(max_bytes, _DIGEST_BLOCK)):
                    digest.update(content)
                    max_bytes -= len(content)
    return digest.hexdigest()


def _list_data_files(path: Path) -> list[Path]:
    shards = open_saved_dataset(path).cache_files if path.is_dir() else []
    return [path / Path(shard["filename"]).name for shard in shards] or [path]


def iterate_texts(dataset: Dataset | IterableDataset, source: str, column: str = TEXT_COLUMN) -> Iterator[str]:
    """Yield the values of a column of a data set; `source` names the data set in error messages.

    Raises a `UserError` if the column is missing, or a value in it is not a string.
    """
    return _iterate_column(make_table(dataset, source), column)


def read_dataset_documents(dataset: Dataset | IterableDataset, source: str, column: str = TEXT_COLUMN) -> Iterator[str]:
    """Yield the documents of a data set of the hub, the values of a column that are not blank.

    Raises a `UserError` as `iterate_texts` does, and if a stream breaks off.
    """
    try:
        yield from (text for text in iterate_texts(dataset, source, column) if text and not text.isspace())
    except UserError:
        raise
    except Exception as error:  # a stream raises the errors of many libraries
        failure = shorten(f"{type(error).__name__}: {error}")
        raise UserError(f"{source}: reading broke off ({failure}); send the command again") from error


def _iterate_column(table: Table, column: str) -> Iterator[str]:
    if column not in table.columns:
        names = ", ".join(map(repr, table.columns)) or "none"
        hint = " (--text reads another column as <file>:<column>)" if table.columns else ""
        raise UserError(f"{table.source}: there is no column {column!r}; found: {names}{hint}")
    for number, values in table.read_rows([column]):
        if values is None:
            raise UserError(f"{table.location(number)}: expected {len(table.columns)} fields as in the header")
        [text] = values
        if isinstance(text, str):
            yield text
        elif text is not None:
            raise UserError(f"{table.location(number)}: {column} is {shorten(repr(text), 60)}; expected a string")


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
