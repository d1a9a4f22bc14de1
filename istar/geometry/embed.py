"""Measures of an embedding matrix, raw and post-processed, and its word similarity and token frequencies.

Implements `istar embed`.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from rich.table import Table
from safetensors.torch import save
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from istar import models
from istar.config import ModelConfig
from istar.errors import UserError, shorten
from istar.files import atomic_write, write_text
from istar.geometry import wordsim
from istar.geometry.corpus import Source, chunks, documents
from istar.geometry.matrix import Matrix, Which, read_matrix
from istar.geometry.measure import matrix_measures
from istar.measures import all_but_the_top, centered, scaled_centered
from istar.measures.rows import unit_vectors, wide_blocks

Form = Literal["raw", "centered", "scaled_centered", "all_but_the_top", "all_but_the_top_published"]
FORMS: dict[str, Callable[[Tensor, int | None], Tensor]] = {
    "raw": lambda matrix, _: matrix,
    "centered": lambda matrix, _: centered(matrix),
    "scaled_centered": lambda matrix, _: scaled_centered(matrix),
    "all_but_the_top": all_but_the_top,
    "all_but_the_top_published": lambda matrix, components: all_but_the_top(matrix, components, "published"),
}
BIN = 1_000
"""Tokens in a bin, as in Figure 3 of *Too Much in Common*."""


@dataclass(frozen=True)
class Choice:
    """Which matrix is measured, and how it is processed.

    Attributes:
        matrix: input or output embeddings.
        form: post-processing of the matrix; see `istar.measures.postprocess`.
        components: number of directions that the all-but-the-top forms remove; None for their default.
        policy: what word similarity does with words of several tokens; see `wordsim.word_vectors`.
    """

    matrix: Which = "input"
    form: Form = "raw"
    components: int | None = None
    policy: wordsim.Policy = "single_token"


@dataclass(frozen=True)
class EmbeddingResults:
    """Measures of an embedding matrix, the matrix, and tables as lists of rows.

    Attributes:
        raw: the matrix as it is stored.
        processed: the matrix in the requested form.
        tokens: token of each row; None for rows without a token.
        about: model, tensor and form, as `embeddings.json` has them.
        figures: measures by form.
        similarity: word similarity by benchmark and form.
        notes: why benchmarks are left out, one line each.
        unused: cosine of unused tokens with the other tokens, by bins of tokens; see `unused_similarity`.
        frequency: tokens of the texts, the most frequent first.
    """

    raw: Matrix
    processed: Tensor
    tokens: list[str | None]
    about: dict[str, Any]
    figures: dict[str, dict[str, Any]]
    similarity: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unused: list[dict[str, Any]] = field(default_factory=list)
    frequency: list[dict[str, Any]] = field(default_factory=list)


def embed(
    config: ModelConfig, choice: Choice, benchmarks: Sequence[Path] = (), texts: Sequence[Source] = ()
) -> EmbeddingResults:
    """Measure an embedding matrix raw, centered, without its top directions, and in the requested form.

    Args:
        config: name and revision of the model.
        choice: matrix and form.
        benchmarks: files of word-similarity benchmarks.
        texts: texts in which tokens are counted.

    Raises:
        UserError: if the model, a benchmark or a text cannot be read, or an option does not fit the others.
    """
    if choice.components is not None and not choice.form.startswith("all_but_the_top"):
        raise UserError(f"--components needs an all_but_the_top form, but --form is {choice.form}; remove --components")
    read_benchmarks = [wordsim.read_benchmark(path) for path in benchmarks]
    tokenizer = models.load_tokenizer(config)
    matrix = read_matrix(config, choice.matrix)
    tokens = _tokens_by_row(tokenizer, len(matrix.values))
    processed = FORMS[choice.form](matrix.values, choice.components)
    forms: dict[str, Tensor] = {"raw": matrix.values, choice.form: processed}
    counts = count_tokens(texts, tokenizer, len(tokens)) if texts else None
    similarity, notes = _word_similarity(read_benchmarks, forms, tokenizer, choice.policy)
    return EmbeddingResults(
        matrix,
        processed,
        tokens,
        _about(config, choice, matrix),
        _figures(matrix.values, choice, processed),
        similarity,
        notes,
        unused_similarity(forms, tokens, set(tokenizer.all_special_ids), counts),
        [] if counts is None else frequencies(counts, tokens),
    )


def _about(config: ModelConfig, choice: Choice, matrix: Matrix) -> dict[str, Any]:
    return {
        "model": config.name,
        "revision": config.revision,
        "matrix": choice.matrix,
        "tensor": matrix.tensor,
        "file": matrix.file,
        "tied": matrix.tied,
        "form": choice.form,
        "components": choice.components,
    }


def _figures(raw: Tensor, choice: Choice, processed: Tensor) -> dict[str, dict[str, Any]]:
    """Measure the three forms of the papers' tables, and the requested form if it is another one."""
    figures = {form: matrix_measures(FORMS[form](raw, None)) for form in ("raw", "centered", "all_but_the_top")}
    if choice.components is not None or choice.form not in figures:
        figures[choice.form] = matrix_measures(processed)
    return figures


