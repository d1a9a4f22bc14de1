"""Correlations over a training, checked against scipy."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from istar.cli.main import main
from istar.geometry.correlation import correlate
from istar.geometry.correlation.correlate import ResampledSeries
from istar.statistics import correlation

pytestmark = pytest.mark.usefixtures("svg_only")

GEOMETRY = "model,revision,step,weights,source,layer,isoscore,inter_sim\n"


def write_text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(tmp_path: Path, geometry: str, scores: str, *options: str) -> int:
    geometry_path, scores_path = (
        write_text(tmp_path / "geometry.csv", geometry),
        write_text(tmp_path / "scores.csv", scores),
    )
    return main(["correlate", str(geometry_path), str(scores_path), "--out", str(tmp_path / "out"), *options])


def simulate_training(num_points: int = 12, seed: int = 0) -> tuple[str, str, np.ndarray, np.ndarray]:
    """Simulate a trajectory of two layers and the scores of two tasks.

    Returns the CSV files of measures and scores, whose rows have different orders, and the arrays of their numbers.
    """
    random = np.random.default_rng(seed)
    measures, scores = random.normal(size=(num_points, 2, 2)), random.normal(size=(num_points, 2)).round(1)
    geometry = GEOMETRY + "".join(
        f"org/tiny,step{point},{point},w{point},wiki,layer_{layer + 1},{values[0]!r},{values[1]!r}\n"
        for point in range(num_points)
        for layer, values in enumerate(measures[point].tolist())
    )
    lines = [f"tiny,step{point},{scores[point, 0]},{scores[point, 1]}\n" for point in random.permutation(num_points)]
    return geometry, "model,revision,MR,CR\n" + "".join(lines), measures, scores


def test_against_scipy(tmp_path: Path) -> None:
    geometry, scores, measures, task_scores = simulate_training()
    assert run(tmp_path, geometry, scores) == 0
    rows = read_rows(tmp_path / "out" / "correlation.csv")
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        x = measures[:, int(row["layer"][-1]) - 1, ["isoscore", "inter_sim"].index(row["measure"])]
        y = task_scores[:, ["MR", "CR"].index(row["task"])]
        assert (row["n"], row["source"], row["model"], row["note"]) == ("12", "wiki", "tiny", "")
        for name, function in (("pearson", "pearsonr"), ("spearman", "spearmanr"), ("kendall", "kendalltau")):
            assert float(row[name]) == pytest.approx(getattr(scipy.stats, function)(x, y).statistic, abs=1e-12)
            assert -1 <= float(row[f"{name}_low"]) < float(row[name]) < float(row[f"{name}_high"]) <= 1


def test_resamples_equal_scipy_on_repeated_points() -> None:
    """Each resample equals scipy on points that are repeated as often as they are drawn, including ties."""
    random = np.random.default_rng(1)
    x, y = random.integers(0, 5, 9).astype(float), random.normal(size=9).round(1)
    draws = np.array([np.bincount(random.integers(0, 9, 9), minlength=9) for _ in range(50)], dtype=float)
    correlations = correlate.correlate_resamples(ResampledSeries(x, draws), ResampledSeries(y, draws))
    for resample_index, multiplicities in enumerate(draws.astype(int)):
        repeated_x, repeated_y = np.repeat(x, multiplicities), np.repeat(y, multiplicities)
        expected = [
            getattr(scipy.stats, function)(repeated_x, repeated_y).statistic
            for function in ("pearsonr", "spearmanr", "kendalltau")
        ]
        np.testing.assert_allclose(correlations[:, resample_index], expected, atol=1e-12)


def test_a_constant_resample_has_no_statistics() -> None:
    draws = np.array([[3.0, 0, 0], [0, 2, 1], [1, 1, 1]])
    x, y = np.array([0.1, 0.7, 0.7]), np.array([1.0, 2, 3])
    correlations = correlate.correlate_resamples(ResampledSeries(x, draws), ResampledSeries(y, draws))
    assert np.isnan(correlations[:, :2]).all()
    assert np.isfinite(correlations[:, 2]).all()


def test_intervals_cover_the_true_correlation() -> None:
    """About 95% of the intervals cover the true value; percentile intervals are slightly too narrow."""
    true_values = {"pearson": 0.6, "spearman": 6 / math.pi * math.asin(0.3), "kendall": 2 / math.pi * math.asin(0.6)}
    random = np.random.default_rng(0)
    num_covered = dict.fromkeys(true_values, 0)
    num_rounds, num_points = 300, 40
    for seed in range(num_rounds):
        x = random.normal(size=num_points)
        y = 0.6 * x + 0.8 * random.normal(size=num_points)
        weights = correlate._bootstrap_weights(num_points, 400, seed)
        intervals = correlate.correlate_with_intervals(ResampledSeries(x, weights), ResampledSeries(y, weights))
        for name, value in true_values.items():
            num_covered[name] += intervals[f"{name}_low"] <= value <= intervals[f"{name}_high"]
    for name, count in num_covered.items():
        assert 0.88 < count / num_rounds < 0.985, (name, count / num_rounds)


def test_the_seed_determines_the_intervals(tmp_path: Path) -> None:
    geometry, scores, *_ = simulate_training()
    tables = []
    for seed in ("0", "0", "1"):
        assert run(tmp_path, geometry, scores, "--seed", seed) == 0
        tables.append((tmp_path / "out" / "correlation.csv").read_text())
    assert tables[0] == tables[1] != tables[2]


# ---- joining


def test_only_common_points_count_and_empty_cells_do_not(tmp_path: Path) -> None:
    geometry, scores, measures, task_scores = simulate_training()
    lines = scores.splitlines()
    retained_lines = [line for line in lines if line.split(",")[1] not in ("step3", "step4")]
    retained_lines = [
        line.rsplit(",", 1)[0] + "," if line.split(",")[1] == "step5" else line for line in retained_lines
    ]
    assert run(tmp_path, geometry, "\n".join([*retained_lines, "tiny,step99,1,1"]), "--omit", "step0") == 0
    rows = {row["task"]: row for row in read_rows(tmp_path / "out" / "correlation.csv") if row["measure"] == "isoscore"}
    assert (rows["MR"]["n"], rows["CR"]["n"]) == ("9", "8")
    common_points = [1, 2, 6, 7, 8, 9, 10, 11]
    expected = scipy.stats.kendalltau(measures[common_points, 1, 0], task_scores[common_points, 1]).statistic
    assert float(rows["CR"]["kendall"]) == pytest.approx(expected)


def test_tasks_as_rows_and_steps_for_revisions(tmp_path: Path) -> None:
    geometry, scores, *_ = simulate_training()
    assert run(tmp_path, geometry, scores) == 0
    expected = (tmp_path / "out" / "correlation.csv").read_text()
    wide_rows = [line.split(",") for line in scores.splitlines()[1:]]
    rows = [f"{cells[1].removeprefix('step')},{task},{cells[2 + index]}" for index, task in enumerate(("MR", "CR"))
            for cells in wide_rows]  # fmt: skip
    assert run(tmp_path, geometry, "\n".join(["step,task,score", *rows])) == 0
    assert (tmp_path / "out" / "correlation.csv").read_text() == expected


def test_models_are_correlated_separately(tmp_path: Path) -> None:
    geometry, scores, measures, task_scores = simulate_training()
    small_geometry, small_scores, _, _ = simulate_training(seed=1)
    small_geometry, small_scores = (
        table.replace("tiny", "small").split("\n", 1)[1] for table in (small_geometry, small_scores)
    )
    assert (
        run(tmp_path, geometry + small_geometry, scores + small_scores, "--measure", "isoscore", "--layer", "layer_2")
        == 0
    )
    rows = read_rows(tmp_path / "out" / "table.csv")
    # The first columns are those of the paper's table.
    assert list(rows[0])[:5] == ["task", "model", "pearson", "spearman", "kendall"]
    assert [(row["task"], row["model"]) for row in rows] == [
        ("MR", "tiny"), ("CR", "tiny"), ("MR", "small"), ("CR", "small")
    ]  # fmt: skip
    assert float(rows[0]["pearson"]) == pytest.approx(np.corrcoef(measures[:, 1, 0], task_scores[:, 0])[0, 1])
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.count("| tiny | ") == 2
    assert f"| {float(rows[0]['pearson']):.2f} \\[" in table


def test_the_model_of_the_scores_may_have_another_name(tmp_path: Path) -> None:
    geometry, scores, *_ = simulate_training()
    assert run(tmp_path, geometry, scores) == 0
    expected = (tmp_path / "out" / "correlation.csv").read_text()
    assert run(tmp_path, geometry, scores.replace("tiny,", "tiny-v1.1,"), "--model", "tiny") == 0
    assert (tmp_path / "out" / "correlation.csv").read_text() == expected


def test_the_table_shows_the_papers_measures_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    geometry, scores, *_ = simulate_training()
    lines = [line + "," for line in geometry.splitlines()[1:]]
    matrix_lines = [f"org/tiny,step{point},{point},w{point},,output_embeddings,,,0.{point + 1}" for point in range(12)]
    header = GEOMETRY.strip() + ",partition_isotropy_both"
    assert run(tmp_path, "\n".join([header, *lines, *matrix_lines]), scores) == 0
    layers_and_measures = {(row["layer"], row["measure"]) for row in read_rows(tmp_path / "out" / "table.csv")}
    assert layers_and_measures == {
        ("layer_2", "isoscore"), ("layer_2", "inter_sim"), ("output_embeddings", "partition_isotropy_both")
    }  # fmt: skip
    output = capsys.readouterr().out
    assert "MR" in output
    assert "tiny: IsoScore, InterSim of layer 2 over wiki; I(W), both signs of output embeddings" in output


def test_the_papers_correlations_stand_beside_those_of_its_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers of pythia-70m and MR, SciQ-acc-norm and SST2 are those of Table 1 of the second paper."""
    random = np.random.default_rng(0)
    geometry = "model,revision,step,weights,source,layer,partition_isotropy_both,partition_isotropy_as_computed,norm\n"
    for model in ("EleutherAI/pythia-70m", "EleutherAI/pythia-1b"):
        for point in range(8):
            for layer in ("output_embeddings", "input_embeddings"):
                numbers = ",".join(map(repr, random.uniform(size=3).tolist()))
                geometry += f"{model},step{point},{point},{model}{point}{layer},,{layer},{numbers}\n"
    names, scores = ("MR", "sciq acc_norm", "SST2", "mine"), random.uniform(size=(8, 4)).tolist()
    lines = [
        f"{model},step{point},{','.join(map(repr, scores[point]))}"
        for model in ("pythia-70m", "pythia-1b")
        for point in range(8)
    ]
    measures = ("partition_isotropy_both", "partition_isotropy_as_computed", "norm")
    options = [option for measure in measures for option in ("--measure", measure)]
    assert run(tmp_path, geometry, "\n".join([f"model,revision,{','.join(names)}", *lines]), *options) == 0
    published = {
        "MR": (0.99, 0.83, 0.69), "sciq acc_norm": (0.80, 0.79, 0.63), "SST2": (0.95, 0.88, 0.68), "mine": None
    }  # fmt: skip
    for row in read_rows(tmp_path / "out" / "table.csv"):
        expected = published[row["task"]]
        if row["model"] != "pythia-70m" or row["layer"] != "output_embeddings" or row["measure"] == "norm":
            expected = None
        for index, name in enumerate(("pearson", "spearman", "kendall")):
            paper, difference = row[f"paper_{name}"], row[f"minus_paper_{name}"]
            assert (paper, difference) == ("", "") if expected is None else float(paper) == expected[index]
            if expected is not None:
                assert float(difference) == pytest.approx(float(row[name]) - expected[index], abs=1e-12)
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.count("0.99, 0.83, 0.69") == 2  # for both sign conventions
    assert "Table 1 of Machina and Mercer (2024)" in table
    output = capsys.readouterr().out
    assert "pythia-70m, Table 1 of the paper" in output
    assert "pythia-1b, Table 1 of the paper" not in output
    geometry, scores_of_another, *_ = simulate_training()
    assert run(tmp_path, geometry, scores_of_another) == 0
    assert "paper" not in (tmp_path / "out" / "table.csv").read_text() + (tmp_path / "out" / "table.md").read_text()


