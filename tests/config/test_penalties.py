"""The options of the group `reg` and the penalties that are built from them."""

from typing import Any

import pytest

from istar.config.penalties import CosRegConfig, IStarConfig

COSREG = {"weight": -2.0, "layers": [1], "include_padding": True, "sync": False}
ISTAR = {**COSREG, "zeta": 0.3, "compute": "bfloat16"}


@pytest.mark.parametrize(("kind", "settings"), [(CosRegConfig, COSREG), (IStarConfig, ISTAR)])
def test_every_setting_reaches_the_penalty(kind: type[CosRegConfig], settings: dict[str, Any]) -> None:
    default, changed = kind().build(), kind(**settings).build()
    for name, value in settings.items():
        assert getattr(default, name) != value
        assert getattr(changed, name) == value


def test_the_estimator_reaches_the_penalty() -> None:
    assert [IStarConfig(estimator=name).build().estimator for name in ("shrinkage", "unbiased")] == [
        "shrinkage", "unbiased"
    ]  # fmt: skip
