"""The page of a model, of several models, of a training and of several trainings, from synthetic measures."""

import json
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as hf

from istar.cli.main import main
from istar.drawing import page_folder, rendering
from istar.errors import UserError
from istar.files.writing import to_csv
from istar.geometry.collect import measures_file
from istar.geometry.collect.mean_states import Similarity
from istar.geometry.collect.pass_settings import MeasureSettings
from istar.geometry.collect.trajectory_file import Trajectory, TrajectoryPlan
from istar.geometry.show import axis_figures, compare_page, model_tables
from istar.geometry.show.compare import MeasuredModel
from istar.models import tiny
from istar.models.saved_checkpoints import Checkpoint
from istar.texts import demo
from tests.geometry.show.test_axis_figures import T_QUANTILE, make_training
from tests.geometry.synthetic import TAPS, make_measurements, make_model, write_measures
from tests.reports.test_report import balanced, contents, parsed
from tests.waiting import SECONDS

REPOSITORY = Path(__file__).resolve().parents[3]

AXIS_FIGURES = {"isotropy", "directions", "dimension", "spectrum", "norms", "single_dimensions", "neighbours", "shares",
                "outliers"}  # fmt: skip
STATE_FIGURES = {"spectra", "scales", "state_norms", "positions", "frequency", "partition", "final_norm"}
MATRIX_FIGURES = {"matrix_spectra", "projection", "row_norms"}
DETAIL_TABLES = {"massive", "extremes", "matrices", "final_norm", "texts", "settings"}
pytestmark = pytest.mark.usefixtures("blank_figures")
CHECKPOINTS = [Checkpoint(f"step{step}", "m", step=step) for step in (0, 1, 2, 4, 8)]


def read_text(out: Path) -> str:
    """Return the text of a page, with single spaces."""
    return " ".join(" ".join(parsed(out / "index.html").text).split())


def write_training(out: Path) -> Path:
    """Write the page of a training of which one checkpoint could not be measured."""
    measured = Trajectory({checkpoint.label: make_measurements() for checkpoint in CHECKPOINTS}, {"step9": "broken"})
    plan = TrajectoryPlan("org/m", [], MeasureSettings(16), out, command="istar measure m")
    return compare_page.write_training(plan, CHECKPOINTS, measured)


RENDER = rendering.render


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, blank_figures: None) -> dict[str, Path]:
    """Write the four pages, and return their folders by name."""
    folder = tmp_path_factory.mktemp("pages")
    compare_page.write_model(make_measurements(), folder / "model")
    values, errors = ((math.nan, 0.25, 0.5), (math.nan,) * 3), (0.01, math.nan)
    similarity = Similarity("a", "b", ("layer_1", "layer_2"), TAPS[:3], values, errors, 10, 40)
    models = [make_model("a"), make_model("b", taps=TAPS[:3], final_norm=None)]
    compare_page.write_comparison(models, folder / "models", [similarity], "istar compare a b")
    write_training(folder / "training")
    trainings = [make_training("first"), make_training("second", (0, 500))]
    compare_page.write_trainings(trainings, folder / "trainings", "istar compare first second")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "figures", "tables"),
    [
        ("model", MATRIX_FIGURES, {"layers"}),
        ("models", {"differences", "similarity"}, {"models", "layers", "differences", "similarity"}),
        ("training", {"differences"}, {"models", "differences"}),
        ("trainings", {"differences"}, {"models", "differences"}),
    ],
)
def test_every_page_is_complete(pages: dict[str, Path], name: str, figures: set[str], tables: set[str]) -> None:
    out = pages[name]
    page = parsed(out / "index.html")
    assert len(page.ids) == len(set(page.ids))
    for _, target in page.references:
        assert not re.match(r"(https?:)?//", target)
        assert target.startswith("data:") or target.lstrip("#") in page.ids or (out / target).is_file()
    drawn = {path.stem for path in (out / "figures").glob("*.csv")}
    assert drawn == AXIS_FIGURES | STATE_FIGURES | figures
    written = {path.name for path in (out / "tables").iterdir()}
    assert written == {f"{table}.{suffix}" for table in DETAIL_TABLES | tables for suffix in ("csv", "md", "tex")}
    for path in (out / "tables").glob("*.tex"):
        balanced(path.read_text(encoding="utf-8"))
    text = read_text(out)
    assert "What stands out" in text
    assert "The model has read each document alone. The measures are over the hidden states" in text
    assert "2.26 for 10 groups" in text
    assert "Not measured," not in text
    assert "nan" not in (out / "tables" / "matrices.md").read_text().lower()


