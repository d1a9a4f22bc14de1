"""The runs that a sweep lists, compared with hand-written products and with the configs that Hydra composes."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from hydra_plugins.istar_sweeper import IstarSweeper
from istar.errors import UserError
from istar.finetune.config import schema
from istar.finetune.config.options import sweep_folder
from istar.finetune.sweeps.trials import (
    allow_options_without_key,
    list_combinations,
    make_search_spaces,
    replace_seed,
    sweep_hash,
)


def expand(arguments=(), params=None, grids=None, only=()):
    space_by_grid = make_search_spaces(arguments, params or {}, grids or {}, only)
    return {name: list_combinations(space) for name, space in space_by_grid.items()}


def test_all_combinations_as_hydra_has_them() -> None:
    arguments = [
        "task=rte,mrpc", "reg=istar", "reg.lambda=-5,-1", "reg.zeta=choice(0.2,0.4)", "seed=range(1,4)", "+a=[1,2]",
    ]  # fmt: skip
    expected = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(arguments), None)[0]
    [combinations] = expand(arguments).values()
    assert [list(overrides) for overrides in combinations] == expected
    assert len(combinations) == 2 * 2 * 2 * 3
    assert expand(["seed=1,1,2"]) == {"": [("seed=1",), ("seed=2",)]}


def test_grids_stand_beside_each_other() -> None:
    grids = {"base": {"reg": "none"}, "istar": {"reg": "istar", "reg.lambda": "-1,1", "reg.zeta": [0.2, 0.4]}}
    combinations_by_grid = expand(["seed=1"], {"optim.lr": "1e-5,3e-5"}, grids)
    assert combinations_by_grid["base"] == [(f"optim.lr={lr}", "reg=none", "seed=1") for lr in ("1e-05", "3e-05")]
    product = set(itertools.product((-1.0, 1.0), (0.2, 0.4), (1e-5, 3e-5)))
    run_settings = [dict(override.split("=") for override in overrides) for overrides in combinations_by_grid["istar"]]
    assert {
        (float(settings["reg.lambda"]), float(settings["reg.zeta"]), float(settings["optim.lr"]))
        for settings in run_settings
    } == product
    assert len(run_settings) == len(product)
    assert list(expand(["seed=1"], {}, grids, ["istar"])) == ["istar"]


def test_the_command_line_replaces_what_it_names_and_only_there() -> None:
    grids = {"base": {"reg": "none"}, "istar": {"reg": "istar", "reg.zeta": "0.2,0.4"}}
    combinations_by_grid = expand(
        ["reg.zeta=0.6", "optim.lr=1", "task=rte,mrpc"], {"optim.lr": "2,3", "seed": 7}, grids
    )
    assert combinations_by_grid["base"] == [
        ("optim.lr=1", "seed=7", "reg=none", f"task={task}") for task in ("rte", "mrpc")
    ]
    assert combinations_by_grid["istar"] == [
        ("optim.lr=1", "seed=7", "reg=istar", "reg.zeta=0.6", f"task={task}") for task in ("rte", "mrpc")
    ]


def test_several_values_on_the_command_line_do_not_replace_a_single_one_of_a_grid() -> None:
    grids = {"cosreg": {"reg": "cosreg", "reg.lambda": 1}, "istar": {"reg": "istar", "reg.lambda": "-1,1"}}
    assert expand(["reg.lambda=-5,-3"], {}, grids) == {
        "cosreg": [("reg=cosreg", "reg.lambda=1")],
        "istar": [("reg=istar", "reg.lambda=-5"), ("reg=istar", "reg.lambda=-3")],
    }
    assert expand(["reg.lambda=3"], {}, grids)["cosreg"] == [("reg=cosreg", "reg.lambda=3")]


def test_what_the_grids_differ_by_cannot_be_replaced() -> None:
    with pytest.raises(UserError, match=r"reg is what the grids .* sweep.only=\[base,istar\]"):
        make_search_spaces(["reg=cosreg"], {}, {"base": {"reg": "none"}, "istar": {"reg": "istar"}}, [])


@pytest.mark.parametrize(
    "override",
    ["seed=range(3,1)", "reg.lambda=range(1.0,0.5)", "reg.lambda=range(0.5,1,-0.1)", "seed=shuffle(range(-3))",
     "optim.lr=interval(1e-3,1e-4)", "seed=int(interval(3,1))"],
)  # fmt: skip
def test_a_range_without_values_is_refused(override: str) -> None:
    message = f"{override} is empty; expected bounds in order, such as range(1,4) or interval(1,4)"
    for grids in ({}, {"base": {"reg": "none"}}):
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            make_search_spaces([override], {}, grids, [])
    for filled in ("seed=range(1,2)", "seed=range(3,1,-1)", "optim.lr=interval(1e-4,1e-3)", "seed=int(interval(1,1))"):
        make_search_spaces([filled], {}, {}, [])


def test_with_seed() -> None:
    assert replace_seed(("seed=1", "reg=none"), 5) == ("reg=none", "seed=5")
    assert replace_seed(("reg=none",), 5) == ("reg=none", "seed=5")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("reg=none,vicreg reg.gamma=2 optim.lr=1", "reg=none,vicreg reg.gamma=choice(2) optim.lr=1"),
        ("reg.layers=[1,2] reg=choice(none,istar)", "reg.layers=choice([1,2]) reg=choice(none,istar)"),
        ("reg=none,istar reg.lambda=-1,1 seed=1", "reg=none,istar reg.lambda=-1,1 seed=1"),
        ("reg=vicreg reg.gamma=2 reg.lambda=1,2", "reg=vicreg reg.gamma=2 reg.lambda=1,2"),
    ],
)
def test_values_of_a_group_that_is_swept_are_lists(arguments: str, expected: str) -> None:
    texts = allow_options_without_key(arguments.split())
    assert texts == expected.split()
    assert expand(texts) == expand(arguments.split())


def test_the_same_sweep_is_found_again() -> None:
    def compute_hash(*arguments: str) -> str:
        return sweep_hash(make_search_spaces(arguments, {}, {}, []))

    assert compute_hash("seed=1,2", "sweep.jobs=2") == compute_hash("seed=1,2", "sweep.jobs=4", "sweep.fail_fast=true")
    assert compute_hash("seed=1,2", "run.root=a", "logger=wandb") == compute_hash("seed=1,2", "run.root=b")
    others = ("seed=1,3",), ("seed=1,2", "task=rte"), ("+sweep=table1", "seed=1,2")
    assert len({compute_hash("seed=1,2"), *(compute_hash(*arguments) for arguments in others)}) == 4


# ---- the shipped files

CONF = Path(__file__).resolve().parents[3] / "conf"
# In a wheel the files are in conf/; in the repository they are in sweep/.
FILES = sorted(path.stem for path in sweep_folder().glob("*.yaml"))


SEARCH = {"data.batch_size": (8, 16, 32), "optim.lr": (1e-5, 3e-5, 5e-5), "trainer.max_epochs": (3, 4, 5)}
ISTAR = {"reg": ("istar",), "reg.lambda": (-5, -3, -1, 1, 3, 5), "reg.zeta": (0.2, 0.4, 0.6, 0.8), **SEARCH}
SEEDS = (1, 2, 3, 4, 5)
ZETAS = {"reg.zeta": (0, 0.2, 0.4, 0.6, 0.8, 1), "seed": SEEDS}
LAYERS = {"reg.layers": ([1], [2], [3], [4], [5], [6], [7], [8], [9], [10], [11], [12], "all"), "seed": SEEDS}
GRIDS = {
    "table1": {
        "base": {"reg": ("none",), **SEARCH},
        "cosreg": {"reg": ("cosreg",), "reg.lambda": (1,), **SEARCH},
        "istar": ISTAR,
    },
    "table2": {"": ISTAR},
    "figure3": {"": {"reg.lambda": (-5, -3, -1, 0.5, 1, 3, 5), "reg.zeta": (0.2,), "seed": SEEDS}},
    "figure4": {"base": {"reg": ("none",)}, "cosreg": {"reg": ("cosreg",), "reg.lambda": (-1, 1)}},
    "figure5": {"base": {"reg": ("none",)}, "istar": {"reg": ("istar",), "reg.lambda": (-5, -3, 3, 5)}},
    "figure6": {"base": {"reg": ("none",)}, "istar": {"reg": ("istar",), "reg.lambda": (-1, 1), "reg.zeta": (0.2,)}},
    "figure7": {"": ZETAS},
    "zeta_ablation": {"": ZETAS},
    "figure8": {"": LAYERS},
    "layer_ablation": {"": LAYERS},
}  # fmt: skip
"""The values of each grid as in the paper's Section 4, Appendices E to G and captions."""

