"""From documents to blocks, labels and batches, and the metrics of all predicted tokens."""

import math
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from istar.errors import NonFiniteError, UserError
from istar.finetune.tasks.blocks import Corpus, cut_blocks, load_or_tokenize_corpus
from istar.finetune.tasks.language_modelling import (
    BlockCollator,
    BlockRows,
    LanguageModelEvaluator,
    Masking,
    find_block_tokens,
    perplexity,
)
from istar.models import tiny
from istar.models.special_tokens import find_separator_id
from istar.regularizers.points import IGNORED_LABEL
from istar.runs.tasks import TASKS

TEXTS = ["The cat sat on a mat.", "It was raining.", "A dog barked at the cat again and again."]
CLM, MLM = TASKS["clm"], TASKS["mlm"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.make_tokenizer(["the", "cat", "sat", "on", "a", "mat", "it", "was", "raining", "dog", "again"])


@pytest.fixture
def corpus(tokenizer: Any, tmp_path: Path) -> Corpus:
    return load_or_tokenize_corpus(Dataset.from_dict({"text": TEXTS}), tokenizer, tmp_path)


def make_rows(spec: Any, corpus: Corpus, tokenizer: Any, length: int = 8, packing: bool = True) -> BlockRows:
    masking = Masking(tokenizer) if spec is MLM else None
    return BlockRows(cut_blocks(corpus, length, *find_block_tokens(spec, tokenizer), packing), masking, seed=7)


def test_a_corpus_is_the_tokens_of_each_document_and_a_separator(corpus: Corpus, tokenizer: Any) -> None:
    expected = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.sep_token_id] for text in TEXTS]
    assert corpus.tokens.tolist() == list(chain(*expected))
    assert np.diff(corpus.starts).tolist() == [len(ids) for ids in expected]


def test_a_corpus_is_written_once_for_each_text_and_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    documents = Dataset.from_dict({"text": TEXTS})
    load_or_tokenize_corpus(documents, tokenizer, tmp_path)
    [folder] = (tmp_path / "tokens").iterdir()
    write_time = (folder / "tokens.uint16").stat().st_mtime_ns
    load_or_tokenize_corpus(Dataset.from_dict({"text": TEXTS}), tokenizer, tmp_path)
    assert (folder / "tokens.uint16").stat().st_mtime_ns == write_time
    load_or_tokenize_corpus(documents.select([0, 1]), tokenizer, tmp_path)
    load_or_tokenize_corpus(documents, tiny.make_tokenizer(["cat"]), tmp_path)
    assert len(list((tmp_path / "tokens").iterdir())) == 3


def test_a_damaged_corpus_is_written_again(tokenizer: Any, tmp_path: Path) -> None:
    documents = Dataset.from_dict({"text": TEXTS})
    expected = load_or_tokenize_corpus(documents, tokenizer, tmp_path).tokens.tolist()
    [folder] = (tmp_path / "tokens").iterdir()
    (folder / "tokens.uint16").write_bytes(b"short")
    assert load_or_tokenize_corpus(documents, tokenizer, tmp_path).tokens.tolist() == expected