def _tokens_by_row(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str | None]:
    """Return the token of each row; embeddings often have more rows than the vocabulary has tokens."""
    vocabulary = tokenizer.get_vocab()
    highest = max(vocabulary.values())
    if highest >= rows:
        raise UserError(
            f"the tokenizer has token {highest}, but the embeddings have {rows} rows; expected more rows; "
            "the two are not of one model"
        )
    tokens: list[str | None] = [None] * rows
    for token, number in vocabulary.items():
        tokens[number] = token
    return tokens


# ---- word similarity


def _word_similarity(
    benchmarks: Iterable[wordsim.Benchmark],
    forms: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    policy: wordsim.Policy,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each benchmark and form, and a note for each benchmark with too few known words."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for benchmark in benchmarks:
        for form, matrix in forms.items():
            vectors = wordsim.word_vectors(benchmark.words(), tokenizer, matrix, policy)
            try:
                rows.append(_similarity_row(wordsim.similarity(vectors, benchmark), form))
            except UserError as error:
                notes.append(str(error))
                break
    return rows, notes


def _similarity_row(result: wordsim.WordSimilarity, form: str) -> dict[str, Any]:
    return {
        "benchmark": result.benchmark,
        "form": form,
        "policy": result.policy,
        "pairs": len(result.kept) + len(result.left_out),
        "kept": len(result.kept),
        "cosine_pearson": result.cosine.pearson,
        "cosine_spearman": result.cosine.spearman,
        "inner_product_pearson": result.inner_product.pearson,
        "inner_product_spearman": result.inner_product.spearman,
    }


# ---- frequency


def count_tokens(texts: Iterable[Source], tokenizer: PreTrainedTokenizerBase, rows: int) -> np.ndarray:
    """Count how often each token occurs, `(rows,)`; the special tokens around a text are not counted.

    Raises:
        UserError: if a file cannot be read, or the texts have no tokens.
    """
    counts = np.zeros(rows, dtype=np.int64)
    for source in texts:
        for chunk in chunks(documents(source), 1_000):
            encoded = tokenizer(chunk, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids in encoded["input_ids"]:
                counts += np.bincount(np.asarray(ids, dtype=np.int64), minlength=rows)
    if not counts.any():
        raise UserError("--text: no file holds any text; expected at least one line that is not empty")
    return counts


def frequencies(counts: np.ndarray, tokens: Sequence[str | None]) -> list[dict[str, Any]]:
    """Return a row for each token that occurs, the most frequent first, with its share and the cumulative share."""
    order = _by_frequency(counts)
    shares = counts[order] / counts.sum()
    return [
        {
            "rank": rank,
            "id": number,
            "token": json.dumps(tokens[number]),
            "count": counts[number],
            "share": share,
            "cumulative_share": cumulative,
        }
        for rank, (number, share, cumulative) in enumerate(zip(order, shares, shares.cumsum(), strict=True), start=1)
    ]


def _by_frequency(counts: np.ndarray) -> np.ndarray:
    """Return the ids that occur, the most frequent first; of equally frequent ids the smaller one comes first."""
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)]


