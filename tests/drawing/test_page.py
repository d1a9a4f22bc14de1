"""The HTML page: escaping, colours, alignment, and the functions of its script."""

import base64
import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from istar.drawing import page_folder, panel_drawing
from istar.drawing.page_folder import Page, Section
from istar.drawing.page_tables import Entry, Sheet
from istar.drawing.pictures import render_pictures
from istar.drawing.plot import FIGURE_FORMATS, Line, Panel, Plot
from tests.reports.test_report import inline_parts, parsed

TEMPLATES = Path(str(files("istar.drawing"))) / "templates"
BROKEN = Panel("y", [Line("line", (1, 2), (0.1,))])  # a line without its second y
HOSTILE = '<script>alert(1)</script> "]]>& <b onclick="x()">'


def write_page(tmp_path: Path, name: str = "name") -> Path:
    """Write a page with a table and two figures of two models; every text contains the name."""
    rows = [[Entry(name), Entry(f"{10**n}.{n}", n == 2, number=True), Entry(name, code=True)] for n in range(12)]
    sheet = Sheet("table", name, name, (name, "v", name), {name: rows}, pd.DataFrame(), (name,))
    panels = tuple(
        Panel(name, [Line(name, (1, 2), (0.1, 0.5)), Line("other", (1, 2), (0.3, 0.2))], name, model, name)
        for model in (name, f"{name}2")
    )
    plot = Plot("plot", name, name, "line", name, panels)
    pictures = render_pictures([plot], tmp_path)[plot.name]
    section = Section("section", name, (name,), sheet, pictures, name, (name,), is_wide=True)
    path = tmp_path / "index.html"
    path.write_text(
        page_folder.render_html(Page(name, ("Runs", name, name), "test", [("1", name)], [section])), encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("page"))


def test_all_formats_are_drawn_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a process with the threads of torch, OpenMP or CUDA could wait for ever."""
    plots = [
        Plot(name, name, name, "line", "x", (Panel("y", [Line("line", (1, 2), (0.1, y))]),))
        for name, y in (("first", 0.2), ("second", 0.3), ("third", 0.4))
    ]
    expected = render_pictures(plots, tmp_path)
    drawn: list[str] = []
    monkeypatch.setattr(os, "fork", None)
    formats = FIGURE_FORMATS.set(("svg", "pdf"))
    try:
        pictures = render_pictures(plots, tmp_path, drawn.append)
        assert drawn == ["first", "second", "third"]
        for name, [picture] in pictures.items():
            assert set(picture.files) == {"svg", "narrow.svg", "pdf", "csv"}
            assert {suffix: picture.files[suffix] for suffix in expected[name][0].files} == expected[name][0].files
        with pytest.raises(ValueError, match="must have same first dimension"):
            render_pictures([replace(plot, panels=(BROKEN,)) for plot in plots], tmp_path)
    finally:
        FIGURE_FORMATS.reset(formats)


@pytest.mark.usefixtures("svg_only")
def test_hostile_names_stay_texts(tmp_path: Path) -> None:
    path = write_page(tmp_path, HOSTILE)
    inline_parts(path)
    reader = parsed(path)
    assert "".join(reader.text).count(HOSTILE) > 20
    assert len(reader.ids) == len(set(reader.ids))
    # The page has one `<b>` tag for each panel, before its fixed settings.
    assert [tag for tag, _ in reader.tags].count("b") == 2


def test_figures_are_images_and_files_are_linked(plain_page: Path) -> None:
    """The SVG is as matplotlib wrote it, so that no id of one figure can meet one of another."""
    path = plain_page
    images = [attributes for tag, attributes in parsed(path).tags if tag == "img"]
    assert [image["alt"] for image in images] == [
        f"name, {model}: name by name: name from 0.1 at 1 to 0.5 at 2; other from 0.3 at 1 to 0.2 at 2."
        for model in ("name", "name2")
    ]
    for image in images:
        svg = base64.b64decode((image["src"] or "").removeprefix("data:image/svg+xml;base64,"))
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    targets = [target for _, target in parsed(path).references]
    assert not any("narrow" in target for target in targets)
    for target in ("tables/table.csv", "tables/table.tex", "figures/plot-name.csv", "figures/plot-name2.svg"):
        assert target in targets


def test_an_empty_section_is_only_named_at_the_end(tmp_path: Path) -> None:
    sections = [
        Section("full", "Full", ("Something.",), about=("Long. " * 40,)),
        Section("empty", "Empty", ("Never shown.",), empty_note="No runs.", commands=["make runs"]),
    ]
    path = tmp_path / "index.html"
    path.write_text(page_folder.render_html(Page("title", ("Runs", "a", "b"), "test", (), sections)))
    reader = parsed(path)
    assert [tag for tag, _ in reader.tags].count("h2") == 2  # of the contents and the first section
    text = " ".join(" ".join(reader.text).split())
    assert "Never shown" not in text
    assert text.index("Long.") < text.index("Not on this page: Empty.") < text.index("No runs.") < text.index("make")
    # The long explanation is folded.
    assert [tag for tag, attributes in reader.tags if attributes.get("class") == "about"] == ["details"]


def test_a_phone_gets_a_narrow_figure(plain_page: Path) -> None:
    tags = [attributes for tag, attributes in parsed(plain_page).tags if tag in ("source", "img")]
    for narrow, wide in zip(tags[::2], tags[1::2], strict=True):
        assert narrow["media"] == "screen and (max-width: 40rem)"
        widths = []
        for source in (narrow["srcset"], wide["src"]):
            svg = base64.b64decode((source or "").removeprefix("data:image/svg+xml;base64,"))
            widths.append(float(ElementTree.fromstring(svg).attrib["width"].removesuffix("pt")))
        assert widths[0] < widths[1]


# Colours.


def read_colour_schemes(style: str) -> list[dict[str, str]]:
    """Return the variables of the light and of the dark colour scheme."""
    return [dict(re.findall(r"--(\w+): ([^;]*);", block)) for block in re.findall(r":root \{([^}]*)\}", style)]


def luminance(colour: Any) -> float:
    """Return the relative luminance of a colour as defined in WCAG 2."""
    parts = np.asarray(colour)
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(first: Any, second: Any) -> float:
    """Return the contrast ratio of two colours as defined in WCAG 2, from 1 to 21."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_texts_have_contrast_in_both_schemes(plain_page: Path) -> None:
    light, dark = read_colour_schemes(inline_parts(plain_page)["style"])
    assert light.keys() == dark.keys()
    for scheme in (light, dark):
        for text, background in (
            ("ink", "paper"), ("soft", "paper"), ("link", "paper"), ("ink", "tint"), ("soft", "tint"),
        ):  # fmt: skip
            assert contrast(to_rgb(scheme[text]), to_rgb(scheme[background])) >= 4.5, (text, background)


