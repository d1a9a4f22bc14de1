"""A sweep does what Hydra itself does with `-m`, or refuses it with a message of one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hydra.experimental.callback import Callback

from hydra_plugins.istar_sweeper import IstarSweeper
from istar.finetune.config import schema
from istar.finetune.sweeps import sweep, trials
from istar.finetune.sweeps.planned_runs import SweepRequest
from tests.finetune.sweeps.conftest import TINY, Call


class MultirunCallback(Callback):
    """Records the methods that Hydra calls."""

    calls: ClassVar[list[str]] = []

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        self.calls.append("start")

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        self.calls.append("end")


class JobCallback(Callback):
    def on_job_end(self, config: Any, **kwargs: Any) -> None:
        raise AssertionError


@pytest.fixture
def make_request(
    make_sweeper: Callable[..., IstarSweeper], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SweepRequest]:
    """Return a function from command-line arguments to the `SweepRequest` that the sweeper makes of them."""

    def record_request(*arguments: str) -> SweepRequest:
        requests: list[SweepRequest] = []
        monkeypatch.setattr(sweep, "run_sweep", lambda request, console: requests.append(request) or 0)
        make_sweeper(*(text for text in arguments if "," not in text and "glob" not in text)).sweep(list(arguments))
        return requests[0]

    return record_request


def test_values_of_hydra_are_those_of_the_run(make_request: Callable[..., SweepRequest]) -> None:
    arguments = (
        "task.data_dir=${hydra:runtime.cwd}/a,${hydra:runtime.cwd}/b", "model.name=${hydra:runtime.choices.reg}",
        "run.root=${hydra:runtime.cwd}/runs", "reg=none,cosreg",
    )  # fmt: skip
    request = make_request(*arguments)
    assert request.root == Path.cwd() / "runs"
    [space] = trials.make_search_spaces(request.arguments, {}, {}, [], request.config_loader).values()
    first, *_, last = trials.list_combinations(space)
    configs = [schema.load(request.compose(overrides)) for overrides in (first, last)]
    assert [(config.run.root, config.task.data_dir, config.model.name) for config in configs] == [
        (f"{Path.cwd()}/runs", f"{Path.cwd()}/a", "none"),
        (f"{Path.cwd()}/runs", f"{Path.cwd()}/b", "cosreg"),
    ]


def test_glob_chooses_options(shared_sweeper: IstarSweeper) -> None:
    request = shared_sweeper.request(["reg=glob(istar*)"], "")
    [space] = trials.make_search_spaces(request.arguments, {}, {}, [], request.config_loader).values()
    assert sorted(space["reg"].sweep_string_iterator()) == ["istar", "istar_paper_code", "istar_scratch"]


def test_the_environment_of_the_runs(make_request: Callable[..., SweepRequest], shared_sweeper: IstarSweeper) -> None:
    request = make_request("+hydra.job.env_set.FIRST=a b", "+hydra.job.env_set.SECOND=2", "seed=1,2")
    assert request.environment == {"FIRST": "a b", "SECOND": "2"}
    assert shared_sweeper.request(["seed=1,2"], "").environment == {}


def test_callbacks_of_the_sweep(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultirunCallback, "calls", [])
    target = f"+hydra.callbacks.ours._target_={__name__}.MultirunCallback"
    assert call("-m", "seed=1", "--dry-run", target, *TINY) == 0
    assert MultirunCallback.calls == ["start", "end"]


@pytest.mark.parametrize(
    ("target", "message"),
    [(f"{__name__}.JobCallback", "error: hydra.callbacks: JobCallback.on_job_end "), ("nowhere.Nothing", "error: ")],
)
def test_refused_callbacks(call: Call, capsys: pytest.CaptureFixture[str], target: str, message: str) -> None:
    assert call("-m", "seed=1", "--dry-run", f"+hydra.callbacks.ours._target_={target}", *TINY) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
    assert target.split(".")[-2] in line or "JobCallback" in line


@pytest.mark.parametrize("mode", [(), ("-m",)])
@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir", "++hydra.sweep.subdir"])
def test_folders_of_hydra_are_refused(call: Call, capsys: pytest.CaptureFixture[str], mode: Any, key: str) -> None:
    assert call(*mode, "seed=1", f"{key}=elsewhere", "--dry-run") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {key.lstrip('+')} ")
    assert "run.root=<folder>" in line
    assert list(Path.cwd().iterdir()) == []
