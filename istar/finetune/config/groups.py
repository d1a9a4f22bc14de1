"""The settings of a run: one dataclass per config group, which checks its values in `__post_init__`.

Defaults are defined only here; the files in conf/ contain only values that differ. `istar.finetune.config.schema` turns
these classes into Hydra's schema of keys and types.
"""

import inspect
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from istar.errors import UserError, check_at_least, check_one_of, check_range, did_you_mean, shorten
from istar.files.folders import is_model_folder
from istar.finetune.config.trainer_arguments import check_trainer_arguments
from istar.runs.identity import TINY

FURTHER_KEYS = {"further_keys": True}
"""Metadata of a field that collects the group's keys without a field, by name."""
NOT_IN_IDENTITY = {"identity": False}
"""Metadata of a field that does not change the outcome of a run. `istar.runs.identity` ignores such fields."""

ALL_LINEAR = "all-linear"
"""Value of `model.lora_target_modules` for adapters on all linear modules."""
MIN_VOCAB_SIZE = 300
"""Smallest `model.vocab_size`: byte-level BPE has 256 tokens for the bytes, and special tokens."""
TRAIN = "train"
"""Value of `model.tokenizer` for a tokenizer that is trained on the task's text."""


@dataclass
class TaskConfig:
    """The task and its data."""

    name: str = MISSING
    """Name of the task, a key of `istar.runs.tasks.TASKS`."""
    data_dir: str | None = field(default=None, metadata=NOT_IN_IDENTITY)
    """Folder with the task's files; for language modelling also a text file. None loads the data from the hub, or
    generates them for the demo tasks, `clm` and `mlm`."""
    limit_train: int | None = None
    """Number of training examples to use, a random sample that is the same in all runs; None uses all."""
    limit_validation: int | None = None
    """Number of examples to use of each validation set, a random sample that is the same in all runs; None uses all."""
    validation_fraction: float | None = None
    """Fraction of the training data, above 0 and at most 0.5, that is held out to choose the best epoch and the best
    configuration. None chooses by the validation set. Results are on the validation set in either case."""
    max_length: int | None = None
    """Maximum number of tokens per sequence; None uses the task's default, or the model's limit if that is lower."""
    submission: bool = field(default=False, metadata=NOT_IN_IDENTITY)
    """Also predict the test set and write the GLUE submission file."""
    doc_stride: int = 128
    """Span tasks only: number of tokens shared by two neighbouring windows of a long context."""
    n_best: int = 20
    """Span tasks only: number of candidate start positions, and of end positions, that are combined into spans."""
    max_answer_length: int = 30
    """Span tasks only: maximum number of tokens in an answer."""
    packing: bool = True
    """Language modelling only: fill each block of `max_length` tokens, across the ends of documents. Documents of a
    block do not attend to each other where the model allows it. False gives each block tokens of one document only."""
    whole_word: bool = False
    """`mlm` only: mask all tokens of a word or none."""
    stream: bool = False
    """Language modelling only: read and tokenize the training text during the training, instead of copying it into the
    cache first. Needs `trainer.max_steps` and validation data."""
    shuffle_blocks: int = 1024
    """With `stream`: number of consecutive blocks of a process that are shuffled together, rounded up to whole batches.
    A larger number shuffles better and needs more memory."""

    def __post_init__(self) -> None:
        for name in (
            "limit_train", "limit_validation", "max_length", "doc_stride", "n_best", "max_answer_length",
            "shuffle_blocks",
        ):  # fmt: skip
            check_at_least(1, f"task.{name}", getattr(self, name))
        fraction = self.validation_fraction
        if fraction is not None and not 0 < fraction <= 0.5:
            raise UserError(f"task.validation_fraction={fraction:g}; expected more than 0 and at most 0.5, or null")


