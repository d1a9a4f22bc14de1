"""Fine-tuning with Lightning: the LightningModule, the data module and the callbacks."""

from istar.finetune.training.data import FineTuningData
from istar.finetune.training.history import History
from istar.finetune.training.layer_geometry import ValidationGeometry
from istar.finetune.training.module import FineTuner, merge_outputs
from istar.finetune.training.refresh import ShrinkageCovariance

__all__ = [
    "FineTuner",
    "FineTuningData",
    "History",
    "ShrinkageCovariance",
    "ValidationGeometry",
    "merge_outputs",
]
