"""HTML page of `istar compare`: the second and third paper's figures with several models in each."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from istar.drawing import page_folder
from istar.drawing.page import Page, Section
from istar.drawing.page_folder import PageKind
from istar.drawing.page_tables import Entry, Sheet, number_entry
from istar.drawing.plot import Line, Panel, Plot
from istar.files.writing import to_csv
from istar.geometry.collect.intervals import interval_half_width, t_quantile
from istar.geometry.show import compare, comparison_findings, model_differences
from istar.geometry.show.compare import MeasuredModel
from istar.geometry.show.model_figures import (
    FORM_TITLES,
    MEASURE_TITLES,
    column_header,
    format_tap_name,
    make_measure_line,
    make_measure_panel,
    make_panel,
)

if TYPE_CHECKING:
    from istar.geometry.collect.similarity import Similarity

KIND = PageKind("comparison", "istar compare", (compare.TABLE_FILE,))
_LAYER_PLOTS = {
    "isotropy": (
        "Isotropy by depth",
        "IsoScore of the hidden states (how evenly the variance is spread over all directions; 1 is isotropic), with "
        "ζ = 0 and without its bias towards 0 for few tokens.",
        ("isoscore", "isoscore_unbiased"),
    ),
    "directions": (
        "Cosines by depth",
        "InterSim is the mean cosine of the states of any two tokens, IntraSim that of two occurrences of the same "
        "token type. If both are near 1, all states share one direction. Their difference is IntraSim adjusted for "
        "anisotropy.",
        ("inter_sim", "intra_sim", "adjusted_intra_sim"),
    ),
    "dimension": (
        "Intrinsic dimension and rank by depth",
        "TwoNN estimates the local dimension of the cloud; effective rank and participation ratio count the directions "
        "that its spectrum spans. They cannot exceed the model's width.",
        ("two_nn", "effective_rank", "participation_ratio"),
    ),
    "spectrum": (
        "Shape of the spectrum by depth",
        "RankMe is the effective rank of the spectrum without centering, so that a common direction lowers it. NESum "
        "is the sum of the variances of the principal components divided by the largest. alpha-ReQ is the exponent of "
        "a power law fitted to the variances of components 11 to 100, which means something only if R² is near 1.",
        ("rank_me", "nesum", "alpha_req", "alpha_req_r_squared"),
    ),
    "outliers": (
        "Outliers by depth",
        "Outlier dimensions have a mean above 5 median deviations. The kurtosis of a dimension, over the tokens, is "
        "large if few tokens have very large values there. The share of the variance is that of the dimension with the "
        "largest variance.",
        ("outlier_dimensions", "largest_kurtosis", "largest_variance_share"),
    ),
    "norms": (
        "Norms by depth",
        "Average norm of the states, and the norm of their mean divided by that average: 0 for a cloud around the "
        "origin, 1 if all states are equal.",
        ("average_norm", "norm_ratio"),
    ),
}
"""Title, caption and measures of the plots by relative depth, by the plot's name."""
_FINAL_NORM_POSITION = 1.15
"""Position of the final normalization on the axis of the relative depth, beyond the last layer."""
_SIGN_CONVENTIONS = {"as_computed": "signs as computed", "both": "both signs"}
"""Titles of the sign conventions of I(W)."""
_MISSING_REASONS = {"similarity": "Not computed, because no texts were given (--text)."}
"""Reasons why plots are missing, by the plot's name."""
_READING_NOTES = (
    "The layers of each model are at their relative depth: 0 is the output of the embeddings, 1 that of the last "
    "layer. The states after a final normalization, which some models have behind the last layer, are a separate mark "
    "beyond it.",
    "IsoScore, TwoNN and the ranks depend on the number of tokens and on the width. Compare models over the same "
    "texts, with more than ten tokens per dimension. docs/measures.md defines each measure and states its limits.",
)


_INTERVAL_NOTE = (
    "Bands in the figures, the bar of a single mark, and ± in the tables are 95% intervals of each model by itself: "
    "from the jackknife over groups of documents and Student's distribution (2.26 errors for 10 groups), and for "
    "TwoNN 1.96 errors of points that are independent of each other. A measure without a band has no error."
)
_DIFFERENCE_TEXTS = (
    "Differences from the first model",
    "Measures of each model's last layer, before a final normalization, minus those of the first model, with 95% "
    "intervals from groups of documents. The intervals say how much a difference would change over other documents of "
    "the same kind, not over other training runs. Each is for itself: of many intervals, one in twenty misses the true "
    "difference. Average norms have the units of the states, and ranks depend on the width.",
)
"""Title and caption of the plot of differences."""
_ERROR_METHOD_TEXTS = {
    "paired": "{other} and {first} read the same documents in the same groups, so the errors of their differences are "
    "those of the paired jackknife: of the differences without each group.",
    "independent": "{other} and {first} do not have the same documents in the same groups, or their measures.json does "
    "not hold the values without each group. The error of their differences is therefore the root of the sum of the "
    "squares of both errors, which is rather too large than too small.",
}
"""How errors of differences are computed, by `model_differences.ErrorMethod`."""
_PLOTTED_DIFFERENCES = ("isoscore", "inter_sim", "norm_ratio", "isoscore_unbiased", "effective_rank", "average_norm")
"""Measures in the figure of differences; the table has all that have an error."""


