"""Sources of a task's splits: a folder, a text corpus, the hub, or the generator of the demo tasks."""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from istar.errors import UserError, shorten
from istar.files.folders import describe_saved_splits, list_visible
from istar.files.parsing import is_missing
from istar.finetune.tasks import formats
from istar.finetune.tasks.document_stream import DocumentStream, make_hub_stream, open_file_stream
from istar.finetune.tasks.formats import RawSplit
from istar.models.hub import find_cached_commit, find_commit, find_hub_problem, load_dataset, open_dataset_stream
from istar.runs.tasks import Files, TaskSpec
from istar.texts import demo
from istar.texts.documents import (
    TEXT_COLUMN,
    cache_documents,
    compute_content_digest,
    is_corpus_file,
    iterate_texts,
    read_dataset_documents,
    read_documents,
)
from istar.texts.readers import make_table

Reader = Callable[[Path, TaskSpec, str], RawSplit]
Layout = Mapping[str, Reader]
"""Readers by file name pattern. In it, `{}` is the name of the split, and `dev` may replace `validation`."""

_SAVED_LAYOUT: Layout = {"{}/state.json": formats.read_saved_split}
_BENCHMARK_LAYOUTS: Mapping[Files, Layout] = {
    "": {},
    "tsv": {"{}.tsv": formats.read_glue},
    "trees": {"{}.txt": formats.read_trees},
    "squad": {"{}-v1.1.json": formats.read_squad},
    "text": {},
}
_TABLE_LAYOUT: Layout = {f"{{}}{suffix}": formats.read_table for suffix in (".csv", ".jsonl", ".json", ".parquet")}
_SPLIT_NAMES = {"train": "train", "training": "train"} | dict.fromkeys(
    ("validation", "valid", "val", "dev"), "validation"
)
"""Splits by the words that denote them in file and folder names."""


@dataclass(frozen=True)
class ExampleSource:
    """Source of the splits of a task: a folder, a text corpus, the hub or the demo generator."""

    read_split: Callable[[str], RawSplit | Dataset]  # a data set, for a corpus that may be larger than the memory
    has_split: Callable[[str], bool]
    commit: str | None = None  # commit of the data set on the hub; None for other sources, or if it is unknown
    open_stream: Callable[[], DocumentStream] | None = None  # opens the training split as a stream


def make_folder_source(spec: TaskSpec, data_dir: Path, splits: Sequence[str]) -> ExampleSource:
    """Return the source that reads splits from the files of a folder.

    It uses the subfolder and file layout that contain most of the requested splits. In a tie, it prefers those with
    more of the task's other splits, then `data_dir` itself, then saved data sets, then the benchmark's own files.
    Raises a `UserError` if the folder cannot be read or contains no file of the task.
    """
    option = f"task.data_dir={data_dir}"
    try:
        next(data_dir.iterdir(), None)
    except OSError as error:  # e.g. permission denied, or the name is too long
        reasons = {FileNotFoundError: "does not exist", NotADirectoryError: "is not a folder"}
        reason = reasons.get(type(error), f"cannot be read ({error.strerror})")
        raise UserError(f"{option} {reason}; name the folder that holds the files of task {spec.name}") from error
    layouts = [_SAVED_LAYOUT, _BENCHMARK_LAYOUTS[spec.files], _TABLE_LAYOUT]
    subfolders = [*spec.folders, spec.name]
    candidates = itertools.product([data_dir, *(data_dir / name for name in subfolders)], layouts)

    def count_splits(candidate: tuple[Path, Layout]) -> tuple[int, int]:
        available_splits = {split for split in {*splits, *spec.splits} if _find_file(spec, *candidate, split)}
        return len(available_splits & set(splits)), len(available_splits)

    folder, layout = best_candidate = max(candidates, key=count_splits)
    if not any(count_splits(best_candidate)):
        names = ", ".join(pattern.format(spec.train) for layout in layouts for pattern in layout)
        places = ", ".join(f"{name}/" for name in subfolders)
        places += describe_saved_splits(data_dir)
        raise UserError(f"{option} holds no data of task {spec.name}: no {names} in it or in {places}")

    def read_split(split: str) -> RawSplit:
        file_and_reader = _find_file(spec, folder, layout, split)
        if file_and_reader is None:
            names = " or ".join(name for pattern in layout for name in _list_file_names(spec, pattern, split))
            place = f"{folder}{describe_saved_splits(folder)}"
            raise UserError(f"{option}: split {split!r} of task {spec.name} is missing: no {names} in {place}")
        path, reader = file_and_reader
        return reader(path, spec, split)

    return ExampleSource(read_split, lambda split: _find_file(spec, folder, layout, split) is not None)


def make_text_source(path: Path, cache_dir: Path) -> ExampleSource:
    """Return the source of the splits of a text corpus in a file or folder, as `find_text_splits` finds them."""
    splits = find_text_splits(path)
    return ExampleSource(
        lambda split: read_texts(splits[split], cache_dir),
        lambda split: split in splits,
        open_stream=lambda: open_file_stream(splits["train"]),
    )


