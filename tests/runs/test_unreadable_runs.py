"""Damaged and hostile files in a folder of runs: each is one line, and every command shows the other runs."""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from istar.cli.main import main
from istar.errors import UserError
from istar.files.parsing import MAX_DEPTH, parse_json, read_json, read_yaml
from istar.finetune.execute.identify import read_finished_run
from istar.finetune.sweeps import live_table, sweep_plan
from istar.models.saved_checkpoints import find_checkpoints
from istar.reports import report
from istar.reports.run_frame import read_runs
from istar.runs.record import CONFIG, KEY, PROGRESS, RESULT, format_key
from tests.reports.synthetic import BASE, istar, record, save

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*found in sys.modules after import"),
    pytest.mark.usefixtures("blank_figures"),
]

BERT = "google-bert/bert-base-cased"
GOOD = record("rte", BERT, istar(), 1)


def changed(*path: Any, to: Any, unfinished: bool = False) -> str:
    """Return the text of a good record, or of a good config, in which the value at a path of keys is another one."""
    content: Any = copy.deepcopy(GOOD.config if unfinished else asdict(GOOD))
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = to
    return json.dumps(content)


def laughing(levels: int) -> str:
    """Return a YAML file whose aliases stand for 10 to the power of `levels` values."""
    lines = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
    return "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *lines])


