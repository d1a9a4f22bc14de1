"""`istar report`: writes an HTML page with the paper's tables and figures for the runs in a folder."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from istar.errors import UserError
from istar.figures.plot import Plot
from istar.pages import folder
from istar.pages.folder import PageKind
from istar.pages.page import Page, Picture, Section
from istar.pages.sheets import Sheet
from istar.reports import (
    cells,
    class_table,
    geometry_file,
    method_comparisons,
    method_figure,
    method_table,
    missing_runs,
    paper_tables,
    plan_departures,
    plan_file,
    rank_figure,
    run_figures,
    stability,
    training_figures,
)
from istar.reports.cells import Cell
from istar.reports.geometry_file import Geometry
from istar.reports.missing_runs import MissingRuns, SweepCommand
from istar.reports.plan_file import Plan
from istar.reports.rank_figure import RankedMethods
from istar.reports.run_frame import Runs, load_runs
from istar.statistics import conclusions

KIND = PageKind("report", "istar report")
_MAX_ROWS = 300  # rows that the page shows of an ungrouped table; the files have all rows


@dataclass(frozen=True)
class WrittenReport:
    """The HTML page of a report, the number of its runs, and the number of rows in its table of missing runs."""

    page: Path
    runs: int
    missing_rows: int


def write(root: Path, out: Path, console: Console | None = None, plan: Path | None = None) -> WrittenReport:
    """Write the report of the runs below `root`, the folder that `run.root` names.

    `out` is a new or empty folder, or an earlier report, which is replaced (on an error, it stays as it was). The
    console shows the progress if it is a terminal. With the `plan.yaml` of `istar plan`, a section names the departures
    from it.

    Raises:
        UserError: if `plan` is no plan, if there are no runs, if `out` holds files that are no report, or if it cannot
            be written.
    """
    folder.check_replaceable(out, KIND)
    planned = None if plan is None else plan_file.read(plan)
    columns = TextColumn("{task.description}"), BarColumn()
    is_hidden = console is None or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task("reading runs", total=None)
        runs = _exclude_invalid(load_runs(root, keep_records=True), out)
        if runs.frame.empty:
            count = len(runs.read_errors)
            unreadable = f"; {count} folder{'s' * (count > 1)} could not be read as one" if count else ""
            raise UserError(f"{root} holds no runs{unreadable}; train.py leaves them below run.root")
        progress.update(task, description="computing tables and figures", advance=1)
        contents = _compute(runs, root)
        if plan is not None and planned is not None:
            contents = _add_departures(contents, plan, planned)
        # After the figures, there is one more step, the writing.
        progress.update(task, total=2 + len(contents.plots))
        pictures: dict[str, list[Picture]] = {}
        for plot in contents.plots:
            progress.update(task, description=f"drawing {plot.name}", advance=1)
            pictures[plot.name] = folder.render_pictures(plot)
        progress.update(task, description="writing", advance=1)
        folder.replace_folder(out, folder.page_files(_page(contents, pictures), contents.sheets), KIND)
    return WrittenReport(out / folder.INDEX, len(runs.frame), len(contents.missing))


def _exclude_invalid(runs: Runs, out: Path) -> Runs:
    """Move runs with an invalid `result.json` to the read errors; drop the error about an earlier report in `out`."""
    errors = {path: error for path, record in runs.records.items() if (error := cells.content_error(record))}
    read_errors = {path: error for path, error in runs.read_errors.items() if Path(path).resolve() != out.resolve()}
    valid = runs.frame[~runs.frame["folder"].isin(list(errors))].reset_index(drop=True)
    return Runs(valid, {**read_errors, **errors}, runs.records)


@dataclass(frozen=True)
class _Contents:
    """Everything that the report shows, as numbers."""

    root: Path
    frame: pd.DataFrame
    unreadable: int
    cells: list[Cell]
    sheets: dict[str, Sheet]
    plots: list[Plot]
    missing: list[MissingRuns]
    sweep_command: SweepCommand
    conclusions: str  # how many comparisons with Base end in which way
    ranks: list[RankedMethods]
    plan: Path | None = None  # file of the plan with which the runs are compared
    departures: str = ""  # sentence on the departures from the plan


def _add_departures(contents: _Contents, path: Path, plan: Plan) -> _Contents:
    """Add the table of departures from the plan in the file `path`, and a sentence on them."""
    departures = plan_departures.departures(plan, contents.frame)
    sheets = {**contents.sheets, "departures": plan_departures.sheet(departures)}
    return replace(contents, sheets=sheets, plan=path, departures=plan_departures.sentence(plan, departures))


def _compute(runs: Runs, root: Path) -> _Contents:
    """Compute all tables and plots of the report."""
    frame, records = cells.prepare(runs), runs.records
    geometries, geometry_errors = _read_geometries(frame)
    selected = cells.select_cells(frame)
    compared = method_comparisons.compare_methods(frame)
    ranks = rank_figure.rank_methods(compared)
    plots = [
        run_figures.minibatch_stability(stability.stability()),
        run_figures.isotropy_and_performance(frame, geometries),
        run_figures.mean_activations(frame, geometries),
        run_figures.intrinsic_dimensions(frame, geometries),
        run_figures.layer_isotropy(frame, records, geometries),
        run_figures.zeta_ablation(frame),
        run_figures.layer_ablation(frame, records),
        *run_figures.curves(selected, records),
        *training_figures.geometry_during_training(frame),
        method_figure.plot(compared),
        rank_figure.plot(ranks),
    ]
    sweep_command = missing_runs.sweep_command_builder(frame, records, str(root))
    missing = missing_runs.for_table1(selected, frame, records, sweep_command, str(root))
    missing += missing_runs.for_table2(selected, frame, sweep_command)
    models = frame[frame["usable"]].drop_duplicates("model").set_index("model")["folder"]
    layer_counts = {str(model): run_figures.layer_count(records[path]) for model, path in models.items()}
    for plot in plots:
        if plot.sweep:
            missing += missing_runs.for_plot(plot, frame, layer_counts, sweep_command)
        if plot.name in ("figure4", "figure5"):
            missing += missing_runs.for_geometry(plot, frame, geometries, sweep_command)
    shrinkage_seconds = {path: record.timing.get("shrinkage") or () for path, record in records.items()}
    sheets = (
        paper_tables.table1(selected),
        paper_tables.table2(selected, frame),
        method_table.conclusions(compared),
        method_table.methods(compared),
        class_table.class_isotropy(frame, records),
        rank_figure.sheet(ranks),
        paper_tables.costs(frame, shrinkage_seconds),
        missing_runs.sheet(missing),
        paper_tables.left_out(frame, {**runs.read_errors, **geometry_errors}, str(root)),
    )
    tables = {sheet.name: sheet for sheet in sheets}
    rows = [comparison.row for comparison in compared.comparisons]
    summary = conclusions.summary(rows, method_comparisons.ALPHA)
    return _Contents(
        root, frame, len(runs.read_errors), selected, tables, plots, missing, sweep_command, summary, ranks
    )


def _read_geometries(frame: pd.DataFrame) -> tuple[dict[str, Geometry], dict[str, str]]:
    """Return the geometries of the usable runs, and the error messages of broken files, both by folder."""
    geometries, read_errors = {}, {}
    for path in frame[frame["usable"]]["folder"]:
        try:
            if (geometry := geometry_file.read(Path(path))) is not None:
                geometries[path] = geometry
        except UserError as error:
            read_errors[path] = str(error)
    return geometries, read_errors


def _page(contents: _Contents, pictures: Mapping[str, list[Picture]]) -> Page:
    """Put the page together from its tables and pictures."""
    counts = {"runs": len(contents.frame), **contents.frame["status"].value_counts()}
    counts |= {"collapsed": contents.frame["collapsed"].eq(True).sum(), "folders not read": contents.unreadable}
    summary = [(str(count), str(label)) for label, count in counts.items() if count]
    summary.append((str(len(contents.missing)), "rows of missing runs"))
    head = "Runs below", str(contents.root), f"read by istar {version('istar')}"
    command = f"istar report {shlex.quote(str(contents.root))} --out report"
    command += "" if contents.plan is None else f" --plan {shlex.quote(str(contents.plan))}"
    plots = {plot.name: plot for plot in contents.plots}
    ranks, methods = plots.pop("ranks"), plots.pop("all_methods")
    sections = [
        replace(_table_section(contents, "conclusions"), paragraphs=[contents.conclusions]),
        Section("reading", "How to read this", _READING),
        *([] if contents.plan is None else [_departures_section(contents)]),
        _table_section(contents, "table1", sweep="table1"),
        _table_section(contents, "table2", sweep="table2"),
        _methods_section(contents, methods, pictures[methods.name]),
        _table_section(contents, "class_isotropy"),
        _over_tasks_section(contents, ranks, pictures[ranks.name]),
        *(_plot_section(contents, plot, pictures[plot.name]) for plot in plots.values()),
        _table_section(contents, "cost"),
        _missing_section(contents),
        _table_section(contents, "left_out"),
        Section("reproduce", "This page", ("This command writes the page and its files:",), commands=[command]),
    ]
    return Page("Isotropy and fine-tuning: report", head, KIND.generator, summary, sections)


_READING = (
    "All metrics are measured on validation sets (for GLUE the development sets, as in the paper) and given in "
    "percent, at the epoch with the best headline metric of each run, on the same set or, with "
    "task.validation_fraction, on a held-out part of the training data. This page uses no results of a test set.",
    "Each task, model and method is represented by one configuration: all settings, data and model of a run, without "
    "its seed. Among the configurations with finished runs, it is the one with the most seeds; among equals, the one "
    "with the highest mean of the headline metric on the set that chose the epoch. I-STAR counts with its penalty on "
    "all layers, CosReg with its penalty on the last layer and λ > 0; λ = 0 is Base. If several configurations of a "
    "method were tried and nothing was held out, the same numbers select the best one and are then reported, so its "
    "mean is biased upwards by chance; the remark “best of 9” gives the number of configurations tried.",
    "Tests are paired: the same seeds with and without the penalty. In Table 1, p is two-sided, from the paired t-test "
    "(scipy.stats.ttest_rel) and from the exact permutation test that flips the signs of the differences; with five "
    "pairs the latter cannot fall below 0.0625, with three not below 0.25. Neither is corrected for the selection of "
    "the configuration or for the number of rows. If p is above 0.05, the choice of seeds may explain the difference.",
    "What may be concluded is said by the sentences of the first section and by nothing else. They use the permutation "
    "test with p-values corrected by Holm's method for all comparisons of this page, and require that the method and "
    "Base have the same seeds and the same budget: as many trials (configurations tried, with their epochs and "
    "examples) for each. A row of the table of all methods is one method; each λ is a method of its own.",
    "Means include collapsed runs (constant predictions), which the remarks count. Failed, unfinished and pruned runs "
    "do not count and are listed at the end. A mean is bold only among the methods with the most seeds, and never if "
    "all its runs have collapsed. The runs of a line in a figure differ only in the seed and in what its axis or "
    "legend varies; they are those of the configuration in Table 1 or, if only one value was tried with it, of the "
    "group with the most runs, then the best mean.",
)
_EMPTY_TEXTS = {
    "left_out": "Every run counts.",
    "missing": "Nothing: every cell has its five seeds.",
    "cost": "No run has finished.",
    "class_isotropy": "No run has finished on a classification task with a version of istar that measures this.",
    "conclusions": "No method has a finished run to compare with Base.",
}


def _table_section(contents: _Contents, name: str, sweep: str = "") -> Section:
    sheet = contents.sheets[name]
    empty = "" if sheet.rows else _EMPTY_TEXTS.get(name, "Nothing to show yet.")
    commands = _commands(contents, sweep, [(cell.model, cell.task) for cell in contents.cells])
    is_wide = name in ("table1", "conclusions", "methods", "missing")
    return Section(name, sheet.title, sheet=_truncate(sheet), empty_note=empty, commands=commands, is_wide=is_wide)


def _methods_section(contents: _Contents, plot: Plot, pictures: list[Picture]) -> Section:
    """Return the section with the table of all methods and, if there are several on a task, their figure."""
    section = _table_section(contents, "methods")
    return replace(section, paragraphs=[plot.caption], pictures=pictures) if pictures else section


def _over_tasks_section(contents: _Contents, plot: Plot, pictures: list[Picture]) -> Section:
    """Return the section with the ranks of methods over tasks, or the reasons why they are not ranked."""
    sentences = [ranked.sentence() for ranked in contents.ranks]
    sheet = replace(contents.sheets["over_tasks"], notes=())
    if not pictures:
        return Section("over_tasks", sheet.title, empty_note=" ".join(sentences) or "Nothing to show yet.")
    return Section("over_tasks", sheet.title, [*sentences, plot.caption], sheet=sheet, pictures=pictures)


def _truncate(sheet: Sheet) -> Sheet:
    """Cut an ungrouped table after `_MAX_ROWS` rows, and add a note on the number of rows left out."""
    excess = len(sheet.rows) - _MAX_ROWS
    if excess <= 0 or any(sheet.rows_by_group):
        return sheet
    note = f"{excess} more rows are in the files."
    return replace(sheet, rows_by_group={"": sheet.rows[:_MAX_ROWS]}, notes=(*sheet.notes, note))


def _plot_section(contents: _Contents, plot: Plot, pictures: list[Picture]) -> Section:
    artefact = missing_runs.artefact_name(plot)
    empty = "" if pictures else f"No run for {artefact} yet; the section “What is missing” lists its runs."
    pairs = [(panel.model, panel.task) for panel in plot.panels]
    pairs += [(runs.model, runs.task) for runs in contents.missing if runs.artefact == artefact]
    commands = _commands(contents, "table1" if plot.name.startswith("curves") else plot.sweep, pairs)
    return Section(plot.name, plot.title, [plot.caption], pictures=pictures, empty_note=empty, commands=commands)


def _commands(contents: _Contents, sweep: str, pairs: list[tuple[str, str]]) -> list[str]:
    """Return the command of a sweep for each pair of model and task; an empty list without a sweep."""
    return [contents.sweep_command(sweep, task, model) for model, task in dict.fromkeys(pairs)] if sweep else []


def _departures_section(contents: _Contents) -> Section:
    """Return the section that compares the runs with their plan."""
    sheet = _truncate(contents.sheets["departures"])
    return Section(sheet.name, sheet.title, [contents.departures], sheet=sheet, is_wide=True)


def _missing_section(contents: _Contents) -> Section:
    """Return the section that lists missing runs, with the commands that start them."""
    text = [
        "The report expects five seeds of each method for each of the models and tasks found here, and for each figure "
        "the values that the paper varies. A command does not repeat runs that have finished with the same settings. "
        "It uses the sweep's settings, which may differ from those of the existing runs."
    ]
    commands = []
    if (missing := missing_runs.for_paper(contents.frame)) is not None:
        text.append(missing[0])
        commands.append(missing[1])
    return replace(_table_section(contents, "missing"), paragraphs=text, commands=commands)
