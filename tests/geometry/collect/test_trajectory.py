"""Measuring several checkpoints of a training: the table, cached measurements, and messages."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from istar.cli.main import main
from istar.errors import UserError
from istar.geometry.collect import measure, measures_file, trajectory, trajectory_file
from istar.geometry.collect.pass_settings import MeasureSettings
from istar.geometry.collect.stream import Stream
from istar.geometry.show import terminal_tables
from istar.models import saved_checkpoints, tiny
from istar.models.saved_checkpoints import Checkpoint
from istar.runs.names import TRAJECTORY_KEYS
from tests.archives import compress_archive
from tests.geometry.synthetic import make_measurements
from tests.mock_hub import serving, set_offline, use

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("blank_figures")]

WORDS = ["the", "cat", "dog", "house", "garden", "sees"]
TOKENIZER = tiny.make_tokenizer(WORDS)
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE))


def save_checkpoint(folder: Path, seed: int, step: int | None = None) -> Path:
    make_model(seed).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    saved_checkpoints.record_step(folder, seed if step is None else step)
    return folder


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    random = np.random.default_rng(0)
    path.write_text("\n".join(" ".join(random.choice(WORDS, 8)) for _ in range(40)))
    return path


def save_checkpoints(folder: Path) -> Path:
    for step in (1, 2, 10):
        save_checkpoint(folder / f"step{step}", step)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoints(tmp_path / "saved")


def measure_checkpoints(tmp_path: Path, pattern: object, text: Path, *options: str) -> int:
    arguments = ["measure", "tiny", "--checkpoints", str(pattern), "--text", str(text), "--length", "16"]
    return main([*arguments, "--out", str(tmp_path / "out"), "--device", "cpu", *options])


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, blank_figures: None) -> Path:
    """Return a folder with three saved checkpoints, a text, and their measures in `out`."""
    folder = tmp_path_factory.mktemp("measured")
    save_checkpoints(folder / "saved")
    assert measure_checkpoints(folder, folder / "saved" / "*", write_text(folder)) == 0
    return folder


@pytest.fixture
def measured_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of the models that read the texts are appended."""
    model_names: list[str] = []

    class RecordedStream(Stream):
        def __init__(self, model: Any, *arguments: Any) -> None:
            model_names.append(Path(model.name_or_path).name)
            super().__init__(model, *arguments)

    monkeypatch.setattr(measure, "Stream", RecordedStream)
    return model_names


def test_the_table_equals_separate_measurements(measured: Path, tmp_path: Path) -> None:
    rows = read_rows(measured / "out" / "trajectory.csv")
    assert tuple(rows[0])[:6] == TRAJECTORY_KEYS
    # The checkpoints are sorted by step, not alphabetically.
    assert list(dict.fromkeys((row["model"], row["revision"], row["step"]) for row in rows)) == [
        ("tiny", "step1", "1"), ("tiny", "step2", "2"), ("tiny", "step10", "10")
    ]  # fmt: skip
    single_folder = tmp_path / "alone"
    model, text = measured / "saved" / "step2", measured / "text.txt"
    arguments = ["measure", str(model), "--text", str(text), "--length", "16", "--out", str(single_folder)]
    assert main([*arguments, "--device", "cpu"]) == 0
    expected_row_by_layer = {row["layer"]: row for row in read_rows(single_folder / "measures.csv")}
    row_by_layer = {row["layer"]: row for row in rows if row["revision"] == "step2"}
    assert expected_row_by_layer.keys() <= row_by_layer.keys()
    for layer, expected_row in expected_row_by_layer.items():
        for name, value in expected_row.items():
            if name not in ("model", "revision", "source", "layer") and value:
                assert float(row_by_layer[layer][name]) == pytest.approx(float(value), rel=1e-12), (layer, name)


