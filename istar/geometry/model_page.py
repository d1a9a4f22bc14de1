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
from istar.geometry import findings, measure, model_figures, reading_table
from istar.geometry.intervals import JACKKNIFE, half_width, t_quantile
from istar.geometry.measure import Measurements
from istar.geometry.model_figures import NAMES, tap_name
from istar.geometry.same_model import ModelName, refuse_other_model, saved_weights_hash
from istar.geometry.spheres import Sphere, spheres
from istar.pages import folder
from istar.pages.folder import PageKind
from istar.pages.page import Page, Section
from istar.pages.sheets import Entry, Sheet, number_entry

# A state file that is being written has a name with a further leading dot.
KIND = PageKind("page of measures", "istar measure", (measure.JSON, measure.CSV), (".pass.*", "..pass.*"))
_MAX_ROWS = 80
"""Most rows in the page's table of layers; the files have all rows."""
_MAX_TAPS_IN_FULL = 14
"""With more taps, the tables of extreme dimensions and massive activations show one row of each instead of three."""
_ROWS_OF_TAP = 3
_HEADERS = {
    **{key: model_figures.column_header(key) for key in NAMES},
    "mean_by_typical_deviation": "mean / median\ndeviation",
    "variance_share": "share of\nvariance",
    "ratio": "times the\nmedian",
    "text": "token",
    "partition_isotropy_as_computed": "I(W), signs\nas computed",
    "partition_isotropy_both": "I(W),\nboth signs",
    "partition_as_computed": "I(W), signs\nas computed",
    "partition_both": "I(W),\nboth signs",
}
"""Headers of the columns whose header is not their name."""
_NORM = {
    "gain": "norm of g divided by the square root of d",
    "bias": "norm of b divided by the square root of d; 0 without a bias",
    "ratio": "bias divided by gain; small in isotropic models",
    "bias_over_gain": "sum of b/g; if it is not 0, all outputs lie on one side of a hyperplane through the origin",
    "zero_gains": "dimensions with g = 0, which that sum leaves out",
    "outlier_gains": "dimensions whose gain is more than three standard deviations from the mean",
    "outlier_biases": "dimensions whose bias is more than three standard deviations from the mean",
}
"""Meanings of the measures of the final normalization, by name."""
_NO_NORM = (
    "This architecture has no final normalization with a gain. In BERT and similar models, for example, each layer "
    "normalizes its own output."
)
_DOCUMENTS = {
    "separate": "The model has read each document alone",
    "packed": "The model has read blocks of several documents",
}
_SPECIAL_TOKENS = {
    "include": "with special tokens and without padding",
    "exclude": "without special tokens and padding",
}
_PLACES = (
    "They are taken at named places: embeddings (the input of the first layer), the output of each layer, and final "
    "norm (the output of the final normalization, if the model has one)."
)
_READING = (
    "No single number captures isotropy. A cloud may have one common direction, which InterSim, I(W) and the norm "
    "ratio detect, and yet spread evenly around its mean, which only IsoScore detects. A few dimensions may dominate "
    "the cosine, which the table of extreme dimensions shows. The two spheres at the end are the simplest example.",
    "IsoScore and the ranks are too low if there are fewer than about ten tokens per dimension. Compare models over "
    "the same texts. docs/measures.md defines each measure, cites its papers, and states its limits.",
)


def _intervals(measured: Measurements) -> str:
    """Say what the bands of the figures and the ± of the table are."""
    groups = model_figures.groups(measured)
    figures = [figures for taps in measured.sources.values() for figures in taps.values()]
    if not any(math.isfinite(values.get(f"{name}_error", math.nan)) for values in figures for name in JACKKNIFE):
        return (
            "There are no standard errors from groups of documents, which need --groups of at least 2 and as many "
            "documents as groups. A band around TwoNN or Gride is its 95% interval for independent points."
        )
    return (
        f"Bands in the figures, and ± in the table, are 95% intervals: {t_quantile(groups - 1):.2f} standard errors on "
        f"either side, from the jackknife over {groups} groups of documents. They say how much a value would change "
        "over other documents of the same kind. A measure without a band has no such error; that of TwoNN and Gride is "
        "1.96 errors for points that are independent of each other."
    )


def check(out: Path, name: str, revision: str | None = None) -> None:
    """Refuse a folder that `write` would refuse, so that the error comes before the model is measured.

    Args:
        out: output folder.
        name: hub id or folder of the model.
        revision: branch, tag or commit on the hub.

    Raises:
        UserError: if the folder holds anything but an earlier page of this model, or cannot be written.
    """
    _refuse(out, ModelName(name, revision))
    nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"--out {out} cannot be written; name a folder that you may write to")


