import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from istar.errors import UserError
from istar.reports import configurations
from istar.reports.method_comparisons import ComparedMethods, MethodComparison, compare_methods
from istar.reports.paper_tables import build_table1_sheet
from istar.reports.run_frame import read_runs
from istar.runs.record import read_result
from istar.statistics.conclusions import Verdict, conclusion, verdict
from tests.reports.synthetic import BASE, cosreg, istar, record, save


def compare_methods_in(root: Path, reference: str = "Base") -> ComparedMethods:
    return compare_methods(configurations.add_selection_columns(read_runs(root, keep_records=True)), reference)


def read_comparisons_by_method(root: Path) -> dict[tuple[str, str, str], MethodComparison]:
    return {
        (comparison.method.model, comparison.method.task, comparison.method.name): comparison
        for comparison in compare_methods_in(root).comparisons
    }


def save_all(
    root: Path, reg: Mapping[str, Any], values: Mapping[int, float], task: str = "rte", **options: Any
) -> None:
    for seed, value in values.items():
        save(record(task, options.pop("model", "mine"), reg, seed, value, **options), root, geometry=False)


def compute_permutation_p(differences: np.ndarray) -> float:
    """Return the p-value of SciPy's paired permutation test, which enumerates all patterns of signs."""
    zeros, samples = np.zeros_like(differences), {"permutation_type": "samples", "n_resamples": np.inf}
    test = stats.permutation_test((differences, zeros), lambda x, y: np.mean(x - y), vectorized=False, **samples)
    return float(test.pvalue)


