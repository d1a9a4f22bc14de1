"""The object of what was measured: its table, figures, text, files, and that files give the same object again."""

import builtins
import json
import math
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import transformers as hf

import istar
from istar.cli.main import main
from istar.errors import UserError
from istar.geometry.collect.mean_states import Examples
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.geometry import Geometry
from istar.geometry.show.terminal_tables import HEADERS, make_model_table
from istar.measures.catalogue import MEASURES
from istar.models import tiny
from istar.texts import demo
from tests.geometry.show.test_axis_figures import make_training
from tests.geometry.synthetic import TAPS, WIDTH, make_measurements, make_points, read_sections
from tests.waiting import SECONDS

EXAMPLES = Examples(("a", "b"), ("0", "1"), {"queries": torch.randn(2, 3), "corpus": torch.randn(2, 5)})
CLOUDS = make_points(gaps=[{"first": "queries", "second": "corpus", "distance": 2.5, "cosine": math.nan}])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, blank_figures: None) -> Path:
    """Measure a small model by the command, alone and at two checkpoints, and return the folder."""
    folder = tmp_path_factory.mktemp("measured")
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    for step in (1, 2):
        torch.manual_seed(step)
        hf.BertModel(tiny.make_tiny_config(len(tokenizer))).save_pretrained(folder / f"step{step}")
        tokenizer.save_pretrained(folder / f"step{step}")
    words = demo.vocabulary()
    (folder / "text.txt").write_text("\n".join(" ".join(words[row : row + 9]) for row in range(40)))
    options = ["--text", "text.txt", "--length", "16"]
    (folder / "steps.csv").write_text("checkpoint,step\nstep1,1\nstep2,2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["measure", "step2", *options, "--measures", "all", "--out", "one"]) == 0
        arguments = ["--checkpoints", "step*", "--steps", "steps.csv"]
        assert main(["measure", *arguments, *options, "--out", "training"]) == 0
    return folder


def test_the_table_has_the_numbers_of_the_file(measured: Path) -> None:
    geometry = istar.load(measured / "one")
    frame = pd.read_csv(measured / "one" / "measures.csv").set_index("layer")
    assert geometry.states == tuple(frame.index) == tuple(geometry.table.index)
    assert geometry.table.index.names == ["state"]
    columns = list(geometry.table)
    assert set(columns) == set(frame.columns) - {"model", "revision", "source"}
    order = [measure.name for measure in MEASURES if measure.subject == "layers" and measure.name in frame]
    is_error = [name.endswith("_error") for name in columns]
    assert is_error == sorted(is_error)
    assert columns == sorted(order, key=lambda name: name.endswith("_error"))
    for name in columns:
        assert geometry.table[name].to_numpy() == pytest.approx(frame[name].to_numpy(), rel=1e-12, nan_ok=True)
    # The spectra are those of the centered points: the sum of their squares is (n - 1) times the summed variance.
    variances = geometry.spectra["layer_2"] ** 2
    assert variances.sum() ** 2 / (variances**2).sum() == pytest.approx(
        geometry["participation_ratio"]["layer_2"], rel=1e-5
    )
    assert geometry.settings["length"] == 16
    assert geometry.settings["model"] == "step2"
    assert istar.load(measured / "one" / "measures.json").table.equals(geometry.table)


def test_nothing_that_is_given_out_changes_it(measured: Path) -> None:
    geometry = istar.load(measured / "one")
    for given in (geometry.table["isoscore"], geometry["isoscore"], geometry.interval("isoscore")["value"]):
        given.iloc[:] = 9.0
    table = geometry.table
    table.loc[:, "isoscore"] = 9.0
    assert (geometry["isoscore"] < 1).all()
    with pytest.raises(ValueError, match="read-only"):
        geometry.spectra["layer_1"][0] = 0
    with pytest.raises(TypeError):
        geometry.settings["length"] = 3  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        geometry.examples = None  # type: ignore[misc]
    with pytest.raises(KeyError, match="'isocore' was not measured; did you mean isoscore"):
        geometry["isocore"]
    with pytest.raises(KeyError, match=r"'xyz' was not measured; expected a column of geometry\.table"):
        geometry["xyz"]


@pytest.mark.parametrize(("header", "name"), [(header, name) for name, header in HEADERS.items()])
def test_a_header_of_the_printed_table_suggests_the_column(header: str, name: str) -> None:
    geometry = Geometry(make_measurements())
    assert header in repr(geometry)
    with pytest.raises(KeyError, match=f"'{header}' was not measured; did you mean {name}\\?"):
        geometry[header]
    with pytest.raises(UserError, match=f"{header} was not measured; did you mean {name}\\?"):
        geometry.check({header: (0, 1)})
    with pytest.raises(UserError, match=f"no measure '{header}'; did you mean {name}\\?"):
        geometry.plot(header)


def test_a_file_of_vectors_is_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.eye(5))
    with pytest.raises(UserError, match=r"vectors\.npy is a file; expected a folder .*; istar\.measure reads files of"):
        istar.load(tmp_path / "vectors.npy")


