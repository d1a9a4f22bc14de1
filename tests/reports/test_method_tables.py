from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from istar.reports import configurations, method_tables
from istar.reports.method_comparisons import compare_methods
from istar.reports.method_tables import build_conclusions_sheet, build_methods_sheet
from istar.reports.run_frame import read_runs
from tests.reports.synthetic import BASE, cosreg, istar, record, save


def test_methods_are_compared_with_base_over_the_same_seeds(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    base_scores = {seed: float(random.uniform(0.5, 0.7)) for seed in range(1, 7)}
    istar_scores = {seed: base_scores[seed] + float(random.normal(0.02, 0.01)) for seed in range(2, 7)}
    for seed, value in base_scores.items():
        save(record("rte", "mine", BASE, seed, value), tmp_path)
    for seed, value in istar_scores.items():
        save(record("rte", "mine", istar(-3), seed, value, changes={"collapsed": {"validation": seed == 2}}), tmp_path)
    # A trial of another learning rate has fewer seeds, and a better score.
    save(record("rte", "mine", istar(-3), 1, 0.99, optim__lr=1e-4), tmp_path)
    save(record("rte", "mine", istar(1), 1, 0.6), tmp_path)
    save(record("rte", "other", cosreg(), 1, 0.6), tmp_path)
    compared = compare_methods(configurations.add_selection_columns(read_runs(tmp_path, keep_records=True)))
    sheet = build_methods_sheet(compared)

    row_by_method = {(row["model"], row["method"]): row for row in sheet.frame.to_dict("records")}
    assert list(row_by_method) == [
        ("mine", "Base"), ("mine", "I-STAR λ=-3 ζ=0.4"), ("mine", "I-STAR λ=1 ζ=0.4"), ("other", "CosReg λ=1"),
    ]  # fmt: skip
    row = row_by_method["mine", "I-STAR λ=-3 ζ=0.4"]
    differences = np.array([100 * (istar_scores[seed] - base_scores[seed]) for seed in istar_scores])
    margin = stats.t.ppf(0.975, 4) * stats.sem(differences)
    assert row["mean"] == pytest.approx(100 * np.mean(list(istar_scores.values())), rel=1e-12)
    assert (row["seeds"], row["collapsed"]) == (5, 1)
    assert row["minus_reference"] == pytest.approx(differences.mean(), rel=1e-9)
    assert (row["low"], row["high"]) == pytest.approx(
        (differences.mean() - margin, differences.mean() + margin), rel=1e-9
    )
    # A single pair has a difference but no interval; a method without Base has neither.
    assert np.isnan(row_by_method["mine", "I-STAR λ=1 ζ=0.4"]["low"])
    assert row_by_method["mine", "I-STAR λ=1 ζ=0.4"]["minus_reference"] == pytest.approx(60 - 100 * base_scores[1])
    assert np.isnan(row_by_method["other", "CosReg λ=1"]["minus_reference"])
    # The tuned method has one trial more than Base, so that the page shows no p-value.
    assert (row["trials"], row_by_method["mine", "Base"]["trials"], row["equal_budgets"]) == (2, 1, False)
    assert row["p"] == row["p_holm"] == 2 / 2**5
    entry_by_column = dict(zip(sheet.header, sheet.rows[1], strict=True))
    assert [entry_by_column[name].text for name in ("trials", "chosen\non", "p", "p,\nHolm")] == [
        "2", "validation", "-", "-",
    ]  # fmt: skip
    assert "for 1 test; 2 entries without a p-value are not among them. m = 1." in sheet.caption


def test_sentences_are_in_the_page_and_in_the_files(tmp_path: Path) -> None:
    for seed in range(1, 8):
        save(record("rte", "mine", BASE, seed, 0.5 + seed / 100), tmp_path)
        save(record("rte", "mine", istar(-1), seed, 0.6 + seed**2 / 1000), tmp_path)
    compared = compare_methods(configurations.add_selection_columns(read_runs(tmp_path, keep_records=True)))
    [[sentence]] = build_conclusions_sheet(compared).rows
    assert sentence.text.startswith("I-STAR λ=-1 ζ=0.4 is better than Base on rte by 8.00 (difference +8.00, ")
    assert list(build_conclusions_sheet(compared).frame["verdict"]) == ["better"]
    sheet = build_methods_sheet(compared)
    assert list(sheet.frame["conclusion"]) == ["", sentence.text]
    entry_by_column = dict(zip(sheet.header, sheet.rows[1], strict=True))
    assert [entry_by_column[name].text for name in ("p", "p,\nHolm")] == ["0.0156", "0.0156"]
    assert entry_by_column["smallest"].text == f"{sheet.frame['smallest_difference'][1]:.2f}"
    assert "at 0.05, Holm's strictest level (0.05 / m)" in sheet.caption


def test_a_point_for_each_method_in_the_settings_of_the_table(tmp_path: Path) -> None:
    value_by_seed = {1: 0.5, 2: 0.7, 3: 0.6}
    for seed, value in value_by_seed.items():
        save(record("rte", "mine", BASE, seed, value), tmp_path)
        save(record("rte", "mine", istar(-1), seed, value + 0.1, optim__lr=1e-4), tmp_path)
    # One method has a trial with fewer seeds, and one task has a single method.
    save(record("rte", "mine", istar(-1), 1, 0.99), tmp_path)
    save(record("cola", "mine", BASE, 1, 0.3), tmp_path)
    save(record("stsb", "mine", BASE, 1, 0.3), tmp_path)
    save(record("stsb", "mine", istar(1), 1, 0.4), tmp_path)
    compared = compare_methods(configurations.add_selection_columns(read_runs(tmp_path, keep_records=True)))
    plot = method_tables.build_all_methods_plot(compared)
    assert [(panel.model, panel.title) for panel in plot.panels] == [("mine", "rte"), ("mine", "stsb")]
    line_by_label = {line.label: line for line in plot.panels[0].lines}
    assert list(line_by_label) == ["Base", "I-STAR λ=-1 ζ=0.4"]
    scores = 100 * np.array(list(value_by_seed.values()))
    runs_by_method = {method.name: method.runs for method in compared.methods if method.task == "rte"}
    for (label, line), shift in zip(line_by_label.items(), (0, 10), strict=True):
        assert line.y == pytest.approx((scores.mean() + shift,))
        assert line.y_error == pytest.approx((scores.std(ddof=1),))
        isotropy = runs_by_method[label]["isoscore_after"].to_numpy(float)
        assert line.x == pytest.approx((isotropy.mean(),))
        assert line.x_error == pytest.approx((isotropy.std(ddof=1),))
        assert line.hollow == (False,)
    # A single seed has no standard deviation.
    assert [line.y_error for line in plot.panels[1].lines] == [(0.0,), (0.0,)]
