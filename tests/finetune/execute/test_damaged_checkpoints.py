"""Damaged and foreign checkpoints are refused, and runs resume from the last intact one."""

import copy
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from istar.errors import UserError
from istar.finetune.execute.run import run
from istar.finetune.training.checkpoints import CHECKPOINT_FORMAT, find_resumable_checkpoint, read_checkpoint
from tests.archives import compress_archive
from tests.finetune.execute.faults import EPOCHS, Broken, Build, break_at, only_folder, warnings_in
from tests.outcomes import assert_same


@pytest.fixture(scope="module")
def good_checkpoint(undisturbed_run: Path) -> Path:
    [path] = (undisturbed_run / "checkpoints").glob("step-*.ckpt")
    return path


@pytest.fixture
def checkpoints(good_checkpoint: Path, tmp_path: Path) -> Path:
    """Return a folder of checkpoints with an intact one, step-1, to which a test adds a newer one, step-2."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-1.ckpt").hardlink_to(good_checkpoint)
    for best in good_checkpoint.parent.glob("best-epoch-*.ckpt"):
        (folder / best.name).hardlink_to(best)
    return folder


def name_of_run(checkpoint: Path) -> str:
    return checkpoint.parents[1].name


def assert_refused(checkpoints: Path, run_name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that step-2 is refused with one warning and renamed, and that step-1 is used."""
    newer = checkpoints / "step-2.ckpt"
    damaged = newer.read_bytes()
    caplog.clear()
    assert find_resumable_checkpoint(checkpoints, run_name) == checkpoints / "step-1.ckpt"
    [warning] = warnings_in(caplog)
    assert str(newer) in warning
    assert "\n" not in warning
    assert not newer.exists()
    assert (checkpoints / "step-2.ckpt.refused").read_bytes() == damaged


def are_equal(first: Any, second: Any) -> bool:
    """Return whether two checkpoints are equal, including types, the order of keys, and NaN."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and bool(torch.equal(first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(are_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(are_equal(*pair) for pair in zip(first, second, strict=True))
    return type(first) is type(second) and (first == second or (first != first and second != second))


def test_a_damaged_checkpoint_that_is_the_only_one(checkpoints: Path, good_checkpoint: Path, caplog: Any) -> None:
    (checkpoints / "step-1.ckpt").unlink()
    (checkpoints / "step-2.ckpt").write_bytes(b"not yours")
    assert find_resumable_checkpoint(checkpoints, name_of_run(good_checkpoint)) is None
    assert len(warnings_in(caplog)) == 1


def test_a_compressed_checkpoint_fills_no_memory(checkpoints: Path, good_checkpoint: Path, caplog: Any) -> None:
    """A few kilobytes that torch would load as a gigabyte."""
    compress_archive(good_checkpoint, checkpoints / "step-2.ckpt")
    assert torch.load(checkpoints / "step-2.ckpt", weights_only=True).keys()
    assert_refused(checkpoints, name_of_run(good_checkpoint), caplog)
    assert "its content is compressed" in caplog.text


def test_flipped_bits(checkpoints: Path, good_checkpoint: Path, caplog: Any) -> None:
    """Eight flipped bits anywhere and eight in the directory of the archive; each is refused or harmless."""
    data, original = good_checkpoint.read_bytes(), read_checkpoint(good_checkpoint)
    generator = random.Random(7)
    newer = checkpoints / "step-2.ckpt"
    directory_start = data.index(b"PK\x01\x02")
    positions = [generator.randrange(len(data)) for _ in range(8)]
    positions += [generator.randrange(directory_start, len(data)) for _ in range(8)]
    refused_count = 0
    for position in positions:
        damaged = bytearray(data)
        damaged[position] ^= 1 << generator.randrange(8)
        newer.write_bytes(damaged)
        caplog.clear()
        resumable = find_resumable_checkpoint(checkpoints, name_of_run(good_checkpoint))
        if resumable == newer:
            assert are_equal(read_checkpoint(newer), original), position
            assert warnings_in(caplog) == []
        else:
            refused_count += 1
            assert resumable == checkpoints / "step-1.ckpt"
            assert (checkpoints / "step-2.ckpt.refused").exists()
            [warning] = warnings_in(caplog)
            assert str(newer) in warning
            assert "\n" not in warning
    assert refused_count > 5


def edit_checkpoint(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the content of a checkpoint, changed in place by `edit`."""
    content = copy.deepcopy(read_checkpoint(checkpoint))
    edit(content)
    return content


class RunsCode:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def callback_state(content: dict[str, Any]) -> dict[str, Any]:
    """Return the state that the callback `Checkpoints` has saved in a checkpoint."""
    return content["callbacks"]["Checkpoints"]


