"""`istar plan` as it is called on the command line."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig

from istar.cli.main import main
from istar.config import Config
from istar.config.schema import sweep_folder
from istar.reports import plan_departures, plan_file
from istar.reports.run_frame import load_runs
from istar.runs.run import run
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


def find_departures(folder: Path) -> dict[str, plan_departures.Departure]:
    """Return the departures by kind, except those that depend on the checkout or on chance in a short training."""
    plan = plan_file.read(folder / "plan" / plan_file.PLAN)
    departures = plan_departures.departures(plan, load_runs(folder / "runs").frame)
    departure_by_kind = {departure.kind: departure for departure in departures}
    return {kind: departure_by_kind[kind] for kind in departure_by_kind.keys() - {"other code", "collapsed run"}}


def test_a_sweep_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SWEEP, "--hypothesis", "CosReg lowers\nthe accuracy.", "--sd", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"plan/{plan_file.PLAN}: 6 runs, and {plan_file.TEXT} beside it"]
    assert not (tmp_path / "runs").exists()
    fields = yaml.safe_load((tmp_path / "plan" / plan_file.PLAN).read_text(encoding="utf-8"))
    assert fields["hypotheses"] == ["CosReg lowers the accuracy."]
    assert fields["budget"] == {"runs": 6, "epochs": 6, "training_examples": 192, "finished_before": 0}
    assert [entry["method"] for entry in fields["methods"]] == ["Base (grid base)", "CosReg (grid cosreg)"]
    assert all(entry["grid"] == {"optim.lr": [1e-3, 1e-5]} for entry in fields["methods"])
    assert (fields["test"]["comparisons"], fields["test"]["pairs"]) == (1, 2)
    assert "+sweep=table1" in fields["train_command"]


def test_each_grid_of_a_sweep_is_a_method(tmp_path: Path) -> None:
    sweep = yaml.safe_load((sweep_folder() / "penalties.yaml").read_text(encoding="utf-8"))["sweep"]
    assert main(["plan", "sweep=penalties", "task=demo", "model=tiny", *SMALL]) == 0
    fields = yaml.safe_load((tmp_path / "plan" / plan_file.PLAN).read_text(encoding="utf-8"))
    assert len(fields["methods"]) == len(sweep["grids"])
    assert all(entry["configurations"] == 3 for entry in fields["methods"])
    assert (fields["test"]["comparisons"], fields["test"]["pairs"]) == (len(sweep["grids"]) - 1, len(sweep["seeds"]))
    assert fields["budget"]["runs"] == len(sweep["grids"]) * (3 + len(sweep["seeds"]) - 1)
    assert "Of each task, model, method and grid, " in fields["selection"]
    assert all(f"(grid {name})" in (tmp_path / "plan" / plan_file.TEXT).read_text() for name in sweep["grids"])


def test_runs_as_planned_and_otherwise(tmp_path: Path, composed: Callable[..., Config]) -> None:
    assert main(["plan", "reg=none", "seed=1,2", *SMALL]) == 0
    assert set(find_departures_without_runs(tmp_path)) == {"missing run"}
    for seed in (1, 2):
        run(composed("reg=none", f"seed={seed}", *SMALL))
    assert find_departures(tmp_path) == {}
    run(composed("reg=none", "seed=7", "optim.lr=1e-4", *SMALL))
    departure_by_kind = find_departures(tmp_path)
    assert set(departure_by_kind) == {"changed setting", "seed that was not planned", "number of trials"}
    assert (departure_by_kind["changed setting"].planned, departure_by_kind["changed setting"].actual) == (
        "optim.lr=0.001",
        "optim.lr=0.0001",
    )
    # The runs are finished before this plan is written, and the plan counts them.
    assert main(["plan", "reg=none", "seed=1,2", *SMALL, "--force"]) == 0
    fields = yaml.safe_load((tmp_path / "plan" / plan_file.PLAN).read_text(encoding="utf-8"))
    assert fields["budget"]["finished_before"] == 2
    assert len(fields["replaces"]) == 1


def find_departures_without_runs(folder: Path) -> dict[str, plan_departures.Departure]:
    (folder / "runs").mkdir()
    return find_departures(folder)


@pytest.mark.slow
def test_a_sweep_runs_as_planned(tmp_path: Path, start: Start) -> None:
    assert main(["plan", *SWEEP]) == 0
    start(tmp_path, "-m", "+sweep=table1", *SWEEP[1:], "sweep.jobs=2").wait().well()
    assert find_departures(tmp_path) == {}
    overrides = ("sweep.only=[base]", "sweep.seeds=[]", "optim.lr=1e-4", "seed=7")
    start(tmp_path, "-m", "+sweep=table1", "task=demo", *SMALL, *overrides).wait().well()
    departure_by_kind = find_departures(tmp_path)
    assert set(departure_by_kind) == {
        "changed setting",
        "seed that was not planned",
        "number of trials",
        "unequal seeds",
    }
    assert departure_by_kind["changed setting"].planned == "optim.lr=0.001, 1e-05"
    assert departure_by_kind["changed setting"].actual == "optim.lr=0.0001"


def test_a_sweep_without_a_file(tmp_path: Path) -> None:
    assert main(["plan", "reg=none,istar", "seed=1,2,3", *SMALL, "--out", "here", "--test", "sign-flip"]) == 0
    fields = yaml.safe_load((tmp_path / "here" / plan_file.PLAN).read_text(encoding="utf-8"))
    assert fields["hypotheses_generated"]
    assert fields["hypotheses"] == [
        "I-STAR changes the accuracy on demo compared with Base over the same seeds (tiny)."
    ]
    assert fields["test"]["name"] == "paired sign-flip test"
    assert [entry["seeds"] for entry in fields["configurations"]] == [[1, 2, 3]] * 2
    assert (fields["test"]["comparisons"], fields["test"]["pairs"], fields["budget"]["runs"]) == (1, 3, 6)
    assert HydraConfig.instance().cfg is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sweep=tabel1",), "sweep=tabel1: there is no such option; did you mean table1?"),
        (("task=rtee",), "did you mean rte?"),
        (("reg.lamda=1,2",), "did you mean reg.lambda?"),
        (("reg.zeta=2,3",), "reg.zeta=2 is outside [0, 1]"),
        (("seed=1,,2",), "not understood"),
        (("reg=istar", "reg.lambda=interval(-1,1)"), "an interval is for sweep.search=optuna"),
        (("task=rte", "model=tiny", "task.data_dir=/nowhere"), "task.data_dir=/nowhere does not exist"),
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
