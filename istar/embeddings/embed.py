"""`istar embed`: measures of an embedding matrix, raw and post-processed, word similarity and token frequencies."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.table import Table
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from istar.embeddings import wordsim
from istar.errors import UserError, shorten
from istar.files.outputs import Output
from istar.files.writing import to_csv
from istar.geometry.collect.measure import measure_matrix
from istar.geometry.collect.measures_file import number_table
from istar.geometry.collect.same_model import ModelName, refuse_other_model
from istar.inputs import pretrained
from istar.inputs.corpus import Source
from istar.inputs.documents import read_documents
from istar.inputs.embedding_matrix import Matrix, Side, read_matrix
from istar.inputs.tokenizing import tokenize
from istar.measures import all_but_the_top, centered, scaled_centered
from istar.measures.input_checks import unit_vectors, upcast_blocks
from istar.records.config import ModelConfig

FORM_FUNCTIONS: dict[str, Callable[[Tensor, int | None], Tensor]] = {
    "raw": lambda matrix, _: matrix,
    "centered": lambda matrix, _: centered(matrix),
    "scaled_centered": lambda matrix, _: scaled_centered(matrix),
    "all_but_the_top": all_but_the_top,
    "all_but_the_top_published": lambda matrix, components: all_but_the_top(matrix, components, "published"),
}
"""Post-processing of an embedding matrix by the name of its form, as a function of the matrix and of the number of
components that are removed, which only the all-but-the-top forms use; None for their default."""
PAPER_FORMS = ("raw", "centered", "all_but_the_top")
"""The forms whose isotropy the papers' tables have."""
BIN_SIZE = 1_000
"""Number of tokens in a bin, as in Figure 3 of *Too Much in Common*."""
TEXT_SHARES = (0.3, 0.5, 0.98)
"""Shares of a text for which *Too Much in Common* counts the tokens that make them up, in section 2.2."""
_NOUN = "matrix's measures"
_RESULT_FILES = ("embeddings.json", "embeddings.csv", "wordsim.csv", "unused.csv", "frequency.csv")
_MATRIX_FILES = ("embeddings.safetensors", "tokens.txt")
_MODEL_FOLDER = "model"
_TERMINAL_HEADERS = {
    # Forms are compared by the first; the second is the papers' convention, which depends on the eigensolver.
    "partition_isotropy_both": "I(W), both signs",
    "partition_isotropy_as_computed": "as computed",
    "average_norm": "norm",
    "mean_vector_norm": "of the mean",
    "norm_ratio": "ratio",
}
"""Headers of the measures in the terminal table."""


@dataclass(frozen=True)
class MatrixSettings:
    """Which matrix is measured, and how it is processed."""

    matrix: Side = "input"  # input or output embeddings
    form: str = "raw"  # post-processing of the matrix, a key of `FORM_FUNCTIONS`; see `istar.measures.postprocess`
    components: int | None = None  # number of directions that the all-but-the-top forms remove; None for their default
    policy: wordsim.Policy = "single_token"  # treatment of words of several tokens; see `wordsim.word_vectors`


@dataclass(frozen=True)
class EmbeddingResults:
    """Measures of an embedding matrix, and the matrix."""

    matrix: Matrix  # the matrix as it is stored
    processed: Tensor  # the matrix in the requested form
    tokens: list[str | None]  # token of each row; None for rows without a token
    metadata: dict[str, Any]  # model, tensor and form, as `embeddings.json` has them
    measures_by_form: dict[str, dict[str, Any]]
    word_similarity: pd.DataFrame  # correlations with human ratings, with a row for each benchmark and form
    notes: list[str]  # why benchmarks are left out, one line each
    unused_similarity: pd.DataFrame  # cosine of unused tokens with others by bins; see `measure_unused_similarity`
    token_frequencies: pd.DataFrame  # tokens of the texts, the most frequent first


