"""HTML page with figures of a model's geometry over its training."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from istar.figures.plot import Line, Panel, Plot
from istar.files import atomic_write
from istar.geometry.measure import Measurements
from istar.geometry.model_figures import NAMES, tap_name
from istar.geometry.trajectory import Checkpoint, Plan, Trajectory
from istar.pages import folder
from istar.pages.page import Page, Section

GENERATOR = "istar measure, over a training"
_MAX_LAYERS = 5
"""Most layers in a figure; of deeper models, layers evenly spaced from the first to the last."""

Figure = Callable[[Measurements], float | None]
"""Reads one number from the measurements of a checkpoint; None if the model does not have it."""


def write(plan: Plan, checkpoints: Sequence[Checkpoint], trajectory: Trajectory) -> Path:
    """Write `index.html` and `figures/` beside `trajectory.csv`; returns the page's path."""
    page_plots = plots(checkpoints, trajectory.measured)
    pictures = {name: picture for plot in page_plots for name, picture in folder.draw(plot).items()}
    for name, content in folder.files(_page(plan, trajectory, page_plots, pictures), {}, pictures).items():
        with atomic_write(plan.out / name) as file:
            file.write(content)
    return plan.out / folder.INDEX


def plots(checkpoints: Sequence[Checkpoint], measured: Mapping[str, Measurements]) -> list[Plot]:
    """Return the figures of layers, embedding matrices and the final normalization over the training.

    The layers' figures are over all texts together. The x axis is the step if every checkpoint has a distinct one,
    otherwise the checkpoint's position.

    Args:
        checkpoints: checkpoints in their order; those without measurements are left out.
        measured: measurements by the checkpoints' labels, at least one.
    """
    checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.label in measured]
    measurements = [measured[checkpoint.label] for checkpoint in checkpoints]
    steps = [checkpoint.step for checkpoint in checkpoints]
    has_steps = None not in steps and len(set(steps)) == len(steps)
    xs = tuple(float(step or 0) for step in steps) if has_steps else tuple(map(float, range(1, len(checkpoints) + 1)))
    taps = _evenly_spaced(list(measurements[0].all_texts))

    def panel(y_label: str, figures: Mapping[str, Figure]) -> Panel | None:
        values = {name: [figure(result) for result in measurements] for name, figure in figures.items()}
        lines = [Line(name, xs, tuple(math.nan if y is None else y for y in ys)) for name, ys in values.items()]
        lines = [line for line in lines if any(map(math.isfinite, line.y))]
        return Panel("", "", tuple(lines), "", y_label) if lines else None

    def layer_panel(key: str) -> Panel | None:
        return panel(NAMES[key], {tap_name(tap): partial(_layer_figure, tap=tap, key=key) for tap in taps})

    def plot(name: str, title: str, caption: str, panels: Sequence[Panel | None], ordered: bool = False) -> Plot:
        x_label = "step" if has_steps else "checkpoint, in the given order"
        defined = tuple(panel for panel in panels if panel is not None)
        return Plot(name, title, caption, "line", x_label, defined, ordered=ordered)

    matrices: dict[str, Figure] = {
        f"{which} embeddings": partial(_partition_isotropy, which=which) for which in ("input", "output")
    }
    norms: dict[str, Figure] = {name: partial(_final_norm_figure, name=name) for name in ("gain", "bias")}
    return [
        plot(
            "isotropy",
            "Isotropy of the layers",
            "IsoScore*, InterSim, IntraSim and TwoNN of the hidden states of some layers.",
            [layer_panel(key) for key in ("isoscore", "inter_sim", "intra_sim", "two_nn")],
            ordered=True,
        ),
        plot(
            "partition",
            "I(W) of the embedding matrices",
            "I(W) of the raw matrices, with the signs as computed; 1 is isotropic.",
            [panel("I(W)", matrices)],
        ),
        plot(
            "final_norm",
            "The final normalization",
            "Norms of its gain and bias, divided by the square root of the width.",
            [panel("norm", norms)],
        ),
    ]


def _layer_figure(measured: Measurements, tap: str, key: str) -> float | None:
    return measured.all_texts.get(tap, {}).get(key)


def _partition_isotropy(measured: Measurements, which: str) -> float | None:
    forms = measured.matrices.get(which)
    return None if forms is None else forms["raw"]["partition_isotropy_as_computed"]


def _final_norm_figure(measured: Measurements, name: str) -> float | None:
    return None if measured.final_norm is None else measured.final_norm[name]


def _evenly_spaced(taps: Sequence[str]) -> list[str]:
    """Choose at most `_MAX_LAYERS` taps from the first to the last."""
    indices = {round(number * (len(taps) - 1) / (_MAX_LAYERS - 1)) for number in range(_MAX_LAYERS)}
    return [taps[index] for index in sorted(indices)]


def _page(
    plan: Plan, trajectory: Trajectory, page_plots: Sequence[Plot], pictures: Mapping[str, folder.RenderedPlot]
) -> Page:
    sections = [
        Section(
            plot.name,
            plot.title,
            [plot.caption],
            pictures=folder.pictures_of(plot, pictures),
            empty="" if plot.panels else "This model does not have it, or it is not defined.",
        )
        for plot in page_plots
    ]
    if trajectory.failures:
        failures = [f"{label}: {reason}" for label, reason in trajectory.failures.items()]
        sections.append(Section("left-out", "Not measured", failures))
    sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[plan.command]))
    summary = [(str(len(trajectory.measured)), "checkpoints"), (str(len(plan.texts)), "texts")]
    about = ("Model", plan.model, f"over its training, measured by istar {version('istar')}")
    return Page(f"Geometry of {Path(plan.model).name} over its training", about, GENERATOR, summary, sections)