def test_the_page_of_a_model(pages: dict[str, Path]) -> None:
    text = read_text(pages["model"])
    assert "Geometry of model" in text
    assert "istar measure x" in text
    assert "Everything took 3.0 seconds on cpu: also" in text
    saved = measures_file.read_measurement(pages["model"] / "measures.json")
    assert measures_file.file_contents(saved) == measures_file.file_contents(make_measurements())
    frame = pd.read_csv(pages["model"] / "tables" / "layers.csv").set_index(["source", "layer"])
    assert frame.loc[("talk", "layer_1"), "isoscore"] == make_measurements().sources["talk"]["layer_1"]["isoscore"]
    frame = pd.read_csv(pages["model"] / "tables" / "final_norm.csv", index_col="measure")
    assert (float(frame.loc["gain", "value"]), float(frame.loc["outlier_gains", "value"])) == (1, 3)
    texts = pd.read_csv(pages["model"] / "tables" / "texts.csv", index_col="text")
    assert texts.loc["news", "bytes_per_document"] == 50
    card = (pages["model"] / "card.md").read_text()
    assert "model · 500 tokens of news, talk: separate documents of at most 512 tokens, special" in card
    [row] = [line.split(" | ") for line in card.splitlines() if line.startswith("| layer_1")]
    assert float(row[1]) == pytest.approx(make_measurements().all_texts["layer_1"]["isoscore"], abs=1e-4)


def test_the_page_of_several_models(pages: dict[str, Path]) -> None:
    text = read_text(pages["models"])
    assert "Geometry of a and b" in text
    assert "do not have the same documents in the same groups" in text
    frame = pd.read_csv(pages["models"] / "comparison.csv")
    assert len(frame) == 7
    assert frame["relative_depth"].tolist()[:3] == [0, 0.5, 1]
    similarity = pd.read_csv(pages["models"] / "tables" / "similarity.csv")
    assert similarity["cka"].tolist() == pytest.approx([math.nan, 0.25, 0.5, *[math.nan] * 3], nan_ok=True)
    assert similarity["cka_error"].notna().tolist() == [False, False, True, *[False] * 3]
    differences = pd.read_csv(pages["models"] / "tables" / "differences.csv")
    assert set(differences["measure"]) == {"isoscore", "inter_sim"}


def test_the_pages_of_trainings(pages: dict[str, Path]) -> None:
    text = read_text(pages["training"])
    assert "Geometry of m over training" in text
    assert "Not measured: step9: broken" in text
    assert len(pd.read_csv(pages["training"] / "tables" / "models.csv")) == 5
    assert len(pd.read_csv(pages["training"] / "trajectory.csv")) == 5 * (3 * 4 + 2 + 1)
    text = read_text(pages["trainings"])
    assert "Geometry of first and second over training" in text
    frame = pd.read_csv(pages["trainings"] / "trajectories.csv")
    assert frame.groupby("model")["step"].nunique().to_dict() == {"first": 5, "second": 2}
    models = pd.read_csv(pages["trainings"] / "tables" / "models.csv", index_col="model")
    assert models.loc["second", "last step"] == 500
    assert models.loc["second", "I(W), output"] == 0.8


def test_tables_have_half_widths_and_stay_short(pages: dict[str, Path]) -> None:
    sheet = model_tables.build_layer_sheet([make_model()])
    row = sheet.rows_by_group["news"][1]
    assert row[sheet.header.index("IsoScore")].text == f"0.200 ± {T_QUANTILE * 0.01:.3f}"
    assert (
        row[sheet.header.index("IntraSim")].text == f"{make_measurements().sources['news']['layer_1']['intra_sim']:.4g}"
    )
    assert len(set(sheet.header)) == len(sheet.header)
    many = make_model(taps=["embeddings", *(f"layer_{number}" for number in range(1, 30))])
    sheet = model_tables.build_layer_sheet([many])
    assert (list(sheet.rows_by_group), len(sheet.frame)) == (["combined"], 90)
    assert len(model_tables.build_dimension_sheet("extremes", many.measurements).rows) == 30
    massive = model_tables.build_dimension_sheet("massive", make_measurements(taps=["layer_1"]))
    assert [[entry.text for entry in row] for row in massive.rows] == [
        ["layer 1", "1415", "-3,000", "2,000", "0", "the"]
    ] * 3
    [row] = model_tables.build_model_sheet([make_model("a", taps=TAPS)]).rows
    assert row[0].text == "a"
    # What all checkpoints share is a note, and not a column; the file has it.
    text = read_text(pages["training"])
    assert "All checkpoints" in text
    assert "In all rows: matrix output; type gpt2; layers 2; dimensions 24; points 500." in text
    columns = list(pd.read_csv(pages["training"] / "tables" / "models.csv"))
    assert {"type", "layers", "dimensions", "points", "matrix"} <= {*columns}
    header = (pages["training"] / "tables" / "models.md").read_text().splitlines()[2]
    assert header.startswith("| checkpoint | IsoScore |")
    assert "±" in row[1].text