def measure_embeddings(
    config: ModelConfig, settings: MatrixSettings, benchmarks: Sequence[Path] = (), texts: Sequence[Source] = ()
) -> EmbeddingResults:
    """Measure an embedding matrix raw, centered, without its top directions, and in the requested form.

    Args:
        config: the model that has the matrix.
        settings: which of its matrices is measured, and in which form.
        benchmarks: files of word similarity benchmarks.
        texts: texts in which tokens are counted.

    Raises:
        UserError: if the model, a benchmark or a text cannot be read, or an option does not fit the others.
    """
    if settings.components is not None and not settings.form.startswith("all_but_the_top"):
        raise UserError(
            f"--components needs an all_but_the_top form, but --form is {settings.form}; remove --components"
        )
    loaded_benchmarks = [wordsim.read_benchmark(path) for path in benchmarks]
    tokenizer = pretrained.load_tokenizer(config)
    matrix = read_matrix(config, settings.matrix)
    tokens = tokens_by_row(tokenizer, len(matrix.values))
    processed = FORM_FUNCTIONS[settings.form](matrix.values, settings.components)
    # The forms of the papers, and the requested form if it is another one.
    measures_by_form = {form: measure_matrix(FORM_FUNCTIONS[form](matrix.values, None)) for form in PAPER_FORMS}
    if settings.components is not None or settings.form not in measures_by_form:
        measures_by_form[settings.form] = measure_matrix(processed)
    matrix_by_form = {"raw": matrix.values, settings.form: processed}
    counts = count_tokens(texts, tokenizer, len(tokens)) if texts else None
    similarity, notes = measure_word_similarity(loaded_benchmarks, matrix_by_form, tokenizer, settings.policy)
    return EmbeddingResults(
        matrix,
        processed,
        tokens,
        {**make_metadata(config, matrix), "form": settings.form, "components": settings.components},
        measures_by_form,
        similarity,
        notes,
        measure_unused_similarity(matrix_by_form, tokens, set(tokenizer.all_special_ids), counts),
        pd.DataFrame() if counts is None else make_frequency_table(counts, tokens),
    )


def make_metadata(config: ModelConfig, matrix: Matrix) -> dict[str, Any]:
    """Return the model's name and revision, the hash of the embedding matrix, and the tensor that holds the matrix."""
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
    """Return the token of each row of an embedding matrix, or None for a row without a token.

    Embeddings often have more rows than the vocabulary has tokens.

    Raises:
        UserError: if a token of the tokenizer has no row.
    """
    token_by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    largest_id = max(token_by_id)
    if largest_id >= rows:
        raise UserError(
            f"the tokenizer has token {largest_id}, but the embeddings have {rows} rows; expected more rows; "
            "the two are not of one model"
        )
    return [token_by_id.get(token_id) for token_id in range(rows)]


def measure_word_similarity(
    benchmarks: Iterable[wordsim.Benchmark],
    matrix_by_form: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    policy: wordsim.Policy,
) -> tuple[pd.DataFrame, list[str]]:
    """Correlate the similarities of word embeddings with human ratings, for each benchmark and form of the matrix.

    Returns:
        A row for each benchmark and form, and a note for each benchmark of which too few words have a vector.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for benchmark in benchmarks:
        for form, matrix in matrix_by_form.items():
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
    """Count how often each token occurs in texts, `(rows,)`; the special tokens around a text are not counted.

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


def make_frequency_table(counts: np.ndarray, tokens: Sequence[str | None]) -> pd.DataFrame:
    """Return a row for each token that occurs, the most frequent first, with its share and the cumulative share.

    Args:
        counts: number of occurrences by token id.
        tokens: tokens by token id.
    """
    token_ids = _sort_by_frequency(counts)
    shares = counts[token_ids] / counts.sum()
    return pd.DataFrame({
        "rank": np.arange(1, len(token_ids) + 1),
        "id": token_ids,
        "token": [json.dumps(tokens[token_id]) for token_id in token_ids],
        "count": counts[token_ids],
        "share": shares,
        "cumulative_share": shares.cumsum(),
    })  # fmt: skip


def count_needed(cumulative_share: pd.Series, share: float) -> int:
    """Return how many of the most frequent tokens or words make up at least this share of a text."""
    # The tolerance allows for rounding errors in the cumulative sum.
    return int(cumulative_share.to_numpy().searchsorted(share * (1 - 1e-12))) + 1


def _sort_by_frequency(counts: np.ndarray) -> np.ndarray:
    """Return the indices of the counts that are not 0, the largest count first; equal counts keep their order."""
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)]


def find_unused_tokens(tokens: Sequence[str | None]) -> list[int]:
    """Return the ids of placeholder tokens such as BERT's `[unused0]`, which no text contains.

    A vocabulary without placeholders is represented by its last 1,000 tokens, as in *Too Much in Common*. If it has
    fewer than 2,000 tokens, the result is empty.
    """
    pattern = re.compile(r"[\[<]unused_?\d+[\]>]")
    placeholder_ids = [token_id for token_id, token in enumerate(tokens) if token and pattern.fullmatch(token)]
    known_ids = [token_id for token_id, token in enumerate(tokens) if token is not None]
    return placeholder_ids or (known_ids[-BIN_SIZE:] if len(known_ids) >= 2 * BIN_SIZE else [])


