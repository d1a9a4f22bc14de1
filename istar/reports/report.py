"""`istar report`: writes an HTML page with the paper's tables and figures for the runs in a folder."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from istar.drawing import page_folder
from istar.drawing.page_folder import Page, PageKind, Picture, Section
from istar.drawing.page_tables import Sheet
from istar.drawing.plot import Plot
from istar.errors import UserError
from istar.records.identity import BASE_LABEL
from istar.reports import (
    configurations,
    geometry_file,
    method_comparisons,
    method_tables,
    paper_figures,
    paper_tables,
    plan_file,
    rank_figure,
    stability,
    sweep_commands,
    training_figures,
)
from istar.reports.plan_file import Plan
from istar.reports.rank_figure import RankedMethods
from istar.reports.run_frame import Runs, load_runs
from istar.statistics import ALPHA, TEST, conclusions

REPORT_KIND = PageKind("report", "istar report")
_EMPTY_NOTE = "No run has what it shows."
_MAX_ROWS = 300  # rows that the page shows of an ungrouped table; the files have all rows


@dataclass(frozen=True)
class WrittenReport:
    """The path of a written report's page, and its number of runs."""

    page_path: Path
    num_runs: int


def write_report(
    root: Path,
    out: Path,
    console: Console | None = None,
    plan_path: Path | None = None,
    reference: str = BASE_LABEL,
) -> WrittenReport:
    """Write the report of the runs below `root` to the folder `out`.

    An earlier report in `out` is replaced, and other files stay as they are. `console` shows the progress if it is a
    terminal. With a `plan.yaml` from `istar plan`, the report uses the plan's test and significance level, and lists
    the departures from it. The other methods are compared with `reference`, see `method_comparisons.compare_methods`.

    Raises:
        UserError: if `plan_path` is not a plan, if `root` lacks runs, if no method or several are the reference, if
            `out` contains files that are not a report, or if it cannot be written.
    """
    page_folder.check(out, REPORT_KIND, (root,) if plan_path is None else (root, plan_path))
    plan = None if plan_path is None else plan_file.read_plan(plan_path)
    progress_columns = TextColumn("{task.description}", markup=False), BarColumn()
    is_hidden = console is None or not console.is_terminal
    with Progress(*progress_columns, console=console, transient=True, disable=is_hidden) as progress:
        progress_task = progress.add_task("reading runs", total=None)
        runs = load_runs(root, keep_records=True, excluded=out)
        if runs.frame.empty:
            num_errors = len(runs.read_errors)
            note = f"; {num_errors} folder{'s' * (num_errors > 1)} could not be read as one" if num_errors else ""
            raise UserError(f"{root} holds no runs{note}; train.py leaves them below run.root")
        progress.update(progress_task, description="computing tables and figures", advance=1)
        contents = _compute_contents(runs, root, plan_path, plan, reference)
        # The two steps besides the figures are reading, which is done, and writing.
        progress.update(progress_task, total=2 + len(contents.plots))
        pictures_by_plot: dict[str, list[Picture]] = {}
        for plot in contents.plots:
            progress.update(progress_task, description=f"drawing {plot.name}", advance=1)
            pictures_by_plot[plot.name] = page_folder.render_pictures(plot)
        progress.update(progress_task, description="writing", advance=1)
        files = page_folder.page_files(_build_page(contents, pictures_by_plot), contents.sheets)
        page_path = page_folder.write(out, files, REPORT_KIND)
    return WrittenReport(page_path, len(runs.frame))


@dataclass(frozen=True)
class _ReportContents:
    """Everything that the report shows, before it is drawn and written as a page."""

    root: Path
    all_runs: pd.DataFrame
    num_unreadable: int  # number of folders that could not be read as a run
    num_smoke: int  # number of smoke runs, which are not counted
    missing_seeds: list[str]  # sentences on seeds that only some methods of a model and task have
    sheets: dict[str, Sheet]  # tables by name
    plots: list[Plot]
    commands_by_artefact: dict[str, list[str]]  # commands that run what a table or a figure shows
    reference: str  # method that the others are compared with
    conclusions: str  # sentence that counts the outcomes of the comparisons with the reference
    ranks: list[RankedMethods]
    plan_path: Path | None  # plan that the runs are compared with
    departures: str  # sentence on the departures from the plan


