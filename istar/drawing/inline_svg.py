"""SVG files as parts of an HTML page: without style attributes, with ids of their page, and with values."""

import re
from collections.abc import Iterable
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from markupsafe import Markup

from istar.drawing.hover_points import Spot

_SPOT_RADIUS = 5
"""Radius of the area around a point that shows its value, in points (1/72 inch)."""
_REFERENCE = re.compile(r"url\(#([^)]*)\)")
"""Reference to an id in an attribute, such as `url(#clip)`."""


def inline_svg(svg: bytes, name: str, description: str, spots: Iterable[Spot] = ()) -> Markup:
    """Convert an SVG file of matplotlib to an HTML element that shows a spot's text when the pointer is over it.

    Style attributes become presentation attributes, and style elements are left out, because the page's
    Content-Security-Policy forbids both. Texts are escaped.

    Args:
        svg: content of the SVG file.
        name: name of the figure, unique within the page; the ids in the figure contain it.
        description: what the figure shows, in words.
        spots: positions and texts of the figure's points.
    """
    source = ElementTree.fromstring(svg)
    prefix = f"figure-{name}-"
    size_in_points = {key: float(source.attrib[key].removesuffix("pt")) for key in ("width", "height")}
    # matplotlib sets the joins and ends of all lines in its style element. A CSS pixel is 1/96 inch.
    root = Element("svg", {"viewBox": source.attrib["viewBox"], "stroke-linejoin": "round", "stroke-linecap": "butt"})
    root.attrib |= {key: f"{length * 96 / 72:.0f}" for key, length in size_in_points.items()}
    drawing = SubElement(root, "g", {"role": "img", "aria-labelledby": f"{prefix}description"})
    drawing.extend(_copy_without_namespaces(child) for child in source if _strip_namespace(child.tag) in ("defs", "g"))
    for element in drawing.iter():
        if element is not drawing:
            _use_presentation_attributes(element)
            _prefix_ids(element, prefix)
    _remove_unused_ids(drawing)
    description_element = Element("desc", {"id": f"{prefix}description"})
    description_element.text = _remove_control_characters(description)
    drawing.insert(0, description_element)
    spot_layer = SubElement(root, "g", {"class": "spots", "fill": "none", "pointer-events": "all"})
    for spot in spots:
        circle = SubElement(
            spot_layer, "circle", {"cx": f"{spot.x:.1f}", "cy": f"{spot.y:.1f}", "r": str(_SPOT_RADIUS)}
        )
        SubElement(circle, "title").text = _remove_control_characters(spot.text)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _strip_namespace(tag: str) -> str:
    return tag.rpartition("}")[2]


def _copy_without_namespaces(element: Element) -> Element:
    """Return a copy of an element without namespaces, style elements and the white space between elements."""
    copy = Element(
        _strip_namespace(element.tag), {_strip_namespace(key): value for key, value in element.attrib.items()}
    )
    copy.text = element.text if len(element) == 0 else None
    copy.extend(_copy_without_namespaces(child) for child in element if _strip_namespace(child.tag) != "style")
    return copy


def _use_presentation_attributes(element: Element) -> None:
    """Replace the style attribute by an attribute for each of its properties, and round the coordinates of paths."""
    for declaration in filter(str.strip, element.attrib.pop("style", "").split(";")):
        key, _, value = declaration.partition(":")
        element.set(key.strip(), value.strip())
    # The page sets the font.
    element.attrib.pop("font-family", None)
    for key in ("d", "x", "y"):
        if key in element.attrib:
            value = re.sub(r"(\.\d\d)\d+", r"\1", element.attrib[key])
            element.set(key, " ".join(value.split()))


def _prefix_ids(element: Element, prefix: str) -> None:
    if "id" in element.attrib:
        element.set("id", prefix + element.attrib["id"])
    for key, value in element.attrib.items():
        if key == "href" and value.startswith("#"):
            element.set(key, f"#{prefix}{value[1:]}")
        elif key != "id":
            element.set(key, _REFERENCE.sub(lambda match: f"url(#{prefix}{match[1]})", value))


def _remove_unused_ids(root: Element) -> None:
    used_ids = set()
    for element in root.iter():
        for key, value in element.attrib.items():
            used_ids |= {value[1:]} if key == "href" else set(_REFERENCE.findall(value))
    for element in root.iter():
        if element.get("id") not in used_ids:
            element.attrib.pop("id", None)


def _remove_control_characters(text: str) -> str:
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "", text)
