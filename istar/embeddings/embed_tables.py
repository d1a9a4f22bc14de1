"""Tables 1 to 3 of *Too Much in Common* from measured embedding matrices, with the paper's numbers beside them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import scipy.stats
from rich.table import Table

from istar.drawing.page_tables import Entry, Sheet
from istar.embeddings import embed, published_embeddings
from istar.embeddings.embed_models import ModelEmbeddings
from istar.embeddings.published_embeddings import BENCHMARK_TITLES

_MEASURED, _BOTH_SIGNS, _PUBLISHED, _DIFFERENCE = "istar", "both signs", "paper", "difference"
FORM_NAMES = {
    "raw": "raw",
    "centered": "centered",
    "scaled_centered": "centered-scaled",
    "all_but_the_top": "post-processed",
    "all_but_the_top_published": "post-processed, as published in 2018",
}
"""Names of the forms in tables, after those of the paper."""
_ISOTROPY_COLUMNS = {
    "isotropy_raw": ("I(W)\nraw", "raw"),
    "isotropy_centered": ("I(W)\ncentered", "centered"),
    "isotropy_post_processed": ("I(W), top\nremoved", "all_but_the_top"),
}
"""Header and form of the I(W) columns of Table 1, by the column's name in the CSV file with the paper's numbers."""
_NORM_COLUMNS = {
    "average_norm": ("average\nnorm", "average_norm"),
    "mean_vector_norm": ("norm of\nthe mean", "mean_vector_norm"),
    "mean_to_average_norm": ("ratio", "norm_ratio"),
}
"""Header and measure of the other columns of Table 1, by the column's name in the CSV file with the paper's numbers."""
_SCORE_HEADERS = {"cosine": "cosine", "inner_product": "inner\nproduct"}


@dataclass(frozen=True)
class _Row:
    """A row of a table: numbers by column, measured or published."""

    model: str  # label of the model
    form: str  # form of the matrix; empty in Table 1
    source: str  # where the numbers are from, such as `istar` or `paper`
    values: Mapping[str, float]


def make_table1(models: Sequence[ModelEmbeddings]) -> Sheet:
    """Return Table 1 of *Too Much in Common*: isotropy and norms of the embedding matrix of each model.

    A model has rows of measured numbers and, if the paper has the model, of published numbers and of the differences.
    """
    rows = [row for model in models for row in _make_isotropy_rows(model)]
    headers = {name: header for name, (header, _) in (_ISOTROPY_COLUMNS | _NORM_COLUMNS).items()}
    caption = (
        "I(W) of the embedding matrices raw, centered, and without the first principal components; average norm of the "
        "rows, norm of their mean, and the ratio of the two. I(W) depends on the signs of the eigenvectors: the row "
        "istar has them as computed, as the paper does, which depends on the eigensolver; compare models by the row "
        "with both signs."
    )
    title = "Table 1: isotropy and norms"
    notes = _describe_norm_correlation(models)
    return _make_sheet("table1", title, caption, rows, headers, lambda value: f"{value:.3f}", notes)


def make_table2(models: Sequence[ModelEmbeddings]) -> Sheet:
    """Return Table 2 of *Too Much in Common*: the average word similarity of each model and form.

    The table also has the difference of each form from the raw matrix, and the published numbers.
    """
    rows = [row for model in models for row in _make_average_rows(model)]
    headers: dict[str, str] = {}
    for score, header in _SCORE_HEADERS.items():
        headers |= {score: header, f"{score}_gain": f"{header.split()[-1]}\nminus raw"}
    headers["benchmarks"] = "benchmarks"
    caption = (
        "Average over the benchmarks of Pearson's r with the ratings, times 100, and its difference to the raw matrix. "
        "Bold: the best form of each model. The paper's averages are shown where all five of its benchmarks were given."
    )
    title = "Table 2: average word similarity"
    sheet = _make_sheet("table2", title, caption, rows, headers, format_score, _describe_left_out(models))
    return _mark_best(sheet, rows, list(headers))


def average_similarity(model: ModelEmbeddings) -> dict[str, dict[str, float]]:
    """Return the average over the benchmarks of 100 times Pearson's r with the ratings, by form and score.

    The scores are `cosine` and `inner_product`. A benchmark whose correlation is undefined makes the average NaN.
    Without benchmarks, the result is empty.
    """
    if model.word_similarity.empty:
        return {}
    return {
        str(form): {score: 100 * float(rows[f"{score}_pearson"].mean(skipna=False)) for score in _SCORE_HEADERS}
        for form, rows in model.word_similarity.groupby("form", sort=False)
    }


def make_table3(models: Sequence[ModelEmbeddings]) -> Sheet:
    """Return Table 3 of *Too Much in Common*: the word similarity of each model and form on each benchmark."""
    rows = [row for model in models for row in _make_benchmark_rows(model)]
    used_benchmarks = {column.partition("/")[0] for row in rows for column in row.values}
    names = [name for name in BENCHMARK_TITLES if name in used_benchmarks]
    names += sorted(used_benchmarks.difference(names))
    headers = {
        f"{name}/{score}": f"{BENCHMARK_TITLES.get(name, name)}\n{_SCORE_HEADERS[score].replace(chr(10), ' ')}"
        for name in names
        for score in ("inner_product", "cosine")
    }
    caption = (
        "Pearson's r with the ratings, times 100, on each benchmark. Pairs with a word that is not a single token are "
        "left out, so that models with other tokenizers are not comparable. The paper's table has no centered form."
    )
    title = "Table 3: word similarity by benchmark"
    return _make_sheet("table3", title, caption, rows, headers, format_score, _describe_kept_pairs(models))


def make_coverage_table(models: Sequence[ModelEmbeddings], words: pd.DataFrame) -> Sheet:
    """Return the table of how many of the most frequent words or tokens make up given shares of the texts.

    Section 2.2 of *Too Much in Common* has such numbers, which the last row shows.
    """
    frequencies_by_unit = {"words": words, **{f"tokens of {model.label}": model.token_frequencies for model in models}}
    rows = []
    for unit, frequencies in frequencies_by_unit.items():
        cumulative_share = frequencies["cumulative_share"]
        counts = {str(share): embed.count_needed(cumulative_share, share) for share in embed.TEXT_SHARES}
        occurrences = int(frequencies["count"].sum())
        rows.append({"unit": unit, "different": len(frequencies), "occurrences": occurrences, **counts})
    rows.append({"unit": "WordPiece tokens of the CNN corpus, as published"}
                | {str(share): count for share, count in published_embeddings.TOKENS_BY_SHARE.items()})  # fmt: skip
    frame = pd.DataFrame(rows)
    entries = [[Entry(str(unit)), *map(_make_count_cell, counts)] for unit, *counts in frame.itertuples(index=False)]
    header = ("unit", "different", "occurrences", *(f"for {share:.0%}\nof the text" for share in embed.TEXT_SHARES))
    caption = (
        "How many of the most frequent words or tokens make up 30%, 50% and 98% of the texts. The paper's last number "
        "is approximate."
    )
    return Sheet("figure4_coverage", "Coverage of the texts", caption, header, {"": entries}, frame)


def make_terminal_table(sheet: Sheet) -> Table:
    """Return the terminal table of a sheet. The first column has the names of the groups, if the sheet has any."""
    has_groups = any(sheet.rows_by_group)
    table = Table(title=sheet.title, title_justify="left", padding=(0, 0, 0, 1))
    for column_index, header in enumerate((sheet.group_header, *sheet.header) if has_groups else sheet.header):
        is_text = column_index < sheet.num_row_headers + has_groups
        table.add_column(
            header, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text or header == "source"
        )
    for group, rows in sheet.rows_by_group.items():
        for index, row in enumerate(rows):
            cells = [entry.text for entry in row]
            is_last = index == len(rows) - 1
            table.add_row(*([group if index == 0 else "", *cells] if has_groups else cells), end_section=is_last)
    return table


def _make_isotropy_rows(model: ModelEmbeddings) -> Iterator[_Row]:
    """Yield the rows of a model in the table of isotropy and norms, measured and published."""

    def collect_isotropy(signs: str) -> dict[str, float]:
        """Return I(W) of each form by the column's name, for a sign convention."""
        measure = f"partition_isotropy_{signs}"
        return {column: model.measures_by_form[form][measure] for column, (_, form) in _ISOTROPY_COLUMNS.items()}

    measured = collect_isotropy("as_computed")
    measured |= {column: model.measures_by_form["raw"][measure] for column, (_, measure) in _NORM_COLUMNS.items()}
    yield _Row(model.label, form="", source=_MEASURED, values=measured)
    yield _Row(model.label, form="", source=_BOTH_SIGNS, values=collect_isotropy("both"))
    paper_model = _find_paper_model(model)
    if paper_model is not None:
        published = dict(published_embeddings.read_isotropy_and_norms(paper_model))
        if model.metadata["components"] is not None:
            del published["isotropy_post_processed"]
        yield from _make_published_rows(model.label, form="", measured=measured, published=published)


