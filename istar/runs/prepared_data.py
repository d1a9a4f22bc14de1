"""The data of a run, tokenized: rows for training and evaluation, and what turns outputs into metrics."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import tokenizers
import transformers
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar import models
from istar.config import Config
from istar.errors import UserError, shorten
from istar.files import cache_folder, new_folder
from istar.runs.store import Examples
from istar.tasks.blocks import Corpus
from istar.tasks.evaluation import Evaluator, constant_baseline
from istar.tasks.features import Collator, FeatureRows, Rows, featurize, limit_max_length
from istar.tasks.language_modelling import (
    BlockCollator,
    BlockRows,
    LanguageModelEvaluator,
    cut_into_blocks,
    load_or_tokenize_corpus,
)
from istar.tasks.masking import Masking
from istar.tasks.specs import TaskSpec
from istar.training.data import Collate, build_evaluation_loader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedData:
    """The tokenized data of a run.

    Attributes:
        examples: the examples, with evaluation sets cut to `trainer.limit_val_batches`.
        train, validation, test: rows of the splits.
        evaluators: evaluator of each validation set, by the suffix of its metrics.
        test_evaluators: evaluator of each test set.
        corpus: tokens of the training data, for language modelling only.
    """

    examples: Examples
    train: Rows
    validation: list[Rows]
    test: list[Rows]
    evaluators: dict[str, Any]
    test_evaluators: Sequence[Evaluator] = ()
    corpus: Corpus | None = None

    def baseline(self, spec: TaskSpec, collate: Collate, batch_size: int, vocabulary: int) -> dict[str, float]:
        """Return the metrics of a prediction that ignores the input, on the first validation set."""
        if self.corpus is None:
            return constant_baseline(spec, self.examples.train, self.examples.validation[0])
        rows = self.validation[0]
        batches = build_evaluation_loader(rows, collate, batch_size, range(len(rows)))
        labels: list[Tensor] = [batch["labels"][:, 1:] if _is_causal(spec) else batch["labels"] for batch in batches]
        evaluator: LanguageModelEvaluator = self.evaluators[""]
        return evaluator.unigram_baseline(self.corpus, labels, vocabulary)


def prepare(
    spec: TaskSpec, config: Config, examples: Examples, tokenizer: PreTrainedTokenizerBase, model_config: Any
) -> PreparedData:
    """Tokenize all splits, using the cache of tokenized data.

    Raises:
        UserError: if the data do not fit the task or the model.
    """
    length = limit_max_length(tokenizer, model_config, config.task.max_length or spec.max_length)
    if spec.is_language_modelling:
        return _prepare_text(spec, config, examples, tokenizer, length)
    return _prepare_labelled(spec, config, examples, tokenizer, length)


def load_tokenizer(
    config: Config, spec: TaskSpec, examples: Examples, data_fingerprint: str
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model, or train one on the training texts; a trained one is kept in the cache.

    Raises:
        UserError: see `istar.models.load_tokenizer`.
    """
    if not config.model.trains_tokenizer:
        return models.load_tokenizer(config.model)
    description = [repr(config.model), data_fingerprint, tokenizers.__version__, transformers.__version__]
    key = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    folder = cache_folder(config.data.cache_dir) / "tokenizers" / key
    if not folder.exists():
        columns = [examples.train[name] for name in spec.text_columns]
        texts = columns[0] if len(columns) == 1 else list(chain(*columns))
        log.info("training a tokenizer on %d texts", len(texts))
        tokenizer = models.load_tokenizer(config.model, texts)
        try:
            with new_folder(folder) as draft:
                tokenizer.save_pretrained(draft)
        except OSError as error:
            raise UserError(
                f"the tokenizer cannot be cached: {shorten(error)}; name another folder with data.cache_dir"
            ) from error
    # Also the process that trained it loads it from the folder, so that all processes have the same object.
    return models.load_tokenizer(replace(config.model, tokenizer=str(folder)))