def adjust_by_holm(p_values: list[float]) -> list[float]:
    """Return adjusted p-values: for each hypothesis, the smallest level at which Holm's procedure rejects it."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    largest_so_far = 0.0
    for step, index in enumerate(order):
        largest_so_far = max(largest_so_far, min(1.0, (len(order) - step) * p_values[index]))
        adjusted[index] = largest_so_far
    return adjusted


def test_tests_are_paired_and_corrected_over_the_whole_report(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    # The seeds differ by much more than the methods, so that an unpaired test would find nothing.
    base = {seed: float(random.uniform(0.3, 0.7)) for seed in range(1, 9)}
    shifts = {("rte", -1): 0.01, ("rte", 1): 0.001, ("cola", -1): -0.02, ("cola", 1): 0.004}
    differences = {}
    for task in ("rte", "cola"):
        save_all(tmp_path, BASE, base, task)
    for (task, weight), shift in shifts.items():
        values = {seed: value + shift + float(random.normal(0, 0.003)) for seed, value in base.items()}
        save_all(tmp_path, istar(weight), values, task)
        differences[task, weight] = np.array([100 * (values[seed] - base[seed]) for seed in base])
    # A method with one pair has no test, and is not counted.
    save_all(tmp_path, cosreg(), {1: 0.6})
    compared = compare_methods_in(tmp_path)

    assert (compared.holm.tests, compared.holm.left_out) == (4, 1)
    unadjusted_p_values = {key: compute_permutation_p(values) for key, values in differences.items()}
    adjusted_p_values = dict(zip(unadjusted_p_values, adjust_by_holm(list(unadjusted_p_values.values())), strict=True))
    comparison_by_method = {(row.method.task, row.method.name): row for row in compared.comparisons}
    for (task, weight), values in differences.items():
        comparison = comparison_by_method[task, f"I-STAR λ={weight} ζ=0.4"]
        assert comparison.unadjusted_p_value == pytest.approx(unadjusted_p_values[task, weight], rel=1e-12)
        assert comparison.statistics.p_value == pytest.approx(adjusted_p_values[task, weight], rel=1e-12)
        reference_interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert comparison.statistics.interval == pytest.approx(tuple(reference_interval), rel=1e-9)
        # The power follows from the noncentral F distribution, that of the square of a noncentral t.
        limit = stats.f.isf(0.05 / 4, 1, 7)
        assert comparison.statistics.smallest_difference is not None
        ratio = comparison.statistics.smallest_difference / values.std(ddof=1)
        assert stats.ncf.sf(limit, 1, 7, 8 * ratio**2) == pytest.approx(0.8, abs=1e-6)
    assert verdict(comparison_by_method["rte", "I-STAR λ=-1 ζ=0.4"].statistics) is Verdict.BETTER
    assert verdict(comparison_by_method["cola", "I-STAR λ=-1 ζ=0.4"].statistics) is Verdict.WORSE
    # Without the correction, this difference would be significant.
    assert unadjusted_p_values["cola", 1] < 0.05 / 2
    assert comparison_by_method["rte", "CosReg λ=1"].statistics.p_value is None


def test_holm_is_applied(tmp_path: Path) -> None:
    """With six seeds, one test reaches p = 0.031, but two such tests reach no adjusted p-value below 0.05."""
    base_values = dict.fromkeys(range(1, 7), 0.5)
    better_values = {seed: 0.51 + seed / 1000 for seed in base_values}
    save_all(tmp_path, BASE, base_values)
    save_all(tmp_path, istar(-1), better_values)
    [single_comparison] = compare_methods_in(tmp_path).comparisons
    assert single_comparison.statistics.p_value == single_comparison.unadjusted_p_value == 2 / 2**6
    assert verdict(single_comparison.statistics) is Verdict.BETTER
    save_all(tmp_path, istar(1), better_values)
    for comparison in compare_methods_in(tmp_path).comparisons:
        assert (comparison.unadjusted_p_value, comparison.statistics.p_value) == (2 / 2**6, 4 / 2**6)
        assert conclusion(comparison.statistics).endswith(
            "they have 6 seeds in common, with which the test cannot give an adjusted p-value below 0.05; run more "
            "seeds."
        )
        # At the level 0.05 / 2, no difference is found, however large it is.
        assert comparison.statistics.smallest_difference is None


# Trials.


def save_search(root: Path, reg: Mapping[str, Any], rates: tuple[float, ...], seeds: int = 6, **options: Any) -> None:
    """Write the runs of a search over learning rates with seed 1; only the last rate has the other seeds, too."""
    for rate in rates:
        save_all(root, reg, {1: 0.5}, optim__lr=rate, **options)
    values = {seed: 0.5 + reg.get("lambda", 0) / 50 + seed / 1000 for seed in range(2, seeds + 1)}
    save_all(root, reg, values, optim__lr=rates[-1], **options)


RATES = (1e-5, 3e-5, 5e-5)


def test_each_lambda_is_a_method_with_trials_of_its_own(tmp_path: Path) -> None:
    for reg in (BASE, istar(-1), istar(1), istar(3)):
        save_search(tmp_path, reg, RATES)
    comparisons = read_comparisons_by_method(tmp_path)
    assert len(comparisons) == 3
    for comparison in comparisons.values():
        assert comparison.method.budget.total() == 3
        assert comparison.statistics.has_equal_budgets


def test_unequal_trials_allow_no_conclusion(tmp_path: Path) -> None:
    save_search(tmp_path, BASE, RATES)
    save_search(tmp_path, istar(-1), (*RATES, 1e-4))
    save_search(tmp_path, istar(1), RATES[1:])
    for comparison, num_trials in zip(compare_methods_in(tmp_path).comparisons, (4, 2), strict=True):
        assert comparison.method.budget.total() == num_trials
        assert conclusion(comparison.statistics).startswith(
            f"Nothing can be concluded about {comparison.method.name} and Base on rte: their budgets differ"
        )


def test_the_run_that_makes_budgets_differ_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    """A trial run with fewer examples used to spoil a sweep, without a word about which run it was."""
    values = {1: 0.6, 2: 0.61}
    save_all(tmp_path, BASE, values)
    save_all(tmp_path, istar(-1), values)
    trial = record("rte", "mine", istar(-1), 3, 0.5, data="few", task__limit_train=9)
    save(replace(trial, name="rte-bert-istar-0123456789ab"), tmp_path)
    [comparison] = compare_methods_in(tmp_path).comparisons
    assert "their budgets differ by rte-bert-istar-0123456789ab (istar report --exclude" in conclusion(
        comparison.statistics
    )
    runs = read_runs(tmp_path, keep_records=True, left_out=["*-0123456789ab"])
    [comparison] = compare_methods(configurations.add_selection_columns(runs)).comparisons
    assert comparison.statistics.has_equal_budgets
    with pytest.raises(UserError, match=r"--exclude x\*: no run below .* is called so; a pattern has a \*"):
        read_runs(tmp_path, left_out=["x*"])


def test_trials_that_failed_or_were_pruned_were_tried(tmp_path: Path) -> None:
    save_search(tmp_path, BASE, RATES)
    save_search(tmp_path, istar(-1), RATES[1:])
    save_all(tmp_path, istar(-1), {1: 0.5}, status="failed", optim__lr=RATES[0])
    # An unfinished run does not count as a trial, and a failed seed of a trial does not count as another one.
    save_all(tmp_path, istar(-1), {1: 0.5}, status="unfinished", optim__lr=1.0)
    save_all(tmp_path, istar(-1), {7: 0.5}, status="failed", optim__lr=RATES[-1])
    save_search(tmp_path, istar(1), RATES[1:])
    save_all(tmp_path, istar(1), {1: 0.4}, status="pruned", optim__lr=RATES[0])
    for comparison in compare_methods_in(tmp_path).comparisons:
        assert comparison.method.budget.total() == 3
        assert comparison.method.num_configurations == 2
        assert comparison.statistics.has_equal_budgets


@pytest.mark.parametrize(
    "changes",
    [{"trainer__max_epochs": 4}, {"trainer__max_steps": 30}, {"task__limit_train": 50}],
    ids=lambda changes: next(iter(changes)),
)
def test_longer_trials_or_other_data_are_another_budget(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_search(tmp_path, BASE, RATES)
    save_search(tmp_path, istar(-1), RATES, **changes)
    save_search(tmp_path, istar(1), RATES)
    different_budget, equal_budget = compare_methods_in(tmp_path).comparisons
    assert different_budget.method.budget.total() == equal_budget.method.budget.total()
    assert (different_budget.statistics.has_equal_budgets, equal_budget.statistics.has_equal_budgets) == (False, True)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ([{"task__data_dir": "easy"}, {"task__data_dir": "hard"}], [("mine", "rte (easy)"), ("mine", "rte (hard)")]),
        ([{"model": "a/last"}, {"model": "b/last"}], [("a/last", "rte"), ("b/last", "rte")]),
    ],
)
def test_each_data_set_and_model(tmp_path: Path, paths: list[dict[str, Any]], names: list[tuple[str, str]]) -> None:
    """Of two corpora or of two checkpoints with the same last name, only those with the best means were compared."""
    for number, (path, gain) in enumerate(zip(paths, (0.2, -0.2), strict=True)):
        hashes = {"data": f"data {number}", "weights": f"model {number}"}
        for seed in range(1, 9):
            score = 0.5 + seed / 100
            save_all(tmp_path, BASE, {seed: score}, **hashes, **path)
            save_all(tmp_path, istar(-1), {seed: score + gain + seed / 1000}, **hashes, **path)
    compared = compare_methods_in(tmp_path)
    assert [(method.model, method.task) for method in compared.methods[::2]] == names
    assert [verdict(row.statistics) for row in compared.comparisons] == [Verdict.BETTER, Verdict.WORSE]
    assert [row.statistics.chosen_among for row in compared.comparisons] == [1, 1]


@pytest.mark.parametrize("inputs", [{"data": "a part"}, {"weights": "5678"}], ids=lambda inputs: next(iter(inputs)))
def test_scores_on_other_data_or_of_other_models_are_not_compared(tmp_path: Path, inputs: dict[str, Any]) -> None:
    """Two methods used to be compared even if each had another validation set, such as a part of it."""
    scores = {seed: 0.5 + seed / 100 for seed in range(1, 8)}
    save_all(tmp_path, BASE, scores)
    better_scores = {seed: score + 0.2 + seed / 1000 for seed, score in scores.items()}
    save_all(tmp_path, istar(-1), better_scores)
    save_all(tmp_path, istar(1), better_scores, **inputs)
    same, other = (comparison.statistics for comparison in compare_methods_in(tmp_path).comparisons)
    assert (same.pairs, other.pairs) == (7, 0)
    assert "is better than Base" in conclusion(same)
    assert conclusion(other) == (
        "Nothing can be concluded about I-STAR λ=1 ζ=0.4 and Base on rte: their models or their data differ, so "
        "that no score can be compared."
    )
    # One p-value alone is corrected.
    assert other.difference is other.p_value is None
    assert same.p_value == pytest.approx(2 / 2**7)
    (tmp_path / "table").mkdir()
    for path in tmp_path.glob("rte-*"):
        reg = read_result(path).config["reg"]
        if reg == BASE or reg["lambda"] > 0:
            path.rename(tmp_path / "table" / path.name)
    runs = configurations.add_selection_columns(read_runs(tmp_path / "table", keep_records=True))
    [row] = build_table1_sheet(configurations.select_cells(runs)).frame.query("zeta == 0.4").to_dict("records")
    assert row["differs_from_base"] == "model or data"
    assert row["minus_base"] is None


def test_a_part_of_the_validation_set_is_not_the_best_by_luck(tmp_path: Path) -> None:
    """A short trial run with `task.limit_validation`, in the same folder, used to be shown for its better mean."""
    part = {"train": 100, "validation": {"validation": 5}}
    for reg in (BASE, istar(-1)):
        save_all(tmp_path, reg, {1: 0.6})
        save_all(tmp_path, reg, {1: 1.0}, changes={"data": part}, data="a part", task__limit_validation=5)
    compared = compare_methods_in(tmp_path)
    assert [list(method.score_by_seed.values()) for method in compared.methods] == [[60.0], [60.0]]
    assert compared.comparisons[0].statistics.obstacle == ""


def test_a_search_over_epochs_is_equal_for_methods_that_end_with_different_ones(tmp_path: Path) -> None:
    for reg, chosen_epochs in ((BASE, 3), (istar(-1), 5)):
        for epochs in (3, 4, 5):
            seeds = range(1, 7) if epochs == chosen_epochs else [1]
            save_all(tmp_path, reg, {seed: 0.5 + seed / 100 for seed in seeds}, trainer__max_epochs=epochs)
    [comparison] = compare_methods_in(tmp_path).comparisons
    assert comparison.statistics.has_equal_budgets


def test_steps_and_the_batch_are_the_examples_of_a_training_by_steps(tmp_path: Path) -> None:
    for reg, batch_size in ((BASE, 32), (istar(-1), 32), (istar(1), 64)):
        values = {seed: 0.5 + seed / 100 for seed in range(1, 7)}
        save_all(tmp_path, reg, values, trainer__max_steps=30, data__batch_size=batch_size)
    equal_budget, larger_batch = compare_methods_in(tmp_path).comparisons
    assert (equal_budget.statistics.has_equal_budgets, larger_batch.statistics.has_equal_budgets) == (True, False)


# The set that chooses.


def test_the_held_out_set_chooses_and_the_reported_set_does_not(tmp_path: Path) -> None:
    for reg in (BASE, istar(-1)):
        for rate, value, chosen_by in ((1e-5, 0.9, 0.5), (3e-5, 0.6, 0.7)):
            for seed in range(1, 7):
                held_out = {"selection": {"set": "held_out", "metric": "accuracy_held_out", "value": chosen_by}}
                save_all(tmp_path, reg, {seed: value + seed / 100}, changes=held_out, optim__lr=rate)
    [comparison] = compare_methods_in(tmp_path).comparisons
    assert comparison.method.selection_set == "held-out"
    assert set(comparison.method.runs["optim.lr"]) == {3e-5}
    assert comparison.method.score_by_seed[1] == pytest.approx(61)
    assert comparison.method.num_configurations == 2
    assert (comparison.statistics.chosen_among, comparison.statistics.reference_chosen_among) == (1, 1)
    assert "biased" not in conclusion(comparison.statistics)


def test_a_choice_on_the_reported_set_is_said(tmp_path: Path) -> None:
    for reg in (BASE, istar(-1)):
        save_search(tmp_path, reg, RATES)
    [comparison] = compare_methods_in(tmp_path).comparisons
    assert comparison.method.selection_set == "validation"
    assert conclusion(comparison.statistics).endswith(
        " The mean of I-STAR λ=-1 ζ=0.4 is biased upwards by the choice among 3 configurations on the reported set. "
        "The mean of Base is biased upwards by the choice among 3 configurations on the reported set."
    )


# Seeds.


@pytest.mark.parametrize(
    ("seeds", "reason"),
    [
        (range(7, 9), "they have no seed in common"),
        (range(6, 12), "they have one seed in common, and a test needs at least two"),
        (range(1, 8), "their seeds differ, and 1 seed has a run of only one of them; run both with the same seeds"),
    ],
)
def test_other_seeds_than_those_of_base(tmp_path: Path, seeds: range, reason: str) -> None:
    save_all(tmp_path, BASE, {seed: 0.5 + seed / 100 for seed in range(1, 7)})
    save_all(tmp_path, istar(-1), dict.fromkeys(seeds, 0.6))
    [comparison] = compare_methods_in(tmp_path).comparisons
    assert (
        conclusion(comparison.statistics)
        == f"Nothing can be concluded about I-STAR λ=-1 ζ=0.4 and Base on rte: {reason}."
    )


def test_methods_are_compared_with_another_reference(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    placebo = {"name": "random_direction", "lambda": 1.0}
    scores = {
        name: {seed: 0.6 + shift + 0.02 * random.standard_normal() for seed in range(1, 8)}
        for name, shift in (("Base", 0.0), ("CosReg λ=1", 0.05), ("random direction λ=1", -0.05))
    }
    for reg, score_by_seed in zip((BASE, cosreg(), placebo), scores.values(), strict=True):
        save_all(tmp_path, reg, score_by_seed)
    compared = compare_methods_in(tmp_path, reference="random direction")
    assert compared.reference == "random direction"
    assert [comparison.method.name for comparison in compared.comparisons] == ["Base", "CosReg λ=1"]
    placebo_scores = 100 * np.array(list(scores["random direction λ=1"].values()))
    p_values = [
        compute_permutation_p(100 * np.array(list(scores[name].values())) - placebo_scores)
        for name in ("Base", "CosReg λ=1")
    ]
    for comparison, adjusted_p in zip(compared.comparisons, adjust_by_holm(p_values), strict=True):
        assert comparison.statistics.p_value == pytest.approx(adjusted_p, rel=1e-9)
        assert comparison.reference is not None
        assert comparison.statistics.reference == comparison.reference.name == "random direction λ=1"
        mean_difference = np.mean(100 * np.array(list(scores[comparison.method.name].values())) - placebo_scores)
        assert comparison.statistics.difference == pytest.approx(mean_difference)
    assert conclusion(compared.comparisons[1].statistics).startswith("CosReg λ=1 is better than random direction λ=1")
    # The full name gives the same comparison.
    in_full = compare_methods_in(tmp_path, reference="random direction λ=1")
    assert [row.statistics for row in in_full.comparisons] == [row.statistics for row in compared.comparisons]


def test_a_reference_that_is_no_method_or_several_is_refused(tmp_path: Path) -> None:
    save_all(tmp_path, BASE, {1: 0.6, 2: 0.7})
    for weight in (-1, 1):
        save_all(tmp_path, istar(weight), {1: 0.5, 2: 0.6})
    with pytest.raises(UserError, match="no finished run is of the method 'VICReg'; expected one of 'Base', 'I-STAR"):
        compare_methods_in(tmp_path, reference="VICReg")
    with pytest.raises(UserError, match=r"the reference 'I-STAR' may be 'I-STAR λ=-1 ζ=0.4' or 'I-STAR λ=1 ζ=0.4'"):
        compare_methods_in(tmp_path, reference="I-STAR")
    compared = compare_methods_in(tmp_path, reference="I-STAR λ=1 ζ=0.4")
    assert [comparison.method.name for comparison in compared.comparisons] == ["Base", "I-STAR λ=-1 ζ=0.4"]


def test_without_base_nothing_is_concluded(tmp_path: Path) -> None:
    save_all(tmp_path, istar(-1), {1: 0.5})
    [comparison] = compare_methods_in(tmp_path).comparisons
    assert comparison.reference is comparison.unadjusted_p_value is None
    assert verdict(comparison.statistics) is Verdict.NONE


def test_collapsed_runs_of_the_pairs_are_counted(tmp_path: Path) -> None:
    for (reg, level), seed in itertools.product(((BASE, 0.5), (istar(-1), 0.52)), range(1, 7)):
        collapsed = {"collapsed": {"validation": reg is not BASE and seed < 3}}
        save(record("rte", "mine", reg, seed, level + seed**2 / 1000, changes=collapsed), tmp_path, geometry=False)
    [comparison] = compare_methods_in(tmp_path).comparisons
    assert conclusion(comparison.statistics).endswith(" have collapsed to constant predictions and count.")


def test_a_lower_perplexity_is_an_improvement(tmp_path: Path) -> None:
    save_all(tmp_path, BASE, {seed: 30.0 + seed for seed in range(1, 7)}, "clm")
    save_all(tmp_path, istar(-1), {seed: 28.0 + 1.1 * seed for seed in range(1, 7)}, "clm")
    [comparison] = compare_methods_in(tmp_path).comparisons
    assert comparison.statistics.difference == pytest.approx(-2 + 0.35)
    assert verdict(comparison.statistics) is Verdict.BETTER
