import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from istar.errors import UserError
from istar.finetune.config import schema
from istar.finetune.config.schema import to_dict
from istar.finetune.sweeps.planned_runs import SweepRuns
from istar.finetune.sweeps.trials import replace_seed
from tests.finetune.sweeps.conftest import TINY, with_all_runs

MakeRuns = Callable[..., SweepRuns]
SMALL = TINY[1:]


def list_names(sweep: SweepRuns) -> list[str]:
    return list(with_all_runs(sweep).planned)


def test_the_runs_of_a_grid(make_runs: MakeRuns) -> None:
    entries = with_all_runs(make_runs("reg=none,cosreg", "optim.lr=1e-3,1e-4", "seed=1,2", *SMALL)).state.entries
    assert [(entry.method, entry.seed) for entry in entries] == [
        (method, seed) for method in ("Base", "CosReg λ=1") for _ in range(2) for seed in (1, 2)
    ]
    assert {(entry.task, entry.model) for entry in entries} == {("demo", "tiny")}


def test_settings_that_do_not_change_the_outcome_do_not_change_the_names(make_runs: MakeRuns) -> None:
    arguments = ("seed=1,2", *TINY[1:-2])
    names = list_names(make_runs(*arguments, *TINY[-2:]))
    others = ("trainer.accelerator=auto", "trainer.devices=1", "data.num_workers=2", "run.save_model=false")
    assert names == list_names(make_runs(*arguments, *others))
    assert names != list_names(make_runs(*arguments, "optim.lr=1e-2"))


@pytest.mark.parametrize(
    ("arguments", "num_runs", "note"),
    [
        (("reg=none,istar", "reg.lambda=-1,1"), 3, "4 combinations are 3 runs: reg=none ignores reg.lambda"),
        (("reg=none,cosreg,istar", "reg.lambda=-1,1", "reg.zeta=0.2", "seed=1,2"), 10,
         "12 combinations are 10 runs: reg=none ignores reg.lambda and reg.zeta, reg=cosreg ignores reg.zeta\n"),
        (("reg=none,istar", "reg.zeta=0.2"), 2, "reg=none ignores reg.zeta"),
        (("optim=adamw,sgd", "optim.eps=1e-6,1e-8", "optim.lr=1e-3"), 3, "4 combinations are 3 runs: optim=torch"),
        (("logger=csv,wandb", "logger.project=p,q", "seed=1,2"), 2, "8 combinations are 2 runs: logger=csv ignores"),
        (("reg=istar,istar_scratch", "reg.lambda=-1,1"), 4, ""),
    ],
)  # fmt: skip
def test_keys_of_other_options(make_runs: MakeRuns, arguments: tuple[str, ...], num_runs: int, note: str) -> None:
    sweep = make_runs(*arguments, *SMALL)
    sweep.console = Console(file=io.StringIO(), width=1000)
    with_all_runs(sweep)
    printed = sweep.console.file.getvalue()  # type: ignore[attr-defined]
    assert len(sweep.state.entries) == len({entry.name for entry in sweep.state.entries}) == num_runs
    assert printed.startswith(note)
    assert printed.count("\n") == bool(note)
    # A launcher composes the configs of the runs from their overrides.
    for run in sweep.planned.values():
        assert to_dict(sweep.compose_config(run.entry.overrides).reg) == to_dict(run.config.reg)


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


def test_each_data_set_and_each_model_is_repeated(make_runs: MakeRuns, tmp_path: Path) -> None:
    """Only the best of two corpora, or of two models whose folders have the same last name, used to be repeated."""
    paths = [tmp_path / name for name in ("easy.txt", "hard.txt")]
    for path in paths:
        path.write_text("".join(f"{path.stem} {number}\n" for number in range(50)))
    arguments = (f"task.data_dir={','.join(map(str, paths))}", "task=clm", "model=tiny_decoder")
    sweep = with_all_runs(make_runs(*arguments, "reg=none,istar", "sweep.seeds=[1,2]", *SMALL))
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
    [run] = with_all_runs(make_runs(*arguments)).planned.values()
    repeated = make_runs(*arguments).run_name(replace_seed(run.entry.overrides, 2))
    assert [repeated] == list_names(make_runs(*arguments[:2], "reg.seed=2", "seed=2", *SMALL))


def test_runs_with_other_tokenizers_are_no_repetitions(make_runs: MakeRuns, tmp_path: Path) -> None:
    """The live table used to show the mean over two tokenizers, and only the first of them was repeated."""
    tokenizers = [tmp_path / name for name in ("first", "second")]
    for path in tokenizers:
        path.mkdir()
        (path / "tokenizer.json").write_text(json.dumps(path.name))
    arguments = ("model=small_encoder", f"model.tokenizer={','.join(map(str, tokenizers))}", "seed=1,2", *SMALL)
    sweep = with_all_runs(make_runs(*arguments, "sweep.seeds=[1,2,3]"))
    for run in sweep.planned.values():
        run.entry.status, run.entry.value = "finished", 0.5
        run.entry.selection_merit = 0.5 + (run.config.model.tokenizer == str(tokenizers[1]))
    [best] = sweep.find_best_configurations()
    assert [entry.seed for entry in best] == [1, 2]
    assert all(f"model.tokenizer={tokenizers[1]}" in entry.overrides for entry in best)
    repeated = sweep.list_repetitions_of_best()
    assert len(repeated) == 3
    assert all(f"model.tokenizer={tokenizers[1]}" in overrides for overrides in repeated)


def test_a_run_whose_data_cannot_be_loaded_repeats_no_other(make_runs: MakeRuns, tmp_path: Path) -> None:
    arguments = ("task=rte", f"task.data_dir={tmp_path / 'nowhere'}", "seed=1,2", "reg.lambda=0,1", *SMALL)
    entries = with_all_runs(make_runs(*arguments)).state.entries
    assert {entry.status for entry in entries} == {"failed"}
    assert len({entry.configuration for entry in entries}) == len(entries) == 4
    assert [entry.method for entry in entries] == ["I-STAR"] * 4
