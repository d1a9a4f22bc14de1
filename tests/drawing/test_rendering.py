"""The files of a figure: formats, resolution and colours."""

import io
import math
import re
import zlib
from dataclasses import replace
from typing import Any

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from PIL import Image

from istar.drawing import panel_drawing, rendering
from istar.drawing.plot import SUFFIXES, Line, Panel, Plot, tabulate_points
from istar.drawing.rendering import render


def make_plot(*lines: Line, **options: object) -> Plot:
    settings: dict[str, object] = {"kind": "line", "x_label": "layer", **options}
    return Plot("name", "title", "caption", panels=(Panel("InterSim", lines, "task"),), **settings)  # type: ignore[arg-type]


SIMPLE = make_plot(Line("one", (1, 2, 3), (0.1, 0.5, 0.2)), Line("two", (1, 2, 3), (0.3, 0.2, 0.4)))


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return render(SIMPLE, SUFFIXES)


def test_every_figure_has_three_formats(files: dict[str, bytes]) -> None:
    assert tuple(files) == SUFFIXES == ("svg", "pdf", "png")
    assert files["pdf"].startswith(b"%PDF")
    assert b"<svg" in files["svg"]
    # The content of a file is always the same, and does not depend on the other formats that are written.
    assert render(SIMPLE, ["svg"])["svg"] == files["svg"]
    assert render(SIMPLE, ["pdf"])["pdf"] == files["pdf"]


def test_a_png_has_300_dots_per_inch_and_the_size_of_the_svg(files: dict[str, bytes]) -> None:
    picture = Image.open(io.BytesIO(files["png"]))
    assert [round(value) for value in picture.info["dpi"]] == [300, 300]
    points = re.search(rb'width="([\d.]+)pt" height="([\d.]+)pt"', files["svg"])
    assert points is not None
    for pixels, size in zip(picture.size, points.groups(), strict=True):
        assert abs(pixels - float(size) / 72 * 300) <= 1


def test_the_formats_have_the_same_colours(files: dict[str, bytes]) -> None:
    svg = {colour.decode() for colour in re.findall(rb"stroke: (#[0-9a-f]{6})", files["svg"])}
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", files["pdf"], re.DOTALL)
    text = b"\n".join(zlib.decompress(stream) for stream in streams if stream.startswith(b"x"))
    pdf = {
        "#" + "".join(f"{round(255 * float(component)):02x}" for component in components)
        for components in re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) RG", text)
    }
    pixels = {
        "#" + "".join(f"{component:02x}" for component in pixel[:3])
        for _, pixel in Image.open(io.BytesIO(files["png"])).getcolors(1 << 24)
    }  # type: ignore[union-attr,index]
    for colour in panel_drawing.PALETTE[:2]:
        assert colour in svg & pdf & pixels


def test_points_may_be_hollow_or_crossed() -> None:
    line = Line("mean", (1, 2, 3), (0.1, 0.5, 0.2), hollow=(False, True, False), crossed=(False, False, True))
    [axes] = rendering._draw_figure(make_plot(line, kind="bars")).axes
    hollow = [mark for mark in axes.lines if mark.get_markerfacecolor() == panel_drawing.PAPER]
    assert [list(mark.get_xdata()) for mark in hollow] == [[2]]
    crossed = [mark for mark in axes.lines if mark.get_marker() == "x"]
    assert [list(mark.get_xdata()) for mark in crossed] == [[3]]


def assign_colours(*labels: str, all_labels: tuple[str, ...] = (), **positions: float) -> dict[str, str]:
    """Return the colours of lines with these labels; `positions` are further labels and their places on the scale."""
    lines = [Line(label, (1.0,), (0.5,), scale_position=at) for label, at in positions.items()]
    lines = [*(Line(label, (1.0,), (0.5,)) for label in labels), *lines]
    plot = make_plot(*lines, reference_label="Base", labels=all_labels)
    styles = panel_drawing.assign_line_styles(plot)
    return {label: matplotlib.colors.to_hex(style["color"]) for label, style in styles.items()}


def test_a_label_has_the_same_colour_in_every_figure_with_the_same_labels() -> None:
    all_labels = ("Base", "b", "a", "c")
    colours = assign_colours("c", "a", "Base", "b", all_labels=all_labels)
    assert list(colours) == ["Base", "b", "a", "c"]
    assert len(set(colours.values())) == 4
    assert colours["Base"] == panel_drawing.INK
    assert assign_colours("c", all_labels=all_labels) == {"c": colours["c"]}
    assert assign_colours("c") != {"c": colours["c"]}


