"""`istar embed` with several models: tables and figures of *Too Much in Common*, checked against numpy."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from istar.cli.main import main
from istar.drawing.plot import Plot
from istar.embeddings import embed, embed_figures, embed_models, embed_tables, published_embeddings
from istar.embeddings.density import estimate_density
from istar.geometry.show import compare
from istar.geometry.show.spheres import NUM_POINTS, make_spectra
from istar.inputs import corpus
from tests.embeddings.test_embed import TOKENIZER, UNUSED, WIDTH, build, compute_isotropy, read_rows, save_model
from tests.reports.test_report import parsed

PAIRS = [("cat", "dog", 8), ("house", "garden", 7), ("cat", "garden", 1), ("house", "dog", 3), ("the", "sees", 2)]
TEXT = "the cat the dog\n\nthe house sees the cat.\n"


def write_files(folder: Path) -> list[str]:
    """Write two benchmarks in different formats and a text; return the options that name the benchmarks."""
    pairs = [(a, b, rating) for a, b, rating in PAIRS]
    (folder / "MEN.txt").write_text("".join(f"{a} {b} {5 * rating}\n" for a, b, rating in pairs))
    lines = [f"{a}\t{b}\tN\t{10 - rating}\n" for a, b, rating in pairs[1:]]
    (folder / "SimLex.txt").write_text("".join(lines))
    (folder / "text.txt").write_text(TEXT)
    return ["--wordsim", str(folder / "MEN.txt"), "--wordsim", str(folder / "SimLex.txt")]


def make_embeddings(kind: str = "bert") -> np.ndarray:
    model: Any = build(kind)
    return np.asarray(model.get_input_embeddings().weight.detach().double().numpy())


def compute_forms(matrix: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the paper's forms of a matrix by their definitions; return them by name."""
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    centered = matrix - matrix.mean(0)
    top = np.linalg.eigh(centered.T @ centered)[1][:, ::-1][:, : math.ceil(WIDTH / 100)]
    return {
        "raw": matrix,
        "centered": centered,
        "scaled_centered": matrix - norms * (matrix / norms).mean(0),
        "all_but_the_top": centered - centered @ top @ top.T,
    }


def compute_scores(matrix: np.ndarray, pairs: list[tuple[str, str, float]]) -> tuple[float, float]:
    """Return 100 times Pearson's r of the ratings with the cosines and with the inner products."""
    ids = [[TOKENIZER.convert_tokens_to_ids(word) for word in pair[:2]] for pair in pairs]
    products = np.array([matrix[a] @ matrix[b] for a, b in ids])
    norms = np.array([np.linalg.norm(matrix[a]) * np.linalg.norm(matrix[b]) for a, b in ids])
    ratings = [pair[2] for pair in pairs]
    return tuple(100 * np.corrcoef(values, ratings)[0, 1] for values in (products / norms, products))  # type: ignore[return-value]


def measure_saved_model(
    folder: Path, label: str = "tiny", kind: str = "bert", **options: Any
) -> embed_models.ModelEmbeddings:
    argument = compare.ModelArgument(label, str(save_model(folder / label, kind)))
    texts = corpus.parse_sources([str(folder / "text.txt")]) if (folder / "text.txt").exists() else []
    benchmarks = embed_models.read_benchmarks(options.pop("wordsim", []))
    return embed_models.measure_model(argument, embed_models.EmbeddingSettings(**options), benchmarks, texts)


# ---- the tables


def test_table_1_has_the_measures_and_those_of_the_paper(tmp_path: Path) -> None:
    models = [measure_saved_model(tmp_path, "gpt2"), measure_saved_model(tmp_path, "mine", "neox")]
    sheet = embed_tables.make_table1(models)
    rows = {(row["model"], row["source"]): row for row in sheet.frame.to_dict("records")}
    assert [source for model, source in rows if model == "gpt2"] == ["istar", "both signs", "paper", "difference"]
    assert [source for model, source in rows if model == "mine"] == ["istar", "both signs"]
    raw = make_embeddings()
    both_signs = rows["gpt2", "both signs"]
    assert both_signs["isotropy_raw"] == pytest.approx(compute_isotropy(raw), rel=1e-6)
    assert both_signs["isotropy_centered"] == pytest.approx(compute_isotropy(compute_forms(raw)["centered"]), rel=1e-6)
    assert both_signs["isotropy_post_processed"] == pytest.approx(
        compute_isotropy(compute_forms(raw)["all_but_the_top"]), rel=1e-6
    )
    istar_row, paper_row, difference_row = (rows["gpt2", source] for source in ("istar", "paper", "difference"))
    norms = np.linalg.norm(raw, axis=1)
    assert istar_row["average_norm"] == pytest.approx(norms.mean(), rel=1e-9)
    assert istar_row["mean_vector_norm"] == pytest.approx(np.linalg.norm(raw.mean(0)), rel=1e-9)
    assert istar_row["mean_to_average_norm"] == pytest.approx(np.linalg.norm(raw.mean(0)) / norms.mean(), rel=1e-9)
    # These are the numbers of "GPT-2 (12 layers)" in Table 1 of the paper.
    columns = list(sheet.frame.columns[2:])
    assert [paper_row[name] for name in columns] == [0.12, 0.91, 0.969, 3.96, 2.05, 0.52]
    for name in columns:
        assert difference_row[name] == pytest.approx(istar_row[name] - paper_row[name])