FIXED = {
    "table1": {"seed": 1}, "table2": {"seed": 1}, "figure3": {"task.name": "rte", "reg.name": "istar"},
    "figure4": {"task.name": "qnli", "seed": 1}, "figure5": {"task.name": "sst2", "seed": 1},
    "figure6": {"task.name": "qnli", "seed": 1},
    "figure7": {"task.name": "rte", "reg.name": "istar", "reg.lambda": -1},
    "figure8": {"task.name": "cola", "reg.name": "istar", "reg.lambda": -1, "reg.zeta": 0.8},
}  # fmt: skip
FIXED |= {"zeta_ablation": FIXED["figure7"], "layer_ablation": FIXED["figure8"]}
"""Values common to all runs of a file. Lambda and zeta are those of Table 2, for all models or for BERT and ALBERT."""


@pytest.mark.parametrize("name", GRIDS)
def test_sweeps_have_the_values_of_the_paper(name: str, make_sweeper: Callable[..., IstarSweeper]) -> None:
    sweeper = make_sweeper(f"+sweep={name}")
    assert sweeper.config.hydra.mode.name == "MULTIRUN"
    settings = schema.load_sweep(sweeper.config)
    assert settings.name == {"figure7": "zeta_ablation", "figure8": "layer_ablation"}.get(name, name)
    assert tuple(settings.seeds) == (SEEDS if name == "table1" else ())
    for key, value in FIXED[name].items():
        assert OmegaConf.select(sweeper.config, key) == value
    combinations_by_grid = expand([], sweeper.params, settings.grids or {})
    assert combinations_by_grid.keys() == GRIDS[name].keys()
    for grid, values_by_key in GRIDS[name].items():
        expected_settings = [
            dict(zip(values_by_key, values, strict=True)) for values in itertools.product(*values_by_key.values())
        ]
        run_settings = [
            {key: yaml.safe_load(value) for key, value in (text.split("=") for text in overrides)}
            for overrides in combinations_by_grid[grid]
        ]
        assert sorted(map(format_settings, run_settings)) == sorted(map(format_settings, expected_settings))