def test_a_scale_may_be_sequential() -> None:
    colour_by_label = assign_colours("auto", "unbiased", a=0.0, b=0.2, c=0.4, d=0.8, e=1.0)
    assert list(colour_by_label) == ["a", "b", "c", "d", "e", "auto", "unbiased"]
    brightness = [sum(matplotlib.colors.to_rgb(colour_by_label[label])) for label in "abcde"]
    assert brightness == sorted(brightness)
    assert assign_colours(x=0.4)["x"] == colour_by_label["c"]
    assert len(set(colour_by_label.values())) == 7


def draw_axes(y_bounds: tuple[float, float] | None, *values: float) -> Any:
    line = Line("one", tuple(map(float, range(len(values)))), values)
    panel = Panel("measure", (line,), y_bounds=y_bounds)
    return rendering._draw_figure(Plot("name", "title", "caption", "line", "layer", (panel,))).axes[0]


@pytest.mark.parametrize(
    ("bounds", "values", "low", "high"),
    [
        ((-1, 1), (-0.1, 0.9), (-1.1, -1.0), (1.0, 1.1)),  # much of the range: all of it
        ((-1, 1), (0.91, 0.93), (0.9, 0.91), (0.93, 0.94)),  # little of it: the part with the values
        ((0, 1), (0.01, 0.02), (0, 0), (0.02, 0.03)),  # from 0, if the range begins there
        ((1, 384), (3.0, 300.0), (-20, 1), (384, 400)),
        (None, (1.0, 2.0), (0.9, 1.0), (2.0, 2.1)),
    ],
)
def test_a_bounded_measure_has_its_whole_range_or_the_part_with_its_values(
    bounds: tuple[float, float] | None, values: tuple[float, ...], low: tuple[float, float], high: tuple[float, float]
) -> None:
    bottom, top = draw_axes(bounds, *values).get_ylim()
    assert low[0] <= bottom <= low[1]
    assert high[0] <= top <= high[1]


@pytest.mark.parametrize(
    ("values", "y_range"),
    [((97, 100), (0, 100)), ((50, 50), (0, 100)), ((0.2, 3.0), (0, math.inf)), ((-99, -100), (-100, 100))],
)
def test_an_axis_ends_with_the_range_of_a_metric(values: tuple[float, ...], y_range: tuple[float, float]) -> None:
    plot = make_plot(Line("mean", (1, 2), values, y_error=(1.0, 1.0)), kind="points")
    [panel] = plot.panels
    [axes] = rendering._draw_figure(replace(plot, panels=(replace(panel, y_range=y_range),))).axes
    bottom, top = axes.get_ylim()
    margin = 0.05 * (top - bottom)
    assert y_range[0] - margin < bottom < min(values)
    assert max(values) < top < y_range[1] + margin
    assert top - bottom < 6  # the axis is as long as the values and their errors need
    assert len(axes.get_yticks()) > 1
    assert all(max(bottom, y_range[0]) <= tick <= min(top, y_range[1]) for tick in axes.get_yticks())


def test_a_variant_of_a_line_is_dashed_and_in_the_legend_once() -> None:
    lines = [Line(label, xs, xs, variant=variant) for variant in ("", "unbiased") for label, xs in
             (("a", (1.0, 2.0)), ("b", (1.0, 2.0)), ("b", (3.0,)))]  # fmt: skip
    plot = make_plot(*lines)
    figure = rendering._draw_figure(plot)
    drawn = figure.axes[0].lines
    assert [line.get_linestyle() for line in drawn] == ["-", "--", "-", "-", "--", "-"]
    assert [line.get_fillstyle() for line in drawn if len(line.get_xdata()) == 1] == ["full", "none"]
    assert drawn[0].get_color() == drawn[1].get_color() != drawn[2].get_color() == drawn[4].get_color()
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "dashed: unbiased"]
    assert {*tabulate_points(plot)["line"]} == {"a", "b", "a, unbiased", "b, unbiased"}
    other = replace(plot.panels[0], lines=(Line("a", (1.0, 2.0), (1.0, 2.0), variant="corrected"),))
    [legend] = rendering._draw_figure(replace(plot, panels=(*plot.panels, other))).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "dashed: unbiased or corrected"]


