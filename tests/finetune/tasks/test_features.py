import json
import multiprocessing
import pickle
import re
import warnings
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import normalizers, processors
from torch.utils.data import DataLoader
from transformers import BertConfig, GPT2Config, PreTrainedTokenizerFast, RobertaConfig, XLNetConfig

from istar.errors import UserError
from istar.finetune.tasks import features
from istar.finetune.tasks.features import Collator, FeatureRows, featurize, limit_max_length
from istar.runs.tasks import TASKS
from tests.finetune.tasks.builders import make_tokenizer
from tests.waiting import SECONDS

RTE, STSB, SQUAD = TASKS["rte"], TASKS["stsb"], TASKS["squad"]


def pairs(count: int = 7, **columns) -> Dataset:
    texts = ["ab " * (row + 1) for row in range(count)]
    data = {"sentence1": texts, "sentence2": texts[::-1], "label": [row % 2 for row in range(count)]}
    return Dataset.from_dict(data | columns)


def questions(count: int = 5) -> Dataset:
    contexts = ["xy " * 20 + f"n{row} " + "uv " * (3 * row) for row in range(count)]
    return Dataset.from_dict(
        {
            "id": [f"q{row}" for row in range(count)],
            "question": ["who is it?"] * count,
            "context": contexts,
            "answers": [{"text": [f"n{row}"], "answer_start": [60]} for row in range(count)],
        }
    )


def are_equal(first: Dataset, second: Dataset) -> bool:
    return first.features == second.features and first[:] == second[:]


@pytest.fixture
def tokenizations(monkeypatch) -> list[str]:
    """Return a list that grows by one with each split that is tokenized instead of read from the cache."""
    calls: list[str] = []
    tokenize = features._tokenize_split

    def record_and_tokenize(spec, rows, encode):
        calls.append(spec.name)
        return tokenize(spec, rows, encode)

    monkeypatch.setattr(features, "_tokenize_split", record_and_tokenize)
    return calls


# --- features -----------------------------------------------------------------------------------------------


def test_features_of_pairs_are_the_tokenizer_s():
    tokenizer, data = make_tokenizer(), pairs()
    tokenized = featurize(RTE, data, tokenizer, 16, training=True, cache_dir=None)
    expected = tokenizer(data["sentence1"][:], data["sentence2"][:], truncation=True, max_length=16)
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert tokenized[name][:] == expected[name]
    assert tokenized["labels"][:] == data["label"][:]
    assert tokenized["feature_id"][:] == tokenized["example_id"][:] == list(range(len(data)))
    assert tokenized["length"][:] == [len(ids) for ids in expected["input_ids"]]
    assert max(tokenized["length"][:]) == 16
    assert are_equal(tokenized, featurize(RTE, data, tokenizer, 16, training=False, cache_dir=None))


def test_labels_are_numbers_or_absent():
    tokenizer = make_tokenizer(model_input_names=["input_ids", "attention_mask"])
    scores = featurize(STSB, pairs(label=[0.5] * 7), tokenizer, 24, training=True, cache_dir=None)
    assert scores.features["labels"].dtype == "float32"
    assert "token_type_ids" not in scores.column_names
    unlabelled = featurize(RTE, pairs().remove_columns("label"), tokenizer, 24, training=False, cache_dir=None)
    assert "labels" not in unlabelled.column_names


def test_features_of_spans():
    data = questions()
    training = featurize(SQUAD, data, make_tokenizer(), 48, training=True, doc_stride=8, cache_dir=None)
    evaluation = featurize(SQUAD, data, make_tokenizer(), 48, training=False, doc_stride=8, cache_dir=None)
    assert training["input_ids"][:] == evaluation["input_ids"][:]
    assert len(training) > len(data)
    assert training["feature_id"][:] == list(range(len(training)))
    assert set(training.column_names) - set(evaluation.column_names) == {"start_positions", "end_positions"}
    assert set(evaluation.column_names) - set(training.column_names) == {"offset_mapping"}
    for row in evaluation:
        context = data[row["example_id"]]["context"]
        for (start, end), token_type, mask in zip(
            row["offset_mapping"], row["token_type_ids"], row["attention_mask"], strict=True
        ):
            assert mask == 1
            assert (start, end) == (-1, -1) or (token_type == 1 and context[start:end].strip())
    unlabelled = data.remove_columns("answers")
    assert are_equal(
        evaluation, featurize(SQUAD, unlabelled, make_tokenizer(), 48, training=False, doc_stride=8, cache_dir=None)
    )


