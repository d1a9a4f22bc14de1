import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pytest
from rich.console import Console

from istar.finetune.runs.run_summary import build_run_table
from istar.finetune.sweeps import comparison
from istar.finetune.sweeps.comparison import (
    COMPARISON_COLUMNS,
    build_comparison_row,
    build_comparison_table,
    format_comparison_as_markdown,
)
from istar.records.identity import label_method
from istar.records.results import RunRecord
from istar.records.run_rows import group_by_task


def make_record(reg: dict[str, Any] | None = None, **changes: Any) -> RunRecord:
    record = RunRecord(
        name="rte-bert-istar-0123456789ab",
        status="finished",
        config={
            "task": {"name": "rte"},
            "model": {"name": "google-bert/bert-base-cased"},
            "reg": reg or {"name": "istar", "lambda": -1.0, "zeta": 0.4, "include_padding": False},
            "seed": 1,
        },
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


def render_table(table: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[│┃|]", line)[1:-1]]


def find_row(output: str, start: str) -> list[str]:
    return next(
        split_cells(line)
        for line in output.splitlines()
        if len(split_cells(line)) and split_cells(line)[0].startswith(start)
    )


def test_row() -> None:
    assert dict(zip(COMPARISON_COLUMNS, build_comparison_row([make_record()]), strict=True)) == {
        "task": "rte, accuracy",
        "model": "bert-base-cased",
        "method": "I-STAR λ=-1 ζ=0.4",
        "seed": "1",
        "value": "70.76",
        "constant": "52.71",
        "epoch": "3",
        "IsoScore": "0.0444 → 0.0889",
        "seconds": "62",
    }


def test_collapse_is_shown() -> None:
    collapsed = make_record(collapsed={"validation_matched": False, "validation_mismatched": True})
    assert build_comparison_row([collapsed])[COMPARISON_COLUMNS.index("value")] == "70.76 (collapsed)"
    output = " ".join(render_table(build_run_table(collapsed)).split())
    assert "Collapsed on validation_mismatched: all predictions are the same." in output
    assert "validation_matched" not in output
    assert "ollapsed" not in render_table(build_run_table(make_record()))
    assert "(1 collapsed)" in format_comparison_as_markdown(group_by_task([make_record(), collapsed])).splitlines()[2]


def test_no_baseline() -> None:
    assert build_comparison_row([make_record(baseline={})])[COMPARISON_COLUMNS.index("constant")] == "-"
    assert "constant prediction" not in render_table(build_run_table(make_record(baseline={})))


def test_negative_metrics() -> None:
    record = make_record(headline={"metric": "matthews_correlation", "value": -0.05, "epoch": 1})
    assert build_comparison_row([record])[COMPARISON_COLUMNS.index("value")] == "-5.00"


@pytest.mark.parametrize(
    ("reg", "name"),
    [
        ({"name": "none"}, "Base"),
        ({"name": "cosreg", "lambda": 1.0, "include_padding": False}, "CosReg λ=1"),
        ({"name": "istar", "lambda": -0.5, "zeta": 0.2, "include_padding": False}, "I-STAR λ=-0.5 ζ=0.2"),
        (
            {"name": "istar", "lambda": 5, "zeta": 1, "include_padding": True},
            "I-STAR λ=5 ζ=1 padding counted",
        ),
        ({"name": "istar", "lambda": 1, "zeta": "auto", "include_padding": False}, "I-STAR λ=1 ζ=auto"),
        (
            {"name": "istar", "lambda": 1, "zeta": 0.0, "include_padding": False, "estimator": "unbiased"},
            "I-STAR λ=1 unbiased",
        ),
        (
            {"name": "istar", "lambda": 1, "zeta": 0.0, "include_padding": False, "estimator": "unbiased_by_sentence"},
            "I-STAR λ=1 unbiased by sentence",
        ),
    ],
)
def test_method(reg: dict[str, Any], name: str) -> None:
    assert label_method(make_record(reg).config) == name


def test_summary() -> None:
    summary = render_table(build_run_table(make_record()))
    assert "rte · I-STAR λ=-1 ζ=0.4 · bert-base-cased" in summary
    assert find_row(summary, "accuracy (epoch 3)")[2] == "70.76"
    assert find_row(summary, "f1")[2] == "65.43"
    assert "loss" not in summary
    assert find_row(summary, "IsoScore embeddings")[1:] == ["0.1111", "0.1555", "+0.0444"] or find_row(
        summary, "IsoScore embeddings"
    )[1:] == ["0.1111", "0.1556", "+0.0444"]
    assert find_row(summary, "IsoScore layer 2")[1:] == ["0.3333", "0.0778", "-0.2556"]
    assert find_row(summary, "IsoScore layers 1 to L")[1:] == ["0.0444", "0.0889", "+0.0444"]
    assert "A constant prediction has accuracy 52.71." in summary
    assert "4321 validation tokens" in summary


def test_comparison() -> None:
    records = [
        make_record(),
        make_record({"name": "none"}),
        make_record({"name": "cosreg", "lambda": 1.0, "include_padding": False}),
    ]
    table = build_comparison_table(group_by_task(records))
    assert table.title == "rte, accuracy · bert-base-cased · seed 1"
    columns = [name for name in COMPARISON_COLUMNS[2:] if name != "seed"]
    assert [column.header for column in table.columns] == columns
    lines = [split_cells(line) for line in render_table(table).splitlines() if len(split_cells(line)) == len(columns)]
    assert lines[-3:] == [[row[2], *row[4:]] for row in (build_comparison_row([record]) for record in records)]


def test_comparison_keeps_the_columns_in_which_runs_differ() -> None:
    other = make_record()
    other.config["task"] = {"name": "stsb"}
    table = build_comparison_table(group_by_task([make_record(), other]))
    assert table.title == "bert-base-cased · seed 1"
    assert [column.header for column in table.columns] == ["task", "method", *COMPARISON_COLUMNS[4:]]


def test_runs_that_differ_in_nothing_but_the_seed_are_one_row() -> None:
    records = [make_seeded_record(seed, value) for seed, value in ((1, 0.70), (2, 0.73), (4, 0.71))]
    other = make_seeded_record(1, 0.5)
    other.config["optim"] = {"lr": 1.0}
    table = build_comparison_table(group_by_task([records[0], other, *records[1:]]))
    assert table.title == "rte, accuracy · bert-base-cased"
    assert [column.header for column in table.columns] == list(COMPARISON_COLUMNS[2:])
    first, second = [
        row for row in (split_cells(line) for line in render_table(table).splitlines()) if row and "λ" in row[0]
    ]
    deviation = np.std([70, 73, 71], ddof=1)
    assert first[1:3] == ["1,2,4", f"{np.mean([70, 73, 71]):.2f} ± {deviation:.2f}"]
    assert second[1:3] == ["1", "50.00"]
    assert "1 collapsed" in " ".join(
        build_comparison_row([*records, make_seeded_record(5, 0.5, collapsed={"validation": True})])
    )


def make_seeded_record(seed: int, value: float, **fields: Any) -> RunRecord:
    record = make_record(headline={"metric": "accuracy", "value": value, "epoch": 2}, **fields)
    return replace(record, config={**record.config, "seed": seed})


def test_markdown() -> None:
    records = [make_record(), make_record({"name": "none"})]
    lines = format_comparison_as_markdown(group_by_task(records)).splitlines()
    assert split_cells(lines[0]) == list(COMPARISON_COLUMNS)
    assert set(split_cells(lines[1])) == {"---"}
    assert [split_cells(line) for line in lines[2:]] == [build_comparison_row([record]) for record in records]
    assert len({line.count("|") for line in lines}) == 1


def test_records_are_left_alone() -> None:
    record, equal_record = make_record(), make_record()
    render_table(build_run_table(record))
    render_table(build_comparison_table(group_by_task([record])))
    assert record == equal_record


REGS: list[dict[str, Any]] = [
    {"name": "none"},
    {"name": "istar", "lambda": -1.0, "zeta": 0.4, "include_padding": False},
    {"name": "istar", "lambda": 1.0, "zeta": 0.4, "include_padding": False},
    {"name": "cosreg", "lambda": 1.0, "include_padding": False},
    {"name": "istar", "lambda": 5.0, "zeta": 0.2, "include_padding": True},
    {"name": "istar", "lambda": -5.0, "zeta": 0.8, "include_padding": False},
]
METHODS = ["Base", "I-STAR λ=-1 ζ=0.4", "I-STAR λ=1 ζ=0.4", "CosReg λ=1"]


def make_drawn_record(number: int, value: float | None = None, baseline: bool = True) -> RunRecord:
    layers = [str(layer) for layer in range(13)]
    return RunRecord(
        name=f"run{number}",
        status="finished",
        config={"task": {"name": "rte"}, "model": {"name": "bert"}, "reg": REGS[number % 6], "seed": number // 6},
        headline={"metric": "accuracy", "value": 0.6 + 0.05 * (number % 6) if value is None else value, "epoch": 1},
        baseline={"accuracy": 0.5} if baseline else {},
        isotropy={
            "before": {**{layer: 0.1 + 0.01 * int(layer) for layer in layers}, "union": 0.2},
            "after": {**{layer: 0.1 * (number + 1) + 0.01 * int(layer) for layer in layers}, "union": 0.3},
            "points": 10,
        },
    )


def test_files() -> None:
    """Twelve runs are more than there are colours, and one score is negative."""
    values = [None] * 11 + [-0.3]
    files = comparison.draw_comparison(group_by_task([make_drawn_record(*numbered) for numbered in enumerate(values)]))
    assert list(files) == ["comparison.png", "comparison.svg"]
    png = files["comparison.png"]
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(png[offset : offset + 4], "big") for offset in (16, 20))
    assert (width, height) == (3000, 1200)  # 10 by 4 inches
    root = ElementTree.fromstring(files["comparison.svg"])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def draw_figure(monkeypatch: pytest.MonkeyPatch, records: list[RunRecord]) -> Any:
    """Draw the comparison of records and return the figure, which is not saved."""
    figures: list[Any] = []
    monkeypatch.setattr(comparison.Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    comparison.draw_comparison(group_by_task(records))
    monkeypatch.undo()
    return figures[0]


def test_a_row_of_panels_per_task(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [make_drawn_record(number) for number in range(4)]
    for record in records[::2]:
        record.config["task"] = {"name": "stsb"}
    axes = draw_figure(monkeypatch, records).axes
    assert [panel.get_title(loc="right") for panel in axes[1::2]] == ["stsb · bert", "rte · bert"]
    assert [bar.get_width() for bar in axes[0].patches] == pytest.approx([60, 70])
    assert [bar.get_width() for bar in axes[2].patches] == pytest.approx([65, 75])


def test_numbers_in_the_figure_are_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [make_drawn_record(number) for number in range(4)]
    score_panel, isotropy_panel = draw_figure(monkeypatch, records).axes
    assert [bar.get_width() for bar in score_panel.patches] == pytest.approx([60, 65, 70, 75])
    assert [text.get_text() for text in score_panel.texts] == ["60.0", "65.0", "70.0", "75.0"]
    assert [label.get_text() for label in score_panel.get_yticklabels()] == METHODS
    assert "accuracy" in score_panel.get_xlabel()
    # The y axis is inverted, so that the first run is on top.
    bottom, top = score_panel.get_ylim()
    assert bottom > top
    assert score_panel.lines[0].get_xdata() == [50, 50]

    line_by_label = {line.get_label(): line for line in isotropy_panel.lines}
    assert list(line_by_label) == [*METHODS, "before training"]
    for record, name in zip(records, METHODS, strict=True):
        assert list(line_by_label[name].get_xdata()) == list(range(13))
        after = [record.isotropy["after"][str(layer)] for layer in range(13)]
        assert list(line_by_label[name].get_ydata()) == pytest.approx(after)
    assert list(line_by_label["before training"].get_ydata()) == pytest.approx(
        [0.1 + 0.01 * layer for layer in range(13)]
    )
    assert isotropy_panel.get_ylim()[0] == 0
    # A run has the same colour in both panels.
    assert [bar.get_facecolor()[:3] for bar in score_panel.patches] == [
        matplotlib.colors.to_rgb(line_by_label[name].get_color()) for name in METHODS
    ]


@pytest.mark.parametrize(
    "records", [[make_drawn_record(0, baseline=False)], [make_drawn_record(0), make_drawn_record(1, baseline=False)]]
)
def test_no_common_baseline_no_line(monkeypatch: pytest.MonkeyPatch, records: list[RunRecord]) -> None:
    score_panel = draw_figure(monkeypatch, records).axes[0]
    assert not score_panel.lines
    assert "constant" not in score_panel.get_title(loc="left")
