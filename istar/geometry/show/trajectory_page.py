"""HTML page with figures of a model's geometry over its training."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from istar.drawing import page_folder
from istar.drawing.page import Page, Section
from istar.drawing.page_tables import Entry, Sheet, number_entry
from istar.drawing.plot import Panel, Plot
from istar.drawing.spacing import are_log_spaced, evenly_spaced
from istar.geometry.collect import measures_file
from istar.geometry.collect.intervals import interval_half_width
from istar.geometry.collect.layer_outputs import FINAL_NORM
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.collect.trajectory import (
    CHECKPOINT_FILES,
    KIND,
    Trajectory,
    TrajectoryPlan,
    checkpoint_output,
    make_csv,
    make_rows,
    refuse_other_checkpoints,
)
from istar.geometry.show import model_differences
from istar.geometry.show.compare import MeasuredModel
from istar.geometry.show.model_figures import (
    MEASURE_TITLES,
    column_header,
    format_tap_name,
    make_measure_line,
    make_panel,
    num_document_groups,
)
from istar.geometry.show.model_page import describe_documents_and_tokens
from istar.geometry.show.training_findings import describe_training
from istar.inputs.saved_checkpoints import Checkpoint

_PLOT_TEXTS = {
    "isotropy": (
        "Isotropy of the layers",
        "IsoScore, InterSim, IntraSim and TwoNN of the hidden states of some layers. Bands: 95% intervals, "
        "where there are standard errors.",
    ),
    "partition": (
        "I(W) of the embedding matrices",
        "I(W) of the raw matrices over both signs of the eigenvectors, which is reproducible and can be compared "
        "between checkpoints; 1 is isotropic. The papers' convention, signs as computed, is in trajectory.csv.",
    ),
    "final_norm": ("The final normalization", "Norms of its gain and bias, divided by the square root of the width."),
}
"""Title and caption of each plot, by the plot's name."""
_READING = (
    "Each checkpoint is a point on the x axis. Layers are places of the model: embeddings (the input of the first "
    "layer), the output of each layer, and final norm (the output of the final normalization, if the model has one).",
    "IsoScore is 1 if the variance is spread evenly over all directions, and 0 if it is in a single one. InterSim is "
    "the mean cosine of the states of any two tokens, and IntraSim that of two occurrences of the same token type. "
    "docs/measures.md defines all measures.",
)
_CHANGE_INTERVALS: dict[model_differences.ErrorMethod, str] = {
    "paired": "All checkpoints read the same documents in the same groups. The interval of a change is that of the "
    "paired jackknife, of the differences without each group, and can exclude 0 although the intervals of both values "
    "overlap. Each interval is for itself: of many, one in twenty misses the true change.",
    "independent": "The error of a change is the root of the sum of the squares of both values' errors, which is "
    "rather too large than too small. Each interval is for itself: of many, one in twenty misses the true change.",
}
"""How the intervals of changes are computed, by the method."""
_NO_CHANGE_INTERVALS = (
    "Changes have no intervals without standard errors from groups of documents, which need --groups of at least 2 and "
    "as many documents as groups."
)
_TABLE_MEASURES = ("isoscore", "inter_sim", "intra_sim", "two_nn", "effective_rank", "average_norm")
"""Measures of the last layer in the table of checkpoints."""


