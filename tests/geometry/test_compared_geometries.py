"""Differences of geometries: which states are paired, their intervals, CKA of common examples, and the page."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

import istar
from istar.errors import UserError
from istar.geometry.collect.mean_states import Examples
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.geometry import Geometry
from tests.geometry.synthetic import TAPS, make_measurements, make_points, read_sections

T_QUANTILE = scipy.stats.t.ppf(0.975, 9)
RANDOM = np.random.default_rng(0)
REPLICATES = RANDOM.normal(size=(2, 10))


def with_replicates(measured: Measurements, index: int) -> Measurements:
    """Return measurements with replicates of IsoScore at every state."""
    values = {"points": [450.0] * 10, "isoscore": REPLICATES[index].tolist()}
    return replace(measured, replicates={measured.combined_key: dict.fromkeys(measured.all_texts, values)})


def compare_pair(first: Measurements, other: Measurements) -> istar.Comparison:
    return istar.compare({"a": Geometry(with_replicates(first, 0)), "b": Geometry(with_replicates(other, 1))})


@pytest.mark.parametrize("kind", ["points", "places"])
@pytest.mark.parametrize("has_ids", [True, False])
def test_equal_ids_are_paired_and_others_are_not(kind: str, has_ids: bool) -> None:
    states = ["queries", "corpus"] if kind == "points" else TAPS
    fields: dict[str, Any] = {"text_hashes": {"points": "0123"} if has_ids else {}}
    first, other = make_points(states, kind, **fields), make_points(states, kind, **fields)
    for measures in other.all_texts.values():
        measures["isoscore"] += 0.1
        measures["isoscore_error"] = 0.03
    comparison = compare_pair(first, other)
    rows = comparison.table.query("measure == 'isoscore'").set_index("state")
    assert list(rows.index) == list(states)
    differences = REPLICATES[1] - REPLICATES[0]
    error = math.sqrt(9 / 10 * ((differences - differences.mean()) ** 2).sum()) if has_ids else math.hypot(0.01, 0.03)
    for state, row in rows.iterrows():
        assert (row["first"], row["other"]) == (first.all_texts[state]["isoscore"], other.all_texts[state]["isoscore"])
        assert row["difference"] == pytest.approx(0.1, rel=1e-9)
        assert row["high"] - row["difference"] == pytest.approx(T_QUANTILE * error, rel=1e-9)
        assert row["difference"] - row["low"] == pytest.approx(T_QUANTILE * error, rel=1e-9)
        assert row["method"] == ("paired" if has_ids else "independent")
    assert any("because ids were not given or are not equal" in line for line in comparison.findings) == (not has_ids)
    half_width = T_QUANTILE * error
    decimals = 1 - math.floor(math.log10(half_width))
    lines = [line for line in repr(comparison).splitlines() if " isoscore " in line]
    assert all(f" {0.1:.{decimals}f} ± {half_width:.{decimals}f}│" in line for line in lines)
    assert len(lines) == comparison._repr_html_().count("isoscore") == (2 if kind == "points" else 1)
    without_error = comparison.table.query("measure == 'rank_me'")
    assert without_error["low"].isna().all()
    assert set(without_error["method"]) == {""}


def test_other_rows_or_groups_are_independent() -> None:
    first, other = (make_points(text_hashes={"points": name}) for name in ("0", "1"))
    assert set(compare_pair(first, other).table["method"]) == {"independent", ""}
    first = make_points(text_hashes={"points": "0"})
    other = replace(first, settings={**first.settings, "groups": 5})
    assert set(compare_pair(first, other).table["method"]) == {"independent", ""}


def test_which_states_are_compared() -> None:
    def list_states(first: Measurements, other: Measurements) -> list[str]:
        return list(istar.compare({"a": Geometry(first), "b": Geometry(other)}).table["state"].unique())

    assert list_states(make_points(["x", "y", "z"]), make_points(["z", "x"])) == ["x", "z"]
    assert list_states(make_points(["before"]), make_points(["after"])) == ["after"]
    assert list_states(make_measurements(), make_measurements()) == list(TAPS)
    deeper = make_measurements(taps=("embeddings", "layer_1", "layer_2", "layer_3"))
    assert list_states(make_measurements(), deeper) == ["layer_3"]


def test_texts_are_as_on_the_page_of_today() -> None:
    other_texts = make_measurements(text_hashes={"news": "77", "talk": "88"})
    comparison = istar.compare({"a": Geometry(make_measurements()), "b": Geometry(other_texts)})
    assert comparison.table["low"].isna().all()
    assert any("they were measured over different texts" in line for line in comparison.findings)
    assert any("b was measured over other texts than a." in line for line in comparison.findings)


def make_examples(seed: int, names: str, states: tuple[str, ...] = ("queries", "corpus")) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples(
        tuple(names), tuple(names), {name: torch.randn(len(names), 6, generator=generator) for name in states}
    )


def debiased_cka(xs: np.ndarray, ys: np.ndarray) -> float:
    """CKA with the unbiased HSIC of Song et al. (2012), written out with n x n matrices."""

    def hsic(k: np.ndarray, l: np.ndarray) -> float:  # noqa: E741
        n = len(k)
        k, l = (matrix - np.diag(np.diag(matrix)) for matrix in (k, l))  # noqa: E741
        total = np.trace(k @ l) + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k @ l).sum()
        return float(total / (n * (n - 3)))

    k, l = xs @ xs.T, ys @ ys.T  # noqa: E741
    return hsic(k, l) / math.sqrt(hsic(k, k) * hsic(l, l))


def test_cka_is_of_the_common_examples() -> None:
    first, other = make_examples(0, "abcdefghij"), make_examples(1, "xjihgfe")
    comparison = istar.compare({"a": Geometry(make_points(), first), "b": Geometry(make_points(), other)})
    [(labels, table)] = comparison.similarity.items()
    assert labels == ("a", "b")
    names = "efghij"
    for state in first.states:
        for other_state in other.states:
            xs = first.states[state][[first.ids.index(name) for name in names]].double().numpy()
            ys = other.states[other_state][[other.ids.index(name) for name in names]].double().numpy()
            assert table.loc[state, other_state] == pytest.approx(debiased_cka(xs, ys), rel=1e-9)
    without = istar.compare(
        {"a": Geometry(make_points(), first), "b": Geometry(make_points(), other)}, similarity=False
    )
    assert without.similarity == {}


def test_cka_that_is_not_possible() -> None:
    points = make_points()
    geometries = {"a": Geometry(points, make_examples(0, "abcdef")), "b": Geometry(points, make_examples(0, "efghi"))}
    assert istar.compare(geometries).similarity == {}
    message = "4 of the 6 examples of a are not in b, the first is a; CKA needs at least 4 with equal ids"
    with pytest.raises(UserError, match=message):
        istar.compare(geometries, similarity=True)
    with pytest.raises(UserError, match="b has no mean states of examples; measure again, and save with examples=True"):
        istar.compare({**geometries, "b": Geometry(points)}, similarity=True)


@pytest.mark.parametrize(
    ("geometries", "message"),
    [
        ({"a": make_points()}, "1 geometries cannot be compared; expected two or more"),
        ({"a": make_points(), "b": make_measurements()}, "a has clouds, b has layers; expected geometries of the same"),
        ({"a": make_points(), "b": make_points(["x", "y"])}, r"b \(x, y\) has no state of a; expected equal names"),
    ],
)
def test_what_cannot_be_compared(geometries: dict[str, Measurements], message: str) -> None:
    with pytest.raises(UserError, match=message):
        istar.compare({label: Geometry(measured) for label, measured in geometries.items()})


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("kind", ["points", "places", "tokens"])
def test_pages_and_folders(kind: str, tmp_path: Path) -> None:
    measured = make_measurements() if kind == "tokens" else make_points(TAPS[:3], kind)
    geometry = Geometry(measured, make_examples(0, "abcdef", TAPS[:3]))
    geometry.save(tmp_path / "base", examples=True)
    comparison = istar.compare({"base": tmp_path / "base", "tuned": geometry})
    assert comparison.similarity[("base", "tuned")].loc["layer_1", "layer_1"] == pytest.approx(1, abs=1e-9)
    page = comparison.save(tmp_path / "page")
    assert len(pd.read_csv(tmp_path / "page" / "comparison.csv")) == 2 * len(measured.all_texts)
    text = read_sections(page)
    assert "Geometry of base and tuned" in text
    assert {"similarity.csv", "layers.csv"} <= {path.name for path in (tmp_path / "page" / "tables").iterdir()}
    if kind != "tokens":
        for word in ("document", "I(W)", "final normalization with", "Not on this page"):
            assert word not in text, word
    assert max(map(len, repr(comparison).splitlines())) <= 80
    html = comparison._repr_html_()
    assert "paired" in html or "independent" in html
    assert len(comparison.plot("isoscore").axes) == 1


def measure_rows(rows: Any, ids: Any, **options: Any) -> Geometry:
    return istar.measure(rows, ids=ids, **options)


def measure_batch_of_rows(rows: Any, ids: Any, **options: Any) -> Geometry:
    batches = [{"input": torch.from_numpy(rows).float()}]
    return istar.measure(torch.nn.Sequential(torch.nn.Identity()), batches, modules=["0"], ids=ids, **options)


@pytest.mark.parametrize("measure", [measure_rows, measure_batch_of_rows])
@pytest.mark.parametrize("has_groups", [True, False])
def test_equal_ids_in_another_order_are_paired(measure: Any, has_groups: bool) -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(203, 5))
    changed = rows + 0.1 * generator.normal(size=rows.shape)
    ids = np.array([f"row {index}" for index in range(len(rows))])
    users = np.array([f"user {index}" for index in generator.integers(0, 40, len(rows))])
    order = generator.permutation(len(rows))
    options = [{"groups": users}, {"groups": users[order]}] if has_groups else [{}, {}]
    first, same, shuffled = (
        measure(points, names, **groups)
        for points, names, groups in (
            (rows, ids, options[0]),
            (changed, ids, options[0]),
            (changed[order], ids[order], options[1]),
        )
    )
    expected, table = (istar.compare({"a": first, "b": other}).table for other in (same, shuffled))
    pairs = zip(table.to_dict("records"), expected.to_dict("records"), strict=True)
    paired = {row["measure"]: (row, expected_row) for row, expected_row in pairs if expected_row["method"]}
    assert {"isoscore", "inter_sim"} <= paired.keys()
    for row, expected_row in paired.values():
        assert row["method"] == expected_row["method"] == "paired"
        assert row["high"] - row["low"] == pytest.approx(expected_row["high"] - expected_row["low"], rel=1e-3)
    # Only the first rows are read, which are others in another order.
    limited = [measure(rows, ids, limit=100), measure(changed[order], ids[order], limit=100)]
    assert set(istar.compare({"a": limited[0], "b": limited[1]}).table["method"]) <= {"independent", ""}


def test_clouds_with_ids_in_different_orders_keep_no_examples() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 3))
    ids = [str(index) for index in range(20)]
    same = istar.measure({"a": rows, "b": rows}, ids=ids)
    assert same.examples is not None
    assert istar.measure({"a": rows, "b": rows[::-1]}, ids={"a": ids, "b": ids[::-1]}).examples is None
