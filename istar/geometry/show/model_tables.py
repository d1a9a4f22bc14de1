"""Tables of the geometry of models, for the page and its files.

A table of several models has their rows one below the other, in a group for each model.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pandas as pd

from istar.drawing.page_tables import Entry, Sheet, group_rows_by_model, number_entry
from istar.geometry.collect.measures_file import Measurements, interval_half_width, layer_frame, t_quantile
from istar.geometry.show import compare
from istar.geometry.show.compare import TEXTS, MeasuredModel
from istar.geometry.show.measured_training import MeasuredTraining
from istar.geometry.show.model_figures import FORM_TITLES, MEASURE_TITLES, name_tap
from istar.measures.catalogue import MEASURES

if TYPE_CHECKING:
    from istar.geometry.collect.mean_states import Similarity

_MAX_ROWS = 80
"""Most rows of a text in the page's table of layers if there are several; the files have all rows."""
_MAX_TAPS_IN_FULL, _MAX_ROWS_OF_TAP = 14, 3
"""The tables of extreme dimensions and massive activations have at most three rows for each place of a model, and one
if there are more than 14 places."""


def column_header(name: str) -> str:
    """Return the header of a column: the title of a measure, or the name."""
    if name in TEXTS["headers"]:
        return str(TEXTS["headers"][name])
    return MEASURE_TITLES.get(name, name.replace("_", " "))


