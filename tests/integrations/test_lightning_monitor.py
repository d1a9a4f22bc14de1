"""The monitor of Lightning: counts, readings, loggers, checkpoints, stops and validations."""

import json
import logging
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import pytest
import torch
import torch.multiprocessing as mp
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import istar
from istar.errors import UserError
from istar.integrations.lightning import MonitorCallback
from tests.integrations.builders import collate, make_classifier, make_examples
from tests.oracles import mean_pair_cosine, stack

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
ROWS = make_examples("classification", 16)
STATES = ["embeddings", "layer_1", "layer_2"]
Pass = tuple[nn.Module, dict[str, Tensor]]


def copy_classifier(model: nn.Module) -> nn.Module:
    copied = make_classifier("bert")
    copied.load_state_dict(model.state_dict())
    return copied.eval()


class Classifier(L.LightningModule):
    """Records the batches that it trains on and validates on, with the model before each.

    Args:
        num_batches_of_step: with manual optimization, the optimizer steps after this many batches.
        num_optimizers: number of optimizers that step after them.
    """

    def __init__(self, num_batches_of_step: int = 0, num_optimizers: int = 1) -> None:
        super().__init__()
        self.model = make_classifier("bert")
        self.num_batches_of_step, self.num_optimizers = num_batches_of_step, num_optimizers
        self.automatic_optimization = num_batches_of_step == 0
        self.passes: list[Pass] = []
        self.validation_passes: list[Pass] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.passes.append((copy_classifier(self.model), batch))
        loss: Tensor = self.model(**batch).loss
        if not self.automatic_optimization:
            self.manual_backward(loss)
            if (batch_idx + 1) % self.num_batches_of_step == 0:
                optimizers = self.optimizers()
                for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                    optimizer.step()
                    optimizer.zero_grad()
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_passes.append((copy_classifier(self.model), batch))
        self.model(**batch)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.num_optimizers)]


def make_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(ROWS, 2, collate_fn=collate)  # type: ignore[arg-type]


def make_trainer(*callbacks: L.Callback, **settings: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "max_steps": 8,
    }
    defaults |= {"enable_model_summary": False, "accelerator": "cpu", "precision": "64-true", "devices": 1}
    return L.Trainer(callbacks=list(callbacks), **(defaults | settings))


def find_monitor(callback: MonitorCallback) -> istar.Monitor:
    assert callback.monitor is not None
    return callback.monitor


@torch.no_grad()
def compute_values(passes: list[Pass]) -> dict[str, dict[str, float]]:
    """Return the number of points, InterSim and average norm of each state over some passes, in float64."""
    outputs = [model(**batch, output_hidden_states=True).hidden_states for model, batch in passes]
    values = {}
    for number, state in enumerate(STATES):
        states = [
            stack([hidden[number]], batch["attention_mask"]) for hidden, (_, batch) in zip(outputs, passes, strict=True)
        ]
        points = torch.cat(states)
        values[state] = {
            "points": len(points),
            "inter_sim": mean_pair_cosine(points.numpy()),
            "average_norm": points.norm(dim=1).mean().item(),
        }
    return values


def check_readings(monitor: istar.Monitor, passes: list[Pass], steps: list[int], num_passes: int) -> None:
    """Check the steps of the readings, and their values against the passes of each step."""
    assert [reading.step for reading in monitor.readings] == steps
    for reading in monitor.readings:
        expected = compute_values(passes[reading.step * num_passes :][:num_passes])
        assert list(reading.values) == list(expected)
        for state, values in expected.items():
            assert {name: reading.values[state][name] for name in values} == pytest.approx(values, rel=1e-9)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_readings_are_those_of_the_batches_of_each_due_step(accumulation: int) -> None:
    module, callback = Classifier(), MonitorCallback(every=3)
    trainer = make_trainer(callback, accumulate_grad_batches=accumulation)
    trainer.fit(module, make_loader())
    assert find_monitor(callback).count == trainer.global_step == 8
    check_readings(find_monitor(callback), module.passes, [0, 3, 6], accumulation)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.model.modules())


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_a_step_of_manual_optimization_counts_once(num_optimizers: int, tmp_path: Path) -> None:
    module, callback = Classifier(2, num_optimizers), MonitorCallback(every=3)
    logger = CSVLogger(tmp_path, "", "")
    trainer = make_trainer(callback, logger=logger, max_steps=-1, max_epochs=2)
    trainer.fit(module, make_loader())
    assert find_monitor(callback).count == 8
    assert trainer.global_step == 8 * num_optimizers
    check_readings(find_monitor(callback), module.passes, [0, 3, 6], 2)
    logged = pd.read_csv(tmp_path / "metrics.csv")
    assert list(logged["step"]) == [0, 3 * num_optimizers, 6 * num_optimizers]


