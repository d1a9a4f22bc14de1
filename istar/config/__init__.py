"""The config of a run: a dataclass for each config group, and the Hydra schema derived from them."""

from istar.config.groups import (
    Config,
    CosRegConfig,
    DataConfig,
    IStarConfig,
    LoggerConfig,
    ModelConfig,
    NoRegConfig,
    OptimConfig,
    RunConfig,
    SweepConfig,
    TaskConfig,
    TrainerConfig,
    WandbConfig,
)

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
    "TrainerConfig",
    "WandbConfig",
]