_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")


def unused_tokens(tokens: Sequence[str | None]) -> list[int]:
    """Return the ids of placeholder tokens such as BERT's `[unused0]`, which no text contains.

    Without placeholders these are the last 1,000 tokens, as in the paper, or none of fewer than 2,000.
    """
    placeholders = [number for number, token in enumerate(tokens) if token and _UNUSED.fullmatch(token)]
    known = [number for number, token in enumerate(tokens) if token is not None]
    return placeholders or (known[-BIN:] if len(known) >= 2 * BIN else [])


def unused_similarity(
    forms: Mapping[str, Tensor], tokens: Sequence[str | None], special: set[int], counts: np.ndarray | None
) -> list[dict[str, Any]]:
    """Compute the mean cosine of unused tokens with the others, in bins of 1,000 (*Too Much in Common*, Figure 3).

    The bins are by token id, as in the paper: vocabularies such as BERT's are ordered by frequency. If tokens were
    counted, there are also bins by rank of frequency, and one bin of the tokens that do not occur.

    Args:
        forms: matrices `(rows, d)` by form.
        tokens: token of each row.
        special: ids to leave out.
        counts: number of occurrences of each token, `(rows,)`; None if unknown.

    Returns:
        A row for each bin that is not empty.
    """
    unused = unused_tokens(tokens)
    if not unused:
        return []
    excluded = special.union(unused)
    others = np.array([i for i, token in enumerate(tokens) if token is not None and i not in excluded], dtype=int)
    cosines = {f"cosine_{form}": _mean_cosines(matrix, unused) for form, matrix in forms.items()}
    return [
        {
            "order": order,
            "first": first,
            "last": last,
            "tokens": len(ids),
            "occurrences": None if counts is None else int(counts[ids].sum()),
            **{name: values[ids].mean() for name, values in cosines.items()},
        }
        for order, first, last, ids in _bins(others, counts)
        if len(ids)
    ]


def _bins(others: np.ndarray, counts: np.ndarray | None) -> Iterator[tuple[str, int | None, int | None, np.ndarray]]:
    """Yield for each bin the order, its first and last position in that order, and its ids."""
    for start in range(0, int(others.max(initial=-1)) + 1, BIN):
        yield "index", start, start + BIN - 1, others[(others >= start) & (others < start + BIN)]
    if counts is None:
        return
    ranked = others[_by_frequency(counts[others])]
    for start in range(0, len(ranked), BIN):
        yield "frequency", start + 1, min(start + BIN, len(ranked)), ranked[start : start + BIN]
    yield "not in the text", None, None, others[counts[others] == 0]


def _mean_cosines(matrix: Tensor, unused: Sequence[int]) -> np.ndarray:
    """Compute each row's mean cosine with the unused rows, `(rows,)`."""
    mean_direction = unit_vectors(matrix[list(unused)].double())[0].mean(0)
    return torch.cat([unit_vectors(block)[0] @ mean_direction for block in wide_blocks(matrix)]).numpy()


# ---- output


def write(results: EmbeddingResults, out: Path) -> list[Path]:
    """Write `embeddings.json` and the CSV tables that have rows; returns their paths.

    A table without rows is removed, so that no table of an earlier call remains.
    """
    text = json.dumps({**results.about, "figures": results.figures}, indent=1)
    write_text(out / "embeddings.json", text + "\n")
    figures = [
        {**results.about, "form": form, **{name: value for name, value in row.items() if name != "singular_values"}}
        for form, row in results.figures.items()
    ]
    tables = {
        "embeddings": figures,
        "wordsim": results.similarity,
        "unused": results.unused,
        "frequency": results.frequency,
    }
    written = [out / "embeddings.json"]
    for name, rows in tables.items():
        path = out / f"{name}.csv"
        if rows:
            write_text(path, pd.DataFrame(rows).convert_dtypes().to_csv(index=False))
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


