"""`istar compare` of trainings: the measures of several models over their steps, on one page.

Its figures are Figures 3, 4, 7 and 9 of *Anisotropy is Not Inherent to Transformers* (Machina and Mercer, 2024).
"""

import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pandas as pd
from rich.table import Table

from istar.drawing import page_folder
from istar.drawing.page import Page, Section
from istar.drawing.page_folder import PageKind
from istar.drawing.page_tables import Entry, Sheet, number_entry
from istar.drawing.plot import Line, Panel, Plot
from istar.errors import UserError, shorten
from istar.files.writing import to_csv, unescape_cell
from istar.geometry.collect import measures_file, trajectory
from istar.geometry.collect.layer_outputs import FINAL_NORM
from istar.geometry.show import compare
from istar.geometry.show.compare import MeasuredModel, ModelArgument
from istar.geometry.show.compare_page import join_names
from istar.geometry.show.measured_training import ASSUMED_GROUPS, MeasuredTraining
from istar.geometry.show.model_figures import MEASURE_TITLES, make_panel
from istar.geometry.show.training_findings import describe_trainings

TABLE_FILE = "trajectories.csv"
KIND = PageKind("comparison of trainings", "istar compare, over trainings", (TABLE_FILE,))
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
"""Title, caption and measures of the plots of the last layer and the final normalization, by the plot's name."""
_READING_NOTES = (
    "Each model has a line with a point for each of its checkpoints, in the same colour in all figures. The axis of "
    "the steps is logarithmic, and linear from step 0 to the first other step. The measures of the last layer and of "
    "the final normalization, if the model has one, are over all texts together. Bands, and ± in the table, are 95% "
    "intervals, where there are standard errors.",
    "IsoScore and TwoNN depend on the number of tokens and on the width. Compare models over the same texts.",
)
_STEP_AXIS_LABEL = "step (logarithmic)"


def read_trainings(arguments: Sequence[ModelArgument]) -> list[MeasuredTraining]:
    """Read the measures of several trainings from the folders that the command line names.

    A training without a label on the command line is labelled by its model. If several trainings are of the same model,
    the folder's name is added.

    Raises:
        UserError: if a folder holds no measures of a training, if a checkpoint has no step, or if two trainings have
            the same label.
    """
    tables = [_read_trajectory(argument) for argument in arguments]
    model_names = [Path(table["model"].iloc[0]).name for table in tables]
    labels = []
    for argument, name in zip(arguments, model_names, strict=True):
        default_label = name if model_names.count(name) == 1 else f"{name} ({Path(argument.name).name})"
        labels.append(argument.label or default_label)
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"several trainings are called {label}; give them names, as in first=<folder>")
    labelled_tables = zip(labels, arguments, tables, strict=True)
    return [MeasuredTraining(label, Path(argument.name), table) for label, argument, table in labelled_tables]


def _read_trajectory(argument: ModelArgument) -> pd.DataFrame:
    """Read the `trajectory.csv` of a folder, and return its rows sorted by step.

    Raises:
        UserError: if the file is missing or damaged, has several models, or a checkpoint has no step.
    """
    path = Path(argument.name) / measures_file.TRAJECTORY_FILE
    if not path.is_file():
        raise UserError(
            f"{argument.name} holds no {measures_file.TRAJECTORY_FILE}; expected folders of istar measure --revisions "
            "or --checkpoints alone, or models alone"
        )
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""]).map(unescape_cell)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {shorten(error)}; measure the training again") from error
    missing_columns = [column for column in trajectory.KEY_COLUMNS if column not in rows]
    if missing_columns or rows.empty:
        problem = f"has no column {missing_columns[0]}" if missing_columns else "has no rows"
        raise UserError(f"{path} {problem}; expected the table of istar measure --revisions or --checkpoints")
    if rows["model"].nunique(dropna=False) > 1:
        raise UserError(f"{path} has several models; expected the table of one training")
    for column in map(str, rows):
        if column not in trajectory.KEY_COLUMNS or column == "step":
            rows[column] = pd.to_numeric(rows[column], errors="coerce")
    without_step = rows.loc[rows["step"].isna(), "revision"]
    if len(without_step):
        raise UserError(
            f"{path}: {without_step.iloc[0]} has no step; measure the training with --steps, a table of the steps"
        )
    return rows.sort_values("step", kind="stable")


def describe_differences(trainings: Sequence[MeasuredTraining]) -> list[str]:
    """Return a sentence for each training that was measured over other texts or with other settings than the first.

    The values of such trainings cannot be compared. Texts and settings are those of the last checkpoints. The list is
    empty if the folder of one of these checkpoints has been deleted.
    """
    last_models = []
    for training in trainings:
        if training.last_measurements is None:
            return []
        last_models.append(MeasuredModel(training.label, training.last_measurements))
    return compare.describe_differences(last_models)


