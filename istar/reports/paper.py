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
        family: `base`, `cosreg` or `istar`.
    """
    return _scores().get((MODELS.get(model, ""), task, metric, family))


def tuned_penalty(model: str, task: str) -> TunedPenalty | None:
    """Return an entry of Table 2, or None if the table has no such entry; the arguments are as for `score`."""
    return _tuned_penalties().get((MODELS.get(model, ""), task))


@cache
def _scores() -> dict[tuple[str, str, str, str], Score]:
    return {
        (row["model"], row["task"], row["metric"], family): Score(float(row[family]), float(row[f"{family}_std"]))
        for row in _read_table("table1").to_dict("records")
        for family in FAMILIES
    }


@cache
def _tuned_penalties() -> dict[tuple[str, str], TunedPenalty]:
    return {
        (model, row["task"]): TunedPenalty(float(row[f"{model}_lambda"]), float(row[f"{model}_zeta"]))
        for row in _read_table("table2").to_dict("records")
        for model in MODELS.values()
    }


def _read_table(name: str) -> pd.DataFrame:
    with files("istar.reports").joinpath("paper", f"{name}.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file)
