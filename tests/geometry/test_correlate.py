"""Correlations over a training, checked against scipy."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from istar.cli.main import main
from istar.geometry import correlate
from istar.geometry.correlate import ResampledSeries
from istar.statistics import correlation

GEOMETRY = "model,revision,step,weights,source,layer,isoscore,inter_sim\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(tmp_path: Path, geometry: str, scores: str, *more: str) -> int:
    first, second = write(tmp_path / "geometry.csv", geometry), write(tmp_path / "scores.csv", scores)
    return main(["correlate", str(first), str(second), "--out", str(tmp_path / "out"), *more])


def simulated(points: int = 12, seed: int = 0) -> tuple[str, str, np.ndarray, np.ndarray]:
    """Return a trajectory of two layers and the scores of two tasks in another order, with the numbers in both."""
    random = np.random.default_rng(seed)
    measures, scores = random.normal(size=(points, 2, 2)), random.normal(size=(points, 2)).round(1)
    geometry = GEOMETRY + "".join(
        f"org/tiny,step{point},{point},w{point},wiki,layer_{layer + 1},{values[0]!r},{values[1]!r}\n"
        for point in range(points)
        for layer, values in enumerate(measures[point].tolist())
    )
    lines = [f"tiny,step{point},{scores[point, 0]},{scores[point, 1]}\n" for point in random.permutation(points)]
    return geometry, "model,revision,MR,CR\n" + "".join(lines), measures, scores


def test_against_scipy(tmp_path: Path) -> None:
    geometry, scores, measures, tasks = simulated()
    assert run(tmp_path, geometry, scores) == 0
    rows = rows_of(tmp_path / "out" / "correlation.csv")
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        x = measures[:, int(row["layer"][-1]) - 1, ["isoscore", "inter_sim"].index(row["measure"])]
        y = tasks[:, ["MR", "CR"].index(row["task"])]
        assert (row["n"], row["source"], row["model"], row["note"]) == ("12", "wiki", "tiny", "")
        for name, function in (("pearson", "pearsonr"), ("spearman", "spearmanr"), ("kendall", "kendalltau")):
            assert float(row[name]) == pytest.approx(getattr(scipy.stats, function)(x, y).statistic, abs=1e-12)
            assert -1 <= float(row[f"{name}_low"]) < float(row[name]) < float(row[f"{name}_high"]) <= 1


def test_resamples_equal_scipy_on_repeated_points() -> None:
    """Each resample equals scipy on points that are repeated as often as they are drawn, including ties."""
    random = np.random.default_rng(1)
    x, y = random.integers(0, 5, 9).astype(float), random.normal(size=9).round(1)
    draws = np.array([np.bincount(random.integers(0, 9, 9), minlength=9) for _ in range(50)], dtype=float)
    found = correlate.correlate_resamples(ResampledSeries(x, draws), ResampledSeries(y, draws))
    for number, drawn in enumerate(draws.astype(int)):
        a, b = np.repeat(x, drawn), np.repeat(y, drawn)
        expected = [getattr(scipy.stats, f)(a, b).statistic for f in ("pearsonr", "spearmanr", "kendalltau")]
        np.testing.assert_allclose(found[:, number], expected, atol=1e-12)


def test_a_constant_resample_has_no_statistics() -> None:
    draws = np.array([[3.0, 0, 0], [0, 2, 1], [1, 1, 1]])
    x, y = np.array([0.1, 0.7, 0.7]), np.array([1.0, 2, 3])
    found = correlate.correlate_resamples(ResampledSeries(x, draws), ResampledSeries(y, draws))
    assert np.isnan(found[:, :2]).all()
    assert np.isfinite(found[:, 2]).all()


def test_intervals_cover_the_true_correlation() -> None:
    """About 95% of the intervals cover the true value; percentile intervals are slightly too narrow."""
    truth = {"pearson": 0.6, "spearman": 6 / math.pi * math.asin(0.3), "kendall": 2 / math.pi * math.asin(0.6)}
    random = np.random.default_rng(0)
    inside = dict.fromkeys(truth, 0)
    rounds, points = 300, 40
    for seed in range(rounds):
        x = random.normal(size=points)
        y = 0.6 * x + 0.8 * random.normal(size=points)
        weights = correlate._bootstrap_weights(points, 400, seed)
        found = correlate.correlate_with_intervals(ResampledSeries(x, weights), ResampledSeries(y, weights))
        for name, value in truth.items():
            inside[name] += found[f"{name}_low"] <= value <= found[f"{name}_high"]
    for name, count in inside.items():
        assert 0.88 < count / rounds < 0.985, (name, count / rounds)


def test_the_seed_determines_the_intervals(tmp_path: Path) -> None:
    geometry, scores, *_ = simulated()
    texts = []
    for seed in ("0", "0", "1"):
        assert run(tmp_path, geometry, scores, "--seed", seed) == 0
        texts.append((tmp_path / "out" / "correlation.csv").read_text())
    assert texts[0] == texts[1] != texts[2]


# ---- joining


def test_only_common_points_count_and_empty_cells_do_not(tmp_path: Path) -> None:
    geometry, scores, measures, tasks = simulated()
    lines = scores.splitlines()
    kept = [line for line in lines if line.split(",")[1] not in ("step3", "step4")]
    kept = [line.rsplit(",", 1)[0] + "," if line.split(",")[1] == "step5" else line for line in kept]
    assert run(tmp_path, geometry, "\n".join([*kept, "tiny,step99,1,1"]), "--omit", "step0") == 0
    rows = {row["task"]: row for row in rows_of(tmp_path / "out" / "correlation.csv") if row["measure"] == "isoscore"}
    assert (rows["MR"]["n"], rows["CR"]["n"]) == ("9", "8")
    own = [1, 2, 6, 7, 8, 9, 10, 11]
    expected = scipy.stats.kendalltau(measures[own, 1, 0], tasks[own, 1]).statistic
    assert float(rows["CR"]["kendall"]) == pytest.approx(expected)


def test_tasks_as_rows_and_steps_for_revisions(tmp_path: Path) -> None:
    geometry, scores, *_ = simulated()
    assert run(tmp_path, geometry, scores) == 0
    expected = (tmp_path / "out" / "correlation.csv").read_text()
    wide = [line.split(",") for line in scores.splitlines()[1:]]
    rows = [f"{cells[1].removeprefix('step')},{task},{cells[2 + number]}" for number, task in enumerate(("MR", "CR"))
            for cells in wide]  # fmt: skip
    assert run(tmp_path, geometry, "\n".join(["step,task,score", *rows])) == 0
    assert (tmp_path / "out" / "correlation.csv").read_text() == expected


def test_models_are_correlated_separately(tmp_path: Path) -> None:
    geometry, scores, measures, tasks = simulated()
    other, more, _, _ = simulated(seed=1)
    other, more = (text.replace("tiny", "small").split("\n", 1)[1] for text in (other, more))
    assert run(tmp_path, geometry + other, scores + more, "--measure", "isoscore", "--layer", "layer_2") == 0
    rows = rows_of(tmp_path / "out" / "table.csv")
    # The columns of the paper's table come first.
    assert list(rows[0])[:5] == ["task", "model", "pearson", "spearman", "kendall"]
    assert [(row["task"], row["model"]) for row in rows] == [
        ("MR", "tiny"), ("CR", "tiny"), ("MR", "small"), ("CR", "small")
    ]  # fmt: skip
    assert float(rows[0]["pearson"]) == pytest.approx(np.corrcoef(measures[:, 1, 0], tasks[:, 0])[0, 1])
    text = (tmp_path / "out" / "table.md").read_text()
    assert text.count("| tiny | ") == 2
    assert f"| {float(rows[0]['pearson']):.2f} \\[" in text


def test_the_model_of_the_scores_may_have_another_name(tmp_path: Path) -> None:
    geometry, scores, *_ = simulated()
    assert run(tmp_path, geometry, scores) == 0
    expected = (tmp_path / "out" / "correlation.csv").read_text()
    assert run(tmp_path, geometry, scores.replace("tiny,", "tiny-v1.1,"), "--model", "tiny") == 0
    assert (tmp_path / "out" / "correlation.csv").read_text() == expected


def test_the_table_shows_the_papers_measures_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    geometry, scores, *_ = simulated()
    lines = [line + "," for line in geometry.splitlines()[1:]]
    matrix = [f"org/tiny,step{point},{point},w{point},,output_embeddings,,,0.{point + 1}" for point in range(12)]
    header = GEOMETRY.strip() + ",partition_isotropy_both"
    assert run(tmp_path, "\n".join([header, *lines, *matrix]), scores) == 0
    shown = {(row["layer"], row["measure"]) for row in rows_of(tmp_path / "out" / "table.csv")}
    assert shown == {
        ("layer_2", "isoscore"), ("layer_2", "inter_sim"), ("output_embeddings", "partition_isotropy_both")
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert "MR" in shown
    assert "tiny: isoscore, inter sim of layer 2 over wiki; I(W), both signs of output embeddings" in shown


def test_each_model_has_its_own_last_layer_and_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tied models have no output embeddings, encoders no final normalization, and depths differ."""
    columns = "model,revision,step,weights,source,layer,isoscore,partition_isotropy_both,partition_isotropy_as_computed"
    places = {
        "tied": ("input_embeddings", "layer_9", "layer_10"),
        "untied": ("input_embeddings", "output_embeddings", "layer_2", "final_norm"),
        "plain": ("", ),
        "silent": ("layer_1",),
    }  # fmt: skip
    random = np.random.default_rng(0)
    geometry = [columns]
    for model, layers in places.items():
        for point in range(5):
            for layer in layers:
                is_matrix = layer.endswith("embeddings")
                numbers = ["", random.random(), random.random()] if is_matrix else [random.random(), "", ""]
                source = "" if is_matrix else "wiki"
                line = [model, f"step{point}", point, f"{model}{point}", source, layer, *numbers]
                geometry.append(",".join(map(str, line)))
    scores = ["model,revision,MR"]
    scores += [f"{model},step{point},{random.random()}" for model in ("tied", "untied", "plain") for point in range(5)]
    scores += [f"other,step{point},1" for point in range(5)]
    assert run(tmp_path, "\n".join(geometry), "\n".join(scores)) == 0
    rows = rows_of(tmp_path / "out" / "table.csv")
    assert {(row["model"], row["layer"], row["measure"]) for row in rows} == {
        ("tied", "layer_10", "isoscore"), ("tied", "input_embeddings", "partition_isotropy_both"),
        ("untied", "final_norm", "isoscore"), ("untied", "output_embeddings", "partition_isotropy_both"),
        ("plain", "", "isoscore"),
    }  # fmt: skip
    shown = capsys.readouterr().out
    note = (tmp_path / "out" / "table.md").read_text()
    for line in (
        "tied: I(W), both signs of input embeddings; isoscore of layer 10 over wiki",
        "untied: I(W), both signs of output embeddings; isoscore of final norm over wiki",
        "plain: all measures, because it has none of an embedding matrix or a numbered layer",
        f"left out: silent, which has no scores in {tmp_path / 'scores.csv'}",
        f"left out: other, which has no measures in {tmp_path / 'geometry.csv'}",
    ):
        assert line in shown
        assert line.replace("_", "\\_") in note
    assert run(tmp_path, "\n".join(geometry), "\n".join(scores), "--layer", "layer_10") == 0
    shown = capsys.readouterr().out
    assert f"left out: untied, which has no number in the selected rows of {tmp_path / 'geometry.csv'}" in shown


