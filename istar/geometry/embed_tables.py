"""Tables 1 to 3 of *Too Much in Common* from measured embedding matrices, with the paper's numbers beside them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import scipy.stats
from rich.table import Table

from istar.geometry import embed, published_embeddings
from istar.geometry.embed_models import ModelEmbeddings
from istar.geometry.published_embeddings import BENCHMARKS
from istar.pages.sheets import Entry, Sheet

_ISTAR, _BOTH, _PAPER, _DIFFERENCE = "istar", "both signs", "paper", "difference"
_FORM_NAMES = {
    "raw": "raw",
    "centered": "centered",
    "scaled_centered": "centered-scaled",
    "all_but_the_top": "post-processed",
    "all_but_the_top_published": "post-processed, as published in 2018",
}
"""Names of the forms in tables, after those of the paper."""
_ISOTROPY = {
    "isotropy_raw": ("I(W)\nraw", "raw"),
    "isotropy_centered": ("I(W)\ncentered", "centered"),
    "isotropy_post_processed": ("I(W), top\nremoved", "all_but_the_top"),
}
"""Header and form of the columns of Table 1 with I(W), by the name of the column in the paper's CSV file."""
_NORMS = {
    "average_norm": ("average\nnorm", "average_norm"),
    "mean_vector_norm": ("norm of\nthe mean", "mean_vector_norm"),
    "mean_to_average_norm": ("ratio", "norm_ratio"),
}
"""Header of the other columns of Table 1 and name of the measure, by the name of the column in the paper's CSV file."""
_SCORES = {"cosine": "cosine", "inner_product": "inner\nproduct"}


@dataclass(frozen=True)
class _Row:
    """A row of a table: numbers by column, of istar or of the paper."""

    model: str
    form: str  # empty in Table 1
    source: str
    values: Mapping[str, float]


def table1(subjects: Sequence[ModelEmbeddings]) -> Sheet:
    """Return the table of isotropy and norms, with up to four rows for each model."""
    rows = [row for subject in subjects for row in _isotropy_rows(subject)]
    headers = {name: header for name, (header, _) in (_ISOTROPY | _NORMS).items()}
    caption = (
        "I(W) of the embedding matrices raw, centered, and without the first principal components; average norm of the "
        "rows, norm of their mean, and the ratio of the two. I(W) depends on the signs of the eigenvectors: the row "
        "istar has them as computed, as the paper does, which depends on the eigensolver; compare models by the row "
        "with both signs."
    )
    title = "Table 1: isotropy and norms"
    return _sheet("table1", title, caption, rows, headers, lambda value: f"{value:.3f}", _correlation_note(subjects))


def table2(subjects: Sequence[ModelEmbeddings]) -> Sheet:
    """Return the table of the average word similarity, with a row for each model and form, and its gain over raw."""
    rows = [row for subject in subjects for row in _average_rows(subject)]
    headers: dict[str, str] = {}
    for score, name in _SCORES.items():
        headers |= {score: name, f"{score}_gain": f"{name.split()[-1]}\nminus raw"}
    headers["benchmarks"] = "benchmarks"
    caption = (
        "Average over the benchmarks of Pearson's r with the ratings, times 100, and its difference to the raw matrix. "
        "Bold: the best form of each model. The paper's averages are shown where all five of its benchmarks were given."
    )
    sheet = _sheet("table2", "Table 2: average word similarity", caption, rows, headers, _score, _left_out(subjects))
    return _with_best(sheet, rows, list(headers))


def table3(subjects: Sequence[ModelEmbeddings]) -> Sheet:
    """Return the table of the word similarity on each benchmark, with a row for each model and form."""
    rows = [row for subject in subjects for row in _benchmark_rows(subject)]
    used = {column.partition("/")[0] for row in rows for column in row.values}
    names = [name for name in BENCHMARKS if name in used]
    names += sorted(used.difference(names))
    headers = {
        f"{name}/{score}": f"{BENCHMARKS.get(name, name)}\n{_SCORES[score].replace(chr(10), ' ')}"
        for name in names
        for score in ("inner_product", "cosine")
    }
    caption = (
        "Pearson's r with the ratings, times 100, on each benchmark. Pairs with a word that is not a single token are "
        "left out, so that models with other tokenizers are not comparable. The paper's table has no centered form."
    )
    title = "Table 3: word similarity by benchmark"
    return _sheet("table3", title, caption, rows, headers, _score, _kept_pairs(subjects))


