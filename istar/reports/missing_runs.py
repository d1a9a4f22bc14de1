"""Finds the runs that the paper's tables and figures still need, and builds the commands that start them."""

import itertools
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from istar.drawing.page_tables import Entry, Sheet
from istar.drawing.plot import BASE, Panel, Plot
from istar.records.config.groups import TINY
from istar.records.results import RunRecord
from istar.reports import paper
from istar.reports.configurations import Cell, list_models, list_tasks
from istar.reports.paper_tables import collect_tried_pairs

_MODEL_OPTIONS = {
    "albert/albert-base-v2": "albert",
    "google-bert/bert-base-cased": "bert",
    "distilbert/distilbert-base-cased": "distilbert",
}
"""`model.name` -> `model` option, for the models that have an option."""


@dataclass(frozen=True)
class MissingRuns:
    """Missing runs of a model and a task, and the command that starts them; also a row of the table of missing runs."""

    artefact: str  # table or figure that needs the runs, e.g. `Figure 3`
    model: str
    task: str
    missing: str  # what is missing, in words
    command: str


SweepCommandBuilder = Callable[[str, str, str], str]
"""Takes the names of a sweep, a task and a model; returns the command that starts the sweep."""


def make_sweep_command_builder(
    all_runs: pd.DataFrame, records: Mapping[str, RunRecord], root: str
) -> SweepCommandBuilder:
    """Return a function that builds the command of a sweep, which skips runs that have finished."""
    folder_by_model = all_runs.drop_duplicates("model").set_index("model")["folder"]

    def build_command(sweep: str, task: str, model: str) -> str:
        model_override = build_model_override(records[folder_by_model[model]].config["model"])
        root_override = [] if root == "runs" else [shlex.quote(f"run.root={root}")]
        sweep_overrides = [f"+sweep={sweep}", shlex.quote(f"task={task}")]
        return " ".join(["python train.py -m", *sweep_overrides, model_override, *root_override])

    return build_command


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


def find_missing_table1_runs(
    cells: Iterable[Cell], all_runs: pd.DataFrame, build_sweep_command: SweepCommandBuilder
) -> list[MissingRuns]:
    """Return the missing runs of Table 1 for every model and task: methods without a run, or with too few seeds."""
    seeds_by_key = {(cell.model, cell.task, cell.family): cell.seeds for cell in cells}
    missing = []
    for model, task in itertools.product(list_models(all_runs), list_tasks(all_runs)):
        gaps = {
            method: describe_missing_seeds(seeds_by_key.get((model, task, family), ()))
            for family, method in paper.FAMILIES.items()
        }
        if description := "; ".join(f"{method}: {gap}" for method, gap in gaps.items() if gap):
            missing.append(MissingRuns("Table 1", model, task, description, build_sweep_command("table1", task, model)))
    return missing


def find_missing_table2_runs(
    cells: Iterable[Cell], all_runs: pd.DataFrame, build_sweep_command: SweepCommandBuilder
) -> list[MissingRuns]:
    """Return the missing runs of Table 2 for every model and task: pairs of lambda and zeta without a finished run."""
    paper_pairs = set(itertools.product(paper.LAMBDAS, paper.ZETAS))
    missing = []
    for cell in cells:
        if cell.family == "istar" and paper.look_up_tuned_penalty(cell.model, cell.task) is not None:
            untried_pairs = paper_pairs - collect_tried_pairs(all_runs, cell)
            if untried_pairs:
                description = f"I-STAR: {len(untried_pairs)} of the {len(paper_pairs)} pairs of λ and ζ"
                command = build_sweep_command("table2", cell.task, cell.model)
                missing.append(MissingRuns("Table 2", cell.model, cell.task, description, command))
    return missing


def find_missing_plot_runs(
    plot: Plot, all_runs: pd.DataFrame, build_sweep_command: SweepCommandBuilder
) -> list[MissingRuns]:
    """Return the missing runs of a figure of the paper: values without a run, or with fewer seeds than expected."""
    panel_by_model_and_task = {(panel.model, panel.task): panel for panel in plot.panels}
    missing = []
    for model in list_models(all_runs):
        for task in _list_expected_tasks(plot, all_runs, model):
            if description := _describe_missing_values(plot, panel_by_model_and_task.get((model, task))):
                command = build_sweep_command(plot.sweep, task, model)
                missing.append(MissingRuns(get_artefact_name(plot), model, task, description, command))
    return missing


