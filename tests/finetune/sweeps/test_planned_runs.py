import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from istar.errors import UserError
from istar.finetune.sweeps.planned_runs import SweepRuns, describe_sweep
from istar.finetune.sweeps.trials import replace_seed
from istar.records.config import schema
from istar.records.config.schema import to_dict
from istar.reports.plan_file import plan_test
from istar.statistics import ALPHA, POWER, TEST
from tests.finetune.sweeps.conftest import TINY, with_all_runs, with_grids

MakeRuns = Callable[..., SweepRuns]
SMALL = TINY[1:]


def describe(sweep: SweepRuns) -> dict[str, Any]:
    return describe_sweep(sweep.request, Console(quiet=True))


def test_the_runs_of_a_grid(make_runs: MakeRuns) -> None:
    sweep = make_runs("reg=none,cosreg", "optim.lr=1e-3,1e-4", "seed=1,2", *SMALL)
    fields = describe(sweep)
    runs = fields["runs"]
    assert [run["name"] for run in runs] == list(with_all_runs(sweep).trial_by_name)
    assert [(run["method"], run["seed"]) for run in runs] == [
        (method, seed) for method in ("Base", "CosReg λ=1") for _ in range(2) for seed in (1, 2)
    ]
    assert {(run["task"], run["model"]) for run in runs} == {("demo", "tiny")}
    assert (fields["trials"], fields["seeds_of_best"], fields["repetitions"]) == (None, [], [])
    assert fields["overrides_by_grid"][""][:2] == ["reg=none,cosreg", "optim.lr=1e-3,1e-4"]


def test_a_penalty_of_weight_0_is_base(make_runs: MakeRuns) -> None:
    fields = describe(make_runs("reg=none,istar", "reg.lambda=0,1", "seed=1,2", *SMALL))
    assert {run["method"] for run in fields["runs"]} == {"Base", "I-STAR λ=1 ζ=0.4"}
    assert plan_test(TEST, ALPHA, None, POWER, fields["runs"], fields["repetitions"])["comparisons"] == 1


def test_a_plan_has_no_smoke_runs(make_runs: MakeRuns) -> None:
    with pytest.raises(UserError, match="smoke runs are never counted"):
        describe(make_runs("seed=1,2", "trainer.fast_dev_run=true", *SMALL))


def test_settings_that_do_not_change_the_outcome_do_not_change_the_names(make_runs: MakeRuns) -> None:
    arguments = ("seed=1,2", *TINY[1:-2])
    names = [run["name"] for run in describe(make_runs(*arguments, *TINY[-2:]))["runs"]]
    others = ("trainer.accelerator=auto", "trainer.devices=1", "data.num_workers=2", "run.save_model=false")
    assert names == [run["name"] for run in describe(make_runs(*arguments, *others))["runs"]]
    assert names != [run["name"] for run in describe(make_runs(*arguments, "optim.lr=1e-2"))["runs"]]


@pytest.mark.parametrize(
    ("arguments", "num_runs", "note"),
    [
        (("reg=none,istar", "reg.lambda=-1,1"), 3, "4 combinations are 3 runs: reg=none ignores reg.lambda"),
        (
            ("reg=none,cosreg,istar", "reg.lambda=-1,1", "reg.zeta=0.2", "seed=1,2"),
            10,
            "12 combinations are 10 runs: reg=none ignores reg.lambda and reg.zeta, reg=cosreg ignores reg.zeta\n",
        ),
        (("reg=none,istar", "reg.zeta=0.2"), 2, "reg=none ignores reg.zeta"),
        (
            ("optim=adamw,sgd", "optim.eps=1e-6,1e-8", "optim.lr=1e-3"),
            3,
            "4 combinations are 3 runs: optim=torch ignores",
        ),
        (
            ("logger=csv,wandb", "logger.project=p,q", "seed=1,2"),
            2,
            "8 combinations are 2 runs: logger=csv ignores",
        ),
        (("reg=istar,istar_scratch", "reg.lambda=-1,1"), 4, ""),
    ],
)
def test_keys_that_an_option_lacks_have_no_effect_on_its_runs(
    make_runs: MakeRuns, arguments: tuple[str, ...], num_runs: int, note: str
) -> None:
    sweep = make_runs(*arguments, *SMALL)
    sweep.console = Console(file=io.StringIO(), width=1000)
    with_all_runs(sweep)
    printed = sweep.console.file.getvalue()  # type: ignore[attr-defined]
    assert len(sweep.state.entries) == len({entry.name for entry in sweep.state.entries}) == num_runs
    assert printed.startswith(note)
    assert printed.count("\n") == bool(note)
    # A launcher composes the configs of the runs from their overrides.
    for trial in sweep.trial_by_name.values():
        assert to_dict(sweep.compose_config(trial.overrides).reg) == to_dict(trial.config.reg)


def test_a_key_that_no_option_has_is_refused(make_runs: MakeRuns) -> None:
    for arguments in (("reg=none", "reg.lambda=-1,1"), ("reg=none,weight_decay", "reg.zeta=0,1")):
        with pytest.raises((HydraException, OmegaConfBaseException)) as error:
            with_all_runs(make_runs(*arguments, *SMALL))
        assert "which is not selected" in schema.explain(error.value)


@pytest.mark.parametrize("key", ["reg", "logger", "model", "trainer.max_epochs", "reg.name"])
def test_a_deleted_key_is_refused(make_runs: MakeRuns, key: str) -> None:
    with pytest.raises((UserError, HydraException, OmegaConfBaseException)) as error:
        with_all_runs(make_runs(f"~{key}", "seed=1,2", *(text for text in SMALL if key not in text)))
    message = str(error.value) if isinstance(error.value, UserError) else schema.explain(error.value)
    assert message == f"{key} is missing; give it on the command line: {key}=<value>"


