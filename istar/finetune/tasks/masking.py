"""Masked language modelling: choice of the tokens that a model has to predict (Devlin et al., 2019)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError
from istar.regularizers.points import IGNORED_LABEL

_CHOICE_PROBABILITY = 0.15
_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1  # shares of the chosen tokens; the rest stays unchanged


class Masking:
    """Choose and replace the tokens that a masked language model has to predict, as in BERT's pre-training.

    Each token is chosen with a probability of 15%. Of the chosen tokens, 80% become the mask token, 10%
    become a random token, and 10% stay unchanged. Special tokens are never chosen. At least one token of a text is
    chosen, because a mean loss over no token is undefined.

    Args:
        tokenizer: a fast tokenizer with a mask token.
        whole_word: whether to choose either all tokens of a word or none.

    Raises:
        UserError: if the tokenizer does not mark where words begin although `whole_word` is True.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, whole_word: bool = False) -> None:
        self.mask_id: Any = tokenizer.mask_token_id
        tokens: Any = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        special_ids = set(tokenizer.all_special_ids)
        self._is_special = np.array([token_id in special_ids for token_id in range(len(tokens))])
        self._ordinary_ids = np.flatnonzero(~self._is_special)
        self._continues_word = find_word_continuations(tokens) if whole_word else np.zeros(len(tokens), dtype=bool)

    def __call__(self, input_ids: NDArray[Any], seed: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the token ids of a text with the chosen tokens replaced, and the labels, (tokens,) each.

        The label of a chosen token is its original id; all others are `IGNORED_LABEL`. Equal seeds give equal choices.
        """
        rng = np.random.default_rng(seed)
        is_ordinary = ~self._is_special[input_ids]
        # The index of the word to which each token belongs; without `whole_word`, each token is a word.
        word_index = np.cumsum(~self._continues_word[input_ids] | ~is_ordinary) - 1
        is_chosen = is_ordinary & (rng.random(len(input_ids)) < _CHOICE_PROBABILITY)[word_index]
        if not is_chosen.any() and is_ordinary.any():
            is_chosen = is_ordinary & (word_index == rng.choice(word_index[is_ordinary]))
        draws, replacements = rng.random(len(input_ids)), rng.choice(self._ordinary_ids, len(input_ids))
        masked = np.where(is_chosen & (draws < _MASK_SHARE), self.mask_id, input_ids)
        is_random = is_chosen & (draws >= _MASK_SHARE) & (draws < _MASK_SHARE + _RANDOM_SHARE)
        return np.where(is_random, replacements, masked), np.where(is_chosen, input_ids, IGNORED_LABEL)


def find_word_continuations(tokens: list[str]) -> NDArray[np.bool_]:
    """Return for each token of a vocabulary whether it continues a word instead of beginning one, (tokens,) bool.

    WordPiece marks continuations by `##`. Byte-level BPE and SentencePiece mark beginnings by a character for a space,
    `\u0120` and `\u2581`; tokens that start with a letter or digit instead continue a word.

    Raises:
        UserError: if the vocabulary has none of these marks.
    """
    if any(token.startswith("##") for token in tokens):
        return np.array([token.startswith("##") and len(token) > 2 for token in tokens])
    for mark in ("\u0120", "\u2581"):
        if any(token.startswith(mark) for token in tokens):
            return np.array([not token.startswith(mark) and token[:1].isalnum() for token in tokens])
    raise UserError("task.whole_word=true: the tokenizer does not mark where words begin; set task.whole_word=false")