RESULTS: dict[str, str | bytes] = {
    "empty": "", "cut": '{"name": "x", "sta', "not text": b"\xff\xfe\x00{", "deep": "[" * 100_000,
    "deep and closed": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "a little too deep": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "a list": "[]",
    "half a surrogate pair": changed("error", to="\ud83d"),
    "escape sequence": changed("config", "task", "name", to="\x1b]0;title\x07"),
    "zeta": changed("config", "reg", "zeta", to="x"), "huge lambda": changed("config", "reg", "lambda", to=10**400),
    "huge value": changed("headline", "value", to=10**400),
    "huge batch": changed("config", "data", "batch_size", to=10**400),
    "no task": changed("config", "task", "name", to=None),
    "no lambda": changed("config", "reg", to={"name": "istar"}), "config": changed("config", to=[]),
    "status": changed("status", to=[]), "seed": changed("config", "seed", to="one"),
    "negative seed": changed("config", "seed", to=-1), "metrics": changed("metrics", to=None),
    "metric": changed("metrics", "accuracy", to="high"), "headline": changed("headline", to={}),
    "foreign headline": changed("headline", "metric", to="loudness"),
    "isotropy": changed("isotropy", "after", to={"union": 1.0, "last": 0.5}),
    "isotropy before": changed("isotropy", "before", to={"union": 1.0}),
    "timing": changed("timing", "total", to="long"), "epochs": changed("epochs", to=[1]),
    "format": changed("format", to=99), "no key": changed("key", to=None),
    "no data in the key": changed("key", "data", to=None),
    "key without model": changed("key", "settings", "model", to="bert"),
    "zeta in the key": changed("key", "settings", "reg", "zeta", to="x"),
    "no lambda in the key": changed("key", "settings", "reg", to={"name": "istar"}),
    "unknown field": changed("colour", to="red"),
}  # fmt: skip
CONFIGS: dict[str, str | bytes] = {
    "empty": "", "cut": "task: {name: rte", "not text": b"\xff\xfe\x00{", "deep": "[" * 100_000,
    "deep mappings": "{a: " * 100_000, "deep lists in a line": "- " * 100_000, "recursive": "task: &a [*a]",
    "laughing": laughing(12),
    "date": changed("config", to=1).replace('"config": 1', "config: 2001-01-01") + "\nseed: 2001-01-01",
    "impossible date": "seed: 2001-99-99", "tag": "seed: !!python/object/apply:os.system [exit]",
    "zeta": changed("reg", "zeta", to="x", unfinished=True),
    "huge": changed("reg", "lambda", to=10**400, unfinished=True),
    "no task": changed("task", "name", to=None, unfinished=True),
    "no lambda": changed("reg", to={"name": "istar"}, unfinished=True),
    "no trainer": changed("trainer", to={}, unfinished=True), "a list": "[]",
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with four good runs, and one for each entry of `RESULTS` and `CONFIGS` and other obstacles."""
    root = tmp_path / "runs"
    for seed in (1, 2):
        save(record("rte", BERT, BASE, seed, 0.6 + seed / 100), root)
        save(record("rte", BERT, istar(), seed, 0.6 + seed / 50), root)
    for file_name, texts in ((RESULT, RESULTS), (CONFIG, CONFIGS)):
        for name, text in texts.items():
            path = root / f"bad {file_name} {name}" / file_name
            path.parent.mkdir()
            path.write_bytes(text.encode() if isinstance(text, str) else text)
            (path.parent / KEY).write_text(format_key(GOOD.key))
    for name, text in {"cut": "{", "without settings": "{}", "empty": ""}.items():
        path = root / f"bad {KEY} {name}" / KEY
        path.parent.mkdir()
        path.write_text(text)
        (path.parent / CONFIG).write_text(json.dumps(GOOD.config))
    for file_name in (RESULT, CONFIG):
        fifo, loop = root / f"bad fifo {file_name}", root / f"bad loop {file_name}"
        fifo.mkdir()
        os.mkfifo(fifo / file_name)
        loop.mkdir()
        (loop / file_name).symlink_to(file_name)
    (root / "bad mode" / RESULT).parent.mkdir()
    (root / "bad mode" / RESULT).touch(0)
    (root / "bad folder").mkdir(0)
    return root


def bad_folders(root: Path) -> list[Path]:
    return sorted(root.glob("bad*"))


def lines_about(folders: list[Path], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Assert that each folder has one warning of one line, and return the warnings."""
    messages = sorted(message for message in caplog.messages if message.startswith("not read: "))
    assert [next(iter(m for m in messages if str(folder) in m), f"no line about {folder}") for folder in folders]
    for folder in folders:
        [line] = [message for message in messages if f"{folder}/" in message or f"{folder}:" in message]
        assert "\n" not in line
        assert len(line) < 500
    assert len(messages) == len(folders)
    return messages


@pytest.mark.parametrize("command", ["results", "power --runs", "report"])
def test_every_command_shows_the_other_runs(root: Path, caplog: Any, capsys: Any, command: str) -> None:
    out = {"results": root.parent / "runs.parquet", "report": root.parent / "report"}.get(command)
    assert main([*command.split(), str(root), *(["--out", str(out)] if out else [])]) == 0
    lines_about(bad_folders(root), caplog)
    output = capsys.readouterr().out
    if command == "results":
        assert len(output.splitlines()) == 1 + 4
    elif out is None:
        assert "I-STAR" in output
    else:
        page = (out / "index.html").read_text()
        assert all(folder.name in page for folder in bad_folders(root))


def test_the_cost_of_a_sweep(root: Path, caplog: Any) -> None:
    assert len(sweep_plan.read_finished_runs(root)) == 4
    lines_about([path.parent for path in root.glob(f"bad*/{RESULT}")], caplog)


def test_a_sweep_and_a_run_whose_result_cannot_be_read(root: Path, composed: Callable[..., Any]) -> None:
    """`train.py` and the sweep, which shows the line as the error of the run."""
    config = composed("task=rte", f"run.root={root}")
    for folder in root.glob(f"bad {RESULT}*"):
        with pytest.raises(UserError, match=r"delete .* to run it again") as error:
            read_finished_run(folder, config)
        assert "\n" not in str(error.value)
        assert str(folder / RESULT) in str(error.value)


def test_checkpoints_of_a_run(root: Path, caplog: Any) -> None:
    """The step is that of `result.json`; the models are there."""
    for folder in root.glob(f"bad {RESULT}*"):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
    for folder in root.glob(f"bad {RESULT}*"):
        caplog.clear()
        [checkpoint] = find_checkpoints(str(folder))
        readable = "deep" not in folder.name and "text" not in folder.name
        assert checkpoint.step in (None, 30)
        assert readable or lines_about([folder], caplog)


BAD_GEOMETRIES = ["[" * 100_000, "{}", '{"examples": 1, "mean_activation": ["x"], "two_nn": []}', '{"examples": 1e400}']
BAD_METRICS = [
    "", "step,probe/layer_x/isoscore\n1,2\n", "step,probe/layer_1/isoscore\none,two\n", "a\0b\n\0", '"',
]  # fmt: skip


def test_files_beside_the_result(tmp_path: Path) -> None:
    for index, text in enumerate(BAD_GEOMETRIES):
        folder = save(record("rte", BERT, istar(), index, 0.6), tmp_path / "runs")
        (folder / "geometry.json").write_text(text)
    for index, text in enumerate(BAD_METRICS):
        folder = save(record("rte", BERT, BASE, index, 0.6), tmp_path / "runs")
        (folder / "metrics.csv").write_text(text)
    _, num_runs = report.write_report(tmp_path / "runs", tmp_path / "report")
    assert num_runs == len(BAD_GEOMETRIES) + len(BAD_METRICS)
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("geometry.json") >= len(BAD_GEOMETRIES)


# ---- sweeps

STATE = live_table.SweepState("good-123456", "train.py -m", "runs", 1, seen=0.0)
ENTRY = live_table.SweepEntry("run", ("seed=1",), "rte", "bert", "I-STAR", 1, "I-STAR", "c1")
SWEEPS: dict[str, dict[str, Any] | str] = {
    "no jobs": {"jobs": 0}, "jobs": {"jobs": "two"}, "entries": {"entries": [1]},
    "progress": {"entries": [{**asdict(ENTRY), "progress": [1]}]},
    "status": {"entries": [{**asdict(ENTRY), "status": []}]},
    "method": {"entries": [{**asdict(ENTRY), "method": None}]}, "seen": {"seen": "yesterday"},
    "expected": {"expected": 10**400}, "format": {"format": 99}, "deep": "[" * 100_000, "a list": "[]",
}  # fmt: skip


def test_watch(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for name, change in {"good": {}, **SWEEPS}.items():
        (tmp_path / "sweeps" / name).mkdir(parents=True)
        text = change if isinstance(change, str) else json.dumps(asdict(STATE) | change)
        (tmp_path / "sweeps" / name / live_table.STATE_FILE).write_text(text)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if line.startswith("not read: ")]
    assert len(lines) == len(SWEEPS)
    assert all(any(str(tmp_path / "sweeps" / name) in line for line in lines) for name in SWEEPS)
    assert "good-123456" in output
    assert live_table.find_sweeps(tmp_path, "no jobs")[0] == []
    for name in ("lr=[1]", ".hidden"):
        shutil.copytree(tmp_path / "sweeps" / "good", tmp_path / "sweeps" / name)
    assert len(live_table.find_sweeps(tmp_path, "lr=[1]")[0]) == 1
    with pytest.raises(UserError, match=r"no sweep nowhere; there are (?!.*hidden).*lr=\[1\]"):
        live_table.find_sweeps(tmp_path, "nowhere")


@pytest.mark.parametrize("content", [b"", b'["epoch 1/3"', b"\xff", b"[" * 100_000, None])
def test_the_live_table_of_a_run_with_damaged_progress(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / ENTRY.name / PROGRESS
    path.parent.mkdir(parents=True)
    if content is None:
        os.mkfifo(path)  # reading it would wait forever
    else:
        path.write_bytes(content)
    running_entry = replace(ENTRY, status="running")
    live_table.update_progress(replace(STATE, entries=[running_entry]), tmp_path)
    assert running_entry.progress == ""


# ---- the reader


def test_what_may_be_read(tmp_path: Path) -> None:
    content = {"a": [1, 2.5, "λ\n", True, None, {"b": 10**30}], "depth": json.loads("[" * 40 + "]" * 40)}
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(content, allow_unicode=True))
    assert read_json(tmp_path / "a.json") == read_yaml(tmp_path / "a.yaml") == content
    (tmp_path / "alias.yaml").write_text("{a: &shared [1, 2], b: *shared}")
    with pytest.raises(UserError, match=r"not YAML: the alias \*shared; expected the values themselves"):
        read_yaml(tmp_path / "alias.yaml")


def test_lines_name_their_place() -> None:
    with pytest.raises(UserError, match=r"^here, line 3: not JSON: .*surrogate"):
        parse_json('{"text": "hello \\ud83d again"}', "here, line 3")


# ---- random damage


def damage(value: Any, generator: random.Random) -> Any:
    """Return a copy of nested data in which one value is another one, or is missing."""
    value = copy.copy(value)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return value
    key = generator.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and generator.random() < 0.8:
        value[key] = damage(value[key], generator)
    elif generator.random() < 0.2:
        del value[key]
    else:
        value[key] = generator.choice(
            [None, "x", "", [], {}, [1], -1, 1.5, 10**17, 10**40, 10**400, True, float("nan"), "\x1b"]
        )
    return value


NUM_DAMAGED = 60


def test_random_damage(tmp_path: Path, caplog: Any, capsys: Any) -> None:
    """A damaged run is left out with a line, or is good enough for every table."""
    generator = random.Random(0)
    for index in range(NUM_DAMAGED):
        good = record("rte", BERT, istar() if index % 2 else BASE, index // 2 % 5)
        folder = tmp_path / "runs" / f"{index:03d}"
        folder.mkdir(parents=True)
        if index % 5:
            (folder / RESULT).write_text(json.dumps(damage(asdict(good), generator)))
        else:
            (folder / CONFIG).write_text(yaml.safe_dump(damage(good.config, generator)))
            (folder / KEY).write_text(format_key(good.key))
    loaded = read_runs(tmp_path / "runs", keep_records=True)
    assert len(loaded.frame) + len(loaded.read_errors) == NUM_DAMAGED
    assert min(len(loaded.frame), len(loaded.read_errors)) > NUM_DAMAGED / 6
    assert main(["results", str(tmp_path / "runs"), "--out", str(tmp_path / "runs.parquet")]) == 0
    assert main(["power", "--runs", str(tmp_path / "runs")]) == 0
    sections = report.compute_sections(loaded, tmp_path / "runs", "Base")
    assert {"conclusions", "table1", "left_out"} <= {section.content.anchor for section in sections}
    sweep_plan.estimate_duration([], sweep_plan.read_finished_runs(tmp_path / "runs"))
