"""Published results and search grids of *Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024)."""

from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd

from istar.runs.names import BASE, METHOD_NAMES

MODELS = {"albert-base-v2": "albert", "bert-base-cased": "bert", "distilbert-base-cased": "distilbert"}
"""The paper's models: last part of the model's name -> its `model` option on the command line."""
PAPER_TASKS = ("sst2", "qnli", "rte", "mrpc", "qqp", "cola", "stsb", "sst5", "squad")
"""The paper's tasks in the order of Table 1."""
FAMILIES = {method: METHOD_NAMES[method] for method in (BASE, "cosreg", "istar")}
"""The paper's methods: name in files -> name in the paper."""
ISOSCORE_ZETA = 0.2  # zeta of the IsoScore* in the paper's Figures 3 and 6


def look_up_score(model: str, task: str, metric: str, family: str) -> tuple[float, float] | None:
    """Return mean and standard deviation in the paper's Table 1 (five seeds, development set, percent), if any.

    `model` is the last part of a model's name, e.g. `bert-base-cased`, and `family` is a key of `FAMILIES`.
    """
    row = _read_table("table1", "model", "task", "metric").get((MODELS.get(model), task, metric))
    return None if row is None else (row[family], row[f"{family}_std"])


def look_up_tuned_penalty(model: str, task: str) -> tuple[float, float] | None:
    """Return the best lambda and zeta in the paper's Table 2, if any; `model` is as for `look_up_score`."""
    row = _read_table("table2", "task").get(task)
    if row is None or model not in MODELS:
        return None
    return row[f"{MODELS[model]}_lambda"], row[f"{MODELS[model]}_zeta"]


@cache
def _read_table(name: str, *index_columns: str) -> dict[Any, dict[str, float]]:
    with files("istar.reports").joinpath("paper", f"{name}.csv").open(encoding="utf-8") as file:
        table = pd.read_csv(file, index_col=list(index_columns))
    return table.astype(float).to_dict("index")  # type: ignore[return-value]
