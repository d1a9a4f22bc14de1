"""How a sweep's state is saved in its file and shown in the live table and by `istar watch`."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from istar.cli.main import main
from istar.drawing.terminal import format_duration
from istar.errors import UserError
from istar.files.writing import write_text
from istar.finetune.sweeps import live_table
from istar.finetune.sweeps.live_table import (
    STATE_FILE,
    SWEEPS_FOLDER,
    Board,
    SweepEntry,
    SweepState,
    estimate_seconds_left,
    format_result_line,
    read_state,
    render_sweep,
    update_progress,
)
from istar.runs.record import PROGRESS
from tests.finished_runs import make_finished_record

NOW = 1_700_000_000.0


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `time.time` always return `NOW`."""
    monkeypatch.setattr(live_table, "time", SimpleNamespace(time=lambda: NOW))


def make_entry(run_number: int = 1, **values: Any) -> SweepEntry:
    default_values = {
        "overrides": [f"seed={run_number}", "task=rte"], "task": "rte", "model": "bert",
        "method": "I-STAR λ=-1 ζ=0.4", "method_name": "I-STAR", "configuration": "c1", "seed": run_number,
    }  # fmt: skip
    return SweepEntry(f"run{run_number}", **{**default_values, **values})


def render_text(state: SweepState) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(render_sweep(state))
    return console.file.getvalue()  # type: ignore[attr-defined]


def make_state(*entries: SweepEntry, **values: Any) -> SweepState:
    return SweepState(
        **{"name": "sweep-1", "command": "python train.py -m", "root": "runs", "jobs": 2, **values},
        entries=list(entries),
    )


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, "-"), (0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5940, "99 min"), (6060, "1 h 41 min"),
     (172700, "47 h 58 min"), (176400, "2 d 1 h")],
)  # fmt: skip
def test_duration(seconds: float | None, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_the_phase_of_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    entries = [make_entry(1, status="running"), make_entry(2, status="elsewhere"), make_entry(3, status="finished")]
    for entry in entries:
        write_text(tmp_path / entry.name / PROGRESS, json.dumps("epoch 2/3 · validating"))
    update_progress(make_state(*entries), tmp_path)
    assert [entry.progress for entry in entries] == ["epoch 2/3 · validating"] * 2 + [""]


def test_the_time_to_go() -> None:
    finished_entries = [
        make_entry(1, status="finished", started=NOW - 100, ended=NOW - 40),
        make_entry(2, status="finished", started=0, ended=0),
    ]
    waiting_entries = [make_entry(number, status="waiting") for number in range(3, 6)]
    running_entry = make_entry(6, status="running", started=NOW - 20)
    # One run took 60 s; a run that was finished before the sweep has no duration. The running one has 40 s left.
    assert estimate_seconds_left(make_state(*finished_entries, *waiting_entries, running_entry)) == 110
    assert estimate_seconds_left(make_state(*waiting_entries)) is None
    assert estimate_seconds_left(make_state(*waiting_entries, expected=10, jobs=1, to_come=2)) == pytest.approx(50)


def test_the_table() -> None:
    entries = [
        make_entry(1, status="finished", metric="accuracy", value=0.6, selection_merit=0.6),
        make_entry(2, status="finished", metric="accuracy", value=0.7, selection_merit=0.7),
        make_entry(3, status="pruned", metric="accuracy", value=0.9, selection_merit=0.9),
        make_entry(4, status="failed", error="it broke"),
        make_entry(5, status="running", started=NOW - 65, progress="epoch 2/3 · computing Sigma_S"),
        make_entry(6),
        make_entry(7, method="Base", method_name="Base", status="stopped"),
        make_entry(8, method="Base", method_name="Base", status="elsewhere"),
    ]
    text = render_text(make_state(*entries, to_come=4))
    expected = "2 of 12 runs finished · 1 running · 1 running elsewhere · 1 failed · 1 pruned · 1 stopped · 5 left"
    assert f"sweep-1: {expected}" in text
    [row] = [row for row in text.splitlines() if "│ I-STAR" in row]
    # The score of a pruned run is not shown as the best.
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        "rte", "bert", "I-STAR", "3", "1", "1", "1",
    ]  # fmt: skip
    lines = [line.strip() for line in text.splitlines()]
    assert lines[lines.index("best so far:") + 1] == "rte · bert · I-STAR λ=-1 ζ=0.4: accuracy 65.00 (2 seeds)"
    running = "rte · bert · I-STAR λ=-1 ζ=0.4 · seed 5: epoch 2/3 · computing Sigma_S, 65 s"
    assert lines[lines.index("running:") + 1] == running
    assert lines[lines.index("running elsewhere:") + 1] == "rte · bert · Base · seed 8: starting"


