"""Tables, figures and flags of `istar embed`, checked against numpy."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from istar.drawing.plot import Plot
from istar.embeddings import embed_figures, embed_models, embed_page, embed_tables, token_frequencies
from istar.embeddings.embed_models import ModelEmbeddings
from istar.models.saved_checkpoints import ModelArgument
from istar.texts import corpus
from tests.embeddings.builders import (
    PAIRS,
    TOKENIZER,
    compute_forms,
    compute_isotropy,
    get_embeddings,
    save_model,
    write_files,
)


def compute_scores(matrix: np.ndarray, pairs: list[tuple[str, str, float]]) -> tuple[float, float]:
    """Return 100 times Pearson's r of the ratings with the cosines and with the inner products."""
    ids = [[TOKENIZER.convert_tokens_to_ids(word) for word in pair[:2]] for pair in pairs]
    products = np.array([matrix[a] @ matrix[b] for a, b in ids])
    norms = np.array([np.linalg.norm(matrix[a]) * np.linalg.norm(matrix[b]) for a, b in ids])
    ratings = [pair[2] for pair in pairs]
    return tuple(100 * np.corrcoef(values, ratings)[0, 1] for values in (products / norms, products))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two models, benchmarks and a text."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("bert", "neox"):
        save_model(folder / kind, kind)
    write_files(folder)
    return folder


def measure(folder: Path, label: str = "tiny", kind: str = "bert", **settings: Any) -> ModelEmbeddings:
    benchmarks = embed_models.read_benchmarks([f"men={folder / 'MEN.txt'}", f"SimLex-999={folder / 'SimLex.txt'}"])
    texts = corpus.parse_sources([str(folder / "text.txt")])
    model = ModelArgument(label, str(folder / kind))
    return embed_models.measure_embeddings(model, embed_models.EmbeddingSettings(**settings), benchmarks, texts)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> ModelEmbeddings:
    return measure(folder)


# ---- the tables


def test_table_1_has_the_measures_and_those_of_the_paper(tiny: ModelEmbeddings) -> None:
    sheet = embed_tables.make_table1([replace(tiny, label="gpt2"), replace(tiny, label="mine")])
    rows = {(row["model"], row["source"]): row for row in sheet.frame.to_dict("records")}
    assert [source for model, source in rows if model == "gpt2"] == [
        "signs as computed", "both signs", "paper", "difference",
    ]  # fmt: skip
    assert [source for model, source in rows if model == "mine"] == ["signs as computed", "both signs"]
    forms = compute_forms(get_embeddings())
    both_signs = rows["gpt2", "both signs"]
    for name, form in (("raw", "raw"), ("centered", "centered"), ("post_processed", "all_but_the_top")):
        assert both_signs[f"isotropy_{name}"] == pytest.approx(compute_isotropy(forms[form]), rel=1e-6)
    istar_row, paper_row, difference_row = (
        rows["gpt2", source] for source in ("signs as computed", "paper", "difference")
    )
    norms, norm_of_mean = np.linalg.norm(forms["raw"], axis=1), np.linalg.norm(forms["raw"].mean(0))
    assert istar_row["average_norm"] == pytest.approx(norms.mean(), rel=1e-9)
    assert istar_row["mean_vector_norm"] == pytest.approx(norm_of_mean, rel=1e-9)
    assert istar_row["mean_to_average_norm"] == pytest.approx(norm_of_mean / norms.mean(), rel=1e-9)
    # These are the numbers of "GPT-2 (12 layers)" in Table 1 of the paper.
    columns = list(sheet.frame.columns[2:])
    assert [paper_row[name] for name in columns] == [0.12, 0.91, 0.969, 3.96, 2.05, 0.52]
    for name in columns:
        assert difference_row[name] == pytest.approx(istar_row[name] - paper_row[name])


def change_raw(model: ModelEmbeddings, label: str, **measures: float) -> ModelEmbeddings:
    """Return a model with other measures of the raw matrix."""
    measures_by_form = {**model.measures_by_form, "raw": {**model.measures_by_form["raw"], **measures}}
    return replace(model, label=label, measures_by_form=measures_by_form)


def test_table_1_correlates_norm_and_isotropy_of_three_models(tiny: ModelEmbeddings) -> None:
    numbers = np.array([[1.0, 0.2], [2.0, 0.3], [4.0, 0.1]])
    models = [
        change_raw(tiny, f"m{norm}", average_norm=norm, partition_isotropy_as_computed=isotropy)
        for norm, isotropy in numbers
    ]
    assert embed_tables.make_table1(models[:2]).notes == ()
    [note] = embed_tables.make_table1(models).notes
    assert f"these 3 models is {np.corrcoef(numbers.T)[0, 1]:.2f}" in note


