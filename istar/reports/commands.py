"""The commands that make what a report shows, and what it lacks."""

import shlex
from collections.abc import Mapping
from typing import Any

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


def where(run: Mapping[str, Any], root: str) -> list[str]:
    """What else a run's command needs: where the data lie and where runs go, if that is not the default."""
    folder = run.get("task.data_dir")
    parts = [shlex.quote(f"task.data_dir={folder}")] if isinstance(folder, str) else []
    return [*parts, *([] if root == "runs" else [shlex.quote(f"run.root={root}")])]
