"""Where a task's splits come from: a folder, the hub, a generator. Each gives a function that reads one."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import datasets

from istar.errors import UserError, shorten
from istar.tasks import formats, readers
from istar.tasks.hub import hub_obstacle
from istar.tasks.readers import Rows
from istar.tasks.specs import Files, TaskSpec

Reader = Callable[[Path, TaskSpec, str], Rows]
Layout = Mapping[str, Reader]
"""File name of a split, with `{}` for the split's name -> what reads the file."""

_SAVED: Layout = {"{}/state.json": readers.read_saved}
_TSV: Layout = {"{}.tsv": readers.read_tsv}
_TREES: Layout = {"{}.txt": formats.read_trees}
_SQUAD: Layout = {"{}-v1.1.json": formats.read_squad}
_TABLES: Layout = {
    "{}.csv": readers.read_csv,
    "{}.jsonl": readers.read_json,
    "{}.json": readers.read_json,
    "{}.parquet": readers.read_parquet,
}

_FILES: Mapping[Files, Layout] = {"": {}, "tsv": _TSV, "trees": _TREES, "squad": _SQUAD}


def _layouts(spec: TaskSpec) -> tuple[list[Layout], list[str]]:
    """A task's layouts in the order of preference, and the subfolders in which its files may stand."""
    return [_SAVED, _FILES[spec.files], _TABLES], [*spec.folders, spec.name]


def _find(place: Path, layout: Layout, split: str) -> tuple[Path, Reader] | None:
    """A split's file and what reads it."""
    paths = ((place / name, read) for pattern, read in layout.items() for name in _names(pattern, split))
    return next(((path, read) for path, read in paths if path.is_file()), None)


def _names(pattern: str, split: str) -> list[str]:
    # the benchmarks call `dev` what the hub calls `validation`
    return [pattern.format(stem) for stem in dict.fromkeys((split, split.replace("validation", "dev")))]


def folder(spec: TaskSpec, data_dir: Path, splits: Sequence[str]) -> Callable[[str], Rows]:
    """Choose the place and the layout that hold most of the wanted splits, the preferred ones first."""
    option = f"task.data_dir={data_dir}"
    if what := _no_folder(data_dir):
        raise UserError(f"{option} {what}; name the folder that holds the files of task {spec.name}")
    layouts, subfolders = _layouts(spec)
    places = [data_dir, *(data_dir / name for name in subfolders)]
    known = {spec.train, *splits, *(split.name for split in (*spec.validation, *spec.test))}

    def held(choice: tuple[Path, Layout]) -> list[int]:
        return [sum(_find(*choice, split) is not None for split in some) for some in (splits, known)]

    place, layout = best = max(itertools.product(places, layouts), key=held)
    if not any(held(best)):
        names = ", ".join(pattern.format(spec.train) for layout in layouts for pattern in layout)
        there = ", ".join(f"{name}/" for name in subfolders)
        raise UserError(f"{option} holds no data of task {spec.name}: no {names} in it or in {there}")

    def read(split: str) -> Rows:
        found = _find(place, layout, split)
        if found is None:
            names = " or ".join(name for pattern in layout for name in _names(pattern, split))
            raise UserError(f"{option}: split {split!r} of task {spec.name} is missing: no {names} in {place}")
        path, reader = found
        return reader(path, spec, split)

    return read


def _no_folder(path: Path) -> str:
    """Why a path is no folder to read from; empty if it is one."""
    try:
        next(path.iterdir(), None)
    except FileNotFoundError:
        return "does not exist"
    except NotADirectoryError:
        return "is not a folder"
    except OSError as error:  # forbidden, too long a name
        return f"cannot be read ({error.strerror})"
    return ""


def hub(spec: TaskSpec) -> Callable[[str], Rows]:
    """Load from the Hugging Face hub; where it cannot be reached, from the cache of earlier loads."""
    assert spec.hub is not None, spec.name
    source, local = " ".join(filter(None, spec.hub)), "name a local copy with task.data_dir=<folder>"
    obstacle = hub_obstacle()
    try:
        with _offline() if obstacle else contextlib.nullcontext():
            found = datasets.load_dataset(*spec.hub)
    except Exception as error:  # the libraries below raise a dozen kinds for a dozen reasons
        reason = f"the hub did not deliver it ({shorten(f'{type(error).__name__}: {error}')})"
        reason = f"not in the local cache, and {obstacle}" if obstacle else reason
        raise UserError(f"{source}: {reason}; {local}") from error

    def read(split: str) -> Rows:
        if split not in found:
            raise UserError(f"{source} has no split {split!r}; found: {', '.join(found)}")
        return readers.from_dataset(found[split], spec, split, f"{source}, split {split}")

    return read


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let `datasets` look into its cache only, at once instead of after its retries."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def generator(spec: TaskSpec) -> Callable[[str], Rows]:
    """Invent the examples."""
    from istar.tasks import demo

    return lambda split: readers.from_dataset(
        demo.generate(spec.name, split), spec, split, f"generated {split} of {spec.name}"
    )
