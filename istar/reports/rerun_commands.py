"""The commands that make what a report shows, and what it lacks."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from istar import config
from istar.reports.paper import MODELS


def sweep(name: str, task: str, model: str, *more: str) -> str:
    """`python train.py -m +sweep=<name> task=<task> <model> ...`.

    Args:
        name: of a file in conf/sweep/.
        task: as on the command line.
        model: as `model_option` gives it.
        more: further overrides.
    """
    return " ".join(["python train.py -m", f"+sweep={name}", shlex.quote(f"task={task}"), model, *more])


def model_option(name: str, pretrained: bool = True) -> str:
    """`model=bert` for the models that have an option of their own, else `model=auto model.name=<name>`.

    Args:
        name: `model.name` as the run's config has it.
        pretrained: `model.pretrained`.
    """
    if not pretrained and name == "tiny":
        return "model=tiny"
    if name in _OPTIONS:
        return f"model={_OPTIONS[name]}"
    return f"model=auto {shlex.quote(f'model.name={name}')}"


_OPTIONS = {
    f"{owner}/{name}": MODELS[name]
    for owner, name in (
        ("albert", "albert-base-v2"),
        ("google-bert", "bert-base-cased"),
        ("distilbert", "distilbert-base-cased"),
    )
}


def again(run: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """The command of runs that differ from one in nothing but the seed.

    Args:
        run: its config, as `result.json` has it.
        seeds: of those that are wanted.
    """
    reg = run["reg"]
    penalty = [f"reg={reg['name']}", *_unlike(_REGS.get(reg["name"], {}), reg, "reg")]
    known = [shlex.quote(f"task={run['task']['name']}"), model_option(**named(run["model"]))]
    return " ".join(["python train.py -m", *known, *penalty, *settings(run), f"seed={','.join(map(str, seeds))}"])


def settings(run: Mapping[str, Any]) -> list[str]:
    """A run's data, limits, batch, optimizer and trainer, where they are not what train.py takes by itself.

    The tiny model chooses options of other groups, too; they are put back first.
    """
    chosen = [] if named(run["model"])["pretrained"] else ["optim=adamw", "trainer=default"]
    unlike = [_unlike(known, run.get(group, {}), group) for group, known in _GROUPS.items()]
    return chosen + [override for group in unlike for override in group]


def where(root: str) -> list[str]:
    """The folder of the runs, if that is not the default."""
    return [] if root == "runs" else [shlex.quote(f"run.root={root}")]


def named(model: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `model_option` from the config's `model`."""
    return {"name": str(model["name"]), "pretrained": bool(model.get("pretrained", True))}


def _unlike(known: Mapping[str, Any], own: Mapping[str, Any], group: str) -> list[str]:
    """Overrides for the keys of a group that do not have the value that they have by themselves."""
    return [
        shlex.quote(f"{group}.{key}={_value(own[key])}")
        for key, default in known.items()
        if key in own and own[key] != default
    ]


def _value(value: Any) -> str:
    if isinstance(value, str) and not re.fullmatch(r"[\w./-]+", value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return value if isinstance(value, str) else json.dumps(value)


def _defaults(kind: Any, *but: str) -> dict[str, Any]:
    """Keys and values that a group of the config has by itself."""
    own = {}
    for field in fields(kind):
        key = str(field.metadata.get("key", field.name))
        if key not in but:
            own[key] = field.default_factory() if callable(field.default_factory) else field.default
    return own


_GROUPS = {
    "task": _defaults(config.TaskConfig, "name", "submission"),
    "model": _defaults(config.ModelConfig, "name", "pretrained"),
    "data": _defaults(config.DataConfig, "cache_dir", "num_workers"),
    "optim": _defaults(config.OptimConfig),
    "trainer": _defaults(
        config.TrainerConfig, "accelerator", "strategy", "progress_bar", "log_every_n_steps",
        "checkpoint_every_n_steps", "checkpoint_every_n_minutes", "nonfinite", "monitor_isotropy",
    ),
}  # fmt: skip
_REGS = {"istar": _defaults(config.IStarConfig, "name"), "cosreg": _defaults(config.CosRegConfig, "name")}
