"""What is missing, and the command that makes it."""

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
class Hole:
    """An artefact's missing runs for a model and a task."""

    artefact: str
    model: str
    task: str
    missing: str
    command: str


Command = Callable[[str, str, str], str]
"""Sweep, task and model to a command."""


def command_for(frame: pd.DataFrame, records: Mapping[str, RunRecord], root: str) -> Command:
    """How to run a sweep for a model and task as the runs found were run: same folder, model, data and settings."""

    def build(sweep: str, task: str, model: str) -> str:
        own = frame[frame["model"] == model]
        same = own[own["task"] == task]
        same = same if len(same) else frame[frame["task"] == task]
        found = records[(same if len(same) else own)["folder"].iloc[0]].config
        option = rerun_commands.model_option(**rerun_commands.named(records[own["folder"].iloc[0]].config["model"]))
        if same.empty:
            # Of another task: where its data lie and how many are used is its own affair.
            found = {**found, "task": {"name": task}}
        return rerun_commands.sweep(sweep, task, option, *rerun_commands.settings(found), *rerun_commands.where(root))

    return build


def of_table1(
    cells: Iterable[Cell],
    found_models: Sequence[str],
    found_tasks: Sequence[str],
    how: Command,
    records: Mapping[str, RunRecord],
    root: str,
) -> list[Hole]:
    """Methods without a run, and with fewer than five seeds, in the grid of found models and tasks."""
    known = {(cell.model, cell.task, cell.family): cell for cell in cells}
    holes = []
    for model, task in itertools.product(found_models, found_tasks):
        own = {family: known.get((model, task, family)) for family in paper.FAMILIES}
        absent = [paper.FAMILIES[family] for family, cell in own.items() if cell is None or cell.runs is None]
        if absent:
            told = "; ".join(f"{name}: no run" for name in absent)
            holes.append(Hole("Table 1", model, task, told, how("table1", task, model)))
        for family, cell in own.items():
            if cell is not None and cell.runs is not None and (seeds := wanted_seeds(cell.seeds)):
                command = rerun_commands.again(records[cell.runs["folder"].iloc[0]].config, seeds)
                command = " ".join([command, *rerun_commands.where(root)])
                holes.append(Hole("Table 1", model, task, lacking(paper.FAMILIES[family], cell.seeds), command))
    return holes


def of_table2(cells: Iterable[Cell], frame: pd.DataFrame, how: Command) -> list[Hole]:
    """Pairs of the paper's lambdas and zetas that nobody has tried, for the paper's models."""
    grid = set(itertools.product(paper.WEIGHTS, paper.ZETAS))
    holes = []
    for cell in cells:
        missing = len(grid - tried_pairs(frame, cell)) if cell.family == "istar" else 0
        if missing and paper.tuned(cell.model, cell.task) is not None:
            told = f"I-STAR: {missing} of the {len(grid)} pairs of λ and ζ"
            holes.append(Hole("Table 2", cell.model, cell.task, told, how("table2", cell.task, cell.model)))
    return holes


def of_plot(plot: Plot, frame: pd.DataFrame, layers: Mapping[str, int], how: Command) -> list[Hole]:
    """Values that the paper varies and nobody has run, and values with fewer seeds than the paper has.

    Args:
        layers: how many a model has.
    """
    panels = {(panel.model, panel.task): panel for panel in plot.panels}
    holes = []
    for model in models(frame):
        for task in _expected_tasks(plot, frame, model, [task for at, task in panels if at == model]):
            told = _plot_lacks(plot, panels.get((model, task)))
            if told:
                title = plot.title.split(":")[0]
                panel = panels.get((model, task))
                command = how(plot.sweep, task, model) + _more(plot, panel, model, task, layers.get(model))
                holes.append(Hole(title, model, task, "; ".join(told), command))
    return holes


def _more(plot: Plot, panel: Panel | None, model: str, task: str, layers: int | None) -> str:
    """What the sweep's file cannot know: own lambdas; for single layers how many, and Table 2's lambda and zeta."""
    if plot.name == "figure3":
        own_values = _own_values(plot, panel)
        return f" reg.lambda={','.join(f'{value:g}' for value in own_values)}" if own_values else ""
    if plot.symbol != "layer":
        return ""
    tuned = paper.tuned(model, task)
    own = f" reg.lambda={tuned.weight:g} reg.zeta={tuned.zeta:g}" if tuned is not None else ""
    numbers = ",".join(f"[{layer}]" for layer in range(1, (layers or 0) + 1))
    return own + (f" 'reg.layers={numbers},all'" if numbers else "")