def _format_value(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "none" if value is None else "" if value != value else str(value)  # NaN differs from itself


def _make_entry(value: Any) -> Entry:
    if isinstance(value, Entry):
        return value
    if isinstance(value, str):
        return Entry(value)
    if isinstance(value, Sequence):
        return Entry(_format_value(value) or "none", number=True)
    return number_entry(value)


def _make_sheet(name: str, shown: pd.DataFrame, frame: pd.DataFrame, words: Mapping[str, str] | None = None) -> Sheet:
    """Return a table that shows the data frame `shown`; its CSV file has the unrounded numbers of `frame`."""
    rows = [[_make_entry(value) for value in row] for row in shown.itertuples(index=False)]
    return Sheet(name, *_get_texts(name, words or {}), tuple(map(column_header, map(str, shown))), {"": rows}, frame)


def _get_texts(name: str, words: Mapping[str, str]) -> tuple[str, str]:
    """Return the title and the caption of a table, with `words` for the names in braces."""
    title, caption = (str(TEXTS["tables"][name][part]).format_map(words) for part in ("title", "caption"))
    return title, caption


def join_sheets(models: Sequence[MeasuredModel], build: Callable[[Measurements], Sheet]) -> Sheet:
    """Return the table of a model, or the tables of several models as groups of one table."""
    sheets = [build(model.measurements) for model in models]
    if len(models) == 1:
        return sheets[0]
    longest = max(sheets, key=lambda sheet: len(sheet.header))
    labels = [model.label for model in models]
    frames = [sheet.frame.assign(model=label) for label, sheet in zip(labels, sheets, strict=True)]
    groups = {label: sheet.rows for label, sheet in zip(labels, sheets, strict=True) if sheet.rows}
    return replace(longest, rows_by_group=groups, frame=pd.concat(frames, ignore_index=True))


def number_with_interval(measures: Mapping[str, float], name: str, num_groups: int) -> Entry:
    """Return a table cell with a measure and its 95% interval, if it has one."""
    error = measures.get(f"{name}_error", math.nan)
    return number_entry(measures.get(name, math.nan), interval_half_width(name, error, num_groups))


def build_layer_sheet(models: Sequence[MeasuredModel]) -> Sheet:
    """Return the table of all layers, with a group for each text of the only model, or for each of several models."""
    if len(models) == 1:
        sources = models[0].measurements.sources
        groups = {source: (models[0], taps) for source, taps in sources.items()}
        frame = layer_frame(models[0].measurements)
    else:
        groups = {model.label: (model, model.measurements.all_texts) for model in models}
        frame = pd.DataFrame(compare.make_layer_rows(models))
    names = [name for name in MEASURE_TITLES if name in frame]
    rows_by_group = {
        group: [
            [
                Entry(name_tap(tap)),
                number_entry(measures["points"]),
                *(number_with_interval(measures, name, model.num_groups) for name in names),
            ]
            for tap, measures in taps.items()
        ]
        for group, (model, taps) in groups.items()
    }
    words, measured = models[0].words, models[0].measurements
    notes = () if measured.kind == "tokens" else tuple(compare.describe_points(measured))
    if len(models) == 1 and sum(map(len, rows_by_group.values())) > _MAX_ROWS and len(groups) > 1:
        combined = models[0].measurements.combined_key
        rows_by_group = {combined: rows_by_group[combined]}
        notes = ("All texts together; the files have each text.",)
    if len(groups) == 1:
        rows_by_group = {"": next(iter(rows_by_group.values()))}
    return Sheet(
        "layers",
        *_get_texts("layers", words),
        (words["state"], words["units"], *map(column_header, names)),
        rows_by_group,
        frame,
        notes,
        group_header="text" if len(models) == 1 else words["subject"],
    )


def build_model_sheet(models: Sequence[MeasuredModel], subject: str = "model") -> Sheet:
    """Return the table with a row for each model or checkpoint: its size, its last layer, I(W) and its final norm.

    `subject` says which of both the models are.

    I(W) is for the matrix nearest to the prediction. It is taken over both signs of the eigenvectors, because only this
    convention is comparable between models.
    """
    rows, shown = [], []
    for model in models:
        measurements, measures = model.measurements, model.last_layer_measures
        matrix_name = "output" if "output" in measurements.matrices else "input"
        measures_by_form = measurements.matrices.get(matrix_name, {})
        final_norm = measurements.final_norm or {}
        row = {
            "model": model.label,
            **{name: measures.get(name, math.nan) for name in compare.SUMMARY_MEASURES},
            **{f"partition_{form}": matrix["partition_isotropy_both"] for form, matrix in measures_by_form.items()},
            "matrix": matrix_name,
            "type": measurements.model["type"] or math.nan,
            "layers": len(model.layers) - 1,
            "dimensions": measurements.width,
            "points": measures["points"],
            "norm_ratio": measures_by_form["raw"]["norm_ratio"] if measures_by_form else math.nan,
            "gain": final_norm.get("gain", math.nan),
            "bias": final_norm.get("bias", math.nan),
        }
        cells = {name: number_with_interval(measures, name, model.num_groups) for name in compare.SUMMARY_MEASURES}
        rows.append({**row, "weights": measurements.weights})
        shown.append({**row, **cells})
    details = ["partition_post_processed", "norm_ratio", "gain", "bias"]  # other tables and figures have them
    display = pd.DataFrame(shown).drop(columns=details, errors="ignore")
    sheet = _make_sheet("models", display, pd.DataFrame(rows), {"subject": subject})
    headers = (subject, *sheet.header[1:])
    return replace(sheet, header=headers, descriptive=("type", "layers", "dimensions", "points", "matrix"))


_TRAINING_COLUMNS = {
    "IsoScore, unbiased": ("isoscore_unbiased", ""),
    **{measure.title: (measure.name, "") for measure in MEASURES if measure.summary},
    "I(W), input": ("partition_isotropy_both", "input_embeddings"),
    "I(W), output": ("partition_isotropy_both", "output_embeddings"),
    "final gain": ("layer_norm_gain", "final_norm_parameters"),
    "final bias": ("layer_norm_bias", "final_norm_parameters"),
}
"""Measure and layer of each column of the table of trainings, by its header; an empty layer is the last one."""


def build_training_sheet(trainings: Sequence[MeasuredTraining]) -> Sheet:
    """Return the table with a row for each training: its checkpoints and steps, and measures at the last checkpoint."""
    rows, shown = [], []
    for training in trainings:
        steps = training.steps
        row = {"model": training.label, "checkpoints": len(steps), "first step": steps[0], "last step": steps[-1]}
        cells: dict[str, Entry] = {}
        for header, (name, layer) in _TRAINING_COLUMNS.items():
            layer_name = layer or training.last_layer
            value = training.values_by_step(layer_name, name)[-1]
            row[header] = value
            cells[header] = number_entry(value, training.half_widths_by_step(layer_name, name)[-1])
        rows.append(row)
        shown.append({**row, **cells})
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    sheet = _make_sheet("trainings", pd.DataFrame(shown)[list(frame)], frame)
    return replace(sheet, name="models", descriptive=("checkpoints", "first step", "last step"))


def build_difference_sheet(models: Sequence[MeasuredModel]) -> Sheet:
    """Return the table of differences from the first model: of the last layers, and in the CSV of all layers."""
    rows = compare.compute_all_differences(models)

    def format_row(row: Mapping[str, Any]) -> list[Entry]:
        numbers = [number_entry(row["value"]), number_entry(row["value_of_first"])]
        difference = number_entry(row["difference"], (row["high"] - row["low"]) / 2)
        cloud = "" if models[0].is_ordered else f", {row['layer']}"
        return [Entry(MEASURE_TITLES[row["measure"]] + cloud), *numbers, difference, Entry(row["method"])]

    subject = models[0].words["subject"]
    return Sheet(
        "differences",
        *_get_texts("differences", models[0].words),
        ("measure", subject, f"first\n{subject}", "difference", "error"),
        group_rows_by_model(filter(itemgetter("is_last"), rows), format_row),
        pd.DataFrame(rows),
        group_header=subject,
        descriptive=("error",),
    )


def build_similarity_sheet(similarities: Sequence["Similarity"], words: Mapping[str, str]) -> Sheet:
    """Return the table that names, for each layer of one model, the most similar layer of the other."""
    rows, shown_rows = [], []
    for similarity in similarities:
        names = {"first": similarity.first, "second": similarity.second}
        errors = similarity.errors_of_largest
        for tap, values, error in zip(similarity.first_taps, similarity.values, errors, strict=True):
            largest = max(values, key=lambda value: -math.inf if math.isnan(value) else value)
            most_similar = similarity.second_taps[values.index(largest)]
            half_width = t_quantile(similarity.num_groups - 1) * error
            shown_most_similar = "\u2013" if math.isnan(largest) else name_tap(most_similar)
            shown = {f"{words['state']} of the first": name_tap(tap), "most similar of the second": shown_most_similar}
            shown_rows.append({**names, **shown, "CKA": number_entry(largest, half_width)})
            rows += [
                {**names, "layer": tap, "other_layer": other_tap, "cka": value}
                | {"cka_error": error if other_tap == most_similar else math.nan}
                for other_tap, value in zip(similarity.second_taps, values, strict=True)
            ]
    return _make_sheet("similarity", pd.DataFrame(shown_rows), pd.DataFrame(rows), words)


_DIMENSION_COLUMNS = {
    "massive": ("dimension", "value", "ratio", "token", "position", "text"),
    "extremes": ("dimension", "mean", "deviation", "mean_by_typical_deviation", "variance_share"),
}
"""Columns of the tables of massive activations and of the dimensions with means farthest from 0."""


def build_dimension_sheet(name: str, measured: Measurements) -> Sheet:
    """Return a table of `_DIMENSION_COLUMNS`: the first rows of each layer over all texts together; the CSV has all."""
    rows = [
        {"source": source, "layer": tap, **row}
        for source, taps in getattr(measured, name).items()
        for tap, tap_rows in taps.items()
        for row in tap_rows
    ]
    frame = pd.DataFrame(rows, columns=["source", "layer", *_DIMENSION_COLUMNS[name]])
    if "ratio" in frame:
        # The ratio to a median of 0 is undefined.
        frame = frame.astype({"ratio": float})
    shown = frame[frame["source"] == measured.combined_key].drop(columns=["source", "token"], errors="ignore")
    num_rows = _MAX_ROWS_OF_TAP if shown["layer"].nunique() <= _MAX_TAPS_IN_FULL else 1
    shown = shown.groupby("layer", sort=False).head(num_rows)
    shown = shown.assign(layer=shown["layer"].map(name_tap))
    for column in shown.columns.intersection(["dimension", "position"]):
        # Indices have no thousands separators.
        shown[column] = shown[column].map(lambda index: Entry(str(int(index)), number=True))
    if "text" in shown:
        shown["text"] = shown["text"].map(lambda text: Entry(text, code=True))
    words = TEXTS["words"][measured.kind]
    return _make_sheet(name, shown.rename(columns={"layer": words["state"]}), frame, words)


def build_matrix_sheet(measured: Measurements) -> Sheet:
    """Return the table of measures of the embedding matrices in each form: raw, centered and post-processed."""
    rows = [
        {"matrix": side, "form": form, **measures}
        for side, forms in measured.matrices.items()
        for form, measures in forms.items()
    ]
    frame = pd.DataFrame(rows, columns=None if rows else ["matrix", "form"]).drop(
        columns="singular_values", errors="ignore"
    )
    sheet = _make_sheet("matrices", frame.assign(form=frame["form"].map(FORM_TITLES)), frame)
    return replace(sheet, num_row_headers=2)


def build_final_norm_sheet(measured: Measurements) -> Sheet:
    """Return the table of the measures of the final normalization's gain and bias."""
    values = measured.final_norm or {}
    measures = [measure for measure in MEASURES if measure.subject == "final_norm" and measure.name in values]
    frame = pd.DataFrame(
        {"measure": [measure.name for measure in measures], "value": [values[measure.name] for measure in measures]},
        dtype=object,
    )
    titles = [measure.title for measure in measures]
    meanings = [measure.meaning for measure in measures]
    return _make_sheet(
        "final_norm",
        frame.assign(measure=titles, meaning=meanings),
        frame.assign(value=frame["value"].map(_format_value)),
    )


def build_reading_sheet(measured: Measurements) -> Sheet:
    """Return a table with how much of each text was read and the time it took, one row per text."""
    columns = ["text", "documents", "sentences", "characters", "bytes", "tokens", "seconds", "forward_seconds"]
    rows = [{"text": text, **reading} for text, reading in measured.readings.items()]
    frame = pd.DataFrame(rows, columns=columns)
    frame.insert(5, "bytes_per_document", frame["bytes"].astype(float) / frame["documents"].astype(float))
    sheet = _make_sheet("texts", frame.rename(columns={"text": "name"}), frame)
    if measured.seconds is None:
        return sheet
    processes = f", in {measured.processes} processes, over which the forward passes are summed"
    total = (
        f"Everything took {measured.seconds:,.1f} seconds on {measured.model['device']}"
        f"{processes if measured.processes > 1 else ''}: also the loading of the model, its embedding matrices and the "
        "computation of the measures, but not the drawing of this page."
    )
    return replace(sheet, notes=(total,))


def build_settings_sheet(measured: Measurements) -> Sheet:
    """Return the table of the model, the texts and the settings of the pass."""
    words = TEXTS["words"][measured.kind]
    values = {words["subject"]: measured.model["name"]}
    values |= {f"{words['subject']} {name}": value for name, value in measured.model.items() if name != "name"}
    values |= {"weights": measured.weights}
    if measured.kind != "tokens":
        values = {name: value for name, value in values.items() if value}
    values |= {name: value for name, value in measured.settings.items() if name != "texts"}
    values |= {f"text {name}": path for name, path in measured.settings.get("texts", {}).items()}
    values |= {f"groups of {state}": number for state, number in measured.groups.items()}
    names = [compare.SETTING_NAMES.get(name, name) for name in values]
    frame = pd.DataFrame({"setting": names, "value": map(_format_value, values.values())})
    value_entries = frame["value"].map(lambda text: Entry(text, code=True))
    return _make_sheet(
        "settings", frame.assign(setting=frame["setting"].str.replace("_", " "), value=value_entries), frame, words
    )


def build_gap_sheet(measured: Measurements) -> Sheet:
    """Return the table with the distance and the cosine of the means of each pair of clouds."""
    frame = pd.DataFrame(measured.gaps)
    return replace(_make_sheet("gaps", frame, frame), num_row_headers=2)


MODEL_SHEET_BUILDERS: tuple[Callable[[Measurements], Sheet], ...] = (
    build_gap_sheet,
    partial(build_dimension_sheet, "massive"),
    partial(build_dimension_sheet, "extremes"),
    build_matrix_sheet,
    build_final_norm_sheet,
    build_reading_sheet,
    build_settings_sheet,
)
"""Functions that build the detailed tables of one model, in their order on the page."""
