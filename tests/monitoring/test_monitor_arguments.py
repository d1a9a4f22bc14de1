"""Arguments of a monitor that are refused, and what does not stop a training."""

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from istar.errors import UserError
from istar.monitoring.alarms import Alarm
from istar.monitoring.monitor import Monitor
from tests.monitoring.builders import count_hooks


class SkippingNet(nn.Module):
    """Leaves out its second layer every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.num_calls = nn.Linear(4, 6), nn.Linear(6, 6), 0
        self.parts = nn.ModuleList([self.first, self.second])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        state = self.first(inputs)
        self.num_calls += 1
        return self.second(state) if self.num_calls % 2 else state


ALARM = Alarm("inter_sim", above=-1.1, readings=1, states=("second", "third"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measures": "inter_sim"}, r"measures is a str; expected a list, even of one: measures=\[...\]"),
        ({"modules": "first"}, r"modules is a str; expected a list"),
        ({"alarms": ALARM}, r"alarms is a Alarm; expected a list"),
        (
            {"alarms": [ALARM]},
            "the alarm of inter_sim names the state third; expected one of first, second",
        ),
        ({"alarms": ["inter_sim"]}, r"alarms has a str; expected istar\.Alarm\(\.\.\.\)$"),
        ({"every": 2.5}, "every=2.5 is not a whole number; expected 1 or more$"),
        ({"every": "5"}, "every='5' is not a whole number; expected 1 or more$"),
        ({"every": ["first"]}, r"every=\['first'\] is not a whole number"),
        ({"points": 1e3}, "points=1000.0 is not a whole number; expected 2 or more$"),
        ({"optimizer": "adam"}, r"optimizer is a str; expected a torch\.optim\.Optimizer$"),
        (
            {"dump": "points.pt"},
            r"dump=points\.pt; expected a file with the ending \.safetensors, which istar\.measure",
        ),
        (
            {"modules": ["parts"]},
            r'a ModuleList is not called and has no outputs; name its modules, such as "parts\.\*"',
        ),
    ],
)
def test_bad_arguments_are_refused_and_leave_no_hooks(arguments: dict[str, Any], message: str) -> None:
    net = SkippingNet()
    with pytest.raises(UserError, match=f"^{message}"):
        Monitor(net, **({"modules": ["first", "second"]} | arguments))
    assert count_hooks(net) == 0


def test_an_alarm_of_a_state_that_a_step_left_out_does_not_stop_the_training() -> None:
    net, messages = SkippingNet(), []
    alarm = Alarm("inter_sim", above=-1.1, readings=1, states=("second",), action=messages.append)
    with Monitor(net, every=1, modules=["first", "second"], alarms=[alarm]) as monitor:
        for num_states in (2, 1, 2):
            net(torch.randn(20, 4)).sum().backward()
            reading = monitor.step()
            assert reading is not None
            assert len(reading.values) == num_states
    assert len(messages) == 1


def test_a_function_is_refused_as_a_model() -> None:
    with pytest.raises(UserError, match=r"^the model is a function; expected a torch\.nn\.Module$"):
        Monitor(lambda inputs: inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("batches", [{"inputs": torch.ones(3, 4)}, torch.ones(3, 4)])
def test_a_batch_in_place_of_batches_is_refused(batches: Any) -> None:
    with Monitor(SkippingNet(), modules=["first"]) as monitor:
        with pytest.raises(UserError, match=r"^batches is a .*; expected a list, even of one: measure\(\[batch\]\)$"):
            monitor.measure(batches)
        assert monitor.measure([torch.ones(3, 4)]).values["first"]["points"] == 3


def test_a_list_of_measures_is_refused_in_a_plot() -> None:
    with Monitor(SkippingNet(), modules=["first"]) as monitor:
        monitor.measure([torch.randn(9, 4)])
        with pytest.raises(
            UserError, match=r"^\['inter_sim'\] is a list; expected names: plot\(\"inter_sim\", \.\.\.\)$"
        ):
            monitor.plot(["inter_sim"])  # type: ignore[arg-type]


def test_a_foreign_state_is_refused() -> None:
    with (
        Monitor(SkippingNet(), modules=["first"]) as monitor,
        pytest.raises(
            UserError, match=r"^the state has no readings of a monitor; expected what state_dict\(\) returned$"
        ),
    ):
        monitor.load_state_dict({"model": {}})


def test_an_output_of_integers_is_named() -> None:
    net = nn.Sequential(nn.Identity(), nn.Embedding(5, 4))
    with Monitor(net, every=1, modules=["0", "1"]) as monitor:
        net(torch.arange(5)).sum().backward()
        with pytest.warns(UserWarning, match=r"0 returns a tensor of torch\.int64; expected a floating tensor"):
            monitor.step()


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    file, folder, pipe = tmp_path / "file", tmp_path / "folder.csv", tmp_path / "pipe.csv"
    folder.mkdir()
    file.write_text("kept")
    os.mkfifo(pipe)
    with Monitor(SkippingNet(), modules=["first"]) as monitor:
        for path, reason in ((folder, "Is a directory"), (file / "a.csv", "exists|directory"), (pipe, "is a pipe")):
            message = rf"^the readings were not written: {re.escape(str(tmp_path))}[^\n]*({reason})[^\n]*$"
            with pytest.raises(UserError, match=message):
                monitor.save(path)
        for name in ("monitor", "monitor.png", ""):
            with pytest.raises(
                UserError, match=rf"^{name or '.'} has not the ending \.csv, by which istar\.load knows"
            ):
                monitor.save(name)
    assert file.read_text() == "kept"
    assert pipe.is_fifo()


def test_named_modules_that_are_not_called_are_said_once() -> None:
    net = nn.ModuleDict({"used": nn.Linear(4, 6), "unused": nn.Linear(4, 6), "spare": nn.Linear(4, 6)})
    net.forward = lambda inputs: net["used"](inputs)
    with Monitor(net, every=1, modules=["used", "unused", "spare"]) as monitor:
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                net(torch.randn(20, 4)).sum().backward()
                monitor.step()
            messages = [str(warning.message) for warning in caught]
            assert messages == (["unused, spare: not called in step 0, so not in its reading"] * (monitor.count == 1))
