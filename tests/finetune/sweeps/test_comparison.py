import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from istar.drawing import rendering
from istar.drawing.pictures import render_files
from istar.finetune.execute.run_summary import build_run_table
from istar.finetune.sweeps.comparison import (
    COMPARISON_COLUMNS,
    build_comparison_plots,
    build_comparison_row,
    build_comparison_table,
    format_comparison_as_markdown,
)
from istar.runs.record import RunRecord
from istar.runs.run_rows import Configuration, group_by_task
from tests.finished_runs import make_plain_key


def make_record(reg: dict[str, Any] | None = None, **changes: Any) -> RunRecord:
    config = {
        "task": {"name": "rte"}, "model": {"name": "google-bert/bert-base-cased"},
        "reg": reg or {"name": "istar", "lambda": -1.0, "zeta": 0.4, "include_padding": False}, "seed": 1,
    }  # fmt: skip
    record = RunRecord(
        name="rte-bert-istar-0123456789ab",
        status="finished",
        config=config,
        key=make_plain_key(config),
        headline={"metric": "accuracy", "value": 0.70758, "epoch": 3},
        metrics={"accuracy": 0.70758, "f1": 0.6543, "loss": 0.61234},
        baseline={"accuracy": 0.5271, "f1": 0.0},
        collapsed={"validation": False},
        isotropy={
            "before": {"0": 0.11111, "1": 0.22222, "2": 0.33333, "union": 0.04444},
            "after": {"0": 0.15555, "1": 0.26666, "2": 0.07777, "union": 0.08888},
            "points": 4321,
        },
        timing={"total": 61.7},
    )
    return replace(record, **changes)


def with_settings(record: RunRecord, data: str = "data", **settings: Any) -> RunRecord:
    config = {**record.config, **settings}
    return replace(record, config=config, key=make_plain_key(config, data))