def test_the_table_shows_the_last_layer_of_all_texts(tmp_path: Path) -> None:
    geometry, scores, *_ = simulated()
    lines = geometry.splitlines()[1:]
    combined = [line.replace(",wiki,", ",combined,") for line in lines]
    later = [line.replace(",wiki,", ",zeta,") for line in lines]
    assert run(tmp_path, "\n".join([GEOMETRY.strip(), *lines, *combined, *later]), scores) == 0
    shown = {(row["source"], row["layer"]) for row in rows_of(tmp_path / "out" / "table.csv")}
    assert shown == {("combined", "layer_2")}


def test_undefined_correlations_have_a_dash_and_a_reason(tmp_path: Path) -> None:
    geometry = "revision,flat,good\n" + "".join(f"r{point},0.1,{point}\n" for point in range(5))
    scores = "revision,same,few,good\n" + "".join(
        f"r{point},7,{point if point < 2 else ''},{point % 3}\n" for point in range(5)
    )
    assert run(tmp_path, geometry, scores) == 0
    rows = {(row["measure"], row["task"]): row for row in rows_of(tmp_path / "out" / "correlation.csv")}
    assert rows["good", "same"]["note"] == "the score is constant"
    assert rows["flat", "good"]["note"] == "the measure is constant"
    assert rows["good", "few"]["note"] == "2 common points; 3 are needed"
    assert rows["good", "same"]["pearson"] == ""
    assert rows["good", "good"]["note"] == ""
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert any("| same |" in line and "| - | - | - | the score is constant |" in line for line in lines)