def test_each_run_is_composed_from_its_own_overrides(make_sweeper: Callable[..., IstarSweeper]) -> None:
    sweeper = make_sweeper()
    interpolated = sweeper.compose(["seed=${trainer.max_epochs}", "trainer.max_epochs=7", "reg=cosreg"])
    assert (schema.load(interpolated).seed, interpolated.reg.name) == (7, "cosreg")
    for wrong in ("trainer.max_epochs=many", "reg.no_key=1", "trainer.checkpoints=maybe"):
        with pytest.raises(HydraException, match=re.escape(wrong)):
            sweeper.compose([wrong])
    plain = sweeper.compose([])
    assert (plain.seed, plain.trainer.max_epochs, plain.reg.name) == (sweeper.config.seed, 10, "istar")


def test_all_methods_of_the_sweep_of_penalties_have_equal_trials(make_sweeper: Callable[..., IstarSweeper]) -> None:
    """The experiment of the same name has the same runs as the sweep file."""
    sweepers = make_sweeper("+sweep=penalties"), make_sweeper("experiment=penalties", "task=mrpc")
    all_settings = [schema.load_sweep(sweeper.config) for sweeper in sweepers]
    assert [settings.seeds for settings in all_settings] == [list(range(1, 11))] * 2
    of_file, of_experiment = (
        expand([], sweeper.params, settings.grids or {})
        for sweeper, settings in zip(sweepers, all_settings, strict=True)
    )
    assert of_file == of_experiment
    assert [len(combinations) for combinations in of_file.values()] == [3] * 12


def format_settings(settings: dict[str, Any]) -> str:
    """Return a text that is equal for equal settings in any order. The rate is converted; YAML reads 1e-05 as text."""
    values_by_key = {key: float(value) if key == "optim.lr" else value for key, value in settings.items()}
    return repr(sorted((key, float(value) if type(value) is int else value) for key, value in values_by_key.items()))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_runs_of_every_sweep_file_compose(name: str, make_sweeper: Callable[..., IstarSweeper]) -> None:
    required = ["model.name=tiny", "model.pretrained=false"] if name == "finetune_own" else []
    sweeper = make_sweeper(f"+sweep={name}", *required)
    grids = schema.load_sweep(sweeper.config).grids or {}
    for combinations in expand([f"+sweep={name}", *required], sweeper.params, grids).values():
        for overrides in (combinations[0], combinations[-1]):
            schema.load(sweeper.compose(overrides))