@pytest.mark.parametrize(("metric", "direction"), [("accuracy", 1), ("perplexity", -1)])
def test_the_best_configuration_has_the_best_mean_over_its_seeds(metric: str, direction: int) -> None:
    """The best single seed belongs to another configuration, and the selection metric alone decides."""
    entries = []
    for lambda_, merits in {"-1": (0.9, 0.1), "1": (0.6, 0.8), "2": (0.5, 0.7)}.items():
        for seed, merit in enumerate(merits, start=1):
            overrides = "task=rte", f"reg.lambda={lambda_}", f"optim.lr={lambda_}", f"seed={seed}"
            scores = {"metric": metric, "value": direction * merit, "selection_merit": merit}
            entries.append(make_entry(seed, status="finished", configuration=lambda_, overrides=overrides, **scores))
    score = "accuracy 70.00" if metric == "accuracy" else "perplexity -0.70"
    text = render_text(make_state(*entries))
    assert f"best so far:\n  rte · bert · I-STAR λ=-1 ζ=0.4: {score} (2 seeds), optim.lr=1\n" in text


def test_the_best_configuration_has_the_most_seeds_and_examples_as_in_the_report() -> None:
    """Another configuration used to be repeated than the report shows, if one of its runs had failed."""
    numbers = {"lucky": [(0.9, 50)], "part": [(0.8, 9), (0.8, 9)], "best": [(0.6, 50), (0.6, 50)]}
    entries = [
        make_entry(seed, status="finished", value=0.5, configuration=name, selection_merit=merit, validation_examples=n)
        for name, runs in numbers.items()
        for seed, (merit, n) in enumerate(runs, start=1)
    ]
    assert [entry.configuration for entry in live_table.find_best_configuration(entries)] == ["best"] * 2


def test_lines_name_the_settings_in_which_runs_of_one_method_differ() -> None:
    """Runs of a grid over the learning rate used to have lines of one name."""
    slow, fast = (
        make_entry(number, seed=1, status="running", overrides=["task=rte", f"optim.lr={rate}", "seed=1"])
        for number, rate in ((1, 1e-5), (2, 3e-5))
    )
    other_seed = make_entry(3, status="running", overrides=["task=rte", "optim.lr=1e-05", "seed=3"])
    state = make_state(slow, fast, other_seed)
    label = "rte · bert · I-STAR λ=-1 ζ=0.4 · seed"
    names = [f"{label} {seed} · optim.lr={rate}" for seed, rate in ((1, "1e-05"), (1, "3e-05"), (3, "1e-05"))]
    assert [state.describe(entry) for entry in state.entries] == names
    assert all(f"  {name}: starting" in render_text(state) for name in names)
    fast.status, fast.metric, fast.value = "finished", "accuracy", 0.5
    fast.started, fast.ended, fast.collapsed = 10, 70, True
    assert format_result_line(state, fast) == f"[1/3] {names[1]}: accuracy 50.00, collapsed (60 s)"
    slow.status, slow.error, slow.log = "failed", "no such layer", "logs/run1.log"
    assert format_result_line(state, slow).endswith(": failed: no such layer (logs/run1.log)")


