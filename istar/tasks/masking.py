"""Masked language modelling: the choice of the tokens that a model has to predict (Devlin et al., 2019)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError

IGNORED = -100
"""Label of a token that is not to be predicted, which the losses of torch and transformers leave out."""

_REPLACED, _RANDOM = 0.8, 0.1  # shares of the chosen tokens; the rest stays as it is


class Masking:
    """Chooses tokens and replaces them, as BERT's pre-training does.

    A token is chosen with a probability of 15%. Of the chosen ones, 80% become the mask token and 10% a random token;
    10% stay as they are. Special tokens are never chosen. If chance chooses no token of a text, one is chosen at
    random, because a loss without a token has no value.

    With `whole_word`, all tokens of a word are chosen or none.

    Args:
        tokenizer: a fast tokenizer with a mask token.
        whole_word: choose whole words.
        probability: probability with which a token, or a word, is chosen, above 0 and at most 1.

    Raises:
        UserError: if the tokenizer has no mask token, or if it does not mark where words begin.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, whole_word: bool = False, probability: float = 0.15) -> None:
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"{type(tokenizer).__name__} has no mask token, which task=mlm needs; choose an encoder such as BERT, "
                "or task=clm"
            )
        self.mask = int(tokenizer.mask_token_id)
        self.probability = probability
        tokens: Any = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        special = set(tokenizer.all_special_ids)
        self._is_special = np.array([number in special for number in range(len(tokens))])
        self._ordinary = np.flatnonzero(~self._is_special)
        self._continues = continues_word(tokens) if whole_word else np.zeros(len(tokens), dtype=bool)

    def __call__(self, input_ids: NDArray[Any], seed: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the ids with the chosen tokens replaced, and the labels, (tokens,) each.

        A label is the original id of a chosen token and `IGNORED` elsewhere. Equal seeds give equal choices.
        """
        random = np.random.default_rng(seed)
        may_be_chosen = ~self._is_special[input_ids]
        # A word is numbered by its first token; without `whole_word`, each token is a word.
        word = np.cumsum(~self._continues[input_ids] | ~may_be_chosen) - 1
        is_chosen = may_be_chosen & (random.random(len(input_ids)) < self.probability)[word]
        if not is_chosen.any() and may_be_chosen.any():
            is_chosen = may_be_chosen & (word == random.choice(word[may_be_chosen]))
        lot, replacements = random.random(len(input_ids)), random.choice(self._ordinary, len(input_ids))
        masked = np.where(is_chosen & (lot < _REPLACED), self.mask, input_ids)
        is_random = is_chosen & (lot >= _REPLACED) & (lot < _REPLACED + _RANDOM)
        return np.where(is_random, replacements, masked), np.where(is_chosen, input_ids, IGNORED)


def continues_word(tokens: list[str]) -> NDArray[np.bool_]:
    """Return for each token of a vocabulary whether it continues a word instead of beginning one.

    WordPiece marks continuations by `##`. Byte-level BPE and SentencePiece mark beginnings by the signs for a space,
    `\u0120` and `\u2581`; letters and digits without such a sign continue a word.

    Raises:
        UserError: if the vocabulary has none of these marks.
    """
    if any(token.startswith("##") for token in tokens):
        return np.array([token.startswith("##") and len(token) > 2 for token in tokens])
    for mark in ("\u0120", "\u2581"):
        if any(token.startswith(mark) for token in tokens):
            return np.array([not token.startswith(mark) and token[:1].isalnum() for token in tokens])
    raise UserError("task.whole_word=true: the tokenizer does not mark where words begin; set task.whole_word=false")