Edit = Callable[[dict[str, Any]], object]
EDITS: dict[str, Edit] = {
    "callbacks without ours": lambda content: content["callbacks"].pop("Checkpoints"),
    "another run": lambda content: callback_state(content).update(run="demo-tiny-none-0"),
    "another format": lambda content: callback_state(content).update(format=CHECKPOINT_FORMAT + 1),
    "no format": lambda content: callback_state(content).pop("format"),
    "no history": lambda content: content["callbacks"].pop("History"),
    "no run": lambda content: callback_state(content).pop("run"),
    "no random numbers": lambda content: callback_state(content).pop("random"),
}
FOREIGN: dict[str, Any] = {
    "empty dict": {}, "a dict": {"weights": torch.zeros(3)}, "weights only": {"state_dict": {}, "callbacks": {}},
    "a list": [1, 2], "a tensor": torch.zeros(3), "no callbacks": {"callbacks": None},
}  # fmt: skip


@pytest.mark.parametrize("kind", [*EDITS, *FOREIGN])
def test_a_foreign_checkpoint(checkpoints: Path, good_checkpoint: Path, caplog: Any, kind: str) -> None:
    content = edit_checkpoint(good_checkpoint, EDITS[kind]) if kind in EDITS else FOREIGN[kind]
    torch.save(content, checkpoints / "step-2.ckpt")
    assert_refused(checkpoints, name_of_run(good_checkpoint), caplog)


@pytest.mark.parametrize("kind", ["empty", "text", "half", "without its last byte", "another archive", "a pickle"])
def test_no_checkpoint(checkpoints: Path, good_checkpoint: Path, caplog: Any, tmp_path: Path, kind: str) -> None:
    newer, marker, data = checkpoints / "step-2.ckpt", tmp_path / "marker", good_checkpoint.read_bytes()
    pickled = pickle.dumps(RunsCode(marker))
    if kind == "another archive":
        with zipfile.ZipFile(newer, "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
            archive.writestr("archive/version", "3")
    else:
        contents = {"empty": b"", "text": b"not yours", "half": data[: len(data) // 2], "a pickle": pickled}
        newer.write_bytes(contents.get(kind, data[:-1]))
    assert_refused(checkpoints, name_of_run(good_checkpoint), caplog)
    assert not marker.exists()


@pytest.mark.parametrize("is_old", [False, True], ids=["archive", "old format"])
def test_code_in_a_checkpoint(
    checkpoints: Path, good_checkpoint: Path, caplog: Any, tmp_path: Path, is_old: bool
) -> None:
    marker = tmp_path / "marker"
    content = edit_checkpoint(good_checkpoint, lambda content: content.update(extra=RunsCode(marker)))
    torch.save(content, checkpoints / "step-2.ckpt", _use_new_zipfile_serialization=not is_old)
    assert_refused(checkpoints, name_of_run(good_checkpoint), caplog)
    assert not marker.exists()
    torch.load(checkpoints / "step-2.ckpt.refused", weights_only=False)
    assert marker.exists()


def test_fsdp_needs_a_checkpoint_of_fsdp(checkpoints: Path, good_checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"written without trainer\.strategy=fsdp .*run\.overwrite=true") as error:
        find_resumable_checkpoint(checkpoints, name_of_run(good_checkpoint), is_sharded=True)
    assert "\n" not in str(error.value)


def damage(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("selection", "failing_step"), [("the newest", 4), pytest.param("all", 7, marks=pytest.mark.slow)]
)
def test_a_run_with_damaged_checkpoints_ends_as_the_undisturbed_one(
    small: Build, undisturbed_run: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, selection: str, failing_step: int
) -> None:
    config = small(*EPOCHS)
    restore_step = break_at(monkeypatch, failing_step, Broken())
    with pytest.raises(Broken):
        run(config)
    restore_step()
    folder = only_folder(config)
    checkpoints = sorted((folder / "checkpoints").glob("step-*.ckpt"))
    assert [path.name for path in checkpoints] == [f"step-{failing_step - 2}.ckpt", f"step-{failing_step - 1}.ckpt"]
    damaged_checkpoints = checkpoints if selection == "all" else checkpoints[-1:]
    for path in damaged_checkpoints:
        damage(path)
    caplog.clear()
    run(config)
    warnings = warnings_in(caplog)
    damage_warnings = warnings[: len(damaged_checkpoints)]
    for path, warning in zip(reversed(damaged_checkpoints), damage_warnings, strict=True):
        assert str(path) in warning
        assert "checksum" in warning
    assert warnings[len(damaged_checkpoints) :] == (
        [] if selection == "all" else [f"{folder} was interrupted; it resumes from {checkpoints[0].name}"]
    )
    assert_same(folder, undisturbed_run)


@pytest.mark.parametrize("is_gone", [False, True], ids=["damaged", "gone"])
def test_checkpoints_need_the_best_epoch(checkpoints: Path, good_checkpoint: Path, caplog: Any, is_gone: bool) -> None:
    best_epoch = read_checkpoint(good_checkpoint)["callbacks"]["History"]["best"]
    best_weights = checkpoints / f"best-epoch-{best_epoch}.ckpt"
    data = best_weights.read_bytes()
    best_weights.unlink()
    if not is_gone:
        best_weights.write_bytes(data)
        damage(best_weights)
    assert find_resumable_checkpoint(checkpoints, name_of_run(good_checkpoint)) is None
    [warning] = warnings_in(caplog)
    assert str(best_weights) in warning
    assert (checkpoints / "step-1.ckpt.refused").exists()
