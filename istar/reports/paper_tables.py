"""The report's tables: the paper's Tables 1 and 2 beside the published numbers, run times, and excluded runs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from istar.pages.sheets import Entry, Sheet
from istar.reports import paper
from istar.reports.cells import Cell, describe, differing_keys, is_finite, row_dicts
from istar.reports.run_tables import format_number
from istar.reports.statistics import compare_paired
from istar.scores import merit

NONE = "-"

Row = Mapping[str, Any]


def table1(cells: Sequence[Cell]) -> Sheet:
    """Return Table 1: metrics by model, task and method, compared with the paper and, by paired tests, with Base."""
    rows = []
    for _, group in groupby(cells, key=lambda cell: (cell.model, cell.task)):
        rows += _table1_rows(list(group))
    hyperparameters = {row["hyperparameters"] for row in rows} - {""}
    common = hyperparameters.pop() if len(hyperparameters) == 1 else ""
    return Sheet(
        "table1",
        "Table 1: performance",
        "Metric on the validation set in percent, mean ± standard deviation (ddof = 1) over seeds; bold: per model and "
        "task, the best mean among the methods with the most seeds, without those whose runs have all collapsed to "
        "constant predictions. Paper: Table 1 of Rudman and Eickhoff (2024), five seeds, development sets. "
        "Chosen on: the set that chose the epoch and the configuration, the reported validation set itself or held-out "
        "training data. Minus Base: mean difference from Base over the seeds that both have; p: two-sided, paired over "
        "these seeds, not corrected for the number of rows.",
        ("task, metric", "method", "λ", "ζ", "mean ± std", "seeds", "chosen\non", "paper", "minus\npaper",
         "minus\nBase", "pairs", "p,\nt-test", "p,\nsign-flip", "remarks"),
        _group_by_model(rows, lambda row: _table1_entries(row, common)),
        pd.DataFrame(rows).drop(columns=["best", "most_seeds", "all_collapsed"]),
        (f"All runs: {common}.",) if common else (),
        num_row_headers=2,
    )  # fmt: skip


def _group_by_model(rows: Iterable[Row], to_entries: Callable[[Row], list[Entry]]) -> dict[str, list[list[Entry]]]:
    """Convert rows to table entries and group these by model, in order of appearance."""
    groups: dict[str, list[list[Entry]]] = {}
    for row in rows:
        groups.setdefault(row["model"], []).append(to_entries(row))
    return groups


def _table1_rows(group: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return a row per metric and method for the cells of one model and task; without any result, the metric is ''."""
    base = next(cell for cell in group if cell.family == "base")
    rows = []
    for metric in max((cell.metrics for cell in group), key=len) or [""]:
        metric_rows = [_table1_row(cell, base, metric) for cell in group]
        most_seeds = max(row["seeds"] for row in metric_rows)
        valid = [row for row in metric_rows if row["mean"] is not None and not row["all_collapsed"]]
        fullest = max((row["seeds"] for row in valid), default=0)
        # Means that are equal to the two digits shown are equally good.
        means = [round(row["mean"], 2) for row in valid if row["seeds"] == fullest]
        best = max(means, key=lambda mean: merit(metric, mean), default=None)
        for row in metric_rows:
            row["best"] = row in valid and row["seeds"] == fullest and round(row["mean"], 2) == best
            row["most_seeds"] = most_seeds
        rows += metric_rows
    return rows