def coverage(subjects: Sequence[ModelEmbeddings], words: pd.DataFrame) -> Sheet:
    """Return the numbers of words and tokens that make up given shares of the texts (section 2.2)."""
    units = {"words": words, **{f"tokens of {subject.label}": subject.frequency for subject in subjects}}
    rows = []
    for unit, frame in units.items():
        ranks = {str(share): embed.needed(frame["cumulative_share"], share) for share in embed.SHARES}
        rows.append({"unit": unit, "different": len(frame), "occurrences": int(frame["count"].sum()), **ranks})
    rows.append({"unit": "WordPiece tokens of the CNN corpus, as published"}
                | {str(share): count for share, count in published_embeddings.COVERAGE.items()})  # fmt: skip
    frame = pd.DataFrame(rows)
    entries = [[Entry(str(unit)), *map(_count, numbers)] for unit, *numbers in frame.itertuples(index=False)]
    header = ("unit", "different", "occurrences", *(f"for {share:.0%}\nof the text" for share in embed.SHARES))
    caption = (
        "How many of the most frequent words or tokens make up 30%, 50% and 98% of the texts. The paper's last number "
        "is approximate."
    )
    return Sheet("figure4_coverage", "Coverage of the texts", caption, header, {"": entries}, frame)


def terminal_table(sheet: Sheet) -> Table:
    """Return a table for the terminal."""
    has_groups = any(sheet.rows_by_group)
    table = Table(title=sheet.title, title_justify="left", padding=(0, 0, 0, 1))
    for number, name in enumerate((sheet.group_header, *sheet.header) if has_groups else sheet.header):
        is_text = number < sheet.num_row_headers + has_groups
        table.add_column(
            name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text or name == "source"
        )
    for group, rows in sheet.rows_by_group.items():
        for number, row in enumerate(rows):
            texts = [entry.text for entry in row]
            last = number == len(rows) - 1
            table.add_row(*([group if number == 0 else "", *texts] if has_groups else texts), end_section=last)
    return table


def _isotropy_rows(subject: ModelEmbeddings) -> Iterator[_Row]:
    """Yield the rows of a model in Table 1."""

    def isotropy(signs: str) -> dict[str, float]:
        return {name: subject.figures[form][f"partition_isotropy_{signs}"] for name, (_, form) in _ISOTROPY.items()}

    measured = isotropy("as_computed")
    measured |= {name: subject.figures["raw"][measure] for name, (_, measure) in _NORMS.items()}
    yield _Row(subject.label, "", _ISTAR, measured)
    yield _Row(subject.label, "", _BOTH, isotropy("both"))
    model = _paper_model(subject)
    if model is not None:
        published = dict(published_embeddings.measures(model))
        if subject.about["components"] is not None:
            del published["isotropy_post_processed"]
        yield from _comparison(subject.label, "", measured, published)


def _average_rows(subject: ModelEmbeddings) -> Iterator[_Row]:
    """Yield the rows of a model in Table 2."""
    scores = subject.similarity
    if scores.empty:
        return
    has_all = set(scores["benchmark"]) == set(BENCHMARKS)
    raw: dict[str, float] = {}
    published_raw: Mapping[str, float] = {}
    for form, group in scores.groupby("form", sort=False):
        # A benchmark whose correlation is undefined makes the average undefined.
        means = {score: 100 * float(group[f"{score}_pearson"].mean(skipna=False)) for score in _SCORES}
        raw = raw or means
        measured = _with_gains(means, raw) | {"benchmarks": float(len(group))}
        yield _Row(subject.label, str(form), _ISTAR, measured)
        published = published_embeddings.average(_word_model(subject, str(form)), str(form)) if has_all else {}
        if published:
            published_raw = published_raw or published
            yield from _comparison(subject.label, str(form), measured, _with_gains(published, published_raw))


def _benchmark_rows(subject: ModelEmbeddings) -> Iterator[_Row]:
    """Yield the rows of a model in Table 3."""
    if subject.similarity.empty:
        return
    for form, group in subject.similarity.groupby("form", sort=False):
        measured: dict[str, float] = {}
        published: dict[str, float] = {}
        model = _word_model(subject, str(form))
        for row in group.to_dict("records"):
            entry = published_embeddings.benchmark(model, str(form), str(row["benchmark"]))
            for score in _SCORES:
                column = f"{row['benchmark']}/{score}"
                measured[column] = 100 * row[f"{score}_pearson"]
                if entry:
                    published[column] = entry[score]
        yield _Row(subject.label, str(form), _ISTAR, measured)
        if published:
            yield from _comparison(subject.label, str(form), measured, published)


def _with_gains(scores: Mapping[str, float], raw: Mapping[str, float]) -> dict[str, float]:
    """Return the scores and their differences to those of the raw matrix."""
    return {**scores, **{f"{score}_gain": scores[score] - raw[score] for score in _SCORES}}


def _comparison(
    model: str, form: str, measured: Mapping[str, float], published: Mapping[str, float]
) -> tuple[_Row, _Row]:
    """Return the row of the paper and that of the differences."""
    differences = {name: measured[name] - value for name, value in published.items()}
    return _Row(model, form, _PAPER, published), _Row(model, form, _DIFFERENCE, differences)


def _paper_model(subject: ModelEmbeddings) -> str | None:
    """Return the paper's name of the model; None if it is another one, or another matrix than the paper's."""
    about = subject.about
    is_same_matrix = about["matrix"] == "input" or about["tied"]
    return published_embeddings.model_name(subject.label, about["model"]) if is_same_matrix else None


