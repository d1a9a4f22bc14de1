import io
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from istar.finetune.runs.run_summary import build_run_table
from istar.finetune.sweeps.comparison_table import (
    build_comparison_row,
    build_comparison_table,
    format_comparison_as_markdown,
)
from istar.records.identity import label_method
from istar.records.results import RunRecord
from istar.records.run_rows import COMPARISON_COLUMNS


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
    assert "(1 collapsed)" in format_comparison_as_markdown([make_record(), collapsed]).splitlines()[2]


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
    table = build_comparison_table(records)
    assert table.title == "rte, accuracy · bert-base-cased · seed 1"
    columns = [name for name in COMPARISON_COLUMNS[2:] if name != "seed"]
    assert [column.header for column in table.columns] == columns
    lines = [split_cells(line) for line in render_table(table).splitlines() if len(split_cells(line)) == len(columns)]
    assert lines[-3:] == [[row[2], *row[4:]] for row in (build_comparison_row([record]) for record in records)]


def test_comparison_keeps_the_columns_in_which_runs_differ() -> None:
    other = make_record()
    other.config["task"] = {"name": "stsb"}
    table = build_comparison_table([make_record(), other])
    assert table.title == "bert-base-cased · seed 1"
    assert [column.header for column in table.columns] == ["task", "method", *COMPARISON_COLUMNS[4:]]


def test_runs_that_differ_in_nothing_but_the_seed_are_one_row() -> None:
    records = [make_seeded_record(seed, value) for seed, value in ((1, 0.70), (2, 0.73), (4, 0.71))]
    other = make_seeded_record(1, 0.5)
    other.config["optim"] = {"lr": 1.0}
    table = build_comparison_table([records[0], other, *records[1:]])
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
    lines = format_comparison_as_markdown(records).splitlines()
    assert split_cells(lines[0]) == list(COMPARISON_COLUMNS)
    assert set(split_cells(lines[1])) == {"---"}
    assert [split_cells(line) for line in lines[2:]] == [build_comparison_row([record]) for record in records]
    assert len({line.count("|") for line in lines}) == 1


def test_records_are_left_alone() -> None:
    record, equal_record = make_record(), make_record()
    render_table(build_run_table(record))
    render_table(build_comparison_table([record]))
    assert record == equal_record
