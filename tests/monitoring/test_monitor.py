"""What a monitor returns, says, saves and stops."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import istar
from istar.errors import UserError
from istar.monitoring.monitor import MAX_PASSES, Monitor
from tests.monitoring.builders import (
    count_hooks,
    make_batches,
    make_bert,
    no_warnings,
    read_naively,
    train,
)


def collapse(net: Any, share: float) -> None:
    """Move all outputs of a linear layer towards one point."""
    with torch.no_grad():
        net.weight.mul_(share)


def make_net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 6)


def run_step(net: Any, monitor: Monitor, number: int = 0) -> Any:
    net(torch.randn(40, 4, generator=torch.Generator().manual_seed(number))).sum().backward()
    return monitor.step()


def test_readings_come_at_every_nth_step():
    model = make_bert()
    with no_warnings():
        monitor = Monitor(model, every=3)
        train(model, monitor, list(make_batches(8)))
    assert [reading.step for reading in monitor.readings] == [0, 3, 6]
    assert monitor.count == 8


def test_the_table():
    model = make_bert()
    monitor = Monitor(model, every=2, measures=["inter_sim", "largest_activation"], gradients=True)
    train(model, monitor, list(make_batches(3)))
    table = monitor.table
    assert list(table) == ["step", "source", "state", "points", "sequences", "inter_sim", "largest_activation",
                           "gradient_norm", "inter_sim_error"]  # fmt: skip
    assert table["step"].tolist() == [0] * 4 + [2] * 4
    assert table["state"].tolist() == ["embeddings", "layer_1", "layer_2", "layer_3"] * 2
    assert table["points"].dtype == table["sequences"].dtype == int
    assert table.loc[5, "inter_sim"] == monitor.readings[1].values["layer_1"]["inter_sim"]
    table.loc[0, "inter_sim"] = 5
    assert monitor.table.loc[0, "inter_sim"] != 5
    assert Monitor(make_bert()).table.empty


def test_the_points_are_limited():
    model = make_bert()
    monitor = Monitor(model, points=10)
    train(model, monitor, list(make_batches(1)))
    assert {values["points"] for values in monitor.readings[0].values.values()} == {10}


def test_an_optimizer_counts_its_steps():
    model = make_bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, every=2, optimizer=optimizer)
    for number, batch in enumerate(make_batches(6)):
        model(**batch).loss.backward()
        if number % 2:  # two micro-batches a step
            optimizer.step()
    assert monitor.count == 3
    assert [reading.step for reading in monitor.readings] == [0, 2]
    monitor.close()
    optimizer.step()
    assert monitor.count == 3


def test_a_probe_is_measured_in_eval_mode_and_changes_nothing():
    model, batches = make_bert(hidden_dropout_prob=0.5).train(), list(make_batches(3))
    expected = read_naively(model.eval(), batches[0])
    model.train()
    monitor = Monitor(model, every=1)
    model(**batches[1]).loss.backward()
    weights, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    reading = monitor.measure(batches[:1])
    assert reading.source == "probe"
    for name, values in reading.values.items():
        assert values["inter_sim"] == pytest.approx(expected[name]["inter_sim"], rel=1e-6)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, gradients, (parameter.grad for parameter in model.parameters())))
    # The pass before the probe is still part of the reading of the training.
    training = monitor.step()
    assert training is not None
    assert training.values["layer_1"]["points"] == batches[1]["attention_mask"].sum()
    assert monitor.table["source"].unique().tolist() == ["probe", "training"]


def test_a_probe_between_readings_and_without_batches():
    model, [batch] = make_bert(), list(make_batches(1))
    monitor = Monitor(model, every=5)
    train(model, monitor, [batch, batch])
    num_hooks = count_hooks(model)
    assert monitor.measure([batch]).step == 2
    assert count_hooks(model) == num_hooks
    with pytest.raises(UserError, match=r"^the batches gave no points; expected at least one batch$"):
        monitor.measure([])


def test_a_resumed_training_has_the_readings_of_an_undisturbed_one():
    def start() -> tuple[Any, Monitor]:
        model = make_bert()
        return model, Monitor(model, every=2, points=20)

    batches = list(make_batches(7))
    model, undisturbed = start()
    train(model, undisturbed, batches)
    model, first = start()
    train(model, first, batches[:3])
    state, weights = json.loads(json.dumps(first.state_dict())), model.state_dict()
    model, resumed = start()
    model.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(model, resumed, batches[3:])
    pd.testing.assert_frame_equal(resumed.table, undisturbed.table, rtol=0, atol=0)


def test_an_alarm_of_a_collapse_warns_once_for_each_state(tmp_path):
    net = make_net()
    dump = tmp_path / "points.safetensors"
    alarm = istar.Alarm("inter_sim", above=0.99, readings=2)
    monitor = Monitor(net, every=1, modules=[net], alarms=[alarm], dump=dump)
    run_step(net, monitor)
    collapse(net, 1e-3)
    with no_warnings():
        run_step(net, monitor)
    assert not dump.exists()
    with pytest.warns(UserWarning, match=r"^step 2: .* may have collapsed: inter_sim was .*its points are in"):
        run_step(net, monitor, 7)
    with no_warnings():
        run_step(net, monitor)
    measured = istar.measure(dump).table
    assert float(measured["inter_sim"].iloc[0]) == pytest.approx(
        next(iter(monitor.readings[2].values.values()))["inter_sim"], rel=1e-5
    )


def test_a_stop_raises_after_the_reading_is_kept():
    net = make_net()
    alarm = istar.Alarm("inter_sim", above=0.99, readings=1, action="stop")
    monitor = Monitor(net, every=1, modules=[net], alarms=[alarm])
    collapse(net, 1e-3)
    with pytest.raises(istar.Collapse, match=r"step 0: .* may have collapsed"):
        run_step(net, monitor)
    assert (monitor.count, len(monitor.readings)) == (1, 1)
    # The user may go on.
    assert run_step(net, monitor) is not None


def test_an_action_is_called_with_the_message():
    net, messages = make_net(), []
    alarm = istar.Alarm("inter_sim", above=0.99, readings=1, action=messages.append)
    monitor = Monitor(net, every=1, modules=[net], alarms=[alarm])
    collapse(net, 1e-3)
    with no_warnings():
        run_step(net, monitor)
    assert len(messages) == 1


def test_a_resumed_alarm_does_not_go_off_again():
    net, messages = make_net(), []
    alarm = istar.Alarm("inter_sim", above=0.99, readings=2, action=messages.append)
    monitor = Monitor(net, every=1, modules=[net], alarms=[alarm])
    collapse(net, 1e-3)
    run_step(net, monitor)
    state = monitor.state_dict()
    monitor.close()
    for number_before, number_after in ((1, 1), (2, 0)):
        messages.clear()
        resumed = Monitor(net, every=1, modules=[net], alarms=[alarm])
        resumed.load_state_dict(state)
        run_step(net, resumed)
        assert len(messages) == number_after
        state = resumed.state_dict()
        resumed.close()
        assert len(state["readings"]) == number_before + 1


def test_nan_states_set_off_the_default_alarms():
    model, batches = make_bert(), list(make_batches(4))
    monitor = Monitor(model, every=1)
    train(model, monitor, batches[:1])
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.weight.fill_(torch.nan)
    for batch in batches[1:]:
        model(**batch).loss.backward()
        if monitor.count < 3:
            monitor.step()
    with pytest.warns(UserWarning, match="may have collapsed") as caught:
        monitor.step()
    first, second = (str(warning.message) for warning in caught)
    assert "layer_3 may have collapsed: inter_sim was nan, nan, nan" in first
    assert "layer_2 may have collapsed: participation_ratio was nan, nan, nan" in second
    assert ", and so may layer_3" in second


def test_a_second_monitor_closes_the_first():
    model, [batch] = make_bert(), list(make_batches(1))
    first = Monitor(model)
    num_hooks = count_hooks(model)
    with pytest.warns(UserWarning, match="the model had another Monitor, which is closed now"):
        second = Monitor(model)
    assert count_hooks(model) == num_hooks
    assert first.is_closed
    model(**batch).loss.backward()
    assert first.step() is None
    assert second.step() is not None


def test_a_closed_monitor_leaves_no_hook():
    model = make_bert()
    num_hooks = count_hooks(model)
    with Monitor(model) as monitor:
        assert count_hooks(model) > num_hooks
    assert count_hooks(model) == num_hooks
    assert monitor.is_closed


def test_a_model_that_is_not_called_is_said_once():
    monitor = Monitor(make_bert(), every=1)
    with pytest.warns(UserWarning, match=r"^nothing was read at step 0: the model was not called with gradients"):
        assert monitor.step() is None
    with no_warnings():
        assert monitor.step() is None


def test_a_forgotten_step_is_said_once():
    net = make_net()
    Monitor(net, modules=[net])
    points = torch.randn(2, 4)
    for _ in range(MAX_PASSES):
        net(points)
    with pytest.warns(UserWarning, match=rf"^the model was called {MAX_PASSES} times without a step\(\): call monitor"):
        net(points)
    with no_warnings():
        net(points)


def test_an_error_in_a_hook_warns_and_does_not_stop_the_training():
    convolution = nn.Conv2d(1, 2, 3)
    monitor = Monitor(convolution, every=1, modules=[convolution])
    message = r"^the passes of step 0 were not read: .* has shape \(2, 2, 3, 3\); expected \(batch, d\)"
    for number in range(2):
        convolution(torch.randn(2, 1, 5, 5)).sum().backward()
        if number == 0:
            with pytest.warns(UserWarning, match=message):
                assert monitor.step() is None
        else:
            with no_warnings():
                assert monitor.step() is None


def test_files(tmp_path: Path):
    model = make_bert()
    monitor = Monitor(model, every=2)
    train(model, monitor, list(make_batches(3)))
    path = tmp_path / "monitor.csv"
    monitor.save(path)
    table = pd.read_csv(path)
    assert list(table)[:6] == ["model", "revision", "step", "weights", "source", "layer"]
    assert table["revision"].unique().tolist() == ["step0", "step2"]
    assert table["inter_sim"].tolist() == pytest.approx(monitor.table["inter_sim"].tolist(), rel=1e-9)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"monitor\.csv cannot be written"):
        monitor.save(path / "monitor.csv")
    assert path.read_bytes() == before


def test_figures():
    model = make_bert()
    monitor = Monitor(model, every=1)
    with pytest.raises(UserError, match="there is no reading yet"):
        monitor.plot()
    train(model, monitor, list(make_batches(3)))
    figure = monitor.plot("participation_ratio", "inter_sim")
    assert len(figure.axes) == 2
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=r"^effective_rank was not read"):
        monitor.plot("effective_rank")


def test_the_keys_of_a_log():
    model = make_bert()
    monitor = Monitor(model)
    train(model, monitor, list(make_batches(1)))
    flat = monitor.readings[0].flatten()
    assert flat["geometry/layer_1/inter_sim"] == monitor.readings[0].values["layer_1"]["inter_sim"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"points": 1}, "points=1"),
        ({"measures": ["intersim"]}, "measure=intersim"),
        ({"measures": ["inter_sim"], "alarms": [istar.Alarm("isoscore", below=0.1)]}, "an alarm needs isoscore, which"),
        ({"modules": ["bert.nothing"]}, "no module of BertForSequenceClassification is named bert.nothing"),
    ],
)
def test_bad_options_are_refused(options, message):
    model = make_bert()
    num_hooks = count_hooks(model)
    with pytest.raises(UserError, match=f"^{message}"):
        Monitor(model, **options)
    assert count_hooks(model) == num_hooks
