"""Penalties on hidden states as torch losses.

This package depends on torch only.
"""

from istar.regularizers.base import Penalty, SetPoint, Terms
from istar.regularizers.cosreg import CosReg, cosine_penalty
from istar.regularizers.decorrelation import Decorrelation
from istar.regularizers.gor import Gor
from istar.regularizers.istar import IStar
from istar.regularizers.kurtosis import Kurtosis
from istar.regularizers.placebos import RandomDirection
from istar.regularizers.points import Points, layer_numbers, select_layers, special_ids
from istar.regularizers.sigreg import SigReg
from istar.regularizers.simctg import SimCtg
from istar.regularizers.spectrum_control import Spectrum
from istar.regularizers.uniformity import Uniformity
from istar.regularizers.vicreg import VicReg

__all__ = [
    "CosReg",
    "Decorrelation",
    "Gor",
    "IStar",
    "Kurtosis",
    "Penalty",
    "Points",
    "RandomDirection",
    "SetPoint",
    "SigReg",
    "SimCtg",
    "Spectrum",
    "Terms",
    "Uniformity",
    "VicReg",
    "cosine_penalty",
    "layer_numbers",
    "select_layers",
    "special_ids",
]
