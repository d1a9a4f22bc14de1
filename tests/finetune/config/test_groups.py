"""The rules of a config that concern several groups, and the keys that are refused before Hydra composes it."""

from collections.abc import Callable

import pytest

from istar.errors import UserError
from istar.finetune.config import Config
from istar.finetune.config.groups import check_keys


@pytest.mark.parametrize(
    "override", ["optim.lrr=1", "optim.beta=1", "+data.bach_size=3", "++task.limit_trian=3", "run.rot="]
)
def test_misspelt_keys_that_are_refused_before_torch_is_imported(override: str) -> None:
    with pytest.raises(UserError, match=r"^\w+\.\w+: there is no such key; did you mean \w+\.\w+\?; `istar train"):
        check_keys([override])


def test_keys_that_are_left_to_hydra() -> None:
    """Among them are known keys, keys of groups with further keys or options, and the keys of a dictionary."""
    check_keys(["optim.lr=1", "trainer.max_epoch=3", "reg.lamda=1", "logger.projct=x", "model.config.hiden=3", "-m"])
    check_keys(["optim.arguments.momentum=0.9", "optim.arguments={}", "optim.betas=[0.9,0.9]", "optim.arguments.lrr=1"])
    check_keys(["run.zeta=1", "optim.refresh_every_n_steps=3", "sed=3", "~optim.lrr=1", "optim.lrr", "hydra.rn.dir=x"])


def test_a_quick_run_is_a_smoke_run(composed: Callable[..., Config]) -> None:
    assert not composed().is_smoke
    assert composed("debug=smoke").is_smoke
    assert composed("trainer.fast_dev_run=true").is_smoke
