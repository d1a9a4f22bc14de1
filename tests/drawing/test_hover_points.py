"""The positions and values of a figure's points, compared with the markers of its SVG."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from istar.drawing import hover_points
from istar.drawing.hover_points import MAX_SPOTS
from istar.drawing.plot import Line, Panel, Plot
from istar.drawing.rendering import render, render_with_spots

LINE = Line("λ = 1", (1, 2, 4), (0.1, 0.5, 1234.5), y_error=(0.01, math.nan, 2))
OTHER = Line("Base", (1, 2, 4), (-0.3, math.nan, 0.7))


def make_plot(kind: str, *lines: Line, **options: object) -> Plot:
    settings: dict[str, object] = {"x_label": "layer", **options}
    panels = (Panel("", "left", lines, "", "InterSim"), Panel("", "right", lines[:1], "", "norm"))
    return Plot("name", "title", "caption", kind, panels=panels, **settings)  # type: ignore[arg-type]


def find_marker_positions(svg: bytes) -> set[tuple[float, float]]:
    """Return the positions of all markers of an SVG, including the ticks."""
    uses = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}use")
    return {(float(use.attrib["x"]), float(use.attrib["y"])) for use in uses}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, {}) for kind in ("line", "points", "bars", "scatter")),
        ("line", {"log_x": True}),
        ("scatter", {"share_axes": True}),
    ],
)
def test_a_spot_is_at_its_marker(kind: str, more: dict[str, object]) -> None:
    files, figure_spots = render_with_spots(make_plot(kind, LINE, OTHER, **more))
    assert len(figure_spots) == 3 + 2 + 3
    marker_positions = find_marker_positions(files["svg"])
    assert all(
        any(math.dist((spot.x, spot.y), position) < 0.01 for position in marker_positions) for spot in figure_spots
    )
    assert files == render(make_plot(kind, LINE, OTHER, **more))


def test_a_spot_of_a_column_is_at_its_top() -> None:
    files, figure_spots = render_with_spots(make_plot("columns", LINE, OTHER, x_names={1.0: "raw", 2.0: "b\nc"}))
    tops = set()
    for path in re.findall(rb'd="(M [^"]*?z)', files["svg"]):
        coordinates = [float(coordinate) for coordinate in re.findall(rb"-?[\d.]+", path)]
        xs, ys = coordinates[0::2], coordinates[1::2]
        tops |= {((min(xs) + max(xs)) / 2, y) for y in ys}
    for spot in figure_spots:
        assert any(math.dist((spot.x, spot.y), top) < 0.01 for top in tops)
    assert figure_spots[1].text == "λ = 1\nlayer: b c\nInterSim: 0.5"


def test_a_spot_of_a_ridge_is_on_its_curve_and_says_the_value() -> None:
    lines = (Line("a", (1.0, 2.0, 3.0), (0.0, 8.0, 2.0)), Line("b", (1.0, 2.0, 3.0), (1.0, 0.0, 0.5)))
    files, ridge_spots = render_with_spots(make_plot("ridges", *lines))
    curves = re.findall(rb'd="(M [^"]*)" clip-path="[^"]*" style="fill: none; stroke: #0072b2', files["svg"])
    [first_curve, _] = [[float(coordinate) for coordinate in re.findall(rb"-?[\d.]+", curve)] for curve in curves]
    assert [(spot.x, spot.y) for spot in ridge_spots[:3]] == [
        pytest.approx(position, abs=0.01) for position in zip(first_curve[::2], first_curve[1::2], strict=True)
    ]
    assert ridge_spots[1].text == "a\nlayer: 2\nInterSim: 8"
    # Row b is below row a, and its maximum is as high above its base as that of row a.
    heights = [first_curve[1] - first_curve[3], ridge_spots[4].y - ridge_spots[3].y]
    assert heights[0] == pytest.approx(heights[1], abs=0.01)
    assert ridge_spots[4].y > ridge_spots[0].y


def test_a_spot_says_label_x_and_y() -> None:
    _, figure_spots = render_with_spots(make_plot("line", LINE, OTHER), ["svg"])
    assert [spot.text for spot in figure_spots] == [
        "λ = 1\nlayer: 1\nInterSim: 0.1 ± 0.01",
        "λ = 1\nlayer: 2\nInterSim: 0.5",
        "λ = 1\nlayer: 4\nInterSim: 1,234 ± 2",
        "Base\nlayer: 1\nInterSim: -0.3",
        "Base\nlayer: 4\nInterSim: 0.7",
        "λ = 1\nlayer: 1\nnorm: 0.1 ± 0.01",
        "λ = 1\nlayer: 2\nnorm: 0.5",
        "λ = 1\nlayer: 4\nnorm: 1,234 ± 2",
    ]


def test_a_spot_says_nothing_of_a_place_without_a_name() -> None:
    _, figure_spots = render_with_spots(
        make_plot("points", Line("one", (0.0,), (0.5,)), x_label="", x_names={0.0: ""}), ["svg"]
    )
    assert figure_spots[0].text == "one\nInterSim: 0.5"


def test_the_number_of_spots_is_bounded() -> None:
    count = 2_000
    lines = [Line(name, tuple(map(float, range(count))), tuple(map(math.sin, range(count)))) for name in "ab"]
    _, figure_spots = render_with_spots(make_plot("scatter", *lines), ["svg"])
    assert MAX_SPOTS - 3 <= len(figure_spots) <= MAX_SPOTS
    spot_positions = [int(re.search(r"layer: (.*)", spot.text)[1].replace(",", "")) for spot in figure_spots]  # type: ignore[index]
    first_line_positions = spot_positions[: spot_positions.index(count - 1) + 1]
    steps = [after - before for before, after in itertools.pairwise(first_line_positions)]
    assert (first_line_positions[0], max(steps) - min(steps)) == (0, 1)


def test_a_spot_of_a_heatmap_is_in_the_middle_of_its_cell() -> None:
    rows = (Line("layer 1", (0, 1, 2), (0.1, 0.2, 0.3)), Line("layer 2", (0, 1, 2), (0.4, math.nan, 0.6)))
    panel = Panel("", "second (columns)", rows, "", "first (rows)", column_names=("a", "b", "c"))
    files, figure_spots = render_with_spots(Plot("name", "title", "caption", "heatmap", "", (panel,)))
    middles = set()
    for path in re.findall(rb'd="(M [^"]*)"', files["svg"]):
        coordinates = [float(coordinate) for coordinate in re.findall(rb"-?[\d.]+", path)]
        xs, ys = coordinates[0::2], coordinates[1::2]
        middles.add(((min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2))
    assert len(figure_spots) == 5
    assert all(any(math.dist((spot.x, spot.y), middle) < 0.01 for middle in middles) for spot in figure_spots)
    assert figure_spots[-1].text == "first (rows): layer 2\nsecond (columns): c\n0.6"
    # The first row is at the bottom.
    assert figure_spots[0].y > figure_spots[-1].y


def test_unknown_kinds_have_no_spots() -> None:
    line_plot = make_plot("line", LINE)
    assert hover_points.find_spots(None, Plot("n", "t", "c", "pie", "x", line_plot.panels)) == []  # type: ignore[arg-type]
