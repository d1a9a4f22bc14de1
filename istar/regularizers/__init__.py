"""Penalties on hidden states: which points, gathered how, weighted how. Needs torch and `istar.measures` alone."""

from istar.regularizers.base import Penalty, Regularizer
from istar.regularizers.cosreg import CosReg, cosine_penalty
from istar.regularizers.istar import IStar, union_isoscore_star, union_isoscore_unbiased
from istar.regularizers.points import layer_numbers, select_layers

__all__ = [
    "CosReg",
    "IStar",
    "Penalty",
    "Regularizer",
    "cosine_penalty",
    "layer_numbers",
    "select_layers",
    "union_isoscore_star",
    "union_isoscore_unbiased",
]