def test_tables_2_and_3_average_over_the_benchmarks(tiny: ModelEmbeddings) -> None:
    sheet2, sheet3 = (
        make([replace(tiny, label="bert-base-cased")]) for make in (embed_tables.make_table2, embed_tables.make_table3)
    )
    rows2, rows3 = (sheet.frame[sheet.frame["source"] == "istar"].set_index("form") for sheet in (sheet2, sheet3))
    assert list(rows2.index) == list(embed_models.WORDSIM_FORMS)
    averages = {}
    for form, matrix in compute_forms(get_embeddings()).items():
        # The embeddings are float32.
        men = compute_scores(matrix, [(a, b, rating) for a, b, rating in PAIRS])
        simlex = compute_scores(matrix, [(a, b, 10 - rating) for a, b, rating in PAIRS[1:]])
        averages[form] = np.mean([men, simlex], axis=0)
        for name, scores in (("men", men), ("simlex999", simlex)):
            columns = [f"{name}/cosine", f"{name}/inner_product"]
            assert rows3.loc[form, columns].tolist() == pytest.approx(scores, abs=1e-3)
        assert rows2.loc[form, ["cosine", "inner_product"]].tolist() == pytest.approx(averages[form], abs=1e-3)
        gains = averages[form] - averages["raw"]
        assert rows2.loc[form, ["cosine_gain", "inner_product_gain"]].tolist() == pytest.approx(gains, abs=2e-3)
    assert set(rows2["benchmarks"]) == {2}
    # The best form of each score is bold.
    for column, score in ((1, 0), (3, 1)):
        best = max(averages, key=lambda form: averages[form][score])
        assert [row[0].text for row in sheet2.rows if row[column].bold] == [embed_tables.FORM_NAMES[best]]
    # The paper averages over five benchmarks, so that only its scores on single benchmarks can be compared.
    assert set(sheet2.frame["source"]) == {"istar"}
    paper_rows = sheet3.frame[sheet3.frame["source"] == "paper"].set_index("form")
    assert paper_rows.loc["raw", ["men/inner_product", "men/cosine"]].tolist() == [65.53, 67.07]
    assert "centered" not in paper_rows.index
    assert sheet3.notes == ("Pairs of bert-base-cased: MEN 5 of 6; SimLex-999 4 of 4.",)


@pytest.mark.parametrize("changed_settings", [{"policy": "mean"}, {"components": 2}, {"matrix": "output"}], ids=str)
def test_the_papers_numbers_stand_only_next_to_what_the_paper_measured(
    folder: Path, changed_settings: dict[str, Any]
) -> None:
    kind = "neox" if "matrix" in changed_settings else "bert"
    model = measure(folder, "gpt2", kind, **changed_settings)
    table1, table3 = (make([model]).frame for make in (embed_tables.make_table1, embed_tables.make_table3))
    forms_with_paper_scores = table3[table3["source"] == "paper"]["form"].tolist()
    assert forms_with_paper_scores == (["raw", "scaled_centered"] if "components" in changed_settings else [])
    assert ("paper" in set(table1["source"])) == ("matrix" not in changed_settings)
    if "components" in changed_settings:
        [paper_row] = table1[table1["source"] == "paper"].to_dict("records")
        assert math.isnan(paper_row["isotropy_post_processed"])


def test_undefined_correlations_are_explained(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "MEN.txt").write_text("cat dog 4\nhouse garden 4\ncat garden 4\n")
    (tmp_path / "rw.txt").write_text("unheard\twords\t3\t3\n")
    benchmarks = embed_models.read_benchmarks([tmp_path / "MEN.txt", tmp_path / "rw.txt"])
    model = ModelArgument("m", str(folder / "bert"))
    measured = embed_models.measure_embeddings(model, embed_models.EmbeddingSettings(forms=("raw",)), benchmarks)
    sheet = embed_tables.make_table2([measured])
    assert sheet.notes == (
        "m: rw.txt: 0 of 1 pairs have vectors for both words; a correlation needs at least 2",
        "m: MEN.txt, raw: cosine: the rating is constant; inner product: the rating is constant",
    )
    assert [entry.text for entry in sheet.rows[0][1:]] == ["\u2013"] * 4 + ["1"]


def test_the_papers_tables_agree_with_each_other() -> None:
    """Table 2 averages Table 3 over the five benchmarks."""
    for model in ("bert-base-cased", "bert-large-cased", "roberta-base", "roberta-large", "gpt2", "gpt2-medium"):
        for form in ("raw", "scaled_centered", "all_but_the_top"):
            table2 = embed_tables.read_published_table("table2", "model", "variant")
            table3 = embed_tables.read_published_table("table3", "model", "variant", "benchmark")
            rows = [table3[model, form, name] for name in embed_tables.BENCHMARK_TITLES]
            for score in ("cosine", "inner_product"):
                mean = np.mean([row[score] for row in rows])
                assert table2[model, form][score] == pytest.approx(mean, abs=0.0101)