def check_output_folder(plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse an output folder that holds another page or another model, before anything is measured.

    It may hold measurements of further checkpoints of the same model. They are kept, so that they need not be measured
    again.

    Raises:
        UserError: if the folder holds another model, and as `istar.drawing.page_folder.check` does.
    """
    inputs: list[str | Path] = [*(checkpoint.name for checkpoint in checkpoints), *(text.path for text in plan.texts)]
    page_folder.check(plan.out, KIND, inputs)
    for checkpoint in checkpoints:
        checkpoint_output(plan, checkpoint).check(CHECKPOINT_FILES, inputs)
    refuse_other_checkpoints(plan, checkpoints)


def write_page(plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint], trajectory: Trajectory) -> Path:
    """Write the page of a training with its figures and `trajectory.csv`, and return the page's path."""
    table = make_table(checkpoints, trajectory.measurements)
    models = label_checkpoints(checkpoints, trajectory.measurements)
    sections = [
        Section("findings", "What stands out", describe_training(models)),
        Section(
            "reading",
            "How to read this",
            [*_READING, *_describe_change_intervals(models), *_describe_input(trajectory)],
        ),
        Section("table-checkpoints", table.title, (), table, is_wide=True),
    ]
    for plot in make_plots(checkpoints, trajectory.measurements):
        empty_note = "" if plot.panels else "This model does not have it, or it is not defined."
        sections.append(
            Section(
                plot.name, plot.title, [plot.caption], pictures=page_folder.render_pictures(plot), empty_note=empty_note
            )
        )
    if trajectory.failures:
        failures = [f"{label}: {reason}" for label, reason in trajectory.failures.items()]
        sections.append(Section("left-out", "Not measured", failures))
    sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[plan.command]))
    summary = [
        (str(len(models)), "checkpoint" if len(models) == 1 else "checkpoints"),
        (str(len(plan.texts)), "text" if len(plan.texts) == 1 else "texts"),
    ]
    subject_line = ("Model", plan.model, f"over its training, measured by istar {version('istar')}")
    page = Page(
        f"Geometry of {Path(plan.model).name} over its training", subject_line, KIND.generator, summary, sections
    )
    contents = page_folder.page_files(page, {table.name: table})
    contents[measures_file.TRAJECTORY_FILE] = make_csv(plan, checkpoints, trajectory)
    return page_folder.write(plan.out, contents, KIND)


def _describe_change_intervals(checkpoints: Sequence[MeasuredModel]) -> list[str]:
    """Return a paragraph on how the intervals of changes are computed; the list is empty for a single checkpoint."""
    if len(checkpoints) == 1:
        return []
    first, last = checkpoints[0], checkpoints[-1]
    if model_differences.explain_no_differences(first, last):
        return [_NO_CHANGE_INTERVALS]
    return [_CHANGE_INTERVALS[model_differences.choose_error_method(first, last)]]


def _describe_input(trajectory: Trajectory) -> list[str]:
    """Return a sentence on what the model has read, and which tokens the measures are over."""
    settings = [measured.settings for measured in trajectory.measurements.values()]
    return [describe_documents_and_tokens(settings[0])] if settings else []


def label_checkpoints(
    checkpoints: Sequence[Checkpoint], measurements_by_label: Mapping[str, Measurements]
) -> list[MeasuredModel]:
    """Return the measured checkpoints in the order of the training, each with a label for sentences.

    If the steps of all of them are known, they are sorted by step, and a label is a step, such as `step 1,000`, after
    the checkpoint's name if several have the same step. Otherwise they keep their order, and a label is the
    checkpoint's name with its position on the x axis of the figures, such as `checkpoint base (1 of 3)`; a single
    checkpoint has no position.
    """
    measured_checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.label in measurements_by_label]
    count_by_step = Counter(checkpoint.step for checkpoint in measured_checkpoints)
    if None in count_by_step:
        num_checkpoints = len(measured_checkpoints)
        labels = [
            f"checkpoint {checkpoint.label}" + (f" ({position} of {num_checkpoints})" if num_checkpoints > 1 else "")
            for position, checkpoint in enumerate(measured_checkpoints, start=1)
        ]
    else:
        measured_checkpoints.sort(key=lambda checkpoint: checkpoint.step or 0)
        labels = [
            f"step {checkpoint.step:,}"
            if count_by_step[checkpoint.step] == 1
            else f"checkpoint {checkpoint.label} (step {checkpoint.step:,})"
            for checkpoint in measured_checkpoints
        ]
    return [
        MeasuredModel(label, measurements_by_label[checkpoint.label])
        for label, checkpoint in zip(labels, measured_checkpoints, strict=True)
    ]