def _compute_contents(
    runs: Runs, root: Path, plan_path: Path | None, plan: Plan | None, reference: str
) -> _ReportContents:
    """Compute all tables and plots of the report, with the test and significance level of the plan, if any."""
    all_runs, records = configurations.add_selection_columns(runs), runs.records
    geometry_by_folder, geometry_errors = geometry_file.read_geometries(all_runs[all_runs["usable"]]["folder"])
    table1_cells = configurations.select_cells(all_runs)
    test, alpha = (TEST, ALPHA) if plan is None else (plan.test["name"], plan.test["alpha"])
    compared_methods = method_comparisons.compare_methods(all_runs, test, alpha, reference)
    ranked_methods = rank_figure.rank_methods(compared_methods)
    plots = [
        stability.build_minibatch_stability_plot(stability.compute_stability_scores()),
        paper_figures.build_isotropy_performance_plot(all_runs, geometry_by_folder),
        paper_figures.build_mean_activation_plot(all_runs, geometry_by_folder),
        paper_figures.build_intrinsic_dimension_plot(all_runs, geometry_by_folder),
        paper_figures.build_layer_isotropy_plot(all_runs, records, geometry_by_folder),
        paper_figures.build_zeta_ablation_plot(all_runs),
        paper_figures.build_layer_ablation_plot(all_runs),
        *training_figures.build_learning_curve_plots(table1_cells, records),
        *training_figures.build_training_plots(all_runs),
        method_tables.build_all_methods_plot(compared_methods),
        rank_figure.build_rank_plot(ranked_methods),
    ]
    commands_by_artefact = {
        artefact: sweep_commands.build_sweep_commands(sweep, all_runs, records, str(root))
        for artefact, sweep in sweep_commands.SWEEP_BY_ARTEFACT.items()
    }
    shrinkage_seconds = {path: record.timing.get("shrinkage") or () for path, record in records.items()}
    sheets = [
        paper_tables.build_table1_sheet(table1_cells),
        paper_tables.build_table2_sheet(table1_cells, all_runs),
        method_tables.build_conclusions_sheet(compared_methods),
        method_tables.build_methods_sheet(compared_methods),
        method_tables.build_class_isotropy_sheet(all_runs, records),
        rank_figure.build_rank_sheet(ranked_methods),
        paper_tables.build_cost_sheet(all_runs, shrinkage_seconds),
        paper_tables.build_excluded_runs_sheet(all_runs, {**runs.read_errors, **geometry_errors}, str(root)),
    ]
    departures_summary = ""
    if plan is not None:
        departures = plan_file.find_departures(plan, all_runs)
        departures_summary = plan_file.summarize_departures(plan, departures)
        sheets.append(plan_file.build_departures_sheet(departures))
    comparison_statistics = [comparison.statistics for comparison in compared_methods.comparisons]
    return _ReportContents(
        root=root,
        all_runs=all_runs,
        num_unreadable=len(runs.read_errors),
        num_smoke=runs.num_smoke,
        missing_seeds=sweep_commands.describe_missing_seeds(compared_methods.methods),
        sheets={sheet.name: sheet for sheet in sheets},
        plots=[replace(plot, reference_label=BASE_LABEL) for plot in plots],
        commands_by_artefact=commands_by_artefact,
        reference=reference,
        conclusions=conclusions.summary(comparison_statistics, compared_methods.alpha),
        ranks=ranked_methods,
        plan_path=plan_path,
        departures=departures_summary,
    )