def test_each_model_has_its_own_last_layer_and_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tied models have no output embeddings, encoders no final normalization, and depths differ."""
    header = "model,revision,step,weights,source,layer,isoscore,partition_isotropy_both,partition_isotropy_as_computed"
    layers_by_model = {
        "tied": ("input_embeddings", "layer_9", "layer_10"),
        "untied": ("input_embeddings", "output_embeddings", "layer_2", "final_norm"),
        "plain": ("", ),
        "silent": ("layer_1",),
    }  # fmt: skip
    random = np.random.default_rng(0)
    geometry = [header]
    for model, layers in layers_by_model.items():
        for point in range(5):
            for layer in layers:
                is_matrix = layer.endswith("embeddings")
                values = ["", random.random(), random.random()] if is_matrix else [random.random(), "", ""]
                source = "" if is_matrix else "wiki"
                line = [model, f"step{point}", point, f"{model}{point}", source, layer, *values]
                geometry.append(",".join(map(str, line)))
    scores = ["model,revision,MR"]
    scores += [f"{model},step{point},{random.random()}" for model in ("tied", "untied", "plain") for point in range(5)]
    scores += [f"other,step{point},1" for point in range(5)]
    assert run(tmp_path, "\n".join(geometry), "\n".join(scores)) == 0
    rows = read_rows(tmp_path / "out" / "table.csv")
    assert {(row["model"], row["layer"], row["measure"]) for row in rows} == {
        ("tied", "layer_10", "isoscore"), ("tied", "input_embeddings", "partition_isotropy_both"),
        ("untied", "final_norm", "isoscore"), ("untied", "output_embeddings", "partition_isotropy_both"),
        ("plain", "", "isoscore"),
    }  # fmt: skip
    output = capsys.readouterr().out
    table = (tmp_path / "out" / "table.md").read_text()
    for line in (
        "tied: I(W), both signs of input embeddings; IsoScore of layer 10 over wiki",
        "untied: I(W), both signs of output embeddings; IsoScore of final norm over wiki",
        "plain: all measures, because it has none of an embedding matrix or a numbered layer",
        f"left out: silent, which has no scores in {tmp_path / 'scores.csv'}",
        f"left out: other, which has no measures in {tmp_path / 'geometry.csv'}",
    ):
        assert line in output
        assert line.replace("_", "\\_") in table
    assert run(tmp_path, "\n".join(geometry), "\n".join(scores), "--layer", "layer_10") == 0
    output = capsys.readouterr().out
    assert f"left out: untied, which has no number in the selected rows of {tmp_path / 'geometry.csv'}" in output


def test_the_table_shows_the_last_layer_of_all_texts(tmp_path: Path) -> None:
    geometry, scores, *_ = simulate_training()
    lines = geometry.splitlines()[1:]
    combined_lines = [line.replace(",wiki,", ",combined,") for line in lines]
    zeta_lines = [line.replace(",wiki,", ",zeta,") for line in lines]
    assert run(tmp_path, "\n".join([GEOMETRY.strip(), *lines, *combined_lines, *zeta_lines]), scores) == 0
    sources_and_layers = {(row["source"], row["layer"]) for row in read_rows(tmp_path / "out" / "table.csv")}
    assert sources_and_layers == {("combined", "layer_2")}


def test_undefined_correlations_have_a_dash_and_a_reason(tmp_path: Path) -> None:
    geometry = "revision,flat,good\n" + "".join(f"r{point},0.1,{point}\n" for point in range(5))
    scores = "revision,same,few,good\n" + "".join(
        f"r{point},7,{point if point < 2 else ''},{point % 3}\n" for point in range(5)
    )
    assert run(tmp_path, geometry, scores) == 0
    rows = {(row["measure"], row["task"]): row for row in read_rows(tmp_path / "out" / "correlation.csv")}
    assert rows["good", "same"]["note"] == "the score is constant"
    assert rows["flat", "good"]["note"] == "the measure is constant"
    assert rows["good", "few"]["note"] == "2 common points; 3 are needed"
    assert rows["good", "same"]["pearson"] == ""
    assert rows["good", "good"]["note"] == ""
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert any("| same |" in line and "| - | - | - | the score is constant |" in line for line in lines)


def test_equal_weights_give_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    geometry, scores, *_ = simulate_training()
    assert run(tmp_path, geometry.replace(",w5,", ",w2,"), scores) == 0
    assert "same weights at step2, step5, which count as 2 points" in capsys.readouterr().out


def test_each_series_is_resampled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 layers x 5 measures and 10 tasks make 300 pairs, but only 40 series."""
    argument_counts = []

    class CountedSeries(ResampledSeries):
        def __init__(self, *arguments: np.ndarray) -> None:
            argument_counts.append(len(arguments))
            super().__init__(*arguments)

    monkeypatch.setattr(correlate, "ResampledSeries", CountedSeries)
    random = np.random.default_rng(0)
    columns = ",".join(f"measure_{number}" for number in range(5))
    geometry = f"step,layer,{columns}\n" + "".join(
        f"{step},layer_{layer},{','.join(map(str, random.normal(size=5)))}\n"
        for step in range(21)
        for layer in range(6)
    )
    scores = "step," + ",".join("abcdefghij") + "\n"
    scores += "".join(f"{step},{','.join(map(str, random.normal(size=10)))}\n" for step in range(21))
    assert run(tmp_path, geometry, scores, "--resamples", "100") == 0
    assert len(read_rows(tmp_path / "out" / "correlation.csv")) == 300
    assert len(argument_counts) == 6 * 5 + 10


