"""Runs that are missing, and commands of the sweeps for the paper's tables and figures."""

import shlex
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import pandas as pd

from istar.records.config.groups import TINY
from istar.records.results import RunRecord
from istar.reports.configurations import list_models, list_tasks
from istar.reports.method_comparisons import Method

_MODEL_OPTIONS = {
    "albert/albert-base-v2": "albert",
    "google-bert/bert-base-cased": "bert",
    "distilbert/distilbert-base-cased": "distilbert",
}
"""`model.name` -> `model` option, for the models that have an option."""
SWEEP_BY_ARTEFACT = {
    "table1": "table1", "table2": "table2", **{name: name for name in ("figure3", "figure4", "figure5", "figure6")},
    "figure7": "zeta_ablation", "figure8": "layer_ablation", "curves_loss": "table1", "curves_metric": "table1",
}  # fmt: skip
"""Name of a table's or a figure's files -> sweep that makes its runs."""
ADVICE = "The command of their sweep skips the runs that have finished, and runs what is missing or has failed."


def build_sweep_commands(sweep: str, all_runs: pd.DataFrame, records: Mapping[str, RunRecord], root: str) -> list[str]:
    """Return a sweep's command for each model of the runs, with all tasks that it was trained on."""
    commands = []
    for model in list_models(all_runs):
        model_runs = all_runs[all_runs["model"] == model]
        model_override = build_model_override(records[model_runs["folder"].iloc[0]].config["model"])
        task_override = shlex.quote(f"task={','.join(list_tasks(model_runs))}")
        root_override = [] if root == "runs" else [shlex.quote(f"run.root={root}")]
        commands.append(" ".join(["istar train -m", f"+sweep={sweep}", task_override, model_override, *root_override]))
    return commands


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


def describe_missing_seeds(methods: Iterable[Method]) -> list[str]:
    """Return a sentence for each model and task with the seeds that only some of its methods have finished.

    `methods` are ordered by model and task.
    """
    sentences = []
    for (model, task), task_methods in groupby(methods, key=lambda method: (method.model, method.task)):
        seeds_by_method = {method.name: set(method.score_by_seed) for method in task_methods}
        all_seeds = set().union(*seeds_by_method.values())
        gaps = [
            f"{name} lacks {', '.join(map(str, sorted(all_seeds - seeds)))}"
            for name, seeds in seeds_by_method.items()
            if seeds != all_seeds
        ]
        sentences += [f"Seeds on {task} with {model}: {'; '.join(gaps)}."] if gaps else []
    return sentences
