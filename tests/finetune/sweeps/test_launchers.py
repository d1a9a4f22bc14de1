"""Sweeps through Hydra's launchers for joblib and Ray, and one search by two commands."""

import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext
from omegaconf import DictConfig

from hydra_plugins.istar_sweeper import IstarSweeper
from istar.cli import train
from istar.errors import UserError
from istar.finetune.config import Config
from istar.finetune.execute import extras
from istar.finetune.execute.identify import identify
from istar.finetune.sweeps.live_table import read_state
from istar.finetune.training.pruning import open_storage
from istar.runs.record import RunRecord, read_result
from tests.finetune.sweeps.conftest import CONF, TINY, Call
from tests.finetune.sweeps.test_queue import write_run
from tests.jobs import Start, at_once
from tests.waiting import until

JOBLIB, RAY = "hydra_plugins.hydra_joblib_launcher", "hydra_plugins.hydra_ray_launcher"
RAY_ON_CPUS = ("hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2", "hydra.launcher.ray.remote.num_gpus=0")

INTERPRETER = ("-B",)
"""Arguments of a new interpreter: the workers of joblib end with it, but not with a fork of `multiprocessing`."""

RAY_ENVIRONMENT: dict[str, Any] = {"python": INTERPRETER, "RAY_TMPDIR": tempfile.gettempdir()}
"""Arguments of `start` for Ray, whose sockets need a short path."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Let launchers that execute runs in this process write results only; return the number of runs by seed.

    The first run with seed 3 fails.
    """
    count_by_seed: dict[int, int] = {}

    def execute(config: Config, num_processes: int, trial: str | None) -> RunRecord | UserError:
        count_by_seed[config.seed] = count_by_seed.get(config.seed, 0) + 1
        if config.seed == 3 and count_by_seed[3] == 1:
            return UserError("it broke")
        folder = identify(config).folder
        write_run(folder, config)
        return read_result(folder)

    monkeypatch.setattr(train, "run_launched_job", execute)
    return count_by_seed


