"""Every format of a file of vectors against the array that was saved, the memory of reading, and damaged files."""

import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file

from istar.errors import UserError
from istar.vectors.vector_files import is_vector_file, open_clouds, split_key

POINTS = np.random.default_rng(0).standard_normal((203, 6))
SINGLE = POINTS.astype(np.float32)
HALF = POINTS.astype(np.float16)
BRAIN = torch.from_numpy(POINTS).bfloat16()
IDS = np.arange(203)


def lists(points: np.ndarray, kind: Any = pa.ListArray) -> pa.Array:
    values = pa.array(points.ravel())
    if kind is pa.FixedSizeListArray:
        return kind.from_arrays(values, points.shape[1])
    offsets = np.arange(0, points.size + 1, points.shape[1], dtype=np.int32 if kind is pa.ListArray else np.int64)
    return kind.from_arrays(pa.array(offsets), values)


def write_parquet(path: Path, columns: dict[str, Any], rows_per_group: int = 30) -> None:
    parquet.write_table(pa.table(columns), path, row_group_size=rows_per_group)


def write_lines(path: Path, values: list[Any]) -> None:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values), encoding="utf-8")


Write = Callable[[Path], object]
FILES: dict[str, tuple[str, Write, Any, str, torch.dtype]] = {
    # case: file and key, how it is written, the points, the name of the cloud, and its dtype
    "npy": ("x.npy", lambda p: np.save(p, SINGLE), SINGLE, "x", torch.float32),
    "npy columns first": ("x.npy", lambda p: np.save(p, np.asfortranarray(POINTS)), POINTS, "x", torch.float64),
    "npy big endian": ("x.npy", lambda p: np.save(p, HALF.astype(">f2")), HALF, "x", torch.float16),
    "npz": ("x.npz", lambda p: np.savez(p, a=HALF, ids=IDS), HALF, "a", torch.float16),
    "npz key": ("x.npz:b", lambda p: np.savez_compressed(p, a=HALF, b=POINTS), POINTS, "b", torch.float64),
    "safetensors": ("x.safetensors", lambda p: save_file({"a": torch.from_numpy(SINGLE), "i": torch.arange(9)}, p),
        SINGLE, "a", torch.float32),
    "safetensors float16": ("x.safetensors:h", lambda p: save_file({"a": BRAIN, "h": torch.from_numpy(HALF)}, p),
        HALF, "h", torch.float16),
    "safetensors bfloat16": ("x.safetensors:a.b", lambda p: save_file({"a.b": BRAIN, "c": BRAIN.clone()}, p), BRAIN,
        "a.b", torch.bfloat16),
    "pt": ("x.pt", lambda p: torch.save(BRAIN, p), BRAIN, "x", torch.bfloat16),
    "pth": ("x.pth:b", lambda p: torch.save({"a": BRAIN, "b": torch.from_numpy(POINTS), "epoch": 3}, p), POINTS, "b",
        torch.float64),
    "parquet lists": ("x.parquet", lambda p: write_parquet(p, {"id": IDS, "v": lists(SINGLE)}), SINGLE, "v",
        torch.float32),
    "parquet large lists": ("x.parquet:v",
        lambda p: write_parquet(p, {"v": lists(POINTS, pa.LargeListArray), "w": lists(HALF)}), POINTS, "v",
        torch.float64),
    "parquet fixed lists": ("x.parquet",
        lambda p: write_parquet(p, {"v.w": lists(HALF, pa.FixedSizeListArray), "ids": lists(IDS[:, None])}), HALF,
        "v.w", torch.float16),
    "parquet wide": ("x.parquet", lambda p: write_parquet(p, {f"d{i}": SINGLE[:, i] for i in range(6)}), SINGLE, "x",
        torch.float32),
    "jsonl lists": ("x.jsonl", lambda p: write_lines(p, POINTS.tolist()), POINTS, "x", torch.float64),
    "jsonl objects": ("x.jsonl",
        lambda p: write_lines(p, [{"ids": [1, 2], "text": "a", "v": row} for row in POINTS.tolist()]), POINTS, "v",
        torch.float64),
    "jsonl key": ("X.JSONL:w", lambda p: write_lines(p, [{"v": [0.5, 1], "w": row} for row in POINTS.tolist()]),
        POINTS, "w", torch.float64),
}  # fmt: skip