def apply_dark_filter(colour: str) -> Any:
    """Return a colour of a figure after the filters `invert(0.92) hue-rotate(180deg)` of the CSS filter effects."""
    inverted = 0.92 + np.asarray(to_rgb(colour)) * (1 - 2 * 0.92)
    grey = np.array([0.213, 0.715, 0.072])
    # The cosine of 180 degrees is -1, the sine 0.
    return np.clip(2 * grey @ inverted - inverted, 0, 1)


def test_lines_are_as_visible_in_the_dark(plain_page: Path) -> None:
    _, dark = read_colour_schemes(inline_parts(plain_page)["style"])
    assert dark["figure"] == "invert(0.92) hue-rotate(180deg)"
    paper = apply_dark_filter(panel_drawing.PAPER)
    # The paper of figures is that of the page.
    assert np.abs(paper - to_rgb(dark["paper"])).max() < 1 / 255
    scales = [panel_drawing.choose_scale_colour(position) for position in (0, 0.2, 0.4, 0.6, 0.8, 1)]
    for colour in filter(
        None, (panel_drawing.INK, panel_drawing.RED, *panel_drawing.PALETTE, *panel_drawing.SCALE, *scales)
    ):
        assert contrast(apply_dark_filter(colour), paper) >= min(
            3, contrast(to_rgb(colour), to_rgb(panel_drawing.PAPER))
        )
    text = panel_drawing.INK
    assert contrast(apply_dark_filter(text), paper) >= 4.5


# Script.


def evaluate_script(expression: str) -> Any:
    """Return the value of an expression over the functions of the script, computed by Node.js."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    program = f"const page = require({json.dumps(str(TEMPLATES / 'report.js'))}); "
    program += f"console.log(JSON.stringify({expression}))"
    result = subprocess.run([node, "-e", program], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def test_numbers_of_cells() -> None:
    value_by_cell = {
        "71.67 ± 0.50": 71.67, " 1,234 ": 1234, "1,234,567.5": 1234567.5, "-0.5": -0.5, "\u22125": -5, "+0.5": 0.5,
        "<0.001": 0.001, "1e-05": 1e-05, ".5": 0.5, "5.3 %": 5.3, "50.00 ± 0.00 (collapsed)": 50, "-1 | 0.8": -1,
        "-": None, "\u2013": None, "": None, "1:02": None, "12-layer": None, "bert": None, "2x": None,
    }  # fmt: skip
    assert evaluate_script(f"{json.dumps(list(value_by_cell))}.map(page.parseNumber)") == list(value_by_cell.values())


def test_sorted_order() -> None:
    numbers = ["10.5 ± 3", "9.00", "-", "1,000", "\u2013", "-2"]
    expected_orders: list[tuple[list[str], int, list[str]]] = [
        (numbers, 1, ["-2", "9.00", "10.5 ± 3", "1,000", "-", "\u2013"]),
        (numbers, -1, ["1,000", "10.5 ± 3", "9.00", "-2", "-", "\u2013"]),
        (["layer 10", "layer 2", "-", "Base"], 1, ["Base", "layer 2", "layer 10", "-"]),
        # Equal cells keep their order in both directions.
        (["1", "0", "1.0"], 1, ["0", "1", "1.0"]),
        (["1", "0", "1.0"], -1, ["1", "1.0", "0"]),
    ]
    calls = [f"page.sortedOrder({json.dumps(cells)}, {direction})" for cells, direction, _ in expected_orders]
    orders = evaluate_script(f"[{', '.join(calls)}]")
    for order, (cells, _, expected) in zip(orders, expected_orders, strict=True):
        assert [cells[index] for index in order] == expected


def test_a_filter_finds_all_its_words() -> None:
    texts_and_words = ('"BERT rte 71.67", "rte bert"', '"BERT rte 71.67", "rte gpt"', '"BERT", "  "')
    calls = ", ".join(f"page.hasAllWords({arguments})" for arguments in texts_and_words)
    assert evaluate_script(f"[{calls}]") == [True, False, True]
