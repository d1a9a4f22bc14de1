from pathlib import Path

import pytest

from istar.errors import UserError
from istar.reports.paired_differences import compute_differences_from_base
from tests.reports.synthetic import BASE, cosreg, istar, record, save


def test_methods_are_paired_with_base_by_task_model_and_seed(tmp_path: Path) -> None:
    base_values = {1: 0.60, 2: 0.62, 3: 0.59}
    method_values = {2: 0.63, 3: 0.64, 4: 0.99}
    for seed, value in base_values.items():
        save(record("rte", "mine", BASE, seed, value), tmp_path)
        save(record("clm", "mine", BASE, seed, 40.0 + seed), tmp_path)
        save(record("clm", "mine", istar(-3), seed, 30.0), tmp_path)
    for seed, value in method_values.items():
        save(record("rte", "mine", istar(-3), seed, value), tmp_path)
    # These runs are in no pair: a configuration that is not selected, a failed run, and a model without Base.
    save(record("rte", "mine", istar(-3), 1, 0.99, optim__lr=1e-4), tmp_path)
    save(record("rte", "mine", cosreg(), 1, status="failed"), tmp_path)
    save(record("rte", "other", istar(-3), 1, 0.9), tmp_path)
    differences = {
        (comparison.model, comparison.task, comparison.metric, comparison.method): comparison.by_seed
        for comparison in compute_differences_from_base(tmp_path)
    }
    # Differences of accuracies are in percentage points, those of perplexities are not scaled.
    assert differences == {
        ("mine", "rte", "accuracy", "I-STAR λ=-3 ζ=0.4"): pytest.approx({2: 1.0, 3: 5.0}),
        ("mine", "clm", "perplexity", "I-STAR λ=-3 ζ=0.4"): pytest.approx({1: -11.0, 2: -12.0, 3: -13.0}),
    }


def test_runs_without_a_pair(tmp_path: Path) -> None:
    save(record("rte", "mine", BASE, 1, 0.6), tmp_path)
    save(record("rte", "mine", istar(), 2, 0.6), tmp_path)
    with pytest.raises(UserError, match="holds no finished runs of Base and another method with the same task"):
        compute_differences_from_base(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no finished runs of Base"):
        compute_differences_from_base(tmp_path / "empty")
    with pytest.raises(UserError, match="is not a folder"):
        compute_differences_from_base(tmp_path / "nowhere")
