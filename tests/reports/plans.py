"""Plans of synthetic runs, for the tests of `istar.reports`."""

from collections.abc import Sequence
from typing import Any

from istar.records.identity import label_method, shorten_model_name
from istar.records.results import RunRecord
from istar.records.run_rows import PlannedRun, Repetitions
from istar.reports.plan_file import Plan, plan_test
from tests.reports.synthetic import record

WRITTEN = "2026-03-01T12:00:00+00:00"
LATER = "2026-03-01T12:00:01+00:00"
EARLIER = "2026-03-01T11:59:59+00:00"
COMMIT = "c0ffee"


def run(task: str, reg: dict[str, Any], seed: int, value: float = 0.5, **options: Any) -> RunRecord:
    """Return the record of a run as planned, which began after the plan was written and has the same code."""
    timing = {"total": 60.0, "shrinkage": [], "began": options.pop("began", LATER)}
    code_fields = {"versions": {"istar": options.pop("version", "1.0")}, "code_commit": options.pop("commit", COMMIT)}
    changes = {"timing": timing, "code_modified": False, **code_fields, **options.pop("changes", {})}
    return record(task, options.pop("model", "mine"), reg, seed, value, changes=changes, **options)


def plan_run(run: RunRecord) -> PlannedRun:
    config = run.config
    return PlannedRun(
        name=run.name,
        task=config["task"]["name"],
        model=shorten_model_name(config["model"]["name"]),
        method=label_method(run.config),
        seed=config["seed"],
    )


def make_plan(runs: Sequence[RunRecord], repetitions: Sequence[Repetitions] = (), **changes: Any) -> Plan:
    """Return the plan of a grid of runs, before it is written; `changes` are other values of its fields."""
    planned_runs = [plan_run(run) for run in runs]
    fields = {
        "written": WRITTEN,
        "istar_version": "1.0",
        "code_commit": COMMIT,
        "code_modified": False,
        "command": "istar train -m",
        "hypotheses": ["I-STAR raises the accuracy."],
        "test": plan_test("t", 0.01, 2.0, 0.8, planned_runs, repetitions),
        "overrides_by_grid": {"": ["seed=1,2"]},
        "trials": None,
        "seeds_of_best": [],
        "runs": planned_runs,
        "repetitions": list(repetitions),
    }
    return Plan(**{**fields, **changes})
