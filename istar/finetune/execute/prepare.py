"""The second step of a run: loads the tokenizer and the model's config, and tokenizes the data."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import tokenizers
import transformers
from datasets import Dataset
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import UserError, shorten
from istar.files.writing import atomic_folder, cache_folder
from istar.finetune.config import Config
from istar.finetune.execute.build_config import build_config
from istar.finetune.execute.build_model import build_tokenizer
from istar.finetune.execute.examples import TaskExamples
from istar.finetune.execute.identify import RunIdentity
from istar.finetune.tasks.blocks import Corpus, cut_blocks, load_or_tokenize_corpus
from istar.finetune.tasks.evaluation import Evaluator, constant_baseline
from istar.finetune.tasks.features import Collator, FeatureRows, TokenizedRows, featurize, limit_max_length
from istar.finetune.tasks.language_modelling import (
    BlockCollator,
    BlockRows,
    LanguageModelEvaluator,
    Masking,
    find_block_tokens,
)
from istar.finetune.tasks.stream_blocks import StreamedBlocks
from istar.finetune.training.data import Collate, build_evaluation_loader
from istar.models import attention
from istar.models.pretrained import load_tokenizer
from istar.runs.tasks import TaskSpec

_MAX_TOKENIZER_CHARACTERS = 100_000_000  # maximum number of characters of a stream to train a tokenizer on

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedData:
    """The tokenized data of a run."""

    examples: TaskExamples  # the examples before tokenization, with evaluation sets cut to `trainer.limit_val_batches`
    train: TokenizedRows  # for a stream, a sample of its training blocks
    validation: list[TokenizedRows]
    test: list[TokenizedRows]
    evaluators: dict[str, Any]  # evaluator of each validation set, by the suffix of its metrics
    test_evaluators: Sequence[Evaluator] = ()  # evaluator of each test set
    corpus: Corpus | None = None  # tokens of the training data, for language modelling without a stream only
    stream: StreamedBlocks | None = None  # all blocks of the training data, with `task.stream=true` only

    def compute_baseline(
        self, spec: TaskSpec, collate: Collate, batch_size: int, vocabulary_size: int
    ) -> dict[str, float]:
        """Compute the metrics of a prediction that ignores the input, on the first validation set; {} for a stream."""
        if self.stream is not None:
            return {}
        if self.corpus is None:
            return constant_baseline(spec, self.examples.train, self.examples.validation[0])
        rows = self.validation[0]
        batches = build_evaluation_loader(rows, collate, batch_size, range(len(rows)))
        labels: list[Tensor] = [batch["labels"][:, 1:] if _is_causal(spec) else batch["labels"] for batch in batches]
        evaluator: LanguageModelEvaluator = self.evaluators[""]
        return evaluator.unigram_baseline(self.corpus, labels, vocabulary_size)


@dataclass(frozen=True)
class PreparedRun:
    """A run with its tokenizer, the config of its model and its tokenized data."""

    identity: RunIdentity
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    data: PreparedData


def prepare(identity: RunIdentity) -> PreparedRun:
    """Load the tokenizer and the config of the model, and tokenize the data or read them from the cache.

    Raises a `UserError` if tokenizer, model, penalty and data do not fit together.
    """
    config, spec = identity.config, identity.spec
    tokenizer = load_or_train_tokenizer(identity)
    model_config = build_config(config.model, spec, tokenizer)
    config.reg.check_layers(model_config.num_hidden_layers)
    max_length = limit_max_length(tokenizer, model_config, config.task.max_length, spec.max_length)
    prepare_data = _prepare_documents if spec.is_language_modelling else _prepare_labelled
    return PreparedRun(identity, tokenizer, model_config, prepare_data(identity, tokenizer, max_length))


def load_or_train_tokenizer(identity: RunIdentity) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run's model, or train one on the training texts and keep it in the cache.

    For a stream, the tokenizer is trained on sampled documents with 100 million characters in total. Raises what
    `build_tokenizer` raises.
    """
    config, examples = identity.config, identity.examples
    if not config.model.trains_tokenizer:
        return build_tokenizer(config.model)
    versions = [tokenizers.__version__, transformers.__version__]
    key_parts = [repr(config.model), identity.key.model, identity.key.data, *versions]
    cache_key = hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()
    folder = cache_folder(config.data.cache_dir) / "tokenizers" / cache_key
    if not folder.exists():
        if examples.stream is not None:
            texts: Any = _take_characters(examples.stream.iterate_sample(), _MAX_TOKENIZER_CHARACTERS)
        else:
            text_columns = [examples.train[name] for name in identity.spec.text_columns]
            texts = text_columns[0] if len(text_columns) == 1 else list(chain(*text_columns))
        tokenizer = build_tokenizer(config.model, texts)
        try:
            with atomic_folder(folder) as temporary_folder:
                tokenizer.save_pretrained(temporary_folder)
        except OSError as error:
            raise UserError(f"the tokenizer cannot be cached: {shorten(error)}; set another data.cache_dir") from error
    # The process that trained the tokenizer loads it, too, so that all processes have the same object.
    return load_tokenizer(replace(config.model, tokenizer=str(folder)).source())


def _take_characters(texts: Iterable[str], num_characters: int) -> Iterator[str]:
    for text in texts:
        yield text
        num_characters -= len(text)
        if num_characters <= 0:
            return


