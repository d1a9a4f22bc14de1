"""Runs on benchmark files: baselines, collapse, submissions and overlap of splits."""

import logging
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from istar.errors import UserError
from istar.finetune.config import TaskConfig
from istar.finetune.config.task_config import find_task_spec
from istar.finetune.execute.examples import load_examples
from istar.finetune.execute.run import run
from istar.finetune.tasks.loading import sample_examples
from istar.runs.tasks import TASKS
from istar.texts import demo
from tests.finetune.execute.artifacts import TINY, Build, logged, place, rows_of, rte, table
from tests.finetune.tasks.builders import load_splits


def test_collapse_is_flagged_and_the_baseline_is_the_majority(small: Build, tmp_path: Path) -> None:
    """Training pairs are nearly all entailments, and a third of the validation pairs are."""
    data = tmp_path / "glue_data"
    rte(data, train=64, positive=lambda index: index % 16 != 0)
    rte(tmp_path / "other", validation=12, positive=lambda index: index % 3 == 0)
    (data / "RTE" / "dev.tsv").write_bytes((tmp_path / "other" / "RTE" / "dev.tsv").read_bytes())
    config = small(*TINY, "task=rte", f"task.data_dir={data}", "task.limit_train=64", "reg=none", "optim.lr=5e-3")
    record = run(config)
    predictions = {row["prediction"] for row in rows_of(place(config, record) / "predictions.jsonl")}
    assert predictions == {"entailment"}
    assert record.collapsed == {"validation": True}
    assert record.baseline == {"accuracy": pytest.approx(1 / 3)}
    assert record.headline["value"] == pytest.approx(1 / 3)


# ---- files in the benchmarks' own formats


def test_mnli_has_two_validation_sets(small: Build, tmp_path: Path) -> None:
    labels = ("entailment", "neutral", "contradiction")
    header = "index|sentence1|sentence2|gold_label"

    def lines(determiner: str, count: int) -> list[str]:
        return [header, *(f"{n}|{determiner} lamp {n} is old .|a lamp is new .|{labels[n % 3]}" for n in range(count))]

    folder = tmp_path / "glue_data" / "MNLI"
    table(folder, "train.tsv", *lines("the", 32))
    table(folder, "dev_matched.tsv", *lines("this", 9))
    table(folder, "dev_mismatched.tsv", *lines("that", 13))
    table(folder, "test_matched.tsv", "index|sentence1|sentence2", *(f"{n}|my lamp {n} .|old ." for n in range(5)))
    table(folder, "test_mismatched.tsv", "index|sentence1|sentence2", *(f"{n}|your lamp {n} .|old ." for n in range(6)))
    diagnostic_lines = ("index|sentence1|sentence2", *(f"{n}|her lamp {n} .|new ." for n in range(4)))
    table(tmp_path / "glue_data" / "diagnostic", "diagnostic.tsv", *diagnostic_lines)
    config = small(
        *TINY, "task=mnli", f"task.data_dir={tmp_path / 'glue_data'}", "data.eval_batch_size=4", "task.submission=true",
    )  # fmt: skip
    record = run(config)
    run_folder = place(config, record)
    assert {"accuracy", "accuracy_mismatched"} <= set(record.metrics)
    assert record.headline["metric"] == "accuracy"
    assert record.collapsed.keys() == {"validation_matched", "validation_mismatched"}
    assert record.data["validation"] == {"validation_matched": 9, "validation_mismatched": 13}
    for name, metric, count in (("", "accuracy", 9), ("_mismatched", "accuracy_mismatched", 13)):
        rows = rows_of(run_folder / f"predictions{name}.jsonl")
        assert [row["id"] for row in rows] == list(range(count))
        assert [row["label"] for row in rows] == [labels[n % 3] for n in range(count)]
        correct_count = sum(row["prediction"] == row["label"] for row in rows)
        assert record.metrics[metric] == pytest.approx(correct_count / count)
    assert {"val/accuracy", "val/accuracy_mismatched"} <= set(logged(run_folder))
    assert len((run_folder / "submission" / "MNLI-m.tsv").read_text().splitlines()) == 6
    assert len((run_folder / "submission" / "MNLI-mm.tsv").read_text().splitlines()) == 7
    lines = [line.split("\t") for line in (run_folder / "submission" / "AX.tsv").read_text().splitlines()]
    assert lines[0] == ["index", "prediction"]
    assert [line[0] for line in lines[1:]] == ["0", "1", "2", "3"]
    assert {line[1] for line in lines[1:]} <= set(labels)


