"""Several processes and signals as a user meets them: train.py is called, interrupted, and called again.

Starting a process takes seconds, so one run is interrupted several times.
"""

import csv
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from safetensors.torch import load_file
from torch.testing import assert_close

from istar.errors import LockedError, StoppedError, UserError
from istar.finetune.config import TrainerConfig, schema
from istar.finetune.execute.run import run
from istar.finetune.processes import child, launch, ranks
from istar.finetune.training.data import FineTuningData
from istar.finetune.training.module import FineTuner
from istar.finetune.training.refresh import ShrinkageCovariance
from istar.finetune.training.signals import preserve_signal_handlers
from istar.runs.record import RESULT, read_result
from tests.finetune.execute.artifacts import Build, place
from tests.jobs import NOT_THE_TESTS, Done, Job, starting
from tests.outcomes import assert_same, only_run
from tests.waiting import SECONDS

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")

LONG = ("reg.num_points=500", "task.limit_train=100", "task.limit_validation=9", "data.batch_size=2",
        "trainer.max_epochs=2", "trainer.accumulate_grad_batches=1", "trainer.checkpoint_every_n_steps=5",
        "trainer.accelerator=cpu", "trainer.progress_bar=false")  # fmt: skip
"""A run of a hundred steps, long enough for a signal to reach it after its first checkpoints."""
TWO_PROCESSES = ("trainer=ddp", "trainer.devices=2", "seed=1", *LONG)
TWO_NODES = ("trainer=ddp", "trainer.devices=1", "trainer.num_nodes=2", "seed=1", *LONG)


def free_port() -> str:
    """Return the number of a free port."""
    with socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def make_srun_variables(rank: int, port: str) -> dict[str, str]:
    """Return the variables that `srun --nodes=2 --ntasks-per-node=1` sets, and those of the job around it."""
    return {
        "SLURM_JOB_ID": "123456", "SLURM_JOB_NAME": "istar", "SLURM_NODELIST": "127.0.0.1", "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "MASTER_PORT": port,
    }  # fmt: skip


