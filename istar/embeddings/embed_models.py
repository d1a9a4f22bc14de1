"""Embedding matrices of models in several forms: their measurements, and a processed matrix as files."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from istar.embeddings import token_frequencies, wordsim
from istar.errors import UserError, shorten
from istar.files.folders import split_label
from istar.files.outputs import Output
from istar.measures import all_but_the_top, scaled_centered
from istar.measures.matrix_forms import measure_forms, measure_matrix, project_rows
from istar.measures.numerics import row_norms, upcast_blocks
from istar.measures.spectrum import decompose_rows
from istar.models import model_files, pretrained
from istar.models.embedding_matrix import Matrix, Side, read_matrix
from istar.models.model_source import ModelSource
from istar.models.saved_checkpoints import ModelArgument, check_distinct_labels
from istar.texts.corpus import Source
from istar.vectors.transforms import AllButTheTop, Centering

MATRIX_FILES = ("embeddings.safetensors", "tokens.txt")
MODEL_FOLDER = "model"
FORM_FUNCTIONS: dict[str, Callable[[Tensor, int | None], Tensor]] = {
    "raw": lambda matrix, _: matrix,
    "centered": lambda matrix, _: Centering().fit(matrix).transform(matrix),
    "scaled_centered": lambda matrix, _: scaled_centered(matrix),
    "all_but_the_top": lambda matrix, components: AllButTheTop(components).fit(matrix).transform(matrix),
    "all_but_the_top_published": lambda matrix, components: all_but_the_top(matrix, components, "published"),
}
"""Post-processing by the name of its form: a function of the matrix and of the number of components to remove.
Only the all-but-the-top forms use the number; None is their default."""
PAPER_FORMS = ("raw", "centered", "all_but_the_top")
"""The forms in Table 1 of *Too Much in Common*."""
WORDSIM_FORMS = ("raw", "centered", "scaled_centered", "all_but_the_top")
"""The forms of Table 2 of *Too Much in Common*, in its order."""
SIMILARITY_COLUMNS = ["benchmark", "form", "policy", "pairs", *wordsim.WordSimilarity._fields]
"""Columns of the table of correlations with human ratings."""


@dataclass(frozen=True)
class EmbeddingSettings:
    """The matrix of each model to measure, and its forms.

    Raises a `UserError` if `components` is given without an all-but-the-top form.
    """

    matrix: Side = "input"  # input or output embeddings
    forms: tuple[str, ...] = WORDSIM_FORMS  # forms for word similarity, keys of `FORM_FUNCTIONS`; raw is added
    components: int | None = None  # number of directions that the all-but-the-top forms remove; None for their default
    policy: wordsim.Policy = "single_token"  # treatment of words of several tokens; see `wordsim.word_vectors`

    @property
    def measured_forms(self) -> tuple[str, ...]:
        """All forms that are measured, in their order."""
        return tuple(dict.fromkeys(("raw", *self.forms, *PAPER_FORMS)))

    def __post_init__(self) -> None:
        if self.components is not None and not any(form.startswith("all_but_the_top") for form in self.forms):
            raise UserError(
                f"--components needs an all_but_the_top form, but the forms are {', '.join(self.forms)}; "
                "remove --components"
            )


@dataclass(frozen=True)
class ModelEmbeddings:
    """Measures of an embedding matrix in several forms."""

    label: str  # name on the page, distinct among the models
    metadata: dict[str, Any]  # model, revision, weights and tensor, as `embeddings.json` has them
    measures_by_form: dict[str, dict[str, Any]]
    word_similarity: pd.DataFrame  # correlations with human ratings, with a row for each benchmark and form
    notes: list[str]  # why benchmarks are left out, one line each
    unused_similarity: pd.DataFrame  # mean cosines with unused tokens by bin; see `token_frequencies.make_bins`
    token_frequencies: pd.DataFrame  # tokens of the texts, the most frequent first, with the norm of their row
    projection: dict[str, Any]  # projection onto two singular directions; see `partition.project_rows`
    projection_counts: np.ndarray | None  # occurrences of the projected rows' tokens in the texts; None without texts
    row_norms: dict[str, np.ndarray]  # norms of the rows `(n,)`, raw and centered


def measure_embeddings(
    model: ModelArgument,
    settings: EmbeddingSettings,
    benchmarks: Sequence[wordsim.Benchmark] = (),
    texts: Sequence[Source] = (),
    advance: Callable[[], object] = lambda: None,
) -> ModelEmbeddings:
    """Measure a model's embedding matrix in the forms of the settings, and raw, centered and post-processed.

    At most two matrices are in memory at a time: the stored one and one form of it. `advance` is called after each of
    the `settings.measured_forms`. Raises a `UserError` if the model or a text cannot be read, or the settings do not
    fit the matrix.
    """
    tokenizer = pretrained.load_tokenizer(model.source)
    matrix = read_matrix(model.source, settings.matrix)
    tokens = list_tokens(tokenizer, len(matrix.values))
    counts = token_frequencies.count_tokens(texts, tokenizer, len(tokens)) if texts else None
    unused_ids = token_frequencies.find_unused_tokens(tokens)
    unused_similarity = token_frequencies.make_bins(tokens, set(tokenizer.all_special_ids), counts)
    spectra = decompose_rows(matrix.values)
    forms_of_spectra = measure_forms(matrix.values, spectra, settings.components).values()
    measures_by_form: dict[str, dict[str, Any]] = dict(zip(PAPER_FORMS, forms_of_spectra, strict=True))
    norms_by_form: dict[str, np.ndarray] = {}
    similarity_rows: list[dict[str, Any]] = []
    notes: list[str] = []
    # Word similarity is always measured for the raw form too, to compare the others with it.
    similarity_forms = ("raw", *settings.forms)
    for form in settings.measured_forms:
        components = settings.components if form.startswith("all_but_the_top") else None
        form_matrix = FORM_FUNCTIONS[form](matrix.values, components)
        if form not in PAPER_FORMS:
            measures_by_form[form] = measure_matrix(form_matrix)
        if form in ("raw", "centered"):
            norms_by_form[form] = torch.cat([row_norms(block) for block in upcast_blocks(form_matrix)]).numpy()
        if form in similarity_forms:
            rows, notes = measure_word_similarity(benchmarks, form, form_matrix, tokenizer, settings.policy)
            similarity_rows += rows
            if not unused_similarity.empty:
                cosines = token_frequencies.average_cosines(form_matrix, unused_ids, unused_similarity)
                unused_similarity[f"cosine_{form}"] = cosines
        advance()
    # The sort is stable: the forms of a benchmark keep their order.
    similarity_rows.sort(key=lambda row: [benchmark.name for benchmark in benchmarks].index(row["benchmark"]))
    projection = project_rows(matrix.values, spectra)
    return ModelEmbeddings(
        label=model.default_label,
        metadata={**make_metadata(model.source, matrix), "components": settings.components},
        measures_by_form={form: measures_by_form[form] for form in settings.measured_forms},
        word_similarity=pd.DataFrame(similarity_rows, columns=SIMILARITY_COLUMNS),
        notes=notes,
        unused_similarity=unused_similarity.drop(columns="ids"),
        token_frequencies=(
            pd.DataFrame() if counts is None
            else token_frequencies.make_token_table(counts, tokens, norms_by_form["raw"])
        ),
        projection=projection,
        projection_counts=None if counts is None else counts[projection["ids"]],
        row_norms=norms_by_form,
    )  # fmt: skip


def make_metadata(source: ModelSource, matrix: Matrix) -> dict[str, Any]:
    """Return the model's name and revision, the hash of the embedding matrix, and its tensor's name."""
    return {
        "model": source.name,
        "revision": source.revision,
        "weights": hashlib.blake2b(matrix.values.contiguous().numpy().tobytes(), digest_size=8).hexdigest(),
        "matrix": matrix.side,
        "tensor": matrix.tensor,
        "file": matrix.file,
        "tied": matrix.tied,
    }


def list_tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str | None]:
    """Return the token of each row of an embedding matrix; None for a row without a token.

    Embeddings often have more rows than the vocabulary has tokens. Raises a `UserError` if a token of the tokenizer
    lacks a row.
    """
    token_by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    largest_id = max(token_by_id)
    if largest_id >= rows:
        raise UserError(
            f"the tokenizer has token {largest_id}, but the embeddings have {rows} rows; expected more rows; "
            "the two are not of one model"
        )
    return [token_by_id.get(token_id) for token_id in range(rows)]


def read_benchmarks(arguments: Sequence[str | Path]) -> list[wordsim.Benchmark]:
    """Read files of rated word pairs, each `[name=]<file>`."""
    labels_and_paths = (split_label(str(argument)) for argument in arguments)
    benchmarks = [wordsim.read_benchmark(Path(path), label) for label, path in labels_and_paths]
    check_distinct_labels([benchmark.name for benchmark in benchmarks], "benchmarks")
    return benchmarks


def measure_word_similarity(
    benchmarks: Sequence[wordsim.Benchmark],
    form: str,
    matrix: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    policy: wordsim.Policy,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Correlate the similarities of word embeddings in one form of the matrix with human ratings.

    Returns:
        A row for each benchmark, and a note for each benchmark with too few words that have a vector.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for benchmark in benchmarks:
        vectors = wordsim.word_vectors(benchmark.words(), tokenizer, matrix, policy)
        try:
            similarity = wordsim.measure_similarity(vectors, benchmark)
        except UserError as error:
            notes.append(str(error))
            continue
        names = {"benchmark": benchmark.name, "form": form, "policy": policy, "pairs": len(benchmark.pairs)}
        rows.append({**names, **similarity._asdict()})
    return rows, notes


def make_matrix_files(
    model: ModelArgument, matrix: Matrix, processed: Tensor, settings: dict[str, Any]
) -> dict[str, bytes]:
    """Return the contents of `MATRIX_FILES` for a processed matrix; `matrix` is the stored one.

    `tokens.txt` has a JSON string for each row, or `null` for a row without a token. `settings` becomes metadata.
    """
    metadata = {**make_metadata(model.source, matrix), **settings}
    texts = {name: str(value) for name, value in metadata.items() if value is not None}
    tensors = save_tensors({f"{matrix.side}_embeddings": processed.contiguous()}, texts)
    tokens = list_tokens(pretrained.load_tokenizer(model.source), len(processed))
    lines = "".join(json.dumps(token) + "\n" for token in tokens)
    return dict(zip(MATRIX_FILES, (tensors, lines.encode()), strict=True))


def save_model(model: ModelArgument, matrix: Matrix, processed: Tensor, output: Output) -> Path:
    """Save the whole model with the processed matrix to a draft folder, and return the folder.

    Tied output embeddings stay tied, so that they are processed too. Raises a `UserError` if the folder cannot be
    written.
    """
    model_class = type(model_files.build_meta_model(model.source))
    loaded_model: Any = model_files.load_weights(model.source, model_class, lambda whole: whole, dtype="auto")
    is_input = matrix.side == "input"
    layer = loaded_model.get_input_embeddings() if is_input else loaded_model.get_output_embeddings()
    with torch.no_grad():
        layer.weight.copy_(processed)
    draft = output.make_draft()
    try:
        pretrained.save(loaded_model, pretrained.load_tokenizer(model.source), draft)
    except OSError as error:
        raise UserError(f"{output.folder / MODEL_FOLDER} cannot be written: {shorten(error)}") from error
    return draft
