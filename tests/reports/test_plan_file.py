import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from scipy import stats

from istar.errors import UserError
from istar.records.results import RunRecord
from istar.records.run_rows import PlannedRun, Repetitions, record_to_row
from istar.reports import plan_file
from istar.reports.plan_file import (
    PLAN,
    Departure,
    Plan,
    PlannedTest,
    TestName,
    build_departures_sheet,
    find_departures,
    plan_test,
    read_plan,
    summarize_departures,
    write_plan,
)
from istar.reports.run_frame import read_runs
from tests.reports.plans import COMMIT, EARLIER, LATER, WRITTEN, make_plan, run
from tests.reports.synthetic import BASE, cosreg, istar, save


@pytest.fixture
def small_plan() -> Plan:
    return make_plan([run("rte", reg, seed) for reg in (BASE, istar()) for seed in (1, 2)])


def test_what_is_written_is_read(small_plan: Plan, tmp_path: Path) -> None:
    path = write_plan(small_plan, tmp_path / "new" / "plan")
    assert path == tmp_path / "new" / "plan" / PLAN
    written = read_plan(path)
    assert replace(written, sha256="") == small_plan
    assert written.sha256 == written.compute_hash()


@pytest.mark.parametrize(
    ("original_text", "edited_text"),
    [
        ("I-STAR raises the accuracy.", "I-STAR lowers the accuracy."),
        ("seed: 2", "seed: 3"),
        ("alpha: 0.01", "alpha: 0.05"),
        (WRITTEN, "2026-02-01T12:00:00+00:00"),
    ],
)
def test_an_edit_is_noticed(small_plan: Plan, tmp_path: Path, original_text: str, edited_text: str) -> None:
    path = write_plan(small_plan, tmp_path)
    text = path.read_text(encoding="utf-8")
    assert original_text in text
    path.write_text(text.replace(original_text, edited_text), encoding="utf-8")
    edited_plan = read_plan(path)
    assert edited_plan.sha256 != edited_plan.compute_hash()


def test_another_layout_is_no_edit(small_plan: Plan, tmp_path: Path) -> None:
    path = write_plan(small_plan, tmp_path)
    written_plan = read_plan(path)
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text("# a comment\n" + yaml.safe_dump(fields, sort_keys=True), encoding="utf-8")
    assert read_plan(path) == written_plan


def test_a_plan_is_replaced_by_force_and_kept(small_plan: Plan, tmp_path: Path) -> None:
    first_content = write_plan(small_plan, tmp_path).read_bytes()
    with pytest.raises(UserError, match=r"plan\.yaml exists; .*--force"):
        write_plan(small_plan, tmp_path)
    assert (tmp_path / PLAN).read_bytes() == first_content
    hashes = [read_plan(tmp_path / PLAN).sha256]
    for number in (1, 2):
        write_plan(replace(small_plan, hypotheses=[f"Number {number}"]), tmp_path, force=True)
        assert read_plan(tmp_path / PLAN).replaces == hashes
        hashes.append(read_plan(tmp_path / PLAN).sha256)
    kept_names = [f"plan.old-{digest[:8]}.yaml" for digest in hashes[:2]]
    assert {path.name for path in tmp_path.glob("plan*")} == {PLAN, *kept_names}
    assert (tmp_path / kept_names[0]).read_bytes() == first_content
    assert read_plan(tmp_path / kept_names[1]).hypotheses == ["Number 1"]


def test_an_edited_plan_is_replaced_by_its_own_hash(small_plan: Plan, tmp_path: Path) -> None:
    path = write_plan(small_plan, tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace("raises", "lowers"), encoding="utf-8")
    edited_plan = read_plan(path)
    write_plan(small_plan, tmp_path, force=True)
    assert read_plan(path).replaces == [edited_plan.compute_hash()]
    assert read_plan(tmp_path / f"plan.old-{edited_plan.compute_hash()[:8]}.yaml") == edited_plan


