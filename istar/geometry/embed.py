"""`istar embed`: an embedding matrix, raw and post-processed, and what word similarity makes of it."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
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
from istar.geometry.corpus import Source, documents
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
"""Tokens of a bin, as in Figure 3 of *Too Much in Common*."""
SPECTRUM = "singular_values"


@dataclass(frozen=True)
class Choice:
    """What to do.

    Attributes:
        matrix: input or output embeddings.
        form: how they are processed; see `istar.measures.postprocess`.
        components: directions removed by the all-but-the-top forms; None for their own number.
        policy: of words of several tokens in word similarity.
    """

    matrix: Which = "input"
    form: Form = "raw"
    components: int | None = None
    policy: wordsim.Policy = "single_token"


@dataclass(frozen=True)
class Embedded:
    """What was found, a table each as rows.

    Attributes:
        raw: the matrix as it is stored.
        processed: in the form asked for.
        tokens: of each row; None where the tokenizer has none for it.
        about: model, tensor and form, as `embeddings.json` has them.
        figures: by form.
        similarity: by benchmark and form.
        notes: benchmarks without figures, and why.
        unused: similarity of tokens that no text holds to the others, by bins of frequency.
        frequency: tokens of the corpus, the most frequent first.
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
) -> Embedded:
    """Measure an embedding matrix as it is, as the papers process it, and in the form asked for.

    Args:
        config: name and revision of the model.
        choice: see there.
        benchmarks: files of word similarity.
        texts: in which tokens are counted.

    Raises:
        UserError: for anything that the user can mend.
    """
    if choice.components is not None and not choice.form.startswith("all_but_the_top"):
        raise UserError(f"--components is of the all_but_the_top forms, not of --form {choice.form}")
    read = [wordsim.read_benchmark(path) for path in benchmarks]
    tokenizer = models.load_tokenizer(config)
    matrix = read_matrix(config, choice.matrix)
    tokens = _tokens(tokenizer, len(matrix.values))
    processed = FORMS[choice.form](matrix.values, choice.components)
    forms: dict[str, Tensor] = {"raw": matrix.values, choice.form: processed}
    counts = count_tokens(texts, tokenizer, len(tokens)) if texts else None
    similarity, notes = _similarity(read, forms, tokenizer, choice.policy)
    return Embedded(
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
    """The three forms of the papers' tables and the one asked for, if it is another."""
    figures = {form: matrix_measures(FORMS[form](raw, None)) for form in ("raw", "centered", "all_but_the_top")}
    if choice.components is not None or choice.form not in figures:
        figures[choice.form] = matrix_measures(processed)
    return figures


def _tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str | None]:
    """The token of each row; embeddings often have some more rows than there are tokens."""
    vocabulary = tokenizer.get_vocab()
    highest = max(vocabulary.values())
    if highest >= rows:
        raise UserError(f"the tokenizer has token {highest} and the embeddings {rows} rows; they are not of one model")
    tokens: list[str | None] = [None] * rows
    for token, number in vocabulary.items():
        tokens[number] = token
    return tokens


# ---- word similarity


