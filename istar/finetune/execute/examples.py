"""Loads the examples of a task: samples, documents held out for validation, and warnings about shared examples."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Dataset

from istar.errors import UserError
from istar.finetune.config import TaskConfig
from istar.finetune.tasks.document_stream import DocumentStream
from istar.finetune.tasks.loading import count_overlap, find_source, hold_out, read_splits, sample_examples
from istar.finetune.tasks.sources import ExampleSource
from istar.runs.tasks import HELD_OUT, Split, TaskSpec
from istar.texts.documents import TEXT_COLUMN

_VALIDATION_SHARE = 0.05
"""Share of the documents of a text corpus without validation data that is held out for validation."""

_MAX_SHARED_DOCUMENTS = 0.01
"""Share of the validation documents that may also be in the training data without a warning."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskExamples:
    """The examples of a task before tokenization: its training, validation and test splits."""

    train: Dataset  # without rows, if `stream` has the training examples
    validation: list[Dataset]
    test: list[Dataset]
    test_sets: Sequence[Split]  # the specifications of the sets in `test`, in the same order
    commit: str | None = None  # commit of the data set on the hub; None for other sources, or if it is unknown
    stream: DocumentStream | None = None  # the training documents with `task.stream=true`


def load_examples(spec: TaskSpec, config: TaskConfig, cache_dir: str | None = None) -> TaskExamples:
    """Load the splits of a task, or random samples of `limit_train` and `limit_validation` examples.

    A text corpus without validation data has a twentieth of its documents, chosen at random, held out. Its documents
    are cached below `cache_dir`, see `istar.files.writing.cache_folder`. With `config.stream`, its training documents
    are not read, so that it needs validation data.

    If `spec` has the validation set `HELD_OUT`, `hold_out` splits it off the training data. A warning is logged if the
    training data contain validation examples, or if a test set that the benchmark provides separately is missing.
    """
    validation_names = [split.name for split in spec.validation if split != HELD_OUT]
    test_sets: Sequence[Split] = spec.test if config.submission else ()
    requested_splits = [spec.train, *validation_names, *(split.name for split in test_sets)]
    source = find_source(spec, config.data_dir, requested_splits, cache_dir, config.stream)
    if config.stream:
        return _open_stream(spec, config, source, validation_names)
    missing_splits = [split for split in test_sets if split.is_shipped_separately and not source.has_split(split.name)]
    for split in missing_splits:
        message = "the submission lacks %s: task.data_dir=%s holds no %s, which the benchmark ships apart"
        log.warning(message, split.submission, config.data_dir, " or ".join(f"{stem}.tsv" for stem in split.stems))
    test_sets = [split for split in test_sets if split not in missing_splits]
    if spec.is_language_modelling and not source.has_split(spec.validation[0].name):
        splits = _hold_out_documents(spec, read_splits(source, spec, [spec.train])[spec.train], config)
    else:
        splits = read_splits(source, spec, [spec.train, *validation_names, *(split.name for split in test_sets)])
    train = sample_examples(splits[spec.train], config.limit_train)
    validation = [sample_examples(splits[name], config.limit_validation) for name in validation_names]
    if config.validation_fraction is not None:
        train, held_out = hold_out(spec, train, config.validation_fraction)
        validation.append(held_out)
    examples = TaskExamples(train, validation, [splits[split.name] for split in test_sets], test_sets, source.commit)
    for name, split in zip([split.name for split in spec.validation], validation, strict=True):
        num_shared = count_overlap(spec, examples.train, split)
        # In a corpus, a heading or a short paragraph may well occur again.
        if num_shared > (_MAX_SHARED_DOCUMENTS * len(split) if spec.is_language_modelling else 0):
            message = "%d of the %d examples of %s are also in the training data, word for word: the score is inflated"
            log.warning(message, num_shared, len(split), name)
    return examples


def _open_stream(
    spec: TaskSpec, config: TaskConfig, source: ExampleSource, validation_names: Sequence[str]
) -> TaskExamples:
    if source.open_stream is None:
        raise UserError(f"task.stream=true: the data of {spec.name} are generated; name a text with task.data_dir")
    if not source.has_split(validation_names[0]):
        raise UserError(
            f"task.data_dir={config.data_dir} has no validation data such as validation.txt; task.stream=true needs "
            "them, because no documents can be held out of a stream"
        )
    splits = read_splits(source, spec, validation_names)
    validation = [sample_examples(splits[name], config.limit_validation) for name in validation_names]
    no_documents = Dataset.from_dict({TEXT_COLUMN: []})
    return TaskExamples(no_documents, validation, [], (), source.commit, source.open_stream())


def _hold_out_documents(spec: TaskSpec, documents: Dataset, config: TaskConfig) -> dict[str, Dataset]:
    train, validation = hold_out(spec, documents, _VALIDATION_SHARE)
    message = (
        "task.data_dir=%s has no validation data such as validation.txt; %d of its %d documents, chosen at random, are "
        "held out for validation"
    )
    log.warning(message, config.data_dir, len(validation), len(documents))
    return {spec.train: train, spec.validation[0].name: validation}
