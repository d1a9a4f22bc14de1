"""Rules for every public measure and accumulator: devices, precision, masks, blocks of rows, and refused points.

The device `meta` stands for a GPU: tensors on it and on the CPU do not mix.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from istar import measures
from istar.errors import NonFiniteError, UserError
from istar.measures import numerics
from istar.measures.matrix_forms import measure_forms, project_rows
from istar.measures.norms import norm_parameters
from istar.measures.point_groups import RowSums
from istar.measures.spectrum import decompose_rows
from istar.sums.sample import Sample

POINTS = torch.randn(60, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NUMBERS = torch.arange(60) % 4
COVARIANCE, SCALED_COVARIANCE = torch.cov(POINTS.T), torch.cov((POINTS * torch.linspace(1, 2, 14)).T)
# By parameter: an argument that fits all public functions and methods with this parameter.
ARGUMENTS: dict[str, Any] = {
    "points": POINTS, "embeddings": POINTS, "first": POINTS, "second": POINTS[:, :9], "labels": NUMBERS,
    "tokens": NUMBERS, "groups": NUMBERS, "positions": NUMBERS, "covariance": COVARIANCE,
    "shrinkage_covariance": SCALED_COVARIANCE, "zeta": 0.3, "dimensions": [1, 2], "values": POINTS[0].abs() + 0.1,
    "variances": POINTS[0].square() + 0.1, "weight": POINTS[0], "index": 3, "estimates": [1.0, 2.0], "dim": 14,
    "types": 4, "name": "isoscore", "pairs": POINTS.flip(0), "value": 3.0,
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


def call(name: str, *, points: Tensor | None = None, **changes: Any) -> Any:
    """Return the result of a function, or the states of an accumulator, with other points or other arguments."""
    function = PUBLIC[name]
    if name in ACCUMULATORS:
        accumulator = function(**make_arguments(function, name))
        arguments = make_arguments(function.update, f"{name}.update")
        accumulator.update(**arguments | ({} if points is None else {"points": points}) | changes)
        return accumulator.state_dict()
    arguments = make_arguments(function, name)
    for key in [key for key in POINT_ARGUMENTS if key in arguments and points is not None]:
        arguments[key] = points[..., :9] if key == "second" and isinstance(points, Tensor) else points
    return function(**arguments | changes)


def takes(name: str, *parameters: str) -> bool:
    function = PUBLIC[name].update if name in ACCUMULATORS else PUBLIC[name]
    return any(parameter in inspect.signature(function).parameters for parameter in parameters)


NUMBERED = ("labels", "tokens", "groups", "positions")
POINT_ARGUMENTS = ("points", "embeddings", "first", "second")
OF_POINTS = [name for name in (*FUNCTIONS, *ACCUMULATORS) if takes(name, *POINT_ARGUMENTS) and name != "alpha_req"]
KEEP_THE_DTYPE = ("all_but_the_top", "centered", "scaled_centered")
KNOW_THEIR_PRECISION = ("Moments", "FourthMoments")
SUM_DISTANCES_IN_FLOAT32 = ("find_neighbours", "neighbour_measures")
MASK = torch.arange(60) % 4 > 0


@pytest.mark.parametrize("name", [name for name in OF_POINTS if name not in (*KEEP_THE_DTYPE, *KNOW_THEIR_PRECISION)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_points_are_measured_in_float64(name: str, dtype: torch.dtype) -> None:
    points = POINTS.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        actual = call(name, points=points)
    tolerance = 1e-6 if name in SUM_DISTANCES_IN_FLOAT32 else 0.0
    assert_alike(actual, call(name, points=points.double()), tolerance)


@pytest.mark.parametrize("name", [name for name in OF_POINTS if takes(name, "mask")])
def test_masked_points_change_nothing_bit_for_bit(name: str) -> None:
    kept = {key: NUMBERS[MASK] for key in NUMBERED if takes(name, key)}
    expected = call(name, points=POINTS[MASK], **kept)
    for mask in (MASK, MASK.long()):
        assert_alike(call(name, points=torch.where(MASK[:, None], POINTS, torch.nan), mask=mask), expected)


@pytest.mark.parametrize("name", OF_POINTS)
@pytest.mark.parametrize("block", [1, 33, 100_000])
def test_blocks_of_rows_do_not_change_it(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call(name)
    monkeypatch.setattr(numerics, "BLOCK", block)
    assert_alike(call(name), expected, 1e-11)


@pytest.mark.parametrize("name", OF_POINTS)
def test_what_are_no_points_is_refused_in_one_line(name: str) -> None:
    bad_calls: list[tuple[str, dict[str, Any]]] = [("int64", {"points": POINTS.long()})]
    if takes(name, "mask"):
        bad_calls.append(("mask has shape", {"mask": torch.ones(59)}))
    if not name.startswith("cka"):  # its groups are a number
        bad_calls += [(f"{key} has shape", {key: NUMBERS[:5]}) for key in NUMBERED if takes(name, key)]
    if name in ACCUMULATORS:
        bad_calls.append((r"expected \(\.\.\., 14\)", {"points": POINTS[:, :3]}))
    elif name != "token_kurtosis":  # whose points may have any shape, and are not finite one by one
        not_finite = [POINTS.masked_fill(POINTS.max() == POINTS, value) for value in (torch.nan, torch.inf)]
        bad_calls += [("not finite", {"points": points}) for points in not_finite]
        bad_calls += [("a list", {"points": POINTS.tolist()}), (r"shape \(14,\)", {"points": POINTS[0]})]
        bad_calls.append((r"0 points|shape \(0, 14\)|no points|no token type", {"points": POINTS[:0]}))
    for message, changes in bad_calls:
        if len(changes.get("points", POINTS)) == 0:
            changes |= {key: NUMBERS[:0] for key in NUMBERED if takes(name, key) and not name.startswith("cka")}
        with pytest.raises(NonFiniteError if message == "not finite" else UserError, match=message) as error:
            call(name, **changes)
        assert "\n" not in str(error.value)


def check_same(compute: Callable[[], Any]) -> None:
    """Check that a result is the same under another default device."""
    expected = compute()
    with torch.device("meta"):
        actual = compute()
    assert_alike(actual, expected)


def assert_alike(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Assert that two results of any kind are equal, or close with a tolerance."""
    assert type(actual) is type(expected)
    if dataclasses.is_dataclass(expected):
        actual, expected = vars(actual), vars(expected)
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        actual, expected = list(actual.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        for pair in zip(actual, expected, strict=True):
            assert_alike(*pair, tolerance)
    elif isinstance(expected, Tensor | float):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        assert actual == expected


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
        lambda: RowSums(2**26, torch.zeros(2, device="cpu")).gather()[0],
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
