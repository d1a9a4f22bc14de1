"""The identity of a run, and `result.json`: how it is written and read."""

import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from istar.errors import UserError
from istar.files import writing
from istar.finetune.config import Config
from istar.finetune.config.schema import to_dict
from istar.runs.identity import identity_hash
from istar.runs.record import RESULT, RunRecord, installed_versions, read_result, write_predictions, write_result

RECORD = RunRecord(
    name="demo-tiny-none-0123456789ab",
    status="finished",
    config={
        "task": {"name": "demo"},
        "model": {"name": "tiny"},
        "reg": {"name": "none"},
        "trainer": {"max_epochs": 2},
        "seed": 1,
    },
    headline={"metric": "accuracy", "value": 0.75, "epoch": 2},
    metrics={"accuracy": 0.75, "f1": 1 / 3},
    isotropy={"before": {"0": 0.1, "union": 0.2}, "after": {"0": 0.3, "union": 0.4}, "points": 12},
    timing={"total": 1.5, "shrinkage": []},
)


# ---- identity

IGNORED_OVERRIDES = [
    "task.data_dir=/elsewhere",
    "run.root=/elsewhere",
    "run.overwrite=true",
    "run.save_model=false",
    "logger=wandb",
    "data.cache_dir=/elsewhere",
    "data.num_workers=3",
    "trainer.accelerator=cpu",
    "trainer.progress_bar=false",
    "trainer.log_every_n_steps=1",
    "trainer.checkpoint_every_n_steps=5",
    "trainer.checkpoint_every_n_minutes=1",
    "trainer.nonfinite=skip",
    "trainer.monitor_isotropy=true",
    "task.submission=true",
    "model.revision=main",
]
COUNTED_OVERRIDES = [
    "seed=1",
    "optim.lr=2e-5",
    "optim.weight_decay=0",
    "optim.betas=[0.9,0.98]",
    "optim.eps=1e-6",
    "optim.schedule=linear",
    "optim.warmup=0.1",
    "reg.lambda=1",
    "reg.zeta=0.2",
    "reg.zeta=auto",
    "reg.estimator=unbiased",
    "reg.layers=last",
    "reg.num_points=1000",
    "reg.include_padding=true",
    "reg.sync=false",
    "reg=none",
    "reg=cosreg",
    "task=sst2",
    "task.limit_train=5",
    "task.limit_validation=5",
    "task.max_length=64",
    "data.batch_size=16",
    "data.eval_batch_size=16",
    "data.group_by_length=false",
    "trainer.max_epochs=1",
    "trainer.accumulate_grad_batches=1",
    "trainer.gradient_clip_val=null",
    "trainer.precision=bf16-mixed",
    "trainer.devices=2",
    "trainer.num_nodes=2",
    "trainer.early_stopping=1",
    "trainer.fast_dev_run=true",
    "trainer.checkpoints=false",
    "trainer.stop_at_inter_sim=0.5",
    "model.compile=true",
]


def identity_of(config: Config, data: str = "d", model: str = "m") -> str:
    """Return the hash by which a run with this config, data and model is identified."""
    return identity_hash(to_dict(config), data, model)


def test_identity_is_a_name(composed: Callable[..., Config]) -> None:
    identity = identity_of(composed("task=rte"))
    assert len(identity) == 12
    assert set(identity) <= set("0123456789abcdef")


@pytest.mark.parametrize("override", IGNORED_OVERRIDES)
def test_what_does_not_change_the_outcome_does_not_count(composed: Callable[..., Config], override: str) -> None:
    assert identity_of(composed("task=rte", override)) == identity_of(composed("task=rte"))


def test_what_changes_the_outcome_counts(composed: Callable[..., Config]) -> None:
    identities = [identity_of(composed("task=rte", override)) for override in COUNTED_OVERRIDES]
    config = composed("task=rte")
    identities += [identity_of(config), identity_of(config, data="other"), identity_of(config, model="other")]
    assert len(set(identities)) == len(identities)


def test_a_local_copy_of_the_model_is_the_same_run(composed: Callable[..., Config]) -> None:
    configs = [composed("task=rte", "model=auto", f"model.name=/{folder}") for folder in ("here", "there")]
    assert identity_of(configs[0]) == identity_of(configs[1])


def test_key_order_does_not_count(composed: Callable[..., Config]) -> None:
    values = to_dict(composed("task=rte"))
    reversed_values = {
        group: dict(reversed(group_values.items())) if isinstance(group_values, dict) else group_values
        for group, group_values in reversed(values.items())
    }
    assert list(reversed_values) != list(values)
    assert identity_hash(reversed_values, "d", "m") == identity_hash(values, "d", "m")