@pytest.mark.parametrize(("file", "write", "points", "name", "dtype"), FILES.values(), ids=FILES)
def test_a_file_has_the_points_that_were_saved(
    file: str, write: Write, points: Any, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = f"{tmp_path}/{file}"
    path, key = split_key(source)
    write(path)
    expected = points.double().numpy() if isinstance(points, torch.Tensor) else points.astype(np.float64)
    for [cloud] in (open_clouds(source), open_clouds(path, key)):
        is_counted = path.suffix.lower() != ".jsonl"
        assert (cloud.name, cloud.num_points, cloud.dim) == (name, 203 if is_counted else None, 6)
        for max_points in (17, 1000):
            blocks = list(cloud.read_blocks(max_points))
            assert max(map(len, blocks)) <= max_points
            assert {block.dtype for block in blocks} == {dtype}
            np.testing.assert_array_equal(torch.cat(blocks).double().numpy(), expected)
        spread = cloud.read_spread_rows(40).double().numpy()
        assert 20 <= len(spread) <= 40
        places = [np.flatnonzero((expected == row).all(1)).item() for row in spread]
        assert places == sorted(set(places))
        # From all seven row groups of .parquet, from everywhere in files with arrays, and the first ones of .jsonl.
        if is_counted:
            assert np.bincount(np.array(places) // 30, minlength=7).min() >= 1
        else:
            assert places == list(range(40))


def test_several_keys_are_several_clouds(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=HALF, b=POINTS[:9, :3], c=POINTS)
    clouds = open_clouds(tmp_path / "x.npz", ["b", "a"])
    assert [(cloud.name, cloud.num_points, cloud.dim) for cloud in clouds] == [("b", 9, 3), ("a", 203, 6)]


def test_what_exists_is_not_split(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy:1.npy", POINTS)
    assert split_key(tmp_path / "x.npy:1.npy") == (tmp_path / "x.npy:1.npy", None)
    assert [cloud.name for cloud in open_clouds(tmp_path / "x.npy:1.npy")] == ["x.npy:1"]
    assert split_key("a.npz:b.npz:c") == (Path("a.npz"), "b.npz:c")
    assert split_key("model:a") == (Path("model:a"), None)
    assert [is_vector_file(name) for name in ("a.NPY", Path("b.pt"), "c.parquet:d", "texts.txt", "model", "npy")] == [
        True
    ] * 3 + [False] * 3


# ---- memory


def anonymous_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".pt"])
def test_a_mapped_file_is_not_held_in_memory(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    points = torch.ones(30_000, 512)  # 61 MB
    saved: dict[str, Write] = {
        ".npy": lambda path: np.save(path, points.numpy()),
        ".safetensors": lambda path: save_file({"x": points}, path),
        ".pt": lambda path: torch.save(points, path),
    }
    saved[suffix](path)
    before, [cloud] = anonymous_bytes(), open_clouds(path)
    used = max(anonymous_bytes() - before for block in cloud.read_blocks(500) if block.sum() > 0)
    assert used < 20e6


def test_a_parquet_file_is_not_held_in_memory(tmp_path: Path) -> None:
    points = np.random.default_rng(0).standard_normal((20_000, 100))  # 16 MB in one row group
    write_parquet(tmp_path / "x.parquet", {"x": lists(points)}, len(points))
    [cloud] = open_clouds(tmp_path / "x.parquet")
    before = pa.total_allocated_bytes()  # of other tests
    assert max(pa.total_allocated_bytes() - before for _ in cloud.read_blocks(500)) < 8e6


# ---- refusals


def cut(write: Write) -> Write:
    """Return a function that writes a file without its last third."""

    def write_part(path: Path) -> None:
        write(path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 2 // 3])

    return write_part


def write_with(path: Path, row: Any) -> None:
    write_parquet(path, {"v": pa.array([*POINTS[:100].tolist(), row, *POINTS.tolist()], pa.list_(pa.float64()))})


def save_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": Path}))


DAMAGED = "cannot be read; expected a complete {suffix} file ("
REFUSED: dict[str, tuple[str, Write, str]] = {
    **{f"missing {suffix}": (f"x{suffix}", lambda p: None, ": there is no such file")
       for suffix in (".npy", ".npz", ".safetensors", ".pt", ".parquet", ".jsonl")},
    **{f"empty {suffix}": (f"x{suffix}", lambda p: p.write_bytes(b""), DAMAGED)
       for suffix in (".npy", ".npz", ".safetensors", ".pt", ".parquet")},
    **{f"foreign {suffix}": (f"x{suffix}", lambda p: p.write_bytes(b"\x89PNG" * 99), DAMAGED)
       for suffix in (".npy", ".npz", ".safetensors", ".pt", ".parquet")},
    **{f"cut {suffix}": (f"x{suffix}", cut(FILES[suffix[1:]][1]), DAMAGED)
       for suffix in (".npy", ".npz", ".safetensors", ".pt")},
    "cut .parquet": ("x.parquet", cut(FILES["parquet lists"][1]), DAMAGED),
    "folder": ("x.npy", lambda p: p.mkdir(), DAMAGED),
    "pickled npy": ("x.npy", lambda p: np.save(p, np.array([[{}, 1]] * 5, dtype=object)), DAMAGED),
    "pickled npz": ("x.npz:a", lambda p: np.savez(p, a=np.array([[{}, 1]] * 5, dtype=object)),
        ":a: the dtype is object; expected floating"),
    "pickle named npz": ("x.npz", save_pickle, DAMAGED),
    "pickled pt": ("x.pt", lambda p: torch.save({"a": Path}, p), " has pickled objects, which could execute"),
    "old pickle": ("x.pt", save_pickle, DAMAGED),
    "list in pt": ("x.pt", lambda p: torch.save([1, 2], p),
        " has a list; expected a tensor or a dictionary of tensors"),
    "nested pt": ("x.pt", lambda p: torch.save({"model": {"a": BRAIN}, "step": 3}, p),
        " has no tensors, but model: dict, step: int; expected a tensor or a dictionary of tensors"),
    "nested pt with a key": ("x.pt:model", lambda p: torch.save({"model": {"a": BRAIN}}, p),
        " has no tensors, but model: dict; expected a tensor or a dictionary of tensors"),
    "other suffix": ("x.txt", lambda p: p.write_text("a"),
        " is not a file of vectors; expected one of .npy, .npz, .saf"),
    "several": ("x.npz", lambda p: np.savez(p, a=POINTS, b=HALF[:9], ids=IDS),
        " has several matrices: a float64 (203, 6), b float16 (9, 6); name one, as in {path}:a"),
    "several lists": ("x.parquet",
        lambda p: write_parquet(p, {"v": lists(POINTS), "w": lists(HALF, pa.FixedSizeListArray)}),
        " has several matrices: v double (203, ?), w halffloat (203, 6); name one"),
    "none": ("x.safetensors", lambda p: save_file({"ids": torch.arange(9), "cube": torch.ones(2, 2, 2)}, p),
        " has no matrix of floating numbers (n, d); its keys are cube F32 (2, 2, 2), ids I64 (9)"),
    "no tensors": ("x.pt", lambda p: torch.save({}, p),
        " has no matrix of floating numbers (n, d); its keys are none"),
    "unknown key": ("x.npz:quries", lambda p: np.savez(p, queries=POINTS, corpus=POINTS),
        " has no key quries; did you mean queries?; its keys are queries float64 (203, 6), corpus"),
    "key of one matrix": ("x.npy:a", lambda p: np.save(p, POINTS), " has no key a; its only matrix has no name"),
    "integers": ("x.npy", lambda p: np.save(p, IDS[:, None] + IDS),
        ": the dtype is int64; expected floating numbers; convert integers with .astype before they are saved"),
    "integer column": ("x.parquet:ids", lambda p: write_parquet(p, {"ids": lists(IDS[:200].reshape(100, 2))}),
        ":ids: the dtype is int64; expected floating numbers"),
    "integer lines": ("x.jsonl:ids", lambda p: write_lines(p, [{"ids": [1, 2]}] * 5),
        ":ids: the dtype is int; expected floating numbers"),
    "3-D": ("x.safetensors:a", lambda p: save_file({"a": torch.ones(5, 4, 3)}, p),
        ":a: the shape is (5, 4, 3); expected (n, d); .reshape(-1, 3)"),
    "scalar column": ("x.parquet:s", lambda p: write_parquet(p, {"v": lists(POINTS), "s": POINTS[:, 0]}),
        ":s: the shape is (203,); expected (n, d)"),
    "three rows": ("x.pt", lambda p: torch.save(BRAIN[:3].clone(), p), ": 3 points are too few; expected 4 or more"),
    "three lines": ("x.jsonl", lambda p: write_lines(p, POINTS[:3].tolist()),
        ": 3 points are too few; expected 4 or more"),
    "no lines": ("x.jsonl", lambda p: p.write_text("\n\n"), ": 0 points are too few; expected 4 or more"),
    "width 1": ("x.parquet", lambda p: write_parquet(p, {"v": lists(POINTS[:, :1])}),
        ":v: the shape is (203, 1); expected points of width 2"),
    "mixed columns": ("x.parquet", lambda p: pd.DataFrame(POINTS).rename(columns=str).assign(id=1).to_parquet(p),
        ": 1 of 7 columns are neither floating nor lists: id; expected"),
    "null": ("x.parquet", lambda p: write_with(p, None), ": column v has nulls or rows of different lengths"),
    "other length": ("x.parquet", lambda p: write_with(p, [1.0] * 5),
        ": column v has nulls or rows of different lengths"),
    "null in a row": ("x.parquet", lambda p: write_with(p, [1.0, None, 3.0, 4.0, 5.0, 6.0]),
        ": column v has nulls; expected numbers"),
    "null in a column": ("x.parquet",
        lambda p: write_parquet(p, {"a": POINTS[:4, 0], "b": pa.array([1.0, None, 2.0, 3.0])}),
        ": column b has nulls; expected numbers"),
    "not JSON": ("x.jsonl", lambda p: p.write_text("[1.5, 2]\n" * 9 + "[1.5, 2"), ", line 10: not JSON: "),
    "other width": ("x.jsonl", lambda p: write_lines(p, [[1.5, 2.0]] * 9 + [[1.5]]),
        ", line 10: a list of 1 values; expected a list of 2 numbers"),
    "list among objects": ("x.jsonl", lambda p: write_lines(p, [{"v": [1.5, 2.0]}] * 9 + [[1.5, 2.0]]),
        ", line 10: a NoneType; expected a list of 2 numbers"),
    "null line": ("x.jsonl", lambda p: write_lines(p, [{"v": [1.5, 2.0]}] * 9 + [{"v": None}]),
        ", line 10: a NoneType; expected a list of 2 numbers"),
    "text in a line": ("x.jsonl", lambda p: write_lines(p, [[1.5, 2.0]] * 9 + [[1.5, "2"]]),
        ", line 10: a list of 2 values; expected a list of 2 numbers"),
    "no UTF-8": ("x.jsonl", lambda p: p.write_bytes(b"\xff\xfe" * 9), "utf-8"),
}  # fmt: skip


@pytest.mark.parametrize(("file", "write", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(file: str, write: Write, message: str, tmp_path: Path) -> None:
    source = f"{tmp_path}/{file}"
    path, _ = split_key(source)
    write(path)
    expected = message.format(path=path, suffix=path.suffix)
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        list(open_clouds(source)[0].read_blocks(20))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) * 2 + 400


def test_two_keys_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=POINTS, b=POINTS)
    with pytest.raises(UserError, match=r"x\.npz:a names a key, and key='b' too; expected one of them"):
        open_clouds(f"{tmp_path}/x.npz:a", "b")


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt"])
def test_a_pickle_is_not_executed(suffix: str, tmp_path: Path) -> None:
    payload, path = Payload(tmp_path / "executed"), tmp_path / f"x{suffix}"
    objects = np.array([[payload] * 5] * 5, dtype=object)
    saved: dict[str, Write] = {
        ".npy": lambda path: np.save(path, objects),
        ".npz": lambda path: np.savez(path, x=objects),
        ".pt": lambda path: torch.save({"x": payload}, path),
    }
    saved[suffix](path)
    with pytest.raises(UserError):
        open_clouds(path)
    assert not payload.path.exists()