def _make_average_rows(model: ModelEmbeddings) -> Iterator[_Row]:
    """Yield the rows of a model in the table of average word similarity, measured and published."""
    similarity = model.word_similarity
    if similarity.empty:
        return
    has_all_benchmarks = set(similarity["benchmark"]) == set(BENCHMARK_TITLES)
    raw_means: dict[str, float] = {}
    published_raw: Mapping[str, float] = {}
    num_benchmarks = float(similarity["benchmark"].nunique())
    for form, means in average_similarity(model).items():
        raw_means = raw_means or means
        measured = _add_gains(means, raw_means) | {"benchmarks": num_benchmarks}
        yield _Row(model.label, form, _MEASURED, measured)
        paper_model = _find_wordsim_paper_model(model, form)
        published = published_embeddings.read_average_similarity(paper_model, form) if has_all_benchmarks else {}
        if published:
            published_raw = published_raw or published
            yield from _make_published_rows(model.label, form, measured, _add_gains(published, published_raw))


def _make_benchmark_rows(model: ModelEmbeddings) -> Iterator[_Row]:
    """Yield the rows of a model in the table of word similarity by benchmark, measured and published."""
    if model.word_similarity.empty:
        return
    for form, form_rows in model.word_similarity.groupby("form", sort=False):
        measured: dict[str, float] = {}
        published: dict[str, float] = {}
        paper_model = _find_wordsim_paper_model(model, str(form))
        for row in form_rows.to_dict("records"):
            paper_scores = published_embeddings.read_benchmark_similarity(paper_model, str(form), str(row["benchmark"]))
            for score in _SCORE_HEADERS:
                column = f"{row['benchmark']}/{score}"
                measured[column] = 100 * row[f"{score}_pearson"]
                if paper_scores:
                    published[column] = paper_scores[score]
        yield _Row(model.label, str(form), _MEASURED, measured)
        if published:
            yield from _make_published_rows(model.label, str(form), measured, published)


