import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from istar.finetune.sweeps import comparison_figure
from istar.records.results import RunRecord

REGS: list[dict[str, Any]] = [
    {"name": "none"},
    {"name": "istar", "lambda": -1.0, "zeta": 0.4, "include_padding": False},
    {"name": "istar", "lambda": 1.0, "zeta": 0.4, "include_padding": False},
    {"name": "cosreg", "lambda": 1.0, "include_padding": False},
    {"name": "istar", "lambda": 5.0, "zeta": 0.2, "include_padding": True},
    {"name": "istar", "lambda": -5.0, "zeta": 0.8, "include_padding": False},
]
METHODS = ["Base", "I-STAR λ=-1 ζ=0.4", "I-STAR λ=1 ζ=0.4", "CosReg λ=1"]


def make_record(number: int, value: float | None = None, baseline: bool = True) -> RunRecord:
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


@pytest.mark.parametrize("count", [1, 6])
def test_files(count: int) -> None:
    files = comparison_figure.draw_comparison([make_record(number) for number in range(count)])
    assert list(files) == ["comparison.png", "comparison.svg"]
    png = files["comparison.png"]
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(png[offset : offset + 4], "big") for offset in (16, 20))
    assert (width, height) == (3000, 1200)  # 10 by 4 inches
    root = ElementTree.fromstring(files["comparison.svg"])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not plt.get_fignums()


def draw_figure(monkeypatch: pytest.MonkeyPatch, records: list[RunRecord]) -> Any:
    """Draw the comparison of records and return the figure, which is captured when it is closed."""
    figures: list[Any] = []
    monkeypatch.setattr(comparison_figure.plt, "close", figures.append)
    comparison_figure.draw_comparison(records)
    monkeypatch.undo()
    plt.close(figures[0])
    return figures[0]


def test_a_row_of_panels_per_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = [make_record(number) for number in range(4)]
    for record in records[::2]:
        record.config["task"] = {"name": "stsb"}
    axes = draw_figure(monkeypatch, records).axes
    assert [panel.get_title(loc="right") for panel in axes[1::2]] == ["stsb · bert", "rte · bert"]
    assert [bar.get_width() for bar in axes[0].patches] == pytest.approx([60, 70])
    assert [bar.get_width() for bar in axes[2].patches] == pytest.approx([65, 75])


def test_numbers_in_the_figure_are_the_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = [make_record(number) for number in range(4)]
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
        plt.matplotlib.colors.to_rgb(line_by_label[name].get_color()) for name in METHODS
    ]


@pytest.mark.parametrize(
    "records", [[make_record(0, baseline=False)], [make_record(0), make_record(1, baseline=False)]]
)
def test_no_common_baseline_no_line(monkeypatch: pytest.MonkeyPatch, records: list[RunRecord]) -> None:
    score_panel = draw_figure(monkeypatch, records).axes[0]
    assert not score_panel.lines
    assert "constant" not in score_panel.get_title(loc="left")


@pytest.mark.parametrize("value", [0.0, -0.3, 1.0])
def test_extreme_values(value: float) -> None:
    assert len(comparison_figure.draw_comparison([make_record(0, value)])["comparison.svg"]) > 1000


def test_more_runs_than_colours() -> None:
    assert (
        len(comparison_figure.draw_comparison([make_record(number) for number in range(12)])["comparison.png"]) > 1000
    )