def test_a_file_is_no_folder_for_a_plan(small_plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        write_plan(small_plan, tmp_path / "file", force=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file"),
        ("", "is not a plan"),
        ("- 1\n- 2", "is not a plan"),
        ("task: {name: rte}", "is not a plan: its content lacks"),
        ("{a: ", "not YAML"),
        (b"\xff\xfe\xff", "not UTF-8"),
        ("format: 1", "has format 1; this version reads 2"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / PLAN
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as error:
        read_plan(path)
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(UserError, match=r"is not a plan; expected the plan\.yaml"):
        read_plan(tmp_path)


@pytest.mark.parametrize("damage", [{"runs": [1]}, {"seeds_of_best": 1}, {"test": {"name": "u"}}, {"written": 2026}])
def test_a_broken_field_is_refused(small_plan: Plan, tmp_path: Path, damage: dict) -> None:
    path = write_plan(replace(small_plan, **damage), tmp_path)
    with pytest.raises(UserError, match=f"is not a plan: its content.{next(iter(damage))}"):
        read_plan(path)


def make_runs(methods: tuple[str, ...], seeds: tuple[int, ...], task: str = "rte") -> list[PlannedRun]:
    return [
        PlannedRun(name=f"{task}-{method}-{seed}", task=task, model="mine", method=method, seed=seed)
        for method in methods
        for seed in seeds
    ]


def make_repetitions(method: str, grid: str, seeds: list[int]) -> Repetitions:
    return Repetitions(task="rte", model="mine", method=method, grid=grid, seeds=seeds, names=[])


class TestTheTest:
    """Comparisons, pairs and the smallest difference of the planned test."""

    @pytest.mark.parametrize(
        ("runs", "comparisons", "pairs"),
        [
            (make_runs(("Base", "CosReg λ=1"), (1, 2, 3)), 1, 3),
            (make_runs(("Base", "I-STAR λ=-1 ζ=0.4", "I-STAR λ=-3 ζ=0.4"), (1, 2)), 2, 2),
            (make_runs(("CosReg λ=1",), (1, 2, 3)), 0, 3),
            (make_runs(("Base", "a", "b"), (1,)) + make_runs(("Base", "a"), (1, 2, 3), "cola"), 3, 1),
            (make_runs(("Base",), (1,)) + make_runs(("a",), (1,), "cola"), 0, 1),
            ([], 0, 0),
        ],
    )
    def test_each_method_with_its_settings_is_compared(
        self, runs: list[PlannedRun], comparisons: int, pairs: int
    ) -> None:
        test = plan_test("t", 0.05, None, 0.8, runs)
        assert (test["comparisons"], test["pairs"]) == (comparisons, pairs)

    def test_each_group_of_repetitions_is_compared(self) -> None:
        runs = make_runs(("Base", "I-STAR λ=-1 ζ=0.4", "I-STAR λ=-3 ζ=0.4", "I-STAR λ=1 ζ=0.4"), (1,))
        groups = [("Base", "base"), ("I-STAR", "down"), ("I-STAR", "up")]
        test = plan_test("t", 0.05, None, 0.8, runs, [make_repetitions(*group, [2, 3]) for group in groups])
        assert (test["comparisons"], test["pairs"]) == (2, 3)

    @pytest.mark.parametrize("name", ["t", "sign-flip"])
    def test_the_name_and_the_level_are_those_requested(self, name: TestName) -> None:
        test = plan_test(name, 0.01, 2.0, 0.9)
        assert (test["name"], test["alpha"], test["sd"], test["power"]) == (name, 0.01, 2.0, 0.9)

    @pytest.mark.parametrize(("comparisons", "pairs"), [(1, 5), (6, 10)])
    def test_the_smallest_difference(self, comparisons: int, pairs: int) -> None:
        """The power of the smallest difference, from the noncentral t distribution, is the requested one."""
        runs = make_runs(("Base", *map(str, range(comparisons))), tuple(range(pairs)))
        smallest_difference = plan_test("t", 0.05, 2.0, 0.8, runs)["smallest_difference"]
        assert smallest_difference is not None
        limit = stats.t.isf(0.05 / comparisons / 2, pairs - 1)
        shift = math.sqrt(pairs) * smallest_difference / 2.0
        power = stats.nct.sf(limit, pairs - 1, shift) + stats.nct.cdf(-limit, pairs - 1, shift)
        assert power == pytest.approx(0.8, abs=1e-9)

    def test_what_is_not_known_is_none(self) -> None:
        runs = make_runs(("Base", "a"), (1, 2, 3, 4, 5))

        def unknown(test: PlannedTest) -> tuple[bool, bool]:
            return test["smallest_difference"] is None, test["smallest_p"] is None

        assert unknown(plan_test("t", 0.05, 2.0, 0.8, runs)) == (False, True)
        assert unknown(plan_test("t", 0.05, None, 0.8, runs)) == (True, True)
        assert unknown(plan_test("sign-flip", 0.05, 2.0, 0.8, make_runs(("Base", "a"), (1,)))) == (True, False)
        assert unknown(plan_test("sign-flip", 0.05, 2.0, 0.8)) == (True, True)
        # The smallest p-value has all five signs equal, in either direction.
        assert plan_test("sign-flip", 0.05, None, 0.8, runs)["smallest_p"] == 2 / 2**5

    @pytest.mark.parametrize(
        ("alpha", "sd", "power", "message"),
        [(2, None, 0.8, "alpha is 2"), (0.05, 0.0, 0.8, "differences is 0"), (0.05, 1.0, 2.0, "power is 2")],
    )
    def test_arguments_out_of_range_are_refused(
        self, alpha: float, sd: float | None, power: float, message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            plan_test("t", alpha, sd, power)


SEEDS = (1, 2, 3)
RUNS = [run("rte", reg, seed) for reg in (BASE, istar(-1), istar(-3)) for seed in SEEDS]


def make_frame(runs: Sequence[RunRecord]) -> pd.DataFrame:
    return pd.DataFrame([{"folder": run.name, **record_to_row(run)} for run in runs])


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_file.read_plan(plan_file.write_plan(make_plan(RUNS), tmp_path))


def find_departures_by_kind(plan: Plan, runs: Sequence[RunRecord]) -> dict[str, Departure]:
    """Return the departures of the runs from the plan by their kinds, each of which must occur only once."""
    departures = find_departures(plan, make_frame(runs))
    assert len({departure.kind for departure in departures}) == len(departures), departures
    return {departure.kind: departure for departure in departures}


def test_runs_as_planned_are_no_departure(plan: Plan) -> None:
    assert find_departures(plan, make_frame(RUNS)) == []
    assert build_departures_sheet([]).rows == []
    assert summarize_departures(plan, []).endswith("The runs do not depart from it.")


def test_runs_as_folders(plan: Plan, tmp_path: Path) -> None:
    for record in RUNS:
        save(record, tmp_path / "runs", geometry=False)
    assert find_departures(plan, read_runs(tmp_path / "runs").frame) == []


def test_missing_runs(plan: Plan) -> None:
    departures = find_departures_by_kind(plan, RUNS[:4] + RUNS[6:])
    assert set(departures) == {"missing run"}
    assert departures["missing run"].where == "rte, mine, I-STAR λ=-1 ζ=0.4"
    assert departures["missing run"].runs == (RUNS[4].name, RUNS[5].name)


def test_all_runs_of_two_methods_are_missing(plan: Plan) -> None:
    departures = find_departures(plan, make_frame(RUNS[:3]))
    assert [(departure.kind, len(departure.runs)) for departure in departures] == [("missing run", 3)] * 2


@pytest.mark.parametrize(
    ("more", "where"),
    [
        (run("cola", BASE, 1), "cola, mine, Base"),
        (run("rte", BASE, 1, model="org/other"), "rte, other, Base"),
        (run("rte", cosreg(), 1), "rte, mine, CosReg λ=1"),
        (run("rte", BASE, 7), "rte, mine, Base"),
        (run("rte", istar(-1), 1, optim__lr=5e-5), "rte, mine, I-STAR λ=-1 ζ=0.4"),
        # The same config with other data or weights has another name.
        (replace(RUNS[0], name="rte-mine-none-0"), "rte, mine, Base"),
    ],
)
def test_runs_that_were_not_planned(plan: Plan, more: RunRecord, where: str) -> None:
    departures = find_departures_by_kind(plan, [*RUNS, more])
    assert set(departures) == {"run that was not planned"}
    assert departures["run that was not planned"].where == where
    assert departures["run that was not planned"].runs == (more.name,)


@pytest.mark.parametrize("status", ["failed", "unfinished", "pruned"])
def test_runs_without_a_result(plan: Plan, status: str) -> None:
    run_without_result = replace(RUNS[0], status=status, error="loss is NaN" if status == "failed" else None)
    departures = find_departures_by_kind(plan, [run_without_result, *RUNS[1:]])
    assert set(departures) == {f"{status} run"}
    departure = departures[f"{status} run"]
    assert (departure.where, departure.runs) == ("rte, mine, Base", (RUNS[0].name,))
    assert departure.actual == ("loss is NaN" if status == "failed" else status)


def test_collapsed_runs(plan: Plan) -> None:
    departures = find_departures_by_kind(plan, [replace(RUNS[0], collapsed={"validation": True}), *RUNS[1:]])
    assert set(departures) == {"collapsed run"}
    assert departures["collapsed run"].runs == (RUNS[0].name,)


@pytest.mark.parametrize(
    ("changes", "actual"),
    [
        ({"versions": {"istar": "2.0"}}, f"istar 2.0, commit {COMMIT}"),
        ({"code_commit": "d00d"}, "istar 1.0, commit d00d"),
        ({"code_commit": None, "versions": {}}, "istar unknown, commit unknown"),
        ({"code_modified": True}, f"istar 1.0, commit {COMMIT} with uncommitted changes"),
    ],
)
def test_other_code(plan: Plan, changes: dict, actual: str) -> None:
    departures = find_departures_by_kind(plan, [replace(RUNS[0], **changes), *RUNS[1:]])
    assert set(departures) == {"other code"}
    departure = departures["other code"]
    assert (departure.planned, departure.actual) == (f"istar 1.0, commit {COMMIT}", actual)
    assert departure.runs == (RUNS[0].name,)


def test_uncommitted_changes_are_a_departure_even_if_the_plan_has_some(plan: Plan) -> None:
    runs = [replace(record, code_modified=True) for record in RUNS]
    plan = replace(plan, code_modified=True)
    assert set(find_departures_by_kind(replace(plan, sha256=plan.compute_hash()), runs)) == {"other code"}


@pytest.mark.parametrize(("began", "is_early"), [(EARLIER, True), (WRITTEN, False), (LATER, False)])
def test_runs_that_began_before_the_plan(plan: Plan, began: str, is_early: bool) -> None:
    # The same moment is written with another time zone.
    shifted = began.replace("T11:", "T13:").replace("T12:", "T14:").replace("+00:00", "+02:00")
    for time in (began, shifted):
        departures = find_departures_by_kind(plan, [replace(RUNS[0], timing={"total": 1.0, "began": time}), *RUNS[1:]])
        assert set(departures) == ({"run before the plan"} if is_early else set())


@pytest.mark.parametrize("began", [None, "2026-03-01T12:00:01", "then"])
def test_an_unknown_beginning_is_no_run_as_planned(plan: Plan, began: str | None) -> None:
    departures = find_departures_by_kind(plan, [replace(RUNS[0], timing={"total": 1.0, "began": began}), *RUNS[1:]])
    assert set(departures) == {"run before the plan"}
    assert departures["run before the plan"].runs == (RUNS[0].name,)


def test_an_edited_and_a_replaced_plan(plan: Plan) -> None:
    assert set(find_departures_by_kind(replace(plan, hypotheses=[]), RUNS)) == {"edited plan"}
    replacing_plan = replace(plan, replaces=["abc"])
    replacing_plan = replace(replacing_plan, sha256=replacing_plan.compute_hash())
    assert set(find_departures_by_kind(replacing_plan, RUNS)) == {"replaced plan"}


class TestTheBestIsRepeated:
    """A sweep that repeats the best configuration of each group with more seeds."""

    tried_runs = tuple(run("rte", reg, 1, optim__lr=rate) for reg in (BASE, istar()) for rate in (3e-5, 1e-5))
    base_repetitions, istar_repetitions = (
        [run("rte", reg, seed, optim__lr=rate) for rate in (3e-5, 1e-5) for seed in (2, 3)] for reg in (BASE, istar())
    )

    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        repetitions = [
            Repetitions(
                task="rte", model="mine", method=method, grid=grid, seeds=[2, 3], names=[record.name for record in runs]
            )
            for method, grid, runs in (("Base", "", self.base_repetitions), ("I-STAR", "up", self.istar_repetitions))
        ]
        return plan_file.read_plan(plan_file.write_plan(make_plan(self.tried_runs, repetitions), tmp_path))

    def test_as_planned(self, plan: Plan) -> None:
        runs = [*self.tried_runs, *self.base_repetitions[:2], *self.istar_repetitions[2:]]
        assert find_departures(plan, make_frame(runs)) == []

    @pytest.mark.parametrize("count", [0, 1, 3, 4])
    def test_another_number_of_repetitions(self, plan: Plan, count: int) -> None:
        repetitions = self.istar_repetitions[:count]
        departures = find_departures_by_kind(plan, [*self.tried_runs, *self.base_repetitions[:2], *repetitions])
        assert set(departures) == {"number of repetitions"}
        departure = departures["number of repetitions"]
        assert (departure.where, departure.actual) == ("rte, mine, I-STAR, grid up", f"{count} runs")
        assert departure.planned == "2 runs of one configuration"
        assert departure.runs == tuple(record.name for record in repetitions)

    def test_a_seed_that_was_not_planned(self, plan: Plan) -> None:
        runs = [*self.tried_runs, *self.base_repetitions[:2], *self.istar_repetitions[:2], run("rte", BASE, 4)]
        assert set(find_departures_by_kind(plan, runs)) == {"run that was not planned"}


def test_any_run_may_be_a_trial_of_a_search(tmp_path: Path) -> None:
    plan = plan_file.read_plan(plan_file.write_plan(make_plan([], trials=2), tmp_path))
    trials = [run("rte", istar(-5.0), 1), replace(run("rte", istar(4.9), 1), status="pruned")]
    assert find_departures(plan, make_frame(trials)) == []
    assert "their settings and number are not compared" in summarize_departures(plan, [])
    failed_run = replace(trials[0], status="failed", error="loss is NaN", code_commit="d00d")
    assert set(find_departures_by_kind(plan, [failed_run])) == {"failed run", "other code"}


def test_the_table(plan: Plan) -> None:
    departures = find_departures(plan, make_frame([replace(record, code_commit="d00d") for record in RUNS]))
    sheet = build_departures_sheet(departures)
    [entries] = sheet.rows
    assert len(entries) == len(sheet.header)
    assert entries[4].text == str(len(RUNS))
    assert re.search(r" and 6 more$", entries[5].text)
    assert sheet.frame["runs"].iloc[0].split() == [record.name for record in RUNS]
    assert summarize_departures(plan, departures).endswith("There is one departure from it.")
    assert summarize_departures(plan, departures * 2).endswith("There are 2 departures from it.")
