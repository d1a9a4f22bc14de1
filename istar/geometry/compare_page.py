"""HTML page of `istar compare`: the second and third paper's figures with several models in each."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path

import pandas as pd

from istar.figures.plot import Line, Panel, Plot
from istar.geometry import compare, model_differences
from istar.geometry.compare import Subject
from istar.geometry.intervals import interval_half_width
from istar.geometry.model_figures import (
    FORM_TITLES,
    MEASURE_TITLES,
    column_header,
    format_tap_name,
    make_measure_line,
    make_panel,
    measure_bounds,
)
from istar.geometry.similarity import Similarity
from istar.pages import folder
from istar.pages.folder import PageKind
from istar.pages.page import Page, Section
from istar.pages.sheets import Entry, Sheet, number_entry

KIND = PageKind("comparison", "istar compare", (compare.TABLE,))
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
_BEYOND = 1.15
"""Position of the final normalization on the axis of the relative depth, beyond the last layer."""
_SIGNS = {"as_computed": "signs as computed", "both": "both signs"}
"""Conventions of the signs of I(W)."""
_EMPTY = {"similarity": "Not computed, because no texts were given (--text)."}
"""Why a plot may be missing, by its name."""
_READING = (
    "The layers of each model are at their relative depth: 0 is the output of the embeddings, 1 that of the last "
    "layer. The states after a final normalization, which some models have behind the last layer, are a separate mark "
    "beyond it.",
    "IsoScore, TwoNN and the ranks depend on the number of tokens and on the width. Compare models over the same "
    "texts, with more than ten tokens per dimension. docs/measures.md defines each measure and states its limits.",
)


_BANDS = (
    "Bands in the figures, the bar of a single mark, and ± in the tables are 95% intervals of each model by itself: "
    "from the jackknife over groups of documents and Student's distribution (2.26 errors for 10 groups), and for "
    "TwoNN 1.96 errors of points that are independent of each other. A measure without a band has no error."
)
_DIFFERENCES = (
    "Differences from the first model",
    "Measures of each model's last layer, before a final normalization, minus those of the first model, with 95% "
    "intervals from groups of documents. The intervals say how much a difference would change over other documents of "
    "the same kind, not over other training runs. Each is for itself: of many intervals, one in twenty misses the true "
    "difference. Average norms have the units of the states, and ranks depend on the width.",
)
"""Title and caption of the differences."""
_METHODS = {
    "paired": "{other} and {first} read the same documents in the same groups, so the errors of their differences are "
    "those of the paired jackknife: of the differences without each group.",
    "independent": "{other} and {first} do not have the same documents in the same groups, or their measures.json does "
    "not hold the values without each group. The error of their differences is therefore the root of the sum of the "
    "squares of both errors, which is rather too large than too small.",
}
"""How errors of differences are computed, by `model_differences.Method`."""
_DIFFERENCE_PANELS = ("isoscore", "inter_sim", "norm_ratio", "isoscore_unbiased", "effective_rank", "average_norm")
"""Measures in the figure of differences; the table has all that have an error."""


def check(out: Path) -> None:
    """Refuse a folder that `write` would refuse, so that the error comes before models are measured.

    Raises:
        UserError: if the folder holds anything but an earlier comparison.
    """
    folder.check_replaceable(out, KIND)


def write(subjects: Sequence[Subject], out: Path, similarities: Sequence[Similarity] = (), command: str = "") -> Path:
    """Write the page with its figures and tables, and `comparison.csv`; returns the page's path.

    The page shows the command line that made it.

    Raises:
        UserError: if the folder holds anything but an earlier comparison, or cannot be written.
    """
    folder.check_replaceable(out, KIND)
    tables = [_models(subjects), _layers(subjects), _difference_table(subjects)]
    tables += [_similarity_table(similarities)] if similarities else []
    sheets = {sheet.name: sheet for sheet in tables}
    contents = folder.page_files(_page(subjects, similarities, sheets, command), sheets)
    contents[compare.TABLE] = compare.frame(subjects).to_csv(index=False).encode()
    folder.replace_folder(out, contents, KIND)
    return out / folder.INDEX


def _page(
    subjects: Sequence[Subject], similarities: Sequence[Similarity], sheets: dict[str, Sheet], command: str
) -> Page:
    """Put the page together from its tables and plots."""
    sections = [
        Section("reading", "How to read this", (*_READING, _BANDS, *compare.differences(subjects))),
        Section("table-models", sheets["models"].title, (), sheets["models"], is_wide=True),
    ]
    methods = _difference_methods(subjects)
    for plot in (_difference_plot(subjects), *plots(subjects), similarity_plot(similarities)):
        empty = "" if plot.panels else _EMPTY.get(plot.name, "Not measured for any of these models.")
        text = [plot.caption]
        if plot.name == "differences":
            text, empty = ([plot.caption, *methods], "") if plot.panels else ([], " ".join(methods))
        sections.append(
            Section(plot.name, plot.title, text, sheets.get(plot.name), folder.render_pictures(plot), empty)
        )
    sections.append(Section("table-layers", sheets["layers"].title, (), sheets["layers"], is_wide=True))
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    names = [subject.label for subject in subjects]
    about = ("Models", ", ".join(names), f"compared by istar {version('istar')}")
    tokens = sorted({int(subject.last_layer["tokens"]) for subject in subjects})
    counted = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    summary = [(str(len(names)), "models"), (counted, "tokens")]
    return Page(f"Geometry of {enumerate_names(names)}", about, KIND.generator, summary, sections)


def enumerate_names(names: Sequence[str]) -> str:
    """Join names as in a sentence; of more than three, the first two and the number of the others."""
    if len(names) > 3:
        return f"{names[0]}, {names[1]} and {len(names) - 2} others"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def plots(subjects: Sequence[Subject]) -> list[Plot]:
    """Return the plots of the measures in the order of the page; a model has the same colour in each."""
    results = [
        *(_layer_plot(subjects, name) for name in _LAYER_PLOTS),
        _spectra(subjects),
        _state_norms(subjects),
        _partition(subjects),
        _final_norm(subjects),
    ]
    return [_with_colours(plot, subjects) for plot in results]


def _with_colours(plot: Plot, subjects: Sequence[Subject]) -> Plot:
    """Give each model the colour of its place among the models, also where a model before it has no line.

    No label is drawn in black, because black stands for runs without a penalty and not for a model.
    """
    return replace(plot, labels=tuple(subject.label for subject in subjects), reference_label="")


def _layer_plot(subjects: Sequence[Subject], name: str) -> Plot:
    """Plot measures by relative depth, with a line for each model, and a mark after its final normalization."""
    title, caption, keys = _LAYER_PLOTS[name]
    panels = []
    for key in keys:
        lines = []
        for subject in subjects:
            lines.append(make_measure_line(subject.label, subject.relative_depths, subject.layers, key, subject.groups))
            if subject.final_norm is not None:
                lines.append(make_measure_line(subject.label, (_BEYOND,), [subject.final_norm], key, subject.groups))
        if lines := [line for line in lines if any(map(math.isfinite, line.y))]:
            bounds = measure_bounds(key, [subject.measured for subject in subjects])
            panels.append(make_panel(MEASURE_TITLES[key], lines, y_bounds=bounds))
    has_norm = any(subject.final_norm is not None for subject in subjects)
    ticks = {0.0: "0", 0.25: "0.25", 0.5: "0.5", 0.75: "0.75", 1.0: "1", _BEYOND: "final\nnorm"} if has_norm else {}
    return Plot(name, title, caption, "line", "relative depth", tuple(panels), x_names=ticks)


def _difference_methods(subjects: Sequence[Subject]) -> list[str]:
    """Return, for each model but the first, why it has no differences, or how their errors are computed."""
    first, *others = subjects
    return [
        model_differences.refusal(first, other)
        or _METHODS[model_differences.method(first, other)].format(first=first.label, other=other.label)
        for other in others
    ]


def _difference_plot(subjects: Sequence[Subject]) -> Plot:
    """Plot the differences of each model's last layer from the first model, with their 95% intervals."""
    first, *others = subjects
    rows = {(row["model"], row["measure"]): row for row in model_differences.rows(subjects) if row["is_last"]}
    panels = []
    for name in _DIFFERENCE_PANELS:
        if not any(measure == name for _, measure in rows):
            continue
        # A point at 0 stands for the first model, so that the legend names all models.
        lines = [Line(first.label, (0.0,), (0.0,))]
        for number, other in enumerate(others, start=1):
            if row := rows.get((other.label, name)):
                half_length = (row["high"] - row["low"]) / 2
                lines.append(Line(other.label, (float(number),), (row["difference"],), y_error=(half_length,)))
        panels.append(
            replace(make_panel(f"difference of {MEASURE_TITLES[name]}", lines), horizontal_line=(0.0, "no difference"))
        )
    title, caption = _DIFFERENCES
    positions = {float(number): "" for number in range(len(subjects))}
    plot = Plot("differences", title, caption, "points", "", tuple(panels), x_names=positions)
    return _with_colours(plot, subjects)


