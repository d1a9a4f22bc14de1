"""Tables 1 to 3 of *Too Much in Common* (Biś et al., NAACL 2021): measured matrices and the paper's numbers."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd
import scipy.stats

from istar.drawing.page_folder import read_page_texts
from istar.drawing.page_tables import Entry, Sheet
from istar.embeddings import token_frequencies
from istar.embeddings.embed_models import ModelEmbeddings
from istar.runs.labels import shorten_model_name

FORM_NAMES = {
    "raw": "raw",
    "centered": "centered",
    "scaled_centered": "centered-scaled",
    "all_but_the_top": "post-processed",
    "all_but_the_top_published": "post-processed, as published in 2018",
}
"""Names of the forms in tables, similar to the paper's."""
BENCHMARK_TITLES = {
    "men": "MEN",
    "rw": "RW",
    "simlex999": "SimLex-999",
    "wordsim_similarity": "WordSim similarity",
    "wordsim_relatedness": "WordSim relatedness",
}
"""Title of each benchmark of Table 3, in its order, by its name in `wordsim.Benchmark`."""
NORM_CORRELATION = -0.61
"""Correlation of the average norm with I(W) over the paper's models (appendix C)."""
TOKENS_BY_SHARE = {0.3: 13, 0.5: 85, 0.98: 15_000}
"""Number of WordPiece tokens that make up a share of the CNN corpus (section 2.2); the last is "nearly 15000"."""
UNUSED_COSINE_BY_IDS = {"2,000 to 3,000": 0.27, "28,500 to 29,500": 0.63}
"""Average cosine of the unused tokens of bert-base-cased with the tokens of a range of ids (section 4.2)."""
_ISOTROPY_FORMS = {
    "isotropy_raw": "raw",
    "isotropy_centered": "centered",
    "isotropy_post_processed": "all_but_the_top",
}
"""Form of each column of I(W) in Table 1."""
_NORM_MEASURES = {
    "average_norm": "average_norm",
    "mean_vector_norm": "mean_vector_norm",
    "mean_to_average_norm": "norm_ratio",
}
"""Measure of each other column of Table 1."""
_SCORES = ("cosine", "inner_product")
_TABLE_TEXTS = read_page_texts("istar.embeddings")["tables"]
_HEADERS = {
    "isotropy_raw": "I(W)\nraw",
    "isotropy_centered": "I(W)\ncentered",
    "isotropy_post_processed": "I(W), top\nremoved",
    "average_norm": "average\nnorm",
    "mean_vector_norm": "norm of\nthe mean",
    "mean_to_average_norm": "ratio",
    "inner_product": "inner\nproduct",
    "cosine_gain": "cosine\nminus raw",
    "inner_product_gain": "product\nminus raw",
}


def make_table1(models: Sequence[ModelEmbeddings]) -> Sheet:
    """Return Table 1 of *Too Much in Common*: isotropy and norms of the embedding matrix of each model."""
    rows: list[dict[str, Any]] = []
    for model in models:
        measures = model.measures_by_form
        measured, both_signs = (
            {column: measures[form][f"partition_isotropy_{signs}"] for column, form in _ISOTROPY_FORMS.items()}
            for signs in ("as_computed", "both")
        )
        measured |= {column: measures["raw"][name] for column, name in _NORM_MEASURES.items()}
        rows.append({"model": model.label, "source": "signs as computed", **measured})
        rows.append({"model": model.label, "source": "both signs", **both_signs})
        published = dict(read_published_table("table1", "model").get(find_paper_model(model), {}))
        if model.metadata["components"] is not None:
            published.pop("isotropy_post_processed", None)
        rows += _make_published_rows({"model": model.label}, measured, published)
    return _make_embedding_sheet("table1", pd.DataFrame(rows), "{:.3f}", _describe_norm_correlation(models))