@dataclass
class ModelConfig:
    """The model that is trained."""

    name: str = field(default=MISSING, metadata=NOT_IN_IDENTITY)
    """Hub id, folder, or `tiny`. The hash of a run contains the commit on the hub, or a hash of the files, instead.
    With `architecture` it is a label of your choice, which only the name of the run contains."""
    pretrained: bool = True
    """Load pretrained weights. False gives the model random weights, with its architecture and its tokenizer."""
    revision: str | None = field(default=None, metadata=NOT_IN_IDENTITY)
    """Branch, tag or commit on the hub; null is the branch `main`. A run replaces a branch or a tag by its commit."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory. Losses are equal; with a penalty, up to rounding."""
    attn_implementation: str | None = None
    """Implementation of attention: eager or sdpa. None uses the default of transformers, sdpa for most models. On a CPU
    in bf16, eager trains faster, because sdpa lacks a fast path with dropout there."""
    compile: bool = False
    """Compile the model with torch.compile: the first steps are slow, later ones faster; losses differ by rounding."""
    architecture: str | None = None
    """Architecture of a new model, a model type of transformers, such as bert, gpt2, gpt_neox or llama. It needs
    `pretrained=false` and a tokenizer; its sizes come from `config`, or else from transformers' defaults. None uses the
    architecture of the model `name`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Values to replace in the model's configuration, for example model.config.hidden_size=256. Only new models
    (`pretrained=false`) can have other values. hidden_size, num_hidden_layers, num_attention_heads and
    max_position_embeddings are valid for nearly all architectures."""
    tokenizer: str | None = field(default=None, metadata=NOT_IN_IDENTITY)
    """Tokenizer: a folder, a hub id, or train for a new one that is trained on the task's text (byte-level BPE for
    decoders, WordPiece for encoders). None uses the tokenizer of the model `name`. The hash of a run contains the
    commit on the hub, or a hash of the files, instead."""
    vocab_size: int = 8192
    """Largest size of the vocabulary of a new tokenizer (`tokenizer=train`); little text yields a smaller one."""
    load_in: str = "float32"
    """Data type of the weights: float32 or bf16. trainer.precision decides about the arithmetic."""
    lora: bool = False
    """Train low-rank adapters (LoRA) and the head, and freeze the pretrained weights. Needs `istar[lora]`."""
    lora_r: int = 8
    """Rank of the adapters."""
    lora_alpha: float = 16.0
    """The adapters' outputs are multiplied by `lora_alpha / lora_r`."""
    lora_dropout: float = 0.05
    """Dropout probability of the adapters' inputs, in [0, 1)."""
    lora_target_modules: Any = None
    """Names of the modules that get adapters, e.g. [q_proj,v_proj], or all-linear; None uses peft's default for the
    architecture."""

    def __post_init__(self) -> None:
        self._check_architecture()
        self._check_adapters()
        check_one_of("model.load_in", self.load_in, ("float32", "bf16"))
        if self.attn_implementation is not None:
            check_one_of("model.attn_implementation", self.attn_implementation, ("eager", "sdpa"))
        check_at_least(MIN_VOCAB_SIZE, "model.vocab_size", self.vocab_size)
        if not self.name.strip():
            raise UserError("the name of the model is empty; expected a hub id or a folder that save_pretrained wrote")
        if self.name == TINY and self.pretrained:
            raise UserError(
                f"model {TINY} is istar's own, without pretrained weights; train it with model={TINY}, or write "
                f"./{TINY} for a folder of that name"
            )
        if self.name == TINY and self.revision is not None:
            raise UserError(f"revision {self.revision} needs a model of the hub, but model {TINY} is istar's own")

    @property
    def is_tiny(self) -> bool:
        """Whether this is istar's tiny BERT, which has random weights and no files."""
        return self.name == TINY

    @property
    def label(self) -> str:
        """Name of the model in messages, such as `model gpt2`, which other commands than `istar train` print, too."""
        return f"model {self.name}" if self.architecture is None else f"model.architecture={self.architecture}"

    @property
    def trains_tokenizer(self) -> bool:
        """Whether the tokenizer is trained on the task's text."""
        return self.tokenizer == TRAIN

    def _check_architecture(self) -> None:
        if not isinstance(self.config, dict):
            raise UserError(f"model.config={self.config} is not a mapping, e.g. {{hidden_size: 256}}")
        if self.is_tiny and (self.architecture is not None or self.config or self.tokenizer is not None):
            raise UserError(
                f"model={TINY} has a fixed architecture and tokenizer; model=new accepts model.architecture, "
                "model.config and model.tokenizer"
            )
        if self.architecture is not None and not self.architecture.strip():
            raise UserError("model.architecture is not set; give it on the command line, e.g. model.architecture=llama")
        if self.tokenizer is not None and not self.tokenizer.strip():
            raise UserError("model.tokenizer is empty; expected train, a folder, a hub id or null")
        if self.pretrained:
            if self.architecture is not None:
                raise UserError(
                    f"model.architecture={self.architecture} has no pretrained weights; add model.pretrained=false"
                )
            if self.config:
                raise UserError(
                    f"model.config.{min(self.config)} cannot be set, because pretrained weights have the values of "
                    "their own configuration; model.pretrained=false makes a new model"
                )
            if self.trains_tokenizer:
                raise UserError(
                    "model.tokenizer=train: pretrained weights belong to the tokenizer of their model; "
                    "model.pretrained=false makes a new model"
                )
        if self.architecture is not None and os.path.isdir(self.name) and is_model_folder(Path(self.name)):  # noqa: PTH112
            raise UserError(
                f"model.name={self.name} would only be a label, because model.architecture={self.architecture} makes a "
                "new model; add model=auto to train the model in this folder"
            )
        if self.architecture is not None and self.tokenizer is None:
            raise UserError(
                f"model.architecture={self.architecture} has no tokenizer; add model.tokenizer=train, a folder or id"
            )

    def _check_adapters(self) -> None:
        check_at_least(1, "model.lora_r", self.lora_r)
        if not 0 < self.lora_alpha < math.inf:
            raise UserError(f"model.lora_alpha={self.lora_alpha:g} must be above 0")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"model.lora_dropout={self.lora_dropout:g} is not a probability in [0, 1)")
        targets = self.lora_target_modules
        is_list = isinstance(targets, list) and targets and all(isinstance(name, str) and name for name in targets)
        if not (targets in (None, ALL_LINEAR) or is_list):
            raise UserError(
                f"model.lora_target_modules={targets} is neither a list of names, e.g. [q_proj,v_proj], nor "
                f"{ALL_LINEAR}"
            )
        if self.lora and not self.pretrained:
            raise UserError(
                "model.lora=true with model.pretrained=false: adapters change pretrained weights, and this model has "
                "random ones; leave out one of them"
            )