def _difference_table(subjects: Sequence[Subject]) -> Sheet:
    """Return the table of differences; the page shows the last layers, the CSV all layers that are compared."""
    rows = model_differences.rows(subjects)
    groups: dict[str, list[list[Entry]]] = {}
    for row in filter(itemgetter("is_last"), rows):
        numbers = [row[name] for name in ("value", "value_of_first", "difference", "low", "high")]
        entries = [Entry(MEASURE_TITLES[row["measure"]]), *map(number_entry, numbers), Entry(row["method"])]
        groups.setdefault(row["model"], []).append(entries)
    title, _ = _DIFFERENCES
    return Sheet(
        "differences",
        title,
        "Measures of the last layer: the model, the first model, their difference, the ends of its 95% interval, and "
        "how its error was computed. The CSV also has the errors and, for models with the same number of layers, the "
        "differences of each layer.",
        ("measure", "model", "first\nmodel", "difference", "95%\nfrom", "95%\nto", "error"),
        groups,
        pd.DataFrame(rows),
    )


def _spectra(subjects: Sequence[Subject]) -> Plot:
    """Plot the singular values of each model's last layer, raw and centered."""
    panels = []
    for form in ("raw", "centered"):
        lines = []
        for subject in subjects:
            spectra = subject.measured.spectra.get(subject.measured.combined_key, {})
            values = spectra.get(_last_tap(subject), {}).get(form, [])
            # Divided by the root of the number of tokens, a singular value is the root mean square along its direction.
            scale = math.sqrt(subject.last_layer["tokens"])
            positive = [value / scale for value in values if value > 1e-4 * max(values)]
            if positive:
                lines.append(Line(subject.label, tuple(map(float, range(1, len(positive) + 1))), tuple(positive)))
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


