"""Fine-tuning with isotropy penalties, and measures of the geometry of language-model representations.

The public names of this package depend on torch only. They are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from istar.errors import UserError
    from istar.hidden_states import EmbeddingWatch, Watch, attach, shrinkage_covariance
    from istar.measures import isoscore, isoscore_star, isoscore_unbiased
    from istar.regularizers import (
        CosReg,
        Decorrelation,
        Gor,
        IStar,
        Kurtosis,
        Penalty,
        Points,
        RandomDirection,
        SetPoint,
        SigReg,
        SimCtg,
        Spectrum,
        Terms,
        Uniformity,
        VicReg,
        special_ids,
        weight_at,
    )

__version__ = "0.1.0"

_MODULE_BY_NAME = {
    "Spectrum": "istar.regularizers",
    "SigReg": "istar.regularizers",
    "SimCtg": "istar.regularizers",
    "RandomDirection": "istar.regularizers",
    "Kurtosis": "istar.regularizers",
    "Uniformity": "istar.regularizers",
    "Gor": "istar.regularizers",
    "Decorrelation": "istar.regularizers",
    "VicReg": "istar.regularizers",
    "CosReg": "istar.regularizers",
    "EmbeddingWatch": "istar.hidden_states",
    "IStar": "istar.regularizers",
    "Penalty": "istar.regularizers",
    "Points": "istar.regularizers",
    "SetPoint": "istar.regularizers",
    "Terms": "istar.regularizers",
    "UserError": "istar.errors",
    "Watch": "istar.hidden_states",
    "attach": "istar.hidden_states",
    "isoscore": "istar.measures",
    "isoscore_star": "istar.measures",
    "isoscore_unbiased": "istar.measures",
    "shrinkage_covariance": "istar.hidden_states",
    "special_ids": "istar.regularizers",
    "weight_at": "istar.regularizers",
}

__all__ = [
    "CosReg",
    "Decorrelation",
    "EmbeddingWatch",
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
    "UserError",
    "VicReg",
    "Watch",
    "__version__",
    "attach",
    "isoscore",
    "isoscore_star",
    "isoscore_unbiased",
    "shrinkage_covariance",
    "special_ids",
    "weight_at",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used."""
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'istar' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    """Return all names of the package, including the public names that have not been imported yet."""
    return sorted({*globals(), *__all__})