def make_table(checkpoints: Sequence[Checkpoint], measurements_by_label: Mapping[str, Measurements]) -> Sheet:
    """Return the table of the measured checkpoints, with measures of the last layer and I(W) in a row for each.

    The measures are over all texts together, and before a final normalization. I(W) is over both signs of the
    eigenvectors of the raw matrices.
    """
    measured_checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.label in measurements_by_label]
    matrices = list(dict.fromkeys(name for measured in measurements_by_label.values() for name in measured.matrices))
    rows, frame_rows = [], []
    for checkpoint in measured_checkpoints:
        measured = measurements_by_label[checkpoint.label]
        last_layer = [measures for tap, measures in measured.all_texts.items() if tap != FINAL_NORM][-1]
        num_groups = num_document_groups(measured)
        partition_by_column = {
            f"partition_isotropy_{name}": measured.matrices[name]["raw"]["partition_isotropy_both"]
            if name in measured.matrices
            else math.nan
            for name in matrices
        }
        step = math.nan if checkpoint.step is None else checkpoint.step
        values = {name: last_layer.get(name, math.nan) for name in _TABLE_MEASURES}
        rows.append(
            [
                Entry(checkpoint.label),
                number_entry(step),
                number_entry(last_layer["tokens"]),
                *(
                    number_entry(value, interval_half_width(last_layer, name, num_groups))
                    for name, value in values.items()
                ),
                *map(number_entry, partition_by_column.values()),
            ]
        )
        frame_rows.append({"checkpoint": checkpoint.label, "step": step, **last_layer, **partition_by_column})
    header = ["checkpoint", "step", "tokens", *map(column_header, _TABLE_MEASURES)]
    return Sheet(
        "checkpoints",
        "All checkpoints",
        "Measures of the last layer, before a final normalization, over all texts together, and I(W) of the raw "
        "embedding matrices over both signs of the eigenvectors. ± is a 95% interval. trajectory.csv has all layers.",
        (*header, *(f"I(W),\n{name}" for name in matrices)),
        {"": rows},
        pd.DataFrame(frame_rows),
    )


def make_plots(checkpoints: Sequence[Checkpoint], measurements_by_label: Mapping[str, Measurements]) -> list[Plot]:
    """Return plots of the layers, the embedding matrices and the final normalization during training.

    Measures of layers are over all texts together. The x axis is the step if that of every checkpoint is known,
    otherwise the checkpoint's position. It is logarithmic if the steps are spaced logarithmically. Checkpoints without
    measurements are left out.
    """
    checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.label in measurements_by_label]
    measurements = [measurements_by_label[checkpoint.label] for checkpoint in checkpoints]
    steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.step is not None]
    has_steps = len(steps) == len(checkpoints)
    x_label = "step" if has_steps else "checkpoint, in the given order"
    xs = tuple(steps) if has_steps else tuple(range(1, len(checkpoints) + 1))
    # For each checkpoint, its rows of trajectory.csv over all texts together, by layer.
    checkpoint_rows = [
        {row["layer"]: row for row in make_rows(measured) if row["source"] in (measured.combined_key, None)}
        for measured in measurements
    ]
    num_groups = num_document_groups(measurements[0])

    def make_panels(y_label: str, column_by_label: Mapping[str, tuple[str, str]]) -> list[Panel]:
        """Return a panel with a line for each label, or an empty list if no line has a finite value.

        `column_by_label` has the layer and the column of `trajectory.csv` that each line shows.
        """
        lines = []
        for label, (layer, column) in column_by_label.items():
            line = make_measure_line(label, xs, [rows.get(layer, {}) for rows in checkpoint_rows], column, num_groups)
            if any(map(math.isfinite, line.y)):
                lines.append(line)
        return [make_panel(y_label, lines)] if lines else []

    layers = evenly_spaced(list(measurements[0].all_texts))
    isotropy_panels: list[Panel] = []
    for measure_name in ("isoscore", "inter_sim", "intra_sim", "two_nn"):
        isotropy_panels += make_panels(
            MEASURE_TITLES[measure_name], {format_tap_name(layer): (layer, measure_name) for layer in layers}
        )
    matrix_columns = {
        f"{matrix} embeddings": (f"{matrix}_embeddings", "partition_isotropy_both") for matrix in ("input", "output")
    }
    norm_columns = {name: ("final_norm_parameters", f"layer_norm_{name}") for name in ("gain", "bias")}
    panels_by_plot = {
        "isotropy": isotropy_panels,
        "partition": make_panels("I(W), both signs", matrix_columns),
        "final_norm": make_panels("norm", norm_columns),
    }
    return [
        Plot(
            name,
            title,
            caption,
            "line",
            x_label,
            tuple(panels_by_plot[name]),
            log_x=has_steps and are_log_spaced(steps),
            ordered=name == "isotropy",
        )
        for name, (title, caption) in _PLOT_TEXTS.items()
    ]