def _similarity(
    benchmarks: Iterable[wordsim.Benchmark],
    forms: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    policy: wordsim.Policy,
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each benchmark and form, and a note for each benchmark of which too few words are known."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for benchmark in benchmarks:
        for form, matrix in forms.items():
            vectors = wordsim.word_vectors(benchmark.words(), tokenizer, matrix, policy)
            try:
                rows.append(_row(wordsim.similarity(vectors, benchmark), form, len(benchmark.pairs)))
            except UserError as error:
                notes.append(str(error))
                break
    return rows, notes


def _row(found: wordsim.WordSimilarity, form: str, pairs: int) -> dict[str, Any]:
    return {
        "benchmark": found.benchmark,
        "form": form,
        "policy": found.policy,
        "pairs": pairs,
        "kept": len(found.kept),
        "cosine_pearson": found.cosine.pearson,
        "cosine_spearman": found.cosine.spearman,
        "inner_product_pearson": found.inner_product.pearson,
        "inner_product_spearman": found.inner_product.spearman,
    }


# ---- frequency


def count_tokens(texts: Iterable[Source], tokenizer: PreTrainedTokenizerBase, rows: int) -> np.ndarray:
    """How often each token occurs, `(rows,)`; special tokens around a text do not count.

    Raises:
        UserError: for a file that cannot be read, or texts without tokens.
    """
    counts = np.zeros(rows, dtype=np.int64)
    for source in texts:
        for some in _chunks(documents(source), 1_000):
            encoded = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids in encoded["input_ids"]:
                counts += np.bincount(np.asarray(ids, dtype=np.int64), minlength=rows)
    if not counts.any():
        raise UserError("--text: no file holds any text")
    return counts


def _chunks(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    while some := list(islice(texts, size)):
        yield some


def frequencies(counts: np.ndarray, tokens: Sequence[str | None]) -> list[dict[str, Any]]:
    """Tokens that occur, the most frequent first, with the share of the corpus that they and those before make up."""
    order = _by_frequency(counts)
    shares = counts[order] / counts.sum()
    return [
        {"rank": rank, "id": number, "token": json.dumps(tokens[number]), "count": counts[number], "share": share,
         "cumulative_share": total}
        for rank, (number, share, total) in enumerate(zip(order, shares, shares.cumsum(), strict=True), start=1)
    ]  # fmt: skip


def _by_frequency(counts: np.ndarray) -> np.ndarray:
    """Ids that occur, the most frequent first, the smaller id first among equals."""
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)]


_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")


def unused_tokens(tokens: Sequence[str | None]) -> list[int]:
    """Ids of the tokens that stand for nothing, as BERT has them; without any the last 1000, as the paper takes them.

    None where the vocabulary has not even twice as many.
    """
    found = [number for number, token in enumerate(tokens) if token and _UNUSED.fullmatch(token)]
    used = [number for number, token in enumerate(tokens) if token is not None]
    return found or (used[-BIN:] if len(used) >= 2 * BIN else [])


def unused_similarity(
    forms: Mapping[str, Tensor], tokens: Sequence[str | None], special: set[int], counts: np.ndarray | None
) -> list[dict[str, Any]]:
    """Mean cosine between unused tokens and the others, in bins of 1000 (*Too Much in Common*, Figure 3).

    By index, as in the paper, where a higher one is a rarer token for vocabularies such as BERT's; and by rank of
    frequency where tokens were counted, the tokens that do not occur in a bin of their own.

    Args:
        forms: matrices.
        tokens: of the rows.
        special: ids that are left out.
        counts: `(rows,)`, occurrences of each token.
    """
    unused = unused_tokens(tokens)
    if not unused:
        return []
    left_out = special.union(unused)
    others = np.array([i for i, token in enumerate(tokens) if token is not None and i not in left_out], dtype=int)
    cosines = {f"cosine_{form}": _cosines(matrix, unused) for form, matrix in forms.items()}
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
    """Order, first and last place, and the ids in between."""
    for start in range(0, int(others.max(initial=-1)) + 1, BIN):
        yield "index", start, start + BIN - 1, others[(others >= start) & (others < start + BIN)]
    if counts is None:
        return
    ranked = others[_by_frequency(counts[others])]
    for start in range(0, len(ranked), BIN):
        yield "frequency", start + 1, min(start + BIN, len(ranked)), ranked[start : start + BIN]
    yield "not in the text", None, None, others[counts[others] == 0]


def _cosines(matrix: Tensor, unused: Sequence[int]) -> np.ndarray:
    """Each row's mean cosine with the unused rows, `(rows,)`."""
    mean = unit_vectors(matrix[list(unused)].double())[0].mean(0)
    return torch.cat([unit_vectors(block)[0] @ mean for block in wide_blocks(matrix)]).numpy()


# ---- what is written and shown


