"""What makes runs the same: one run, one configuration, one method, one task and model, or no penalty.

This module alone decides these questions, from a resolved config as plain data with the keys of the command line. It
also makes the labels of methods, tasks and models, which are never parsed.
"""

import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import count
from pathlib import PurePath
from typing import Any, NamedTuple

from istar.runs.record import RECORD_FORMAT

TINY = "tiny"
"""Name of istar's tiny BERT, as in conf/model/tiny.yaml."""
BASE = "base"
"""Method of runs without a penalty."""
METHOD_NAMES = {
    BASE: "Base",
    "istar": "I-STAR",
    "cosreg": "CosReg",
    "vicreg": "VICReg",
    "decorrelation": "decorrelation",
    "gor": "GOR",
    "uniformity": "uniformity",
    "kurtosis": "kurtosis",
    "simctg": "SimCTG",
    "sigreg": "SIGReg",
    "spectrum": "spectrum control",
    "random_direction": "random direction",
    "weight_decay": "weight decay",
    "dropout": "dropout",
}
"""Names of methods in tables, without their settings, by `reg.name` or `BASE`."""
BASE_LABEL = METHOD_NAMES[BASE]
"""Name of training without a penalty in tables and figures."""


def identity_hash(config: Mapping[str, Any], data: str, model: str) -> str:
    """Return the hash that identifies a run: twelve hexadecimal digits.

    Runs with equal settings, data and weights have equal hashes. Settings marked `NEVER_MATTERS` in
    `istar.finetune.config` (paths, logging, hardware) are ignored. `data` is the fingerprint of the training and
    validation examples; `model` is the hub id and revision, or the fingerprint of a local folder.
    """
    # Imported here because istar.finetune.config imports OmegaConf, which `istar train --help` does not need.
    from istar.finetune.config.groups import Config

    identity = {
        "format": RECORD_FORMAT,
        "config": _select_identity_values(Config, config),
        "data": data,
        "model": model,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def configuration_hash(
    config: Mapping[str, Any], data: str = "", model: str | None = None, ignored_key: str = ""
) -> str:
    """Return a hash of everything that changes a run's outcome except the seed; see `identity_hash`.

    The settings of a penalty of weight 0 are ignored, as well as `ignored_key`: `group.key`, or `group` for a whole
    config group. `data` is the fingerprint of the examples, or empty to compare runs on any data. `model` is the
    `model_identity` of the run's record; if it is None, the model's name and revision in the config are used.
    """
    settings = {group: dict(values) for group, values in config.items() if isinstance(values, Mapping)}
    if model is None:
        model = f"{os.path.normpath(str(settings['model'].get('name')))}@{settings['model'].get('revision')}"
    if find_method(config) == BASE:
        settings["reg"] = {"name": "none"}
    group, _, key = ignored_key.partition(".")
    if key:
        settings[group].pop(key, None)
    else:
        settings.pop(group, None)
    return identity_hash(settings, data, model)


def identifies_run(key: str) -> bool:
    """Return whether a key is a config key, `group.key`, and part of a run's identity (see `identity_hash`)."""
    from istar.finetune.config.groups import Config

    group, _, name = key.partition(".")
    is_group = group in {f.name for f in fields(Config)}
    return is_group and name in _select_identity_values(Config, {group: {name: None}}).get(group, {})


def find_method(config: Mapping[str, Any]) -> str:
    """Return the method of a run: the name of its penalty, such as `istar`, or `BASE` without one or with weight 0."""
    reg = config["reg"]
    return BASE if reg["name"] == "none" or reg.get("lambda") == 0 else str(reg["name"])


def name_method(config: Mapping[str, Any]) -> str:
    """Return the name of a run's method in tables, without its settings: `Base`, `I-STAR`, `weight decay`."""
    method = find_method(config)
    return METHOD_NAMES.get(method, method)


def label_method(config: Mapping[str, Any]) -> str:
    """Return the label of a run's method as in the paper, e.g. `Base`, `I-STAR λ=-1 ζ=0.4` or `CosReg λ=1`.

    Settings beyond the paper's are added in words, such as `on output embeddings`.
    """
    if find_method(config) == BASE:
        return BASE_LABEL
    reg = config["reg"]
    parts = [METHOD_NAMES.get(reg["name"], reg["name"]), f"λ={reg['lambda']:g}"]
    if (estimator := reg.get("estimator", "shrinkage")) != "shrinkage":
        parts.append(estimator.replace("_", " "))
    elif "zeta" in reg:
        parts.append("ζ=auto" if reg["zeta"] == "auto" else f"ζ={reg['zeta']:g}")
    parts += ["padding counted"] if reg.get("include_padding") else []
    if reg.get("target_score") is not None:
        parts.append(f"target={reg['target_score']}")
        parts += [f"side={reg['side']}"] if reg.get("side", "both") != "both" else []
    if (target := reg.get("target", "hidden_states")) != "hidden_states":
        parts.append(f"on {target.replace('_', ' ')}")
    if (points := reg.get("points", "all")) != "all":
        parts.append(f"{points} tokens")
    return " ".join(parts)


def shorten_model_name(name: str) -> str:
    """Return a model's name in tables: the last part of a hub id or folder, or the parent's name of a folder `model`.

    A run saves its model in `<run>/model`.
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
    fingerprint: str | None = None  # of the training and validation examples; None if it is not known
    model_identity: str | None = None  # see `configuration_hash`; None if it is not known


def label_inputs(inputs: Iterable[Inputs]) -> dict[Inputs, tuple[str, str]]:
    """Return the labels of task and model in a table of runs, by the inputs of the runs.

    They are the name of the task and the last part of the model's name. If runs of one name have different data or
    models, the label has as much of the path or the commit as makes it unique: `clm (easy.txt)`, `outA/checkpoint-500`
    or `bert@86b5e0934494`. Equal data or models have one label, even under several paths. So has a path whose files
    have changed. Without fingerprints and identities, the paths decide.
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
    """Return the shortest end of each path that tells its files from all others of the same name.

    It is empty if the name has no other files. Paths with a hash in common have the same files, and the same end.
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


def _select_identity_values(config_class: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config without the fields marked `NEVER_MATTERS` in its dataclass."""
    excluded_names, class_by_name = _list_identity_fields(config_class)
    return {
        key: _select_identity_values(class_by_name[key], value) if key in class_by_name else value
        for key, value in values.items()
        if key not in excluded_names
    }


@functools.cache
def _list_identity_fields(config_class: Any) -> tuple[set[str], dict[str, Any]]:
    """Return the names of the fields marked `NEVER_MATTERS`, and the fields that are config groups, with classes."""
    from istar.finetune.config.fields import never_matters

    excluded_names = {f.name for f in fields(config_class) if never_matters(f)}
    return excluded_names, {f.name: f.type for f in fields(config_class) if is_dataclass(f.type)}
