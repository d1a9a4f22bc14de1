import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from istar.errors import UserError
from istar.texts.new_tokenizer import train_tokenizer

HARD_TEXT = "\n  Hällo ☃  wörld, don't!\t\u200b .  <|endoftext|> \U0001f600\r\n"


def make_corpus() -> list[str]:
    """Return texts of random words, in which very many pairs of characters are equally frequent."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyzäöü", k=generator.randint(2, 7))) for _ in range(400)]
    return [" ".join(generator.choices(words, k=12)) + "." for _ in range(100)]


def serialize(tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.backend_tokenizer.to_str())


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_equal_texts_give_equal_tokenizers(kind: str) -> None:
    """Neither the order of the texts matters nor that of the trainer's hash maps, which changes with each call."""
    texts = make_corpus()
    expected = serialize(train_tokenizer(texts, 700, kind))  # type: ignore[arg-type]
    for reordered_texts in (texts, texts[::-1], iter(sorted(texts)), iter(texts)):
        assert serialize(train_tokenizer(reordered_texts, 700, kind)) == expected  # type: ignore[arg-type]


def test_bpe_returns_every_text_exactly() -> None:
    tokenizer = train_tokenizer(make_corpus(), 400, "bpe")
    for text in (HARD_TEXT, "", " ", "a", *make_corpus()[:5]):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == 400
    assert len(tokenizer("the")["input_ids"]) == len(tokenizer.tokenize("the"))


def test_special_tokens_of_bpe() -> None:
    tokenizer = train_tokenizer(make_corpus(), 400, "bpe")
    assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.pad_token == "<|padding|>"
    assert tokenizer("ab", "cd").tokens().count("<|endoftext|>") == 1
    assert list(tokenizer("ab")) == ["input_ids", "attention_mask"]


def test_special_tokens_of_wordpiece() -> None:
    tokenizer = train_tokenizer(make_corpus(), 400, "wordpiece")
    encoded_pair = tokenizer("ab", "CD")
    tokens = encoded_pair.tokens()
    assert (tokens[0], tokens[-1], tokens.count("[SEP]")) == ("[CLS]", "[SEP]", 2)
    assert "[UNK]" not in tokens
    second_start = tokens.index("[SEP]") + 1
    assert encoded_pair["token_type_ids"] == [0] * second_start + [1] * (len(tokens) - second_start)
    assert tokenizer("CÀB").input_ids == tokenizer("cab").input_ids
    assert tokenizer.decode(tokenizer("abc").input_ids, skip_special_tokens=True) == "abc"
    special = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.cls_token, tokenizer.sep_token]
    assert special == ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    # Only these five are special: the others are text, which decoding keeps.
    assert len(tokenizer.all_special_ids) == 5
    assert tokenizer.mask_token_id == 4
    assert tokenizer.tokenize("a [MASK] b")[1] == "[MASK]"


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(make_corpus(), 500, kind)  # type: ignore[arg-type]
    tokenizer.model_max_length = 77
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (HARD_TEXT, *make_corpus()[:5]):
        assert dict(loaded(text, text[::-1])) == dict(tokenizer(text, text[::-1]))
        assert loaded.decode(loaded(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids)
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert (loaded.model_max_length, len(loaded)) == (77, len(tokenizer))


def test_little_text_gives_a_small_vocabulary() -> None:
    assert len(train_tokenizer(["a b"], 8192, "bpe")) < 262
    # Five special tokens, `a`, `b` and their continuations.
    assert len(train_tokenizer(["a b"], 8192, "wordpiece")) == 9


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_no_text(kind: str) -> None:
    with pytest.raises(UserError, match="the text is empty"):
        train_tokenizer(["", " \n"], 400, kind)  # type: ignore[arg-type]


def test_a_vocabulary_has_its_size_in_spite_of_many_characters() -> None:
    texts = ["".join(chr(0x100 + number) for number in range(900))] * 3
    assert len(train_tokenizer(texts, 300, "wordpiece")) <= 300