@pytest.mark.usefixtures("blank_figures")
def test_the_papers_numbers_of_tables_and_figures_need_one_of_its_models(tiny: ModelEmbeddings, tmp_path: Path) -> None:
    words = pd.DataFrame()
    other = replace(tiny, label="other")
    for models, is_of_paper in (([tiny, other], False), ([replace(tiny, label="gpt2"), other], True)):
        sheets = embed_page.make_tables(models, words)
        contents = embed_page.make_contents(models, sheets, words, tmp_path)
        page = contents["index.html"].decode()
        assert ("Table 1: Isotropy and norms" in page, "Figure 5: Norms" in page) == (is_of_paper, is_of_paper)
        assert sheets["table1"].title.endswith("Isotropy and norms")
        assert ("figures/figure2_spheres.svg" in contents) == is_of_paper
        shape = tiny.measures_by_form["raw"]
        tiles = re.findall(r"<dt>(.*)</dt><dd>(.*)</dd>", page)
        assert tiles == [(model.label, f"{shape['rows']} \u00d7 {shape['dimensions']}") for model in models]
    assert "source" not in embed_page.make_tables([tiny], words)["table2"].header


def test_which_models_are_the_papers(tiny: ModelEmbeddings) -> None:
    def find(label: str, name: str) -> str:
        return embed_tables.find_paper_model(replace(tiny, label=label, metadata={**tiny.metadata, "model": name}))

    assert find("x", "openai-community/gpt2") == "gpt2"
    assert find("roberta-large", "folder/model") == "roberta-large"
    assert find("x", "openai-community/gpt2-xl") == ""


def test_flags_are_on_anisotropic_matrices(tiny: ModelEmbeddings) -> None:
    def make_model(label: str, raw: float, centered: float) -> ModelEmbeddings:
        model = change_raw(tiny, label, partition_isotropy_both=raw)
        measures_by_form = {**model.measures_by_form, "centered": {"partition_isotropy_both": centered}}
        return replace(model, measures_by_form=measures_by_form)

    usual = make_model("usual", 0.51, 0.2)
    assert embed_page.describe_anisotropy([usual]) == [
        "No matrix is unusually anisotropic: I(W) over both signs is above 0.5; 1 is isotropic."
    ]
    assert embed_page.describe_anisotropy([make_model("also", 0.5, 0.9), usual, make_model("narrow", 0.1, 0.89)]) == [
        "narrow is anisotropic because of more than a common shift: I(W) over both signs is 0.100, and 0.890 after "
        "centering; 1 is isotropic.",
        "also is anisotropic because of a common shift: I(W) over both signs is 0.500, and 0.900 after centering; 1 is "
        "isotropic.",
    ]
    flags = embed_page.describe_anisotropy([make_model(str(number), 0.1, 0.95) for number in range(7)])
    assert len(flags) == 5
    assert flags[-1] == "3 more in the first table."


# ---- the figures


def get_coordinates(plot: Plot, panel_index: int = 0) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    return {line.label: (line.x, line.y) for line in plot.panels[panel_index].lines}


def test_singular_values_and_projections(tiny: ModelEmbeddings) -> None:
    lines = get_coordinates(embed_figures.make_singular_value_plot([tiny]))
    panels = embed_figures.make_projection_plot([tiny]).panels
    for panel, label, form in zip(panels, lines, ("raw", "centered"), strict=True):
        matrix = compute_forms(get_embeddings())[form]
        _, values, vectors = np.linalg.svd(matrix)
        np.testing.assert_allclose(lines[label][1], values, rtol=1e-5)
        assert lines[label][0] == tuple(range(1, matrix.shape[1] + 1))
        expected = matrix @ vectors[:2].T
        points = np.array([point for line in panel.lines for point in zip(line.x, line.y, strict=True)])
        for axis in (0, 1):  # the sign of an axis and the order of the groups are free
            assert sorted(np.abs(points[:, axis])) == pytest.approx(sorted(np.abs(expected[:, axis])), abs=1e-3)
        assert panel.model == "tiny"


