"""`istar compare` of trainings: the measures of several models over their steps, on one page.

Its figures are Figures 3, 4, 7 and 9 of *Anisotropy is Not Inherent to Transformers* (Machina and Mercer, 2024).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pandas as pd
from rich.table import Table

from istar.errors import UserError, shorten
from istar.figures.plot import Line, Panel, Plot
from istar.geometry import compare, measure, trajectory
from istar.geometry.compare import Choice, Subject
from istar.geometry.compare_page import enumerate_names
from istar.geometry.corpus import COMBINED
from istar.geometry.model_figures import MEASURE_TITLES, make_panel
from istar.geometry.saved_checkpoints import Checkpoint
from istar.geometry.taps import FINAL_NORM
from istar.pages import folder
from istar.pages.folder import PageKind
from istar.pages.page import Page, Section
from istar.pages.sheets import Entry, Sheet, number_entry

TABLE = "trajectories.csv"
KIND = PageKind("comparison of trainings", "istar compare, over trainings", (TABLE,))
_LAYER_PLOTS = {
    "directions": (
        "Cosines over the training",
        "InterSim is the mean cosine of the states of any two tokens, IntraSim that of two occurrences of the same "
        "token type.",
        ("inter_sim", "intra_sim"),
    ),
    "isotropy": (
        "IsoScore and intrinsic dimension over the training",
        "IsoScore with ζ = 0: how evenly the variance is spread over all directions; 1 is isotropic. TwoNN estimates "
        "the local dimension of the cloud.",
        ("isoscore", "two_nn"),
    ),
}
"""Title, caption and measures of the plots of the last layer, by the plot's name."""
_READING = (
    "Each model has a line with a point for each of its checkpoints, in the same colour in all figures. The axis of "
    "the steps is logarithmic, and linear from step 0 to the first other step. The measures of the last layer and of "
    "the final normalization, if the model has one, are over all texts together.",
    "IsoScore and TwoNN depend on the number of tokens and on the width. Compare models over the same texts.",
)
_STEPS = "step (logarithmic)"


