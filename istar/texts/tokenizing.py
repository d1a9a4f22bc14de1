"""Tokenization of documents without special tokens, a tokenizer's special tokens, and a model's longest input."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from istar.errors import UserError, shorten

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

T = TypeVar("T")

_POSITIONS_START_AFTER_PADDING = {
    "altclip_text_model", "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer",
    "luke", "markuplm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
"""Models that number positions from the padding token's id plus 1."""
_TOKENIZER_BATCH = 1_000
"""Maximum number of documents to tokenize in one call, enough for the tokenizer's threads to share."""
_TOKENIZER_CHARACTERS = 1_000_000
"""Maximum number of characters in one call, because a tokenizer needs some 240 bytes for each."""


class TextPart(NamedTuple):
    """A part of a text with its token ids; see `tokenize_parts`."""

    text: str
    token_ids: list[int]
    is_last: bool  # whether the text ends with this part


def tokenize(texts: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> Iterator[list[int]]:
    """Yield the token ids of each text, without special tokens; long texts are cut as by `tokenize_parts`."""
    token_ids: list[int] = []
    for part in tokenize_parts(texts, tokenizer):
        token_ids += part.token_ids
        if part.is_last:
            yield token_ids
            token_ids = []


def tokenize_parts(texts: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> Iterator[TextPart]:
    """Yield the parts of each text with their token ids, without special tokens.

    A text of at most 1,000,000 characters has one part. A longer one is cut before white space, or after 1,000,000
    characters without any. Parts are tokenized only as they are needed, so that the memory does not grow with the
    length of a text. The token ids are those of the whole text, except perhaps next to the cuts.
    """
    for chunk in _split_into_calls(texts):
        part_texts, are_last = zip(*chunk, strict=True)
        # `verbose=False` silences the warning about texts that are longer than the model's input.
        with convert_tokenizer_errors():
            token_ids = tokenizer(
                list(part_texts),
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
        yield from map(TextPart, part_texts, token_ids, are_last)


@contextmanager
def convert_tokenizer_errors() -> Iterator[None]:
    """Convert the error of a fast tokenizer for text that it has no token for, not even an unknown one."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:  # tokenizers raises plain exceptions
            raise
        raise UserError(f"the tokenizer has no token for a part of the text: {shorten(error)}") from error


def _split_into_calls(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Yield lists of text parts for one call of the tokenizer, each part with whether it is the last of its text."""
    chunk: list[tuple[str, bool]] = []
    num_characters = 0
    for part_text, is_last in (part for text in texts for part in _split_text(text)):
        num_characters += len(part_text)
        if chunk and (len(chunk) == _TOKENIZER_BATCH or num_characters > _TOKENIZER_CHARACTERS):
            yield chunk
            chunk, num_characters = [], len(part_text)
        chunk.append((part_text, is_last))
    if chunk:
        yield chunk


def _split_text(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, and whether each is the last one."""
    if len(text) <= _TOKENIZER_CHARACTERS:
        yield text, True
        return
    limit = _TOKENIZER_CHARACTERS
    for match in re.finditer(rf"(?s).{{1,{limit}}}(?=\s|\Z)|.{{{limit}}}", text):
        yield match[0], match.end() == len(text)


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the ids of the special tokens that a fast tokenizer adds before and after a text."""
    encoding = make_one_token_tokenizer(tokenizer)("a").encodings[0]
    position = encoding.sequence_ids.index(0)
    return encoding.ids[:position], encoding.ids[position + 1 :]


def make_one_token_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", embeddings: "Tensor | None" = None
) -> "PreTrainedTokenizerBase":
    """Return a tokenizer with the same special tokens, for which any text is one ordinary token of a fast tokenizer.

    If rows of the model's `embeddings` `(n, d)` are not finite, the token is one with a finite row, if there is any.
    """
    from transformers import PreTrainedTokenizerFast

    token_ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    rows: Any = embeddings if embeddings is not None and not embeddings.is_meta else []
    known_ids = (index for index in token_ids if index < len(rows))
    token_id = next((index for index in known_ids if rows[index].isfinite().all()), token_ids[0])
    backend = Tokenizer(WordLevel({"a": token_id}, unk_token="a"))
    backend.post_processor = tokenizer.backend_tokenizer.post_processor
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=tokenizer.model_input_names)


def count_text_tokens(length: int, prefix: Sequence[int], suffix: Sequence[int]) -> int:
    """Return how many tokens of a text fit into a block with the special tokens; raise a `UserError` if none do."""
    num_text_tokens = length - len(prefix) - len(suffix)
    if num_text_tokens < 1:
        raise UserError(f"a block of {length} tokens has no room for more than special tokens; choose a greater length")
    return num_text_tokens


def find_separator_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id of the token that ends a document: `sep_token`, else `eos_token`; None without either."""
    return tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id


def find_max_input_length(config: "PreTrainedConfig") -> int | None:
    """Return the maximum number of tokens of a model's input, or None if inputs may have any length."""
    config = config.get_text_config()
    # Falcon's config has `max_position_embeddings` even if its attention uses ALiBi and its inputs have no limit.
    if getattr(config, "alibi", False):
        return None
    # MPT and LED have other names for the limit. Models with relative positions have none, or -1.
    names = ("max_position_embeddings", "max_seq_len", "max_encoder_position_embeddings")
    limit = int(next((value for name in names if (value := getattr(config, name, None))), 0))
    if config.model_type in _POSITIONS_START_AFTER_PADDING:
        # MPNet takes 1, whatever the config says.
        limit -= 2 if config.model_type == "mpnet" else (config.pad_token_id or 0) + 1
    return limit if limit > 0 else None


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield consecutive lists of `size` items; the last may be shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
