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
from istar.records.config.penalties import PENALTIES, NoRegConfig, PenaltyConfig

__all__ = [
    "PENALTIES",
    "Config",
    "DataConfig",
    "LoggerConfig",
    "ModelConfig",
    "NoRegConfig",
    "OptimConfig",
    "PenaltyConfig",
    "RunConfig",
    "SweepConfig",
    "TaskConfig",
    "TensorBoardConfig",
    "TrainerConfig",
    "WandbConfig",
]