def test_equal_weights_give_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    geometry, scores, *_ = simulated()
    assert run(tmp_path, geometry.replace(",w5,", ",w2,"), scores) == 0
    assert "same weights at step2, step5, which count as 2 points" in capsys.readouterr().out


def test_each_series_is_resampled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 layers x 5 measures and 10 tasks make 300 pairs, but only 40 series."""
    resampled = []

    class Counted(ResampledSeries):
        def __init__(self, *arguments: np.ndarray) -> None:
            resampled.append(len(arguments))
            super().__init__(*arguments)

    monkeypatch.setattr(correlate, "ResampledSeries", Counted)
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
    assert len(rows_of(tmp_path / "out" / "correlation.csv")) == 300
    assert len(resampled) == 6 * 5 + 10


# ---- columns that are held constant


def naive_partial(x: np.ndarray, y: np.ndarray, covariates: np.ndarray) -> float:
    """Pearson's correlation of what linear regressions on the covariates leave of both."""
    design = np.column_stack([np.ones(len(x)), covariates])
    a, b = (values - design @ (np.linalg.pinv(design) @ values) for values in (x, y))
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def trained(points: int = 14) -> tuple[str, str, np.ndarray, np.ndarray, np.ndarray]:
    """Two layers and a task that both grow with the steps, which the revisions name; and a rate by step."""
    random = np.random.default_rng(5)
    steps = 2 ** np.arange(points)
    rates = random.uniform(1, 2, points)
    drift = np.log(steps) + 3 * rates
    measures = drift[:, None] + random.normal(size=(points, 2))
    scores = (drift + random.normal(size=points)).round(3)
    geometry = "revision,layer,isoscore,norm\n" + "".join(
        f"step{step},layer_{layer},{measures[number, layer].item()!r},{number * (layer + 1)}\n"
        for number, step in enumerate(steps)
        for layer in range(2)
    )
    lines = [
        f"step{step},{score!r},{rate!r}\n"
        for step, score, rate in zip(steps, scores.tolist(), rates.tolist(), strict=True)
    ]
    return geometry, "revision,MR,rate\n" + "".join(reversed(lines)), measures, scores, np.column_stack([steps, rates])


