"""A tokenizer whose tokens are characters, and small data sets of the kinds of tasks."""

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from istar.finetune.tasks.loading import find_source, read_splits
from istar.runs.tasks import TaskSpec

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def make_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer like BERT's whose tokens are single characters."""
    characters = string.ascii_lowercase + string.digits + string.punctuation + "é½"
    tokens = [*SPECIAL.values(), *characters, *(f"##{character}" for character in characters)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], "model_max_length": 512}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL | names | settings)


def load_splits(spec: TaskSpec, data_dir: str | Path | None, splits: Sequence[str]) -> dict[str, Dataset]:
    return read_splits(find_source(spec, data_dir, splits), spec, splits)


def make_questions(words: list[str], prefix: str, suffix: str) -> Dataset:
    """Return a question for each word, which is in the middle of its context and one of two answers."""
    contexts = [f"{prefix}buy {word} now{suffix}" for word in words]
    starts = [context.index(word) for word, context in zip(words, contexts, strict=True)]
    answers = [
        {"text": [word, f"buy {word}"], "answer_start": [start, start - 4]}
        for word, start in zip(words, starts, strict=True)
    ]
    ids = [f"q{row}" for row in range(len(words))]
    return Dataset.from_dict({"id": ids, "question": ["what?"] * len(words), "context": contexts, "answers": answers})
