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

from istar.cli.main import main
from istar.errors import UserError
from istar.geometry import measure, measures_file, saved_checkpoints, trajectory
from istar.models import tiny
from tests.mock_hub import serving, set_offline, use

pytestmark = pytest.mark.slow

WORDS = ["the", "cat", "dog", "house", "garden", "sees"]
TOKENIZER = tiny.make_tokenizer(WORDS)
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE))


def saved(folder: Path, seed: int, step: int | None = None) -> Path:
    model(seed).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    saved_checkpoints.record_step(folder, seed if step is None else step)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    random = np.random.default_rng(0)
    path.write_text("\n".join(" ".join(random.choice(WORDS, 8)) for _ in range(40)))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2, 10):
        saved(tmp_path / "saved" / f"step{step}", step)
    return tmp_path / "saved"


def follow(tmp_path: Path, pattern: object, text: Path, *more: str) -> int:
    arguments = ["measure", "tiny", "--checkpoints", str(pattern), "--text", str(text), "--length", "16"]
    return main([*arguments, "--out", str(tmp_path / "out"), "--device", "cpu", *more])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the models that are not read from a cache."""
    names: list[str] = []
    original = measure.measure_model

    def spy(name: str, *arguments: Any, **more: Any) -> Any:
        names.append(Path(name).name)
        return original(name, *arguments, **more)

    monkeypatch.setattr(measure, "measure_model", spy)
    return names


def test_the_table_equals_separate_measurements(tmp_path: Path, folder: Path, text: Path) -> None:
    assert follow(tmp_path, folder / "*", text) == 0
    rows = rows_of(tmp_path / "out" / "trajectory.csv")
    assert tuple(rows[0])[:6] == trajectory.KEY_COLUMNS
    # The order is by number, not alphabetical.
    assert list(dict.fromkeys((row["model"], row["revision"], row["step"]) for row in rows)) == [
        ("tiny", "step1", "1"), ("tiny", "step2", "2"), ("tiny", "step10", "10")
    ]  # fmt: skip
    alone = tmp_path / "alone"
    arguments = ["measure", str(folder / "step2"), "--text", str(text), "--length", "16", "--out", str(alone)]
    assert main([*arguments, "--device", "cpu"]) == 0
    expected = {row["layer"]: row for row in rows_of(alone / "measures.csv")}
    found = {row["layer"]: row for row in rows if row["revision"] == "step2"}
    assert expected.keys() <= found.keys()
    for layer, own in expected.items():
        for name, value in own.items():
            if name not in ("model", "revision", "source", "layer") and value:
                assert float(found[layer][name]) == pytest.approx(float(value), rel=1e-12), (layer, name)


def test_matrices_and_final_norm(tmp_path: Path, folder: Path, text: Path) -> None:
    assert follow(tmp_path, folder / "step2", text) == 0
    rows = {row["layer"]: row for row in rows_of(tmp_path / "out" / "trajectory.csv")}
    for which, layer in (("input", model(2).get_input_embeddings()), ("output", model(2).get_output_embeddings())):
        matrix = layer.weight.detach().double().numpy()
        own = rows[f"{which}_embeddings"]
        for form, values in (("", matrix), ("centered_", matrix - matrix.mean(0))):
            _, vectors = np.linalg.eigh(values.T @ values)
            z = np.exp(values @ np.concatenate([vectors, -vectors], 1)).sum(0)
            assert float(own[f"{form}partition_isotropy_both"]) == pytest.approx(z.min() / z.max(), rel=1e-5)
    assert float(rows["final_norm_parameters"]["layer_norm_gain"]) == 1
    assert rows["final_norm_parameters"]["isoscore"] == ""


def test_nothing_is_measured_twice(tmp_path: Path, folder: Path, text: Path, measured: list[str]) -> None:
    assert follow(tmp_path, folder / "step[12]", text) == 0
    assert measured == ["step1", "step2"]
    table = (tmp_path / "out" / "trajectory.csv").read_text()
    assert follow(tmp_path, folder / "*", text) == 0
    assert measured == ["step1", "step2", "step10"]
    assert (tmp_path / "out" / "trajectory.csv").read_text().startswith(table)


@pytest.mark.slow
def test_changed_settings_are_measured_again(tmp_path: Path, folder: Path, text: Path, measured: list[str]) -> None:
    assert follow(tmp_path, folder / "step1", text) == 0
    assert follow(tmp_path, folder / "step1", text, "--max-tokens", "100") == 0
    assert len(measured) == 2
    text.write_text(text.read_text() + "\nthe cat")
    assert follow(tmp_path, folder / "step1", text, "--max-tokens", "100") == 0
    assert len(measured) == 3
    before = rows_of(tmp_path / "out" / "trajectory.csv")
    saved(folder / "step1", 7, step=1)
    assert follow(tmp_path, folder / "step1", text, "--max-tokens", "100") == 0
    assert len(measured) == 4
    after = rows_of(tmp_path / "out" / "trajectory.csv")
    assert after[0]["weights"] != before[0]["weights"]
    (tmp_path / "out" / "step1" / "measures.json").write_text("{")
    assert follow(tmp_path, folder / "step1", text, "--max-tokens", "100") == 0
    assert len(measured) == 5
    assert rows_of(tmp_path / "out" / "trajectory.csv") == after


def test_equal_weights_give_a_warning(
    tmp_path: Path, folder: Path, text: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "step2", folder / "step5")
    saved_checkpoints.record_step(folder / "step5", 5)
    for _ in range(2):  # also if all was measured before
        capsys.readouterr()
        assert follow(tmp_path, folder / "*", text) == 0
        assert capsys.readouterr().err.count("warning: step5 has the same weights as step2") == 1
    assert measured == ["step1", "step2", "step10"]
    rows = rows_of(tmp_path / "out" / "trajectory.csv")
    second, fifth = ([row for row in rows if row["step"] == step] for step in ("2", "5"))
    assert [{**row, "revision": "", "step": ""} for row in second] == [
        {**row, "revision": "", "step": ""} for row in fifth
    ]
    assert measures_file.read(tmp_path / "out" / "step5" / "measures.json").model["name"] == str(folder / "step5")


def test_a_failure_does_not_stop_the_other_checkpoints(
    tmp_path: Path, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "step2" / "model.safetensors").write_bytes(b"damaged")
    capsys.readouterr()
    assert follow(tmp_path, folder / "*", text) == 1
    told = capsys.readouterr()
    last = told.err.splitlines()[-1]
    assert last.startswith("error: 1 of 3 not measured: step2 (")
    assert "3 of 3: step10" in told.err
    assert {row["revision"] for row in rows_of(tmp_path / "out" / "trajectory.csv")} == {"step1", "step10"}
    saved(folder / "step2", 2)
    assert follow(tmp_path, folder / "*", text) == 0
    rows = rows_of(tmp_path / "out" / "trajectory.csv")
    assert list(dict.fromkeys(row["revision"] for row in rows)) == ["step1", "step2", "step10"]


def test_runs_and_their_checkpoints(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The runs are as train.py writes them: a model folder, and weights with the names of its module."""
    run = tmp_path / "runs" / "demo-1"
    torch.manual_seed(0)
    shape = {name: value for name, value in SHAPE.items() if "token" not in name}
    best = hf.BertForSequenceClassification(hf.BertConfig(**shape))
    best.save_pretrained(run / "model")
    TOKENIZER.save_pretrained(run / "model")
    (run / "checkpoints").mkdir()
    state = {f"model.{name}": values for name, values in best.state_dict().items()}
    state["other"] = torch.ones(3)
    torch.save({"state_dict": state, "global_step": 84}, run / "checkpoints" / "best-epoch-2.ckpt")
    (run / "other").mkdir()
    epochs = [{"epoch": epoch, "step": 42 * epoch} for epoch in (1, 2, 3)]
    (run / "result.json").write_text(json.dumps({"headline": {"epoch": 2}, "epochs": epochs}))

    assert follow(tmp_path, tmp_path / "runs" / "*", text) == 0
    # The run has saved the model of its best epoch; the number in its name is no step.
    assert rows_of(tmp_path / "out" / "trajectory.csv")[0]["step"] == "84"
    [of_run] = {(row["revision"], row["weights"]) for row in rows_of(tmp_path / "out" / "trajectory.csv")}
    assert of_run[0] == "demo-1"
    assert follow(tmp_path, run / "checkpoints" / "*.ckpt", text) == 0
    rows = rows_of(tmp_path / "out" / "trajectory.csv")
    assert {(row["revision"], row["step"], row["weights"]) for row in rows} == {("best-epoch-2", "84", of_run[1])}
    assert not (tmp_path / "out" / "best-epoch-2" / ".weights").exists()

    (run / "checkpoints" / "best-epoch-2.ckpt").write_bytes(b"damaged")
    assert follow(tmp_path, run / "checkpoints" / "*.ckpt", text) == 1
    shutil.rmtree(run / "model")
    assert follow(tmp_path, run / "checkpoints" / "*.ckpt", text) == 1
    assert "its run has no model folder" in capsys.readouterr().err


