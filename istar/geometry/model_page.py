"""The page of `istar measure`: the papers' figures and tables of one model, and their files."""

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
from istar.geometry.measure import Measured
from istar.geometry.model_figures import NAMES, tap_name, taps_of, whole
from istar.geometry.spheres import Sphere, spheres
from istar.pages import folder
from istar.pages.folder import Drawn, Kind
from istar.pages.page import Page, Section
from istar.pages.sheets import Entry, Sheet

# Drafts of the pass's state begin with a point of their own.
KIND = Kind("page of measures", "istar measure", (measure.JSON, measure.CSV), (".pass.*", "..pass.*"))


def check(out: Path) -> None:
    """Refuse, before anything is measured, a folder that `write` would refuse.

    Raises:
        UserError: if it holds anything else than an earlier page, or cannot be written.
    """
    folder.refuse_foreign(out, KIND)
    if (out / measure.JSON).exists():
        measure.read(out / measure.JSON)
    nearest = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"--out {out} cannot be written")


def write(measured: Measured, out: Path) -> Path:
    """Write the page and all files beside it; returns the page's path.

    Raises:
        UserError: as `check`.
    """
    folder.refuse_foreign(out, KIND)
    try:
        # Before anything is drawn: what took hours is then safe.
        measure.write(measured, out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {shorten(error)}") from error
    shown = spheres()
    sheets, drawn = _sheets(measured, shown), _plots(measured, shown)
    pictures = {name: picture for plot in drawn.values() for name, picture in folder.draw(plot).items()}
    contents = {name: text.encode() for name, text in measure.files(measured).items()}
    contents |= folder.files(_page(measured, sheets, drawn, pictures), sheets, pictures)
    folder.replace_folder(out, contents, KIND)
    return out / folder.INDEX


def _plots(measured: Measured, shown: Sequence[Sphere]) -> dict[str, Plot]:
    found = (
        *model_figures.layer_plots(measured),
        model_figures.spectra(measured),
        model_figures.state_norms(measured),
        model_figures.partition(measured),
        model_figures.matrix_spectra(measured),
        model_figures.projection(measured),
        model_figures.row_norms(measured),
        model_figures.sphere_plot(shown),
    )
    return {plot.name: plot for plot in found}


def _page(
    measured: Measured, sheets: Mapping[str, Sheet], drawn: Mapping[str, Plot], pictures: Mapping[str, Drawn]
) -> Page:
    def plot(name: str, sheet: str = "") -> Section:
        own = drawn[name]
        missing = model_figures.not_drawn(own) if own in layered else []
        empty = f"Not measured, or not defined in any layer: {', '.join(missing)}." if missing else ""
        empty = empty if own.panels or empty else "Not measured."
        table = sheets[sheet] if sheet else None
        return Section(name, own.title, [own.caption], table, folder.of_plot(own, pictures), empty)

    def table(name: str, otherwise: str = "") -> Section:
        text = () if sheets[name].rows else (otherwise,)
        return Section(f"table-{name}", sheets[name].title, text, sheets[name])

    layered = [drawn[name] for name in ("isotropy", "directions", "dimension", "norms")]
    sections = [
        Section("reading", "How to read this", _READING),
        Section("table-layers", sheets["layers"].title, (), _cut(sheets["layers"], whole(measured))),
        *(plot(own.name) for own in layered),
        plot("spectra"),
        plot("state_norms"),
        table("extremes", "Not measured."),
        plot("partition", "matrices"),
        plot("matrix_spectra"),
        plot("projection"),
        plot("row_norms"),
        table("final_norm", _NO_NORM),
        plot("spheres", "spheres"),
        table("settings"),
        Section("reproduce", "This page", ("This page and its files:",), commands=[_command(measured)]),
    ]
    about = f"weights {measured.weights}, measured by istar {version('istar')}"
    name = measured.model["name"]
    head = f"at revision {measured.model['revision']}, {about}" if measured.model["revision"] else about
    return Page(f"Geometry of {_short(name)}", ("Model", name, head), KIND.generator, _summary(measured), sections)


def _cut(sheet: Sheet, group: str) -> Sheet:
    """No longer than a reader reads: of many texts only all together."""
    if len(sheet.rows) <= _MOST_ROWS or group not in sheet.groups:
        return sheet
    notes = (*sheet.notes, "All texts together; the files have each.")
    return replace(sheet, groups={group: sheet.groups[group]}, notes=notes)


_MOST_ROWS = 80


def _summary(measured: Measured) -> list[tuple[str, str]]:
    taps = taps_of(measured)
    texts = measured.settings["texts"]
    matrix = measured.matrices["input"]["raw"]
    return [
        (f"{next(iter(taps.values()))['tokens']:,.0f}", "tokens"),
        (str(len(texts)), "text" if len(texts) == 1 else "texts"),
        (str(sum(tap.startswith("layer_") for tap in taps)), "layers"),
        (f"{matrix['dimensions']:,}", "dimensions"),
        (f"{matrix['rows']:,}", "tokens in the vocabulary"),
    ]


def _short(name: str) -> str:
    return PurePath(name).name or name


def _command(measured: Measured) -> str:
    if measured.command:
        return measured.command
    texts = " ".join(f"--text {shlex.quote(f'{name}={path}')}" for name, path in measured.settings["texts"].items())
    return f"istar measure {shlex.quote(measured.model['name'])} {texts}"


_NO_NORM = (
    "This architecture has none with a gain: nothing normalizes the states behind the last layer, as in BERT and its "
    "kind, whose layers each normalize their own output."
)

_READING = (
    "States of all tokens of the texts, special tokens included and padding left out, at each place that has a name: "
    "embeddings (what goes into the first layer), the layers' own outputs, and final norm, the states behind the final "
    "normalization, where a model has one.",
    "No single number is isotropy. A cloud may have one common direction (InterSim, I(W), the norm ratio notice) and "
    "yet spread evenly about its mean (IsoScore notices that alone); a few dimensions may hold most of a cosine, which "
    "the table of extreme dimensions shows. The two spheres at the end are the simplest example.",
    "IsoScore* and the ranks are too low where there are fewer than some ten tokens for each dimension. Compare models "
    "over the same texts. docs/measures.md has the definition of each measure, its papers, and what it is bad at.",
)


def _sheets(measured: Measured, shown: Sequence[Sphere]) -> dict[str, Sheet]:
    found = (
        _layers(measured),
        _extremes(measured),
        _matrices(measured),
        _final_norm(measured),
        _spheres(shown),
        _settings(measured),
    )
    return {sheet.name: sheet for sheet in found}


def _layers(measured: Measured) -> Sheet:
    keys = [key for key in NAMES if any(key in own for taps in measured.sources.values() for own in taps.values())]
    groups = {
        source: [[Entry(tap_name(tap)), _count(own["tokens"]), *(_number(own.get(key)) for key in keys)]
                 for tap, own in taps.items()]
        for source, taps in measured.sources.items()
    }  # fmt: skip
    rows = [
        {"source": source, "layer": tap, **own}
        for source, taps in measured.sources.items()
        for tap, own in taps.items()
    ]
    return Sheet(
        "layers",
        "All layers",
        "Figures of the hidden states by text and layer; a dash where one is not defined. The CSV has more columns.",
        ("layer", "tokens", *(NAMES[key].replace(" ", "\n", 1) for key in keys)),
        groups if len(groups) > 1 else {"": next(iter(groups.values()))},
        pd.DataFrame(rows),
        grouped_by="text",
    )


def _extremes(measured: Measured) -> Sheet:
    taps = measured.extremes.get(whole(measured), {})
    shown = 3 if len(taps) <= _FEW_TAPS else 1
    rows = [
        [Entry(tap_name(tap)), Entry(str(one["dimension"]), number=True), *(_number(one[key]) for key in _EXTREMES)]
        for tap, found in taps.items()
        for one in found[:shown]
    ]
    frame = [
        {"source": source, "layer": tap, **one}
        for source, taps in measured.extremes.items()
        for tap, found in taps.items()
        for one in found
    ]
    return Sheet(
        "extremes",
        "The most extreme dimensions",
        "Of each layer the dimensions whose mean over the tokens is the farthest from 0: mean and deviation, the mean "
        "in median deviations of all dimensions (an outlier is above 5), and the share of the summed variance. All "
        "texts together; the CSV has each, and three dimensions of each layer.",
        ("layer", "dimension", *_EXTREMES.values()),
        {"": rows},
        pd.DataFrame(frame, columns=["source", "layer", "dimension", *_EXTREMES]),
    )


_FEW_TAPS = 14
_EXTREMES = {
    "mean": "mean",
    "deviation": "deviation",
    "mean_by_typical_deviation": "mean / median\ndeviation",
    "variance_share": "share of\nvariance",
}


def _matrices(measured: Measured) -> Sheet:
    found = [(which, form, own) for which, forms in measured.matrices.items() for form, own in forms.items()]
    rows = [
        [Entry(which), Entry(model_figures.FORMS.get(form, form)), _count(own["rows"]), _count(own["dimensions"]),
         *(_number(own[key]) for key in _MATRICES)]
        for which, form, own in found
    ]  # fmt: skip
    keys = ("rows", "dimensions", *_MATRICES)
    alone = "The model has no output embeddings of its own."
    return Sheet(
        "matrices",
        "Embedding matrices",
        "Figures of the embedding matrices as they are, centered, and without their first components (all-but-the-top, "
        "a hundredth of the dimensions).",
        ("matrix", "form", "rows", "dimensions", *_MATRICES.values()),
        {"": rows},
        pd.DataFrame(
            [{"matrix": which, "form": form, **{key: own[key] for key in keys}} for which, form, own in found]
        ),
        notes=() if "output" in measured.matrices else (alone,),
        row_headers=2,
    )


_MATRICES = {
    "partition_isotropy_as_computed": "I(W), signs\nas computed",
    "partition_isotropy_both": "I(W),\nboth signs",
    "average_norm": "average\nnorm",
    "mean_vector_norm": "norm of\nthe mean",
    "norm_ratio": "norm\nratio",
}


def _final_norm(measured: Measured) -> Sheet:
    own = measured.final_norm or {}
    found = [(name, own[name], meaning) for name, meaning in _NORM.items() if name in own]
    return Sheet(
        "final_norm",
        "The final normalization",
        "Gain g and bias b of the normalization behind the last layer, over d dimensions.",
        ("figure", "value", "what it is"),
        {"": [[Entry(tap_name(name)), _of_norm(value), Entry(meaning)] for name, value, meaning in found]},
        pd.DataFrame(
            [{"figure": name, "value": _plain(value)} for name, value, _ in found], columns=["figure", "value"]
        ),
    )


_NORM = {
    "gain": "norm of g by the root of d",
    "bias": "norm of b by the root of d; 0 where there is none",
    "ratio": "bias by gain; small in isotropic models",
    "bias_over_gain": "sum of b/g: if it is not 0, all outputs lie on one side of a hyperplane through the origin",
    "zero_gains": "dimensions with g = 0, which that sum leaves out",
    "outlier_gains": "dimensions whose gain is more than three deviations from the mean",
    "outlier_biases": "dimensions whose bias is",
}


def _of_norm(value: Any) -> Entry:
    return Entry(_plain(value) or "none", number=True) if isinstance(value, Sequence) else _number(value)


def _spheres(found: Sequence[Sphere]) -> Sheet:
    keys = {
        "inter_sim": "average\ncosine",
        "isoscore": "IsoScore",
        "partition_as_computed": "I(W), signs\nas computed",
        "partition_both": "I(W),\nboth signs",
    }
    rows = [{"sphere": one.name, **{key: getattr(one, key) for key in keys}} for one in found]
    return Sheet(
        "spheres",
        "Two spheres",
        "What the measures say of them.",
        ("sphere", *keys.values()),
        {"": [[Entry(one.name), *(_number(getattr(one, key)) for key in keys)] for one in found]},
        pd.DataFrame(rows),
    )


def _settings(measured: Measured) -> Sheet:
    plain = {name: value for name, value in measured.settings.items() if name != "texts"}
    texts = {f"text {name}": path for name, path in measured.settings["texts"].items()}
    model = {f"model {name}" if name != "name" else "model": value for name, value in measured.model.items()}
    found = {**model, "weights": measured.weights, **plain, **texts}
    return Sheet(
        "settings",
        "Settings",
        "Of the pass: what was read, and how. Equal weights have equal hashes.",
        ("setting", "value"),
        {"": [[Entry(name.replace("_", " ")), Entry(_plain(value), code=True)] for name, value in found.items()]},
        pd.DataFrame([{"setting": name, "value": _plain(value)} for name, value in found.items()]),
    )


def _plain(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)


def _count(value: float) -> Entry:
    return Entry(f"{value:,.0f}", number=True)


def _number(value: float | None) -> Entry:
    if value is None or value != value:
        return Entry("\u2013", number=True)
    return Entry(f"{value:,.0f}" if 1_000 <= abs(value) < 1e9 else f"{value:.4g}", number=True)
