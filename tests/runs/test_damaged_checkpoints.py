"""Damaged and foreign checkpoints are refused, and runs resume from the last intact one."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from istar.errors import UserError
from istar.runs.run import run
from istar.training.checkpoints import FORMAT_VERSION, find_resumable_checkpoint, read_checkpoint
from tests.outcomes import assert_same
from tests.runs.faults import (
    EPOCHS,
    Broken,
    Build,
    break_at,
    only_folder,
    refused_in_one_line,
    warnings_in,
)


@pytest.fixture(scope="module")
def good(undisturbed: Path) -> Path:
    [path] = (undisturbed / "checkpoints").glob("step-*.ckpt")
    return path


@pytest.fixture
def checkpoints(good: Path, tmp_path: Path) -> Path:
    """A folder with a good checkpoint, step-1, and room for a newer one."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-1.ckpt").hardlink_to(good)
    for best in good.parent.glob("best-epoch-*.ckpt"):
        (folder / best.name).hardlink_to(best)
    return folder


def name_of_run(good: Path) -> str:
    return good.parents[1].name


def assert_refused(checkpoints: Path, run_name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The newer one is refused in a line and kept aside, and the one before serves; without that, none does."""
    newer, older = checkpoints / "step-2.ckpt", checkpoints / "step-1.ckpt"
    damaged = newer.read_bytes()
    caplog.clear()
    assert find_resumable_checkpoint(checkpoints, run_name, 1) == older
    [warning] = warnings_in(caplog)
    assert str(newer) in warning
    assert "\n" not in warning
    assert not newer.exists()
    assert (checkpoints / "step-2.ckpt.refused").read_bytes() == damaged
    aside = older.rename(checkpoints / "aside")
    (checkpoints / "step-2.ckpt.refused").rename(newer)
    caplog.clear()
    assert find_resumable_checkpoint(checkpoints, run_name, 1) is None
    assert len(warnings_in(caplog)) == 1
    aside.rename(older)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and (one == other or (one != one and other != other))


@pytest.mark.parametrize("part", range(20))
def test_a_truncated_checkpoint(checkpoints: Path, good: Path, caplog: Any, part: int) -> None:
    data = good.read_bytes()
    (checkpoints / "step-2.ckpt").write_bytes(data[: part * len(data) // 20])
    assert_refused(checkpoints, name_of_run(good), caplog)


def test_a_checkpoint_without_its_last_byte(checkpoints: Path, good: Path, caplog: Any) -> None:
    (checkpoints / "step-2.ckpt").write_bytes(good.read_bytes()[:-1])
    assert_refused(checkpoints, name_of_run(good), caplog)


def test_flipped_bits(checkpoints: Path, good: Path, caplog: Any) -> None:
    """Thirty anywhere and thirty where the archive keeps its own books; each is refused, or harmless."""
    data, original = good.read_bytes(), read_checkpoint(good)
    generator = random.Random(7)
    newer = checkpoints / "step-2.ckpt"
    books = data.index(b"PK\x01\x02")
    places = [generator.randrange(len(data)) for _ in range(30)]
    places += [generator.randrange(books, len(data)) for _ in range(30)]
    refused = 0
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << generator.randrange(8)
        newer.write_bytes(damaged)
        caplog.clear()
        found = find_resumable_checkpoint(checkpoints, name_of_run(good), 1)
        if found == newer:
            assert equal(read_checkpoint(newer), original), place
            assert warnings_in(caplog) == []
        else:
            refused += 1
            assert found == checkpoints / "step-1.ckpt"
            assert (checkpoints / "step-2.ckpt.refused").exists()
            [warning] = warnings_in(caplog)
            assert str(newer) in warning
            assert "\n" not in warning
    assert refused > 20


def edited(good: Path, edit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    content = copy.deepcopy(read_checkpoint(good))
    edit(content)
    return content


def test_equal_sees_a_difference(good: Path) -> None:
    original = read_checkpoint(good)
    assert equal(original, read_checkpoint(good))

    def nudge(content: dict[str, Any]) -> None:
        next(iter(content["state_dict"].values())).view(torch.int32).view(-1)[0] ^= 1

    assert not equal(original, edited(good, nudge))


class RunsCode:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def state(content: dict[str, Any]) -> dict[str, Any]:
    return content["callbacks"]["Checkpoints"]


FOREIGN = {
    "empty dict": lambda good: {},
    "a dict": lambda good: {"weights": torch.zeros(3)},
    "weights only": lambda good: {"state_dict": read_checkpoint(good)["state_dict"], "callbacks": {}},
    "callbacks without ours": lambda good: edited(good, lambda content: content["callbacks"].pop("Checkpoints")),
    "another run": lambda good: edited(good, lambda content: state(content).update(run="demo-tiny-none-0")),
    "another format": lambda good: edited(good, lambda content: state(content).update(format=FORMAT_VERSION + 1)),
    "no format": lambda good: edited(good, lambda content: state(content).pop("format")),
}
NO_DICTS = {
    "a list": lambda good: [1, 2],
    "a tensor": lambda good: torch.zeros(3),
    "no callbacks": lambda good: {"callbacks": None},
    "no history": lambda good: edited(good, lambda content: content["callbacks"].pop("History")),
    "no run": lambda good: edited(good, lambda content: state(content).pop("run")),
    "no random numbers": lambda good: edited(good, lambda content: state(content).pop("random")),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_checkpoint(checkpoints: Path, good: Path, caplog: Any, kind: str) -> None:
    torch.save(FOREIGN[kind](good), checkpoints / "step-2.ckpt")
    assert_refused(checkpoints, name_of_run(good), caplog)


@pytest.mark.parametrize("kind", NO_DICTS)
def test_a_checkpoint_of_another_shape(checkpoints: Path, good: Path, caplog: Any, kind: str) -> None:
    torch.save(NO_DICTS[kind](good), checkpoints / "step-2.ckpt")
    assert_refused(checkpoints, name_of_run(good), caplog)


@pytest.mark.parametrize("kind", ["empty", "text", "another archive", "pickled by hand"])
def test_what_is_no_checkpoint_at_all(checkpoints: Path, good: Path, caplog: Any, tmp_path: Path, kind: str) -> None:
    import pickle
    import zipfile

    newer, marker = checkpoints / "step-2.ckpt", tmp_path / "marker"
    if kind == "another archive":
        with zipfile.ZipFile(newer, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(RunsCode(marker)))
            archive.writestr("archive/version", "3")
    else:
        newer.write_bytes({"empty": b"", "text": b"not yours"}.get(kind, pickle.dumps(RunsCode(marker))))
    assert_refused(checkpoints, name_of_run(good), caplog)
    assert not marker.exists()


@pytest.mark.parametrize("is_old", [False, True], ids=["archive", "old format"])
def test_a_checkpoint_that_would_run_code(
    checkpoints: Path, good: Path, caplog: Any, tmp_path: Path, is_old: bool
) -> None:
    marker = tmp_path / "marker"
    content = edited(good, lambda content: content.update(extra=RunsCode(marker)))
    torch.save(content, checkpoints / "step-2.ckpt", _use_new_zipfile_serialization=not is_old)
    assert_refused(checkpoints, name_of_run(good), caplog)
    assert not marker.exists()
    torch.load(checkpoints / "step-2.ckpt.refused", weights_only=False)
    assert marker.exists()


def test_a_checkpoint_of_two_processes(checkpoints: Path, good: Path) -> None:
    content = edited(good, lambda content: state(content).update(random=state(content)["random"] * 2))
    torch.save(content, checkpoints / "step-2.ckpt")
    with pytest.raises(
        UserError, match=r"written by 2 processes and cannot go on with 1; .*run\.overwrite=true"
    ) as told:
        find_resumable_checkpoint(checkpoints, name_of_run(good), 1)
    assert "\n" not in str(told.value)
    assert find_resumable_checkpoint(checkpoints, name_of_run(good), 2) == checkpoints / "step-2.ckpt"


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("which", ["the newest", "all"])
def test_a_run_with_damaged_checkpoints_ends_as_the_undisturbed_one(
    small: Build, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, which: str, count: int
) -> None:
    config = small(*EPOCHS)
    mend = break_at(monkeypatch, count, Broken())
    with pytest.raises(Broken):
        run(config)
    mend()
    folder = only_folder(config)
    states = sorted((folder / "checkpoints").glob("step-*.ckpt"))
    assert [path.name for path in states] == [f"step-{count - 2}.ckpt", f"step-{count - 1}.ckpt"]
    damaged = states if which == "all" else states[-1:]
    for path in damaged:
        damage(path)
    caplog.clear()
    run(config)
    warnings = warnings_in(caplog)
    for path, warning in zip(reversed(damaged), warnings, strict=False):
        assert str(path) in warning
        assert "checksum" in warning
    assert warnings[len(damaged) :] == (
        [] if which == "all" else [f"{folder} was interrupted; it resumes from {states[0].name}"]
    )
    assert_same(folder, undisturbed)


@pytest.mark.parametrize("is_gone", [False, True], ids=["damaged", "gone"])
def test_a_run_with_damaged_best_weights_ends(small: Build, monkeypatch: pytest.MonkeyPatch, is_gone: bool) -> None:
    """A state is of use only together with the weights of the best epoch before it."""
    config = small(*EPOCHS, "optim.lr=1e-9")  # the first epoch is the best
    mend = break_at(monkeypatch, 7, Broken())
    with pytest.raises(Broken):
        run(config)
    mend()
    best = only_folder(config) / "checkpoints" / "best-epoch-1.ckpt"
    if is_gone:
        best.unlink()
    else:
        damage(best)
    assert run(config).headline["epoch"] == 1


def test_a_run_refuses_a_checkpoint_of_two_processes(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(*EPOCHS)
    mend = break_at(monkeypatch, 3, Broken())
    with pytest.raises(Broken):
        run(config)
    mend()
    newest = only_folder(config) / "checkpoints" / "step-2.ckpt"
    torch.save(edited(newest, lambda content: state(content).update(random=state(content)["random"] * 2)), newest)
    assert "2 processes" in refused_in_one_line(config)