def write_matrix(results: EmbeddingResults, out: Path) -> list[Path]:
    """Write the processed matrix to `embeddings.safetensors`, and its rows' tokens to `tokens.txt`.

    Each line of `tokens.txt` is a token as a JSON string, or `null` for a row without a token. Returns both paths.
    """
    tensor = f"{results.about['matrix']}_embeddings"
    metadata = {name: str(value) for name, value in results.about.items() if value is not None}
    with atomic_write(out / "embeddings.safetensors") as file:
        file.write(save({tensor: results.processed.contiguous()}, metadata))
    write_text(out / "tokens.txt", "".join(json.dumps(token) + "\n" for token in results.tokens))
    return [out / "embeddings.safetensors", out / "tokens.txt"]


def write_model(results: EmbeddingResults, config: ModelConfig, out: Path) -> Path:
    """Save the whole model with the processed matrix to the folder `model`; returns the folder.

    Tied output embeddings stay tied, so that they are processed too.

    Raises:
        UserError: if the model cannot be loaded or written.
    """
    model = models.load_pretrained(config, type(models.meta_model(models.load_pretrained(config, AutoConfig))))
    layer = model.get_input_embeddings() if results.raw.which == "input" else model.get_output_embeddings()
    with torch.no_grad():
        layer.weight.copy_(results.processed)
    draft, folder = out / ".model", out / "model"
    for leftover in (draft, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        models.save(model, models.load_tokenizer(config), draft)
        draft.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {shorten(error)}") from error
    return folder


def tables(results: EmbeddingResults) -> list[Table]:
    """Return the terminal tables: measures by form, and word similarity times 100, as in the paper."""
    about = results.about
    file = "the whole model" if about["file"] is None else about["file"]
    title = f"{Path(about['model']).name}: {about['matrix']} embeddings, {about['tensor']} of {file}"
    rows = [[form, *(f"{figures[name]:.4g}" for name in _COLUMNS)] for form, figures in results.figures.items()]
    measures = _table(title, ["form", *_COLUMNS.values()], rows)
    if not results.similarity:
        return [measures]
    scores = [name for name in results.similarity[0] if name.endswith(("pearson", "spearman"))]
    rows = [
        [row["benchmark"], row["form"], f"{row['kept']}/{row['pairs']}", *(f"{100 * row[name]:.2f}" for name in scores)]
        for row in results.similarity
    ]
    policy = results.similarity[0]["policy"].replace("_", " ")
    title = f"word similarity: Pearson's r and Spearman's rho with the ratings, x 100; {policy}"
    header = ["benchmark", "form", "pairs", "cosine r", "cosine rho", "product r", "product rho"]
    return [measures, _table(title, header, rows)]


_COLUMNS = {
    "partition_isotropy_as_computed": "I(W)",
    "partition_isotropy_both": "I(W) ±",
    "average_norm": "norm",
    "mean_vector_norm": "of the mean",
    "norm_ratio": "ratio",
}


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in header:
        is_text = name in ("benchmark", "form")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def remarks(results: EmbeddingResults) -> list[str]:
    """Return notes for the user, one line each."""
    lines = list(results.notes)
    if results.about["tied"]:
        lines.append("the output embeddings are tied to the input embeddings: processing one processes both")
    if results.frequency:
        cumulative = np.array([row["cumulative_share"] for row in results.frequency])
        # The tolerance allows for rounding errors in the cumulative sum.
        needed = [
            f"{int(np.searchsorted(cumulative, share * (1 - 1e-12))) + 1:,} for {share:.0%}"
            for share in (0.3, 0.5, 0.98)
        ]
        lines.append(f"most frequent tokens needed to cover the text: {', '.join(needed)}")
    return lines
