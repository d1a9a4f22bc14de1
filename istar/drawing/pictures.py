"""Files of plots; a file that would be drawn the same is taken over."""

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from istar.drawing.plot import FIGURE_FORMATS, NARROW, Panel, Plot, compute_identifier, describe, tabulate_points
from istar.files.writing import to_csv

_MAX_FILE_NAME = 150
"""Most characters of a model's name in a file name; file systems allow 255 for the whole."""


@dataclass(frozen=True)
class Picture:
    """A rendered figure of a page."""

    name: str  # name of its files, without suffix
    model: str  # model of the runs in the figure; empty for none
    description: str  # what the figure shows, in words
    panels: Sequence[Panel]  # panels of the figure; the page lists their fixed settings
    files: Mapping[str, bytes]  # rendered files by suffix

    @property
    def sources(self) -> tuple[str, str]:
        """The wide and the narrow SVG as sources of an image, so that the page needs no other files."""
        wide, narrow = (b64encode(self.files[suffix]).decode() for suffix in ("svg", NARROW))
        return f"data:image/svg+xml;base64,{wide}", f"data:image/svg+xml;base64,{narrow}"


def render_pictures(
    plots: Iterable[Plot], folder: Path, on_drawn: Callable[[str], object] = lambda name: None
) -> dict[str, list[Picture]]:
    """Render plots as the pictures of a page, one for each model in a plot, and return them by the names of the plots.

    The pictures have the formats of `FIGURE_FORMATS`, an SVG for phones and a CSV file of their points. `folder` and
    `on_drawn` are as in `render_files`.
    """
    parts = {plot.name: _split_by_model(plot) for plot in plots}
    plot_by_name = {name: plot for plots_by_name in parts.values() for name, plot in plots_by_name.items()}
    files_by_name = render_files(plot_by_name, folder, (*FIGURE_FORMATS.get(), NARROW), on_drawn)

    def make_picture(name: str, plot: Plot) -> Picture:
        files = {**files_by_name[name], "csv": to_csv(tabulate_points(plot)).encode()}
        return Picture(name, plot.panels[0].model, describe(plot), plot.panels, files)

    return {
        plot_name: [make_picture(*part) for part in plots_by_name.items()] for plot_name, plots_by_name in parts.items()
    }


def render_files(
    plot_by_name: Mapping[str, Plot],
    folder: Path,
    suffixes: Sequence[str],
    on_drawn: Callable[[str], object] = lambda name: None,
) -> dict[str, dict[str, bytes]]:
    """Render plots, and return the contents of their files by name and suffix.

    A plot is not drawn again if `folder` has all of its files and they show the same. `on_drawn` is called with each
    name once its files are there.
    """
    files_by_name = {}
    for name, plot in plot_by_name.items():
        files_by_name[name] = _read_drawn(folder / name, suffixes, plot)
        if not files_by_name[name]:
            from istar.drawing import rendering  # loads matplotlib, which files that are taken over do not need

            files_by_name[name] = rendering.render(plot, suffixes)
        on_drawn(name)
    return files_by_name


def _split_by_model(plot: Plot) -> dict[str, Plot]:
    models = list(dict.fromkeys(panel.model for panel in plot.panels))
    names = {model: f"{plot.name}-{_make_unique_file_name(model, models)}" if model else plot.name for model in models}
    return {
        name: replace(plot, panels=tuple(panel for panel in plot.panels if panel.model == model))
        for model, name in names.items()
    }


def _make_unique_file_name(model: str, models: list[str]) -> str:
    """Return a model's name as a safe file name, numbered if another model would get the same name."""
    safe_names = {name: re.sub(r"[^A-Za-z0-9.-]", "-", name)[:_MAX_FILE_NAME] for name in models}
    namesakes = [name for name in models if safe_names[name].lower() == safe_names[model].lower()]
    return safe_names[model] if len(namesakes) == 1 else f"{safe_names[model]}-{namesakes.index(model) + 1}"


def _read_drawn(path: Path, suffixes: Sequence[str], plot: Plot) -> dict[str, bytes]:
    """Return the files of a plot by suffix, if all exist and contain its identifier; otherwise nothing."""
    files = {}
    for suffix in suffixes:
        try:
            files[suffix] = path.with_name(f"{path.name}.{suffix}").read_bytes()
        except OSError:
            return {}
    identifier = compute_identifier(plot).encode()
    return files if all(identifier in content for content in files.values()) else {}