def test_rows_are_numbered_over_batches(monkeypatch):
    expected = featurize(SQUAD, questions(), make_tokenizer(), 48, training=False, cache_dir=None)
    monkeypatch.setattr(features, "_BATCH_ROWS", 2)
    assert are_equal(expected, featurize(SQUAD, questions(), make_tokenizer(), 48, training=False, cache_dir=None))


@pytest.mark.parametrize(
    ("spec", "columns"),
    [
        (RTE, {"sentence1": ["a", "", "a", "", "a"], "sentence2": ["a", "a", "", "\x01", "a"], "label": [0] * 5}),
        (SQUAD, {"question": ["a", "", "a", " ", "a"], "context": ["b", "b", "", "", "b"]}),
    ],
)
def test_a_text_without_a_token_is_refused(spec, columns, monkeypatch):
    monkeypatch.setattr(features, "_BATCH_ROWS", 2)
    data, tokenizer = Dataset.from_dict(columns, split="validation"), make_tokenizer()
    # With special tokens, no text is empty.
    assert min(featurize(spec, data, tokenizer, 48, training=False, cache_dir=None)["length"]) > 1
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    first_column, second_column = spec.text_columns
    expected = (
        f"split validation, example 4 of 5: the tokenizer makes no token of {first_column} "
        f"{columns[first_column][3]!r}, {second_column} {columns[second_column][3]!r}; remove this example"
    )
    with pytest.raises(UserError, match=re.escape(expected)):
        featurize(spec, data, tokenizer, 48, training=False, cache_dir=None)
    others = data.select([0, 1, 2, 4])
    assert 0 not in featurize(spec, others, tokenizer, 48, training=False, cache_dir=None)["length"]


# --- cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "data"), [(RTE, pairs()), (SQUAD, questions())])
def test_the_second_run_reads(spec, data, tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    first = featurize(spec, data, tokenizer, 48, training=True, cache_dir=tmp_path)
    tokenizer(["something"], truncation=True, max_length=9, padding="max_length")  # changes the tokenizer's state

    def refuse(*_, **__):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", refuse)
    second = featurize(spec, data, tokenizer, 48, training=True, cache_dir=tmp_path)
    assert are_equal(first, second)
    assert second.cache_files  # memory-mapped
    assert are_equal(second, featurize(spec, data, make_tokenizer(), 48, training=True, cache_dir=tmp_path))
    (path,) = (tmp_path / "features").iterdir()  # one file and no temporary one
    assert len(path.stem) == 64


def test_the_content_is_the_key_however_it_is_stored(tmp_path, tokenizations):
    data = pairs(7, other=list(range(7)))
    saved_folder = tmp_path / "disk"
    data.save_to_disk(saved_folder, num_shards=3)
    variants = [
        data,
        pairs(7),
        datasets.concatenate_datasets([data.select(range(2)), data.select(range(2, 7))]),
        datasets.concatenate_datasets([data, data]).select([0, 8, 2, 10, 4, 12, 6]),
        data.select(range(6, -1, -1)).select(range(6, -1, -1)),
        data.with_format("numpy"),
        Dataset.load_from_disk(saved_folder),
    ]
    for variant in variants:
        featurize(RTE, variant, make_tokenizer(), 24, training=True, cache_dir=tmp_path / "cache")
    assert len(tokenizations) == 1
    # For classification, training and evaluation have the same features.
    featurize(RTE, data, make_tokenizer(), 24, training=False, cache_dir=tmp_path / "cache")
    assert len(tokenizations) == 1


def test_whatever_acts_on_features_changes_the_key(tmp_path, tokenizations):
    cased = make_tokenizer()
    cased.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    texts = pairs()["sentence1"][:]
    variants = [
        (pairs(), make_tokenizer(), 24),
        (pairs(sentence1=[*texts[:-1], "other"]), make_tokenizer(), 24),
        (pairs(sentence1=["", texts[0] + texts[1], *texts[2:]]), make_tokenizer(), 24),
        (pairs(label=[1] * 7), make_tokenizer(), 24),
        (pairs().remove_columns("label"), make_tokenizer(), 24),
        (pairs(6), make_tokenizer(), 24),
        (pairs(), make_tokenizer(), 25),
        (pairs(), cased, 24),
        (pairs(), make_tokenizer(truncation_side="left"), 24),
        (pairs(), make_tokenizer(model_input_names=["input_ids", "attention_mask"]), 24),
    ]
    for data, tokenizer, max_length in variants:
        featurize(RTE, data, tokenizer, max_length, training=True, cache_dir=tmp_path)
    assert len(tokenizations) == len(variants)
    span_settings = [(True, 8), (False, 8), (False, 9)]
    for training, stride in span_settings:
        featurize(SQUAD, questions(), cased, 48, training=training, doc_stride=stride, cache_dir=tmp_path)
    featurize(replace(RTE, labels=("a", "b", "c")), pairs(), make_tokenizer(), 24, training=True, cache_dir=tmp_path)
    assert len(tokenizations) == len(variants) + len(span_settings) + 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, empty, Path.unlink])