@pytest.mark.parametrize(("given", "columns"), [("step", [0]), ("step, rate", [0, 1]), ("rate", [1])])
def test_partial_correlations_against_regressions(given: str, columns: list[int], tmp_path: Path) -> None:
    geometry, scores, measures, task, covariates = trained()
    assert run(tmp_path, geometry, scores, "--given", given, "--measure", "isoscore", "--task", "MR") == 0
    rows = rows_of(tmp_path / "out" / "correlation.csv")
    # The column of the scores that is held constant is no task.
    assert [(row["layer"], row["task"]) for row in rows] == [("layer_0", "MR"), ("layer_1", "MR")]
    for layer, row in enumerate(rows):
        assert (row["given"], row["partial_n"], row["partial_note"]) == (given, "14", "")
        series = (measures[:, layer], task, covariates[:, columns])
        expected = {"pearson": naive_partial(*series)}
        expected["spearman"] = naive_partial(*(scipy.stats.rankdata(values, axis=0) for values in series))
        for method, value in expected.items():
            assert float(row[f"partial_{method}"]) == pytest.approx(value, rel=1e-9)
            # Fisher's interval, and a t test.
            variance = (1.06 if method == "spearman" else 1.0) / (14 - 3 - len(columns))
            ends = np.tanh(np.arctanh(value) + scipy.stats.norm.ppf([0.025, 0.975]) * math.sqrt(variance))
            found = [float(row[f"partial_{method}_{end}"]) for end in ("low", "high")]
            np.testing.assert_allclose(found, ends, rtol=1e-8)
            degrees = 14 - 2 - len(columns)
            t = value * math.sqrt(degrees / (1 - value**2))
            p = 2 * scipy.stats.t.sf(abs(t), degrees)
            assert float(row[f"partial_{method}_p"]) == pytest.approx(p, rel=1e-7)
        # Nothing else changes.
        assert float(row["pearson"]) == pytest.approx(scipy.stats.pearsonr(measures[:, layer], task).statistic)
    lines = (tmp_path / "out" / "table.md").read_text()
    assert "| partial Pearson | partial Spearman |" in lines
    assert f"with {given} held constant" in lines


