"""Commands of the sweeps for the paper's tables and figures; a sweep skips finished runs."""

import itertools
import shlex
from collections.abc import Mapping
from typing import Any

import pandas as pd

from istar.records.config.groups import TINY
from istar.records.results import RunRecord
from istar.reports import paper
from istar.reports.configurations import Cell, list_models, list_tasks

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
ADVICE = (
    "The same command skips the runs that have finished and runs what is missing or has failed; --dry-run lists both "
    "and stops there. Add the settings in which your runs differ from the sweep, such as task.data_dir."
)


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


def describe_missing_runs(cells: list[Cell], all_runs: pd.DataFrame) -> tuple[str, str]:
    """Return how much of Table 1 is missing, and the command for the paper's pairs of model and task without a run.

    The command is empty if every pair has a run.
    """
    num_incomplete = sum(len(set(cell.seeds)) < len(paper.SEEDS) for cell in cells)
    sentence = f"Of the {len(cells)} cells of Table 1, {num_incomplete} have fewer than {len(paper.SEEDS)} seeds."
    paper_pairs = set(itertools.product(paper.MODELS, paper.PAPER_TASKS))
    missing_pairs = paper_pairs - set(zip(all_runs["model"], all_runs["task"], strict=True))
    if not missing_pairs:
        return sentence, ""
    missing_models, missing_tasks = {model for model, _ in missing_pairs}, {task for _, task in missing_pairs}
    model_options = ",".join(option for model, option in paper.MODELS.items() if model in missing_models)
    tasks = ",".join(task for task in paper.PAPER_TASKS if task in missing_tasks)
    sentence += f" {len(missing_pairs)} of the paper's {len(paper_pairs)} pairs of model and task have no run."
    return sentence, f"istar train -m +sweep=table1 task={tasks} model={model_options}"
