"""The settings of a run: one dataclass for each config group, which checks its values in `__post_init__`.

Defaults are defined here and nowhere else; the files in conf/ hold what differs from them. `istar.config.schema` turns
these classes into the schema by which Hydra checks keys and types.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from istar.errors import UserError, did_you_mean
from istar.regularizers.istar import AUTO, COMPUTE, ESTIMATORS
from istar.regularizers.points import NAMED_LAYERS


@dataclass
class TaskConfig:
    """What is learned, and from which data."""

    name: str = MISSING
    """A name in `istar.tasks.specs.TASKS`."""
    data_dir: str | None = None
    """Folder with the task's files; None loads from the hub (or generates, for the demo tasks)."""
    limit_train: int | None = None
    """Use the first so many training examples."""
    limit_validation: int | None = None
    """Use the first so many examples of each validation set."""
    max_length: int | None = None
    """Tokens per sequence; None takes the task's own default."""
    submission: bool = False
    """Also predict the test set and write the GLUE submission file."""
    doc_stride: int = 128
    """Spans: tokens that two neighbouring windows of a long context share."""
    n_best: int = 20
    """Spans: how many start and end positions are paired."""
    max_answer_length: int = 30
    """Spans: longest answer, in tokens."""

    def __post_init__(self) -> None:
        for name in ("limit_train", "limit_validation", "max_length", "doc_stride", "n_best", "max_answer_length"):
            _at_least(1, f"task.{name}", getattr(self, name))


@dataclass
class ModelConfig:
    """The encoder."""

    name: str = MISSING
    """Hub id, or a folder that `save_pretrained` wrote."""
    pretrained: bool = True
    """False: the project's own tiny BERT with random weights."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    gradient_checkpointing: bool = False
    """Compute activations anew in backward: less memory, more time, the same losses (with a penalty, to rounding)."""
    compile: bool = False
    """torch.compile: a slow start, then faster steps; the losses differ by rounding."""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise UserError("model.name is empty; expected a hub id or a folder that save_pretrained wrote")


@dataclass
class NoRegConfig:
    """The task loss alone."""

    name: str = "none"


@dataclass
class CosRegConfig:
    """CosReg, equation (1)."""

    name: str = "cosreg"
    weight: float = field(default=1.0, metadata={"key": "lambda"})
    """lambda: any finite number; 0 skips the penalty."""
    layers: Any = "last"
    """all, last, with_embeddings, or a list of layer numbers (0: embeddings)."""
    include_padding: bool = False
    sync: bool = True
    """One penalty for the points of all processes together."""

    def __post_init__(self) -> None:
        _finite("reg.lambda", self.weight)
        _check_layers(self.layers)


@dataclass
class IStarConfig(CosRegConfig):
    """I-STAR, equation (2)."""

    name: str = "istar"
    weight: float = field(default=-1.0, metadata={"key": "lambda"})
    """lambda: any finite number; negative lowers isotropy, 0 skips the penalty."""
    layers: Any = "all"
    zeta: float | str = 0.4
    """Weight of the shrinkage covariance, 0 to 1, or auto: estimated from each batch."""
    num_points: int = 250_000
    """Points behind the shrinkage covariance, counted over the union of the layers."""
    estimator: str = "shrinkage"
    r"""shrinkage: the paper's IsoScore\*; unbiased: IsoScore for small samples, without a shrinkage covariance."""
    compute: str | None = None
    """float32 or bfloat16, for the penalty's products with the points; None follows trainer.precision."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.zeta = _zeta(self.zeta)
        _at_least(2, "reg.num_points", self.num_points)
        one_of("reg.estimator", self.estimator, ESTIMATORS)
        if self.compute is not None:
            one_of("reg.compute", self.compute, COMPUTE)
            if self.compute != "float32" and self._needs_digits:
                raise UserError(
                    f"reg.compute={self.compute}: reg.estimator=unbiased and reg.zeta=auto need float32, for their "
                    "fourth powers"
                )
        if self.estimator == "unbiased":
            # What has no effect must not make two runs of one: the config says what is computed.
            self.zeta, self.num_points = 0.0, IStarConfig.num_points

    def resolve(self, precision: str) -> None:
        """Say how the products are computed where that is left to the trainer's precision."""
        if self.compute is None:
            self.compute = "bfloat16" if precision.startswith("bf16") and not self._needs_digits else "float32"

    @property
    def _needs_digits(self) -> bool:
        return self.estimator == "unbiased" or self.zeta == AUTO