def test_matrices_and_final_norm(measured: Path) -> None:
    rows = read_rows(measured / "out" / "trajectory.csv")
    row_by_layer = {row["layer"]: row for row in rows if row["step"] == "2"}
    for matrix_name, embedding in (
        ("input", make_model(2).get_input_embeddings()),
        ("output", make_model(2).get_output_embeddings()),
    ):
        matrix = embedding.weight.detach().double().numpy()
        matrix_row = row_by_layer[f"{matrix_name}_embeddings"]
        for prefix, values in (("", matrix), ("centered_", matrix - matrix.mean(0))):
            _, vectors = np.linalg.eigh(values.T @ values)
            z = np.exp(values @ np.concatenate([vectors, -vectors], 1)).sum(0)
            assert float(matrix_row[f"{prefix}partition_isotropy_both"]) == pytest.approx(z.min() / z.max(), rel=1e-5)
    assert float(row_by_layer["final_norm_parameters"]["layer_norm_gain"]) == pytest.approx(1, abs=1e-9)
    assert row_by_layer["final_norm_parameters"]["isoscore"] == ""


def test_nothing_is_measured_twice(tmp_path: Path, folder: Path, text: Path, measured_names: list[str]) -> None:
    assert measure_checkpoints(tmp_path, folder / "step[12]", text) == 0
    assert measured_names == ["step1", "step2"]
    table = (tmp_path / "out" / "trajectory.csv").read_text()
    assert measure_checkpoints(tmp_path, folder / "*", text) == 0
    assert measured_names == ["step1", "step2", "step10"]
    assert (tmp_path / "out" / "trajectory.csv").read_text().startswith(table)


@pytest.mark.slow
def test_changed_settings_count(tmp_path: Path, folder: Path, text: Path, measured_names: list[str]) -> None:
    assert measure_checkpoints(tmp_path, folder / "step1", text) == 0
    assert measure_checkpoints(tmp_path, folder / "step1", text, "--max-tokens", "100") == 0
    assert len(measured_names) == 2
    text.write_text(text.read_text() + "\nthe cat")
    assert measure_checkpoints(tmp_path, folder / "step1", text, "--max-tokens", "100") == 0
    assert len(measured_names) == 3
    rows_before = read_rows(tmp_path / "out" / "trajectory.csv")
    save_checkpoint(folder / "step1", 7, step=1)
    assert measure_checkpoints(tmp_path, folder / "step1", text, "--max-tokens", "100") == 0
    assert len(measured_names) == 4
    rows_after = read_rows(tmp_path / "out" / "trajectory.csv")
    assert rows_after[0]["weights"] != rows_before[0]["weights"]
    (tmp_path / "out" / "step1" / "measures.json").write_text("{")
    assert measure_checkpoints(tmp_path, folder / "step1", text, "--max-tokens", "100") == 2
    (tmp_path / "out" / "step1" / "measures.json").unlink()
    assert measure_checkpoints(tmp_path, folder / "step1", text, "--max-tokens", "100") == 0
    assert len(measured_names) == 5
    assert read_rows(tmp_path / "out" / "trajectory.csv") == rows_after


def test_equal_weights_give_a_warning(
    tmp_path: Path, folder: Path, text: Path, measured_names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "step2", folder / "step5")
    saved_checkpoints.record_step(folder / "step5", 5)
    for _ in range(2):  # the second time, all checkpoints have been measured before
        capsys.readouterr()
        assert measure_checkpoints(tmp_path, folder / "*", text) == 0
        assert capsys.readouterr().err.count("warning: step5 has the same weights as step2") == 1
    assert measured_names == ["step1", "step2", "step10"]
    rows = read_rows(tmp_path / "out" / "trajectory.csv")
    rows_of_step2, rows_of_step5 = ([row for row in rows if row["step"] == step] for step in ("2", "5"))
    assert [{**row, "revision": "", "step": ""} for row in rows_of_step2] == [
        {**row, "revision": "", "step": ""} for row in rows_of_step5
    ]
    assert measures_file.read_measurement(tmp_path / "out" / "step5" / "measures.json").model["name"] == str(
        folder / "step5"
    )


