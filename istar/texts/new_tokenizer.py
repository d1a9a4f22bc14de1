"""Training of tokenizers on text: byte-level BPE for decoders, WordPiece for encoders."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from istar.errors import UserError

END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"
"""The special tokens of BPE, named as in Pythia. Padding tokens' embeddings are not trained, so padding needs a
token different from the end of the text."""
ENCODER_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of WordPiece, named as in BERT."""

_MAX_ALPHABET_SIZE = 1_000  # largest number of characters in a WordPiece vocabulary, as in the training of BERT


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, kind: Literal["bpe", "wordpiece"]
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on texts; equal texts give equal tokenizers.

    A byte-level BPE tokenizer decodes its tokens to exactly the original text. Its special tokens are `<|padding|>` and
    `<|endoftext|>`, which is first and last token and separates the two texts of a pair. A WordPiece tokenizer
    lowercases, removes accents and puts texts between `[CLS]` and `[SEP]`, as BERT's uncased tokenizer does.

    Args:
        texts: texts in any order. WordPiece reads them twice, and copies an iterator to a list first.
        vocab_size: largest number of tokens, special tokens included. A short text yields fewer.
        kind: `bpe` or `wordpiece`.

    Raises a `UserError` if the texts contain only white space.
    """
    return _train_bpe(texts, vocab_size) if kind == "bpe" else _train_wordpiece(texts, vocab_size)


def _train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(token_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    byte_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special_tokens = [END_OF_TEXT, PADDING]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=byte_alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_skip_blank_texts(texts), trainer)
    template = processors.TemplateProcessing(
        single="$A",
        pair=f"$A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _train_wordpiece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    texts = list(texts) if isinstance(texts, Iterator) else texts
    tokenizer = _build_wordpiece({token: index for index, token in enumerate(ENCODER_TOKENS)})
    characters = _find_most_frequent_characters(texts, tokenizer.normalizer, min(_MAX_ALPHABET_SIZE, vocab_size // 4))
    # Ties between merges are broken by the ids of the merged tokens. The trainer numbers tokens such as `##x`
    # in the order of its hash map, which differs from call to call, but special tokens in the given order. Therefore,
    # tokens such as `##x` are passed as special tokens.
    continuations = [f"##{character}" for character in characters if not _is_punctuation(character)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*ENCODER_TOKENS, *continuations],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_skip_blank_texts(texts), trainer)
    # The tokenizer is rebuilt, because tokens such as `##x` are special tokens in the trained one.
    return PreTrainedTokenizerFast(
        tokenizer_object=_build_wordpiece(tokenizer.get_vocab()),
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _build_wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(token_models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def _find_most_frequent_characters(texts: Iterable[str], normalizer: normalizers.Normalizer, limit: int) -> list[str]:
    counts: Counter[str] = Counter()
    for text in _skip_blank_texts(texts):
        counts.update(normalizer.normalize_str(text))
    sorted_counts = sorted((-count, character) for character, count in counts.items() if not character.isspace())
    return sorted(character for _, character in sorted_counts[:limit])


def _is_punctuation(character: str) -> bool:
    """Return whether a character is punctuation for BERT's tokenizer, which makes it a separate word."""
    return unicodedata.category(character).startswith("P") or (character.isascii() and not character.isalnum())


def _skip_blank_texts(texts: Iterable[str]) -> Iterator[str]:
    are_all_blank = True
    for text in texts:
        if text.strip():
            are_all_blank = False
            yield text
    if are_all_blank:
        raise UserError("model.tokenizer=train: the text is empty, so that there is nothing to train a tokenizer on")
