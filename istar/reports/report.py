"""`istar report`: writes an HTML page with the paper's tables and figures for the runs in a folder."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from istar.drawing import page_folder
from istar.drawing.page_folder import Page, PageKind, Section
from istar.drawing.page_tables import Sheet, fold_columns
from istar.drawing.pictures import render_pictures
from istar.drawing.plot import Plot
from istar.drawing.terminal import make_progress
from istar.errors import UserError
from istar.reports import (
    configurations,
    geometry_file,
    method_comparisons,
    method_tables,
    paper,
    paper_figures,
    paper_tables,
    sweep_commands,
    task_averages,
    training_figures,
)
from istar.reports.method_comparisons import ComparedMethods
from istar.reports.run_frame import Runs, read_runs
from istar.runs.labels import shorten_model_name
from istar.runs.names import BASE_LABEL
from istar.statistics import conclusions

REPORT_KIND = PageKind("report", "istar report")
_NO_RUN = "No run has what it shows."
_READING_GUIDE = (
    "Metrics are in percent, except losses and perplexities. They are measured on validation sets, never on a test "
    "set, at the epoch with the best headline metric of each run. "
    "A row of the table of all methods is one method; each λ is a method. Of a method's configurations (all settings "
    "except the seed), the page shows the one with the most seeds, then the largest validation set, then the best mean "
    "on the set that chose the epoch. If nothing was held out, the reported numbers make this choice, and its mean is "
    "biased upwards. Only the first section says what may be concluded. Its tests are paired over the seeds and "
    "corrected by Holm's method for all comparisons of this page. They need the same seeds, the same data and the same "
    "number of trials, epochs and examples for both methods. "
    "Collapsed runs, which have constant predictions, are part of the means. Failed, unfinished and pruned runs do not "
    "count. The runs of a line in a figure differ only in the seed and in what its axis or legend varies."
)


def write_report(
    root: Path,
    out: Path,
    console: Console | None = None,
    reference: str = BASE_LABEL,
    left_out: Sequence[str] = (),
) -> tuple[Path, int]:
    """Write a report on the runs below `root` to the folder `out`; return the path of its page and the number of runs.

    An earlier report in `out` is replaced, and other files stay as they are. `console` shows the progress if it is a
    terminal. The other methods are compared with `reference`, see `method_comparisons.compare_methods`. `left_out` has
    patterns of the names of runs to leave out.

    Raises:
        UserError: if `root` lacks runs, if no method or several are the reference, if `out` contains files that are not
            a report, or if it cannot be written.
    """
    page_folder.check(out, REPORT_KIND, (root,))
    with make_progress(console) as progress:
        progress_task = progress.add_task("reading runs", total=None)
        runs = read_runs(root, keep_records=True, excluded=out, left_out=left_out)
        if runs.frame.empty:
            num_errors = len(runs.read_errors)
            note = f"; {num_errors} folder{'s' * (num_errors > 1)} could not be read as one" if num_errors else ""
            raise UserError(f"{root} holds no runs{note}; train.py leaves them below run.root")
        progress.update(progress_task, description="computing tables and figures")
        sections = compute_sections(runs, root, reference)
        plots = [section.plot for section in sections if section.plot is not None]
        num_pictures = sum(len({panel.model for panel in plot.panels}) for plot in plots)
        progress.update(progress_task, total=num_pictures, description="drawing figures")
        pictures = render_pictures(plots, out / page_folder.FIGURES, lambda name: progress.advance(progress_task))
        drawn_sections = [
            replace(content, pictures=pictures[plot.name] if plot is not None else ()) for content, plot, _ in sections
        ]
        tables = {section.table.name: section.table for section in sections if section.table is not None}
        progress.update(progress_task, description="writing")
        subject_line = "Runs below", str(root), f"read by istar {version('istar')}"
        title = "Isotropy and fine-tuning: report"
        page = Page(title, subject_line, REPORT_KIND.generator, _count_runs(runs), drawn_sections)
        page_path = page_folder.write(out, page_folder.page_files(page, tables), REPORT_KIND)
    return page_path, len(runs.frame)


def _count_runs(runs: Runs) -> list[tuple[str, str]]:
    counts = {"runs": len(runs.frame), **runs.frame["status"].value_counts()}
    counts |= {"collapsed": runs.frame["collapsed"].eq(True).sum(), "folders not read": len(runs.read_errors)}
    counts |= {"smoke runs not counted": runs.num_smoke}
    return [(str(count), str(label)) for label, count in counts.items() if count]


class ReportSection(NamedTuple):
    """A section of the report before its figure is drawn: its content, and the plot and the table that belong to it."""

    content: Section
    plot: Plot | None = None
    table: Sheet | None = None


def compute_sections(runs: Runs, root: Path, reference: str) -> list[ReportSection]:
    """Return the sections of the report in their order."""
    all_runs, records = configurations.add_selection_columns(runs), runs.records
    geometry_by_folder, geometry_errors = geometry_file.read_geometries(all_runs[all_runs["usable"]]["folder"])
    cells = configurations.select_cells(all_runs)
    compared_methods = method_comparisons.compare_methods(all_runs, reference)
    shrinkage_seconds = {path: record.timing.get("shrinkage") or () for path, record in records.items()}
    has_paper_model = any(shorten_model_name(str(name)) in paper.MODELS for name in all_runs["model.name"])
    over_tasks = task_averages.build_over_tasks_sheet(compared_methods)

    def make_commands(artefact: str) -> list[str]:
        sweep = sweep_commands.SWEEP_BY_ARTEFACT.get(artefact)
        return sweep_commands.build_sweep_commands(sweep, all_runs, records, str(root)) if sweep else []

    def show_figures(*plots: Plot) -> list[ReportSection]:
        return [_show_figure(plot, make_commands(plot.name)) for plot in plots]

    sections = [
        _show_conclusions(compared_methods, reference),
        _show_table(
            method_tables.build_methods_sheet(compared_methods),
            plot=method_tables.build_all_methods_plot(compared_methods),
            is_wide=True,
        ),
        _show_table(over_tasks, empty_note=" ".join(over_tasks.notes) or _NO_RUN),
        *show_figures(*training_figures.build_learning_curve_plots(compared_methods.methods, records)),
        *show_figures(*training_figures.build_training_plots(compared_methods.methods)),
        _show_table(paper_tables.build_cost_sheet(all_runs, shrinkage_seconds)),
        _list_missing_seeds(compared_methods),
        _show_table(
            paper_tables.build_excluded_runs_sheet(all_runs, {**runs.read_errors, **geometry_errors}, str(root))
        ),
        _show_table(paper_tables.build_table1_sheet(cells), commands=make_commands("table1"), is_wide=True),
        _show_table(paper_tables.build_table2_sheet(cells, all_runs), commands=make_commands("table2")),
        *(show_figures(paper_figures.build_minibatch_stability_plot()) if has_paper_model else ()),
        *show_figures(
            paper_figures.build_isotropy_performance_plot(all_runs, geometry_by_folder),
            paper_figures.build_mean_activation_plot(all_runs, geometry_by_folder),
            paper_figures.build_intrinsic_dimension_plot(all_runs, geometry_by_folder),
            paper_figures.build_layer_isotropy_plot(all_runs, records, geometry_by_folder),
            paper_figures.build_zeta_ablation_plot(all_runs),
            paper_figures.build_layer_ablation_plot(all_runs),
        ),
        _show_own_command(root, reference),
    ]
    names = tuple(dict.fromkeys(method.name for method in compared_methods.methods))
    return [section._replace(plot=section.plot and _colour_by_method(section.plot, names)) for section in sections]


def _colour_by_method(plot: Plot, names: tuple[str, ...]) -> Plot:
    """Return a plot whose methods have the colours that they have on the whole page, if its lines are methods."""
    is_of_methods = {line.label for panel in plot.panels for line in panel.lines} <= {*names}
    return replace(plot, labels=names, reference_label=BASE_LABEL) if is_of_methods else plot


def _show_table(
    sheet: Sheet,
    *,
    plot: Plot | None = None,
    paragraphs: Sequence[str] = (),
    guide: str = "",
    commands: Sequence[str] = (),
    empty_note: str = _NO_RUN,
    is_wide: bool = False,
) -> ReportSection:
    """Return the section of a table, with a guide after its caption, and a plot below it."""
    has_plot, sheet = plot is not None and bool(plot.panels), fold_columns(sheet)
    # The caption of a table is folded if it is long, and includes the caption of its figure.
    captions = [sheet.caption, guide, plot.caption if plot is not None and has_plot else ""]
    content = Section(
        sheet.name,
        sheet.title,
        paragraphs,
        sheet=replace(sheet, caption=" ".join(filter(None, captions))),
        empty_note="" if paragraphs or has_plot or sheet.rows else empty_note,
        commands=commands,
        is_wide=is_wide,
    )
    return ReportSection(content, plot if has_plot else None, sheet)


def _show_figure(plot: Plot, commands: Sequence[str]) -> ReportSection:
    if not plot.panels:
        return ReportSection(Section(plot.name, plot.title, empty_note=_NO_RUN, commands=commands))
    return ReportSection(Section(plot.name, plot.title, [plot.caption], commands=commands), plot)


def _show_conclusions(compared_methods: ComparedMethods, reference: str) -> ReportSection:
    summary = [conclusions.summary(row.statistics for row in compared_methods.comparisons)]
    if reference != BASE_LABEL:
        summary.insert(0, f"Methods are compared with {reference}, not with Base.")
    sheet = method_tables.build_conclusions_sheet(compared_methods)
    return _show_table(sheet, paragraphs=summary, guide=_READING_GUIDE, is_wide=True)


def _list_missing_seeds(compared_methods: ComparedMethods) -> ReportSection:
    sentences = sweep_commands.describe_missing_seeds(compared_methods.methods)
    paragraphs = [*sentences, sweep_commands.ADVICE] if sentences else []
    empty_note = "" if sentences else "All methods of a model and task have the same seeds."
    return ReportSection(Section("missing", "What is missing", paragraphs, empty_note=empty_note))


def _show_own_command(root: Path, reference: str) -> ReportSection:
    command = f"istar report {shlex.quote(str(root))} --out report"
    if reference != BASE_LABEL:
        command += f" --reference {shlex.quote(reference)}"
    paragraphs = ["This command writes the page and its files:"]
    return ReportSection(Section("reproduce", "This page", paragraphs, commands=[command]))
