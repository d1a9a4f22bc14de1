"""Griffe extension: docstrings of istar as Markdown, for the reference pages.

The docstrings hold doctests without fences and mathematics in reStructuredText. mkdocstrings reads Markdown, so this
extension fences the doctests and writes the mathematics with the delimiters of pymdownx.arithmatex.
"""

import re
import textwrap
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^|\n)((?P<indent> *)>>> .*(?:\n(?! *$)(?P=indent).*)*)", re.MULTILINE)
INLINE_MATH = re.compile(r":math:`([^`]+)`")
BLOCK_MATH = re.compile(r"^( *)\.\. math::\n((?:\1 +.*\n?|\n(?=\1 ))+)", re.MULTILINE)


def to_markdown(text: str) -> str:
    """Return a docstring with fenced doctests and with mathematics between dollars."""
    text = INLINE_MATH.sub(lambda match: f"${' '.join(match[1].split())}$", text)
    text = BLOCK_MATH.sub(_block_math, text)
    return DOCTEST.sub(_fenced, text)


def _block_math(match: re.Match[str]) -> str:
    formula = textwrap.dedent(match[2]).strip()
    if "&" in formula:
        formula = rf"\begin{{aligned}} {formula} \end{{aligned}}"
    indent = match[1]
    return f"{indent}$$\n{textwrap.indent(formula, indent)}\n{indent}$$\n"


def _fenced(match: re.Match[str]) -> str:
    indent = match["indent"]
    return f"\n{indent}```pycon\n{match[1]}\n{indent}```"


class MarkdownDocstrings(griffe.Extension):
    """Rewrites every docstring once, when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
