"""Failing runs are recorded, and bad settings are refused before anything is written."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from istar.errors import NonFiniteError, UserError
from istar.finetune.config.schema import to_dict
from istar.finetune.execute import recording
from istar.finetune.execute.identify import identify
from istar.finetune.execute.run import run
from istar.finetune.training.module import FineTuner
from istar.runs.record import RESULT, read_result
from tests.finetune.execute.artifacts import Build, folders_in


def test_a_failing_training_is_told_and_goes_on(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    original_step = FineTuner.training_step

    def fail(self: FineTuner, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 3:
            raise RuntimeError("out of\nluck")
        return original_step(self, batch, batch_idx)

    config = small("trainer.max_epochs=2", "trainer.checkpoint_every_n_steps=1")
    monkeypatch.setattr(FineTuner, "training_step", fail)
    with pytest.raises(RuntimeError, match="luck"):
        run(config)
    monkeypatch.undo()
    [name] = folders_in(Path(config.run.root))
    folder = Path(config.run.root) / name
    result = read_result(folder)
    assert result.status == "failed"
    assert result.error == "out of luck"
    assert result.config == to_dict(config)
    assert folders_in(folder / "checkpoints") == ["step-2.ckpt", "step-3.ckpt"]
    assert not {"model", ".model", "predictions.jsonl", "geometry.json"} & set(folders_in(folder))
    resumed_record = run(config)
    assert resumed_record.status == "finished"
    assert folders_in(Path(config.run.root)) == [resumed_record.name] == [name]
    assert read_result(folder).status == "finished"


def test_a_geometry_that_fails_leaves_predictions_and_model(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise NonFiniteError("the hidden states are not finite")

    monkeypatch.setattr(recording, "measure_validation_geometry", fail)
    config = small("run.geometry=true", "run.save_model=true")
    with pytest.raises(UserError, match="not finite"):
        run(config)
    [name] = folders_in(Path(config.run.root))
    names = set(folders_in(Path(config.run.root) / name))
    assert {"model", "predictions.jsonl"} <= names
    assert "geometry.json" not in names


def test_a_model_that_diverges_is_not_a_finished_run(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    original_hook = FineTuner.on_train_epoch_start

    def fill_weights_with_nan(self: FineTuner) -> None:
        original_hook(self)
        with torch.no_grad():
            self.model.classifier.weight.fill_(math.nan)  # type: ignore[union-attr, operator]

    monkeypatch.setattr(FineTuner, "on_train_epoch_start", fill_weights_with_nan)
    config = small("reg=none")
    with pytest.raises(UserError, match=r"^step 1: the task loss is nan; there is no checkpoint yet; lower optim.lr"):
        run(config)
    [name] = folders_in(Path(config.run.root))
    assert read_result(Path(config.run.root) / name).status == "failed"
    assert not (Path(config.run.root) / name / "model").exists()


REFUSED = [
    (["task.submission=true"], "no submission file"),
    (["model=auto", "model.name=/nowhere"], "there is no such folder"),
    (["task.max_length=4"], "max_length=4 is too short"),
    (["task.max_length=513"], "task.max_length=513: the model accepts at most 512 tokens"),
    (["trainer.precision=16-mixed", "trainer.accelerator=cpu"], "needs a CUDA device"),
    (["trainer.accelerator=foo"], "refuses its settings"),
    (["trainer.devices=abc"], "refuses its settings"),
    (["trainer.gradient_clip_algorithm=[norm]"], "=['norm'] is not of the expected type: str"),
    (["trainer.detect_anomaly=1"], "trainer.detect_anomaly=1 is not of the expected type: bool"),
    (["trainer.profiler=true"], "trainer.profiler=True is not of the expected type: Profiler or str"),
    (["trainer.devices=2", "trainer.strategy=ddp"], "needs more processes than this one"),
    (["logger=wandb", "trainer.accelerator=foo"], "refuses its settings"),
    (["trainer.val_check_interval=5", "trainer.max_epochs=3"], "set trainer.check_val_every_n_epoch=null too"),
    (["trainer.limit_train_batches=0.01"], "trainer.limit_train_batches=0.01 is less than one of the 4 batches"),
]


@pytest.mark.parametrize(("overrides", "message_part"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_refused_before_anything_is_written(small: Build, overrides: list[str], message_part: str) -> None:
    config = small(*overrides)
    with pytest.raises(UserError) as error:
        run(config)
    assert message_part in str(error.value)
    assert "\n" not in str(error.value)
    assert folders_in(Path(config.run.root)) == []


def test_a_foreign_result_is_not_overwritten(small: Build) -> None:
    config = small()
    path = identify(config).folder / RESULT
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(UserError, match="is not a result"):
        run(config)
    assert path.read_text() == "{}"


def test_a_training_without_a_step(small: Build) -> None:
    with pytest.raises(UserError, match=r"^the training has ended before its first step; raise trainer\.max_time$"):
        run(small("reg=none", "trainer.max_time=00:00:00:00"))


def test_a_training_without_a_validation_before_its_end(small: Build) -> None:
    record = run(small("reg=none", "trainer.check_val_every_n_epoch=5", "trainer.max_epochs=2"))
    assert [epoch["step"] for epoch in record.epochs] == [8]
