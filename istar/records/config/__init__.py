"""The config of a run: a dataclass for each config group, and the Hydra schema derived from them."""

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
from istar.records.config.penalties import CosRegConfig, IStarConfig, NoRegConfig

__all__ = [
    "Config",
    "CosRegConfig",
    "DataConfig",
    "IStarConfig",
    "LoggerConfig",
    "ModelConfig",
    "NoRegConfig",
    "OptimConfig",
    "RunConfig",
    "SweepConfig",
    "TaskConfig",
    "TensorBoardConfig",
    "TrainerConfig",
    "WandbConfig",
]