@pytest.mark.parametrize("name", ["MNLI/AX.tsv", "AX/AX.tsv", "diagnostic/diagnostic.tsv", None])
def test_where_the_diagnostic_set_may_be(tmp_path: Path, name: str | None, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "MNLI"
    for split in ("train", "dev_matched", "dev_mismatched"):
        table(folder, f"{split}.tsv", "index|sentence1|sentence2|gold_label", f"0|{split} .|old .|neutral")
    for split in ("test_matched", "test_mismatched"):
        table(folder, f"{split}.tsv", "index|sentence1|sentence2", f"0|{split} .|old .")
    if name is not None:
        table((tmp_path / name).parent, Path(name).name, "index|sentence1|sentence2", "0|a lamp .|old .", "1|b .|c .")
    # `task.data_dir` may be the folder of the task or the folder of all tasks.
    for data_dir in (tmp_path, folder):
        config = TaskConfig(name="mnli", data_dir=str(data_dir), submission=True)
        with caplog.at_level(logging.WARNING):
            examples = load_examples(find_task_spec(config), config)
        files = ["MNLI-m.tsv", "MNLI-mm.tsv"] + ["AX.tsv"] * bool(name)
        assert [split.submission for split in examples.test_sets] == files
        assert [len(rows) for rows in examples.test] == [1, 1] + [2] * bool(name)
    assert ("the submission lacks AX.tsv" in caplog.text) == (name is None)


def test_submission(small: Build, tmp_path: Path) -> None:
    data = rte(tmp_path / "glue_data")
    config = small(*TINY, "task=rte", f"task.data_dir={data}", "task.submission=true", "data.eval_batch_size=3")
    record = run(config)
    lines = (place(config, record) / "submission" / "RTE.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in lines[1:]] == [str(index) for index in range(7)]
    assert {line.split("\t")[1] for line in lines[1:]} <= {"entailment", "not_entailment"}
    # The predictions are those of the saved model.
    tokenizer = AutoTokenizer.from_pretrained(place(config, record) / "model")
    model = AutoModelForSequenceClassification.from_pretrained(place(config, record) / "model")
    test_rows = load_splits(TASKS["rte"], data, ["test"])["test"]
    for line, row in zip(lines[1:], test_rows, strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(row["sentence1"], row["sentence2"], return_tensors="pt")).logits[0]
        if abs(float(logits[0] - logits[1])) > 1e-4:
            assert line.split("\t")[1] == model.config.id2label[int(logits.argmax())]


def test_overlap_is_counted_and_told(small: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = rte(tmp_path / "glue_data")
    lines = (data / "RTE" / "train.tsv").read_text().splitlines()
    with (data / "RTE" / "dev.tsv").open("a") as file:
        file.write("\n".join(lines[1:4]) + "\n")
    with caplog.at_level(logging.WARNING):
        record = run(small(*TINY, "task=rte", f"task.data_dir={data}"))
    assert record.data["overlap"] == {"validation": 3}
    assert "3 of the 15 examples of validation are also in the training data" in caplog.text
    caplog.clear()
    load_examples(TASKS["demo"], small().task)
    assert "are also in the training data" not in caplog.text


def test_limits_take_a_random_sample(small: Build) -> None:
    config = small("task.limit_train=3", "task.limit_validation=2")
    examples = load_examples(TASKS["demo"], config.task)
    assert isinstance(examples.train, Dataset)
    assert examples.train[:] == sample_examples(demo.generate("demo", "train"), 3)[:]
    assert [split[:] for split in examples.validation] == [sample_examples(demo.generate("demo", "validation"), 2)[:]]
    assert (len(examples.train), len(examples.validation[0])) == (3, 2)
    assert examples.test == []
    beyond = small("task.limit_train=null", "task.limit_validation=100000")
    assert len(load_examples(TASKS["demo"], beyond.task).train) == demo.SIZES["train"]


def test_a_validation_set_is_never_cut_to_nothing(small: Build) -> None:
    overrides = ("task.max_length=24", "task.doc_stride=4", "data.eval_batch_size=1")
    with pytest.raises(UserError, match=r"more than 1 windows; set a larger data\.eval_batch_size"):
        run(small(*TINY, "task=demo_span", "trainer.limit_val_batches=1", *overrides))
