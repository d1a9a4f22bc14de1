"""The config of a run: a dataclass for each config group, and the Hydra schema derived from them.

The options of the group `reg` are in `istar.finetune.config.penalties`, which imports torch.
"""

from istar.finetune.config.groups import Config
from istar.finetune.config.model_config import ModelConfig
from istar.finetune.config.monitor_config import MonitorConfig
from istar.finetune.config.optim_config import AdamWConfig, OptimConfig
from istar.finetune.config.output_config import LoggerConfig, RunConfig, TensorBoardConfig, WandbConfig
from istar.finetune.config.sweep_config import SweepConfig
from istar.finetune.config.task_config import DataConfig, TaskConfig
from istar.finetune.config.trainer_config import TrainerConfig

__all__ = [
    "AdamWConfig",
    "Config",
    "DataConfig",
    "LoggerConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimConfig",
    "RunConfig",
    "SweepConfig",
    "TaskConfig",
    "TensorBoardConfig",
    "TrainerConfig",
    "WandbConfig",
]
