"""Plans of synthetic runs, for the tests of `istar.reports`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from istar.reports import plan_file
from istar.reports.run_tables import get_method_label
from istar.results import RunRecord
from tests.reports.synthetic import record

WRITTEN = "2026-03-01T12:00:00+00:00"
LATER = "2026-03-01T12:00:01+00:00"
EARLIER = "2026-03-01T11:59:59+00:00"
COMMIT = "c0ffee"
NOT_PLANNED = (
    "task.name", "task.data_dir", "task.submission", "model.name", "model.revision", "data.cache_dir",
    "data.num_workers",
)  # fmt: skip
"""Keys of synthetic configs that do not change the outcome of a run, or that a plan has in fields of their own."""


def run(task: str, reg: dict[str, Any], seed: int, value: float = 0.5, **options: Any) -> RunRecord:
    """Return the record of a run as planned, which began after the plan was written and has the same code."""
    timing = {"total": 60.0, "shrinkage": [], "began": options.pop("began", LATER)}
    code_fields = {"versions": {"istar": options.pop("version", "1.0")}, "code_commit": options.pop("commit", COMMIT)}
    data = {"fingerprint": options.pop("data", f"data-{task}"), "train": 100, "validation": {"validation": 50}}
    changes = {"timing": timing, "code_modified": False, "data": data, **code_fields, **options.pop("changes", {})}
    return record(task, options.pop("model", "mine"), reg, seed, value, changes=changes, **options)


def settings(run: RunRecord) -> dict[str, Any]:
    value_by_key = {
        f"{group}.{key}": value
        for group, values in run.config.items()
        if isinstance(values, dict) and group not in ("run", "logger")
        for key, value in values.items()
    }
    return {key: value for key, value in value_by_key.items() if key not in NOT_PLANNED and value is not None}


def make_plan_fields(runs: Sequence[RunRecord], grids: Sequence[str] = (), **sweep_fields: Any) -> dict[str, Any]:
    """Return the fields of a plan with one configuration for each run; `grids` names the grid of each run."""
    sweep = {"name": "s", "search": "grid", "trials": None, "pruner": None, "seeds_of_best": []}
    return {
        "kind": plan_file.KIND,
        "format": plan_file.FORMAT,
        "written": WRITTEN,
        "istar_version": "1.0",
        "code_commit": COMMIT,
        "code_modified": False,
        "command": "istar plan",
        "train_command": "istar train -m",
        "hypotheses": ["I-STAR raises the accuracy."],
        "hypotheses_generated": False,
        "test": plan_file.build_test_fields("t", 0.01, 1, 5, 2.0, 0.8),
        "sweep": {**sweep, **sweep_fields},
        "tasks": [{"name": "rte", "metric": "accuracy", "reported_set": "validation"}],
        "models": ["mine"],
        "seeds": sorted({run.config["seed"] for run in runs}),
        "selection": "The best is reported.",
        "methods": [{"method": "Base", "configurations": 1, "settings": {"reg.name": "none"}, "grid": {}}],
        "budget": {"runs": len(runs), "epochs": 3, "training_examples": 300, "finished_before": 0},
        "settings": {},
        "configurations": [
            {
                "task": run.config["task"]["name"],
                "model": Path(run.config["model"]["name"]).name,
                "method": get_method_label(run),
                "grid": grid,
                "seeds": [run.config["seed"]],
                "settings": settings(run),
                "ranges": {},
                "data": run.data.get("fingerprint", ""),
                "names": [run.name],
            }
            for run, grid in zip(runs, grids or [""] * len(runs), strict=True)
        ],
    }


def merge_configurations(fields: dict[str, Any]) -> dict[str, Any]:
    """Merge the configurations that differ only in the seed, and move the settings that all have to the top level."""
    entry_by_group: dict[str, dict[str, Any]] = {}
    for entry in fields["configurations"]:
        group_entry = entry_by_group.setdefault(repr((entry["task"], entry["model"], entry["settings"])), entry)
        if group_entry is not entry:
            group_entry["seeds"] = group_entry["seeds"] + entry["seeds"]
            group_entry["names"] = group_entry["names"] + entry["names"]
    entries = list(entry_by_group.values())
    common = {
        key: value
        for key, value in entries[0]["settings"].items()
        if all(entry["settings"].get(key) == value for entry in entries)
    }
    for entry in entries:
        entry["settings"] = {key: value for key, value in entry["settings"].items() if key not in common}
    return {**fields, "settings": common, "configurations": entries}
