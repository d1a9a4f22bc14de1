import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from rich.console import Console

import istar
from istar.cli.main import main
from istar.errors import UserError
from istar.finetune.config import Config
from istar.finetune.config.schema import to_dict
from istar.reports.run_frame import (
    MAIN_COLUMNS,
    Runs,
    build_runs_table,
    check_export,
    export_frame,
    list_default_columns,
    read_runs,
    sort_runs,
)
from istar.runs.record import KEY, RESULT, RunRecord, format_key, write_result
from tests.finished_runs import make_finished_record, make_key


@pytest.fixture
def write_run(composed: Callable[..., Config], tmp_path: Path) -> Callable[..., RunRecord]:
    """Return a function that writes the folder of a run and returns its record.

    Example: `write_run("name", "reg=cosreg", value=0.5)`.
    """

    def write_record(
        name: str, *overrides: str, value: float | None = 0.5, root: Path = tmp_path, weights: str = "model",
        **changes: Any,
    ) -> RunRecord:  # fmt: skip
        config = composed("task=rte", *overrides)
        key = make_key(config, "abc", weights)
        record = RunRecord(name, "finished", to_dict(config), key)
        if value is not None:
            isotropy = {"before": {"1": 0.3, "union": 0.1}, "after": {"1": 0.4, "union": 0.2}, "points": 9}
            record = make_finished_record(
                name, config, value, key, headline={"metric": "accuracy", "value": value, "epoch": 2},
                baseline={"accuracy": 0.5271, "f1": 0.1}, collapsed={"validation": False}, isotropy=isotropy,
                timing={"total": 12.5},
            )  # fmt: skip
        record = replace(record, **changes)
        write_result(record, root / name)
        return record

    return write_record


def write_unfinished(record: RunRecord, folder: Path) -> None:
    folder.mkdir()
    (folder / KEY).write_text(format_key(record.key))
    (folder / "config.yaml").write_text(yaml.safe_dump(record.config))


