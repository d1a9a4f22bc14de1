"""Language modelling: labels of blocks of tokens, masked or causal, their batches, and exact metrics."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from istar.errors import NonFiniteError, UserError
from istar.finetune.tasks.blocks import Corpus, TokenBlocks
from istar.finetune.tasks.evaluation import Evaluation
from istar.models.special_tokens import special_tokens
from istar.regularizers.points import IGNORED_LABEL
from istar.runs.tasks import TaskSpec

_VALIDATION_SEED = 0
_TOKENS_PER_COUNT = 1 << 24  # tokens counted at a time, which limits the memory
_CHOICE_PROBABILITY = 0.15
_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1  # shares of the chosen tokens; the rest stays unchanged


def find_block_tokens(spec: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens at the beginning and at the end of each block.

    A block starts with the special tokens that the tokenizer puts before a text. For masked language modelling, it also
    ends with those that follow a text. From these, a causal model would learn that texts may end anywhere.
    """
    prefix, suffix = special_tokens(tokenizer)
    return prefix, [] if spec.kind == "causal_lm" else suffix


class Masking:
    """Choose and replace the tokens that a masked language model has to predict (Devlin et al., 2019).

    Each token is chosen with a probability of 15%. Of the chosen tokens, 80% become the mask token, 10% become a random
    token, and 10% stay unchanged. Special tokens are never chosen. At least one token of a text is chosen, because a
    mean loss over zero tokens is undefined. With `whole_word`, all tokens of a word are chosen or none. Raises a
    `UserError` if the tokenizer does not mark where words begin although `whole_word` is True.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, whole_word: bool = False) -> None:
        self.mask_id: Any = tokenizer.mask_token_id
        # Ids may be unused, so that the greatest one can exceed the number of tokens.
        tokens: Any = tokenizer.convert_ids_to_tokens(list(range(max(tokenizer.get_vocab().values()) + 1)))
        special_ids = set(tokenizer.all_special_ids)
        self._is_special = np.array([token_id in special_ids for token_id in range(len(tokens))])
        self._ordinary_ids = np.flatnonzero(~self._is_special & [token is not None for token in tokens])
        self._continues_word = find_word_continuations(tokens) if whole_word else np.zeros(len(tokens), dtype=bool)

    def __call__(self, input_ids: NDArray[Any], seed: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the token ids of a text with the chosen tokens replaced, and the labels, (tokens,) each.

        The label of a chosen token is its original id; all others are `IGNORED_LABEL`. Equal seeds give equal choices.
        """
        rng = np.random.default_rng(seed)
        is_ordinary = ~self._is_special[input_ids]
        # The index of each token's word; without `whole_word`, each token is a word.
        word_index = np.cumsum(~self._continues_word[input_ids] | ~is_ordinary) - 1
        is_chosen = is_ordinary & (rng.random(len(input_ids)) < _CHOICE_PROBABILITY)[word_index]
        if not is_chosen.any() and is_ordinary.any():
            is_chosen = is_ordinary & (word_index == rng.choice(word_index[is_ordinary]))
        draws, replacements = rng.random(len(input_ids)), rng.choice(self._ordinary_ids, len(input_ids))
        masked = np.where(is_chosen & (draws < _MASK_SHARE), self.mask_id, input_ids)
        is_random = is_chosen & (draws >= _MASK_SHARE) & (draws < _MASK_SHARE + _RANDOM_SHARE)
        return np.where(is_random, replacements, masked), np.where(is_chosen, input_ids, IGNORED_LABEL)


def find_word_continuations(tokens: Sequence[str | None]) -> NDArray[np.bool_]:
    """Return for each token of a vocabulary whether it continues a word instead of beginning one, (tokens,) bool.

    `tokens` has None for each id without a token.

    WordPiece marks continuations by `##`. Byte-level BPE and SentencePiece mark beginnings by a character for a space,
    `\u0120` and `\u2581`; tokens that start with a letter or digit instead continue a word. Raises a `UserError` if the
    vocabulary contains none of these marks.
    """
    texts = [token or "" for token in tokens]
    if any(text.startswith("##") for text in texts):
        return np.array([text.startswith("##") and len(text) > 2 for text in texts])
    for mark in ("\u0120", "\u2581"):
        if any(text.startswith(mark) for text in texts):
            return np.array([not text.startswith(mark) and text[:1].isalnum() for text in texts])
    raise UserError("task.whole_word=true: the tokenizer does not mark where words begin; set task.whole_word=false")