def write(found: Embedded, out: Path) -> list[Path]:
    """Write the figures; the files' paths."""
    about = {**found.about, "figures": found.figures}
    write_text(out / "embeddings.json", json.dumps(about, indent=1) + "\n")
    figures = [
        {**found.about, "form": form, **{name: value for name, value in own.items() if name != SPECTRUM}}
        for form, own in found.figures.items()
    ]
    tables = {"embeddings": figures, "wordsim": found.similarity, "unused": found.unused, "frequency": found.frequency}
    written = [out / "embeddings.json"]
    for name, rows in tables.items():
        path = out / f"{name}.csv"
        if rows:
            write_text(path, pd.DataFrame(rows).convert_dtypes().to_csv(index=False))
            written.append(path)
        else:
            # One of an earlier call would be taken for this one's.
            path.unlink(missing_ok=True)
    return written


def write_matrix(found: Embedded, out: Path) -> list[Path]:
    """Write the processed matrix as `embeddings.safetensors` and its rows' tokens, a JSON string or null a line."""
    tensor = f"{found.about['matrix']}_embeddings"
    about = {name: str(value) for name, value in found.about.items() if value is not None}
    with atomic_write(out / "embeddings.safetensors") as file:
        file.write(save({tensor: found.processed.contiguous()}, about))
    write_text(out / "tokens.txt", "".join(json.dumps(token) + "\n" for token in found.tokens))
    return [out / "embeddings.safetensors", out / "tokens.txt"]


def write_model(found: Embedded, config: ModelConfig, out: Path) -> Path:
    """Write the whole model with the processed matrix in it to `model`, as `save_pretrained` does.

    Tied output embeddings stay tied and are then processed too.

    Raises:
        UserError: if it cannot be loaded or written.
    """
    model = models.load_pretrained(config, type(models.meta_model(models.load_pretrained(config, AutoConfig))))
    layer = model.get_input_embeddings() if found.raw.which == "input" else model.get_output_embeddings()
    with torch.no_grad():
        layer.weight.copy_(found.processed)
    unfinished, folder = out / ".model", out / "model"
    for leftover in (unfinished, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        models.save(model, models.load_tokenizer(config), unfinished)
        unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {shorten(error)}") from error
    return folder


def tables(found: Embedded) -> list[Table]:
    """Figures of the forms, and word similarity times 100, as the paper prints it."""
    about = found.about
    where = "the whole model" if about["file"] is None else about["file"]
    title = f"{Path(about['model']).name}: {about['matrix']} embeddings, {about['tensor']} of {where}"
    rows = [
        [form, *(f"{own[name]:.4g}" for name in _COLUMNS)] for form, own in found.figures.items()
    ]  # fmt: skip
    shown = [_table(title, ["form", *_COLUMNS.values()], rows)]
    if found.similarity:
        scores = [name for name in found.similarity[0] if name.endswith(("pearson", "spearman"))]
        rows = [
            [
                row["benchmark"],
                row["form"],
                f"{row['kept']}/{row['pairs']}",
                *(f"{100 * row[s]:.2f}" for s in scores),
            ]
            for row in found.similarity
        ]
        header = ["benchmark", "form", "pairs", "cosine r", "cosine rho", "product r", "product rho"]
        policy = found.similarity[0]["policy"].replace("_", " ")
        shown.append(
            _table(f"word similarity: Pearson's r and Spearman's rho with the ratings, x 100; {policy}", header, rows)
        )
    return shown


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
        named = name in ("benchmark", "form")
        table.add_column(name, justify="left" if named else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def remarks(found: Embedded) -> list[str]:
    """What else a reader should know, a line each."""
    told = list(found.notes)
    if found.about["tied"]:
        told.append("the output embeddings are tied to the input's: what is done to one is done to both")
    if found.frequency:
        shares = np.array([row["cumulative_share"] for row in found.frequency])
        needed = [
            f"{int(np.searchsorted(shares, part * (1 - 1e-12))) + 1:,} for {part:.0%}" for part in (0.3, 0.5, 0.98)
        ]
        told.append(f"most frequent tokens needed to cover the text: {', '.join(needed)}")
    return told
