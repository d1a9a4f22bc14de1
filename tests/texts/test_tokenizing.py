"""Tokenization of texts with letters that a tokenizer lacks, and errors that are not about texts."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import models, pre_tokenizers

from istar.embeddings.wordsim import word_vectors
from istar.errors import UserError
from istar.finetune.tasks.features import featurize
from istar.models import pretrained
from istar.models.model_source import ModelSource
from istar.runs.tasks import TASKS
from istar.texts import tokenizing
from istar.texts.corpus import Blocks
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