def test_a_single_point_of_a_line_has_an_error_bar_and_its_colour() -> None:
    line, mark = Line("one", (0.0, 1.0), (3.0, 4.0), y_error=(0.1, 0.1)), Line("one", (1.2,), (5.0,), y_error=(0.5,))
    panel = Panel("norm", (line, mark))
    figure = rendering._draw_figure(Plot("name", "title", "caption", "line", "depth", (panel,)))
    axes = figure.axes[0]
    [bar] = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
    [segment] = bar.lines[2][0].get_segments()
    assert segment == pytest.approx(np.array([[1.2, 4.5], [1.2, 5.5]]))
    assert len({to_hex(drawn_line.get_color()) for drawn_line in axes.lines if drawn_line.get_label() == "one"}) == 1
    # A single label needs no legend.
    assert not figure.legends


def test_compared_panels_share_their_axes() -> None:
    panels = tuple(Panel("second", [Line("points", (x, x + 2), (-1, 1))], name) for name, x in (("a", -1), ("b", 4)))
    figure = rendering._draw_figure(Plot("name", "title", "caption", "scatter", "first", panels, share_axes=True))
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_ylim() == second.get_ylim()
    assert first.get_xlim()[0] < -1 < 6 < first.get_xlim()[1]
    # A unit has the same length in both panels.
    figure.draw_without_rendering()
    widths = [axes.transData.transform((1, 0))[0] - axes.transData.transform((0, 0))[0] for axes in figure.axes]
    assert abs(widths[0] - widths[1]) < 0.02 * widths[0]


def test_points_with_equal_units_keep_their_limits(caplog: pytest.LogCaptureFixture) -> None:
    """Axes with equal units warn if their limits are fixed without need."""
    panels = tuple(Panel("second", (Line("points", (0.0, x), (0.0, 1.0)),)) for x in (1.0, 40.0))
    render(Plot("name", "title", "caption", "scatter", "first", panels), ["svg"])
    assert not caplog.records


def test_panels_with_the_same_label_share_the_y_axis() -> None:
    values_by_label = {"IsoScore": [(0.1, 0.9), (0.5, math.nan)], "TwoNN dimension": [(3.0, 4.0), (9.0, 20.0)]}
    panels = tuple(
        Panel(label, (Line("one", (0.0, 1.0), values),))
        for label, all_values in values_by_label.items()
        for values in all_values
    )
    plot = Plot("name", "title", "caption", "line", "layer", panels, x_names={0.0: "emb.", 1.0: "1"})
    separate, shared = (
        rendering._draw_figure(replace(plot, share_y_by_label=is_shared)).axes for is_shared in (False, True)
    )
    assert len({axes.get_ylim() for axes in rendering._draw_figure(replace(plot, share_y=True)).axes}) == 1
    assert len({axes.get_xlim() for axes in separate}) == 1
    assert len({axes.get_ylim() for axes in separate}) == 4
    assert [shared[0].get_ylim(), shared[2].get_ylim()] == [shared[1].get_ylim(), shared[3].get_ylim()]
    assert shared[0].get_ylim() != shared[2].get_ylim()


def test_an_axis_does_not_show_rounding_errors() -> None:
    gain = 1.4615785
    constant, changing = (Line("one", (0.0, 1.0, 2.0), (gain, gain + step, gain)) for step in (1e-7, 1e-3))
    with_interval = replace(constant, y_error=(0.01, 0.01, 0.01))
    limits = []
    for line in (constant, changing, with_interval):
        plot = Plot("name", "title", "caption", "line", "step", (Panel("gain", (line,)),))
        limits.append(rendering._draw_figure(plot).axes[0].get_ylim())
    assert limits[0] == pytest.approx((0.9 * gain, 1.1 * gain), rel=1e-6)
    assert limits[1][1] - limits[1][0] < 2e-3
    assert 0.02 < limits[2][1] - limits[2][0] < 0.03


def test_the_points_of_a_figure_are_a_table() -> None:
    """Named positions have their names, and the cells of a heatmap those of their columns."""
    line = Line("mean", (1.0, 2.0), (0.1, 0.5), y_error=(0.01, 0.02))
    plot = Plot("n", "t", "c", "line", "x", (Panel("score", (line,), "task", "m"),), x_names={1.0: "final\nnorm"})
    frame = tabulate_points(plot)
    assert frame.to_dict("records")[0] == {
        "panel": "task m", "quantity": "score", "line": "mean", "x": 1.0, "x_name": "final norm", "y": 0.1,
        "y_error": 0.01,
    }  # fmt: skip
    panel = Panel("rows", (Line("row", (0.0, 1.0), (0.25, 0.5)),), column_names=("a", "b"))
    frame = tabulate_points(Plot("n", "t", "c", "heatmap", "", (panel,)))
    assert frame["x_name"].tolist() == ["a", "b"]
    assert frame["y_error"].isna().all()