def _describe_assumed_groups(trainings: Sequence[MeasuredTraining]) -> list[str]:
    """Return a sentence that names the trainings whose number of groups of documents is unknown, if there are any."""
    labels = [training.label for training in trainings if training.last_measurements is None]
    if not labels:
        return []
    return [
        f"The last checkpoint of {compare.list_names(labels)} has no measures.json any more, so that {ASSUMED_GROUPS} "
        "groups of documents are assumed for its intervals."
    ]


def write_page(trainings: Sequence[MeasuredTraining], out: Path, command: str = "") -> Path:
    """Write the page that compares trainings, with its figures and `trajectories.csv`, and return the page's path.

    Args:
        trainings: the compared trainings.
        out: output folder; an earlier result in it is replaced.
        command: command line, to show on the page.

    Raises:
        UserError: see `istar.drawing.page_folder.write`.
    """
    model_table = _make_model_table(trainings)
    contents = page_folder.page_files(_make_page(trainings, model_table, command), {model_table.name: model_table})
    all_measures = pd.concat([training.measures.assign(model=training.label) for training in trainings])
    contents[TABLE_FILE] = to_csv(all_measures).encode()
    return page_folder.write(out, contents, KIND)


def _make_page(trainings: Sequence[MeasuredTraining], model_table: Sheet, command: str) -> Page:
    notes = [*_describe_assumed_groups(trainings), *describe_differences(trainings)]
    sections = [
        Section("findings", "What stands out", describe_trainings(trainings)),
        Section("reading", "How to read this", [*_READING_NOTES, *notes]),
        Section("table-models", model_table.title, sheet=model_table, is_wide=True),
    ]
    for plot in make_plots(trainings):
        empty_note = "" if plot.panels else "Not measured for any of these models."
        sections.append(
            Section(
                plot.name, plot.title, [plot.caption], pictures=page_folder.render_pictures(plot), empty_note=empty_note
            )
        )
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    labels = [training.label for training in trainings]
    subject_line = ("Models", ", ".join(labels), f"over their training, compared by istar {version('istar')}")
    num_checkpoints = sum(len(training.steps) for training in trainings)
    summary = [(str(len(labels)), "models"), (f"{num_checkpoints:,}", "checkpoints")]
    return Page(
        f"Geometry of {join_names(labels)} over their training", subject_line, KIND.generator, summary, sections
    )


def make_plots(trainings: Sequence[MeasuredTraining]) -> list[Plot]:
    """Return plots of the measures by training step, with a line for each training that has the measure.

    The plots are in the order in which the page shows them.
    """
    all_plots = []
    for name, (title, caption, measures) in _LAYER_PLOTS.items():
        layer_panels: list[Panel] = []
        for measure_name in measures:
            y_label = MEASURE_TITLES[measure_name]
            layer_panels += _make_panels(trainings, y_label, "last layer", None, measure_name)
            layer_panels += _make_panels(trainings, y_label, "final normalization", FINAL_NORM, measure_name)
        all_plots.append(_make_plot(name, title, caption, layer_panels, trainings))
    partition_panels: list[Panel] = []
    for signs, sign_title in (("as_computed", "signs as computed"), ("both", "both signs")):
        for matrix in ("input", "output"):
            title, measure_name = f"{matrix} embeddings, {sign_title}", f"partition_isotropy_{signs}"
            partition_panels += _make_panels(trainings, "I(W)", title, f"{matrix}_embeddings", measure_name)
    all_plots.append(
        _make_plot(
            "partition",
            "I(W) of the embedding matrices over the training",
            "I(W) of the raw matrices; 1 is isotropic. The papers' convention is the signs of the eigenvectors as "
            "computed, which depend on the eigensolver's build. Both signs are reproducible and meant for comparisons. "
            "Models without output embeddings of their own have the input embeddings there.",
            partition_panels,
            trainings,
        )
    )
    norm_panels: list[Panel] = []
    for name in ("gain", "bias"):
        norm_panels += _make_panels(trainings, "norm", name, "final_norm_parameters", f"layer_norm_{name}")
    title = "The final normalization over the training"
    caption = "Norms of the gain and the bias of the final normalization, divided by the square root of the width."
    # A gain is often many times as large as a bias.
    all_plots.append(_make_plot("final_norm", title, caption, norm_panels, trainings, share_y_by_label=False))
    return all_plots


