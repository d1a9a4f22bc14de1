"""Fine-tuning with Lightning: the LightningModule, the data module and the callbacks."""

from istar.finetune.training.class_isotropy import ClassIsotropyCallback
from istar.finetune.training.data import FineTuningData
from istar.finetune.training.history import History
from istar.finetune.training.layer_isotropy import LayerIsotropy
from istar.finetune.training.module import FineTuner, merge_outputs
from istar.finetune.training.refresh import ShrinkageCovariance

__all__ = [
    "ClassIsotropyCallback",
    "FineTuner",
    "FineTuningData",
    "History",
    "LayerIsotropy",
    "ShrinkageCovariance",
    "merge_outputs",
]
