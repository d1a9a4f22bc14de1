"""The accumulators of a layer: merges, states, tables, and standard errors, against naive computations and theory."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from istar.measures import isoscore_unbiased
from istar.measures.catalogue import MEASURES_WITH_ERROR
from istar.sums import stack_blocks
from istar.sums.layers import Layer
from istar.sums.rows import Rows
from istar.sums.stack_sums import LayerSettings, StackSums
from tests import oracles
from tests.geometry.collect import test_stream
from tests.sums.layer_measures import decompose_layer, measure_layer, replicate_layer
from tests.waiting import SECONDS

DIM, TYPES, GROUPS, LENGTH = 6, 9, 4, 12
ORIGIN = torch.linspace(-1, 1, DIM).double()


def make_text(num_documents: int = 20) -> tuple[Any, Any, Any, Any]:
    """Return the points, types, positions and groups of the tokens of a text.

    The points of a document share a random shift.
    """
    random = np.random.default_rng(0)
    shifts = np.repeat(random.normal(1, 1, (num_documents, DIM)), LENGTH, axis=0)
    points = torch.from_numpy(shifts + random.normal(0, 2, shifts.shape))
    tokens = torch.from_numpy(random.integers(0, TYPES, num_documents * LENGTH))
    token_index = torch.arange(num_documents * LENGTH)
    return points, tokens, token_index % LENGTH, token_index // LENGTH % GROUPS


def add_tokens(sums: StackSums, points: torch.Tensor, *columns: torch.Tensor) -> None:
    """Add the points of tokens in any order; the columns are their types, positions and groups."""
    types, positions, *groups = columns
    rows = Rows.of(groups[0] if groups else torch.zeros_like(types), types, positions)
    sums.update({"layer": points[rows.order]}, rows)


def make_sums(*batches: Any, settings: LayerSettings | None = None) -> StackSums:
    """Return the sums of a layer over the given batches."""
    result = StackSums({"layer": ORIGIN}, TYPES, settings or LayerSettings("all", GROUPS))
    for points, *tokens in batches:
        add_tokens(result, points, *tokens)
    return result


def make_layer(*batches: Any, settings: LayerSettings | None = None) -> Layer:
    """Return the measures of a layer over the given batches."""
    return Layer(make_sums(*batches, settings=settings), "layer")


def test_a_layer_is_on_the_device_of_its_origin_whatever_the_default_device_is() -> None:
    batch, settings = make_text(), LayerSettings("all", GROUPS)
    expected = make_sums(batch, settings=settings)
    with torch.device("meta"):
        sums = make_sums(batch, settings=settings)
        replicates = replicate_layer(Layer(sums, "layer"))
    assert replicates == replicate_layer(Layer(expected, "layer"))
    torch.testing.assert_close(sums.state_dict(), expected.state_dict(), rtol=0, atol=0, equal_nan=True)


def tolerance(is_by_type: bool) -> dict[str, float]:
    """Return the tolerance of a measure; unit vectors are summed in float32 by type, and otherwise in float64."""
    return {"abs": 1e-7} if is_by_type else {"rel": 1e-9}


@pytest.mark.parametrize("max_rows", [1, 7, 10_000])
def test_batches_and_merges_change_no_measures(max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_blocks, "MAX_PRODUCT_ROWS", max_rows)
    first, second = zip(*(column.split([8 * LENGTH, 12 * LENGTH]) for column in make_text()), strict=True)
    expected_layer = make_layer(make_text())
    restored_sums = make_sums()
    restored_sums.load_state_dict(make_sums(first).state_dict())
    restored_sums.merge(make_sums(second))
    expected = measure_layer(expected_layer)
    for other in (make_layer(first, second), Layer(restored_sums, "layer")):
        measures = measure_layer(other)
        for name, value in expected.items():
            assert measures[name] == pytest.approx(value, nan_ok=True, **tolerance("intra_sim" in name)), name
        for method in ("summarize_by_position", "summarize_by_frequency"):
            for column, values in getattr(expected_layer, method)().items():
                assert getattr(other, method)()[column] == pytest.approx(
                    values, nan_ok=True, **tolerance("frequency" in method)
                )
        assert other.find_massive_activations() == expected_layer.find_massive_activations()


def compute_naive_measures(points: Any) -> dict[str, float]:
    """Compute the measures that have a standard error by their definitions; return them by name."""
    names = ("inter_sim", "average_norm", "isoscore", "effective_rank", "participation_ratio", "nesum",
             "mean_vector_norm")  # fmt: skip
    measures = test_stream.compute_naive_measures(points, np.arange(len(points)) // 2)
    return {
        **{name: measures[name] for name in names},
        "isoscore_unbiased": float(isoscore_unbiased(torch.from_numpy(points))),
        "alpha_req": math.nan,  # not defined in six dimensions
        "norm_ratio": measures["mean_vector_norm"] / measures["average_norm"],
    }


@pytest.fixture(scope="module")
def measures_without_group() -> list[dict[str, float]]:
    """Return the measures of the text without each group."""
    points, _, _, groups = make_text()
    return [compute_naive_measures(points[groups != group].numpy()) for group in range(GROUPS)]


def test_errors_are_those_of_measures_without_each_group(measures_without_group: list[dict[str, float]]) -> None:
    measures = measure_layer(make_layer(make_text()))
    assert {key for key in measures if key.endswith("_error")} == {f"{key}_error" for key in measures_without_group[0]}
    for name in measures_without_group[0]:
        pseudo_values = [-(GROUPS - 1) * values[name] for values in measures_without_group]
        assert measures[f"{name}_error"] == pytest.approx(scipy.stats.sem(pseudo_values), rel=1e-8, nan_ok=True), name


def test_replicates_are_measures_without_each_group(measures_without_group: list[dict[str, float]]) -> None:
    points, tokens, positions, groups = make_text()
    replicates = replicate_layer(make_layer(make_text()))
    assert replicates.keys() == {"points", *measures_without_group[0]}
    for name in measures_without_group[0].keys() - {"alpha_req"}:
        assert replicates[name] == pytest.approx([values[name] for values in measures_without_group], rel=1e-8), name
    assert replicates["alpha_req"] == []  # not defined in six dimensions
    assert replicates["points"] == [int((groups != group).sum()) for group in range(GROUPS)]
    assert replicate_layer(make_layer(make_text(), settings=LayerSettings("basic"))) == {}
    without_group = replicate_layer(make_layer((points, tokens, positions, groups.clamp(max=GROUPS - 2))))
    assert set(map(tuple, without_group.values())) == {()}


FIRST_RESULT = """
import sys
import torch
from istar.sums.sample import Sample
from istar.sums.rows import Rows
from istar.sums.source_sums import SourceSums
from istar.sums.stack_measures import compute_replicates
from istar.sums.stack_sums import LayerSettings, StackSums

