"""Penalties on hidden states as torch losses, and `attach`, which adds a penalty to a model.

This package depends on torch only.
"""

from istar.regularizers.attach import Watch, attach
from istar.regularizers.base import Penalty, Terms
from istar.regularizers.cosreg import CosReg, cosine_penalty
from istar.regularizers.istar import IStar
from istar.regularizers.points import layer_numbers, select_layers
from istar.regularizers.shrinkage import shrinkage_covariance

__all__ = [
    "CosReg",
    "IStar",
    "Penalty",
    "Terms",
    "Watch",
    "attach",
    "cosine_penalty",
    "layer_numbers",
    "select_layers",
    "shrinkage_covariance",
]
