"""Every accumulator, merged in any order, summed over gloo processes, or saved and restored, is that of all points."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from istar.errors import UserError
from istar.measures import (
    Accumulator,
    AverageCosine,
    CosineContributions,
    DimensionMoments,
    FourthMoments,
    GroupedPoints,
    MassiveActivations,
    Moments,
    Norms,
    TokenKurtosis,
    isoscore,
    point_groups,
)
from istar.sums.layers import Layer
from istar.sums.rows import Rows
from istar.sums.sample import Sample
from istar.sums.stack_sums import LayerSettings, StackSums
from tests.forks import compute_in_group
from tests.sums.layer_measures import measure_layer

DIM, LENGTH, NUM_GROUPS, VOCABULARY = 6, 5, 3, 9
SIZES = (3, 8, 1)
"""Number of sentences of each part, which are the shards of as many processes."""


@dataclass
class Batch:
    """Tokens of some sentences: their hidden states `(sentences, LENGTH, DIM)`, and integers for each."""

    points: Tensor
    token_ids: Tensor
    labels: Tensor
    groups: Tensor
    keys: list[int]

    @property
    def tokens(self) -> Rows:
        positions = torch.arange(LENGTH).repeat(len(self.points))
        return Rows.of(self.groups.repeat_interleave(LENGTH), self.token_ids.flatten(), positions)

    @property
    def rows(self) -> Tensor:
        """The hidden states in the order of the rows of `tokens`."""
        return self.points.flatten(0, 1)[self.tokens.order]


def make_batch(part: int | None) -> Batch:
    """Return a part of the sentences, or all."""
    generator = torch.Generator().manual_seed(0)
    count = sum(SIZES)
    scale = torch.logspace(0, 1, DIM, dtype=torch.float64)
    points = torch.randn(count, LENGTH, DIM, generator=generator, dtype=torch.float64) * scale + 30
    points[:, 0] *= 40
    points[4] += 100
    token_ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    start = 0 if part is None else sum(SIZES[:part])
    kept = slice(start, count if part is None else start + SIZES[part])
    groups = torch.arange(count) % NUM_GROUPS
    return Batch(points[kept], token_ids[kept], token_ids[kept] // 2, groups[kept], list(range(count))[kept])


ORIGIN = torch.full((DIM,), 30.0, dtype=torch.float64)
SETTINGS = LayerSettings(measures="all", num_groups=NUM_GROUPS)


def update_sample(sample: Sample, batch: Batch) -> None:
    lengths = [LENGTH] * len(batch.keys)
    sample.update(batch.keys, lengths, batch.token_ids.flatten(), {"layer_1": batch.points.flatten(0, 1)})


CASES: dict[str, tuple[Any, Any]] = {
    "Moments": (lambda: Moments(DIM), lambda sums, batch: sums.update(batch.points)),
    "FourthMoments": (lambda: FourthMoments(DIM), lambda sums, batch: sums.update(batch.points)),
    "DimensionMoments": (lambda: DimensionMoments(DIM), lambda sums, batch: sums.update(batch.points)),
    "AverageCosine": (lambda: AverageCosine(DIM), lambda sums, batch: sums.update(batch.points)),
    "CosineContributions": (lambda: CosineContributions(DIM), lambda sums, batch: sums.update(batch.points)),
    "Norms": (lambda: Norms(DIM, (0, 80, 3e3)), lambda sums, batch: sums.update(batch.points)),
    "TokenKurtosis": (lambda: TokenKurtosis(DIM), lambda sums, batch: sums.update(batch.points)),
    "MassiveActivations": (
        lambda: MassiveActivations(DIM, 7, ratio=1.0),
        lambda sums, batch: sums.update(batch.points, batch.token_ids, batch.token_ids + 1),
    ),
    "GroupedPoints": (
        lambda: GroupedPoints(VOCABULARY, DIM), lambda sums, batch: sums.update(batch.points, batch.token_ids)
    ),
    "StackSums": (
        lambda: StackSums({"layer_1": ORIGIN, "layer_2": ORIGIN}, VOCABULARY, SETTINGS),
        lambda sums, batch: sums.update({"layer_1": batch.rows, "layer_2": batch.rows.flip(1)}, batch.tokens),
    ),
    "Sample": (lambda: Sample({"layer_1": torch.device("cpu")}, 5, seed=0), update_sample),
}  # fmt: skip


def accumulate(name: str, part: int | None = None) -> Accumulator:
    make, update = CASES[name]
    accumulator: Accumulator = make()
    update(accumulator, make_batch(part))
    return accumulator


def summarize(accumulator: Any) -> Any:
    """Return the states of an accumulator in a form that does not depend on where it stores them."""
    if isinstance(accumulator, Sample):
        return [accumulator.types, accumulator.random_numbers, accumulator.get_points("layer_1")]
    if isinstance(accumulator, GroupedPoints):
        return [accumulator.count, accumulator.nonzero, accumulator.norm_total, accumulator.inter_sim()]
    if isinstance(accumulator, StackSums):
        layers = {state: Layer(accumulator, state) for state in accumulator.names}
        return {
            f"{state} {name}": value
            for state, layer in layers.items()
            for name, value in {**measure_layer(layer), **layer.summarize_by_position()}.items()
        }
    return accumulator.state_dict()


def assert_same(actual: Any, expected: Any) -> None:
    for name in [name for name in actual if "intra_sim" in name] if isinstance(actual, dict) else []:
        # Unit vectors are summed by type in float32.
        assert_close(actual[name], expected[name], rtol=0, atol=5e-8)
        actual, expected = ({**values, name: 0.0} for values in (actual, expected))
    assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.fixture
def allocation(request, monkeypatch):
    """Allocate the rows of all groups of points at once, or add rows when they are needed."""
    if request.param == "rows when needed":
        monkeypatch.setattr(point_groups, "_MAX_INITIAL_BYTES", 0)


@pytest.mark.parametrize(
    ("name", "allocation"),
    [*((name, "all rows at once") for name in CASES), ("GroupedPoints", "rows when needed")],
    indirect=["allocation"],
)
@pytest.mark.usefixtures("allocation")
def test_merged_in_any_order_it_is_that_of_all_points(name: str) -> None:
    expected = summarize(accumulate(name))
    for order in ((0, 1, 2), (2, 0, 1)):
        merged = CASES[name][0]()
        for part in order:
            other = accumulate(name, part)
            before = summarize(copy.deepcopy(other))
            merged.merge(other)
            assert_close(summarize(other), before, rtol=0, atol=0, equal_nan=True)
        merged.merge(CASES[name][0]())
        assert_same(summarize(merged), expected)


@pytest.mark.parametrize("name", CASES)
def test_saved_and_restored_it_goes_on(name: str, tmp_path: Any) -> None:
    saved = accumulate(name, 0)
    torch.save(saved.state_dict(), tmp_path / "state")
    restored = CASES[name][0]()
    restored.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for accumulator in (saved, restored):
        CASES[name][1](accumulator, make_batch(1))
    assert_close(summarize(restored), summarize(saved), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_one_that_was_restored_from_another_shares_no_memory_with_it(name: str) -> None:
    saved, restored = accumulate(name, 0), CASES[name][0]()
    expected = summarize(copy.deepcopy(saved))
    restored.load_state_dict(saved.state_dict())
    CASES[name][1](restored, make_batch(1))
    assert_close(summarize(saved), expected, rtol=0, atol=0, equal_nan=True)


def compute_loss(moments: Moments) -> Tensor:
    return isoscore(moments) + moments.mean.square().sum()


def compute_on_rank(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {name: summarize(accumulate(name, rank).all_reduce()) for name in CASES}
    # The last process has no points, as at the end of an uneven pass.
    for name in ("Moments", "MassiveActivations"):
        shard = CASES[name][0]() if rank == len(SIZES) - 1 else accumulate(name, rank)
        results[f"{name}, one shard empty"] = summarize(shard.all_reduce())
    points = make_batch(rank).points.requires_grad_()
    compute_loss(FourthMoments.of(points).all_reduce()).backward()
    return {**results, "gradient": points.grad}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return compute_in_group(compute_on_rank, (), len(SIZES), tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", CASES)
def test_each_process_gets_the_accumulator_of_all(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        assert_same(result[name], summarize(accumulate(name)))
        assert_close(result[name], results[0][name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["Moments", "MassiveActivations"])
def test_a_process_without_points_takes_part(results: list[dict[str, Any]], name: str) -> None:
    expected = summarize(accumulate(name, 0).merge(accumulate(name, 1)))
    for result in results:
        assert_same(result[f"{name}, one shard empty"], expected)


def test_each_process_gets_the_gradient_of_the_sum_of_all_losses(results: list[dict[str, Any]]) -> None:
    points = make_batch(None).points.requires_grad_()
    (len(SIZES) * compute_loss(Moments.of(points))).backward()
    assert_same(torch.cat([result["gradient"] for result in results]), points.grad)


@pytest.mark.parametrize(
    ("own", "other", "message"),
    [
        (FourthMoments(3), Moments(3), "cannot merge Moments into FourthMoments"),
        (Moments(3), Moments(2), r"another mean: shape \(2,\) into shape \(3,\); give both .* the same arguments"),
        (Norms(3, (0, 1)), Norms(3, (0, 2)), "another edges"),
        (MassiveActivations(3), MassiveActivations(3, 5), "another capacity: 5 into 100"),
        (StackSums({"a": ORIGIN}), StackSums({"a": ORIGIN + 1}), "another origins"),
        (GroupedPoints(3, 4), GroupedPoints(3, 5), "RowSums with another dim: 5 into 4"),
        (StackSums({"a": ORIGIN}), StackSums({"a": ORIGIN}, VOCABULARY), "StackSums with another type_scalars"),
    ],
)
def test_only_accumulators_with_the_same_settings_merge(own: Accumulator, other: Accumulator, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        own.merge(other)
    assert "\n" not in str(error.value)
