"""The plan of an experiment (`plan.yaml`), which `istar plan` writes before the runs, and how runs depart from it.

Run names end with a hash of config, data and weights, so the planned names fix what is run.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

import pandas as pd
import yaml

from istar.drawing.page_tables import Entry, Sheet
from istar.errors import UserError
from istar.files.outputs import Output
from istar.files.parsing import read_record
from istar.records.identity import BASE_LABEL
from istar.records.run_rows import PlannedRun, Repetitions
from istar.statistics import power
from istar.statistics.paired import smallest_sign_flip_p

PLAN = "plan.yaml"
PLAN_FORMAT = 2
_ALL_RUNS = "all runs"
_MAX_SHOWN_NAMES = 3  # names of runs that the page shows of a departure; the CSV file has all
TestName = Literal["t", "sign-flip"]


class PlannedTest(TypedDict):
    """The test of each method against Base; see `plan_test`."""

    name: TestName  # a key of `paired.TESTS`
    alpha: float  # probability of any false difference among all comparisons
    comparisons: int  # number of comparisons with Base; 0 for a search, because it is not known beforehand
    pairs: int  # smallest number of seeds that a method has; 0 for a search
    sd: float | None  # standard deviation of the paired differences
    power: float
    smallest_difference: float | None  # None if it is not known
    smallest_p: float | None  # smallest p-value that the sign-flip test can give; None for the t-test or without runs


@dataclass(frozen=True)
class Plan:
    """The plan of an experiment, with the fields of its file."""

    written: str  # time in ISO 8601, with time zone
    istar_version: str
    code_commit: str | None  # commit of istar's git checkout; None if istar did not run from one
    code_modified: bool | None
    command: str  # starts the runs
    hypotheses: list[str]
    test: PlannedTest
    overrides_by_grid: dict[str, list[str]]  # the name is empty without named grids
    trials: int | None  # greatest number of trials of a search; None for a grid
    seeds_of_best: list[int]  # `sweep.seeds`
    runs: list[PlannedRun]  # empty for a search, because its runs are named only when they start
    repetitions: list[Repetitions]
    replaces: list[str] = field(default_factory=list)  # hashes of the plans that this one has replaced
    sha256: str = ""  # hash of the other fields when the plan was written
    format: int = PLAN_FORMAT

    @property
    def num_runs(self) -> int:
        """The number of planned runs; for a search, the maximum number of trials."""
        return self.trials or len(self.runs) + sum(len(group["seeds"]) for group in self.repetitions)

    def compute_hash(self) -> str:
        """Return the SHA-256 of the contents, regardless of the file's layout and comments."""
        contents = {key: value for key, value in asdict(self).items() if key != "sha256"}
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def plan_test(
    name: TestName,
    alpha: float,
    sd: float | None,
    target_power: float,
    runs: Sequence[PlannedRun] = (),
    repetitions: Sequence[Repetitions] = (),
) -> PlannedTest:
    """Return the planned test of runs, with the smallest difference that it finds with the given power.

    Each group of `repetitions` is compared with Base or, without repetitions, each method with its settings. The
    smallest difference is for the paired t-test at alpha divided by the number of comparisons, the strictest level of
    Holm's method. It is None without `sd`, without comparisons, or with fewer than two seeds.

    Raises:
        UserError: if alpha, `sd` or the power is out of range.
    """
    # Check the arguments even if there is nothing to compute.
    power.smallest_difference(1.0 if sd is None else sd, 2, alpha, target_power)
    methods = {(group["task"], group["model"], group["method"], group["grid"]) for group in repetitions}
    methods = methods or {(run["task"], run["model"], run["method"], "") for run in runs}
    has_base = {(task, model) for task, model, method, _ in methods if method == BASE_LABEL}
    comparisons = sum((task, model) in has_base and method != BASE_LABEL for task, model, method, _ in methods)
    seeds_by_method: dict[tuple[str, str, str], set[int]] = {}
    repeated_seeds = {seed for group in repetitions for seed in group["seeds"]}
    for run in runs:
        method = run["task"], run["model"], run["method"]
        seeds_by_method.setdefault(method, set(repeated_seeds)).add(run["seed"])
    pairs = min(map(len, seeds_by_method.values()), default=0)
    smallest_difference = None
    if sd is not None and comparisons and pairs >= 2:
        smallest_difference = power.smallest_difference(sd, pairs, alpha / comparisons, target_power)
    return PlannedTest(
        name=name,
        alpha=alpha,
        comparisons=comparisons,
        pairs=pairs,
        sd=sd,
        power=target_power,
        smallest_difference=smallest_difference,
        smallest_p=smallest_sign_flip_p(pairs) if name == "sign-flip" and pairs else None,
    )


