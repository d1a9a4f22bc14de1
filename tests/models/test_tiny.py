"""The project's own tokenizer and tiny BERT: complete on ASCII, and the same after saving and loading."""

import string
from pathlib import Path

import pytest
from transformers import AutoTokenizer, BertTokenizer

from istar.models import tiny

WORDS = ["lamp", "garden", "Anna"]


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return tiny.make_tokenizer(WORDS)


@pytest.mark.parametrize(
    "text",
    [string.printable, "It cost $3.99 (don't ask!) -- e.g. a#b@c_d~e|f\\g^h", "x" + "y" * 98, "r\u00e9sum\u00e9"],
)
def test_no_unknown_pieces(tokenizer: BertTokenizer, text: str) -> None:
    assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_known_words_are_one_piece_and_others_are_spelt(tokenizer: BertTokenizer) -> None:
    assert tokenizer.tokenize("ANNA's lamps") == ["anna", "'", "s", "lamp", "##s"]


def test_pairs_are_laid_out_as_in_bert(tokenizer: BertTokenizer) -> None:
    encoded = tokenizer("Anna", "the garden")
    pieces = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert pieces == ["[CLS]", "anna", "[SEP]", "t", "##h", "##e", "garden", "[SEP]"]
    assert encoded["token_type_ids"] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert encoded["attention_mask"] == [1] * len(pieces)


def test_offsets_point_into_the_text(tokenizer: BertTokenizer) -> None:
    text = "In the Garden, Anna\tlost her lamp."
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    pieces = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    spans = [text[start:end].lower() for start, end in encoded["offset_mapping"]]
    assert spans == [piece.removeprefix("##") for piece in pieces]


def test_ids_do_not_depend_on_repetitions(tokenizer: BertTokenizer) -> None:
    assert tiny.make_tokenizer([*WORDS, *WORDS, "a", "LAMP"]).get_vocab() == tokenizer.get_vocab()
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert tokenizer.pad_token_id == 0


def test_tokenizer_survives_saving(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast
    assert loaded.model_max_length == 512
    assert loaded.get_vocab() == tokenizer.get_vocab()
    pair = ("Anna's lamp, 3 inches!", "in the garden")
    encoded, expected = (tokenize(*pair, return_offsets_mapping=True) for tokenize in (loaded, tokenizer))
    assert dict(encoded) == dict(expected)
