"""From trajectories to alarms: in which trainings the default alarms fire, when, and how often."""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from scipy.stats import binomtest

from benchmarks.alarms.trace import Reading, read_readings
from benchmarks.common import make_console

CADENCES = 10, 50
CONSECUTIVE = 3
"""Readings that must meet a condition, one after the other."""
PARALLEL_SHARE = 0.1
"""Alarm A: the share of the first value of 1 - InterSim."""
FLAT_RATIO, FLAT_SHARE = 1.5, 0.2
"""Alarm B: the participation ratio, and the share of its first value."""


class Alarm(NamedTuple):
    """The first alarm of a rule: A (InterSim), B (participation ratio) or N (measures that are not defined)."""

    rule: str
    step: int
    state: str


class Run(NamedTuple):
    """A line of `outcomes.csv`, and the alarms at each cadence."""

    kind: str
    seed: int
    group: str
    skill: float
    outcome: str
    alarms: dict[int, list[Alarm]]

    def is_counted(self) -> bool:
        """Return whether the training ended as its group says."""
        return self.outcome == {"healthy": "healthy", "collapsing": "collapsed"}[self.group]

    def default_alarms(self, every: int) -> list[Alarm]:
        """Return the alarms of A and B, the earliest first."""
        return sorted((alarm for alarm in self.alarms[every] if alarm.rule != "N"), key=lambda alarm: alarm.step)


def count_alarms(readings: Iterable[Reading], every: int) -> list[Alarm]:
    """Return the first alarm of each rule, as if the states had been read every `every` steps.

    The last state of the first reading is the last or pooled state, the only one that A looks at.
    """
    readings_of: dict[str, list[Reading]] = defaultdict(list)
    for reading in readings:
        if reading.step % every == 0:
            readings_of[reading.state].append(reading)
    last = next(reversed(readings_of))
    alarms: dict[str, Alarm] = {}
    for state, states in readings_of.items():
        for end in range(CONSECUTIVE, len(states) + 1):
            first, latest = states[0], states[end - CONSECUTIVE : end]
            fired = {
                "A": state == last and _is_parallel(first, latest),
                "B": _is_flat(first, latest),
                "N": _is_nan(latest),
            }
            for rule in (rule for rule, has_fired in fired.items() if has_fired):
                alarm = Alarm(rule, latest[-1].step, state)
                alarms[rule] = min(alarms.get(rule, alarm), alarm, key=lambda alarm: alarm.step)
    return [alarms[rule] for rule in sorted(alarms)]


def _is_parallel(first: Reading, latest: Sequence[Reading]) -> bool:
    """Return whether 1 - InterSim is far below its first value in all readings, and does not grow over them."""
    distances = [1 - reading.inter_sim for reading in latest]
    is_low = all(distance < PARALLEL_SHARE * (1 - first.inter_sim) for distance in distances)
    return is_low and distances[-1] <= distances[0]


def _is_flat(first: Reading, latest: Sequence[Reading]) -> bool:
    """Return whether the participation ratio is near 1 and far below its first value in all readings."""
    bound = min(FLAT_RATIO, FLAT_SHARE * first.participation_ratio)
    return all(reading.participation_ratio < bound for reading in latest)


def _is_nan(latest: Sequence[Reading]) -> bool:
    """Return whether a measure is undefined in all readings, because states are constant, zero or not finite."""
    return all(math.isnan(reading.inter_sim + reading.participation_ratio) for reading in latest)


def read_runs(folder: Path) -> list[Run]:
    """Return the runs of a folder with their alarms."""
    runs = []
    with (folder / "outcomes.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            readings = read_readings(folder / row["file"])
            alarms = {every: count_alarms(readings, every) for every in CADENCES}
            runs.append(Run(row["kind"], int(row["seed"]), row["group"], float(row["skill"]), row["outcome"], alarms))
    return runs


def print_rates(folder: Path) -> None:
    """Print a table of the kinds, and the rates of false alarms and of detected collapses with intervals."""
    runs, console = read_runs(folder), make_console()
    for group in dict.fromkeys(run.group for run in runs):
        runs_of: dict[str, list[Run]] = defaultdict(list)
        for run in runs:
            if run.group == group:
                runs_of[run.kind].append(run)
        console.print(_make_table(group, runs_of))
        for every in CADENCES:
            console.print(_describe_rate(group, every, runs_of))
    console.print("Not counted, because the outcome is not that of the group:")
    for run in runs:
        if not run.is_counted():
            alarms = [f"every={every}: {_describe_alarms(run.alarms[every]) or 'no alarm'}" for every in CADENCES]
            console.print(f"- {run.group}: {run.kind} {run.seed}, skill {run.skill:.2f};", "; ".join(alarms))


def _make_table(group: str, runs_of: dict[str, list[Run]]) -> Table:
    table = Table(
        "kind", "counted", "skill", *(f"alarms at every={every}" for every in CADENCES), title=f"{group} trainings"
    )
    for kind, runs in runs_of.items():
        counted = [run for run in runs if run.is_counted()]
        skills = [run.skill for run in counted or runs]
        alarms = [_summarize_alarms(counted, every) for every in CADENCES]
        table.add_row(kind, f"{len(counted)} of {len(runs)}", f"{min(skills):.2f} to {max(skills):.2f}", *alarms)
    return table


def _summarize_alarms(runs: Sequence[Run], every: int) -> str:
    """Return the number of runs with an alarm of A or B, then the number, steps and states of each rule."""
    parts = [str(sum(bool(run.default_alarms(every)) for run in runs))]
    for rule in "ABN":
        alarms = [alarm for run in runs for alarm in run.alarms[every] if alarm.rule == rule]
        if alarms:
            steps = sorted({alarm.step for alarm in alarms})
            span = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
            parts.append(f"{rule} {len(alarms)}, step {span}, {', '.join(sorted({alarm.state for alarm in alarms}))}")
    return "; ".join(parts)


def _describe_alarms(alarms: Sequence[Alarm]) -> str:
    return ", ".join(f"{alarm.rule} {alarm.step} {alarm.state}" for alarm in alarms)


def _describe_rate(group: str, every: int, runs_of: dict[str, list[Run]]) -> str:
    """Return the share of counted runs and of kinds with an alarm, with exact 95% intervals.

    Runs of one kind resemble each other, so the interval of kinds is the one to believe. A healthy kind counts if any
    of its runs has an alarm, a collapsing one only if all have.
    """
    counted_of = {kind: [run for run in runs if run.is_counted()] for kind, runs in runs_of.items()}
    fired = [[bool(run.default_alarms(every)) for run in runs] for runs in counted_of.values() if runs]
    word, decide = ("any", any) if group == "healthy" else ("each", all)
    rates = (
        ("runs", [has_fired for runs in fired for has_fired in runs]),
        (f"kinds ({word} run)", [decide(runs) for runs in fired]),
    )
    parts = []
    for name, values in rates:
        if values:
            interval = binomtest(sum(values), len(values)).proportion_ci(0.95, "exact")
            parts.append(f"{sum(values)} of {len(values)} {name}, {interval.low:.1%} to {interval.high:.1%}")
    return f"{group}, every={every}: alarms in {'; in '.join(parts)}"