def _state_norms(subjects: Sequence[Subject]) -> Plot:
    """Plot the distribution functions of the norms of each model's last layer."""
    lines = []
    for subject in subjects:
        histograms = subject.measured.norms.get(subject.measured.combined_key, {})
        histogram = histograms.get(_last_tap(subject))
        if histogram and histogram["counts"]:
            below, above = histogram.get("outside", (0, 0))
            totals = list(itertools.accumulate(histogram["counts"], initial=below))
            whole = totals[-1] + above
            lines.append(Line(subject.label, tuple(histogram["edges"]), tuple(100 * total / whole for total in totals)))
    return Plot(
        "state_norms",
        "Norms of the last layer",
        "Percentage of the tokens whose state in the last layer has at most this norm.",
        "line",
        "norm",
        (make_panel("tokens, percent", lines),) if lines else (),
        log_x=True,
    )


def _last_tap(subject: Subject) -> str:
    """Return the name of the last layer's output."""
    return list(subject.measured.all_texts)[len(subject.layers) - 1]


def _partition(subjects: Sequence[Subject]) -> Plot:
    """Plot I(W) of the embedding matrices by form and convention of the signs, with a bar for each model."""
    panels = []
    for which, (signs, name) in itertools.product(("input", "output"), _SIGNS.items()):
        lines = []
        for subject in subjects:
            forms = subject.measured.matrices.get(which)
            if forms:
                values = tuple(figures[f"partition_isotropy_{signs}"] for figures in forms.values())
                lines.append(Line(subject.label, tuple(map(float, range(len(forms)))), values))
        if lines:
            panels.append(make_panel(f"I(W), {name}", lines, f"{which} embeddings"))
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
        x_names={float(number): name for number, name in enumerate(FORM_TITLES.values())},
    )


def _final_norm(subjects: Sequence[Subject]) -> Plot:
    """Plot the norms of the gain and the bias of the final normalization, with a bar for each model."""
    lines = []
    for subject in subjects:
        norm = subject.measured.final_norm
        if norm is not None:
            lines.append(Line(subject.label, (0.0, 1.0), (norm["gain"], norm["bias"])))
    return Plot(
        "final_norm",
        "The final normalization",
        "Norms of the gain and the bias of the normalization behind the last layer, divided by the square root of the "
        "width. Models without such a normalization, such as BERT, have no bars.",
        "columns",
        "",
        (make_panel("norm", lines),) if lines else (),
        x_names={0.0: "gain", 1.0: "bias"},
    )


