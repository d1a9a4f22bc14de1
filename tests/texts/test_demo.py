"""The generated tasks: reproducible, balanced, disjoint, and not to be guessed from one sentence."""

import os
import re
import subprocess
import sys
from itertools import combinations

import pytest
from datasets import Dataset, Value
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from istar.runs.tasks import TASKS, TaskSpec
from istar.texts import demo

NAMES = ["demo", "demo_sentence", "demo_regression", "demo_span"]
SPLITS = [(name, split) for name in NAMES for split in demo.SIZES if split != "test" or TASKS[name].test]


def _read_texts(data: Dataset, spec: TaskSpec) -> list[tuple[str, ...]]:
    return list(zip(*(data[column] for column in spec.text_columns), strict=True))


def _compute_accuracy(*columns: str) -> float:
    """Return the validation accuracy of a logistic regression on the bags of words of some columns of `demo`."""
    splits = demo.generate("demo", "train"), demo.generate("demo", "validation")
    train, validation = ([tuple(row[column] for column in columns) for row in data] for data in splits)
    # A number before each word keeps the two sentences apart.
    vectorizer = CountVectorizer(analyzer=lambda row: [f"{i}{w}" for i, text in enumerate(row) for w in text.split()])
    model = LogisticRegression(max_iter=500).fit(
        vectorizer.fit_transform(train), demo.generate("demo", "train")["label"]
    )
    return float(model.score(vectorizer.transform(validation), demo.generate("demo", "validation")["label"]))


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_columns_and_sizes(name: str, split: str) -> None:
    spec, data = TASKS[name], demo.generate(name, split)
    expected = [*spec.text_columns, *([spec.label_column] if split != "test" else [])]
    assert data.column_names == (["id", *expected] if spec.kind == "span" else expected)
    assert len(data) == demo.SIZES[split]
    if spec.kind != "span" and split != "test":
        assert data.features["label"] == Value("int64" if spec.labels else "float64")


@pytest.mark.slow
def test_same_in_a_fresh_process() -> None:
    program = (
        "from istar.texts.demo import generate\n"
        "for name in ('demo_span', 'demo_regression', 'demo'):\n"
        "    print(generate(name, 'validation')[7])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    expected = [str(demo.generate(name, "validation")[7]) for name in ("demo_span", "demo_regression", "demo")]
    assert result.stdout.splitlines() == expected


@pytest.mark.parametrize("name", NAMES)
def test_no_text_occurs_twice(name: str) -> None:
    texts = {split: _read_texts(demo.generate(name, split), TASKS[name]) for task, split in SPLITS if task == name}
    for split_texts in texts.values():
        assert len(set(split_texts)) == len(split_texts)
    for first, other in combinations(texts.values(), 2):
        assert not set(first) & set(other)


@pytest.mark.parametrize("name", ["demo", "demo_sentence"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_labels_are_balanced(name: str, split: str) -> None:
    labels = list(demo.generate(name, split)["label"])
    assert set(labels) == {0, 1}
    assert sum(labels) * 2 == len(labels)


def test_words_alone_do_not_give_the_label_away() -> None:
    """Those of both sentences do not, so that those of one do not either."""
    assert _compute_accuracy("sentence1", "sentence2") < 0.67


def test_answers_are_where_they_are_said_to_be() -> None:
    num_with_several_answers = 0
    for split in ("train", "validation"):
        for row in demo.generate("demo_span", split):
            golds = list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True))
            num_with_several_answers += len(golds) > 1
            for text, start in golds:
                assert row["context"][start : start + len(text)] == text
                assert len(re.findall(rf"\b{text}\b", row["context"])) == 1
        ids = list(demo.generate("demo_span", split)["id"])
        assert len(set(ids)) == len(ids)
    assert num_with_several_answers


def test_vocabulary_covers_every_text() -> None:
    words = demo.vocabulary()
    assert words == sorted(set(words))
    assert len(words) <= 300
    rows = [row for name, split in SPLITS for row in _read_texts(demo.generate(name, split), TASKS[name])]
    texts = "\n".join(text for row in rows for text in row)
    assert set(re.findall(r"\w+", texts.lower())) == set(words)
    assert "{" not in texts


def test_regression_covers_its_range() -> None:
    labels = list(demo.generate("demo_regression", "train")["label"])
    assert (min(labels), max(labels)) == (0.0, 5.0)
    assert any(label % 1 for label in labels)


def test_sentences_read_as_sentences() -> None:
    for name, split in SPLITS:
        data = demo.generate(name, split)
        for row in _read_texts(data, TASKS[name]):
            for text in row:
                assert re.fullmatch(r"[A-Z][A-Za-z ,.]+[.?]", text), text
                assert "  " not in text
                assert " ." not in text