def test_a_damaged_cache_is_made_anew(damage, tmp_path, tokenizations):
    arguments = RTE, pairs(), make_tokenizer(), 24
    first = featurize(*arguments, training=True, cache_dir=tmp_path)[:]
    (path,) = (tmp_path / "features").iterdir()
    damage(path)
    for _ in range(2):
        assert featurize(*arguments, training=True, cache_dir=tmp_path)[:] == first
    assert len(tokenizations) == 2
    assert list((tmp_path / "features").iterdir()) == [path]


def test_a_file_in_the_way_of_the_cache_costs_only_the_cache(tmp_path, caplog):
    blocking_file = tmp_path / "file"
    blocking_file.touch()
    tokenized = featurize(RTE, pairs(), make_tokenizer(), 24, training=True, cache_dir=blocking_file)
    assert len(tokenized) == 7
    assert "stay in memory" in caplog.text


def featurize_in_race(cache_dir: Path, barrier, results) -> None:
    tokenize = features._tokenize_split

    def tokenize_and_wait(*arguments):
        tokenized = tokenize(*arguments)
        barrier.wait(SECONDS)  # every process has found no valid cache and now writes one
        return tokenized

    features._tokenize_split = tokenize_and_wait
    tokenized = featurize(RTE, pairs(), make_tokenizer(), 24, training=True, cache_dir=cache_dir)
    results.put(json.dumps(tokenized[:]))


@pytest.mark.parametrize("damaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_processes_may_race(damaged, tmp_path):
    expected = featurize(RTE, pairs(), make_tokenizer(), 24, training=True, cache_dir=None)
    if damaged:
        featurize(RTE, pairs(), make_tokenizer(), 24, training=True, cache_dir=tmp_path)
        truncate(next((tmp_path / "features").iterdir()))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, Python >= 3.12
        processes = [context.Process(target=featurize_in_race, args=(tmp_path, barrier, results)) for _ in range(3)]
        for process in processes:
            process.start()
    for _ in processes:
        assert json.loads(results.get(timeout=SECONDS)) == expected[:]
    for process in processes:
        process.join(SECONDS)
        assert process.exitcode == 0
    assert len(list((tmp_path / "features").iterdir())) == 1
    assert are_equal(featurize(RTE, pairs(), make_tokenizer(), 24, training=True, cache_dir=tmp_path), expected)


# --- lengths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "default_length", "expected"),
    [
        (BertConfig(max_position_embeddings=64), 128, 64),
        (BertConfig(max_position_embeddings=64), 32, 32),
        (BertConfig(max_position_embeddings=4096), 4096, 512),  # the tokenizer's limit
        (RobertaConfig(max_position_embeddings=130), 512, 128),
        (GPT2Config(n_positions=100), 512, 100),
        (XLNetConfig(), 512, 512),  # relative positions
    ],
)
def test_the_longest_feature(config, default_length, expected, caplog):
    """A default above the limit is lowered with a warning, and a requested length above it is refused."""
    assert limit_max_length(make_tokenizer(), config, None, default_length) == expected
    assert caplog.messages == [
        f"the task's default of {default_length} tokens is lowered to {expected}, the most that the model accepts"
    ] * (expected < default_length)
    caplog.clear()
    assert limit_max_length(make_tokenizer(), config, expected, 999) == expected
    if expected < default_length:
        message = f"^task.max_length={default_length}: the model accepts at most {expected} tokens .*; lower task.max_l"
        with pytest.raises(UserError, match=message):
            limit_max_length(make_tokenizer(), config, default_length, 16)
    assert not caplog.records


def test_a_tokenizer_without_a_limit_and_a_limit_without_room():
    assert limit_max_length(make_tokenizer(model_max_length=int(1e30)), BertConfig(), None, 4096) == 512
    assert limit_max_length(make_tokenizer(model_max_length=int(1e30)), XLNetConfig(), 4096, 128) == 4096
    with pytest.raises(UserError, match="max_length=7"):
        limit_max_length(make_tokenizer(), BertConfig(), 7, 128)
    with pytest.raises(UserError, match="the model accepts at most 7 tokens"):
        limit_max_length(make_tokenizer(), BertConfig(max_position_embeddings=7), None, 128)