def test_intervals_and_several_texts() -> None:
    geometry = Geometry(make_measurements())
    assert geometry.table.index.names == ["text", "state"]
    assert (
        geometry.table.loc[("talk", "layer_2"), "isoscore"]
        == make_measurements().sources["talk"]["layer_2"]["isoscore"]
    )
    interval = geometry.interval("isoscore").loc[("news", "layer_1")]
    half_width = scipy.stats.t.ppf(0.975, 9) * 0.01
    assert interval.tolist() == pytest.approx([0.2, 0.2 - half_width, 0.2 + half_width], rel=1e-12)
    two_nn = geometry.interval("two_nn").loc[("news", "layer_1")]
    assert two_nn["high"] - two_nn["value"] == pytest.approx(scipy.stats.norm.ppf(0.975) * 0.3, rel=1e-12)
    assert geometry.interval("rank_me")[["low", "high"]].isna().all(axis=None)


def test_a_training(measured: Path, tmp_path: Path) -> None:
    geometry = istar.load(measured / "training")
    assert geometry.table.index.names == ["step", "state"]
    assert geometry.table.index.unique("step").tolist() == [1, 2]
    assert geometry["isoscore"][2].tolist() == pytest.approx(
        istar.load(measured / "one")["isoscore"].tolist(), rel=1e-9
    )
    assert "IsoScore of the last layer" in geometry.findings[0]
    violations = geometry.check(isoscore=(2, None), states="layer_*")
    assert [violation.state for violation in violations] == ["1, layer_1", "1, layer_2", "2, layer_1", "2, layer_2"]
    [axes] = geometry.plot("isoscore").axes
    assert [line.get_xdata().tolist() for line in axes.lines] == [[1, 2]] * 3
    with pytest.raises(UserError, match="copy it"):
        geometry.save(tmp_path)


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("content", [make_measurements(), CLOUDS, make_points(TAPS, "places")])
def test_what_was_saved_is_loaded(content: Any, tmp_path: Path) -> None:
    page = Geometry(content).save(tmp_path / "out")
    assert page == tmp_path / "out" / "index.html"
    loaded = istar.load(tmp_path / "out")
    pd.testing.assert_frame_equal(loaded.table, Geometry(content).table)
    assert repr(loaded) == repr(Geometry(content))
    assert loaded.findings == Geometry(content).findings
    assert loaded.settings == Geometry(content).settings
    assert loaded.examples is None
    with pytest.raises(UserError, match="no mean states of examples were kept"):
        loaded.save(tmp_path / "out", examples=True)


@pytest.mark.usefixtures("blank_figures")
def test_other_points_do_not_replace_what_was_saved(tmp_path: Path) -> None:
    Geometry(CLOUDS).save(tmp_path)
    Geometry(make_points(["corpus"])).save(tmp_path)
    assert istar.load(tmp_path).states == ("corpus",)
    other = make_points(model={**CLOUDS.model, "name": "other.npy"})
    with pytest.raises(UserError, match=r"holds the measures of points, not of other\.npy"):
        Geometry(other).save(tmp_path)


@pytest.mark.usefixtures("blank_figures")
def test_examples_are_saved_if_they_are_asked_for(tmp_path: Path) -> None:
    geometry = Geometry(CLOUDS, EXAMPLES)
    geometry.save(tmp_path)
    assert not (tmp_path / "examples.safetensors").exists()
    geometry.save(tmp_path, examples=True)
    examples = istar.load(tmp_path).examples
    assert examples is not None
    assert (examples.ids, examples.groups) == (EXAMPLES.ids, EXAMPLES.groups)
    assert list(examples.states) == ["queries", "corpus"]
    for state, values in EXAMPLES.states.items():
        assert torch.equal(examples.states[state], values)
    (tmp_path / "examples.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"examples\.safetensors is not a file of examples"):
        istar.load(tmp_path)


def test_what_cannot_be_loaded(measured: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", tmp_path / "missing" / "measures.json"):
        folder = path.parent if path.suffix == ".json" else path
        message = f"{folder / 'measures.json'}: there is no such file; measure a model or vectors: istar measure NAME "
        with pytest.raises(UserError, match=rf"^{re.escape(message)}.*--out {re.escape(str(folder))}$") as error:
            istar.load(path)
        assert "\n" not in str(error.value)
    (tmp_path / "trajectory.csv").write_bytes((measured / "training" / "trajectory.csv").read_bytes())
    with pytest.raises(UserError, match="lacks the folders of its first or last checkpoint"):
        istar.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        make_measurements(), CLOUDS, make_points(TAPS, "places"),
        make_points(["a very long name of a cloud " * 4, "中文" * 30, "b\n<b>"]),
    ],
)  # fmt: skip
def test_text_for_terminals_and_notebooks(content: Any) -> None:
    geometry = Geometry(content)
    lines = repr(geometry).splitlines()
    assert max(map(len, lines)) <= 80
    assert "IsoScore" in lines[2]
    html = geometry._repr_html_()
    assert html.count("<tr") == 1 + len(geometry.states)
    assert "±" in html
    assert "<b>" not in html
    assert "<img" not in html


