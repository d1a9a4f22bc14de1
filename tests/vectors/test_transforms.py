"""Transforms against the papers' formulas in numpy, on every kind of points, and their files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

import istar
from istar import AllButTheTop, Centering, Transform, Whitening
from istar.errors import NonFiniteError, UserError
from istar.measures import all_but_the_top, centered
from istar.vectors import clouds

KINDS: dict[str, type[Transform]] = {"centering": Centering, "all but the top": AllButTheTop, "whitening": Whitening}


def make_points(num_points: int = 300, dim: int = 6, seed: int = 0) -> np.ndarray:
    """Return a cloud in float64 with a mean, and distinct variances along no axis."""
    random = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(random.standard_normal((dim, dim)))
    return (random.standard_normal((num_points, dim)) * np.geomspace(1, 8, dim)) @ rotation + np.linspace(-3, 9, dim)


POINTS = make_points()
OTHERS = make_points(40, seed=1)


def principal_axes(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the variances and the axes, a row each, by a singular value decomposition of the centered points."""
    _, values, axes = np.linalg.svd(points - points.mean(0), full_matrices=False)
    return values**2 / (len(points) - 1), axes


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide all clouds into blocks of 7 of their 6-dimensional points."""
    monkeypatch.setattr(clouds, "_BLOCK_NUMBERS", 45)


# ---- the maps


@pytest.mark.usefixtures("small_blocks")
def test_centering_subtracts_the_mean_of_the_fitted_points() -> None:
    fitted = Centering().fit(POINTS)
    np.testing.assert_allclose(fitted.transform(OTHERS), OTHERS - POINTS.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        fitted.transform(torch.from_numpy(POINTS)), centered(torch.from_numpy(POINTS)), rtol=0, atol=1e-12
    )
    assert fitted.matrix is None


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("components", [None, 0, 2, 6])
def test_all_but_the_top_removes_the_first_axes_of_the_fitted_points(components: int | None) -> None:
    fitted = AllButTheTop(components).fit(POINTS)
    top = principal_axes(POINTS)[1][: 1 if components is None else components]
    differences = OTHERS - POINTS.mean(0)
    expected = differences - differences @ top.T @ top
    np.testing.assert_allclose(fitted.transform(OTHERS), expected, rtol=0, atol=1e-10)
    points = torch.from_numpy(POINTS)
    torch.testing.assert_close(fitted.transform(points), all_but_the_top(points, components), rtol=0, atol=1e-10)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dimensions", [None, 1, 4])
def test_whitening_makes_the_covariance_the_identity(dimensions: int | None) -> None:
    fitted = Whitening(dimensions).fit(POINTS)
    whitened = fitted.transform(POINTS)
    width = dimensions or 6
    np.testing.assert_allclose(np.atleast_2d(np.cov(whitened.T)), np.eye(width), rtol=0, atol=1e-8)
    np.testing.assert_allclose(whitened.mean(0), np.zeros(width), rtol=0, atol=1e-10)
    variances, axes = principal_axes(POINTS)
    expected = (OTHERS - POINTS.mean(0)) @ axes[:width].T / np.sqrt(variances[:width])
    np.testing.assert_allclose(np.abs(fitted.transform(OTHERS)), np.abs(expected), rtol=1e-9, atol=1e-9)


def test_whitening_drops_axes_without_variance() -> None:
    dependent = np.concatenate([POINTS, POINTS[:, :2] + POINTS[:, 2:4]], 1)
    whitened = Whitening().fit(dependent).transform(dependent)
    np.testing.assert_allclose(np.cov(whitened.T), np.eye(6), rtol=0, atol=1e-8)
    assert Whitening().fit(POINTS[:4]).transform(POINTS[:4]).shape == (4, 3)
    # The smallest variance is about 1/64 of the largest.
    assert Whitening(epsilon=0.5).fit(POINTS).transform(POINTS).shape[1] < 6
    with pytest.raises(UserError, match=r"^dimensions=7, but 6 axes of 8 have a variance above epsilon=1e-06 of the l"):
        Whitening(7).fit(dependent)


def test_the_signs_of_the_axes_do_not_depend_on_the_decomposition() -> None:
    matrix = Whitening().fit(POINTS).matrix
    assert matrix is not None
    assert bool((matrix.abs().argmax(0) == matrix.argmax(0)).all())


# ---- kinds of points


def sources(folder: Path) -> dict[str, Any]:
    np.save(folder / "points.npy", POINTS)
    save_file({"points": torch.from_numpy(POINTS)}, folder / "points.safetensors")
    pd.DataFrame({"vector": list(POINTS), "id": range(len(POINTS))}).to_parquet(folder / "points.parquet")
    return {
        "tensor": torch.from_numpy(POINTS),
        "frame": pd.DataFrame(POINTS),
        "rows": POINTS.tolist(),
        "mapping": {"one": POINTS},
        "npy": folder / "points.npy",
        "safetensors": str(folder / "points.safetensors"),
        "parquet": f"{folder}/points.parquet:vector",
    }


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_source_gives_the_map_of_the_array(kind: type[Transform], tmp_path: Path) -> None:
    expected = kind().fit(POINTS)
    for name, source in sources(tmp_path).items():
        fitted = kind().fit(source)
        for actual, value in ((fitted.mean, expected.mean), (fitted.matrix, expected.matrix)):
            torch.testing.assert_close(actual, value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_tensors_keep_their_dtype_and_are_rounded_once(kind: type[Transform], dtype: torch.dtype) -> None:
    fitted, others = kind().fit(POINTS), torch.from_numpy(OTHERS).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        mapped = fitted.transform(others)
    assert (mapped.dtype, mapped.requires_grad) == (dtype, False)
    assert torch.equal(mapped, fitted.transform(others.double()).to(dtype))
    refitted = kind().fit(others)
    exact = kind().fit(others.double())
    torch.testing.assert_close((refitted.mean, refitted.matrix), (exact.mean, exact.matrix), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32", ">f8"])
def test_arrays_keep_their_dtype(dtype: str) -> None:
    fitted = Whitening(2).fit(POINTS)
    others = OTHERS.astype(dtype)[::-1]
    mapped = fitted.transform(others)
    assert isinstance(mapped, np.ndarray)
    assert mapped.dtype == others.dtype.newbyteorder("=")
    expected = fitted.transform(others.astype(np.float64))
    np.testing.assert_array_equal(mapped, expected.astype(mapped.dtype))
    assert fitted.transform(others[:1]).shape == (1, 2)
    assert fitted.transform(others[:0]).shape == (0, 2)


def test_frames_keep_their_index_and_their_columns_where_these_still_mean_something() -> None:
    frame = pd.DataFrame(OTHERS.astype(np.float32), index=[f"row{i}" for i in range(40)], columns=list("abcdef"))
    centered_frame, whitened_frame = Centering().fit(frame).transform(frame), Whitening(3).fit(frame).transform(frame)
    pd.testing.assert_frame_equal(centered_frame, (frame - frame.astype(float).mean()).astype(np.float32))
    assert list(whitened_frame.index) == list(frame.index)
    assert list(whitened_frame.columns) == [0, 1, 2]
    assert set(whitened_frame.dtypes) == {np.dtype("float32")}


def test_rows_that_are_not_finite_are_mapped_and_not_fitted() -> None:
    others = OTHERS.copy()
    others[3, 1] = np.nan
    mapped = Whitening().fit(POINTS).transform(others)
    np.testing.assert_array_equal(np.isnan(mapped).any(1), np.arange(40) == 3)
    with pytest.raises(NonFiniteError, match=r"^points: 1 of 40 rows is"):
        Centering().fit(others)
    with pytest.raises(NonFiniteError, match="squares of the numbers are too large; expected smaller numbers"):
        Centering().fit(OTHERS * 1e200)


def test_another_default_device_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "points.jsonl").write_text("".join(f"{row}\n" for row in POINTS.tolist()))
    with torch.device("meta"):
        mapped = AllButTheTop().fit(tmp_path / "points.jsonl").transform(OTHERS)
    np.testing.assert_allclose(mapped, AllButTheTop().fit(POINTS).transform(OTHERS), rtol=1e-10, atol=1e-10)


# ---- files


@pytest.mark.parametrize("transform", [Centering(), AllButTheTop(2), Whitening(3, 1e-3)], ids=repr)
def test_a_saved_transform_is_loaded_by_its_class_and_by_the_base(transform: Transform, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "map.safetensors"
    transform.fit(POINTS).save(path)
    for kind in (type(transform), Transform):
        loaded = kind.load(str(path))
        assert repr(loaded) == repr(transform)
        np.testing.assert_array_equal(loaded.transform(OTHERS), transform.transform(OTHERS))
    assert [other.name for other in path.parent.iterdir()] == ["map.safetensors"]


def write_foreign_files(folder: Path) -> None:
    Whitening().fit(POINTS).save(folder / "whitening.safetensors")
    save_file({"mean": torch.zeros(3)}, folder / "foreign.safetensors")
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "cut.safetensors").write_bytes((folder / "whitening.safetensors").read_bytes()[:-8])
    metadata = {"transform": "Whitening", "settings": json.dumps({"width": 3})}
    save_file({"mean": torch.zeros(3)}, folder / "settings.safetensors", metadata)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("whitening", "has a transform of the kind Whitening; expected Centering"),
        ("foreign", r"has no transform; expected a file that Transform.save has written"),
        ("empty", "cannot be read; expected a complete .safetensors file"),
        ("cut", "cannot be read; expected a complete .safetensors file"),
        ("settings", "cannot be read; .*'width'"),
        ("missing", "there is no such file"),
    ],
)
def test_other_files_are_refused_in_one_line(name: str, message: str, tmp_path: Path) -> None:
    write_foreign_files(tmp_path)
    path = tmp_path / f"{name}.safetensors"
    with pytest.raises(UserError, match=message) as caught:
        (Centering if name == "whitening" else Transform).load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


# ---- refusals


INVALID_CALLS = {
    "not fitted": (lambda: Whitening().transform(OTHERS), "^Whitening is not fitted; call fit first$"),
    "not fitted, saved": (lambda: Whitening().save("never"), "^Whitening is not fitted; call fit first$"),
    "width": (lambda: Centering().fit(POINTS).transform(OTHERS[:, :5]), "points have the width 5; expected 6"),
    "integers": (lambda: Centering().fit(POINTS).transform(OTHERS.astype(int)), r"the dtype is int64.*astype\("),
    "one point": (lambda: Centering().fit(POINTS).transform(OTHERS[0]), r"the shape is \(6,\); expected \(n, d\)"),
    "clouds": (lambda: Centering().fit({"a": POINTS, "b": POINTS}), "there are 2 clouds, a, b; expected one"),
    "too many components": (lambda: AllButTheTop(7).fit(POINTS), "components is 7; expected 0 to 6, the number of dim"),
    "negative components": (lambda: AllButTheTop(-1), "components=-1 is too small; expected 0 or more"),
    "no dimensions": (lambda: Whitening(0), "dimensions=0 is too small; expected 1 or more"),
    "epsilon": (lambda: Whitening(epsilon=1.0), "epsilon=1; expected a number from 0 to below 1"),
    "equal points": (lambda: Whitening().fit(np.full((9, 5), 0.1)), "all points are equal; expected points with a var"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_what_cannot_be_mapped_is_refused_in_one_line(call: Any, message: str) -> None:
    with pytest.raises(istar.UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