# ---- columns that are held constant


def compute_naive_partial_correlation(x: np.ndarray, y: np.ndarray, covariates: np.ndarray) -> float:
    """Return Pearson's correlation of the residuals of linear regressions of `x` and `y` on the covariates."""
    design = np.column_stack([np.ones(len(x)), covariates])
    x_residuals, y_residuals = (values - design @ (np.linalg.pinv(design) @ values) for values in (x, y))
    return float(x_residuals @ y_residuals / math.sqrt((x_residuals @ x_residuals) * (y_residuals @ y_residuals)))


def simulate_trend(num_points: int = 14) -> tuple[str, str, np.ndarray, np.ndarray, np.ndarray]:
    """Simulate measures of two layers and scores of a task that grow with the step, and a rate for each step.

    Returns the CSV files of measures and scores, and arrays of the measures, the scores, and the steps with the rates.
    """
    random = np.random.default_rng(5)
    steps = 2 ** np.arange(num_points)
    rates = random.uniform(1, 2, num_points)
    drift = np.log(steps) + 3 * rates
    measures = drift[:, None] + random.normal(size=(num_points, 2))
    scores = (drift + random.normal(size=num_points)).round(3)
    geometry = "revision,layer,isoscore,norm\n" + "".join(
        f"step{step},layer_{layer},{measures[index, layer].item()!r},{index * (layer + 1)}\n"
        for index, step in enumerate(steps)
        for layer in range(2)
    )
    lines = [
        f"step{step},{score!r},{rate!r}\n"
        for step, score, rate in zip(steps, scores.tolist(), rates.tolist(), strict=True)
    ]
    return geometry, "revision,MR,rate\n" + "".join(reversed(lines)), measures, scores, np.column_stack([steps, rates])