def test_what_is_missing_is_explained(pages: dict[str, Path], tmp_path: Path) -> None:
    measured = make_measurements(
        final_norm=None, norms={}, extremes={}, rows={}, by_position={}, gride={}, massive={}, readings={},
        matrices={"input": make_measurements().matrices["input"]}, text_hashes={}, seconds=None, command="",
        settings={**make_measurements().settings, "groups": 0, "measures": "basic"},
    )  # fmt: skip
    for taps in measured.sources.values():
        for measures in taps.values():
            for name in ("inter_sim", "intra_sim", "adjusted_intra_sim", "two_nn"):
                measures.pop(name)
            for name in ("isoscore_error", "inter_sim_error", "two_nn_error"):
                measures.pop(name, None)
    out = compare_page.write_model(measured, tmp_path / "page").parent
    text = read_text(out)
    assert "not defined in any layer: IntraSim, IntraSim - InterSim." in text
    assert "Not on this page: Cosines by layer;" in text
    assert "This architecture has no final normalization with a gain" in text
    assert "There are no standard errors from groups of documents" in text
    assert "Not recorded." in text
    assert "No layer has massive activations, or they were not measured" in text
    assert not (out / "figures" / "directions.svg").exists()
    # A page that is written again has no earlier files, and measures that are read again have the same page.
    compare_page.write_model(measures_file.read_measurement(pages["model"] / "measures.json"), out)
    assert (out / "figures" / "directions.svg").is_file()
    again, expected = contents(out), contents(pages["model"])
    for files in (again, expected):
        del files[".istar/manifest.json"]  # lists the files in another order
    assert again == expected


NASTY = '<script>alert(1)</script> & "q" $x_1$ \x01\n {y}'


def test_hostile_names(tmp_path: Path) -> None:
    measured = make_measurements(texts=[NASTY, "_hidden 中", "combined"])
    measured = replace(
        measured,
        model={**measured.model, "name": f"mine/{NASTY}"},
        settings={**measured.settings, "texts": {NASTY: "/a/<b>", "_hidden": "x"}},
        command=f"istar measure '{NASTY}'",
    )
    out = compare_page.write_model(measured, tmp_path / "page").parent
    page = parsed(out / "index.html")
    assert [tag for tag, _ in page.tags if tag == "script"] == ["script"]
    text = "".join(page.text)
    for hostile_text in ("/a/<b>", f"mine/{NASTY}", f"istar measure '{NASTY}'"):
        assert hostile_text in text
    plots = axis_figures.plot_measures(axis_figures.make_layer_axis([MeasuredModel("m", measured)]), 24)
    svg = RENDER(plots[0], ["svg"])["svg"]
    ElementTree.fromstring(svg)
    # The legend shows the label despite its leading underscore.
    assert "_hidden 中" in svg.decode()