def test_another_configuration_is_measured(tmp_path: Path, folder: Path, text: Path, measured_names: list[str]) -> None:
    shutil.copytree(folder / "step2", folder / "step5")
    saved_checkpoints.record_step(folder / "step5", 5)
    config = json.loads((folder / "step5" / "config.json").read_text())
    (folder / "step5" / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    assert measure_checkpoints(tmp_path, folder / "step[25]", text) == 0
    assert measured_names == ["step2", "step5"]
    values = {row["step"]: row["isoscore"] for row in read_rows(tmp_path / "out" / "trajectory.csv")
              if row["layer"] == "layer_2"}  # fmt: skip
    assert values["2"] != values["5"]


def test_checkpoints_of_another_place_are_accepted_if_they_are_the_same(
    tmp_path: Path, folder: Path, text: Path, measured_names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure_checkpoints(tmp_path, folder / "step[12]", text) == 0
    moved = folder.rename(tmp_path / "moved")
    assert measure_checkpoints(tmp_path, moved / "step[12]", text) == 0
    assert measured_names == ["step1", "step2"]
    table = (tmp_path / "out" / "trajectory.csv").read_bytes()
    other = save_checkpoint(tmp_path / "other" / "step1", 7, step=1)
    capsys.readouterr()
    assert measure_checkpoints(tmp_path, other.parent / "*", text) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {tmp_path}/out/step1 holds the measures of {moved}/step1, not of {other}; expected another folder"
    )
    assert measured_names == ["step1", "step2"]
    assert (tmp_path / "out" / "trajectory.csv").read_bytes() == table


def test_failures_stop_no_other(tmp_path: Path, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step2" / "model.safetensors").write_bytes(b"damaged")
    capsys.readouterr()
    assert measure_checkpoints(tmp_path, folder / "*", text) == 1
    captured = capsys.readouterr()
    last_line = captured.err.splitlines()[-1]
    assert last_line.startswith("error: 1 of 3 not measured: step2 (")
    assert "3 of 3: step10" in captured.err
    assert {row["revision"] for row in read_rows(tmp_path / "out" / "trajectory.csv")} == {"step1", "step10"}
    save_checkpoint(folder / "step2", 2)
    assert measure_checkpoints(tmp_path, folder / "*", text) == 0
    rows = read_rows(tmp_path / "out" / "trajectory.csv")
    assert list(dict.fromkeys(row["revision"] for row in rows)) == ["step1", "step2", "step10"]


def test_runs_and_their_checkpoints(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run is as train.py writes it: a model folder, and checkpoints whose weights have the names of its module."""
    run = tmp_path / "runs" / "demo-1"
    torch.manual_seed(0)
    shape = {name: value for name, value in SHAPE.items() if "token" not in name}
    best_model = hf.BertForSequenceClassification(hf.BertConfig(**shape))
    best_model.save_pretrained(run / "model")
    TOKENIZER.save_pretrained(run / "model")
    (run / "checkpoints").mkdir()
    state_dict = {f"model.{name}": values for name, values in best_model.state_dict().items()}
    state_dict["other"] = torch.ones(3)
    torch.save({"state_dict": state_dict, "global_step": 84}, run / "checkpoints" / "best-epoch-2.ckpt")
    (run / "other").mkdir()
    epochs = [{"epoch": epoch, "step": 42 * epoch} for epoch in (1, 2, 3)]
    (run / "result.json").write_text(json.dumps({"headline": {"epoch": 2}, "epochs": epochs}))

    assert measure_checkpoints(tmp_path, tmp_path / "runs" / "*", text) == 0
    # The run has saved the model of its best epoch, which determines the step; the number in its name does not.
    assert read_rows(tmp_path / "out" / "trajectory.csv")[0]["step"] == "84"
    [revision_and_weights] = {(x["revision"], x["weights"]) for x in read_rows(tmp_path / "out" / "trajectory.csv")}
    assert revision_and_weights[0] == "demo-1"
    assert measure_checkpoints(tmp_path, run / "checkpoints" / "*.ckpt", text) == 0
    rows = read_rows(tmp_path / "out" / "trajectory.csv")
    assert {(x["revision"], x["step"], x["weights"]) for x in rows} == {("best-epoch-2", "84", revision_and_weights[1])}
    assert not (tmp_path / "out" / "best-epoch-2" / ".weights").exists()

    (run / "checkpoints" / "best-epoch-2.ckpt").write_bytes(b"damaged")
    assert measure_checkpoints(tmp_path, run / "checkpoints" / "*.ckpt", text) == 1
    shutil.rmtree(run / "model")
    assert measure_checkpoints(tmp_path, run / "checkpoints" / "*.ckpt", text) == 1
    assert "its run has no model folder" in capsys.readouterr().err


def test_hostile_checkpoints_are_refused(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The compressed one has a few kilobytes that torch would load as a gigabyte."""

    class RunsCode:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    save_checkpoint(tmp_path / "run" / "model", 1)
    good, compressed, foreign = (tmp_path / "run" / "checkpoints" / f"step-{step}.ckpt" for step in (1, 2, 3))
    good.parent.mkdir()
    weights = {f"model.{name}": value for name, value in load_file(tmp_path / "run/model/model.safetensors").items()}
    torch.save({"state_dict": weights, "global_step": 1}, good)
    compress_archive(good, compressed)
    torch.save({"state_dict": RunsCode(), "global_step": 1}, foreign)
    assert measure_checkpoints(tmp_path, good, text) == 0
    for checkpoint in (compressed, foreign):
        assert measure_checkpoints(tmp_path, checkpoint, text) in (1, 2)
        assert checkpoint.name in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    torch.load(foreign, weights_only=False)
    assert (tmp_path / "ran").exists()


def test_a_pooler_outside_the_files_does_not_count(tmp_path: Path, text: Path, measured_names: list[str]) -> None:
    """RoBERTa's files lack the pooler, which is then random at each loading."""
    shape = {name: value for name, value in SHAPE.items() if "token" not in name}
    torch.manual_seed(0)
    hf.BertForMaskedLM(hf.BertConfig(**shape)).save_pretrained(tmp_path / "saved" / "step1")
    TOKENIZER.save_pretrained(tmp_path / "saved" / "step1")
    shutil.copytree(tmp_path / "saved" / "step1", tmp_path / "saved" / "step2")
    for step in (1, 2):
        saved_checkpoints.record_step(tmp_path / "saved" / f"step{step}", step)
    for _ in range(2):
        assert measure_checkpoints(tmp_path, tmp_path / "saved" / "*", text) == 0
    assert measured_names == ["step1"]


def test_revisions_from_the_cache_of_the_hub(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "hub" / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    for number in (1, 2):
        save_checkpoint(cache / "snapshots" / f"commit{number}", number)
        (cache / "refs" / f"step{number}").write_text(f"commit{number}")
    with serving() as hub:
        use(hub, tmp_path, monkeypatch)
        set_offline(True, monkeypatch)
        command = ["measure", "some/model", "--revisions", "step1,step2,step3", "--text", str(text), "--length", "16"]
        assert main([*command, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 1
        assert hub.requests == []
    assert "1 of 3 not measured: step3 (" in capsys.readouterr().err
    rows = read_rows(tmp_path / "out" / "trajectory.csv")
    assert {(row["model"], row["revision"], row["step"]) for row in rows} == {
        ("some/model", "step1", "1"), ("some/model", "step2", "2")
    }  # fmt: skip
    assert {row["layer"] for row in rows} >= {"input_embeddings", "output_embeddings", "final_norm"}
    record = json.loads((tmp_path / "out" / "step2" / "measures.json").read_text())
    assert record["model"]["revision"] == "step2"


@pytest.mark.parametrize(
    ("label", "step"),
    [("step1000", 1000), ("main", None), ("stage1-step1000-tokens4B", 1000), ("step-7", 7), ("step1-of-step2", None),
     ("sst2-bert", None), ("demo-tiny-istar-a4869cdddaeb", None), ("v2", None), ("laststep5", None), ("7", None)],
)  # fmt: skip
def test_step_in_the_name_of_a_revision(label: str, step: int | None) -> None:
    assert saved_checkpoints.step_from_name(label) == step
    assert saved_checkpoints.find_revisions("some/model", [label])[0].step == step


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoints", "nowhere/*"], "matches no model"),
        (["some/model", "--revisions", " , "], "--revisions is empty"),
        (["--revisions", "step1"], "which is missing"),
        ([], "model is missing"),
        (["some/model@b", "--revisions", "a"], "do not go together"),
        (["some/model", "--revisions", "a", "--checkpoints", "b"], "do not go together"),
        ([".", "--revisions", "a"], "is a folder"),
        ([".", "--steps", "steps.csv"], "--steps is for several checkpoints"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", *arguments, "--text", str(text), "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_names_that_cannot_name_folders() -> None:
    with pytest.raises(UserError, match="cannot name a folder"):
        saved_checkpoints.find_revisions("some/model", ["a/b", "a_b"])
    with pytest.raises(UserError, match="cannot name a folder"):
        saved_checkpoints.find_revisions("some/model", [".."])


def write_model_folder(folder: Path, **values: Any) -> Path:
    """Write a folder with only the config of a model, for tests that read no weights; return its path."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 16, **values}))
    return folder


def find_steps(pattern: object, **options: Any) -> dict[str, int | None]:
    return {found.label: found.step for found in saved_checkpoints.find_checkpoints(str(pattern), **options)}


def test_a_run_stands_for_the_models_that_it_has_kept(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo-tiny-none-0123456789ab"
    write_model_folder(run / "model")
    assert [checkpoint.name for checkpoint in saved_checkpoints.find_checkpoints(str(run))] == [str(run / "model")]
    for step in (0, 8, 16, 1000):
        saved_checkpoints.record_step(write_model_folder(run / "models" / f"step-{step}"), step)
    write_model_folder(run / "models" / ".step-2000")
    for pattern in (run, run / "models", run / "models" / "*"):
        assert find_steps(pattern) == {f"step-{step}": step for step in (0, 8, 16, 1000)}
        assert saved_checkpoints.common_name(saved_checkpoints.find_checkpoints(str(pattern))) == run.name


def test_the_output_of_a_trainer_stands_for_its_checkpoints(tmp_path: Path) -> None:
    """The final model, which `save_model` writes next to the checkpoints, is equal to one of them."""
    output = write_model_folder(tmp_path / "sst2-bert")
    write_model_folder(output / "1_Pooling")  # as sentence-transformers writes it; not a model
    assert find_steps(output) == {"sst2-bert": None}
    for folder, step in ((output, 1000), *((write_model_folder(output / f"checkpoint-{n}"), n) for n in (1000, 500))):
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert list(find_steps(output).items()) == [("checkpoint-500", 500), ("checkpoint-1000", 1000)]
    assert saved_checkpoints.common_name(saved_checkpoints.find_checkpoints(str(output))) == "sst2-bert"


def test_checkpoints_of_several_trainings_are_refused(tmp_path: Path) -> None:
    for name in ("sst2-bert", "rte-bert"):
        run = tmp_path / "runs" / name
        saved_checkpoints.record_step(write_model_folder(run / "models" / "step-4"), 4)
        write_model_folder(run / "model")
        (run / "checkpoints").mkdir()
        torch.save({"state_dict": {}, "global_step": 4}, run / "checkpoints" / "last.ckpt")
        folder = write_model_folder(tmp_path / "outputs" / name)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 300}))
    for pattern in ("runs/*", "runs/*/models/*", "runs/*/checkpoints/*.ckpt", "outputs/*"):
        first, second = (str(tmp_path / pattern.split("/")[0] / name) for name in ("rte-bert", "sst2-bert"))
        with pytest.raises(UserError) as caught:
            saved_checkpoints.find_checkpoints(str(tmp_path / pattern))
        message = str(caught.value)
        assert f"matches 2 trainings: {first}, {second}; expected checkpoints of one" in message
        assert f"such as --checkpoints {first};" in message
        assert "\n" not in message


def test_a_step_is_never_guessed(tmp_path: Path) -> None:
    for name in ("sst2-bert", "step10", "run-7"):
        write_model_folder(tmp_path / "saved" / name)
    with pytest.raises(UserError, match=r"no training step is recorded in .*run-7.*--steps steps\.csv") as caught:
        saved_checkpoints.find_checkpoints(str(tmp_path / "saved" / "*"))
    assert "\n" not in str(caught.value)
    # A single checkpoint needs no step.
    assert find_steps(tmp_path / "saved" / "step10") == {"step10": None}


def test_steps_from_a_table(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_model_folder(tmp_path / "saved" / name)
    table = tmp_path / "steps.csv"
    table.write_text(f"checkpoint,step\nb,0\n{tmp_path / 'saved' / 'c'},70\na,500\n")
    steps = trajectory.read_steps(table)
    assert list(find_steps(tmp_path / "saved" / "*", steps=steps).items()) == [("b", 0), ("c", 70), ("a", 500)]
    revisions = saved_checkpoints.find_revisions("some/model", ["main", "step9"], {"main": 20, "step9": 10})
    assert [revision.step for revision in revisions] == [20, 10]
    for rows, message in (
        ("checkpoint,step\na,1\nb,2\n", "--steps has no row for c"),
        ("checkpoint,step\na,1\nb,2\nc,3\nd,4\n", "--steps: d names no checkpoint"),
        ("checkpoint,step\na,1\na,2\n", "a has two rows"),
        ("checkpoint,step\na,soon\n", "the step 'soon'; expected the columns checkpoint and step"),
        ("name,number\na,1\n", "expected the columns checkpoint and step"),
    ):
        table.write_text(rows)
        with pytest.raises(UserError, match=message):
            find_steps(tmp_path / "saved" / "*", steps=trajectory.read_steps(table))
    with pytest.raises(UserError, match="cannot be read"):
        trajectory.read_steps(tmp_path / "none.csv")


def test_terminal_compares_by_both_signs(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(measured / "out", tmp_path / "out")
    assert measure_checkpoints(tmp_path, measured / "saved" / "step2", measured / "text.txt") == 0
    [row] = [row for row in read_rows(tmp_path / "out" / "trajectory.csv") if row["layer"] == "output_embeddings"]
    both_signs = float(row["partition_isotropy_both"])
    output = "".join(capsys.readouterr().out.split())
    assert f"{both_signs:.4g}" != f"{float(row['partition_isotropy_as_computed']):.4g}"
    assert f"{both_signs:.4g}" in output


def test_the_table_on_the_terminal_has_the_last_layer_before_a_final_norm(tmp_path: Path) -> None:
    scores = {"embeddings": 0.1, "layer_1": 0.2, "final_norm": 0.3}
    measures_by_tap = {tap: {"points": 100.0, "isoscore": score} for tap, score in scores.items()}
    measured = make_measurements(sources={"wiki": measures_by_tap})
    checkpoints = [Checkpoint(f"step{step}", "m", step=step) for step in (1, 2)]
    plan = trajectory_file.TrajectoryPlan("m", [], MeasureSettings(length=16), tmp_path)
    table = terminal_tables.make_checkpoint_table(plan, checkpoints, trajectory_file.Trajectory({"step2": measured}))
    assert [list(column.cells) for column in table.columns[:2]] == [["step1", "step2"], ["\N{EN DASH}", "0.2"]]


def test_another_model_is_refused(tmp_path: Path, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_checkpoints(tmp_path, folder / "step1", text) == 0
    out = tmp_path / "out"
    table_before = (out / "trajectory.csv").read_bytes()
    arguments = ["--checkpoints", str(folder / "step2"), "--text", str(text), "--length", "16", "--device", "cpu"]
    assert main(["measure", "large", *arguments, "--out", str(out)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {out} holds the measures of tiny, not of large; expected another folder"
    )
    assert (out / "trajectory.csv").read_bytes() == table_before


def test_a_trajectory_that_is_written_again_leaves_foreign_figures(tmp_path: Path, folder: Path, text: Path) -> None:
    assert measure_checkpoints(tmp_path, folder / "step[12]", text) == 0
    foreign_figure = tmp_path / "out" / "figures" / "mine.svg"
    foreign_figure.write_text("<svg/>")
    assert measure_checkpoints(tmp_path, folder / "step1", text) == 2
    assert foreign_figure.read_text() == "<svg/>"
    foreign_figure.unlink()
    assert measure_checkpoints(tmp_path, folder / "step1", text) == 0
    figure_names = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"isotropy", "directions", "partition", "final_norm"} <= figure_names
    # Measurements of other checkpoints of the same model are kept, so that they need not be taken again.
    assert (tmp_path / "out" / "step2" / "measures.json").is_file()
