"""`istar report`: writes an HTML page with the paper's tables and figures for the runs in a folder."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from istar.drawing import page_folder
from istar.drawing.page_folder import Page, PageKind, Section
from istar.drawing.page_tables import Sheet
from istar.drawing.pictures import render_pictures
from istar.drawing.plot import Plot
from istar.drawing.terminal import make_progress
from istar.errors import UserError
from istar.reports import (
    configurations,
    geometry_file,
    method_comparisons,
    method_tables,
    paper_figures,
    paper_tables,
    sweep_commands,
    task_averages,
    training_figures,
)
from istar.reports.run_frame import Runs, read_runs
from istar.runs.names import BASE_LABEL
from istar.statistics import conclusions

REPORT_KIND = PageKind("report", "istar report")


@dataclass(frozen=True)
class WrittenReport:
    """The path of a written report's page, and its number of runs."""

    page_path: Path
    num_runs: int


def write_report(root: Path, out: Path, console: Console | None = None, reference: str = BASE_LABEL) -> WrittenReport:
    """Write the report of the runs below `root` to the folder `out`.

    An earlier report in `out` is replaced, and other files stay as they are. `console` shows the progress if it is a
    terminal. The other methods are compared with `reference`, see `method_comparisons.compare_methods`.

    Raises:
        UserError: if `root` lacks runs, if no method or several are the reference, if `out` contains files that are not
            a report, or if it cannot be written.
    """
    page_folder.check(out, REPORT_KIND, (root,))
    with make_progress(console) as progress:
        progress_task = progress.add_task("reading runs", total=None)
        runs = read_runs(root, keep_records=True, excluded=out)
        if runs.frame.empty:
            num_errors = len(runs.read_errors)
            note = f"; {num_errors} folder{'s' * (num_errors > 1)} could not be read as one" if num_errors else ""
            raise UserError(f"{root} holds no runs{note}; train.py leaves them below run.root")
        progress.update(progress_task, description="computing tables and figures")
        sheets, sections = _compute_contents(runs, root, reference)
        plots = [plot for _, plot in sections if plot is not None]
        num_pictures = sum(len({panel.model for panel in plot.panels}) for plot in plots)
        progress.update(progress_task, total=num_pictures, description="drawing figures")
        pictures = render_pictures(plots, out / page_folder.FIGURES, lambda name: progress.advance(progress_task))
        drawn_sections = [
            replace(section, pictures=pictures[plot.name] if plot is not None else ()) for section, plot in sections
        ]
        progress.update(progress_task, description="writing")
        subject_line = "Runs below", str(root), f"read by istar {version('istar')}"
        title = "Isotropy and fine-tuning: report"
        page = Page(title, subject_line, REPORT_KIND.generator, _count_runs(runs), drawn_sections)
        page_path = page_folder.write(out, page_folder.page_files(page, sheets), REPORT_KIND)
    return WrittenReport(page_path, len(runs.frame))


def _count_runs(runs: Runs) -> list[tuple[str, str]]:
    """Return the key figures of the page: numbers of runs with their labels."""
    counts = {"runs": len(runs.frame), **runs.frame["status"].value_counts()}
    counts |= {"collapsed": runs.frame["collapsed"].eq(True).sum(), "folders not read": len(runs.read_errors)}
    counts |= {"smoke runs not counted": runs.num_smoke}
    return [(str(count), str(label)) for label, count in counts.items() if count]