def measure_unused_similarity(
    matrix_by_form: Mapping[str, Tensor], tokens: Sequence[str | None], special_ids: set[int], counts: np.ndarray | None
) -> pd.DataFrame:
    """Compute the mean cosine of unused tokens with used ones, in bins of 1,000 (*Too Much in Common*, Figure 3).

    The bins are by token id, as in the paper: vocabularies such as BERT's are ordered by frequency. If `counts` is
    given, there are also bins by rank of frequency, and one bin of the tokens that do not occur.

    Args:
        matrix_by_form: matrices `(rows, d)` by form.
        tokens: token of each row; None for rows without a token.
        special_ids: ids of special tokens, which are left out.
        counts: number of occurrences of each token, `(rows,)`; None if unknown.

    Returns:
        A row for each bin that has tokens; no rows if there are no unused tokens.
    """
    unused_ids = find_unused_tokens(tokens)
    if not unused_ids:
        return pd.DataFrame()
    excluded = special_ids.union(unused_ids)
    used_ids = np.array(
        [token_id for token_id, token in enumerate(tokens) if token is not None and token_id not in excluded], dtype=int
    )
    cosines_by_column: dict[str, np.ndarray] = {}
    for form, matrix in matrix_by_form.items():
        mean_direction = unit_vectors(matrix[unused_ids].double())[0].mean(0)
        cosines_by_column[f"cosine_{form}"] = torch.cat([
            unit_vectors(block)[0] @ mean_direction for block in upcast_blocks(matrix)
        ]).numpy()  # fmt: skip
    rows: list[dict[str, Any]] = []
    for order, first, last, bin_ids in _iterate_bins(used_ids, counts):
        if len(bin_ids):
            occurrences = None if counts is None else int(counts[bin_ids].sum())
            row = {"order": order, "first": first, "last": last, "tokens": len(bin_ids), "occurrences": occurrences}
            rows.append({**row, **{name: cosines[bin_ids].mean() for name, cosines in cosines_by_column.items()}})
    return pd.DataFrame(rows)


def _iterate_bins(
    token_ids: np.ndarray, counts: np.ndarray | None
) -> Iterator[tuple[str, int | None, int | None, np.ndarray]]:
    """Divide token ids into bins by id and, if `counts` is given, also by rank of frequency.

    Yields:
        For each bin: what it is ordered by, its first and last position in that order, and its token ids.
    """
    for start in range(0, int(token_ids.max(initial=-1)) + 1, BIN_SIZE):
        yield "index", start, start + BIN_SIZE - 1, token_ids[(token_ids >= start) & (token_ids < start + BIN_SIZE)]
    if counts is None:
        return
    ranked_ids = token_ids[_sort_by_frequency(counts[token_ids])]
    for start in range(0, len(ranked_ids), BIN_SIZE):
        yield "frequency", start + 1, min(start + BIN_SIZE, len(ranked_ids)), ranked_ids[start : start + BIN_SIZE]
    yield "not in the text", None, None, token_ids[counts[token_ids] == 0]


def check_output_folder(out: Path, inputs: Iterable[str | Path]) -> None:
    """Refuse, before any work is done, a folder into which the results cannot be written.

    Raises:
        UserError: see `istar.files.outputs.Output.check`.
    """
    Output(out, _NOUN).check((*_RESULT_FILES, *_MATRIX_FILES, _MODEL_FOLDER), inputs)


def write_results(
    results: EmbeddingResults, out: Path, save: str | None = None, config: ModelConfig | None = None
) -> list[Path]:
    """Write the measures to `embeddings.json` and to CSV files, and return the paths of what was written.

    A table without rows is not written. What an earlier call has written for the same model is replaced or removed.

    Args:
        results: the measures, and the processed matrix.
        out: output folder.
        save: "matrix" also writes the processed matrix to `embeddings.safetensors` and its rows' tokens to
            `tokens.txt`, in which each line is a JSON string, or `null` for a row without a token. "model" writes the
            whole model with the processed matrix to the folder `model`; tied output embeddings stay tied, so that they
            are processed too.
        config: the model, for `save="model"`.

    Raises:
        UserError: if the folder holds the measures of another model or foreign files, or cannot be written.
    """
    _refuse_other_results(results, out)
    json_text = json.dumps({**results.metadata, "figures": results.measures_by_form}, indent=1)
    rows = [{**results.metadata, "form": form, **measures} for form, measures in results.measures_by_form.items()]
    tables = {
        "embeddings": pd.DataFrame(rows).drop(columns="singular_values"),
        "wordsim": results.word_similarity,
        "unused": results.unused_similarity,
        "frequency": results.token_frequencies,
    }
    contents = {"embeddings.json": (json_text + "\n").encode()}
    for name, table in tables.items():
        if not table.empty:
            contents[f"{name}.csv"] = to_csv(table.convert_dtypes()).encode()
    output, drafts = Output(out, _NOUN), {}
    if save == "matrix":
        contents |= _make_matrix_files(results)
    elif save == "model":
        assert config is not None, "the model is read again"
        drafts[_MODEL_FOLDER] = _save_model(results, config, output)
    output.write(contents, drafts, is_complete=True)
    return [out / name for name in (*contents, *drafts)]


