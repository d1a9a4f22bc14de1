"""The figure of scores over a training that `istar correlate` draws."""

from pathlib import Path

import pytest
import scipy.stats

from istar.cli.main import main
from istar.drawing.plot import Plot
from istar.geometry.correlation import score_figure, score_join
from istar.geometry.correlation.score_join import Selection

GEOMETRY = """model,revision,step,source,layer,isoscore
small,step1000,1000,wiki,layer_1,0.1
small,step2000,2000,wiki,layer_1,0.3
large,step1000,1000,wiki,layer_1,0.2
large,step2000,2000,wiki,layer_1,0.2
"""
SCORES = """model,revision,task,score,standard_error
small,step2000,sciq,0.5,0.01
small,step1000,sciq,0.4,0.02
small,step512,sciq,0.3,0.02
large,step1000,sciq,0.6,
large,step1000,lambada,0.7,0.01
other,step1000,sciq,0.9,0.01
"""


def join_and_plot(folder: Path, geometry: str, scores: str, **selection: object) -> Plot | None:
    (folder / "geometry.csv").write_text(geometry)
    (folder / "scores.csv").write_text(scores)
    joined = score_join.join_measures_and_scores(folder / "geometry.csv", folder / "scores.csv", Selection(**selection))  # type: ignore[arg-type]
    return score_figure.make_plot(joined.scores_by_step)


@pytest.mark.parametrize("pool", [False, True])
def test_a_panel_for_each_task_and_a_line_for_each_model(tmp_path: Path, pool: bool) -> None:
    """Scores of checkpoints without measures are drawn too; models without measures are left out."""
    plot = join_and_plot(tmp_path, GEOMETRY, SCORES, pool=pool)
    assert plot is not None
    assert plot.x_label == "step"
    line_by_task_and_model = {(panel.task, line.label): line for panel in plot.panels for line in panel.lines}
    assert set(line_by_task_and_model) == {("sciq", "small"), ("sciq", "large"), ("lambada", "large")}
    small_line = line_by_task_and_model["sciq", "small"]
    assert (small_line.x, small_line.y) == ((512, 1000, 2000), (0.3, 0.4, 0.5))
    quantile = scipy.stats.norm.interval(0.95)[1]
    assert small_line.y_error == pytest.approx((0.02 * quantile, 0.02 * quantile, 0.01 * quantile))
    assert line_by_task_and_model["sciq", "large"].y_error == ()


def test_the_steps_of_the_measures_count_where_the_scores_have_names_only(tmp_path: Path) -> None:
    geometry = "revision,step,isoscore\nfirst,10,0.1\nsecond,30,0.2\n"
    plot = join_and_plot(tmp_path, geometry, "revision,sciq,MR\nsecond,0.4,0.6\nfirst,0.3,0.5\nlast,0.6,0.7\n")
    assert plot is not None
    assert {panel.task: (panel.lines[0].x, panel.lines[0].y) for panel in plot.panels} == {
        "sciq": ((10, 30), (0.3, 0.4)),
        "MR": ((10, 30), (0.5, 0.6)),
    }


def test_the_command_writes_the_figure_and_deletes_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "geometry.csv").write_text(GEOMETRY)
    (tmp_path / "scores.csv").write_text(SCORES)
    arguments = [str(tmp_path / "scores.csv"), "--out", str(tmp_path / "out")]
    assert main(["correlate", str(tmp_path / "geometry.csv"), *arguments]) == 0
    expected_files = {f"scores.{suffix}" for suffix in ("svg", "pdf", "png")}
    assert {path.name for path in (tmp_path / "out" / "figures").iterdir()} == expected_files
    # Without steps there is no figure.
    (tmp_path / "geometry.csv").write_text("revision,isoscore\na,0.1\nb,0.2\nc,0.3\n")
    (tmp_path / "scores.csv").write_text("revision,sciq\na,0.1\nb,0.2\nc,0.3\n")
    assert main(["correlate", str(tmp_path / "geometry.csv"), *arguments]) == 0
    assert not (tmp_path / "out" / "figures").exists()
