"""HTML page with the figures and tables of `istar measure` for one model."""

import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

import pandas as pd

from istar.errors import UserError, shorten
from istar.figures.plot import Plot
from istar.geometry import measure, model_figures
from istar.geometry.measure import Measurements
from istar.geometry.model_figures import NAMES, tap_name
from istar.geometry.spheres import Sphere, spheres
from istar.pages import folder
from istar.pages.folder import Kind, RenderedPlot
from istar.pages.page import Page, Section
from istar.pages.sheets import Entry, Sheet

# A state file that is being written has a name with a further leading dot.
KIND = Kind("page of measures", "istar measure", (measure.JSON, measure.CSV), (".pass.*", "..pass.*"))


def check(out: Path) -> None:
    """Refuse a folder that `write` would refuse, so that the error comes before the model is measured.

    Raises:
        UserError: if the folder holds anything but an earlier page, or cannot be written.
    """
    folder.refuse_foreign(out, KIND)
    if (out / measure.JSON).exists():
        measure.read(out / measure.JSON)
    nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"--out {out} cannot be written; name a folder that you may write to")


def write(measured: Measurements, out: Path) -> Path:
    """Write the page with its figures, tables and measures; returns the page's path.

    Raises:
        UserError: if the folder holds anything but an earlier page, or cannot be written.
    """
    folder.refuse_foreign(out, KIND)
    try:
        # The measures, which may have taken hours, are saved before anything is drawn.
        measure.write(measured, out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {shorten(error)}") from error
    examples = spheres()
    sheets = {sheet.name: sheet for sheet in _sheets(measured, examples)}
    plots = {plot.name: plot for plot in _plots(measured, examples)}
    pictures = {name: picture for plot in plots.values() for name, picture in folder.draw(plot).items()}
    contents = {name: text.encode() for name, text in measure.files(measured).items()}
    contents |= folder.files(_page(measured, sheets, plots, pictures), sheets, pictures)
    folder.replace_folder(out, contents, KIND)
    return out / folder.INDEX


def _plots(measured: Measurements, examples: Sequence[Sphere]) -> list[Plot]:
    return [
        *model_figures.layer_plots(measured),
        model_figures.spectra(measured),
        model_figures.state_norms(measured),
        model_figures.partition(measured),
        model_figures.matrix_spectra(measured),
        model_figures.projection(measured),
        model_figures.row_norms(measured),
        model_figures.sphere_plot(examples),
    ]


def _page(
    measured: Measurements,
    sheets: Mapping[str, Sheet],
    plots: Mapping[str, Plot],
    pictures: Mapping[str, RenderedPlot],
) -> Page:
    layer_plots = ("isotropy", "directions", "dimension", "norms")

    def plot_section(name: str, sheet: str = "") -> Section:
        plot = plots[name]
        empty = "" if plot.panels else "Not measured."
        if name in layer_plots and (missing := model_figures.missing_measures(plot)):
            empty = f"Not measured, or not defined in any layer: {', '.join(missing)}."
        table = sheets[sheet] if sheet else None
        return Section(name, plot.title, [plot.caption], table, folder.pictures_of(plot, pictures), empty)

    def table_section(name: str, empty: str = "") -> Section:
        text = () if sheets[name].rows else (empty,)
        return Section(f"table-{name}", sheets[name].title, text, sheets[name])

    sections = [
        Section("reading", "How to read this", _READING),
        Section("table-layers", sheets["layers"].title, (), _shortened(sheets["layers"], measured.combined_key)),
        *map(plot_section, layer_plots),
        plot_section("spectra"),
        plot_section("state_norms"),
        table_section("extremes", "Not measured."),
        plot_section("partition", "matrices"),
        plot_section("matrix_spectra"),
        plot_section("projection"),
        plot_section("row_norms"),
        table_section("final_norm", _NO_NORM),
        plot_section("spheres", "spheres"),
        table_section("settings"),
        Section("reproduce", "This page", ("This page and its files:",), commands=[_command(measured)]),
    ]
    about = f"weights {measured.weights}, measured by istar {version('istar')}"
    name = measured.model["name"]
    head = f"at revision {measured.model['revision']}, {about}" if measured.model["revision"] else about
    return Page(
        f"Geometry of {PurePath(name).name or name}",
        ("Model", name, head),
        KIND.generator,
        _summary(measured),
        sections,
    )


def _shortened(sheet: Sheet, group: str) -> Sheet:
    """Keep only one group of a sheet with more than 80 rows, and add a note."""
    if len(sheet.rows) <= _MAX_ROWS or group not in sheet.groups:
        return sheet
    notes = (*sheet.notes, "All texts together; the files have each text.")
    return replace(sheet, groups={group: sheet.groups[group]}, notes=notes)


_MAX_ROWS = 80


def _summary(measured: Measurements) -> list[tuple[str, str]]:
    taps = measured.all_texts
    texts = measured.settings["texts"]
    matrix = measured.matrices["input"]["raw"]
    return [
        (f"{next(iter(taps.values()))['tokens']:,.0f}", "tokens"),
        (str(len(texts)), "text" if len(texts) == 1 else "texts"),
        (str(sum(tap.startswith("layer_") for tap in taps)), "layers"),
        (f"{matrix['dimensions']:,}", "dimensions"),
        (f"{matrix['rows']:,}", "tokens in the vocabulary"),
    ]


def _command(measured: Measurements) -> str:
    """Return the command line that was recorded, or else the shortest one that measures the same texts."""
    if measured.command:
        return measured.command
    texts = " ".join(f"--text {shlex.quote(f'{name}={path}')}" for name, path in measured.settings["texts"].items())
    return f"istar measure {shlex.quote(measured.model['name'])} {texts}"


_NO_NORM = (
    "This architecture has no final normalization with a gain. In BERT and similar models, for example, each layer "
    "normalizes its own output."
)

_READING = (
    "The measures are over the hidden states of all tokens of the texts, with special tokens and without padding. They "
    "are taken at named places: embeddings (the input of the first layer), the output of each layer, and final norm "
    "(the output of the final normalization, if the model has one).",
    "No single number captures isotropy. A cloud may have one common direction, which InterSim, I(W) and the norm "
    "ratio detect, and yet spread evenly around its mean, which only IsoScore detects. A few dimensions may dominate "
    "the cosine, which the table of extreme dimensions shows. The two spheres at the end are the simplest example.",
    "IsoScore* and the ranks are too low if there are fewer than about ten tokens per dimension. Compare models over "
    "the same texts. docs/measures.md defines each measure, cites its papers, and states its limits.",
)


def _sheets(measured: Measurements, examples: Sequence[Sphere]) -> list[Sheet]:
    return [
        _layers(measured),
        _extremes(measured),
        _matrices(measured),
        _final_norm(measured),
        _spheres(examples),
        _settings(measured),
    ]


def _layers(measured: Measurements) -> Sheet:
    by_source = measured.sources.items()
    keys = [key for key in NAMES if any(key in figures for _, taps in by_source for figures in taps.values())]
    groups = {
        source: [
            [Entry(tap_name(tap)), _count(figures["tokens"]), *(_number(figures.get(key)) for key in keys)]
            for tap, figures in taps.items()
        ]
        for source, taps in by_source
    }
    return Sheet(
        "layers",
        "All layers",
        "Measures of the hidden states by text and layer; a dash marks an undefined one. The CSV has more columns.",
        ("layer", "tokens", *(NAMES[key].replace(" ", "\n", 1) for key in keys)),
        groups if len(groups) > 1 else {"": next(iter(groups.values()))},
        measure.layer_frame(measured),
        grouped_by="text",
    )


def _extremes(measured: Measurements) -> Sheet:
    by_tap = measured.extremes.get(measured.combined_key, {})
    count = 3 if len(by_tap) <= _MAX_TAPS_IN_FULL else 1
    rows = [
        [
            Entry(tap_name(tap)),
            Entry(str(extreme["dimension"]), number=True),
            *(_number(extreme[key]) for key in _EXTREMES),
        ]
        for tap, extremes in by_tap.items()
        for extreme in extremes[:count]
    ]
    frame = [
        {"source": source, "layer": tap, **extreme}
        for source, taps in measured.extremes.items()
        for tap, extremes in taps.items()
        for extreme in extremes
    ]
    return Sheet(
        "extremes",
        "The most extreme dimensions",
        "Dimensions of each layer whose mean over the tokens is the farthest from 0: mean and standard deviation, the "
        "mean divided by the median deviation of all dimensions (an outlier is above 5), and the share of the summed "
        "variance. All texts together; the CSV has each text, with three dimensions of each layer.",
        ("layer", "dimension", *_EXTREMES.values()),
        {"": rows},
        pd.DataFrame(frame, columns=["source", "layer", "dimension", *_EXTREMES]),
    )


_MAX_TAPS_IN_FULL = 14
"""With more taps, the table shows one dimension of each instead of three."""
_EXTREMES = {
    "mean": "mean",
    "deviation": "deviation",
    "mean_by_typical_deviation": "mean / median\ndeviation",
    "variance_share": "share of\nvariance",
}


def _matrices(measured: Measurements) -> Sheet:
    keys = ("rows", "dimensions", *_MATRICES)
    figures = [
        {"matrix": which, "form": form, **{key: values[key] for key in keys}}
        for which, forms in measured.matrices.items()
        for form, values in forms.items()
    ]
    rows = [
        [
            Entry(row["matrix"]),
            Entry(model_figures.FORMS.get(row["form"], row["form"])),
            _count(row["rows"]),
            _count(row["dimensions"]),
            *(_number(row[key]) for key in _MATRICES),
        ]
        for row in figures
    ]
    no_output = ("The model has no output embeddings of its own.",)
    return Sheet(
        "matrices",
        "Embedding matrices",
        "Measures of the embedding matrices raw, centered, and without their first components (all-but-the-top, a "
        "hundredth of the dimensions).",
        ("matrix", "form", "rows", "dimensions", *_MATRICES.values()),
        {"": rows},
        pd.DataFrame(figures),
        notes=() if "output" in measured.matrices else no_output,
        row_headers=2,
    )


_MATRICES = {
    "partition_isotropy_as_computed": "I(W), signs\nas computed",
    "partition_isotropy_both": "I(W),\nboth signs",
    "average_norm": "average\nnorm",
    "mean_vector_norm": "norm of\nthe mean",
    "norm_ratio": "norm\nratio",
}


def _final_norm(measured: Measurements) -> Sheet:
    figures = measured.final_norm or {}
    names = [name for name in _NORM if name in figures]
    return Sheet(
        "final_norm",
        "The final normalization",
        "Gain g and bias b of the normalization behind the last layer, over d dimensions.",
        ("figure", "value", "meaning"),
        {"": [[Entry(tap_name(name)), _norm_entry(figures[name]), Entry(_NORM[name])] for name in names]},
        pd.DataFrame(
            [{"figure": name, "value": _to_text(figures[name])} for name in names], columns=["figure", "value"]
        ),
    )


_NORM = {
    "gain": "norm of g divided by the square root of d",
    "bias": "norm of b divided by the square root of d; 0 without a bias",
    "ratio": "bias divided by gain; small in isotropic models",
    "bias_over_gain": "sum of b/g; if it is not 0, all outputs lie on one side of a hyperplane through the origin",
    "zero_gains": "dimensions with g = 0, which that sum leaves out",
    "outlier_gains": "dimensions whose gain is more than three standard deviations from the mean",
    "outlier_biases": "dimensions whose bias is more than three standard deviations from the mean",
}


def _norm_entry(value: Any) -> Entry:
    return Entry(_to_text(value) or "none", number=True) if isinstance(value, Sequence) else _number(value)


def _spheres(examples: Sequence[Sphere]) -> Sheet:
    columns = {
        "inter_sim": "average\ncosine",
        "isoscore": "IsoScore",
        "partition_as_computed": "I(W), signs\nas computed",
        "partition_both": "I(W),\nboth signs",
    }
    rows = [{"sphere": sphere.name, **{key: getattr(sphere, key) for key in columns}} for sphere in examples]
    return Sheet(
        "spheres",
        "Two spheres",
        "Measures of the two spheres.",
        ("sphere", *columns.values()),
        {"": [[Entry(row["sphere"]), *(_number(row[key]) for key in columns)] for row in rows]},
        pd.DataFrame(rows),
    )


def _settings(measured: Measurements) -> Sheet:
    model = {f"model {name}" if name != "name" else "model": value for name, value in measured.model.items()}
    settings = {name: value for name, value in measured.settings.items() if name != "texts"}
    texts = {f"text {name}": path for name, path in measured.settings["texts"].items()}
    values = {**model, "weights": measured.weights, **settings, **texts}
    return Sheet(
        "settings",
        "Settings",
        "Model, texts and settings of the pass. Equal weights have equal hashes.",
        ("setting", "value"),
        {"": [[Entry(name.replace("_", " ")), Entry(_to_text(value), code=True)] for name, value in values.items()]},
        pd.DataFrame([{"setting": name, "value": _to_text(value)} for name, value in values.items()]),
    )


def _to_text(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)


def _count(value: float) -> Entry:
    return Entry(f"{value:,.0f}", number=True)


def _number(value: float | None) -> Entry:
    """Return a cell with four significant digits, whole numbers from 1,000 on, or a dash for None and NaN."""
    if value is None or math.isnan(value):
        return Entry("\u2013", number=True)
    return Entry(f"{value:,.0f}" if 1_000 <= abs(value) < 1e9 else f"{value:.4g}", number=True)
