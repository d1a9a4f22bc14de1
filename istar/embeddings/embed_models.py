"""`istar embed` with several models or forms: what the tables and figures of *Too Much in Common* are made of."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from istar.embeddings import embed, wordsim
from istar.errors import UserError
from istar.geometry.collect.figure_data import summarize_rows
from istar.geometry.collect.measure import measure_matrix
from istar.geometry.show.compare import ModelArgument
from istar.inputs import pretrained
from istar.inputs.corpus import Source
from istar.inputs.documents import read_documents
from istar.inputs.embedding_matrix import Side, read_matrix
from istar.measures.input_checks import row_norms, upcast_blocks
from istar.records.config import ModelConfig

WORDSIM_FORMS = ("raw", "centered", "scaled_centered", "all_but_the_top")
"""The forms of Table 2 of *Too Much in Common*, in its order."""
_WORD_PATTERN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class EmbeddingSettings:
    """Which matrix of each model is measured, and in which forms."""

    matrix: Side = "input"  # input or output embeddings
    forms: tuple[str, ...] = WORDSIM_FORMS  # forms for word similarity, keys of `embed.FORM_FUNCTIONS`; raw is added
    components: int | None = None  # number of directions that the all-but-the-top forms remove; None for their default
    policy: wordsim.Policy = "single_token"  # treatment of words of several tokens; see `wordsim.word_vectors`

    @property
    def similarity_forms(self) -> tuple[str, ...]:
        """Forms whose word similarity is measured; the first is raw, with which the others are compared."""
        return tuple(dict.fromkeys(("raw", *self.forms)))


@dataclass(frozen=True)
class ModelEmbeddings:
    """Measures of an embedding matrix in several forms."""

    label: str  # name on the page, distinct among the models
    metadata: dict[str, Any]  # model, revision, weights and tensor; see `embed.make_metadata`
    measures_by_form: dict[str, dict[str, Any]]
    word_similarity: pd.DataFrame  # correlations with human ratings, with a row for each benchmark and form
    notes: list[str]  # why benchmarks are left out, one line each
    unused_similarity: pd.DataFrame  # see `embed.measure_unused_similarity`
    token_frequencies: pd.DataFrame  # tokens of the texts, the most frequent first, with the norm of their row
    projected_rows: dict[str, Any]  # projection onto two singular directions; see `figure_data.summarize_rows`
    row_norms: dict[str, np.ndarray]  # norms of the rows `(n,)`, raw and centered


def measure_model(
    argument: ModelArgument,
    settings: EmbeddingSettings,
    benchmarks: Sequence[wordsim.Benchmark] = (),
    texts: Sequence[Source] = (),
) -> ModelEmbeddings:
    """Measure the embedding matrix of a model in the forms of the settings, and raw, centered and post-processed.

    At most two matrices are in memory at a time: the stored one and one form of it.

    Raises:
        UserError: if the model or a text cannot be read, or the settings do not fit the matrix.
    """
    config = ModelConfig(name=argument.model_name, revision=argument.revision)
    tokenizer = pretrained.load_tokenizer(config)
    matrix = read_matrix(config, settings.matrix)
    tokens = embed.tokens_by_row(tokenizer, len(matrix.values))
    counts = embed.count_tokens(texts, tokenizer, len(tokens)) if texts else None
    special_ids = set(tokenizer.all_special_ids)
    measures_by_form: dict[str, dict[str, Any]] = {}
    norms_by_form: dict[str, np.ndarray] = {}
    notes: list[str] = []
    similarities, unused_similarity = [], pd.DataFrame()
    for form in dict.fromkeys((*settings.similarity_forms, *embed.PAPER_FORMS)):
        components = settings.components if form.startswith("all_but_the_top") else None
        form_matrix = embed.FORM_FUNCTIONS[form](matrix.values, components)
        measures_by_form[form] = measure_matrix(form_matrix)
        if form in ("raw", "centered"):
            norms_by_form[form] = _compute_row_norms(form_matrix)
        if form in settings.similarity_forms:
            similarity, notes = embed.measure_word_similarity(
                benchmarks, {form: form_matrix}, tokenizer, settings.policy
            )
            similarities.append(similarity)
            form_unused_similarity = embed.measure_unused_similarity({form: form_matrix}, tokens, special_ids, counts)
            if unused_similarity.empty:
                unused_similarity = form_unused_similarity
            else:
                unused_similarity[f"cosine_{form}"] = form_unused_similarity[f"cosine_{form}"]
    token_frequencies = pd.DataFrame()
    if counts is not None:
        token_frequencies = embed.make_frequency_table(counts, tokens)
        token_frequencies["norm"] = norms_by_form["raw"][token_frequencies["id"]]
    return ModelEmbeddings(
        argument.default_label,
        {**embed.make_metadata(config, matrix), "components": settings.components},
        measures_by_form,
        _sort_by_benchmark(pd.concat(similarities, ignore_index=True)),
        notes,
        unused_similarity,
        token_frequencies,
        summarize_rows(matrix.values, None if counts is None else torch.from_numpy(counts)),
        norms_by_form,
    )


def check_labels(arguments: Sequence[ModelArgument]) -> None:
    """Check that models on the command line have distinct labels.

    Raises:
        UserError: if two models have the same label.
    """
    labels = Counter(argument.default_label for argument in arguments)
    label, count = labels.most_common(1)[0]
    if count > 1:
        raise UserError(f"{count} models are called {label}; give them names, as in first=<model>")


def read_benchmarks(paths: Sequence[Any]) -> list[wordsim.Benchmark]:
    """Read the files of word similarity benchmarks.

    Raises:
        UserError: if a file cannot be read, or two are the same benchmark, which would count twice in the average.
    """
    benchmarks = [wordsim.read_benchmark(path) for path in paths]
    count_by_name = Counter(benchmark.name for benchmark in benchmarks)
    for name, count in count_by_name.items():
        if count > 1:
            raise UserError(f"--wordsim: {count} files are the benchmark {name}; give each benchmark once")
    return benchmarks


def count_words(texts: Iterable[Source]) -> pd.DataFrame:
    """Count the words of texts, and return a row for each word, the most frequent first.

    The columns are those of `embed.make_frequency_table`. A word is a run of letters, digits and underscores, and any
    other character except whitespace is a word by itself. Words that differ only in case count as different words.
    """
    counter: Counter[str] = Counter()
    for source in texts:
        for document in read_documents(source.path):
            counter.update(_WORD_PATTERN.findall(document))
    words = sorted(counter, key=lambda word: (-counter[word], word))
    counts = np.array([counter[word] for word in words], dtype=np.int64)
    shares = counts / max(1, counts.sum())
    return pd.DataFrame({
        "rank": np.arange(1, len(words) + 1),
        "word": words,
        "count": counts,
        "share": shares,
        "cumulative_share": shares.cumsum(),
    })  # fmt: skip


def _compute_row_norms(matrix: Tensor) -> np.ndarray:
    """Return the norm of each row `(n,)`, float64."""
    return torch.cat([row_norms(block) for block in upcast_blocks(matrix)]).cpu().numpy()


def _sort_by_benchmark(similarity: pd.DataFrame) -> pd.DataFrame:
    """Group rows by benchmark, with the benchmarks in the order of their first row; the forms keep their order."""
    if similarity.empty:
        return similarity
    rank_by_name = {name: rank for rank, name in enumerate(similarity["benchmark"].drop_duplicates())}
    return similarity.sort_values(
        "benchmark", key=lambda names: names.map(rank_by_name), kind="stable", ignore_index=True
    )