def make_table2(models: Sequence[ModelEmbeddings]) -> Sheet:
    """Return Table 2 of *Too Much in Common*: the average word similarity of each model and form.

    The average over the benchmarks is of 100 times Pearson's r with the ratings. The table also has the difference of
    each form from the raw matrix, and the published numbers.
    """
    rows: list[dict[str, Any]] = []
    for model in models:
        benchmarks = set(model.word_similarity["benchmark"])
        # The first form is raw.
        raw: Mapping[str, float] = {}
        published_raw: Mapping[str, float] = {}
        for form, form_rows in model.word_similarity.groupby("form", sort=False):
            # A benchmark with an undefined correlation makes the average NaN.
            averages = {score: 100 * float(form_rows[f"{score}_pearson"].mean(skipna=False)) for score in _SCORES}
            raw = raw or averages
            names = {"model": model.label, "form": form}
            measured = _add_gains(averages, raw)
            rows.append({**names, "source": "istar", **measured, "benchmarks": len(benchmarks)})
            published: Mapping[str, float] = {}
            if benchmarks == set(BENCHMARK_TITLES):
                paper_key = (_find_wordsim_paper_model(model, str(form)), form)
                published = read_published_table("table2", "model", "variant").get(paper_key, {})
            published_raw = published_raw or published
            rows += _make_published_rows(names, measured, _add_gains(published, published_raw))
    frame = pd.DataFrame(rows)
    frame = frame[
        ["model", "form", "source", "cosine", "cosine_gain", "inner_product", "inner_product_gain", "benchmarks"]
    ]
    best = frame[frame["source"] != "difference"].groupby(["model", "source"])[list(_SCORES)].transform("max")
    is_bold = frame[list(_SCORES)].eq(best)
    return _make_embedding_sheet("table2", frame, "{:.2f}", _describe_left_out(models), is_bold)


def make_table3(models: Sequence[ModelEmbeddings]) -> Sheet:
    """Return Table 3 of *Too Much in Common*: the word similarity of each model and form on each benchmark."""
    rows: list[dict[str, Any]] = []
    for model in models:
        for form, form_rows in model.word_similarity.groupby("form", sort=False):
            measured: dict[str, float] = {}
            published: dict[str, float] = {}
            paper_model = _find_wordsim_paper_model(model, str(form))
            published_by_key = read_published_table("table3", "model", "variant", "benchmark")
            for row in form_rows.to_dict("records"):
                name = str(row["benchmark"])
                paper_scores = published_by_key.get((paper_model, form, name), {})
                for score in ("inner_product", "cosine"):
                    measured[f"{name}/{score}"] = 100 * row[f"{score}_pearson"]
                published |= {f"{name}/{score}": value for score, value in paper_scores.items()}
            names = {"model": model.label, "form": form}
            rows += [{**names, "source": "istar", **measured}, *_make_published_rows(names, measured, published)]
    frame = pd.DataFrame(rows)
    benchmarks = {column.rpartition("/")[0] for column in frame.columns[3:]}
    # The paper's benchmarks come first, in its order.
    ordered = [name for name in BENCHMARK_TITLES if name in benchmarks]
    ordered += sorted(benchmarks.difference(ordered))
    columns = [f"{name}/{score}" for name in ordered for score in ("inner_product", "cosine")]
    frame = frame[["model", "form", "source", *columns]]
    return _make_embedding_sheet("table3", frame, "{:.2f}", _describe_kept_pairs(models))


def make_coverage_table(models: Sequence[ModelEmbeddings], words: pd.DataFrame) -> Sheet:
    """Return the table of how many of the most frequent words or tokens make up given shares of the texts."""
    rows: list[dict[str, Any]] = []
    tables = {"words": words, **{f"tokens of {model.label}": model.token_frequencies for model in models}}
    for unit, table in tables.items():
        counts = {
            str(share): token_frequencies.count_needed(table["cumulative_share"], share) for share in TOKENS_BY_SHARE
        }
        rows.append({"unit": unit, "different": len(table), "occurrences": int(table["count"].sum()), **counts})
    published = {str(share): count for share, count in TOKENS_BY_SHARE.items()}
    rows.append({"unit": "WordPiece tokens of the CNN corpus, as published", **published})
    frame = pd.DataFrame(rows)
    entries = [
        [Entry(str(unit)), *(Entry("" if math.isnan(count) else f"{count:,.0f}", number=True) for count in counts)]
        for unit, *counts in frame.itertuples(index=False)
    ]
    share_headers = [f"for {share:.0%}\nof the text" for share in TOKENS_BY_SHARE]
    header = ("unit", "different", "occurrences", *share_headers)
    texts = _TABLE_TEXTS["figure4_coverage"]
    return Sheet("figure4_coverage", texts["title"], texts["caption"], header, {"": entries}, frame)


def _add_gains(scores: Mapping[str, float], raw_scores: Mapping[str, float]) -> dict[str, float]:
    return {**scores, **{f"{score}_gain": value - raw_scores[score] for score, value in scores.items()}}


def _make_published_rows(
    names: Mapping[str, Any], measured: Mapping[str, float], published: Mapping[str, float]
) -> list[dict[str, Any]]:
    if not published:
        return []
    differences = {column: measured[column] - value for column, value in published.items()}
    return [{**names, "source": "paper", **published}, {**names, "source": "difference", **differences}]