def similarity_plot(similarities: Sequence[Similarity]) -> Plot:
    """Plot CKA of the layers of each pair of models, with a panel for each pair."""
    panels = []
    for pair in similarities:
        rows = zip(pair.first_taps, pair.values, strict=True)
        lines = [Line(format_tap_name(tap), tuple(map(float, range(len(values)))), values) for tap, values in rows]
        columns = tuple(map(format_tap_name, pair.second_taps))
        panels.append(
            Panel("", f"{pair.second} (columns)", tuple(lines), "", f"{pair.first} (rows)", column_names=columns)
        )
    number = f"{similarities[0].documents:,}" if similarities else "some"
    return Plot(
        "similarity",
        "Similarity of the layers (CKA)",
        f"Debiased linear CKA of the layers of two models: the mean states of {number} documents at a place in one "
        "model (rows) and in the other (columns, named in the title). 1: equal but for rotation, translation and "
        "scale; 0: unrelated, and slightly negative by chance.",
        "heatmap",
        "",
        tuple(panels),
    )


def _similarity_table(similarities: Sequence[Similarity]) -> Sheet:
    """Return the table that names, for each layer of one model, the most similar layer of the other."""
    pairs = [
        {
            "first": pair.first,
            "second": pair.second,
            "layer": first_tap,
            "other_layer": second_tap,
            "cka": value,
            "is_best": value == max(values),
        }
        for pair in similarities
        for first_tap, values in zip(pair.first_taps, pair.values, strict=True)
        for second_tap, value in zip(pair.second_taps, values, strict=True)
    ]
    frame = pd.DataFrame(pairs)
    shown = frame[frame["is_best"]].drop(columns="is_best")
    entries = [[_entry(value) for value in row] for row in shown.itertuples(index=False)]
    header = ("first", "second", "layer of the first", "most similar of the second", "CKA")
    caption = "For each layer of a model, the layer of the other model with the largest CKA; the CSV has all pairs."
    return Sheet("similarity", "Most similar layers", caption, header, {"": entries}, frame.drop(columns="is_best"))


_MODEL_HEADERS = {
    "partition_raw": "I(W)\nraw",
    "partition_centered": "I(W)\ncentered",
    "partition_post_processed": "I(W)\npost-processed",
    "norm_ratio": "norm\nratio",
    "gain": "final\ngain",
    "bias": "final\nbias",
}


def _models(subjects: Sequence[Subject]) -> Sheet:
    """Return the table with a row for each model."""
    summary = compare.summary(subjects)
    shown = summary.drop(columns="weights")
    return Sheet(
        "models",
        "All models",
        "Measures of each model's last layer over all its texts; I(W), with both signs of the eigenvectors, and norm "
        "ratio of the embedding matrix nearest to the prediction; norms of the final normalization's gain and bias. A "
        "dash marks what a model does not have.",
        tuple(_MODEL_HEADERS.get(name, MEASURE_TITLES.get(name, name)) for name in map(str, shown)),
        {"": [[_entry(value) for value in row] for row in shown.itertuples(index=False)]},
        summary,
    )


_LAYER_COLUMNS = ("layer", "relative_depth", "tokens")


def _layers(subjects: Sequence[Subject]) -> Sheet:
    """Return the table with a row for each layer of each model."""
    frame = compare.frame(subjects)
    names = [name for name in MEASURE_TITLES if name in frame]
    groups = {
        subject.label: [
            [
                *(_entry(row[column]) for column in _LAYER_COLUMNS),
                *(
                    number_entry(row.get(name, math.nan), interval_half_width(row, name, subject.groups))
                    for name in names
                ),
            ]
            for row in compare.rows([subject])
        ]
        for subject in subjects
    }
    header = tuple(map(column_header, (*_LAYER_COLUMNS, *names)))
    caption = "Measures of the hidden states of each layer over all texts; the CSV has the standard errors."
    return Sheet("layers", "All layers", caption, header, groups, frame)


def _entry(value: object) -> Entry:
    """Return a cell: a number as `number_entry` does, a text with spaces for underscores."""
    if isinstance(value, str):
        return Entry(value.replace("_", " "))
    assert isinstance(value, int | float)
    return number_entry(value)
