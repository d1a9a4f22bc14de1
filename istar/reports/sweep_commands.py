"""Runs that are missing, and commands of the sweeps for the paper's tables and figures."""

import shlex
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import pandas as pd

from istar.reports.configurations import by_model_and_task
from istar.reports.method_comparisons import Method
from istar.runs.names import TINY
from istar.runs.record import RunRecord

_MODEL_OPTIONS = {
    "albert/albert-base-v2": "albert",
    "google-bert/bert-base-cased": "bert",
    "distilbert/distilbert-base-cased": "distilbert",
    TINY: TINY,
}
"""`model.name` -> `model` option, for the models that have an option."""
SWEEP_BY_ARTEFACT = {
    "table1": "table1", "table2": "table2", **{name: name for name in ("figure3", "figure4", "figure5", "figure6")},
    "figure7": "zeta_ablation", "figure8": "layer_ablation", "curves_loss": "table1", "curves_metric": "table1",
}  # fmt: skip
"""Name of a table's or a figure's files -> sweep that makes its runs."""
ADVICE = "The command of their sweep skips the runs that have finished, and runs what is missing or has failed."


def build_sweep_commands(sweep: str, all_runs: pd.DataFrame, records: Mapping[str, RunRecord], root: str) -> list[str]:
    """Return a sweep's command for each model and `task.data_dir` of the runs, with all tasks that have both."""
    configs_by_paths: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for runs in by_model_and_task(all_runs):
        config = records[runs["folder"].iloc[0]].config
        configs_by_paths.setdefault((str(config["model"]["name"]), config["task"].get("data_dir")), []).append(config)
    commands = []
    for (name, data_dir), configs in configs_by_paths.items():
        model_config = configs[0]["model"]
        words = [f"+sweep={sweep}", f"task={','.join(dict.fromkeys(config['task']['name'] for config in configs))}"]
        words += [f"task.data_dir={data_dir}"] if data_dir else []
        words.append(f"model={_MODEL_OPTIONS.get(name, 'auto')}")
        words += [] if name in _MODEL_OPTIONS else [f"model.name={name}"]
        # The option of the tiny model, which always has random weights, says so.
        words += [] if model_config.get("pretrained", True) or name == TINY else ["model.pretrained=false"]
        words += [] if root == "runs" else [f"run.root={root}"]
        commands.append(f"istar train -m {shlex.join(words)}")
    return commands


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
