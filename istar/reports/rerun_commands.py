"""Builds the `train.py` commands that start or repeat the runs of a report."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from istar import config
from istar.config.groups import TINY, identity_values
from istar.config.penalties import PENALTIES
from istar.config.schema import to_dict

_MODEL_OPTIONS = {
    "albert/albert-base-v2": "albert",
    "google-bert/bert-base-cased": "bert",
    "distilbert/distilbert-base-cased": "distilbert",
}
"""`model.name` -> `model` option, for the models that have an option."""


def _get_defaults(config_class: Any, *excluded_keys: str) -> dict[str, Any]:
    """Return the default values of a config group by key, without the excluded keys."""
    return {key: value for key, value in to_dict(config_class()).items() if key not in excluded_keys}


_GROUP_DEFAULTS = {
    "task": _get_defaults(config.TaskConfig, "name", "submission"),
    "model": _get_defaults(config.ModelConfig, "name", "pretrained"),
    "data": identity_values(config.DataConfig, _get_defaults(config.DataConfig)),
    "optim": _get_defaults(config.OptimConfig),
    "trainer": identity_values(config.TrainerConfig, _get_defaults(config.TrainerConfig)),
}
"""Default values of the settings that a command repeats. Settings of hardware, cache and logging are left out."""
_TINY_DEFAULTS: dict[str, dict[str, Any]] = {
    "optim": {"lr": 1e-3},
    "trainer": {"max_epochs": 10, "accumulate_grad_batches": 1},
}
"""Values that model=tiny sets instead, as in conf/model/tiny.yaml."""
_REG_DEFAULTS = {name: _get_defaults(penalty, "name") for name, penalty in PENALTIES.items()}
"""Default values of the settings of each penalty, by the name of the penalty."""


def build_sweep_command(sweep: str, task: str, model_override: str, *overrides: str) -> str:
    """Return the command that starts a sweep: `python train.py -m +sweep=<sweep> task=<task> <model> <overrides>`.

    `sweep` is the name of a file in sweep/, and `model_override` is what `build_model_override` returns.
    """
    return " ".join(["python train.py -m", f"+sweep={sweep}", shlex.quote(f"task={task}"), model_override, *overrides])


def build_repeat_command(run_config: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """Return the command that repeats the run of this config with other seeds and otherwise the same settings."""
    reg = run_config["reg"]
    overrides = [
        shlex.quote(f"task={run_config['task']['name']}"),
        build_model_override(run_config["model"]),
        f"reg={reg['name']}",
        *_build_changed_overrides("reg", reg, _REG_DEFAULTS.get(reg["name"], {})),
        *build_setting_overrides(run_config),
        f"seed={','.join(map(str, seeds))}",
    ]
    return " ".join(["python train.py -m", *overrides])


def build_model_override(model_config: Mapping[str, Any]) -> str:
    """Return `model=<option>` if the model has an option on the command line, else `model=auto model.name=<name>`.

    A model with random weights also gets `model.pretrained=false`, unless it is the tiny model, which always has random
    weights.
    """
    name = str(model_config["name"])
    if name == TINY:
        return f"model={TINY}"
    option = f"model={_MODEL_OPTIONS.get(name, 'auto')}"
    name_override = [] if name in _MODEL_OPTIONS else [shlex.quote(f"model.name={name}")]
    weights_override = [] if model_config.get("pretrained", True) else ["model.pretrained=false"]
    return " ".join([option, *name_override, *weights_override])


def build_setting_overrides(run_config: Mapping[str, Any]) -> list[str]:
    """Return overrides for a run's task, model, data, optimizer and trainer settings that are not the defaults."""
    is_tiny = run_config["model"]["name"] == TINY
    overrides: list[str] = []
    for group, defaults in _GROUP_DEFAULTS.items():
        tiny_defaults = _TINY_DEFAULTS.get(group, {}) if is_tiny else {}
        overrides += _build_changed_overrides(group, run_config.get(group, {}), {**defaults, **tiny_defaults})
    # Arguments that are passed on to lightning.Trainer have no default.
    trainer = run_config.get("trainer", {})
    lightning_keys = trainer.keys() - {field.name for field in fields(config.TrainerConfig)}
    return overrides + _build_changed_overrides("trainer", trainer, dict.fromkeys(sorted(lightning_keys)))


def build_root_override(root: str) -> list[str]:
    """Return the override of `run.root`, or an empty list for the default folder `runs`."""
    return [] if root == "runs" else [shlex.quote(f"run.root={root}")]


def _build_changed_overrides(group: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return an override `group.key=value` for each setting of a config group that differs from its default."""
    return [
        shlex.quote(f"{group}.{key}={_format_hydra_value(settings[key])}")
        for key, default in defaults.items()
        if key in settings and settings[key] != default
    ]


def _format_hydra_value(value: Any) -> str:
    """Return a value in Hydra's override grammar; strings with special characters, or like numbers, are quoted."""
    if not isinstance(value, str):
        return json.dumps(value)
    # The hash of a commit may look like a number.
    if re.fullmatch(r"[\w./-]+", value) and not re.fullmatch(r"[\d.e-]+", value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