def _refuse_other_results(results: EmbeddingResults, out: Path) -> None:
    """Raise a `UserError` if the folder holds the measures of another model."""
    try:
        earlier_metadata = json.loads((out / "embeddings.json").read_text(encoding="utf-8"))
        earlier_model = ModelName(earlier_metadata["model"], earlier_metadata["revision"])
        earlier_weights = earlier_metadata.get("weights")
    except (OSError, ValueError, TypeError, KeyError):  # there is no such file, or `istar embed` did not write it
        return
    model = ModelName(results.metadata["model"], results.metadata["revision"])
    refuse_other_model(out, earlier_model, model, lambda: earlier_weights == results.metadata["weights"])


def _make_matrix_files(results: EmbeddingResults) -> dict[str, bytes]:
    tensor_name = f"{results.metadata['matrix']}_embeddings"
    metadata = {name: str(value) for name, value in results.metadata.items() if value is not None}
    matrix = save_tensors({tensor_name: results.processed.contiguous()}, metadata)
    tokens = "".join(json.dumps(token) + "\n" for token in results.tokens).encode()
    return dict(zip(_MATRIX_FILES, (matrix, tokens), strict=True))


def _save_model(results: EmbeddingResults, config: ModelConfig, output: Output) -> Path:
    """Save the whole model with the processed matrix to a draft of a folder, and return the draft."""
    model_class = type(pretrained.build_meta_model(pretrained.load_pretrained(config, AutoConfig)))
    model: Any = pretrained.load_weights(config, model_class, dtype="auto")
    layer = model.get_input_embeddings() if results.matrix.side == "input" else model.get_output_embeddings()
    with torch.no_grad():
        layer.weight.copy_(results.processed)
    draft = output.make_draft()
    try:
        pretrained.save(model, pretrained.load_tokenizer(config), draft)
    except OSError as error:
        raise UserError(f"{output.folder / _MODEL_FOLDER} cannot be written: {shorten(error)}") from error
    return draft


def make_terminal_tables(results: EmbeddingResults) -> list[Table]:
    """Return tables for the terminal: the measures by form and, with benchmarks, the word similarity times 100."""
    metadata = results.metadata
    file = metadata["file"] or "the whole model"
    title = f"{Path(metadata['model']).name}: {metadata['matrix']} embeddings, {metadata['tensor']} of {file}"
    values_by_form = {
        form: [measures[name] for name in _TERMINAL_HEADERS] for form, measures in results.measures_by_form.items()
    }
    measure_table = number_table(title, "form", _TERMINAL_HEADERS.values(), values_by_form)
    if results.word_similarity.empty:
        return [measure_table]
    policy = results.word_similarity["policy"][0].replace("_", " ")
    title = f"word similarity: Pearson's r and Spearman's rho with the ratings, x 100; {policy}"
    similarity_table = Table(title=title, title_justify="left")
    for name in ("benchmark", "form"):
        similarity_table.add_column(name, overflow="fold")
    for name in ("pairs", "cosine r", "cosine rho", "product r", "product rho"):
        similarity_table.add_column(name, justify="right", overflow="fold")
    for benchmark, form, _, pairs, kept, *correlations, _ in results.word_similarity.itertuples(index=False):
        cells = ("-" if math.isnan(value) else f"{100 * value:.2f}" for value in correlations)
        similarity_table.add_row(benchmark, form, f"{kept}/{pairs}", *cells)
    return [measure_table, similarity_table]


def make_remarks(results: EmbeddingResults) -> list[str]:
    """Return remarks on the results for the user, one line each, such as the benchmarks that are left out and why."""
    remarks = list(results.notes)
    if not results.word_similarity.empty:
        undefined_rows = results.word_similarity[results.word_similarity["note"] != ""]
        remarks += [f"undefined: {row.benchmark}, {row.form}: {row.note}" for row in undefined_rows.itertuples()]
    if results.metadata["tied"]:
        remarks.append("the output embeddings are tied to the input embeddings: processing one processes both")
    if not results.token_frequencies.empty:
        cumulative_share = results.token_frequencies["cumulative_share"]
        counts = [f"{count_needed(cumulative_share, share):,} for {share:.0%}" for share in TEXT_SHARES]
        remarks.append(f"most frequent tokens needed to cover the text: {', '.join(counts)}")
    return remarks
