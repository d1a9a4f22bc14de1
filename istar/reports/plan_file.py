"""The plan of an experiment (`plan.yaml`), which `istar plan` writes before the runs: its fields, writing and reading.

The name of a run ends with a hash of its config, data and weights, so the names of the planned runs say what is done.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, TypedDict

import yaml

from istar.errors import UserError
from istar.files.outputs import Output
from istar.files.parsing import read_record
from istar.records.identity import BASE_LABEL
from istar.records.run_rows import PlannedRun, Repetitions
from istar.statistics import power
from istar.statistics.paired import smallest_sign_flip_p

PLAN = "plan.yaml"
PLAN_FORMAT = 2
TestName = Literal["t", "sign-flip"]


class PlannedTest(TypedDict):
    """The test of each method against Base; see `plan_test`."""

    name: TestName  # a key of `paired.TESTS`
    alpha: float  # probability of any false difference among all comparisons
    comparisons: int  # number of comparisons with Base; 0 for a search, where it is not known beforehand
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
    overrides_by_grid: dict[str, list[str]]  # the name is empty if the sweep has no named grids
    trials: int | None  # greatest number of trials of a search; None for a grid
    seeds_of_best: list[int]  # `sweep.seeds`
    runs: list[PlannedRun]  # empty for a search, whose runs have no names before it starts
    repetitions: list[Repetitions]
    replaces: list[str] = field(default_factory=list)  # hashes of the plans that this one has replaced
    sha256: str = ""  # hash of the other fields when the plan was written
    format: int = PLAN_FORMAT

    @property
    def num_runs(self) -> int:
        """The number of planned runs; of a search, the greatest number of its trials."""
        return self.trials or len(self.runs) + sum(len(group["seeds"]) for group in self.repetitions)

    def compute_hash(self) -> str:
        """Return the SHA-256 of the contents, which does not depend on the layout of the file or on comments."""
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

    Each group of `repetitions` is compared with Base. Without repetitions, each method with its settings is. The
    smallest difference is for the paired t-test at alpha divided by the number of comparisons, the strictest level of
    Holm's method. It is None without `sd`, without comparisons, or with fewer than two seeds.

    Raises:
        UserError: if alpha, `sd` or the power is out of range.
    """
    # Checks the arguments also where there is nothing to compute.
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
    """Return the plan that a new plan in a folder replaces, or None if the folder has no plan.

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
        UserError: if there is no such file, or if it is not a plan of this version's format.
    """
    if path.suffix != ".yaml":
        raise UserError(f"{path} is not a plan; expected the {PLAN} that istar plan writes")
    return Plan(**read_record(path, Plan, "a plan", PLAN_FORMAT))
