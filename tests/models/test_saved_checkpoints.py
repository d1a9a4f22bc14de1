"""Models and checkpoints named on a command line, with names that look like labels, revisions and patterns."""

import json
from pathlib import Path

import pytest

from istar.errors import UserError
from istar.models.saved_checkpoints import ModelArgument, find_checkpoints, find_revisions, parse_models


def write_model(folder: Path, file_name: str = "config.json", step: int | None = None) -> Path:
    """Write a folder that is a model by its files, for tests that read no weights."""
    folder.mkdir(parents=True)
    (folder / file_name).write_text("{}")
    if step is not None:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


@pytest.mark.parametrize("folder", ["lr=0.1/model", "a=b", "exp [old]", "a@b=c", "runs/lr=0.1,wd=0"])
@pytest.mark.parametrize("label", ["", "x=", "x=y="])
def test_folders_are_taken_as_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, label: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / folder)
    for name in (folder, str(tmp_path / folder)):
        assert parse_models([label + name]) == [ModelArgument(label.removesuffix("="), name)]


def test_labels_stay_in_the_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for label in ("", ".", ".."):
        with pytest.raises(UserError, match="cannot name a folder"):
            parse_models([f"{label}=org/model"])
    folder = write_model(tmp_path / "runs" / "a" / "b")
    monkeypatch.chdir(folder)
    arguments = [".", "..", f"../x={folder}", "org/bert@a/b", "/"]
    assert [model.default_label for model in parse_models(arguments)] == ["b", "a", ".._x", "bert-a_b", "_"]
    with pytest.raises(UserError, match="cannot name a folder"):
        find_revisions("org/model", ["."])
    assert [(checkpoint.label, checkpoint.name) for checkpoint in find_checkpoints(".")] == [("b", ".")]


@pytest.mark.parametrize(
    ("pattern", "steps"),
    [
        ("exp [old]", [5, 10]), ("exp [old]/checkpoint-*", [5, 10]), ("exp [old]/checkpoint-[15]*", [5, 10]),
        ("exp [old]/checkpoint-10", [10]), ("exp*/checkpoint-*", [5, 10]), ("r*/*/exp [old]/*", [5]),
        ("runs/exp [[]old]/*", []), ("x?", [7]), ("x?/", [7]), ("x?/../x?", [7]), ("checkpoint-*", []), ("", []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_absolute", [False, True])
def test_what_exists_is_no_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, steps: list[int], is_absolute: bool
) -> None:
    for step in (10, 5):
        write_model(tmp_path / "exp [old]" / f"checkpoint-{step}", step=step)
    write_model(tmp_path / "exp [old]" / ".checkpoint-15", step=15)
    write_model(tmp_path / "runs" / "a" / "exp [old]" / "checkpoint-5", step=5)
    write_model(tmp_path / "x?", step=7)
    write_model(tmp_path / "xo", step=8)
    monkeypatch.chdir(tmp_path)
    pattern = str(tmp_path / pattern) if is_absolute and pattern else pattern
    if not steps:
        with pytest.raises(UserError, match="matches no model"):
            find_checkpoints(pattern)
    else:
        checkpoints = find_checkpoints(pattern)
        assert [checkpoint.step for checkpoint in checkpoints] == steps
        assert all(Path(checkpoint.name).is_absolute() == is_absolute for checkpoint in checkpoints)


def test_folders_of_adapters_alone_are_checkpoints(tmp_path: Path) -> None:
    for step in (500, 1000):
        write_model(tmp_path / "out" / f"checkpoint-{step}", "adapter_config.json", step)
    (tmp_path / "out" / "runs").mkdir()
    for pattern in ("out", "out/*", "out/checkpoint-*"):
        steps = {checkpoint.label: checkpoint.step for checkpoint in find_checkpoints(str(tmp_path / pattern))}
        assert steps == {"checkpoint-500": 500, "checkpoint-1000": 1000}
    # The final adapters, which `save_model` writes next to the checkpoints.
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    assert [checkpoint.step for checkpoint in find_checkpoints(str(tmp_path / "out"))] == [500, 1000]
    for file_name in ("config.json", "adapter_config.json"):
        run = write_model(tmp_path / file_name / "model", file_name).parent
        assert ModelArgument("", str(run)).source.name == str(run / "model")
        assert [checkpoint.name for checkpoint in find_checkpoints(str(run))] == [str(run / "model")]


def test_a_folder_of_runs_and_a_run_without_its_model_are_named(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "result.json").touch()
    [runs, run] = parse_models([str(tmp_path / "runs"), str(tmp_path / "runs" / "a")])
    with pytest.raises(UserError, match=r"runs is a folder of 2 runs; name one or several, such as .*/runs/a$"):
        _ = runs.source
    with pytest.raises(UserError, match=r"a is a run without a saved model; train it with run\.save_model=true$"):
        _ = run.source
