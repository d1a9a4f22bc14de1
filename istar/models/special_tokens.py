"""The special tokens of a tokenizer, and a tokenizer that makes trial inputs for a model."""

from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the ids of the special tokens that a fast tokenizer adds before and after a text."""
    encoding = make_one_token_tokenizer(tokenizer)("a").encodings[0]
    position = encoding.sequence_ids.index(0)
    return encoding.ids[:position], encoding.ids[position + 1 :]


def make_one_token_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", embeddings: "Tensor | None" = None
) -> "PreTrainedTokenizerBase":
    """Return a tokenizer that turns any text into one ordinary token of a fast tokenizer, between its special tokens.

    With `embeddings` `(n, d)`, the token is one with a finite row, if there is any.
    """
    from transformers import PreTrainedTokenizerFast  # takes seconds to import; refusing a text does not need it

    token_ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    rows: Any = embeddings if embeddings is not None and not embeddings.is_meta else []
    known_ids = (index for index in token_ids if index < len(rows))
    token_id = next((index for index in known_ids if rows[index].isfinite().all()), token_ids[0])
    backend = Tokenizer(WordLevel({"a": token_id}, unk_token="a"))
    backend.post_processor = tokenizer.backend_tokenizer.post_processor
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=tokenizer.model_input_names)


def find_separator_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id of the token that ends a document: `sep_token`, else `eos_token`; None without either."""
    return tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
