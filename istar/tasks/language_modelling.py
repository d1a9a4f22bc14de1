"""Language modelling: from documents to blocks of tokens, batches with labels, and exact metrics."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from istar.files import atomic_folder
from istar.tasks.blocks import Blocks, Corpus, open_corpus, packed, separate, with_separator, write_corpus
from istar.tasks.documents import documents_of
from istar.tasks.evaluation import Evaluation
from istar.tasks.features import tokenizer_description
from istar.tasks.loading import fingerprint
from istar.tasks.masking import IGNORED, Masking
from istar.tasks.specs import TaskSpec
from istar.tasks.tokenizing import separator, special_tokens, tokenize

_VALIDATION_SEED = 0
_PROGRESS_MIN_DOCUMENTS = 20_000  # smaller corpora are tokenized too quickly for a progress bar
_COUNTED_TOKENS = 1 << 24  # tokens counted at a time, which limits the memory


def tokenized_corpus(documents: Dataset, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> Corpus:
    """Return the tokens of all documents, memory-mapped from the cache, which they are written to only once.

    Each document ends with the tokenizer's separator, see `istar.tasks.tokenizing.separator`. If several processes
    write the same corpus at the same time, the first to finish keeps its files.

    Raises:
        UserError: if the cache cannot be written.
    """
    description = [tokenizer_description(tokenizer), fingerprint(documents)]
    folder = cache_dir / "tokens" / hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    corpus = open_corpus(folder)
    if corpus is not None:
        return corpus
    bar = tqdm(
        documents_of(documents, "the text"),
        total=len(documents),
        desc="Tokenizing",
        unit=" documents",
        disable=len(documents) < _PROGRESS_MIN_DOCUMENTS or None,
    )
    tokens = with_separator(tokenize(bar, tokenizer), separator(tokenizer))
    try:
        if folder.exists():
            shutil.rmtree(folder)  # it is damaged
        with atomic_folder(folder) as draft:
            write_corpus(tokens, max(tokenizer.get_vocab().values()) + 1, draft)
    except OSError as error:
        raise UserError(
            f"the tokens cannot be cached: {shorten(error)}; name another folder with data.cache_dir"
        ) from error
    corpus = open_corpus(folder)
    assert corpus is not None
    return corpus


def cut_into_blocks(
    spec: TaskSpec, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, length: int, packing: bool
) -> Blocks:
    """Cut a corpus into blocks of at most `length` tokens with special tokens.

    A block starts with the special tokens that the tokenizer puts before a text. For masked language modelling, it also
    ends with those that follow a text. A causal model would learn from them that texts end anywhere.

    Raises:
        UserError: if the special tokens leave no room, or the corpus is shorter than a block.
    """
    prefix, suffix = special_tokens(tokenizer)
    if spec.kind == "causal_lm":
        suffix = []
    if not packing:
        return separate(corpus, length, prefix, suffix)
    total = int(corpus.starts[-1])
    if 0 < total < length - len(prefix) - len(suffix):
        raise UserError(
            f"the text has {total} tokens, which is less than one block of {length}; give more text, a smaller "
            "task.max_length, or task.packing=false"
        )
    return packed(corpus, length, prefix, suffix)


@dataclass(frozen=True)
class BlockRows:
    """Blocks of tokens with their labels, as the rows of a `DataLoader` with a `BlockCollator`.

    Attributes:
        blocks: the blocks.
        masking: chooses the tokens to predict, for masked language modelling; None predicts each next token.
        seed: seed of the masks in training, which also depend on epoch and row.
    """

    blocks: Blocks
    masking: Masking | None
    seed: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each block, (blocks,)."""
        return self.blocks.lengths

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return a block as in validation, with the same masks each time.

        The row has `input_ids`, `labels` and `documents`, (tokens,) each, and the row number `feature_id`.
        """
        return self._labelled(row, (_VALIDATION_SEED, row))

    def in_epoch(self, row: int, epoch: int) -> dict[str, Any]:
        """Return a block as in training, with the masks of an epoch."""
        return self._labelled(row, (self.seed, epoch, row))

    def _labelled(self, row: int, seed: tuple[int, ...]) -> dict[str, Any]:
        input_ids = self.blocks.input_ids(row)
        if self.masking is not None:
            input_ids, labels = self.masking(input_ids, seed)
        else:
            # The special tokens at the beginning are given; they are not predicted.
            labels = input_ids.copy()
            labels[: len(self.blocks.prefix)] = IGNORED
        return {
            "input_ids": input_ids,
            "labels": labels,
            "documents": self.blocks.documents(row),
            "feature_id": row,
        }

    def first(self, count: int) -> "BlockRows":
        """Return the first blocks."""
        blocks = Blocks(self.blocks.corpus, self.blocks.spans[:count], self.blocks.prefix, self.blocks.suffix)
        return BlockRows(blocks, self.masking, self.seed)


class BlockCollator:
    """Pads blocks on the right and converts them to tensors.

    Args:
        pad: id of the padding token; any id will do if there is none, because the attention mask excludes padding.
        isolate: function from document numbers (batch, tokens), -1 for padding, to the model inputs with which packed
            documents do not attend to each other; None if the model has no such inputs, or blocks hold one document.
        is_causal: whether each token is predicted from those before it. With `isolate`, the first token of a further
            document has none before it and is not predicted.
    """

    def __init__(self, pad: int | None, isolate: Callable[[Tensor], dict[str, Tensor]] | None, is_causal: bool) -> None:
        self.pad = 0 if pad is None else pad
        self.isolate = isolate
        self.is_causal = is_causal

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate rows of `BlockRows` into a batch.

        Returns:
            `input_ids`, `labels`, (batch, tokens) long, `attention_mask` or the inputs that isolate documents, and
            `feature_id`, (batch,) long.
        """
        input_ids = _padded([row["input_ids"] for row in rows], self.pad)
        labels = _padded([row["labels"] for row in rows], IGNORED)
        documents = _padded([row["documents"] for row in rows], -1)
        if self.isolate is None:
            inputs = {"attention_mask": (documents >= 0).long()}
        else:
            inputs = self.isolate(documents)
            if self.is_causal:
                labels[:, 1:][documents[:, 1:] != documents[:, :-1]] = IGNORED
        feature_id = torch.tensor([row["feature_id"] for row in rows], dtype=torch.long)
        return {"input_ids": input_ids, "labels": labels, **inputs, "feature_id": feature_id}


