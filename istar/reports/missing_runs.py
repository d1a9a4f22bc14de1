"""Finds the runs that the paper's tables and figures still need, and builds the commands that start them."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from istar.figures.plot import BASE, Panel, Plot
from istar.pages.sheets import Entry, Sheet
from istar.reports import paper, rerun_commands
from istar.reports.cells import Cell, models, tasks
from istar.reports.paper_tables import tried_pairs
from istar.results import RunRecord


@dataclass(frozen=True)
class MissingRuns:
    """The runs of a model and a task that a table or figure (`artefact`) needs, and the command that starts them."""

    artefact: str
    model: str
    task: str
    missing: str
    command: str


SweepCommand = Callable[[str, str, str], str]
"""Takes the names of a sweep, a task and a model; returns the command of the sweep."""


def sweep_command_builder(frame: pd.DataFrame, records: Mapping[str, RunRecord], root: str) -> SweepCommand:
    """Return a function that builds sweep commands with the data, settings and folder of the existing runs."""

    def build(sweep: str, task: str, model: str) -> str:
        of_model, of_task = frame[frame["model"] == model], frame[frame["task"] == task]
        of_both = of_model[of_model["task"] == task]
        similar = next(runs for runs in (of_both, of_task, of_model) if len(runs))
        config = records[similar["folder"].iloc[0]].config
        if of_task.empty:
            # The paths and limits of another task's data do not apply.
            config = {**config, "task": {"name": task}}
        model_option = rerun_commands.model_option(records[of_model["folder"].iloc[0]].config["model"])
        overrides = [*rerun_commands.settings(config), *rerun_commands.root_override(root)]
        return rerun_commands.sweep(sweep, task, model_option, *overrides)

    return build


def for_table1(
    cells: Iterable[Cell], frame: pd.DataFrame, records: Mapping[str, RunRecord], sweep_command: SweepCommand, root: str
) -> list[MissingRuns]:
    """List methods without a run or with too few seeds, for every combination of a model and a task in the frame."""
    filled = {(cell.model, cell.task, cell.family): cell for cell in cells if cell.seeds}
    missing = []
    for model, task in itertools.product(models(frame), tasks(frame)):
        absent = [name for family, name in paper.FAMILIES.items() if (model, task, family) not in filled]
        if absent:
            text = "; ".join(f"{name}: no run" for name in absent)
            missing.append(MissingRuns("Table 1", model, task, text, sweep_command("table1", task, model)))
        for family, name in paper.FAMILIES.items():
            cell = filled.get((model, task, family))
            if cell is not None and (seeds := missing_seeds(cell.seeds)):
                repeated = rerun_commands.repeat(records[cell.runs["folder"].iloc[0]].config, seeds)
                command = " ".join([repeated, *rerun_commands.root_override(root)])
                text = f"{name}: {describe_missing_seeds(cell.seeds)}"
                missing.append(MissingRuns("Table 1", model, task, text, command))
    return missing


def for_table2(cells: Iterable[Cell], frame: pd.DataFrame, sweep_command: SweepCommand) -> list[MissingRuns]:
    """List the models and tasks of Table 2 for which pairs of the paper's lambda and zeta have no finished run."""
    grid = set(itertools.product(paper.WEIGHTS, paper.ZETAS))
    missing = []
    for cell in cells:
        if cell.family == "istar" and paper.tuned_penalty(cell.model, cell.task) is not None:
            untried = grid - tried_pairs(frame, cell)
            if untried:
                text = f"I-STAR: {len(untried)} of the {len(grid)} pairs of λ and ζ"
                command = sweep_command("table2", cell.task, cell.model)
                missing.append(MissingRuns("Table 2", cell.model, cell.task, text, command))
    return missing


def for_plot(
    plot: Plot, frame: pd.DataFrame, layer_counts: Mapping[str, int], sweep_command: SweepCommand
) -> list[MissingRuns]:
    """List the values that the paper's figure varies and that have no run, or fewer seeds than in the paper.

    `plot` is the figure drawn from the existing runs; `layer_counts` are numbers of transformer layers by model.
    """
    panels = {(panel.model, panel.task): panel for panel in plot.panels}
    missing = []
    for model in models(frame):
        for task in _expected_tasks(plot, frame, model):
            panel = panels.get((model, task))
            text = _describe_missing_values(plot, panel)
            if text:
                command = sweep_command(plot.sweep, task, model)
                command = " ".join([command, *_plot_overrides(plot, panel, model, task, layer_counts.get(model, 0))])
                missing.append(MissingRuns(artefact_name(plot), model, task, text, command))
    return missing


def for_geometry(
    plot: Plot, frame: pd.DataFrame, measured: Iterable[str], sweep_command: SweepCommand
) -> list[MissingRuns]:
    """List finished runs that Figure 4 or 5 could show if they had a `geometry.json`, as the folders `measured` do."""
    family = "cosreg" if plot.name == "figure4" else "istar"
    unmeasured = frame[frame["usable"] & frame["family"].isin(("base", family)) & ~frame["folder"].isin(list(measured))]
    panels = {(panel.model, panel.task) for panel in plot.panels}
    missing = []
    for (model, task), runs in unmeasured.groupby(["model", "task"]):
        if task == plot.task or (model, task) in panels:
            count = f"{len(runs)} finished run{'s' * (len(runs) > 1)}"
            text = f"{count} without geometry.json, which run.overwrite=true makes"
            command = f"{sweep_command(plot.sweep, str(task), str(model))} run.overwrite=true"
            missing.append(MissingRuns(artefact_name(plot), str(model), str(task), text, command))
    return missing