def _compute_contents(
    runs: Runs, root: Path, reference: str
) -> tuple[dict[str, Sheet], list[tuple[Section, Plot | None]]]:
    """Return all tables of the report by name, and its sections, each with the plot that it will show."""
    all_runs, records = configurations.add_selection_columns(runs), runs.records
    geometry_by_folder, geometry_errors = geometry_file.read_geometries(all_runs[all_runs["usable"]]["folder"])
    table1_cells = configurations.select_cells(all_runs)
    compared_methods = method_comparisons.compare_methods(all_runs, reference)
    training_plots = [
        *training_figures.build_learning_curve_plots(table1_cells, records),
        *training_figures.build_training_plots(all_runs),
    ]
    paper_plots = [
        paper_figures.build_minibatch_stability_plot(),
        paper_figures.build_isotropy_performance_plot(all_runs, geometry_by_folder),
        paper_figures.build_mean_activation_plot(all_runs, geometry_by_folder),
        paper_figures.build_intrinsic_dimension_plot(all_runs, geometry_by_folder),
        paper_figures.build_layer_isotropy_plot(all_runs, records, geometry_by_folder),
        paper_figures.build_zeta_ablation_plot(all_runs),
        paper_figures.build_layer_ablation_plot(all_runs),
    ]
    shrinkage_seconds = {path: record.timing.get("shrinkage") or () for path, record in records.items()}
    all_sheets = [
        paper_tables.build_table1_sheet(table1_cells),
        paper_tables.build_table2_sheet(table1_cells, all_runs),
        method_tables.build_conclusions_sheet(compared_methods),
        method_tables.build_methods_sheet(compared_methods),
        task_averages.build_over_tasks_sheet(compared_methods),
        paper_tables.build_cost_sheet(all_runs, shrinkage_seconds),
        paper_tables.build_excluded_runs_sheet(all_runs, {**runs.read_errors, **geometry_errors}, str(root)),
    ]
    command = f"istar report {shlex.quote(str(root))} --out report"
    summary = [conclusions.summary(row.statistics for row in compared_methods.comparisons)]
    if reference != BASE_LABEL:
        summary.insert(0, f"Methods are compared with {reference}, not with Base.")
        command += f" --reference {shlex.quote(reference)}"
    sheets = {sheet.name: sheet for sheet in all_sheets}
    commands = {
        artefact: sweep_commands.build_sweep_commands(sweep, all_runs, records, str(root))
        for artefact, sweep in sweep_commands.SWEEP_BY_ARTEFACT.items()
    }
    guide = f"{sheets['conclusions'].caption} {_READING_GUIDE}"
    sections = [
        _build_section(replace(sheets["conclusions"], caption=guide), paragraphs=summary),
        _build_section(sheets["methods"], method_tables.build_all_methods_plot(compared_methods)),
        _build_section(sheets["over_tasks"]),
        *(_build_section(None, plot, commands) for plot in training_plots),
        _build_section(sheets["cost"]),
        (_build_missing_section(sweep_commands.describe_missing_seeds(compared_methods.methods)), None),
        _build_section(sheets["left_out"]),
        *(_build_section(sheets[name], None, commands) for name in ("table1", "table2")),
        *(_build_section(None, plot, commands) for plot in paper_plots),
        (Section("reproduce", "This page", ("This command writes the page and its files:",), commands=[command]), None),
    ]
    return sheets, sections


def _build_section(
    sheet: Sheet | None,
    plot: Plot | None = None,
    commands: Mapping[str, list[str]] | None = None,
    paragraphs: Sequence[str] = (),
) -> tuple[Section, Plot | None]:
    """Return the section of a table or a plot, or of a table with a plot below it, and the plot if it has panels.

    `commands` are by the names of tables and plots. A section without any content has a note instead.
    """
    artefact = sheet or plot
    assert artefact is not None
    captions = [plot.caption] if plot is not None and plot.panels else []
    has_content = paragraphs or captions or (sheet is not None and sheet.rows)
    notes = sheet.notes if artefact.name == "over_tasks" and sheet else ()
    if sheet is not None:
        # The caption of a table is folded if it is long.
        sheet, captions = replace(sheet, caption=" ".join([sheet.caption, *captions])), []
    section = Section(
        artefact.name,
        artefact.title,
        [*paragraphs, *captions],
        sheet=sheet,
        empty_note="" if has_content else " ".join(notes) or "No run has what it shows.",
        commands=(commands or {}).get(artefact.name, ()),
        is_wide=artefact.name in ("table1", "conclusions", "methods"),
    )
    return section, replace(plot, reference_label=BASE_LABEL) if plot is not None and plot.panels else None


def _build_missing_section(sentences: Sequence[str]) -> Section:
    if not sentences:
        return Section("missing", "What is missing", empty_note="All methods of a model and task have the same seeds.")
    return Section("missing", "What is missing", [*sentences, sweep_commands.ADVICE])


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