def without_geometry(plot: Plot, frame: pd.DataFrame, measured: Iterable[str], how: Command) -> list[Hole]:
    """Finished runs that a figure could use, had they measured their geometry."""
    name = "cosreg" if plot.name == "figure4" else "istar"
    bare = frame[frame["usable"] & frame["family"].isin(("base", name)) & ~frame["folder"].isin(list(measured))]
    title = plot.title.split(":")[0]
    return [
        Hole(
            title,
            str(model),
            str(task),
            f"{len(group)} finished run{'s' * (len(group) > 1)} without geometry.json, which run.overwrite=true makes",
            f"{how(plot.sweep, str(task), str(model))} run.overwrite=true",
        )
        for (model, task), group in bare.groupby(["model", "task"])
        if not plot.task or task == plot.task or (model, task) in {(panel.model, panel.task) for panel in plot.panels}
    ]


def of_the_paper(frame: pd.DataFrame) -> tuple[str, str] | None:
    """The paper's models and tasks without a single run, in a sentence, and the command for them; None if none is."""
    names = paper.MODELS
    tried = set(zip(frame["model"], frame["task"], strict=True))
    missing = [(full, task) for full in names for task in paper.TASKS if (full, task) not in tried]
    if not missing:
        return None
    wanted_models = [names[full] for full in names if any(full == at for at, _ in missing)]
    wanted_tasks = [task for task in paper.TASKS if any(task == at for _, at in missing)]
    total = len(names) * len(paper.TASKS)
    told = f"{len(missing)} of the paper's {total} pairs of model and task have no run."
    return told, (f"python train.py -m +sweep=table1 task={','.join(wanted_tasks)} model={','.join(wanted_models)}")


def sheet(holes: Sequence[Hole]) -> Sheet:
    """A row per hole."""
    frame = pd.DataFrame([vars(hole) for hole in holes], columns=["artefact", "model", "task", "missing", "command"])
    groups: dict[str, list[list[Entry]]] = {}
    for hole in holes:
        entries = [Entry(hole.artefact), Entry(hole.task), Entry(hole.missing), Entry(hole.command, code=True)]
        groups.setdefault(hole.model, []).append(entries)
    return Sheet(
        "missing",
        "What is missing",
        "Runs that tables and figures still want, and the command that makes them.",
        ("artefact", "task", "missing", "command"),
        groups,
        frame,
        row_headers=2,
    )


def lacking(name: str, seeds: Sequence[int], wanted: int = len(paper.SEEDS)) -> str:
    """`Base: seeds 4, 5`, `Base: no run`, or nothing for as many seeds as are wanted."""
    absent = wanted_seeds(seeds, wanted)
    if not absent:
        return ""
    if not seeds:
        return f"{name}: no run"
    return f"{name}: seed{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"


def wanted_seeds(seeds: Sequence[int], wanted: int = len(paper.SEEDS)) -> list[int]:
    """Of the paper's, as many as are missing."""
    return [seed for seed in paper.SEEDS if seed not in seeds][: max(0, wanted - len(set(seeds)))]


def _expected_tasks(plot: Plot, frame: pd.DataFrame, model: str, drawn: Sequence[str]) -> list[str]:
    """Tasks in which something is drawn, the paper's if it has runs, else the one with the most runs."""
    found = tasks(frame)
    if not plot.task:
        return tasks(frame[frame["model"] == model])
    if plot.task in found:
        return [task for task in found if task in drawn or task == plot.task]
    counts = frame[frame["model"] == model]["task"].value_counts()
    return list(drawn) or [min(counts.index, key=lambda task: (-counts[task], found.index(task)))]


def _plot_lacks(plot: Plot, panel: Panel | None) -> list[str]:
    seeds: dict[Any, tuple[int, ...]] = dict(panel.seeds or {}) if panel is not None else {}
    if plot.symbol == "layer":
        return _told(seeds, plot) if panel is not None else ["no run with a single layer"]
    wanted: list[Any] = _own_values(plot, panel) or list(plot.values)
    if plot.with_base:
        wanted = [BASE, *wanted]
    return _told({value: seeds.get(value, ()) for value in wanted}, plot)


def _own_values(plot: Plot, panel: Panel | None) -> list[float]:
    """Values of a model that is trained with none of the paper's, and so lacks none of them."""
    own = {value for value in (panel.seeds or {}) if value != BASE} if panel is not None else set()
    return [] if own & set(plot.values) else sorted(own)


def _told(seeds: dict[Any, tuple[int, ...]], plot: Plot) -> list[str]:
    """Values that lack the same are told together."""
    by_lack: dict[str, list[str]] = {}
    for value, found in seeds.items():
        lack = lacking("", found, plot.seeds).removeprefix(": ")
        if lack:
            by_lack.setdefault(lack, []).append(value if isinstance(value, str) else f"{value:g}")
    told = []
    for lack, names in by_lack.items():
        words = [name for name in names if not _is_number(name)]
        numbers = [name for name in names if _is_number(name)]
        if numbers:
            equals = " " if plot.symbol == "layer" else " = "
            words.append(f"{plot.symbol}{equals}{', '.join(numbers)}")
        told.append(f"{' and '.join(words)}: {lack}")
    return told


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdigit()
