import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from istar.reports import plan_file
from istar.reports.plan_departures import Departure, build_departures_sheet, departures, summarize_departures
from istar.reports.plan_file import Plan
from istar.reports.run_frame import load_runs, record_to_row
from istar.results import RunRecord
from tests.reports.plans import COMMIT, EARLIER, LATER, WRITTEN, make_plan_fields, merge_configurations, run
from tests.reports.synthetic import BASE, cosreg, istar, save

SEEDS = (1, 2, 3)
RUNS = [run("rte", reg, seed) for reg in (BASE, istar(-1), istar(-3)) for seed in SEEDS]


def make_frame(runs: Sequence[RunRecord]) -> pd.DataFrame:
    return pd.DataFrame([{"folder": run.name, **record_to_row(run)} for run in runs])


def write_plan(runs: Sequence[RunRecord], folder: Path, **sweep: Any) -> Plan:
    return plan_file.read(plan_file.write(merge_configurations(make_plan_fields(runs, **sweep)), folder))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return write_plan(RUNS, tmp_path)


def find_departures_by_kind(plan: Plan, runs: Sequence[RunRecord]) -> dict[str, Departure]:
    """Return the departures of the runs from the plan by their kinds, each of which must occur only once."""
    result = departures(plan, make_frame(runs))
    assert len({departure.kind for departure in result}) == len(result), result
    return {departure.kind: departure for departure in result}


def test_runs_as_planned_are_no_departure(plan: Plan) -> None:
    assert departures(plan, make_frame(RUNS)) == []
    assert build_departures_sheet([]).rows == []
    assert summarize_departures(plan, []).endswith("The runs do not depart from it.")
    # Other paths are no departure.
    moved_runs = [run("rte", BASE, 1, name=RUNS[0].name, task__data_dir="/d", run__root="/r"), *RUNS[1:]]
    assert departures(plan, make_frame(moved_runs)) == []


def test_runs_as_folders(plan: Plan, tmp_path: Path) -> None:
    for record in RUNS:
        save(record, tmp_path / "runs", geometry=False)
    assert departures(plan, load_runs(tmp_path / "runs").frame) == []


def test_missing_runs(plan: Plan) -> None:
    result = find_departures_by_kind(plan, RUNS[:4] + RUNS[6:])
    missing = result["missing run"]
    assert (missing.where, missing.planned) == ("rte, mine, I-STAR", "6 runs")
    assert missing.actual == "4 runs; missing: seeds 2, 3"
    assert set(missing.runs) == {RUNS[4].name, RUNS[5].name}
    assert set(result) == {"missing run"}


def test_seeds_that_differ_between_methods(plan: Plan) -> None:
    result = find_departures_by_kind(plan, RUNS[:2] + RUNS[3:])
    assert set(result) == {"missing run", "unequal seeds"}
    assert result["unequal seeds"].actual == "Base: 1, 2; I-STAR: 1, 2, 3"
    assert result["unequal seeds"].planned == "seeds 1, 2, 3 of each method"


@pytest.mark.parametrize(
    ("more", "kind", "planned", "actual"),
    [
        (run("cola", BASE, 1), "task that was not planned", "rte", "cola"),
        (run("rte", BASE, 1, model="org/other"), "model that was not planned", "mine", "other"),
        (run("rte", cosreg(), 1), "method that was not planned", "Base, I-STAR", "CosReg"),
        (run("rte", BASE, 7), "seed that was not planned", "seeds 1, 2, 3", "seed 7"),
    ],
)
def test_runs_that_were_not_planned(plan: Plan, more: RunRecord, kind: str, planned: str, actual: str) -> None:
    result = find_departures_by_kind(plan, [*RUNS, more])
    departure = result.pop(kind)
    assert (departure.planned, departure.actual, departure.runs) == (planned, actual, (more.name,))
    # A further seed of only one method makes the seeds unequal, too.
    assert set(result) == ({"unequal seeds"} if kind.startswith("seed") else set())


