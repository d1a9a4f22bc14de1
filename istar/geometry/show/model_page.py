"""The HTML page of `istar measure` for one model, with its figures and tables."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from istar.drawing import page_folder
from istar.drawing.page import Page, Section
from istar.drawing.page_folder import PageKind
from istar.drawing.page_tables import Entry, Sheet, number_entry
from istar.drawing.plot import Plot
from istar.geometry.collect import measures_file
from istar.geometry.collect.intervals import JACKKNIFE_MEASURES, interval_half_width, t_quantile
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.collect.same_model import ModelName, load_and_hash_weights, refuse_other_model
from istar.geometry.show import compare, findings, model_figures, reading_table
from istar.geometry.show.model_figures import MEASURE_TITLES, format_tap_name
from istar.geometry.show.spheres import Sphere, make_spheres

KIND = PageKind("page of measures", "istar measure", (measures_file.JSON_FILE, measures_file.CSV_FILE))
_MAX_ROWS = 80
"""Most rows in the page's table of layers; the files have all rows."""
_MAX_TAPS_IN_FULL = 14
"""With more taps, the tables of extreme dimensions and massive activations show one row per tap instead of three."""
_MAX_ROWS_OF_TAP = 3
_HEADERS = {
    **{key: model_figures.column_header(key) for key in MEASURE_TITLES},
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
_FINAL_NORM_MEANINGS = {
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


def _describe_intervals(measured: Measurements) -> str:
    """Return sentences on what the bands in the figures and the ± in the table of layers are."""
    num_groups = model_figures.num_document_groups(measured)
    sources_without_errors = [
        source
        for source, taps in measured.sources.items()
        if not any(
            math.isfinite(measures.get(f"{name}_error", math.nan))
            for measures in taps.values()
            for name in JACKKNIFE_MEASURES
        )
    ]
    if len(sources_without_errors) == len(measured.sources):
        return (
            "There are no standard errors from groups of documents, which need --groups of at least 2 and as many "
            "documents as groups. A band around TwoNN or Gride is its 95% interval for independent points."
        )
    missing_errors = (
        f" Not of {compare.list_names(sources_without_errors)}: fewer documents than groups."
        if sources_without_errors
        else ""
    )
    return (
        f"Bands in the figures, and ± in the table, are 95% intervals: {t_quantile(num_groups - 1):.2f} standard "
        f"errors on either side, from the jackknife over {num_groups} groups of documents. They say how much a value "
        "would change over other documents of the same kind. A measure without a band has no such error; that of TwoNN "
        f"and Gride is 1.96 errors for points that are independent of each other.{missing_errors}"
    )


def check_output_folder(out: Path, name: str, revision: str | None = None, texts: Sequence[Path] = ()) -> None:
    """Raise an error if `write` would refuse the output folder, so that the error comes before the model is measured.

    Args:
        out: output folder.
        name: hub id or folder of the model.
        revision: branch, tag or commit on the hub.
        texts: the texts that the model will read.

    Raises:
        UserError: if the folder holds the measures of another model, and as `istar.drawing.page_folder.check` does.
    """
    page_folder.check(out, KIND, (name, *texts))
    _refuse_other_model(out, ModelName(name, revision))


def _refuse_other_model(out: Path, model: ModelName, weights: str = "") -> None:
    """Raise an error if a folder holds the measures of another model.

    Args:
        out: output folder.
        model: model whose page is to be written.
        weights: hash of the model's weights; empty if unknown, in which case it is computed if needed.

    Raises:
        UserError: if the folder holds the measures of another model.
    """
    if not (out / measures_file.JSON_FILE).exists():
        return
    earlier = measures_file.read(out / measures_file.JSON_FILE)

    def has_same_weights() -> bool:
        """Return whether the weights are those of the earlier measures, in the dtype on which their hash depends."""
        return weights == earlier.weights or load_and_hash_weights(model, earlier.model["dtype"]) == earlier.weights

    refuse_other_model(out, ModelName(earlier.model["name"], earlier.model["revision"]), model, has_same_weights)


def write(measured: Measurements, out: Path) -> Path:
    """Write the page of a model with its figures, tables and measures in place of an earlier one, and return its path.

    Raises:
        UserError: if the folder holds the measures of another model, and as `istar.drawing.page_folder.write` does.
    """
    _refuse_other_model(out, ModelName(measured.model["name"], measured.model["revision"]), measured.weights)
    contents = {name: text.encode() for name, text in measures_file.file_contents(measured).items()}
    # The measures, which may have taken hours, are saved before anything is drawn.
    page_folder.page_output(out, KIND).write(contents)
    spheres = make_spheres()
    sheet_builders = (
        _build_layer_sheet,
        _build_massive_sheet,
        _build_extremes_sheet,
        _build_matrix_sheet,
        _build_final_norm_sheet,
        reading_table.build_reading_sheet,
        _build_settings_sheet,
    )
    tables = [build(measured) for build in sheet_builders]
    sheets = {sheet.name: sheet for sheet in (*tables, _build_sphere_sheet(spheres))}
    plots = {plot.name: plot for plot in _make_plots(measured, spheres)}
    contents |= page_folder.page_files(_make_page(measured, sheets, plots), sheets)
    return page_folder.write(out, contents, KIND)


def _make_plots(measured: Measurements, spheres: Sequence[Sphere]) -> list[Plot]:
    """Return all plots of a model's page in their order; `spheres` are those of the last plot."""
    return [
        *model_figures.plot_layers(measured),
        model_figures.plot_scales(measured),
        model_figures.plot_single_dimensions(measured),
        model_figures.plot_positions(measured),
        model_figures.plot_frequency(measured),
        model_figures.plot_spectra(measured),
        model_figures.plot_state_norms(measured),
        model_figures.plot_partition(measured),
        model_figures.plot_matrix_spectra(measured),
        model_figures.plot_projection(measured),
        model_figures.plot_row_norms(measured),
        model_figures.plot_spheres(spheres),
    ]


def _make_page(measured: Measurements, sheets: Mapping[str, Sheet], plots: Mapping[str, Plot]) -> Page:
    """Return a model's page, with its tables and plots given by name."""
    measures_hint = "" if measured.settings.get("measures") == "all" else " Some measures need --measures all."

    def make_plot_section(name: str, sheet_name: str = "") -> Section:
        """Return the section of a plot, with a table below it if `sheet_name` is not empty."""
        plot = plots[name]
        empty_note = "" if plot.panels else f"Not measured.{measures_hint}"
        if missing := model_figures.find_missing_measures(plot):
            empty_note = f"Not measured, or not defined in any layer: {', '.join(missing)}.{measures_hint}"
        sheet = sheets[sheet_name] if sheet_name else None
        return Section(name, plot.title, [plot.caption], sheet, page_folder.render_pictures(plot), empty_note)

    def make_table_section(name: str, empty_note: str = "") -> Section:
        paragraphs = () if sheets[name].rows else (empty_note,)
        return Section(f"table-{name}", sheets[name].title, paragraphs, sheets[name])

    sections = [
        Section("findings", "What stands out", findings.describe_findings(measured)),
        Section(
            "reading",
            "How to read this",
            (_describe_input(measured.settings), *_READING, _describe_intervals(measured)),
        ),
        Section(
            "table-layers",
            sheets["layers"].title,
            (),
            _shorten_sheet(sheets["layers"], measured.combined_key),
            is_wide=True,
        ),
        *map(make_plot_section, ("isotropy", "directions")),
        *map(make_plot_section, ("dimension", "scales", "spectrum", "spectra")),
        *map(make_plot_section, ("single_dimensions", "outliers")),
        make_table_section(
            "massive", f"Not measured.{measures_hint}" if measures_hint else "No layer has massive activations."
        ),
        make_table_section("extremes", "Not measured."),
        *map(make_plot_section, ("norms", "state_norms", "positions", "frequency")),
        make_plot_section("partition", "matrices"),
        *map(make_plot_section, ("matrix_spectra", "projection", "row_norms")),
        make_table_section("final_norm", _NO_NORM),
        make_plot_section("spheres", "spheres"),
        make_table_section("texts", "Not recorded."),
        make_table_section("settings"),
        Section("reproduce", "This page", ("This page and its files:",), commands=[_get_command(measured)]),
    ]
    name, revision = measured.model["name"], measured.model["revision"]
    details = f"weights {measured.weights}, measured by istar {version('istar')}"
    subject_line = ("Model", name, f"at revision {revision}, {details}" if revision else details)
    title = f"Geometry of {compare.shorten_model_name(name)}"
    return Page(title, subject_line, KIND.generator, _make_key_figures(measured), sections)


def _describe_input(settings: Mapping[str, Any]) -> str:
    """Return sentences on what the model has read, which tokens the measures are over, and the names of the layers."""
    return f"{describe_documents_and_tokens(settings)} {_PLACES}"


def describe_documents_and_tokens(settings: Mapping[str, Any]) -> str:
    """Return sentences on what the model has read, and which tokens the measures are over."""
    documents, tokens = _DOCUMENTS[settings["documents"]], _SPECIAL_TOKENS[settings["special_tokens"]]
    return f"{documents}. The measures are over the hidden states of all tokens, {tokens}."


def _shorten_sheet(sheet: Sheet, group: str) -> Sheet:
    """Return a table with only one group of its rows and a note, if it has more than `_MAX_ROWS` rows."""
    if len(sheet.rows) <= _MAX_ROWS or group not in sheet.rows_by_group:
        return sheet
    notes = (*sheet.notes, "All texts together; the files have each text.")
    return replace(sheet, rows_by_group={group: sheet.rows_by_group[group]}, notes=notes)


def _make_key_figures(measured: Measurements) -> list[tuple[str, str]]:
    """Return the key figures at the top of a model's page as (number, label)."""
    measures_by_tap = measured.all_texts
    texts = measured.settings["texts"]
    return [
        (f"{next(iter(measures_by_tap.values()))['tokens']:,.0f}", "tokens"),
        (str(len(texts)), "text" if len(texts) == 1 else "texts"),
        (str(sum(tap.startswith("layer_") for tap in measures_by_tap)), "layers"),
        (f"{measured.width:,}", "dimensions"),
        (f"{measured.matrices['input']['raw']['rows']:,}", "tokens in the vocabulary"),
    ]


def _get_command(measured: Measurements) -> str:
    """Return the command line that was recorded, or else the shortest one that measures the same texts."""
    if measured.command:
        return measured.command
    texts = " ".join(f"--text {shlex.quote(f'{name}={path}')}" for name, path in measured.settings["texts"].items())
    return f"istar measure {shlex.quote(measured.model['name'])} {texts}"


def _make_sheet(name: str, title: str, caption: str, shown_frame: pd.DataFrame, csv_frame: pd.DataFrame) -> Sheet:
    """Return a table that shows the data frame `shown_frame`; its CSV file has the unrounded numbers of `csv_frame`."""
    header = tuple(_HEADERS.get(column, column) for column in map(str, shown_frame))
    return Sheet(name, title, caption, header, {"": _make_entries(shown_frame)}, csv_frame)


def _build_layer_sheet(measured: Measurements) -> Sheet:
    frame = measures_file.layer_frame(measured)
    measure_names = [name for name in MEASURE_TITLES if name in frame]
    num_groups = model_figures.num_document_groups(measured)
    shown_frame = pd.DataFrame(
        {
            "layer": format_tap_name(tap),
            "tokens": measures["tokens"],
            **{
                name: number_entry(measures.get(name, math.nan), interval_half_width(measures, name, num_groups))
                for name in measure_names
            },
        }
        for taps in measured.sources.values()
        for tap, measures in taps.items()
    )
    sheet = _make_sheet(
        "layers",
        "All layers",
        "Measures of the hidden states by text and layer; a dash marks an undefined one. The CSV has the standard "
        "errors, and docs/measures.md defines the measures.",
        shown_frame,
        frame,
    )
    rows_by_text = {
        str(source): _make_entries(rows) for source, rows in shown_frame.groupby(frame["source"], sort=False)
    }
    return replace(sheet, rows_by_group=rows_by_text, group_header="text") if len(rows_by_text) > 1 else sheet


def _build_massive_sheet(measured: Measurements) -> Sheet:
    """Return the table of massive activations, which shows the largest of each layer over all texts together."""
    columns = ["layer", "dimension", "value", "ratio", "position", "text"]
    rows = [
        {"source": source, "layer": tap, **activation}
        for source, taps in measured.massive.items()
        for tap, activations in taps.items()
        for activation in activations
    ]
    # A median of 0, and files of earlier versions, have no ratio.
    frame = pd.DataFrame(rows, columns=["source", *columns[:4], "token", *columns[4:]]).astype({"ratio": float})
    shown_frame = frame.loc[frame["source"] == measured.combined_key, columns]
    shown_frame = shown_frame.groupby("layer", sort=False).head(_choose_rows_per_layer(shown_frame))
    return _make_sheet(
        "massive",
        "Massive activations",
        "Activations with a magnitude above 100 and above 1,000 times the median magnitude of all activations of the "
        "layer: the largest of each layer, with the dimension, the magnitude divided by the median, and the token and "
        "its position in the model's input, counted from 0. All texts together; the CSV has each text, and at most "
        "100 activations of each layer.",
        shown_frame.assign(
            layer=shown_frame["layer"].map(format_tap_name),
            dimension=shown_frame["dimension"].map(_make_integer_entry),
            position=shown_frame["position"].map(_make_integer_entry),
            text=shown_frame["text"].map(lambda text: Entry(text, code=True)),
        ),
        frame,
    )


def _choose_rows_per_layer(shown_frame: pd.DataFrame) -> int:
    """Return how many rows of each layer a table shows, so that it stays short."""
    return _MAX_ROWS_OF_TAP if shown_frame["layer"].nunique() <= _MAX_TAPS_IN_FULL else 1


def _make_integer_entry(value: int) -> Entry:
    """Return a table cell with an integer without thousands separators, such as the index of a dimension."""
    return Entry(str(int(value)), number=True)


def _build_extremes_sheet(measured: Measurements) -> Sheet:
    """Return the table of the dimensions whose mean is farthest from 0, over all texts together."""
    columns = ["layer", "dimension", "mean", "deviation", "mean_by_typical_deviation", "variance_share"]
    rows = [
        {"source": source, "layer": tap, **extreme}
        for source, taps in measured.extremes.items()
        for tap, extremes in taps.items()
        for extreme in extremes
    ]
    frame = pd.DataFrame(rows, columns=["source", *columns])
    shown_frame = frame.loc[frame["source"] == measured.combined_key, columns]
    shown_frame = shown_frame.groupby("layer", sort=False).head(_choose_rows_per_layer(shown_frame))
    dimensions = shown_frame["dimension"].map(_make_integer_entry)
    return _make_sheet(
        "extremes",
        "The most extreme dimensions",
        "Dimensions of each layer whose mean over the tokens is the farthest from 0: mean and standard deviation, the "
        "mean divided by the median deviation of all dimensions (an outlier is above 5), and the share of the summed "
        "variance. All texts together; the CSV has each text, with three dimensions of each layer.",
        shown_frame.assign(layer=shown_frame["layer"].map(format_tap_name), dimension=dimensions),
        frame,
    )


def _build_matrix_sheet(measured: Measurements) -> Sheet:
    """Return the table of measures of the embedding matrices in each form: raw, centered and post-processed."""
    rows = [
        {"matrix": side, "form": form, **measures}
        for side, forms in measured.matrices.items()
        for form, measures in forms.items()
    ]
    frame = pd.DataFrame(rows).drop(columns="singular_values")
    sheet = _make_sheet(
        "matrices",
        "Embedding matrices",
        "Measures of the embedding matrices raw, centered, and without their first components (all-but-the-top, a "
        "hundredth of the dimensions).",
        frame.assign(form=frame["form"].map(model_figures.FORM_TITLES)),
        frame,
    )
    no_output = ("The model has no output embeddings of its own.",)
    return replace(sheet, notes=() if "output" in measured.matrices else no_output, num_row_headers=2)


def _build_final_norm_sheet(measured: Measurements) -> Sheet:
    """Return the table of the measures of the final normalization's gain and bias."""
    measures = measured.final_norm or {}
    measure_names = [name for name in _FINAL_NORM_MEANINGS if name in measures]
    frame = pd.DataFrame({"figure": measure_names, "value": [measures[name] for name in measure_names]}, dtype=object)
    return _make_sheet(
        "final_norm",
        "The final normalization",
        "Gain g and bias b of the normalization behind the last layer, over d dimensions.",
        frame.assign(figure=frame["figure"].map(format_tap_name), meaning=frame["figure"].map(_FINAL_NORM_MEANINGS)),
        frame.assign(value=frame["value"].map(_format_value)),
    )


def _build_sphere_sheet(spheres: Sequence[Sphere]) -> Sheet:
    """Return the table of the measures of the two example spheres."""
    frame = pd.DataFrame(spheres).drop(columns=["x", "y"]).rename(columns={"name": "sphere"})
    shown_frame = frame.rename(columns={"inter_sim": "average\ncosine", "isoscore": "IsoScore"})
    return _make_sheet("spheres", "Two spheres", "Measures of the two spheres.", shown_frame, frame)


def _build_settings_sheet(measured: Measurements) -> Sheet:
    """Return the table of the model, the texts and the settings of the pass."""
    values = {"model": measured.model["name"]}
    values |= {f"model {name}": value for name, value in measured.model.items() if name != "name"}
    values |= {"weights": measured.weights}
    values |= {name: value for name, value in measured.settings.items() if name != "texts"}
    values |= {f"text {name}": path for name, path in measured.settings["texts"].items()}
    names = [compare.SETTING_NAMES.get(name, name) for name in values]
    frame = pd.DataFrame({"setting": names, "value": map(_format_value, values.values())})
    value_entries = frame["value"].map(lambda text: Entry(text, code=True))
    return _make_sheet(
        "settings",
        "Settings",
        "Model, texts and settings of the pass. Equal weights have equal hashes.",
        frame.assign(setting=frame["setting"].str.replace("_", " "), value=value_entries),
        frame,
    )


def _format_value(value: Any) -> str:
    """Return a setting or a measure as text: a sequence joined by commas, and `none` for None."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)


def _make_entries(frame: pd.DataFrame) -> list[list[Entry]]:
    """Return the table cells of a data frame, row by row."""
    return [[_make_entry(value) for value in row] for row in frame.itertuples(index=False)]


def _make_entry(value: Any) -> Entry:
    """Return a table cell: a text as it is, a sequence joined by commas, and a number as `number_entry` formats it."""
    if isinstance(value, Entry):
        return value
    if isinstance(value, str):
        return Entry(value)
    if isinstance(value, Sequence):
        return Entry(_format_value(value) or "none", number=True)
    return number_entry(value)
