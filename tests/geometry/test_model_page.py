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
from istar.geometry.collect import figure_data, measure, measures_file
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.collect.stream import Pass
from istar.geometry.show import model_figures, model_page
from istar.geometry.show.spheres import make_spheres
from istar.inputs import demo, tiny
from istar.inputs.corpus import Source
from tests.reports.test_report import balanced, contents, inline_parts, parsed

pytestmark = pytest.mark.slow

TOKENIZER = tiny.make_tokenizer(demo.vocabulary())
SHAPE: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "vocab_size": len(TOKENIZER),
}  # fmt: skip
WORDS = demo.vocabulary()[:20]


def save_model(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    special_ids = {"bos_token_id": 1, "eos_token_id": 1}
    model = hf.BertModel(hf.BertConfig(**SHAPE)) if kind == "bert" else hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**SHAPE, **special_ids, tie_word_embeddings=False)
    )  # fmt: skip
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def write_text(path: Path, seed: int, num_lines: int = 60) -> Source:
    random = np.random.default_rng(seed)
    path.write_text("\n".join(" ".join(random.choice(WORDS, 9)) for _ in range(num_lines)))
    return Source(path.stem, path)


@pytest.fixture(scope="module")
def work_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def encoder_measures(work_folder: Path) -> Measurements:
    """Return measurements of an encoder over two texts."""
    sources = [write_text(work_folder / f"{name}.txt", seed) for seed, name in enumerate(("news", "talk"))]
    settings = Pass(16, measures="all")
    return measure.measure_model(
        str(save_model(work_folder / "bert", "bert")), sources, settings, work_folder / "out", command="istar measure x"
    )


@pytest.fixture(scope="module")
def decoder_measures(work_folder: Path) -> Measurements:
    """Return measurements of a decoder with a final normalization and untied output embeddings over one text."""
    sources = [write_text(work_folder / "one.txt", 2)]
    return measure.measure_model(
        str(save_model(work_folder / "neox", "neox")), sources, Pass(16, sample=0), work_folder / "out2"
    )


@pytest.fixture(scope="module")
def page_folder(encoder_measures: Measurements, work_folder: Path) -> Path:
    return model_page.write(encoder_measures, work_folder / "written").parent


def are_equal(first: Measurements, second: Measurements) -> bool:
    # Compare the contents of the files, because NaN does not equal itself.
    return measures_file.file_contents(first) == measures_file.file_contents(second)


def without_times(measured: Measurements) -> Measurements:
    """Return a copy of measurements without the times, which differ between two measurements of the same model."""
    readings = {
        source: {name: value for name, value in reading.items() if "seconds" not in name}
        for source, reading in measured.readings.items()
    }
    return replace(measured, readings=readings, seconds=None)


def test_the_page_is_complete_and_self_contained(page_folder: Path) -> None:
    page = parsed(page_folder / "index.html")
    html = (page_folder / "index.html").read_text(encoding="utf-8")
    assert len(page.ids) == len(set(page.ids))
    for _, target in page.references:
        assert not re.match(r"(https?:)?//", target)
        assert target[1:] in page.ids if target.startswith("#") else (page_folder / target).is_file()
    inline_parts(page_folder / "index.html")
    assert len(re.findall(r"<desc[^>]*>[^<]+</desc>", html)) == len(PICTURES)
    assert "istar measure x" in " ".join(page.text)


PICTURES = {
    "isotropy", "directions", "dimension", "scales", "spectrum", "spectra", "single_dimensions", "outliers", "norms",
    "state_norms", "positions", "frequency", "partition", "matrix_spectra", "projection", "row_norms", "spheres",
}  # fmt: skip
TABLES = {"layers", "massive", "extremes", "matrices", "final_norm", "spheres", "texts", "settings"}


def test_the_texts_and_the_time_are_on_the_page(page_folder: Path, encoder_measures: Measurements) -> None:
    frame = pd.read_csv(page_folder / "tables" / "texts.csv", index_col="text")
    assert list(frame.index) == list(encoder_measures.readings) == list(encoder_measures.sources)
    for source, path in encoder_measures.settings["texts"].items():
        lines = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
        row = frame.loc[source]
        assert row["documents"] == len(lines)
        assert row["bytes_per_document"] == pytest.approx(sum(len(line.encode()) for line in lines) / len(lines))
        assert row["tokens"] == encoder_measures.sources[source]["embeddings"]["tokens"]
    page_text = " ".join(parsed(page_folder / "index.html").text)
    assert "Texts and time" in page_text
    assert f"Everything took {encoder_measures.seconds:,.1f} seconds on cpu: also" in page_text


