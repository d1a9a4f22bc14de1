"""Fine-tuning with Lightning: the LightningModule, the data module and the callbacks."""

from istar.training.class_isotropy import ClassIsotropyCallback
from istar.training.data import FineTuningData
from istar.training.history import History
from istar.training.layer_isotropy import LayerIsotropy
from istar.training.module import FineTuner, merge_outputs
from istar.training.refresh import ShrinkageCovariance

__all__ = [
    "ClassIsotropyCallback",
    "FineTuner",
    "FineTuningData",
    "History",
    "LayerIsotropy",
    "ShrinkageCovariance",
    "merge_outputs",
]
