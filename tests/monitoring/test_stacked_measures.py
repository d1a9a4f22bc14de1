"""Measures of stacked states against the measures of single clouds, and their errors against derivatives in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from istar.measures import (
    average_cosine,
    effective_rank,
    isoscore,
    isoscore_unbiased,
    outlier_severity,
    participation_ratio,
    singular_values,
)
from istar.monitoring import stacked_measures
from istar.monitoring.stacked_measures import SAMPLE_MEASURES, SAMPLE_MEASURES_WITH_ERROR, StateSample, measure_samples

ORACLES = {
    "isoscore": isoscore,
    "isoscore_unbiased": isoscore_unbiased,
    "participation_ratio": lambda points: participation_ratio(singular_values(points).square()),
    "inter_sim": average_cosine,
    "average_norm": lambda points: points.norm(dim=1).mean(),
    "outlier_severity": outlier_severity,
    "largest_activation": lambda points: points.abs().max(),
    "effective_rank": lambda points: effective_rank(singular_values(points)),
}


def make_points(num_points: int = 60, dim: int = 7, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(num_points, dim, generator=generator, dtype=torch.float64)
    mean = 3 * torch.randn(dim, generator=generator, dtype=torch.float64)
    return scale * (points * torch.linspace(0.2, 2, dim, dtype=torch.float64) + mean)


def make_samples(**shapes: tuple[int, int]) -> dict[str, StateSample]:
    return {
        name: StateSample(make_points(*shape, seed=seed), torch.arange(shape[0]) // 6)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def test_all_measures_have_an_oracle_here():
    assert set(ORACLES) == set(SAMPLE_MEASURES)


@pytest.mark.parametrize("max_bytes", [1, 2**28])
def test_values_are_those_of_each_state(monkeypatch, max_bytes):
    """Also of states of other widths or numbers of points, and if each state is computed alone."""
    monkeypatch.setattr(stacked_measures, "_MAX_STACK_BYTES", max_bytes)
    samples = make_samples(embeddings=(60, 7), layer_1=(60, 7), layer_2=(60, 4), layer_3=(31, 7))
    values = measure_samples(samples, SAMPLE_MEASURES)
    assert list(values) == list(samples)
    for state, (points, groups) in samples.items():
        assert (values[state]["points"], values[state]["sequences"]) == (len(points), len(groups.unique()))
        for name, oracle in ORACLES.items():
            tolerance = 1e-6 if name == "largest_activation" else 1e-11  # the maximum is sent in float32
            assert values[state][name] == pytest.approx(float(oracle(points)), rel=tolerance), (state, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_values_of_narrow_dtypes_are_those_of_the_rounded_points(dtype, scale):
    points = make_points(400, 12, scale=scale).to(dtype)
    values = measure_samples({"state": StateSample(points, torch.arange(400))}, SAMPLE_MEASURES)["state"]
    for name, oracle in ORACLES.items():
        expected = float(oracle(points.double()))
        assert values[name] == pytest.approx(expected, rel=2e-6), name


def weighted_measure(name: str, points: Tensor, weights: Tensor) -> Tensor:
    """Return a measure of the distribution that has these points with these weights."""
    weights = weights / weights.sum()
    mean = weights @ points
    centered = points - mean
    covariance = centered.T @ (weights[:, None] * centered)
    norms = points.norm(dim=1)
    ratio = covariance.trace().square() / covariance.square().sum()
    return {
        "participation_ratio": ratio,
        "isoscore": (ratio - 1) / (points.shape[1] - 1),
        "isoscore_unbiased": (ratio - 1) / (points.shape[1] - 1),
        "inter_sim": (weights @ (points / norms[:, None])).square().sum(),
        "average_norm": weights @ norms,
        "outlier_severity": mean.norm() / covariance.trace().sqrt(),
    }[name]


@pytest.mark.parametrize("name", SAMPLE_MEASURES_WITH_ERROR)
def test_errors_are_those_of_the_delta_method_with_groups_as_clusters(name):
    points = make_points()
    groups = torch.tensor([0] * 20 + [7] * 5 + [3] * 35)[torch.randperm(60, generator=torch.Generator().manual_seed(1))]
    weights = torch.ones(60, dtype=torch.float64, requires_grad=True)
    # The derivative of the measure by the weight of a point is its influence divided by n.
    [derivatives] = torch.autograd.grad(weighted_measure(name, points, weights), weights)
    totals = torch.stack([derivatives[groups == group].sum() for group in (0, 3, 7)])
    expected = (3 / 2 * totals.square().sum()).sqrt()
    values = measure_samples({"state": StateSample(points, groups)}, [name])["state"]
    assert values[f"{name}_error"] == pytest.approx(float(expected), rel=1e-9)


def test_the_error_is_the_deviation_of_new_samples():
    """Sequences of 5 points that share a part; 400 samples of 40 sequences."""
    generator = torch.Generator().manual_seed(0)
    scales, names = torch.linspace(0.5, 2, 6, dtype=torch.float64), ("isoscore_unbiased", "inter_sim")
    results = []
    for _ in range(400):
        shared = torch.randn(40, 1, 6, generator=generator, dtype=torch.float64)
        own = torch.randn(40, 5, 6, generator=generator, dtype=torch.float64)
        points = ((shared + own) * scales + 1).flatten(0, 1)
        results.append(measure_samples({"state": StateSample(points, torch.arange(200) // 5)}, names)["state"])
    for name in names:
        deviation = torch.tensor([values[name] for values in results]).std()
        mean_error = torch.tensor([values[f"{name}_error"] for values in results]).mean()
        assert 0.9 < float(mean_error / deviation) < 1.1, name


def test_the_order_of_columns():
    values = measure_samples(make_samples(state=(60, 7)), ["inter_sim", "largest_activation", "isoscore"])["state"]
    measures = ["inter_sim", "largest_activation", "isoscore"]
    assert list(values) == ["points", "sequences", *measures, "inter_sim_error", "isoscore_error"]


def test_points_without_variance_have_no_score():
    points = make_points()[:1].expand(50, -1).float()
    values = measure_samples({"state": StateSample(points, torch.arange(50))}, SAMPLE_MEASURES)["state"]
    undefined = {"isoscore", "isoscore_unbiased", "participation_ratio", "outlier_severity", "effective_rank"}
    assert {name for name in SAMPLE_MEASURES if math.isnan(values[name])} == undefined
    assert values["inter_sim"] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_points_that_are_not_finite_make_their_state_undefined(bad):
    samples = make_samples(layer_1=(60, 7), layer_2=(60, 7))
    samples["layer_1"].points[3, 2] = bad
    values = measure_samples(samples, SAMPLE_MEASURES)
    assert all(math.isnan(values["layer_1"][name]) for name in SAMPLE_MEASURES)
    assert all(math.isfinite(values["layer_2"][name]) for name in SAMPLE_MEASURES)


def test_one_group_has_no_error():
    values = measure_samples({"state": StateSample(make_points(), torch.zeros(60))}, ["inter_sim"])["state"]
    assert math.isnan(values["inter_sim_error"])


def test_states_without_points_are_left_out():
    samples = make_samples(layer_1=(60, 7))
    assert list(measure_samples(samples, ["inter_sim"], ["embeddings", "layer_1"])) == ["layer_1"]
    assert measure_samples({}, ["inter_sim"], ["embeddings"], device=torch.device("cpu")) == {}


def test_zero_points_have_no_direction():
    points = torch.cat([make_points(), torch.zeros(3, 7, dtype=torch.float64)])
    values = measure_samples({"state": StateSample(points, torch.arange(63))}, ["inter_sim"])["state"]
    assert_close(values["inter_sim"], float(average_cosine(points)), rtol=1e-11, atol=0)
