"""What makes runs equal, repetitions of each other, or of one method; whatever compares runs reads the same keys."""

import copy
import itertools
import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from istar.finetune.config.penalties import PENALTIES
from istar.finetune.sweeps.planned_runs import make_entry
from istar.reports.configurations import add_selection_columns
from istar.reports.run_frame import MAIN_COLUMNS, list_default_columns, read_runs
from istar.runs.key import RunKey, flatten_settings
from istar.runs.names import BASE, METHOD_NAMES
from istar.runs.record import RunRecord
from istar.runs.run_rows import group_by_task
from tests.finished_runs import make_key
from tests.reports.synthetic import istar, record, save

SETTINGS = {
    "task": {"name": "rte"}, "model": {"pretrained": True, "config": {}},
    "reg": {"name": "istar", "lambda": -1.0, "zeta": 0.4}, "optim": {"lr": 1e-3},
    "data": {"eval_batch_size": 64}, "trainer": {"limit_val_batches": 1.0}, "seed": 1,
}  # fmt: skip
KEY = RunKey(SETTINGS, "data", "model")


def changed(name: str, value: Any, key: RunKey = KEY) -> RunKey:
    """Return a key with another value of a setting."""
    settings = copy.deepcopy(key.settings)
    group, _, name = name.rpartition(".")
    (settings[group] if group else settings)[name] = value
    return replace(key, settings=settings)


def test_a_hash_is_a_name_that_depends_on_values_only() -> None:
    assert len(KEY.hash) == len(KEY.configuration) == 12
    assert set(KEY.hash + KEY.configuration) <= set("0123456789abcdef")
    reordered = {
        group: dict(reversed(values.items())) if isinstance(values, dict) else values
        for group, values in reversed(SETTINGS.items())
    }
    assert RunKey(reordered, "data", "model").hash == KEY.hash
    assert KEY.without("reg.lambda") != KEY.without("reg")
    assert SETTINGS["reg"] == {"name": "istar", "lambda": -1.0, "zeta": 0.4}
    assert RunKey(**json.loads(json.dumps(asdict(KEY)))) == KEY


@pytest.mark.parametrize(
    "other",
    [changed("optim.lr", 1e-4), changed("seed", 2), changed("trainer", {"new": 1}), replace(KEY, data="other"),
     replace(KEY, model="other")],
)  # fmt: skip
def test_settings_data_and_model_make_a_run(other: RunKey) -> None:
    assert other.hash != KEY.hash
    assert (other.configuration == KEY.configuration) == (other.settings["seed"] == 2)


def test_a_penalty_of_weight_0_is_none(composed: Any) -> None:
    overrides = ("reg=none",), ("reg=istar", "reg.lambda=0"), ("reg=cosreg", "reg.lambda=0", "reg.layers=all")
    none, *zeros = (make_key(composed("task=rte", *chosen)) for chosen in overrides)
    assert zeros == [none, none]
    assert (none.method, none.method_name, none.label) == (BASE, "Base", "Base")


def test_equal_hashes_are_equal_settings() -> None:
    """The oracle compares the settings themselves, after it has removed what should not count."""
    generator = random.Random(0)
    regs: list[dict[str, Any]] = [{"name": "none"}]
    regs += [{"name": "istar", "lambda": weight, "zeta": zeta} for weight in (1, 2) for zeta in (0.1, 0.2)]

    def make_random_key() -> RunKey:
        reg, rate, seed = (generator.choice(values) for values in (regs, (1, 2), (1, 2)))
        settings = {"reg": reg, "optim": {"lr": rate}, "seed": seed}
        return RunKey(settings, generator.choice("ab"), generator.choice("mn"))

    keys = [make_random_key() for _ in range(100)]

    def strip(key: RunKey, ignored: str) -> tuple[dict[str, Any], str, str]:
        kept = {name: value for name, value in flatten_settings(key.settings).items() if name not in ("seed", ignored)}
        return {name: value for name, value in kept.items() if name.partition(".")[0] != ignored}, key.data, key.model

    for ignored in ("", "reg.lambda", "reg.zeta", "reg", "optim.lr"):
        for first, second in itertools.combinations(keys, 2):
            is_equal = strip(first, ignored) == strip(second, ignored)
            assert (first.without(ignored) == second.without(ignored)) == is_equal
            if not ignored:
                assert (first.configuration == second.configuration) == is_equal
    assert len({key.hash for key in keys}) == len({json.dumps(asdict(key), sort_keys=True) for key in keys})