def test_a_search_has_one_trial_for_the_combinations_that_are_the_same_run(make_runs: MakeRuns) -> None:
    sweep = make_runs("reg=none,istar", "reg.lambda=interval(-1,1)", "sweep.search=optuna", *SMALL)
    names = [sweep.run_name(("reg=none", f"reg.lambda={value}", *SMALL)) for value in (-0.5, 0.5)]
    assert names == [sweep.add_run(("reg=none", *SMALL)).name] * 2
    assert sweep.run_name(("reg=istar", "reg.lambda=0.5", *SMALL)) not in names


GRIDS = {
    "base": {"reg": "none"},
    "down": {"reg": "istar", "reg.lambda": -1},
    "up": {"reg": "istar", "reg.lambda": 1},
}


def test_repetitions_have_the_names_that_the_sweep_gives_them(make_runs: MakeRuns) -> None:
    """`sweep.seeds` repeats the best run of each task, model, method and grid, whichever run that is."""
    arguments = ("task=demo,demo_sentence", "optim.lr=1e-3,1e-4", "seed=1", *SMALL)
    sweep = with_grids(make_runs(*arguments), GRIDS, seeds=[1, 2])
    fields = describe(sweep)
    with_all_runs(sweep)
    groups = [(group["task"], group["model"], group["method"], group["grid"]) for group in fields["repetitions"]]
    assert sorted(groups) == sorted(set(map(sweep.selection_group, sweep.state.entries)))
    assert {group[3] for group in groups} == set(GRIDS)
    assert len(groups) == 2 * len(GRIDS)
    assert all(group["seeds"] == [2] for group in fields["repetitions"])
    assert fields["seeds_of_best"] == [1, 2]
    assert set(fields["overrides_by_grid"]) == set(GRIDS)
    # Two grids of the same penalty are two methods, each compared with base in each task.
    assert plan_test(TEST, ALPHA, None, POWER, fields["runs"], fields["repetitions"])["comparisons"] == 2 * 2
    names = {name for group in fields["repetitions"] for name in group["names"]}
    assert len(names) == len(sweep.trial_by_name)
    assert not names & set(sweep.trial_by_name)
    for entry in list(sweep.state.entries):
        assert sweep.run_name(replace_seed(tuple(entry.overrides), 2)) in names


def test_each_data_set_and_each_model_is_repeated(make_runs: MakeRuns, tmp_path: Path) -> None:
    """Only the best of two corpora, or of two models whose folders have the same last name, used to be repeated."""
    paths = [tmp_path / name for name in ("easy.txt", "hard.txt")]
    for path in paths:
        path.write_text("".join(f"{path.stem} {number}\n" for number in range(50)))
    arguments = (f"task.data_dir={','.join(map(str, paths))}", "task=clm", "model=tiny_decoder")
    sweep = with_all_runs(make_runs(*arguments, "reg=none,istar", "sweep.seeds=[1,2]", *SMALL))
    fields = describe(sweep)
    assert plan_test(TEST, ALPHA, None, POWER, fields["runs"], fields["repetitions"])["comparisons"] == 2
    assert {(entry.task, entry.model) for entry in sweep.state.entries} == {
        ("clm (easy.txt)", "tiny_decoder"), ("clm (hard.txt)", "tiny_decoder")
    }  # fmt: skip
    for entry in sweep.state.entries:
        entry.status, entry.value = "finished", 20.0
    repeated = sweep.list_repetitions_of_best()
    assert len(repeated) == 2 * 2 * 2
    for path in paths:
        assert sum(f"task.data_dir={path}" in overrides for overrides in repeated) == 4


def test_a_value_that_follows_the_seed(make_runs: MakeRuns) -> None:
    arguments = ("reg=random_direction", "reg.lambda=1", "reg.seed=${seed}", "seed=1", *SMALL)
    sweep = make_runs(*arguments)
    settings = replace(sweep.request.settings, seeds=[2])
    [group] = describe_sweep(replace(sweep.request, settings=settings), Console(quiet=True))["repetitions"]
    other_sweep = make_runs(*arguments[:2], "reg.seed=2", "seed=2", *SMALL)
    assert group["names"] == [run["name"] for run in describe(other_sweep)["runs"]]


def test_a_search_has_no_runs_yet(make_runs: MakeRuns) -> None:
    space = ("reg=istar_scratch", "reg.lambda=interval(-1,1)", "optim.lr=1e-3,1e-4", "seed=1")
    fields = describe(make_runs(*space, "sweep.search=optuna", "sweep.trials=7", *TINY))
    assert fields["overrides_by_grid"][""][: len(space)] == list(space)
    assert (fields["trials"], fields["runs"], fields["repetitions"]) == (7, [], [])


def test_secrets_are_not_written(make_runs: MakeRuns) -> None:
    fields = describe(make_runs("seed=1,2", "logger=wandb", "logger.tags=[postgresql://me:pass@host/db]", *SMALL))
    assert "pass" not in str(fields)


@pytest.mark.parametrize(
    ("arguments", "advice"), [(("seed=1,2",), r".*\(a plan identifies its runs"), (("sweep.search=optuna",), "")]
)
def test_runs_without_data_cannot_be_planned(
    make_runs: MakeRuns, tmp_path: Path, arguments: tuple[str, ...], advice: str
) -> None:
    with pytest.raises(UserError, match=f"does not exist{advice}"):
        describe(make_runs("task=rte", "model=tiny", f"task.data_dir={tmp_path / 'nowhere'}", *arguments))