def test_roberta_s_longest_feature_has_a_position():
    from transformers import RobertaModel

    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}
    config = RobertaConfig(max_position_embeddings=20, **sizes)
    model = RobertaModel(config)
    longest = limit_max_length(make_tokenizer(), config, None, 512)
    model(torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, longest + 1), 5))


# --- collator -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_padded_as_the_tokenizer_pads(side):
    tokenizer = make_tokenizer(padding_side=side)
    data = featurize(RTE, pairs(), tokenizer, 64, training=True, cache_dir=None)
    rows = [data[2], data[0], data[5]]
    names = ("input_ids", "attention_mask", "token_type_ids")
    expected = tokenizer.pad([{name: row[name] for name in names} for row in rows], return_tensors="pt")
    batch = Collator(tokenizer)(rows)
    for name in names:
        assert batch[name].dtype == torch.long
        torch.testing.assert_close(batch[name], expected[name])
    assert set(batch) == {*names, "labels", "feature_id"}
    assert batch["feature_id"].tolist() == [2, 0, 5]
    assert batch["labels"].dtype == torch.long
    assert Collator(tokenizer)(rows[1:2])["input_ids"].shape[1] == rows[1]["length"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_positions_follow_the_padding(side):
    tokenizer = make_tokenizer(padding_side=side)
    data = featurize(SQUAD, questions(), tokenizer, 200, training=True, cache_dir=None)
    batch = Collator(tokenizer)(list(data))
    for row in range(len(data)):
        first, last = batch["start_positions"][row], batch["end_positions"][row]
        answer = batch["input_ids"][row, first : last + 1]
        assert tokenizer.decode(answer).replace("##", "").replace(" ", "") == f"n{row}"
    evaluation = featurize(SQUAD, questions(), tokenizer, 200, training=False, cache_dir=None)
    names = {"input_ids", "attention_mask", "token_type_ids", "feature_id"}
    assert set(Collator(tokenizer)([evaluation[0]])) == set(FeatureRows(evaluation)[0]) == names


def test_the_collator_is_small_and_works_in_a_loader():
    collator = Collator(make_tokenizer())
    assert len(pickle.dumps(collator)) < 500
    data = featurize(RTE, pairs(), make_tokenizer(), 64, training=True, cache_dir=None)
    batches = list(DataLoader(data, batch_size=3, collate_fn=pickle.loads(pickle.dumps(collator))))
    assert [len(batch["labels"]) for batch in batches] == [3, 3, 1]
    assert batches[0]["input_ids"].shape[1] == max(data["length"][:3])
    numpy_data = data.with_format("numpy")
    for list_batch, numpy_batch in zip(batches, DataLoader(numpy_data, batch_size=3, collate_fn=collator), strict=True):
        for name, values in list_batch.items():
            assert values.dtype == numpy_batch[name].dtype
            np.testing.assert_array_equal(values, numpy_batch[name])


def test_a_tokenizer_without_padding_is_refused():
    with pytest.raises(UserError, match="pad_token"):
        Collator(make_tokenizer(pad_token=None))


# --- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("spec", "training"), [(RTE, True), (STSB, True), (SQUAD, True), (SQUAD, False)])
def test_rows_make_the_batches_that_lists_make(tmp_path, monkeypatch, spec, training, cached):
    monkeypatch.setattr(features, "_BATCH_ROWS", 3)  # several chunks
    examples = questions() if spec is SQUAD else pairs(**({"label": [0.5] * 7} if spec is STSB else {}))
    length = 40 if spec is SQUAD else 64
    settings = {"training": training, "doc_stride": 4, "cache_dir": tmp_path if cached else None}
    data = featurize(spec, examples, make_tokenizer(), length, **settings)
    collator = Collator(make_tokenizer())
    for subset in (data, data.select([4, 0, 4, 2]), data.select(range(1, 5))):
        rows = FeatureRows(subset)
        assert len(rows) == len(subset)
        expected = collator([subset[row] for row in range(len(subset))])
        batch = next(iter(DataLoader(rows, batch_size=len(subset), collate_fn=collator)))
        assert set(batch) == set(expected)
        for name, values in expected.items():
            assert batch[name].dtype == (torch.float32 if spec is STSB and name == "labels" else values.dtype)
            assert torch.equal(batch[name], values)


def test_rows_are_views_of_the_mapped_file(tmp_path):
    data = featurize(RTE, pairs(), make_tokenizer(), 64, training=True, cache_dir=tmp_path)
    row = FeatureRows(data)[3]
    assert row["input_ids"].tolist() == data[3]["input_ids"]
    assert not row["input_ids"].flags.owndata
    assert not row["input_ids"].flags.writeable