def test_a_measure_of_the_same_layer_is_held_constant(tmp_path: Path) -> None:
    geometry, scores, measures, task, _ = trained()
    assert run(tmp_path, geometry, scores, "--given", "norm", "--task", "MR") == 0
    rows = rows_of(tmp_path / "out" / "correlation.csv")
    # It is no measure itself.
    assert {row["measure"] for row in rows} == {"isoscore"}
    for layer, row in enumerate(rows):
        expected = naive_partial(measures[:, layer], task, np.arange(14.0) * (layer + 1))
        assert float(row["partial_pearson"]) == pytest.approx(expected, rel=1e-9)


def test_points_without_the_column_are_left_out(tmp_path: Path) -> None:
    geometry, scores, measures, task, covariates = trained()
    lines = scores.splitlines()
    changed = [lines[0], *(f"{line.rsplit(',', 1)[0]}," for line in lines[1:3]), *lines[3:]]
    assert run(tmp_path, geometry, "\n".join(changed), "--given", "rate", "--measure", "isoscore") == 0
    [row, _] = rows_of(tmp_path / "out" / "correlation.csv")
    assert (row["n"], row["partial_n"]) == ("14", "12")
    expected = naive_partial(measures[:12, 0], task[:12], covariates[:12, 1])
    assert float(row["partial_pearson"]) == pytest.approx(expected, rel=1e-9)


def test_a_column_that_explains_too_much_has_a_reason(tmp_path: Path) -> None:
    geometry, scores, *_ = trained()
    twice = "revision,MR,one\n" + "".join(f"{line.rsplit(',', 1)[0]},1\n" for line in scores.splitlines()[1:])
    assert run(tmp_path, geometry, twice, "--given", "one", "--measure", "isoscore") == 0
    [row, _] = rows_of(tmp_path / "out" / "correlation.csv")
    assert "a covariate is constant" in row["partial_note"]
    assert (row["partial_pearson"], row["note"]) == ("", "")
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| - | - | partial: a covariate is constant or a linear function of the others; leave it out |" in table


def test_the_checkpoints_of_all_models_are_pooled(tmp_path: Path) -> None:
    """Within a model the width is constant; over all models it can be held constant."""
    random = np.random.default_rng(3)
    widths = np.repeat([64, 128, 256], 6)
    x = widths / 100 + random.normal(size=18)
    y = widths / 50 + random.normal(size=18)
    names = [(f"m{width}", f"step{step}") for width, step in zip(widths, [1, 2, 3, 4, 5, 6] * 3, strict=True)]
    geometry = "model,revision,isoscore,width\n" + "".join(
        f"org/{model},{revision},{value!r},{width}\n"
        for (model, revision), value, width in zip(names, x.tolist(), widths.tolist(), strict=True)
    )
    scores = "model,revision,MR\n" + "".join(
        f"{model},{revision},{value!r}\n" for (model, revision), value in zip(names, y.tolist(), strict=True)
    )
    assert run(tmp_path, geometry, scores, "--given", "width") == 0
    rows = rows_of(tmp_path / "out" / "correlation.csv")
    assert [(row["model"], row["n"], row["partial_pearson"]) for row in rows] == [
        (f"m{width}", "6", "") for width in (64, 128, 256)
    ]
    assert run(tmp_path, geometry, scores, "--given", "width,step", "--pool") == 0
    [row] = rows_of(tmp_path / "out" / "correlation.csv")
    assert (row["model"], row["n"], row["measure"]) == ("all models", "18", "isoscore")
    assert float(row["pearson"]) == pytest.approx(scipy.stats.pearsonr(x, y).statistic)
    covariates = np.column_stack([widths, [1, 2, 3, 4, 5, 6] * 3])
    assert float(row["partial_pearson"]) == pytest.approx(naive_partial(x, y, covariates), rel=1e-9)