def test_table_1_correlates_norm_and_isotropy_of_three_models(tmp_path: Path) -> None:
    first, second = measure_saved_model(tmp_path, "first"), measure_saved_model(tmp_path, "second", "neox")
    measures_by_form = {**first.measures_by_form, "raw": {**first.measures_by_form["raw"], "average_norm": 1.0}}
    third = embed_models.ModelEmbeddings(**{**vars(first), "label": "third", "measures_by_form": measures_by_form})
    assert embed_tables.make_table1([first, second]).notes == ()
    models = [first, second, third]
    norms_and_isotropies = np.array([
        [model.measures_by_form["raw"][name] for name in ("average_norm", "partition_isotropy_as_computed")]
        for model in models
    ])  # fmt: skip
    [note] = embed_tables.make_table1(models).notes
    assert f"these 3 models is {np.corrcoef(norms_and_isotropies.T)[0, 1]:.2f}" in note


def test_tables_2_and_3_average_over_the_benchmarks(tmp_path: Path) -> None:
    benchmark_files = write_files(tmp_path)[1::2]
    model = measure_saved_model(tmp_path, "bert-base-cased", wordsim=[Path(name) for name in benchmark_files])
    table2, table3 = (make_table([model]).frame for make_table in (embed_tables.make_table2, embed_tables.make_table3))
    istar_rows = table2[table2["source"] == "istar"].set_index("form")
    benchmark_rows = table3[table3["source"] == "istar"].set_index("form")
    assert list(istar_rows.index) == list(embed_models.WORDSIM_FORMS)
    expected_averages = {}
    for form, matrix in compute_forms(make_embeddings()).items():
        # The embeddings are float32.
        expected_men = compute_scores(matrix, [(a, b, rating) for a, b, rating in PAIRS])
        expected_simlex = compute_scores(matrix, [(a, b, 10 - rating) for a, b, rating in PAIRS[1:]])
        assert benchmark_rows.loc[form, ["men/cosine", "men/inner_product"]].tolist() == pytest.approx(
            expected_men, abs=1e-3
        )
        simlex_scores = benchmark_rows.loc[form, ["simlex999/cosine", "simlex999/inner_product"]].tolist()
        assert simlex_scores == pytest.approx(expected_simlex, abs=1e-3)
        expected_averages[form] = np.mean([expected_men, expected_simlex], axis=0)
        assert istar_rows.loc[form, ["cosine", "inner_product"]].tolist() == pytest.approx(
            expected_averages[form], abs=1e-3
        )
        gains = expected_averages[form] - expected_averages["raw"]
        assert istar_rows.loc[form, ["cosine_gain", "inner_product_gain"]].tolist() == pytest.approx(gains, abs=2e-3)
    assert set(istar_rows["benchmarks"]) == {2}
    # The paper averages over five benchmarks, so that only its scores on single benchmarks can be compared.
    assert set(table2["source"]) == {"istar"}
    paper_rows = table3[table3["source"] == "paper"].set_index("form")
    assert paper_rows.loc["raw", ["men/inner_product", "men/cosine"]].tolist() == [65.53, 67.07]
    assert "centered" not in paper_rows.index


def test_the_best_form_is_bold(tmp_path: Path) -> None:
    benchmark_files = write_files(tmp_path)[1:2]
    sheet = embed_tables.make_table2([measure_saved_model(tmp_path, wordsim=[Path(benchmark_files[0])])])
    bold_names = [row[0].text for row in sheet.rows if row[2].bold]
    cosines = sheet.frame.set_index("form")["cosine"]
    names = {"raw": "raw", "centered": "centered", "scaled_centered": "centered-scaled"}
    assert bold_names == [names.get(str(cosines.idxmax()), "post-processed")]


