"""Full disks, lacking memory, over-long names, pipes and impossible configurations end in one line."""

import csv
import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedConfig

from istar.cli.main import main
from istar.embeddings import embed_models
from istar.errors import UserError
from istar.files import writing
from istar.finetune.config import schema
from istar.models import adapters
from istar.models.architectures import get_checkpoint_class
from tests.cli.test_foreign_files import ARGUMENTS, call, inputs, world
from tests.embeddings.builders import save_model
from tests.files.test_outputs import read_tree

__all__ = ["inputs", "world"]  # fixtures

pytestmark = pytest.mark.usefixtures("blank_figures")


def assert_one_line(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    for part in parts:
        assert part in lines[0]


def fail_to_sync(monkeypatch: pytest.MonkeyPatch, number: int, folders: bool) -> None:
    original_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == folders:
            raise OSError(number, os.strerror(number))
        original_fsync(descriptor)

    monkeypatch.setattr(writing.os, "fsync", fsync)


def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "model")
    fail_to_sync(monkeypatch, errno.ENOSPC, folders=False)
    for save in ([], ["--save", "model"]):
        assert main(["embed", str(folder), "--out", str(tmp_path / "out"), *save]) == 2
        assert_one_line(capsys, "--out", "No space left on device")
    monkeypatch.undo()
    assert main(["embed", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert not [name for name in read_tree(tmp_path / "out") if name.startswith(".")]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_folders_is_tolerated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail_to_sync(monkeypatch, number, folders=True)
    writing.write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (MemoryError(), "not enough memory"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.csv"), "x.csv: No space left on device"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "No space left"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "not enough memory"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_the_machine_anywhere_in_a_command_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, part: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    folder = save_model(tmp_path / "model")
    monkeypatch.setattr(embed_models, "measure_embeddings", fail)
    assert main(["embed", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert_one_line(capsys, part)


def test_a_mistake_of_the_program_keeps_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("shapes do not match")

    folder = save_model(tmp_path / "model")
    monkeypatch.setattr(embed_models, "measure_embeddings", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        main(["embed", str(folder), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_an_over_long_name_is_one_line(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    # From Python 3.14 on, these methods return False where earlier versions raise an OSError.
    functions = {
        "exists": os.path.exists,
        "is_dir": os.path.isdir,
        "is_file": os.path.isfile,
        "is_symlink": os.path.islink,
    }
    for name, function in functions.items():
        monkeypatch.setattr(Path, name, lambda path, function=function: function(path))
    assert call(world, arguments, world / ("a" * 300)) == 2
    assert_one_line(capsys, "File name too long")


@pytest.mark.parametrize("command", ["measure {} --text {}", "embed {} --wordsim {}", "correlate {} {}", "report {}"])
def test_an_over_long_name_of_an_input_is_one_line(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main(command.replace("{}", "a" * 5000).split()) in (1, 2)
    assert_one_line(capsys)


def test_formulas_in_csv_files_are_texts_and_numbers_stay_numbers() -> None:
    names = ["=1+1", "+cmd", "-x", "@sum", "\t=a", "plain", "-", "-1.5", "+2", "-inf", "1e5", "", "a=b"]
    frame = pd.DataFrame({"=name": names, "value": range(-7, 6), "x": [-0.5] * 13}).convert_dtypes()
    frame.loc[3, "value"] = pd.NA
    rows = list(csv.reader(io.StringIO(writing.to_csv(frame))))
    assert rows[0] == ["'=name", "value", "x"]
    assert [row[0] for row in rows[1:]] == [*(f"'{name}" for name in names[:5]), *names[5:]]
    assert [row[1] for row in rows[1:]] == ["-7", "-6", "-5", "", *map(str, range(-3, 6))]
    assert {row[2] for row in rows[1:]} == {"-0.5"}
    assert [writing.unescape_cell(row[0]) for row in rows[1:]] == names
    assert list(frame["=name"]) == names  # unchanged


@pytest.mark.parametrize("command", ["embed {model} --form centered --save model", "measure {model} --text {text}"])
def test_an_impossible_number_of_layers_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "text.txt").write_text("the cat sees the dog\n" * 20)
    arguments = command.format(model=folder, text=tmp_path / "text.txt").split()
    for num_layers in (-1, 0, 10_000_000):
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
        capsys.readouterr()
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
        assert_one_line(capsys, f"num_hidden_layers is {num_layers}")


def test_a_class_that_is_no_model_is_replaced_by_that_of_the_model_type(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["pipeline"]}))
    arguments = ["embed", str(folder), "--form", "centered", "--save", "model"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert get_checkpoint_class(PreTrainedConfig(architectures=[3])) is None


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("embed {model}", "model/config.json"),
        ("embed {model} --wordsim {pipe}", "pipe"),
        ("embed {model} --text {pipe}", "pipe"),
        ("measure {model} --text {pipe}", "pipe"),
        ("measure {model} --text {folder}", "folder/text.txt"),
        ("correlate {pipe} {pipe}", "pipe"),
        ("measure --checkpoints {model} --text {model} --steps {pipe}", "pipe"),
    ],
)
def test_a_pipe_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "folder").mkdir()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    places = {place: tmp_path / place for place in ("model", "pipe", "folder")}
    assert main([*command.format(**places).split(), "--out", str(tmp_path / "out")]) == 2
    assert_one_line(capsys, "a pipe or a device")


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_a_regular_expression_for_modules_is_one_line(tmp_path: Path, key: str) -> None:
    settings = {"base_model_name_or_path": "bert", "target_modules": ["query"], key: "(a+)+$"}
    (tmp_path / adapters.ADAPTER_CONFIG_FILE).write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f"{key} is a regular expression"):
        adapters.read_base_source(tmp_path)
    settings |= {key: "all-linear"}
    (tmp_path / adapters.ADAPTER_CONFIG_FILE).write_text(json.dumps(settings))
    assert adapters.read_base_source(tmp_path).name == "bert"


@pytest.mark.parametrize("root", ["d${x}", r"d\${x}", r"\\${x}${y}", "a$b", "end\\", "${"])
def test_a_config_for_a_process_of_a_run_keeps_values_that_look_like_interpolations(
    tmp_path: Path, small: Any, root: str
) -> None:
    config = small()
    config.run.root = root
    (tmp_path / "config.yaml").write_text(schema.to_yaml(config))
    loaded: Any = OmegaConf.load(tmp_path / "config.yaml")
    assert schema.load(loaded) == config