# ---- blocks of neighbouring checkpoints


def series(points: int = 24) -> tuple[str, str, np.ndarray, np.ndarray]:
    """A measure and a score whose neighbours depend on each other, in files with another order each."""
    random = np.random.default_rng(2)
    x, y = (np.convolve(random.normal(size=points + 3), np.ones(4), "valid") for _ in range(2))
    steps = (np.arange(points) + 1) * 1000
    measures = [f"step{step},{value!r}\n" for step, value in zip(steps, x.tolist(), strict=True)]
    scores = [f"step{step},{value!r}\n" for step, value in zip(steps, y.tolist(), strict=True)]
    # In the order of the names, step10000 is before step2000.
    return "revision,isoscore\n" + "".join(measures), "revision,MR\n" + "".join(sorted(scores)), x, y


@pytest.mark.parametrize("blocks", ["3", "auto"])
def test_intervals_of_blocks_against_scipy(blocks: str, tmp_path: Path) -> None:
    geometry, scores, x, y = series()
    assert run(tmp_path, geometry, scores, "--blocks", blocks, "--resamples", "300", "--seed", "4") == 0
    [row] = rows_of(tmp_path / "out" / "correlation.csv")
    length = correlation.automatic_block_length(x, y) if blocks == "auto" else 3
    assert int(row["block_length"]) == length > 1
    starts = np.random.default_rng(4).integers(0, 24 - length + 1, (300, math.ceil(24 / length)))
    for name, function in (("pearson", "pearsonr"), ("spearman", "spearmanr"), ("kendall", "kendalltau")):
        drawn = []
        for resample in starts:
            points = [start + offset for start in resample for offset in range(length)][:24]
            drawn.append(getattr(scipy.stats, function)(x[points], y[points]).statistic)
        assert float(row[name]) == pytest.approx(getattr(scipy.stats, function)(x, y).statistic, rel=1e-12)
        low, high = np.quantile(drawn, [0.025, 0.975])
        assert [float(row[f"{name}_low"]), float(row[f"{name}_high"])] == pytest.approx([low, high], abs=1e-10)
    for method in ("pearson", "spearman"):
        other = correlation.block_bootstrap_correlation(x, y, length, method, resamples=300, seed=4)
        assert [float(row[f"{method}{end}"]) for end in ("", "_low", "_high")] == pytest.approx(
            [other.value, other.low, other.high], abs=1e-10
        )
    assert "bootstrap resamples of blocks of neighbouring checkpoints" in (tmp_path / "out" / "table.md").read_text()


def test_blocks_of_one_point_are_single_checkpoints(tmp_path: Path) -> None:
    geometry, scores, *_ = series()
    rows = []
    for more in ([], ["--blocks", "1"]):
        assert run(tmp_path, geometry, scores, *more, "--resamples", "4000") == 0
        rows += rows_of(tmp_path / "out" / "correlation.csv")
    for name in ("pearson_low", "pearson_high", "kendall_low"):
        assert float(rows[0][name]) == pytest.approx(float(rows[1][name]), abs=0.05)


def test_too_few_points_for_blocks_have_no_interval(tmp_path: Path) -> None:
    geometry, scores, *_ = series()
    assert run(tmp_path, geometry, "\n".join(scores.splitlines()[:8]), "--blocks", "4") == 0
    [row] = rows_of(tmp_path / "out" / "correlation.csv")
    assert row["note"] == "no interval: blocks of 4 need 8 common points"
    assert (row["n"], row["pearson_low"], row["block_length"]) == ("7", "", "")
    assert math.isfinite(float(row["kendall"]))
    assert f"| {float(row['pearson']):.2f} |" in (tmp_path / "out" / "table.md").read_text()
    flat = "revision,MR\n" + "".join(f"step{step}000,{int(step == 1)}\n" for step in range(1, 25))
    assert run(tmp_path, geometry, flat, "--blocks", "12") == 0
    [row] = rows_of(tmp_path / "out" / "correlation.csv")
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
    assert "cannot be made" in line


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["correlate", str(tmp_path / "none.csv"), str(tmp_path / "none.csv")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "none.csv cannot be read" in line
