"""Language modelling: from documents to blocks of tokens, batches with labels, and exact metrics."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from datasets.utils import tqdm
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError, shorten
from istar.files.writing import atomic_folder
from istar.finetune.tasks.blocks import (
    Corpus,
    TokenBlocks,
    append_separator,
    cut_packed_blocks,
    cut_separate_blocks,
    open_corpus,
    write_corpus,
)
from istar.finetune.tasks.evaluation import Evaluation
from istar.finetune.tasks.features import describe_tokenizer
from istar.finetune.tasks.loading import fingerprint
from istar.finetune.tasks.masking import Masking
from istar.inputs.documents import iterate_texts
from istar.inputs.tokenizing import find_separator_id, special_tokens, tokenize
from istar.records.task_specs import TaskSpec
from istar.regularizers.points import IGNORED_LABEL

_VALIDATION_SEED = 0
_PROGRESS_MIN_DOCUMENTS = 20_000  # smaller corpora are tokenized too quickly for a progress bar
_TOKENS_PER_COUNT = 1 << 24  # tokens counted at a time, which limits the memory


def load_or_tokenize_corpus(documents: Dataset, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> Corpus:
    """Return the memory-mapped tokens of all documents from the cache; if they are missing, tokenize and cache them.

    Each document ends with the tokenizer's separator token, if there is one. If several processes write the same corpus
    at the same time, the files of the first to finish are kept.

    Raises:
        UserError: if the cache cannot be written.
    """
    description = [describe_tokenizer(tokenizer), fingerprint(documents)]
    folder = cache_dir / "tokens" / hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    corpus = open_corpus(folder)
    if corpus is not None:
        return corpus
    documents_with_progress = tqdm(
        iterate_texts(documents, "the text"),
        total=len(documents),
        desc="Tokenizing",
        unit=" documents",
        disable=len(documents) < _PROGRESS_MIN_DOCUMENTS or None,
    )
    tokens = append_separator(tokenize(documents_with_progress, tokenizer), find_separator_id(tokenizer))
    try:
        if folder.exists():
            shutil.rmtree(folder)  # it is damaged
        with atomic_folder(folder) as temporary_folder:
            write_corpus(tokens, max(tokenizer.get_vocab().values()) + 1, temporary_folder)
    except OSError as error:
        raise UserError(
            f"the tokens cannot be cached: {shorten(error)}; name another folder with data.cache_dir"
        ) from error
    corpus = open_corpus(folder)
    assert corpus is not None
    return corpus


def cut_into_blocks(
    spec: TaskSpec, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, length: int, packing: bool
) -> TokenBlocks:
    """Cut a corpus into blocks of at most `length` tokens, including special tokens.

    A block starts with the special tokens that the tokenizer puts before a text. For masked language modelling, it also
    ends with those that follow a text. From these, a causal model would learn that texts may end anywhere.

    With `packing`, all blocks have `length` tokens, and may contain parts of several documents.

    Raises:
        UserError: if the special tokens leave no room for text, or if a packed corpus is shorter than a block.
    """
    prefix, suffix = special_tokens(tokenizer)
    if spec.kind == "causal_lm":
        suffix = []
    if not packing:
        return cut_separate_blocks(corpus, length, prefix, suffix)
    num_tokens = int(corpus.starts[-1])
    if 0 < num_tokens < length - len(prefix) - len(suffix):
        raise UserError(
            f"the text has {num_tokens} tokens, which is less than one block of {length}; give more text, a smaller "
            "task.max_length, or task.packing=false"
        )
    return cut_packed_blocks(corpus, length, prefix, suffix)


@dataclass(frozen=True)
class BlockRows:
    """Blocks of tokens with their labels, as the rows of a `DataLoader` with a `BlockCollator`.

    Attributes:
        blocks: the blocks.
        masking: chooses the tokens to predict in masked language modelling; None for causal language modelling.
        seed: seed of the masks in training, which also depend on the epoch and the row.
    """

    blocks: TokenBlocks
    masking: Masking | None
    seed: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each block, (blocks,)."""
        return self.blocks.lengths

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row as in validation, with the same masks each time.

        The row has `input_ids`, `labels` and `documents`, (tokens,) each, and the row number `feature_id`.
        """
        return self._make_row(index, (_VALIDATION_SEED, index))

    def training_row(self, index: int, epoch: int) -> dict[str, Any]:
        """Return a row as in training, with new masks in each epoch."""
        return self._make_row(index, (self.seed, epoch, index))

    def _make_row(self, index: int, mask_seed: tuple[int, ...]) -> dict[str, Any]:
        input_ids = self.blocks.input_ids(index)
        if self.masking is not None:
            input_ids, labels = self.masking(input_ids, mask_seed)
        else:
            # The special tokens at the beginning are not predicted.
            labels = input_ids.copy()
            labels[: len(self.blocks.prefix)] = IGNORED_LABEL
        return {
            "input_ids": input_ids,
            "labels": labels,
            "documents": self.blocks.document_numbers(index),
            "feature_id": index,
        }

    def take_first(self, count: int) -> "BlockRows":
        """Return only the first `count` rows."""
        return replace(self, blocks=replace(self.blocks, spans=self.blocks.spans[:count]))


class BlockCollator:
    """Collator that pads blocks on the right and converts them to tensors.

    Args:
        padding_id: id of the padding token. None stands for any id, because the attention mask excludes padding.
        isolate_documents: function that returns the model inputs with which packed documents do not attend to each
            other, given document numbers (batch, tokens), -1 for padding. None if the model has no such inputs, or if
            each block contains one document.
        is_causal: whether each token is predicted from the previous ones. With `isolate_documents`, the first token of
            a document has no previous ones, and is not predicted.
    """

    def __init__(
        self, padding_id: int | None, isolate_documents: Callable[[Tensor], dict[str, Tensor]] | None, is_causal: bool
    ) -> None:
        self.padding_id = 0 if padding_id is None else padding_id
        self.isolate_documents = isolate_documents
        self.is_causal = is_causal

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate rows of `BlockRows` into a batch.

        Returns:
            `input_ids` and `labels`, (batch, tokens) long; `attention_mask`, or the inputs that isolate documents; and
            `feature_id`, (batch,) long.
        """
        input_ids = _pad_rows([row["input_ids"] for row in rows], self.padding_id)
        labels = _pad_rows([row["labels"] for row in rows], IGNORED_LABEL)
        document_numbers = _pad_rows([row["documents"] for row in rows], -1)
        if self.isolate_documents is None:
            inputs = {"attention_mask": (document_numbers >= 0).long()}
        else:
            inputs = self.isolate_documents(document_numbers)
            if self.is_causal:
                labels[:, 1:][document_numbers[:, 1:] != document_numbers[:, :-1]] = IGNORED_LABEL
        feature_id = torch.tensor([row["feature_id"] for row in rows], dtype=torch.long)
        return {"input_ids": input_ids, "labels": labels, **inputs, "feature_id": feature_id}