@dataclass
class DataConfig:
    """Batches and caches."""

    batch_size: int = 32
    """Examples per process and micro-batch."""
    eval_batch_size: int = 64
    group_by_length: bool = True
    """Fill batches with examples of similar length (still shuffled, seeded)."""
    num_workers: int = 0
    """Processes that collate batches; 0 collates in the training process."""
    cache_dir: str | None = None
    """Where tokenized data is kept and shared by runs; None is $ISTAR_CACHE or ~/.cache/istar."""

    def __post_init__(self) -> None:
        _at_least(1, "data.batch_size", self.batch_size)
        _at_least(1, "data.eval_batch_size", self.eval_batch_size)
        _at_least(0, "data.num_workers", self.num_workers)


@dataclass
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 3e-5
    """Peak learning rate."""
    weight_decay: float = 0.01
    """On all weights but biases and LayerNorm's."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    schedule: str = "constant"
    """constant, linear (decay to 0) or cosine (decay to 0)."""
    warmup: float = 0.0
    """Share of the optimizer steps over which the learning rate rises from 0."""

    def __post_init__(self) -> None:
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise UserError(f"optim.lr={self.lr:g} is not a positive number; the paper uses 1e-5, 3e-5 and 5e-5")
        one_of("optim.schedule", self.schedule, ("constant", "linear", "cosine"))
        if not 0 <= self.warmup <= 1:
            raise UserError(f"optim.warmup={self.warmup:g} is outside [0, 1]; it is a share of the optimizer steps")
        pair = isinstance(self.betas, list) and len(self.betas) == 2
        if not pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas={self.betas} is not a pair of numbers in [0, 1), e.g. [0.9,0.999]")
        if not 0 <= self.weight_decay < math.inf or not 0 < self.eps < math.inf:
            raise UserError(
                f"optim.weight_decay={self.weight_decay:g} must be 0 or more and optim.eps={self.eps:g} above 0"
            )


@dataclass
class TrainerConfig:
    """Length and hardware of the training; the names are Lightning's."""

    max_epochs: int = 3
    accumulate_grad_batches: int = 2
    """Micro-batches per optimizer step."""
    gradient_clip_val: float | None = 1.0
    """Largest norm of the gradient; null switches clipping off."""
    precision: str = "32-true"
    """32-true, bf16-mixed, or 16-mixed (CUDA only)."""
    accelerator: str = "auto"
    devices: Any = 1
    num_nodes: int = 1
    strategy: str = "auto"
    """auto or ddp; with several devices both are ddp."""
    early_stopping: int | None = None
    """Stop after so many epochs without a better headline metric; null never stops early."""
    monitor_isotropy: bool = False
    """After every validation, log InterSim, norms and ranks of each layer, too."""
    stop_at_inter_sim: float | None = None
    """Stop when the layers' mean InterSim has risen to this, and stays there; null never stops."""
    inter_sim_patience: int = 2
    """For so many validations in a row."""
    checkpoints: bool = True
    """Keep the best and the last state; without them the last weights are the result and nothing can be resumed."""
    checkpoint_every_n_steps: int | None = None
    """Optimizer steps between two checkpoints, beside the one after every epoch; null for none."""
    checkpoint_every_n_minutes: float | None = 10.0
    """Minutes between two checkpoints, beside the one after every epoch; null for none."""
    nonfinite: str = "stop"
    """What a NaN or infinite loss or gradient does: stop the run, or skip the optimizer step."""
    deterministic: bool = False
    fast_dev_run: bool = False
    """One batch of everything, no checkpoints: does it run at all?"""
    log_every_n_steps: int = 10
    progress_bar: bool = True

    def __post_init__(self) -> None:
        _at_least(1, "trainer.max_epochs", self.max_epochs)
        _at_least(1, "trainer.accumulate_grad_batches", self.accumulate_grad_batches)
        _at_least(1, "trainer.early_stopping", self.early_stopping)
        _at_least(1, "trainer.inter_sim_patience", self.inter_sim_patience)
        if self.stop_at_inter_sim is not None and not -1 <= self.stop_at_inter_sim <= 1:
            raise UserError(
                f"trainer.stop_at_inter_sim={self.stop_at_inter_sim:g} is no average cosine; expected -1 to 1, or null"
            )
        _at_least(1, "trainer.log_every_n_steps", self.log_every_n_steps)
        if self.gradient_clip_val is not None and not self.gradient_clip_val > 0:
            raise UserError(f"trainer.gradient_clip_val={self.gradient_clip_val:g} must be above 0, or null for none")
        _at_least(1, "trainer.checkpoint_every_n_steps", self.checkpoint_every_n_steps)
        minutes = self.checkpoint_every_n_minutes
        if minutes is not None and not 0 < minutes < math.inf:
            raise UserError(f"trainer.checkpoint_every_n_minutes={minutes:g} must be above 0, or null for none")
        if self.strategy == "fsdp":
            raise UserError(
                "trainer.strategy=fsdp is not supported: with sharded weights the norm of the gradient, which is "
                "checked and clipped in every step, would be that of a shard; use ddp"
            )
        one_of("trainer.strategy", self.strategy, ("auto", "ddp"))
        one_of("trainer.nonfinite", self.nonfinite, ("stop", "skip"))
        one_of("trainer.precision", self.precision, ("32-true", "bf16-mixed", "16-mixed"))


