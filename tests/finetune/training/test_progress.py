"""What a run shows: a line after each epoch and, on a terminal, a bar of each phase within 80 columns."""

import json
import re
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from rich.control import strip_control_codes

from istar.finetune.tasks.features import FeatureRows
from istar.finetune.training import progress
from istar.finetune.training.module import FineTuner
from istar.finetune.training.progress import RunProgress
from istar.finetune.training.refresh import ShrinkageCovariance
from istar.finetune.training.trainer import StopAfterLastStep
from istar.finetune.training.validation_isoscore import ValidationIsoScore
from istar.regularizers import IStar
from istar.runs.record import PROGRESS
from tests.finetune.training.conftest import Setting, trainer

VALIDATED = {"limit_val_batches": 1.0, "log_every_n_steps": 1}


def hide_values(line: str) -> str:
    """Replace the values in a line by dots, but not its position in the training."""
    position, *parts = line.split(" · ")
    return " · ".join([position, *(re.sub(r"-?\d+\.\d+|\d+:\d\d", ".", part) for part in parts)])


class MetricRecorder(L.Callback):
    """Records the task losses and the accuracy of each epoch."""

    def __init__(self) -> None:
        self.values: list[tuple[float, float]] = []
        self._losses: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        task_loss = pl_module.task_loss

        def record_loss(batch: Any) -> Any:
            loss = task_loss(batch)
            self._losses.append(loss.item())
            return loss

        pl_module.task_loss = record_loss

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.values.append((fmean(self._losses), pl_module.metrics["accuracy"]))
        self._losses = []


def test_outside_a_terminal_each_epoch_has_a_line(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss of -0.1 would look like an error, so the penalty is not part of it. The metric is in percent."""
    shown, recorder = RunProgress(is_shown=True), MetricRecorder()
    # Fewer steps than the logging interval used to show neither loss nor IsoScore*.
    settings = {**VALIDATED, "log_every_n_steps": 1000}
    fitting = trainer(shown, recorder, max_epochs=2, accumulate_grad_batches=2, **settings)
    with shown.bar:
        fitting.fit(setting.module(IStar(-1.0, 0.0)), setting.data(batch_size=40))
    lines = capsys.readouterr().out.splitlines()
    assert [hide_values(line) for line in lines] == [
        "epoch 1/2 · loss . · IsoScore . · accuracy . · . left",
        "epoch 2/2 · loss . · IsoScore . · accuracy .",
    ]
    for line, (loss, accuracy) in zip(lines, recorder.values, strict=True):
        assert f" · loss {loss:.3g} · " in line
        assert f" · accuracy {100 * accuracy:.2f}" in line
    assert max(map(len, lines)) <= 80


def test_without_a_penalty_the_line_has_isoscore_of_the_validation(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, isotropy = RunProgress(is_shown=True), ValidationIsoScore()
    trainer(isotropy, shown, max_epochs=1, **VALIDATED).fit(setting.module(), setting.data(batch_size=40))
    [line] = capsys.readouterr().out.splitlines()
    assert hide_values(line) == "epoch 1/1 · loss . · IsoScore . · accuracy ."
    assert f" · IsoScore {isotropy.scores['union']:.3g} · " in line


def test_a_validation_within_an_epoch_has_a_line(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    """The training ends after 8 steps, in the middle of the second epoch of 5."""
    shown, module = RunProgress(is_shown=True), setting.module()
    module.max_steps = 8
    settings = {**VALIDATED, "val_check_interval": 2, "max_epochs": 9}
    trainer(StopAfterLastStep(8), shown, **settings).fit(module, setting.data(batch_size=40))
    assert [hide_values(line) for line in capsys.readouterr().out.splitlines()] == [
        "epoch 1/2 · 2/5 · loss . · accuracy . · . left",
        "epoch 1/2 · 4/5 · loss . · accuracy . · . left",
        "epoch 1/2 · loss . · accuracy . · . left",
        "epoch 2/2 · 2/3 · loss . · accuracy . · . left",
        "epoch 2/2 · loss . · accuracy .",
    ]


def test_on_a_terminal_each_phase_is_a_line_of_80_columns(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    shown, module = RunProgress(tmp_path, is_shown=True), setting.module(IStar(-1.0, 0.4))
    phases = []

    class Refresher(L.Callback):
        """Draws the bar after each batch, and not only four times a second; records what the file says."""

        def on_train_batch_end(self, *arguments: Any) -> None:
            shown.bar.refresh()
            phases.append(json.loads((tmp_path / PROGRESS).read_text()))

        on_validation_batch_end = on_train_batch_end

    covariance = ShrinkageCovariance(module.penalty, FeatureRows(setting.train), setting.collate, 100, 3, shown)
    fitting = trainer(shown, covariance, Refresher(), max_epochs=2, **VALIDATED)
    data = setting.data(batch_size=100)
    with shown.bar:
        fitting.validate(module, data, verbose=False)
        fitting.fit(module, data)
        shown.show("measuring")
    output = capsys.readouterr().out
    frames = [strip_control_codes(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", output)).replace("\r", "\n")]
    lines = [line for line in "".join(frames).splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    text = "\n".join(re.sub(" *[━╸╺]+ *", " ━ ", re.sub("\n", "", line)) for line in lines)
    assert phases[:3] == ["validating"] * 3
    assert list(dict.fromkeys(phases[3:])) == [
        "epoch 1/2", "epoch 1/2 · validating", "epoch 2/2", "epoch 2/2 · validating",
    ]  # fmt: skip
    for shown_text in ("validating", "epoch 1/2 · computing Sigma_S", "epoch 2/2 · validating", "measuring"):
        assert shown_text in text
    assert json.loads((tmp_path / PROGRESS).read_text()) == "epoch 2/2 · measuring"


@pytest.mark.parametrize(
    ("seconds", "expected"), [(20, "0:20"), (125, "2:05"), (3_600 + 125, "1:02:05"), (86_400 + 7_200, "1 day, 2:00:00")]
)
def test_a_resumed_training_continues_at_its_epoch_with_the_time_left(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, seconds: int, expected: str
) -> None:
    """Lightning skips the hook of an epoch's start if the training resumes within the epoch."""
    module, shown = setting.module(), RunProgress(is_shown=True)
    module.total_steps, module.step_metrics = 20, {"train/task_loss": 0.25}
    resumed: Any = SimpleNamespace(
        current_epoch=2,
        global_step=12,
        num_training_batches=10,
        accumulate_grad_batches=2,
        is_global_zero=True,
        callback_metrics={},
    )
    clock = SimpleNamespace(perf_counter=lambda: 100.0)
    monkeypatch.setattr(progress, "time", clock)
    shown.on_train_start(resumed, module)
    [task] = shown.bar.tasks
    resumed.global_step = 13
    clock.perf_counter = lambda: 100.0 + seconds / 7
    shown.on_train_batch_end(resumed, module, None, None, 5)
    [task] = shown.bar.tasks
    assert task.description == "epoch 3/4"
    assert task.fields["details"] == f"6/10 · loss 0.25 · {expected} left"


def test_other_processes_show_nothing(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress.rank_zero_only, "rank", 1)
    shown, module = RunProgress(tmp_path, is_shown=True), setting.module()
    assert isinstance(module, FineTuner)
    shown.show("measuring")
    shown.on_train_epoch_end(SimpleNamespace(global_step=1), module)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_a_disk_without_space_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / ".istar").write_text("a file instead of a folder")
    RunProgress(tmp_path).show("measuring")