def test_a_folder_of_another_page_or_model_is_refused(pages: dict[str, Path], tmp_path: Path) -> None:
    out = shutil.copytree(pages["model"], tmp_path / "out")
    (out / ".pass.0.0-1").write_bytes(b"state")
    (out / "thesis.tex").write_text("mine")
    page_folder.check(out, compare_page.MODEL_KIND)
    contents_before = contents(out)
    other = make_measurements(model={**make_measurements().model, "name": "other"}, identity="4567")
    with pytest.raises(UserError, match="holds the measures of model, not of other; expected another folder"):
        compare_page.write_model(other, out)
    (out / "figures" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds figures/notes\.txt, which is no part of a page of measures"):
        page_folder.check(out, compare_page.MODEL_KIND)
    (out / "figures" / "notes.txt").unlink()
    assert contents(out) == contents_before


def test_measures_are_saved_even_if_the_page_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no room to draw")

    monkeypatch.setattr(compare_page, "_make_plots", fail)
    with pytest.raises(RuntimeError):
        compare_page.write_model(make_measurements(), tmp_path / "out")
    saved = measures_file.read_measurement(tmp_path / "out" / "measures.json")
    assert measures_file.file_contents(saved) == measures_file.file_contents(make_measurements())


def test_models_without_intervals_of_differences_have_a_sentence() -> None:
    other = make_model("b", text_hashes={"other": "23"})
    [sentence] = compare_page.describe_error_methods([make_model("a"), other])
    assert sentence.startswith("Differences of b from a are not computed: they were measured over different texts")


@pytest.mark.slow
def test_both_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One model has been measured, the other has not; CKA needs both models and a text."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        hf.BertModel(tiny.make_tiny_config(len(tokenizer))).save_pretrained(name)
        tokenizer.save_pretrained(name)
    Path("text.txt").write_text("\n".join(" ".join(demo.vocabulary()[row : row + 9]) for row in range(40)))
    options = ["--text", "text.txt", "--length", "16", "--examples", "30"]
    assert main(["measure", "a", *options, "--out", "first"]) == 0
    assert "first/index.html" in capsys.readouterr().out
    assert main(["compare", "first", "new=b", "--text", "text.txt", "--cka-documents", "30", "--out", "page"]) == 0
    captured = capsys.readouterr()
    assert "warning: new was measured with other settings than a: length 512 instead of 16" in captured.err
    assert set(pd.read_csv("page/tables/similarity.csv")["second"]) == {"new"}
    assert Path("page/figures/similarity.svg").is_file()
    assert {path.name for path in Path().iterdir()} == {"a", "b", "text.txt", "first", "page"}
    assert main(["compare", "first", "page/models/new", "--json", "--out", "again"]) == 0
    assert [row["model"] for row in json.loads(capsys.readouterr().out)["models"]] == ["a", "b"]
    assert main(["compare", "first", "page/models/new", "--out", "first"]) == 2
    assert "would replace files of the input" in capsys.readouterr().err


@pytest.mark.slow
def test_measured_folders_are_compared_without_torch(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        write_measures(make_measurements(), Path(folder))
    code = "import sys; from istar.cli.main import main; print(main(sys.argv[1:]), *sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code, "compare", *folders, "--out", str(tmp_path / "page")],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    exit_code, *modules = process.stdout.splitlines()[-1].split()
    assert (exit_code, "matplotlib.figure" in modules) == ("0", True)
    assert not {"torch", "datasets", "transformers"}.intersection(modules)


def write_trajectory(folder: Path, model: str, steps: tuple[int, ...] = (0, 1)) -> Path:
    """Write the table of a training, without the folders of its checkpoints."""
    table = make_training("m", steps).table
    keys = {"model": model, "weights": "w", "revision": [f"step{step}" for step in table["step"]]}
    folder.mkdir(parents=True)
    (folder / "trajectory.csv").write_text(to_csv(table.assign(**keys)))
    return folder


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("step1,1,", "step1,,", "step1 has no step; measure the training with --steps"),
        ("weights", "hash", "could not convert string to float: 'w'; measure the training again"),
        (r"(?s)\n.*", "\n", "it has no rows; measure the training again"),
    ],
)
def test_a_damaged_table(old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = (write_trajectory(tmp_path / name, "m") for name in ("good", "bad"))
    text = (bad / "trajectory.csv").read_text()
    (bad / "trajectory.csv").write_text(re.sub(old, new, text, count=1))
    assert main(["compare", str(good), str(bad), "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{bad}/trajectory.csv" in line
    assert message in line
    assert not (tmp_path / "out").exists()


def test_trainings_are_compared_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(write_trajectory(tmp_path / name, "org/m", (0, 7))) for name in ("first", "second"))
    for step in (0, 7):
        write_measures(make_measurements(), Path(first) / f"step{step}")
    out = tmp_path / "out"
    assert main(["compare", first, f"large={second}", "--out", str(out)]) == 0
    assert "At the last step of each training" in capsys.readouterr().out
    text = read_text(out)
    assert "Geometry of m (first) and large over training" in text
    assert "The first or last checkpoint of large has no measures.json any more, so that 10 groups" in text
    assert set(pd.read_csv(out / "trajectories.csv")["model"]) == {"m (first)", "large"}
    (tmp_path / "model").mkdir()
    assert main(["compare", first, str(tmp_path / "model"), "--out", str(out)]) == 2
    assert "model holds no trajectory.csv; expected folders of istar measure --revis" in capsys.readouterr().err
    assert main(["compare", first, second, "--text", "x.txt", "--out", str(out)]) == 2
    assert "--text does not go with folders of trainings" in capsys.readouterr().err
    assert main(["compare", first, second, "--out", first]) == 2