SBATCH_VARIABLES = {
    "SLURM_JOB_ID": "123456", "SLURM_JOB_NAME": "istar", "SLURM_NODELIST": "127.0.0.1", "SLURM_NNODES": "1",
    "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip
"""The variables of the only process of a script under `sbatch --ntasks=2`, without srun."""


@pytest.fixture(scope="module")
def single_process_run(composed: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in this process that was never interrupted."""
    config = composed("seed=1", *LONG, f"run.root={tmp_path_factory.mktemp('alone')}")
    return place(config, run(config))


@pytest.fixture(scope="module")
def two_process_run(own_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in two processes that was never interrupted."""
    folder = tmp_path_factory.mktemp("pair")
    with starting(own_cache) as start:
        job = start(folder, *TWO_PROCESSES)
        job.wait().well()
        job.until_it_is_gone()
        return only_run(folder / "runs")


def assert_stopped(done: Done, signal_number: int, message: str = r"saved at step \d+") -> None:
    """Assert that a call was stopped by this signal, with its exit code and one line on stderr."""
    stop = "interrupted" if signal_number == signal.SIGINT else f"stopped by {signal.Signals(signal_number).name}"
    assert done.code == 128 + signal_number, done
    assert re.fullmatch(f"{stop}: {message}; run the same command to resume", done.line())


# ---- ways to start


def test_two_processes(tmp_path, start):
    done = start(tmp_path, *TWO_PROCESSES, "task.limit_train=12", "reg.num_points=50", "run.isotropy_zeta=null").wait()
    folder = only_run(tmp_path / "runs")
    record = read_result(folder)
    assert record.status == "finished"
    assert record.data["validation"] == {"validation": 9}
    assert len((folder / "predictions.jsonl").read_text().splitlines()) == 9
    assert done.well().stdout.count("IsoScore of ") == 1


@pytest.mark.slow
def test_a_multirun_of_two_processes_each(tmp_path, start, two_process_run):
    arguments = [argument for argument in TWO_PROCESSES if not argument.startswith("seed=")]
    done = start(tmp_path, "-m", "seed=1,2", *arguments).wait().well()
    runs = {read_result(path).config["seed"]: path for path in (tmp_path / "runs").glob("demo-*")}
    assert sorted(runs) == [1, 2]
    assert_same(runs[1], two_process_run)
    assert read_result(runs[2]).status == "finished"
    assert read_result(runs[2]).metrics != read_result(runs[1]).metrics
    [sweep] = (tmp_path / "runs" / "sweeps").glob("[!.]*")
    figures = {f"comparison-{name}.{suffix}" for name in ("metric", "isoscore") for suffix in ("png", "svg")}
    assert {path.name for path in sweep.glob("comparison*")} == {"comparison.md", *figures}
    assert "comparison-metric.png" in done.stdout


def torchrun_arguments() -> tuple[str, ...]:
    """Return the arguments of Python that start two processes of a script by torchrun."""
    port = f"--master-port={free_port()}"
    return "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", port


@pytest.mark.slow
def test_what_torchrun_starts(tmp_path, start, two_process_run):
    """Two processes with torchrun's variables, without its agent, which starts and watches them."""
    variables = {
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False", "WORLD_SIZE": "2", "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
    }  # fmt: skip
    jobs = [start(tmp_path, *TWO_PROCESSES, **variables, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    for job in jobs:
        job.wait().well()
    assert_same(only_run(tmp_path / "runs"), two_process_run)


@pytest.mark.slow
def test_torchrun_is_refused(tmp_path, start):
    cases = {
        "-m starts the processes of its runs by itself": ("-m", *TWO_PROCESSES),
        "2 processes have been started, but trainer.devices=1 on trainer.num_nodes=1 are 1": LONG,
    }
    jobs = [start(tmp_path, *arguments, python=torchrun_arguments()) for arguments in cases.values()]
    for job, message in zip(jobs, cases, strict=True):
        done = job.wait()
        assert done.code != 0
        # torchrun itself prints further lines.
        [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert message in line
    assert not list(tmp_path.glob("runs/demo-*"))


@pytest.mark.slow
def test_srun(tmp_path, start, two_process_run):
    port = free_port()
    jobs = [start(tmp_path, *TWO_NODES, **make_srun_variables(rank, port)) for rank in range(2)]
    for job in jobs:
        job.wait().well()
    assert_same(only_run(tmp_path / "runs"), two_process_run, but_for_the_name=True)


@pytest.mark.slow
def test_nodes_by_hand(tmp_path, start, two_process_run):
    port = free_port()
    jobs = [start(tmp_path, *TWO_NODES, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK=str(i)) for i in range(2)]
    for job in jobs:
        job.wait().well()
    assert_same(only_run(tmp_path / "runs"), two_process_run, but_for_the_name=True)


@pytest.mark.slow
def test_nodes_that_cannot_meet(tmp_path, start):
    done = start(tmp_path, *TWO_NODES).wait()
    assert done.code == 2
    assert "trainer.num_nodes=2 needs MASTER_ADDR, MASTER_PORT, NODE_RANK in the environment" in done.line()


@pytest.mark.parametrize(
    ("environment", "devices", "expected_processes", "expected_tasks"),
    [
        pytest.param(SBATCH_VARIABLES, 2, 2, None, id="sbatch"),
        pytest.param({**SBATCH_VARIABLES, "SLURM_STEP_NUM_TASKS": "1"}, 2, 2, None, id="srun --ntasks=1"),
        pytest.param(make_srun_variables(0, "1"), 1, 1, "2", id="srun"),
        pytest.param({**make_srun_variables(0, "1"), "SLURM_NTASKS": "8"}, 1, 1, "2", id="srun --preserve-env"),
        pytest.param({**make_srun_variables(0, "1"), "SLURM_JOB_NAME": "interactive"}, 1, 1, "2", id="salloc, srun"),
    ],
)
def test_lightning_sees_srun_where_it_is(monkeypatch, environment, devices, expected_processes, expected_tasks):
    for name in [name for name in os.environ if NOT_THE_TESTS.match(name)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ranks.fix_slurm_detection()
    nodes = int(expected_tasks or 1) // expected_processes
    assert (
        ranks.processes_to_start(TrainerConfig(devices=devices, num_nodes=nodes, strategy="ddp")) == expected_processes
    )
    assert SLURMEnvironment.detect() == ranks.has_external_launcher() == (expected_tasks is not None)
    assert os.environ.get("SLURM_NTASKS") == expected_tasks


def test_a_lock_is_told_from_other_errors(composed):
    """A lock is recognized by the exit code, whatever the message."""

    class EndedProcess:
        def __init__(self, code, arguments, environment, log):
            self.exit_code = code
            if code == LockedError.exit_code:
                error = {"message": "busy", "code": code, "trace": ""}
                (Path(arguments[1]) / "error-0.json").write_text(json.dumps(error))

        def poll(self):
            return self.exit_code

        def send_signal(self, number):
            assert number == signal.SIGKILL

        wait = poll

    errors = []
    for code in (LockedError.exit_code, 1):
        processes = launch.RunProcesses(composed(), 1, spawn=partial(EndedProcess, code))
        assert processes.has_ended()
        with pytest.raises(UserError) as error:
            processes.read_record([])
        errors.append(error.value)
    assert [type(error) for error in errors] == [LockedError, UserError]
    # Errors must survive pickling, by which a launcher's job returns them.
    unpickled = pickle.loads(pickle.dumps(errors[0]))
    assert (type(unpickled), str(unpickled), unpickled.exit_code) == (LockedError, "busy", LockedError.exit_code)


# ---- other numbers of processes

# SGD without dropout: other numbers of processes can only round otherwise.
PLAIN = ("task=demo_sentence", "model=small_encoder", "model.vocab_size=300", "model.config.hidden_size=32",
         "model.config.intermediate_size=64", "+model.config.hidden_dropout_prob=0",
         "+model.config.attention_probs_dropout_prob=0", "reg=istar", "optim=sgd", "optim.lr=0.1",
         "run.isotropy_zeta=null", *LONG, "reg.num_points=100000")  # fmt: skip
GLOBAL_BATCH = 8


def divide_batch(num_processes: int, strategy: str = "ddp") -> tuple[str, ...]:
    """Return overrides that divide each batch of 8 examples among processes."""
    strategies = () if num_processes == 1 else (f"trainer.strategy={strategy}",)
    return (f"trainer.devices={num_processes}", *strategies, f"data.batch_size={GLOBAL_BATCH // num_processes}")


@pytest.fixture(scope="module")
def plain_run(composed: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of `PLAIN` in one process that was never interrupted."""
    config = composed(*PLAIN, *divide_batch(1), f"run.root={tmp_path_factory.mktemp('plain')}")
    return place(config, run(config))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "ddp"), (1, "ddp")),
        pytest.param((1, "ddp"), (4, "ddp"), marks=pytest.mark.slow),
        pytest.param((2, "fsdp"), (4, "fsdp"), marks=pytest.mark.slow),
        pytest.param((4, "fsdp"), (1, "ddp"), marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_with_another_number_of_processes(tmp_path, start, plain_run, first, second):
    stopped = start(tmp_path, *PLAIN, *divide_batch(*first)).until_it_trains().send(signal.SIGTERM).wait()
    assert_stopped(stopped, signal.SIGTERM)
    step = int(re.search(r"saved at step (\d+)", stopped.line())[1])
    done = start(tmp_path, *PLAIN, *divide_batch(*second)).wait()
    assert done.code == 0
    folder = only_run(tmp_path / "runs")
    assert folder.name == plain_run.name
    rows, expected_rows = (read_metrics(path) for path in (folder, plain_run))
    assert [row["step"] for row in rows] == [row["step"] for row in expected_rows]
    assert 0 < step < int(rows[-1]["step"])
    losses, expected_losses = (
        [float(row["train/loss"]) for row in each if row["train/loss"]] for each in (rows, expected_rows)
    )
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    weights, expected_weights = (load_file(path / "model" / "model.safetensors") for path in (folder, plain_run))
    assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


def read_metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# ---- signals


@pytest.mark.slow
def test_a_stopped_run_is_saved_and_goes_on_exactly(tmp_path, start, composed, caplog):
    overrides = (*LONG, "task.limit_train=60", "run.isotropy_zeta=null")
    assert_stopped(start(tmp_path, *overrides).until_it_trains().send(signal.SIGINT).wait(), signal.SIGINT)
    resumed, undisturbed = (composed(*overrides, f"run.root={tmp_path / name}") for name in ("runs", "undisturbed"))
    run(resumed)
    assert "was interrupted; it resumes from step-" in caplog.text
    run(undisturbed)
    assert_same(only_run(tmp_path / "runs"), only_run(tmp_path / "undisturbed"))


@pytest.mark.slow
def test_a_stopped_sweep_within_sbatch(tmp_path, start, single_process_run):
    """The run is one process although the job has two tasks."""
    command = ("-m", "seed=1", *LONG)
    stopped = start(tmp_path, *command, **SBATCH_VARIABLES).until_it_trains().send(signal.SIGTERM).wait()
    assert (stopped.code, stopped.line()) == (143, "stopped by SIGTERM; run the same command to resume")
    assert re.search(r"seed 1: stopped by SIGTERM: saved at step \d+; run the same command to resume", stopped.stdout)
    start(tmp_path, *command, **SBATCH_VARIABLES).wait().well()
    logs = "".join(path.read_text() for path in tmp_path.glob("runs/sweeps/*/logs/*"))
    assert "was interrupted; it resumes from step-" in logs
    assert_same(only_run(tmp_path / "runs"), single_process_run)


@pytest.mark.parametrize(
    ("owner", "name", "reg"),
    [
        # Lightning handles signals a moment before the callbacks do, and would end the process with exit code 0.
        pytest.param(FineTuningData, "val_dataloader", "none", id="before the callbacks hear it"),
        pytest.param(FineTuner, "validation_step", "none", id="in the first validation"),
        pytest.param(ShrinkageCovariance, "refresh", "istar", id="in the first refresh of the shrinkage covariance"),
    ],
)
def test_a_signal_where_nothing_is_to_be_saved(small, monkeypatch, owner, name, reg):
    original_function, old_handler = getattr(owner, name), signal.signal(signal.SIGTERM, lambda *_: None)

    def send_signal(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original_function(*arguments)

    monkeypatch.setattr(owner, name, send_signal)
    try:
        with pytest.raises(StoppedError, match="stopped by SIGTERM: the last checkpoint is kept") as error:
            run(small(f"reg={reg}", "data.eval_batch_size=8"))
    finally:
        signal.signal(signal.SIGTERM, old_handler)
    assert error.value.exit_code == 143


def test_ctrl_c_before_the_callbacks_hear_it(small, monkeypatch):
    """Lightning turns it into an exit with code 1."""
    monkeypatch.setattr(FineTuner, "configure_model", lambda module: signal.raise_signal(signal.SIGINT))
    with preserve_signal_handlers():
        # A shell may have started the tests in the background, where SIGINT is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(StoppedError, match=r"^interrupted: the last checkpoint is kept; run") as error:
            run(small())
        assert error.value.exit_code == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_exit_of_a_library_in_the_process_of_a_run_is_told(small, tmp_path, monkeypatch):
    exit_codes: list[int] = []
    monkeypatch.setattr("istar.finetune.execute.run.run", lambda *arguments: sys.exit("no licence"))
    monkeypatch.setattr(child, "_terminate_with_parent", lambda is_parent_alive: None)
    monkeypatch.setattr(os, "_exit", exit_codes.append)
    (tmp_path / "config.yaml").write_text(schema.to_yaml(small()))
    with preserve_signal_handlers():
        child.execute_process([str(tmp_path / "config.yaml"), str(tmp_path)], lambda: True)
    assert exit_codes == [1]
    assert json.loads((tmp_path / "error-0.json").read_text())["message"] == "SystemExit: no licence"


def test_a_process_of_a_run_leaves_no_semaphore_where_processes_are_not_forked(small, tmp_path):
    (tmp_path / "config.yaml").write_text(schema.to_yaml(small("reg=none", f"data.cache_dir={tmp_path / 'cache'}")))
    code = (
        "import multiprocessing, sys; from istar.finetune.processes import child; "
        "multiprocessing.set_start_method('spawn'); child.execute_process(sys.argv[1:], lambda: True)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "config.yaml"), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stderr == ""


def lost_process_message(rank: int) -> str:
    """Return the line on stderr of a run of two processes, one of which was killed."""
    return f"error: process {rank} of 2 was killed by SIGKILL; the same command resumes from the last checkpoint"


def assert_lost_rank_ends_run(job: Job, rank: int) -> None:
    """Kill the process of a rank, and assert that the run ends with an error."""
    os.kill(job.until_it_trains().rank(rank), signal.SIGKILL)
    done = job.wait()
    assert done.code == 1
    assert done.line() == lost_process_message(rank)
    job.until_it_is_gone()


@pytest.mark.slow
def test_a_lost_process_a_stop_and_a_lost_parent(tmp_path, start, two_process_run):
    assert_lost_rank_ends_run(start(tmp_path, *TWO_PROCESSES), 1)
    job = start(tmp_path, *TWO_PROCESSES).until_it_trains().send(signal.SIGTERM)
    assert_stopped(job.wait(), signal.SIGTERM)
    job.until_it_is_gone()
    job = start(tmp_path, *TWO_PROCESSES).until_it_trains().send(signal.SIGKILL)
    job.wait()
    job.until_it_is_gone()
    record = only_run(tmp_path / "runs") / RESULT
    assert not record.exists() or read_result(record.parent).status != "finished"
    assert (
        "was interrupted; it resumes from step-"
        in start(tmp_path, *TWO_PROCESSES, **SBATCH_VARIABLES).wait().well().stderr
    )
    assert_same(only_run(tmp_path / "runs"), two_process_run)


@pytest.mark.slow
def test_the_first_process_lost_and_both_stopped(tmp_path, start, two_process_run):
    assert_lost_rank_ends_run(start(tmp_path, *TWO_PROCESSES), 0)
    job = start(tmp_path, *TWO_PROCESSES).until_it_trains().send(signal.SIGINT)
    assert_stopped(job.wait(), signal.SIGINT)
    job.until_it_is_gone()
    job = start(tmp_path, *TWO_PROCESSES).until_it_trains()
    os.kill(job.rank(1), signal.SIGTERM)
    assert_stopped(job.wait(), signal.SIGTERM)
    start(tmp_path, *TWO_PROCESSES).wait().well()
    assert_same(only_run(tmp_path / "runs"), two_process_run)


@pytest.mark.slow
def test_a_lost_process_and_a_stop_under_torchrun(tmp_path, start, two_process_run):
    for rank in (0, 1):
        job = start(tmp_path, *TWO_PROCESSES, python=torchrun_arguments())
        os.kill(job.until_it_trains().rank(rank), signal.SIGKILL)
        assert job.wait().code != 0
        job.until_it_is_gone()
    job = start(tmp_path, *TWO_PROCESSES, python=torchrun_arguments()).until_it_trains().send(signal.SIGTERM)
    done = job.wait()
    assert done.code != 0
    assert "stopped by SIGTERM: saved at step" in done.stderr
    job.until_it_is_gone()
    done = start(tmp_path, *TWO_PROCESSES, python=torchrun_arguments()).wait()
    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert_same(only_run(tmp_path / "runs"), two_process_run)


@pytest.mark.slow
def test_a_writer_is_not_disturbed(tmp_path, start):
    """The first of two simultaneous calls does not finish in the time that the second one waits."""
    arguments = (*LONG, "trainer.max_epochs=1000")
    first = start(tmp_path, *arguments).until_it_trains()
    second = start(tmp_path, *arguments).wait()
    assert second.code == LockedError.exit_code
    assert "is being written by another process" in second.line()
    assert_stopped(first.send(signal.SIGTERM).wait(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_stopped_by_slurm(tmp_path, start, two_process_run, number):
    """SLURM signals every process of a step; Lightning alone would requeue the job."""
    for is_resumed in (False, True):
        port = free_port()
        jobs = [start(tmp_path, *TWO_NODES, **make_srun_variables(rank, port)) for rank in range(2)]
        if not is_resumed:
            for job in jobs:
                job.until_it_trains()
            first, second = [job.wait() for job in [job.send(number) for job in jobs]]
            assert_stopped(first, number)
            assert (second.code, second.stderr) == (128 + number, "")
        else:
            for job in jobs:
                job.wait().well()
    assert_same(only_run(tmp_path / "runs"), two_process_run, but_for_the_name=True)


@pytest.mark.slow
def test_two_nodes_of_two_processes_are_one_of_four(tmp_path, start):
    overrides = ("trainer=ddp", "seed=1", *LONG)
    start(tmp_path / "one", *overrides, "trainer.devices=4").wait().well()
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    jobs = [
        start(
            tmp_path / "two", *overrides, "trainer.devices=2", "trainer.num_nodes=2", NODE_RANK=str(rank), **rendezvous
        )
        for rank in range(2)
    ]
    for job in jobs:
        job.wait().well()
    assert_same(only_run(tmp_path / "two" / "runs"), only_run(tmp_path / "one" / "runs"), but_for_the_name=True)
