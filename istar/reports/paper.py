"""What *Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024) reports: its tables and its grids.

Numbers of Table 1 are percent: mean and standard deviation over five seeds, of development sets.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import pandas as pd

MODELS = {"albert-base-v2": "albert", "bert-base-cased": "bert", "distilbert-base-cased": "distilbert"}
"""The last part of a model's name -> the paper's model, which is also its option on the command line."""
TASKS = ("sst2", "qnli", "rte", "mrpc", "qqp", "cola", "stsb", "sst5", "squad")
"""In the order of Table 1."""
FAMILIES = {"base": "Base", "cosreg": "CosReg", "istar": "I-STAR"}
"""Method families as files name them -> as the paper does."""
SEEDS = (1, 2, 3, 4, 5)
"""The paper averages over five; which, it does not say."""

WEIGHTS, ZETAS = (-5.0, -3.0, -1.0, 1.0, 3.0, 5.0), (0.2, 0.4, 0.6, 0.8)
"""What Table 2 was searched over."""


@dataclass(frozen=True)
class Score:
    """A number of Table 1, in percent."""

    mean: float
    std: float


@dataclass(frozen=True)
class Tuned:
    """A cell of Table 2."""

    weight: float
    zeta: float


def score(model: str, task: str, metric: str, family: str) -> Score | None:
    """A number of Table 1, or None where the paper has none.

    Args:
        model: the last part of a model's name, e.g. `bert-base-cased`.
        task: e.g. `rte`.
        metric: e.g. `accuracy`.
        family: `base`, `cosreg` or `istar`.
    """
    return _scores().get((MODELS.get(model, ""), task, metric, family))


def tuned(model: str, task: str) -> Tuned | None:
    """The best lambda and zeta of Table 2, or None where the paper has none; arguments as in `score`."""
    return _tuned().get((MODELS.get(model, ""), task))


@cache
def _scores() -> dict[tuple[str, str, str, str], Score]:
    return {
        (row["model"], row["task"], row["metric"], family): Score(float(row[family]), float(row[f"{family}_std"]))
        for row in _table("table1").to_dict("records")
        for family in FAMILIES
    }


@cache
def _tuned() -> dict[tuple[str, str], Tuned]:
    return {
        (model, row["task"]): Tuned(float(row[f"{model}_lambda"]), float(row[f"{model}_zeta"]))
        for row in _table("table2").to_dict("records")
        for model in MODELS.values()
    }


def _table(name: str) -> pd.DataFrame:
    with files("istar.reports").joinpath("paper", f"{name}.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file)
