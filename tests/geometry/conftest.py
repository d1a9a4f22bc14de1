"""Fixtures of the tests of geometry."""

from collections.abc import Iterator

import pytest

from istar.drawing import rendering

BLANK = b'<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"/>'


@pytest.fixture(scope="module")
def blank_figures() -> Iterator[None]:
    """Leave the figures blank: test_axis_figures.py tests what is in them, and tests/drawing their rendering."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "render", lambda plot: dict.fromkeys(rendering.SUFFIXES, BLANK))
        yield