def test_the_colours_of_a_projection_are_ids_or_frequencies(tiny: ModelEmbeddings) -> None:
    assert tiny.projection_counts is not None
    [first, *_] = embed_figures.make_projection_plot([tiny]).panels
    assert "the colour is the token id" not in first.fixed_settings  # few tokens occur, so that ids are shown
    assert "id, which stands for the rank by frequency" in first.fixed_settings
    counts = np.arange(len(tiny.projection_counts))
    [first, *_] = embed_figures.make_projection_plot([replace(tiny, projection_counts=counts)]).panels
    labels = ["most frequent quarter", "second", "third", "rarest quarter", "not in the texts"]
    assert [line.label for line in first.lines] == labels
    assert first.lines[-1].x == (tiny.projection["raw"][0][0],)


def test_the_gap_of_the_singular_values_grows_with_the_distance() -> None:
    points_plot, values_plot = embed_figures.make_sphere_plots()
    ratios = []
    for shift in (0, 1, 2):
        x, _ = get_coordinates(points_plot)[f"center at {shift}"]
        _, values = get_coordinates(values_plot)[f"center at {shift}"]
        # The squared norms of the points sum to n (1 + shift^2), because their mean is the center.
        assert sum(value**2 for value in values) == pytest.approx(len(x) * (1 + shift**2))
        assert np.mean(x) == pytest.approx(shift, abs=1e-12)
        ratios.append(values[0] / values[1])
    assert ratios == sorted(ratios)
    assert ratios[0] < 1.1 < 3 < ratios[-1]


def test_densities_are_kernel_estimates_with_scotts_bandwidth(tiny: ModelEmbeddings) -> None:
    values = np.random.default_rng(0).gamma(3.0, size=40)
    plot = embed_figures.make_norm_plot([replace(tiny, row_norms={"raw": values})])
    positions, heights = map(np.array, get_coordinates(plot)["tiny"])
    bandwidth = values.std(ddof=1) * len(values) ** -0.2
    kernels = np.exp(-0.5 * ((positions[:, None] - values) / bandwidth) ** 2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(heights, kernels.sum(1) / (len(values) * bandwidth), rtol=1e-10)
    assert positions[0] == max(0.0, values.min() - 3 * bandwidth)
    assert positions[-1] == pytest.approx(values.max() + 3 * bandwidth)


def test_norms_before_and_after_centering(tiny: ModelEmbeddings) -> None:
    matrices = compute_forms(get_embeddings())
    for form in ("raw", "centered"):
        np.testing.assert_allclose(tiny.row_norms[form], np.linalg.norm(matrices[form], axis=1), rtol=1e-6)
    line_before_centering = get_coordinates(embed_figures.make_centering_plot([tiny]))["before centering"]
    assert line_before_centering == get_coordinates(embed_figures.make_norm_plot([tiny]))["tiny"]
    model_of_equal_norms = replace(tiny, row_norms={"raw": np.ones(9), "centered": np.ones(9)})
    assert embed_figures.make_norm_plot([model_of_equal_norms]).panels == ()
    assert embed_figures.make_centering_plot([model_of_equal_norms]).panels == ()


def test_unused_tokens_by_bins(tiny: ModelEmbeddings) -> None:
    bins = pd.DataFrame({
        "order": ["index", "index", "frequency", "not in the text"], "first": [0, 2000, 1, None],
        "cosine_raw": [0.1, 0.2, 0.3, 0.4],
    })  # fmt: skip
    plot = embed_figures.make_unused_plot([replace(tiny, unused_similarity=bins)])
    assert get_coordinates(plot) == {"tiny": ((0.0, 2.0), (0.1, 0.2))}
    assert get_coordinates(plot, 1) == {"tiny": ((0.0,), (0.3,))}


def test_words_and_tokens_by_rank(tiny: ModelEmbeddings, folder: Path) -> None:
    words = token_frequencies.count_words(corpus.parse_sources([str(folder / "text.txt")]))
    assert dict(zip(words["word"], words["count"], strict=True)) == {
        "the": 4, "cat": 2, ".": 1, "dog": 1, "house": 1, "sees": 1
    }  # fmt: skip
    lines = get_coordinates(embed_figures.make_frequency_plot([tiny], words))
    assert lines["words"] == ((1, 2, 3, 4, 5, 6), pytest.approx((40, 20, 10, 10, 10, 10)))
    assert lines["tokens of tiny"][1] == pytest.approx(100 * tiny.token_frequencies["share"].to_numpy())
    frame = embed_tables.make_coverage_table([tiny], words).frame.set_index("unit")
    assert frame.loc["words", ["0.3", "0.5", "0.98"]].tolist() == [1, 2, 6]
    x, y = get_coordinates(embed_figures.make_frequency_norm_plot([tiny]))["tiny"]
    # There are fewer ranks than bins, so that each rank has a separate bin.
    assert x == tuple(tiny.token_frequencies["rank"])
    assert y == pytest.approx(tuple(tiny.token_frequencies["norm"]))
