"""Models with states or embeddings for which some measures are undefined: all others are measured and compared."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as hf

import istar
from istar.cli.main import main
from istar.drawing import rendering
from istar.errors import UserError
from istar.files.outputs import Output
from istar.geometry.collect import measures_file, stream
from istar.geometry.collect.measures_file import read_measurement
from istar.geometry.collect.stream import Stream
from istar.geometry.show import compare_page
from istar.geometry.show.compare import MeasuredModel
from istar.models import saved_checkpoints
from tests.geometry.collect.test_stream import SENTENCES, TOKENIZER
from tests.geometry.collect.test_trajectory import read_rows

pytestmark = pytest.mark.usefixtures("blank_figures")

RENDER = rendering.render
OPTIONS = ("--text", "text.txt,other.txt", "--length", "16", "--measures", "all", "--groups", "3", "--device", "cpu")
UNUSED_ROW = len(TOKENIZER)


def set_final_norm(model: Any, gain: float, bias: float) -> None:
    torch.nn.init.constant_(model.transformer.ln_f.weight, gain)
    torch.nn.init.constant_(model.transformer.ln_f.bias, bias)


def make_tokens_equal(model: Any) -> None:
    model.transformer.wte.weight.data[:] = model.transformer.wte.weight.data[5].clone()
    torch.nn.init.zeros_(model.transformer.wpe.weight)


EDITS: dict[str, Callable[[Any], object]] = {
    "usual": lambda model: None, "gain_0": lambda model: set_final_norm(model, 0.0, 0.0),
    "gain_0_with_bias": lambda model: set_final_norm(model, 0.0, 0.3), "equal": make_tokens_equal,
    "nan_input": lambda model: model.transformer.wte.weight.data[UNUSED_ROW].fill_(math.nan),
    "inf_output": lambda model: model.lm_head.weight.data[UNUSED_ROW].fill_(math.inf),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models and two texts; the embeddings have three rows without a token."""
    folder = tmp_path_factory.mktemp("models")
    ids = {"bos_token_id": 1, "eos_token_id": 1}
    config = hf.GPT2Config(n_embd=24, n_layer=2, n_head=2, n_positions=32, vocab_size=UNUSED_ROW + 3, **ids)
    for name, edit in EDITS.items():
        torch.manual_seed(0)
        config.tie_word_embeddings = name != "inf_output"
        model = hf.GPT2LMHeadModel(config)
        with torch.no_grad():
            edit(model)
        model.save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    (folder / "text.txt").write_text("\n".join(SENTENCES * 4))
    (folder / "other.txt").write_text("\n".join(SENTENCES[::-1] * 3))
    return folder