def _add_gains(scores: Mapping[str, float], raw_scores: Mapping[str, float]) -> dict[str, float]:
    """Return scores together with their differences from the scores of the raw matrix."""
    return {**scores, **{f"{score}_gain": scores[score] - raw_scores[score] for score in _SCORE_HEADERS}}


def _make_published_rows(
    model_label: str, form: str, measured: Mapping[str, float], published: Mapping[str, float]
) -> tuple[_Row, _Row]:
    """Return the row of published numbers, and the row of the measured numbers minus the published ones."""
    differences = {column: measured[column] - value for column, value in published.items()}
    return _Row(model_label, form, _PUBLISHED, published), _Row(model_label, form, _DIFFERENCE, differences)


def _find_paper_model(model: ModelEmbeddings) -> str | None:
    """Return the model's name in *Too Much in Common*, or None if the paper does not have its embedding matrix."""
    metadata = model.metadata
    is_same_matrix = metadata["matrix"] == "input" or metadata["tied"]
    return published_embeddings.find_paper_model(model.label, metadata["model"]) if is_same_matrix else None


def _find_wordsim_paper_model(model: ModelEmbeddings, form: str) -> str:
    """Return the model's name in *Too Much in Common* if its word similarity can be compared with the published one.

    The name is empty if the paper does not have the matrix, or if words of several tokens or the components that are
    removed were treated differently.
    """
    policies = set(model.word_similarity["policy"])
    has_other_components = form == "all_but_the_top" and model.metadata["components"] is not None
    return "" if has_other_components or policies != {"single_token"} else _find_paper_model(model) or ""


def _describe_norm_correlation(models: Sequence[ModelEmbeddings]) -> tuple[str, ...]:
    """Return a sentence on the correlation of average norm and I(W) over the models, as in appendix C of the paper.

    The tuple is empty for fewer than three models, and if the norms or the isotropies are all equal.
    """
    raw_measures = [model.measures_by_form["raw"] for model in models]
    norms = [measures["average_norm"] for measures in raw_measures]
    isotropies = [measures["partition_isotropy_as_computed"] for measures in raw_measures]
    if len(models) < 3 or len(set(norms)) == 1 or len(set(isotropies)) == 1:
        return ()
    correlation = scipy.stats.pearsonr(norms, isotropies).statistic
    return (
        f"The correlation of average norm and raw I(W), with the signs as computed, over these {len(models)} models is "
        f"{correlation:.2f}; the paper has {published_embeddings.NORM_CORRELATION} over its eight.",
    )


