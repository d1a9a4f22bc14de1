import math
from pathlib import Path

import pytest
import yaml
from scipy import stats

from istar.errors import UserError
from istar.reports import plan_file
from istar.reports.plan_file import PLAN, TEXT, compute_digest, flatten_settings, read, write
from tests.reports.plans import COMMIT, WRITTEN, make_plan_fields, merge_configurations, run, settings
from tests.reports.synthetic import BASE, istar


@pytest.fixture
def fields() -> dict:
    return merge_configurations(make_plan_fields([run("rte", reg, seed) for reg in (BASE, istar()) for seed in (1, 2)]))


def test_what_is_written_is_read(fields: dict, tmp_path: Path) -> None:
    path = write(fields, tmp_path / "new" / "plan")
    assert path == tmp_path / "new" / "plan" / PLAN
    plan = read(path)
    assert plan.written_at.isoformat() == WRITTEN
    assert (plan.istar_version, plan.code_commit, plan.code_modified) == ("1.0", COMMIT, False)
    assert not plan.is_edited
    assert (plan.num_trials, plan.seeds_of_best, plan.replaced_hashes, plan.can_prune) == (None, (), (), False)
    base, other = plan.configurations
    assert (base.group, other.group) == (("rte", "mine", "Base"), ("rte", "mine", "I-STAR"))
    assert (base.seeds, len(base.run_names), base.data_fingerprint) == ((1, 2), 2, "data-rte")
    assert plan.settings | other.settings == settings(run("rte", istar(), 1))


def test_a_grid_is_a_method(fields: dict, tmp_path: Path) -> None:
    for entry, grid in zip(fields["configurations"], ("base", "up"), strict=True):
        entry["grid"] = grid
    base, other = read(write(fields, tmp_path)).configurations
    assert (base.grid, other.grid) == ("base", "up")
    assert (base.group, other.group) == (("rte", "mine", "Base (grid base)"), ("rte", "mine", "I-STAR (grid up)"))
    # A plan may lack the names of grids.
    for entry in fields["configurations"]:
        del entry["grid"]
    plan = read(write(fields, tmp_path / "without"))
    assert [entry.group[2] for entry in plan.configurations] == ["Base", "I-STAR"]


def test_the_text_names_the_main_things(fields: dict, tmp_path: Path) -> None:
    write(fields, tmp_path)
    text = (tmp_path / TEXT).read_text(encoding="utf-8")
    smallest = fields["test"]["smallest_difference"]
    for part in (
        WRITTEN,
        "I-STAR raises the accuracy.",
        f"{smallest:.3g}",
        "4 runs",
        compute_digest(read_yaml(tmp_path)),
    ):
        assert part in text


def read_yaml(folder: Path) -> dict:
    return yaml.safe_load((folder / PLAN).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("original_text", "edited_text"),
    [
        ("I-STAR raises the accuracy.", "I-STAR lowers the accuracy."),
        ("seeds: [1, 2]", "seeds: [1, 3]"),
        ("optim.lr: 3.0e-05", "optim.lr: 5.0e-05"),
        (WRITTEN, "2026-02-01T12:00:00+00:00"),
    ],
)
def test_an_edit_is_noticed(fields: dict, tmp_path: Path, original_text: str, edited_text: str) -> None:
    path = write(fields, tmp_path)
    text = path.read_text(encoding="utf-8")
    assert original_text in text
    path.write_text(text.replace(original_text, edited_text), encoding="utf-8")
    assert read(path).is_edited


def test_another_layout_is_no_edit(fields: dict, tmp_path: Path) -> None:
    path = write(fields, tmp_path)
    path.write_text("# a comment\n" + yaml.safe_dump(read_yaml(tmp_path), sort_keys=True), encoding="utf-8")
    assert not read(path).is_edited


