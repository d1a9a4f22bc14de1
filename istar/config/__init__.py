"""What can be configured: a dataclass for each group of `conf/`, and the Hydra schema made from them."""

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