def write_page(
    models: Sequence[MeasuredModel], out: Path, similarities: Sequence["Similarity"] = (), command: str = ""
) -> Path:
    """Write the page that compares models, with its figures, tables and `comparison.csv`, and return the page's path.

    Args:
        models: the compared models. Differences are relative to the first.
        out: output folder; an earlier result in it is replaced.
        similarities: layer similarities between pairs of models.
        command: command line, to show on the page.

    Raises:
        UserError: see `istar.drawing.page_folder.write`.
    """
    tables = [_make_model_table(models), _make_layer_table(models), _make_difference_table(models)]
    tables += [_make_similarity_table(similarities)] if similarities else []
    sheets = {sheet.name: sheet for sheet in tables}
    contents = page_folder.page_files(_make_page(models, similarities, sheets, command), sheets)
    contents[compare.TABLE_FILE] = to_csv(compare.make_layer_table(models)).encode()
    return page_folder.write(out, contents, KIND)


def _make_page(
    models: Sequence[MeasuredModel], similarities: Sequence["Similarity"], sheets: dict[str, Sheet], command: str
) -> Page:
    """Assemble the page that compares models from its tables and plots."""
    sections = [
        Section("findings", "What stands out", comparison_findings.describe_comparison(models)),
        Section(
            "reading", "How to read this", (*_READING_NOTES, _INTERVAL_NOTE, *compare.describe_differences(models))
        ),
        Section("table-models", sheets["models"].title, (), sheets["models"], is_wide=True),
    ]
    error_methods = _describe_error_methods(models)
    for plot in (_make_difference_plot(models), *make_plots(models), make_similarity_plot(similarities)):
        empty_note = "" if plot.panels else _MISSING_REASONS.get(plot.name, "Not measured for any of these models.")
        paragraphs = [plot.caption]
        if plot.name == "differences":
            paragraphs, empty_note = (
                ([plot.caption, *error_methods], "") if plot.panels else ([], " ".join(error_methods))
            )
        sections.append(
            Section(
                plot.name, plot.title, paragraphs, sheets.get(plot.name), page_folder.render_pictures(plot), empty_note
            )
        )
    sections.append(Section("table-layers", sheets["layers"].title, (), sheets["layers"], is_wide=True))
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    labels = [model.label for model in models]
    subject_line = ("Models", ", ".join(labels), f"compared by istar {version('istar')}")
    token_counts = sorted({int(model.last_layer_measures["tokens"]) for model in models})
    token_range = f"{token_counts[0]:,}" + (f" to {token_counts[-1]:,}" if len(token_counts) > 1 else "")
    summary = [(str(len(labels)), "models"), (token_range, "tokens")]
    return Page(f"Geometry of {join_names(labels)}", subject_line, KIND.generator, summary, sections)


def join_names(names: Sequence[str]) -> str:
    """Join names as in a sentence: all of up to three names, otherwise the first two and the number of the others."""
    if len(names) > 3:
        return f"{names[0]}, {names[1]} and {len(names) - 2} others"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def make_plots(models: Sequence[MeasuredModel]) -> list[Plot]:
    """Return the plots of all measures in the order of the page; a model has the same colour in each plot."""
    all_plots = [
        *(_make_layer_plot(models, name) for name in _LAYER_PLOTS),
        _make_spectrum_plot(models),
        _make_norm_distribution_plot(models),
        _make_partition_plot(models),
        _make_final_norm_plot(models),
    ]
    return [_fix_model_colours(plot, models) for plot in all_plots]


def _fix_model_colours(plot: Plot, models: Sequence[MeasuredModel]) -> Plot:
    """Return the plot with a fixed colour for each model, which does not depend on which models have a line in it.

    No model is drawn in black, because black stands for runs without a penalty.
    """
    return replace(plot, labels=tuple(model.label for model in models), reference_label="")


