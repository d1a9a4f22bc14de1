"""Measures and accumulators compute on the device of their points, whatever torch's default device is.

The device `meta` stands for a GPU: tensors on it and on the CPU do not mix.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from istar import measures
from istar.geometry.collect.sample import Sample
from istar.measures.matrix_forms import measure_forms, project_rows
from istar.measures.norms import norm_parameters
from istar.measures.point_groups import RowSums
from istar.measures.spectrum import decompose_rows

POINTS = torch.randn(60, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NUMBERS = torch.arange(60) % 4
COVARIANCE, SCALED_COVARIANCE = torch.cov(POINTS.T), torch.cov((POINTS * torch.linspace(1, 2, 14)).T)
# By parameter: an argument that fits all public functions and methods with this parameter.
ARGUMENTS: dict[str, Any] = {
    "points": POINTS, "embeddings": POINTS, "first": POINTS, "second": POINTS.tanh(), "labels": NUMBERS,
    "tokens": NUMBERS, "groups": NUMBERS, "positions": NUMBERS, "covariance": COVARIANCE,
    "shrinkage_covariance": SCALED_COVARIANCE, "zeta": 0.3, "dimensions": [1, 2], "values": POINTS[0].abs() + 0.1,
    "variances": POINTS[0].square() + 0.1, "weight": POINTS[0], "index": 3, "estimates": [1.0, 2.0], "dim": 14,
    "types": 4, "name": "isoscore",
}  # fmt: skip
PUBLIC = {name: getattr(measures, name) for name in measures.__all__}
FUNCTIONS = sorted(name for name, value in PUBLIC.items() if inspect.isfunction(value))
ACCUMULATORS = sorted(
    name
    for name, value in PUBLIC.items()
    if inspect.isclass(value) and issubclass(value, measures.Accumulator) and value is not measures.Accumulator
)


# By function or method: other arguments.
CHANGES: dict[str, dict[str, Any]] = {
    "GroupedPoints": {"groups": 4},
    "alpha_req": {"first": 1, "last": 9},
    "log2_bins": {"values": NUMBERS},
    "shrinkage_intensity": {"moments": measures.FourthMoments.of(POINTS)},
}


def make_arguments(function: Callable[..., Any], name: str) -> dict[str, Any]:
    changes = CHANGES.get(name, {})
    parameters = inspect.signature(function).parameters.values()
    required = [key.name for key in parameters if key.default is key.empty and key.name != "self"]
    return {key: changes[key] if key in changes else ARGUMENTS[key] for key in dict.fromkeys([*required, *changes])}


def check_same(compute: Callable[[], Any]) -> None:
    """Check that a result is the same under another default device."""
    expected = compute()
    with torch.device("meta"):
        actual = compute()
    assert_alike(actual, expected)


def assert_alike(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_alike(actual[key], value)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert repr(actual) == repr(expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_compute_on_the_device_of_their_points(name: str) -> None:
    arguments = make_arguments(PUBLIC[name], name)
    check_same(lambda: PUBLIC[name](**arguments))


@pytest.mark.parametrize("name", ACCUMULATORS)
def test_accumulators_are_on_the_cpu_unless_they_get_a_device(name: str) -> None:
    accumulator_class = PUBLIC[name]
    settings = make_arguments(accumulator_class, name)
    arguments = make_arguments(accumulator_class.update, f"{name}.update")

    def compute() -> Any:
        accumulator = accumulator_class(**settings)
        accumulator.update(**arguments)
        accumulator.merge(accumulator_class(**settings))
        accumulator.update(**arguments)
        summaries = {
            attribute: getattr(accumulator, attribute)()
            for attribute in ("compute", "score", "covariance", "contributions", "kurtosis", "skewness", "cosreg")
            if callable(getattr(accumulator, attribute, None))
        }
        return {"summaries": repr(summaries), **accumulator.state_dict()}

    check_same(compute)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: norm_parameters(nn.LayerNorm(14, device="cpu"), 14)[0],  # type: ignore[index]
        lambda: norm_parameters(nn.LayerNorm(13, device="cpu"), 13)[0],  # type: ignore[index]
        lambda: project_rows(POINTS, decompose_rows(POINTS), 7),
        lambda: measure_forms(POINTS, decompose_rows(POINTS)),
        lambda: measures.singular_values(POINTS, centered=False),
        lambda: measures.GroupedPoints(2**24, 14).update(POINTS, NUMBERS).inter_sim().nansum(),
        lambda: RowSums(2**26, torch.zeros(2, device="cpu")).find_occupied(),
    ],
    ids=range(7),
)
def test_what_is_not_public_does_so_too(compute: Callable[[], Any]) -> None:
    check_same(compute)


def test_a_sample_is_on_the_cpu() -> None:
    def compute() -> Any:
        sample = Sample({"layer_1": torch.device("cpu")}, 3, seed=0)
        sample.update([1, 2], [30, 30], NUMBERS, {"layer_1": POINTS})
        return sample.get_points("layer_1")

    check_same(compute)