@pytest.mark.parametrize(
    ("reg", "changes", "planned", "actual"),
    [
        (BASE, {"optim__lr": 5e-5}, "optim.lr=3e-05", "optim.lr=5e-05"),
        (BASE, {"trainer__max_steps": 9}, "trainer.max_steps=not set", "trainer.max_steps=9"),
        (istar(-5), {}, "reg.lambda=-1, -3", "reg.lambda=-5"),
        (istar(-1, 0.8), {}, "reg.zeta=0.4", "reg.zeta=0.8"),
        (istar(-1, layers=[2]), {}, "reg.layers=all", "reg.layers=[2]"),
        (BASE, {"task__limit_train": 10, "data": "less"}, "task.limit_train=not set", "task.limit_train=10"),
    ],
)
def test_changed_settings(plan: Plan, reg: dict, changes: dict, planned: str, actual: str) -> None:
    changed_runs = [run("rte", reg, seed, **changes) for seed in SEEDS]
    result = find_departures_by_kind(plan, [*RUNS, *changed_runs])
    assert set(result) - {"other data"} == {"changed setting", "number of trials"}
    departure = result["changed setting"]
    assert (departure.planned, departure.actual) == (planned, actual)
    assert departure.runs == tuple(record.name for record in changed_runs)
    num_planned, num_actual = (1, 2) if reg == BASE else (2, 3)
    assert result["number of trials"].planned == f"{num_planned} configuration{'s' * (num_planned > 1)}"
    assert result["number of trials"].actual == f"{num_actual} configurations"


def test_a_combination_that_was_not_planned(tmp_path: Path) -> None:
    planned = [run("rte", istar(-1), 1, optim__lr=1e-5), run("rte", istar(-3), 1, optim__lr=5e-5)]
    result = find_departures_by_kind(
        write_plan(planned, tmp_path), [*planned, run("rte", istar(-1), 1, optim__lr=5e-5)]
    )
    departure = result["changed setting"]
    assert (departure.planned, departure.actual) in {
        ("optim.lr=1e-05 with its other settings", "optim.lr=5e-05"),
        ("reg.lambda=-3 with its other settings", "reg.lambda=-1"),
    }


def test_other_data_and_other_weights(plan: Plan) -> None:
    other_data = run("rte", BASE, 1, data="new", name="renamed")
    result = find_departures_by_kind(plan, [other_data, *RUNS[1:]])
    assert set(result) == {"other data"}
    assert (result["other data"].planned, result["other data"].actual) == ("fingerprint data-rte", "fingerprint new")
    result = find_departures_by_kind(plan, [replace(RUNS[0], name="renamed"), *RUNS[1:]])
    assert set(result) == {"other model"}
    assert result["other model"].planned == f"run {RUNS[0].name}"


@pytest.mark.parametrize("status", ["failed", "unfinished", "pruned"])
def test_runs_without_a_result(tmp_path: Path, status: str) -> None:
    plan = write_plan(RUNS, tmp_path)
    run_without_result = replace(RUNS[0], status=status, error="loss is NaN" if status == "failed" else None)
    result = departures(plan, make_frame([run_without_result, *RUNS[1:]]))
    [departure] = [departure for departure in result if departure.kind == f"{status} run"]
    assert departure.where == "rte, mine, Base"
    assert departure.runs == (RUNS[0].name,)
    assert departure.actual == ("loss is NaN" if status == "failed" else status)
    assert "missing run" not in {departure.kind for departure in result}


def test_a_planned_pruner_may_prune(tmp_path: Path) -> None:
    plan = write_plan(RUNS, tmp_path, pruner="asha")
    pruned = [replace(record, status="pruned") for record in RUNS]
    assert departures(plan, make_frame(pruned)) == []


