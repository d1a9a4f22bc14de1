"""Result files of lm-evaluation-harness and MTEB as scores of `istar correlate`."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from istar.cli.main import main
from istar.errors import UserError
from istar.geometry.correlation.score_files import read_scores
from tests.files.test_folders import write_files

pytestmark = pytest.mark.usefixtures("blank_figures")


def write_file(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def make_harness_results(name: str, revision: str | None, accuracy: float) -> dict[str, Any]:
    """Return what lm-evaluation-harness 0.4 writes to `results_<date>.json` for two tasks and a group of tasks."""
    arguments = f"pretrained={name},dtype=float32" + (f",revision={revision}" if revision else "")
    return {
        "results": {
            "sciq": {
                "alias": "sciq", "acc,none": accuracy, "acc_stderr,none": 0.015, "acc_norm,none": accuracy / 2,
                "acc_norm_stderr,none": "N/A", "sample_len": 1000,
            },
            "gsm8k": {"exact_match,strict-match": accuracy / 4, "exact_match_stderr,strict-match": 0.1},
            "mmlu": {" ": " ", "alias": "mmlu", "name": "mmlu", "sample_len": 114, "sample_count": {"acc,none": 114}},
        },
        "config": {"model": "hf", "model_args": arguments, "limit": None},
        "n-shot": {"sciq": 0},
        "model_name": name,
        "date": 1.7e9,
    }  # fmt: skip


def make_mteb_results(task: str, **splits: list[tuple[str, float]]) -> dict[str, Any]:
    """Return what MTEB 1.11 and later versions write to `<task>.json`."""
    scores = {
        split: [{"hf_subset": subset, "languages": ["eng"], "f1": 0.0, "main_score": score} for subset, score in pairs]
        for split, pairs in splits.items()
    }
    versions = {"dataset_revision": "1", "mteb_version": "1.12.41", "evaluation_time": 1}
    return {"task_name": task, "scores": scores, **versions}


def read_records(path: Path) -> list[tuple[str, str, str, float]]:
    scores, _ = read_scores(path)
    return list(scores[["model", "revision", "task", "score"]].itertuples(index=False, name=None))


def test_a_file_of_the_harness(tmp_path: Path) -> None:
    path = write_file(tmp_path / "results_1.json", make_harness_results("EleutherAI/pythia-70m", "step1000", 0.4))
    assert read_records(path) == [
        ("pythia-70m", "step1000", "sciq acc", 0.4),
        ("pythia-70m", "step1000", "sciq acc_norm", 0.2),
        ("pythia-70m", "step1000", "gsm8k exact_match strict-match", 0.1),
    ]
    np.testing.assert_equal(list(read_scores(path)[0]["standard_error"]), [0.015, np.nan, 0.1])


@pytest.mark.parametrize(
    "config",
    [
        {"model_args": "use_accelerate=True,pretrained=EleutherAI/pythia-v1.1-70m,revision=step1000"},
        {"model_args": {"pretrained": "EleutherAI/pythia-v1.1-70m", "revision": "step1000", "trust_remote_code": True}},
    ],
    ids=["before 0.4", "as a table"],
)  # fmt: skip
def test_other_versions_of_the_harness(config: dict[str, Any], tmp_path: Path) -> None:
    """Before version 0.4, metrics had no filter, and there was no `model_name`."""
    metrics = {"ppl": 4465.3, "ppl_stderr": 200.2, "acc": 0.05, "acc_stderr": 0.003}
    results = {"results": {"lambada_openai": metrics}, "versions": {"lambada_openai": 0}, "config": config}
    assert read_records(write_file(tmp_path / "70m_step1000.json", results)) == [
        ("pythia-v1.1-70m", "step1000", "lambada_openai ppl", 4465.3),
        ("pythia-v1.1-70m", "step1000", "lambada_openai acc", 0.05),
    ]
    assert list(read_scores(tmp_path / "70m_step1000.json")[0]["standard_error"]) == [200.2, 0.003]


@pytest.mark.parametrize(
    "group",
    [
        {"alias": "mmlu", "name": "mmlu", "sample_len": 114}, {" ": " ", "alias": "mmlu"},
        {"alias": "mmlu", "samples": 114, "acc": True}, {"sample_len": 114},
    ],
    ids=str,
)  # fmt: skip
def test_sizes_are_not_scores(group: dict[str, Any], tmp_path: Path) -> None:
    """A group without scores, alone in its file or before tasks with scores."""
    content: dict[str, Any] = {"results": {"mmlu": group}, "config": {"model_args": "pretrained=tiny,revision=step1"}}
    path = write_file(tmp_path / "results_1.json", content)
    with pytest.raises(UserError, match=r"results_1\.json holds no scores"):
        read_scores(path)
    # Scores of a group and its tasks have filters.
    content["results"] |= {
        "mmlu_stem": {**group, "acc,none": 0.3, "acc_stderr,none": 0.1},
        "mmlu": {**group, "f1,x": 1},
    }
    expected = {("tiny", "step1", "mmlu f1 x", 1.0), ("tiny", "step1", "mmlu_stem acc", 0.3)}
    assert set(read_records(write_file(path, content))) == expected


def test_a_file_with_shots_is_not_of_an_old_version(tmp_path: Path) -> None:
    content = {"results": {"mmlu": {"questions": 114}}, "n-shot": {"mmlu": 5}, "configs": {}}
    with pytest.raises(UserError, match="holds no scores"):
        read_scores(write_file(tmp_path / "results_1.json", content))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("pretrained=org/base,peft=/ckpt/checkpoint-500", ("", "checkpoint-500")),
        ("peft=/ckpt/checkpoint-500/,pretrained=org/base,revision=step1000", ("", "checkpoint-500")),
        ("pretrained=org/base,revision=step1000,peft=runs/a/checkpoint-500", ("", "checkpoint-500")),
        ("pretrained=org/base,revision=step1000,lora_local_path=ckpt/checkpoint-500", ("", "checkpoint-500")),
        ("pretrained=org/base,delta=./delta-5,revision=step1000", ("", "delta-5")),
        # The harness loads an adapter from the hub at the revision.
        ("pretrained=org/base,peft=org/adapter,revision=step500", ("adapter", "step500")),
        (
            {"pretrained": "org/base", "peft": "org/adapter", "revision": "step500", "lora_local_path": None},
            ("adapter", "step500"),
        ),
        ({"pretrained": "org/base", "lora_local_path": "/ckpt/checkpoint-500", "peft": None}, ("", "checkpoint-500")),
        ("pretrained=org/base,peft=,delta=None,revision=step1000", ("base", "step1000")),
        ("pretrained='org/base', revision=\"step1000\"", ("base", "step1000")),
        ("pretrained=org/base,tokenizer=org/other,revision=step1000", ("base", "step1000")),
        ("pretrained=org/base,subfolder=checkpoint-500", ("", "checkpoint-500")),
        ("pretrained=org/base,subfolder=one,peft=org/adapter", ("", "adapter")),
        ("model=named,base_url=http://localhost:8000/v1", ("", "named")),
        (None, ("", "named")),
    ],
    ids=str,
)
def test_one_rule_names_the_model(arguments: Any, expected: tuple[str, str], tmp_path: Path) -> None:
    """An adapter is measured, not the model that it changes; the harness itself names `named`."""
    content = {"results": {"sciq": {"acc,none": 0.4}}, "config": {"model": "hf", "model_args": arguments}}
    [record] = read_records(write_file(tmp_path / "results_1.json", content | {"model_name": "named"}))
    assert record[:2] == expected


def test_two_adapters_are_two_checkpoints(tmp_path: Path) -> None:
    for step in (500, 1000):
        results = make_harness_results(f"org/base,peft=/ckpt/checkpoint-{step}", "step1000", step / 2000)
        write_file(tmp_path / f"results_{step}.json", results)
    base = write_file(tmp_path / "results_base.json", make_harness_results("org/base", "step1000", 0.9))
    assert {record for record in read_records(tmp_path) if record[2] == "sciq acc"} == {
        ("checkpoint-500", "main", "sciq acc", 0.25),
        ("checkpoint-1000", "main", "sciq acc", 0.5),
        ("base", "step1000", "sciq acc", 0.9),
    }
    base.unlink()
    assert {record[:2] for record in read_records(tmp_path)} == {("", "checkpoint-500"), ("", "checkpoint-1000")}


def test_a_folder_of_mteb(tmp_path: Path) -> None:
    folder = tmp_path / "org__encoder" / "step500"
    write_file(folder / "Banking77.json", make_mteb_results("Banking77", test=[("default", 0.8)]))
    write_file(
        folder / "STS22.json",
        make_mteb_results("STS22", test=[("en", 0.6), ("de", 0.5)], validation=[("default", 0.7)]),
    )
    expected = {
        ("encoder", "step500", "Banking77", 0.8), ("encoder", "step500", "STS22 en", 0.6),
        ("encoder", "step500", "STS22 de", 0.5), ("encoder", "step500", "STS22 validation", 0.7),
    }  # fmt: skip
    assert set(read_records(tmp_path)) == expected
    write_file(folder / "model_meta.json", {"name": "org/other", "revision": "step9", "n_parameters": 1})
    assert set(read_records(tmp_path)) == {("other", "step9", task, score) for _, _, task, score in expected}
    # A subfolder, a single file and the folder above are read alike.
    assert read_records(folder / "Banking77.json") == [("other", "step9", "Banking77", 0.8)]


def test_folders_without_a_revision_are_checkpoints_of_one_model(tmp_path: Path) -> None:
    for step in (10, 20):
        results = make_harness_results(f"runs/mine/models/step-{step}", None, step / 100)
        write_file(tmp_path / "scores" / f"results_{step}.json", results)
    assert {record[:2] for record in read_records(tmp_path / "scores")} == {("", "step-10"), ("", "step-20")}
    write_file(tmp_path / "scores" / "results_3.json", make_harness_results("org/mine", "step30", 0.3))
    write_file(tmp_path / "scores" / "results_4.json", make_harness_results("org/mine", None, 0.4))
    assert {record[:2] for record in read_records(tmp_path / "scores")} >= {("mine", "step30"), ("mine", "main")}


def test_foreign_files_of_a_folder_are_named(tmp_path: Path) -> None:
    write_file(tmp_path / "a" / "results_1.json", make_harness_results("org/mine", "step1", 0.3))
    for name in ("b.json", "c.json"):
        write_file(tmp_path / name, {"results": [1, 2]})
    _, remarks = read_scores(tmp_path)
    assert remarks == [f"left out, because it has no scores: {tmp_path / name}" for name in ("b.json", "c.json")]
    write_files(tmp_path, "._results.json", "a/.ipynb_checkpoints/results-checkpoint.json")
    assert read_scores(tmp_path)[1] == remarks


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"accuracy": 0.5}', "scores.json holds no scores of lm-evaluation-harness (results by task) or MTEB"),
        ('{"task_name": "STS22", "scores": {"test": [{"hf_subset": "en"}]}}', "scores.json holds no scores of"),
        ("[1, 2]", "scores.json holds no scores of"),
        ("{", "scores.json: not JSON"),
        (None, "; expected such a .json file, a folder of such files, or a"),
        (make_harness_results("org/tiny", "step1", 0.2), "scores.json: there is a second number for sciq acc"),
    ],
)
def test_another_file_is_one_line(content: Any, message: str, tmp_path: Path) -> None:
    if content is not None:
        write_file(tmp_path / "scores.json", content)
    if isinstance(content, dict):
        write_file(tmp_path / "results_1.json", content)
    with pytest.raises(UserError) as error:
        read_scores(tmp_path if content is None or isinstance(content, dict) else tmp_path / "scores.json")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["harness", "mteb", "csv"])
def test_the_same_scores_in_each_form_give_the_same_correlations(form: str, tmp_path: Path) -> None:
    isoscore, accuracy = [0.1, 0.3, 0.2, 0.5, 0.4], [0.25, 0.3, 0.4, 0.45, 0.6]
    steps = [1, 2, 4, 8, 16]
    lines = [f"org/tiny,step{step},{step},wiki,layer_2,{value}" for step, value in zip(steps, isoscore, strict=True)]
    geometry = write_file(tmp_path / "geometry.csv", "\n".join(["model,revision,step,source,layer,isoscore", *lines]))
    scores = tmp_path / "scores"
    for step, value in zip(steps, accuracy, strict=True):
        if form == "harness":
            write_file(
                scores / "org__tiny" / f"results_{step}.json", make_harness_results("org/tiny", f"step{step}", value)
            )
        elif form == "mteb":
            folder = scores / "org__tiny" / f"step{step}"
            write_file(folder / "sciq.json", make_mteb_results("sciq", test=[("default", value)]))
            write_file(folder / "model_meta.json", {"name": "org/tiny", "revision": f"step{step}"})
    if form == "csv":
        rows = [f"tiny,step{step},{value}" for step, value in zip(steps, accuracy, strict=True)]
        scores = write_file(tmp_path / "scores.csv", "\n".join(["model,revision,sciq", *rows]))
    out = tmp_path / "out"
    assert main(["correlate", str(geometry), str(scores), "--task", "sciq", "--out", str(out)]) == 0
    with (out / "correlation.csv").open(newline="") as file:
        rows = {row["task"]: row for row in csv.DictReader(file)}
    assert set(rows) == ({"sciq acc", "sciq acc_norm"} if form == "harness" else {"sciq"})
    for row in rows.values():
        assert (row["n"], row["model"]) == ("5", "tiny")
        for name, function in (("pearson", "pearsonr"), ("spearman", "spearmanr"), ("kendall", "kendalltau")):
            expected = getattr(scipy.stats, function)(isoscore, accuracy).statistic
            assert float(row[name]) == pytest.approx(expected, rel=1e-12)