@dataclass
class DataConfig:
    """Batching of the data and the cache of tokenized data."""

    batch_size: int = 32
    """Training examples per process and micro-batch."""
    eval_batch_size: int = 64
    """Examples per process and batch in forward passes without gradients."""
    group_by_length: bool = True
    """Build batches from examples of similar length. The order is still shuffled, and depends on the seed."""
    num_workers: int = field(default=0, metadata=NOT_IN_IDENTITY)
    """Number of worker processes that collate batches; 0 collates in the training process."""
    cache_dir: str | None = field(default=None, metadata=NOT_IN_IDENTITY)
    """Folder of the tokenized data, which runs share; None means $ISTAR_CACHE, or ~/.cache/istar if that is not set."""

    def __post_init__(self) -> None:
        check_at_least(1, "data.batch_size", self.batch_size)
        check_at_least(1, "data.eval_batch_size", self.eval_batch_size)
        check_at_least(0, "data.num_workers", self.num_workers)


@dataclass
class OptimConfig:
    """What all optimizers have: a learning rate with its schedule, and weight decay."""

    name: str = MISSING
    """Name of the optimizer, a key of `OPTIMIZERS`, or with optim=torch the name of a class of torch.optim."""
    lr: float = 3e-5
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Weight decay of all parameters except biases and the parameters of normalization layers."""
    schedule: str = "constant"
    """Learning rate after the warmup: constant, linear (decays to 0) or cosine (decays to 0)."""
    warmup: float = 0.0
    """Optimizer steps over which the learning rate rises linearly from 0: a fraction of all steps, in [0, 1], or a
    whole number of steps above 1."""

    def __post_init__(self) -> None:
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise UserError(f"optim.lr={self.lr:g} is not a positive number; the paper uses 1e-5, 3e-5 and 5e-5")
        check_one_of("optim.schedule", self.schedule, ("constant", "linear", "cosine"))
        is_number_of_steps = self.warmup > 1 and float(self.warmup).is_integer()
        if not 0 <= self.warmup <= 1 and not is_number_of_steps:
            raise UserError(
                f"optim.warmup={self.warmup:g} is neither a fraction of the optimizer steps, in [0, 1], nor a whole "
                "number of steps above 1"
            )
        check_range("optim.weight_decay", self.weight_decay, 0)


@dataclass
class AdamWConfig(OptimConfig):
    """AdamW alone, or together with `coupled_adam` or `muon`, which train only some of the parameters."""

    name: str = "adamw"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of AdamW's running averages of the gradient and of its square."""
    eps: float = 1e-8
    """Constant added to AdamW's denominator for numerical stability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_pair = isinstance(self.betas, list) and len(self.betas) == 2
        if not is_pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas={self.betas} is not a pair of numbers in [0, 1), e.g. [0.9,0.999]")
        check_range("optim.eps", self.eps, 0, is_exclusive=True)


@dataclass
class TorchOptimConfig(OptimConfig):
    """Any optimizer of `torch.optim` that can train all parameters of a model; conf/optim/ has some by name."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer by name, for example optim.arguments.momentum=0.9."""

    def __post_init__(self) -> None:
        super().__post_init__()
        import torch  # takes seconds, and `check_keys` does without

        unsuitable = ("LBFGS", "Muon", "Optimizer", "SparseAdam")
        classes: dict[str, Any] = {
            name: member for name, member in vars(torch.optim).items() if inspect.isclass(member)
        }
        check_one_of("optim.name", self.name, sorted(classes.keys() - unsuitable))
        known = inspect.signature(classes[self.name]).parameters
        if self.weight_decay != 0 and "weight_decay" not in known:
            raise UserError(f"optim.name={self.name} has no weight decay; add optim.weight_decay=0")
        further = [name for name in known if name not in ("params", "lr", "weight_decay")]
        if not isinstance(self.arguments, dict):
            raise UserError(f"optim.arguments={self.arguments} is not a mapping, e.g. {{momentum: 0.9}}")
        for name, value in self.arguments.items():
            if name not in further:
                raise UserError(
                    f"optim.arguments.{name}: {self.name} has no such further argument{did_you_mean(name, further)}; "
                    f"expected one of {', '.join(further)}"
                )
            if isinstance(known[name].default, bool) and not isinstance(value, bool):
                raise UserError(f"optim.arguments.{name}={value}; expected true or false")
        # Values are tried in a step, because torch does not check all before. `capturable` is for GPUs only.
        arguments = {name: value for name, value in self.arguments.items() if name != "capturable"}
        weight = torch.ones(2, 2, requires_grad=True)
        weight.grad = torch.ones(2, 2)
        try:
            classes[self.name]([weight], lr=self.lr, **arguments).step()
        except Exception as error:
            raise UserError(
                f"optim.arguments={self.arguments}: {self.name} refuses them: {shorten(error)}; the documentation of "
                f"torch.optim.{self.name} has the allowed values"
            ) from error