def test_collapsed_runs(plan: Plan) -> None:
    result = find_departures_by_kind(plan, [replace(RUNS[0], collapsed={"validation": True}), *RUNS[1:]])
    assert set(result) == {"collapsed run"}
    assert result["collapsed run"].runs == (RUNS[0].name,)


def test_another_version_or_commit(plan: Plan) -> None:
    result = find_departures_by_kind(
        plan, [replace(RUNS[0], versions={"istar": "2.0"}), replace(RUNS[1], code_commit="d00d"), *RUNS[2:]]
    )
    assert set(result) == {"other version of istar", "other code"}
    version, code = result["other version of istar"], result["other code"]
    assert (version.planned, version.actual, version.runs) == ("1.0", "2.0", (RUNS[0].name,))
    assert (code.planned, code.actual, code.runs) == (f"commit {COMMIT}", "commit d00d", (RUNS[1].name,))
    result = find_departures_by_kind(plan, [replace(RUNS[0], code_modified=True), *RUNS[1:]])
    assert result["other code"].actual == f"commit {COMMIT}, with changes that are not committed"


@pytest.mark.parametrize(("began", "is_early"), [(EARLIER, True), (WRITTEN, False), (LATER, False)])
def test_runs_that_began_before_the_plan(plan: Plan, began: str, is_early: bool) -> None:
    result = find_departures_by_kind(plan, [replace(RUNS[0], timing={"total": 1.0, "began": began}), *RUNS[1:]])
    assert set(result) == ({"run before the plan"} if is_early else set())
    # The same moment is written with another time zone.
    shifted = began.replace("T11:", "T13:").replace("T12:", "T14:").replace("+00:00", "+02:00")
    result = find_departures_by_kind(plan, [replace(RUNS[0], timing={"total": 1.0, "began": shifted}), *RUNS[1:]])
    assert set(result) == ({"run before the plan"} if is_early else set())


@pytest.mark.parametrize("began", [None, "2026-03-01T12:00:01", "then"])
def test_an_unknown_beginning_is_no_run_as_planned(plan: Plan, began: str | None) -> None:
    result = find_departures_by_kind(plan, [replace(RUNS[0], timing={"total": 1.0, "began": began}), *RUNS[1:]])
    assert set(result) == {"unknown beginning"}


def test_an_edited_plan(plan: Plan) -> None:
    assert set(find_departures_by_kind(replace(plan, is_edited=True), RUNS)) == {"edited plan"}