@dataclass(frozen=True)
class Training:
    """The measures of a model over its training."""

    label: str  # name on the page, distinct among the trainings
    folder: Path  # folder of the trajectory
    rows: pd.DataFrame  # rows of `trajectory.csv`, by ascending step

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints, in ascending order."""
        return sorted(map(int, self.rows["step"].unique()))

    @property
    def last_layer(self) -> str:
        """Name of the last layer, before a final normalization; empty if the table has no layer."""
        numbers = self.rows["layer"].str.extract(r"^layer_(\d+)$", expand=False).dropna().astype(int)
        return f"layer_{numbers.max()}" if len(numbers) else ""

    def series(self, layer: str, column: str) -> list[float]:
        """Return a column at each of `steps`, over all texts together; NaN where the table has no number."""
        if column not in self.rows:
            return [math.nan] * len(self.steps)
        sources = self.rows["source"]
        texts = sources.dropna().unique()
        source = COMBINED if COMBINED in texts else next(iter(texts), None)
        # Embedding matrices and the gain of the final normalization do not depend on a text.
        rows = self.rows[(self.rows["layer"] == layer) & (sources.isna() | (sources == source))]
        values = dict(zip(rows["step"], rows[column], strict=True))
        return [float(values.get(step, math.nan)) for step in self.steps]


def is_trajectory(choice: Choice) -> bool:
    """Return whether this is a folder of `istar measure --revisions` or `--checkpoints`."""
    return (Path(choice.name) / trajectory.TABLE).is_file()


def read(chosen: Sequence[Choice]) -> list[Training]:
    """Read the trajectories that the command line names.

    A training without a name of its own has that of its model; trainings of the same model then have the name of their
    folder.

    Raises:
        UserError: if a folder holds no trajectory, a checkpoint has no step, or two trainings have the same name.
    """
    tables = [_read_table(choice) for choice in chosen]
    models = [Path(table["model"].iloc[0]).name for table in tables]
    labels = []
    for choice, model in zip(chosen, models, strict=True):
        labels.append(choice.label or (model if models.count(model) == 1 else f"{model} ({Path(choice.name).name})"))
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"several trainings are called {label}; give them names, as in first=<folder>")
    parts = zip(labels, chosen, tables, strict=True)
    return [Training(label, Path(choice.name), table) for label, choice, table in parts]


def _read_table(choice: Choice) -> pd.DataFrame:
    """Read the rows of a `trajectory.csv`, sorted by step."""
    path = Path(choice.name) / trajectory.TABLE
    if not path.is_file():
        raise UserError(
            f"{choice.name} holds no {trajectory.TABLE}; expected folders of istar measure --revisions or "
            "--checkpoints alone, or models alone"
        )
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {shorten(error)}; measure the training again") from error
    missing = [name for name in trajectory.KEYS if name not in rows]
    if missing or rows.empty:
        lacks = f"has no column {missing[0]}" if missing else "has no rows"
        raise UserError(f"{path} {lacks}; expected the table of istar measure --revisions or --checkpoints")
    if rows["model"].nunique(dropna=False) > 1:
        raise UserError(f"{path} has several models; expected the table of one training")
    for name in map(str, rows):
        if name not in trajectory.KEYS or name == "step":
            rows[name] = pd.to_numeric(rows[name], errors="coerce")
    unknown = rows.loc[rows["step"].isna(), "revision"]
    if len(unknown):
        raise UserError(
            f"{path}: {unknown.iloc[0]} has no step; measure the training with --steps, a table of the steps"
        )
    return rows.sort_values("step", kind="stable")


def differences(trainings: Sequence[Training]) -> list[str]:
    """Return sentences on what makes the figures of these trainings incomparable: other texts or other settings.

    They compare the last checkpoints of the trainings. Without the measures of a checkpoint, whose folder may have been
    deleted, nothing is said.
    """
    subjects = []
    for training in trainings:
        last = Checkpoint(str(training.rows["revision"].iloc[-1]), "")
        try:
            subjects.append(Subject(training.label, measure.read(training.folder / last.folder / measure.JSON_FILE)))
        except UserError:
            return []
    return compare.differences(subjects)


def check(out: Path) -> None:
    """Refuse a folder that holds anything but an earlier comparison of trainings.

    Raises:
        UserError: if the folder does.
    """
    folder.check_replaceable(out, KIND)


def write(trainings: Sequence[Training], out: Path, command: str = "") -> Path:
    """Write the page with its figures and table, and `trajectories.csv`; returns the page's path.

    The page shows the command line that made it.

    Raises:
        UserError: if the folder holds anything but an earlier comparison of trainings, or cannot be written.
    """
    folder.check_replaceable(out, KIND)
    sheet = _sheet(trainings)
    contents = folder.page_files(_page(trainings, sheet, command), {sheet.name: sheet})
    rows = pd.concat([training.rows.assign(model=training.label) for training in trainings])
    contents[TABLE] = rows.to_csv(index=False).encode()
    folder.replace_folder(out, contents, KIND)
    return out / folder.INDEX


def _page(trainings: Sequence[Training], sheet: Sheet, command: str) -> Page:
    """Put the page together from its table and plots."""
    sections = [
        Section("reading", "How to read this", (*_READING, *differences(trainings))),
        Section("table-models", sheet.title, (), sheet, is_wide=True),
    ]
    for plot in plots(trainings):
        empty = "" if plot.panels else "Not measured for any of these models."
        sections.append(
            Section(plot.name, plot.title, [plot.caption], pictures=folder.render_pictures(plot), empty_note=empty)
        )
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    names = [training.label for training in trainings]
    about = ("Models", ", ".join(names), f"over their training, compared by istar {version('istar')}")
    checkpoints = sum(len(training.steps) for training in trainings)
    summary = [(str(len(names)), "models"), (f"{checkpoints:,}", "checkpoints")]
    return Page(f"Geometry of {enumerate_names(names)} over their training", about, KIND.generator, summary, sections)


def plots(trainings: Sequence[Training]) -> list[Plot]:
    """Return all plots of the page in their order, with a line for each training that has the measure."""
    results = []
    for name, (title, caption, measures) in _LAYER_PLOTS.items():
        panels: list[Panel] = []
        for key in measures:
            panels += _panel(trainings, MEASURE_TITLES[key], "last layer", "", key)
            panels += _panel(trainings, MEASURE_TITLES[key], "final normalization", FINAL_NORM, key)
        results.append(_plot(name, title, caption, panels, trainings))
    partition: list[Panel] = []
    for signs, words in (("as_computed", "signs as computed"), ("both", "both signs")):
        for which in ("input", "output"):
            title = f"{which} embeddings, {words}"
            partition += _panel(trainings, "I(W)", title, f"{which}_embeddings", f"partition_isotropy_{signs}")
    results.append(
        _plot(
            "partition",
            "I(W) of the embedding matrices over the training",
            "I(W) of the raw matrices; 1 is isotropic. The papers' convention is the signs of the eigenvectors as "
            "computed, which depend on the eigensolver's build. Both signs are reproducible and meant for comparisons. "
            "Models without output embeddings of their own have the input embeddings there.",
            partition,
            trainings,
        )
    )
    norms: list[Panel] = []
    for name in ("gain", "bias"):
        norms += _panel(trainings, "norm", name, "final_norm_parameters", f"layer_norm_{name}")
    caption = "Norms of the gain and the bias of the final normalization, divided by the square root of the width."
    results.append(_plot("final_norm", "The final normalization over the training", caption, norms, trainings))
    return results


def _plot(name: str, title: str, caption: str, panels: Sequence[Panel], trainings: Sequence[Training]) -> Plot:
    labels = tuple(training.label for training in trainings)
    return Plot(name, title, caption, "line", _STEPS, tuple(panels), log_x=True, labels=labels)


def _panel(trainings: Sequence[Training], y_label: str, title: str, layer: str, column: str) -> list[Panel]:
    """Return a panel with a line for each training in which the column is finite at some step; none without a line.

    An empty layer stands for the last one of each model.
    """
    lines = []
    for training in trainings:
        xs = tuple(map(float, training.steps))
        place = layer or training.last_layer
        ys, errors = (tuple(training.series(place, name)) for name in (column, f"{column}_error"))
        if any(map(math.isfinite, ys)):
            lines.append(Line(training.label, xs, ys, y_error=errors if any(map(math.isfinite, errors)) else ()))
    return [make_panel(y_label, lines, title)] if lines else []


_COLUMNS = {
    "InterSim": ("inter_sim", ""),
    "IntraSim": ("intra_sim", ""),
    "IsoScore": ("isoscore", ""),
    "TwoNN": ("two_nn", ""),
    "I(W), input": ("partition_isotropy_both", "input_embeddings"),
    "I(W), output": ("partition_isotropy_both", "output_embeddings"),
    "final gain": ("layer_norm_gain", "final_norm_parameters"),
    "final bias": ("layer_norm_bias", "final_norm_parameters"),
}
"""Column and layer of the measures in the table of all models, by their header; no layer stands for the last one."""


def summary(trainings: Sequence[Training]) -> pd.DataFrame:
    """Return one row for each training: its checkpoints, and measures at the last of them; I(W) is by both signs."""
    rows = []
    for training in trainings:
        steps = training.steps
        values = {
            name: training.series(layer or training.last_layer, column)[-1]
            for name, (column, layer) in _COLUMNS.items()
        }
        row = {"model": training.label, "checkpoints": len(steps), "first step": steps[0], "last step": steps[-1]}
        rows.append({**row, **values})
    return pd.DataFrame(rows)


def _sheet(trainings: Sequence[Training]) -> Sheet:
    frame = summary(trainings)
    entries = [
        [Entry(str(row[0])), *(number_entry(value) for value in row[1:])] for row in frame.itertuples(index=False)
    ]
    return Sheet(
        "models",
        "At the end of the training",
        "Measures at the last checkpoint: of the last layer, over all texts; I(W) by both signs of the embedding "
        "matrices; norms of the final normalization's gain and bias. A dash marks what a model does not have.",
        tuple(map(str, frame)),
        {"": entries},
        frame,
    )


def table(trainings: Sequence[Training]) -> Table:
    """Return the terminal table: the measures of `summary`."""
    frame = summary(trainings)
    numbers = frame[list(_COLUMNS)].to_numpy()
    rows = {str(label): list(map(float, values)) for label, values in zip(frame["model"], numbers, strict=True)}
    return measure.number_table("At the last checkpoint of each training", "model", _COLUMNS, rows)