OPTIMIZERS: dict[str, Any] = {
    **dict.fromkeys(("adamw", "coupled_adam", "muon"), AdamWConfig),
    "torch": TorchOptimConfig,
}
"""The dataclass of each option of `optim`; conf/optim/ has further ones, which are values of `torch`."""


@dataclass
class TrainerConfig:
    """Duration, hardware and monitoring of the training.

    Arguments of `lightning.Trainer` keep their names. Those without a field here are accepted too, for example
    `trainer.benchmark=true`.
    """

    max_epochs: int = 3
    """Number of epochs."""
    max_steps: int | None = None
    """Number of optimizer steps after which training stops, within `max_epochs`; null stops after the epochs."""
    limit_train_batches: int | float = 1.0
    """Number (2) or fraction (0.5) of an epoch's batches to train on; 1.0 or null uses all."""
    limit_val_batches: int | float = 1.0
    """Number or fraction of a validation set's batches to predict; 1.0 or null uses all."""
    val_check_interval: int | float = 1.0
    """Number of batches between two validations, or fraction of an epoch; 1.0 or null validates after each epoch."""
    check_val_every_n_epoch: int | None = 1
    """Epochs between two validations; null counts `val_check_interval` across epochs. Whatever the interval, the last
    step has a validation."""
    accumulate_grad_batches: int = 2
    """Micro-batches per optimizer step."""
    gradient_clip_val: float | None = 1.0
    """Maximum norm of the gradient; null disables clipping."""
    precision: str = "32-true"
    """32-true, bf16-mixed, 16-mixed (CUDA only), or auto for the one that is fast on this machine."""
    accelerator: str = field(default="auto", metadata=NOT_IN_IDENTITY)
    """Hardware to train on: auto, cpu, gpu, or another accelerator of Lightning."""
    devices: Any = 1
    """Number of devices per node, a list of device indices, or auto. Each device has one process."""
    num_nodes: int = 1
    """Number of nodes (machines)."""
    strategy: str = field(default="auto", metadata=NOT_IN_IDENTITY)
    """auto, ddp, or fsdp, which shards the model over the processes; with several devices auto means ddp."""
    early_stopping: int | None = None
    """Number of validations without a better headline metric after which training stops; null never stops early."""
    monitor_isotropy: bool = field(default=False, metadata=NOT_IN_IDENTITY)
    """Also log the InterSim, norms and ranks of each layer after every validation."""
    stop_at_inter_sim: float | None = None
    """Mean InterSim of the layers, in [-1, 1], that stops training if it persists; null never stops."""
    inter_sim_patience: int = 2
    """Number of consecutive validations that must reach `stop_at_inter_sim`."""
    checkpoints: bool = True
    """Keep the best and the latest state. Without checkpoints, a run returns its last weights and cannot be resumed."""
    checkpoint_every_n_steps: int | None = field(default=None, metadata=NOT_IN_IDENTITY)
    """Optimizer steps between two checkpoints within an epoch; null writes none by this rule."""
    checkpoint_every_n_minutes: float | None = field(default=10.0, metadata=NOT_IN_IDENTITY)
    """Minutes between two checkpoints within an epoch; null writes none by this rule."""
    keep_models: Any = field(default=None, metadata=NOT_IN_IDENTITY)
    """Optimizer steps after which the model is kept as `models/step-<n>/`: log (0, 1, 2, 4, ..., 512, then every 1000),
    or a number n for every n steps; in both cases also the last step. null keeps none."""
    measure_every_n_steps: int | None = field(default=None, metadata=NOT_IN_IDENTITY)
    """Optimizer steps between two measurements of each layer's geometry, which are also made before training and at its
    end; null measures none."""
    measure_examples: int = field(default=64, metadata=NOT_IN_IDENTITY)
    """Number of examples of the first validation set that `measure_every_n_steps` measures: a random sample, always the
    same one."""
    # Not in the identity: a run that finishes with `stop` has had no step that `skip` would have skipped.
    nonfinite: str = field(default="stop", metadata=NOT_IN_IDENTITY)
    """Reaction to a NaN or infinite loss or gradient: stop the run, or skip the optimizer step."""
    deterministic: bool | str = False
    """Use deterministic algorithms only; warn allows others, with a warning, where there is no deterministic one."""
    fast_dev_run: bool = False
    """Run one batch of training, validation and prediction, without checkpoints, to test a config."""
    log_every_n_steps: int = field(default=10, metadata=NOT_IN_IDENTITY)
    """Optimizer steps between two logged steps."""
    progress_bar: bool = field(default=True, metadata=NOT_IN_IDENTITY)
    """Print a line for each epoch and, on a terminal, show a bar of what the run does."""
    lightning: dict[str, Any] = field(default_factory=dict, metadata=FURTHER_KEYS)
    """Further arguments of `lightning.Trainer` by name, which are keys of the group: trainer.max_time=00:12:00:00."""

    def __post_init__(self) -> None:
        check_trainer_arguments(self.lightning, [f.name for f in fields(self)])
        for name in ("limit_train_batches", "limit_val_batches", "val_check_interval"):
            self._check_batch_limit(name)
        for name in (
            "max_epochs", "max_steps", "check_val_every_n_epoch", "accumulate_grad_batches", "early_stopping",
            "inter_sim_patience", "log_every_n_steps", "checkpoint_every_n_steps", "measure_every_n_steps",
            "measure_examples",
        ):  # fmt: skip
            check_at_least(1, f"trainer.{name}", getattr(self, name))
        if self.stop_at_inter_sim is not None and not -1 <= self.stop_at_inter_sim <= 1:
            raise UserError(
                f"trainer.stop_at_inter_sim={self.stop_at_inter_sim:g} is not an average cosine; expected -1 to 1"
            )
        if self.gradient_clip_val is not None and not self.gradient_clip_val > 0:
            raise UserError(f"trainer.gradient_clip_val={self.gradient_clip_val:g} must be above 0, or null for none")
        minutes = self.checkpoint_every_n_minutes
        if minutes is not None and not 0 < minutes < math.inf:
            raise UserError(f"trainer.checkpoint_every_n_minutes={minutes:g} must be above 0, or null for none")
        if self.keep_models not in (None, "log") and not (type(self.keep_models) is int and self.keep_models > 0):
            raise UserError(
                f"trainer.keep_models={self.keep_models} is not a schedule; expected log, a whole number of optimizer "
                "steps above 0, or null"
            )
        if type(self.deterministic) is not bool and self.deterministic != "warn":
            raise UserError(f"trainer.deterministic={self.deterministic}; expected true, false or warn")
        self._check_end()
        check_one_of("trainer.strategy", self.strategy, ("auto", "ddp", "fsdp"))
        if self.strategy == "fsdp" and self.precision == "16-mixed":
            raise UserError("trainer.strategy=fsdp needs trainer.precision=bf16-mixed or 32-true, not 16-mixed")
        check_one_of("trainer.nonfinite", self.nonfinite, ("stop", "skip"))
        check_one_of("trainer.precision", self.precision, ("32-true", "bf16-mixed", "16-mixed", "auto"))

    def _check_end(self) -> None:
        """Check further arguments of Lightning about the end of the training, which needs a validation."""
        max_time = self.lightning.get("max_time")
        if max_time is not None and not isinstance(max_time, str | dict):
            expected = "days:hours:minutes:seconds, e.g. 00:12:00:00"
            raise UserError(f"trainer.max_time={max_time} is not a duration; expected {expected}")
        if max_time is not None and self.check_val_every_n_epoch not in (None, 1):
            raise UserError(
                f"trainer.max_time={max_time} may end the training in an epoch without a validation; leave out "
                f"trainer.check_val_every_n_epoch={self.check_val_every_n_epoch}"
            )
        for name in ("min_epochs", "min_steps"):
            if self.max_steps is not None and self.lightning.get(name) is not None:
                raise UserError(
                    f"trainer.{name}={self.lightning[name]} may require more steps than trainer.max_steps="
                    f"{self.max_steps} allows; leave out one of them"
                )

    def _check_batch_limit(self, name: str) -> None:
        """Replace null by 1.0, which means the same, and check that a field is a number of batches or a fraction."""
        value = getattr(self, name)
        if value is None:
            setattr(self, name, 1.0)
        elif not (value > 0 if type(value) is int else isinstance(value, float) and 0 < value <= 1):
            raise UserError(f"trainer.{name}={value}; expected a number of batches above 0, or a fraction in (0, 1]")


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
    (tokens x layers) of the training data, or all if there are fewer. The scores take one more pass over these points
    and over the validation set. With None, `geometry=false` or `trainer.fast_dev_run`, they are not written."""

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


@dataclass
class SweepConfig:
    """Settings of a sweep (`-m`) in addition to the lists of values on the command line. They are not part of a run."""

    name: str = "sweep"
    """Prefix of the name of the sweep's folder in `<run.root>/sweeps`, and of its W&B group."""
    jobs: int = 1
    """Number of concurrent runs on this machine; the GPUs are divided among them."""
    fork: bool = True
    """Fork the runs on this machine from a process that has loaded the libraries, which saves seconds for each run.
    With false, and on other systems than Linux, each run starts in a new Python interpreter."""
    fail_fast: bool = False
    """Stop all other runs when a run fails."""
    dry_run: bool = False
    """Print the planned runs and their estimated cost without running them, like `--dry-run`."""
    grids: Any = None
    """Named grids, each with lists of values by config key. None uses only the grid of the command line."""
    only: list[str] = field(default_factory=list)
    """Names of the grids to run; an empty list runs all."""
    seeds: list[int] = field(default_factory=list)
    """Seeds for repeating the best run of each task, model, method and grid, after all other runs."""
    search: str = "grid"
    """grid runs all combinations; optuna runs `trials` of them, chosen by the results of earlier trials."""
    trials: int = 20
    """Number of Optuna trials, not counting failed ones. Each has a different run; the search ends when all runs of the
    search space have been tried."""
    sampler: str = "tpe"
    """Optuna sampler: tpe or random."""
    sampler_seed: int = 0
    """Seed of the Optuna sampler."""
    pruner: str = "none"
    """Optuna pruner: none, median, or asha (successive halving). It compares the headline metric after every epoch."""
    storage: str | None = None
    """Optuna storage that commands may share, a database URL or `journal:///<path>`. None means a SQLite file in the
    sweep's folder. A password belongs in a variable, as other users can read arguments: `'${oc.env:STORAGE}'`."""
    trial: str | None = None
    """ID of the search trial that this run belongs to. Set by the sweep; do not set it by hand."""

    def __post_init__(self) -> None:
        check_at_least(1, "sweep.jobs", self.jobs)
        check_at_least(1, "sweep.trials", self.trials)
        check_one_of("sweep.search", self.search, ("grid", "optuna"))
        check_one_of("sweep.sampler", self.sampler, ("tpe", "random"))
        check_one_of("sweep.pruner", self.pruner, ("none", "median", "asha"))
        if not re.fullmatch(r"[\w.-]+", self.name) or self.name.startswith("."):
            raise UserError(f"sweep.name={self.name!r} is not a folder name; expected letters, digits, '.', '_', '-'")
        grids = {} if self.grids is None else self.grids
        if not isinstance(grids, dict) or not all(isinstance(grid, dict) for grid in grids.values()):
            raise UserError(f"sweep.grids={grids} does not map names to grids, e.g. {{base: {{reg: none}}}}")
        if not isinstance(self.only, list) or not all(isinstance(name, str) for name in self.only):
            raise UserError(f"sweep.only={self.only} is not a list of names of grids, e.g. [base]")
        for name in self.only:
            check_one_of("sweep.only", name, tuple(grids))
        if not isinstance(self.seeds, list) or not all(type(seed) is int and 0 <= seed < 2**32 for seed in self.seeds):
            raise UserError(f"sweep.seeds={self.seeds} are not whole numbers in [0, 2^32), e.g. [1,2,3,4,5]")


