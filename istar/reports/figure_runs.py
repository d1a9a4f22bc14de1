"""Selects the runs that a figure of the paper shows, and describes what they have in common.

The runs of a line differ only in the seed and in the penalty's setting that the x axis or the legend varies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from istar.drawing.plot import Line, Panel
from istar.reports import configurations
from istar.runs.names import BASE_LABEL, axis_label, metric_range
from istar.statistics.arguments import is_finite

_SYMBOLS = {"reg.lambda": "λ", "reg.zeta": "ζ", "reg.layers": "layer"}


@dataclass(frozen=True)
class FigureRuns:
    """The runs of one model and task that a panel shows."""

    varied: str  # the config key that the figure varies
    candidates: pd.DataFrame  # runs of one method, before the selection
    selected: pd.DataFrame  # the selected candidates, which differ only in the seed and in `varied`
    runs_by_value: Mapping[Any, pd.DataFrame]  # shown runs by the value of `varied`; `BASE_LABEL` without a penalty

    @property
    def folders(self) -> list[str]:
        """The folders of the runs that are shown."""
        return [folder for runs in self.runs_by_value.values() for folder in runs["folder"]]


def split_by_task(all_runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the usable runs of each model and task; an empty list if no run has a penalty."""
    usable_runs = all_runs[all_runs["usable"]]
    return list(configurations.by_model_and_task(usable_runs)) if "reg.lambda" in usable_runs else []


def get_istar_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of I-STAR with a fixed zeta that penalize all layers."""
    return runs[runs["has_fixed_zeta"] & runs["reg.layers"].eq("all")]


def select_by_lambda(runs: pd.DataFrame, candidates: pd.DataFrame) -> FigureRuns:
    """Select the runs of Base and of each lambda, with equal other settings.

    `runs` are the usable runs of one model and task, and `candidates` the runs of one penalty among them.
    """
    selected = select_settings(candidates, "reg.lambda")
    has_same_settings = configurations.hash_without(runs, "reg") == selected["key"].iloc[0].without("reg")
    base_runs = runs[(runs["family"] == "base") & has_same_settings]
    runs_by_lambda = {**({} if base_runs.empty else {BASE_LABEL: base_runs}), **group_by_number(selected, "reg.lambda")}
    return FigureRuns("reg.lambda", candidates, selected, runs_by_lambda)


def select_settings(candidates: pd.DataFrame, varied: str) -> pd.DataFrame:
    """Select the runs that a figure shows: they share all settings but the seed and `varied`, a config key.

    These are the settings of Table 1's configuration. If only one value of `varied` was tried with that configuration,
    but several with others, they are the settings of the best of the others; see `find_best_group`. `candidates` are
    the runs of one model, task and method.
    """
    settings = choose_settings(candidates, varied)
    return candidates[configurations.hash_without(candidates, varied) == settings]


def choose_settings(candidates: pd.DataFrame, varied: str) -> str:
    """Return the hash of the settings that `select_settings` selects."""
    candidates = candidates.assign(shared=configurations.hash_without(candidates, varied))
    has_several_values = candidates.groupby("shared")["configuration"].transform("nunique") > 1
    preferred = candidates[has_several_values] if has_several_values.any() else candidates
    table1_key = candidates["table1_key"].iloc[0]
    table1_hash = "" if table1_key is None else table1_key.without(varied)
    return (
        table1_hash if table1_hash in set(preferred["shared"]) else configurations.find_best_group(preferred, "shared")
    )


def group_by_number(runs: pd.DataFrame, column: str) -> dict[Any, pd.DataFrame]:
    """Group the runs by the number in a column, in ascending order."""
    return {float(number): group for number, group in runs.groupby(runs[column].astype(float))}


def build_panel(selection: FigureRuns, lines: Sequence[Line], y_label: str = "") -> Panel:
    """Return a panel of lines with a description of the settings that its runs share.

    Without `y_label`, the label is the headline metric.
    """
    varied, symbol = selection.varied, _SYMBOLS[selection.varied]
    first_run = configurations.row_dicts(selection.selected.head(1))[0]
    settings = [
        f"{_SYMBOLS[key]} = {first_run[key]:g}"
        for key in ("reg.lambda", "reg.zeta")
        if key != varied and is_finite(first_run.get(key))
    ]
    num_runs = len(selection.folders)
    counts = f"{num_runs} run{'s' * (num_runs > 1)}"
    shown_hashes, all_hashes = (
        set(configurations.hash_without(runs, varied)) for runs in (selection.selected, selection.candidates)
    )
    if (num_hidden := len(all_hashes) - 1) > 0:
        counts += f", {num_hidden} other configuration{'s' * (num_hidden > 1)} not shown"
        table1_key = first_run["table1_key"]
        if table1_key is not None and table1_key.without(varied) in all_hashes - shown_hashes:
            counts += f", among them that of Table 1, for which only one {symbol} was tried"
    notes = [", ".join([*settings, configurations.describe_hyperparameters(first_run)]), counts]
    max_seeds = max(map(len, selection.runs_by_value.values()), default=0)
    fewer_seeds = [
        f"{len(runs)} at {value if isinstance(value, str) else f'{symbol} = {value:g}'}"
        for value, runs in selection.runs_by_value.items()
        if 0 < len(runs) < max_seeds
    ]
    notes += [f"fewer than {max_seeds} seeds: {', '.join(fewer_seeds)}"] if fewer_seeds else []
    return Panel(
        y_label or axis_label(first_run["metric"]),
        lines,
        first_run["task"],
        first_run["model"],
        fixed_settings="; ".join(notes),
        y_bounds=(0, 1) if y_label.startswith("IsoScore") else None,
        y_range=None if y_label else metric_range(first_run["metric"]),
    )
