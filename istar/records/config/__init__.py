"""The config of a run: a dataclass for each config group, and the Hydra schema derived from them.

The dataclasses of penalties are in `istar.records.config.penalties`, which imports torch.
"""

from istar.records.config.groups import (
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