@pytest.fixture(scope="module")
def measured(folder: Path, blank_figures: None) -> Path:
    """Return the folder, where all models are measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in EDITS:
            assert main(["measure", name, *OPTIONS, "--examples", "12", "--out", f"out/{name}"]) == 0
    return folder


def read_strict_json(path: Path) -> Any:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("name", ["gain_0", "gain_0_with_bias", "equal"])
def test_a_state_without_variance_is_null_and_the_others_stay(measured: Path, name: str) -> None:
    contents, usual = (read_strict_json(measured / "out" / model / "measures.json") for model in (name, "usual"))
    for text, taps in contents["sources"].items():
        for tap, measures in taps.items():
            expected = usual["sources"][text][tap]
            if name != "equal" and tap != "final_norm":
                # All states are summed together, so that the last digit may differ.
                assert measures == pytest.approx(expected, rel=1e-12)
                continue
            assert measures.keys() == expected.keys()
            defined = {key for key, value in measures.items() if value is not None}
            norms = {"points", "average_norm", "mean_vector_norm", "norm_ratio"}
            assert norms <= defined
            cosines = {"inter_sim", "intra_sim", "mean_direction_norm", "sample_inter_sim"}
            assert cosines & defined == (set() if name == "gain_0" else cosines)
            of_differences = ("isoscore", "effective", "participation", "nesum", "alpha", "two_nn", "dimensions_",
                              "outlier_", "antihubs", "hubness", "near_", "relative_", "uniformity")  # fmt: skip
            for key in expected:
                if key.startswith(of_differences) or "variance" in key or key in ("largest_kurtosis", "mean_kurtosis"):
                    assert measures[key] is None, key
            assert measures["average_norm"] == pytest.approx(measures["mean_vector_norm"], rel=1e-6)
    spectra = contents["spectra"]["combined"]["final_norm"]
    assert spectra["centered"] == [0.0] * 24
    assert contents["gride"]["combined"]["final_norm"] == []


@pytest.mark.parametrize("name", ["gain_0", "gain_0_with_bias", "equal"])
def test_the_page_says_why_and_has_no_nan(measured: Path, name: str) -> None:
    out = measured / "out" / name
    places = "the embeddings, layer 1 and 2 others" if name == "equal" else "the final norm"
    page = (out / "index.html").read_text()
    assert f"All hidden states of {places} are equal, so that measures of variance are undefined." in page
    for path in [*out.glob("*.csv"), *out.glob("*.md"), *out.rglob("tables/*")]:
        assert not re.search(r"\bnan\b", path.read_text(), re.IGNORECASE), path
    assert not re.search(r">\s*nan\s*<", page)
    table = istar.load(out).table
    assert table.xs("final_norm", level="state")["isoscore"].isna().all()
    assert table["average_norm"].notna().all()
    assert len(table) == 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gain_0", "equal", "inf_output"])
def test_its_figures_are_drawn(measured: Path, name: str) -> None:
    """A warning, as of an axis without limits, is an error in tests."""
    models = [MeasuredModel(name, read_measurement(measured / "out" / name / "measures.json"))]
    plots = compare_page._make_plots(compare_page.PageContent(compare_page.MODEL_KIND, models))
    drawn = {plot.name: RENDER(plot, ("svg",))["svg"] for plot in plots if plot.panels}
    assert "row_norms" in drawn
    assert not [name for name, image in drawn.items() if re.search(rb"\bnan\b", image)]


@pytest.mark.parametrize(("name", "side"), [("nan_input", "input"), ("inf_output", "output")])
def test_embeddings_that_are_not_finite_are_null_and_the_others_stay(measured: Path, name: str, side: str) -> None:
    contents, usual = (read_strict_json(measured / "out" / model / "measures.json") for model in (name, "usual"))
    assert contents["sources"] == usual["sources"]
    for form, measures in contents["matrices"][side].items():
        expected = usual["matrices"]["input"][form]
        assert measures.keys() == expected.keys()
        assert (measures["rows"], measures["dimensions"]) == (expected["rows"], expected["dimensions"])
        assert set(measures["singular_values"]) == {None}
        assert all(value is None for key, value in measures.items() if isinstance(expected[key], float))
    assert side not in contents["rows"]
    if side == "output":
        assert contents["matrices"]["input"] == usual["matrices"]["input"]
        assert contents["rows"]["input"] == usual["rows"]["input"]
    page = (measured / "out" / name / "index.html").read_text()
    assert f"The {side} embeddings have values that are not finite, and so no measures." in page


def test_embeddings_are_measured_before_the_pass(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise UserError("the pass begins")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(Stream, "__call__", fail)
    assert main(["measure", "nan_input", *OPTIONS, "--out", str(tmp_path / "out")]) == 2
    warning, error = capsys.readouterr().err.splitlines()[-2:]
    assert warning.startswith("warning: the input embeddings get no measures: ")
    assert error == "error: the pass begins"


def test_the_state_stays_until_the_measures_are_on_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise UserError("No space left on device")

    monkeypatch.chdir(folder)
    calls = {
        "models": ["measure", "usual", *OPTIONS, "--out", str(tmp_path / "one")],
        "checkpoints": ["measure", "--checkpoints", "usua*", *OPTIONS, "--out", str(tmp_path / "all")],
    }
    for arguments in calls.values():
        out = Path(arguments[-1])
        with monkeypatch.context() as patch:
            patch.setattr(Output, "write", fail)
            assert main(arguments) != 0
        assert "No space left on device" in capsys.readouterr().err
        assert len(list(out.rglob("pass.*"))) == 2  # one for each text
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "_update_statistics", fail)  # all has been read
            assert main(arguments) == 0
        assert not list(out.rglob("pass.*"))
        [measures] = out.rglob("measures.json")
        assert read_measurement(measures).sources == read_measurement(folder / "out/usual/measures.json").sources


@pytest.fixture(scope="module")
def trained(measured: Path) -> Path:
    """Return the folder, where the models are also measured as the checkpoints of a training."""
    for step, name in enumerate(EDITS, start=1):
        saved_checkpoints.record_step(shutil.copytree(measured / name, measured / "saved" / name), step)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(measured)
        assert main(["measure", "--checkpoints", "saved/*", *OPTIONS, "--out", "trained"]) == 0
    return measured


def test_training_with_gaps(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(trained)
    rows = read_rows(trained / "trained" / "trajectory.csv")
    for revision in EDITS:
        [row] = [x for x in rows if (x["revision"], x["source"], x["layer"]) == (revision, "text", "final_norm")]
        assert (row["isoscore"] == "") == (revision in ("gain_0", "gain_0_with_bias", "equal"))
        [row] = [row for row in rows if (row["revision"], row["layer"]) == (revision, "input_embeddings")]
        assert (row["partition_isotropy_both"] == "") == (revision == "nan_input")
    table = istar.load("trained").table
    assert list(table.index.names) == ["step", "text", "state"]
    assert list(table.index.unique("step")) == list(range(1, len(EDITS) + 1))
    frame = pd.read_csv("trained/trajectory.csv").dropna(subset="source")
    assert table["isoscore"].to_numpy() == pytest.approx(frame["isoscore"].to_numpy(), nan_ok=True)
    scores = pd.DataFrame({"revision": list(EDITS), "task": "acc", "score": range(len(EDITS))})
    scores.to_csv("scores.csv", index=False)
    assert main(["correlate", "trained/trajectory.csv", "scores.csv", "--out", "correlated"]) == 0
    table = pd.read_csv("correlated/correlation.csv").set_index(["source", "layer", "measure"])
    assert table.loc[("combined", "final_norm", "isoscore"), "n"] == 3
    assert table.loc[("combined", "layer_2", "isoscore"), "n"] == 5
    shutil.copytree("trained", "second")
    assert main(["compare", "a=trained", "b=second", "--out", "compared_trainings", "--json"]) == 0
    captured = capsys.readouterr()
    assert "NaN" not in captured.out


def test_comparing_them(measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(measured)
    folders = [f"out/{name}" for name in ("gain_0", "equal", "usual", "nan_input", "gain_0_with_bias")]
    capsys.readouterr()
    assert main(["compare", *folders, *OPTIONS[:2], "--cka-documents", "12", "--out", "compared", "--json"]) == 0
    scores = {row["model"]: row["isoscore"] for row in json.loads(capsys.readouterr().out)["models"]}
    assert scores["equal"] is None
    assert scores["gain_0"] == scores["usual"] == scores["nan_input"]
    similarity = read_rows(Path("compared/tables/similarity.csv"))
    constant = {("gain_0", "final_norm"), ("gain_0_with_bias", "final_norm")}
    constant |= {("equal", layer) for layer in ("embeddings", "layer_1", "layer_2", "final_norm")}
    for row in similarity:
        places = {(row["first"], row["layer"]), (row["second"], row["other_layer"])}
        assert (row["cka"] == "") == bool(places & constant), row
        if (row["first"], row["second"]) == ("usual", "nan_input") and row["layer"] == row["other_layer"]:
            assert float(row["cka"]) == pytest.approx(1)


def test_labels_that_collide_are_refused_before_a_model_is_measured(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(measured)
    monkeypatch.setattr(stream.Stream, "__call__", None)
    for first, second in (("out/usual", "usual"), ("a=out/usual", "a=gain_0")):
        assert main(["compare", first, second, *OPTIONS, "--out", "collided"]) == 2
        assert "error: several models are called" in capsys.readouterr().err


def test_a_state_is_discarded_only_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "pass.0.0-1").touch()
    measures_file.discard_state(tmp_path)
    assert (tmp_path / "pass.0.0-1").exists()
