"""Finds the runs that the paper's tables and figures still need, and builds the commands that start them."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from istar.figures.plot import BASE, Panel, Plot
from istar.pages.sheets import Entry, Sheet
from istar.reports import paper, rerun_commands
from istar.reports.cells import Cell, list_models, list_tasks
from istar.reports.paper_tables import collect_tried_pairs
from istar.results import RunRecord


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
    """Return a function that builds sweep commands with the data, settings and folder of the existing runs."""

    def build_command(sweep: str, task: str, model: str) -> str:
        """Return the command of a sweep with the settings of the most similar run: same task and model if possible."""
        model_runs, task_runs = all_runs[all_runs["model"] == model], all_runs[all_runs["task"] == task]
        model_and_task_runs = model_runs[model_runs["task"] == task]
        similar_runs = next(runs for runs in (model_and_task_runs, task_runs, model_runs) if len(runs))
        config = records[similar_runs["folder"].iloc[0]].config
        if task_runs.empty:
            # The paths and limits of another task's data do not apply.
            config = {**config, "task": {"name": task}}
        model_override = rerun_commands.build_model_override(records[model_runs["folder"].iloc[0]].config["model"])
        overrides = [*rerun_commands.build_setting_overrides(config), *rerun_commands.build_root_override(root)]
        return rerun_commands.build_sweep_command(sweep, task, model_override, *overrides)

    return build_command


def find_missing_table1_runs(
    cells: Iterable[Cell],
    all_runs: pd.DataFrame,
    records: Mapping[str, RunRecord],
    build_sweep_command: SweepCommandBuilder,
    root: str,
) -> list[MissingRuns]:
    """Return the missing runs of Table 1 for every model and task: methods without a run, or with too few seeds."""
    cell_by_key = {(cell.model, cell.task, cell.family): cell for cell in cells if cell.seeds}
    missing = []
    for model, task in itertools.product(list_models(all_runs), list_tasks(all_runs)):
        absent_methods = [
            method for family, method in paper.FAMILIES.items() if (model, task, family) not in cell_by_key
        ]
        if absent_methods:
            description = "; ".join(f"{method}: no run" for method in absent_methods)
            missing.append(MissingRuns("Table 1", model, task, description, build_sweep_command("table1", task, model)))
        for family, method in paper.FAMILIES.items():
            cell = cell_by_key.get((model, task, family))
            if cell is not None and (seeds := find_missing_seeds(cell.seeds)):
                config = records[cell.runs["folder"].iloc[0]].config
                repeat_command = rerun_commands.build_repeat_command(config, seeds)
                command = " ".join([repeat_command, *rerun_commands.build_root_override(root)])
                description = f"{method}: {describe_missing_seeds(cell.seeds)}"
                missing.append(MissingRuns("Table 1", model, task, description, command))
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
    plot: Plot, all_runs: pd.DataFrame, num_layers_by_model: Mapping[str, int], build_sweep_command: SweepCommandBuilder
) -> list[MissingRuns]:
    """Return the missing runs of a figure of the paper: values without a run, or with fewer seeds than expected.

    Args:
        plot: the figure drawn from the existing runs.
        all_runs: all runs of the report.
        num_layers_by_model: number of transformer layers of each model.
        build_sweep_command: returns the command that starts a sweep.
    """
    panel_by_model_and_task = {(panel.model, panel.task): panel for panel in plot.panels}
    missing = []
    for model in list_models(all_runs):
        for task in _list_expected_tasks(plot, all_runs, model):
            panel = panel_by_model_and_task.get((model, task))
            description = _describe_missing_values(plot, panel)
            if description:
                overrides = _build_plot_overrides(plot, panel, model, task, num_layers_by_model.get(model, 0))
                command = " ".join([build_sweep_command(plot.sweep, task, model), *overrides])
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


def find_missing_seeds(seeds: Sequence[int], num_expected: int = len(paper.SEEDS)) -> list[int]:
    """Return the paper's seeds that have to be run until there are `num_expected` different ones."""
    return [seed for seed in paper.SEEDS if seed not in seeds][: max(0, num_expected - len(set(seeds)))]