@dataclass(frozen=True)
class BlockRows:
    """Blocks of tokens with their labels, as the rows of a `DataLoader` with a `BlockCollator`."""

    blocks: TokenBlocks
    # Chooses the tokens to predict in masked language modelling; None for causal language modelling.
    masking: Masking | None
    seed: int  # seed of the masks in training, which also depend on the epoch and the row

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.blocks.lengths

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row as in validation, with the same masks each time.

        The row has `input_ids`, `labels` and `documents`, (tokens,) each, and the row number `feature_id`.
        """
        return self._make_row(index, (_VALIDATION_SEED, index))

    def training_row(self, index: int, epoch: int) -> dict[str, Any]:
        return self._make_row(index, (self.seed, epoch, index))

    def _make_row(self, index: int, mask_seed: tuple[int, ...]) -> dict[str, Any]:
        input_ids = self.blocks.input_ids(index)
        # The tokens around the text are not predicted, even if a tokenizer adds tokens that occur in texts.
        labels = np.full_like(input_ids, IGNORED_LABEL)
        text = slice(len(self.blocks.prefix), len(input_ids) - len(self.blocks.suffix))
        if self.masking is not None:
            input_ids[text], labels[text] = self.masking(input_ids[text], mask_seed)
        else:
            labels[text] = input_ids[text]
        documents = self.blocks.document_numbers(index)
        return {"input_ids": input_ids, "labels": labels, "documents": documents, "feature_id": index}

    def take_first(self, count: int) -> "BlockRows":
        return replace(self, blocks=replace(self.blocks, spans=self.blocks.spans[:count]))


class BlockCollator:
    """Collator that pads blocks on the right and converts them to tensors.

    Args:
        padding_id: id of the padding token. None allows any id, because the attention mask excludes padding.
        isolate_documents: returns the model inputs that keep packed documents from attending to each other, given
            document numbers (batch, tokens), -1 for padding. None if the model lacks such inputs, or if each block
            contains one document.
        is_causal: whether each token is predicted from the previous ones. With `isolate_documents`, the first token of
            a document is then not predicted.
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


def _pad_rows(rows: Sequence[NDArray[np.int64]], padding_id: int) -> Tensor:
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=padding_id)


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
            ValueError: if blocks are missing or unknown.
            NonFiniteError: if the loss is not finite.
        """
        if outputs.keys() != set(range(self.num_blocks)):
            raise ValueError(
                f"the outputs must belong to exactly the {self.num_blocks} blocks; they are {len(outputs)}"
            )
        loss_sum, num_tokens, num_correct = map(math.fsum, zip(*outputs.values(), strict=True))
        if not math.isfinite(loss_sum):
            raise NonFiniteError(
                f"task {self.spec.name}: the loss of the validation set is {loss_sum:g}: the model has diverged, or "
                "overflows its data type"
            )
        return Evaluation(self._select_metrics(loss_sum / num_tokens, num_correct / num_tokens), [], collapsed=False)

    def _select_metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        value_by_metric = {"perplexity": perplexity(loss), "loss": loss, "accuracy": accuracy}
        return {name: value_by_metric[name] for name in self.spec.metrics}

    def unigram_baseline(self, corpus: Corpus, labels: Iterable[Tensor], vocabulary_size: int) -> dict[str, float]:
        """Return the metrics of a unigram model, which ignores the context, on the validation labels in batches.

        It predicts tokens by their frequencies in the training data `corpus` with add-one smoothing: the probability of
        a token is (its count + 1) / (number of training tokens + vocabulary size).
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