def _make_layer_plot(models: Sequence[MeasuredModel], name: str) -> Plot:
    """Return a plot of measures by relative depth, with a line for each model and a mark for its final normalization.

    `name` is a key of `_LAYER_PLOTS`.
    """
    title, caption, measures = _LAYER_PLOTS[name]
    panels = []
    for measure in measures:
        lines = []
        for model in models:
            depths, num_groups = model.relative_depths, model.num_groups
            lines.append(make_measure_line(model.label, depths, model.layer_measures, measure, num_groups))
            if model.final_norm_measures is not None:
                position, final_measures = (_FINAL_NORM_POSITION,), [model.final_norm_measures]
                lines.append(make_measure_line(model.label, position, final_measures, measure, num_groups))
        if lines := [line for line in lines if any(map(math.isfinite, line.y))]:
            panels.append(make_measure_panel(measure, lines, [model.measurements for model in models]))
    ticks = {0.0: "0", 0.25: "0.25", 0.5: "0.5", 0.75: "0.75", 1.0: "1", _FINAL_NORM_POSITION: "final\nnorm"}
    has_final_norm = any(model.final_norm_measures is not None for model in models)
    tick_names = ticks if has_final_norm else {}
    share_y = name == "isotropy"
    return Plot(name, title, caption, "line", "relative depth", tuple(panels), share_y=share_y, x_names=tick_names)


def _describe_error_methods(models: Sequence[MeasuredModel]) -> list[str]:
    """Return a sentence for each model but the first on how the errors of its differences from the first are computed.

    For a model that cannot be compared with the first, the sentence says why.
    """
    first_model, *other_models = models
    sentences = []
    for other_model in other_models:
        reason = model_differences.explain_no_differences(first_model, other_model)
        method_text = _ERROR_METHOD_TEXTS[model_differences.choose_error_method(first_model, other_model)]
        sentences.append(reason or method_text.format(first=first_model.label, other=other_model.label))
    return sentences


def _make_difference_plot(models: Sequence[MeasuredModel]) -> Plot:
    """Return a plot of the differences of each model's last layer from that of the first model, with 95% intervals."""
    first_model, *other_models = models
    differences = filter(itemgetter("is_last"), model_differences.compute_all_differences(models))
    difference_by_key = {(row["model"], row["measure"]): row for row in differences}
    panels = []
    for measure in _PLOTTED_DIFFERENCES:
        if not any(compared_measure == measure for _, compared_measure in difference_by_key):
            continue
        # A point at 0 stands for the first model, so that the legend names all models.
        lines = [Line(first_model.label, (0.0,), (0.0,))]
        for position, other_model in enumerate(other_models, start=1):
            if row := difference_by_key.get((other_model.label, measure)):
                half_width = (row["high"] - row["low"]) / 2
                lines.append(Line(other_model.label, (float(position),), (row["difference"],), y_error=(half_width,)))
        panels.append(
            replace(
                make_panel(f"difference of {MEASURE_TITLES[measure]}", lines), horizontal_line=(0.0, "no difference")
            )
        )
    title, caption = _DIFFERENCE_TEXTS
    tick_names = {float(position): "" for position in range(len(models))}
    plot = Plot("differences", title, caption, "points", "", tuple(panels), x_names=tick_names)
    return _fix_model_colours(plot, models)


def _make_difference_table(models: Sequence[MeasuredModel]) -> Sheet:
    """Return the table of differences from the first model.

    The page shows the differences at the last layers, and the CSV file those at all compared layers.
    """
    rows = model_differences.compute_all_differences(models)
    rows_by_model: dict[str, list[list[Entry]]] = {}
    for row in filter(itemgetter("is_last"), rows):
        numbers = [row[name] for name in ("value", "value_of_first", "difference", "low", "high")]
        entries = [Entry(MEASURE_TITLES[row["measure"]]), *map(number_entry, numbers), Entry(row["method"])]
        rows_by_model.setdefault(row["model"], []).append(entries)
    title, _ = _DIFFERENCE_TEXTS
    return Sheet(
        "differences",
        title,
        "Measures of the last layer: the model, the first model, their difference, the ends of its 95% interval, and "
        "how its error was computed. The CSV also has the errors and, for models with the same number of layers, the "
        "differences of each layer.",
        ("measure", "model", "first\nmodel", "difference", "95%\nfrom", "95%\nto", "error"),
        rows_by_model,
        pd.DataFrame(rows),
    )