def test_a_process_that_is_late_removes_no_corpus_of_another(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no corpus; the other one writes it before this one has."""
    documents = Dataset.from_dict({"text": TEXTS})

    def write_earlier(tokenizer: Any) -> int | None:
        monkeypatch.undo()
        load_or_tokenize_corpus(documents, tokenizer, tmp_path)
        [path] = tmp_path.glob("tokens/[!.]*/tokens.*")
        (tmp_path / "link").hardlink_to(path)
        return find_separator_id(tokenizer)

    monkeypatch.setattr("istar.finetune.tasks.blocks.find_separator_id", write_earlier)
    corpus = load_or_tokenize_corpus(documents, tokenizer, tmp_path)
    assert corpus.tokens.tolist() == load_or_tokenize_corpus(documents, tokenizer, tmp_path).tokens.tolist()
    [path] = tmp_path.glob("tokens/*/tokens.*")
    assert path.samefile(tmp_path / "link")


def test_a_cache_that_cannot_be_written_is_one_line(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a file")
    with pytest.raises(UserError, match=r"^the tokens cannot be cached: .*data\.cache_dir$"):
        load_or_tokenize_corpus(Dataset.from_dict({"text": TEXTS}), tokenizer, tmp_path)


def test_blocks_of_a_causal_model_begin_with_the_special_token_and_end_with_text(
    corpus: Corpus, tokenizer: Any
) -> None:
    rows = make_rows(CLM, corpus, tokenizer)
    assert rows.lengths.tolist() == [8] * len(rows)
    text_ids = np.concatenate([rows[index]["input_ids"][1:] for index in range(len(rows))])
    assert text_ids.tolist() == corpus.tokens[: len(text_ids)].tolist()
    assert len(corpus.tokens) - len(text_ids) < 7
    for index in range(len(rows)):
        row = rows[index]
        assert row["input_ids"][0] == tokenizer.cls_token_id
        assert row["labels"].tolist() == [IGNORED_LABEL, *row["input_ids"][1:]]
        assert row["feature_id"] == index


def test_blocks_of_a_masked_model_have_both_special_tokens(corpus: Corpus, tokenizer: Any) -> None:
    rows = make_rows(MLM, corpus, tokenizer)
    for index in range(len(rows)):
        row = rows[index]
        original = np.where(row["labels"] == IGNORED_LABEL, row["input_ids"], row["labels"])
        assert original[[0, -1]].tolist() == [tokenizer.cls_token_id, tokenizer.sep_token_id]
        assert original[1:-1].tolist() == corpus.tokens[6 * index : 6 * index + 6].tolist()
        assert (row["labels"] != IGNORED_LABEL).any()


def test_tokens_around_a_text_are_not_masked_even_if_texts_may_contain_them(corpus: Corpus, tokenizer: Any) -> None:
    [cat, dog] = tokenizer.convert_tokens_to_ids(["cat", "dog"])
    for masking in (Masking(tokenizer), None):
        rows = BlockRows(cut_blocks(corpus, 12, [cat] * 4, [dog] * 2), masking, seed=7)
        for row in (rows.training_row(index, epoch) for index in range(len(rows)) for epoch in range(40)):
            assert [*row["input_ids"][:4], *row["input_ids"][-2:]] == [cat] * 4 + [dog] * 2
            assert [*row["labels"][:4], *row["labels"][-2:]] == [IGNORED_LABEL] * 6
            assert (row["labels"] != IGNORED_LABEL).any()


def test_masks_are_new_in_each_epoch_and_the_same_in_validation(corpus: Corpus, tokenizer: Any) -> None:
    rows, other_rows = (
        BlockRows(make_rows(MLM, corpus, tokenizer, 32).blocks, Masking(tokenizer), seed) for seed in (7, 8)
    )
    assert rows[0]["labels"].tolist() == other_rows[0]["labels"].tolist() == rows[0]["labels"].tolist()
    epochs = [rows.training_row(0, epoch)["input_ids"].tolist() for epoch in range(20)]
    assert epochs == [rows.training_row(0, epoch)["input_ids"].tolist() for epoch in range(20)]
    assert len({tuple(ids) for ids in epochs}) > 10
    assert epochs != [other_rows.training_row(0, epoch)["input_ids"].tolist() for epoch in range(20)]


def test_a_text_shorter_than_a_block_is_one_line(corpus: Corpus, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"^the text has \d+ tokens, which is less than one block of 64; .*packing"):
        make_rows(CLM, corpus, tokenizer, 64)
    assert len(make_rows(CLM, corpus, tokenizer, 64, packing=False)) == len(TEXTS)


def test_batches_are_padded_on_the_right(corpus: Corpus, tokenizer: Any) -> None:
    rows = make_rows(CLM, corpus, tokenizer, 64, packing=False)
    batch = BlockCollator(tokenizer.pad_token_id, None, is_causal=True)([rows[0], rows[1]])
    for batch_row, index in enumerate((0, 1)):
        length = len(rows[index]["input_ids"])
        assert batch["input_ids"][batch_row, :length].tolist() == rows[index]["input_ids"].tolist()
        assert set(batch["input_ids"][batch_row, length:].tolist()) <= {tokenizer.pad_token_id}
        padding = batch["labels"].shape[1] - length
        assert batch["labels"][batch_row].tolist() == [*rows[index]["labels"], *[IGNORED_LABEL] * padding]
        assert batch["attention_mask"][batch_row].tolist() == [1] * length + [0] * padding
    assert batch["feature_id"].tolist() == [0, 1]


def test_the_first_token_of_an_isolated_document_is_not_predicted(corpus: Corpus, tokenizer: Any) -> None:
    rows = make_rows(CLM, corpus, tokenizer, 16)
    isolated_documents: list[torch.Tensor] = []

    def isolate(documents: torch.Tensor) -> dict[str, torch.Tensor]:
        isolated_documents.append(documents)
        return {"position_ids": documents}

    batch = BlockCollator(0, isolate, is_causal=True)([rows[0]])
    starts = [
        position for position in range(1, 16) if rows[0]["documents"][position] != rows[0]["documents"][position - 1]
    ]
    assert starts
    expected = rows[0]["labels"].copy()
    expected[starts] = IGNORED_LABEL
    assert batch["labels"][0].tolist() == expected.tolist()
    assert isolated_documents[0][0].tolist() == rows[0]["documents"].tolist()
    assert "attention_mask" not in batch
    masked_batch = BlockCollator(0, isolate, is_causal=False)([rows[0]])
    assert masked_batch["labels"][0].tolist() == rows[0]["labels"].tolist()


def test_metrics_are_those_of_all_tokens() -> None:
    losses = [[0.5, 1.5], [2.0], [0.1, 0.2, 0.3]]
    correct = [[1, 0], [0], [1, 1, 0]]
    sums = {row: np.array([sum(values), len(values), sum(correct[row])]) for row, values in enumerate(losses)}
    evaluation = LanguageModelEvaluator(MLM, 3)(dict(reversed(sums.items())))
    all_losses = list(chain(*losses))
    assert evaluation.metrics["loss"] == pytest.approx(sum(all_losses) / len(all_losses), rel=1e-15)
    assert evaluation.metrics["perplexity"] == pytest.approx(math.exp(sum(all_losses) / len(all_losses)), rel=1e-14)
    assert evaluation.metrics["accuracy"] == 0.5
    assert LanguageModelEvaluator(CLM, 3)(sums).metrics.keys() == {"perplexity", "loss"}
    with pytest.raises(ValueError, match="4 blocks"):
        LanguageModelEvaluator(MLM, 4)(sums)
    with pytest.raises(NonFiniteError, match=r"^task mlm: the loss of the validation set is nan"):
        LanguageModelEvaluator(MLM, 1)({0: np.array([math.nan, 1, 0])})


def test_the_baseline_is_the_frequency_of_each_token() -> None:
    tokens = np.array([3, 1, 3, 3, 2, 1], dtype=np.uint16)
    corpus = Corpus(tokens, np.array([0, 6]))
    labels = [torch.tensor([[3, IGNORED_LABEL], [0, 1]]), torch.tensor([[3]])]
    metrics = LanguageModelEvaluator(MLM, 3).unigram_baseline(corpus, labels, vocabulary_size=5)
    counts = Counter(tokens.tolist())
    losses = [-math.log((counts[token] + 1) / (6 + 5)) for token in (3, 0, 1, 3)]
    assert metrics["loss"] == pytest.approx(sum(losses) / 4, rel=1e-14)
    assert metrics["accuracy"] == 0.5


def test_a_perplexity_may_be_infinite() -> None:
    assert perplexity(1000.0) == math.inf
    assert perplexity(0.0) == 1.0


def test_the_first_blocks(corpus: Corpus) -> None:
    blocks = cut_blocks(corpus, 4)
    rows = BlockRows(blocks, None, seed=1)
    assert len(rows.take_first(2)) == 2
    assert rows.take_first(2)[1]["input_ids"].tolist() == rows[1]["input_ids"].tolist()
    assert len(rows.take_first(10**6)) == len(rows)
