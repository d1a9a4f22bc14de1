import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from istar.cli.main import main
from istar.errors import UserError
from istar.records.config import Config
from istar.records.config.schema import to_dict
from istar.records.results import RESULT, RunRecord, write_result
from istar.reports.run_frame import export_frame, load_runs


@pytest.fixture
def write_run(composed: Callable[..., Config], tmp_path: Path) -> Callable[..., RunRecord]:
    """Return a function that writes the folder of a run and returns its record.

    Example: `write_run("name", "reg=cosreg", value=0.5)`.
    """

    def write_record(
        name: str, *overrides: str, value: float | None = 0.5, root: Path = tmp_path, **changes: Any
    ) -> RunRecord:
        record = RunRecord(name, "finished", to_dict(composed("task=rte", *overrides)))
        if value is not None:
            record = replace(
                record,
                headline={"metric": "accuracy", "value": value, "epoch": 2},
                metrics={"accuracy": value},
                baseline={"accuracy": 0.5271, "f1": 0.1},
                collapsed={"validation": False},
                isotropy={"before": {"1": 0.3, "union": 0.1}, "after": {"1": 0.4, "union": 0.2}, "points": 9},
                timing={"total": 12.5},
            )
        record = replace(record, **changes)
        write_result(record, root / name)
        return record

    return write_record


