"""The monitor of transformers' `Trainer`: counts, readings, reporters, checkpoints, stops and evaluations."""

import copy
import json
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer

import istar
from istar.errors import UserError
from istar.integrations.monitor_callback import READINGS_KEY
from istar.integrations.transformers import MonitorCallback
from istar.monitoring.monitor import Reading
from tests.forks import run_in_processes
from tests.integrations.builders import collate, make_examples, make_model, sgd_arguments
from tests.oracles import mean_pair_cosine, stack

NAME = "bert classification"
STATES = ["embeddings", "layer_1", "layer_2"]


class Recorder(Trainer):
    """Records the batches that it trains on, with the model before each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passes: list[tuple[nn.Module, dict[str, Tensor]]] = []

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        unwatched = make_model(NAME)
        unwatched.load_state_dict(find_model(self).state_dict())
        self.passes.append((unwatched, dict(inputs)))
        return super().training_step(model, inputs, *args, **kwargs)


def make_trainer(folder: Path, options: dict[str, Any] | None = None, **arguments: Any) -> Recorder:
    """Return a trainer that has a `MonitorCallback` with these options as its last callback."""
    trainer = Recorder(
        model=make_model(NAME),
        args=sgd_arguments(folder, **({"learning_rate": 0.1, "max_steps": 8} | arguments)),
        train_dataset=make_examples(NAME),
        eval_dataset=make_examples(NAME, 10)[2:],
        data_collator=collate,
    )
    trainer.add_callback(MonitorCallback(trainer, **({"every": 2} | (options or {}))))
    return trainer


def find_model(trainer: Trainer) -> nn.Module:
    assert isinstance(trainer.model, nn.Module)
    return trainer.model


def find_monitor(trainer: Trainer) -> istar.Monitor:
    callback = trainer.callback_handler.callbacks[-1]
    assert isinstance(callback, MonitorCallback)
    assert callback.monitor is not None
    return callback.monitor


@torch.no_grad()
def compute_values(passes: list[tuple[nn.Module, dict[str, Tensor]]]) -> dict[str, dict[str, float]]:
    """Return the number of points, InterSim and average norm of each state over some passes, in float64."""
    outputs = [model(**batch, output_hidden_states=True).hidden_states for model, batch in passes]
    values = {}
    for number, state in enumerate(STATES):
        points = torch.cat(
            [
                stack([hidden[number]], batch["attention_mask"])
                for hidden, (_, batch) in zip(outputs, passes, strict=True)
            ]
        )
        values[state] = {
            "points": len(points),
            "inter_sim": mean_pair_cosine(points.numpy()),
            "average_norm": points.norm(dim=1).mean().item(),
        }
    return values


def check_values(reading: Any, expected: dict[str, dict[str, float]]) -> None:
    assert list(reading.values) == list(expected)
    for state, values in expected.items():
        assert {name: reading.values[state][name] for name in values} == pytest.approx(values, rel=1e-9)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_readings_are_those_of_the_batches_of_each_due_step(accumulation: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=accumulation)
    trainer.train()
    monitor = find_monitor(trainer)
    assert monitor.count == trainer.state.global_step == 8
    assert [reading.step for reading in monitor.readings] == [0, 2, 4, 6]
    for reading in monitor.readings:
        first_pass = reading.step * accumulation
        check_values(reading, compute_values(trainer.passes[first_pass : first_pass + accumulation]))
    assert monitor.is_closed
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in find_model(trainer).modules())


def test_the_reporters_get_all_values_and_the_log_history_and_the_screen_do_not(tmp_path: Path, capsys: Any) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = make_trainer(tmp_path, {"probe": 1}, report_to="tensorboard", eval_strategy="steps", eval_steps=4)
    trainer.train()
    monitor = find_monitor(trainer)
    [file] = tmp_path.glob("runs/*/events*")
    logged = events.EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    for source, pattern in (("training", "train/geometry/{}/{}"), ("probe", "eval/{}_{}")):
        readings = [reading for reading in monitor.readings if reading.source == source]
        assert [reading.step for reading in readings] == ([0, 2, 4, 6] if source == "training" else [4, 8])
        for state in STATES:
            for measure in ("inter_sim", "largest_activation"):
                scalars = [(event.step, event.value) for event in logged.Scalars(pattern.format(state, measure))]
                expected = [(reading.step, reading.values[state][measure]) for reading in readings]
                assert scalars == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    assert not any("layer" in name for log in trainer.state.log_history for name in log)
    printed = capsys.readouterr().out
    assert "layer_1" not in printed
    lines = [line for line in printed.splitlines() if " over 3 states" in line]
    numbers = [reading.values[state]["inter_sim"] for reading in monitor.readings[1:2] for state in STATES]
    assert lines[1].startswith("step 2: isoscore_unbiased ")
    assert f", inter_sim {min(numbers):.3g} to {max(numbers):.3g}, participation_ratio " in lines[1]
    assert [line.partition(":")[0] for line in lines] == [
        *("step 0", "step 2", "step 4, probe", "step 4", "step 6", "step 8, probe"),
    ]


@pytest.mark.parametrize("action", ["stop", "warn"])
def test_a_collapse_ends_the_training_after_its_step(action: str, tmp_path: Path) -> None:
    alarm = istar.Alarm("inter_sim", above=-1.0, readings=3, states=["layer_2"], action=action)  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path, {"every": 3, "alarms": [alarm]}, max_steps=10)
    with pytest.warns(UserWarning, match=r"^step 6: layer_2 may have collapsed: inter_sim was"):
        output = trainer.train()
    # The third reading is of the seventh step.
    assert trainer.state.global_step == output.global_step == (7 if action == "stop" else 10)
    assert [reading.step for reading in find_monitor(trainer).readings] == (
        [0, 3, 6] if action == "stop" else [0, 3, 6, 9]
    )
    assert find_monitor(trainer).is_closed


def test_a_resumed_training_has_the_readings_of_the_undisturbed_one(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    options = {"probe": 2, "points": 12, "alarms": [istar.Alarm("inter_sim", above=-1.0, readings=1, states="pooled")]}
    undisturbed = make_trainer(tmp_path, options, **settings)
    with pytest.warns(UserWarning, match="step 0: layer_2 may have collapsed"):
        undisturbed.train()
    resumed = make_trainer(tmp_path, options, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # the alarm does not go off again
    readings = [json.dumps(reading) for reading in find_monitor(undisturbed).readings]
    assert readings == [json.dumps(reading) for reading in find_monitor(resumed).readings]
    assert [(reading.step, reading.source) for reading in find_monitor(resumed).readings] == [
        *((0, "training"), (2, "training"), (3, "probe"), (4, "training"), (6, "probe"), (6, "training")),
        (8, "probe"),
    ]
    saved = [json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text()) for step in (3, 8)]
    assert [len(state["stateful_callbacks"][READINGS_KEY]) for state in saved] == [3, 7]


def test_a_checkpoint_without_readings_begins_with_the_next_due_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=3)
    trainer.pop_callback(MonitorCallback)
    trainer.train()
    resumed = make_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [reading.step for reading in find_monitor(resumed).readings] == [4, 6]
    assert find_monitor(resumed).count == 8


def test_another_training_begins_anew_with_the_model_that_is_trained(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.model_init = lambda: make_model(NAME)
    for _ in range(2):
        trainer.passes = []
        trainer.train()
        monitor = find_monitor(trainer)
        assert [reading.step for reading in monitor.readings] == [0, 2, 4, 6]
        check_values(monitor.readings[-1], compute_values(trainer.passes[6:7]))


def test_an_evaluation_has_the_measures_of_its_first_batches(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, {"probe": 2}, per_device_eval_batch_size=3)
    before = trainer.evaluate()
    trainer.train()
    for metrics, model in (
        (before, make_model(NAME)),
        (trainer.evaluate(metric_key_prefix="test"), find_model(trainer)),
    ):
        prefix = "eval" if metrics is before else "test"
        rows = make_examples(NAME, 10)[2:]
        expected = compute_values([(copy.deepcopy(model).eval(), collate(batch)) for batch in (rows[:3], rows[3:6])])
        for measure in ("inter_sim", "average_norm"):
            values = [metrics[f"{prefix}_{state}_{measure}"] for state in STATES]
            assert values == pytest.approx([expected[state][measure] for state in STATES], rel=1e-9)
            assert metrics[f"{prefix}_{measure}"] == pytest.approx(sum(values[1:]) / 2, rel=1e-12)
    assert not any("points" in name or "error" in name for name in before)


def test_the_batches_of_a_probe_are_given_or_not_read(tmp_path: Path) -> None:
    batch = collate(make_examples(NAME, 3))
    metrics = make_trainer(tmp_path, {"probe": [batch], "measures": ["inter_sim"], "alarms": []}).evaluate()
    expected = compute_values([(make_model(NAME).eval(), batch)])
    assert metrics["eval_layer_1_inter_sim"] == pytest.approx(expected["layer_1"]["inter_sim"], rel=1e-9)
    assert not any("inter_sim" in name for name in make_trainer(tmp_path).evaluate())


def test_a_measure_of_a_state_chooses_the_best_model(tmp_path: Path) -> None:
    name = "eval_layer_2_isoscore_unbiased"
    settings = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.5}
    trainer = make_trainer(tmp_path, {"probe": 4}, metric_for_best_model=name, greater_is_better=True, **settings)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=100))
    callback = trainer.callback_handler.callbacks[-2]
    assert isinstance(callback, MonitorCallback)
    trainer.train()
    assert callback.monitor is not None
    scores = {
        reading.step: reading.values["layer_2"]["isoscore_unbiased"]
        for reading in callback.monitor.readings
        if reading.source == "probe"
    }
    assert list(scores) == [2, 4, 6, 8]
    assert trainer.state.best_metric == max(scores.values())
    assert trainer.state.best_global_step == max(scores, key=scores.__getitem__)


def test_the_training_is_the_same_as_without_a_monitor(tmp_path: Path) -> None:
    parameters = []
    for is_watched in (True, False):
        model = make_model(NAME)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 6, "learning_rate": 0.1}
        trainer = Trainer(
            model=model,
            args=sgd_arguments(tmp_path, **settings),
            train_dataset=make_examples(NAME),
            eval_dataset=make_examples(NAME, 8),
            data_collator=collate,
        )
        if is_watched:
            trainer.add_callback(MonitorCallback(trainer, every=2, probe=2))
        torch.manual_seed(0)
        trainer.train()
        parameters.append(dict(model.named_parameters()))
    assert all(torch.equal(value, parameters[1][name]) for name, value in parameters[0].items())


def train_in_process(rank: int, port: int, folder: str) -> None:
    """Save the passes and the readings of a process; it stops by an alarm after the fourth step, as all do."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", **address}
    alarm = istar.Alarm("inter_sim", above=-1.0, readings=2, states="pooled", action="stop")
    options = {"every": 3, "probe": 1, "alarms": [alarm]}
    trainer = make_trainer(Path(folder), options, gradient_accumulation_steps=2, per_device_eval_batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    is_warned = any("layer_2 may have collapsed" in str(warning.message) for warning in caught)
    metrics = trainer.evaluate()
    states = [(dict(model.state_dict()), batch) for model, batch in trainer.passes]
    readings = [tuple(reading) for reading in find_monitor(trainer).readings]
    final_state = find_model(trainer).state_dict()
    results = (states, readings, trainer.state.global_step, is_warned, metrics["eval_layer_1_inter_sim"], final_state)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    # Skip the shutdown of the interpreter, in which the process group may abort.
    os._exit(0)


@pytest.mark.slow
def test_two_processes_measure_the_union_of_their_points_and_stop_together(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run_in_processes(train_in_process, (port, str(tmp_path)), 2)
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert results[0][1] == results[1][1]
    assert [(step, source) for step, source, _ in results[0][1]] == [(0, "training"), (3, "training"), (4, "probe")]
    assert [result[2:4] for result in results] == [(4, True), (4, False)]
    for step, _, values in results[0][1][:2]:
        passes = []
        for saved, batch in (saved_pass for result in results for saved_pass in result[0][2 * step : 2 * step + 2]):
            model = make_model(NAME)
            model.load_state_dict(saved)
            passes.append((model, batch))
        check_values(Reading(step, "training", values), compute_values(passes))
    model = make_model(NAME).eval()
    model.load_state_dict(results[0][5])
    expected = compute_values([(model, collate(make_examples(NAME, 10)[2:6]))])  # two examples of each process
    assert results[0][4] == results[1][4] == pytest.approx(expected["layer_1"]["inter_sim"], rel=1e-9)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(UserError, match=r"^option=evry is not known; did you mean every\?"):
        MonitorCallback(trainer, evry=3)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"^probe=0 is too small"):
        MonitorCallback(trainer, probe=0)
    with pytest.raises(UserError, match=r"^probe= is an iterator"):
        MonitorCallback(trainer, probe=iter([]))
    with pytest.raises(UserError, match=r"^BertForSequenceClassification does not take the batches of the probe: "):
        make_trainer(tmp_path, {"probe": [{"words": torch.ones(1)}]}).evaluate()
    with pytest.raises(UserError, match=r"^measure=isoscor is not known; did you mean isoscore"):
        make_trainer(tmp_path, {"measures": ["isoscor"]}).train()