def describe_missing_seeds(seeds: Sequence[int], num_expected: int = len(paper.SEEDS)) -> str:
    """Return e.g. `seeds 4, 5`, `no run` if there is no seed at all, or an empty string if none is missing."""
    if not seeds:
        return "no run"
    missing_seeds = find_missing_seeds(seeds, num_expected)
    return f"seed{'s' * (len(missing_seeds) > 1)} {', '.join(map(str, missing_seeds))}" if missing_seeds else ""


def _list_expected_tasks(plot: Plot, all_runs: pd.DataFrame, model: str) -> list[str]:
    """Return the tasks for which the figure should have a panel for this model.

    These are all tasks of the model if the paper's figure shows all tasks. Otherwise they are the tasks with a panel
    and, if any model has runs of it, the task of the paper's figure. If there are none, it is the task for which the
    model has the most runs.
    """
    all_tasks, model_runs = list_tasks(all_runs), all_runs[all_runs["model"] == model]
    if not plot.task:
        return list_tasks(model_runs)
    tasks_with_panel = [panel.task for panel in plot.panels if panel.model == model]
    if plot.task in all_tasks:
        return [task for task in all_tasks if task in tasks_with_panel or task == plot.task]
    num_runs_by_task = model_runs["task"].value_counts()
    return tasks_with_panel or [max(list_tasks(model_runs), key=lambda task: num_runs_by_task[task])]


def _build_plot_overrides(plot: Plot, panel: Panel | None, model: str, task: str, num_layers: int) -> list[str]:
    """Return the overrides of a figure's sweep that depend on the model.

    For Figure 3, these are the lambdas of a model that was not trained with any of the paper's lambdas. For the figure
    of single layers, they are the layers, and lambda and zeta of the paper's Table 2.
    """
    if plot.name == "figure3":
        lambdas = _list_other_values(plot, panel)
        return [f"reg.lambda={','.join(f'{lambda_:g}' for lambda_ in lambdas)}"] if lambdas else []
    if plot.symbol != "layer":
        return []
    tuned_penalty = paper.look_up_tuned_penalty(model, task)
    overrides = (
        [f"reg.lambda={tuned_penalty.weight:g}", f"reg.zeta={tuned_penalty.zeta:g}"]
        if tuned_penalty is not None
        else []
    )
    layer_options = "".join(f"[{layer}]," for layer in range(1, num_layers + 1))
    return overrides + ([f"'reg.layers={layer_options}all'"] if layer_options else [])


def _describe_missing_values(plot: Plot, panel: Panel | None) -> str:
    """Return which values of a figure's panel lack which seeds, or an empty string if nothing is missing.

    For example: `Base and λ = -1, 1: seeds 4, 5; λ = 3: no run`.
    """
    if plot.symbol == "layer" and panel is None:
        return "no run with a single layer"
    seeds_by_value: Mapping[Any, tuple[int, ...]] = (panel.seeds if panel is not None else None) or {}
    if plot.symbol == "layer":
        expected_values: list[Any] = list(seeds_by_value)
    else:
        expected_values = [*([BASE] if plot.has_baseline else []), *(_list_other_values(plot, panel) or plot.values)]
    values_by_missing_text: dict[str, list[Any]] = {}
    for value in expected_values:
        if missing_text := describe_missing_seeds(seeds_by_value.get(value, ()), plot.seeds):
            values_by_missing_text.setdefault(missing_text, []).append(value)
    descriptions = []
    for missing_text, values in values_by_missing_text.items():
        names = [value for value in values if isinstance(value, str)]
        numbers = ", ".join(f"{value:g}" for value in values if not isinstance(value, str))
        if numbers:
            names.append(f"{plot.symbol}{' ' if plot.symbol == 'layer' else ' = '}{numbers}")
        descriptions.append(f"{' and '.join(names)}: {missing_text}")
    return "; ".join(descriptions)


def _list_other_values(plot: Plot, panel: Panel | None) -> list[float]:
    """Return the values of a panel, sorted, if none of them is a value of the paper; otherwise an empty list.

    Small models are trained with other lambdas than the paper's.
    """
    panel_values = set(panel.seeds or ()) - {BASE} if panel is not None else set()
    return [] if panel_values & set(plot.values) else sorted(panel_values)