@pytest.mark.parametrize(("covariate_names", "columns"), [("step", [0]), ("step, rate", [0, 1]), ("rate", [1])])
def test_partial_correlations_against_regressions(covariate_names: str, columns: list[int], tmp_path: Path) -> None:
    geometry, scores, measures, task_scores, covariates = simulate_trend()
    assert run(tmp_path, geometry, scores, "--given", covariate_names, "--measure", "isoscore", "--task", "MR") == 0
    rows = read_rows(tmp_path / "out" / "correlation.csv")
    # A column of scores that is held constant is not a task.
    assert [(row["layer"], row["task"]) for row in rows] == [("layer_0", "MR"), ("layer_1", "MR")]
    for layer, row in enumerate(rows):
        assert (row["given"], row["partial_n"], row["partial_note"]) == (covariate_names, "14", "")
        series = (measures[:, layer], task_scores, covariates[:, columns])
        expected = {"pearson": compute_naive_partial_correlation(*series)}
        expected["spearman"] = compute_naive_partial_correlation(
            *(scipy.stats.rankdata(values, axis=0) for values in series)
        )
        for method, value in expected.items():
            assert float(row[f"partial_{method}"]) == pytest.approx(value, rel=1e-9)
            # The interval is Fisher's, and the p-value is that of a t test.
            variance = (1.06 if method == "spearman" else 1.0) / (14 - 3 - len(columns))
            expected_interval = np.tanh(np.arctanh(value) + scipy.stats.norm.ppf([0.025, 0.975]) * math.sqrt(variance))
            interval = [float(row[f"partial_{method}_{end}"]) for end in ("low", "high")]
            np.testing.assert_allclose(interval, expected_interval, rtol=1e-8)
            degrees = 14 - 2 - len(columns)
            t = value * math.sqrt(degrees / (1 - value**2))
            expected_p = 2 * scipy.stats.t.sf(abs(t), degrees)
            assert float(row[f"partial_{method}_p"]) == pytest.approx(expected_p, rel=1e-7)
        # The correlation without covariates is as before.
        assert float(row["pearson"]) == pytest.approx(scipy.stats.pearsonr(measures[:, layer], task_scores).statistic)
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| partial Pearson | partial Spearman |" in table
    assert f"with {covariate_names} held constant" in table