@pytest.mark.parametrize(
    "changed_settings",
    [{"policy": "mean"}, {"components": 2}, {"matrix": "output"}],
    ids=lambda settings: next(iter(settings)),
)
def test_the_papers_numbers_stand_only_beside_what_the_paper_measured(
    tmp_path: Path, changed_settings: dict[str, Any]
) -> None:
    benchmark_files = [Path(name) for name in write_files(tmp_path)[1::2]]
    kind = "neox" if "matrix" in changed_settings else "bert"
    model = measure_saved_model(tmp_path, "gpt2", kind, wordsim=benchmark_files, **changed_settings)
    table1, table3 = (make_table([model]).frame for make_table in (embed_tables.make_table1, embed_tables.make_table3))
    forms_with_paper_scores = table3[table3["source"] == "paper"]["form"].tolist()
    assert forms_with_paper_scores == (["raw", "scaled_centered"] if "components" in changed_settings else [])
    assert ("paper" in set(table1["source"])) == ("matrix" not in changed_settings)
    if "components" in changed_settings:
        [paper_row] = table1[table1["source"] == "paper"].to_dict("records")
        assert math.isnan(paper_row["isotropy_post_processed"])


def test_the_papers_tables_agree_with_each_other() -> None:
    """Table 2 averages Table 3 over the five benchmarks."""
    for model in ("bert-base-cased", "bert-large-cased", "roberta-base", "roberta-large", "gpt2", "gpt2-medium"):
        for form in ("raw", "scaled_centered", "all_but_the_top"):
            rows = [
                published_embeddings.read_benchmark_similarity(model, form, name)
                for name in published_embeddings.BENCHMARK_TITLES
            ]
            for score in ("cosine", "inner_product"):
                mean = np.mean([row[score] for row in rows])
                assert published_embeddings.read_average_similarity(model, form)[score] == pytest.approx(
                    mean, abs=0.0101
                )


def test_which_models_are_the_papers() -> None:
    assert published_embeddings.find_paper_model("x", "openai-community/gpt2") == "gpt2"
    assert published_embeddings.find_paper_model("roberta-large", "folder/model") == "roberta-large"
    assert published_embeddings.find_paper_model("x", "openai-community/gpt2-xl") is None


# ---- the figures


def coordinates_by_label(plot: Plot, panel_index: int = 0) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    return {line.label: (line.x, line.y) for line in plot.panels[panel_index].lines}


def test_singular_values_before_and_after_centering(tmp_path: Path) -> None:
    lines = coordinates_by_label(embed_figures.make_singular_value_plot([measure_saved_model(tmp_path)]))
    for label, form in (("before centering", "raw"), ("after centering", "centered")):
        x, y = lines[label]
        np.testing.assert_allclose(
            y, np.linalg.svd(compute_forms(make_embeddings())[form], compute_uv=False), rtol=1e-5
        )
        assert x == tuple(range(1, WIDTH + 1))


def test_projections_are_onto_the_first_two_singular_vectors(tmp_path: Path) -> None:
    raw, centered = embed_figures.make_projection_plot([measure_saved_model(tmp_path)]).panels
    for panel, form in ((raw, "raw"), (centered, "centered")):
        matrix = compute_forms(make_embeddings())[form]
        expected = matrix @ np.linalg.svd(matrix)[2][:2].T
        points = np.array([point for line in panel.lines for point in zip(line.x, line.y, strict=True)])
        for axis in (0, 1):  # the sign of an axis and the order of the groups are free
            assert sorted(np.abs(points[:, axis])) == pytest.approx(sorted(np.abs(expected[:, axis])), abs=1e-3)
        assert panel.model == "tiny"


def test_the_gap_of_the_singular_values_grows_with_the_distance() -> None:
    spheres = make_spectra()
    for sphere in spheres:
        # The squared norms of the points sum to n (1 + shift^2), because their mean is the center.
        assert sum(value**2 for value in sphere.singular_values) == pytest.approx(NUM_POINTS * (1 + sphere.shift**2))
        assert np.mean(sphere.x) == pytest.approx(sphere.shift, abs=1e-12)
    ratios = [sphere.singular_values[0] / sphere.singular_values[1] for sphere in spheres]
    assert ratios == sorted(ratios)
    assert ratios[0] < 1.1 < 3 < ratios[-1]


