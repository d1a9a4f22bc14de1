"""Published results of *Too Much in Common* (Biś et al., NAACL 2021): Tables 1 to 3."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import pandas as pd

PAPER_FORM_NAMES = {
    "raw": "raw",
    "centered": "centered",
    "scaled_centered": "centered_scaled",
    "all_but_the_top": "post_processed",
}
"""Name of a form in the paper's tables, by its name in `istar.embeddings.embed_models.FORM_FUNCTIONS`."""
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


def find_paper_model(label: str, name: str) -> str:
    """Return the name of a model in *Too Much in Common*; empty if the paper does not have the model.

    The paper's name is either the model's label or the last part of its hub id or path.
    """
    paper_models = _read_table("table1", "model")
    return next((candidate for candidate in (label, PurePath(name).name) if candidate in paper_models), "")


def read_isotropy_and_norms(model: str) -> Mapping[str, float]:
    """Return the isotropy and norms that *Too Much in Common* has for a model (Table 1); empty if it has none.

    I(W) has the signs of the eigenvectors as computed.
    """
    return _read_table("table1", "model").get(model, {})


def read_average_similarity(model: str, form: str) -> Mapping[str, float]:
    """Return the average word similarity that *Too Much in Common* has for a model and form of the matrix (Table 2).

    The keys are `cosine` and `inner_product`; the values are Pearson's r x 100. The mapping is empty if the paper has
    none.
    """
    return _read_table("table2", "model", "variant").get((model, PAPER_FORM_NAMES.get(form)), {})


def read_benchmark_similarity(model: str, form: str, name: str) -> Mapping[str, float]:
    """Return the word similarity on one benchmark that *Too Much in Common* has for a model and form (Table 3).

    The keys are `cosine` and `inner_product`; the values are Pearson's r x 100. The mapping is empty if the paper has
    none.
    """
    return _read_table("table3", "model", "variant", "benchmark").get((model, PAPER_FORM_NAMES.get(form), name), {})


@cache
def _read_table(name: str, *key_columns: str) -> dict[Any, dict[str, float]]:
    """Return the rows of one of the tables of *Too Much in Common* by the values of the columns `key_columns`."""
    with files("istar.embeddings").joinpath("paper", f"{name}.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file, index_col=list(key_columns)).astype(float).to_dict("index")  # type: ignore[return-value]
