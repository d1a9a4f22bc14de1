"""The settings of a sweep, which are not part of a run."""

from typing import Any

import pytest

from istar.errors import UserError
from istar.finetune.config import SweepConfig


@pytest.mark.parametrize("value", [3, 1.5, None, True, "base", {"base": 1}, [None], [[1]], [1.5]])
@pytest.mark.parametrize("key", ["only", "seeds"])
def test_lists_with_values_of_a_wrong_type_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^sweep\.{key}=.*, e\.g\. \["):
        SweepConfig(**{key: value})