@dataclass
class LoggerConfig:
    """Where metrics go beside `metrics.csv`, which is always written."""

    name: str = "csv"


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases."""

    name: str = "wandb"
    project: str = "istar"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    mode: str = "auto"
    """online, offline, disabled; auto is offline where there is no API key or WANDB_MODE says so."""

    def __post_init__(self) -> None:
        one_of("logger.mode", self.mode, ("auto", "online", "offline", "disabled"))
        if not isinstance(self.tags, list) or not all(isinstance(tag, str) for tag in self.tags):
            raise UserError(f"logger.tags={self.tags} is not a list of words, e.g. [paper,rte]")


@dataclass
class RunConfig:
    """Where results go."""

    root: str = "runs"
    """Folder that holds the run folders."""
    overwrite: bool = False
    """Start anew although the run is finished or could be resumed; the old folder is kept aside."""
    save_model: bool = True
    """Write `model/`, a `save_pretrained` folder with the tokenizer."""
    geometry: bool = True
    """Write `geometry.json`: mean activation and intrinsic dimensions, from one pass over 1,000 validation features."""

    def __post_init__(self) -> None:
        if not self.root.strip():
            raise UserError("run.root is empty; expected the folder that is to hold the run folders")


@dataclass
class SweepConfig:
    """Many runs: what `-m` does beside Hydra's lists of values. No part of a run."""

    name: str = "sweep"
    """Beginning of the name of the sweep's folder below `<run.root>/sweeps`, and of its group in W&B."""
    jobs: int = 1
    """Runs at a time on this machine; GPUs are dealt out to them."""
    fail_fast: bool = False
    """Stop the others when a run fails."""
    dry_run: bool = False
    """Say what would be run and what it may cost, and run nothing; `--dry-run` is the same."""
    grids: Any = None
    """Grids beside each other: a name for each, with lists of values by key. None: only that of the command line."""
    only: list[str] = field(default_factory=list)
    """Names of the grids that count; empty for all."""
    seeds: list[int] = field(default_factory=list)
    """When the others are done, run the best of each task, model and method with these seeds."""
    search: str = "grid"
    """grid: all combinations; optuna: `trials` of them, chosen by what the ones before have shown."""
    trials: int = 20
    """Optuna: how many, failed ones aside."""
    sampler: str = "tpe"
    """Optuna: tpe or random."""
    sampler_seed: int = 0
    pruner: str = "none"
    """Optuna: none, median, or asha (successive halving); looks at the headline metric after every epoch."""
    storage: str | None = None
    """Optuna: database URL; None is a SQLite file in the sweep's folder. Several calls may share it."""
    trial: str | None = None
    """Of which search a run is a trial; set by the sweep itself."""

    def __post_init__(self) -> None:
        _at_least(1, "sweep.jobs", self.jobs)
        _at_least(1, "sweep.trials", self.trials)
        one_of("sweep.search", self.search, ("grid", "optuna"))
        one_of("sweep.sampler", self.sampler, ("tpe", "random"))
        one_of("sweep.pruner", self.pruner, ("none", "median", "asha"))
        if not re.fullmatch(r"[\w.-]+", self.name) or self.name.startswith("."):
            raise UserError(f"sweep.name={self.name!r} names a folder; expected letters, digits, '.', '_' and '-'")
        grids = {} if self.grids is None else self.grids
        if not isinstance(grids, dict) or not all(isinstance(grid, dict) for grid in grids.values()):
            raise UserError(f"sweep.grids={grids} is not a grid by its name, e.g. {{base: {{reg: none}}}}")
        for name in self.only:
            one_of("sweep.only", name, tuple(grids))
        if not all(type(seed) is int and 0 <= seed < 2**32 for seed in self.seeds):
            raise UserError(f"sweep.seeds={self.seeds} are not whole numbers in [0, 2^32), e.g. [1,2,3,4,5]")


