"""Correlations over a training, checked against scipy."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from istar.cli.main import main
from istar.drawing.plot import Plot
from istar.geometry.correlation import correlate as correlating
from istar.geometry.correlation import correlation_tables
from istar.geometry.correlation.correlate import correlate, correlate_series, resample_correlations
from istar.geometry.correlation.correlation_tables import make_correlation_table
from istar.geometry.correlation.score_files import read_scores

pytestmark = pytest.mark.usefixtures("blank_figures")

GEOMETRY = "model,revision,step,weights,source,layer,isoscore,inter_sim\n"
FUNCTIONS = {"pearson": scipy.stats.pearsonr, "spearman": scipy.stats.spearmanr, "kendall": scipy.stats.kendalltau}


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(correlating, "NUM_RESAMPLES", 400)
    correlating.draw_weights.cache_clear()
    yield
    correlating.draw_weights.cache_clear()


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(tmp_path: Path, geometry: str, scores: str, *options: str) -> int:
    paths = tmp_path / "geometry.csv", tmp_path / "scores.csv"
    for path, text in zip(paths, (geometry, scores), strict=True):
        path.write_text(text)
    return main(["correlate", *map(str, paths), "--out", str(tmp_path / "out"), *options])


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


def test_resamples_equal_scipy_on_repeated_points() -> None:
    """Each resample equals scipy on points that are repeated as often as they are drawn, including ties."""
    random = np.random.default_rng(1)
    x, y = random.integers(0, 5, 9).astype(float), random.normal(size=9).round(1)
    draws = np.array([np.bincount(random.integers(0, 9, 9), minlength=9) for _ in range(50)], dtype=float)
    correlations = resample_correlations(x, y, draws)
    for index, multiplicities in enumerate(draws.astype(int)):
        repeated_x, repeated_y = np.repeat(x, multiplicities), np.repeat(y, multiplicities)
        for name, function in FUNCTIONS.items():
            expected = function(repeated_x, repeated_y).statistic
            assert correlations[name][index] == pytest.approx(expected, abs=1e-12)
    draws = np.array([[3.0, 0, 0], [0, 2, 1], [1, 1, 1]])
    for values in resample_correlations(np.array([0.1, 0.7, 0.7]), np.array([1.0, 2, 3]), draws).values():
        assert np.isfinite(values).tolist() == [False, False, True]  # x is constant in the first two


def test_intervals_cover_the_true_correlation() -> None:
    """About 95% of the intervals cover the true value; percentile intervals are slightly too narrow."""
    true_values = {"pearson": 0.6, "spearman": 6 / math.pi * math.asin(0.3), "kendall": 2 / math.pi * math.asin(0.6)}
    random = np.random.default_rng(0)
    num_covered, num_rounds = dict.fromkeys(true_values, 0), 200
    for _ in range(num_rounds):
        x = random.normal(size=40)
        results = correlate_series(x, 0.6 * x + 0.8 * random.normal(size=40))
        for name, value in true_values.items():
            num_covered[name] += results[f"{name}_low"] <= value <= results[f"{name}_high"]
    for name, count in num_covered.items():
        assert 0.88 < count / num_rounds < 0.985, (name, count / num_rounds)


def test_constant_and_short_series_are_undefined() -> None:
    small = np.array([1e-20, 2e-20, 4e-20])  # not constant
    assert correlate_series(small, np.array([1.0, 2, 4]))["pearson"] == pytest.approx(1)
    for x, y, note in (
        (small[:2], small[:2], "2 common points; 3 are needed"),
        (np.full(4, 0.1 + 0.2), np.arange(4.0), "the measure is constant"),
        (np.arange(4.0), np.array([0.3, 0.1 + 0.2, 0.3, 0.3]), "the score is constant"),
    ):
        results = correlate_series(x, y)
        assert results["note"] == note
        assert math.isnan(results["kendall"])
        assert math.isnan(results["spearman_low"])


# ---- joining


def test_against_scipy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are joined by revision, without empty cells and omitted checkpoints."""
    geometry, scores, measures, task_scores = simulate_training()
    lines = [line for line in scores.splitlines() if ",step3," not in line]
    lines = [line.rsplit(",", 1)[0] + "," if ",step5," in line else line for line in lines]
    assert run(tmp_path, geometry, "\n".join([*lines, "tiny,step99,1,1", "other,step1,1,1"]), "--omit", "step0") == 0
    rows = read_rows(tmp_path / "out" / "correlation.csv")
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        points = [point for point in range(1, 12) if point != 3 and (point != 5 or row["task"] == "MR")]
        x = measures[points, int(row["layer"][-1]) - 1, ["isoscore", "inter_sim"].index(row["measure"])]
        y = task_scores[points, ["MR", "CR"].index(row["task"])]
        assert (row["n"], row["source"], row["model"], row["note"]) == (str(len(points)), "wiki", "tiny", "")
        for name, function in FUNCTIONS.items():
            assert float(row[name]) == pytest.approx(function(x, y).statistic, abs=1e-12)
            assert -1 <= float(row[f"{name}_low"]) < float(row[name]) < float(row[f"{name}_high"]) <= 1
    assert f"left out: other, which is not in both {tmp_path / 'geometry.csv'}" in capsys.readouterr().out