def for_paper(frame: pd.DataFrame) -> tuple[str, str] | None:
    """Return a sentence on the paper's pairs of model and task without a run, and their command; None without any."""
    pairs = set(itertools.product(paper.MODELS, paper.TASKS))
    missing = pairs - set(zip(frame["model"], frame["task"], strict=True))
    if not missing:
        return None
    missing_models = [option for model, option in paper.MODELS.items() if any(model == pair[0] for pair in missing)]
    missing_tasks = [task for task in paper.TASKS if any(task == pair[1] for pair in missing)]
    return (
        f"{len(missing)} of the paper's {len(pairs)} pairs of model and task have no run.",
        f"python train.py -m +sweep=table1 task={','.join(missing_tasks)} model={','.join(missing_models)}",
    )


def sheet(missing: Sequence[MissingRuns]) -> Sheet:
    """Return the table of missing runs, grouped by model."""
    groups: dict[str, list[list[Entry]]] = {}
    for runs in missing:
        row = [Entry(runs.artefact), Entry(runs.task), Entry(runs.missing), Entry(runs.command, code=True)]
        groups.setdefault(runs.model, []).append(row)
    return Sheet(
        "missing",
        "What is missing",
        "Runs that the tables and figures need, and the command that starts them.",
        ("artefact", "task", "missing", "command"),
        groups,
        pd.DataFrame(missing, columns=["artefact", "model", "task", "missing", "command"]),
        num_row_headers=2,
    )


def artefact_name(plot: Plot) -> str:
    """Return the figure's number in the paper, e.g. `Figure 3`."""
    return plot.title.split(":")[0]


def missing_seeds(seeds: Sequence[int], expected: int = len(paper.SEEDS)) -> list[int]:
    """Return the paper's seeds to run until there are `expected` different ones."""
    return [seed for seed in paper.SEEDS if seed not in seeds][: max(0, expected - len(set(seeds)))]


def describe_missing_seeds(seeds: Sequence[int], expected: int = len(paper.SEEDS)) -> str:
    """Return e.g. `seeds 4, 5`, `no run` if there is no seed at all, or an empty string if none is missing."""
    if not seeds:
        return "no run"
    absent = missing_seeds(seeds, expected)
    return f"seed{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}" if absent else ""


def _expected_tasks(plot: Plot, frame: pd.DataFrame, model: str) -> list[str]:
    """Return the tasks for which the figure should have a panel for this model.

    These are all tasks of the model if the paper's figure shows all tasks. Otherwise they are the tasks with a panel
    and the paper's task if any model has runs of it; if there are none, the task for which the model has most runs.
    """
    all_tasks, of_model = tasks(frame), frame[frame["model"] == model]
    if not plot.task:
        return tasks(of_model)
    with_panel = [panel.task for panel in plot.panels if panel.model == model]
    if plot.task in all_tasks:
        return [task for task in all_tasks if task in with_panel or task == plot.task]
    counts = of_model["task"].value_counts()
    return with_panel or [max(tasks(of_model), key=lambda task: counts[task])]


def _plot_overrides(plot: Plot, panel: Panel | None, model: str, task: str, layer_count: int) -> list[str]:
    """Return the overrides that depend on the model: its other lambdas, or for single layers Table 2's penalty."""
    if plot.name == "figure3":
        weights = _other_values(plot, panel)
        return [f"reg.lambda={','.join(f'{weight:g}' for weight in weights)}"] if weights else []
    if plot.symbol != "layer":
        return []
    tuned = paper.tuned_penalty(model, task)
    overrides = [f"reg.lambda={tuned.weight:g}", f"reg.zeta={tuned.zeta:g}"] if tuned is not None else []
    layers = "".join(f"[{layer}]," for layer in range(1, layer_count + 1))
    return overrides + ([f"'reg.layers={layers}all'"] if layers else [])


def _describe_missing_values(plot: Plot, panel: Panel | None) -> str:
    """Return e.g. `Base and λ = -1, 1: seeds 4, 5; λ = 3: no run`, or an empty string if nothing is missing."""
    if plot.symbol == "layer" and panel is None:
        return "no run with a single layer"
    seeds: Mapping[Any, tuple[int, ...]] = (panel.seeds if panel is not None else None) or {}
    if plot.symbol == "layer":
        expected: list[Any] = list(seeds)
    else:
        expected = [*([BASE] if plot.has_baseline else []), *(_other_values(plot, panel) or plot.values)]
    values_by_lack: dict[str, list[Any]] = {}
    for value in expected:
        if lack := describe_missing_seeds(seeds.get(value, ()), plot.seeds):
            values_by_lack.setdefault(lack, []).append(value)
    parts = []
    for lack, values in values_by_lack.items():
        names = [value for value in values if isinstance(value, str)]
        numbers = ", ".join(f"{value:g}" for value in values if not isinstance(value, str))
        if numbers:
            names.append(f"{plot.symbol}{' ' if plot.symbol == 'layer' else ' = '}{numbers}")
        parts.append(f"{' and '.join(names)}: {lack}")
    return "; ".join(parts)


def _other_values(plot: Plot, panel: Panel | None) -> list[float]:
    """Return the values of a panel that has none of the paper's, as for models trained with other lambdas."""
    values = set(panel.seeds or ()) - {BASE} if panel is not None else set()
    return [] if values & set(plot.values) else sorted(values)