def test_a_plan_is_replaced_by_force_and_kept(fields: dict, tmp_path: Path) -> None:
    write(fields, tmp_path)
    first_text = (tmp_path / PLAN).read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"plan\.yaml exists; .*--force"):
        write(fields, tmp_path)
    assert (tmp_path / PLAN).read_text(encoding="utf-8") == first_text
    hashes = [read_yaml(tmp_path)["hash"]]
    for number in (1, 2):
        write({**fields, "hypotheses": [f"Number {number}"]}, tmp_path, force=True)
        assert read(tmp_path / PLAN).replaced_hashes == tuple(hashes)
        hashes.append(read_yaml(tmp_path)["hash"])
    assert (tmp_path / "plan.old-1.yaml").read_text(encoding="utf-8") == first_text
    names = {PLAN, TEXT, "plan.old-1.yaml", "plan.old-1.md", "plan.old-2.yaml", "plan.old-2.md"}
    assert {path.name for path in tmp_path.glob("plan*")} == names
    assert not read(tmp_path / "plan.old-2.yaml").is_edited


def test_a_file_is_no_folder_for_a_plan(fields: dict, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        write(fields, tmp_path / "file", force=True)


@pytest.mark.parametrize(("test", "alpha"), [("t", 0.05), ("sign-flip", 0.01)])
def test_the_test_and_its_level_are_read_back(fields: dict, tmp_path: Path, test: str, alpha: float) -> None:
    test_fields = plan_file.build_test_fields(test, alpha, 3, 5, None, 0.8)
    plan = read(write({**fields, "test": test_fields}, tmp_path))
    assert (plan.test, plan.alpha) == (test, alpha)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such plan; istar plan writes one"),
        ("", "is no plan"),
        ("- 1\n- 2", "is no plan"),
        ("task: {name: rte}", "is no plan"),
        ("{a: ", "not YAML"),
        (b"\xff\xfe\xff", "not UTF-8"),
        (f"kind: {plan_file.KIND}\nformat: 99", "has format 99"),
        (f"kind: {plan_file.KIND}\nformat: 1", "was edited such that it is no plan any more"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / PLAN
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as error:
        read(path)
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(UserError, match="is a folder; name the file"):
        read(tmp_path)


@pytest.mark.parametrize("damage", [("written", "yesterday"), ("written", "2026-01-01"), ("configurations", [1])])
def test_a_broken_field_is_refused(fields: dict, tmp_path: Path, damage: tuple) -> None:
    path = write({**fields, damage[0]: damage[1]}, tmp_path)
    with pytest.raises(UserError, match="was edited such that it is no plan any more"):
        read(path)


def test_settings_are_those_that_identify_a_run() -> None:
    config = run("rte", istar(), 1, task__limit_train=8).config
    assert flatten_settings(config) == settings(run("rte", istar(), 1, task__limit_train=8))


@pytest.mark.parametrize(("comparisons", "pairs"), [(1, 5), (6, 10)])
def test_the_smallest_difference(comparisons: int, pairs: int) -> None:
    """The power of the smallest difference, from the noncentral t distribution, is the requested one."""
    smallest_difference = plan_file.build_test_fields("t", 0.05, comparisons, pairs, 2.0, 0.8)["smallest_difference"]
    limit = stats.t.isf(0.05 / comparisons / 2, pairs - 1)
    shift = math.sqrt(pairs) * smallest_difference / 2.0
    power = stats.nct.sf(limit, pairs - 1, shift) + stats.nct.cdf(-limit, pairs - 1, shift)
    assert power == pytest.approx(0.8, abs=1e-9)


def test_without_a_deviation_the_smallest_difference_is_unknown(fields: dict, tmp_path: Path) -> None:
    test = plan_file.build_test_fields("sign-flip", 0.05, 3, 5, None, 0.8)
    assert test["smallest_difference"] is None
    # The smallest p-value has all five signs equal, in either direction.
    assert test["smallest_p"] == 2 / 2**5
    write({**fields, "test": test}, tmp_path)
    text = (tmp_path / TEXT).read_text(encoding="utf-8")
    assert "is unknown" in text
    assert "gives no p-value below 0.0625" in text
    with pytest.raises(UserError, match="alpha is 2"):
        plan_file.build_test_fields("t", 2, 1, 5, None, 0.8)