def test_inputs_are_the_data_the_model_and_what_is_evaluated() -> None:
    others = [replace(KEY, data="x"), replace(KEY, model="x"), changed("model.config", {"hidden_size": 8})]
    two_batches = changed("trainer.limit_val_batches", 2)
    others += [two_batches, changed("data.eval_batch_size", 8, two_batches), changed("trainer.limit_val_batches", 0.5)]
    assert len({key.inputs for key in [KEY, *others]}) == 7
    assert changed("data.eval_batch_size", 8).inputs == KEY.inputs
    assert changed("optim.lr", 1e-4).inputs == changed("reg", {"name": "none"}).inputs == KEY.inputs


def test_every_penalty_has_a_name_in_tables() -> None:
    assert {"none", *METHOD_NAMES} - {BASE} == set(PENALTIES)


@pytest.mark.parametrize("reg", sorted(set(PENALTIES) - {"none"}))
def test_the_live_table_names_methods_in_full(composed: Any, reg: str) -> None:
    config = composed("task=rte", f"reg={reg}", "reg.lambda=0.5")
    key = make_key(config)
    entry = make_entry("run", ("seed=1",), config, key)
    assert entry.group == ("rte", "bert-base-cased", key.method_name)
    assert (key.method, key.label) == (reg, entry.method)
    assert key.label.startswith(entry.method_name)
    assert entry.method_name not in ("weight", "random", "spectrum")


INPUTS = {
    "data_dir": ({"data": "1", "task__data_dir": "easy"}, {"data": "2", "task__data_dir": "hard"}),
    "limit": ({"data": "1", "task__limit_train": 9}, {"data": "2", "task__limit_train": 99}),
    "tokenizer": ({"weights": "1", "model__tokenizer": "a"}, {"weights": "2", "model__tokenizer": "b"}),
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_other_data_or_tokenizers_are_no_repetitions(tmp_path: Path, inputs: tuple[dict[str, Any], ...]) -> None:
    """They are two configurations in the comparison, the results and the report, each with its own label."""
    for number, changes in enumerate(inputs):
        for seed in (1, 2):
            save(record("rte", "bert", istar(), seed, 0.5 + number / 10, **changes), tmp_path)
    runs = read_runs(tmp_path, keep_records=True)
    groups = group_by_task(list(runs.records.values()))
    labels = [(*names, configuration.label) for names, group in groups.items() for configuration in group]
    assert len(set(labels)) == len(labels) == 2
    assert [len(configuration.runs) for group in groups.values() for configuration in group] == [2, 2]
    settings = set(list_default_columns(runs.frame, runs.settings_that_matter)) - set(MAIN_COLUMNS)
    assert len(runs.frame[["task", "model", *settings]].drop_duplicates()) == 2
    frame = add_selection_columns(runs)
    assert frame.groupby("configuration").size().tolist() == [2, 2]
    assert frame["usable"].all()
    assert frame["inputs"].nunique() == 2


def test_the_report_and_the_sweep_agree(tmp_path: Path, composed: Any) -> None:
    """Also about runs that have failed, and about seeds on other hardware."""
    overrides = [("seed=1",), ("seed=2", "trainer.accelerator=gpu", "run.root=elsewhere"), ("optim.lr=1e-3",)]
    overrides += [("seed=3", "data.batch_size=16", "trainer.devices=2")]
    for number, chosen in enumerate(overrides):
        run = record("rte", "bert", istar(), 1, status="failed", name=str(number))
        save(replace(run, key=make_key(composed("task=rte", *chosen))), tmp_path)
    runs = read_runs(tmp_path, keep_records=True)
    records: list[RunRecord] = [runs.records[folder] for folder in runs.frame["folder"]]
    [configurations] = group_by_task(records).values()
    assert sorted(len(configuration.runs) for configuration in configurations) == [1, 3]
    assert sorted(add_selection_columns(runs).groupby("configuration").size()) == [1, 3]