def _table1_row(cell: Cell, base: Cell, metric: str) -> dict[str, Any]:
    """Return a cell's row of Table 1: its scores, the published ones, and the comparison with Base."""
    scores = cell.spread(metric)
    published = paper.score(cell.model, cell.task, metric, cell.family)
    first_run = cell.first_run
    row = {
        "model": cell.model,
        "task": cell.task,
        "metric": metric,
        "split": "validation",
        "method": paper.FAMILIES[cell.family],
        "lambda": _finite(first_run.get("reg.lambda")) if cell.family != "base" else None,
        "zeta": _finite(first_run.get("reg.zeta")) if cell.family == "istar" else None,
        "mean": scores.mean,
        "std": scores.std,
        "seeds": scores.count,
        "which_seeds": " ".join(map(str, cell.seeds)),
        "paper_mean": published.mean if published else None,
        "paper_std": published.std if published else None,
        "minus_paper": scores.mean - published.mean if published and scores.mean is not None else None,
        **dict.fromkeys(("minus_base", "pairs", "p_t_test", "p_sign_flip", "no_test")),
        "collapsed": cell.collapsed,
        "all_collapsed": cell.all_collapsed,
        "failed": cell.failed,
        "pruned": cell.pruned,
        "configurations": cell.configurations,
        "base_configurations": base.configurations,
        "chosen_on": cell.chosen_on,
        "hyperparameters": describe(first_run),
        "differs_from_base": "",
    }
    if cell.family != "base" and metric in cell.metrics:
        comparison = compare_paired(cell.by_seed(metric), base.by_seed(metric))
        reasons = dict.fromkeys(test.reason for test in (comparison.t_test, comparison.sign_flip) if test.reason)
        row |= {
            "minus_base": comparison.difference,
            "pairs": comparison.pairs,
            "p_t_test": comparison.t_test.p_value,
            "p_sign_flip": comparison.sign_flip.p_value,
            "no_test": "; ".join(reasons) or None,
            "differs_from_base": " ".join(differing_keys(base.first_run, first_run)),
        }
    return row


def _table1_entries(row: Row, common: str) -> list[Entry]:
    """Format a row of Table 1; the remarks have the hyperparameters only if they differ from the common ones."""
    remarks = [
        "" if row["seeds"] else "no finished run",
        f"{row['seeds']} of {row['most_seeds']} seeds" if 0 < row["seeds"] < row["most_seeds"] else "",
        *(f"{row[count]} {count}" if row[count] else "" for count in ("collapsed", "failed", "pruned")),
        f"best of {row['configurations']}" if row["configurations"] > 1 else "",
        _unequal_choice(row),
        row["no_test"],
        f"differs from Base in {row['differs_from_base']}" if row["differs_from_base"] else "",
        row["hyperparameters"] if row["hyperparameters"] != common else "",
    ]
    numbers = [
        format_spread(row["paper_mean"], row["paper_std"]),
        format_number(row["minus_paper"], "+.2f"),
        format_number(row["minus_base"], "+.2f"),
        format_number(row["pairs"], "d"),
        format_p_value(row["p_t_test"]),
        format_p_value(row["p_sign_flip"]),
    ]
    return [
        Entry(f"{row['task']}, {row['metric']}" if row["metric"] else row["task"]),
        Entry(row["method"]),
        Entry(format_number(row["lambda"], "g"), number=True),
        Entry(format_number(row["zeta"], "g"), number=True),
        Entry(_mark_collapsed(format_spread(row["mean"], row["std"]), row), bold=row["best"], number=True),
        Entry(str(row["seeds"]), number=True),
        Entry(row["chosen_on"] or NONE),
        *(Entry(number, number=True) for number in numbers),
        Entry("; ".join(filter(None, remarks))),
    ]


def _unequal_choice(row: Row) -> str:
    """Return the remark that a method and Base are the best of different numbers of configurations."""
    tried, tried_of_base = row["configurations"], row["base_configurations"]
    is_unequal = tried and tried_of_base and tried != tried_of_base
    return f"Base is the best of {tried_of_base}" if is_unequal else ""