def test_numbers_of_dimensions_have_whole_ticks() -> None:
    panel = Panel("outlier dimensions", (Line("one", (0.0, 1.0), (0.0, 0.0)),), y_bounds=(0, 384))
    axes = rendering._draw_figure(Plot("name", "title", "caption", "line", "layer", (panel,))).axes[0]
    low, high = axes.get_ylim()
    assert [tick for tick in axes.get_yticks() if low <= tick <= high] == [0, 1]


def test_values_above_columns_do_not_overlap() -> None:
    lines = [Line(f"model {index}", (0.0, 1.0, 2.0), (0.999, 0.988, 0.994)) for index in range(4)]
    panels = tuple(Panel("I(W)", tuple(lines)) for _ in range(2))
    figure = rendering._draw_figure(Plot("name", "title", "caption", "columns", "", panels))
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 12
        assert not any(box.overlaps(other) for index, box in enumerate(boxes) for other in boxes[:index])
        assert all(box.y1 <= axes.get_window_extent().y1 for box in boxes)


def draw_panels(plot: Plot) -> Any:
    """Return a drawn figure, whose texts have their places."""
    figure = rendering.draw(plot)
    figure.canvas.draw()
    return figure


def test_a_long_label_of_the_y_axis_is_within_the_figure() -> None:
    label, line = "sample InterSim, without top dimension", Line("a", (1, 2), (0.1, 0.2))
    for log_y in (False, True):
        panels = tuple(replace(Panel(label, (line,)), log_y=log_y) for _ in range(4))
        figure = draw_panels(replace(make_plot(line), panels=panels))
        for axes in figure.axes:
            extent = axes.yaxis.label.get_window_extent()
            assert extent.y0 >= 0
            assert extent.y1 <= figure.bbox.height
            assert " ".join(axes.get_ylabel().split()) == label + " (logarithmic)" * log_y
    others = [axes.yaxis.label.get_window_extent() for axes in figure.axes]
    assert not any(first.overlaps(second) for index, first in enumerate(others) for second in others[:index])


@pytest.mark.parametrize("values", [(0.9, -0.001), (-3.16, -2.47)])
def test_values_below_columns_are_above_the_axis(values: tuple[float, ...]) -> None:
    lines = tuple(Line(f"line {index}", (1,), (value,)) for index, value in enumerate(values))
    panel = Panel("measure", lines, y_bounds=(0, 1) if values[0] > 0 else None)
    figure = draw_panels(replace(make_plot(*lines), kind="columns", panels=(panel, panel)))
    for axes in figure.axes:
        assert all(text.get_window_extent().y0 >= axes.bbox.y0 for text in axes.texts)


def test_long_names_on_the_x_axis_do_not_overlap() -> None:
    names = {float(index): f"a cloud with a long name {index}" for index in range(6)}
    line = Line("m", tuple(names), (0.1,) * 6, y_error=(0.02,) * 5 + (math.nan,))
    for x_names, rotation in ((names, 30), (dict.fromkeys(names, "short"), 0)):
        plot = Plot("name", "title", "caption", "columns", "cloud", (Panel("y", [line]),), x_names=x_names)
        figure = rendering.draw(plot)
        [axes] = figure.axes
        assert {label.get_rotation() for label in axes.get_xticklabels()} == {rotation}
        assert all(label.get_window_extent().x0 >= 0 for label in axes.get_xticklabels())
        # The number of a bar is above its error bar.
        tops = [text.get_window_extent().y0 for text in axes.texts]
        assert tops[0] >= axes.transData.transform((0, 0.12))[1]


def test_rows_with_long_names_have_room_and_a_reference_line() -> None:
    """The title and the label of the x axis used to be cut off, because long names left no room for the axes."""
    names = ["Base", "I-STAR λ=1 ζ=0.4 schedule=cosine precision=bf16-mixed batch_size=16"]
    lines = [Line(name, (0.5 + row,), (row,), x_error=(0.0,)) for row, name in enumerate(names)]
    panel = Panel("", lines, "accuracy, percent: demo · tiny", vertical_line=(0.4, "a constant prediction"))
    figure = rendering._draw_figure(Plot("name", "title", "caption", "rows", "mean over seeds", (panel, panel)))
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a constant prediction"]
    top, bottom = figure.axes
    assert top.get_position().y0 > bottom.get_position().y1
    for axes in figure.axes:
        for text in (axes.title, axes.xaxis.label, *axes.get_yticklabels()):
            box = text.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert [label.get_text() for label in axes.get_yticklabels()] == names
        low, high = axes.get_ylim()
        assert low > high  # the first row is on top