def _make_spectrum_plot(models: Sequence[MeasuredModel]) -> Plot:
    """Return a plot of the singular values of each model's last layer, raw and centered."""
    panels = []
    for form in ("raw", "centered"):
        lines = []
        for model in models:
            spectrum_by_layer = model.measurements.spectra.get(model.measurements.combined_key, {})
            singular_values = spectrum_by_layer.get(_get_last_layer_name(model), {}).get(form, [])
            # Divided by the root of the number of tokens, a singular value is the root mean square along its direction.
            scale = math.sqrt(model.last_layer_measures["tokens"])
            scaled_values = [value / scale for value in singular_values if value > 1e-4 * max(singular_values)]
            if scaled_values:
                lines.append(
                    Line(model.label, tuple(map(float, range(1, len(scaled_values) + 1))), tuple(scaled_values))
                )
        if lines:
            panels.append(make_panel("root mean square", lines, FORM_TITLES[form]))
    return Plot(
        "spectra",
        "Spectra of the last layer",
        "Root mean square of the last layer's states along each of their singular directions (singular value divided "
        "by the root of the number of tokens), raw and centered. Values below 1e-4 of the largest are rounding errors "
        "and are left out.",
        "line",
        "number of the singular value",
        tuple(panels),
        log_x=True,
        log_y=True,
        share_axes=True,
    )


def _make_norm_distribution_plot(models: Sequence[MeasuredModel]) -> Plot:
    """Return a plot of the cumulative distribution of the norms of the states in each model's last layer."""
    lines = []
    for model in models:
        histogram_by_layer = model.measurements.norms.get(model.measurements.combined_key, {})
        histogram = histogram_by_layer.get(_get_last_layer_name(model))
        if histogram and histogram["counts"]:
            below, above = histogram.get("outside", (0, 0))
            cumulative_counts = list(itertools.accumulate(histogram["counts"], initial=below))
            num_tokens = cumulative_counts[-1] + above
            percentages = tuple(100 * count / num_tokens for count in cumulative_counts)
            lines.append(Line(model.label, tuple(histogram["edges"]), percentages))
    return Plot(
        "state_norms",
        "Norms of the last layer",
        "Percentage of the tokens whose state in the last layer has at most this norm.",
        "line",
        "norm",
        (make_panel("tokens, percent", lines),) if lines else (),
        log_x=True,
    )


def _get_last_layer_name(model: MeasuredModel) -> str:
    """Return the name under which the measures of the last layer's output are stored, such as `layer_12`."""
    return list(model.measurements.all_texts)[len(model.layer_measures) - 1]


def _make_partition_plot(models: Sequence[MeasuredModel]) -> Plot:
    """Return a plot of I(W) of the embedding matrices by form and sign convention, with a bar for each model."""
    panels = []
    for matrix, (signs, sign_title) in itertools.product(("input", "output"), _SIGN_CONVENTIONS.items()):
        lines = []
        for model in models:
            measures_by_form = model.measurements.matrices.get(matrix)
            if measures_by_form:
                values = tuple(measures[f"partition_isotropy_{signs}"] for measures in measures_by_form.values())
                lines.append(Line(model.label, tuple(map(float, range(len(values)))), values))
        if lines:
            panels.append(make_panel(f"I(W), {sign_title}", lines, f"{matrix} embeddings"))
    return Plot(
        "partition",
        "I(W) of the embedding matrices",
        "Smallest over largest value of the partition function at the eigenvectors c of the matrix; 1 is isotropic. "
        "Signs as computed: c as the eigensolver returns it, the papers' convention, which depends on the solver's "
        "build. Both signs: over c and -c, which is reproducible and meant for comparisons. The output embeddings of "
        "models that have none of their own are the input embeddings.",
        "columns",
        "",
        tuple(panels),
        x_names={float(position): form for position, form in enumerate(FORM_TITLES.values())},
    )


def _make_final_norm_plot(models: Sequence[MeasuredModel]) -> Plot:
    lines = []
    for model in models:
        final_norm = model.measurements.final_norm
        if final_norm is not None:
            lines.append(Line(model.label, (0.0, 1.0), (final_norm["gain"], final_norm["bias"])))
    return Plot(
        "final_norm",
        "The final normalization",
        "Norms of the gain and the bias of the normalization behind the last layer, divided by the square root of the "
        "width. Models without such a normalization, such as BERT, have no bars; a normalization without a bias has 0.",
        "columns",
        "",
        (make_panel("norm", lines),) if lines else (),
        x_names={0.0: "gain", 1.0: "bias"},
    )