def test_densities_are_kernel_estimates_with_scotts_bandwidth() -> None:
    values = np.random.default_rng(0).gamma(3.0, size=40)
    density = estimate_density(values)
    assert density is not None
    positions, heights = density
    bandwidth = values.std(ddof=1) * len(values) ** -0.2
    kernels = np.exp(-0.5 * ((positions[:, None] - values) / bandwidth) ** 2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(heights, kernels.sum(1) / (len(values) * bandwidth), rtol=1e-10)
    assert positions[0] == max(0.0, values.min() - 3 * bandwidth)
    assert positions[-1] == pytest.approx(values.max() + 3 * bandwidth)
    shifted_density = estimate_density(values + 10)
    assert shifted_density is not None
    assert np.trapezoid(shifted_density[1], shifted_density[0]) == pytest.approx(1, abs=1e-3)
    assert estimate_density(np.full(5, 1.5)) is None
    assert estimate_density(np.array([1.5])) is None


def test_norms_before_and_after_centering(tmp_path: Path) -> None:
    model = measure_saved_model(tmp_path)
    matrices = compute_forms(make_embeddings())
    for form in ("raw", "centered"):
        np.testing.assert_allclose(model.row_norms[form], np.linalg.norm(matrices[form], axis=1), rtol=1e-6)
    line_before_centering = coordinates_by_label(embed_figures.make_centering_plot([model]))["before centering"]
    assert line_before_centering == coordinates_by_label(embed_figures.make_norm_plot([model]))["tiny"]


def test_unused_tokens_by_bins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "BIN_SIZE", 3)
    write_files(tmp_path)
    model = measure_saved_model(tmp_path)
    by_index, by_frequency = embed_figures.make_unused_plot([model]).panels
    unit_rows = make_embeddings() / np.linalg.norm(make_embeddings(), axis=1, keepdims=True)
    unused_ids = TOKENIZER.convert_tokens_to_ids(UNUSED)
    excluded_ids = {*unused_ids, *TOKENIZER.all_special_ids}
    [line] = by_index.lines
    assert len(line.x) > 0
    for bin_index, cosine in zip(line.x, line.y, strict=True):
        start = 3 * int(bin_index)
        member_ids = [
            token_id
            for token_id in range(start, start + 3)
            if token_id not in excluded_ids and token_id < len(TOKENIZER)
        ]
        expected = np.mean(
            [unit_rows[unused_id] @ unit_rows[member_id] for unused_id in unused_ids for member_id in member_ids]
        )
        assert cosine == pytest.approx(expected, abs=1e-6)
    assert by_frequency.lines[0].x == (0, 1)
    # Each form has a column, as in a call for a single form.
    assert {f"cosine_{form}" for form in embed_models.WORDSIM_FORMS} <= set(model.unused_similarity)


def test_words_and_tokens_by_rank(tmp_path: Path) -> None:
    write_files(tmp_path)
    words = embed_models.count_words(corpus.parse_sources([str(tmp_path / "text.txt")]))
    assert dict(zip(words["word"], words["count"], strict=True)) == {
        "the": 4, "cat": 2, ".": 1, "dog": 1, "house": 1, "sees": 1
    }  # fmt: skip
    model = measure_saved_model(tmp_path)
    lines = coordinates_by_label(embed_figures.make_frequency_plot([model], words))
    assert lines["words"] == ((1, 2, 3, 4, 5, 6), pytest.approx((40, 20, 10, 10, 10, 10)))
    assert lines["tokens of tiny"][1] == pytest.approx(100 * model.token_frequencies["share"].to_numpy())
    frame = embed_tables.make_coverage_table([model], words).frame.set_index("unit")
    assert frame.loc["words", ["0.3", "0.5", "0.98"]].tolist() == [1, 2, 6]


def test_norms_by_frequency(tmp_path: Path) -> None:
    write_files(tmp_path)
    model = measure_saved_model(tmp_path)
    norms = np.linalg.norm(make_embeddings(), axis=1)
    for row in model.token_frequencies.to_dict("records"):
        assert row["norm"] == pytest.approx(norms[row["id"]], rel=1e-6)
    x, y = coordinates_by_label(embed_figures.make_frequency_norm_plot([model]))["tiny"]
    # There are fewer ranks than bins, so that each rank has a bin of its own.
    assert x == tuple(model.token_frequencies["rank"])
    assert y == pytest.approx(tuple(model.token_frequencies["norm"]))