class TestTheBestIsRepeated:
    """A sweep that repeats the best configuration of each method with more seeds."""

    tried_runs = (
        run("rte", BASE, 1, 0.6),
        run("rte", BASE, 1, 0.7, optim__lr=1e-5),
        run("rte", istar(), 1, 0.8),
        run("rte", istar(), 1, 0.5, optim__lr=1e-5),
    )
    repeated_runs = (
        *(run("rte", BASE, seed, 0.7, optim__lr=1e-5) for seed in (2, 3)),
        *(run("rte", istar(), seed, 0.8) for seed in (2, 3)),
    )

    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        return write_plan(self.tried_runs, tmp_path, seeds_of_best=[1, 2, 3])

    def test_as_planned(self, plan: Plan) -> None:
        assert departures(plan, make_frame([*self.tried_runs, *self.repeated_runs])) == []

    def test_repetitions_are_missing(self, plan: Plan) -> None:
        result = find_departures_by_kind(plan, [*self.tried_runs, *self.repeated_runs[:3]])
        assert set(result) == {"missing run", "unequal seeds"}
        assert result["missing run"].where == "rte, mine, I-STAR"
        assert result["missing run"].planned == "the best configuration with seeds 1, 2, 3"
        assert result["missing run"].actual == "without seed 3"

    def test_four_consecutive_seeds_are_a_range(self, tmp_path: Path) -> None:
        plan = write_plan(self.tried_runs, tmp_path, seeds_of_best=[8, 4, 3, 2, 1])
        base, penalty = departures(plan, make_frame(self.tried_runs))
        assert base.planned == penalty.planned == "the best configuration with seeds 1 to 4, 8"
        assert base.actual == penalty.actual == "without seeds 2, 3, 4, 8"

    def test_another_one_than_the_best(self, plan: Plan) -> None:
        worse_runs = [run("rte", istar(), seed, 0.5, optim__lr=1e-5) for seed in (2, 3)]
        result = find_departures_by_kind(plan, [*self.tried_runs, *self.repeated_runs[:2], *worse_runs])
        assert set(result) == {"repeated configurations"}
        departure = result["repeated configurations"]
        assert departure.planned == "the best: optim.lr=3e-05"
        assert departure.actual == "another one: optim.lr=1e-05"

    def test_lower_is_better_for_a_loss(self, tmp_path: Path) -> None:
        tried_runs = [run("clm", BASE, 1, 30.0), run("clm", BASE, 1, 20.0, optim__lr=1e-5)]
        repeated_runs = [run("clm", BASE, 2, 21.0, optim__lr=1e-5)]
        plan = write_plan(tried_runs, tmp_path, seeds_of_best=[1, 2])
        assert departures(plan, make_frame([*tried_runs, *repeated_runs])) == []

    def test_two_are_repeated(self, plan: Plan) -> None:
        other_repetition = [run("rte", istar(), 2, 0.5, optim__lr=1e-5)]
        result = departures(plan, make_frame([*self.tried_runs, *self.repeated_runs, *other_repetition]))
        assert {departure.kind for departure in result} == {"repeated configurations"}
        assert result[0].actual == "2 configurations with these seeds"


class TestNamedGrids:
    """A sweep with a grid for each sign of λ, which repeats the best configuration of each grid."""

    GRIDS = ("base", "base", "down", "down", "up", "up")
    tried_runs = tuple(
        run("rte", reg, 1, value, optim__lr=rate)
        for reg, values in ((BASE, (0.6, 0.7)), (istar(-1), (0.8, 0.5)), (istar(1), (0.55, 0.65)))
        for value, rate in zip(values, (3e-5, 1e-5), strict=True)
    )
    repeated_runs = tuple(
        run("rte", reg, seed, 0.7, optim__lr=rate)
        for reg, rate in ((BASE, 1e-5), (istar(-1), 3e-5), (istar(1), 1e-5))
        for seed in (2, 3)
    )

    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        return plan_file.read(
            plan_file.write(
                merge_configurations(make_plan_fields(self.tried_runs, self.GRIDS, seeds_of_best=[1, 2, 3])), tmp_path
            )
        )

    def test_as_planned(self, plan: Plan) -> None:
        assert departures(plan, make_frame([*self.tried_runs, *self.repeated_runs])) == []

    def test_repetitions_are_missing(self, plan: Plan) -> None:
        result = find_departures_by_kind(plan, [*self.tried_runs, *self.repeated_runs[:-1]])
        assert set(result) == {"missing run", "unequal seeds"}
        assert result["missing run"].where == "rte, mine, I-STAR (grid up)"
        assert result["missing run"].actual == "without seed 3"
        assert result["unequal seeds"].actual == (
            "Base (grid base): 1, 2, 3; I-STAR (grid down): 1, 2, 3; I-STAR (grid up): 1, 2"
        )

    def test_four_consecutive_seeds_are_a_range(self, tmp_path: Path) -> None:
        plan = write_plan(self.tried_runs, tmp_path, seeds_of_best=[8, 4, 3, 2, 1])
        base, penalty = departures(plan, make_frame(self.tried_runs))
        assert base.planned == penalty.planned == "the best configuration with seeds 1 to 4, 8"
        assert base.actual == penalty.actual == "without seeds 2, 3, 4, 8"

    def test_another_one_than_the_best(self, plan: Plan) -> None:
        worse_runs = [run("rte", istar(1), seed, 0.7, optim__lr=3e-5) for seed in (2, 3)]
        [departure] = departures(plan, make_frame([*self.tried_runs, *self.repeated_runs[:-2], *worse_runs]))
        assert (departure.kind, departure.where) == ("repeated configurations", "rte, mine, I-STAR (grid up)")
        assert departure.planned == "the best: optim.lr=1e-05"
        assert departure.actual == "another one: optim.lr=3e-05"

    def test_the_grid_of_a_setting_that_was_not_planned(self, plan: Plan) -> None:
        """The grid is that of the nearest planned configuration."""
        changed_run = run("rte", istar(1), 1, optim__lr=2e-5)
        result = find_departures_by_kind(plan, [*self.tried_runs, *self.repeated_runs, changed_run])
        assert set(result) == {"changed setting", "number of trials"}
        assert {departure.where for departure in result.values()} == {"rte, mine, I-STAR (grid up)"}
        assert result["changed setting"].planned == "optim.lr=3e-05, 1e-05"
        assert result["number of trials"].planned == "2 configurations"
        assert result["number of trials"].actual == "3 configurations"

    def test_a_run_without_a_result_is_one_of_its_grid(self, plan: Plan) -> None:
        failed_run = replace(self.repeated_runs[-1], status="failed", error="loss is NaN")
        result = find_departures_by_kind(plan, [*self.tried_runs, *self.repeated_runs[:-1], failed_run])
        assert result["failed run"].where == "rte, mine, I-STAR (grid up)"


