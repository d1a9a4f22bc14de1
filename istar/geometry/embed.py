"""`istar embed`: measures of an embedding matrix, raw and post-processed, word similarity and token frequencies."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from istar.geometry.corpus import Source
from istar.geometry.matrix import Matrix, Side, read_matrix
from istar.geometry.measure import measure_matrix, number_table
from istar.geometry.same_model import ModelName, refuse_other_model
from istar.measures import all_but_the_top, centered, scaled_centered
from istar.measures.rows import unit_vectors, wide_blocks
from istar.tasks.documents import read_documents
from istar.tasks.tokenizing import tokenize

FORMS: dict[str, Callable[[Tensor, int | None], Tensor]] = {
    "raw": lambda matrix, _: matrix,
    "centered": lambda matrix, _: centered(matrix),
    "scaled_centered": lambda matrix, _: scaled_centered(matrix),
    "all_but_the_top": all_but_the_top,
    "all_but_the_top_published": lambda matrix, components: all_but_the_top(matrix, components, "published"),
}
PAPER_FORMS = ("raw", "centered", "all_but_the_top")
"""The forms whose isotropy the papers' tables have."""
BIN = 1_000
"""Tokens in a bin, as in Figure 3 of *Too Much in Common*."""
SHARES = (0.3, 0.5, 0.98)
"""Shares of a text whose tokens *Too Much in Common* counts, in section 2.2."""
_COLUMNS = {
    # Forms are compared by the first; the second is the papers' convention, which depends on the eigensolver.
    "partition_isotropy_both": "I(W), both signs",
    "partition_isotropy_as_computed": "as computed",
    "average_norm": "norm",
    "mean_vector_norm": "of the mean",
    "norm_ratio": "ratio",
}
"""Headers of the measures in the terminal table."""


@dataclass(frozen=True)
class Choice:
    """Which matrix is measured, and how it is processed."""

    matrix: Side = "input"  # input or output embeddings
    form: str = "raw"  # post-processing of the matrix, a key of `FORMS`; see `istar.measures.postprocess`
    components: int | None = None  # number of directions that the all-but-the-top forms remove; None for their default
    policy: wordsim.Policy = "single_token"  # treatment of words of several tokens; see `wordsim.word_vectors`


@dataclass(frozen=True)
class EmbeddingResults:
    """Measures of an embedding matrix, and the matrix."""

    raw: Matrix  # the matrix as it is stored
    processed: Tensor  # the matrix in the requested form
    tokens: list[str | None]  # token of each row; None for rows without a token
    about: dict[str, Any]  # model, tensor and form, as `embeddings.json` has them
    figures: dict[str, dict[str, Any]]  # measures by form
    similarity: pd.DataFrame  # word similarity, with a row for each benchmark and form
    notes: list[str]  # why benchmarks are left out, one line each
    unused: pd.DataFrame  # cosine of unused tokens with the other tokens, by bins of tokens; see `unused_similarity`
    frequency: pd.DataFrame  # tokens of the texts, the most frequent first


def embed(
    config: ModelConfig, choice: Choice, benchmarks: Sequence[Path] = (), texts: Sequence[Source] = ()
) -> EmbeddingResults:
    """Measure an embedding matrix raw, centered, without its top directions, and in the requested form.

    Raises:
        UserError: if the model, a benchmark or a text cannot be read, or an option does not fit the others.
    """
    if choice.components is not None and not choice.form.startswith("all_but_the_top"):
        raise UserError(f"--components needs an all_but_the_top form, but --form is {choice.form}; remove --components")
    read_benchmarks = [wordsim.read_benchmark(path) for path in benchmarks]
    tokenizer = models.load_tokenizer(config)
    matrix = read_matrix(config, choice.matrix)
    tokens = tokens_by_row(tokenizer, len(matrix.values))
    processed = FORMS[choice.form](matrix.values, choice.components)
    # The three forms of the papers' tables, and the requested form if it is another one.
    figures = {form: measure_matrix(FORMS[form](matrix.values, None)) for form in PAPER_FORMS}
    if choice.components is not None or choice.form not in figures:
        figures[choice.form] = measure_matrix(processed)
    forms = {"raw": matrix.values, choice.form: processed}
    counts = count_tokens(texts, tokenizer, len(tokens)) if texts else None
    similarity, notes = word_similarity(read_benchmarks, forms, tokenizer, choice.policy)
    return EmbeddingResults(
        matrix,
        processed,
        tokens,
        {**describe(config, matrix), "form": choice.form, "components": choice.components},
        figures,
        similarity,
        notes,
        unused_similarity(forms, tokens, set(tokenizer.all_special_ids), counts),
        pd.DataFrame() if counts is None else frequencies(counts, tokens),
    )


