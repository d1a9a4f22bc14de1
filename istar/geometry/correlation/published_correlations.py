"""Published results of *Anisotropy is Not Inherent to Transformers* (Machina and Mercer, NAACL 2024): Table 1."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePath

import pandas as pd


def look_up_correlations(model: str, task: str) -> Mapping[str, float]:
    """Return the published correlations of I(W) of the output embeddings with a task over the training of a model.

    I(W) has the signs of the eigenvectors as computed, and the first checkpoint (`step0`) is left out.

    Args:
        model: name, hub id or path of a model, whose last part is compared with the paper's names, e.g. `pythia-70m`.
        task: name of a task, which is compared with the paper's, e.g. `SciQ-acc-norm`, regardless of case, spaces,
            hyphens and underscores.

    Returns:
        The correlations by the names `pearson`, `spearman` and `kendall`; empty if the paper has none.
    """
    return _read_table().get((PurePath(model).name, _normalize(task)), {})


def _normalize(task: str) -> str:
    """Return the letters and digits of the name of a task in lower case."""
    return "".join(filter(str.isalnum, task.lower()))


@cache
def _read_table() -> dict[tuple[str, str], dict[str, float]]:
    """Return the rows of the table by the name of the model and the normalized name of the task."""
    with files("istar.geometry.correlation").joinpath("paper", "correlations.csv").open(encoding="utf-8") as file:
        table = pd.read_csv(file)
    table["task"] = table["task"].map(_normalize)
    return table.set_index(["model", "task"]).astype(float).to_dict("index")  # type: ignore[return-value]