def find_runs_without_geometry(
    plot: Plot, all_runs: pd.DataFrame, measured_folders: Iterable[str], build_sweep_command: SweepCommandBuilder
) -> list[MissingRuns]:
    """Return the finished runs that the paper's Figure 4 or 5 cannot show because they have no `geometry.json`.

    `measured_folders` are the folders of the runs that have one.
    """
    family = "cosreg" if plot.name == "figure4" else "istar"
    shown_runs = all_runs[all_runs["usable"] & all_runs["family"].isin(("base", family))]
    unmeasured_runs = shown_runs[~shown_runs["folder"].isin(list(measured_folders))]
    pairs_with_panel = {(panel.model, panel.task) for panel in plot.panels}
    missing = []
    for (model, task), runs in unmeasured_runs.groupby(["model", "task"]):
        if task == plot.task or (model, task) in pairs_with_panel:
            count_text = f"{len(runs)} finished run{'s' * (len(runs) > 1)}"
            description = f"{count_text} without geometry.json, which run.overwrite=true makes"
            command = f"{build_sweep_command(plot.sweep, str(task), str(model))} run.overwrite=true"
            missing.append(MissingRuns(get_artefact_name(plot), str(model), str(task), description, command))
    return missing


def describe_missing_paper_pairs(all_runs: pd.DataFrame) -> tuple[str, str] | None:
    """Return a sentence on the paper's pairs of model and task without a run, and the command that starts their runs.

    Return None if every pair has a run.
    """
    paper_pairs = set(itertools.product(paper.MODELS, paper.TASKS))
    missing_pairs = paper_pairs - set(zip(all_runs["model"], all_runs["task"], strict=True))
    if not missing_pairs:
        return None
    missing_models, missing_tasks = {model for model, _ in missing_pairs}, {task for _, task in missing_pairs}
    model_options = [option for model, option in paper.MODELS.items() if model in missing_models]
    ordered_tasks = [task for task in paper.TASKS if task in missing_tasks]
    return (
        f"{len(missing_pairs)} of the paper's {len(paper_pairs)} pairs of model and task have no run.",
        f"python train.py -m +sweep=table1 task={','.join(ordered_tasks)} model={','.join(model_options)}",
    )


def build_missing_runs_sheet(missing: Sequence[MissingRuns]) -> Sheet:
    """Return the table of missing runs, grouped by model."""
    rows_by_model: dict[str, list[list[Entry]]] = {}
    for missing_runs in missing:
        texts = [missing_runs.artefact, missing_runs.task, missing_runs.missing]
        row = [*map(Entry, texts), Entry(missing_runs.command, code=True)]
        rows_by_model.setdefault(missing_runs.model, []).append(row)
    return Sheet(
        name="missing",
        title="What is missing",
        caption="Runs that the tables and figures need, and the command that starts them.",
        header=("artefact", "task", "missing", "command"),
        rows_by_group=rows_by_model,
        frame=pd.DataFrame(missing, columns=["artefact", "model", "task", "missing", "command"]),
        num_row_headers=2,
    )


def get_artefact_name(plot: Plot) -> str:
    """Return the figure's number in the paper, e.g. `Figure 3`."""
    return plot.title.split(":")[0]


def describe_missing_seeds(seeds: Sequence[int], num_expected: int = len(paper.SEEDS)) -> str:
    """Return e.g. `seeds 4, 5`, `no run` if there is no seed at all, or an empty string if none is missing."""
    if not seeds:
        return "no run"
    num_missing = max(0, num_expected - len(set(seeds)))
    missing_seeds = [str(seed) for seed in paper.SEEDS if seed not in seeds][:num_missing]
    return f"seed{'s' * (len(missing_seeds) > 1)} {', '.join(missing_seeds)}" if missing_seeds else ""


def _list_expected_tasks(plot: Plot, all_runs: pd.DataFrame, model: str) -> list[str]:
    """Return the tasks with a panel and the task of the paper's figure; all tasks of the model if that shows all."""
    if not plot.task:
        return list_tasks(all_runs[all_runs["model"] == model])
    expected_tasks = {plot.task, *(panel.task for panel in plot.panels if panel.model == model)}
    return [task for task in list_tasks(all_runs) if task in expected_tasks]


def _describe_missing_values(plot: Plot, panel: Panel | None) -> str:
    """Return which values of a figure's panel lack which seeds, or an empty string if nothing is missing.

    For example: `Base: seeds 4, 5; λ = 3: no run`. Models that were trained with none of the paper's values, such as
    small ones, miss none.
    """
    seeds_by_value: Mapping[Any, tuple[int, ...]] = (panel.seeds if panel is not None else None) or {}
    if plot.symbol == "layer":
        return "" if seeds_by_value else "no run with a single layer"
    if panel is not None and not set(plot.values) & set(seeds_by_value):
        return ""
    gaps = {value: describe_missing_seeds(seeds_by_value.get(value, ()), plot.seeds) for value in plot.values}
    baseline_gap = describe_missing_seeds(seeds_by_value.get(BASE, ()), plot.seeds) if plot.has_baseline else ""
    parts = [f"{BASE}: {baseline_gap}"] if baseline_gap else []
    for gap in dict.fromkeys(filter(None, gaps.values())):
        values = ", ".join(f"{value:g}" for value, value_gap in gaps.items() if value_gap == gap)
        parts.append(f"{plot.symbol} = {values}: {gap}")
    return "; ".join(parts)