def test_a_measure_of_the_same_layer_is_held_constant(tmp_path: Path) -> None:
    geometry, scores, measures, task_scores, _ = simulate_trend()
    assert run(tmp_path, geometry, scores, "--given", "norm", "--task", "MR") == 0
    rows = read_rows(tmp_path / "out" / "correlation.csv")
    # The column that is held constant is not itself correlated.
    assert {row["measure"] for row in rows} == {"isoscore"}
    for layer, row in enumerate(rows):
        expected = compute_naive_partial_correlation(measures[:, layer], task_scores, np.arange(14.0) * (layer + 1))
        assert float(row["partial_pearson"]) == pytest.approx(expected, rel=1e-9)


def test_points_without_the_column_are_left_out(tmp_path: Path) -> None:
    geometry, scores, measures, task_scores, covariates = simulate_trend()
    lines = scores.splitlines()
    changed_lines = [lines[0], *(f"{line.rsplit(',', 1)[0]}," for line in lines[1:3]), *lines[3:]]
    assert run(tmp_path, geometry, "\n".join(changed_lines), "--given", "rate", "--measure", "isoscore") == 0
    [row, _] = read_rows(tmp_path / "out" / "correlation.csv")
    assert (row["n"], row["partial_n"]) == ("14", "12")
    expected = compute_naive_partial_correlation(measures[:12, 0], task_scores[:12], covariates[:12, 1])
    assert float(row["partial_pearson"]) == pytest.approx(expected, rel=1e-9)