def test_all_loggers_get_all_values_and_the_screen_gets_a_line(tmp_path: Path, caplog: Any) -> None:
    loggers = [CSVLogger(tmp_path, name, "") for name in ("one", "two")]
    callback = MonitorCallback(every=4)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        make_trainer(callback, logger=loggers, log_every_n_steps=5).fit(Classifier(), make_loader())
    for name in ("one", "two"):
        logged = pd.read_csv(tmp_path / name / "metrics.csv", index_col="step")
        readings = find_monitor(callback).readings
        assert list(logged.index) == [reading.step for reading in readings] == [0, 4]
        for reading in readings:
            assert logged.loc[reading.step].to_dict() == pytest.approx(reading.flatten(), rel=1e-12, nan_ok=True)
    lines = [record.message for record in caplog.records if record.message.startswith("step ")]
    numbers = [find_monitor(callback).readings[1].values[state]["inter_sim"] for state in STATES]
    assert len(lines) == 2
    assert f", inter_sim {min(numbers):.3g} to {max(numbers):.3g}, participation_ratio " in lines[1]
    assert lines[1].startswith("step 4: isoscore_unbiased ")
    assert lines[1].endswith(" over 3 states")


@pytest.mark.parametrize(("action", "min_steps", "num_steps"), [("stop", None, 5), ("stop", 9, 9), ("warn", None, 12)])
def test_a_collapse_ends_the_training(action: str, min_steps: int | None, num_steps: int) -> None:
    alarm = istar.Alarm("inter_sim", above=-1.0, readings=3, states=["layer_2"], action=action)  # type: ignore[arg-type]
    callback = MonitorCallback(every=2, alarms=[alarm])
    trainer = make_trainer(callback, max_steps=12, min_steps=min_steps)
    with pytest.warns(UserWarning, match=r"step 4: layer_2 may have collapsed: inter_sim was"):
        trainer.fit(Classifier(), make_loader())
    assert trainer.global_step == num_steps
    assert find_monitor(callback).is_closed


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_training_has_the_readings_of_the_undisturbed_one(tmp_path: Path) -> None:
    readings = []
    for checkpoint in (None, tmp_path / "epoch=0.ckpt"):
        callback = MonitorCallback(every=3, points=12, probe=2)
        saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        trainer = make_trainer(callback, saving, enable_checkpointing=True, max_steps=-1, max_epochs=2)
        trainer.fit(Classifier(), make_loader(), make_loader(), ckpt_path=checkpoint)
        readings.append([json.dumps(reading) for reading in find_monitor(callback).readings])
        assert [(reading.step, reading.source) for reading in find_monitor(callback).readings] == [
            *((0, "training"), (3, "training"), (6, "training"), (8, "probe"), (9, "training")),
            *((12, "training"), (15, "training"), (16, "probe")),
        ]
    assert readings[0] == readings[1]


def test_a_trainer_that_goes_on_has_the_readings_of_both_trainings() -> None:
    module, callback = Classifier(), MonitorCallback(every=2)
    trainer = make_trainer(callback, max_epochs=1, max_steps=-1)
    trainer.fit(module, make_loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader())
    assert find_monitor(callback).count == 16
    check_readings(find_monitor(callback), module.passes, list(range(0, 16, 2)), 1)
    make_trainer(callback, max_steps=3).fit(module, make_loader())
    assert [reading.step for reading in find_monitor(callback).readings] == [0, 2]


def test_a_validation_has_the_measures_of_its_first_batches() -> None:
    module, callback = Classifier(), MonitorCallback(lambda module: module.get_submodule("model"), probe=2)
    trainer = make_trainer(callback, max_epochs=2, max_steps=-1)
    trainer.validate(module, make_loader(), verbose=False)
    metrics = [dict(trainer.callback_metrics)]
    trainer.fit(module, make_loader(), make_loader())
    metrics.append(dict(trainer.callback_metrics))
    for logged, first in zip(metrics, (0, -8), strict=True):
        expected = compute_values(module.validation_passes[first:][:2])
        for measure in ("inter_sim", "average_norm"):
            values = [float(logged[f"val/{state}/{measure}"]) for state in STATES]
            assert values == pytest.approx([expected[state][measure] for state in STATES], rel=1e-6)  # float32
            assert float(logged[f"val/{measure}"]) == pytest.approx(sum(values[1:]) / 2, rel=1e-6)
    # The sanity check is not measured.
    probes = [reading for reading in find_monitor(callback).readings if reading.source == "probe"]
    assert [reading.step for reading in probes] == [8, 16]