def test_a_run_is_a_row(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    write_run("one", "reg=istar", "reg.lambda=3", "reg.layers=[1,2]", "seed=7", value=0.75)
    loaded = read_runs(tmp_path)
    assert loaded.read_errors == {}
    [run] = loaded.frame.to_dict("records")
    expected = {
        "folder": str(tmp_path / "one"), "name": "one", "status": "finished", "task": "rte", "seed": 7,
        "model": "bert-base-cased", "method": "I-STAR λ=3 ζ=0.4", "metric": "accuracy", "value": 0.75, "epoch": 2,
        "constant": 0.5271, "collapsed": False, "isoscore_before": 0.1, "isoscore_after": 0.2, "seconds": 12.5,
        "skipped_steps": 0, "error": None, "reg.lambda": 3.0, "reg.layers": [1, 2], "optim.lr": 3e-5,
    }  # fmt: skip
    assert {key: run[key] for key in expected} == expected


def test_failed_and_unfinished_runs_are_rows_too(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    write_run("finished")
    write_unfinished(write_run("failed", value=None, status="failed", error="out of luck"), tmp_path / "unfinished")
    frame = read_runs(tmp_path).frame.set_index("name")
    assert frame["status"].to_dict() == {"finished": "finished", "failed": "failed", "unfinished": "unfinished"}
    assert frame.loc["failed", "error"] == "out of luck"
    assert frame["value"].isna().to_dict() == {"finished": False, "failed": True, "unfinished": True}


def test_smoke_runs(write_run: Callable[..., RunRecord], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run("real")
    write_run("stray", "debug=smoke")
    write_run("other", "trainer.fast_dev_run=true", root=tmp_path / "smoke")
    write_unfinished(write_run("third", "debug=smoke", root=tmp_path / "smoke"), tmp_path / "smoke" / "unfinished")
    loaded = read_runs(tmp_path, keep_records=True)
    assert (list(loaded.frame["name"]), list(loaded.records)) == (["real"], [str(tmp_path / "real")])
    assert (loaded.num_smoke, loaded.read_errors) == (4, {})
    [message] = caplog.messages
    assert message.startswith("4 smoke runs are not counted")


def test_where_runs_are_looked_for(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    write_run("deeper", root=tmp_path / "sweep" / "rte")
    write_run("again")
    write_run("again.old-1")
    write_run("inside", root=tmp_path / "again" / "wandb")
    (tmp_path / ".locks").mkdir()
    (tmp_path / "multirun").mkdir()
    write_run("trial", root=tmp_path / "sweeps" / "table1")
    loaded = read_runs(tmp_path)
    assert sorted(loaded.frame["name"]) == ["again", "deeper"]
    assert loaded.read_errors == {}
    assert list(read_runs(tmp_path / "again").frame["name"]) == ["again"]
    assert read_runs(tmp_path / "again").read_errors == {}


def test_metrics_and_records(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    record = write_run("one", metrics={"accuracy": 0.5, "f1": 0.25, "loss": 0.7})
    loaded = read_runs(tmp_path, keep_records=True)
    [run] = loaded.frame.to_dict("records")
    assert (run["validation.f1"], run["fingerprint"]) == (0.25, "abc")
    assert loaded.records == {str(tmp_path / "one"): record}
    assert read_runs(tmp_path).records == {}


def test_no_folder_and_no_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        read_runs(tmp_path / "nowhere")
    loaded = read_runs(tmp_path)
    assert len(loaded.frame) == 0
    assert {"name", "status", "value"} <= set(loaded.frame)


@pytest.mark.parametrize(
    ("suffix", "reader"), [(".csv", pd.read_csv), (".json", pd.read_json), (".parquet", pd.read_parquet)]
)
def test_exports_are_read_back(write_run: Callable[..., RunRecord], tmp_path: Path, suffix: str, reader: Any) -> None:
    write_run("one", "reg=istar", "reg.layers=[1,2]", value=0.123456789012345)
    write_run("two", "reg=none", "trainer.devices=auto")
    write_run("three", value=None, status="failed", error='out of, "luck"')
    frame = read_runs(tmp_path).frame
    export_frame(frame, tmp_path / "out" / f"runs{suffix}")
    exported_frame = reader(tmp_path / "out" / f"runs{suffix}")
    assert list(exported_frame["name"]) == list(frame["name"])
    assert set(exported_frame.columns) == set(frame.columns)
    pd.testing.assert_series_equal(exported_frame["value"], frame["value"], check_exact=suffix != ".json", rtol=1e-9)
    assert exported_frame.set_index("name").loc["three", "error"] == 'out of, "luck"'


def test_a_format_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected one of \.csv, \.parquet, \.json"):
        check_export(tmp_path / "runs.xls")


def write_three_runs(write_run: Callable[..., RunRecord], root: Path) -> None:
    write_run("low", value=0.25)
    write_run("high", "reg=cosreg", value=0.75, collapsed={"validation": True})
    write_run("broken", value=None, status="failed", error="out of luck")
    (root / "foreign").mkdir()


def test_the_command_prints_a_table_to_a_terminal(
    write_run: Callable[..., RunRecord], tmp_path: Path, capsys: Any, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # the output counts as a terminal
    monkeypatch.setenv("COLUMNS", "200")
    write_three_runs(write_run, tmp_path)
    out = tmp_path / "out" / "runs.csv"
    assert main(["results", str(tmp_path), "--sort", "value", "--out", str(out)]) == 0
    output, errors = capsys.readouterr()
    assert "3 runs: 2 finished, 1 failed" in output
    assert output.index("75.00 (collapsed)") < output.index("25.00") < output.index("out of luck")
    assert "nan" not in output
    assert errors == f"{out}\n"
    assert f"not read: {tmp_path / 'foreign'} holds no run" in caplog.messages
    assert list(pd.read_csv(out)["name"]) == ["high", "low", "broken"]
    assert main(["results", str(tmp_path / "nowhere")]) == 2
    assert main(["results", str(tmp_path), "--sort", "valu"]) == 2
    assert main(["results", str(tmp_path), "--columns", "name,optim.rl"]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {tmp_path / 'nowhere'} is not a folder")
    assert [message.rpartition("; ")[2] for message in others] == ["did you mean value?", "did you mean optim.lr?"]


def test_without_a_terminal(write_run: Callable[..., RunRecord], tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.chdir(tmp_path)
    write_three_runs(partial(write_run, root=tmp_path / "runs"), tmp_path)
    write_run("precise", value=0.123456789012345, root=tmp_path / "runs")
    assert main(["results"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == list(MAIN_COLUMNS)
    assert [line[0] for line in lines[1:]] == ["broken", "high", "low", "precise"]
    assert lines[4][MAIN_COLUMNS.index("value")] == "0.123456789012345"
    assert main(["results", "--json", "--columns", "name,reg.lambda, value"]) == 0
    assert json.loads(capsys.readouterr().out)[:3] == [
        {"name": "broken", "reg.lambda": -1.0, "value": None},
        {"name": "high", "reg.lambda": 1.0, "value": 0.75},
        {"name": "low", "reg.lambda": -1.0, "value": 0.25},
    ]


def default_columns(runs: Runs) -> list[str]:
    return list_default_columns(runs.frame, runs.settings_that_matter)


def test_settings_that_tell_runs_apart_are_columns(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    """Runs of two penalties differ in other keys too, and so do runs in other folders; these need no column."""
    write_run("slow", "reg=istar", "optim.lr=1e-5", "run.root=a", "seed=1")
    write_run("fast", "reg=istar", "optim.lr=3e-5", "run.root=b", "seed=2")
    runs = read_runs(tmp_path)
    assert "optim.lr" not in list_default_columns(runs.frame.iloc[:1], runs.settings_that_matter)
    write_run("other", "reg=none", "optim.lr=3e-5", "data.batch_size=8")
    columns = default_columns(read_runs(tmp_path))
    assert [column for column in columns if column not in MAIN_COLUMNS] == ["optim.lr"]
    write_run("unlike", "reg=istar", "optim=sgd", "optim.lr=3e-5")
    new_columns = default_columns(read_runs(tmp_path))
    assert [column for column in new_columns if column not in columns] == ["optim.name"]
    assert columns[columns.index("method") + 1] == "optim.lr"


def test_models_of_one_name_in_a_narrow_table(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    write_run("rte-bert-none-0", "reg=none", "model.name=a/bert", weights="1")
    assert read_runs(tmp_path).frame["model"].tolist() == ["bert"]
    write_run("rte-bert-none-1", "reg=none", "model.name=b/bert", weights="2")
    runs = read_runs(tmp_path)
    assert runs.frame["model"].tolist() == ["a/bert", "b/bert"]
    table, _ = build_runs_table(runs.frame, (), 50, default_columns(runs))
    assert "model" in [column.header for column in table.columns]
    assert "task" not in [column.header for column in table.columns]


def test_a_narrow_table_lacks_columns_but_no_digits(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    write_run("rte-bert-base-cased-istar-0123456789ab", value=0.75)
    runs = read_runs(tmp_path)

    def show(width: int, *columns: str) -> tuple[list[str], list[str]]:
        table, dropped = build_runs_table(runs.frame, columns, width, default_columns(runs))
        console = Console(width=width, file=StringIO(), record=True)
        console.print(table)
        return console.export_text().splitlines(), dropped

    lines, dropped = show(200)
    assert dropped == []
    assert lines[-1].split() == [
        "rte-bert-base-cased-istar-0123456789ab", "rte", "bert-base-cased", "I-STAR", "λ=-1", "ζ=0.4", "42", "accuracy",
        "75.00", "52.71", "2", "0.1000", "0.2000", "12", "finished",
    ]  # fmt: skip
    lines, dropped = show(80)
    assert lines[-1] == "rte-bert-base-cased-istar  I-STAR λ=-1 ζ=0.4  75.00    0.1000    0.2000"
    title = " ".join(map(str.strip, lines[:2]))
    assert title == "1 run: 1 finished (metrics in percent, except losses) · rte · bert-base-cased · accuracy · seed 42"
    assert dropped == ["seconds", "epoch", "constant", "the hash of name"]
    lines, dropped = show(30, "name", "optim.lr", "validation.accuracy")
    assert dropped == []
    text = " ".join(lines)
    assert "…" not in text
    assert {"3e-05", "75.00"} <= set(text.split())


def test_a_narrow_table_of_several_tasks_keeps_task_metric_and_isoscore(
    write_run: Callable[..., RunRecord], tmp_path: Path
) -> None:
    perplexity = {"headline": {"metric": "perplexity", "value": 12.0, "epoch": 1}, "metrics": {"perplexity": 12.0}}
    write_run("rte-bert-base-cased-istar-0123456789ab", value=0.75)
    write_run("clm-gpt2-istar-0123456789ac", "task=clm", "model=gpt2", **perplexity)
    runs = read_runs(tmp_path)
    table, dropped = build_runs_table(runs.frame, (), 80, default_columns(runs))
    headers = {str(column.header).replace("\n", "_") for column in table.columns}
    assert {"task", "model", "method", "metric", "value", "isoscore_before", "isoscore_after"} <= headers
    assert dropped == ["seconds", "epoch", "constant", "the hash of name", "name"]


def test_losses_are_sorted_from_the_lowest(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    for name, value in (("good", 12.0), ("bad", 80.0)):
        write_run(name, headline={"metric": "perplexity", "value": value, "epoch": 1}, metrics={"perplexity": value})
    write_run("failed", value=None, status="failed")
    frame = read_runs(tmp_path).frame
    assert list(sort_runs(frame, "value")["name"]) == ["good", "bad", "failed"]
    assert list(sort_runs(frame, "name")["name"]) == ["bad", "failed", "good"]


def test_work_is_linear(write_run: Callable[..., RunRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is the number of calls. Finished runs are read without a YAML parser, which would take most of it."""
    write_run("first")
    text = (tmp_path / "first" / RESULT).read_text()
    monkeypatch.setattr(yaml, "load", None)

    def count_calls(count: int) -> int:
        root = tmp_path / str(count)
        for run_index in range(count):
            (root / f"run-{run_index}").mkdir(parents=True)
            (root / f"run-{run_index}" / RESULT).write_text(text)
        events: Counter[str] = Counter()
        previous_profiler = sys.getprofile()
        sys.setprofile(lambda frame, event, argument: events.update([event]))
        try:
            loaded = read_runs(root)
        finally:
            sys.setprofile(previous_profiler)
        assert len(loaded.frame) == count
        return events["call"] + events["c_call"]

    count_calls(2)  # fills caches and imports modules, so that they are not counted below
    calls_of_few_runs, calls_of_many_runs = count_calls(10), count_calls(40)
    assert calls_of_many_runs < 4.2 * calls_of_few_runs


def test_a_notebook_gets_the_runs_by_one_import(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    write_run("first", "reg=none", value=0.25)
    frame = istar.load_runs(str(tmp_path))
    pd.testing.assert_frame_equal(frame, read_runs(tmp_path).frame)
    assert "first" in frame._repr_html_()
    assert "load_runs" in dir(istar)
    assert "load_runs" not in istar.__all__
