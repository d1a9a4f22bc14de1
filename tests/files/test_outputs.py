"""Folders of results: nothing foreign is ever replaced, and a kill at any system call leaves whole files.

Each writer of the package is stopped before each of its system calls that change the file system, and makes no such
call from then on, as if it were killed. Then each file must be the old or the new one, and the next call must write the
new ones and leave nothing unfinished.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from istar.drawing import page_folder
from istar.drawing.page_folder import PageKind
from istar.errors import UserError
from istar.files.outputs import STATE_FOLDER, Output, run_output
from istar.files.writing import write_text
from istar.finetune.training.checkpoints import (
    AtomicCheckpointIO,
    find_resumable_checkpoint,
    read_checkpoint,
    remove_old_checkpoints,
)
from istar.reports import run_frame

KILLED = 77
SYSTEM_CALLS = ("rename", "replace", "unlink", "mkdir", "rmdir")
Tree = dict[str, bytes]


def read_tree(root: Path) -> Tree:
    """Return the content of all files below a folder; of a link, its target. Empty folders have a name that ends in /.

    The manifest, whose content is not a result, is left out.
    """
    tree = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            tree[name] = os.readlink(path).encode()  # noqa: PTH115
        elif path.is_file():
            tree[name] = path.read_bytes()
        elif not any(path.iterdir()):
            tree[f"{name}/"] = b""
    return {name: content for name, content in tree.items() if name != f"{STATE_FOLDER}/manifest.json"}


class Killed(BaseException):
    """Ends a writer, which cannot handle it: every further system call raises it again."""


@contextmanager
def fatal_calls(count: int, end: Callable[[], Any]) -> Iterator[None]:
    """Within the block, call `end` in place of the count-th system call and of all later ones."""
    num_calls = 0

    def make_fatal(original_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return end() if num_calls >= count else original_call(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in SYSTEM_CALLS:
            patch.setattr(os, name, make_fatal(getattr(os, name)))
        yield


def raise_killed() -> None:
    raise Killed


def is_stopped(write: Callable[[], Any], count: int) -> bool:
    """Call `write`, and let its count-th system call and all later ones fail; return False if it makes fewer calls."""
    try:
        with fatal_calls(count, raise_killed):
            write()
    except Killed:
        return True
    return False


def is_fork_killed(write: Callable[[], Any], count: int) -> bool:
    """Call `write` in a fork that dies at its count-th system call, with all that it has not flushed."""
    child = os.fork()
    if child == 0:
        try:
            with fatal_calls(count, lambda: os._exit(KILLED)):
                write()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


@pytest.fixture(params=[is_stopped, pytest.param(is_fork_killed, marks=pytest.mark.slow)])
def is_killed(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any], int], bool]:
    """Return the way in which a writer ends early; killing forks takes five times as long, and is nightly."""
    return request.param


KIND = PageKind("report", "test", ("data.json",))


def write_page(root: Path, version: str) -> None:
    """Write a page; the two versions have some files in common."""
    page_folder.check(root, KIND)
    names = ("index.html", "data.json", "tables/a.csv", f"tables/{version}.csv", f"figures/{version}.svg")
    page_folder.write(root, {name: f"{name} {version}".encode() for name in names}, KIND)


def write_model(root: Path, version: str) -> None:
    """Write a model and a file of measures, as `istar embed --save model` and `istar train` do."""
    output = Output(root, "matrix")
    output.check(["model", "measures.json"])
    draft = output.make_draft()
    for name in ("config.json", "weights", f"{version}/deep"):
        (draft / name).parent.mkdir(exist_ok=True)
        (draft / name).write_text(f"{name} {version}")
    output.write({"measures.json": version.encode()}, {"model": draft, "models/step-1": _copy(output, draft)})


def _copy(output: Output, draft: Path) -> Path:
    copy = output.open_state("copy")
    copy.mkdir(exist_ok=True)
    for path in draft.glob("w*"):
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def write_runs(root: Path, version: str) -> None:
    run_frame.export_frame(pd.DataFrame({"version": [version]}), root / "runs.csv")


def write_checkpoint(root: Path, version: str) -> None:
    AtomicCheckpointIO().save_checkpoint({"version": version}, root / "step-1.ckpt")


def write_record(root: Path, version: str) -> None:
    write_text(root / "result.json", json.dumps({"version": version}))


WRITERS = [write_page, write_model, write_runs]


# All `WRITERS` call `Output.write`, of which a page and a table without earlier ones have no step of their own.
@pytest.mark.parametrize(
    ("write", "has_earlier"),
    [
        *((write, True) for write in (*WRITERS, write_checkpoint, write_record)),
        *((write, False) for write in (write_model, write_checkpoint, write_record)),
        *(pytest.param(write, False, marks=pytest.mark.slow) for write in (write_page, write_runs)),
    ],
)
def test_a_writer_that_is_killed_at_any_step(
    tmp_path: Path, write: Callable[[Path, str], None], has_earlier: bool, is_killed: Callable[..., bool]
) -> None:
    old_tree: Tree = {}
    write(tmp_path / "new", "2")
    new_tree = read_tree(tmp_path / "new")
    if has_earlier:
        write(tmp_path / "old", "1")
        old_tree = read_tree(tmp_path / "old")
    count = 1
    while True:
        root = tmp_path / str(count)
        if has_earlier:
            write(root, "1")
        (tmp_path / "marker").write_text("")
        killed = is_killed(lambda root=root: write(root, "2"), count)
        if root.exists() and write in WRITERS:
            # The next call recovers first, which must leave the old or the new file everywhere.
            Output(root, "other").check([])
        for name, content in read_tree(root).items() if root.exists() else ():
            is_state = (
                name.endswith("/") or name.startswith(STATE_FOLDER) or (write not in WRITERS and name.startswith("."))
            )
            assert is_state or content in (old_tree.get(name), new_tree.get(name)), (count, name)
        for name in set(old_tree) & set(new_tree):
            assert (root / name).exists() or name.startswith("model"), (count, name)
        if write is write_model and has_earlier:
            model = read_tree(root / "model")
            assert model in ({}, read_tree(tmp_path / "old" / "model"), read_tree(tmp_path / "new" / "model"))
        if not killed:
            break
        write(root, "2")
        final_tree = read_tree(root)
        if write not in WRITERS:  # `istar train` removes the drafts when it resumes the run
            final_tree = {name: content for name, content in final_tree.items() if not name.startswith(".")}
        assert final_tree == new_tree, count
        count += 1
    assert count > 3


def test_a_checkpoint_is_whole_after_each_kill(tmp_path: Path, is_killed: Callable[..., bool]) -> None:
    path = tmp_path / "step-1.ckpt"
    AtomicCheckpointIO().save_checkpoint({"value": torch.zeros(3)}, path)
    count = 1
    while is_killed(lambda: AtomicCheckpointIO().save_checkpoint({"value": torch.ones(3)}, path), count):
        assert read_checkpoint(path)["value"].tolist() in ([0.0] * 3, [1.0] * 3)
        count += 1
    assert read_checkpoint(path)["value"].tolist() == [1.0] * 3


def test_a_refused_checkpoint_replaces_no_earlier_one(tmp_path: Path) -> None:
    for name in ("step-1.ckpt", "step-1.ckpt.refused", "step-1.ckpt.refused-2", "step-mine-1.ckpt"):
        (tmp_path / name).write_text(name)
    assert find_resumable_checkpoint(tmp_path, "run") is None
    remove_old_checkpoints(tmp_path, tmp_path / "best-epoch-1.ckpt")
    assert read_tree(tmp_path) == {
        "step-1.ckpt.refused": b"step-1.ckpt.refused", "step-1.ckpt.refused-2": b"step-1.ckpt.refused-2",
        "step-1.ckpt.refused-3": b"step-1.ckpt", "step-mine-1.ckpt": b"step-mine-1.ckpt",
    }  # fmt: skip


def make_foreign(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")


@pytest.mark.parametrize(
    "name", ["index.html", "data.json", "figures/mine.png", "tables/deep/notes.txt", "figures", "tables/2.csv"]
)
@pytest.mark.parametrize("has_earlier", [False, True])
def test_foreign_files_are_refused_before_any_work(tmp_path: Path, name: str, has_earlier: bool) -> None:
    root = tmp_path / "out"
    if has_earlier:
        write_page(root, "1")
        if (root / name).is_dir():
            return
    make_foreign(root / name)
    if has_earlier and name in ("index.html", "data.json"):
        expected_message = f"{name} was changed after istar wrote it"
    else:
        expected_message = f"holds {name}, which is no part of a report"
    tree = read_tree(root)
    for call in (page_folder.check, page_folder.write):
        with pytest.raises(UserError, match=expected_message):
            call(root, KIND) if call is page_folder.check else write_page(root, "2")
        assert read_tree(root) == tree


def test_foreign_files_of_other_names_stay(tmp_path: Path) -> None:
    write_page(tmp_path, "1")
    make_foreign(tmp_path / "notes.txt")
    make_foreign(tmp_path / ".pass" / "mine")
    write_page(tmp_path, "2")
    assert read_tree(tmp_path).keys() == {
        "index.html", "data.json", "tables/a.csv", "tables/2.csv", "figures/2.svg", "notes.txt", ".pass/mine",
    }  # fmt: skip


def test_a_full_disk_is_one_line_and_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_page(tmp_path, "1")
    tree = read_tree(tmp_path)
    syncs = iter(range(4))

    def sync_until_full(descriptor: int) -> None:
        if next(syncs, None) is None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", sync_until_full)
    with pytest.raises(UserError, match=r"cannot be written: .*No space left"):
        write_page(tmp_path, "2")
    assert read_tree(tmp_path) == tree


def test_files_of_another_command_are_foreign(tmp_path: Path) -> None:
    write_page(tmp_path, "1")
    with pytest.raises(UserError, match=r"holds index\.html, which is no part of a comparison"):
        page_folder.check(tmp_path, PageKind("comparison", "test"))
    Output(tmp_path, "table").write({"runs.csv": b"1"}, is_complete=True)
    write_page(tmp_path, "2")
    assert (tmp_path / "runs.csv").read_bytes() == b"1"


@pytest.mark.parametrize("name", [".", "figures", "tables/a.csv", STATE_FOLDER, f"{STATE_FOLDER}/manifest.json"])
@pytest.mark.parametrize("has_earlier", [False, True])
def test_links_are_not_followed(tmp_path: Path, name: str, has_earlier: bool) -> None:
    root, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    if has_earlier:
        write_page(root, "1")
        (root / name).rename(elsewhere)
    else:
        make_foreign(elsewhere / "1.svg")
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root if name == "." else root / name).symlink_to(elsewhere)
    tree = read_tree(elsewhere) if elsewhere.is_dir() else elsewhere.read_bytes()
    with pytest.raises(UserError):
        write_page(root, "2")
    assert (read_tree(elsewhere) if elsewhere.is_dir() else elsewhere.read_bytes()) == tree


def test_a_linked_model_is_refused(tmp_path: Path) -> None:
    make_foreign(tmp_path / "elsewhere" / "weights")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="holds model, which is no part"):
        write_model(tmp_path / "out", "1")
    assert read_tree(tmp_path / "elsewhere") == {"weights": b"mine"}


def test_a_model_with_a_foreign_file_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    write_model(tmp_path, "1")
    make_foreign(tmp_path / "model" / "notes.txt")
    make_foreign(tmp_path / "models" / "step-1" / "notes.txt")
    tree = read_tree(tmp_path)
    with pytest.raises(UserError, match=r"model/notes\.txt"):
        write_model(tmp_path, "2")
    with pytest.raises(UserError, match=r"models/step-1/notes\.txt"):
        Output(tmp_path, "matrix").remove_folder("models/step-1")
    tree |= {name: content for name, content in read_tree(tmp_path).items() if name.startswith(STATE_FOLDER)}
    assert read_tree(tmp_path) == tree


def test_a_model_is_read_again_only_if_its_size_or_time_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "1")
    weights = tmp_path / "model" / "weights"
    output, read_files, file_digest = Output(tmp_path, "matrix"), [], hashlib.file_digest

    def record(file: Any, name: Any) -> Any:
        read_files.append(Path(file.name))
        return file_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", record)
    output.check(["model", "models"])
    assert {path.name for path in read_files} == {"measures.json"}
    # A copy of the folder on another machine has other times.
    os.utime(weights, ns=(1, 1))
    output.check(["model", "models"])
    assert {path.name for path in read_files} == {"measures.json", "weights"}
    weights.write_text("weights X")
    with pytest.raises(UserError, match="model/weights was changed after istar wrote it"):
        output.check(["model", "models"])


@pytest.mark.parametrize("name", ["../victim", "/victim", "a/../../victim"])
def test_the_manifest_of_a_stranger_reaches_no_other_folder(tmp_path: Path, name: str) -> None:
    write_page(tmp_path / "out", "1")
    victim = tmp_path / "victim"
    make_foreign(victim)
    manifest = tmp_path / "out" / STATE_FOLDER / "manifest.json"
    content = json.loads(manifest.read_text())
    checksum = "3fd30542fe3f61b14bd4a4b2dc0b6fb30fa6f63ebce52dd1778aaa8c4dc02cff"  # of "mine"
    content["files"][name.replace("/victim", str(victim)) if name == "/victim" else name] = ["report", checksum]
    manifest.write_text(json.dumps(content))
    write_page(tmp_path / "out", "2")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("text", ["", "[", "[]", '{"files": 3}', '{"files": {"a": 3}}', "[" * 100_000])
def test_a_damaged_manifest_is_one_line(tmp_path: Path, text: str) -> None:
    write_page(tmp_path, "1")
    (tmp_path / STATE_FOLDER / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="manifest"):
        write_page(tmp_path, "2")


def test_inputs_are_not_replaced(tmp_path: Path) -> None:
    write_model(tmp_path, "1")
    output = Output(tmp_path, "matrix")
    for path in (tmp_path, tmp_path / "model", tmp_path / "model" / "weights", tmp_path / "x" / ".." / "measures.json"):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(UserError, match="would replace files of the input"):
            output.check(["model", "measures.json"], [path])
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(UserError, match="would replace files of the input"):
        output.check(["model"], [tmp_path / "link"])
    output.check(["model"], ["google-bert/bert-base-cased", tmp_path / "x", "a" * 5000])


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe or a device"):
        Output(tmp_path / "out", "report").check([], [tmp_path / "pipe"])


def test_a_run_folder_that_istar_has_not_begun_is_refused(tmp_path: Path) -> None:
    make_foreign(tmp_path / "config.yaml")
    output = run_output(tmp_path)
    with pytest.raises(UserError, match=r"config\.yaml, which is no part of a run; run\.overwrite=true keeps"):
        output.check(output.list_names())
