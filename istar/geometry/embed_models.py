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

from istar import models
from istar.config import ModelConfig
from istar.errors import UserError
from istar.geometry import embed, wordsim
from istar.geometry.arrays import summarize_rows
from istar.geometry.compare import Choice
from istar.geometry.corpus import Source
from istar.geometry.matrix import Side, read_matrix
from istar.geometry.measure import measure_matrix
from istar.measures.rows import row_norms, wide_blocks
from istar.tasks.documents import read_documents

WORDSIM_FORMS = ("raw", "centered", "scaled_centered", "all_but_the_top")
"""The forms of the paper's Table 2, in its order."""
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Settings:
    """Which matrices are measured, and how they are processed."""

    matrix: Side = "input"  # input or output embeddings
    forms: tuple[str, ...] = WORDSIM_FORMS  # forms for the word similarity, keys of `embed.FORMS`; raw is added
    components: int | None = None  # number of directions that the all-but-the-top forms remove; None for their default
    policy: wordsim.Policy = "single_token"  # treatment of words of several tokens; see `wordsim.word_vectors`

    @property
    def similarity_forms(self) -> tuple[str, ...]:
        """The forms whose word similarity is measured: raw, with which the others are compared, comes first."""
        return tuple(dict.fromkeys(("raw", *self.forms)))


@dataclass(frozen=True)
class ModelEmbeddings:
    """Measures of an embedding matrix in several forms."""

    label: str  # name on the page, distinct among the models
    about: dict[str, Any]  # model, revision, weights and tensor; see `embed.describe`
    figures: dict[str, dict[str, Any]]  # `measure_matrix` by form
    similarity: pd.DataFrame  # word similarity, with a row for each benchmark and form
    notes: list[str]  # why benchmarks are left out, one line each
    unused: pd.DataFrame  # see `embed.unused_similarity`
    frequency: pd.DataFrame  # tokens of the texts, the most frequent first, with the norm of their row
    rows: dict[str, Any]  # projection onto two singular directions; see `arrays.summarize_rows`
    norms: dict[str, np.ndarray]  # norms of the rows `(n,)`, raw and centered


def measure(
    choice: Choice, settings: Settings, benchmarks: Sequence[wordsim.Benchmark] = (), texts: Sequence[Source] = ()
) -> ModelEmbeddings:
    """Measure the embedding matrix of a model in the forms of Table 1 and in those of the settings.

    At most two matrices are in memory at a time: the stored one and one form of it.

    Raises:
        UserError: if the model or a text cannot be read, or the settings do not fit the matrix.
    """
    config = ModelConfig(name=choice.model, revision=choice.revision)
    tokenizer = models.load_tokenizer(config)
    matrix = read_matrix(config, settings.matrix)
    tokens = embed.tokens_by_row(tokenizer, len(matrix.values))
    counts = embed.count_tokens(texts, tokenizer, len(tokens)) if texts else None
    special = set(tokenizer.all_special_ids)
    figures: dict[str, dict[str, Any]] = {}
    norms: dict[str, np.ndarray] = {}
    notes: list[str] = []
    similarity, unused = [], pd.DataFrame()
    for form in dict.fromkeys((*settings.similarity_forms, *embed.PAPER_FORMS)):
        components = settings.components if form.startswith("all_but_the_top") else None
        processed = embed.FORMS[form](matrix.values, components)
        figures[form] = measure_matrix(processed)
        if form in ("raw", "centered"):
            norms[form] = _norms(processed)
        if form in settings.similarity_forms:
            scores, notes = embed.word_similarity(benchmarks, {form: processed}, tokenizer, settings.policy)
            similarity.append(scores)
            cosines = embed.unused_similarity({form: processed}, tokens, special, counts)
            unused = cosines if unused.empty else unused.assign(**{f"cosine_{form}": cosines[f"cosine_{form}"]})
    frequency = pd.DataFrame()
    if counts is not None:
        frequency = embed.frequencies(counts, tokens)
        frequency["norm"] = norms["raw"][frequency["id"]]
    return ModelEmbeddings(
        choice.default_label,
        {**embed.describe(config, matrix), "components": settings.components},
        figures,
        _by_benchmark(pd.concat(similarity, ignore_index=True)),
        notes,
        unused,
        frequency,
        summarize_rows(matrix.values, None if counts is None else torch.from_numpy(counts)),
        norms,
    )


def check_labels(chosen: Sequence[Choice]) -> None:
    """Refuse models that would have the same label.

    Raises:
        UserError: if two models have the same label.
    """
    labels = Counter(choice.default_label for choice in chosen)
    label, count = labels.most_common(1)[0]
    if count > 1:
        raise UserError(f"{count} models are called {label}; give them names, as in first=<model>")


def read_benchmarks(paths: Sequence[Any]) -> list[wordsim.Benchmark]:
    """Read the files of benchmarks.

    Raises:
        UserError: if a file cannot be read, or two are the same benchmark, which would count twice in the average.
    """
    benchmarks = [wordsim.read_benchmark(path) for path in paths]
    names = Counter(benchmark.name for benchmark in benchmarks)
    for name, count in names.items():
        if count > 1:
            raise UserError(f"--wordsim: {count} files are the benchmark {name}; give each benchmark once")
    return benchmarks


def word_frequencies(texts: Iterable[Source]) -> pd.DataFrame:
    """Count the words of texts; returns a row for each word, the most frequent first, as `embed.frequencies`.

    A word is a run of letters, digits and underscores, and any other sign except a space is a word by itself. Upper
    and lower case are kept apart.
    """
    counter: Counter[str] = Counter()
    for source in texts:
        for document in read_documents(source.path):
            counter.update(_WORD.findall(document))
    words = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    counts = np.array([count for _, count in words], dtype=np.int64)
    shares = counts / max(1, counts.sum())
    return pd.DataFrame({
        "rank": np.arange(1, len(words) + 1),
        "word": [word for word, _ in words],
        "count": counts,
        "share": shares,
        "cumulative_share": shares.cumsum(),
    })  # fmt: skip


def _norms(matrix: Tensor) -> np.ndarray:
    """Return the norm of each row `(n,)`, float64."""
    return torch.cat([row_norms(block) for block in wide_blocks(matrix)]).cpu().numpy()


def _by_benchmark(similarity: pd.DataFrame) -> pd.DataFrame:
    """Sort the rows by benchmark in the order of the command line; the forms keep their order."""
    if similarity.empty:
        return similarity
    order = {name: number for number, name in enumerate(similarity["benchmark"].drop_duplicates())}
    return similarity.sort_values("benchmark", key=lambda names: names.map(order), kind="stable", ignore_index=True)
