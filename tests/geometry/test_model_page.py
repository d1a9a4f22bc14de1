"""The page of `istar measure`, for tiny models."""

import csv
import itertools
import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf

from istar.cli.main import main
from istar.errors import UserError
from istar.geometry import arrays, measure, measures_file, model_figures, model_page
from istar.geometry.corpus import Source
from istar.geometry.measures_file import Measurements
from istar.geometry.spheres import make_spheres
from istar.geometry.stream import Pass
from istar.models import tiny
from istar.tasks import demo
from tests.reports.test_report import balanced, contents, inline_parts, parsed

pytestmark = pytest.mark.slow

TOKENIZER = tiny.make_tokenizer(demo.vocabulary())
SHAPE: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "vocab_size": len(TOKENIZER),
}  # fmt: skip
WORDS = demo.vocabulary()[:20]


def save(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    made = hf.BertModel(hf.BertConfig(**SHAPE)) if kind == "bert" else hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**SHAPE, **ends, tie_word_embeddings=False)
    )  # fmt: skip
    made.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def text(path: Path, seed: int, lines: int = 60) -> Source:
    random = np.random.default_rng(seed)
    path.write_text("\n".join(" ".join(random.choice(WORDS, 9)) for _ in range(lines)))
    return Source(path.stem, path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def several(place: Path) -> Measurements:
    """Measurements of an encoder over two texts."""
    found = [text(place / f"{name}.txt", seed) for seed, name in enumerate(("news", "talk"))]
    settings = Pass(16, measures="all")
    return measure.measure_model(
        str(save(place / "bert", "bert")), found, settings, place / "out", command="istar measure x"
    )


@pytest.fixture(scope="module")
def decoder(place: Path) -> Measurements:
    """Measurements of a decoder with a final normalization and untied output embeddings over one text."""
    found = [text(place / "one.txt", 2)]
    return measure.measure_model(str(save(place / "neox", "neox")), found, Pass(16, sample=0), place / "out2")


@pytest.fixture(scope="module")
def written(several: Measurements, place: Path) -> Path:
    return model_page.write(several, place / "written").parent


def same(own: Measurements, other: Measurements) -> bool:
    # The texts are compared, since NaN does not equal itself.
    return measures_file.file_contents(own) == measures_file.file_contents(other)


def without_times(measured: Measurements) -> Measurements:
    """Leave out how long the measurement took; that differs each time."""
    readings = {
        text: {name: value for name, value in reading.items() if "seconds" not in name}
        for text, reading in measured.readings.items()
    }
    return replace(measured, readings=readings, seconds=None)


def test_the_page_is_complete_and_self_contained(written: Path) -> None:
    read = parsed(written / "index.html")
    said = (written / "index.html").read_text(encoding="utf-8")
    assert len(read.ids) == len(set(read.ids))
    for _, target in read.references:
        assert not re.match(r"(https?:)?//", target)
        assert target[1:] in read.ids if target.startswith("#") else (written / target).is_file()
    inline_parts(written / "index.html")
    assert len(re.findall(r"<desc[^>]*>[^<]+</desc>", said)) == len(PICTURES)
    assert "istar measure x" in " ".join(read.text)


PICTURES = {
    "isotropy", "directions", "dimension", "scales", "spectrum", "spectra", "single_dimensions", "outliers", "norms",
    "state_norms", "positions", "frequency", "partition", "matrix_spectra", "projection", "row_norms", "spheres",
}  # fmt: skip
TABLES = {"layers", "massive", "extremes", "matrices", "final_norm", "spheres", "texts", "settings"}


def test_the_texts_and_the_time_are_on_the_page(written: Path, several: Measurements) -> None:
    frame = pd.read_csv(written / "tables" / "texts.csv", index_col="text")
    assert list(frame.index) == list(several.readings) == list(several.sources)
    for text, path in several.settings["texts"].items():
        lines = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
        row = frame.loc[text]
        assert row["documents"] == len(lines)
        assert row["bytes_per_document"] == pytest.approx(sum(len(line.encode()) for line in lines) / len(lines))
        assert row["tokens"] == several.sources[text]["embeddings"]["tokens"]
    text = " ".join(parsed(written / "index.html").text)
    assert "Texts and time" in text
    assert f"Everything took {several.seconds:,.1f} seconds on cpu: also" in text


def test_measures_without_times_have_a_page(several: Measurements, tmp_path: Path) -> None:
    """Files of earlier versions record no times."""
    model_page.write(replace(several, readings={}, seconds=None), tmp_path / "page")
    assert "Not recorded." in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")


def test_every_file(written: Path, several: Measurements) -> None:
    assert {path.name for path in (written / "figures").iterdir()} == {
        f"{name}.{suffix}" for name in PICTURES for suffix in ("svg", "pdf", "png")
    }
    for name in PICTURES:
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(written / "figures" / f"{name}.svg")
    assert {path.name for path in (written / "tables").iterdir()} == {
        f"{name}.{suffix}" for name in TABLES for suffix in ("csv", "md", "tex")
    }
    for name in TABLES - {"final_norm", "massive"}:
        balanced((written / "tables" / f"{name}.tex").read_text(encoding="utf-8"))
    frame = pd.read_csv(written / "tables" / "layers.csv").set_index(["source", "layer"])
    assert len(frame) == 9
    for source, taps in several.sources.items():
        for tap, figures in taps.items():
            assert frame.loc[(source, tap), "isoscore"] == pytest.approx(figures["isoscore"], rel=1e-12)
    assert same(measures_file.read(written / "measures.json"), several)


def test_lines_are_the_figures_of_their_text(several: Measurements) -> None:
    by_name = {plot.name: plot for plot in model_figures.plot_layers(several)}
    inter, intra, _ = by_name["directions"].panels
    assert [line.label for line in inter.lines] == ["news", "talk", "combined"]
    assert by_name["directions"].reference_label == "combined"
    for line in intra.lines:
        assert line.y == tuple(own["intra_sim"] for own in several.sources[line.label].values())
    assert by_name["dimension"].x_names == {0.0: "emb.", 1.0: "1", 2.0: "2"}
    assert all(not model_figures.find_missing_measures(plot) for plot in by_name.values())


def test_spectra_are_absolute_and_share_their_axes(several: Measurements) -> None:
    plot = model_figures.plot_spectra(several)
    assert plot.share_axes
    assert plot.log_y
    for panel, form in zip(plot.panels, ("raw", "centered"), strict=True):
        for line in panel.lines:
            values = several.spectra["combined"][line.label.replace(" ", "_")][form]
            assert line.y == tuple(values[: len(line.y)])


def test_a_final_norm_is_the_last_named_tick(decoder: Measurements, tmp_path: Path) -> None:
    by_name = {plot.name: plot for plot in model_figures.plot_layers(decoder)}
    assert by_name["norms"].x_names == {0.0: "emb.", 1.0: "1", 2.0: "2", 3.0: "final\nnorm"}
    assert model_figures.find_missing_measures(by_name["dimension"]) == ["TwoNN dimension"]
    assert [panel.task for panel in model_figures.plot_partition(decoder).panels] == [
        "input embeddings",
        "output embeddings",
    ]
    out = model_page.write(decoder, tmp_path / "page").parent
    said = " ".join(" ".join(parsed(out / "index.html").text).split())
    assert "Not measured, or not defined in any layer: TwoNN dimension. Some measures need --measures all." in said
    assert "norm of g divided by the square root of d" in said
    assert "This architecture has no final normalization" not in said
    frame = pd.read_csv(out / "tables" / "final_norm.csv", index_col="figure")
    assert float(frame.loc["gain", "value"]) == pytest.approx(1)


def test_a_missing_final_norm_is_explained(written: Path) -> None:
    said = " ".join(" ".join(parsed(written / "index.html").text).split())
    assert "This architecture has no final normalization with a gain" in said
    assert "The model has no output embeddings of its own." in said


@pytest.mark.parametrize("taps", [2, 3, 8, 13, 14, 26, 50])
@pytest.mark.parametrize("norm", [False, True])
def test_ticks_have_room(taps: int, norm: bool) -> None:
    names = ["embeddings", *(f"layer_{number}" for number in range(1, taps)), *(["final_norm"] if norm else [])]
    name_by_position = model_figures._make_tick_names(names)
    assert len(name_by_position) <= 8
    assert name_by_position[0.0] == "emb."
    positions = sorted(name_by_position)
    assert min(after - before for before, after in itertools.pairwise(positions)) >= math.ceil(taps / 7)
    assert all(str(int(x)) == name for x, name in name_by_position.items() if name.isdigit())
    assert (name_by_position.get(float(taps)) == "final\nnorm") == norm


NASTY = '<script>alert(1)</script> & "q" $x_1$ \x01\n {y}'


def test_hostile_names(several: Measurements, tmp_path: Path) -> None:
    own = {
        NASTY: several.sources["news"],
        "_hidden 中": several.sources["talk"],
        "combined": several.sources["combined"],
    }
    hostile = replace(
        several,
        model={**several.model, "name": f"mine/{NASTY}"},
        sources=own,
        settings={**several.settings, "texts": {NASTY: "/a/<b>", "_hidden": "x"}},
        command=f"istar measure '{NASTY}'",
    )
    out = model_page.write(hostile, tmp_path / "page").parent
    read = parsed(out / "index.html")
    inline_parts(out / "index.html")
    # The two remaining ones are in the spheres' captions.
    assert [tag for tag, _ in read.tags if tag == "b"] == ["b", "b"]
    said = "".join(read.text)
    for told in ("/a/<b>", f"mine/{NASTY}", f"istar measure '{NASTY}'"):
        assert told in said
    for path in out.rglob("*.svg"):
        ElementTree.parse(path)
    # The legend shows the label despite its leading underscore.
    assert "_hidden 中" in (out / "figures" / "isotropy.svg").read_text(encoding="utf-8")


def test_many_layers_and_texts_stay_readable(several: Measurements) -> None:
    taps = {f"layer_{number}": several.extremes["news"]["layer_1"] for number in range(1, 25)}
    large = replace(several, extremes={"combined": taps, "news": taps})
    sheet = model_page._build_extremes_sheet(large)
    assert (len(sheet.rows), len(sheet.frame)) == (24, 144)
    figures = dict.fromkeys(taps, several.sources["news"]["layer_1"])
    sheet = model_page._build_layer_sheet(replace(several, sources=dict.fromkeys(["a", "b", "c", "combined"], figures)))
    assert len(sheet.rows) == len(sheet.frame) == 96
    assert list(model_page._shorten_sheet(sheet, "combined").rows_by_group) == ["combined"]
    assert list(model_page._shorten_sheet(model_page._build_layer_sheet(several), "combined").rows_by_group) == [
        "news",
        "talk",
        "combined",
    ]


def test_labels_differ_and_are_short() -> None:
    labels = model_figures._shorten_labels(["a" * 90, "a" * 91, "b\nc", "b c", "\x00", "_d"])
    assert len(set(labels)) == 6
    assert max(map(len, labels)) <= model_figures._MAX_LABEL + 4
    assert labels[2:] == ["b c", "b c (4)", "text", " _d"]


def test_undefined_measures(several: Measurements, tmp_path: Path) -> None:
    nan = {
        source: {
            tap: {key: math.nan if key.endswith("intra_sim") or key == "inter_sim" or tap == "layer_1" else value
                  for key, value in figures.items() if key != "two_nn"}
            for tap, figures in taps.items()
        }
        for source, taps in several.sources.items()
    }  # fmt: skip
    for taps in nan.values():
        for figures in taps.values():
            figures["tokens"] = 5.0
    bare = replace(
        several, sources=nan, norms={}, extremes={}, rows={}, by_position={}, by_frequency={}, gride={}, command=""
    )
    out = model_page.write(bare, tmp_path / "page").parent
    said = " ".join(" ".join(parsed(out / "index.html").text).split())
    assert "not defined in any layer: InterSim, IntraSim, IntraSim - InterSim." in said
    # Norms, extreme dimensions, rows of the matrix, their norms, positions, frequencies and Gride.
    assert said.count("Not measured.") == 7
    assert not (out / "figures" / "directions.svg").exists()
    assert "istar measure" in said
    assert "nan" not in (out / "tables" / "layers.md").read_text().lower()
    with (out / "measures.csv").open() as file:
        assert {row["inter_sim"] for row in csv.DictReader(file)} == {""}


def test_the_same_measures_give_the_same_files(several: Measurements, written: Path, place: Path) -> None:
    first = contents(written)
    again = measure.measure_model(
        several.model["name"], [Source(name, Path(path)) for name, path in several.settings["texts"].items()],
        Pass(16, measures="all"), place / "again", command="istar measure x",
    )  # fmt: skip
    assert same(without_times(again), without_times(several))
    model_page.write(measures_file.read(written / "measures.json"), written)
    assert contents(written) == first


def test_no_mathematical_notation(written: Path) -> None:
    """matplotlib's math text is switched off, since names may contain dollar signs."""
    for name in ("spectra", "matrix_spectra", "state_norms"):
        assert "mathdefault" not in (written / "figures" / f"{name}.svg").read_text(encoding="utf-8")


# What the figures are made of.


def test_rows_of_a_matrix() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(5_000, 6) * torch.tensor([5.0, 3, 1, 1, 1, 1]) + 4
    found = arrays.summarize_rows(matrix, torch.arange(5_000))
    assert found["ids"][0] == 0
    assert found["ids"][-1] == 4_999
    assert len(found["ids"]) == arrays.MAX_ROWS
    assert found["counts"] == found["ids"]
    for form, points in (("raw", matrix), ("centered", matrix - matrix.mean(0))):
        left, values, _ = np.linalg.svd(points.double().numpy(), full_matrices=False)
        for own, axis in zip(found[form], (0, 1), strict=True):
            expected = (left * values)[found["ids"], axis]
            assert abs(np.corrcoef(own, expected)[0, 1]) == pytest.approx(1, abs=1e-6)
            assert np.abs(own) == pytest.approx(np.abs(expected), rel=1e-3, abs=1e-3)
    assert sum(found["norms"]["counts"]) == 5_000
    assert found["norms"]["edges"][0] == pytest.approx(matrix.norm(dim=1).min().item())


@pytest.mark.parametrize("place", [-5.0, 5.0])
def test_directions_have_a_fixed_sign(place: float) -> None:
    """The largest coordinate of each direction is positive, whatever sign the eigensolver returns."""
    torch.manual_seed(0)
    x, _ = arrays.summarize_rows(0.1 * torch.randn(50, 3) + torch.tensor([0, place, 0]))["raw"]
    assert np.mean(x) == pytest.approx(place, rel=0.05)


def test_histograms_and_extremes(several: Measurements) -> None:
    for taps in (several.norms["combined"], several.norms["news"]):
        for tap, own in taps.items():
            assert len(own["edges"]) == len(own["counts"]) + 1
            assert own["counts"][0] > 0
            assert own["counts"][-1] > 0
            middle = np.average(np.sqrt(np.array(own["edges"][1:]) * own["edges"][:-1]), weights=own["counts"])
            source = "combined" if taps is several.norms["combined"] else "news"
            assert middle == pytest.approx(several.sources[source][tap]["average_norm"], rel=0.03)
    for found in several.extremes["combined"].values():
        sizes = [abs(one["mean_by_typical_deviation"]) for one in found]
        assert sizes == sorted(sizes, reverse=True)


def test_colours_show_the_frequency_if_it_is_known() -> None:
    rows = {"ids": [0, 10, 20, 30], "counts": [0, 5, 9, 1]}
    shades, caption = model_figures._group_by_colour(rows)
    assert list(shades) == ["most frequent quarter", "second", "third", "rarest quarter", "not in the texts"]
    assert sorted(place for places in shades.values() for place in places) == [0, 1, 2, 3]
    assert shades["not in the texts"] == [0]
    assert "frequency in these texts" in caption
    for counts in ({"counts": [0, 0, 0, 1]}, {"counts": None}):
        shades, caption = model_figures._group_by_colour({**rows, **counts})
        assert sorted(place for places in shades.values() for place in places) == [0, 1, 2, 3]
        assert "the colour is the id" in caption


def test_measures_of_the_spheres() -> None:
    centered, moved = make_spheres()
    assert centered.inter_sim == pytest.approx(-1 / 499)
    assert centered.isoscore == pytest.approx(moved.isoscore, abs=1e-9)
    assert centered.isoscore > 0.95
    assert centered.partition_both > 0.9
    assert moved.inter_sim > 0.7
    assert moved.partition_both < moved.partition_as_computed < 0.3


# Writing.


@pytest.mark.parametrize("kind", ["thesis", "page", "tables", "file", "other json", "link"])
def test_foreign_files_are_not_replaced(
    place: Path, several: Measurements, tmp_path: Path, kind: str, capsys: Any
) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "link":
        (tmp_path / "real").mkdir()
        out.symlink_to(tmp_path / "real")
    else:
        name = {"thesis": "thesis.tex", "page": "index.html", "tables": "tables/a.csv", "other json": "measures.json"}
        (out / name[kind]).parent.mkdir(parents=True)
        (out / name[kind]).write_text("{}")
    before = contents(tmp_path)
    arguments = ["measure", several.model["name"], "--text", str(place / "news.txt"), "--out", str(out)]
    assert main(arguments) == 2
    [told] = capsys.readouterr().err.splitlines()
    assert str(out) in told
    assert contents(tmp_path) == before


def test_an_interrupted_pass_and_earlier_measures_are_accepted(
    several: Measurements, written: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".pass.0.0-1").write_bytes(b"state")
    model_page.check_output_folder(out, several.model["name"])
    shutil.copy(written / "measures.json", out)
    model_page.check_output_folder(out, several.model["name"])
    model_page.write(several, out)
    assert (out / ".pass.0.0-1").read_bytes() == b"state"
    (out / "figures" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds figures/notes\.txt, which is no part of a page of measures"):
        model_page.write(several, out)
    assert (out / "figures" / "notes.txt").read_text() == "mine"


def test_another_model_does_not_replace_the_page(
    several: Measurements, decoder: Measurements, place: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    model_page.write(several, out)
    before = contents(out)
    first, second = several.model["name"], decoder.model["name"]
    message = f"--out {out} holds the measures of {first}, not of {second}; expected another folder: --out <folder>"
    with pytest.raises(UserError) as caught:
        model_page.write(decoder, out)
    assert str(caught.value) == message
    # The command refuses before it measures.
    assert main(["measure", second, "--text", str(place / "news.txt"), "--out", str(out)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"
    assert contents(out) == before
    # The same model may be measured again, also from another place.
    model_page.check_output_folder(out, first)
    shutil.copytree(first, tmp_path / "moved")
    model_page.check_output_folder(out, str(tmp_path / "moved"))
    model_page.write(replace(several, model={**several.model, "name": str(tmp_path / "moved")}), out)


def test_a_page_that_is_written_again_has_no_earlier_files(several: Measurements, tmp_path: Path) -> None:
    out = model_page.write(several, tmp_path / "out").parent
    model_page.write(replace(several, rows={}, norms={}), out)
    assert {path.stem for path in (out / "figures").iterdir()} == PICTURES - {"projection", "row_norms", "state_norms"}


def test_measures_are_saved_even_if_the_page_fails(
    several: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no room to draw")

    monkeypatch.setattr(model_page, "_make_plots", fails)
    with pytest.raises(RuntimeError):
        model_page.write(several, tmp_path / "out")
    assert same(measures_file.read(tmp_path / "out" / "measures.json"), several)


def test_a_large_model_has_a_small_file(several: Measurements) -> None:
    """The shape is that of BERT-base over three texts."""
    layer = {
        "raw": arrays.round_digits(np.random.default_rng(0).random(768)),
        "centered": arrays.round_digits(np.full(768, 1 / 3)),
    }
    taps = {f"layer_{number}": layer for number in range(13)}
    large = replace(several, spectra=dict.fromkeys("abcd", taps))
    assert len(measures_file.file_contents(large)["measures.json"]) < 2_000_000


def test_the_command(place: Path, several: Measurements, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["measure", several.model["name"], "--text", f"a b={place / 'news.txt'}", "--length", "16"]
    assert main(arguments) == 0
    assert "geometry/index.html" in capsys.readouterr().out
    found = json.loads(Path("geometry/measures.json").read_text())
    assert found["command"] == f"istar measure {several.model['name']} --text 'a b={place / 'news.txt'}' --length 16"
    assert sorted(path.name for path in Path("geometry").iterdir()) == [
        "figures", "index.html", "measures.csv", "measures.json", "tables",
    ]  # fmt: skip
