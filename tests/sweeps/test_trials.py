"""Which runs a sweep asks for, against products written out by hand and against Hydra's own composing."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hydra_plugins.istar_sweeper import IstarSweeper
from istar.config import schema
from istar.errors import UserError
from istar.sweeps.trials import combinations, identity, spaces, with_seed


def expand(arguments=(), params=None, grids=None, only=()):
    found = spaces(arguments, params or {}, grids or {}, only)
    return {name: combinations(space) for name, space in found.items()}


def test_all_combinations_as_hydra_has_them() -> None:
    arguments = [
        "task=rte,mrpc",
        "reg=istar",
        "reg.lambda=-5,-1",
        "reg.zeta=choice(0.2,0.4)",
        "seed=range(1,4)",
        "+a=[1,2]",
    ]
    expected = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(arguments), None)[0]
    [found] = expand(arguments).values()
    assert [list(overrides) for overrides in found] == expected
    assert len(found) == 2 * 2 * 2 * 3


def test_grids_stand_beside_each_other() -> None:
    grids = {"base": {"reg": "none"}, "istar": {"reg": "istar", "reg.lambda": "-1,1", "reg.zeta": [0.2, 0.4]}}
    found = expand(["seed=1"], {"optim.lr": "1e-5,3e-5"}, grids)
    assert found["base"] == [(f"optim.lr={lr}", "reg=none", "seed=1") for lr in ("1e-05", "3e-05")]
    product = set(itertools.product((-1.0, 1.0), (0.2, 0.4), (1e-5, 3e-5)))
    values = [dict(override.split("=") for override in overrides) for overrides in found["istar"]]
    assert {(float(v["reg.lambda"]), float(v["reg.zeta"]), float(v["optim.lr"])) for v in values} == product
    assert len(values) == len(product)
    assert list(expand(["seed=1"], {}, grids, ["istar"])) == ["istar"]


def test_the_command_line_replaces_what_it_names_and_only_there() -> None:
    grids = {"base": {"reg": "none"}, "istar": {"reg": "istar", "reg.zeta": "0.2,0.4"}}
    found = expand(["reg.zeta=0.6", "optim.lr=1", "task=rte,mrpc"], {"optim.lr": "2,3", "seed": 7}, grids)
    assert found["base"] == [("optim.lr=1", "seed=7", "reg=none", f"task={task}") for task in ("rte", "mrpc")]
    assert found["istar"] == [
        ("optim.lr=1", "seed=7", "reg=istar", "reg.zeta=0.6", f"task={task}") for task in ("rte", "mrpc")
    ]


def test_what_the_grids_differ_by_cannot_be_replaced() -> None:
    with pytest.raises(UserError, match=r"reg is what the grids .* sweep.only=\[base,istar\]"):
        spaces(["reg=cosreg"], {}, {"base": {"reg": "none"}, "istar": {"reg": "istar"}}, [])


def test_an_interval_is_no_grid() -> None:
    with pytest.raises(UserError, match=r"reg.lambda=interval\(-1,1\).*sweep.search=optuna"):
        expand(["reg.lambda=interval(-1,1)"])


def test_equal_combinations_are_one() -> None:
    assert expand(["seed=1,1,2"]) == {"": [("seed=1",), ("seed=2",)]}


def test_with_seed() -> None:
    assert with_seed(("seed=1", "reg=none"), 5) == ("reg=none", "seed=5")
    assert with_seed(("reg=none",), 5) == ("reg=none", "seed=5")


def test_the_same_sweep_is_found_again() -> None:
    def name(*arguments: str) -> str:
        return identity(spaces(arguments, {}, {}, []))

    assert name("seed=1,2", "sweep.jobs=2") == name("seed=1,2", "sweep.jobs=4", "sweep.fail_fast=true")
    assert name("seed=1,2", "run.root=a", "logger=wandb") == name("seed=1,2", "run.root=b")
    assert (
        len({name("seed=1,2"), name("seed=1,3"), name("seed=1,2", "task=rte"), name("+sweep=table1", "seed=1,2")}) == 4
    )


# ---- the shipped files

CONF = Path(__file__).resolve().parents[2] / "conf"
FILES = sorted(path.stem for path in (CONF / "sweep").glob("*.yaml"))


def test_there_is_a_file_for_each_artefact() -> None:
    figures = {f"figure{number}" for number in range(3, 9)}
    assert figures | {"table1", "table2", "zeta_ablation", "layer_ablation"} <= set(FILES)
    # Hydra chooses them in conf/, people look for them in sweep/.
    assert (CONF / "sweep").resolve() == CONF.parent / "sweep"


COUNTS = {
    "table1": 27 + 27 + 27 * 24, "table2": 27 * 24, "figure3": 35, "figure4": 3, "figure5": 5, "figure6": 3,
    "figure7": 30, "zeta_ablation": 30, "figure8": 65, "layer_ablation": 65,
}  # fmt: skip
"""As the paper has them: lambdas x zetas x batch sizes x learning rates x epochs, or values x seeds."""


@pytest.mark.parametrize("name", FILES)
def test_every_sweep_file_composes(name: str, sweeper_for: Callable[..., IstarSweeper]) -> None:
    sweeper = sweeper_for(f"+sweep={name}")
    assert sweeper.config.hydra.mode.name == "MULTIRUN"
    settings = schema.load_sweep(sweeper.config)
    assert settings.name == {"figure7": "zeta_ablation", "figure8": "layer_ablation"}.get(name, name)
    found = expand([f"+sweep={name}"], sweeper.params, settings.grids or {})
    assert sum(map(len, found.values())) == COUNTS[name]
    for grid in found.values():
        for overrides in (grid[0], grid[-1]):
            composed = sweeper.compose(overrides)
            schema.load(composed)
            # Faster than Hydra, but to the same end.
            whole = sweeper.hydra_context.config_loader.load_sweep_config(sweeper.config, list(overrides))
            expected = OmegaConf.to_container(whole)
            assert isinstance(expected, dict)
            assert OmegaConf.to_container(composed) == {key: expected[key] for key in expected if key != "hydra"}