# ---- the command


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Return the arguments of `istar` that measure two models, with benchmarks and a text."""
    first, second = save_model(tmp_path / "gpt2"), save_model(tmp_path / "other", "neox")
    options = [*write_files(tmp_path), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    return ["embed", str(first), f"mine={second}", *options]


@pytest.mark.slow
def test_the_page_and_its_files(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    out = tmp_path / "out"
    output = capsys.readouterr().out
    assert "Table 1" in output
    assert "Table 2" in output
    html = (out / "index.html").read_text()
    assert "Embedding matrices of gpt2 and mine" in html
    page_text = " ".join(" ".join(parsed(out / "index.html").text).split())
    assert "What stands out The raw input embeddings of " in page_text
    assert "The average word similarity by cosine (Table 2) is highest for the " in page_text
    assert page_text.index("What stands out") < page_text.index("How to read this")
    for name in ("table1", "table2", "table3", "figure4_coverage"):
        assert {path.suffix for path in (out / "tables").glob(f"{name}.*")} == {".csv", ".md", ".tex"}
    figures = {path.name for path in (out / "figures").iterdir()}
    for name in ("projection-gpt2", "projection-mine", "singular_values"):
        assert f"figure1_{name}.svg" in figures
    records = json.loads((out / "embeddings.json").read_text())["models"]
    assert [record["label"] for record in records] == ["gpt2", "mine"]
    for name in ("embeddings", "wordsim", "unused", "frequency"):
        assert {row["label"] for row in read_rows(out / f"{name}.csv")} == {"gpt2", "mine"}
    # The numbers are those of a call for a single form.
    assert main(["embed", str(tmp_path / "gpt2"), "--form", "centered", "--out", str(tmp_path / "single")]) == 0
    row_by_form = {row["form"]: row for row in read_rows(tmp_path / "single" / "embeddings.csv")}
    rows_of_both = [row for row in read_rows(out / "embeddings.csv") if row["label"] == "gpt2"]
    assert "centered" in row_by_form.keys() & {row["form"] for row in rows_of_both}
    for row in rows_of_both:
        if row["form"] in row_by_form:
            for name in ("partition_isotropy_both", "average_norm"):
                assert row[name] == row_by_form[row["form"]][name]
    # A second call replaces the page by the same files.
    contents_before = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(command) == 0
    assert {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()} == contents_before


@pytest.mark.slow
def test_one_model_in_chosen_forms(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    out = tmp_path / "out"
    assert main(["embed", str(folder), "--forms", "centered", *write_files(tmp_path), "--out", str(out)]) == 0
    with (out / "tables" / "table2.csv").open(newline="") as file:
        assert [row["form"] for row in csv.DictReader(file)] == ["raw", "centered"]
    assert not (out / "frequency.csv").exists()
    page_text = (out / "index.html").read_text()
    assert "no texts were given" in page_text
    assert "I(W) of the raw input embeddings of model, over both signs of the eigenvectors, is " in page_text


def test_rows_of_equal_norm_have_no_density(tmp_path: Path) -> None:
    model = measure_saved_model(tmp_path)
    model_of_equal_norms = embed_models.ModelEmbeddings(
        **{**vars(model), "row_norms": {"raw": np.ones(9), "centered": np.ones(9)}}
    )
    assert embed_figures.make_norm_plot([model_of_equal_norms]).panels == ()
    assert embed_figures.make_centering_plot([model_of_equal_norms]).panels == ()


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (["--form", "centered"], "--form needs a single matrix in a single form; name the forms with --forms"),
        (["--save", "matrix"], "--save needs a single matrix in a single form"),
        (["--revision", "main"], "give it with its model, as in <model>@<revision>"),
        (["--forms", "raw", "--components", "2"], "--components needs an all_but_the_top form"),
        (["--wordsim", "MEN"], "2 files are the benchmark men; give each benchmark once"),
        (["SECOND"], "2 models are called model; give them names, as in first=<model>"),
        (["FIRST"], "is given twice"),
    ],
)
def test_an_error_is_one_line(
    tmp_path: Path, added: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (save_model(tmp_path / name) for name in ("model", "elsewhere/model", "third"))
    options = write_files(tmp_path)
    names = {"SECOND": str(second), "FIRST": str(first), "MEN": str(tmp_path / "MEN.txt")}
    added = [names.get(argument, argument) for argument in added]
    capsys.readouterr()  # discard the progress bars of transformers
    assert main(["embed", str(first), f"third={third}", *added, *options, "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_an_unknown_form_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["embed", "model", "--forms", "raw,centred"])
    assert "'centred' is no form" in capsys.readouterr().err


def test_a_page_and_a_single_matrix_do_not_replace_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "model")
    page, single = tmp_path / "page", tmp_path / "single"
    assert main(["embed", str(folder), "--forms", "raw", "--out", str(page)]) == 0
    assert main(["embed", str(folder), "--out", str(single)]) == 0
    capsys.readouterr()
    assert main(["embed", str(folder), "--out", str(page)]) == 2
    assert "holds embeddings.json, which is no part of a matrix's measures" in capsys.readouterr().err
    assert main(["embed", str(folder), "--forms", "raw", "--out", str(single)]) == 2
    assert "holds embeddings.json, which is no part of a page of embedding matrices" in capsys.readouterr().err
