"""Points in memory, read in blocks and compared with numpy, and what is refused."""

import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch

from istar.errors import NonFiniteError, UserError
from istar.vectors.clouds import Cloud, check_finite_rows
from istar.vectors.vector_files import open_clouds

POINTS = np.random.default_rng(0).standard_normal((23, 5))
SINGLE = POINTS.astype(np.float32)
HALF = POINTS.astype(np.float16)


class Exporting:
    """An object of another library, which NumPy can convert."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return SINGLE


def read_only(points: np.ndarray) -> np.ndarray:
    view = points.view()
    view.flags.writeable = False
    return view


SOURCES: dict[str, tuple[Any, np.ndarray, torch.dtype]] = {
    "float64 tensor": (torch.from_numpy(POINTS), POINTS, torch.float64),
    "bfloat16 tensor": (torch.from_numpy(HALF).bfloat16(), torch.from_numpy(HALF).bfloat16().double(), torch.bfloat16),
    "transposed tensor": (torch.from_numpy(POINTS.T.copy()).T, POINTS, torch.float64),
    "parameter": (torch.nn.Parameter(torch.from_numpy(SINGLE)), SINGLE, torch.float32),
    "float16 array": (HALF, HALF, torch.float16),
    "read-only array": (read_only(SINGLE), SINGLE, torch.float32),
    "negative strides": (SINGLE[::-2, ::-1], SINGLE[::-2, ::-1], torch.float32),
    "columns first": (np.asfortranarray(POINTS), POINTS, torch.float64),
    "big endian": (SINGLE.astype(">f4"), SINGLE, torch.float32),
    "frame": (pd.DataFrame(SINGLE), SINGLE, torch.float32),
    "frame of two dtypes": (pd.DataFrame(POINTS).astype({0: "float32"}), None, torch.float64),
    "frame of pandas' dtypes": (pd.DataFrame(SINGLE).astype("Float32"), SINGLE, torch.float32),
    "frame of pyarrow's dtypes": (pd.DataFrame(SINGLE).astype("float[pyarrow]"), SINGLE, torch.float32),
    "rows": (POINTS.tolist(), POINTS, torch.float64),
    "list of arrays": (list(SINGLE), SINGLE, torch.float32),
    "list of tensors": (list(torch.from_numpy(SINGLE)), SINGLE, torch.float32),
    "column of a data set": (datasets.Dataset.from_dict({"vector": POINTS.tolist()})["vector"], POINTS, torch.float64),
    "array interface": (Exporting(), SINGLE, torch.float32),
}


def read(cloud: Cloud, max_points: int) -> torch.Tensor:
    blocks = list(cloud.read_blocks(max_points))
    assert {len(block) for block in blocks[:-1]} <= {max_points}
    return torch.cat(blocks)


@pytest.mark.parametrize(("source", "expected", "dtype"), SOURCES.values(), ids=SOURCES)
def test_the_blocks_are_the_rows_in_order(source: Any, expected: Any, dtype: torch.dtype) -> None:
    if expected is None:  # the first column in float32, the others in float64
        expected = np.concatenate([SINGLE[:, :1], POINTS[:, 1:]], 1, dtype=np.float64)
    [cloud] = open_clouds(source)
    assert (cloud.name, cloud.num_points, cloud.dim) == ("points", len(expected), 5)
    for max_points in (1, 4, 23, 100):  # a cloud can be read again and again
        rows = read(cloud, max_points)
        assert (rows.dtype, rows.requires_grad) == (dtype, False)
        np.testing.assert_array_equal(rows.double().numpy(), np.asarray(expected, np.float64))
    spread = cloud.read_spread_rows(3).double().numpy()
    np.testing.assert_array_equal(spread, np.asarray(expected, np.float64)[[0, round((len(expected) - 1) / 2), -1]])
    assert len(cloud.read_spread_rows(100)) == len(expected)


def test_a_missing_value_of_a_frame_and_a_masked_value_are_nan() -> None:
    frame = pd.DataFrame(POINTS).astype("Float64")
    frame.iloc[2, 3] = pd.NA
    masked = np.ma.masked_array(POINTS, mask=np.zeros_like(POINTS, bool))
    masked[2, 3] = np.ma.masked
    for source in (frame, masked):
        [cloud] = open_clouds(source)
        assert read(cloud, 10).isnan().nonzero().tolist() == [[2, 3]]


def test_a_mapping_names_its_clouds(tmp_path: Path) -> None:
    np.savez(tmp_path / "saved.npz", first=POINTS[:9], second=POINTS)
    sources = {"queries": SINGLE[:7, :3], "corpus": torch.from_numpy(POINTS), "file": f"{tmp_path}/saved.npz:first"}
    clouds = open_clouds(sources)
    assert [(cloud.name, cloud.num_points, cloud.dim) for cloud in clouds] == [
        ("queries", 7, 3),
        ("corpus", 23, 5),
        ("file", 9, 5),
    ]
    with pytest.raises(UserError, match="has several matrices"):
        open_clouds({"file": tmp_path / "saved.npz"})


@pytest.mark.parametrize("bad_rows", [[4], [0, 9, 22]])
def test_rows_that_are_not_finite_are_counted_over_the_whole_cloud(
    bad_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("istar.vectors.clouds._BLOCK_NUMBERS", 20)
    check_finite_rows(open_clouds(POINTS)[0])
    points = POINTS.copy()
    points[bad_rows, 2], points[bad_rows, 3] = np.nan, -np.inf
    message = (
        rf"^cloud: {len(bad_rows)} of 23 rows (is|are) not finite, the first at index {bad_rows[0]}; expected finite"
    )
    with pytest.raises(NonFiniteError, match=message):
        check_finite_rows(open_clouds({"cloud": points})[0])


REFUSED: dict[str, tuple[Any, str]] = {
    "integers": (np.arange(20).reshape(5, 4),
        'points: the dtype is int64; expected floating numbers; convert integers with .astype("float32")'),
    "integer tensor": (torch.ones(5, 4, dtype=torch.int8),
        "points: the dtype is torch.int8; expected floating numbers; convert integers with .float()"),
    "bool": (POINTS > 0, 'the dtype is bool; expected floating numbers; convert integers with .astype("float32")'),
    "complex": (POINTS + 1j, "the dtype is complex128; expected floating numbers"),
    "long doubles": (POINTS.astype(np.longdouble), "expected floating numbers"),
    "text": (np.array([["a", "b"]] * 5), "expected floating numbers"),
    "objects": (np.array([[1.0, "a"]] * 5, dtype=object), "points: a ndarray of objects; expected numbers (n, d)"),
    "series of vectors": (pd.Series(list(POINTS)),
        "a Series of objects; expected numbers (n, d); numpy.stack joins a list of vectors"),
    "a vector": (POINTS[0], "the shape is (5,); expected (n, d)"),
    "3-D": (np.zeros((5, 4, 3)), "the shape is (5, 4, 3); expected (n, d); .reshape(-1, 3) makes each place a row"),
    "4-D": (torch.zeros(5, 4, 3, 3), "the shape is (5, 4, 3, 3); expected (n, d)"),
    "three rows": (POINTS[:3], "points: 3 points are too few; expected 4 or more"),
    "width 1": (POINTS[:, :1], "the shape is (23, 1); expected points of width 2 or more"),
    "no columns": (pd.DataFrame(index=range(5)), "the shape is (5, 0); expected points of width 2 or more"),
    "meta": (torch.zeros(5, 4, device="meta"), "a tensor on the device meta, which has no values; expected a device"),
    "sparse": (torch.eye(5).to_sparse(), "a sparse or nested tensor; expected a dense one, as from .to_dense()"),
    "ragged rows": ([[1.0, 2.0], [3.0]] * 3, "expected rows of equal length"),
    "ragged tensors": ([torch.zeros(3), torch.zeros(2)], "expected rows of equal length"),
    "frame with other columns": (pd.DataFrame(POINTS).assign(id=1, text="a"),
        "2 of 7 columns are not floating: id, text; expected floating columns"),
    "frame with a column of vectors": (pd.DataFrame({"vector": list(POINTS)}), "numpy.stack joins a column of vectors"),
    "named": ({"corpus": POINTS[0]}, "corpus: the shape is (5,)"),
    "no clouds": ({}, "the mapping has no clouds; expected at least one name with points"),
    "sparse matrix": (scipy.sparse.csr_matrix(POINTS),
        "points: a csr_matrix, which is sparse; expected a dense array, as from .toarray()"),
    "sparse array": (scipy.sparse.coo_array(POINTS),
        "points: a coo_array, which is sparse; expected a dense array, as from .toarray()"),
    "nothing": (None, "a NoneType of objects; expected numbers"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_points_is_refused_in_one_line(source: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        open_clouds(source)
    assert "\n" not in str(caught.value)


def test_a_key_is_for_files() -> None:
    with pytest.raises(UserError, match=r"^key='a' needs a file; expected no key for points in memory$"):
        open_clouds(POINTS, "a")