def test_a_column_that_explains_too_much_has_a_reason(tmp_path: Path) -> None:
    geometry, scores, *_ = simulate_trend()
    scores_with_constant = "revision,MR,one\n" + "".join(
        f"{line.rsplit(',', 1)[0]},1\n" for line in scores.splitlines()[1:]
    )
    assert run(tmp_path, geometry, scores_with_constant, "--given", "one", "--measure", "isoscore") == 0
    [row, _] = read_rows(tmp_path / "out" / "correlation.csv")
    assert "a covariate is constant" in row["partial_note"]
    assert (row["partial_pearson"], row["note"]) == ("", "")
    table = (tmp_path / "out" / "table.md").read_text()
    reason = "a covariate is constant or a linear function of the others; leave it out"
    assert f"| - | - | partial: Pearson and Spearman: {reason} |" in table


def test_the_checkpoints_of_all_models_are_pooled(tmp_path: Path) -> None:
    """Within a model the width is constant; over all models it can be held constant."""
    random = np.random.default_rng(3)
    widths = np.repeat([64, 128, 256], 6)
    x = widths / 100 + random.normal(size=18)
    y = widths / 50 + random.normal(size=18)
    checkpoints = [(f"m{width}", f"step{step}") for width, step in zip(widths, [1, 2, 3, 4, 5, 6] * 3, strict=True)]
    geometry = "model,revision,isoscore,width\n" + "".join(
        f"org/{model},{revision},{value!r},{width}\n"
        for (model, revision), value, width in zip(checkpoints, x.tolist(), widths.tolist(), strict=True)
    )
    scores = "model,revision,MR\n" + "".join(
        f"{model},{revision},{value!r}\n" for (model, revision), value in zip(checkpoints, y.tolist(), strict=True)
    )
    assert run(tmp_path, geometry, scores, "--given", "width") == 0
    rows = read_rows(tmp_path / "out" / "correlation.csv")
    assert [(row["model"], row["n"], row["partial_pearson"]) for row in rows] == [
        (f"m{width}", "6", "") for width in (64, 128, 256)
    ]
    assert run(tmp_path, geometry, scores, "--given", "width,step", "--pool") == 0
    [row] = read_rows(tmp_path / "out" / "correlation.csv")
    assert (row["model"], row["n"], row["measure"]) == ("all models", "18", "isoscore")
    assert float(row["pearson"]) == pytest.approx(scipy.stats.pearsonr(x, y).statistic)
    covariates = np.column_stack([widths, [1, 2, 3, 4, 5, 6] * 3])
    assert float(row["partial_pearson"]) == pytest.approx(compute_naive_partial_correlation(x, y, covariates), rel=1e-9)


