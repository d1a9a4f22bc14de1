"""One module answers what a run, a configuration and a method are; the sweep's and the report's tables ask it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from istar.finetune.config import (
    AdamWConfig,
    Config,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    RunConfig,
    TaskConfig,
    TrainerConfig,
)
from istar.finetune.config.penalties import PENALTIES
from istar.finetune.config.schema import to_dict
from istar.finetune.execute.identify import run_folder_path
from istar.finetune.sweeps import live_table
from istar.finetune.sweeps.trials import Trial
from istar.models.saved_checkpoints import ModelArgument
from istar.reports.configurations import add_selection_columns
from istar.reports.run_frame import read_runs
from istar.runs.identity import (
    BASE,
    METHOD_NAMES,
    Inputs,
    configuration_hash,
    find_method,
    identifies_run,
    label_inputs,
    label_method,
    name_method,
    shorten_model_name,
)
from istar.runs.record import RunRecord, write_result
from istar.runs.run_rows import group_by_task, record_to_row


def make_config(reg: str = "istar", weight: float = -1.0, **changes: Any) -> Config:
    penalty = PENALTIES[reg]() if reg == "none" else PENALTIES[reg](weight=weight)
    task, model, logger = TaskConfig("rte"), ModelConfig("bert"), LoggerConfig("none")
    config = Config(task, model, penalty, DataConfig(), AdamWConfig(), TrainerConfig(), logger, RunConfig())
    for group_and_key, value in changes.items():
        group, _, key = group_and_key.partition("__")
        config = replace(config, **{group: replace(getattr(config, group), **{key: value}) if key else value})
    return config


HARDWARE = [
    lambda: make_config(seed=2, trainer__accelerator="gpu"),
    lambda: make_config(seed=2, data__num_workers=3),
    lambda: make_config(seed=2, run__root="elsewhere"),
]


@pytest.mark.parametrize("make_other", HARDWARE)
def test_seeds_on_other_hardware_are_one_configuration(make_other: Callable[[], Config]) -> None:
    first, other = to_dict(make_config(seed=1)), to_dict(make_other())
    assert configuration_hash(first) == configuration_hash(other)
    records = [RunRecord(str(number), "finished", config) for number, config in enumerate((first, other))]
    assert [len(configuration.runs) for [configuration] in group_by_task(records).values()] == [2]


@pytest.mark.parametrize("change", [{"optim__lr": 1e-3}, {"model__lora": True}, {"reg": "cosreg"}])
def test_what_changes_the_outcome_makes_another_configuration(change: dict[str, Any]) -> None:
    first, other = to_dict(make_config(seed=1)), to_dict(make_config(seed=2, **change))
    assert configuration_hash(first) != configuration_hash(other)
    records = [RunRecord(str(number), "finished", config) for number, config in enumerate((first, other))]
    assert [len(configurations) for configurations in group_by_task(records).values()] == [2]


def test_a_penalty_of_weight_0_is_none_in_every_table(tmp_path: Any) -> None:
    without, of_weight_0 = to_dict(make_config("none")), to_dict(make_config(weight=0.0))
    assert find_method(of_weight_0) == find_method(without) == BASE
    assert name_method(of_weight_0) == name_method(without) == "Base"
    assert configuration_hash(of_weight_0) == configuration_hash(without)
    assert label_method(of_weight_0) == label_method(without) == "Base"


def test_the_model_of_a_run_has_the_name_of_the_run_in_every_table() -> None:
    name = "runs/rte-bert-none-0123/model"
    config = make_config(model__name=name)
    record = RunRecord("run", "finished", to_dict(config))
    assert record_to_row(record)["model"] == "rte-bert-none-0123"
    assert list(group_by_task([record])) == [("rte", "rte-bert-none-0123")]
    assert run_folder_path(config, "", "").name.startswith("rte-rte-bert-none-0123-istar-")
    assert ModelArgument("", name).default_label == "rte-bert-none-0123"
    names = {"org/bert": "bert", "bert": "bert", "/models/bert/": "bert", "model": "model", "a/models/step-1": "step-1"}
    assert {name: shorten_model_name(name) for name in names} == names


def label(*runs: tuple[str | None, ...]) -> list[str]:
    """Return the labels of tasks or models; a run is a path, for a model a commit, and the hash of the files."""
    if len(runs[0]) == 2:
        inputs = [Inputs("clm", path, "bert", None, digest, None) for path, digest in runs]
    else:
        inputs = [Inputs("rte", None, str(name), commit, "data", digest) for name, commit, digest in runs]
    labels = label_inputs(inputs)
    return [labels[run][len(runs[0]) - 2] for run in inputs]


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        ([("a/easy.txt", "1"), ("a/hard.txt", "2")], ["clm (easy.txt)", "clm (hard.txt)"]),
        ([("easy/data", "1"), ("hard/data", "2"), ("hard/data/", "2")], ["clm (easy/data)", *["clm (hard/data)"] * 2]),
        ([("/data", "1"), ("data", "2"), (None, "3")], ["clm (/data)", "clm (data)", "clm"]),
        ([("/home/me/data", "1"), ("/scratch/data", "1")], ["clm"] * 2),
        # A copy on another machine, of which a part was used as well.
        ([("here", "part"), ("there", "all"), ("copy", "part"), ("copy", "all")], ["clm"] * 4),
        ([("changed", "1"), ("changed", "2"), ("changed", None)], ["clm"] * 3),
        # The data of runs that have not begun are not known.
        ([("easy.txt", None), ("hard.txt", None)], ["clm (easy.txt)", "clm (hard.txt)"]),
    ],
)
def test_data_sets_of_one_task_have_different_labels(runs: list[tuple[str, str | None]], labels: list[str]) -> None:
    assert label(*runs) == labels
    assert label(*reversed(runs)) == labels[::-1]


CHECKPOINTS = ("outA/checkpoint-500", None, "1"), ("outB/checkpoint-500", None, "2")


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        (CHECKPOINTS, ["outA/checkpoint-500", "outB/checkpoint-500"]),
        ([("a/run/model", None, "1"), ("b/run/model/", None, None)], ["a/run", "b/run"]),
        ([("org/bert", "c0ffee", "org/bert@c0ffee"), ("/copies/bert", None, "1")], ["org/bert", "copies/bert"]),
        ([("bert", None, "1"), ("org/bert", None, "2"), ("org/gpt", None, "3")], ["bert", "org/bert", "gpt"]),
        ([("/home/me/bert", None, "1"), ("/scratch/bert", None, "1")], ["bert"] * 2),
        ([("out/bert", None, "1"), ("out/bert", None, "2"), ("out/bert", None, None)], ["bert"] * 3),
        # New models have no files, and their identity is that of their tokenizer.
        ([("small", None, "new"), ("large", None, "new")], ["small", "large"]),
        (
            [("org/bert", "0123456789abcd", "1"), ("org/bert", "cdef", "2"), ("org/gpt", "cdef", "3")],
            ["bert@0123456789ab", "bert@cdef", "gpt"],
        ),
    ],
)
def test_models_of_one_name_have_different_labels(runs: list[tuple[str | None, ...]], labels: list[str]) -> None:
    assert label(*runs) == labels
    assert label(*reversed(runs)) == labels[::-1]


def test_every_penalty_has_a_name_in_tables() -> None:
    assert {"none", *METHOD_NAMES} - {BASE} == set(PENALTIES)


@pytest.mark.parametrize("reg", sorted(set(PENALTIES) - {"none"}))
def test_the_live_table_names_methods_in_full(reg: str) -> None:
    config = make_config(reg, 0.5)
    trial = Trial(("seed=1",), config, "run")
    entry = live_table.make_entry(trial)
    assert entry.group == ("rte", "bert", name_method(to_dict(config)))
    assert label_method(to_dict(config)).startswith(entry.group[2])
    assert entry.group[2] not in ("weight", "random", "spectrum")


def test_the_report_and_the_sweep_agree(tmp_path: Any) -> None:
    for number, config in enumerate((make_config(seed=1), HARDWARE[0](), make_config(seed=1, optim__lr=1e-3))):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        write_result(RunRecord(folder.name, "failed", to_dict(config), error="the disk is full"), folder)
    runs = read_runs(tmp_path, keep_records=True)
    in_report = add_selection_columns(runs)["config_hash"].nunique()
    [in_sweep] = map(len, group_by_task([runs.records[folder] for folder in runs.frame["folder"]]).values())
    assert in_report == in_sweep == 2


def test_the_keys_that_identify_a_run() -> None:
    assert all(map(identifies_run, ("optim.lr", "trainer.max_steps", "task.limit_train", "reg.zeta")))
    others = ("trainer.accelerator", "data.num_workers", "run.root", "logger.project", "task.data_dir", "model.name")
    others += ("validation.f1", "no.key")
    assert not any(map(identifies_run, others))