def _refuse(out: Path, model: ModelName, weights: str = "") -> None:
    """Refuse a folder with foreign files or the measures of another model; `weights` is a hash, if it is known."""
    folder.check_replaceable(out, KIND)
    if not (out / measure.JSON).exists():
        return
    earlier = measure.read(out / measure.JSON)

    def has_same_weights() -> bool:
        # The hash depends on the dtype.
        return weights == earlier.weights or saved_weights_hash(model, earlier.model["dtype"]) == earlier.weights

    refuse_other_model(out, ModelName(earlier.model["name"], earlier.model["revision"]), model, has_same_weights)


def write(measured: Measurements, out: Path) -> Path:
    """Write the page with its figures, tables and measures, and remove those of an earlier one; returns its path.

    Raises:
        UserError: if the folder holds anything but an earlier page of this model, or cannot be written.
    """
    _refuse(out, ModelName(measured.model["name"], measured.model["revision"]), measured.weights)
    try:
        # The measures, which may have taken hours, are saved before anything is drawn.
        measure.write(measured, out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {shorten(error)}") from error
    examples = spheres()
    sheet_functions = (_layers, _massive, _extremes, _matrices, _final_norm, reading_table.sheet, _settings)
    tables = [build(measured) for build in sheet_functions]
    sheets = {sheet.name: sheet for sheet in (*tables, _spheres(examples))}
    plots = {plot.name: plot for plot in _plots(measured, examples)}
    contents = {name: text.encode() for name, text in measure.files(measured).items()}
    contents |= folder.page_files(_page(measured, sheets, plots), sheets)
    folder.replace_folder(out, contents, KIND)
    return out / folder.INDEX


def _plots(measured: Measurements, examples: Sequence[Sphere]) -> list[Plot]:
    """Return all plots of the page in their order."""
    return [
        *model_figures.layer_plots(measured),
        model_figures.scales(measured),
        model_figures.single_dimensions(measured),
        model_figures.positions(measured),
        model_figures.frequency(measured),
        model_figures.spectra(measured),
        model_figures.state_norms(measured),
        model_figures.partition(measured),
        model_figures.matrix_spectra(measured),
        model_figures.projection(measured),
        model_figures.row_norms(measured),
        model_figures.sphere_plot(examples),
    ]


def _page(measured: Measurements, sheets: Mapping[str, Sheet], plots: Mapping[str, Plot]) -> Page:
    """Put the page together from its tables and plots."""
    hint = "" if measured.settings.get("measures") == "all" else " Some measures need --measures all."

    def plot_section(name: str, sheet: str = "") -> Section:
        plot = plots[name]
        empty = "" if plot.panels else f"Not measured.{hint}"
        if missing := model_figures.missing_measures(plot):
            empty = f"Not measured, or not defined in any layer: {', '.join(missing)}.{hint}"
        table = sheets[sheet] if sheet else None
        return Section(name, plot.title, [plot.caption], table, folder.render_pictures(plot), empty)

    def table_section(name: str, empty: str = "") -> Section:
        text = () if sheets[name].rows else (empty,)
        return Section(f"table-{name}", sheets[name].title, text, sheets[name])

    sections = [
        Section("findings", "What stands out", findings.sentences(measured)),
        Section("reading", "How to read this", (_feeding(measured.settings), *_READING, _intervals(measured))),
        Section(
            "table-layers",
            sheets["layers"].title,
            (),
            _shortened(sheets["layers"], measured.combined_key),
            is_wide=True,
        ),
        *map(plot_section, ("isotropy", "directions")),
        *map(plot_section, ("dimension", "scales", "spectrum", "spectra")),
        *map(plot_section, ("single_dimensions", "outliers")),
        table_section("massive", f"Not measured.{hint}" if hint else "No layer has massive activations."),
        table_section("extremes", "Not measured."),
        *map(plot_section, ("norms", "state_norms", "positions", "frequency")),
        plot_section("partition", "matrices"),
        *map(plot_section, ("matrix_spectra", "projection", "row_norms")),
        table_section("final_norm", _NO_NORM),
        plot_section("spheres", "spheres"),
        table_section("texts", "Not recorded."),
        table_section("settings"),
        Section("reproduce", "This page", ("This page and its files:",), commands=[_command(measured)]),
    ]
    name, revision = measured.model["name"], measured.model["revision"]
    about = f"weights {measured.weights}, measured by istar {version('istar')}"
    head = ("Model", name, f"at revision {revision}, {about}" if revision else about)
    title = f"Geometry of {PurePath(name).name or name}"
    return Page(title, head, KIND.generator, _summary(measured), sections)


def _feeding(settings: Mapping[str, Any]) -> str:
    """Say which tokens the measures are over, and what the model has seen beside them."""
    documents, tokens = _DOCUMENTS[settings["documents"]], _SPECIAL_TOKENS[settings["special_tokens"]]
    return f"{documents}. The measures are over the hidden states of all tokens, {tokens}. {_PLACES}"


def _shortened(sheet: Sheet, group: str) -> Sheet:
    """Keep only one group of a sheet with more than `_MAX_ROWS` rows, and add a note."""
    if len(sheet.rows) <= _MAX_ROWS or group not in sheet.rows_by_group:
        return sheet
    notes = (*sheet.notes, "All texts together; the files have each text.")
    return replace(sheet, rows_by_group={group: sheet.rows_by_group[group]}, notes=notes)


def _summary(measured: Measurements) -> list[tuple[str, str]]:
    """Return the key figures at the top of the page as (number, label)."""
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


def _sheet(name: str, title: str, caption: str, shown: pd.DataFrame, frame: pd.DataFrame) -> Sheet:
    """Return a sheet that shows one data frame, and has the numbers of another in its CSV file."""
    header = tuple(_HEADERS.get(column, column) for column in map(str, shown))
    return Sheet(name, title, caption, header, {"": _entries(shown)}, frame)


def _layers(measured: Measurements) -> Sheet:
    """Return the table of all measures by text and layer."""
    frame = measure.layer_frame(measured)
    columns = ["layer", "tokens", *(key for key in NAMES if key in frame)]
    num_groups = model_figures.groups(measured)
    shown = pd.DataFrame(
        {
            "layer": tap_name(tap),
            "tokens": figures["tokens"],
            **{
                name: number_entry(figures.get(name, math.nan), half_width(figures, name, num_groups))
                for name in columns[2:]
            },
        }
        for taps in measured.sources.values()
        for tap, figures in taps.items()
    )
    sheet = _sheet(
        "layers",
        "All layers",
        "Measures of the hidden states by text and layer; a dash marks an undefined one. The CSV has the standard "
        "errors, and docs/measures.md defines the measures.",
        shown,
        frame,
    )
    groups = {str(source): _entries(group) for source, group in shown.groupby(frame["source"], sort=False)}
    return replace(sheet, rows_by_group=groups, group_header="text") if len(groups) > 1 else sheet


def _massive(measured: Measurements) -> Sheet:
    """Return the table of massive activations; the page shows the largest of each layer over all texts together."""
    columns = ["layer", "dimension", "value", "ratio", "position", "text"]
    rows = [
        {"source": source, "layer": tap, **activation}
        for source, taps in measured.massive.items()
        for tap, activations in taps.items()
        for activation in activations
    ]
    # A median of 0, and files of earlier versions, have no ratio.
    frame = pd.DataFrame(rows, columns=["source", *columns[:4], "token", *columns[4:]]).astype({"ratio": float})
    shown = frame.loc[frame["source"] == measured.combined_key, columns]
    shown = shown.groupby("layer", sort=False).head(_rows_of_tap(shown))
    return _sheet(
        "massive",
        "Massive activations",
        "Activations with a magnitude above 100 and above 1,000 times the median magnitude of all activations of the "
        "layer: the largest of each layer, with the dimension, the magnitude divided by the median, and the token and "
        "its position in the model's input, counted from 0. All texts together; the CSV has each text, and at most "
        "100 activations of each layer.",
        shown.assign(
            layer=shown["layer"].map(tap_name),
            dimension=shown["dimension"].map(_whole_number),
            position=shown["position"].map(_whole_number),
            text=shown["text"].map(lambda text: Entry(text, code=True)),
        ),
        frame,
    )


def _rows_of_tap(shown: pd.DataFrame) -> int:
    """Return how many rows of each layer a table shows, so that it stays short."""
    return _ROWS_OF_TAP if shown["layer"].nunique() <= _MAX_TAPS_IN_FULL else 1


def _whole_number(value: int) -> Entry:
    """Return a cell with a number that has no thousands separator, such as that of a dimension."""
    return Entry(str(int(value)), number=True)


def _extremes(measured: Measurements) -> Sheet:
    """Return the table of the dimensions whose mean is farthest from 0, over all texts together."""
    columns = ["layer", "dimension", "mean", "deviation", "mean_by_typical_deviation", "variance_share"]
    rows = [
        {"source": source, "layer": tap, **extreme}
        for source, taps in measured.extremes.items()
        for tap, extremes in taps.items()
        for extreme in extremes
    ]
    frame = pd.DataFrame(rows, columns=["source", *columns])
    shown = frame.loc[frame["source"] == measured.combined_key, columns]
    shown = shown.groupby("layer", sort=False).head(_rows_of_tap(shown))
    dimensions = shown["dimension"].map(_whole_number)
    return _sheet(
        "extremes",
        "The most extreme dimensions",
        "Dimensions of each layer whose mean over the tokens is the farthest from 0: mean and standard deviation, the "
        "mean divided by the median deviation of all dimensions (an outlier is above 5), and the share of the summed "
        "variance. All texts together; the CSV has each text, with three dimensions of each layer.",
        shown.assign(layer=shown["layer"].map(tap_name), dimension=dimensions),
        frame,
    )


def _matrices(measured: Measurements) -> Sheet:
    """Return the table of measures of the embedding matrices in each form."""
    rows = [
        {"matrix": which, "form": form, **figures}
        for which, forms in measured.matrices.items()
        for form, figures in forms.items()
    ]
    frame = pd.DataFrame(rows).drop(columns="singular_values")
    sheet = _sheet(
        "matrices",
        "Embedding matrices",
        "Measures of the embedding matrices raw, centered, and without their first components (all-but-the-top, a "
        "hundredth of the dimensions).",
        frame.assign(form=frame["form"].map(model_figures.FORMS)),
        frame,
    )
    no_output = ("The model has no output embeddings of its own.",)
    return replace(sheet, notes=() if "output" in measured.matrices else no_output, num_row_headers=2)


def _final_norm(measured: Measurements) -> Sheet:
    """Return the table of the gain and the bias of the final normalization."""
    figures = measured.final_norm or {}
    names = [name for name in _NORM if name in figures]
    frame = pd.DataFrame({"figure": names, "value": [figures[name] for name in names]}, dtype=object)
    return _sheet(
        "final_norm",
        "The final normalization",
        "Gain g and bias b of the normalization behind the last layer, over d dimensions.",
        frame.assign(figure=frame["figure"].map(tap_name), meaning=frame["figure"].map(_NORM)),
        frame.assign(value=frame["value"].map(_to_text)),
    )


def _spheres(examples: Sequence[Sphere]) -> Sheet:
    frame = pd.DataFrame(examples).drop(columns=["x", "y"]).rename(columns={"name": "sphere"})
    shown = frame.rename(columns={"inter_sim": "average\ncosine", "isoscore": "IsoScore"})
    return _sheet("spheres", "Two spheres", "Measures of the two spheres.", shown, frame)


def _settings(measured: Measurements) -> Sheet:
    """Return the table of the model, the texts and the settings of the pass."""
    values = {"model": measured.model["name"]}
    values |= {f"model {name}": value for name, value in measured.model.items() if name != "name"}
    values |= {"weights": measured.weights}
    values |= {name: value for name, value in measured.settings.items() if name != "texts"}
    values |= {f"text {name}": path for name, path in measured.settings["texts"].items()}
    frame = pd.DataFrame({"setting": values.keys(), "value": map(_to_text, values.values())})
    codes = frame["value"].map(lambda text: Entry(text, code=True))
    return _sheet(
        "settings",
        "Settings",
        "Model, texts and settings of the pass. Equal weights have equal hashes.",
        frame.assign(setting=frame["setting"].str.replace("_", " "), value=codes),
        frame,
    )


def _to_text(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)


def _entries(frame: pd.DataFrame) -> list[list[Entry]]:
    """Return the cells of a data frame; see `_entry`."""
    return [[_entry(value) for value in values] for values in frame.itertuples(index=False)]


def _entry(value: Any) -> Entry:
    """Return a cell: texts as they are, sequences joined by commas, and numbers as `number_entry` does."""
    if isinstance(value, Entry):
        return value
    if isinstance(value, str):
        return Entry(value)
    if isinstance(value, Sequence):
        return Entry(_to_text(value) or "none", number=True)
    return number_entry(value)
