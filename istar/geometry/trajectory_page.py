"""HTML page with figures of a model's geometry over its training."""

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from istar.errors import UserError
from istar.figures import drawing
from istar.figures.plot import Panel, Plot
from istar.figures.spacing import are_log_spaced, evenly_spaced
from istar.files import atomic_write
from istar.geometry import measure
from istar.geometry.measure import Measurements
from istar.geometry.model_figures import (
    MEASURE_TITLES,
    format_tap_name,
    make_measure_line,
    make_panel,
    num_document_groups,
)
from istar.geometry.saved_checkpoints import Checkpoint
from istar.geometry.trajectory import Plan, Trajectory, refuse_other_checkpoints, table_rows
from istar.pages import folder
from istar.pages.folder import PageKind
from istar.pages.page import Page, Section

KIND = PageKind("trajectory", "istar measure, over a training")
_TEXTS = {
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


def check(plan: Plan, checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse an output folder with another page or another model, before anything is measured.

    The measurements of other checkpoints of the same model may be there. They are kept, so that they need not be taken
    again.

    Raises:
        UserError: if the folder is such a folder.
    """
    index = plan.out / folder.INDEX
    if (plan.out / measure.JSON_FILE).exists() or (index.exists() and not folder.has_generator(index, KIND)):
        raise UserError(
            f"--out {plan.out} is no trajectory but holds another page; expected another folder: --out <folder>"
        )
    refuse_other_checkpoints(plan, checkpoints)


def write(plan: Plan, checkpoints: Sequence[Checkpoint], trajectory: Trajectory) -> Path:
    """Write `index.html` and `figures/` beside `trajectory.csv`, without earlier figures; returns the page's path."""
    sections = []
    for plot in plots(checkpoints, trajectory.measured):
        empty = "" if plot.panels else "This model does not have it, or it is not defined."
        sections.append(
            Section(plot.name, plot.title, [plot.caption], pictures=folder.render_pictures(plot), empty_note=empty)
        )
    if trajectory.failures:
        failures = [f"{label}: {reason}" for label, reason in trajectory.failures.items()]
        sections.append(Section("left-out", "Not measured", failures))
    sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[plan.command]))
    summary = [(str(len(trajectory.measured)), "checkpoints"), (str(len(plan.texts)), "texts")]
    about = ("Model", plan.model, f"over its training, measured by istar {version('istar')}")
    page = Page(f"Geometry of {Path(plan.model).name} over its training", about, KIND.generator, summary, sections)
    contents = folder.page_files(page, {})
    for name, content in contents.items():
        with atomic_write(plan.out / name) as file:
            file.write(content)
    for path in (plan.out / folder.FIGURES).glob("*"):
        if path.suffix[1:] in drawing.SUFFIXES and path.relative_to(plan.out).as_posix() not in contents:
            path.unlink()
    return plan.out / folder.INDEX


def plots(checkpoints: Sequence[Checkpoint], measured: Mapping[str, Measurements]) -> list[Plot]:
    """Return the figures of layers, embedding matrices and the final normalization over the training.

    The layers' figures are over all texts together. The x axis is the step if that of every checkpoint is known,
    otherwise the checkpoint's position. It is logarithmic if the steps are. Checkpoints without measurements are left
    out.
    """
    checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.label in measured]
    measurements = [measured[checkpoint.label] for checkpoint in checkpoints]
    steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.step is not None]
    has_steps = len(steps) == len(checkpoints)
    x_label = "step" if has_steps else "checkpoint, in the given order"
    xs = tuple(steps) if has_steps else tuple(range(1, len(checkpoints) + 1))
    # Rows of each checkpoint in trajectory.csv, over all texts together, by layer.
    tables = [
        {row["layer"]: row for row in table_rows(result) if row["source"] in (result.combined_key, None)}
        for result in measurements
    ]

    def column_panel(y_label: str, columns: Mapping[str, tuple[str, str]]) -> list[Panel]:
        """Return a panel with a line for each label's (layer, column) of the table; none without a finite value."""
        lines = []
        for label, (layer, column) in columns.items():
            line = make_measure_line(
                label, xs, [table.get(layer, {}) for table in tables], column, num_document_groups(measurements[0])
            )
            if any(map(math.isfinite, line.y)):
                lines.append(line)
        return [make_panel(y_label, lines)] if lines else []

    taps = evenly_spaced(list(measurements[0].all_texts))
    isotropy: list[Panel] = []
    for key in ("isoscore", "inter_sim", "intra_sim", "two_nn"):
        isotropy += column_panel(MEASURE_TITLES[key], {format_tap_name(tap): (tap, key) for tap in taps})
    matrices = {
        f"{which} embeddings": (f"{which}_embeddings", "partition_isotropy_both") for which in ("input", "output")
    }
    norms = {name: ("final_norm_parameters", f"layer_norm_{name}") for name in ("gain", "bias")}
    panels = {
        "isotropy": isotropy,
        "partition": column_panel("I(W), both signs", matrices),
        "final_norm": column_panel("norm", norms),
    }
    return [
        Plot(
            name,
            title,
            caption,
            "line",
            x_label,
            tuple(panels[name]),
            log_x=has_steps and are_log_spaced(steps),
            ordered=name == "isotropy",
        )
        for name, (title, caption) in _TEXTS.items()
    ]
