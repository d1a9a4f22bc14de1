"""Visible files of a folder, and arguments that name files and folders with signs of other meanings."""

from pathlib import Path

import pytest

from istar.errors import UserError
from istar.files.folders import list_visible, split_label, to_file_name

HIDDEN = ("._a.txt", ".~lock.a.txt#", ".ipynb_checkpoints/a.txt", "b/.a.txt", "b/.c/a.txt")
"""Files that systems, offices and notebooks leave next to a file `a.txt`."""


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\xff")


def test_hidden_files_are_not_listed(tmp_path: Path) -> None:
    folder = tmp_path / ".texts"  # a hidden folder that is named may be read
    write_files(folder, *HIDDEN, "b/d/a.txt", "a.txt", "b/a.txt")
    assert list_visible(folder) == [folder / "a.txt", folder / "b"]
    assert list_visible(folder, "*/*.txt") == [folder / "b" / "a.txt"]
    assert list_visible(folder, "**/*.txt") == [folder / name for name in ("a.txt", "b/a.txt", "b/d/a.txt")]
    assert list_visible(folder / "none") == []


@pytest.mark.parametrize(
    ("argument", "label", "rest"),
    [
        ("lr=0.1/model", "", "lr=0.1/model"), ("x=lr=0.1/model", "x", "lr=0.1/model"),
        ("a=b=lr=0.1/model", "a=b", "lr=0.1/model"), ("x=a=b.txt", "x", "a=b.txt"), ("a=b.txt", "", "a=b.txt"),
        ("a/x=a=b.txt", "a/x", "a=b.txt"), ("gpt2", "", "gpt2"), ("x=gpt2", "x", "gpt2"),
        ("lr=0.1=org/model", "lr=0.1", "org/model"), ("org/model@lr=0.1", "", "org/model@lr=0.1"),
        ("x=org/model@lr=0.1", "x", "org/model@lr=0.1"), ("x@1=org/model@1", "x@1", "org/model@1"),
        ("x=hf://org/data:a=b:train", "x", "hf://org/data:a=b:train"), ("x=/none/a=b", "x", "/none/a=b"),
    ],
)  # fmt: skip
def test_what_exists_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, label: str, rest: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, "lr=0.1/model/config.json", "a=b.txt")
    assert split_label(argument) == (label, rest)


@pytest.mark.parametrize("label", ["", ".", "..", ".istar"])
def test_labels_that_name_other_folders_are_refused(tmp_path: Path, label: str) -> None:
    for rest in ("org/model", str(tmp_path)):
        with pytest.raises(UserError, match="cannot name a folder") as caught:
            split_label(f"{label}={rest}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("label", ["../a", "/a", "a/../..", "a/b", "..."])
def test_names_of_results_lie_in_their_folder(tmp_path: Path, label: str) -> None:
    assert (tmp_path / to_file_name(label)).resolve().parent == tmp_path.resolve()
