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
"""The special tokens of BPE, named as in Pythia. Embeddings of padding tokens are not trained, so that a padding token
other than the end of the text is needed."""
ENCODER_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of WordPiece, named as in BERT."""

_MAX_CHARACTERS = 1_000  # of a WordPiece vocabulary, as in BERT's training


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, kind: Literal["bpe", "wordpiece"]
) -> PreTrainedTokenizerFast:
    """Train a tokenizer; equal texts give equal tokenizers.

    A byte-level BPE tokenizer returns every text exactly when it decodes its tokens. It has `<|endoftext|>` as first
    and last token, which also separates the two texts of a pair, and `<|padding|>`. A WordPiece tokenizer lowercases,
    removes accents and puts texts between `[CLS]` and `[SEP]`, as BERT's uncased one does.

    Args:
        texts: any number of texts, in any order. WordPiece reads them twice, and copies an iterator to a list first.
        vocab_size: largest number of tokens, special tokens included. Little text yields fewer.
        kind: `bpe` or `wordpiece`.

    Raises:
        UserError: if the texts contain nothing but white space.
    """
    return _train_bpe(texts, vocab_size) if kind == "bpe" else _train_wordpiece(texts, vocab_size)


def _train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(token_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [END_OF_TEXT, PADDING]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=bytes_, show_progress=False
    )
    tokenizer.train_from_iterator(_not_blank(texts), trainer)
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
    tokenizer = _wordpiece({token: number for number, token in enumerate(ENCODER_TOKENS)})
    characters = _characters(texts, tokenizer.normalizer, min(_MAX_CHARACTERS, vocab_size // 4))
    # Merges of equal frequency are chosen by the numbers of their parts. The trainer numbers `##x` in the order of its
    # hash map, which differs from call to call, unless they are special tokens: these it numbers in the order given.
    continued = [f"##{character}" for character in characters if not _is_separate(character)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*ENCODER_TOKENS, *continued],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_not_blank(texts), trainer)
    # Built anew, because `##x` are special tokens in the tokenizer that was trained.
    return PreTrainedTokenizerFast(
        tokenizer_object=_wordpiece(tokenizer.get_vocab()),
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    """Return BERT's uncased tokenizer with another vocabulary."""
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


def _characters(texts: Iterable[str], normalizer: normalizers.Normalizer, most: int) -> list[str]:
    """Return the most frequent characters of the texts, without white space, in the order of their code points."""
    counts: Counter[str] = Counter()
    for text in _not_blank(texts):
        counts.update(normalizer.normalize_str(text))
    frequent = sorted((-count, character) for character, count in counts.items() if not character.isspace())
    return sorted(character for _, character in frequent[:most])


def _is_separate(character: str) -> bool:
    """Return whether BERT takes a character for a word of its own: punctuation."""
    return unicodedata.category(character).startswith("P") or (character.isascii() and not character.isalnum())


def _not_blank(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts that are not blank; raise a `UserError` at the end if all are."""
    is_empty = True
    for text in texts:
        if text.strip():
            is_empty = False
            yield text
    if is_empty:
        raise UserError("model.tokenizer=train: the text is empty, so that there is nothing to train a tokenizer on")