def _make_plot(
    name: str,
    title: str,
    caption: str,
    panels: Sequence[Panel],
    trainings: Sequence[MeasuredTraining],
    share_y_by_label: bool = True,
) -> Plot:
    """Return a line plot over the training steps, in which each training has its colour even without a line.

    With `share_y_by_label`, panels of the same quantity have the same limits of the y axis.
    """
    labels = tuple(training.label for training in trainings)
    return Plot(
        name,
        title,
        caption,
        "line",
        _STEP_AXIS_LABEL,
        tuple(panels),
        log_x=True,
        share_y_by_label=share_y_by_label,
        labels=labels,
    )


def _make_panels(
    trainings: Sequence[MeasuredTraining], y_label: str, title: str, layer: str | None, measure_name: str
) -> list[Panel]:
    """Return a panel with the values of a measure by step, or an empty list if no training has a finite value.

    The panel has a line for each training with a finite value. If `layer` is None, it is the last layer of each model.
    """
    lines = []
    for training in trainings:
        steps = tuple(map(float, training.steps))
        layer_name = layer or training.last_layer
        values = tuple(training.values_by_step(layer_name, measure_name))
        half_widths = tuple(training.half_widths_by_step(layer_name, measure_name))
        if any(map(math.isfinite, values)):
            has_errors = any(map(math.isfinite, half_widths))
            lines.append(Line(training.label, steps, values, y_error=half_widths if has_errors else ()))
    return [make_panel(y_label, lines, title)] if lines else []


_SUMMARY_COLUMNS = {
    "InterSim": ("inter_sim", None),
    "IntraSim": ("intra_sim", None),
    "IsoScore": ("isoscore", None),
    "TwoNN": ("two_nn", None),
    "I(W), input": ("partition_isotropy_both", "input_embeddings"),
    "I(W), output": ("partition_isotropy_both", "output_embeddings"),
    "final gain": ("layer_norm_gain", "final_norm_parameters"),
    "final bias": ("layer_norm_bias", "final_norm_parameters"),
}
"""Measure and layer of each column of the table of all models, by its header; None stands for the last layer."""
_TERMINAL_COLUMNS = ("InterSim", "IntraSim", "IsoScore", "TwoNN", "I(W), input", "I(W), output")
"""Columns of the table for the terminal; more would break headers and names within a line of 80 characters."""


def summarize_trainings(trainings: Sequence[MeasuredTraining]) -> pd.DataFrame:
    """Return one row for each training: its number of checkpoints, its steps, and measures at the last checkpoint.

    I(W) is taken over both signs of the eigenvectors.
    """
    rows = []
    for training in trainings:
        steps = training.steps
        last_values = {
            header: training.values_by_step(layer or training.last_layer, measure_name)[-1]
            for header, (measure_name, layer) in _SUMMARY_COLUMNS.items()
        }
        keys = {"model": training.label, "checkpoints": len(steps), "first step": steps[0], "last step": steps[-1]}
        rows.append({**keys, **last_values})
    return pd.DataFrame(rows)


def _make_model_table(trainings: Sequence[MeasuredTraining]) -> Sheet:
    """Return the page's table of measures at the last checkpoints, with a row for each training."""
    summary = summarize_trainings(trainings)
    entries = []
    for training, row in zip(trainings, summary.to_dict("records"), strict=True):
        half_widths = {
            header: training.half_widths_by_step(layer or training.last_layer, measure_name)[-1]
            for header, (measure_name, layer) in _SUMMARY_COLUMNS.items()
        }
        numbers = [number_entry(row[name], half_widths.get(name, math.nan)) for name in map(str, summary.columns[1:])]
        entries.append([Entry(training.label), *numbers])
    return Sheet(
        "models",
        "At the end of the training",
        "Measures at the last checkpoint: of the last layer, over all texts; I(W) by both signs of the embedding "
        "matrices; norms of the final normalization's gain and bias. A dash marks what a model does not have.",
        tuple(map(str, summary)),
        {"": entries},
        summary,
    )


def make_terminal_table(trainings: Sequence[MeasuredTraining]) -> Table:
    """Return a table for the terminal, with measures of the last layer and I(W) at each training's last checkpoint."""
    summary = summarize_trainings(trainings)
    numbers = summary[list(_TERMINAL_COLUMNS)].to_numpy()
    values_by_model = {
        str(name): list(map(float, values)) for name, values in zip(summary["model"], numbers, strict=True)
    }
    title = "At the last checkpoint of each training; I(W) by both signs"
    return measures_file.number_table(title, "model", _TERMINAL_COLUMNS, values_by_model)
