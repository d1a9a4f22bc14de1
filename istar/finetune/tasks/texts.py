"""The splits of a text corpus: which files of a folder are training data and which are validation data."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from datasets import Dataset

from istar.errors import UserError, shorten
from istar.inputs.documents import (
    TEXT_COLUMN,
    cache_documents,
    compute_content_digest,
    is_corpus_file,
    iterate_texts,
    read_documents,
)

_SPLIT_NAMES = {"train": "train", "training": "train"} | dict.fromkeys(
    ("validation", "valid", "val", "dev"), "validation"
)
"""Splits by the words in the name of a file or folder that denote them."""


def find_text_splits(path: Path) -> dict[str, list[Path]]:
    """Return the files or folders of a text corpus by split: `train` and possibly `validation`.

    In a folder, files and subfolders belong to the splits that their names contain, such as `books-train.txt`,
    `train-00000-of-00002.parquet`, `dev.jsonl` or `validation/`, and others are ignored. If no name contains a split,
    the whole folder is training data, as is a single file or a data set that `Dataset.save_to_disk` wrote.

    Raises:
        UserError: if the path does not exist or cannot be read, or if the folder contains only validation data.
    """
    try:
        if not path.exists():
            raise UserError(
                f"task.data_dir={path} does not exist; name a text file, a folder of texts, or a saved data set"
            )
        children = sorted(path.iterdir()) if path.is_dir() and not (path / "state.json").is_file() else []
    except OSError as error:
        raise UserError(f"task.data_dir={path} cannot be read: {shorten(error)}") from error
    splits: dict[str, list[Path]] = {}
    for child in children:
        name_words = re.findall(r"[a-z]+", (child.name if child.is_dir() else child.stem).lower())
        for split in {_SPLIT_NAMES[word] for word in name_words if word in _SPLIT_NAMES}:
            if child.is_dir() or is_corpus_file(child):
                splits.setdefault(split, []).append(child)
    if not splits:
        return {"train": [path]}
    if "train" not in splits:
        names = ", ".join(child.name for child in splits["validation"])
        raise UserError(f"task.data_dir={path} has validation data ({names}), but no training data such as train.txt")
    return splits


def read_texts(paths: list[Path], cache_dir: Path) -> Dataset:
    """Return the documents of files or folders as a memory-mapped data set with the column `text`.

    The documents are read once and then loaded from the cache, until the content of a file changes.

    Raises:
        UserError: if a file cannot be read, there is no document, or the cache cannot be written.
    """
    digest = "-".join(compute_content_digest(path)[:32] for path in paths)

    def iterate_documents() -> Iterator[str]:
        for path in paths:
            yield from read_documents(path)

    dataset = cache_documents(iterate_documents(), cache_dir / "texts", digest)
    if not len(dataset):
        names = ", ".join(map(str, paths))
        raise UserError(f"{names}: the text is empty; expected a document or a paragraph in each line")
    return dataset


def drop_blank_rows(dataset: Dataset, source: str) -> Dataset:
    """Return the rows of a data set whose column `text` is not blank. `source` names the data set in error messages."""
    is_not_blank = np.array([bool(text.strip()) for text in iterate_texts(dataset, source)])
    texts = dataset.select_columns([TEXT_COLUMN])
    return texts if is_not_blank.all() else texts.select(np.flatnonzero(is_not_blank))