def test_the_text_is_not_shown_in_a_notebook_that_has_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class ZMQInteractiveShell:
        """The class by which rich knows a notebook, where it shows what it prints."""

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert "IsoScore" in repr(Geometry(CLOUDS))


def test_figures_are_drawn_as_on_the_page_and_outside_of_pyplot() -> None:
    clouds, model = Geometry(CLOUDS), Geometry(make_points(TAPS, "places"))
    figure = clouds.plot("isoscore", "inter_sim")
    first, _ = figure.axes
    assert [bar.get_height() for bar in first.patches] == clouds["isoscore"].tolist()
    assert first.get_ylabel() == "IsoScore"
    ends = np.concatenate([segment[:, 1] for lines in first.collections for segment in lines.get_segments()])
    assert ends == pytest.approx(clouds.interval("isoscore")[["low", "high"]].to_numpy().ravel())
    [line] = model.plot("isoscore").axes[0].lines
    assert line.get_ydata().tolist() == model["isoscore"].tolist()
    shown = ["IsoScore", "InterSim", "average norm", "effective rank", "TwoNN dimension"]
    assert [axes.get_ylabel() for axes in model.plot().axes if axes.get_visible()] == shown
    assert [axes.get_title() for axes in clouds.plot("spectrum").axes] == ["raw", "centered"]
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        assert pyplot.get_fignums() == []
    with pytest.raises(UserError, match="spectrum has another axis"):
        clouds.plot("spectrum", "isoscore")
    with pytest.raises(UserError, match="no measure 'isocore'; did you mean isoscore"):
        clouds.plot("isocore")
    with pytest.raises(UserError, match="intra_sim has no finite value"):
        clouds.plot("intra_sim")
    with pytest.raises(UserError, match=r"^\['isoscore'\] is a list; expected names: plot\("):
        clouds.plot(["isoscore"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "title"),
    [
        (make_points(["points"]), "500 points in 24 dimensions"),
        (make_points(["x"], model={**CLOUDS.model, "name": "a/half.npy"}), "half.npy · 500 points in 24 dimensions"),
        (CLOUDS, "2 clouds of 500 points in 24 dimensions"),
        (make_points(TAPS, "places"), "points · 500 vectors in 24 dimensions"),
        (make_measurements(), "model · 500 tokens"),
    ],
)
def test_a_title_says_how_much_was_measured(content: Measurements, title: str) -> None:
    assert repr(Geometry(content)).splitlines()[0] == title
    assert f"<p>{title}</p>" in Geometry(content)._repr_html_()
    content = replace(content, sources={"all": {name: dict(row) for name, row in content.all_texts.items()}})
    list(content.all_texts.values())[-1]["points"] = 7.0
    first = repr(Geometry(content)).splitlines()[0]
    assert "500" not in first or len(content.all_texts) == 1


def test_numbers_and_headers_are_never_broken() -> None:
    content = make_measurements(["encoder.layers.10.self_attention.output", *TAPS])
    rows = content.all_texts.values()
    for row, points in zip(rows, (262_144, 1_234_567, 60, 500, 7), strict=True):
        row |= {
            "points": float(points),
            "inter_sim": -0.0001234567,
            "isoscore_unbiased": 1 / 3,
            "average_norm": 12345.6,
        }
    lines = repr(Geometry(content)).splitlines()
    assert max(map(len, lines)) <= 80
    for header in ("tokens", "IsoScore", "unbiased", "InterSim", "TwoNN", "norm", "rank"):
        assert f" {header}┃" in lines[2]
    for number in ("262,144", "1,234,567", "60", "-0.0001235", "0.3333", "12,346"):
        assert any(f" {number}│" in line for line in lines), number


def test_settings_of_points_name_their_source() -> None:
    points = istar.measure({"queries": torch.randn(8, 3), "answers": torch.randn(8, 3)})
    assert points.settings["source"] == "queries, answers"
    assert not {"model", "type", "texts", "revision"} & points.settings.keys()
    assert points.label == "queries and answers"


