"""Equal configs are the same run; another value of a key that affects the result makes another run."""

import hashlib
import io
import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from istar.errors import UserError
from istar.finetune.config import ModelConfig
from istar.finetune.execute import execute as execute_module
from istar.finetune.execute import precision
from istar.finetune.execute.identify import KeyMaker, identify, identify_model, read_finished_run
from istar.finetune.execute.run import run
from istar.runs.key import RunKey
from istar.runs.record import RunRecord, read_result, write_result
from tests.finetune.execute.artifacts import TINY, Build, everything_measured, folders_in, place, rows_of, rte
from tests.finished_runs import make_finished_record, make_key


def test_the_same_call_returns_the_finished_run(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    levels = [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")]
    first = run(config)
    # The signals and the loggers are the caller's again.
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")] == levels
    modification_times = {path: path.stat().st_mtime_ns for path in Path(config.run.root).rglob("*")}
    # No model is loaded and nothing is trained.
    monkeypatch.setattr(execute_module, "assemble", None)
    console = Console(width=120, file=io.StringIO())
    second = run(small("logger=csv", "trainer.log_every_n_steps=5", "data.num_workers=0"), console)
    assert second == first
    assert {path: path.stat().st_mtime_ns for path in Path(config.run.root).rglob("*")} == modification_times
    assert "run.overwrite=true" in console.file.getvalue()  # type: ignore[attr-defined]
    # Of several processes, only rank 0 prints.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(logging.getLogger("istar"), "setLevel", lambda level: None)  # the level would remain
    other_console = Console(width=120, file=io.StringIO())
    assert run(config, other_console) == first
    assert other_console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_a_precision_chosen_here_is_the_same_run_as_one_named(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_bfloat16", lambda uses_cuda: False)
    chosen, named = (identify(small(f"trainer.precision={precision}")) for precision in ("auto", "32-true"))
    assert chosen.config == named.config
    assert chosen.folder == named.folder


def test_overwrite_keeps_the_old_folder(small: Build, caplog: pytest.LogCaptureFixture) -> None:
    config = small()
    folder = identify(config).folder
    write_result(make_finished_record(folder.name, config), folder)
    (folder / "notes.txt").write_text("mine")
    (Path(config.run.root) / f"{folder.name}.old-1").mkdir()
    record = run(small("run.overwrite=true"))
    assert record == read_result(folder)
    assert folders_in(Path(config.run.root)) == [record.name, f"{record.name}.old-1", f"{record.name}.old-2"]
    assert (Path(config.run.root) / f"{record.name}.old-2" / "notes.txt").read_text() == "mine"
    assert not (place(config, record) / "notes.txt").exists()
    assert "it is kept as" in caplog.text


def test_a_finished_run_must_hold_what_is_requested_now(small: Build, tmp_path: Path) -> None:
    run_overrides = ("run.geometry=false", "run.save_model=false")

    def look_up_finished_run(*overrides: str, **fields: Any) -> RunRecord | None:
        """Look up a run that was finished without any output files, with these overrides."""
        folder = tmp_path / "finished"
        write_result(make_finished_record("finished", small(*run_overrides), **fields), folder)
        return read_finished_run(folder, small(*overrides))

    assert look_up_finished_run(*run_overrides) is not None
    for key, missing_file in (
        ("run.geometry", "geometry.json"),
        ("run.save_model", "model/"),
        ("task.submission", "submission/"),
    ):
        with pytest.raises(UserError, match=rf"without {missing_file}; {key}=false accepts it; run\.overwrite=true"):
            look_up_finished_run(*run_overrides, f"{key}=true")
    assert look_up_finished_run(*run_overrides, "trainer.nonfinite=skip", skipped_steps=3) is not None
    with pytest.raises(UserError, match=r"has skipped 3 steps; trainer\.nonfinite=skip accepts it"):
        look_up_finished_run(*run_overrides, skipped_steps=3)


def test_a_finished_run_must_have_measured_the_requested_steps(small: Build, tmp_path: Path) -> None:
    accepted = ("run.geometry=false", "run.save_model=false")

    def look_up(record_overrides: tuple[str, ...], *overrides: str) -> RunRecord | None:
        write_result(make_finished_record("finished", small(*accepted, *record_overrides)), tmp_path)
        return read_finished_run(tmp_path, small(*accepted, *overrides))

    measured = ("monitor.every=2", "monitor.measures=[inter_sim,isoscore]")
    for steps in ("2", "4", "null"):
        assert look_up(measured, *measured, f"monitor.every={steps}") is not None
    previous = r"monitor\.points=4096 monitor\.measures=\[inter_sim,isoscore\] monitor\.probe_examples=64, which"
    for other in ("every=3", "every=1", "probe_examples=8", "points=50", "measures=[inter_sim]"):
        with pytest.raises(UserError, match=rf"was run with monitor\.every=2 {previous}"):
            look_up(measured, *measured, f"monitor.{other}")
    with pytest.raises(UserError, match=r"was run with monitor\.every=null .* monitor\.measures=\[\]"):
        look_up((), *measured)


def test_a_finished_run_must_have_kept_the_requested_models(small: Build, tmp_path: Path) -> None:
    accepted = ("run.geometry=false", "run.save_model=false")
    epoch = {"epoch": 1, "step": 4, "metrics": {"accuracy": 0.5}, "isotropy": {"union": 0.2}}
    write_result(make_finished_record("finished", small(*accepted), epochs=[epoch]), tmp_path)
    for step in (0, 2, 4):
        (tmp_path / "models" / f"step-{step}").mkdir(parents=True)

    def look_up(schedule: str) -> RunRecord | None:
        return read_finished_run(tmp_path, small(*accepted, f"trainer.keep_models={schedule}"))

    # The models of a coarser schedule are among these; without a schedule nothing is missing.
    for schedule in ("2", "4", "null"):
        assert look_up(schedule) is not None
    with pytest.raises(UserError, match=r"without models/step-1/ of trainer\.keep_models=log; trainer\.keep_models"):
        look_up("log")
    (tmp_path / "models" / "step-2").rmdir()
    with pytest.raises(UserError, match=r"without models/step-2/"):
        look_up("2")


def test_the_seed_decides_everything(small: Build, tmp_path: Path) -> None:
    def measure_and_predict(*overrides: str) -> tuple[list[Any], list[Any]]:
        config = small("task.limit_train=16", "run.geometry=false", *overrides)
        record = run(config)
        return everything_measured(record), rows_of(place(config, record) / "predictions.jsonl")

    first = measure_and_predict()
    torch.rand(3)
    second = measure_and_predict(f"run.root={tmp_path / 'elsewhere'}", f"data.cache_dir={tmp_path / 'cache'}")
    assert first == second
    other_seed = measure_and_predict("seed=43")
    assert other_seed[0][3]["before"] != first[0][3]["before"]
    assert other_seed[1] != first[1]


@pytest.mark.slow
def test_the_evaluation_batch_matters_only_to_rounding(cached_run: Callable[..., Any]) -> None:
    _, small_batches, _ = cached_run("task=demo", "reg=istar")
    _, large_batches, _ = cached_run("task=demo", "reg=istar", "data.eval_batch_size=24")
    # The evaluation batches change the rounding of the shrinkage covariance, and its padding if that is included.
    assert small_batches.name != large_batches.name
    assert large_batches.metrics == pytest.approx(small_batches.metrics, rel=1e-4)
    assert large_batches.isotropy["after"] == pytest.approx(small_batches.isotropy["after"], rel=1e-3)


def test_the_place_of_the_data_does_not_count_but_its_content_does(small: Build, tmp_path: Path) -> None:
    original, same_content = rte(tmp_path / "first"), rte(tmp_path / "copy")
    other_content = rte(tmp_path / "other", positive=lambda number: number % 2 == 1)
    names = [
        KeyMaker().make(small(*TINY, "task=rte", f"task.data_dir={data_dir}")).hash
        for data_dir in (original, same_content, other_content)
    ]
    assert names[0] == names[1] != names[2]


def test_a_key_is_read_as_it_was_written(composed: Build) -> None:
    """JSON has no integers as keys."""
    key = make_key(composed("model=small_encoder", "model.config={id2label:{0:a,10:b,9:c}}"))
    assert RunKey(**json.loads(json.dumps(asdict(key)))) == key


def test_new_models_are_named_by_their_values(composed: Build) -> None:
    override_lists = [[], ["model.config.hidden_size=64"], ["model.vocab_size=500"], ["model.architecture=albert"]]
    configs = [composed("task=rte", "model=small_encoder", *overrides) for overrides in override_lists]
    assert len({make_key(config, model=identify_model(config.model)).hash for config in configs}) == 4
    # The name of a new model is a label.
    labelled_configs = [composed("task=rte", "model=small_encoder", f"model.name={name}") for name in ("a", "b")]
    hashes = {make_key(config, model=identify_model(config.model)).hash for config in labelled_configs}
    assert len(hashes) == 1


def test_processes_that_would_train_different_runs_are_refused(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute_module, "all_gather_object", lambda name: [name, "another-run"])
    with pytest.raises(UserError, match=r"about to train different runs \(another-run, demo-.*send the same command"):
        run(small())


def make_adapters(folder: Path, base: Path | str, **settings: Any) -> Path:
    """Write a folder as peft does; only the names of its files matter to the identity."""
    folder.mkdir()
    values = {"base_model_name_or_path": str(base), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    (folder / "adapter_model.safetensors").write_bytes(b"adapters")
    return folder


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("is_chain", [False, True])
def test_the_identity_of_adapters_covers_their_base_model(
    tmp_path: Path, base_folder: Path, monkeypatch: pytest.MonkeyPatch, is_chain: bool, is_relative: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_adapters(tmp_path / "adapters", "base" if is_relative else base_folder)
    if is_chain:
        folder = make_adapters(tmp_path / "further", "adapters" if is_relative else folder)
    trained, new = (ModelConfig(name=str(folder), pretrained=is_pretrained) for is_pretrained in (True, False))
    as_tokenizer = ModelConfig(name="tiny", pretrained=False)
    as_tokenizer.tokenizer = str(folder)
    first = [identify_model(config) for config in (trained, new, as_tokenizer)]
    (base_folder / "model.safetensors").write_text("other weights")
    second = [identify_model(config) for config in (trained, new, as_tokenizer)]
    assert second[0] != first[0]
    assert second[1:] == first[1:]
    (base_folder / "tokenizer.json").write_text('{"other": 1}')
    third = [identify_model(config) for config in (trained, new, as_tokenizer)]
    assert all(one != other for one, other in zip(second, third, strict=True))


def test_adapters_that_are_their_own_base_are_refused(tmp_path: Path) -> None:
    make_adapters(tmp_path / "a", tmp_path / "b")
    make_adapters(tmp_path / "b", tmp_path / "a")
    with pytest.raises(UserError, match=r"adapter_config\.json: .* leads back to .*a$") as error:
        identify_model(ModelConfig(name=str(tmp_path / "a")))
    assert "\n" not in str(error.value)


def test_a_sweep_hashes_weights_once(composed: Build, base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    original = hashlib.file_digest

    def record(file: Any, name: Any) -> Any:
        hashed.append(Path(file.name).name)
        return original(file, name)

    monkeypatch.setattr(hashlib, "file_digest", record)
    key_maker = KeyMaker()
    overrides = ["model.lora=true", "model.lora_r=4", "model.load_in=bf16", "model.compile=true", "seed=7"]
    small = ("task.limit_train=8", "task.limit_validation=8", f"model.name={base_folder}")
    changes = [(), *((override,) for override in overrides)]
    hashes = {key_maker.make(composed("task=demo", "model=auto", *small, *change)).hash for change in changes}
    assert hashed.count("model.safetensors") == 1
    assert len(hashes) > 4
    # The process of each run identifies the model again.
    config = ModelConfig(name=str(base_folder))
    identity = identify_model(config)
    assert hashed.count("model.safetensors") == 1
    weights = base_folder / "model.safetensors"
    content = weights.read_text()
    weights.write_text(content[::-1])
    assert identify_model(config) != identity
    weights.write_text(content)
    os.utime(weights, ns=(1, 1))
    assert identify_model(config) == identity
    assert hashed.count("model.safetensors") == 3


def test_weights_are_hashed_where_nothing_can_be_remembered(
    base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = identify_model(ModelConfig(name=str(base_folder)))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ISTAR_CACHE", str(tmp_path / "file"))
    assert identify_model(ModelConfig(name=str(base_folder))) == identity


def test_a_local_copy_of_the_model_is_the_same_run(composed: Build) -> None:
    here, there = (make_key(composed("task=rte", "model=auto", f"model.name=/{folder}")) for folder in "ab")
    assert here == there
