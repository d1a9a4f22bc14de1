"""Fixtures shared by the tests of fine-tuning."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from istar.finetune.execute import recording


@pytest.fixture(scope="session", autouse=True)
def blank_isotropy_picture() -> Iterator[None]:
    """Leave the picture of each run blank, which would take a quarter of the time of a small run.

    `tests/finetune/execute/test_run_summary.py` tests the picture.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "render", lambda plot, formats: dict.fromkeys(formats, b"blank"))
        yield


@pytest.fixture
def start(own_cache: Path) -> Iterator[Any]:
    """Yield the function of `tests.jobs.starting`."""
    from tests.jobs import starting  # skips tests where processes cannot be found

    with starting(own_cache) as start:
        yield start