def test_identity_leaves_the_config_alone(composed: Callable[..., Config]) -> None:
    values = to_dict(composed("task=rte"))
    before = json.dumps(values)
    identity_hash(values, "d", "m")
    assert json.dumps(values) == before


# ---- writing


def test_round_trip(tmp_path: Path) -> None:
    write_result(RECORD, tmp_path / "new" / "folder")
    assert read_result(tmp_path / "new" / "folder") == RECORD
    text = (tmp_path / "new" / "folder" / RESULT).read_text()
    assert json.loads(text) == asdict(RECORD)
    assert text.startswith('{\n  "name": "demo-tiny-none-0123456789ab",\n')
    assert text.endswith("}\n")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [RESULT]


def test_records_without_the_later_fields_are_read(tmp_path: Path) -> None:
    fields = ("model_identity", "data_commit", "code_commit", "code_modified", "device", "processes", "cuda", "system")
    values = {name: value for name, value in asdict(RECORD).items() if name not in fields}
    (tmp_path / RESULT).write_text(json.dumps(values))
    assert read_result(tmp_path) == RECORD
    assert [getattr(RECORD, name) for name in fields] == [None] * len(fields)


def test_text_is_utf8_with_plain_line_ends(tmp_path: Path) -> None:
    writing.write_text(tmp_path / "a.txt", "Zürich\r\nλ\n")
    assert (tmp_path / "a.txt").read_bytes() == "Zürich\r\nλ\n".encode()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    write_result(RECORD, tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if step == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_result(replace(RECORD, status="failed"), tmp_path)
    monkeypatch.undo()
    assert read_result(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


def test_an_unwritable_record_leaves_the_old_file(tmp_path: Path) -> None:
    write_result(RECORD, tmp_path)
    with pytest.raises(TypeError):
        write_result(replace(RECORD, metrics={"accuracy": object()}), tmp_path)  # type: ignore[dict-item]
    assert read_result(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_file_mode_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    previous_umask = os.umask(umask)
    try:
        write_result(RECORD, tmp_path)
    finally:
        os.umask(previous_umask)
    assert stat.S_IMODE((tmp_path / RESULT).stat().st_mode) == mode


def test_predictions_are_json_lines(tmp_path: Path) -> None:
    rows = [{"id": 0, "prediction": "Zürich\n\u2028x"}, {"id": 1, "prediction": 0.1 + 0.2}]
    write_predictions(tmp_path / "p.jsonl", rows)
    lines = (tmp_path / "p.jsonl").read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    assert [json.loads(line) for line in lines] == rows
    assert "Zürich" in lines[0]


# ---- reading

BROKEN = {
    "empty": "",
    "half": '{"name": "x", "sta',
    "no json": "hello",
    "a list": "[1, 2]",
    "null": "null",
    "foreign keys": '{"loss": 0.3}',
    "a key too many": json.dumps(asdict(RECORD) | {"colour": "red"}),
    "a key too few": '{"name": "x", "status": "finished"}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_and_foreign_files(tmp_path: Path, text: str) -> None:
    (tmp_path / RESULT).write_text(text)
    with pytest.raises(UserError, match=r"not JSON|is not a result") as error:
        read_result(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path / RESULT) in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / RESULT).write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(UserError, match="not UTF-8 text"):
        read_result(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no result\.json") as error:
        read_result(tmp_path / "nowhere")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("more", [{}, {"a_key_of_tomorrow": 1}])
def test_another_format(tmp_path: Path, more: dict[str, int]) -> None:
    (tmp_path / RESULT).write_text(json.dumps(asdict(RECORD) | {"format": 99} | more))
    with pytest.raises(UserError, match="has format 99; this version reads 1"):
        read_result(tmp_path)


def test_versions_name_what_a_result_depends_on() -> None:
    assert {"istar", "torch", "transformers", "lightning", "datasets"} <= set(installed_versions())


def test_a_key_that_no_dataclass_has_counts() -> None:
    config: dict[str, dict[str, Any]] = {"task": {"name": "demo"}, "trainer": {"max_epochs": 3}}
    unknown = {**config, "trainer": {"max_epochs": 3, "colour": "red"}}
    assert identity_hash(unknown, "d", "m") != identity_hash(config, "d", "m")


def test_groups_that_are_missing_are_allowed() -> None:
    config: dict[str, dict[str, Any]] = {"task": {"name": "demo"}}
    ignored = {"task": {"name": "demo", "data_dir": "elsewhere"}, "run": {"root": "runs"}, "logger": {"name": "csv"}}
    assert identity_hash(ignored, "d", "m") == identity_hash(config, "d", "m")
