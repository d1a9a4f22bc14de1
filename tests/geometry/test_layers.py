"""The accumulators of a layer: merges, states, tables, and standard errors, against naive computations and theory."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from istar.geometry import grouped_moments
from istar.geometry.layers import (
    COVARIANCE_MEASURES_WITH_ERROR,
    MEASURES_WITH_ERROR,
    SCORE_BY_SENTENCE,
    Layer,
    LayerSettings,
)
from istar.measures import isoscore_by_sentence, isoscore_unbiased
from tests import oracles

CPU = torch.device("cpu")
DIM, TYPES, GROUPS, LENGTH = 6, 9, 4, 12


def text(documents: int = 20, length: int = LENGTH, seed: int = 0) -> tuple[Any, Any, Any, Any, Any]:
    """Return points, tokens, positions, groups and numbers of documents, whose points have a common part."""
    random = np.random.default_rng(seed)
    shifts = np.repeat(random.normal(1, 1, (documents, DIM)), length, axis=0)
    points = torch.from_numpy(shifts + random.normal(0, 2, shifts.shape))
    tokens = torch.from_numpy(random.integers(0, TYPES, documents * length))
    number = torch.arange(documents * length)
    return points, tokens, number % length, number // length % GROUPS, number // length


def layer(*parts: Any, settings: LayerSettings | None = None) -> Layer:
    """Return a layer that has seen batches."""
    result = Layer(DIM, TYPES, CPU, settings or LayerSettings("all", GROUPS))
    for part in parts:
        result.update(*part)
    return result


def split(part: Any, at: int) -> tuple[Any, Any]:
    """Return the tokens before and after an index."""
    return tuple(values[:at] for values in part), tuple(values[at:] for values in part)


@pytest.mark.parametrize("waiting", [1, 7, 10_000])
def test_batches_merges_and_states_do_not_change_measures(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_moments, "MAX_WAITING_POINTS", waiting)
    first, second = split(text(), 8 * LENGTH)
    whole = layer(text())
    merged, again = layer(second), layer(settings=LayerSettings("all", GROUPS))
    again.load_state_dict(layer(first).state_dict())
    again.merge(merged)
    expected = whole.compute_measures()
    for other in (layer(first, second), again):
        assert other.compute_measures() == pytest.approx(expected, rel=1e-9, nan_ok=True)
        for field in ("summarize_by_position", "summarize_by_frequency"):
            for column, values in getattr(whole, field)().items():
                assert getattr(other, field)()[column] == pytest.approx(values, rel=1e-9, nan_ok=True)
        assert other.find_massive_activations() == whole.find_massive_activations()


def naive(points: Any) -> dict[str, float]:
    """Compute the measures that have a standard error."""
    covariance = np.cov(points.T)
    singular = np.linalg.svd(points - points.mean(0), compute_uv=False)
    shares = singular / singular.sum()
    participation = np.trace(covariance) ** 2 / np.trace(covariance @ covariance)
    average_norm, mean_vector = np.linalg.norm(points, axis=1).mean(), np.linalg.norm(points.mean(0))
    return {
        "inter_sim": oracles.mean_pair_cosine(points),
        "average_norm": average_norm,
        "isoscore": (participation - 1) / (points.shape[1] - 1),
        "isoscore_unbiased": float(isoscore_unbiased(torch.from_numpy(points))),
        "isoscore_by_sentence": float(isoscore_by_sentence(torch.from_numpy(points).view(-1, LENGTH, DIM))),
        "effective_rank": np.exp(-(shares * np.log(shares)).sum()),
        "participation_ratio": participation,
        "mean_vector_norm": mean_vector,
        "norm_ratio": mean_vector / average_norm,
    }


def test_errors_are_those_of_measures_without_each_group() -> None:
    points, _, _, groups, _ = text()
    without = [naive(points[groups != group].numpy()) for group in range(GROUPS)]
    measured = layer(text()).compute_measures()
    assert {name for name in measured if name.endswith("_error")} == {f"{name}_error" for name in without[0]}
    for name in without[0]:
        pseudo_values = [-(GROUPS - 1) * figures[name] for figures in without]
        assert measured[f"{name}_error"] == pytest.approx(scipy.stats.sem(pseudo_values), rel=1e-8), name


@pytest.mark.parametrize("waiting", [1, 7, 10_000])
def test_sentences_are_documents_of_unlike_length_about_an_origin(
    waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_moments, "MAX_WAITING_POINTS", waiting)
    points, tokens, positions, groups, documents = text()
    is_kept = positions <= documents % 5
    # Of the points of every seventh document, none counts.
    numbers = torch.where(documents % 7 == 0, -1, documents)
    chosen = is_kept & (numbers >= 0)
    padded, mask = points.view(20, LENGTH, DIM), chosen.view(20, LENGTH)
    for settings in (LayerSettings("all"), LayerSettings("all", GROUPS)):
        measured = Layer(DIM, TYPES, CPU, settings, origin=points[chosen].mean(0))
        for rows in ((documents < 9), (documents >= 9)):
            parts = (points, tokens, positions, groups, numbers)
            measured.update(*(part[rows & is_kept] for part in parts))
        expected = isoscore_by_sentence(padded, mask).item()
        assert measured.compute_measures()[SCORE_BY_SENTENCE] == pytest.approx(expected, rel=1e-9)


def test_the_score_by_sentence_needs_four_documents_and_separate_documents() -> None:
    few = layer(split(text(), 3 * LENGTH)[0]).compute_measures()
    assert math.isnan(few[SCORE_BY_SENTENCE])
    assert math.isnan(few[f"{SCORE_BY_SENTENCE}_error"])
    packed = layer(text(), settings=LayerSettings("all", GROUPS, has_separate_documents=False)).compute_measures()
    assert not [name for name in packed if name.startswith(SCORE_BY_SENTENCE)]


def test_replicates_are_measures_without_each_group() -> None:
    points, tokens, positions, groups, documents = text()
    without = [naive(points[groups != group].numpy()) for group in range(GROUPS)]
    replicates = layer(text()).compute_replicates()
    assert replicates.keys() == {"tokens", *without[0]}
    for name in without[0]:
        assert replicates[name] == pytest.approx([figures[name] for figures in without], rel=1e-8), name
    assert replicates["tokens"] == [int((groups != group).sum()) for group in range(GROUPS)]
    assert layer(text(), settings=LayerSettings("basic")).compute_replicates() == {}
    empty_group = layer((points, tokens, positions, groups.clamp(max=GROUPS - 2), documents)).compute_replicates()
    assert set(map(tuple, empty_group.values())) == {()}


def test_groups_do_not_change_the_measures() -> None:
    plain = layer(text(), settings=LayerSettings("all")).compute_measures()
    assert not [name for name in plain if name.endswith("_error")]
    grouped = layer(text()).compute_measures()
    assert {name: grouped[name] for name in plain} == pytest.approx(plain, rel=1e-11, nan_ok=True)


def test_without_scatter_by_group_some_errors_are_left_out() -> None:
    few = layer(text(), settings=LayerSettings("basic", GROUPS, scatter_by_group=False)).compute_measures()
    full = layer(text()).compute_measures()
    assert {name for name in few if name.endswith("_error")} == {f"{name}_error" for name in MEASURES_WITH_ERROR}
    assert few == pytest.approx({name: full[name] for name in few}, rel=1e-10, nan_ok=True)


def test_errors_are_not_defined_if_a_group_is_empty() -> None:
    points, tokens, positions, groups, documents = text()
    measured = layer((points, tokens, positions, groups.clamp(max=GROUPS - 2), documents)).compute_measures()
    for name in (*MEASURES_WITH_ERROR, *COVARIANCE_MEASURES_WITH_ERROR, SCORE_BY_SENTENCE):
        assert math.isnan(measured[f"{name}_error"])
        assert math.isfinite(measured[name])


def test_by_position_and_by_frequency() -> None:
    points, tokens, positions, *_ = text()
    counts = np.bincount(tokens, minlength=TYPES)
    table = layer(text()).summarize_by_position()
    assert (table["first"], table["last"]) == ([0, 1, 2, 4, 8], [0, 1, 3, 7, 15])
    for values, rows in ((positions.numpy(), table), (counts[tokens], layer(text()).summarize_by_frequency())):
        for first, last, number, norm, cosine in zip(*rows.values(), strict=True):
            members = points.numpy()[(values >= first) & (values <= last)]
            assert len(members) == number > 0
            assert norm == pytest.approx(np.linalg.norm(members, axis=1).mean(), rel=1e-12)
            assert cosine == pytest.approx(oracles.mean_pair_cosine(members), rel=1e-9)
        assert sum(rows["tokens"]) == len(points)


def test_basic_measures_and_no_vocabulary() -> None:
    settings = LayerSettings("basic")
    basic, every = layer(text(), settings=settings).compute_measures(), layer(text()).compute_measures()
    extra = {
        SCORE_BY_SENTENCE,
        "token_kurtosis",
        "largest_token_kurtosis",
        "massive_activations",
        "largest_activation_ratio",
    }
    assert {name for name in every if not name.endswith("_error")} - basic.keys() == extra
    assert layer(text(), settings=settings).find_massive_activations() is None
    bare = Layer(DIM, 0, CPU, settings)
    bare.update(*text()[:3])
    assert basic.keys() - bare.compute_measures().keys() == {"intra_sim", "adjusted_intra_sim"}
    assert bare.summarize_by_frequency() == {}


def test_massive_activations_have_their_places() -> None:
    points, tokens, positions, *groups = text()
    points[17, 3] = -2e4
    found = layer((points, tokens, positions, *groups)).find_massive_activations()
    assert found is not None
    assert [tuple(item) for item in found.top] == [(-2e4, 3, int(tokens[17]), 5)]


def test_a_power_law_is_found_and_needs_twelve_dimensions() -> None:
    assert math.isnan(layer(text()).compute_measures()["alpha_req"])
    random = np.random.default_rng(0)
    axes = random.normal(size=(400, 40))
    axes, _ = np.linalg.qr(axes - axes.mean(0))
    wide = Layer(40, 0, CPU)
    wide.update(
        torch.from_numpy(axes * np.arange(1, 41) ** -0.7), torch.zeros(400, dtype=torch.int64), torch.arange(400)
    )
    measured = wide.compute_measures()
    assert measured["alpha_req"] == pytest.approx(1.4, rel=1e-6)
    assert measured["alpha_req_r_squared"] == pytest.approx(1, rel=1e-9)


# ---- coverage of the intervals


def covers(estimate: float, error: float, true: float, quantile: float) -> bool:
    return abs(estimate - true) <= quantile * error


@pytest.mark.slow
def test_intervals_from_documents_cover_and_those_from_tokens_do_not() -> None:
    """The tokens of a document come from the few types of its topic, so that they depend on each other.

    The true values are exact sums over types. The expectation of IsoScore is that of the estimator.
    """
    random = np.random.default_rng(0)
    types = 1.5 + random.normal(size=(12, 4)) * np.array([3, 1, 1, 0.5])
    topics = random.dirichlet(np.full(12, 0.3), size=8)
    unit = types / np.linalg.norm(types, axis=1, keepdims=True)
    shares = topics.mean(0)
    true = {"inter_sim": np.sum((shares @ unit) ** 2), "average_norm": shares @ np.linalg.norm(types, axis=1)}
    groups, documents, length, rounds = 10, 150, 20, 250
    numbers = torch.arange(documents).repeat_interleave(length) % groups
    settings = LayerSettings("basic", groups)
    by_document: dict[str, list[tuple[float, float]]] = {"inter_sim": [], "average_norm": [], "isoscore": []}
    by_token: dict[str, list[tuple[float, float]]] = {"inter_sim": [], "average_norm": []}
    for _ in range(rounds):
        chosen = topics[random.integers(8, size=documents)]
        ends = chosen.cumsum(1)[:, None, :]
        tokens = (random.random((documents, length, 1)) > ends).sum(2).clip(max=11).ravel()
        corpus = Layer(4, 0, CPU, settings)
        points = types[tokens]
        corpus.update(torch.from_numpy(points), torch.from_numpy(tokens), torch.zeros(len(tokens)).long(), numbers)
        measured = corpus.compute_measures()
        for name, values in by_document.items():
            values.append((measured[name], measured[f"{name}_error"]))
        # The errors of independent tokens: that of a mean, and by the delta method.
        directions = unit[tokens]
        for name, influence in (
            ("average_norm", np.linalg.norm(points, axis=1)),
            ("inter_sim", 2 * directions @ directions.mean(0)),
        ):
            by_token[name].append((measured[name], scipy.stats.sem(influence)))
    true["isoscore"] = np.mean([estimate for estimate, _ in by_document["isoscore"]])
    quantile = scipy.stats.t.ppf(0.975, groups - 1)
    for name, values in by_document.items():
        assert 0.9 <= np.mean([covers(*value, true[name], quantile) for value in values]) <= 0.98, name
    for name, values in by_token.items():
        assert np.mean([covers(*value, true[name], 1.96) for value in values]) < 0.75, name
