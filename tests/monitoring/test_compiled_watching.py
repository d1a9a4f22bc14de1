"""Compiled models: as many graphs as without a monitor at any cadence, and the readings of the eager model."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import istar
from tests.monitoring.builders import make_batches, make_bert, no_warnings, train

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning", "ignore:.*TF32.*:UserWarning", "ignore:The .grad"
)
STEPS = 6


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train_compiled(backend: str, way: str, every: int | None) -> tuple[int, list[float], Any]:
    """Return the number of graphs, the losses and the monitor of a training with a compiled model."""
    model, counter = make_bert(num_hidden_layers=4).float(), CompileCounterWithBackend(backend)
    monitor = None if every is None else istar.Monitor(model, every=every)
    called = model
    if way == "layers":
        for layer in model.bert.encoder.layer:
            layer.compile(backend=counter)
    elif way == "in place":
        model.compile(backend=counter, fullgraph=True)
    else:
        called = torch.compile(model, backend=counter, fullgraph=True)
    losses = train(model, monitor, list(make_batches(STEPS)), called)
    return counter.frame_count, losses, monitor


@pytest.mark.parametrize(
    ("backend", "way"),
    [("aot_eager", "full"), pytest.param("aot_eager", "in place", marks=pytest.mark.slow),
     pytest.param("inductor", "full", marks=pytest.mark.slow)],
)  # fmt: skip
def test_as_many_graphs_as_without_a_monitor_and_the_readings_of_an_eager_model(backend, way):
    num_graphs, losses, _ = train_compiled(backend, way, None)
    eager = make_bert(num_hidden_layers=4).float()
    expected = istar.Monitor(eager, every=2)
    train(eager, expected, list(make_batches(STEPS)))
    with no_warnings():
        num_watched, watched_losses, monitor = train_compiled(backend, way, 2)
    assert num_watched == num_graphs
    assert watched_losses == pytest.approx(losses, rel=1e-6)
    assert [reading.step for reading in monitor.readings] == [0, 2, 4]
    for reading, eager_reading in zip(monitor.readings, expected.readings, strict=True):
        assert list(reading.values) == list(eager_reading.values)
        for state, values in reading.values.items():
            assert values == pytest.approx(eager_reading.values[state], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_layers_that_are_compiled_one_by_one_share_their_graphs():
    graphs = []
    for num_layers in (4, 10):
        torch._dynamo.reset()
        model, counter = make_bert(num_hidden_layers=num_layers).float(), CompileCounterWithBackend("aot_eager")
        monitor = istar.Monitor(model, every=2)
        for layer in model.bert.encoder.layer:
            layer.compile(backend=counter)
        train(model, monitor, list(make_batches(STEPS)))
        assert len(monitor.readings) == 3
        assert list(monitor.readings[0].values)[-1] == f"layer_{num_layers}"
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] <= 3


@pytest.mark.slow
def test_the_first_call_may_be_of_a_step_that_is_not_due():
    model = make_bert().float()
    monitor = istar.Monitor(model, every=2)
    monitor.load_state_dict({"step": 1, "readings": []})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(model, monitor, list(make_batches(3)), compiled)
    assert [reading.step for reading in monitor.readings] == [2]


def test_a_model_that_was_compiled_and_called_before_is_compiled_anew():
    model = make_bert().float()
    compiled = torch.compile(model, backend="aot_eager")
    train(model, None, list(make_batches(1)), compiled)
    monitor = istar.Monitor(model, every=1)
    with no_warnings():
        train(model, monitor, list(make_batches(2)), compiled)
    assert [reading.step for reading in monitor.readings] == [0, 1]


def test_code_of_another_model_of_the_class_is_used_again_which_is_said_once():
    watched, other = make_bert().float(), make_bert().float()
    monitor = istar.Monitor(watched, every=1)
    train(other, None, list(make_batches(1)), torch.compile(other, backend="aot_eager"))
    compiled = torch.compile(watched, backend="aot_eager")
    with pytest.warns(UserWarning, match=r"nothing was read at step 0: .*compiled code of another model"):
        train(watched, monitor, list(make_batches(1)), compiled)
    with no_warnings():
        train(watched, monitor, list(make_batches(2)), compiled)
    assert monitor.readings == []


@pytest.mark.slow
def test_a_closed_monitor_leaves_an_operator_that_does_nothing():
    model = make_bert().float()
    monitor = istar.Monitor(model, every=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(model, monitor, list(make_batches(1)), compiled)
    monitor.close()
    train(model, monitor, list(make_batches(2)), compiled)
    assert len(monitor.readings) == 1


@pytest.mark.slow
def test_a_probe_of_a_compiled_model_runs_uncompiled():
    model, [batch] = make_bert().float(), list(make_batches(1))
    monitor = istar.Monitor(model, every=5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(model, monitor, list(make_batches(2)), compiled)
    reading = monitor.measure([batch])
    assert reading.source == "probe"
    assert reading.values["layer_1"]["points"] == batch["attention_mask"].sum()