def render_table(table: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[│┃|]", line)[1:-1]]


def find_row(output: str, start: str) -> list[str]:
    rows = [split_cells(line) for line in output.splitlines()]
    return next(row for row in rows if row and row[0].startswith(start))


def make_row(label: str, *records: RunRecord) -> list[str]:
    return build_comparison_row(("rte", "bert-base-cased"), Configuration(label, list(records)))


def test_row() -> None:
    assert dict(zip(COMPARISON_COLUMNS, make_row("I-STAR λ=-1 ζ=0.4", make_record()), strict=True)) == {
        "task": "rte, accuracy", "model": "bert-base-cased", "method": "I-STAR λ=-1 ζ=0.4", "seed": "1",
        "value": "70.76", "constant": "52.71", "epoch": "3", "IsoScore": "0.0444 → 0.0889", "seconds": "62",
    }  # fmt: skip


def test_collapse_and_missing_baselines_are_shown() -> None:
    collapsed = make_record(collapsed={"validation_matched": False, "validation_mismatched": True})
    assert make_row("", collapsed)[COMPARISON_COLUMNS.index("value")] == "70.76 (collapsed)"
    output = " ".join(render_table(build_run_table(collapsed)).split())
    assert "Collapsed on validation_mismatched: all predictions are the same." in output
    assert "validation_matched" not in output
    assert "ollapsed" not in render_table(build_run_table(make_record()))
    assert "(1 collapsed)" in format_comparison_as_markdown(group_by_task([make_record(), collapsed])).splitlines()[2]
    plain = make_record(headline={"metric": "matthews_correlation", "value": -0.05, "epoch": 1}, baseline={})
    assert make_row("", plain)[COMPARISON_COLUMNS.index("value")] == "-5.00"
    assert make_row("", plain)[COMPARISON_COLUMNS.index("constant")] == "-"
    assert "constant prediction" not in render_table(build_run_table(plain))


@pytest.mark.parametrize(
    ("reg", "name"),
    [
        ({"name": "none"}, "Base"),
        ({"name": "cosreg", "lambda": 1.0, "include_padding": False}, "CosReg λ=1"),
        ({"name": "istar", "lambda": -0.5, "zeta": 0.2, "include_padding": False}, "I-STAR λ=-0.5 ζ=0.2"),
        ({"name": "istar", "lambda": 5, "zeta": 1, "include_padding": True}, "I-STAR λ=5 ζ=1 padding counted"),
        ({"name": "istar", "lambda": 1, "zeta": "auto", "include_padding": False}, "I-STAR λ=1 ζ=auto"),
        ({"name": "istar", "lambda": 1, "zeta": 0.0, "estimator": "unbiased"}, "I-STAR λ=1 unbiased"),
    ],
)
def test_method(reg: dict[str, Any], name: str) -> None:
    assert make_record(reg).key.label == name


def test_summary() -> None:
    summary = render_table(build_run_table(make_record()))
    assert "rte · I-STAR λ=-1 ζ=0.4 · bert-base-cased" in summary
    assert find_row(summary, "accuracy (epoch 3)")[2] == "70.76"
    assert find_row(summary, "f1")[2] == "65.43"
    assert "│ loss" not in summary
    assert find_row(summary, "IsoScore embeddings")[1] == "0.1111"
    assert find_row(summary, "IsoScore layer 2")[1:] == ["0.3333", "0.0778", "-0.2556"]
    assert find_row(summary, "IsoScore layers 1 to L")[1:] == ["0.0444", "0.0889", "+0.0444"]
    assert "A constant prediction has accuracy 52.71." in summary
    assert "4321 validation tokens" in summary


def test_comparison() -> None:
    records = [make_record(), make_record({"name": "none"}), make_record({"name": "cosreg", "lambda": 1.0})]
    table = build_comparison_table(group_by_task(records))
    assert table.title == "rte, accuracy · bert-base-cased · seed 1"
    columns = [name for name in COMPARISON_COLUMNS[2:] if name != "seed"]
    assert [column.header for column in table.columns] == columns
    lines = [split_cells(line) for line in render_table(table).splitlines() if len(split_cells(line)) == len(columns)]
    rows = [make_row(record.key.label, record) for record in records]
    assert lines[-3:] == [[row[2], *row[4:]] for row in rows]
    lines = format_comparison_as_markdown(group_by_task(records)).splitlines()
    assert split_cells(lines[0]) == list(COMPARISON_COLUMNS)
    assert set(split_cells(lines[1])) == {"---"}
    assert [split_cells(line) for line in lines[2:]] == rows
    # The columns in which runs differ are kept.
    other = with_settings(make_record(), task={"name": "stsb"})
    table = build_comparison_table(group_by_task([make_record(), other]))
    assert table.title == "bert-base-cased · seed 1"
    assert [column.header for column in table.columns] == ["task", "method", *COMPARISON_COLUMNS[4:]]


def test_runs_that_differ_in_nothing_but_the_seed_are_one_row() -> None:
    records = [make_seeded_record(seed, value) for seed, value in ((1, 0.70), (2, 0.73), (4, 0.71))]
    other = with_settings(make_seeded_record(1, 0.5), optim={"lr": 1.0})
    table = build_comparison_table(group_by_task([records[0], other, *records[1:]]))
    assert table.title == "rte, accuracy · bert-base-cased"
    assert [column.header for column in table.columns] == list(COMPARISON_COLUMNS[2:])
    first, second = [row for row in map(split_cells, render_table(table).splitlines()) if row and "λ" in row[0]]
    deviation = np.std([70, 73, 71], ddof=1)
    assert first[1:3] == ["1,2,4", f"{np.mean([70, 73, 71]):.2f} ± {deviation:.2f}"]
    assert second[1:3] == ["1", "50.00"]
    assert "1 collapsed" in " ".join(make_row("", *records, make_seeded_record(5, 0.5, collapsed={"validation": True})))


def make_seeded_record(seed: int, value: float, **fields: Any) -> RunRecord:
    record = make_record(headline={"metric": "accuracy", "value": value, "epoch": 2}, **fields)
    return with_settings(record, seed=seed)


@pytest.mark.parametrize(
    ("seeds", "text"), [([2, 1], "1,2"), ([1, 2, 3], "1-3"), ([9, 3, 1, 2, 4, 8], "1-4,8,9"), (range(1000), "0-999")]
)
def test_three_or_more_consecutive_seeds_are_a_range(seeds: Sequence[int], text: str) -> None:
    assert make_row("", *(make_seeded_record(seed, 0.5) for seed in seeds))[3] == text


ISTAR = {"name": "istar", "lambda": -1.0, "zeta": 0.4, "include_padding": False}
REGS: list[dict[str, Any]] = [{"name": "none"}, ISTAR, {**ISTAR, "lambda": 1.0}, {"name": "cosreg", "lambda": 1.0}]
REGS += [{**ISTAR, "lambda": 5.0, "zeta": 0.2, "include_padding": True}, {**ISTAR, "lambda": -5.0, "zeta": 0.8}]
METHODS = ["Base", "I-STAR λ=-1 ζ=0.4", "I-STAR λ=1 ζ=0.4", "CosReg λ=1"]


def make_drawn_record(number: int, value: float | None = None, baseline: bool = True) -> RunRecord:
    layers = [str(layer) for layer in range(13)]
    config = {"task": {"name": "rte"}, "model": {"name": "bert"}, "reg": REGS[number % 6], "seed": number // 6}
    return RunRecord(
        name=f"run{number}",
        status="finished",
        config=config,
        key=make_plain_key(config),
        headline={"metric": "accuracy", "value": 0.6 + 0.05 * (number % 6) if value is None else value, "epoch": 1},
        baseline={"accuracy": 0.5} if baseline else {},
        isotropy={
            "before": {**{layer: 0.1 + 0.01 * int(layer) for layer in layers}, "union": 0.2},
            "after": {**{layer: 0.1 * (number + 1) + 0.01 * int(layer) for layer in layers}, "union": 0.3},
            "points": 10,
        },
        timing={"total": 1.0},
    )


def draw(records: list[RunRecord], folder: Path) -> dict[str, dict[str, bytes]]:
    plots = build_comparison_plots(group_by_task(records))
    return render_files({plot.name: plot for plot in plots}, folder, ("png", "svg"))


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve runs are more than there are colours, and one score is negative. Files that are there are not drawn."""
    records = [make_drawn_record(number, value) for number, value in enumerate([None] * 11 + [-0.3])]
    files_by_name = draw(records, tmp_path)
    assert list(files_by_name) == ["comparison-metric", "comparison-isoscore"]
    for name, files in files_by_name.items():
        assert files["png"].startswith(b"\x89PNG\r\n\x1a\n")
        assert ElementTree.fromstring(files["svg"]).tag == "{http://www.w3.org/2000/svg}svg"
        for suffix, content in files.items():
            (tmp_path / f"{name}.{suffix}").write_bytes(content)
    drawn: list[str] = []
    render = rendering.render
    monkeypatch.setattr(rendering, "render", lambda plot, suffixes: drawn.append(plot.name) or render(plot, suffixes))
    assert draw(records, tmp_path) == files_by_name
    assert drawn == []
    draw([*records[:11], make_drawn_record(11, -0.2)], tmp_path)
    assert drawn == ["comparison-metric"]


def test_a_panel_per_task() -> None:
    records = [make_drawn_record(number) for number in range(4)]
    for record in records[::2]:
        record.config["task"] = {"name": "stsb"}
    metric_plot, isoscore_plot = build_comparison_plots(group_by_task(records))
    assert [panel.title for panel in isoscore_plot.panels] == ["stsb · bert", "rte · bert"]
    assert [panel.title for panel in metric_plot.panels] == [
        "accuracy, percent: stsb · bert", "accuracy, percent: rte · bert"
    ]  # fmt: skip
    means = [[line.x[0] for line in panel.lines] for panel in metric_plot.panels]
    assert means == [pytest.approx([60, 70]), pytest.approx([65, 75])]


def test_numbers_in_the_plots_are_the_records() -> None:
    records = [make_drawn_record(number) for number in range(4)]
    [score_panel], [isoscore_panel] = (plot.panels for plot in build_comparison_plots(group_by_task(records)))
    assert [(line.label, line.x, line.x_error) for line in score_panel.lines] == [
        (method, (pytest.approx(score),), (0.0,)) for method, score in zip(METHODS, (60, 65, 70, 75), strict=True)
    ]
    assert score_panel.vertical_line == (50, "a constant prediction")
    without_baseline = [records[0], make_drawn_record(1, baseline=False)]
    assert build_comparison_plots(group_by_task(without_baseline))[0].panels[0].vertical_line is None
    line_by_label = {line.label: line for line in isoscore_panel.lines}
    assert list(line_by_label) == ["before training", *METHODS]
    for record, name in zip(records, METHODS, strict=True):
        assert line_by_label[name].x == tuple(range(13))
        assert line_by_label[name].y == tuple(record.isotropy["after"][str(layer)] for layer in range(13))
    assert line_by_label["before training"].y == pytest.approx([0.1 + 0.01 * layer for layer in range(13)])


def test_seeds_are_a_mean_with_a_standard_deviation() -> None:
    records = [make_drawn_record(number) for number in (0, 6, 12)]  # the same method
    scores, isoscores = [60, 66, 75], [record.isotropy["after"]["3"] for record in records]
    for record, score in zip(records, scores, strict=True):
        record.headline["value"] = score / 100
    [score_panel], [isoscore_panel] = (plot.panels for plot in build_comparison_plots(group_by_task(records)))
    [line] = score_panel.lines
    assert (*line.x, *line.x_error) == pytest.approx((np.mean(scores), np.std(scores, ddof=1)))
    _, after = isoscore_panel.lines
    assert (after.y[3], after.y_error[3]) == pytest.approx((np.mean(isoscores), np.std(isoscores, ddof=1)))


def test_options_are_told_apart_by_their_names() -> None:
    """Keys that only one of two optimizers has say nothing beyond the names of the optimizers."""
    optimizers = ({"name": "adamw", "lr": 1e-5, "betas": [0.9, 0.999]}, {"name": "SGD", "lr": 1e-5, "nesterov": True})
    [group] = group_by_task([with_settings(make_drawn_record(0), optim=optimizer) for optimizer in optimizers]).values()
    assert [configuration.label for configuration in group] == ["Base optim=adamw", "Base optim=SGD"]


def test_models_with_different_layers_are_compared() -> None:
    """A sweep over the number of layers used to end with a `KeyError`, after all of its runs."""

    def with_layers(record: RunRecord, num_layers: int) -> RunRecord:
        return with_settings(record, model={"name": "bert", "config": {"num_hidden_layers": num_layers}})

    shallow, deep = with_layers(make_drawn_record(0), 2), with_layers(make_drawn_record(1), 4)
    for record, num_layers in ((shallow, 2), (deep, 4)):
        for scores in (record.isotropy["before"], record.isotropy["after"]):
            for layer in range(num_layers + 1, 13):
                del scores[str(layer)]
    _, isoscore_plot = build_comparison_plots(group_by_task([deep, shallow]))
    assert {line.label: len(line.x) for line in isoscore_plot.panels[0].lines} == {METHODS[1]: 5, METHODS[0]: 3}
    # A narrow terminal cuts nothing of the setting that tells two configurations apart.
    other = with_layers(shallow, 3)
    console = Console(width=60, file=io.StringIO(), record=True)
    console.print(build_comparison_table(group_by_task([shallow, other])))
    text = console.export_text()
    assert "…" not in text
    assert {"=2", "=3"} <= set(re.findall(r"=\d", text))


def test_data_sets_of_one_task_are_told_apart() -> None:
    records = [
        with_settings(make_drawn_record(number), data=path, task={"name": "rte", "data_dir": path})
        for path in ("easy.txt", "hard.txt")
        for number in (0, 1)
    ]
    groups = group_by_task(records)
    assert [len(group) for group in groups.values()] == [2, 2]
    titles = ["rte (easy.txt)", "rte (hard.txt)"]
    assert [task for task, _ in groups] == titles
    rows = format_comparison_as_markdown(groups).splitlines()[2:]
    assert [split_cells(row)[0].partition(",")[0] for row in rows] == [titles[0]] * 2 + [titles[1]] * 2
    assert [panel.title.partition(" ·")[0] for panel in build_comparison_plots(groups)[1].panels] == titles


def test_configurations_of_a_method_are_told_apart() -> None:
    """The labels of a grid over the learning rate name it; they used to be the method alone, the same for all."""
    records = [
        with_settings(make_drawn_record(number), optim={"lr": rate, "weight_decay": 0.01}, run={"root": f"runs-{rate}"})
        for number, rate in ((0, 1e-5), (0, 3e-5), (1, 1e-5), (1, 3e-5), (2, 1e-5))
    ]
    [group] = group_by_task(records).values()
    labels = [
        "Base lr=1e-05",
        "Base lr=3e-05",
        f"{METHODS[1]} lr=1e-05",
        f"{METHODS[1]} lr=3e-05",
        f"{METHODS[2]} lr=1e-05",
    ]
    assert [configuration.label for configuration in group] == labels
    table = format_comparison_as_markdown(group_by_task(records)).splitlines()
    assert [split_cells(row)[2] for row in table[2:]] == labels
    assert [line.label for line in build_comparison_plots(group_by_task(records))[0].panels[0].lines] == labels


def test_trials_of_a_search_name_every_setting() -> None:
    """Each trial has its own lambda, so the learning rate used to differ between no two runs of one label."""
    records = [with_settings(make_drawn_record(n), optim={"lr": rate}) for n, rate in ((1, 1e-5), (2, 3e-5))]
    [group] = group_by_task(records).values()
    labels = [f"{METHODS[1]} lr=1e-05", f"{METHODS[2]} lr=3e-05"]
    assert METHODS[1].split(" ")[0] == METHODS[2].split(" ")[0]
    assert [configuration.label for configuration in group] == labels