def find_paper_model(model: ModelEmbeddings) -> str:
    """Return the model's name in *Too Much in Common*; empty if the paper lacks its embedding matrix.

    The paper's name is either the model's label or the last part of its hub id or path.
    """
    if model.metadata["matrix"] == "output" and not model.metadata["tied"]:
        return ""
    paper_models = read_published_table("table1", "model")
    candidates = (model.label, shorten_model_name(model.metadata["model"]))
    return next((candidate for candidate in candidates if candidate in paper_models), "")


def _find_wordsim_paper_model(model: ModelEmbeddings, form: str) -> str:
    """Return the model's name in *Too Much in Common*; empty if its word similarity was measured differently."""
    has_other_components = form == "all_but_the_top" and model.metadata["components"] is not None
    is_other_policy = set(model.word_similarity["policy"]) != {"single_token"}
    return "" if has_other_components or is_other_policy else find_paper_model(model)


def _describe_norm_correlation(models: Sequence[ModelEmbeddings]) -> list[str]:
    raw_measures = [model.measures_by_form["raw"] for model in models]
    norms = [measures["average_norm"] for measures in raw_measures]
    isotropies = [measures["partition_isotropy_as_computed"] for measures in raw_measures]
    if len(models) < 3 or len(set(norms)) == 1 or len(set(isotropies)) == 1:
        return []
    correlation = scipy.stats.pearsonr(norms, isotropies).statistic
    return [
        f"The correlation of average norm and raw I(W), with the signs as computed, over these {len(models)} models is "
        f"{correlation:.2f}; the paper has {NORM_CORRELATION} over its eight."
    ]


def _describe_left_out(models: Sequence[ModelEmbeddings]) -> list[str]:
    notes = [f"{model.label}: {note}" for model in models for note in model.notes]
    for model in models:
        for row in model.word_similarity.to_dict("records"):
            if row["note"]:
                notes.append(f"{model.label}: {row['benchmark']}, {row['form']}: {row['note']}")
    return notes


def _describe_kept_pairs(models: Sequence[ModelEmbeddings]) -> list[str]:
    sentences = []
    for model in models:
        rows = model.word_similarity.to_dict("records")
        counts = [
            f"{BENCHMARK_TITLES.get(row['benchmark'], row['benchmark'])} {row['kept']:,} of {row['pairs']:,}"
            for row in rows
            if row["form"] == "raw"
        ]
        if counts:
            sentences.append(f"Pairs of {model.label}: {'; '.join(counts)}.")
    return sentences


def _make_embedding_sheet(
    name: str,
    frame: pd.DataFrame,
    number_format: str,
    notes: Sequence[str],
    is_bold: pd.DataFrame | None = None,
) -> Sheet:
    """Return a table with a group for each model; missing and undefined numbers are dashes.

    The files, and the title and caption in `texts.toml`, have the name `name`. Differences and gains also get a sign.
    `is_bold` says by column which numbers are bold.
    """
    names = [name for name in ("form", "source") if name in frame and (name == "form" or frame[name].nunique() > 1)]
    columns = [str(column) for column in frame if column not in ("model", "form", "source")]
    rows_by_model: dict[str, list[list[Entry]]] = {}
    for index, row in enumerate(frame.to_dict("records")):
        entries = [Entry(FORM_NAMES.get(row[column], row[column])) for column in names]
        for column in columns:
            is_signed = row["source"] == "difference" or column.endswith("_gain")
            text = _format_number(row[column], "{:.0f}" if column == "benchmarks" else number_format, is_signed)
            bold = is_bold is not None and column in is_bold and bool(is_bold[column].iloc[index])
            entries.append(Entry(text, bold=bold, number=True))
        rows_by_model.setdefault(row["model"], []).append(entries)
    header = (*names, *(_make_header(column) for column in columns))
    texts = _TABLE_TEXTS[name]
    return Sheet(
        name, texts["title"], texts["caption"], header, rows_by_model, frame, tuple(notes), num_row_headers=len(names)
    )


def _make_header(column: str) -> str:
    """Return the header of a column; columns of Table 3 are named `<benchmark>/<score>`."""
    benchmark, _, score = column.rpartition("/")
    title = f"{BENCHMARK_TITLES.get(benchmark, benchmark)}\n" if benchmark else ""
    return f"{title}{score.replace('_', ' ')}" if title else _HEADERS.get(score, score)


def _format_number(value: float, number_format: str, is_signed: bool) -> str:
    if math.isnan(value):
        return "\u2013"
    return f"{'+' if is_signed and value > 0 else ''}{number_format.format(value)}"


@cache
def read_published_table(name: str, *key_columns: str) -> dict[Any, dict[str, float]]:
    """Read a table of *Too Much in Common*; return its rows by their values of `key_columns`."""
    with files("istar.embeddings").joinpath("paper", f"{name}.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file, index_col=list(key_columns)).astype(float).to_dict("index")  # type: ignore[return-value]