def make_collator(
    spec: TaskSpec, config: Config, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> Collate:
    """Create the collator of a task, which makes a batch for the model out of rows."""
    if not spec.is_language_modelling:
        return Collator(tokenizer, with_positions=attention.accepts_position_ids(model))
    return BlockCollator(tokenizer.pad_token_id, _make_isolation_function(spec, config, model), _is_causal(spec))


def _make_isolation_function(
    spec: TaskSpec, config: Config, model: PreTrainedModel
) -> Callable[[Tensor], dict[str, Tensor]] | None:
    """Return a function that makes the model inputs by which packed documents stay apart; None if there are none."""
    if not config.task.packing:
        return None
    isolation_inputs = attention.isolation(model)
    if isolation_inputs is None:
        log.warning(
            "%s attends across the documents of a block, because it has no inputs that prevent it; "
            "task.packing=false gives each document separate blocks",
            model.config.model_type,
        )
        return None
    return partial(attention.make_isolating_inputs, isolation_inputs, is_causal=_is_causal(spec))


def _is_causal(spec: TaskSpec) -> bool:
    return spec.kind == "causal_lm"


def _prepare_documents(identity: RunIdentity, tokenizer: PreTrainedTokenizerBase, max_length: int) -> PreparedData:
    spec, config, examples = identity.spec, identity.config, identity.examples
    cache_dir = cache_folder(config.data.cache_dir)
    masking = None if _is_causal(spec) else Masking(tokenizer, config.task.whole_word)
    prefix, suffix = find_block_tokens(spec, tokenizer)
    document_sets = examples.validation if examples.stream is not None else (examples.train, *examples.validation)
    corpora = [load_or_tokenize_corpus(documents, tokenizer, cache_dir) for documents in document_sets]
    blocks = [cut_blocks(corpus, max_length, prefix, suffix, config.task.packing) for corpus in corpora]
    all_rows = [BlockRows(blocks_of_set, masking, config.seed) for blocks_of_set in blocks]
    if examples.stream is None:
        stream, train, validation = None, all_rows[0], all_rows[1:]
    else:
        stream = StreamedBlocks(
            documents=examples.stream, tokenizer=tokenizer, prefix=prefix, suffix=suffix, length=max_length,
            packing=config.task.packing, masking=masking, seed=config.seed,
            window_blocks=math.ceil(config.task.shuffle_blocks / config.data.batch_size) * config.data.batch_size,
        )  # fmt: skip
        train, validation = stream.sample_rows(), all_rows
    validation = [rows.take_first(_count_evaluated_rows(config, len(rows))) for rows in validation]
    evaluators = {
        split.suffix: LanguageModelEvaluator(spec, len(rows))
        for split, rows in zip(spec.validation, validation, strict=True)
    }
    corpus = corpora[0] if stream is None else None
    return PreparedData(examples, train, list(validation), [], evaluators, corpus=corpus, stream=stream)


def _prepare_labelled(identity: RunIdentity, tokenizer: PreTrainedTokenizerBase, max_length: int) -> PreparedData:
    spec, config, examples = identity.spec, identity.config, identity.examples

    def tokenize(dataset: Dataset, *, training: bool) -> Dataset:
        stride, cache_dir = config.task.doc_stride, cache_folder(config.data.cache_dir)
        return featurize(
            spec, dataset, tokenizer, max_length, training=training, doc_stride=stride, cache_dir=cache_dir
        )

    def tokenize_evaluation_set(dataset: Dataset, is_cut: bool) -> tuple[Dataset, Dataset]:
        features = tokenize(dataset, training=False)
        max_features = _count_evaluated_rows(config, len(features)) if is_cut else len(features)
        return _take_first_features(dataset, features, max_features)

    validation = [tokenize_evaluation_set(dataset, is_cut=True) for dataset in examples.validation]
    test = [tokenize_evaluation_set(dataset, is_cut=config.trainer.fast_dev_run) for dataset in examples.test]
    examples = replace(
        examples, validation=[dataset for dataset, _ in validation], test=[dataset for dataset, _ in test]
    )
    evaluators = {
        split.suffix: Evaluator(spec, dataset, features, config.task.n_best, config.task.max_answer_length)
        for split, (dataset, features) in zip(spec.validation, validation, strict=True)
    }
    return PreparedData(
        examples,
        FeatureRows(tokenize(examples.train, training=True)),
        [FeatureRows(features) for _, features in validation],
        [FeatureRows(features) for _, features in test],
        evaluators,
        [Evaluator(spec, dataset, features) for dataset, features in test],
    )


def _count_evaluated_rows(config: Config, num_rows: int) -> int:
    # Sets are cut beforehand: Lightning would skip batches, but metrics need predictions for complete sets.
    batch_limit = 1 if config.trainer.fast_dev_run else config.trainer.limit_val_batches
    if type(batch_limit) is int:
        return min(num_rows, batch_limit * config.data.eval_batch_size)
    return min(num_rows, max(1, int(batch_limit * num_rows)))


def _take_first_features(examples: Dataset, features: Dataset, max_features: int) -> tuple[Dataset, Dataset]:
    """Return the first examples, as many as have at most `max_features` features in total, and their features.

    An example has one feature or, in a span task, one for each window of its text.
    """
    if len(features) <= max_features:
        return examples, features
    example_ids = features["example_id"][: max_features + 1]
    # The first feature beyond the limit belongs to this example; all examples before it are complete.
    num_complete = example_ids[max_features]
    if num_complete == 0:
        raise UserError(f"the first example has more than {max_features} windows; set a larger data.eval_batch_size")
    return examples.select(range(num_complete)), features.select(range(example_ids.index(num_complete)))
