"""`istar report`: from a folder of runs to a page with the paper's tables and figures, and their files."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from istar.errors import UserError
from istar.figures.plot import Plot
from istar.pages import folder
from istar.pages.folder import Drawn, Kind
from istar.pages.page import Page, Section
from istar.pages.sheets import Sheet
from istar.reports import cells, geometry_file, holes, paper_tables, run_figures, stability
from istar.reports.cells import Cell, models, prepare, tasks
from istar.reports.geometry_file import Geometry
from istar.reports.holes import Command, Hole
from istar.reports.run_frame import Runs, load_runs

KIND = Kind("report", "istar report")


@dataclass(frozen=True)
class Written:
    """What `write` has left.

    Attributes:
        page: the page's path.
        runs: how many were found.
        holes: rows of what is missing.
    """

    page: Path
    runs: int
    holes: int


def write(root: Path, out: Path, console: Console | None = None) -> Written:
    """Write the report of the runs below a folder; all of it or nothing.

    Args:
        root: as `run.root`.
        out: a folder: new, empty, or an earlier report, which is replaced.
        console: where progress is shown.

    Raises:
        UserError: if there are no runs, if `out` holds anything that is no report, or cannot be written.
    """
    folder.refuse_foreign(out, KIND)
    with _progress(console) as step:
        step("reading runs")
        found = load_runs(root, keep_records=True)
        found = _without_flaws(found, out)
        if found.frame.empty:
            many = len(found.troubles)
            unread = f"; {many} folder{'s' * (many > 1)} could not be read as one" if many else ""
            raise UserError(f"{root} holds no runs{unread}; train.py leaves them below run.root")
        step("tables, and the cloud of Figure 2")
        data = _gather(found, root)
        pictures: dict[str, Drawn] = {}
        for plot in data.plots:
            step(f"drawing {plot.name}")
            pictures.update(folder.draw(plot))
        step("writing")
        folder.replace_folder(out, folder.files(_page(data, pictures), data.sheets, pictures), KIND)
    return Written(out / folder.INDEX, len(found.frame), len(data.holes))


def _without_flaws(found: Runs, out: Path) -> Runs:
    """Runs that can be shown; the others, but for an earlier report, become troubles."""
    flaws = {place: why for place, record in found.records.items() if (why := cells.flaw(record))}
    troubles = {at: why for at, why in found.troubles.items() if Path(at).resolve() != out.resolve()}
    kept = found.frame[~found.frame["folder"].isin(list(flaws))].reset_index(drop=True)
    return Runs(kept, {**troubles, **flaws}, found.records)


@dataclass(frozen=True)
class _Data:
    """All that is shown, as numbers."""

    root: Path
    found: Runs
    frame: pd.DataFrame
    cells: list[Cell]
    sheets: dict[str, Sheet]
    plots: list[Plot]
    holes: list[Hole]
    how: Command


def _gather(found: Runs, root: Path) -> _Data:
    frame = prepare(found)
    measured, troubles = _geometries(frame)
    filled = cells.cells(frame)
    drawn = _plots(found, frame, filled, measured)
    how = holes.command_for(frame, found.records, str(root))
    missing = holes.of_table1(filled, models(frame), tasks(frame), how, found.records, str(root))
    missing += holes.of_table2(filled, frame, how)
    for plot in (plot for plot in drawn if plot.sweep):
        missing += holes.of_plot(plot, frame, _layer_counts(found, frame), how)
        if plot.name in ("figure4", "figure5"):
            missing += holes.without_geometry(plot, frame, measured, how)
    refreshes = {place: record.timing.get("shrinkage") or () for place, record in found.records.items()}
    tables = (
        paper_tables.table1(filled),
        paper_tables.table2(filled, frame),
        paper_tables.costs(frame, refreshes),
        holes.sheet(missing),
        paper_tables.left_out(frame, {**found.troubles, **troubles}, str(root)),
    )
    return _Data(root, found, frame, filled, {table.name: table for table in tables}, drawn, missing, how)


def _layer_counts(found: Runs, frame: pd.DataFrame) -> dict[str, int]:
    """Layers of each model that has a finished run."""
    done = frame[frame["usable"]].drop_duplicates("model")
    return {
        model: run_figures.layer_count(found.records[place])
        for model, place in zip(done["model"], done["folder"], strict=True)
    }


def _plots(found: Runs, frame: pd.DataFrame, filled: list[Cell], measured: dict[str, Geometry]) -> list[Plot]:
    return [
        run_figures.minibatch_stability(stability.stability()),
        run_figures.isotropy_and_performance(frame),
        run_figures.mean_activations(frame, measured),
        run_figures.intrinsic_dimensions(frame, measured),
        run_figures.layer_isotropy(frame, found.records),
        run_figures.zeta_ablation(frame),
        run_figures.layer_ablation(frame, found.records),
        *run_figures.curves(filled, found.records),
    ]


def _geometries(frame: pd.DataFrame) -> tuple[dict[str, Geometry], dict[str, str]]:
    measured, troubles = {}, {}
    for place in frame[frame["usable"]]["folder"]:
        try:
            if (own := geometry_file.read(Path(place))) is not None:
                measured[place] = own
        except UserError as error:
            troubles[place] = str(error)
    return measured, troubles


def _page(data: _Data, pictures: dict[str, Drawn]) -> Page:
    counts = data.frame["status"].value_counts()
    collapsed = int((data.frame["collapsed"] == True).sum())  # noqa: E712
    summary = [(str(len(data.frame)), "runs"), *((str(count), str(status)) for status, count in counts.items())]
    summary += [(str(collapsed), "collapsed")] if collapsed else []
    summary += [(str(len(data.found.troubles)), "folders not read")] if data.found.troubles else []
    summary += [(str(len(data.holes)), "rows of missing runs")]
    sections = [
        Section("reading", "How to read this", _READING),
        _table_section(data, "table1", "table1"),
        _table_section(data, "table2", "table2"),
        *(_plot_section(data, plot, pictures) for plot in data.plots if not plot.name.startswith("curves")),
        *(_plot_section(data, plot, pictures) for plot in data.plots if plot.name.startswith("curves")),
        _table_section(data, "cost", ""),
        _missing_section(data),
        _table_section(data, "left_out", ""),
        Section("reproduce", "This page", ("This page and its files:",), commands=[_own_command(data.root)]),
    ]
    return Page(
        "Isotropy and fine-tuning: report",
        ("Runs below", str(data.root), f"read by istar {version('istar')}"),
        KIND.generator,
        summary,
        sections,
    )


_READING = (
    "All metrics are of validation sets (GLUE's own, and the paper's, are its development sets), in percent, from the "
    "epoch with the best headline metric of each run. Nothing on this page has seen a test set.",
    "Which configuration stands for a task, model and method: among the finished runs, grouped by everything that "
    "names a run but its seed (settings, data, model), the group with the most seeds; among equals the one with the "
    "highest mean of the headline metric on the validation set. I-STAR counts with its penalty on all layers, CosReg "
    "with its penalty on the last layer and λ > 0; λ = 0 is Base. A method that was tried in many configurations is "
    "chosen by the very numbers that are then reported, so chance flatters its mean; the remark “best of 9” says that "
    "there were nine.",
    "Tests are paired: the same seeds with and without the penalty. p is two-sided, of the paired t-test "
    "(scipy.stats.ttest_rel) and of the exact permutation test that flips the signs of the differences; with five "
    "pairs the latter cannot fall below 0.0625, with three not below 0.25. Neither is corrected for the choice of the "
    "configuration or for the number of rows. Where p is above 0.05, seeds alone may well explain the difference.",
    "Collapsed runs (constant predictions) count in the means and are told; failed, unfinished and pruned ones do not "
    "count and are told. In a figure the runs of a line differ in nothing but what its axis or legend varies and the "
    "seed; where several configurations could be drawn, it is the one with the most runs, then the best mean.",
)


def _table_section(data: _Data, name: str, sweep: str) -> Section:
    sheet = data.sheets[name]
    empty = "" if sheet.rows else _NOTHING.get(name, "Nothing to show yet.")
    commands = _commands(data, sweep, [(cell.model, cell.task) for cell in data.cells]) if sweep else []
    wide = name == "table1"
    return Section(name, sheet.title, sheet=_cut(sheet), empty=empty, commands=commands, wide=wide)


def _cut(sheet: Sheet) -> Sheet:
    """No longer than a reader reads; the files hold it all."""
    more = len(sheet.rows) - _MOST_ROWS
    if more <= 0 or any(sheet.groups):
        return sheet
    note = f"{more} more rows are in the files."
    return replace(sheet, groups={"": sheet.rows[:_MOST_ROWS]}, notes=(*sheet.notes, note))


_MOST_ROWS = 300


_NOTHING = {
    "left_out": "Every run counts.",
    "missing": "Nothing: every cell has its five seeds.",
    "cost": "No run has finished.",
}


def _plot_section(data: _Data, plot: Plot, pictures: dict[str, Drawn]) -> Section:
    own = folder.of_plot(plot, pictures)
    title = plot.title.split(":")[0]
    pairs = [(panel.model, panel.task) for panel in plot.panels]
    pairs += [(hole.model, hole.task) for hole in data.holes if hole.artefact == title]
    sweep = plot.sweep or ("table1" if plot.name.startswith("curves") else "")
    return Section(
        plot.name,
        plot.title,
        [plot.caption],
        pictures=own,
        empty="" if own else f"No runs for it yet; see below what is missing for {title}.",
        commands=_commands(data, sweep, pairs) if sweep else [],
    )


def _commands(data: _Data, sweep: str, pairs: list[tuple[str, str]]) -> list[str]:
    return [data.how(sweep, task, model) for model, task in dict.fromkeys(pairs)]


def _missing_section(data: _Data) -> Section:
    text = [
        "Expected are five seeds of each method for each model and task found here, and what the paper varies in each "
        "figure. A command repeats nothing that is finished with the same settings; it fills a row with the sweep's "
        "settings, which may differ from those of the runs found."
    ]
    rest = holes.of_the_paper(data.frame)
    sheet = data.sheets["missing"]
    return Section(
        "missing",
        sheet.title,
        text + ([rest[0]] if rest else []),
        sheet,
        empty="" if sheet.rows else _NOTHING["missing"],
        commands=[rest[1]] if rest else [],
        wide=True,
    )


def _own_command(root: Path) -> str:
    return f"istar report {shlex.quote(str(root))} --out report"


class _progress:  # noqa: N801
    """A line that says what is being done, on a terminal; `step(what)` goes on to the next."""

    def __init__(self, console: Console | None) -> None:
        shown = console is not None and console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), console=console, transient=True, disable=not shown
        )

    def __enter__(self) -> Callable[[str], None]:
        self.bar.start()
        task = self.bar.add_task("", total=_STEPS)
        return lambda what: self.bar.update(task, description=what, advance=1)

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()


_STEPS = 12