def describe(config: ModelConfig, matrix: Matrix) -> dict[str, Any]:
    """Return the model, its revision, the hash of the matrix, and where the matrix was found."""
    return {
        "model": config.name,
        "revision": config.revision,
        "weights": hashlib.blake2b(matrix.values.contiguous().numpy().tobytes(), digest_size=8).hexdigest(),
        "matrix": matrix.side,
        "tensor": matrix.tensor,
        "file": matrix.file,
        "tied": matrix.tied,
    }


def tokens_by_row(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str | None]:
    """Return the token of each row; embeddings often have more rows than the vocabulary has tokens."""
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    highest = max(tokens)
    if highest >= rows:
        raise UserError(
            f"the tokenizer has token {highest}, but the embeddings have {rows} rows; expected more rows; "
            "the two are not of one model"
        )
    return [tokens.get(number) for number in range(rows)]


def word_similarity(
    benchmarks: Iterable[wordsim.Benchmark],
    forms: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    policy: wordsim.Policy,
) -> tuple[pd.DataFrame, list[str]]:
    """Return a row for each benchmark and form, and a note for each benchmark with too few known words."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for benchmark in benchmarks:
        for form, matrix in forms.items():
            vectors = wordsim.word_vectors(benchmark.words(), tokenizer, matrix, policy)
            try:
                result = wordsim.similarity(vectors, benchmark)
            except UserError as error:
                notes.append(str(error))
                break
            rows.append({
                "benchmark": benchmark.name,
                "form": form,
                "policy": policy,
                "pairs": len(benchmark.pairs),
                "kept": len(result.kept),
                "cosine_pearson": result.cosine.pearson,
                "cosine_spearman": result.cosine.spearman,
                "inner_product_pearson": result.inner_product.pearson,
                "inner_product_spearman": result.inner_product.spearman,
                "note": "; ".join(
                    f"{name}: {correlation.note}"
                    for name, correlation in (("cosine", result.cosine), ("inner product", result.inner_product))
                    if correlation.note
                ),
            })  # fmt: skip
    return pd.DataFrame(rows), notes


def count_tokens(texts: Iterable[Source], tokenizer: PreTrainedTokenizerBase, rows: int) -> np.ndarray:
    """Count how often each token occurs, `(rows,)`; the special tokens around a text are not counted.

    Raises:
        UserError: if a file cannot be read, or the texts have no tokens.
    """
    counts = np.zeros(rows, dtype=np.int64)
    for source in texts:
        for ids in tokenize(read_documents(source.path), tokenizer):
            counts += np.bincount(np.asarray(ids, dtype=np.int64), minlength=rows)
    if not counts.any():
        raise UserError("--text: no file holds any text; expected at least one line that is not empty")
    return counts


def frequencies(counts: np.ndarray, tokens: Sequence[str | None]) -> pd.DataFrame:
    """Return a row for each token that occurs, the most frequent first, with its share and the cumulative share."""
    ids = _by_frequency(counts)
    shares = counts[ids] / counts.sum()
    return pd.DataFrame({
        "rank": np.arange(1, len(ids) + 1),
        "id": ids,
        "token": [json.dumps(tokens[number]) for number in ids],
        "count": counts[ids],
        "share": shares,
        "cumulative_share": shares.cumsum(),
    })  # fmt: skip


def needed(cumulative_share: pd.Series, share: float) -> int:
    """Return how many of the most frequent tokens or words make up at least this share of a text."""
    # The tolerance allows for rounding errors in the cumulative sum.
    return int(cumulative_share.to_numpy().searchsorted(share * (1 - 1e-12))) + 1


def _by_frequency(counts: np.ndarray) -> np.ndarray:
    """Return the ids that occur, the most frequent first; of equally frequent ids the smaller one comes first."""
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)]


def unused_tokens(tokens: Sequence[str | None]) -> list[int]:
    """Return the ids of placeholder tokens such as BERT's `[unused0]`, which no text contains.

    Without placeholders these are the last 1,000 tokens, as in the paper, or none of fewer than 2,000.
    """
    pattern = re.compile(r"[\[<]unused_?\d+[\]>]")
    placeholders = [number for number, token in enumerate(tokens) if token and pattern.fullmatch(token)]
    known = [number for number, token in enumerate(tokens) if token is not None]
    return placeholders or (known[-BIN:] if len(known) >= 2 * BIN else [])


def unused_similarity(
    forms: Mapping[str, Tensor], tokens: Sequence[str | None], special: set[int], counts: np.ndarray | None
) -> pd.DataFrame:
    """Compute the mean cosine of unused tokens with the others, in bins of 1,000 (*Too Much in Common*, Figure 3).

    The bins are by token id, as in the paper: vocabularies such as BERT's are ordered by frequency. If tokens were
    counted, there are also bins by rank of frequency, and one bin of the tokens that do not occur.

    Args:
        forms: matrices `(rows, d)` by form.
        tokens: token of each row.
        special: ids to leave out.
        counts: number of occurrences of each token, `(rows,)`; None if unknown.
    """
    unused = unused_tokens(tokens)
    if not unused:
        return pd.DataFrame()
    excluded = special.union(unused)
    others = np.array([i for i, token in enumerate(tokens) if token is not None and i not in excluded], dtype=int)
    cosines: dict[str, np.ndarray] = {}
    for form, matrix in forms.items():
        mean_direction = unit_vectors(matrix[unused].double())[0].mean(0)
        cosines[f"cosine_{form}"] = torch.cat([
            unit_vectors(block)[0] @ mean_direction for block in wide_blocks(matrix)
        ]).numpy()  # fmt: skip
    rows: list[dict[str, Any]] = []
    for order, first, last, ids in _bins(others, counts):
        if len(ids):
            occurrences = None if counts is None else int(counts[ids].sum())
            row = {"order": order, "first": first, "last": last, "tokens": len(ids), "occurrences": occurrences}
            rows.append({**row, **{name: values[ids].mean() for name, values in cosines.items()}})
    return pd.DataFrame(rows)


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


def write(results: EmbeddingResults, out: Path) -> list[Path]:
    """Write `embeddings.json` and the CSV tables that have rows; returns their paths.

    All files of an earlier call for the same model are removed.

    Raises:
        UserError: if the folder holds the measures of another model.
    """
    _remove_earlier(results, out)
    text = json.dumps({**results.about, "figures": results.figures}, indent=1)
    write_text(out / "embeddings.json", text + "\n")
    rows = [{**results.about, "form": form, **figures} for form, figures in results.figures.items()]
    tables = {
        "embeddings": pd.DataFrame(rows).drop(columns="singular_values"),
        "wordsim": results.similarity,
        "unused": results.unused,
        "frequency": results.frequency,
    }
    written = [out / "embeddings.json"]
    for name, table in tables.items():
        path = out / f"{name}.csv"
        if table.empty:
            path.unlink(missing_ok=True)
        else:
            write_text(path, table.convert_dtypes().to_csv(index=False))
            written.append(path)
    return written


def _remove_earlier(results: EmbeddingResults, out: Path) -> None:
    """Remove the matrix and the model that an earlier call has saved; refuse a folder of another model."""
    try:
        earlier = json.loads((out / "embeddings.json").read_text(encoding="utf-8"))
        model, weights = ModelName(earlier["model"], earlier["revision"]), earlier.get("weights")
    except (OSError, ValueError, TypeError, KeyError):  # missing or foreign
        return
    about = results.about
    refuse_other_model(out, model, ModelName(about["model"], about["revision"]), lambda: weights == about["weights"])
    if Path(about["model"]).is_dir() and Path(about["model"]).resolve().is_relative_to(out.resolve()):
        raise UserError(f"--out {out} contains the model {about['model']}; expected another folder: --out <folder>")
    for name in ("embeddings.safetensors", "tokens.txt"):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "model", ignore_errors=True)


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
    layer = model.get_input_embeddings() if results.raw.side == "input" else model.get_output_embeddings()
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
    file = about["file"] or "the whole model"
    title = f"{Path(about['model']).name}: {about['matrix']} embeddings, {about['tensor']} of {file}"
    rows = {form: [figures[name] for name in _COLUMNS] for form, figures in results.figures.items()}
    measures = number_table(title, "form", _COLUMNS.values(), rows)
    if results.similarity.empty:
        return [measures]
    policy = results.similarity["policy"][0].replace("_", " ")
    title = f"word similarity: Pearson's r and Spearman's rho with the ratings, x 100; {policy}"
    similarity = Table(title=title, title_justify="left")
    for name in ("benchmark", "form"):
        similarity.add_column(name, overflow="fold")
    for name in ("pairs", "cosine r", "cosine rho", "product r", "product rho"):
        similarity.add_column(name, justify="right", overflow="fold")
    for benchmark, form, _, pairs, kept, *scores, _ in results.similarity.itertuples(index=False):
        texts = ("-" if math.isnan(score) else f"{100 * score:.2f}" for score in scores)
        similarity.add_row(benchmark, form, f"{kept}/{pairs}", *texts)
    return [measures, similarity]


def remarks(results: EmbeddingResults) -> list[str]:
    """Return notes for the user, one line each."""
    lines = list(results.notes)
    if not results.similarity.empty:
        noted = results.similarity[results.similarity["note"] != ""]
        lines += [f"undefined: {row.benchmark}, {row.form}: {row.note}" for row in noted.itertuples()]
    if results.about["tied"]:
        lines.append("the output embeddings are tied to the input embeddings: processing one processes both")
    if not results.frequency.empty:
        cumulative = results.frequency["cumulative_share"]
        ranks = [f"{needed(cumulative, share):,} for {share:.0%}" for share in SHARES]
        lines.append(f"most frequent tokens needed to cover the text: {', '.join(ranks)}")
    return lines
