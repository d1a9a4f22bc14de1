"""Sums of several states at once, against the measures of each state by their definitions, in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from istar.errors import NonFiniteError
from istar.sums.layers import Layer
from istar.sums.rows import Rows
from istar.sums.source_sums import SourceSums, SumSettings
from istar.sums.stack_sums import LayerSettings, StackSums
from tests.geometry.collect.test_stream import compute_naive_measures
from tests.operations import CountedOperations
from tests.sums.layer_measures import measure_layer

NUM_POINTS, DIM, TYPES = 400, 12, 30
MAX_OPERATIONS, MAX_SYNCHRONIZATIONS = 500, 3
"""Limits of an update of 8,192 points in seven states, without the model and the tokens."""
MAX_OPERATIONS_AT_THE_END, MAX_SYNCHRONIZATIONS_AT_THE_END = 2_500, 50
"""Limits of the measures of seven states with ten groups, without those of a sample."""


def make_states(names: str = "abcde", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return correlated points of several states, `(NUM_POINTS, DIM)`, with means of some deviations."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(0.5, 3, DIM)
    return {
        name: (torch.randn(NUM_POINTS, DIM, generator=generator) * scales + torch.randn(DIM, generator=generator)).to(
            dtype
        )
        for name in names
    }


def make_rows(num_groups: int = 4, has_types: bool = True) -> Rows:
    """Return rows that are in the order of the points: document by document, and group by group."""
    generator = torch.Generator().manual_seed(1)
    index = torch.arange(NUM_POINTS)
    types = torch.randint(TYPES, (NUM_POINTS,), generator=generator) if has_types else None
    return Rows.of(index * num_groups // NUM_POINTS, types, index % 20)


def assert_naive(layer: Layer, points: Tensor, rows: Rows, rel: float = 1e-5) -> None:
    """Assert that the measures of a layer are those of its points by their definitions."""
    types = np.arange(len(points)) // 2 if rows.type_ids is None else rows.type_ids.numpy()
    expected = compute_naive_measures(points.double().numpy(), types)
    measures = measure_layer(layer)
    for name in expected.keys() & measures.keys():
        absolute = 1e-4 if "kurtosis" in name else 1e-7
        if rows.type_ids is not None or "intra" not in name:
            assert measures[name] == pytest.approx(expected[name], rel=rel, abs=absolute), name


def assert_all_naive(states: Mapping[str, Tensor], rows: Rows, settings: LayerSettings, rel: float = 1e-5) -> StackSums:
    origins = {name: points[:50].double().mean(0) for name, points in states.items()}
    sums = StackSums(origins, TYPES, settings)
    sums.update(states, rows)
    for name, points in states.items():
        assert_naive(Layer(sums, name), points, rows, rel)
    return sums


@pytest.mark.parametrize("block", [1, 40 * DIM, 10**6])
@pytest.mark.parametrize("num_groups", [0, 1, 4])
@pytest.mark.parametrize("has_types", [True, False])
def test_each_state_of_a_stack_has_its_own_measures(
    monkeypatch: pytest.MonkeyPatch, block: int, num_groups: int, has_types: bool
) -> None:
    monkeypatch.setattr("istar.sums.stack_blocks.STACK_BLOCK", block)
    rows = make_rows(max(num_groups, 1), has_types)
    sums = assert_all_naive(make_states(), rows, LayerSettings("all", num_groups))
    assert sums.epsilons.tolist() == [2.0**-23] * 5
    by_frequency = Layer(sums, "a").summarize_by_frequency()
    assert sum(by_frequency["points"]) == (NUM_POINTS if has_types else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_states_of_another_dtype(dtype: torch.dtype) -> None:
    states = make_states(dtype=dtype) | make_states("fg")
    assert_all_naive(states, make_rows(), LayerSettings("all", 4))


SCALED: dict[str, Callable[[Tensor], Tensor]] = {
    "tiny norms": lambda points: points * 1e-8,
    "tinier than float32 can square": lambda points: points * 1e-30,
    "large norms": lambda points: points * 1e12,
    "larger than float32 can square": lambda points: points * 1e25,
    "some zero points": lambda points: points * (torch.arange(len(points)) % 7 > 0)[:, None],
}


@pytest.mark.parametrize("scale", SCALED.values(), ids=SCALED)
def test_extreme_states_do_not_disturb_their_neighbours(scale: Callable[[Tensor], Tensor]) -> None:
    states = make_states()
    states["c"] = scale(states["c"])
    plain = StackSums({name: points[:50].double().mean(0) for name, points in make_states().items()}, TYPES)
    plain.update(make_states(), make_rows())
    origins = {name: points[:50].double().mean(0) for name, points in states.items()}
    sums = StackSums(origins, TYPES)
    sums.update(states, make_rows())
    for name in "abde":
        assert measure_layer(Layer(sums, name)) == pytest.approx(
            measure_layer(Layer(plain, name)), rel=1e-6, abs=1e-6, nan_ok=True
        )
    layer = Layer(sums, "c")
    points = states["c"].double().numpy()
    nonzero = points[np.linalg.norm(points, axis=1) > 0]
    measures = measure_layer(layer)
    unit = nonzero / np.linalg.norm(nonzero, axis=1, keepdims=True)
    n = len(nonzero)
    assert measures["inter_sim"] == pytest.approx((np.square(unit.sum(0)).sum() - n) / (n * (n - 1)), rel=1e-6)
    assert measures["average_norm"] == pytest.approx(np.linalg.norm(points, axis=1).mean(), rel=1e-6)
    kurtosis = (layer.dimensions.kurtosis() + 3).numpy()
    deviations = points - points.mean(0)
    assert kurtosis == pytest.approx((deviations**4).mean(0) / (deviations**2).mean(0) ** 2, rel=1e-5)
    assert layer.norms.compute().smallest == pytest.approx(np.linalg.norm(points, axis=1).min(), rel=1e-6)


def test_dimensions_of_tiny_deviations_have_their_moments() -> None:
    states = make_states()
    states["b"][:, 3] *= 1e-25
    sums = assert_all_naive(states, make_rows(), LayerSettings("basic", 4))
    points = states["b"][:, 3].double().numpy()
    assert Layer(sums, "b").dimensions.variance(0)[3].item() == pytest.approx(points.var(), rel=1e-9, abs=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_state_that_is_not_finite_is_named(value: float, dtype: torch.dtype) -> None:
    states = make_states(dtype=dtype)
    origins = {name: points.double().mean(0) for name, points in states.items()}
    states["d"][7, 2] = value
    with pytest.raises(NonFiniteError, match="the hidden states at d, or their fourth powers, are not finite"):
        StackSums(origins, TYPES).update(states, make_rows())


def test_some_of_the_states_may_come_alone() -> None:
    """States of images and modules have other places, so that their batches come one after the other."""
    states, rows = make_states(), make_rows()
    sums = StackSums({name: points[:50].double().mean(0) for name, points in states.items()}, TYPES)
    for names in ("bd", "ace"):
        sums.update({name: states[name] for name in names} | {"another": states["a"]}, rows)
    for name, points in states.items():
        assert_naive(Layer(sums, name), points, rows)


def test_states_of_different_widths_are_in_different_stacks() -> None:
    states = make_states() | {
        "narrow": make_states("n")["n"][:, :5],
        "wide": torch.cat([*make_states("xy").values()], 1),
    }
    rows = make_rows()
    order = ("a", "narrow", "b", "wide", "c", "d", "e")
    origins = {name: states[name].double().mean(0) for name in order}
    sums = SourceSums(SumSettings(groups=4, sample=0), origins, num_types=TYPES, num_examples=3)
    assert len(sums.stacks) == 3
    sums.update(states, rows, [], [])
    assert tuple(sums.layers) == order
    for name, layer in sums.layers.items():
        assert_naive(layer, states[name], rows)
    restored = SourceSums(SumSettings(groups=4, sample=0), origins, num_types=TYPES, num_examples=3)
    restored.load_state_dict(sums.state_dict())
    restored.merge(sums)
    for name, layer in restored.layers.items():
        once, twice = measure_layer(sums.layers[name]), measure_layer(layer)
        assert twice["points"] == 2 * once["points"]
        for measure in ("isoscore", "average_norm", "effective_rank", "mean_direction_norm", "largest_kurtosis"):
            assert twice[measure] == pytest.approx(once[measure], rel=1e-9)


def test_an_update_has_few_operations_and_synchronizations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU waits for the host between operations, and the host for the GPU in a synchronization."""
    generator = torch.Generator().manual_seed(0)
    num_points, dim, vocabulary = 8_192, 384, 20_000
    names = ["embeddings", *(f"layer_{index}" for index in range(1, 7))]
    states = {name: torch.randn(num_points, dim, generator=generator) + 1 for name in names}
    counter = CountedOperations()
    read_list = Tensor.tolist

    def count_list(values: Tensor) -> Any:  # on a CPU, it is not dispatched
        counter.synchronizations += 1
        return read_list(values)

    sums = SourceSums(
        SumSettings(groups=10, sample=5_000), dict.fromkeys(names, torch.ones(dim).double()), num_types=vocabulary
    )
    documents = torch.arange(num_points) // 32
    frequencies = 1 / torch.arange(1, vocabulary + 1)
    for update in range(2):
        types = frequencies.multinomial(num_points, replacement=True, generator=generator)
        rows = Rows.of(documents % 10, types, torch.arange(num_points) % 32)
        counter = CountedOperations()
        with monkeypatch.context() as patch, counter:
            patch.setattr(Tensor, "tolist", count_list)
            sums.update(states, rows, [update], [num_points])
        assert 100 < counter.total <= MAX_OPERATIONS
        assert 0 < counter.synchronizations <= MAX_SYNCHRONIZATIONS


def test_the_measures_at_the_end_have_few_operations_and_synchronizations() -> None:
    names = [f"layer_{index}" for index in range(7)]
    generator = torch.Generator().manual_seed(0)
    states = {name: torch.randn(NUM_POINTS, 64, generator=generator) + 1 for name in names}
    sums = SourceSums(SumSettings(groups=10, sample=0), dict.fromkeys(names, torch.ones(64).double()), num_types=TYPES)
    sums.update(states, make_rows(10), [], [])
    with CountedOperations() as counter:
        measures = sums.compute_measures()
    assert measures["layer_3"]["isoscore_error"] > 0
    assert 500 < counter.total <= MAX_OPERATIONS_AT_THE_END
    assert 0 < counter.synchronizations <= MAX_SYNCHRONIZATIONS_AT_THE_END
