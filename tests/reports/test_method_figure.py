"""The report's figure of all methods."""

from pathlib import Path

import numpy as np
import pytest

from istar.drawing.rendering import render
from istar.reports import configurations, method_figure
from istar.reports.method_comparisons import compare_methods
from istar.reports.run_frame import load_runs
from tests.reports.synthetic import BASE, istar, record, save


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
    compared = compare_methods(configurations.add_selection_columns(load_runs(tmp_path, keep_records=True)))
    plot = method_figure.build_all_methods_plot(compared)
    assert [(panel.model, panel.task) for panel in plot.panels] == [("mine", "rte"), ("mine", "stsb")]
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
        assert (line.num_seeds, line.seeds) == ((3,), (1, 2, 3))
    # A single seed has no standard deviation.
    assert [line.y_error for line in plot.panels[1].lines] == [(0.0,), (0.0,)]
    assert set(render(plot)) == {"svg", "pdf", "png"}
