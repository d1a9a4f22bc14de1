import csv
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features, List, Value
from datasets.arrow_writer import ArrowWriter

from istar.errors import UserError
from istar.finetune.tasks import formats, sources
from istar.finetune.tasks.loading import count_overlap, hold_out, sample_examples
from istar.models import hub
from istar.runs.tasks import TASKS
from istar.texts import demo
from tests.finetune.execute.faults import warnings_in
from tests.finetune.tasks.builders import load_splits
from tests.waiting import SECONDS


def write_lines(path: Path, *lines: str, end: str = "\n", start: str = "") -> Path:
    """Write lines in which `|` stands for a tab, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((start + "".join(line.replace("|", "\t") + end for line in lines)).encode())
    return path


def load_columns(task: str, folder: Path | None, *splits: str) -> list[dict[str, list[Any]]]:
    loaded = load_splits(TASKS[task], folder, splits)
    assert list(loaded) == list(splits)
    return [loaded[split][:] for split in splits]


def get_load_error(task: str, folder: Path | None, *splits: str) -> str:
    with pytest.raises(UserError) as caught:
        load_splits(TASKS[task], folder, splits)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- GLUE as the benchmark ships it


@pytest.mark.parametrize(
    ("task", "headers", "rows", "columns", "labels"),
    [
        ("cola", ("", "", "index|sentence"),
         ("gj04|0|*|They drank the pub.", "gj04|1||The sailors rode.", "0|Bill whistled."),
         {"sentence": ("They drank the pub.", "The sailors rode.", "Bill whistled.")}, (0, 1)),
        ("sst2", ("sentence|label", "sentence|label", "index|sentence"),
         ("hide new secretions |0", "it 's a charming journey . |1", "0|uneasy mishmash ."),
         {"sentence": ("hide new secretions ", "it 's a charming journey . ", "uneasy mishmash .")}, (0, 1)),
        ("qqp", (*("id|qid1|qid2|question1|question2|is_duplicate",) * 2, "id|question1|question2"),
         ("133273|213221|213222|How is life?|How is life now?|1", "201359|303345|303346|Why?|What?|0", "0|A?|B?"),
         {"question1": ("How is life?", "Why?", "A?"), "question2": ("How is life now?", "What?", "B?")}, (1, 0)),
    ],
)  # fmt: skip
def test_cola_sst2_qqp(tmp_path: Path, task: str, headers: Any, rows: Any, columns: Any, labels: Any) -> None:
    for name, header, row in zip(("train.tsv", "dev.tsv", "test.tsv"), headers, rows, strict=True):
        write_lines(tmp_path / name, *filter(None, (header, row)))
    loaded = load_columns(task, tmp_path, "train", "validation", "test")
    for index, split in enumerate(loaded):
        label = {"label": [labels[index]]} if index < 2 else {}
        assert split == {column: [texts[index]] for column, texts in columns.items()} | label


def test_mrpc_has_a_mark_and_lone_quotes(tmp_path: Path) -> None:
    header = "Quality|#1 ID|#2 ID|#1 String|#2 String"
    rows = ['1|1|2|He said " yes|" Yes', '0|3|4|"a|b']
    write_lines(tmp_path / "train.tsv", header, *rows, start="\ufeff")
    write_lines(tmp_path / "test.tsv", "index|#1 ID|#2 ID|#1 String|#2 String", "0|1|2|a|b", start="\ufeff")
    train, test = load_columns("mrpc", tmp_path, "train", "test")
    assert train == {"sentence1": ['He said " yes', '"a'], "sentence2": ['" Yes', "b"], "label": [1, 0]}
    assert test == {"sentence1": ["a"], "sentence2": ["b"]}


def test_stsb_is_a_regression(tmp_path: Path) -> None:
    header = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2"
    row = "0|main-captions|MSRvid|2012test|0001|none|none|A plane is taking off.|An air plane is taking off."
    write_lines(tmp_path / "train.tsv", f"{header}|score", f"{row}|5.000", f"{row}|0.8")
    write_lines(tmp_path / "test.tsv", header, row)
    loaded = load_splits(TASKS["stsb"], tmp_path, ["train", "test"])
    assert loaded["train"].features["label"] == Value("float64")
    assert loaded["train"]["label"][:] == [5.0, 0.8]
    assert loaded["test"].column_names == ["sentence1", "sentence2"]


def test_mnli_has_two_sets_and_two_widths(tmp_path: Path) -> None:
    header = (
        "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|"
        "sentence2_parse|sentence1|sentence2"
    )
    row = "0|31193|31193n|government|( a )|( b )|(ROOT a)|(ROOT b)|Conceptually.|Product."
    votes = "neutral|neutral|entailment|neutral|neutral"
    write_lines(tmp_path / "train.tsv", f"{header}|label1|gold_label", f"{row}|neutral|neutral")
    labels = "label1|label2|label3|label4|label5|gold_label"
    write_lines(tmp_path / "dev_matched.tsv", f"{header}|{labels}", f"{row}|{votes}|contradiction")
    write_lines(tmp_path / "dev_mismatched.tsv", f"{header}|{labels}", f"{row}|{votes}|entailment")
    write_lines(tmp_path / "test_matched.tsv", header, row)
    write_lines(tmp_path / "test_mismatched.tsv", header, row, row)
    texts = {"premise": ["Conceptually."], "hypothesis": ["Product."]}
    spec = TASKS["mnli"]
    names = [spec.train, *(split.name for split in (*spec.validation, *spec.test) if not split.is_shipped_separately)]
    train, matched, mismatched, test_matched, test_mismatched = load_columns("mnli", tmp_path, *names)
    assert train == {**texts, "label": [1]}
    assert matched == {**texts, "label": [2]}
    assert mismatched == {**texts, "label": [0]}
    assert test_matched == texts
    assert len(test_mismatched["premise"]) == 2


@pytest.mark.parametrize(
    ("task", "columns", "labels", "ids"),
    [
        ("qnli", "question|sentence", ["entailment", "not_entailment"], [0, 1]),
        ("rte", "sentence1|sentence2", ["not_entailment", "entailment"], [1, 0]),
        ("wnli", "sentence1|sentence2", ["1", "0"], [1, 0]),
    ],
)
def test_qnli_rte_wnli(tmp_path: Path, task: str, columns: str, labels: list[str], ids: list[int]) -> None:
    rows = [f"{number}|Left {number}.|Right {number}.|{label}" for number, label in enumerate(labels)]
    write_lines(tmp_path / "train.tsv", f"index|{columns}|label", *rows)
    write_lines(tmp_path / "dev.tsv", f"index|{columns}|label", rows[0])
    write_lines(tmp_path / "test.tsv", f"index|{columns}", "0|Left.|Right.")
    train, validation, test = load_columns(task, tmp_path, "train", "validation", "test")
    first_column, second_column = columns.split("|")
    assert train == {first_column: ["Left 0.", "Left 1."], second_column: ["Right 0.", "Right 1."], "label": ids}
    assert validation["label"] == ids[:1]
    assert test == {first_column: ["Left."], second_column: ["Right."]}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_whatever_looks_like_something_else_stays_text(tmp_path: Path, end: str) -> None:
    texts = ["null", "NA", "", "nan", "1.0", '"', " padded ", "a\u2028b\u0085c\x0bd", "caf\u00e9", "x\ry"]
    write_lines(tmp_path / "train.tsv", "sentence|label", *(f"{text}|1" for text in texts), "", end=end)
    (train,) = load_columns("sst2", tmp_path, "train")
    assert train["sentence"] == texts


def test_columns_are_exact_and_typed(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.tsv", "index|sentence1|sentence2|label", "0|a|b|entailment")
    train = load_splits(TASKS["rte"], tmp_path, ["train"])["train"]
    assert train.features == {"sentence1": Value("string"), "sentence2": Value("string"), "label": Value("int64")}
    assert train.split == "train"


# ---- rows that do not fit


def make_qqp_rows(num_good: int, *bad_rows: str) -> list[str]:
    rows = [f"{number}|1|2|left {number}|right {number}|{number % 2}" for number in range(num_good)]
    return ["id|qid1|qid2|question1|question2|is_duplicate", *rows[:50], *bad_rows, *rows[50:]]


def test_few_malformed_rows_are_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_lines(tmp_path / "train.tsv", *make_qqp_rows(300, "7|1|2|too few", "8|1|2|one|too|many|0", "9"))
    (train,) = load_columns("qqp", tmp_path, "train")
    assert len(train["label"]) == 300
    assert train["question1"][49:51] == ["left 49", "left 50"]
    (record,) = [record for record in caplog.records if record.name.startswith("istar")]
    assert (record.levelname, record.name) == ("WARNING", "istar.finetune.tasks.formats")
    message = record.getMessage()
    assert str(path) in message
    assert "3 of 303 rows do not have 6 fields, the first on line 52" in message


def test_many_malformed_rows_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "train.tsv", *make_qqp_rows(190, "1", "2"))
    message = get_load_error("qqp", tmp_path, "train")
    assert message.startswith(f"{path}: 2 of 192 rows do not have 6 fields, the first on line 52")


def test_no_row_of_a_test_set_is_left_out(tmp_path: Path) -> None:
    rows = [f"{number}|left|right" for number in range(500)]
    path = write_lines(tmp_path / "test.tsv", "id|question1|question2", *rows, "500|left")
    assert f"{path}: 1 of 501 rows do not have 3 fields" in get_load_error("qqp", tmp_path, "test")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "train.tsv", "Quality|#1 ID|#2 ID|#1 String", "1|1|2|a")
    message = get_load_error("mrpc", tmp_path, "train")
    assert message.startswith(f"{path}: column '#2 String'")
    assert "found: 'Quality', '#1 ID', '#2 ID', '#1 String'" in message
    write_lines(tmp_path / "dev.tsv", "index|sentence", "0|a")
    assert "column 'label'" in get_load_error("sst2", tmp_path, "validation")


@pytest.mark.parametrize("label", ["maybe", "2", "-1", "", "True", "0.5"])
def test_unknown_label(tmp_path: Path, label: str) -> None:
    path = write_lines(tmp_path / "train.tsv", "index|sentence1|sentence2|label", "0|a|b|0", f"1|a|b|{label}")
    message = get_load_error("rte", tmp_path, "train")
    assert message.startswith(f"{path}, line 3: label {label!r}")
    assert "entailment (0), not_entailment (1)" in message


@pytest.mark.parametrize("score", ["nan", "inf", "", "high"])
def test_scores_are_finite_numbers(tmp_path: Path, score: str) -> None:
    path = tmp_path / "train.csv"
    path.write_text(f"sentence1,sentence2,label\na,b,4.5\na,b,{score}\n")
    assert get_load_error("stsb", tmp_path, "train").startswith(f"{path}, line 3: label {score!r} is not a finite")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.tsv", b"sentence\tlabel\n"),
        ("train.tsv", b""),
        ("train.csv", b"sentence,label\n"),
        ("train.csv", b""),
        ("train.jsonl", b""),
        ("train.json", b"[]"),
    ],
)
def test_empty_split(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert get_load_error("sst2", tmp_path, "train") == f"{tmp_path / name}: no examples"


@pytest.mark.parametrize(
    ("task", "name", "start"),
    [
        ("sst2", "train.tsv", "sentence\tlabel\nfine\t1\n"),
        ("sst2", "train.csv", "sentence,label\nfine,1\n"),
        ("sst2", "train.jsonl", '{"sentence": "fine", "label": 1}\n\n'),
        ("sst5", "train.txt", "(2 fine)\n(2 fine)\n"),
        ("squad", "train-v1.1.json", "{\n\n"),
    ],
)
def test_other_encodings_are_refused(tmp_path: Path, task: str, name: str, start: str) -> None:
    (tmp_path / name).write_bytes(start.encode() + "caf\u00e9".encode("latin-1") + b"\n")
    message = get_load_error(task, tmp_path, "train")
    assert message.startswith(f"{tmp_path / name}, line 3: not UTF-8: byte 4 is 0xe9")


# ---- where the files are


def test_no_folder(tmp_path: Path) -> None:
    assert get_load_error("rte", Path("/nowhere"), "train").startswith("task.data_dir=/nowhere does not exist")
    path = write_lines(tmp_path / "file", "x")
    assert get_load_error("rte", path, "train").startswith(f"task.data_dir={path} is not a folder")


def test_nothing_suitable(tmp_path: Path) -> None:
    message = get_load_error("rte", tmp_path, "train")
    assert message.startswith(f"task.data_dir={tmp_path} holds no data of task rte")
    for name in ("train.tsv", "train.csv", "train.jsonl", "train.parquet", "train/state.json", "RTE/"):
        assert name in message
    assert "train-v1.1.json" in get_load_error("squad", tmp_path, "train")
    assert ".tsv" not in get_load_error("demo", tmp_path, "train")


def test_missing_split_counts_only_when_wanted(tmp_path: Path) -> None:
    write_lines(tmp_path / "RTE/train.tsv", "index|sentence1|sentence2|label", "0|a|b|0")
    load_columns("rte", tmp_path, "train")
    message = get_load_error("rte", tmp_path, "train", "test")
    assert "split 'test' of task rte is missing: no test.tsv" in message
    assert str(tmp_path / "RTE") in message
    assert "dev.tsv" in get_load_error("rte", tmp_path, "validation")


def test_one_parent_serves_several_tasks(tmp_path: Path) -> None:
    write_lines(tmp_path / "glue_data/RTE/train.tsv", "index|sentence1|sentence2|label", "0|a|b|0")
    write_lines(tmp_path / "glue_data/SST-2/train.tsv", "sentence|label", "fine|1")
    write_lines(tmp_path / "sst/trees/train.txt", "(4 (2 Very) (3 fine))")
    for parent in (tmp_path, tmp_path / "glue_data"):
        assert load_columns("rte", parent, "train")[0]["label"] == [0]
        assert load_columns("sst2", parent, "train")[0]["sentence"] == ["fine"]
    for parent in (tmp_path, tmp_path / "sst", tmp_path / "sst/trees"):
        assert load_columns("sst5", parent, "train") == [{"text": ["Very fine"], "label": [4]}]


def test_own_files_come_before_tables(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.tsv", "sentence|label", "from the TSV|1")
    (tmp_path / "train.csv").write_text("sentence,label\nfrom the CSV,0\n")
    assert load_columns("sst2", tmp_path, "train")[0]["sentence"] == ["from the TSV"]


def test_a_changed_file_is_read_again_and_nothing_is_written(tmp_path: Path) -> None:
    for text in ("old", "new"):
        (tmp_path / "train.csv").write_text(f"sentence,label\n{text},1\n")
        assert load_columns("sst2", tmp_path, "train")[0]["sentence"] == [text]
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


# ---- trees


def test_trees_of_every_split(tmp_path: Path) -> None:
    nested = r"(3 (2 (2 -LRB-) (2 (2 9) (2 1\/2))) (4 (3 stars\*) (2 (2 -RRB-) (2 ``))))"
    write_lines(tmp_path / "train.txt", nested, "", "(0 Ugh)", end="\r\n")
    write_lines(tmp_path / "dev.txt", "(1 (2 caf\u00e9) (2 9\u00a01\\/2))")
    write_lines(tmp_path / "test.txt", "(2 (2 So) (2 so))")
    train, validation, test = load_columns("sst5", tmp_path, "train", "validation", "test")
    assert train == {"text": ["( 9 1/2 stars* ) ``", "Ugh"], "label": [3, 0]}
    assert validation == {"text": ["caf\u00e9 9\u00a01/2"], "label": [1]}
    assert test == {"text": ["So so"], "label": [2]}


@pytest.mark.parametrize(
    "tree",
    ["(3 (2 a) (2 b)", "(3 (2 a)) (2 b))", "(2 a))", "(2 a) x", "3 a", "(3 )", "(a)", "((2 a))", "()", ")", "(",
     "(3 a b)", "(3 a (2 b))", "(2 (3 a) b)", " "],
)  # fmt: skip
def test_malformed_tree(tmp_path: Path, tree: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        formats.parse_tree(tree)
    path = write_lines(tmp_path / "train.txt", "(2 fine)", tree)
    assert get_load_error("sst5", tmp_path, "train").startswith(f"{path}, line 2: malformed tree: ")


def test_label_of_a_tree_is_checked(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "train.txt", "(2 fine)", "", "(5 (2 too) (2 good))")
    assert get_load_error("sst5", tmp_path, "train").startswith(f"{path}, line 3: label '5'")


# ---- SQuAD


def make_squad_document(*ids: str, **fields: Any) -> dict[str, Any]:
    answers = [{"text": "Rome", "answer_start": 0}, {"text": "in Italy", "answer_start": 8}]
    questions = [{"id": id_, "question": f"Where {id_}?", "answers": answers, **fields} for id_ in ids]
    paragraph = {"context": "Rome is in Italy", "qas": questions}
    return {"version": "1.1", "data": [{"title": "Rome", "paragraphs": [paragraph]}]}


def test_squad(tmp_path: Path) -> None:
    (tmp_path / "train-v1.1.json").write_text(json.dumps(make_squad_document("b", "a")))
    (tmp_path / "dev-v1.1.json").write_text(json.dumps(make_squad_document("c", is_impossible=False)))
    loaded = load_splits(TASKS["squad"], tmp_path, ["train", "validation"])
    assert loaded["train"].column_names == ["id", "question", "context", "answers"]
    assert loaded["train"]["id"][:] == ["b", "a"]
    assert loaded["validation"][0] == {
        "id": "c",
        "question": "Where c?",
        "context": "Rome is in Italy",
        "answers": {"text": ["Rome", "in Italy"], "answer_start": [0, 8]},
    }


@pytest.mark.parametrize(
    ("document", "expected_message"),
    [
        (make_squad_document("a", is_impossible=True), "question 'a': is_impossible is true"),
        (make_squad_document("a", "b", "a"), "id 'a' occurs 2 times"),
        (make_squad_document("a", answers=[]), "row 1: answers is {'text': [], 'answer_start': []}"),
        (make_squad_document("a", answers=[{"text": "x"}]), "key 'answer_start' is missing"),
        (make_squad_document("a", answers=[{"text": "x", "answer_start": "0"}]), "row 1: answers is"),
        (make_squad_document("a", id=7), "row 1: id is not a text but 7"),
        (make_squad_document("a", question="\ud800"), "has half of a surrogate pair"),
        ({"version": "1.1"}, "key 'data' is missing"),
        ([1], "unexpected structure"),
        ({"data": []}, "no examples"),
    ],
)
def test_squad_that_is_not(tmp_path: Path, document: Any, expected_message: str) -> None:
    path = tmp_path / "train-v1.1.json"
    path.write_text(json.dumps(document))
    message = get_load_error("squad", tmp_path, "train")
    assert message.startswith(str(path))
    assert expected_message in message


@pytest.mark.parametrize("indent", [None, 1])
def test_squad_under_another_name_says_which_name_is_expected(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "train.json").write_text(json.dumps(make_squad_document("a"), indent=indent))
    message = get_load_error("squad", tmp_path, "train")
    assert "train.json" in message
    assert "expected as train-v1.1.json and dev-v1.1.json" in message
    path = write_lines(tmp_path / "dev-v1.1.json", '{"data": [')
    assert get_load_error("squad", tmp_path, "validation").startswith(f"{path}: not JSON: ")


# ---- tables and saved data sets

TEXTS = ["one, two", 'she said "no"', "two\nlines", "", "NA"]
LABELS = [1, 0, 1, 1, 0]


def write_csv(path: Path, columns: dict[str, list[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def write_jsonl(path: Path, columns: dict[str, list[Any]]) -> None:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_array(path: Path, columns: dict[str, list[Any]]) -> None:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    path.write_text(json.dumps(rows, indent=1))


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    Dataset.from_dict(columns).to_parquet(path)


Write = Callable[[Path, dict[str, list[Any]]], None]
TABLES = [("csv", write_csv), ("jsonl", write_jsonl), ("json", write_jsonl), ("json", write_array),
          ("parquet", write_parquet)]  # fmt: skip


@pytest.mark.parametrize(("suffix", "write"), TABLES)
@pytest.mark.parametrize("labels", [LABELS, [("negative", "positive")[label] for label in LABELS]])
def test_tables(tmp_path: Path, suffix: str, write: Write, labels: Sequence[Any]) -> None:
    write(tmp_path / f"train.{suffix}", {"more": [0] * 5, "label": list(labels), "sentence": TEXTS})
    write(tmp_path / f"dev.{suffix}", {"sentence": ["a"], "label": [1]})
    write(tmp_path / f"test.{suffix}", {"sentence": ["a", "b"], "label": [-1, -1]})
    train, validation, test = load_columns("sst2", tmp_path, "train", "validation", "test")
    assert train == {"sentence": TEXTS, "label": LABELS}
    assert validation == {"sentence": ["a"], "label": [1]}
    assert test == {"sentence": ["a", "b"]}


@pytest.mark.parametrize(("suffix", "write"), TABLES)
def test_regression_tables(tmp_path: Path, suffix: str, write: Write) -> None:
    write(tmp_path / f"validation.{suffix}", {"sentence1": ["a"], "sentence2": ["b"], "label": [3]})
    write(tmp_path / f"test.{suffix}", {"sentence1": ["a"], "sentence2": ["b"], "label": [-1.0]})
    validation, test = load_columns("stsb", tmp_path, "validation", "test")
    assert validation["label"] == [3.0]
    assert test == {"sentence1": ["a"], "sentence2": ["b"]}


@pytest.mark.parametrize(("suffix", "write"), TABLES[1:])
def test_span_tables(tmp_path: Path, suffix: str, write: Write) -> None:
    columns: dict[str, list[Any]] = {"id": ["a"], "question": ["Where?"], "context": ["Rome"]}
    columns["answers"] = [{"text": ["Rome"], "answer_start": [0]}]
    write(tmp_path / f"train.{suffix}", columns)
    assert load_columns("squad", tmp_path, "train") == [columns]


@pytest.mark.parametrize(
    ("name", "content", "expected_message"),
    [
        ("train.csv", "sentence,label\na,1\nb,3\n", ", line 3: label '3'"),
        ("train.csv", 'sentence,label\n"a\nb",1\n"c",3\n', ", line 4: label '3'"),
        ("train.csv", 'sentence,label\na,1\n"never closed,1\n', ", line 3: not CSV: "),
        ("train.csv", "text,label\na,1\n", ": column 'sentence'"),
        ("train.csv", "sentence,label,sentence\na,1,b\n", ": column 'sentence' occurs at positions 1, 3; rename"),
        ("train.jsonl", '{"sentence": "a", "label": 1}\n{"label": 0}\n', ", line 2: key 'sentence' is missing"),
        ("train.jsonl", '{"sentence": "a", "label": 1}\n\n{"sentence"\n', ", line 3: not JSON: "),
        ("train.jsonl", '{"sentence": null, "label": 1}\n', ", line 1: sentence is not a text but None"),
        ("train.jsonl", '{"sentence": "a", "label": null}\n', ", line 1: label None"),
        ("train.jsonl", '{"sentence": "a", "label": [1]}\n', ", line 1: label [1]"),
        ("train.jsonl", '"a"\n', ", line 1: a JSON object was expected"),
        ("train.json", '[{"sentence": "a", "label": 1}, {"sentence": "a", "label": 7}]', ", row 2: label 7"),
        ("train.parquet", "PAR?", ": not a readable Parquet file"),
    ],
)
def test_tables_that_do_not_fit(tmp_path: Path, name: str, content: str, expected_message: str) -> None:
    (tmp_path / name).write_text(content)
    assert get_load_error("sst2", tmp_path, "train").startswith(f"{tmp_path / name}{expected_message}")


def test_csv_with_long_fields_and_repeated_columns_that_are_not_needed(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(f"more,sentence,label,more\n0,{'a' * 200_000},1,0\n")
    write_parquet(tmp_path / "validation.parquet", {"sentence": ["b"], "label": [0]})
    train, validation = load_columns("sst2", tmp_path, "train", "validation")
    assert train == {"sentence": ["a" * 200_000], "label": [1]}
    assert validation == {"sentence": ["b"], "label": [0]}


def make_parquet_columns(**extra: Any) -> dict[str, Any]:
    return {"sentence": pa.array(["a", "b"]), "label": pa.array([0, 1]), **extra}


@pytest.mark.parametrize(
    "extra",
    [
        pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        pa.array([b"0" * 16] * 2, pa.uuid()),
        pa.array([[1], []], pa.list_view(pa.int64())),
    ],
    ids=lambda column: str(column.type),
)
def test_columns_of_any_type_that_are_not_needed(tmp_path: Path, extra: pa.Array) -> None:
    pq.write_table(pa.table(make_parquet_columns(more=extra)), tmp_path / "train.parquet")
    assert load_columns("sst2", tmp_path, "train") == [{"sentence": ["a", "b"], "label": [0, 1]}]


def test_class_names_next_to_features_that_this_version_of_datasets_lacks(tmp_path: Path) -> None:
    names = {"_type": "ClassLabel", "names": ["positive", "negative"]}
    features = {"label": names, "sentence": {"_type": "Value", "dtype": "string"}, "more": {"_type": "Newer"}}
    for info in ({"features": features}, {"features": {**features, "more": [{"_type": "Newer"}]}}):
        metadata = {"huggingface": json.dumps({"info": info})}
        table = pa.table(make_parquet_columns(more=[0, 0])).replace_schema_metadata(metadata)
        pq.write_table(table, tmp_path / "train.parquet")
        assert load_columns("sst2", tmp_path, "train")[0]["label"] == [1, 0]
    for metadata in ({"huggingface": "{}"}, {"huggingface": json.dumps({"info": {"features": None}})}, {"other": "?"}):
        pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "train.parquet")
        assert load_columns("sst2", tmp_path, "train")[0]["label"] == [0, 1]


def test_parquet_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    texts, labels = make_parquet_columns().values()
    pq.write_table(pa.table([texts, labels, texts], ["sentence", "label", "sentence"]), path)
    assert get_load_error("sst2", tmp_path, "train").startswith(f"{path}: column 'sentence' occurs at positions 1, 3;")
    pq.write_table(pa.table([texts, labels, texts, texts], ["sentence", "label", "more", "more"]), path)
    assert load_columns("sst2", tmp_path, "train") == [{"sentence": ["a", "b"], "label": [0, 1]}]
    maps = pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table([maps, labels], ["sentence", "label"]), path)
    assert get_load_error("sst2", tmp_path, "train").startswith(f"{path}, row 1: sentence is not a text but [('a', 1)]")


def test_saved_data_set_with_its_own_order_of_names(tmp_path: Path) -> None:
    texts = {"sentence1": ["a", "b"], "sentence2": ["c", "d"]}
    strings = {"sentence1": Value("string"), "sentence2": Value("string"), "idx": Value("int32")}
    features = Features({**strings, "label": ClassLabel(names=["not_entailment", "entailment"])})
    train = Dataset.from_dict({**texts, "label": [0, 1], "idx": [5, 6]}, features=features)
    test = Dataset.from_dict({**texts, "label": [-1, -1], "idx": [0, 1]}, features=features)
    DatasetDict(train=train, validation=train.select([1]), test=test).save_to_disk(tmp_path / "saved")
    loaded = load_columns("rte", tmp_path / "saved", "train", "validation", "test")
    assert loaded[0] == {**texts, "label": [1, 0]}
    assert loaded[1]["sentence1"] == ["b"]
    assert loaded[2] == texts
    train.to_parquet(tmp_path / "train.parquet")
    assert load_columns("rte", tmp_path, "train") == [loaded[0]]


def test_the_splits_of_a_saved_data_set_are_named_if_none_fits(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"sentence": ["a"], "label": [1]})
    for name in ("odd", "even"):
        rows.save_to_disk(tmp_path / name)
    finding = f"; it has the saved splits {tmp_path / 'even'}, {tmp_path / 'odd'}"
    assert get_load_error("sst2", tmp_path, "train").endswith(finding)
    rows.save_to_disk(tmp_path / "train")
    assert get_load_error("sst2", tmp_path, "validation").endswith(f"{finding}, {tmp_path / 'train'}")


def test_saved_data_set_that_is_damaged(tmp_path: Path) -> None:
    DatasetDict(train=Dataset.from_dict({"sentence": ["a"], "label": [7]})).save_to_disk(tmp_path)
    assert get_load_error("sst2", tmp_path, "train").startswith(f"{tmp_path / 'train'}, row 1: label 7")
    (tmp_path / "train" / "state.json").write_text("{}")
    assert get_load_error("sst2", tmp_path, "train").startswith(f"{tmp_path / 'train'}: not a readable saved data")


# ---- the hub and the generator


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return tmp_path


def test_unreachable_hub_is_one_line_without_retries(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Any] = []
    connect = socket.socket.connect

    def record_attempt(*arguments: Any) -> None:
        attempts.append(arguments[1])
        connect(*arguments)

    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(socket.socket, "connect", record_attempt)
    monkeypatch.setattr(time, "sleep", lambda seconds: attempts.append(f"waited {seconds} s"))
    monkeypatch.setattr(sources, "find_hub_problem", functools.partial(hub.find_hub_problem, SECONDS))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    huggingface_hub.close_session()  # its client has read the proxies
    message = get_load_error("rte", None, "train")
    huggingface_hub.close_session()
    assert attempts == [("127.0.0.1", 9)]
    assert "nyu-mll/glue rte" in message
    assert "the hub http://127.0.0.1:9 cannot be reached" in message
    assert "task.data_dir=<folder>" in message


def test_a_silent_hub_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = threading.Event()

    class SilentSession:
        def head(self, endpoint: str, timeout: float) -> None:
            finished.wait(SECONDS)

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_session", SilentSession)
    assert "no answer within 0.1 s" in hub.find_hub_problem(timeout=0.1)
    finished.set()


def test_offline_by_environment(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "get_session", lambda: pytest.fail("the hub was asked"))
    message = get_load_error("rte", None, "train")
    assert "not in the local cache, and HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids" in message


def test_prepared_cache_is_used_when_the_hub_is_away(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "find_hub_problem", lambda: "the hub cannot be reached")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    folder = empty_cache / "nyu-mll___glue" / "rte" / "0.0.0" / "0123456789abcdef"
    folder.mkdir(parents=True)
    label = ClassLabel(names=["entailment", "not_entailment"])
    features = Features(
        {"sentence1": Value("string"), "sentence2": Value("string"), "label": label, "idx": Value("int32")}
    )
    splits = {}
    for split, value in (("train", 1), ("test", -1)):
        with ArrowWriter(features=features, path=str(folder / f"glue-{split}.arrow")) as writer:
            writer.write({"sentence1": "a", "sentence2": "b", "label": value, "idx": 0})
            writer.finalize()
        splits[split] = {"name": split, "num_examples": 1, "dataset_name": "glue"}
    info = DatasetInfo(features=features, splits=splits, builder_name="parquet", dataset_name="glue", config_name="rte")
    info.write_to_directory(str(folder))
    train, test = load_columns("rte", None, "train", "test")
    assert train == {"sentence1": ["a"], "sentence2": ["b"], "label": [1]}
    assert test == {"sentence1": ["a"], "sentence2": ["b"]}
    assert not datasets.config.HF_HUB_OFFLINE
    assert "no split 'validation'; found: train, test" in get_load_error("rte", None, "validation")
    assert "mnli: not in the local cache" in get_load_error("mnli", None, "train")


def test_what_the_hub_delivers_is_brought_into_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"text": List(Value("string")), "answer_start": List(Value("int32"))}
    texts = {name: Value("string") for name in ("id", "title", "context", "question")}
    row = {"id": "1", "title": "t", "context": "Rome", "question": "Where?"}
    row["answers"] = {"text": ["Rome"], "answer_start": [0]}  # type: ignore[assignment]
    hub_dataset = DatasetDict(train=Dataset.from_list([row], features=Features({**texts, "answers": answers})))
    monkeypatch.setattr(sources, "find_hub_problem", lambda: "")
    monkeypatch.setattr(sources, "find_commit", lambda *_: "a commit")
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *arguments, **_: hub_dataset if arguments == TASKS["squad"].hub else None
    )
    train = load_splits(TASKS["squad"], None, ["train"])["train"]
    assert train.column_names == ["id", "question", "context", "answers"]
    del row["title"]
    assert train[0] == row


def test_hub_that_breaks_down_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(*_: Any, **__: Any) -> None:
        raise OSError("No space\nleft on device")

    monkeypatch.setattr(sources, "find_hub_problem", lambda: "")
    monkeypatch.setattr(sources, "find_commit", lambda *_: "a commit")
    monkeypatch.setattr(datasets, "load_dataset", raise_no_space)
    message = get_load_error("sst5", None, "train")
    assert "SetFit/sst5: the hub did not deliver it (OSError: No space left on device)" in message


@pytest.mark.parametrize("task", [name for name, spec in TASKS.items() if spec.hub is None])
def test_generated_tasks(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SIZES", {"train": 40, "validation": 8})
    monkeypatch.setattr(demo, "generate", demo.generate.__wrapped__)  # without its cache
    spec = TASKS[task]
    loaded = load_splits(spec, None, ["train", "validation"])
    ids = ("id",) if spec.kind == "span" else ()
    for split, data in loaded.items():
        labels = () if spec.is_language_modelling else (spec.label_column,)
        assert data.column_names == [*ids, *spec.text_columns, *labels]
        assert data[:] == demo.generate(task, split).select_columns(data.column_names)[:]


# ---- overlap


def test_overlap_counts_validation_examples_with_all_texts_known() -> None:
    train = Dataset.from_dict({"sentence1": ["a", "b", "a"], "sentence2": ["x", "y", "x"], "label": [0, 1, 1]})
    validation = Dataset.from_dict(
        {"sentence1": ["a", "a", "b", "a"], "sentence2": ["x", "y", "y ", "x"], "label": [1, 1, 1, 0]}
    )
    assert count_overlap(TASKS["rte"], train, validation) == 2
    assert count_overlap(TASKS["rte"], train, validation.select([1, 2])) == 0


# ---- the real files


@pytest.mark.parametrize(
    ("task", "counts"),
    [
        ("rte", {"train": 2490, "validation": 277}),
        ("stsb", {"train": 5749, "validation": 1500}),
        ("sst5", {"validation": 1101}),
        pytest.param("sst5", {"train": 8544, "test": 2210}, marks=pytest.mark.slow),
        ("squad", {"train": 1013, "validation": 177}),
    ],
)
def test_real_row_counts(real_data: Path, task: str, counts: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_splits(TASKS[task], real_data, list(counts))
    assert {split: len(data) for split, data in loaded.items()} == counts
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(("split", "name"), [("train", "train.tsv"), ("validation", "dev.tsv")])
def test_real_mrpc_as_the_csv_module_reads_it(real_data: Path, split: str, name: str) -> None:
    with (real_data / "glue_data" / "MRPC" / name).open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    (loaded,) = load_columns("mrpc", real_data / "glue_data", split)
    assert loaded == {
        "sentence1": [row["#1 String"] for row in rows],
        "sentence2": [row["#2 String"] for row in rows],
        "label": [int(row["Quality"]) for row in rows],
    }


def test_real_answers_stand_where_they_say(real_data: Path) -> None:
    for row in load_splits(TASKS["squad"], real_data, ["validation"])["validation"]:
        for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True):
            assert row["context"][start : start + len(text)] == text


# ---- samples, and rows held out of the training data


def test_samples_of_sorted_data_have_all_labels() -> None:
    rows = Dataset.from_dict({"label": [0] * 500 + [1] * 500, "index": list(range(1000))})
    small, large = (sample_examples(rows, size)["index"][:] for size in (200, 400))
    assert len(small) == 200
    assert small == sorted(small)
    assert set(small) < set(large)
    assert 70 < sum(index < 500 for index in small) < 130
    assert sample_examples(rows, None)["index"][:] == sample_examples(rows, 2000)["index"][:] == list(range(1000))


def test_held_out_rows_and_the_rest_are_all_rows_in_their_order() -> None:
    train = Dataset.from_dict({"sentence": [f"text {number}" for number in range(40)], "label": [0, 1] * 20})
    rest, held_out = hold_out(TASKS["sst2"], train, 0.1)
    assert (len(rest), len(held_out)) == (36, 4)
    row_numbers = [[int(text.split()[1]) for text in part["sentence"]] for part in (rest, held_out)]
    assert sorted(row_numbers[0] + row_numbers[1]) == list(range(40))
    assert all(part == sorted(part) for part in row_numbers)
    # At random, but the same rows in each call.
    assert row_numbers[1] != list(range(4))
    assert row_numbers[1] != list(range(36, 40))
    assert hold_out(TASKS["sst2"], train, 0.1)[1]["sentence"][:] == held_out["sentence"][:]


def test_questions_about_a_context_are_held_out_together() -> None:
    contexts = [f"context {number // 5}" for number in range(50)]
    train = Dataset.from_dict({"question": [f"question {number}" for number in range(50)], "context": contexts})
    rest, held_out = hold_out(TASKS["squad"], train, 0.2)
    assert len(held_out) == 10
    assert not set(rest["context"]) & set(held_out["context"])


def test_too_few_rows_to_hold_any_out() -> None:
    with pytest.raises(UserError, match=r"task\.validation_fraction=0\.5: the training data are too few"):
        hold_out(TASKS["sst2"], Dataset.from_dict({"sentence": ["one"], "label": [0]}), 0.5)