def test_a_run_is_a_row(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    write_run("one", "reg=istar", "reg.lambda=3", "reg.layers=[1,2]", "seed=7", value=0.75)
    loaded = load_runs(tmp_path)
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
    config = write_run("failed", value=None, status="failed", error="out of luck").config
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text(yaml.safe_dump(config))
    frame = load_runs(tmp_path).frame.set_index("name")
    assert frame["status"].to_dict() == {"finished": "finished", "failed": "failed", "unfinished": "unfinished"}
    assert frame.loc["failed", "error"] == "out of luck"
    assert frame["value"].isna().to_dict() == {"finished": False, "failed": True, "unfinished": True}


def test_smoke_runs_are_left_out_and_counted_in_one_line(
    write_run: Callable[..., RunRecord], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run("real")
    write_run("stray", "debug=smoke")
    write_run("other", "trainer.fast_dev_run=true", root=tmp_path / "smoke")
    config = write_run("third", "debug=smoke", root=tmp_path / "smoke").config
    (tmp_path / "smoke" / "unfinished").mkdir()
    (tmp_path / "smoke" / "unfinished" / "config.yaml").write_text(yaml.safe_dump(config))
    loaded = load_runs(tmp_path, keep_records=True)
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
    loaded = load_runs(tmp_path)
    assert sorted(loaded.frame["name"]) == ["again", "deeper"]
    assert loaded.read_errors == {}
    assert list(load_runs(tmp_path / "again").frame["name"]) == ["again"]


def test_folders_inside_a_run_are_not_missing_runs(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    write_run("only")
    (tmp_path / "only" / "model").mkdir()
    loaded = load_runs(tmp_path / "only")
    assert loaded.frame["name"].tolist() == ["only"]
    assert loaded.read_errors == {}


def test_metrics_and_records(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    record = write_run("one", metrics={"accuracy": 0.5, "f1": 0.25, "loss": 0.7}, data={"fingerprint": "abc"})
    loaded = load_runs(tmp_path, keep_records=True)
    [run] = loaded.frame.to_dict("records")
    assert (run["validation.f1"], run["fingerprint"]) == (0.25, "abc")
    assert loaded.records == {str(tmp_path / "one"): record}
    assert load_runs(tmp_path).records == {}


BROKEN: dict[str, dict[str, str]] = {
    "foreign result": {RESULT: "{}"},
    "cut result": {RESULT: '{"name": "x", "sta'},
    "later format": {RESULT: '{"format": 99}'},
    "foreign config": {"config.yaml": "a: 1"},
    "cut config": {"config.yaml": "task: {name: rte"},
    "no config": {"config.yaml": ""},
    "no run at all": {"notes.txt": "mine"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_is_no_run_is_told_and_the_others_are_read(
    write_run: Callable[..., RunRecord], tmp_path: Path, name: str
) -> None:
    write_run("good")
    (tmp_path / "bad").mkdir()
    for file, content in BROKEN[name].items():
        (tmp_path / "bad" / file).write_text(content)
    loaded = load_runs(tmp_path)
    assert list(loaded.frame["name"]) == ["good"]
    [(folder, message)] = loaded.read_errors.items()
    assert folder == str(tmp_path / "bad")
    assert folder in message
    assert "\n" not in message


def test_a_record_without_a_config_of_a_run(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    record = write_run("good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / RESULT).write_text(json.dumps({**asdict(record), "config": {"task": 3}}))
    loaded = load_runs(tmp_path)
    assert list(loaded.frame["name"]) == ["good"]
    assert "bad" in loaded.read_errors[str(tmp_path / "bad")]


def test_no_folder_and_no_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        load_runs(tmp_path / "nowhere")
    loaded = load_runs(tmp_path)
    assert len(loaded.frame) == 0
    assert {"name", "status", "value"} <= set(loaded.frame)


@pytest.mark.parametrize(
    ("suffix", "reader"), [(".csv", pd.read_csv), (".json", pd.read_json), (".parquet", pd.read_parquet)]
)
def test_what_is_exported_is_read_back(
    write_run: Callable[..., RunRecord], tmp_path: Path, suffix: str, reader: Any
) -> None:
    write_run("one", "reg=istar", "reg.layers=[1,2]", value=0.123456789012345)
    write_run("two", "reg=none", "trainer.devices=auto")
    write_run("three", value=None, status="failed", error='out of, "luck"')
    frame = load_runs(tmp_path).frame
    export_frame(frame, tmp_path / "out" / f"runs{suffix}")
    exported_frame = reader(tmp_path / "out" / f"runs{suffix}")
    assert list(exported_frame["name"]) == list(frame["name"])
    assert set(exported_frame.columns) == set(frame.columns)
    pd.testing.assert_series_equal(exported_frame["value"], frame["value"], check_exact=suffix != ".json", rtol=1e-9)
    assert exported_frame.set_index("name").loc["three", "error"] == 'out of, "luck"'


def test_a_format_that_is_none(write_run: Callable[..., RunRecord], tmp_path: Path) -> None:
    write_run("one")
    with pytest.raises(UserError, match=r"expected one of \.csv, \.parquet, \.json"):
        export_frame(load_runs(tmp_path).frame, tmp_path / "runs.xls")


def test_the_command(
    write_run: Callable[..., RunRecord], tmp_path: Path, capsys: Any, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_run("low", value=0.25)
    write_run("high", "reg=cosreg", value=0.75, collapsed={"validation": True})
    write_run("broken", value=None, status="failed", error="out of luck")
    (tmp_path / "foreign").mkdir()
    out = tmp_path / "out" / "runs.csv"
    assert main(["results", str(tmp_path), "--sort", "value", "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert "3 runs: 2 finished, 1 failed" in output
    assert output.index("75.00 (collapsed)") < output.index("25.00") < output.index("failed: out of luck")
    assert "nan" not in output
    assert "rte, accuracy" in output
    assert f"not read: {tmp_path / 'foreign'} holds no run" in caplog.messages
    assert list(pd.read_csv(out)["name"]) == ["high", "low", "broken"]
    assert main(["results", str(tmp_path / "nowhere")]) == 2
    assert main(["results", str(tmp_path), "--sort", "valu"]) == 2
    [first, second] = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert second.endswith("did you mean value?")


def test_four_times_the_runs_take_four_times_the_work(
    write_run: Callable[..., RunRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            loaded = load_runs(root)
        finally:
            sys.setprofile(previous_profiler)
        assert len(loaded.frame) == count
        return events["call"] + events["c_call"]

    count_calls(2)  # fills caches and imports modules, so that they are not counted below
    calls_of_few_runs, calls_of_many_runs = count_calls(10), count_calls(40)
    assert calls_of_many_runs < 4.2 * calls_of_few_runs