def table2(cells: Sequence[Cell], frame: pd.DataFrame) -> Sheet:
    """Return Table 2: lambda and zeta of the I-STAR runs in Table 1, compared with the paper's best values."""
    rows = [_table2_row(cell, len(tried_pairs(frame, cell))) for cell in cells if cell.family == "istar"]
    return Sheet(
        "table2",
        "Table 2: best λ | ζ",
        "λ | ζ of I-STAR with the most seeds, among these with the best mean on the set that chose (the reported "
        "validation set itself or held-out training data), and the number of pairs tried. "
        "Paper: Table 2, searched over λ in -5, -3, -1, 1, 3, 5 and ζ in 0.2, 0.4, 0.6, 0.8.",
        ("task", "λ | ζ", "seeds", "mean, percent", "pairs tried", "paper", "agreement", "chosen on"),
        _group_by_model(rows, _table2_entries),
        pd.DataFrame(rows).drop(columns="all_collapsed", errors="ignore"),
    )


def _mark_collapsed(text: str, row: Row) -> str:
    """Mark a mean over runs whose predictions are all constant."""
    return f"{text} (collapsed)" if row["all_collapsed"] else text


def tried_pairs(frame: pd.DataFrame, cell: Cell) -> set[tuple[float, float]]:
    """Return every (lambda, zeta) with which a candidate run of the cell's task, model and family has finished."""
    runs = frame[frame["candidate"] & frame["usable"] & (frame["family"] == cell.family)]
    runs = runs[(runs["model"] == cell.model) & (runs["task"] == cell.task)]
    return {(float(run["reg.lambda"]), float(run["reg.zeta"])) for run in row_dicts(runs)}


def _table2_row(cell: Cell, tried: int) -> dict[str, Any]:
    """Return the row of Table 2 for the best configuration of a task, out of `tried`."""
    published = paper.tuned_penalty(cell.model, cell.task)
    metric = cell.metrics[0] if cell.metrics else ""
    return {
        "model": cell.model,
        "task": cell.task,
        "metric": metric,
        "split": "validation",
        "lambda": _finite(cell.first_run.get("reg.lambda")),
        "zeta": _finite(cell.first_run.get("reg.zeta")),
        "seeds": len(cell.seeds),
        "mean": cell.spread(metric).mean,
        "all_collapsed": cell.all_collapsed,
        "tried": tried,
        "chosen_on": cell.chosen_on,
        "paper_lambda": published.weight if published else None,
        "paper_zeta": published.zeta if published else None,
    }


def _table2_entries(row: Row) -> list[Entry]:
    """Format a row of Table 2."""
    best, published = (
        NONE if row[weight] is None or row[zeta] is None else f"{row[weight]:g} | {row[zeta]:g}"
        for weight, zeta in (("lambda", "zeta"), ("paper_lambda", "paper_zeta"))
    )
    agreement = NONE if NONE in (best, published) else "same" if best == published else "differs"
    numbers = [best, str(row["seeds"]), _mark_collapsed(format_number(row["mean"], ".2f"), row)]
    numbers += [str(row["tried"]), published]
    texts = [Entry(agreement), Entry(row["chosen_on"] or NONE)]
    return [Entry(row["task"]), *(Entry(number, number=True) for number in numbers), *texts]


