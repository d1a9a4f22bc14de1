"""Departures of runs from the plan of an experiment: what was planned, and what was done."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from istar.drawing.page_tables import Entry, Sheet
from istar.reports.plan_file import Plan

_ALL_RUNS = "all runs"
_MAX_SHOWN_NAMES = 3  # names of runs that the page shows of a departure; the CSV file has all


@dataclass(frozen=True)
class Departure:
    """A difference between what was planned and what was done."""

    kind: str  # e.g. `missing run`
    where: str  # task, model and method in words; `all runs` if it concerns no method in particular
    planned: str
    actual: str
    runs: tuple[str, ...] = ()  # names of the runs, or of the planned runs that are missing


def find_departures(plan: Plan, frame: pd.DataFrame) -> list[Departure]:
    """Return all departures of the runs in a frame from a plan; an empty list if there are none.

    A run was planned if its name is in the plan. The runs of a search have no names beforehand, so that any run may be
    one of its trials.

    Args:
        plan: from `istar.reports.plan_file.read_plan`.
        frame: `istar.reports.run_frame.Runs.frame`, of runs with any status.
    """
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    names = {row["name"] for row in rows}
    planned_names = {run["name"] for run in plan.runs}.union(*(group["names"] for group in plan.repetitions))
    # Names of runs by the fields `kind`, `where`, `planned` and `actual` of their departure.
    names_by_departure = defaultdict(list)
    for run in plan.runs:
        if run["name"] not in names:
            names_by_departure["missing run", _describe_method(run), "a run", "none"].append(run["name"])
    for row in rows:
        for departure in _compare_run(plan, planned_names, row):
            names_by_departure[departure].append(row["name"])
    departures = [Departure(*departure, tuple(names)) for departure, names in names_by_departure.items()]
    for group in plan.repetitions:
        repeated = tuple(name for name in group["names"] if name in names)
        counts = f"{len(group['seeds'])} runs of one configuration", f"{len(repeated)} runs"
        if len(repeated) != len(group["seeds"]):
            where = _describe_method(group) + (f", grid {group['grid']}" if group["grid"] else "")
            departures.append(Departure("number of repetitions", where, *counts, repeated))
    if plan.sha256 != plan.compute_hash():
        departures.append(
            Departure("edited plan", _ALL_RUNS, "the plan as it was written", "contents that do not match its hash")
        )
    if plan.replaces:
        departures.append(Departure("replaced plan", _ALL_RUNS, "no earlier plan", f"{len(plan.replaces)} earlier"))
    return sorted(departures, key=lambda departure: departure.kind)


def _compare_run(plan: Plan, planned_names: set[str], row: Mapping[Any, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the fields `kind`, `where`, `planned` and `actual` of each departure of a run, given as a row."""
    method, status, is_search = _describe_method(row), row["status"], plan.trials is not None
    if not is_search and row["name"] not in planned_names:
        yield "run that was not planned", method, "none", "a run with other settings, seed, data or weights"
    if status != "finished" and not (status == "pruned" and is_search):
        yield f"{status} run", method, "a usable result", row["error"] or status
    if row["collapsed"]:
        yield "collapsed run", method, "a usable result", "all predictions are equal"
    planned_code = _describe_code(plan.istar_version, plan.code_commit, plan.code_modified)
    code = _describe_code(row["istar_version"], row["code_commit"], row["code_modified"])
    # An unfinished run has no record yet. Two states of one commit with uncommitted changes may differ.
    if status != "unfinished" and (code != planned_code or row["code_modified"]):
        yield "other code", _ALL_RUNS, planned_code, code
    if not _has_begun_after(row["began"], plan.written):
        yield "run before the plan", _ALL_RUNS, f"after {plan.written}", "before, or at a time that is not recorded"


def _describe_code(version: str | None, commit: str | None, is_modified: bool | None) -> str:
    changes = " with uncommitted changes" if is_modified else ""
    return f"istar {version or 'unknown'}, commit {commit or 'unknown'}{changes}"


def _has_begun_after(began: Any, written: str) -> bool:
    try:
        return datetime.fromisoformat(began) >= datetime.fromisoformat(written)
    except (ValueError, TypeError):  # no time at all, or one without a time zone
        return False


def _describe_method(run: Mapping[Any, Any]) -> str:
    return f"{run['task']}, {run['model']}, {run['method']}"


def build_departures_sheet(departures: Sequence[Departure]) -> Sheet:
    """Return the table of departures from a plan; without rows if there are none."""
    rows, frame_rows = [], []
    for departure in departures:
        texts = departure.kind, departure.where, departure.planned, departure.actual
        first_names, num_left_out = departure.runs[:_MAX_SHOWN_NAMES], len(departure.runs[_MAX_SHOWN_NAMES:])
        shown_names = ", ".join(first_names) + (f" and {num_left_out} more" if num_left_out else "")
        rows.append([*map(Entry, texts), Entry(str(len(departure.runs)), number=True), Entry(shown_names)])
        frame_rows.append((*texts, len(departure.runs), " ".join(departure.runs)))
    return Sheet(
        name="departures",
        title="Departures from the plan",
        caption="What was done otherwise than the plan says: planned runs that are missing or have no usable result, "
        "runs that were not planned, other code, and runs that began before the plan was written.",
        header=("departure", "task, model, method", "planned", "actual", "runs", "names"),
        rows_by_group={"": rows} if rows else {},
        frame=pd.DataFrame(frame_rows, columns=["departure", "where", "planned", "actual", "count", "runs"]),
        num_row_headers=2,
    )


def summarize_departures(plan: Plan, departures: Sequence[Departure]) -> str:
    """Return sentences that say when the plan was written and how many departures from it there are."""
    count = len(departures)
    text = f"The plan was written at {plan.written} by istar {plan.istar_version}. "
    if plan.trials is not None:
        text += "The runs of a search have no names beforehand, so that their settings and number are not compared. "
    if not count:
        return f"{text}The runs do not depart from it."
    return f"{text}There {'is one departure' if count == 1 else f'are {count} departures'} from it."