def _word_model(subject: ModelEmbeddings, form: str) -> str:
    """Return the paper's name of the model if its word similarity was measured as in the paper, else an empty name."""
    policies = set(subject.similarity["policy"])
    has_other_components = form == "all_but_the_top" and subject.about["components"] is not None
    return "" if has_other_components or policies != {"single_token"} else _paper_model(subject) or ""


def _correlation_note(subjects: Sequence[ModelEmbeddings]) -> tuple[str, ...]:
    """Return a sentence on the correlation of average norm and I(W) over the models (appendix C); none for few."""
    pairs = [(subject.figures["raw"]["average_norm"], subject.figures["raw"]["partition_isotropy_as_computed"])
             for subject in subjects]  # fmt: skip
    norms, isotropy = zip(*pairs, strict=True)
    if len(pairs) < 3 or len(set(norms)) == 1 or len(set(isotropy)) == 1:
        return ()
    value = scipy.stats.pearsonr(norms, isotropy).statistic
    return (
        f"The correlation of average norm and raw I(W), with the signs as computed, over these {len(pairs)} models is "
        f"{value:.2f}; the paper has {published_embeddings.NORM_CORRELATION} over its eight.",
    )


def _left_out(subjects: Sequence[ModelEmbeddings]) -> tuple[str, ...]:
    """Return sentences that name the benchmarks that a model has too few words for, and undefined correlations."""
    notes = [f"{subject.label}: {note}" for subject in subjects for note in subject.notes]
    for subject in subjects:
        if not subject.similarity.empty:
            noted = subject.similarity[subject.similarity["note"] != ""]
            notes += [f"{subject.label}: {row.benchmark}, {row.form}: {row.note}" for row in noted.itertuples()]
    return tuple(notes)


def _kept_pairs(subjects: Sequence[ModelEmbeddings]) -> tuple[str, ...]:
    """Return for each model a sentence with the number of pairs that were correlated."""
    sentences = []
    for subject in subjects:
        if not subject.similarity.empty:
            first = subject.similarity.drop_duplicates("benchmark")
            rows = zip(*(first[name].tolist() for name in ("benchmark", "kept", "pairs")), strict=True)
            texts = [f"{BENCHMARKS.get(name, name)} {kept:,} of {pairs:,}" for name, kept, pairs in rows]
            sentences.append(f"Pairs of {subject.label}: {'; '.join(texts)}.")
    return tuple(sentences)


def _sheet(
    name: str,
    title: str,
    caption: str,
    rows: Sequence[_Row],
    headers: Mapping[str, str],
    text: Callable[[float], str],
    notes: tuple[str, ...],
) -> Sheet:
    """Return a table with a group for each model; the column `form` is left out if no row has one."""
    has_forms = any(row.form for row in rows)
    groups: dict[str, list[list[Entry]]] = {}
    records = []
    for row in rows:
        keys = {"form": row.form, "source": row.source} if has_forms else {"source": row.source}
        records.append({"model": row.model, **keys, **{name: row.values.get(name, math.nan) for name in headers}})
        leading = [Entry(_FORM_NAMES[row.form])] if has_forms else []
        entries = [_number(row, column, text) for column in headers]
        groups.setdefault(row.model, []).append([*leading, Entry(row.source), *entries])
    header = (*(("form",) if has_forms else ()), "source", *headers.values())
    return Sheet(name, title, caption, header, groups, pd.DataFrame(records), notes, num_row_headers=1 + has_forms)


def _number(row: _Row, column: str, text: Callable[[float], str]) -> Entry:
    """Return the cell of a number; differences have a sign, and an empty cell is a number that does not exist."""
    value = row.values.get(column)
    if value is None:
        return Entry("", number=True)
    if math.isnan(value):
        return Entry("\u2013", number=True)
    if column == "benchmarks":
        return Entry(f"{value:.0f}", number=True)
    is_signed = row.source == _DIFFERENCE or column.endswith("_gain")
    return Entry(f"+{text(value)}" if is_signed and value > 0 else text(value), number=True)


def _with_best(sheet: Sheet, rows: Sequence[_Row], columns: list[str]) -> Sheet:
    """Mark the best form of each model in bold, by each score, among the numbers of istar and of the paper."""
    first = len(sheet.header) - len(columns)
    marked: dict[str, list[list[Entry]]] = {}
    for group, entries in sheet.rows_by_group.items():
        model_rows = [row for row in rows if row.model == group]
        marked[group] = [list(row) for row in entries]
        for source in (_ISTAR, _PAPER):
            for score in _SCORES:
                values = [row.values.get(score, math.nan) if row.source == source else math.nan for row in model_rows]
                best = max((value for value in values if not math.isnan(value)), default=None)
                for number, value in enumerate(values):
                    if value == best:
                        column = first + columns.index(score)
                        marked[group][number][column] = Entry(entries[number][column].text, bold=True, number=True)
    return Sheet(**{**vars(sheet), "rows_by_group": marked})


def _score(value: float) -> str:
    return f"{value:.2f}"


def _count(value: float) -> Entry:
    return Entry("" if math.isnan(value) else f"{value:,.0f}", number=True)
