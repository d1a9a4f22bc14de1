"""From trajectories to alarms: in which trainings the default alarms fire, when, and how often."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from rich.table import Table
from scipy.stats import binomtest

from benchmarks.common import make_console
from istar.monitoring.alarms import DEFAULT_ALARMS

CADENCES = 10, 50


class FirstAlarm(NamedTuple):
    """When an alarm goes off for the first time."""

    measure: str
    step: int
    state: str


class Run(NamedTuple):
    """A line of `outcomes.csv`, and the alarms at each cadence."""

    kind: str
    seed: int
    group: str
    skill: float
    outcome: str
    alarms: dict[int, list[FirstAlarm]]

    def is_counted(self) -> bool:
        """Return whether the training ended as its group says."""
        return self.outcome == {"healthy": "healthy", "collapsing": "collapsed"}[self.group]


def find_first_alarms(readings: pd.DataFrame, every: int) -> list[FirstAlarm]:
    """Return when each default alarm of `istar.Monitor` goes off first, as if every `every`-th step had been read.

    `readings` is what `Monitor.save` writes. The result is in the order of the steps.
    """
    history: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in readings.to_dict("records"):
        if row["step"] % every == 0:
            history[row["step"]][row["layer"]] = row
    steps, values = list(history), list(history.values())
    first_alarms = []
    for alarm in DEFAULT_ALARMS:
        for end, step in enumerate(steps, 1):
            if states := alarm.find_states(values[:end]):
                first_alarms.append(FirstAlarm(alarm.measure, step, states[0]))
                break
    return sorted(first_alarms, key=lambda alarm: alarm.step)


def read_runs(folder: Path) -> list[Run]:
    """Return the runs of a folder with their alarms."""
    runs = []
    with (folder / "outcomes.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            readings = pd.read_csv(folder / row["file"], dtype={"layer": str})
            alarms = {every: find_first_alarms(readings, every) for every in CADENCES}
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
    console.print("Not counted, because the training did not end as intended:")
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
    """Return the number of runs with an alarm, then the number, the steps and the states of each alarm."""
    parts = [str(sum(bool(run.alarms[every]) for run in runs))]
    for measure in (alarm.measure for alarm in DEFAULT_ALARMS):
        alarms = [alarm for run in runs for alarm in run.alarms[every] if alarm.measure == measure]
        if alarms:
            steps = sorted({alarm.step for alarm in alarms})
            span = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
            parts.append(
                f"{measure} {len(alarms)}, step {span}, {', '.join(sorted({alarm.state for alarm in alarms}))}"
            )
    return "; ".join(parts)


def _describe_alarms(alarms: Sequence[FirstAlarm]) -> str:
    return ", ".join(f"{alarm.measure} {alarm.step} {alarm.state}" for alarm in alarms)


def _describe_rate(group: str, every: int, runs_of: dict[str, list[Run]]) -> str:
    """Return the share of counted runs and of kinds with an alarm, with exact 95% intervals.

    Runs of one kind resemble each other, so the interval of kinds is the one to believe. A healthy kind counts if any
    of its runs has an alarm, a collapsing one only if all have.
    """
    counted_of = {kind: [run for run in runs if run.is_counted()] for kind, runs in runs_of.items()}
    fired = [[bool(run.alarms[every]) for run in runs] for runs in counted_of.values() if runs]
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