def test_measures_without_times_have_a_page(encoder_measures: Measurements, tmp_path: Path) -> None:
    """Files of earlier versions record no times."""
    model_page.write(replace(encoder_measures, readings={}, seconds=None), tmp_path / "page")
    assert "Not recorded." in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")


def test_every_file(page_folder: Path, encoder_measures: Measurements) -> None:
    assert {path.name for path in (page_folder / "figures").iterdir()} == {
        f"{name}.{suffix}" for name in PICTURES for suffix in ("svg", "pdf", "png")
    }
    for name in PICTURES:
        assert (page_folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(page_folder / "figures" / f"{name}.svg")
    assert {path.name for path in (page_folder / "tables").iterdir()} == {
        f"{name}.{suffix}" for name in TABLES for suffix in ("csv", "md", "tex")
    }
    for name in TABLES - {"final_norm", "massive"}:
        balanced((page_folder / "tables" / f"{name}.tex").read_text(encoding="utf-8"))
    frame = pd.read_csv(page_folder / "tables" / "layers.csv").set_index(["source", "layer"])
    assert len(frame) == 9
    for source, taps in encoder_measures.sources.items():
        for tap, measures in taps.items():
            assert frame.loc[(source, tap), "isoscore"] == pytest.approx(measures["isoscore"], rel=1e-12)
    assert are_equal(measures_file.read(page_folder / "measures.json"), encoder_measures)


def test_lines_are_the_figures_of_their_text(encoder_measures: Measurements) -> None:
    plot_by_name = {plot.name: plot for plot in model_figures.plot_layers(encoder_measures)}
    inter_sim, intra_sim, _ = plot_by_name["directions"].panels
    assert [line.label for line in inter_sim.lines] == ["news", "talk", "combined"]
    assert plot_by_name["directions"].reference_label == "combined"
    for line in intra_sim.lines:
        assert line.y == tuple(measures["intra_sim"] for measures in encoder_measures.sources[line.label].values())
    assert plot_by_name["dimension"].x_names == {0.0: "emb.", 1.0: "1", 2.0: "2"}
    assert all(not model_figures.find_missing_measures(plot) for plot in plot_by_name.values())


def test_spectra_are_absolute_and_share_their_axes(encoder_measures: Measurements) -> None:
    plot = model_figures.plot_spectra(encoder_measures)
    assert plot.share_axes
    assert plot.log_y
    for panel, form in zip(plot.panels, ("raw", "centered"), strict=True):
        for line in panel.lines:
            values = encoder_measures.spectra["combined"][line.label.replace(" ", "_")][form]
            assert line.y == tuple(values[: len(line.y)])


def test_a_final_norm_is_the_last_named_tick(decoder_measures: Measurements, tmp_path: Path) -> None:
    plot_by_name = {plot.name: plot for plot in model_figures.plot_layers(decoder_measures)}
    assert plot_by_name["norms"].x_names == {0.0: "emb.", 1.0: "1", 2.0: "2", 3.0: "final\nnorm"}
    assert model_figures.find_missing_measures(plot_by_name["dimension"]) == ["TwoNN dimension"]
    assert [panel.task for panel in model_figures.plot_partition(decoder_measures).panels] == [
        "input embeddings",
        "output embeddings",
    ]
    out = model_page.write(decoder_measures, tmp_path / "page").parent
    page_text = " ".join(" ".join(parsed(out / "index.html").text).split())
    assert "Not measured, or not defined in any layer: TwoNN dimension. Some measures need --measures all." in page_text
    assert "norm of g divided by the square root of d" in page_text
    assert "This architecture has no final normalization" not in page_text
    frame = pd.read_csv(out / "tables" / "final_norm.csv", index_col="figure")
    assert float(frame.loc["gain", "value"]) == pytest.approx(1)


def test_a_missing_final_norm_is_explained(page_folder: Path) -> None:
    page_text = " ".join(" ".join(parsed(page_folder / "index.html").text).split())
    assert "This architecture has no final normalization with a gain" in page_text
    assert "The model has no output embeddings of its own." in page_text


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


def test_hostile_names(encoder_measures: Measurements, tmp_path: Path) -> None:
    sources = {
        NASTY: encoder_measures.sources["news"],
        "_hidden 中": encoder_measures.sources["talk"],
        "combined": encoder_measures.sources["combined"],
    }
    hostile = replace(
        encoder_measures,
        model={**encoder_measures.model, "name": f"mine/{NASTY}"},
        sources=sources,
        settings={**encoder_measures.settings, "texts": {NASTY: "/a/<b>", "_hidden": "x"}},
        command=f"istar measure '{NASTY}'",
    )
    out = model_page.write(hostile, tmp_path / "page").parent
    page = parsed(out / "index.html")
    inline_parts(out / "index.html")
    # The page has only two such tags of its own, in the captions of the spheres.
    assert [tag for tag, _ in page.tags if tag == "b"] == ["b", "b"]
    page_text = "".join(page.text)
    for hostile_text in ("/a/<b>", f"mine/{NASTY}", f"istar measure '{NASTY}'"):
        assert hostile_text in page_text
    for path in out.rglob("*.svg"):
        ElementTree.parse(path)
    # The legend shows the label despite its leading underscore.
    assert "_hidden 中" in (out / "figures" / "isotropy.svg").read_text(encoding="utf-8")


def test_many_layers_and_texts_stay_readable(encoder_measures: Measurements) -> None:
    taps = {f"layer_{number}": encoder_measures.extremes["news"]["layer_1"] for number in range(1, 25)}
    large = replace(encoder_measures, extremes={"combined": taps, "news": taps})
    sheet = model_page._build_extremes_sheet(large)
    assert (len(sheet.rows), len(sheet.frame)) == (24, 144)
    measures_by_tap = dict.fromkeys(taps, encoder_measures.sources["news"]["layer_1"])
    sheet = model_page._build_layer_sheet(
        replace(encoder_measures, sources=dict.fromkeys(["a", "b", "c", "combined"], measures_by_tap))
    )
    assert len(sheet.rows) == len(sheet.frame) == 96
    assert list(model_page._shorten_sheet(sheet, "combined").rows_by_group) == ["combined"]
    assert list(
        model_page._shorten_sheet(model_page._build_layer_sheet(encoder_measures), "combined").rows_by_group
    ) == [
        "news",
        "talk",
        "combined",
    ]


def test_labels_differ_and_are_short() -> None:
    labels = model_figures._shorten_labels(["a" * 90, "a" * 91, "b\nc", "b c", "\x00", "_d"])
    assert len(set(labels)) == 6
    assert max(map(len, labels)) <= model_figures._MAX_LABEL + 4
    assert labels[2:] == ["b c", "b c (4)", "text", " _d"]


def test_undefined_measures(encoder_measures: Measurements, tmp_path: Path) -> None:
    undefined_sources = {
        source: {
            tap: {key: math.nan if key.endswith("intra_sim") or key == "inter_sim" or tap == "layer_1" else value
                  for key, value in measures.items() if key != "two_nn"}
            for tap, measures in taps.items()
        }
        for source, taps in encoder_measures.sources.items()
    }  # fmt: skip
    for taps in undefined_sources.values():
        for measures in taps.values():
            measures["tokens"] = 5.0
    incomplete = replace(
        encoder_measures,
        sources=undefined_sources,
        norms={},
        extremes={},
        rows={},
        by_position={},
        by_frequency={},
        gride={},
        command="",
    )
    out = model_page.write(incomplete, tmp_path / "page").parent
    page_text = " ".join(" ".join(parsed(out / "index.html").text).split())
    assert "not defined in any layer: InterSim, IntraSim, IntraSim - InterSim." in page_text
    # These are not measured: norms, extreme dimensions, projected rows, norms of rows, positions, frequencies, Gride.
    assert page_text.count("Not measured.") == 7
    assert not (out / "figures" / "directions.svg").exists()
    assert "istar measure" in page_text
    assert "nan" not in (out / "tables" / "layers.md").read_text().lower()
    with (out / "measures.csv").open() as file:
        assert {row["inter_sim"] for row in csv.DictReader(file)} == {""}


def test_the_same_measures_give_the_same_files(
    encoder_measures: Measurements, page_folder: Path, work_folder: Path
) -> None:
    contents_before = contents(page_folder)
    repeated_measurements = measure.measure_model(
        encoder_measures.model["name"],
        [Source(name, Path(path)) for name, path in encoder_measures.settings["texts"].items()],
        Pass(16, measures="all"), work_folder / "again", command="istar measure x",
    )  # fmt: skip
    assert are_equal(without_times(repeated_measurements), without_times(encoder_measures))
    model_page.write(measures_file.read(page_folder / "measures.json"), page_folder)
    assert contents(page_folder) == contents_before


def test_no_mathematical_notation(page_folder: Path) -> None:
    """matplotlib's math text is switched off, since names may contain dollar signs."""
    for name in ("spectra", "matrix_spectra", "state_norms"):
        assert "mathdefault" not in (page_folder / "figures" / f"{name}.svg").read_text(encoding="utf-8")


# ---- data of the figures


def test_rows_of_a_matrix() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(5_000, 6) * torch.tensor([5.0, 3, 1, 1, 1, 1]) + 4
    summary = figure_data.summarize_rows(matrix, torch.arange(5_000))
    assert summary["ids"][0] == 0
    assert summary["ids"][-1] == 4_999
    assert len(summary["ids"]) == figure_data.MAX_ROWS
    assert summary["counts"] == summary["ids"]
    for form, points in (("raw", matrix), ("centered", matrix - matrix.mean(0))):
        left_vectors, singular_values, _ = np.linalg.svd(points.double().numpy(), full_matrices=False)
        for coordinates, axis in zip(summary[form], (0, 1), strict=True):
            expected = (left_vectors * singular_values)[summary["ids"], axis]
            assert abs(np.corrcoef(coordinates, expected)[0, 1]) == pytest.approx(1, abs=1e-6)
            assert np.abs(coordinates) == pytest.approx(np.abs(expected), rel=1e-3, abs=1e-3)
    assert sum(summary["norms"]["counts"]) == 5_000
    assert summary["norms"]["edges"][0] == pytest.approx(matrix.norm(dim=1).min().item())


@pytest.mark.parametrize("offset", [-5.0, 5.0])
def test_directions_have_a_fixed_sign(offset: float) -> None:
    """The largest coordinate of each direction is positive, whatever sign the eigensolver returns."""
    torch.manual_seed(0)
    x, _ = figure_data.summarize_rows(0.1 * torch.randn(50, 3) + torch.tensor([0, offset, 0]))["raw"]
    assert np.mean(x) == pytest.approx(offset, rel=0.05)


def test_histograms_and_extremes(encoder_measures: Measurements) -> None:
    for histogram_by_tap in (encoder_measures.norms["combined"], encoder_measures.norms["news"]):
        for tap, histogram in histogram_by_tap.items():
            assert len(histogram["edges"]) == len(histogram["counts"]) + 1
            assert histogram["counts"][0] > 0
            assert histogram["counts"][-1] > 0
            mean_norm = np.average(
                np.sqrt(np.array(histogram["edges"][1:]) * histogram["edges"][:-1]), weights=histogram["counts"]
            )
            source = "combined" if histogram_by_tap is encoder_measures.norms["combined"] else "news"
            assert mean_norm == pytest.approx(encoder_measures.sources[source][tap]["average_norm"], rel=0.03)
    for extreme_dimensions in encoder_measures.extremes["combined"].values():
        distances = [abs(dimension["mean_by_typical_deviation"]) for dimension in extreme_dimensions]
        assert distances == sorted(distances, reverse=True)


def test_colours_show_the_frequency_if_it_is_known() -> None:
    rows = {"ids": [0, 10, 20, 30], "counts": [0, 5, 9, 1]}
    groups, caption = model_figures._group_by_colour(rows)
    assert list(groups) == ["most frequent quarter", "second", "third", "rarest quarter", "not in the texts"]
    assert sorted(index for indices in groups.values() for index in indices) == [0, 1, 2, 3]
    assert groups["not in the texts"] == [0]
    assert "frequency in these texts" in caption
    for counts in ({"counts": [0, 0, 0, 1]}, {"counts": None}):
        groups, caption = model_figures._group_by_colour({**rows, **counts})
        assert sorted(index for indices in groups.values() for index in indices) == [0, 1, 2, 3]
        assert "the colour is the id" in caption


def test_measures_of_the_spheres() -> None:
    centered, moved = make_spheres()
    assert centered.inter_sim == pytest.approx(-1 / 499)
    assert centered.isoscore == pytest.approx(moved.isoscore, abs=1e-9)
    assert centered.isoscore > 0.95
    assert centered.partition_both > 0.9
    assert moved.inter_sim > 0.7
    assert moved.partition_both < moved.partition_as_computed < 0.3


# ---- writing the page


@pytest.mark.parametrize("kind", ["page", "tables", "file", "other json", "link"])
def test_foreign_files_are_not_replaced(
    work_folder: Path, encoder_measures: Measurements, tmp_path: Path, kind: str, capsys: Any
) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "link":
        (tmp_path / "real").mkdir()
        out.symlink_to(tmp_path / "real")
    else:
        path_by_kind = {
            "page": "index.html",
            "tables": "tables/a.csv",
            "other json": "measures.json",
        }
        (out / path_by_kind[kind]).parent.mkdir(parents=True)
        (out / path_by_kind[kind]).write_text("{}")
    contents_before = contents(tmp_path)
    arguments = ["measure", encoder_measures.model["name"], "--text", str(work_folder / "news.txt"), "--out", str(out)]
    assert main(arguments) == 2
    [error_line] = capsys.readouterr().err.splitlines()
    assert str(out) in error_line
    assert contents(tmp_path) == contents_before


def test_an_interrupted_pass_and_an_earlier_page_are_accepted(
    encoder_measures: Measurements, page_folder: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(page_folder, tmp_path / "out")
    (out / ".pass.0.0-1").write_bytes(b"state")
    (out / "thesis.tex").write_text("mine")
    model_page.check_output_folder(out, encoder_measures.model["name"])
    model_page.write(encoder_measures, out)
    assert (out / ".pass.0.0-1").read_bytes() == b"state"
    assert (out / "thesis.tex").read_text() == "mine"
    (out / "figures" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds figures/notes\.txt, which is no part of a page of measures"):
        model_page.check_output_folder(out, encoder_measures.model["name"])
    assert (out / "figures" / "notes.txt").read_text() == "mine"


def test_another_model_does_not_replace_the_page(
    encoder_measures: Measurements, decoder_measures: Measurements, work_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    model_page.write(encoder_measures, out)
    contents_before = contents(out)
    first, second = encoder_measures.model["name"], decoder_measures.model["name"]
    message = f"--out {out} holds the measures of {first}, not of {second}; expected another folder: --out <folder>"
    with pytest.raises(UserError) as caught:
        model_page.write(decoder_measures, out)
    assert str(caught.value) == message
    # The command refuses before it measures.
    assert main(["measure", second, "--text", str(work_folder / "news.txt"), "--out", str(out)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"
    assert contents(out) == contents_before
    # The same model may be measured again, also from another place.
    model_page.check_output_folder(out, first)
    shutil.copytree(first, tmp_path / "moved")
    model_page.check_output_folder(out, str(tmp_path / "moved"))
    model_page.write(replace(encoder_measures, model={**encoder_measures.model, "name": str(tmp_path / "moved")}), out)


def test_a_page_that_is_written_again_has_no_earlier_files(encoder_measures: Measurements, tmp_path: Path) -> None:
    out = model_page.write(encoder_measures, tmp_path / "out").parent
    model_page.write(replace(encoder_measures, rows={}, norms={}), out)
    assert {path.stem for path in (out / "figures").iterdir()} == PICTURES - {"projection", "row_norms", "state_norms"}


def test_measures_are_saved_even_if_the_page_fails(
    encoder_measures: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no room to draw")

    monkeypatch.setattr(model_page, "_make_plots", fail)
    with pytest.raises(RuntimeError):
        model_page.write(encoder_measures, tmp_path / "out")
    assert are_equal(measures_file.read(tmp_path / "out" / "measures.json"), encoder_measures)


def test_a_large_model_has_a_small_file(encoder_measures: Measurements) -> None:
    """The shape is that of BERT-base over three texts."""
    layer = {
        "raw": figure_data.round_digits(np.random.default_rng(0).random(768)),
        "centered": figure_data.round_digits(np.full(768, 1 / 3)),
    }
    taps = {f"layer_{number}": layer for number in range(13)}
    large = replace(encoder_measures, spectra=dict.fromkeys("abcd", taps))
    assert len(measures_file.file_contents(large)["measures.json"]) < 2_000_000


def test_the_command(
    work_folder: Path, encoder_measures: Measurements, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "measure",
        encoder_measures.model["name"],
        "--text",
        f"a b={work_folder / 'news.txt'}",
        "--length",
        "16",
    ]
    assert main(arguments) == 0
    assert "geometry/index.html" in capsys.readouterr().out
    record = json.loads(Path("geometry/measures.json").read_text())
    assert (
        record["command"]
        == f"istar measure {encoder_measures.model['name']} --text 'a b={work_folder / 'news.txt'}' --length 16"
    )
    assert sorted(path.name for path in Path("geometry").iterdir()) == [
        ".istar", "figures", "index.html", "measures.csv", "measures.json", "tables",
    ]  # fmt: skip