def _padded(rows: Sequence[NDArray[Any]], padding: int) -> Tensor:
    width = max(len(row) for row in rows)
    padded = np.full((len(rows), width), padding, dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded)


@dataclass(frozen=True)
class LanguageModelEvaluator:
    """Computes the metrics of a whole validation set from the sums of its blocks."""

    spec: TaskSpec
    blocks: int  # number of blocks of the set

    def __call__(self, outputs: Mapping[int, NDArray[Any]]) -> Evaluation:
        """Return `loss` (nats per predicted token), `perplexity` and, for masked tokens, `accuracy`.

        Sums are taken in the order of the blocks, so that they do not depend on batches or on the number of processes.

        Args:
            outputs: by block, the sum of the losses, the number of predicted tokens and that of rightly predicted ones.

        Raises:
            ValueError: if blocks are missing or unknown, or the loss is not finite.
        """
        if outputs.keys() != set(range(self.blocks)):
            raise ValueError(f"the outputs must belong to exactly the {self.blocks} blocks; they are {len(outputs)}")
        loss, tokens, correct = (math.fsum(values) for values in zip(*outputs.values(), strict=True))
        if not math.isfinite(loss):
            raise ValueError("the loss of the validation set is not finite: the model has diverged")
        return Evaluation(self._metrics(loss / tokens, correct / tokens), [], collapsed=False)

    def _metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        values = {"perplexity": perplexity(loss), "loss": loss, "accuracy": accuracy}
        return {name: values[name] for name in self.spec.metrics}

    def baseline(self, corpus: Corpus, labels: Iterable[Tensor], vocabulary: int) -> dict[str, float]:
        """Return the metrics of a prediction that ignores the context: the frequencies of the training tokens.

        Each token has the probability (count + 1) / (tokens + vocabulary), with add-one smoothing.

        Args:
            corpus: tokens of the training data.
            labels: labels of the batches of the validation set, as the model has to predict them.
            vocabulary: number of token ids.
        """
        counts = np.zeros(vocabulary, dtype=np.int64)
        for start in range(0, len(corpus.tokens), _COUNTED_TOKENS):
            counts += np.bincount(corpus.tokens[start : start + _COUNTED_TOKENS], minlength=vocabulary)
        losses = -np.log((counts + 1) / (counts.sum() + vocabulary))
        predicted = torch.cat([batch[batch != IGNORED] for batch in labels]).numpy()
        return self._metrics(float(losses[predicted].mean()), float((predicted == counts.argmax()).mean()))


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss in nats; infinity if that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