def test_joblib_executes_a_grid(call: Call, executed: dict[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """A failed run is reported and is the only one that the same command executes again."""
    pytest.importorskip(JOBLIB)
    arguments = ("-m", "hydra/launcher=joblib", "seed=1,3", *TINY)
    assert call(*arguments) == 1
    assert re.search(r"1 of 2 runs failed; .*\n.*seed=3.*: it broke", capsys.readouterr().out)
    assert executed == {1: 1, 3: 1}
    assert call(*arguments) == 0
    assert executed == {1: 1, 3: 2}


def test_joblib_executes_a_search(call: Call, executed: dict[int, int]) -> None:
    pytest.importorskip(JOBLIB)
    arguments = ("-m", "hydra/launcher=joblib", "seed=1,2", "sweep.search=optuna", "sweep.trials=2", *TINY)
    assert call(*arguments) == 0
    assert executed == {1: 1, 2: 1}


@pytest.mark.parametrize(
    ("launcher", "module", "extra"), [("joblib", JOBLIB, "joblib"), ("ray", RAY, "ray"), ("ray_cluster", RAY, "ray")]
)
def test_a_launcher_that_is_not_installed(
    call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launcher: str, module: str,
    extra: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)
    assert call("-m", f"hydra/launcher={launcher}", "seed=1,2", *TINY) == 2
    assert capsys.readouterr().err == (
        f"error: hydra/launcher={launcher} needs {module}; pip install 'istar[{extra}]'\n"
    )


def closed_port() -> int:
    """Return the number of a port at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("hydra/launcher=ray", r"num_gpus=1: this machine has 0 GPUs; hydra\.launcher\.ray\.remote\.num_gpus=0 uses"),
        ("hydra/launcher=ray trainer.devices=auto", r"num_gpus=auto is not a number; set it, or trainer\.devices"),
        ("hydra/launcher=ray_cluster", r"run\.root=runs: the nodes of a Ray cluster need an absolute path"),
        ("hydra/launcher=ray_cluster run.root={0} hydra.launcher.ray.init.address=ray://127.0.0.1:{1}",
            r"no Ray can be reached at ray://127\.0\.0\.1:\d+ \(.*refused\); no run has started"),
        ("hydra/launcher=ray_cluster run.root={0}", r"no Ray can be reached at 127\.0\.0\.1:\d+ "),
    ],
)  # fmt: skip
def test_a_ray_that_could_not_execute_the_runs_is_refused(
    make_sweeper: Callable[..., IstarSweeper], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(extras, "require", lambda feature, extra: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    port = closed_port()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(UserError, match=message) as error:
        make_sweeper(*arguments.format(tmp_path, port).split(), *TINY)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_joblib_starts_runs_of_two_processes(tmp_path: Path, start: Start) -> None:
    pytest.importorskip(JOBLIB)
    arguments = ("sweep.jobs=2", "seed=1,2", *TINY, "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    done = start(tmp_path, "-m", "hydra/launcher=joblib", *arguments, python=INTERPRETER).wait()
    assert done.code == 0, done
    assert read_statuses(tmp_path) == ["finished"] * 2


def read_statuses(folder: Path) -> list[str]:
    """Return the statuses of the runs of the only sweep in `folder`."""
    [path] = folder.glob("runs/sweeps/*/sweep.json")
    return [entry.status for entry in read_state(path).entries]


@pytest.mark.slow
def test_ray_executes_a_grid_in_two_workers(tmp_path: Path, start: Start) -> None:
    """A failed run is reported; the same command executes neither of the finished runs again."""
    pytest.importorskip(RAY)
    arguments = ("-m", *RAY_ON_CPUS, "reg.layers=[7],last", *TINY)
    done = start(tmp_path, *arguments, **RAY_ENVIRONMENT).wait()
    assert done.code == 1, done
    assert "1 of 2 runs failed" in done.stdout
    assert done.stdout.count("layer 7 does not exist") == 2  # when it ends, and in the list at the end
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/demo-*/result.json")}
    finished = [path for path in times if read_result(path.parent).status == "finished"]
    assert len(finished) == 1
    assert start(tmp_path, *arguments, **RAY_ENVIRONMENT).wait().code == 1
    assert {path: path.stat().st_mtime_ns for path in finished} == {path: times[path] for path in finished}


def wait_for_the_other_job(config: DictConfig) -> str:
    """Return the GPUs of a job once as many jobs run as `task.limit_train` says."""
    folder = Path(config.run.root)
    (folder / str(config.seed)).touch()
    until(lambda: len(list(folder.iterdir())) >= config.task.limit_train)
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "gpus"), [(1, ["0", "1"]), (2, ["0,1"])])
def test_jobs_of_ray_have_gpus_of_their_own(tmp_path: Path, num_devices: int, gpus: list[str]) -> None:
    """Ray assigns GPUs by number, whether or not the machine has them."""
    ray = pytest.importorskip("ray")
    pytest.importorskip(RAY)
    jobs = [[f"seed={seed}", f"run.root={tmp_path}", f"task.limit_train={len(gpus)}"] for seed in range(len(gpus))]
    overrides = ["hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2", "hydra.launcher.ray.init.num_gpus=2",
                 f"trainer.devices={num_devices}"]  # fmt: skip
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides, return_hydra_config=True)
        sweeper = IstarSweeper()
        context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks(config))
        sweeper.setup(hydra_context=context, task_function=wait_for_the_other_job, config=config)
        launcher = sweeper.request([], "").launcher
        assert launcher is not None
        try:
            assert sorted(launcher(jobs)) == gpus
        finally:
            ray.shutdown()
            HydraConfig.instance().cfg = None


@pytest.mark.slow
def test_two_commands_share_a_search(tmp_path: Path, start: Start) -> None:
    """As on two machines: other working folders, the same `run.root`, and a storage in a file."""
    storage = f"journal://{tmp_path / 'search.log'}"
    arguments = ("-m", "sweep.search=optuna", "sweep.trials=4", f"sweep.storage={storage}", f"run.root={tmp_path}/runs",
                 "optim.lr=interval(1e-5,1e-3)", *TINY)  # fmt: skip
    commands = [start(tmp_path / folder, *arguments) for folder in ("first", "second")]
    for done in at_once(*(command.wait for command in commands)):
        assert done.code == 0, done
        assert "not done" not in done.stdout
    assert read_statuses(tmp_path) == ["finished"] * 4
    file = open_storage(storage)
    [name] = optuna.get_all_study_names(file)
    trials = optuna.load_study(study_name=name, storage=file).trials
    complete: list[Any] = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert len({trial.user_attrs["run"] for trial in complete}) == len(complete) == 4
    assert len({trial.user_attrs["worker"] for trial in complete}) == 2
