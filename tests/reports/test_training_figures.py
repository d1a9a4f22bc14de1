from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from istar.drawing.plot import Plot
from istar.reports import configurations
from istar.reports.method_comparisons import compare_methods
from istar.reports.run_frame import read_runs
from istar.reports.training_figures import build_training_plots
from istar.runs.record import METRICS_FILE
from tests.reports.synthetic import BASE, istar, record, save

STEPS = range(0, 400, 100)


def add_run(
    root: Path, reg: Mapping[str, Any], seed: int, level: float, model: str = "new", data_dir: str | None = None
) -> None:
    """Write a run of 400 steps that measured two layers every 100 steps; layer 2 has InterSim `level` x step."""
    folder = save(record("clm", model, reg, seed, 20.0, data=str(data_dir), task__data_dir=data_dir), root)
    rows: list[dict[str, float]] = [{"step": step, "train/task_loss": 9 - step / 100} for step in range(400)]
    for step in STEPS:
        rows.append({"step": step, "probe/layer_1/inter_sim": -1.0, "probe/layer_2/inter_sim": level * step})
    pd.DataFrame(rows).to_csv(folder / METRICS_FILE, index=False)


def plot_training(root: Path) -> list[Plot]:
    runs = configurations.add_selection_columns(read_runs(root, keep_records=True))
    return build_training_plots(compare_methods(runs).methods)


def test_lines_are_means_over_the_seeds_of_each_method(tmp_path: Path) -> None:
    for seed, level in ((1, 0.1), (2, 0.3)):
        add_run(tmp_path, BASE, seed, level)
    add_run(tmp_path, istar(), 1, 0.5)
    add_run(tmp_path, istar(), 1, 0.7, model="larger")
    save(record("rte", "new", BASE, 1), tmp_path)  # without measures during training
    [plot] = plot_training(tmp_path)

    assert [(panel.model, panel.y_label) for panel in plot.panels] == [
        ("larger", "training loss"), ("larger", "InterSim"), ("new", "training loss"), ("new", "InterSim"),
    ]  # fmt: skip
    loss, inter_sim = plot.panels[2:]
    assert [line.label for line in inter_sim.lines] == ["Base", "I-STAR λ=-1 ζ=0.4"]
    base, penalized = inter_sim.lines
    assert base.x == tuple(STEPS)
    assert base.y == pytest.approx([0.2 * step for step in STEPS])
    assert base.y_error == pytest.approx([0.1 * 2**0.5 * step for step in STEPS])
    assert penalized.y_error == ()
    # Fifty bins of eight steps each.
    assert loss.lines[0].x[:2] == (4.0, 12.0)
    assert loss.lines[0].y == pytest.approx([9 - (8 * bin_index + 3.5) / 100 for bin_index in range(50)])


def test_data_sets_of_one_task_have_separate_panels(tmp_path: Path) -> None:
    for data_dir in ("easy/data", "hard/data"):
        add_run(tmp_path, BASE, 1, 0.1, data_dir=data_dir)
    [plot] = plot_training(tmp_path)
    assert plot.name == "training-clm"  # also the name of its files
    assert [panel.title for panel in plot.panels] == ["clm (easy/data)"] * 2 + ["clm (hard/data)"] * 2


def test_broken_and_missing_files_show_nothing(tmp_path: Path) -> None:
    save(record("clm", "new", BASE, 1), tmp_path)
    broken_folder = save(record("clm", "new", BASE, 2), tmp_path)
    (broken_folder / METRICS_FILE).write_bytes(b"\xff\xfe\x00")
    assert plot_training(tmp_path) == []