def test_other_forms_of_the_same_scores(tmp_path: Path) -> None:
    """Tasks may be rows, steps may stand for revisions, and the model may be missing or have another name."""
    geometry, scores, *_ = simulate_training()
    cells = [line.split(",") for line in scores.splitlines()[1:]]
    long_rows = [f"{row[1].removeprefix('step')},{task},{row[2 + index]}" for index, task in enumerate(("MR", "CR"))
                 for row in cells]  # fmt: skip
    (tmp_path / "geometry.csv").write_text(geometry)
    tables = []
    for text, model in (
        (scores, ""),
        ("\n".join(["step,task,score", *long_rows]), ""),
        (scores.replace("tiny,", "tiny-v1.1,"), "tiny"),
    ):
        (tmp_path / "scores.csv").write_text(text)
        tables.append(correlate(tmp_path / "geometry.csv", tmp_path / "scores.csv", model=model).table)
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


# ---- the table


def test_the_table_shows_the_papers_measures_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tied models have no output embeddings, encoders no final normalization, and depths and texts differ."""
    layers_by_model = {
        "tied": ("input_embeddings", "layer_9", "layer_10"),
        "untied": ("input_embeddings", "output_embeddings", "layer_2", "final_norm"),
        "plain": ("",),
    }
    random = np.random.default_rng(0)
    geometry = ["model,revision,source,layer,isoscore,partition_isotropy_both,partition_isotropy_as_computed"]
    for model, layers in layers_by_model.items():
        for point in range(5):
            for layer in layers:
                values = random.random(2).tolist()
                numbers = ["", *values] if layer.endswith("embeddings") else [values[0], "", ""]
                for source in ("",) if layer.endswith("embeddings") else ("wiki", "combined"):
                    geometry.append(",".join(map(str, [model, f"step{point}", source, layer, *numbers])))
    scores = [f"{model},step{point},{random.random()}" for model in layers_by_model for point in range(5)]
    assert run(tmp_path, "\n".join(geometry), "\n".join(["model,revision,MR", *scores])) == 0
    rows = read_rows(tmp_path / "out" / "tables" / "correlations.csv")
    # The first columns are those of the paper's table.
    assert list(rows[0])[:5] == ["task", "model", "pearson", "spearman", "kendall"]
    assert {(row["model"], row["source"], row["layer"], row["measure"]) for row in rows} == {
        ("tied", "combined", "layer_10", "isoscore"), ("tied", "", "input_embeddings", "partition_isotropy_both"),
        ("untied", "combined", "final_norm", "isoscore"),
        ("untied", "", "output_embeddings", "partition_isotropy_both"),
        ("plain", "wiki", "", "isoscore"), ("plain", "combined", "", "isoscore"),
    }  # fmt: skip
    assert f"{float(rows[0]['pearson']):.2f}" in capsys.readouterr().out


def test_a_single_model_is_in_the_title_and_several_are_in_the_rows() -> None:
    row = {"task": "MR", "measure": "isoscore", "layer": "layer_2", "n": 8, "pearson": 0.5, "spearman": 0.25,
           "kendall": 0.125}  # fmt: skip
    single = make_correlation_table(pd.DataFrame([row | {"model": "first"}]))
    assert "the checkpoints of first," in str(single.title)
    assert list(single.columns[0].cells) == ["MR"]
    several = make_correlation_table(pd.DataFrame([row | {"model": "first"}, row | {"model": "second"}]))
    assert list(several.columns[0].cells) == ["MR\nfirst", "MR\nsecond"]


def test_the_papers_correlations_stand_next_to_those_of_its_models(tmp_path: Path) -> None:
    """The numbers of pythia-70m and MR, SciQ-acc-norm and SST2 are those of Table 1 of the second paper."""
    random = np.random.default_rng(0)
    geometry = "model,revision,step,layer,partition_isotropy_both,partition_isotropy_as_computed,norm\n"
    scores = "model,revision,MR,sciq acc_norm,SST2,mine\n"
    for model in ("EleutherAI/pythia-70m", "EleutherAI/pythia-1b"):
        for point in range(8):
            for layer in ("output_embeddings", "input_embeddings"):
                numbers = ",".join(map(repr, random.uniform(size=3).tolist()))
                geometry += f"{model},step{point},{point},{layer},{numbers}\n"
            scores += f"{model},step{point},{','.join(map(repr, random.uniform(size=4).tolist()))}\n"
    measures = ("partition_isotropy_both", "partition_isotropy_as_computed", "norm")
    options = [option for measure in measures for option in ("--measure", measure)]
    assert run(tmp_path, geometry, scores, *options) == 0
    published = {
        "MR": (0.99, 0.83, 0.69), "sciq acc_norm": (0.80, 0.79, 0.63), "SST2": (0.95, 0.88, 0.68), "mine": None
    }  # fmt: skip
    for row in read_rows(tmp_path / "out" / "tables" / "correlations.csv"):
        expected = published[row["task"]]
        if row["model"] != "pythia-70m" or row["layer"] != "output_embeddings" or row["measure"] == "norm":
            expected = None
        for index, name in enumerate(FUNCTIONS):
            paper, difference = row[f"paper_{name}"], row[f"minus_paper_{name}"]
            assert (paper, difference) == ("", "") if expected is None else float(paper) == expected[index]
            if expected is not None:
                assert float(difference) == pytest.approx(float(row[name]) - expected[index], abs=1e-12)


# ---- the figure of the scores

MEASURED = """model,revision,step,layer,isoscore
small,step1000,1000,layer_1,0.1
small,step2000,2000,layer_1,0.3
large,step1000,1000,layer_1,0.2
"""
SCORED = """model,revision,task,score,standard_error
small,step2000,sciq,0.5,0.01
small,step1000,sciq,0.4,0.02
small,step512,sciq,0.3,0.02
large,step1000,sciq,0.6,
large,step1000,lambada,0.7,0.01
other,step1000,sciq,0.9,0.01
"""


def make_plot(folder: Path, geometry: str, scores: str) -> Plot | None:
    (folder / "geometry.csv").write_text(geometry)
    (folder / "scores.csv").write_text(scores)
    return correlation_tables.plot_scores(correlate(folder / "geometry.csv", folder / "scores.csv").scores)


def test_a_panel_for_each_task_and_a_line_for_each_model(tmp_path: Path) -> None:
    """Scores of checkpoints without measures are drawn too; models without measures are left out."""
    plot = make_plot(tmp_path, MEASURED, SCORED)
    assert plot is not None
    line_by_task_and_model = {(panel.title, line.label): line for panel in plot.panels for line in panel.lines}
    assert set(line_by_task_and_model) == {("sciq", "small"), ("sciq", "large"), ("lambada", "large")}
    small_line = line_by_task_and_model["sciq", "small"]
    assert (small_line.x, small_line.y) == ((512, 1000, 2000), (0.3, 0.4, 0.5))
    quantile = scipy.stats.norm.interval(0.95)[1]
    assert small_line.y_error == pytest.approx((0.02 * quantile, 0.02 * quantile, 0.01 * quantile))
    assert line_by_task_and_model["sciq", "large"].y_error == ()


def test_steps_of_the_scores_are_those_of_the_measures(tmp_path: Path) -> None:
    geometry, scores = "revision,step,isoscore\nfirst,10,0.1\nsecond,30,0.2\n", "second,0.4\nfirst,0.3\nlast,0.6\n"
    plot = make_plot(tmp_path, geometry, f"revision,sciq\n{scores}")
    assert plot is not None
    [line] = plot.panels[0].lines
    assert (line.x, line.y) == ((10, 30), (0.3, 0.4))
    # Without steps there is no figure, and an earlier one is deleted.
    out = tmp_path / "out" / "figures"
    for geometry_text, has_figure in ((geometry, True), ("revision,isoscore\nfirst,0.1\nsecond,0.2\n", False)):
        assert run(tmp_path, geometry_text, f"revision,sciq\n{scores}") == 0
        assert (out / "scores.svg").exists() == has_figure


def test_a_measure_is_drawn_against_the_scores(tmp_path: Path) -> None:
    (tmp_path / "geometry.csv").write_text(MEASURED)
    (tmp_path / "scores.csv").write_text(SCORED)
    results = correlate(tmp_path / "geometry.csv", tmp_path / "scores.csv")
    table = results.table.assign(note="")  # no model has enough points for a correlation
    [plot] = correlation_tables.plot_points(results.points, table)
    assert (plot.x_label, plot.kind) == ("IsoScore of layer 1", "points")
    points = {
        (panel.title, line.label): sorted(zip(line.x, line.y, strict=True))
        for panel in plot.panels
        for line in panel.lines
    }
    assert points == {
        ("sciq", "small"): [(0.1, 0.4), (0.3, 0.5)],
        ("sciq", "large"): [(0.2, 0.6)],
        ("lambada", "large"): [(0.2, 0.7)],
    }


# ---- spreadsheets


def write_as_spreadsheet(text: str, separator: str, decimal: str) -> str:
    """Return a CSV text with other separators and decimal marks."""
    rows = [
        [cell.replace(".", decimal) if cell[-1].isdecimal() and "." in cell else cell for cell in line.split(",")]
        for line in text.splitlines()
    ]
    quoted = [[f'"{cell}"' if separator in cell else cell for cell in row] for row in rows]
    return "".join(separator.join(row) + "\r\n" for row in quoted)


@pytest.mark.parametrize("start", ["", "\ufeff", "\ufeffsep={}\r\n"])
@pytest.mark.parametrize(("separator", "decimal"), [(";", ","), (";", "."), ("\t", ","), ("\t", "."), (",", ",")])
def test_tables_of_spreadsheets_are_read(tmp_path: Path, separator: str, decimal: str, start: str) -> None:
    geometry, scores, *_ = simulate_training()
    assert run(tmp_path, geometry, scores) == 0
    expected = (tmp_path / "out" / "correlation.csv").read_text()
    texts = [start.format(separator) + write_as_spreadsheet(text, separator, decimal) for text in (geometry, scores)]
    assert run(tmp_path, *texts) == 0
    assert (tmp_path / "out" / "correlation.csv").read_text() == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["1000;45,123;46,2", "2000;46,123;"], [45.123, 46.2, 46.123]), (["1000;-0,5;1,5E-3"], [-0.5, 0.0015]),
        (["1000;0,123;7"], [0.123, 7.0]), (["1000,0;0,123;7"], [0.123, 7.0]),
    ],
)  # fmt: skip
def test_decimal_commas(tmp_path: Path, rows: list[str], expected: list[float]) -> None:
    (tmp_path / "scores.csv").write_text("\n".join(["step;a;b", *rows]))
    scores, _ = read_scores(tmp_path / "scores.csv")
    assert sorted(scores["score"]) == sorted(expected)
    assert set(scores["step"]) <= {1000, 2000}


# ---- errors

GOOD = "revision,isoscore\nr1,1\nr2,2\nr3,4\n"
SCORES = "revision,MR\nr1,3\nr2,4\nr3,1\n"


@pytest.mark.parametrize(
    ("geometry", "scores", "more", "message"),
    [
        (GOOD, "revision,MR\nr1,3\nr2,high\n", [], "scores.csv, line 3: MR is 'high'; expected a number or nothing"),
        (GOOD, "revision,MR\nr1,3,4\n", [], "scores.csv, line 2: the row has 3 cells; expected 2, as the header"),
        (GOOD, "revision,MR\nr1,3\nr1,4\n", [], "scores.csv, line 3: there is a second number for MR"),
        (GOOD, "revision,MR,MR\nr1,3,4\n", [], "two columns are called 'MR'"),
        ("revision,isoscore,\nr1,1,2\n", SCORES, [], "geometry.csv: column 3 is unnamed; expected names for all"),
        (GOOD, "name,MR\nr1,3\n", [], "scores.csv has no column revision or step"),
        (GOOD, "revision;step\nr1;0,5\n", [], "scores.csv, line 2: there is no column of numbers"),
        (GOOD, "", [], "scores.csv has no rows"), (GOOD, "revision,MR\nq1,3\n", [], "no checkpoint in common: "),
        (GOOD, "step;MR\n1000;0,5\n2000;0.6\n", [], "scores.csv, line 2: MR is '0,5'; expected a number or nothing"),
        (GOOD, "step;MR\n1.000;51\n", [], "scores.csv, line 2: step is 1.000; expected a whole number"),
        (GOOD, "sep=;\nstep;MR\n1000;high\n", [], "scores.csv, line 3: MR is 'high'; expected a number"),
        (GOOD, "step,MR\nmain,3\n", [], "scores.csv, line 2: step is 'main'; expected a number"),
        ("revision,isoscore\nstep1,1\na-step1,2\n", "step,MR\n1,3\n", [], "has several rows for a step"),
        (GOOD, SCORES, ["--measure", "isoscor"], "did you mean isoscore?; expected one of isoscore"),
        ("revision,a,b\nr1,1,2\n", SCORES, ["--measure", "x"], "has no such measure; expected one of a, b"),
        (GOOD, SCORES, ["--omit", "r9"], "--omit r9: neither "), (GOOD, SCORES, ["--task", "MX"], "--task MX: "),
        ("model,revision,isoscore\na,r1,1\n", "model,revision,MR\nb,r1,1\n", [], "the revisions r1 of a, "),
        ("model,revision,isoscore\na,r1,1\nb,r1,1\n", SCORES, [], "geometry.csv has the models a, b, but the scores"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(
    tmp_path: Path, geometry: str, scores: str, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, geometry, scores, *more) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_points", [9, 10])
def test_few_and_dependent_points_are_named(
    tmp_path: Path, num_points: int, capsys: pytest.CaptureFixture[str]
) -> None:
    geometry, scores, _, _ = simulate_training(num_points)
    assert run(tmp_path, geometry, scores) == 0
    output = capsys.readouterr().out
    assert "checkpoints of ," not in output
    [line] = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert "depend on each other" in line
    assert ("9 points also have high correlations by chance" in line) == (num_points < 10)


def test_unusable_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["correlate", str(tmp_path / "none.csv"), str(tmp_path / "none.csv")]) == 2
    assert "none.csv: cannot be read" in capsys.readouterr().err
    (tmp_path / "out").write_text("something")
    assert run(tmp_path, GOOD, SCORES) == 2
    assert "is not a folder" in capsys.readouterr().err
