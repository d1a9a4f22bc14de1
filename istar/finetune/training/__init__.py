"""Fine-tuning with Lightning: the LightningModule, the data module and the callbacks.

Its public names are imported on first use, because Lightning takes seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from istar.finetune.training.data import FineTuningData as FineTuningData
    from istar.finetune.training.history import History as History
    from istar.finetune.training.layer_geometry import ValidationGeometry as ValidationGeometry
    from istar.finetune.training.module import FineTuner as FineTuner
    from istar.finetune.training.module import merge_outputs as merge_outputs
    from istar.finetune.training.refresh import ShrinkageCovariance as ShrinkageCovariance

_MODULE_BY_NAME = {
    "FineTuner": "module",
    "FineTuningData": "data",
    "History": "history",
    "ShrinkageCovariance": "refresh",
    "ValidationGeometry": "layer_geometry",
    "merge_outputs": "module",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _MODULE_BY_NAME:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