def test_the_command_keeps_the_page_of_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], blank_figures: None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        np.save(f"{name}.npy", np.random.default_rng(0).standard_normal((20, 4)))
    assert main(["measure", "a.npy", "b.npy", "--out", "page"]) == 0
    assert "Geometry of a and b" in Path("page/index.html").read_text()
    before = Path("page/measures.json").read_text()
    assert main(["measure", "a.npy", "b=c.npy", "--out", "page"]) == 2
    assert "page holds the measures of a.npy, b.npy, not of a.npy, c.npy; expected another" in capsys.readouterr().err
    assert Path("page/measures.json").read_text() == before
    assert main(["measure", "a.npy", "b.npy", "--out", "page"]) == 0
    assert main(["measure", "first=c.npy", "--out", "one"]) == 0
    assert istar.load("one").states == ("first",)
    assert istar.load("one").label == "c.npy"
    assert main(["measure", "first=a.npy", "--out", "two"]) == 0
    capsys.readouterr()
    assert main(["compare", "one", "two", "--out", "both"]) == 0
    assert capsys.readouterr().out.startswith("Differences from c.npy, with 95% intervals\n")
    assert main(["compare", "one", "two", "--out", "both", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"][0]["label"] == "a.npy"


@pytest.mark.usefixtures("blank_figures")
def test_the_page_of_clouds_has_their_words(tmp_path: Path) -> None:
    page = Geometry(CLOUDS).save(tmp_path)
    text = read_sections(page)
    assert "The means of the clouds queries and corpus have a distance of 2.5." in text
    assert "Each row is its own group" in text
    assert "points 1,000 clouds 2 dimensions 24" in text
    for word in (
        "document",
        "i(w)",
        "final norm",
        "text",
        "model",
        "hidden state",
        "all layers",
        "last layer",
        "vocabulary",
    ):
        assert word not in text.lower(), word
    names = {path.stem for path in (tmp_path / "tables").iterdir()}
    assert names == {"layers", "gaps", "extremes", "settings"}
    card = (tmp_path / "card.md").read_text()
    assert card.startswith("## Geometry of the points\n\n2 clouds of 500 points in 24 dimensions. Measured")


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(
    ("choice", "sentence"), [("include", "All places of the inputs count"), ("exclude", "do not count")]
)
def test_the_page_of_places_says_which_count(choice: str, sentence: str, tmp_path: Path) -> None:
    settings = {**make_points(TAPS, "places").settings, "special_tokens": choice}
    fields: dict[str, Any] = {"settings": settings, "groups": dict.fromkeys(TAPS, 20)}
    positions = make_measurements().by_position["combined"]
    geometry = Geometry(make_points(TAPS, "places", by_position={"batches": positions}, **fields))
    page = geometry.save(tmp_path)
    text = read_sections(page)
    for shown in (text, " ".join(repr(geometry).split()), geometry._repr_html_()):
        assert sentence in shown
        assert "The vectors are in 20 groups" in shown
    # One place an example is not special.
    single = {name: [values[0]] for name, values in positions["layer_1"].items()}
    for by_position in ({}, {"batches": dict.fromkeys(TAPS, single)}):
        assert sentence not in Geometry(make_points(TAPS, "places", by_position=by_position, **fields))._repr_html_()
    assert "vectors 500 states 4" in text


WARNING = "There are only {}: IsoScore and the ranks are too low; measure more points."


@pytest.mark.parametrize(
    ("num_points", "num_groups", "warning"),
    [
        (10 * WIDTH, 10 * WIDTH, ""),
        (10 * WIDTH - 1, 10 * WIDTH - 1, "239 points of the cloud corpus for 24 dimensions"),
        (5_000, WIDTH, ""),
        (5_000, WIDTH - 1, "5,000 points of the cloud corpus in 23 groups for 24 dimensions"),
    ],
)
def test_too_few_points_or_groups_are_a_finding(num_points: int, num_groups: int, warning: str) -> None:
    content = make_points(groups={"queries": 500, "corpus": num_groups})
    content.all_texts["corpus"]["points"] = float(num_points)
    last = Geometry(content).findings[-1]
    assert (last == WARNING.format(warning)) if warning else not last.startswith("There are only")
    caption = str(make_model_table("m", content).caption)
    assert caption.startswith(last) if warning else "There are only" not in caption


def test_the_public_names_need_no_torch_before_they_are_used() -> None:
    code = "import istar, sys; istar.load, istar.compare, istar.Geometry; print('torch' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert completed.stdout.split() == ["False"], completed.stderr


def test_a_training_with_missing_measures_is_drawn() -> None:
    training = make_training("m")
    geometry = Geometry(training.checkpoints[-1].measurements, training=training)
    assert geometry.plot().axes