def find_text_splits(path: Path) -> dict[str, list[Path]]:
    """Return the files or folders of a text corpus by split: `train` and possibly `validation`.

    In a folder, files and subfolders belong to the splits that their names contain, such as `books-train.txt`,
    `train-00000-of-00002.parquet`, `dev.jsonl` or `validation/`, and others are ignored. If no name contains a split,
    the whole folder is training data, as is a single file or a data set that `Dataset.save_to_disk` wrote. Raises a
    `UserError` if the path does not exist or cannot be read, or if the folder contains only validation data.
    """
    try:
        if is_missing(path):
            raise UserError(
                f"task.data_dir={path} does not exist; name a text file, a folder of texts, or a saved data set"
            )
        children = [] if (path / "state.json").is_file() else list_visible(path)
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

    The documents are read once and then loaded from the cache, until the content of a file changes. Raises a
    `UserError` if a file cannot be read, the text is empty, or the cache cannot be written.
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
    """Return the rows of a data set with a `text` that is not blank. `source` names the data set in error messages."""
    is_not_blank = np.array([bool(text.strip()) for text in iterate_texts(dataset, source)])
    texts = dataset.select_columns([TEXT_COLUMN])
    return texts if is_not_blank.all() else texts.select(np.flatnonzero(is_not_blank))


def make_hub_source(spec: TaskSpec) -> ExampleSource:
    """Return the source that loads a task from the Hugging Face hub, or from the local cache without the hub.

    All splits are of the same commit, the latest of the data set's main branch. Raises a `UserError` if the hub cannot
    be reached and the task is not in the cache, or if loading fails.
    """
    assert spec.hub is not None, spec.name
    source_name = " ".join(filter(None, spec.hub))
    problem = find_hub_problem()
    name, default_configuration = spec.hub
    commit = None if problem else find_commit(name, None, "dataset")

    dataset = load_dataset(name, default_configuration, commit, problem)
    hub_location_by_split = {split.name: split.hub for split in spec.test if split.hub is not None}

    def read_split(split: str) -> RawSplit | Dataset:
        splits, name_on_hub = (
            (load_dataset(name, hub_location_by_split[split][0], commit, problem), hub_location_by_split[split][1])
            if split in hub_location_by_split
            else (dataset, split)
        )
        if name_on_hub not in splits:
            raise UserError(f"{source_name} has no split {name_on_hub!r}; found: {', '.join(splits)}")
        split_source = f"{source_name}, split {split}"
        if spec.is_language_modelling:
            return drop_blank_rows(splits[name_on_hub], split_source)
        return formats.select_columns(make_table(splits[name_on_hub], split_source), spec, split)

    return ExampleSource(
        read_split,
        lambda split: split in hub_location_by_split or split in dataset,
        commit or find_cached_commit(dataset.values()),
    )


def make_hub_stream_source(spec: TaskSpec, cache_dir: Path) -> ExampleSource:
    """Return the source that streams the training split of a text from the Hugging Face hub, which it must reach.

    The documents of the other splits are cached below `cache_dir`. All splits are of the same commit. Raises a
    `UserError` if the hub cannot be reached, or a split cannot be loaded.
    """
    assert spec.hub is not None, spec.name
    name, configuration = spec.hub
    source_name = " ".join(filter(None, spec.hub))
    train_rows, commit = open_dataset_stream(name, configuration, spec.train, None)

    def read_split(split: str) -> Dataset:
        rows, _ = open_dataset_stream(name, configuration, split, commit)
        digest = hashlib.sha256(f"{source_name} {commit} {split}".encode()).hexdigest()
        documents = read_dataset_documents(rows, f"{source_name}, split {split}")
        return cache_documents(documents, cache_dir / "texts", digest)

    return ExampleSource(
        read_split, lambda split: True, commit, lambda: make_hub_stream(train_rows, source_name, commit)
    )


def make_demo_source(spec: TaskSpec) -> ExampleSource:
    """Return the source that generates the splits of a demo task."""

    def read_split(split: str) -> RawSplit | Dataset:
        generated = demo.generate(spec.name, split)
        if spec.is_language_modelling:
            return generated
        return formats.select_columns(make_table(generated, f"generated {split} of {spec.name}"), spec, split)

    return ExampleSource(read_split, lambda split: True)


def _find_file(spec: TaskSpec, folder: Path, layout: Layout, split: str) -> tuple[Path, Reader] | None:
    for pattern, reader in layout.items():
        for name in _list_file_names(spec, pattern, split):
            if (folder / name).is_file():
                return folder / name, reader
    return None


def _list_file_names(spec: TaskSpec, pattern: str, split: str) -> list[str]:
    return [pattern.format(stem) for stem in spec.stems(split)]
