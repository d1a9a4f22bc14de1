import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from scipy import stats

from istar.errors import UserError
from istar.records.run_rows import PlannedRun, Repetitions
from istar.reports.plan_file import PLAN, Plan, PlannedTest, TestName, plan_test, read_plan, write_plan
from tests.reports.plans import WRITTEN, make_plan, run
from tests.reports.synthetic import BASE, istar


@pytest.fixture
def plan() -> Plan:
    return make_plan([run("rte", reg, seed) for reg in (BASE, istar()) for seed in (1, 2)])


def test_what_is_written_is_read(plan: Plan, tmp_path: Path) -> None:
    path = write_plan(plan, tmp_path / "new" / "plan")
    assert path == tmp_path / "new" / "plan" / PLAN
    written = read_plan(path)
    assert replace(written, sha256="") == plan
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
def test_an_edit_is_noticed(plan: Plan, tmp_path: Path, original_text: str, edited_text: str) -> None:
    path = write_plan(plan, tmp_path)
    text = path.read_text(encoding="utf-8")
    assert original_text in text
    path.write_text(text.replace(original_text, edited_text), encoding="utf-8")
    edited_plan = read_plan(path)
    assert edited_plan.sha256 != edited_plan.compute_hash()


def test_another_layout_is_no_edit(plan: Plan, tmp_path: Path) -> None:
    path = write_plan(plan, tmp_path)
    written_plan = read_plan(path)
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text("# a comment\n" + yaml.safe_dump(fields, sort_keys=True), encoding="utf-8")
    assert read_plan(path) == written_plan


def test_a_plan_is_replaced_by_force_and_kept(plan: Plan, tmp_path: Path) -> None:
    first_content = write_plan(plan, tmp_path).read_bytes()
    with pytest.raises(UserError, match=r"plan\.yaml exists; .*--force"):
        write_plan(plan, tmp_path)
    assert (tmp_path / PLAN).read_bytes() == first_content
    hashes = [read_plan(tmp_path / PLAN).sha256]
    for number in (1, 2):
        write_plan(replace(plan, hypotheses=[f"Number {number}"]), tmp_path, force=True)
        assert read_plan(tmp_path / PLAN).replaces == hashes
        hashes.append(read_plan(tmp_path / PLAN).sha256)
    kept_names = [f"plan.old-{digest[:8]}.yaml" for digest in hashes[:2]]
    assert {path.name for path in tmp_path.glob("plan*")} == {PLAN, *kept_names}
    assert (tmp_path / kept_names[0]).read_bytes() == first_content
    assert read_plan(tmp_path / kept_names[1]).hypotheses == ["Number 1"]


def test_an_edited_plan_is_replaced_by_its_own_hash(plan: Plan, tmp_path: Path) -> None:
    path = write_plan(plan, tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace("raises", "lowers"), encoding="utf-8")
    edited_plan = read_plan(path)
    write_plan(plan, tmp_path, force=True)
    assert read_plan(path).replaces == [edited_plan.compute_hash()]
    assert read_plan(tmp_path / f"plan.old-{edited_plan.compute_hash()[:8]}.yaml") == edited_plan


def test_a_file_is_no_folder_for_a_plan(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        write_plan(plan, tmp_path / "file", force=True)


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
def test_a_broken_field_is_refused(plan: Plan, tmp_path: Path, damage: dict) -> None:
    path = write_plan(replace(plan, **damage), tmp_path)
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