@dataclass
class Config:
    """All settings of a run."""

    task: TaskConfig
    model: ModelConfig
    reg: Any
    data: DataConfig
    optim: OptimConfig
    trainer: TrainerConfig
    logger: Any = field(metadata=NOT_IN_IDENTITY)
    run: RunConfig = field(metadata=NOT_IN_IDENTITY)
    seed: int = 42
    """Seed of the initialization of the head, of dropout, and of the order of the training data; from 0 to 2^32 - 1."""

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed} is not a whole number in [0, 2^32)")
        if self.trainer.strategy == "fsdp" and self.data.eval_batch_size < 2:
            # A batch of one example cannot be split to give all processes as many batches.
            raise UserError("trainer.strategy=fsdp needs data.eval_batch_size=2 or more")
        if self.trainer.strategy == "fsdp" and self.optim.name in ("Adafactor", "Rprop"):
            raise UserError(f"{self.optim.name} cannot train sharded weights; use trainer.strategy=ddp, or another one")
        if self.task.stream:
            self._check_stream()
        if self.trainer.fast_dev_run:
            self.run = replace(self.run, smoke=True)
        if self.trainer.precision != "auto":
            self.reg.resolve(self.trainer.precision)

    def _check_stream(self) -> None:
        """Raise a `UserError` if a setting needs the length of the training data, which a stream does not have."""
        if self.trainer.max_steps is None:
            raise UserError("task.stream=true needs trainer.max_steps, because a stream has no length")
        interval, train_limit = self.trainer.val_check_interval, self.trainer.limit_train_batches
        advice_by_key = {
            "task.limit_train": (self.task.limit_train, "set null, and end the training by trainer.max_steps"),
            "task.validation_fraction": (self.task.validation_fraction, "set null"),
            "data.num_workers": (self.data.num_workers or None, "set 0: each process reads its own shards"),
            "trainer.limit_train_batches": (
                train_limit if type(train_limit) is int or train_limit != 1 else None,
                "use trainer.max_steps",
            ),
            "trainer.val_check_interval": (
                None if type(interval) is int or interval == 1 else interval,
                "give a whole number of batches",
            ),
        }
        for key, (value, advice) in advice_by_key.items():
            if value is not None:
                raise UserError(f"{key}={value} does not work with task.stream=true; {advice}")