def test_the_line_of_a_trial_has_all_searched_settings_but_lambda_once() -> None:
    overrides = ["reg=istar", "reg.lambda=0.3", "optim.lr=0.002", "data.batch_size=8", "seed=1"]
    state = make_state(make_entry(1, method="I-STAR λ=0.3 ζ=0.4", overrides=overrides), searched=["optim.lr"])
    assert state.describe(state.entries[0]) == "rte · bert · I-STAR λ=0.3 ζ=0.4 · seed 1 · optim.lr=0.002"


def test_the_file_is_kept_up_to_date(composed: Any, tmp_path: Path) -> None:
    config = composed("task=rte")
    entry = make_entry()
    sweep_state = make_state(entry, root=str(tmp_path))
    console = Console(file=io.StringIO())
    with Board(tmp_path / "s", sweep_state, console) as live_board:
        assert read_state(tmp_path / "s" / STATE_FILE) == sweep_state
        live_board.record_start(entry, tmp_path / "log")
        assert read_state(tmp_path / "s" / STATE_FILE).entries[0].status == "running"
        live_board.record_end(entry, make_finished_record("run1", config, 0.7))
        saved_state = read_state(tmp_path / "s" / STATE_FILE)
        assert (saved_state.entries[0].status, saved_state.entries[0].value) == ("finished", 0.7)
        assert not saved_state.is_over
        live_board.record_end(entry, UserError("it broke"))
        assert read_state(tmp_path / "s" / STATE_FILE).entries[0].error == "it broke"
    assert read_state(tmp_path / "s" / STATE_FILE).is_over
    # On a terminal the table is drawn again and again, without a line for each run.
    terminal = Console(file=io.StringIO(), force_terminal=True, width=150)
    with Board(tmp_path / "s", make_state(make_entry(), root=str(tmp_path)), terminal) as live_board:
        [entry] = live_board.state.entries
        live_board.record_start(entry, None)
        live_board.tick()
        live_board.record_end(entry, UserError("it broke"))
    text = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "seed 1: starting" in text
    assert "1 failed" in text
    assert "[1/1]" not in text


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"format": 1}', '{"format": 99, "entries": []}', '{"format": 1, "entries": [{}]}']
)
def test_a_broken_file_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(UserError, match=r"sweep\.json(: not JSON| is not a sweep: | has format 99)") as error:
        read_state(tmp_path / STATE_FILE)
    assert "\n" not in str(error.value)


# ---- istar watch


def write_state_file(root: Path, name: str, **values: Any) -> None:
    folder = root / SWEEPS_FOLDER / name
    folder.mkdir(parents=True)
    sweep_state = make_state(make_entry(1, status="running", started=NOW), **{"name": name, "seen": NOW, **values})
    from dataclasses import asdict

    (folder / STATE_FILE).write_text(json.dumps(asdict(sweep_state)))


def test_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def watch(*arguments: str, code: int = 0) -> str:
        assert main(["watch", str(tmp_path), "--once", *arguments]) == code
        output = capsys.readouterr()
        return " ".join((output.out + output.err).split())

    assert "holds no sweep; name the folder that holds the runs" in watch(code=2)
    write_state_file(tmp_path, "old-1", is_over=True)
    write_state_file(tmp_path, "now-2")
    output = watch()
    assert "now-2: 0 of 1 runs finished" in output
    assert "old-1" not in output
    assert "no update" not in output
    assert "old-1: 0 of 1" in watch("--sweep", "old-1")
    assert "holds no sweep later; there are now-2" in watch("--sweep", "later", code=2)
    write_state_file(tmp_path, "dead-3", seen=NOW - 3600)
    dead = watch("--sweep", "dead-3")
    assert "no update for 60 min; if the sweep was killed, this command resumes it: python train.py -m" in dead