def test_a_pooler_that_is_not_in_the_files_does_not_count(tmp_path: Path, text: Path, measured: list[str]) -> None:
    """RoBERTa's files lack the pooler, which is then random at each loading."""
    shape = {name: value for name, value in SHAPE.items() if "token" not in name}
    torch.manual_seed(0)
    hf.BertForMaskedLM(hf.BertConfig(**shape)).save_pretrained(tmp_path / "saved" / "step1")
    TOKENIZER.save_pretrained(tmp_path / "saved" / "step1")
    shutil.copytree(tmp_path / "saved" / "step1", tmp_path / "saved" / "step2")
    for step in (1, 2):
        saved_checkpoints.record_step(tmp_path / "saved" / f"step{step}", step)
    for _ in range(2):
        assert follow(tmp_path, tmp_path / "saved" / "*", text) == 0
    assert measured == ["step1"]


def test_revisions_from_the_cache_of_the_hub(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "hub" / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    for number in (1, 2):
        saved(cache / "snapshots" / f"commit{number}", number)
        (cache / "refs" / f"step{number}").write_text(f"commit{number}")
    with serving() as hub:
        use(hub, tmp_path, monkeypatch)
        set_offline(True, monkeypatch)
        call = ["measure", "some/model", "--revisions", "step1,step2,step3", "--text", str(text), "--length", "16"]
        assert main([*call, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 1
        assert hub.requests == []
    assert "1 of 3 not measured: step3 (" in capsys.readouterr().err
    rows = rows_of(tmp_path / "out" / "trajectory.csv")
    assert {(row["model"], row["revision"], row["step"]) for row in rows} == {
        ("some/model", "step1", "1"), ("some/model", "step2", "2")
    }  # fmt: skip
    assert {row["layer"] for row in rows} >= {"input_embeddings", "output_embeddings", "final_norm"}
    written = json.loads((tmp_path / "out" / "step2" / "measures.json").read_text())
    assert written["model"]["revision"] == "step2"


@pytest.mark.parametrize(
    ("label", "step"),
    [("step1000", 1000), ("main", None), ("stage1-step1000-tokens4B", 1000), ("step-7", 7), ("step1-of-step2", None),
     ("sst2-bert", None), ("demo-tiny-istar-a4869cdddaeb", None), ("v2", None), ("laststep5", None), ("7", None)],
)  # fmt: skip
def test_step_in_the_name_of_a_revision(label: str, step: int | None) -> None:
    assert saved_checkpoints.step_from_name(label) == step
    assert saved_checkpoints.parse_revisions("some/model", label)[0].step == step


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--checkpoints", "nowhere/*"], "matches no model"),
        (["some/model", "--revisions", " , "], "--revisions is empty"),
        (["--revisions", "step1"], "which is missing"),
        ([], "model is missing"),
        (["some/model", "--revisions", "a", "--revision", "b"], "do not go together"),
        (["some/model", "--revisions", "a", "--checkpoints", "b"], "do not go together"),
        ([".", "--revisions", "a"], "is a folder"),
        ([".", "--steps", "steps.csv"], "--steps is for several checkpoints"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], told: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", *arguments, "--text", str(text), "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line
    assert not (tmp_path / "out").exists()


def test_names_that_cannot_name_folders() -> None:
    with pytest.raises(UserError, match="cannot name a folder"):
        saved_checkpoints.parse_revisions("some/model", "a/b,a_b")
    with pytest.raises(UserError, match="cannot name a folder"):
        saved_checkpoints.parse_revisions("some/model", "..")


def config(folder: Path, **values: Any) -> Path:
    """Write a folder that looks like a model; its weights are not read."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 16, **values}))
    return folder


def steps_of(pattern: object, **options: Any) -> dict[str, int | None]:
    return {
        checkpoint.label: checkpoint.step for checkpoint in saved_checkpoints.find_checkpoints(str(pattern), **options)
    }


def test_a_run_stands_for_the_models_that_it_has_kept(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo-tiny-none-0123456789ab"
    config(run / "model")
    assert [checkpoint.name for checkpoint in saved_checkpoints.find_checkpoints(str(run))] == [str(run / "model")]
    for step in (0, 8, 16, 1000):
        saved_checkpoints.record_step(config(run / "models" / f"step-{step}"), step)
    config(run / "models" / ".step-2000")
    for pattern in (run, run / "models", run / "models" / "*"):
        assert steps_of(pattern) == {f"step-{step}": step for step in (0, 8, 16, 1000)}
        assert saved_checkpoints.common_name(saved_checkpoints.find_checkpoints(str(pattern))) == run.name


def test_models_that_an_earlier_version_has_kept(tmp_path: Path) -> None:
    """Their folders are named by the step; only folders of a run are."""
    run = tmp_path / "run"
    for step in (0, 8):
        config(run / "models" / f"step-{step}")
    with pytest.raises(UserError, match="no training step is recorded"):
        saved_checkpoints.find_checkpoints(str(run))
    (run / "config.yaml").write_text("seed: 1")
    assert steps_of(run) == {"step-0": 0, "step-8": 8}


def test_checkpoints_of_transformers_trainer(tmp_path: Path) -> None:
    """The order and the steps are those of the records, whatever else stands in the path."""
    for step in (1000, 200):
        folder = config(tmp_path / "sst2-bert" / f"checkpoint-{step}")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert list(steps_of(tmp_path / "sst2-bert" / "*").items()) == [("checkpoint-200", 200), ("checkpoint-1000", 1000)]


def test_checkpoints_of_several_trainings_are_refused(tmp_path: Path) -> None:
    for name in ("sst2-bert", "rte-bert"):
        run = tmp_path / "runs" / name
        saved_checkpoints.record_step(config(run / "models" / "step-4"), 4)
        config(run / "model")
        (run / "checkpoints").mkdir()
        torch.save({"state_dict": {}, "global_step": 4}, run / "checkpoints" / "last.ckpt")
        folder = config(tmp_path / "outputs" / name)
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
        config(tmp_path / "saved" / name)
    with pytest.raises(UserError, match=r"no training step is recorded in .*run-7.*--steps steps\.csv") as caught:
        saved_checkpoints.find_checkpoints(str(tmp_path / "saved" / "*"))
    assert "\n" not in str(caught.value)
    # A single checkpoint needs no step.
    assert steps_of(tmp_path / "saved" / "step10") == {"step10": None}


def test_steps_from_a_table(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        config(tmp_path / "saved" / name)
    table = tmp_path / "steps.csv"
    table.write_text(f"checkpoint,step\nb,0\n{tmp_path / 'saved' / 'c'},70\na,500\n")
    steps = saved_checkpoints.read_steps(table)
    assert list(steps_of(tmp_path / "saved" / "*", steps=steps).items()) == [("b", 0), ("c", 70), ("a", 500)]
    pair = saved_checkpoints.parse_revisions("some/model", "main,step9", {"main": 20, "step9": 10})
    assert [revision.step for revision in pair] == [20, 10]
    for rows, message in (
        ("checkpoint,step\na,1\nb,2\n", "--steps has no row for c"),
        ("checkpoint,step\na,1\nb,2\nc,3\nd,4\n", "--steps: d names no checkpoint"),
        ("checkpoint,step\na,1\na,2\n", "a has two rows"),
        ("checkpoint,step\na,soon\n", "the step 'soon'; expected the columns checkpoint and step"),
        ("name,number\na,1\n", "expected the columns checkpoint and step"),
    ):
        table.write_text(rows)
        with pytest.raises(UserError, match=message):
            steps_of(tmp_path / "saved" / "*", steps=saved_checkpoints.read_steps(table))
    with pytest.raises(UserError, match="cannot be read"):
        saved_checkpoints.read_steps(tmp_path / "none.csv")


def test_different_models_are_refused_even_with_a_table(tmp_path: Path) -> None:
    config(tmp_path / "small", hidden_size=8)
    config(tmp_path / "large")
    with pytest.raises(UserError, match=r"different models: .*large \(model_type bert, hidden_size 16\) and .*small"):
        saved_checkpoints.find_checkpoints(str(tmp_path / "*"), {"small": 1, "large": 2})


def test_the_table_on_the_terminal_compares_by_both_signs(
    tmp_path: Path, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(tmp_path, folder / "step2", text) == 0
    [row] = [row for row in rows_of(tmp_path / "out" / "trajectory.csv") if row["layer"] == "output_embeddings"]
    both = float(row["partition_isotropy_both"])
    shown = "".join(capsys.readouterr().out.split())
    assert f"{both:.4g}" != f"{float(row['partition_isotropy_as_computed']):.4g}"
    assert f"{both:.4g}" in shown


def test_another_model_does_not_replace_a_trajectory(
    tmp_path: Path, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(tmp_path, folder / "step1", text) == 0
    out = tmp_path / "out"
    before = (out / "trajectory.csv").read_bytes()
    arguments = ["--checkpoints", str(folder / "step2"), "--text", str(text), "--length", "16", "--device", "cpu"]
    assert main(["measure", "large", *arguments, "--out", str(out)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: --out {out} holds the measures of tiny, not of large; expected another folder: --out <folder>"
    )
    assert (out / "trajectory.csv").read_bytes() == before
    # Neither do the page of a single model and a trajectory replace each other.
    alone = tmp_path / "alone"
    measured = ["measure", str(folder / "step1"), "--text", str(text), "--length", "16", "--device", "cpu"]
    assert main([*measured, "--out", str(alone)]) == 0
    assert main(["measure", "tiny", *arguments, "--out", str(alone)]) == 2
    assert "is no trajectory" in capsys.readouterr().err.splitlines()[-1]
    assert main([*measured, "--out", str(out)]) == 2


def test_a_trajectory_that_is_written_again_has_no_earlier_figures(tmp_path: Path, folder: Path, text: Path) -> None:
    assert follow(tmp_path, folder / "step[12]", text) == 0
    (tmp_path / "out" / "figures" / "of-an-earlier-version.svg").write_text("<svg/>")
    assert follow(tmp_path, folder / "step1", text) == 0
    names = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert names == {"isotropy", "partition", "final_norm"}
    # Measurements of other checkpoints of the same model are kept, so that they need not be taken again.
    assert (tmp_path / "out" / "step2" / "measures.json").is_file()
