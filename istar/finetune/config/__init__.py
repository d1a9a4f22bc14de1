"""The config of a run: a dataclass for each config group, and the Hydra schema derived from them.

The options of the group `reg` are in `istar.finetune.config.penalties`, which imports torch.
"""

from istar.finetune.config.groups import (
    AdamWConfig,
    Config,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SweepConfig,
    TaskConfig,
    TensorBoardConfig,
    TrainerConfig,
    WandbConfig,
)

__all__ = [
    "AdamWConfig",
    "Config",
    "DataConfig",
    "LoggerConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "SweepConfig",
    "TaskConfig",
    "TensorBoardConfig",
    "TrainerConfig",
    "WandbConfig",
]