def find_replaced_plan(folder: Path, force: bool) -> Plan | None:
    """Return the plan that a new plan in a folder replaces, or None without one.

    Raises:
        UserError: if there is a plan and `force` is False, if it cannot be read, or if the folder cannot be used.
    """
    output = Output(folder, "plan")
    if force:
        output.recover()
    if not (folder / PLAN).exists():
        output.check([PLAN])
        return None
    if not force:
        raise UserError(
            f"{folder / PLAN} exists; name another folder with --out, or write a new plan with --force, which keeps "
            "this one under another name"
        )
    return read_plan(folder / PLAN)


def write_plan(plan: Plan, folder: Path, force: bool = False) -> Path:
    """Write `plan.yaml` into a folder, and return its path.

    With `force`, an earlier plan is kept as `plan.old-<hash>.yaml`, and the new plan records its hash.

    Raises:
        UserError: as `find_replaced_plan`, or if the file cannot be written.
    """
    files: dict[str, bytes] = {}
    if (replaced_plan := find_replaced_plan(folder, force)) is not None:
        files[f"plan.old-{replaced_plan.compute_hash()[:8]}.yaml"] = (folder / PLAN).read_bytes()
        plan = replace(plan, replaces=[*replaced_plan.replaces, replaced_plan.compute_hash()])
    plan = replace(plan, sha256=plan.compute_hash())
    yaml_text = yaml.safe_dump(asdict(plan), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    # The plan itself is last, so that the earlier one has been kept before it is replaced.
    Output(folder, "plan").write({**files, PLAN: yaml_text.encode()}, saved=(PLAN,) if force else ())
    return folder / PLAN


def read_plan(path: Path) -> Plan:
    """Read the plan of an experiment from its `plan.yaml`.

    Raises:
        UserError: if the file is missing, or is not a plan of this version's format.
    """
    if path.suffix != ".yaml":
        raise UserError(f"{path} is not a plan; expected the {PLAN} that istar plan writes")
    return Plan(**read_record(path, Plan, "a plan", PLAN_FORMAT))


@dataclass(frozen=True)
class Departure:
    """A difference between what was planned and what was done."""

    kind: str  # e.g. `missing run`
    where: str  # task, model and method in words; `all runs` if it concerns no method in particular
    planned: str
    actual: str
    runs: tuple[str, ...] = ()  # names of the runs, or of the planned runs that are missing


def find_departures(plan: Plan, frame: pd.DataFrame) -> list[Departure]:
    """Return all departures from a plan by the runs in a frame; an empty list if there are none.

    A run was planned if its name is in the plan. The runs of a search are not named beforehand, so any run may be one
    of its trials. `frame` is `istar.reports.run_frame.Runs.frame`, with runs of any status.
    """
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    names = {row["name"] for row in rows}
    planned_names = {run["name"] for run in plan.runs}.union(*(group["names"] for group in plan.repetitions))
    # Run names by the fields `kind`, `where`, `planned` and `actual` of their departure.
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
    # The record of an unfinished run is not written yet. Two states of a commit with uncommitted changes may differ.
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
    """Return sentences on the time of the plan and the number of departures from it."""
    count = len(departures)
    text = f"The plan was written at {plan.written} by istar {plan.istar_version}. "
    if plan.trials is not None:
        text += "The runs of a search have no names beforehand, so that their settings and number are not compared. "
    if not count:
        return f"{text}The runs do not depart from it."
    return f"{text}There {'is one departure' if count == 1 else f'are {count} departures'} from it."
