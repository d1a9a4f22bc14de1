"""The table of isotropy within and between classes, for records with and without these measures."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from istar.errors import UserError
from istar.records import results
from istar.reports import configurations
from istar.reports.class_table import build_class_isotropy_sheet
from istar.reports.run_frame import load_runs
from tests.reports.synthetic import BASE, istar, record, save


def make_changes(within: float | None, share: float) -> dict[str, Any]:
    initial_measures = {"within": 0.5, "between": 0.0, "between_share": 0.01}
    final_measures = {"within": within, "between": 0.0, "between_share": share}
    return {
        "class_isotropy": {
            "before": {"2": initial_measures, "10": initial_measures},
            "after": {"2": initial_measures, "10": final_measures},
        }
    }


def build_sheet(root: Path) -> Any:
    runs = load_runs(root, keep_records=True)
    return build_class_isotropy_sheet(configurations.add_selection_columns(runs), runs.records)


def test_a_row_has_the_means_of_the_last_layer_over_seeds(tmp_path: Path) -> None:
    for seed, within in ((1, 0.2), (2, None), (3, 0.4)):
        save(record("rte", "mine", BASE, seed, changes=make_changes(within, 0.1 * seed)), tmp_path)
    save(record("rte", "mine", istar(), 1, changes=make_changes(0.3, 0.9)), tmp_path)
    save(record("rte", "mine", istar(), 2, changes={"class_isotropy": {}}), tmp_path)
    save(record("stsb", "mine", BASE, 1), tmp_path)
    save(record("rte", "mine", istar(within="label"), 1, changes=make_changes(0.7, 0.5)), tmp_path)
    sheet = build_sheet(tmp_path)
    rows = sheet.frame.to_dict("records")
    names = ["Base", "I-STAR λ=-1 ζ=0.4", "I-STAR λ=-1 ζ=0.4 within classes"]
    assert [(row["task"], row["method"], row["seeds"]) for row in rows] == [
        ("rte", name, seeds) for name, seeds in zip(names, (3, 1, 1), strict=True)
    ]
    base = rows[0]
    assert (base["within_before"], base["within_after"]) == pytest.approx((0.5, 0.3))
    assert (base["between_share_before"], base["between_share_after"]) == pytest.approx((0.01, 0.2))
    assert [entry.text for entry in sheet.rows[0]] == [
        "rte", "Base", "3", "0.500 → 0.300", "0.0000 → 0.0000", "0.010 → 0.200"
    ]  # fmt: skip


def test_runs_within_classes_are_not_those_of_table_1(tmp_path: Path) -> None:
    save(record("rte", "mine", istar(within="label"), 1), tmp_path)
    save(record("rte", "mine", istar(within=None), 2), tmp_path)
    frame = configurations.add_selection_columns(load_runs(tmp_path, keep_records=True)).set_index("seed")
    assert frame["candidate"].to_dict() == {1: False, 2: True}


def test_results_of_earlier_versions_are_read_and_left_out(tmp_path: Path) -> None:
    folder = save(record("rte", "mine", BASE, 1), tmp_path)
    values = asdict(results.read(folder))
    del values["class_isotropy"]
    (folder / results.RESULT).write_text(json.dumps(values))
    assert results.read(folder).class_isotropy == {}
    assert build_sheet(tmp_path).rows == []


@pytest.mark.parametrize(
    ("after", "message"),
    [({"1": {"within": "high"}}, r"after\.1\.within is 'high'; expected float"), ([1], r"class_isotropy\.after is")],
)
def test_a_value_that_is_no_number_is_named(tmp_path: Path, after: Any, message: str) -> None:
    folder = save(record("rte", "mine", BASE, 1, changes={"class_isotropy": {"after": after}}), tmp_path)
    with pytest.raises(UserError, match=message):
        results.read(folder)