def _describe_left_out(models: Sequence[ModelEmbeddings]) -> tuple[str, ...]:
    """Return notes on the benchmarks of which a model has too few words, and on undefined correlations."""
    notes = [f"{model.label}: {note}" for model in models for note in model.notes]
    for model in models:
        if not model.word_similarity.empty:
            undefined_rows = model.word_similarity[model.word_similarity["note"] != ""]
            notes += [f"{model.label}: {row.benchmark}, {row.form}: {row.note}" for row in undefined_rows.itertuples()]
    return tuple(notes)


def _describe_kept_pairs(models: Sequence[ModelEmbeddings]) -> tuple[str, ...]:
    """Return a sentence for each model with the number of word pairs of each benchmark that were correlated."""
    sentences = []
    for model in models:
        if not model.word_similarity.empty:
            benchmarks = model.word_similarity.drop_duplicates("benchmark")
            rows = zip(*(benchmarks[column].tolist() for column in ("benchmark", "kept", "pairs")), strict=True)
            counts = [f"{BENCHMARK_TITLES.get(name, name)} {kept:,} of {pairs:,}" for name, kept, pairs in rows]
            sentences.append(f"Pairs of {model.label}: {'; '.join(counts)}.")
    return tuple(sentences)


def _make_sheet(
    name: str,
    title: str,
    caption: str,
    rows: Sequence[_Row],
    headers: Mapping[str, str],
    format_number: Callable[[float], str],
    notes: tuple[str, ...],
) -> Sheet:
    """Return a table with a group for each model, and a column `form` if any row has a form.

    Args:
        name: name of the table's files.
        title: title of the table.
        caption: caption of the table.
        rows: rows of the table, with the numbers by column.
        headers: headers of the columns by their names.
        format_number: function that formats a number.
        notes: sentences below the table.
    """
    has_forms = any(row.form for row in rows)
    rows_by_model: dict[str, list[list[Entry]]] = {}
    records = []
    for row in rows:
        keys = {"form": row.form, "source": row.source} if has_forms else {"source": row.source}
        records.append({"model": row.model, **keys, **{column: row.values.get(column, math.nan) for column in headers}})
        form_cells = [Entry(FORM_NAMES[row.form])] if has_forms else []
        number_cells = [_make_number_cell(row, column, format_number) for column in headers]
        rows_by_model.setdefault(row.model, []).append([*form_cells, Entry(row.source), *number_cells])
    header = (*(("form",) if has_forms else ()), "source", *headers.values())
    return Sheet(
        name, title, caption, header, rows_by_model, pd.DataFrame(records), notes, num_row_headers=1 + has_forms
    )


def _make_number_cell(row: _Row, column: str, format_number: Callable[[float], str]) -> Entry:
    """Return the cell of a row in a column: empty if the row has no number there, a dash if the number is undefined.

    Positive differences and gains have a plus sign.
    """
    value = row.values.get(column)
    if value is None:
        return Entry("", number=True)
    if math.isnan(value):
        return Entry("\u2013", number=True)
    if column == "benchmarks":
        return Entry(f"{value:.0f}", number=True)
    is_signed = row.source == _DIFFERENCE or column.endswith("_gain")
    text = format_number(value)
    return Entry(f"+{text}" if is_signed and value > 0 else text, number=True)


def _mark_best(sheet: Sheet, rows: Sequence[_Row], columns: list[str]) -> Sheet:
    """Return the table with the best form of each model in bold, for each score of the measured and published numbers.

    Args:
        sheet: the table, with a group for each model.
        rows: rows of the table.
        columns: names of the table's number columns, which are its last ones.
    """
    num_leading_columns = len(sheet.header) - len(columns)
    marked_rows_by_model: dict[str, list[list[Entry]]] = {}
    for model_label, model_cells in sheet.rows_by_group.items():
        model_rows = [row for row in rows if row.model == model_label]
        marked_rows_by_model[model_label] = [list(row) for row in model_cells]
        for source in (_MEASURED, _PUBLISHED):
            for score in _SCORE_HEADERS:
                values = [row.values.get(score, math.nan) if row.source == source else math.nan for row in model_rows]
                best = max((value for value in values if not math.isnan(value)), default=None)
                for index, value in enumerate(values):
                    if value == best:
                        column_index = num_leading_columns + columns.index(score)
                        marked_rows_by_model[model_label][index][column_index] = Entry(
                            model_cells[index][column_index].text, bold=True, number=True
                        )
    return Sheet(**{**vars(sheet), "rows_by_group": marked_rows_by_model})


def format_score(value: float) -> str:
    """Return a score with two decimals."""
    return f"{value:.2f}"


def _make_count_cell(value: float) -> Entry:
    """Return the cell of a count, which is empty for NaN."""
    return Entry("" if math.isnan(value) else f"{value:,.0f}", number=True)
