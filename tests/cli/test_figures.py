"""The formats of the figures of pages."""

from pathlib import Path

import numpy as np
import pytest

from istar.cli.main import main
from istar.drawing import rendering


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    """Return the paths of two tables that `istar correlate` draws one figure from."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(12, 2))
    geometry = "".join(f"m,s{step},{step},w{step},wiki,layer_1,{rows[step, 0]}\n" for step in range(12))
    scores = "".join(f"m,s{step},{rows[step, 1]}\n" for step in range(12))
    (tmp_path / "geometry.csv").write_text("model,revision,step,weights,source,layer,isoscore\n" + geometry)
    (tmp_path / "scores.csv").write_text("model,revision,MR\n" + scores)
    return ["correlate", str(tmp_path / "geometry.csv"), str(tmp_path / "scores.csv"), "--out", str(tmp_path / "out")]


def test_figures_are_svg_and_in_the_formats_that_are_asked_for(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*inputs, "--figures", "pdf"]) == 0
    figures = tmp_path / "out" / "figures"
    assert {path.suffix for path in figures.iterdir()} == {".svg", ".csv", ".pdf"}
    page = (tmp_path / "out" / "index.html").read_text()
    for path in figures.iterdir():
        assert (f'href="figures/{path.name}"' in page) == (not path.name.endswith(".narrow.svg"))
    # The formats are those of one command; a new page replaces the earlier one with all its files.
    assert main(inputs) == 0
    assert {path.suffix for path in figures.iterdir()} == {".svg", ".csv"}
    assert ".pdf" not in (tmp_path / "out" / "index.html").read_text()
    assert main([*inputs, "--figures", "pdff"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "error: --figures=pdff is not known; did you mean pdf?; expected one of svg, pdf, png"


def test_a_figure_is_drawn_again_only_if_it_changes(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    render = rendering.render
    monkeypatch.setattr(rendering, "render", lambda plot, suffixes: drawn.append(plot.name) or render(plot, suffixes))

    def list_drawn(*options: str) -> list[str]:
        drawn.clear()
        assert main([*inputs, *options]) == 0
        return list(drawn)

    all_figures = list_drawn()
    name = all_figures[0]
    folder = tmp_path / "out"
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert list_drawn() == []
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == contents
    assert list_drawn("--figures", "svg,pdf,png") == all_figures
    assert list_drawn("--figures", "svg,pdf,png") == []
    scores = tmp_path / "scores.csv"
    scores.write_text(scores.read_text().replace("m,s3,", "m,s3,1"))
    assert list_drawn("--figures", "svg,pdf,png") == all_figures
    # A missing file, of any format, is drawn again.
    for suffix in ("pdf", "narrow.svg"):
        (folder / "figures" / f"{name}.{suffix}").unlink()
        assert list_drawn("--figures", "svg,pdf,png") == [name]