# ---- blocks of neighbouring checkpoints


def simulate_dependent_checkpoints(num_points: int = 24) -> tuple[str, str, np.ndarray, np.ndarray]:
    """Simulate a measure and a score whose values at neighbouring checkpoints depend on each other.

    Returns the CSV files of measures and scores, whose rows have different orders, and the arrays of their values.
    """
    random = np.random.default_rng(2)
    x, y = (np.convolve(random.normal(size=num_points + 3), np.ones(4), "valid") for _ in range(2))
    steps = (np.arange(num_points) + 1) * 1000
    measures = [f"step{step},{value!r}\n" for step, value in zip(steps, x.tolist(), strict=True)]
    scores = [f"step{step},{value!r}\n" for step, value in zip(steps, y.tolist(), strict=True)]
    # Sorted by name, step10000 comes before step2000.
    return "revision,isoscore\n" + "".join(measures), "revision,MR\n" + "".join(sorted(scores)), x, y


@pytest.mark.parametrize("block_length", ["3", "auto"])
def test_intervals_of_blocks_against_scipy(block_length: str, tmp_path: Path) -> None:
    geometry, scores, x, y = simulate_dependent_checkpoints()
    assert run(tmp_path, geometry, scores, "--blocks", block_length, "--resamples", "300", "--seed", "4") == 0
    [row] = read_rows(tmp_path / "out" / "correlation.csv")
    expected_length = correlation.automatic_block_length(x, y) if block_length == "auto" else 3
    assert int(row["block_length"]) == expected_length > 1
    starts = np.random.default_rng(4).integers(0, 24 - expected_length + 1, (300, math.ceil(24 / expected_length)))
    for name, function in (("pearson", "pearsonr"), ("spearman", "spearmanr"), ("kendall", "kendalltau")):
        resampled = []
        for resample in starts:
            indices = [start + offset for start in resample for offset in range(expected_length)][:24]
            resampled.append(getattr(scipy.stats, function)(x[indices], y[indices]).statistic)
        assert float(row[name]) == pytest.approx(getattr(scipy.stats, function)(x, y).statistic, rel=1e-12)
        low, high = np.quantile(resampled, [0.025, 0.975])
        assert [float(row[f"{name}_low"]), float(row[f"{name}_high"])] == pytest.approx([low, high], abs=1e-10)
    assert "bootstrap resamples of blocks of neighbouring checkpoints" in (tmp_path / "out" / "table.md").read_text()


def test_blocks_of_one_point_are_single_checkpoints(tmp_path: Path) -> None:
    geometry, scores, *_ = simulate_dependent_checkpoints()
    rows = []
    for options in ([], ["--blocks", "1"]):
        assert run(tmp_path, geometry, scores, *options, "--resamples", "4000") == 0
        rows += read_rows(tmp_path / "out" / "correlation.csv")
    for name in ("pearson_low", "pearson_high", "kendall_low"):
        assert float(rows[0][name]) == pytest.approx(float(rows[1][name]), abs=0.05)