@dataclass
class Config:
    """One run."""

    task: TaskConfig
    model: ModelConfig
    reg: Any
    data: DataConfig
    optim: OptimConfig
    trainer: TrainerConfig
    logger: Any
    run: RunConfig
    seed: int = 42

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed} is not a whole number in [0, 2^32)")
        if isinstance(self.reg, IStarConfig):
            self.reg.resolve(self.trainer.precision)


def _at_least(least: int, key: str, value: int | None) -> None:
    if value is not None and value < least:
        raise UserError(f"{key}={value} is too small; expected {least} or more")


def _finite(key: str, value: float) -> None:
    if not math.isfinite(value):
        raise UserError(f"{key}={value} is not a finite number; the paper uses -5 to 5")


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is none of those allowed."""
    if value not in allowed:
        raise UserError(
            f"{key}={value} is not known{did_you_mean(value, allowed)}; expected one of {', '.join(allowed)}"
        )


def _zeta(value: Any) -> float | str:
    if value == AUTO:
        return AUTO
    try:
        zeta = float(str(value))  # str: true is 1 to Python.
    except ValueError:
        raise UserError(f"reg.zeta={value} is neither a number in [0, 1] nor {AUTO}") from None
    if not 0 <= zeta <= 1:
        raise UserError(
            f"reg.zeta={zeta:g} is outside [0, 1]; 0 means no shrinkage, 1 only the shrinkage covariance, "
            "the paper uses 0.2 to 0.8"
        )
    return zeta


def _check_layers(layers: Any) -> None:
    if isinstance(layers, str):
        one_of("reg.layers", layers, NAMED_LAYERS)
    elif not (isinstance(layers, list) and layers and all(type(number) is int for number in layers)):
        raise UserError(
            f"reg.layers={layers} is neither one of {', '.join(NAMED_LAYERS)} nor a list of layer numbers like [1,2,12]"
        )
