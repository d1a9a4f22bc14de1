"""The page of a training: how the figures of `istar measure` change from one stop to the next."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from istar.figures.plot import Line, Panel, Plot
from istar.files import atomic_write
from istar.geometry.measure import Measured
from istar.geometry.model_figures import NAMES, tap_name, taps_of
from istar.geometry.trajectory import Plan, Stop, Trajectory
from istar.pages import folder
from istar.pages.page import Page, Section

GENERATOR = "istar measure, over a training"
_TAPS = 5
"""So many layers in a figure; of deeper models evenly many between the first and the last."""

Figure = Callable[[Measured], float | None]


def write(plan: Plan, stops: Sequence[Stop], found: Trajectory) -> Path:
    """Write `index.html` and `figures/` beside `trajectory.csv`; returns the page's path."""
    drawn = plots(stops, found.measured)
    pictures = {name: picture for plot in drawn for name, picture in folder.draw(plot).items()}
    for name, content in folder.files(_page(plan, found, drawn, pictures), {}, pictures).items():
        with atomic_write(plan.out / name) as file:
            file.write(content)
    return plan.out / folder.INDEX


def plots(stops: Sequence[Stop], measured: Mapping[str, Measured]) -> list[Plot]:
    """Figures of layers, embedding matrices and the final normalization over the steps; of all texts together.

    The x axis is the step where every stop has one of its own, else the stop's place in the order.
    """
    own = [(stop, measured[stop.label]) for stop in stops if stop.label in measured]
    steps = [stop.step for stop, _ in own]
    has_steps = None not in steps and len(set(steps)) == len(steps)
    xs = [float(step or 0) for step in steps] if has_steps else [float(place) for place in range(1, len(own) + 1)]
    label = "step" if has_steps else "stop, in their order"
    first = own[0][1]
    taps = _some(list(taps_of(first)))

    def panel(title: str, lines: Mapping[str, Figure]) -> Panel | None:
        drawn = [_line(name, xs, [figure(found) for _, found in own]) for name, figure in lines.items()]
        shown = tuple(line for line in drawn if any(map(math.isfinite, line.y)))
        return Panel("", "", shown, "", title) if shown else None

    def layers(key: str) -> Panel | None:
        return panel(NAMES[key], {tap_name(tap): partial(_tap, tap=tap, key=key) for tap in taps})

    matrices: dict[str, Figure] = {
        f"{which} embeddings": partial(_matrix, which=which) for which in ("input", "output")
    }
    norms: dict[str, Figure] = {name: partial(_norm, name=name) for name in ("gain", "bias")}
    wanted = (
        ("isotropy", "Isotropy of the layers", "IsoScore*, InterSim, IntraSim and TwoNN of some layers' states.",
         [layers(key) for key in ("isoscore", "inter_sim", "intra_sim", "two_nn")]),
        ("partition", "I(W) of the embedding matrices", "Raw, signs as computed; 1 is isotropic.",
         [panel("I(W)", matrices)]),
        ("final_norm", "The final normalization", "Norms of its gain and bias over the root of the width.",
         [panel("norm", norms)]),
    )  # fmt: skip
    return [
        Plot(
            name,
            title,
            caption,
            "line",
            label,
            tuple(panel for panel in panels if panel is not None),
            ordered=name == "isotropy",
        )
        for name, title, caption, panels in wanted
    ]


def _line(name: str, xs: Sequence[float], ys: Sequence[float | None]) -> Line:
    return Line(name, tuple(xs), tuple(math.nan if y is None else y for y in ys))


def _tap(found: Measured, tap: str, key: str) -> float | None:
    return taps_of(found).get(tap, {}).get(key)


def _matrix(found: Measured, which: str) -> float | None:
    own = found.matrices.get(which)
    return None if own is None else own["raw"]["partition_isotropy_as_computed"]


def _norm(found: Measured, name: str) -> float | None:
    return None if found.final_norm is None else found.final_norm[name]


def _some(taps: Sequence[str]) -> list[str]:
    places = {round(number * (len(taps) - 1) / (_TAPS - 1)) for number in range(_TAPS)}
    return [taps[place] for place in sorted(places)]


def _page(plan: Plan, found: Trajectory, drawn: Sequence[Plot], pictures: Mapping[str, folder.Drawn]) -> Page:
    sections = [
        Section(
            plot.name,
            plot.title,
            [plot.caption],
            pictures=folder.of_plot(plot, pictures),
            empty="" if plot.panels else "This model has none, or it is not defined.",
        )
        for plot in drawn
    ]
    told = [f"{label}: {why}" for label, why in found.troubles.items()]
    sections += [Section("left-out", "Not measured", told)] if told else []
    sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[plan.command]))
    summary = [(str(len(found.measured)), "stops"), (str(len(plan.texts)), "texts")]
    about = ("Model", plan.model, f"over its training, measured by istar {version('istar')}")
    return Page(f"Geometry of {Path(plan.model).name} over its training", about, GENERATOR, summary, sections)