def _pad_rows(rows: Sequence[NDArray[Any]], padding_id: int) -> Tensor:
    """Return the rows padded on the right to the length of the longest one, (rows, tokens) long."""
    max_length = max(len(row) for row in rows)
    padded = np.full((len(rows), max_length), padding_id, dtype=np.int64)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    return torch.from_numpy(padded)


@dataclass(frozen=True)
class LanguageModelEvaluator:
    """Compute the metrics of a whole validation set from the sums of its blocks."""

    spec: TaskSpec
    num_blocks: int  # number of blocks in the validation set

    def __call__(self, outputs: Mapping[int, NDArray[Any]]) -> Evaluation:
        """Return `loss` (nats per predicted token), `perplexity` and, for masked language modelling, `accuracy`.

        Sums are exact, so that they do not depend on batches or on the number of processes.

        Args:
            outputs: sum of losses, number of predicted tokens and number of correct predictions, by block number.

        Raises:
            ValueError: if blocks are missing or unknown, or the loss is not finite.
        """
        if outputs.keys() != set(range(self.num_blocks)):
            raise ValueError(
                f"the outputs must belong to exactly the {self.num_blocks} blocks; they are {len(outputs)}"
            )
        loss_sum, num_tokens, num_correct = (
            math.fsum(block_values) for block_values in zip(*outputs.values(), strict=True)
        )
        if not math.isfinite(loss_sum):
            raise ValueError("the loss of the validation set is not finite: the model has diverged")
        return Evaluation(self._select_metrics(loss_sum / num_tokens, num_correct / num_tokens), [], collapsed=False)

    def _select_metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        value_by_metric = {"perplexity": perplexity(loss), "loss": loss, "accuracy": accuracy}
        return {name: value_by_metric[name] for name in self.spec.metrics}

    def unigram_baseline(self, corpus: Corpus, labels: Iterable[Tensor], vocabulary_size: int) -> dict[str, float]:
        """Return the metrics of a unigram model, which ignores the context, on a validation set.

        It predicts tokens by their frequencies in the training data with add-one smoothing: the probability of a token
        is (its count + 1) / (number of training tokens + vocabulary size).

        Args:
            corpus: tokens of the training data.
            labels: labels of the validation set, batch by batch.
            vocabulary_size: number of token ids.
        """
        count_by_id = np.zeros(vocabulary_size, dtype=np.int64)
        for start in range(0, len(corpus.tokens), _TOKENS_PER_COUNT):
            count_by_id += np.bincount(corpus.tokens[start : start + _TOKENS_PER_COUNT], minlength=vocabulary_size)
        loss_by_id = -np.log((count_by_id + 1) / (count_by_id.sum() + vocabulary_size))
        target_ids = torch.cat([batch[batch != IGNORED_LABEL] for batch in labels]).numpy()
        return self._select_metrics(
            float(loss_by_id[target_ids].mean()), float((target_ids == count_by_id.argmax()).mean())
        )


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats, its exponential; infinity if that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
