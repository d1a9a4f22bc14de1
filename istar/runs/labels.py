"""Labels of tasks and models, which tell the runs of a table apart. They are printed and never parsed."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import PurePath
from typing import NamedTuple


def shorten_model_name(name: str) -> str:
    """Return a model's name in tables: the last part of a hub id or folder.

    For `<run>/model`, where a run saves its model, it is the name of the run's folder.
    """
    return _strip_model_folder(name).name or name


def _strip_model_folder(name: str) -> PurePath:
    path = PurePath(name)
    return path.parent if path.name == "model" and path.parent.name else path


class Inputs(NamedTuple):
    """The data and the model that a run starts from."""

    task: str
    data_dir: str | None
    model: str
    revision: str | None  # commit of a hub model
    fingerprint: str | None = None  # `RunKey.data`; None if it is not known
    model_identity: str | None = None  # `RunKey.model`; None if it is not known


def label_inputs(inputs: Iterable[Inputs]) -> dict[Inputs, tuple[str, str]]:
    """Return the labels of task and model in a table of runs, by the inputs of the runs.

    A label is the task's name, or the last part of the model's name. If one name stands for different data or models,
    as much of the path or the commit is added as makes the label unique: `clm (easy.txt)`, `outA/checkpoint-500` or
    `bert@86b5e0934494`. Equal data or models have one label, even under several paths, and a path has one label, even
    if its files have changed. Without fingerprints and identities, the paths decide.
    """
    runs = list(dict.fromkeys(inputs))
    num_commits = Counter(model for model, _ in {(run.model, run.revision) for run in runs if run.revision})
    names = [shorten_model_name(run.model) for run in runs]
    data_paths = [PurePath(run.data_dir or "") for run in runs]
    model_paths = [
        PurePath(f"{run.model}@{run.revision[:12]}")
        if run.revision and num_commits[run.model] > 1
        else _strip_model_folder(run.model)
        for run in runs
    ]
    data_ends = _shorten_paths([run.task for run in runs], data_paths, [run.fingerprint for run in runs])
    model_ends = _shorten_paths(names, model_paths, [run.model_identity for run in runs])
    return {
        run: (f"{run.task} ({data_end})" if data_end else run.task, model_end or name)
        for run, data_end, model_end, name in zip(runs, data_ends, model_ends, names, strict=True)
    }


def _shorten_paths(names: Sequence[str], paths: Sequence[PurePath], hashes: Sequence[str | None]) -> list[str]:
    """Return the shortest end of each path that distinguishes its files from other files with the same name.

    The end is empty if no other files have this name. Paths with equal hashes have the same files and the same end.
    """
    # For each name, the paths of the same files, and the hashes of these files.
    groups_by_name: dict[str, list[tuple[set[PurePath], set[str]]]] = {}
    for name, path, digest in zip(names, paths, hashes, strict=True):
        merged, others = ({path}, {digest} if digest else set()), []
        for group in groups_by_name.get(name, []):
            if group[0] & merged[0] or group[1] & merged[1]:
                merged = group[0] | merged[0], group[1] | merged[1]
            else:
                others.append(group)
        groups_by_name[name] = [*others, merged]
    end_by_path: dict[tuple[str, PurePath], str] = {}
    for name, groups in groups_by_name.items():
        reversed_parts = [min(same_paths).parts[::-1] for same_paths, _ in groups]
        length = next(length for length in count() if len({parts[:length] for parts in reversed_parts}) == len(groups))
        for (same_paths, _), parts in zip(groups, reversed_parts, strict=True):
            end = parts[:length][::-1]
            end_by_path |= {(name, path): str(PurePath(*end)) if end else "" for path in same_paths}
    return [end_by_path[key] for key in zip(names, paths, strict=True)]