def test_checkpoints_and_early_stopping_follow_a_measure_of_a_state(tmp_path: Path) -> None:
    name = "val/layer_2/isoscore_unbiased"
    best = ModelCheckpoint(tmp_path, monitor=name, mode="max")
    callback = MonitorCallback(probe=4)
    stopping = EarlyStopping(name, mode="min", patience=50)
    trainer = make_trainer(callback, best, stopping, enable_checkpointing=True, max_steps=-1, max_epochs=3)
    trainer.fit(Classifier(), make_loader(), make_loader())
    scores = [
        reading.values["layer_2"]["isoscore_unbiased"]
        for reading in find_monitor(callback).readings
        if reading.source == "probe"
    ]
    assert len(scores) == 3
    assert float(best.best_model_score) == pytest.approx(max(scores), rel=1e-6)  # type: ignore[arg-type]
    assert float(stopping.best_score) == pytest.approx(min(scores), rel=1e-6)


def test_the_training_is_the_same_as_without_a_monitor() -> None:
    parameters = []
    for callbacks in ([], [MonitorCallback(every=2, probe=2)]):
        module = Classifier()
        make_trainer(*callbacks).fit(module, make_loader(), make_loader())
        parameters.append(dict(module.named_parameters()))
    assert all(torch.equal(value, parameters[1][name]) for name, value in parameters[0].items())


def fit_in_process(rank: int, port: int, folder: Path) -> None:
    """Save the passes, the readings and the logged values of a process that stops after an alarm at step 3."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    alarm = istar.Alarm("inter_sim", above=-1.0, readings=2, action="stop")
    module, callback = Classifier(), MonitorCallback(every=2, alarms=[alarm], probe=1)
    trainer = make_trainer(callback, devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, make_loader(), make_loader())
    passes, validation_passes = (
        [(model.state_dict(), batch) for model, batch in recorded]
        for recorded in (module.passes, module.validation_passes)
    )
    readings = [tuple(reading) for reading in find_monitor(callback).readings]
    logged = float(trainer.callback_metrics["val/layer_2/inter_sim"])
    torch.save((passes, validation_passes, readings, trainer.global_step, logged), folder / f"{rank}.pt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_two_processes_measure_the_union_of_their_points_and_stop_together(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.start_processes(fit_in_process, (port, tmp_path), 2, start_method="fork")
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert results[0][2:] == results[1][2:]
    _, _, readings, num_steps, logged = results[0]
    assert num_steps == 3
    assert [(step, source) for step, source, _ in readings] == [(0, "training"), (2, "training"), (3, "probe")]
    for step, source, values in readings:
        # The last validation begins with the first batch of each process after those of the sanity check.
        recorded = [result[0][step] if source == "training" else result[1][-4] for result in results]
        passes = []
        for saved, batch in recorded:
            model = make_classifier("bert").eval()
            model.load_state_dict(saved)
            passes.append((model, batch))
        expected = compute_values(passes)
        for state in STATES:
            assert values[state]["inter_sim"] == pytest.approx(expected[state]["inter_sim"], rel=1e-9)
    assert logged == pytest.approx(readings[-1][2]["layer_2"]["inter_sim"], rel=1e-6)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match=r"^option=evry is not known; did you mean every\?"):
        MonitorCallback(evry=3)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"^Classifier\.net was not found; name the attribute with the model: model="):
        make_trainer(MonitorCallback("net")).fit(Classifier(), make_loader())
    with pytest.raises(UserError, match=r"^there are several validation sets; give the batches of the probe: probe="):
        make_trainer(MonitorCallback(probe=1)).validate(Classifier(), [make_loader(), make_loader()], verbose=False)


class FailingClassifier(Classifier):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise KeyError("batch")
        return super().training_step(batch, batch_idx)


def test_a_training_that_fails_leaves_no_hooks() -> None:
    module, callback = FailingClassifier(), MonitorCallback(every=1)
    with pytest.raises(KeyError):
        make_trainer(callback).fit(module, make_loader())
    assert [reading.step for reading in find_monitor(callback).readings] == [0, 1, 2]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.model.modules())
