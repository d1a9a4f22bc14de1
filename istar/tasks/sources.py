"""Sources of a task's splits: a folder, a text corpus, the hub, or the generator of the demo tasks."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
from datasets import Dataset

from istar.errors import UserError, shorten
from istar.tasks import demo, formats, readers
from istar.tasks.hub import COMMIT_PATTERN, LOCAL_COPY_HINTS, explain_refusal, find_commit, find_hub_problem
from istar.tasks.readers import RawSplit
from istar.tasks.specs import Files, TaskSpec
from istar.tasks.texts import read_texts, text_splits, without_blank_rows

Reader = Callable[[Path, TaskSpec, str], RawSplit]
Layout = Mapping[str, Reader]
"""Readers by file name pattern, in which `{}` stands for the name of the split; `dev` may stand for `validation`."""

_SAVED: Layout = {"{}/state.json": readers.read_saved}
_BENCHMARK_FILES: Mapping[Files, Layout] = {
    "": {},
    "tsv": {"{}.tsv": readers.read_tsv},
    "trees": {"{}.txt": formats.read_trees},
    "squad": {"{}-v1.1.json": formats.read_squad},
    "text": {},
}
_TABLES: Layout = {
    "{}.csv": readers.read_csv,
    "{}.jsonl": readers.read_json,
    "{}.json": readers.read_json,
    "{}.parquet": readers.read_parquet,
}


@dataclass(frozen=True)
class Source:
    """Where the splits of a task come from."""

    # Reads a split, given its name. Documents come as a data set, which may be larger than the memory.
    read: Callable[[str], RawSplit | Dataset]
    has: Callable[[str], bool]  # whether there is such a split
    commit: str | None = None  # commit of the data set on the hub; None for other sources, or if it is not known


def from_folder(spec: TaskSpec, data_dir: Path, splits: Sequence[str]) -> Source:
    """Select the subfolder and the file layout that contain most of the requested splits.

    If several contain equally many of them, those with more of the task's other splits are preferred, then
    `data_dir` itself, then saved data sets, then the benchmark's own files.

    Raises:
        UserError: if the folder cannot be read or contains no file of the task.
    """
    option = f"task.data_dir={data_dir}"
    try:
        next(data_dir.iterdir(), None)
    except OSError as error:  # e.g. permission denied, or the name is too long
        reasons = {FileNotFoundError: "does not exist", NotADirectoryError: "is not a folder"}
        reason = reasons.get(type(error), f"cannot be read ({error.strerror})")
        raise UserError(f"{option} {reason}; name the folder that holds the files of task {spec.name}") from error
    layouts = [_SAVED, _BENCHMARK_FILES[spec.files], _TABLES]
    subfolders = [*spec.folders, spec.name]
    candidates = itertools.product([data_dir, *(data_dir / name for name in subfolders)], layouts)

    def split_counts(candidate: tuple[Path, Layout]) -> tuple[int, int]:
        available = {split for split in {*splits, *spec.splits} if _find_file(spec, *candidate, split)}
        return len(available & set(splits)), len(available)

    folder, layout = best = max(candidates, key=split_counts)
    if not any(split_counts(best)):
        names = ", ".join(pattern.format(spec.train) for layout in layouts for pattern in layout)
        places = ", ".join(f"{name}/" for name in subfolders)
        raise UserError(f"{option} holds no data of task {spec.name}: no {names} in it or in {places}")

    def read(split: str) -> RawSplit:
        match = _find_file(spec, folder, layout, split)
        if match is None:
            names = " or ".join(name for pattern in layout for name in _file_names(spec, pattern, split))
            raise UserError(f"{option}: split {split!r} of task {spec.name} is missing: no {names} in {folder}")
        path, reader = match
        return reader(path, spec, split)

    return Source(read, lambda split: _find_file(spec, folder, layout, split) is not None)


def from_text(path: Path, cache_dir: Path) -> Source:
    """Return the splits of a text corpus in a file or folder, see `istar.tasks.texts.text_splits`."""
    splits = text_splits(path)
    return Source(lambda split: read_texts(splits[split], cache_dir), lambda split: split in splits)


def from_hub(spec: TaskSpec) -> Source:
    """Load the task from the Hugging Face hub, or from the local cache if the hub cannot be reached.

    All splits are of one commit, which is the latest one of the data set's main branch.

    Raises:
        UserError: if the hub cannot be reached and the task is not in the cache, or if loading fails.
    """
    assert spec.hub is not None, spec.name
    source = " ".join(filter(None, spec.hub))
    problem = find_hub_problem()
    commit = None if problem else find_commit(spec.hub[0], None, "dataset")
    name, configuration = spec.hub

    def load(configuration: str | None) -> datasets.DatasetDict:
        try:
            with _offline() if problem else contextlib.nullcontext():
                return datasets.load_dataset(name, configuration, revision=commit)
        except Exception as error:  # `datasets` and the libraries below it raise many types
            answer = f"the hub did not deliver it ({shorten(f'{type(error).__name__}: {error}')})"
            reason = explain_refusal(error, name, "dataset") or answer
            reason = f"not in the local cache, and {problem}" if problem else reason
            source = " ".join(filter(None, (name, configuration)))
            raise UserError(f"{source}: {reason}; {LOCAL_COPY_HINTS['dataset']}") from error

    dataset = load(configuration)
    apart = {split.name: split.hub for split in spec.test if split.hub is not None}

    def read(split: str) -> RawSplit | Dataset:
        splits, name_on_hub = (load(apart[split][0]), apart[split][1]) if split in apart else (dataset, split)
        if name_on_hub not in splits:
            raise UserError(f"{source} has no split {name_on_hub!r}; found: {', '.join(splits)}")
        place = f"{source}, split {split}"
        if spec.is_language_modelling:
            return without_blank_rows(splits[name_on_hub], place)
        return readers.from_dataset(splits[name_on_hub], spec, split, place)

    return Source(read, lambda split: split in apart or split in dataset, commit or _cached_commit(dataset))


def _cached_commit(dataset: datasets.DatasetDict) -> str | None:
    """Return the commit of a data set from the cache of `datasets`, or None if it was not made from a commit.

    Without the hub, `datasets` takes the latest data set that it has prepared, in a folder with the name of its commit.
    """
    folders = {Path(file["filename"]).parent.name for split in dataset.values() for file in split.cache_files}
    commit = folders.pop() if len(folders) == 1 else ""
    return commit if COMMIT_PATTERN.fullmatch(commit) else None


def from_generator(spec: TaskSpec) -> Source:
    """Generate the examples of a demo task."""

    def read(split: str) -> RawSplit | Dataset:
        generated = demo.generate(spec.name, split)
        if spec.is_language_modelling:
            return generated
        return readers.from_dataset(generated, spec, split, f"generated {split} of {spec.name}")

    return Source(read, lambda split: True)


def _find_file(spec: TaskSpec, folder: Path, layout: Layout, split: str) -> tuple[Path, Reader] | None:
    """Return the first existing file of a split and its reader, or None."""
    for pattern, reader in layout.items():
        for name in _file_names(spec, pattern, split):
            if (folder / name).is_file():
                return folder / name, reader
    return None


def _file_names(spec: TaskSpec, pattern: str, split: str) -> list[str]:
    """Return the possible file names of a split."""
    return [pattern.format(stem) for stem in spec.stems(split)]


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Restrict `datasets` to its cache, which avoids its connection retries."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
