"""The settings of the task and of its data."""

from dataclasses import dataclass, field, replace

from omegaconf import MISSING

from istar.errors import UserError, check_at_least, did_you_mean
from istar.finetune.config.fields import NEVER_MATTERS, matters
from istar.runs.tasks import HELD_OUT, TASKS, TaskSpec

COVERED_BY_DATA = matters(as_=lambda config: None)
"""Metadata of a field that changes a run only through its data."""
FOR_SPANS = matters(if_=lambda config: find_task_spec(config.task).kind == "span")


@dataclass
class TaskConfig:
    """The task and its data."""

    name: str = MISSING
    """Name of the task, a key of `istar.runs.tasks.TASKS`."""
    data_dir: str | None = field(default=None, metadata=NEVER_MATTERS)
    """Folder with the task's files; for language modelling also a text file. None loads the data from the hub, or
    generates them for the demo tasks, `clm` and `mlm`."""
    limit_train: int | None = field(default=None, metadata=COVERED_BY_DATA)
    """Number of training examples to use, a random sample that is the same in all runs; None uses all."""
    limit_validation: int | None = field(default=None, metadata=COVERED_BY_DATA)
    """Number of examples to use of each validation set, a random sample that is the same in all runs; None uses all."""
    validation_fraction: float | None = None
    """Fraction of the training data, above 0 and at most 0.5, that is held out to choose the best epoch and the best
    configuration. None chooses by the validation set. Results are on the validation set in either case."""
    max_length: int | None = field(
        default=None, metadata=matters(as_=lambda config: _find_special_max_length(config.task))
    )
    """Maximum number of tokens per sequence; None uses the task's default, or the model's limit if that is lower."""
    submission: bool = field(default=False, metadata=NEVER_MATTERS)
    """Also predict the test set and write the GLUE submission file."""
    doc_stride: int = field(default=128, metadata=FOR_SPANS)
    """Span tasks only: number of tokens shared by two neighbouring windows of a long context."""
    n_best: int = field(default=20, metadata=FOR_SPANS)
    """Span tasks only: number of candidate start positions, and of end positions, that are combined into spans."""
    max_answer_length: int = field(default=30, metadata=FOR_SPANS)
    """Span tasks only: maximum number of tokens in an answer."""
    packing: bool = field(
        default=True, metadata=matters(if_=lambda config: find_task_spec(config.task).is_language_modelling)
    )
    """Language modelling only: fill each block of `max_length` tokens, across the ends of documents. Documents of a
    block do not attend to each other where the model allows it. False gives each block tokens of one document only."""
    whole_word: bool = field(
        default=False, metadata=matters(if_=lambda config: find_task_spec(config.task).kind == "masked_lm")
    )
    """`mlm` only: mask all tokens of a word or none."""
    stream: bool = False
    """Language modelling only: read and tokenize the training text during the training, instead of copying it into the
    cache first. Needs `trainer.max_steps` and validation data."""
    shuffle_blocks: int = field(default=1024, metadata=matters(if_=lambda config: config.task.stream))
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
class DataConfig:
    """Batching of the data and the cache of tokenized data."""

    batch_size: int = field(default=32, metadata=matters(as_=lambda config: config.merged_batch_size))
    """Training examples per process and micro-batch."""
    eval_batch_size: int = 64
    """Examples per process and batch in forward passes without gradients."""
    group_by_length: bool = field(default=True, metadata=matters(if_=lambda config: not config.task.stream))
    """Build batches from examples of similar length. The order is still shuffled, and depends on the seed."""
    num_workers: int = field(default=0, metadata=NEVER_MATTERS)
    """Number of worker processes that collate batches; 0 collates in the training process."""
    cache_dir: str | None = field(default=None, metadata=NEVER_MATTERS)
    """Folder of the tokenized data, which runs share; None means $ISTAR_CACHE, or ~/.cache/istar if that is not set."""

    def __post_init__(self) -> None:
        check_at_least(1, "data.batch_size", self.batch_size)
        check_at_least(1, "data.eval_batch_size", self.eval_batch_size)
        check_at_least(0, "data.num_workers", self.num_workers)


def find_task_spec(config: TaskConfig) -> TaskSpec:
    """Return the specification of a config's task; `validation_fraction` adds `HELD_OUT` to its validation sets.

    Raises a `UserError` if the task is unknown, `task.submission=true` and the task lacks a submission file, or
    `task.stream=true` and the task is not language modelling.
    """
    spec = TASKS.get(config.name)
    if spec is None:
        hint = did_you_mean(config.name, TASKS)
        raise UserError(f"task.name={config.name} is not known{hint}; one of {', '.join(TASKS)}")
    if config.submission and not any(split.submission for split in spec.test):
        raise UserError(f"task.submission=true, but {spec.name} is not one of GLUE's tasks and has no submission file")
    if config.stream and not spec.is_language_modelling:
        raise UserError(f"task.stream=true needs a task of language modelling, such as clm or mlm, not {spec.name}")
    if config.validation_fraction is not None:
        return replace(spec, validation=(*spec.validation, HELD_OUT))
    return spec


def _find_special_max_length(config: TaskConfig) -> int | None:
    return None if config.max_length == find_task_spec(config).max_length else config.max_length