def costs(frame: pd.DataFrame, shrinkage_seconds: Mapping[str, Sequence[float]]) -> Sheet:
    """Return the run times of finished runs by model, task and method family.

    `shrinkage_seconds` are the seconds of each estimation of Sigma_S, by the run's folder.
    """
    finished = frame[frame["usable"] & frame["seconds"].notna()]
    finished = finished.assign(
        method=finished["family"].replace(paper.FAMILIES),
        seconds=finished["seconds"].astype(float),
        shrinkage=[math.fsum(shrinkage_seconds.get(folder, ())) for folder in finished["folder"]],
    )
    groups = finished.groupby(["model", "task", "method"], as_index=False)
    costs_by_method = groups.agg(
        runs=("seconds", "size"),
        seconds_mean=("seconds", "mean"),
        seconds_std=("seconds", "std"),
        seconds_sum=("seconds", "sum"),
        shrinkage_seconds_mean=("shrinkage", "mean"),
    )
    share = costs_by_method["shrinkage_seconds_mean"] / costs_by_method["seconds_mean"]
    costs_by_method["shrinkage_share"] = share.fillna(0.0)
    totals = costs_by_method.groupby("method", sort=False)["seconds_sum"].sum()
    return Sheet(
        "cost",
        "Cost",
        "Seconds per finished run (of the process that finished it), mean ± standard deviation; Σ_S: seconds per run "
        "for the shrinkage covariance, and its share. The runs do not record their machine: compare only runs that "
        "ran on the same one.",
        ("task", "method", "runs", "seconds a run", "hours:minutes in all", "Σ_S seconds a run", "Σ_S share"),
        _group_by_model(row_dicts(costs_by_method), _cost_entries),
        costs_by_method,
        tuple(f"{method}: {format_duration(seconds)} (hours:minutes) in all." for method, seconds in totals.items()),
    )


def _cost_entries(row: Row) -> list[Entry]:
    """Format a row of the table of run times."""
    has_shrinkage = row["shrinkage_seconds_mean"] > 0
    numbers = (
        str(row["runs"]),
        format_spread(row["seconds_mean"], row["seconds_std"], ".0f"),
        format_duration(row["seconds_sum"]),
        f"{row['shrinkage_seconds_mean']:.1f}" if has_shrinkage else NONE,
        f"{100 * row['shrinkage_share']:.1f} %" if has_shrinkage else NONE,
    )
    return [Entry(row["task"]), Entry(row["method"]), *(Entry(number, number=True) for number in numbers)]


def left_out(frame: pd.DataFrame, read_errors: Mapping[str, str], root: str) -> Sheet:
    """Return the table of runs that no other table includes, and of folders with read errors, relative to `root`."""
    columns = ("folder", "what", "method", "why")
    rows = []
    for run in row_dicts(frame[~frame["usable"]].astype(object)):
        what = run["status"]
        if what == "finished":
            what = "repeated" if run["repeated"] else "without a value"
        error = run["error"] if isinstance(run["error"], str) else ""
        rows.append((_relative(run["folder"], root), what, run["method"], error or _EXCLUSION_REASONS.get(what, "")))
    for folder, error in read_errors.items():
        rows.append((_relative(folder, root), "not read", "", error.replace(folder, "it")))
    return Sheet(
        "left_out",
        "Runs that do not count",
        "Failed, unfinished, pruned (stopped early by a search) and repeated runs, and folders that hold no run.",
        columns,
        {"": [[Entry(text) for text in row] for row in rows]},
        pd.DataFrame(rows, columns=columns),
    )


_EXCLUSION_REASONS = {
    "unfinished": "no result yet; the same command resumes it",
    "pruned": "stopped early by a search; it never counts",
    "repeated": "the same configuration, data and seed as another run",
    "without a value": "its headline metric is no number",
}


def format_spread(mean: float | None, std: float | None, format_spec: str = ".2f") -> str:
    """Format as `62.53 ± 0.70`, without a deviation (None or NaN) as `62.53`, and without a mean as a dash."""
    if mean is None:
        return NONE
    return f"{mean:{format_spec}}" if pd.isna(std) else f"{mean:{format_spec}} ± {std:{format_spec}}"


def format_p_value(p_value: float | None) -> str:
    """Format with four digits; a p-value below 0.001 as `<0.001`, and None as a dash."""
    if p_value is None:
        return NONE
    return "<0.001" if p_value < 0.001 else f"{p_value:.4f}"


def format_duration(seconds: float) -> str:
    """Format as hours and minutes: 3725 becomes `1:02`."""
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d}"


def _finite(value: Any) -> float | None:
    return float(value) if is_finite(value) else None


def _relative(folder: str, root: str) -> str:
    return folder.removeprefix(root).lstrip("/") or folder
