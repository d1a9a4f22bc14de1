"""The labels of tasks and models tell the runs of a table apart."""

from collections.abc import Callable

import pytest

from istar.finetune.config import Config
from istar.finetune.execute.identify import name_run
from istar.models.saved_checkpoints import ModelArgument
from istar.runs.labels import Inputs, label_inputs, shorten_model_name
from istar.runs.run_rows import group_by_task, record_to_row
from tests.finished_runs import make_finished_record


def test_the_model_of_a_run_has_the_name_of_the_run_in_every_table(composed: Callable[..., Config]) -> None:
    name = "runs/rte-bert-none-0123/model"
    config = composed("task=rte", "model=auto", f"model.name={name}")
    record = make_finished_record("run", config)
    assert record_to_row(record)["model"] == "rte-bert-none-0123"
    assert list(group_by_task([record])) == [("rte", "rte-bert-none-0123")]
    assert name_run(config, record.key) == f"rte-rte-bert-none-0123-istar-{record.key.hash}"
    assert ModelArgument("", name).default_label == "rte-bert-none-0123"
    names = {"org/bert": "bert", "bert": "bert", "/models/bert/": "bert", "model": "model", "a/models/step-1": "step-1"}
    assert {name: shorten_model_name(name) for name in names} == names


def label(*runs: tuple[str | None, ...]) -> list[str]:
    """Return the labels of tasks or models; a run is a path, for a model a commit, and the hash of the files."""
    if len(runs[0]) == 2:
        inputs = [Inputs("clm", path, "bert", None, digest, None) for path, digest in runs]
    else:
        inputs = [Inputs("rte", None, str(name), commit, "data", digest) for name, commit, digest in runs]
    labels = label_inputs(inputs)
    return [labels[run][len(runs[0]) - 2] for run in inputs]


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        ([("a/easy.txt", "1"), ("a/hard.txt", "2")], ["clm (easy.txt)", "clm (hard.txt)"]),
        ([("easy/data", "1"), ("hard/data", "2"), ("hard/data/", "2")], ["clm (easy/data)", *["clm (hard/data)"] * 2]),
        ([("/data", "1"), ("data", "2"), (None, "3")], ["clm (/data)", "clm (data)", "clm"]),
        ([("/home/me/data", "1"), ("/scratch/data", "1")], ["clm"] * 2),
        # A copy on another machine, of which a part was used as well.
        ([("here", "part"), ("there", "all"), ("copy", "part"), ("copy", "all")], ["clm"] * 4),
        ([("changed", "1"), ("changed", "2"), ("changed", None)], ["clm"] * 3),
        # The data of runs that have not begun are not known.
        ([("easy.txt", None), ("hard.txt", None)], ["clm (easy.txt)", "clm (hard.txt)"]),
    ],
)
def test_data_sets_of_one_task_have_different_labels(runs: list[tuple[str, str | None]], labels: list[str]) -> None:
    assert label(*runs) == labels
    assert label(*reversed(runs)) == labels[::-1]


CHECKPOINTS = ("outA/checkpoint-500", None, "1"), ("outB/checkpoint-500", None, "2")


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        (CHECKPOINTS, ["outA/checkpoint-500", "outB/checkpoint-500"]),
        ([("a/run/model", None, "1"), ("b/run/model/", None, None)], ["a/run", "b/run"]),
        ([("org/bert", "c0ffee", "org/bert@c0ffee"), ("/copies/bert", None, "1")], ["org/bert", "copies/bert"]),
        ([("bert", None, "1"), ("org/bert", None, "2"), ("org/gpt", None, "3")], ["bert", "org/bert", "gpt"]),
        ([("/home/me/bert", None, "1"), ("/scratch/bert", None, "1")], ["bert"] * 2),
        ([("out/bert", None, "1"), ("out/bert", None, "2"), ("out/bert", None, None)], ["bert"] * 3),
        # New models have no files, and their identity is that of their tokenizer.
        ([("small", None, "new"), ("large", None, "new")], ["small", "large"]),
        (
            [("org/bert", "0123456789abcd", "1"), ("org/bert", "cdef", "2"), ("org/gpt", "cdef", "3")],
            ["bert@0123456789ab", "bert@cdef", "gpt"],
        ),
    ],
)
def test_models_of_one_name_have_different_labels(runs: list[tuple[str | None, ...]], labels: list[str]) -> None:
    assert label(*runs) == labels
    assert label(*reversed(runs)) == labels[::-1]