def make_similarity_plot(similarities: Sequence["Similarity"]) -> Plot:
    """Return heatmaps of CKA between the layers of two models, with a panel for each pair of models."""
    panels = []
    for similarity in similarities:
        rows = zip(similarity.first_taps, similarity.values, strict=True)
        lines = [Line(format_tap_name(tap), tuple(map(float, range(len(values)))), values) for tap, values in rows]
        column_names = tuple(map(format_tap_name, similarity.second_taps))
        panels.append(
            Panel(
                "",
                f"{similarity.second} (columns)",
                tuple(lines),
                "",
                f"{similarity.first} (rows)",
                column_names=column_names,
            )
        )
    num_documents = f"{similarities[0].documents:,}" if similarities else "some"
    return Plot(
        "similarity",
        "Similarity of the layers (CKA)",
        f"Debiased linear CKA of the layers of two models: the mean states of {num_documents} documents at a place in "
        "one model (rows) and in the other (columns, named in the title). 1: equal but for rotation, translation and "
        "scale; 0: unrelated, and slightly negative by chance.",
        "heatmap",
        "",
        tuple(panels),
    )


def _make_similarity_table(similarities: Sequence["Similarity"]) -> Sheet:
    """Return the table that names, for each layer of one model, the most similar layer of the other."""
    rows, cells = [], []
    for similarity in similarities:
        names = {"first": similarity.first, "second": similarity.second}
        for tap, values, error in zip(
            similarity.first_taps, similarity.values, similarity.errors_of_largest, strict=True
        ):
            largest = max(values)
            most_similar = similarity.second_taps[values.index(largest)]
            half_width = t_quantile(similarity.num_groups - 1) * error
            cells.append([*map(_make_cell, (*names.values(), tap, most_similar)), number_entry(largest, half_width)])
            rows += [
                {**names, "layer": tap, "other_layer": other_tap, "cka": value}
                | {"cka_error": error if other_tap == most_similar else math.nan}
                for other_tap, value in zip(similarity.second_taps, values, strict=True)
            ]
    header = ("first", "second", "layer of the first", "most similar of the second", "CKA")
    caption = (
        "For each layer of a model, the layer of the other model with the largest CKA and its 95% interval over groups "
        "of documents, which does not take into account that it is the largest of several. The CSV has all pairs, and "
        "the standard errors of these."
    )
    return Sheet("similarity", "Most similar layers", caption, header, {"": cells}, pd.DataFrame(rows))


_MODEL_HEADERS = {
    "partition_raw": "I(W)\nraw",
    "partition_centered": "I(W)\ncentered",
    "partition_post_processed": "I(W)\npost-processed",
    "norm_ratio": "norm\nratio",
    "gain": "final\ngain",
    "bias": "final\nbias",
}


def _make_model_table(models: Sequence[MeasuredModel]) -> Sheet:
    summary = compare.summarize_models(models)
    shown_summary = summary.drop(columns="weights")
    rows = []
    for model, row in zip(models, shown_summary.to_dict("records"), strict=True):
        half_widths = {
            name: interval_half_width(model.last_layer_measures, name, model.num_groups)
            for name in compare.SUMMARY_MEASURES
        }
        rows.append([
            number_entry(value, half_widths[name]) if name in half_widths else _make_cell(value)
            for name, value in row.items()
        ])  # fmt: skip
    return Sheet(
        "models",
        "All models",
        "Measures of each model's last layer over all its texts; I(W), with both signs of the eigenvectors, and norm "
        "ratio of the embedding matrix nearest to the prediction; norms of the final normalization's gain and bias. A "
        "dash marks what a model does not have.",
        tuple(_MODEL_HEADERS.get(name) or column_header(name) for name in map(str, shown_summary)),
        {"": rows},
        summary,
    )


_LAYER_COLUMNS = ("layer", "relative_depth", "tokens")


def _make_layer_table(models: Sequence[MeasuredModel]) -> Sheet:
    layer_frame = compare.make_layer_table(models)
    measures = [name for name in MEASURE_TITLES if name in layer_frame]
    rows_by_model = {
        model.label: [
            [
                *(_make_cell(row[column]) for column in _LAYER_COLUMNS),
                *(
                    number_entry(row.get(name, math.nan), interval_half_width(row, name, model.num_groups))
                    for name in measures
                ),
            ]
            for row in compare.make_layer_rows([model])
        ]
        for model in models
    }
    header = tuple(map(column_header, (*_LAYER_COLUMNS, *measures)))
    caption = "Measures of the hidden states of each layer over all texts; the CSV has the standard errors."
    return Sheet("layers", "All layers", caption, header, rows_by_model, layer_frame)


def _make_cell(value: object) -> Entry:
    """Return a table cell for a number, or for a text, whose underscores become spaces."""
    if isinstance(value, str):
        return Entry(value.replace("_", " "))
    assert isinstance(value, int | float)
    return number_entry(value)