def collator(spec: TaskSpec, config: Config, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Collate:
    """Return the function that makes a batch of rows for a model."""
    if not spec.is_language_modelling:
        return Collator(tokenizer, with_positions=models.accepts_position_ids(model))
    return BlockCollator(tokenizer.pad_token_id, _isolate(spec, config, model), _is_causal(spec))


def _isolate(spec: TaskSpec, config: Config, model: PreTrainedModel) -> Callable[[Tensor], dict[str, Tensor]] | None:
    """Return the function that gives packed documents the inputs that keep them apart in the model.

    It is None if blocks hold one document each, or if the model has no such inputs, about which a line is logged.
    """
    if not config.task.packing:
        return None
    way = models.isolation(model)
    if way is None:
        log.warning(
            "%s attends across the documents of a block, because it has no inputs that prevent it; "
            "task.packing=false gives each document blocks of its own",
            model.config.model_type,
        )
        return None
    return partial(models.make_isolating_inputs, way, is_causal=_is_causal(spec))


def _is_causal(spec: TaskSpec) -> bool:
    return spec.kind == "causal_lm"


def _prepare_text(
    spec: TaskSpec, config: Config, examples: Examples, tokenizer: PreTrainedTokenizerBase, length: int
) -> PreparedData:
    """Tokenize documents and cut them into blocks."""
    cache = cache_folder(config.data.cache_dir)
    masking = None if _is_causal(spec) else Masking(tokenizer, config.task.whole_word)
    document_sets = (examples.train, *examples.validation)
    corpora = [load_or_tokenize_corpus(documents, tokenizer, cache) for documents in document_sets]
    train, *validation = (
        BlockRows(cut_into_blocks(spec, corpus, tokenizer, length, config.task.packing), masking, config.seed)
        for corpus in corpora
    )
    validation = [rows.take_first(_evaluated_rows(config, len(rows))) for rows in validation]
    evaluators = {
        split.suffix: LanguageModelEvaluator(spec, len(rows))
        for split, rows in zip(spec.validation, validation, strict=True)
    }
    return PreparedData(examples, train, list(validation), [], evaluators, corpus=corpora[0])


def _prepare_labelled(
    spec: TaskSpec, config: Config, examples: Examples, tokenizer: PreTrainedTokenizerBase, length: int
) -> PreparedData:
    """Tokenize texts with labels or answers."""
    tokenize = partial(
        featurize,
        spec,
        tokenizer=tokenizer,
        max_length=length,
        doc_stride=config.task.doc_stride,
        cache_dir=cache_folder(config.data.cache_dir),
    )
    train = tokenize(examples.train, training=True)
    validation = [(rows, tokenize(rows, training=False)) for rows in examples.validation]
    validation = [_first_features(*pair, _evaluated_rows(config, len(pair[1]))) for pair in validation]
    test = [(rows, tokenize(rows, training=False)) for rows in examples.test]
    if config.trainer.fast_dev_run:
        test = [_first_features(*pair, _evaluated_rows(config, len(pair[1]))) for pair in test]
    examples = replace(examples, validation=[rows for rows, _ in validation], test=[rows for rows, _ in test])
    evaluators = {
        split.suffix: Evaluator(spec, *pair, config.task.n_best, config.task.max_answer_length)
        for split, pair in zip(spec.validation, validation, strict=True)
    }
    return PreparedData(
        examples,
        FeatureRows(train),
        [FeatureRows(features) for _, features in validation],
        [FeatureRows(features) for _, features in test],
        evaluators,
        [Evaluator(spec, *pair) for pair in test],
    )


def _evaluated_rows(config: Config, count: int) -> int:
    """Return how many of the rows of an evaluation set are used: `fast_dev_run` or `limit_val_batches` batches.

    Lightning would leave out batches while it validates, but metrics need the predictions of complete sets.
    """
    limit = 1 if config.trainer.fast_dev_run else config.trainer.lightning.get("limit_val_batches", 1.0)
    size = limit * config.data.eval_batch_size if type(limit) is int else max(1, int(limit * count))
    return min(count, size)


def _first_features(rows: Dataset, tokens: Dataset, size: int) -> tuple[Dataset, Dataset]:
    """Return the first examples that have at most `size` features together (for spans: windows), and these features."""
    if len(tokens) <= size:
        return rows, tokens
    example_ids = tokens["example_id"][: size + 1]
    incomplete = example_ids[size]
    if incomplete == 0:
        raise UserError(f"the first example has more than {size} windows; set a larger data.eval_batch_size")
    return rows.select(range(incomplete)), tokens.select(range(example_ids.index(incomplete)))
