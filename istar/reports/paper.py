"""Published results and search grids of *Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024)."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import pandas as pd

MODELS = {"albert-base-v2": "albert", "bert-base-cased": "bert", "distilbert-base-cased": "distilbert"}
"""The paper's models: last part of the model's name -> its `model` option on the command line."""
TASKS = ("sst2", "qnli", "rte", "mrpc", "qqp", "cola", "stsb", "sst5", "squad")
"""The paper's tasks in the order of Table 1."""
FAMILIES = {"base": "Base", "cosreg": "CosReg", "istar": "I-STAR"}
"""Method families: name in files -> name in the paper."""
SEEDS = (1, 2, 3, 4, 5)
"""The paper averages over five seeds without naming them; these stand in for them."""

WEIGHTS, ZETAS = (-5.0, -3.0, -1.0, 1.0, 3.0, 5.0), (0.2, 0.4, 0.6, 0.8)
"""The search grid of Table 2: lambda and zeta."""


@dataclass(frozen=True)
class Score:
    """An entry of Table 1: mean and standard deviation over five seeds on the development set, in percent."""

    mean: float
    std: float


@dataclass(frozen=True)
class TunedPenalty:
    """An entry of Table 2: the best lambda (`weight`) and zeta."""

    weight: float
    zeta: float


def score(model: str, task: str, metric: str, family: str) -> Score | None:
    """Return an entry of Table 1, or None if the table has no such entry.

    Args:
        model: the last part of a model's name, e.g. `bert-base-cased`.
        task: e.g. `rte`.
        metric: e.g. `accuracy`.
        family: a key of `FAMILIES`.
    """
    table = _read_table("table1", "model", "task", "metric")
    key = (MODELS.get(model), task, metric)
    return Score(table[family][key], table[f"{family}_std"][key]) if key in table.index else None


def tuned_penalty(model: str, task: str) -> TunedPenalty | None:
    """Return an entry of Table 2, or None if the table has no such entry; the arguments are as for `score`."""
    table = _read_table("table2", "task")
    if model not in MODELS or task not in table.index:
        return None
    return TunedPenalty(table[f"{MODELS[model]}_lambda"][task], table[f"{MODELS[model]}_zeta"][task])


@cache
def _read_table(name: str, *index: str) -> pd.DataFrame:
    """Read a table of the paper, with the columns `index` as its row labels."""
    with files("istar.reports").joinpath("paper", f"{name}.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file, index_col=list(index)).astype(float)