points, index = torch.randn(200, 16), torch.arange(200)
batch = Rows.of(index // 50, index, index)
sums = StackSums({"layer": torch.zeros(16)}, 200, LayerSettings("all", 4))
sums.update({"layer": points[batch.order]}, batch)
assert len(compute_replicates(sums)["layer"]["isoscore"]) == 4
sample = Sample({"points": torch.device("cpu")}, 100, 0)
sample.update([0], [200], index, {"points": points})
assert sample.estimate_two_nn("points").value > 0
sample.compute_cosines("points")
sample.estimate_gride("points")
print(*{"torch._dynamo", "sympy", "datasets", "transformers", "pandas"} & sys.modules.keys())
"""


def test_a_first_result_of_points_waits_for_no_library_of_texts_or_compilers() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", FIRST_RESULT],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3], timeout=SECONDS,
    )  # fmt: skip
    assert completed.stdout.split() == []


def test_groups_do_not_change_the_measures() -> None:
    ungrouped_measures = measure_layer(make_layer(make_text(), settings=LayerSettings("all")))
    assert not [name for name in ungrouped_measures if name.endswith("_error")]
    grouped_measures = measure_layer(make_layer(make_text()))
    assert math.isnan(ungrouped_measures.pop("effective_rank_unbiased"))  # it needs the groups
    assert {name: grouped_measures[name] for name in ungrouped_measures} == pytest.approx(
        ungrouped_measures, rel=1e-11, nan_ok=True
    )


def test_without_scatter_by_group_some_errors_are_left_out() -> None:
    basic_measures = measure_layer(
        make_layer(make_text(), settings=LayerSettings("basic", GROUPS, scatter_by_group=False))
    )
    all_measures = measure_layer(make_layer(make_text()))
    errors = {name for name in basic_measures if name.endswith("_error")}
    assert errors == {"inter_sim_error", "average_norm_error"}
    assert math.isnan(basic_measures.pop("effective_rank_unbiased"))
    assert basic_measures == pytest.approx({key: all_measures[key] for key in basic_measures}, rel=1e-10, nan_ok=True)


def add_groups_of_points(points: torch.Tensor, num_groups: int = 10) -> dict[str, float]:
    """Return the measures of independent points `(n, d)`; point i is in group i mod `num_groups`."""
    sums = StackSums({"layer": points.mean(0)}, settings=LayerSettings(num_groups=num_groups))
    zeros = torch.zeros(len(points), dtype=torch.int64)
    add_tokens(sums, points, zeros, zeros, torch.arange(len(points)) % num_groups)
    return measure_layer(Layer(sums, "layer"))


@pytest.mark.parametrize("points_per_dimension", [2, 4, 10])
@pytest.mark.parametrize("power", [0.0, 0.25])
def test_corrected_ranks_are_those_of_the_distribution(power: float, points_per_dimension: int) -> None:
    """Over repeated samples of a Gaussian with known variances, the plain ranks are too small."""
    dim, num_repeats = 64, 8
    deviations = np.arange(1, dim + 1) ** -power
    shares, variance_shares = deviations / deviations.sum(), deviations**2 / (deviations**2).sum()
    true_ranks = {
        "effective_rank": np.exp(scipy.stats.entropy(shares)),
        "participation_ratio": 1 / (variance_shares**2).sum(),
    }
    random = np.random.default_rng(points_per_dimension)
    samples = random.normal(size=(num_repeats, points_per_dimension * dim, dim)) * deviations
    repeats = [add_groups_of_points(torch.from_numpy(sample)) for sample in samples]
    for name, true_rank in true_ranks.items():
        plain, corrected = (np.mean([measures[key] for measures in repeats]) for key in (name, f"{name}_unbiased"))
        assert corrected == pytest.approx(true_rank, rel=0.03), name
        assert abs(plain - true_rank) > 2 * abs(corrected - true_rank), name
    too_few = add_groups_of_points(torch.from_numpy(samples[0, : 2 * dim - 1]))
    assert math.isnan(too_few["effective_rank_unbiased"])
    assert math.isfinite(too_few["participation_ratio_unbiased"])


def test_axes_for_a_share_of_the_variance_and_the_severity_of_the_mean() -> None:
    points, *_ = make_text()
    measures = measure_layer(make_layer(make_text()))
    variances = np.linalg.eigvalsh(np.cov(points.T.numpy()))[::-1]
    for percent in (90, 95, 99):
        fewest = next(k for k in range(1, DIM + 1) if variances[:k].sum() >= percent / 100 * variances.sum())
        assert measures[f"dimensions_{percent}"] == fewest
    total_variance = points.numpy().var(0).sum()
    severity = np.linalg.norm(points.numpy().mean(0)) / math.sqrt(total_variance)
    assert measures["outlier_severity"] == pytest.approx(severity, rel=1e-9)


@pytest.mark.parametrize("scale", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_that_are_equal_up_to_rounding_have_norms_and_cosines_alone(scale: float, dtype: torch.dtype) -> None:
    """Half of the points differ from the others by the last bit of each number."""
    points, *columns = make_text()
    points[:] = scale * torch.tensor([3.0, -0.7, 1.3, 0.9, -2.1, 0.3])
    points = points.to(dtype)
    points[::2] *= 1 + torch.finfo(dtype).eps
    sums = StackSums({"layer": scale * ORIGIN}, TYPES, LayerSettings("all", GROUPS))
    add_tokens(sums, points, *columns)
    layer = Layer(sums, "layer")
    measures = measure_layer(layer)
    norms = {"average_norm", "mean_vector_norm", "norm_ratio", "massive_activations", "largest_activation",
             "largest_activation_ratio"}  # fmt: skip
    cosines = {"inter_sim", "intra_sim", "adjusted_intra_sim", "mean_direction_norm", "rank_me", "top_1_cosine_share",
               "top_5_cosine_share", "token_kurtosis", "largest_token_kurtosis"}  # fmt: skip
    expected_names = {"points", *norms, *(cosines if scale else ())}
    errors = {f"{name}_error" for name in expected_names if f"{name}_error" in measures}
    assert {name for name, value in measures.items() if math.isfinite(value)} == expected_names | errors
    assert measures["average_norm"] == pytest.approx(points[0].norm().item(), rel=1e-6)
    assert layer.is_constant
    assert torch.equal(decompose_layer(layer)["centered"], torch.zeros(DIM).double())
    if scale:
        assert measures["inter_sim"] == pytest.approx(1, abs=1e-6)
        assert measures["rank_me"] == pytest.approx(1, rel=1e-4)


def test_the_unbiased_score_of_a_single_outlier_is_undefined_and_the_others_stay() -> None:
    points, *columns = make_text()
    points[:] = 1.0
    points[7, 2] = 5.0
    measures = measure_layer(make_layer((points, *columns)))
    assert math.isnan(measures["isoscore_unbiased"])
    assert measures["participation_ratio"] == pytest.approx(1)
    # One group has the only point that differs; without it, all points are equal.
    assert math.isnan(measures["isoscore_error"])
    assert math.isfinite(measures["average_norm_error"])


def test_errors_are_not_defined_if_a_group_is_empty() -> None:
    points, tokens, positions, groups = make_text()
    measures = measure_layer(make_layer((points, tokens, positions, groups.clamp(max=GROUPS - 2))))
    for name in MEASURES_WITH_ERROR:
        assert math.isnan(measures[f"{name}_error"])
        # A power law needs more than the six dimensions of these points.
        assert math.isfinite(measures[name]) or name == "alpha_req"


def test_by_position_and_by_frequency() -> None:
    points, tokens, positions, *_ = make_text()
    counts = np.bincount(tokens, minlength=TYPES)
    position_table = make_layer(make_text()).summarize_by_position()
    assert (position_table["first"], position_table["last"]) == ([0, 1, 2, 4, 8], [0, 1, 3, 7, 15])
    for token_values, table, is_by_type in (
        (positions.numpy(), position_table, False),
        (counts[tokens], make_layer(make_text()).summarize_by_frequency(), True),
    ):
        for first, last, num_tokens, average_norm, inter_sim in zip(*table.values(), strict=True):
            members = points.numpy()[(token_values >= first) & (token_values <= last)]
            assert len(members) == num_tokens > 0
            assert average_norm == pytest.approx(np.linalg.norm(members, axis=1).mean(), rel=1e-12)
            assert inter_sim == pytest.approx(oracles.mean_pair_cosine(members), **tolerance(is_by_type))
        assert sum(table["points"]) == len(points)


def test_basic_measures_and_no_vocabulary() -> None:
    settings = LayerSettings("basic")
    basic_measures, all_measures = (
        measure_layer(make_layer(make_text(), settings=settings)),
        measure_layer(make_layer(make_text())),
    )
    expected_extra = {"token_kurtosis", "largest_token_kurtosis", "massive_activations", "largest_activation",
                      "largest_activation_ratio"}  # fmt: skip
    assert {name for name in all_measures if not name.endswith("_error")} - basic_measures.keys() == expected_extra
    assert make_layer(make_text(), settings=settings).find_massive_activations() is None
    sums_without_vocabulary = StackSums({"layer": ORIGIN}, 0, settings)
    points, *tokens = make_text()[:3]
    add_tokens(sums_without_vocabulary, points, *tokens)
    layer_without_vocabulary = Layer(sums_without_vocabulary, "layer")
    assert basic_measures.keys() - measure_layer(layer_without_vocabulary).keys() == {
        "intra_sim",
        "adjusted_intra_sim",
    }
    assert layer_without_vocabulary.summarize_by_frequency() == {}


def test_massive_activations_have_their_places() -> None:
    points, tokens, positions, *groups = make_text()
    points[17, 3] = -2e4
    summary = make_layer((points, tokens, positions, *groups)).find_massive_activations()
    assert summary is not None
    assert [tuple(item) for item in summary.top] == [(-2e4, 3, int(tokens[17]), 5)]


def test_a_power_law_is_found_and_needs_twelve_dimensions() -> None:
    assert math.isnan(measure_layer(make_layer(make_text()))["alpha_req"])
    random = np.random.default_rng(0)
    axes = random.normal(size=(400, 40))
    axes, _ = np.linalg.qr(axes - axes.mean(0))
    wide_sums = StackSums({"layer": torch.zeros(40)})
    points = torch.from_numpy(axes * np.arange(1, 41) ** -0.7)
    add_tokens(wide_sums, points, torch.zeros(400, dtype=torch.int64), torch.arange(400))
    measures = measure_layer(Layer(wide_sums, "layer"))
    assert measures["alpha_req"] == pytest.approx(1.4, rel=1e-6)
    assert measures["alpha_req_r_squared"] == pytest.approx(1, rel=1e-9)


def test_the_error_of_alpha_req_is_that_of_power_laws_without_each_group() -> None:
    random = np.random.default_rng(0)
    points = random.normal(size=(400, 30)) * np.arange(1, 31) ** -0.5
    groups = np.arange(400) // 5 % GROUPS
    sums = StackSums({"layer": torch.zeros(30)}, settings=LayerSettings(num_groups=GROUPS))
    columns = (torch.zeros(400, dtype=torch.int64), torch.arange(400) % 5, torch.from_numpy(groups))
    add_tokens(sums, torch.from_numpy(points), *columns)
    exponents = []
    for group in range(GROUPS):
        variances = np.linalg.eigvalsh(np.cov(points[groups != group].T))[::-1][10:29]
        slope, *_ = np.polyfit(np.log(np.arange(11, 30)), np.log(variances), 1)
        exponents.append(-slope)
    measures = measure_layer(Layer(sums, "layer"))
    expected = scipy.stats.sem([-(GROUPS - 1) * exponent for exponent in exponents])
    assert measures["alpha_req_error"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_float32_states_have_the_measures_of_float64(scale: float) -> None:
    """The fourth powers of the smallest and the largest states are out of the range of float32.

    One dimension has a mean of a thousand deviations, as in pretrained models.
    """
    points, *tokens = make_text(num_documents=200)
    points[:, 2] += 2_000
    points = (points * scale).float()
    batches = [(points, *tokens), (points.double(), *tokens)]
    origin = points[:50].double().mean(0)
    accumulators = [StackSums({"layer": origin}, TYPES, LayerSettings("all", GROUPS)) for _ in batches]
    for accumulator, (states, *columns) in zip(accumulators, batches, strict=True):
        for part in range(GROUPS):
            rows = columns[-1] == part
            add_tokens(accumulator, states[rows], *(column[rows] for column in columns))
    layer, wide_layer = (Layer(accumulator, "layer") for accumulator in accumulators)
    measures, expected_measures = measure_layer(layer), measure_layer(wide_layer)
    assert math.isfinite(expected_measures["largest_kurtosis"])
    for name, expected in expected_measures.items():
        # An error is a small difference of large numbers.
        tolerance = 1e-3 if name.endswith("_error") else 1e-6
        # The excess kurtosis is small beside the kurtosis, and the adjusted IntraSim beside IntraSim.
        absolute_tolerance = 3e-6 if "kurtosis" in name else 1e-8
        assert measures[name] == pytest.approx(expected, rel=tolerance, abs=absolute_tolerance, nan_ok=True), name
    for name, values in layer.summarize_by_frequency().items():
        assert values == pytest.approx(wide_layer.summarize_by_frequency()[name], rel=2e-6), name


def test_float32_dimensions_of_tiny_deviations_have_their_kurtosis() -> None:
    """The squares of such dimensions are 0 in float32. Some gains of pretrained normalizations are as small."""
    points, *tokens = make_text(num_documents=200)
    points[:, 1], points[:, 3] = points[:, 1] ** 3 * 1e-32, 3e-20
    points = points.float()
    sums = StackSums({"layer": points[:50].double().mean(0)}, TYPES)
    add_tokens(sums, points, *tokens)
    layer = Layer(sums, "layer")
    kurtosis = layer.dimensions.kurtosis()
    assert layer.dimensions.mean[1].item() == pytest.approx(points[:, 1].double().mean().item(), rel=1e-9, abs=0)
    expected = scipy.stats.kurtosis(points[:, :3].double().numpy())
    assert kurtosis[1].item() == pytest.approx(expected[1], rel=1e-9)
    assert kurtosis[[0, 2]].tolist() == pytest.approx(expected[[0, 2]], rel=1e-5, abs=1e-5)
    assert math.isnan(kurtosis[3])


def test_tokens_may_come_in_any_order() -> None:
    text = make_text()
    order = torch.from_numpy(np.random.default_rng(1).permutation(20 * LENGTH))
    measures = measure_layer(make_layer(tuple(column[order] for column in text)))
    for name, value in measure_layer(make_layer(text)).items():
        assert measures[name] == pytest.approx(value, nan_ok=True, **tolerance("intra_sim" in name)), name


# ---- coverage of the intervals


def covers(estimate: float, error: float, true_value: float, quantile: float) -> bool:
    return abs(estimate - true_value) <= quantile * error


@pytest.mark.slow
def test_intervals_from_documents_cover_and_those_from_tokens_do_not() -> None:
    """The tokens of a document come from the few types of its topic, so that they depend on each other.

    The true values are exact sums over types. For IsoScore and NESum, they are the means of the estimates.
    """
    random = np.random.default_rng(0)
    types = 1.5 + random.normal(size=(12, 4)) * np.array([3, 1, 1, 0.5])
    topics = random.dirichlet(np.full(12, 0.3), size=8)
    unit = types / np.linalg.norm(types, axis=1, keepdims=True)
    shares = topics.mean(0)
    true_values = {"inter_sim": np.sum((shares @ unit) ** 2), "average_norm": shares @ np.linalg.norm(types, axis=1)}
    groups, documents, length, rounds = 10, 150, 20, 250
    group_by_token = torch.arange(documents).repeat_interleave(length) % groups
    settings = LayerSettings("basic", groups)
    names = ("inter_sim", "average_norm", "isoscore", "nesum")
    by_document: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    by_token: dict[str, list[tuple[float, float]]] = {"inter_sim": [], "average_norm": []}
    for _ in range(rounds):
        document_topics = topics[random.integers(8, size=documents)]
        cumulative_shares = document_topics.cumsum(1)[:, None, :]
        tokens = (random.random((documents, length, 1)) > cumulative_shares).sum(2).clip(max=11).ravel()
        accumulator = StackSums({"layer": torch.zeros(4)}, 0, settings)
        points = types[tokens]
        positions = torch.zeros(len(tokens)).long()
        columns = (torch.from_numpy(tokens), positions, group_by_token)
        add_tokens(accumulator, torch.from_numpy(points), *columns)
        measures = measure_layer(Layer(accumulator, "layer"))
        for name, values in by_document.items():
            values.append((measures[name], measures[f"{name}_error"]))
        # These errors assume independent tokens: the first is that of a mean, the second is by the delta method.
        directions = unit[tokens]
        for name, influence in (
            ("average_norm", np.linalg.norm(points, axis=1)),
            ("inter_sim", 2 * directions @ directions.mean(0)),
        ):
            by_token[name].append((measures[name], scipy.stats.sem(influence)))
    for name in ("isoscore", "nesum"):
        true_values[name] = np.mean([estimate for estimate, _ in by_document[name]])
    quantile = scipy.stats.t.ppf(0.975, groups - 1)
    for name, values in by_document.items():
        assert 0.9 <= np.mean([covers(*pair, true_values[name], quantile) for pair in values]) <= 0.98, name
    for name, values in by_token.items():
        assert np.mean([covers(*pair, true_values[name], 1.96) for pair in values]) < 0.75, name
