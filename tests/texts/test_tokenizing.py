"""Tokenization of texts with letters that a tokenizer lacks, and errors that are not about texts."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from istar.embeddings.wordsim import word_vectors
from istar.errors import UserError
from istar.finetune.tasks.features import featurize
from istar.models import pretrained, tiny
from istar.models.model_source import ModelSource
from istar.runs.tasks import TASKS
from istar.texts import tokenizing
from istar.texts.corpus import Blocks
from istar.texts.new_tokenizer import train_tokenizer
from tests.models.test_special_tokens import BERT, CLS, SEP, VOCABULARY, A, C, G, T, make_template, make_tokenizer


@pytest.mark.parametrize(
    "model", [models.WordLevel(VOCABULARY), models.WordPiece(VOCABULARY), models.BPE(VOCABULARY, [], unk_token="?")]
)
def test_only_texts_of_other_letters_are_refused(tmp_path: Path, model: Any) -> None:
    """A tokenizer without an unknown token is good for texts of its alphabet."""
    saved = make_tokenizer(make_template(*BERT), model)
    saved.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    saved.save_pretrained(tmp_path)
    tokenizer = pretrained.load_tokenizer(ModelSource(str(tmp_path)))
    [block] = Blocks(tokenizer, 8)(["ACGT"])
    datasets = [Dataset.from_dict({"sentence": [text], "label": [1]}) for text in ("ACGT", "ACNT")]
    features = [partial(featurize, TASKS["sst2"], x, tokenizer, 8, training=True, cache_dir=None) for x in datasets]
    assert block.tokens == features[0]()[0]["input_ids"] == [CLS, A, C, G, T, SEP]
    for read in (lambda: list(Blocks(tokenizer, 8)(["ACGT", "ACNT"])), features[1]):
        with pytest.raises(UserError, match=r"no token for a part of the text: .*vocabulary"):
            read()
    with pytest.raises(UserError, match="the tokenizer has no token"):
        word_vectors(["ACNT"], tokenizer, torch.eye(8))


def test_other_errors_of_a_tokenizer_are_not_converted() -> None:
    with pytest.raises(TypeError):
        list(tokenizing.tokenize([3], make_tokenizer(None)))  # type: ignore[list-item]


TEXTS = ["the cat sees a dog", "", " a  Dög\t sees [SEP] 猫 . ", "<|endoftext|> the <unk>", "the house " * 300]


def make_unigram_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like those of SentencePiece."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(TEXTS, trainers.UnigramTrainer(special_tokens=["<unk>"], unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


MAKERS = {
    "tiny BERT": partial(tiny.make_tokenizer, ["the", "cat"]),
    "WordPiece": partial(train_tokenizer, TEXTS, 60, "wordpiece"),
    "byte-level BPE": partial(train_tokenizer, TEXTS, 300, "bpe"),
    "Unigram": make_unigram_tokenizer,
    "without a backend": ByT5Tokenizer,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("splits_special_tokens", [False, True])
def test_the_ids_are_those_of_the_call(name: str, splits_special_tokens: bool) -> None:
    tokenizer: Any = MAKERS[name]()
    tokenizer.split_special_tokens = splits_special_tokens
    expected = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in TEXTS]
    assert list(tokenizing.tokenize(TEXTS, tokenizer)) == expected
    assert len({tuple(ids) for ids in expected}) == len(TEXTS)


def test_truncation_and_padding_by_the_backend_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a call with `truncation=True, padding=True`, also if it comes in between."""
    monkeypatch.setattr(tokenizing, "_TOKENIZER_BATCH", 2)
    tokenizer: Any = MAKERS["WordPiece"]()
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    ids = tokenizing.tokenize(TEXTS, tokenizer)
    for text_ids in expected:
        tokenizer.backend_tokenizer.enable_truncation(2)
        tokenizer.backend_tokenizer.enable_padding(length=9)
        assert next(ids) == text_ids
        tokenizer(TEXTS, truncation=True, padding="max_length", max_length=4)


class CountingTokenizer(PreTrainedTokenizerFast):
    """Counts the characters that it is called with, and may change texts as a subclass does."""

    characters, changes = 0, False

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.characters += sum(map(len, text))
        return super().__call__([t.replace("cat", "dog") for t in text] if self.changes else text, *args, **kwargs)


@pytest.mark.parametrize("changes", [False, True])
def test_only_a_tokenizer_that_changes_texts_is_called_with_all(changes: bool) -> None:
    tokenizer = CountingTokenizer(tokenizer_object=MAKERS["WordPiece"]().backend_tokenizer)
    tokenizer.changes = changes
    long_texts = ["the cat sees a dog " * 100, *TEXTS]
    expected = [tokenizer([text], add_special_tokens=False)["input_ids"][0] for text in long_texts]
    tokenizer.characters = 0
    assert list(tokenizing.tokenize(long_texts, tokenizer)) == expected
    trial, total = tokenizing._TRIAL_CHARACTERS, sum(map(len, long_texts))
    assert tokenizer.characters == (trial + total if changes else trial)
