"""Records of Weights & Biases, read from its own files; sweeps by its agent; the workspace. Nothing is uploaded."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from istar.finetune.config import Config
from istar.finetune.config.schema import to_dict
from istar.finetune.execute.run import run
from istar.runs.record import read_result
from istar.runs.tasks import TASKS
from tests.jobs import Fork
from tests.outcomes import only_run
from tests.waiting import SECONDS, until_the_next_second
from tests.wandb_records import config_of, logged_by, offline_records, start_of, summary_of

pytestmark = pytest.mark.slow

Build = Callable[..., Config]
SWEEP = Path("sweep") / "wandb" / "sweep.yml"


def list_run_folders(config: Config) -> list[Path]:
    """Return the folders of all runs below the config's root."""
    return sorted(path for path in Path(config.run.root).iterdir() if path.name != ".locks")


@pytest.fixture
def wandb(wandb_at: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return W&B's module in offline mode, without the user's settings."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    return wandb


# ---- a run


def test_what_a_run_is_found_by(small: Build, wandb: Any) -> None:
    config = small("logger=wandb", "reg=istar", "reg.lambda=0.5", "logger.group=first", "logger.tags=[paper,demo]")
    record = run(config)
    folder = only_run(Path(config.run.root))
    [records] = offline_records(folder)
    start = start_of(records)
    assert (start.run_group, start.job_type, start.display_name) == ("first", "istar", record.name)
    assert sorted(start.tags) == ["demo", "paper"]
    assert start.project == "istar"
    recorded_config = config_of(records)
    del recorded_config["_wandb"]
    assert recorded_config == to_dict(config)
    assert recorded_config["reg"]["lambda"] == 0.5


def test_the_summary_is_the_result_and_not_the_last_epoch(small: Build, wandb: Any) -> None:
    config = small("logger=wandb", "reg=none", "optim.lr=0.02", "trainer.max_epochs=4")
    record = run(config)
    best_epoch, last_epoch = record.headline["epoch"], record.epochs[-1]["epoch"]
    assert best_epoch < last_epoch
    [records] = offline_records(only_run(Path(config.run.root)))
    summary = summary_of(records)
    assert summary["headline/metric"] == "accuracy"
    assert summary["headline/value"] == summary["val/accuracy"] == record.headline["value"]
    assert summary["headline/epoch"] == best_epoch
    assert summary["val/loss"] == record.metrics["loss"] != pytest.approx(record.epochs[-1]["metrics"]["loss"])
    assert summary["constant/accuracy"] == record.baseline["accuracy"]
    assert summary["collapsed"] is any(record.collapsed.values())
    assert summary["status"] == "finished"
    before, after = record.isotropy["before"], record.isotropy["after"]
    assert summary["isotropy/isoscore"] == after["union"]
    assert summary["isotropy/layer_2/isoscore"] == after["2"]
    assert summary["before/isotropy/isoscore"] == before["union"]
    assert summary["before/isotropy/embeddings/isoscore"] == before["0"]
    assert summary["seconds/total"] == record.timing["total"]


def test_layers_are_logged_as_a_table_and_a_figure(small: Build, wandb: Any) -> None:
    config = small("logger=wandb", "reg=none")
    record = run(config)
    folder = only_run(Path(config.run.root))
    [records] = offline_records(folder)
    before, after = record.isotropy["before"], record.isotropy["after"]

    def read_table(name: str) -> dict[str, Any]:
        # W&B shortens the name and adds a hash.
        [path] = folder.glob(f"wandb/offline-run-*/files/media/table/isotropy/{name}_[0-9]*.table.json")
        return json.loads(path.read_text())

    rows = [[layer, before[layer], after[layer]] for layer in ("0", "1", "2", "union")]
    assert read_table("by_layer") == {"columns": ["layer", "before", "after"], "data": rows}
    expected = [[layer, name, scores[str(layer)]] for name, scores in (("before", before), ("after", after))
                for layer in (0, 1, 2)]  # fmt: skip
    assert sorted(map(str, read_table("figure_table")["data"])) == sorted(map(str, expected))
    rows = [record for record in records if record.HasField("history")]
    # W&B records a table as nested keys for its type, size and so on.
    keys = {item.nested_key[0] if item.nested_key else item.key for item in rows[-1].history.item}
    assert {"isotropy/by_layer", "isotropy/figure_table", "trainer/global_step"} <= keys


def test_runs_of_one_process_stay_apart(small: Build, wandb: Any) -> None:
    for seed in (1, 2):
        run(small("logger=wandb", "reg=none", f"seed={seed}"))
    starts = []
    for folder in list_run_folders(small()):
        [records] = offline_records(folder)
        starts.append(start_of(records))
        assert start_of(records).display_name == folder.name
        assert len(logged_by(records, "train/loss")) == 4
        assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    assert len({start.run_id for start in starts}) == 2


def test_a_run_that_the_caller_has_open_is_left_alone(small: Build, wandb: Any, tmp_path: Path) -> None:
    open_run = wandb.init(project="mine", dir=tmp_path, id="own")
    config = small("logger=wandb", "reg=none")
    run(config)
    assert wandb.run is open_run
    open_run.log({"mine": 1})
    open_run.finish()
    [records] = offline_records(only_run(Path(config.run.root)))
    assert start_of(records).run_id != "own"
    [open_run_records] = offline_records(tmp_path)
    history = [item for record in open_run_records if record.HasField("history") for item in record.history.item]
    assert {"/".join(item.nested_key) or item.key for item in history} >= {"mine"}
    assert not any("loss" in ("/".join(item.nested_key) or item.key) for item in history)


# ---- a sweep by W&B's agent


@pytest.fixture(scope="module")
def sweep(repository: Path) -> dict[str, Any]:
    """Return the content of the sweep file for W&B's agent."""
    return yaml.safe_load((repository / SWEEP).read_text())


def make_agent_command(sweep: dict[str, Any], **values: Any) -> list[str]:
    """Return the command that W&B's agent makes from the sweep file and the values that the server has chosen."""
    from wandb.sdk.launch.sweeps import utils

    variables = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    variables |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
    return [
        word
        for part in utils.create_sweep_command(sweep["command"])
        for word in (variables[part[2:-1]] if part.startswith("${") else [part])
    ]


def generate_corners(sweep: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the smallest values of all parameters, then the greatest ones."""
    for choose in (min, max):
        yield {
            name: choose(parameter["values"]) if "values" in parameter else parameter[choose.__name__]
            for name, parameter in sweep["parameters"].items()
        }


def test_every_corner_of_the_sweep_is_a_config_of_ours(sweep: dict[str, Any], composed: Build) -> None:
    assert set(sweep["parameters"]) == {"reg.lambda", "reg.zeta", "optim.lr", "data.batch_size"}
    for values in generate_corners(sweep):
        command = make_agent_command(sweep, **values)
        assert command[:3] == ["/usr/bin/env", "python", "train.py"]
        config = to_dict(composed(*command[3:]))
        assert (config["task"]["name"], config["reg"]["name"], config["logger"]["name"]) == ("rte", "istar", "wandb")
        for name, value in values.items():
            group, key = name.split(".")
            assert config[group][key] == value
    values = {"reg.lambda": -1.2345678901234567e-05, "optim.lr": 3e-05}
    config = to_dict(composed(*make_agent_command(sweep, **values)[3:]))
    assert (config["reg"]["lambda"], config["optim"]["lr"]) == tuple(values.values())
    assert sweep["metric"] == {"name": f"val/{TASKS['rte'].headline}", "goal": "maximize"}


def run_agent_command(repository: Path, command: list[str], run_id: str, folder: Path) -> tuple[int, str]:
    """Run the command of W&B's agent in a fork, with the agent's environment; returns the exit code and the output."""
    parameters = folder / "config.yaml"
    chosen_values = [word.split("=") for word in command[3:] if "." in word.split("=")[0]]
    parameters.write_text(yaml.safe_dump({"wandb_version": 1, **{key: {"value": text} for key, text in chosen_values}}))
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "WANDB_SWEEP_ID": "sweep123", "WANDB_RUN_ID": run_id, "WANDB_PROJECT": "theirs",
        "WANDB_SWEEP_PARAM_PATH": str(parameters), "WANDB_DIR": str(folder), "WANDB_SILENT": "false",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    small_overrides = ["task=demo", "model=tiny", "task.limit_train=16", "task.limit_validation=16",
                       "trainer.max_epochs=1", "trainer.progress_bar=false", "trainer.accelerator=cpu",
                       "trainer.log_every_n_steps=1", f"run.root={folder / 'runs'}"]  # fmt: skip
    command = [*(word for word in command if word != "task=rte"), *small_overrides]
    output = folder / f"{run_id}.log"
    assert command[:3] == ["/usr/bin/env", "python", "train.py"]
    code = Fork(command[3:], repository, environment, [output, output]).wait()
    return code, output.read_text()


@pytest.mark.slow
def test_an_agents_run_keeps_the_agents_id(sweep: dict[str, Any], wandb: Any, repository: Path, tmp_path: Path) -> None:
    values = {"reg.lambda": 0.5, "reg.zeta": 0.2, "optim.lr": 1e-3, "data.batch_size": 4}
    command = make_agent_command(sweep, **values)
    for index, run_id in enumerate(("agents1", "agents2")):
        code, output = run_agent_command(repository, command, run_id, tmp_path)
        assert code == 0, output
        assert "Ignoring" not in output
        folder = only_run(tmp_path / "runs")
        assert len(offline_records(folder)) == index + 1
        until_the_next_second()
    record = read_result(folder)
    first, second = offline_records(folder)
    for records, run_id in ((first, "agents1"), (second, "agents2")):
        start = start_of(records)
        assert (start.run_id, start.sweep_id, start.project) == (run_id, "sweep123", "theirs")
        # The run was finished before the second start, which therefore has a summary and no training.
        assert summary_of(records)[sweep["metric"]["name"]] == record.headline["value"]
        assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    assert len(logged_by(first, sweep["metric"]["name"])) == 2
    assert logged_by(second, "train/loss") == []
    assert (folder / "wandb" / "run-id").read_text() == "agents1"


# ---- the workspace


@pytest.fixture(scope="module")
def workspace(repository: Path) -> list[dict[str, Any]]:
    """Return the sections of the workspace, which is built without a server."""
    command = [sys.executable, str(repository / "sweep" / "wandb" / "workspace.py"), "somebody", "--dry-run"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert completed.returncode == 0, completed.stderr
    sections: list[dict[str, Any]] = json.loads(completed.stdout)["section"]["panelBankConfig"]["sections"]
    return sections


def collect_keys(panels: list[dict[str, Any]]) -> set[str]:
    """Return the keys that panels read: `config:<key>`, `summary:<key>`, or the name of a logged value."""
    names: set[str] = set()
    for panel in panels:
        config = panel["config"]
        names |= {config[axis] for axis in ("xAxis", "yAxis") if axis in config} | set(config.get("metrics", ()))
        names |= {f"config:{config['groupBy']}"} if "groupBy" in config else set()
    return names


def test_every_panel_reads_what_a_run_has_logged(small: Build, wandb: Any, workspace: list[dict[str, Any]]) -> None:
    config = small("logger=wandb", "reg=istar")
    run(config)
    [records] = offline_records(only_run(Path(config.run.root)))
    recorded_config = config_of(records)
    summary = set(summary_of(records))
    rows = [record.history.item for record in records if record.HasField("history")]
    logged_names = {"/".join(item.nested_key) or item.key for row in rows for item in row}
    metrics_of_all_tasks = {f"val/{name}" for spec in TASKS.values() for name in spec.metrics}
    panels = [panel for section in workspace for panel in section["panels"]]
    for name in collect_keys(panels):
        kind, _, key = name.rpartition(":")
        if kind == "config":
            group, _, config_key = key.partition(".value.")
            assert config_key in recorded_config[group]
        elif kind == "summary":
            assert key in summary
        else:
            assert key in logged_names | summary | metrics_of_all_tasks
    [regex] = [panel["config"]["metricRegex"] for panel in panels if "metricRegex" in panel["config"]]
    layers = {f"isotropy/{state}/isoscore" for state in ("embeddings", "layer_1", "layer_2")}
    assert {name for name in logged_names if re.fullmatch(regex, name)} == layers


def test_without_its_package_the_workspace_says_what_to_install(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "wandb_workspaces.py").write_text("raise ModuleNotFoundError('No module', name='wandb_workspaces')")
    completed = subprocess.run(
        [sys.executable, str(repository / "sweep" / "wandb" / "workspace.py"), "somebody", "--dry-run"],
        capture_output=True, text=True, timeout=SECONDS, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert completed.returncode == 2
    assert completed.stderr.count("\n") == 1
    assert "pip install -e '.[dashboards]'" in completed.stderr
