"""`istar plan` as it is called on the command line."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from istar.cli.main import main
from istar.finetune.runs.run import run
from istar.records import results
from istar.records.config import Config
from istar.reports import plan_file
from istar.reports.run_frame import read_runs
from istar.statistics import TEST
from tests.jobs import Start, starting

SMALL = ("task.limit_train=32", "task.limit_validation=9", "data.batch_size=8", "trainer.max_epochs=1",
         "trainer.accelerator=cpu", "trainer.progress_bar=false")  # fmt: skip
SWEEP = ("sweep=table1", "task=demo", "sweep.only=[base,cosreg]", "sweep.seeds=[1,2]", "optim.lr=1e-3,1e-5", *SMALL)


@pytest.fixture(autouse=True)
def work_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(own_cache: Path) -> Iterator[Start]:
    with starting(own_cache) as start:
        yield start


def find_departures(folder: Path) -> dict[str, plan_file.Departure]:
    """Return the departures by kind, except those that depend on the checkout or on chance in a short training."""
    plan = plan_file.read_plan(folder / "plan" / plan_file.PLAN)
    departures = plan_file.find_departures(plan, read_runs(folder / "runs").frame)
    departure_by_kind = {departure.kind: departure for departure in departures}
    return {kind: departure_by_kind[kind] for kind in departure_by_kind.keys() - {"other code", "collapsed run"}}


def test_a_sweep_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SWEEP, "--hypothesis", "CosReg lowers\nthe accuracy.", "--sd", "2", "--test", "t"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"plan/{plan_file.PLAN}: 6 runs"]
    assert printed.err == ""
    assert not (tmp_path / "runs").exists()
    plan = plan_file.read_plan(tmp_path / "plan" / plan_file.PLAN)
    assert plan.hypotheses == ["CosReg lowers the accuracy."]
    assert [(run["method"], run["seed"]) for run in plan.runs] == [("Base", 1), ("Base", 1)] + [("CosReg λ=1", 1)] * 2
    assert [(group["grid"], group["seeds"]) for group in plan.repetitions] == [("base", [2]), ("cosreg", [2])]
    assert (plan.test["comparisons"], plan.test["pairs"]) == (1, 2)
    assert plan.test["smallest_difference"] is not None
    assert plan.command.startswith("istar train -m +sweep=table1 task=demo ")


def test_runs_as_planned_and_otherwise(tmp_path: Path, composed: Callable[..., Config]) -> None:
    assert main(["plan", "reg=none", "seed=1", *SMALL]) == 0
    (tmp_path / "runs").mkdir()
    assert set(find_departures(tmp_path)) == {"missing run"}
    # The number of worker processes does not change the outcome, so that the run is the planned one.
    record = run(composed("reg=none", "seed=1", "data.num_workers=1", *SMALL))
    assert find_departures(tmp_path) == {}
    other_config = {**record.config, "optim": {**record.config["optim"], "lr": 1e-4}}
    other_record = replace(record, name="other", config=other_config)
    shutil.copytree(tmp_path / "runs" / record.name, tmp_path / "runs" / "other")
    results.write_result(other_record, tmp_path / "runs" / "other")
    departure_by_kind = find_departures(tmp_path)
    assert set(departure_by_kind) == {"run that was not planned"}
    assert departure_by_kind["run that was not planned"].runs == (other_record.name,)
    assert main(["plan", "reg=none", "seed=1", *SMALL, "--force"]) == 0
    assert set(find_departures(tmp_path)) >= {"run that was not planned", "replaced plan"}


@pytest.mark.slow
def test_a_sweep_runs_as_planned(tmp_path: Path, start: Start) -> None:
    assert main(["plan", *SWEEP]) == 0
    start(tmp_path, "-m", "+sweep=table1", *SWEEP[1:], "sweep.jobs=2").wait().well()
    assert find_departures(tmp_path) == {}
    overrides = ("sweep.only=[base]", "sweep.seeds=[]", "optim.lr=1e-3", "seed=7")
    start(tmp_path, "-m", "+sweep=table1", "task=demo", *SMALL, *overrides).wait().well()
    departure_by_kind = find_departures(tmp_path)
    assert set(departure_by_kind) == {"run that was not planned"}
    assert departure_by_kind["run that was not planned"].where == "demo, tiny, Base"


def test_a_sweep_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "reg=none,istar", "seed=1,2,3", *SMALL, "--out", "here"]) == 0
    plan = plan_file.read_plan(tmp_path / "here" / plan_file.PLAN)
    assert (plan.hypotheses, plan.repetitions, plan.trials) == ([], [], None)
    assert plan.test["name"] == TEST
    assert [run["seed"] for run in plan.runs] == [1, 2, 3] * 2
    assert (plan.test["comparisons"], plan.test["pairs"], plan.num_runs) == (1, 3, 6)
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: with so few seeds, the sign-flip test gives no p-value below 0.25;")
    assert HydraConfig.instance().cfg is None


def test_a_search_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = ("reg=istar", "reg.lambda=interval(-1,1)", "sweep.search=optuna", "sweep.trials=7")
    assert main(["plan", *search, *SMALL, "--test", "sign-flip"]) == 0
    assert capsys.readouterr() == (f"plan/{plan_file.PLAN}: 7 runs\n", "")
    plan = plan_file.read_plan(tmp_path / "plan" / plan_file.PLAN)
    assert (plan.trials, plan.runs, plan.test["comparisons"]) == (7, [], 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sweep=tabel1",), "sweep=tabel1: there is no such option; did you mean table1?"),
        (("reg.lamda=1,2",), "did you mean reg.lambda?"),
        (("seed=1,,2",), "not understood"),
        (("reg=istar", "reg.lambda=interval(-1,1)"), "an interval is for sweep.search=optuna"),
        (("seed=1,2", "--hypothesis", " "), "--hypothesis is empty; expected a sentence"),
        (("seed=1,2", "--alpha", "5"), "alpha is 5.0"),
        (("seed=1,2", "--sd", "0"), "the standard deviation of the differences is 0.0"),
        (("seed=1,2", "--out", "file"), "--out file is not a folder"),
        (("seed=1,2", "--out", "earlier"), "earlier/plan.yaml exists; name another folder with --out"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / plan_file.PLAN).write_text("mine")
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert printed.out == ""
    assert not (tmp_path / "plan").exists()
    assert (tmp_path / "earlier" / plan_file.PLAN).read_text() == "mine"