def check_keys(overrides: Iterable[str]) -> None:
    """Raise a `UserError` for a key that its config group lacks and that is much like another key of the group.

    Hydra refuses all unknown keys, but only after seconds: its schema contains the options of penalties, which import
    torch. Keys that are not much like another are left to Hydra, because they may be options of a penalty.
    """
    class_by_group: dict[str, Any] = {group.name: group.type for group in fields(Config) if is_dataclass(group.type)}
    for override in overrides:
        key, equals, _ = override.lstrip("+").partition("=")
        group, _, name = key.partition(".")
        classes = OPTIMIZERS.values() if group == "optim" else filter(None, [class_by_group.get(group)])
        known = [option for config_class in classes for option in fields(config_class)] if name.isidentifier() else []
        known_keys = [f"{group}.{option.name}" for option in known]
        accepts_all = not equals or not known or any(option.metadata.get("further_keys") for option in known)
        if not accepts_all and key not in known_keys and (hint := did_you_mean(key, known_keys, cutoff=0.75)):
            raise UserError(describe_unknown_key(key, hint))


def describe_unknown_key(key: str, hint: str) -> str:
    """Return the message about an unknown key; `hint` names a similar one, as `did_you_mean` returns it."""
    return f"{key}: there is no such key{hint}; `python train.py --cfg job` lists all"
