"""The rank that the precision of the sums leaves, and the measures of the spectrum of clouds without full rank."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from istar.measures import FourthMoments, Moments, effective_rank, rank_me, singular_values
from istar.sums.layers import Layer
from istar.sums.rows import Rows
from istar.sums.stack_sums import StackSums
from tests import oracles
from tests.sums.layer_measures import measure_layer

LINES = (
    "The cat sat on the mat.",
    "It rained all day in the old town.",
    "She bought three red apples.",
    "Time flies like an arrow.",
    "The train to Paris leaves at noon.",
)


def spectrum(points: Tensor, centered: bool = True) -> np.ndarray:
    """Return the positive singular values in float64, descending."""
    array = points.double().numpy()
    values = np.linalg.svd(array - array.mean(0) if centered else array, compute_uv=False)
    return values[values > max(array.shape) * np.finfo(float).eps * values[0]][: len(array) - centered]


def measure(points: Tensor) -> dict[str, float]:
    """Return the measures of `istar measure` of points that come in batches of 300."""
    sums = StackSums({"layer": points[:300].double().mean(0)})
    for batch in points.split(300):
        zeros = torch.zeros(len(batch), dtype=torch.int64)
        sums.update({"layer": batch}, Rows.of(zeros, zeros, zeros))
    return measure_layer(Layer(sums, "layer"))


def fitted_exponent(values: np.ndarray) -> float:
    """Return minus the slope of log variance over log rank, for ranks 11 to 100, as far as there are any."""
    logs = np.log(values[10:100] ** 2)
    return -float(np.polyfit(np.log(np.arange(11, 11 + len(logs))), logs, 1)[0])


def low_rank(n: int, d: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return points of whole numbers, exactly of this rank, with one wide dimension and a mean far from the origin."""
    random = np.random.default_rng(n + d)
    points = random.integers(-8, 9, (n, rank)) @ random.integers(-8, 9, (rank, d))
    points[:, 1] *= 1024
    return torch.from_numpy(points + 77).to(dtype)


def repeated(n: int, d: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return n points of which rank + 1 differ, as those of few token types in a first layer."""
    generator = torch.Generator().manual_seed(n + d)
    rows = torch.cat([torch.arange(rank + 1), torch.randint(rank + 1, (n - rank - 1,), generator=generator)])
    return torch.randn(rank + 1, d, generator=generator)[rows].to(dtype)


@pytest.mark.parametrize(
    ("n", "d", "rank", "dtype"),
    [
        (20, 4, 2, torch.float64), (9_000, 64, 30, torch.float32), (50, 200, 49, torch.float32),
        (50, 200, 49, torch.float64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [low_rank, repeated])
def test_moments_have_the_rank_of_their_points(
    make: Callable[..., Tensor], n: int, d: int, rank: int, dtype: torch.dtype
) -> None:
    points = make(n, d, rank, dtype)
    halves = Moments.of(points[: n // 3]).merge(Moments.of(points[n // 3 :]))
    for cloud in (points, Moments.of(points), FourthMoments.of(points), halves):
        for centered in (True, False):
            values = singular_values(cloud, centered)
            expected = spectrum(points, centered)
            assert int((values > 0).sum()) == len(expected), centered
            np.testing.assert_allclose(values.numpy()[:1], expected[:1], rtol=1e-5)


def test_small_dimensions_count_next_to_large_ones() -> None:
    """Dimensions that are a million times as wide as others, as rogue ones of pretrained models, hide none of these."""
    points = torch.randn(400, 30, generator=torch.Generator().manual_seed(0))
    points[:, :3] *= 1e6
    values = singular_values(Moments.of(points)).numpy()
    np.testing.assert_allclose(values, spectrum(points), rtol=1e-4)


@pytest.mark.parametrize("smallest", [1e-17, 1e-22, 1e-25, 1e-33])
@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_dimensions_with_squares_that_float32_loses_hide_no_others(smallest: float, offset: float) -> None:
    """The last layer of all-MiniLM-L6-v2 has two dimensions of size 1e-33, next to others of size 1."""
    points = torch.randn(900, 30, generator=torch.Generator().manual_seed(0)) + offset
    points[:, [3, 7]] *= smallest
    for cloud in (Moments.of(points), Moments.of(points[:200]).merge(Moments.of(points[200:]))):
        for centered in (True, False):
            values = singular_values(cloud, centered).numpy()
            np.testing.assert_allclose(values[:28], spectrum(points, centered)[:28], rtol=1e-5)
            assert (values[28:] < 1e-4 * values[0]).all()


def test_moments_know_the_precision_of_their_sums() -> None:
    points = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    single, double = Moments.of(points), Moments.of(points.double())
    assert (Moments(3).epsilon, single.epsilon, double.epsilon) == (0, 2.0**-23, 2.0**-52)
    assert Moments.of(points.bfloat16()).epsilon == 2.0**-23
    assert Moments(3).merge(double).epsilon == 2.0**-52
    assert Moments(3).merge(double).merge(single).epsilon == 2.0**-23


@pytest.mark.parametrize(("n", "d", "rank"), [(46, 96, 45), (600, 96, 62)])
def test_measures_of_few_components_are_those_of_the_points(n: int, d: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    decay = torch.arange(1, d + 1) ** -0.8
    points = (torch.randn(n, d, generator=generator) * decay)[torch.arange(n) % (rank + 1)] + 3
    values, measures = spectrum(points), measure(points)
    assert len(values) == rank
    assert measures["alpha_req"] == pytest.approx(fitted_exponent(values), rel=1e-3)
    assert measures["effective_rank"] == pytest.approx(oracles.entropy_rank(values), rel=1e-5)
    raw = torch.from_numpy(np.pad(spectrum(points, centered=False), (0, d - rank - 1)))
    assert measures["rank_me"] == pytest.approx(float(rank_me(raw)), rel=1e-5)
    assert float(effective_rank(singular_values(points))) == pytest.approx(oracles.entropy_rank(values), rel=1e-10)


@pytest.mark.parametrize("n", [5, 12, 20])
def test_too_few_components_have_no_power_law(n: int) -> None:
    points = torch.randn(n, 64, generator=torch.Generator().manual_seed(0))
    measures = measure(points)
    assert np.isnan(measures["alpha_req"])
    assert np.isnan(measures["alpha_req_r_squared"])
    assert measures["effective_rank"] == pytest.approx(oracles.entropy_rank(spectrum(points)), rel=1e-5)


@pytest.mark.slow
def test_states_of_real_models_have_the_measures_of_their_points(
    minilm: Path, babyllama: Path, real_data: Path
) -> None:
    text = (real_data / "text" / "books-validation.txt").read_text()[:4_000]
    for folder, lines, layers in ((minilm, LINES, (1, 2, 3)), (babyllama, text.split("\n"), (0,))):
        model = transformers.AutoModel.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        inputs = [tokenizer(line, return_tensors="pt", truncation=True, max_length=200) for line in lines if line]
        with torch.no_grad():
            states = [model(**line, output_hidden_states=True).hidden_states for line in inputs]
        for layer in layers:
            points = torch.cat([line[layer][0] for line in states])
            measures, values = measure(points), spectrum(points)
            assert measures["alpha_req"] == pytest.approx(fitted_exponent(values), rel=0.01)
            assert measures["effective_rank"] == pytest.approx(oracles.entropy_rank(values), rel=1e-4)
