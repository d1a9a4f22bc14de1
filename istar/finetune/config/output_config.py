"""The settings of a run's output folder and of its loggers."""

from dataclasses import dataclass, field
from typing import Any

from istar.errors import UserError, check_one_of

LIGHTNING_LOGGERS = {
    "CometLogger": "comet_ml",
    "CSVLogger": "lightning",
    "LitLogger": "litlogger",
    "MLFlowLogger": "mlflow",
    "TensorBoardLogger": "tensorboard",
}
"""Classes of `lightning.pytorch.loggers` for `logger.also`, with the module that each needs."""


@dataclass
class LoggerConfig:
    """Metrics are logged to `metrics.csv`, which every run writes, and to the loggers of `also`."""

    name: str = "csv"
    also: dict[str, Any] = field(default_factory=dict)
    """Further loggers of Lightning: for the name of each class its arguments, for example
    logger.also.MLFlowLogger.tracking_uri=http://host:5000 or logger.also.TensorBoardLogger={}. Their files are in the
    run's folder, unless an argument says otherwise."""

    def __post_init__(self) -> None:
        if not isinstance(self.also, dict):
            raise UserError(f"logger.also={self.also} is not a mapping, e.g. {{CSVLogger: {{}}}}")
        for name, arguments in self.also.items():
            check_one_of("logger.also", name, tuple(LIGHTNING_LOGGERS))
            if not isinstance(arguments, dict):
                raise UserError(f"logger.also.{name}={arguments} is not a mapping of arguments, e.g. {{}}")


@dataclass
class TensorBoardConfig(LoggerConfig):
    """Configuration of the TensorBoard logger, which writes to `tensorboard/` in the run's folder."""

    name: str = "tensorboard"


@dataclass
class WandbConfig(LoggerConfig):
    """Configuration of the Weights & Biases logger."""

    name: str = "wandb"
    project: str = "istar"
    """W&B project that the run is logged to."""
    entity: str | None = None
    """User or team that owns the project; None means the account's default."""
    group: str | None = None
    """Name under which W&B groups this run with others; None for no group."""
    tags: list[str] = field(default_factory=list)
    """W&B tags for filtering runs."""
    mode: str = "auto"
    """online, offline, disabled, or auto: the value of WANDB_MODE, or else online if there is an API key."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("logger.mode", self.mode, ("auto", "online", "offline", "disabled"))
        if not isinstance(self.tags, list) or not all(isinstance(tag, str) for tag in self.tags):
            raise UserError(f"logger.tags={self.tags} is not a list of strings, e.g. [paper,rte]")


@dataclass
class RunConfig:
    """Output of a run."""

    root: str = "runs"
    """Folder that contains the run folders."""
    smoke: bool = False
    """Mark the run as a test of its config, which no table or comparison counts. `debug=smoke` and
    `trainer.fast_dev_run` do this."""
    overwrite: bool = False
    """Start again even if the run is finished or can be resumed; the existing folder is renamed, not deleted."""
    save_model: bool = True
    """Save the model, its model card and the tokenizer to `model/` with `save_pretrained`."""
    push_to_hub: str | None = None
    """Repository of the hub, `<user>/<model>`, to upload `model/` to at the end. It is created, as private, if absent.
    Needs a token of `hf auth login` or HF_TOKEN. `istar push` uploads the model of a finished run."""
    geometry: bool = True
    """Write `geometry.json`: mean activation and intrinsic dimensions, from one pass over the validation set."""
    isotropy_zeta: float | None = 0.2
    """Also write IsoScore* of each layer and of all layers on the validation set to `geometry.json`, with this zeta in
    [0, 1]. The default is the zeta of the paper's Figures 3 and 6. Sigma_S is computed from 250,000 points
    (tokens x layers) of the training data, or all if there are fewer, in one more pass. With None, `geometry=false` or
    `trainer.fast_dev_run`, the scores are not written."""

    def __post_init__(self) -> None:
        if self.isotropy_zeta is not None and not 0 <= self.isotropy_zeta <= 1:
            raise UserError(
                f"run.isotropy_zeta={self.isotropy_zeta:g}; expected a number from 0 (no shrinkage) to 1 (only the "
                "shrinkage covariance), or null"
            )
        if self.push_to_hub is not None and not self.save_model:
            raise UserError(f"run.push_to_hub={self.push_to_hub} uploads the saved model; set run.save_model=true")
        if not self.root.strip():
            raise UserError("run.root is empty; expected the folder that contains the run folders")