def _build_page(contents: _ReportContents, pictures_by_plot: Mapping[str, list[Picture]]) -> Page:
    counts = {"runs": len(contents.all_runs), **contents.all_runs["status"].value_counts()}
    counts |= {"collapsed": contents.all_runs["collapsed"].eq(True).sum(), "folders not read": contents.num_unreadable}
    counts |= {"smoke runs not counted": contents.num_smoke}
    summary = [(str(count), str(label)) for label, count in counts.items() if count]
    head = "Runs below", str(contents.root), f"read by istar {version('istar')}"
    command = f"istar report {shlex.quote(str(contents.root))} --out report"
    command += "" if contents.plan_path is None else f" --plan {shlex.quote(str(contents.plan_path))}"
    has_base_as_reference = contents.reference == BASE_LABEL
    command += "" if has_base_as_reference else f" --reference {shlex.quote(contents.reference)}"
    note = [] if has_base_as_reference else [f"Methods are compared with {contents.reference}, not with Base."]
    plot_by_name = {plot.name: plot for plot in contents.plots}
    methods = _build_table_section(contents, "methods")
    departures = []
    if contents.plan_path is not None:
        departures = [replace(_build_table_section(contents, "departures"), paragraphs=[contents.departures])]
    rank_plot, methods_plot = plot_by_name.pop("ranks"), plot_by_name.pop("all_methods")
    pictures = pictures_by_plot[methods_plot.name]
    plot_sections = {
        name: _build_plot_section(contents, plot, pictures_by_plot[name]) for name, plot in plot_by_name.items()
    }
    sections = [
        replace(_build_table_section(contents, "conclusions"), paragraphs=[*note, contents.conclusions]),
        Section("reading", "How to read this", _READING_GUIDE),
        *departures,
        replace(methods, paragraphs=[methods_plot.caption], pictures=pictures) if pictures else methods,
        _build_ranks_section(contents, rank_plot, pictures_by_plot[rank_plot.name]),
        _build_table_section(contents, "class_isotropy"),
        *(section for name, section in plot_sections.items() if not name.startswith("figure")),
        _build_table_section(contents, "cost"),
        _build_missing_section(contents),
        _build_table_section(contents, "left_out"),
        _build_table_section(contents, "table1"),
        _build_table_section(contents, "table2"),
        *(section for name, section in plot_sections.items() if name.startswith("figure")),
        Section("reproduce", "This page", ("This command writes the page and its files:",), commands=[command]),
    ]
    return Page("Isotropy and fine-tuning: report", head, REPORT_KIND.generator, summary, sections)


_READING_GUIDE = (
    "Metrics are in percent, except losses and perplexities. They are measured on validation sets, never on a test "
    "set, at the epoch with the best headline metric of each run.",
    "A row of the table of all methods is one method; each λ is a method. Of a method's configurations (all settings "
    "except the seed), the page shows the one with the most seeds, among equals with the best mean on the set that "
    "chose the epoch. If nothing was held out, the reported numbers make this choice, and its mean is biased upwards.",
    "Only the first section says what may be concluded. Its tests are paired over the seeds and corrected by Holm's "
    "method for all comparisons of this page. They need the same seeds and the same number of trials, epochs and "
    "examples for both methods.",
    "Collapsed runs, which have constant predictions, are part of the means. Failed, unfinished and pruned runs do not "
    "count. The runs of a line in a figure differ only in the seed and in what its axis or legend varies.",
)


def _build_table_section(contents: _ReportContents, name: str) -> Section:
    sheet = contents.sheets[name]
    empty_note = "" if sheet.rows or name == "departures" else _EMPTY_NOTE
    commands = contents.commands_by_artefact.get(name, [])
    is_wide = name in ("table1", "conclusions", "methods", "departures")
    return Section(
        name, sheet.title, sheet=_truncate_sheet(sheet), empty_note=empty_note, commands=commands, is_wide=is_wide
    )


def _build_ranks_section(contents: _ReportContents, plot: Plot, pictures: list[Picture]) -> Section:
    """Return the section with the ranks of methods over tasks, or the reasons for missing ranks."""
    sentences = [ranked.summarize() for ranked in contents.ranks]
    sheet = replace(contents.sheets["over_tasks"], notes=())
    if not pictures:
        return Section("over_tasks", sheet.title, empty_note=" ".join(sentences) or _EMPTY_NOTE)
    return Section("over_tasks", sheet.title, [*sentences, plot.caption], sheet=sheet, pictures=pictures)


def _truncate_sheet(sheet: Sheet) -> Sheet:
    """Return the first `_MAX_ROWS` rows of an ungrouped table, with a note on the rest; other tables as they are."""
    num_excess_rows = len(sheet.rows) - _MAX_ROWS
    if num_excess_rows <= 0 or any(sheet.rows_by_group):
        return sheet
    note = f"{num_excess_rows} more rows are in the files."
    return replace(sheet, rows_by_group={"": sheet.rows[:_MAX_ROWS]}, notes=(*sheet.notes, note))


def _build_plot_section(contents: _ReportContents, plot: Plot, pictures: list[Picture]) -> Section:
    empty_note = "" if pictures else _EMPTY_NOTE
    commands = contents.commands_by_artefact.get(plot.name, [])
    return Section(plot.name, plot.title, [plot.caption], pictures=pictures, empty_note=empty_note, commands=commands)


def _build_missing_section(contents: _ReportContents) -> Section:
    advice = [sweep_commands.ADVICE] if contents.missing_seeds else []
    empty_note = "" if contents.missing_seeds else "All methods of a model and task have the same seeds."
    return Section("missing", "What is missing", [*contents.missing_seeds, *advice], empty_note=empty_note)