def test_too_few_points_for_blocks_have_no_interval(tmp_path: Path) -> None:
    geometry, scores, *_ = simulate_dependent_checkpoints()
    assert run(tmp_path, geometry, "\n".join(scores.splitlines()[:8]), "--blocks", "4") == 0
    [row] = read_rows(tmp_path / "out" / "correlation.csv")
    assert row["note"] == "no interval: blocks of 4 need 8 common points"
    assert (row["n"], row["pearson_low"], row["block_length"]) == ("7", "", "")
    assert math.isfinite(float(row["kendall"]))
    assert f"| {float(row['pearson']):.2f} |" in (tmp_path / "out" / "table.md").read_text()
    nearly_constant_scores = "revision,MR\n" + "".join(f"step{step}000,{int(step == 1)}\n" for step in range(1, 25))
    assert run(tmp_path, geometry, nearly_constant_scores, "--blocks", "12") == 0
    [row] = read_rows(tmp_path / "out" / "correlation.csv")
    assert row["note"] == "no interval: a series is constant in half of the resamples or more"


# ---- errors

GOOD = "revision,isoscore\nr1,1\nr2,2\nr3,4\n"
STEPS = "revision,isoscore\nstep1,1\nstep2,2\n"
SCORES = "revision,MR\nr1,3\nr2,4\nr3,1\n"


@pytest.mark.parametrize(
    ("geometry", "scores", "more", "message"),
    [
        (GOOD, "revision,MR\nr1,3\nr2,high\n", [], "scores.csv, line 3: MR is 'high'; expected a number or nothing"),
        (GOOD, "revision,MR\nr1,3,4\n", [], "scores.csv, line 2: the row has 3 cells; expected 2, as the header"),
        (GOOD, "revision,MR\nr1,3\nr1,4\n", [], "scores.csv, line 3: there is a second number for MR r1"),
        (GOOD + "r1,5\n", SCORES, [], "geometry.csv, line 5: there is a second number for isoscore r1"),
        (GOOD, "revision,MR,MR\nr1,3,4\n", [], "two columns are called 'MR'"),
        (GOOD, "name,MR\nr1,3\n", [], "scores.csv has no column revision or step"),
        (GOOD, "step,MR\n1,3\n", ["--by", "revision"], "scores.csv has no column revision;"),
        (GOOD, "revision\nr1\n", [], "scores.csv has no column of scores"),
        (GOOD, "revision,MR\n", [], "scores.csv has no rows"),
        (GOOD, "", [], "scores.csv has no rows"),
        (GOOD, "revision,MR\nq1,3\n", [], "no revision in common: the measures have r1, r2, r3, the scores q1"),
        (STEPS, "step,MR\nmain,3\n", [], "scores.csv, line 2: 'main' is no step; expected a number"),
        (GOOD, SCORES, ["--measure", "isoscor"], "did you mean isoscore?"),
        (GOOD, SCORES, ["--layer", "layer_1"], "--layer layer_1: "),
        (GOOD, SCORES, ["--omit", "r9"], "--omit r9: "),
        (GOOD, SCORES, ["--resamples", "3"], "--resamples 3 is too small"),
        (GOOD, SCORES, ["--task", "MX"], "--task MX: "),
        (GOOD, SCORES, ["--model", "other"], "--model other: "),
        (GOOD, SCORES, ["--given", "isoscor"], "--given isoscor: neither "),
        (GOOD, SCORES, ["--given", "step"], "geometry.csv, line 2: 'r1' is no step; expected a number"),
        (GOOD, SCORES, ["--given", "model"], "--given model: neither "),
        (GOOD, "revision,task,score,lr\nr1,MR,1,2\nr1,CR,1,3\n", ["--given", "lr"], "line 3: lr has another value"),
        (GOOD, SCORES, ["--blocks", "auto"], "--blocks needs the order of the checkpoints, but r1 has no step"),
        (GOOD, SCORES, ["--blocks", "0"], "--blocks 0 is no length; expected auto, or a number of checkpoints"),
        (GOOD, SCORES, ["--blocks", "2", "--pool"], "--blocks are of neighbours in one training, and --pool joins"),
        ("model,revision,isoscore\na,r1,1\n", "model,revision,MR\nb,r1,1\n", [], "no model in common"),
        ("model,revision,isoscore\na,r1,1\nb,r1,1\n", SCORES, [], "scores.csv has no column model"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(
    tmp_path: Path, geometry: str, scores: str, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, geometry, scores, *more) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("something")
    assert run(tmp_path, GOOD, SCORES) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "is not a folder" in line


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["correlate", str(tmp_path / "none.csv"), str(tmp_path / "none.csv")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "none.csv cannot be read" in line