class TestSearch:
    """A search chooses values from lists and intervals, so that a plan cannot name its runs."""

    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        fields = merge_configurations(make_plan_fields([run("rte", istar(), 1)], search="optuna", trials=2))
        [entry] = fields["configurations"]
        for key in ("reg.lambda", "optim.lr"):
            fields["settings"].pop(key, None)
        entry["ranges"] = {"reg.lambda": {"low": -5.0, "high": 5.0}, "optim.lr": [1e-5, 3e-5]}
        entry["names"] = []
        return plan_file.read(plan_file.write(fields, tmp_path))

    def test_as_planned(self, plan: Plan) -> None:
        trials = [run("rte", istar(-5.0), 1), run("rte", istar(4.9), 1, optim__lr=1e-5)]
        assert departures(plan, make_frame(trials)) == []

    def test_other_values_and_another_number(self, plan: Plan) -> None:
        trials = [run("rte", istar(-5.1), 1), run("rte", istar(1), 1, optim__lr=2e-5), run("rte", istar(2), 1)]
        result = departures(plan, make_frame(trials))
        changed_settings = {
            (departure.planned, departure.actual) for departure in result if departure.kind == "changed setting"
        }
        assert changed_settings == {
            ("reg.lambda=-5 to 5", "reg.lambda=-5.1"),
            ("optim.lr=1e-05, 3e-05", "optim.lr=2e-05"),
        }
        [trials_departure] = [departure for departure in result if departure.kind == "number of trials"]
        assert (trials_departure.planned, trials_departure.actual) == ("2 trials", "3 trials")


def test_the_table(plan: Plan) -> None:
    result = departures(plan, make_frame([replace(record, code_commit="d00d") for record in RUNS]))
    sheet = build_departures_sheet(result)
    [entries] = sheet.rows
    assert len(entries) == len(sheet.header)
    assert entries[4].text == str(len(RUNS))
    assert re.search(r" and 6 more$", entries[5].text)
    assert sheet.frame["runs"].iloc[0].split() == [record.name for record in RUNS]
    assert summarize_departures(plan, result).endswith("There is one departure from it.")
    assert summarize_departures(plan, result * 2).endswith("There are 2 departures from it.")
    text_of_replaced_plan = summarize_departures(replace(plan, replaced_hashes=("abc",)), result)
    assert "replaced an earlier one" in text_of_replaced_plan
