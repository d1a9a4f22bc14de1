"""Reads the layers of a sentence-transformers model, and the sentence embeddings of the same pass."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from istar.errors import UserError, check_one_of
from istar.geometry.collect.batch_reader import BatchReader
from istar.geometry.collect.state_rows import Places
from istar.models.special_tokens import special_tokens as find_special_tokens
from istar.runs.names import POOLED

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


_WINDOW_SIZE = 4_096
"""Number of sentences that are read ahead and sorted by length."""


def sort_sentences(sentences: Iterable[str], batch_size: int = 32) -> Iterator[tuple[list[str], Tensor]]:
    """Yield batches of sentences of similar length, so that they need little padding, with their numbers `(batch,)`.

    Raises a `UserError` for anything but strings.
    """
    numbered = enumerate(sentences)
    while window := list(islice(numbered, _WINDOW_SIZE)):
        for number, sentence in window:
            if not isinstance(sentence, str):
                raise UserError(f"sentence {number} is a {type(sentence).__name__}; expected strings")
        window.sort(key=lambda item: len(item[1]), reverse=True)
        for start in range(0, len(window), batch_size):
            numbers, batch = zip(*window[start : start + batch_size], strict=True)
            yield list(batch), torch.tensor(numbers, device="cpu")


class SentenceReader(BatchReader):
    """Reads the hidden states and the embeddings of sentences; a batch is a list of sentences.

    The states are those of the transformers model, and `pooled`, what `encode` returns with the model's default prompt.
    The tokens of the prompt count as tokens of the sentence.

    Args:
        model: a model with a text encoder of transformers.
        first_batch: sentences for the trial; see `BatchReader`.
        special_tokens: "exclude" leaves the special tokens that the tokenizer adds out of the layers.
    """

    def __init__(
        self,
        model: "SentenceTransformer",
        first_batch: list[str],
        *,
        special_tokens: Literal["include", "exclude"] = "exclude",
    ) -> None:
        check_one_of("special_tokens", special_tokens, ("include", "exclude"))
        self._sentence_model = model
        are_left_out = special_tokens == "exclude"
        self._num_special = [len(ids) if are_left_out else 0 for ids in find_special_tokens(model.tokenizer)]
        super().__init__(model, (self._tokenize(first_batch),), mask=self._find_tokens)
        self.special_tokens = special_tokens
        self.names = (*self.names, POOLED)

    def read(self, batch: list[str]) -> tuple[dict[str, Places], Tensor | None]:
        """Return the states of sentences, `pooled` as one place each, and the token ids; see `BatchReader.read`."""
        features = self._tokenize(batch)
        output, states = self.run((features,))
        pooled = output["sentence_embedding"][..., : self._sentence_model.truncate_dim]
        places, _ = self.arrange({**states, POOLED: pooled}, (features,))
        return places, features["input_ids"]

    def _tokenize(self, sentences: list[str]) -> dict[str, Any]:
        model = self._sentence_model
        prompt = model.prompts.get(model.default_prompt_name) if model.default_prompt_name is not None else None
        return model.preprocess(list(sentences), prompt=prompt)

    def _find_tokens(self, batch: Any) -> Tensor:
        """Return which tokens are neither padding nor special tokens that the tokenizer adds."""
        mask: Tensor = batch[0]["attention_mask"].bool()
        numbers, (num_first, num_last) = mask.cumsum(1), self._num_special
        return mask & (numbers > num_first) & (numbers <= numbers[:, -1:] - num_last)
