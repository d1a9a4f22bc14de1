"""SVG files that are inlined in a page."""

import re
from xml.etree import ElementTree

from istar.drawing.hover_points import Spot
from istar.drawing.inline_svg import inline_svg
from istar.drawing.plot import Line, Panel, Plot
from istar.drawing.rendering import INK, PAPER, render_with_spots

HOSTILE = ("<script>alert(1)</script>", "a\x01b", '"]]>&', "</svg><img src=x onerror=alert(1)>", "--><!--")


def make_plot(*labels: str, kind: str = "bars") -> Plot:
    lines = tuple(Line(label, (1, 2, 3), (0.1, 0.5, 0.2)) for label in labels)
    return Plot("name", "title", "caption", kind, labels[0], (Panel("", labels[0], lines, "", labels[0]),))


def render_inline(plot: Plot, name: str = "name", description: str = "words") -> str:
    files, spots = render_with_spots(plot)
    return str(inline_svg(files["svg"], name, description, spots))


def test_hostile_texts_stay_texts() -> None:
    text = render_inline(make_plot(*HOSTILE), description=HOSTILE[2])
    root = ElementTree.fromstring(text)
    assert {element.tag for element in root.iter()} <= {
        "svg", "g", "desc", "defs", "path", "use", "text", "clipPath", "rect", "circle", "title",
    }  # fmt: skip
    texts = ["".join(element.itertext()) for element in root.iter("text")]
    printable_labels = [label.replace("\x01", "") for label in HOSTILE]
    assert set(printable_labels) <= set(texts)
    titles = [element.text or "" for element in root.iter("title")]
    assert [title.split("\n")[0] for title in titles] == [label for label in printable_labels for _ in range(3)]
    assert [element.text for element in root.iter("desc")] == [HOSTILE[2]]
    assert not re.search(r"<script|<img|<!--|]]>|\son\w+=\"", text)


def test_the_style_is_in_attributes() -> None:
    text = render_inline(make_plot("one", "two"))
    root = ElementTree.fromstring(text)
    assert "<style" not in text
    assert " style=" not in text
    attributes = [element.attrib for element in root.iter()]
    assert {PAPER, INK} <= {attribute.get("fill") for attribute in attributes}
    assert any(attribute.get("stroke-width") == "0.8" and attribute.get("stroke") == INK for attribute in attributes)
    assert all(re.fullmatch(r"[\d.]+px", element.attrib["font-size"]) for element in root.iter("text"))


def test_ids_of_different_figures_differ_and_lead_somewhere() -> None:
    ids = []
    for name in ("a", "b"):
        root = ElementTree.fromstring(render_inline(make_plot("one", "two"), name))
        figure_ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
        targets = {value[1:] for element in root.iter() if (value := element.get("href"))}
        clips = {value for element in root.iter() if (value := element.get("clip-path"))}
        targets |= {match[1] for clip in clips if (match := re.fullmatch(r"url\(#(.*)\)", clip))}
        assert clips
        assert targets | {f"figure-{name}-description"} == set(figure_ids)
        ids += figure_ids
    assert len(ids) == len(set(ids))


def test_the_size_is_that_of_the_file_and_the_text_is_shorter() -> None:
    plot = make_plot("one", "two")
    files, spots = render_with_spots(plot)
    root = ElementTree.fromstring(render_inline(plot))
    source = ElementTree.fromstring(files["svg"])
    assert root.attrib["viewBox"] == source.attrib["viewBox"]
    for key in ("width", "height"):
        assert abs(float(root.attrib[key]) * 72 / 96 - float(source.attrib[key].removesuffix("pt"))) < 1
    assert len(inline_svg(files["svg"], "a", "b")) < len(files["svg"])
    circles = list(root.iter("circle"))
    assert [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in circles] == [
        (round(spot.x, 1), round(spot.y, 1)) for spot in spots
    ]


def test_embedded_images_stay() -> None:
    svg = (
        b'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="9pt" height="9pt" '
        b'viewBox="0 0 9 9"><g id="a"><image xlink:href="data:image/png;base64,AA==" id="image1" width="3" '
        b'style="image-rendering:crisp-edges;image-rendering:pixelated"/></g></svg>'
    )
    root = ElementTree.fromstring(inline_svg(svg, "name", "words", [Spot(1, 2, "x")]))
    [image] = root.iter("image")
    assert image.attrib == {"href": "data:image/png;base64,AA==", "width": "3", "image-rendering": "pixelated"}
