"""The report's tables: the paper's Tables 1 and 2 next to the published numbers, run times, and excluded runs."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

import pandas as pd

from istar.drawing.page_tables import (
    EMPTY_CELL,
    Entry,
    Sheet,
    format_mean_and_std,
    format_p_value,
    group_rows_by_model,
    numeric_entries,
)
from istar.drawing.terminal import format_duration
from istar.reports import paper
from istar.reports.configurations import (
    Cell,
    are_all_collapsed,
    describe_hyperparameters,
    find_differing_keys,
    have_same_inputs,
    row_dicts,
)
from istar.runs.labels import shorten_model_name
from istar.runs.names import count_decimals, format_number, merit
from istar.statistics.arguments import is_finite
from istar.statistics.paired import compute_p_value

TableRow = Mapping[str, Any]
"""A table row: values by column name."""


def build_table1_sheet(cells: Sequence[Cell]) -> Sheet:
    """Return Table 1: metrics by model, task and method, compared with the paper and, by paired tests, with Base."""
    rows: list[dict[str, Any]] = []
    tasks_by_settings: dict[str, list[str]] = {}
    for (model, task), task_cells in groupby(cells, key=lambda cell: (cell.model, cell.task)):
        task_rows = _build_table1_rows(list(task_cells))
        settings = {row["hyperparameters"] for row in task_rows} - {""}
        if has_common_settings := len(settings) == 1:
            tasks_by_settings.setdefault(settings.pop(), []).append(f"{task} with {model}")
        task_rows = [row for row in task_rows if row["seeds"] or row["failed"] or row["pruned"]]
        rows += [{**row, "has_common_settings": has_common_settings} for row in task_rows]
    return Sheet(
        name="table1",
        title="Table 1: performance",
        caption="Metric on the validation set in percent, mean ± standard deviation (ddof = 1) over seeds; bold: per "
        "model and task, the best mean among the methods with the most seeds, without those whose runs have all "
        "collapsed to constant predictions. Paper: Table 1 of Rudman and Eickhoff (2024), five seeds, development "
        "sets. Chosen on: the set on which the epoch and the configuration were chosen, the reported validation "
        "set itself or held-out training data. Minus Base: mean difference from Base over the seeds that both have; "
        "p: two-sided, paired over these seeds, not corrected for the number of rows.",
        header=("task, metric", "method", "λ", "ζ", "mean ± std", "seeds", "chosen\non", "paper", "minus\npaper",
                "minus\nBase", "pairs", "p,\nt-test", "p,\nsign-flip", "remarks"),
        rows_by_group=group_rows_by_model(rows, _format_table1_row),
        frame=pd.DataFrame(rows).drop(
            columns=["best", "most_seeds", "all_collapsed", "has_common_settings"], errors="ignore"
        ),
        notes=tuple(f"{', '.join(tasks)}: {settings}." for settings, tasks in tasks_by_settings.items()),
        num_row_headers=2,
        descriptive=("seeds", "chosen\non", "pairs"),
    )  # fmt: skip


def _build_table1_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    base = next(cell for cell in cells if cell.family == "base")
    names = _get_names_in_paper(next((cell for cell in cells if cell.seeds), base))
    rows = []
    # The longest list of metrics, because cells without a finished run have none.
    for metric in max((cell.metrics for cell in cells), key=len) or [""]:
        metric_rows = [_build_table1_row(cell, base, metric, names) for cell in cells]
        max_seeds = max(row["seeds"] for row in metric_rows)
        valid_rows = [row for row in metric_rows if row["mean"] is not None and not row["all_collapsed"]]
        max_valid_seeds = max((row["seeds"] for row in valid_rows), default=0)
        # Means that are equal to the two digits shown are equally good.
        rounded_means = [round(row["mean"], 2) for row in valid_rows if row["seeds"] == max_valid_seeds]
        best_mean = max(rounded_means, key=lambda mean: merit(metric, mean), default=None)
        for row in metric_rows:
            is_eligible = row in valid_rows and row["seeds"] == max_valid_seeds
            row["best"] = is_eligible and round(row["mean"], 2) == best_mean
            row["most_seeds"] = max_seeds
        rows += metric_rows
    return rows


def _get_names_in_paper(cell: Cell) -> tuple[str, str]:
    return shorten_model_name(str(cell.first_run.get("model.name"))), str(cell.first_run.get("task.name"))


def _build_table1_row(cell: Cell, base: Cell, metric: str, names_in_paper: tuple[str, str]) -> dict[str, Any]:
    scores = cell.mean_and_std(metric)
    paper_mean, paper_std = paper.look_up_score(*names_in_paper, metric, cell.family) or (None, None)
    first_run = cell.first_run
    row = {
        "model": cell.model,
        "task": cell.task,
        "metric": metric,
        "split": "validation",
        "method": paper.FAMILIES[cell.family],
        "lambda": _finite_or_none(first_run.get("reg.lambda")) if cell.family != "base" else None,
        "zeta": _finite_or_none(first_run.get("reg.zeta")) if cell.family == "istar" else None,
        "mean": scores.mean,
        "std": scores.std,
        "seeds": scores.count,
        "which_seeds": " ".join(map(str, cell.seeds)),
        "paper_mean": paper_mean,
        "paper_std": paper_std,
        "minus_paper": None if scores.mean is None or paper_mean is None else scores.mean - paper_mean,
        **dict.fromkeys(("minus_base", "pairs", "p_t_test", "p_sign_flip")),
        "collapsed": int(cell.runs["collapsed"].eq(True).sum()),
        "all_collapsed": are_all_collapsed(cell.runs),
        "failed": cell.num_failed,
        "pruned": cell.num_pruned,
        "configurations": cell.num_configurations,
        "base_configurations": base.num_configurations,
        "chosen_on": cell.selection_set,
        "hyperparameters": describe_hyperparameters(first_run),
        "differs_from_base": "",
    }
    if cell.family != "base" and metric in cell.metrics:
        scores_by_seed, base_by_seed = cell.score_by_seed(metric), base.score_by_seed(metric)
        has_same_inputs = base.runs.empty or have_same_inputs(cell.runs, base.runs)
        differing_keys = [] if base.runs.empty else find_differing_keys(base.first_run["key"], first_run["key"])
        seeds = sorted(scores_by_seed.keys() & base_by_seed.keys()) if has_same_inputs else []
        differences = [scores_by_seed[seed] - base_by_seed[seed] for seed in seeds]
        row |= {
            "minus_base": fmean(differences) if differences else None,
            "pairs": len(differences),
            "p_t_test": compute_p_value(differences, "t"),
            "p_sign_flip": compute_p_value(differences, "sign-flip"),
            "differs_from_base": " ".join([*differing_keys, *([] if has_same_inputs else ["model or data"])]),
        }
    return row


def _format_table1_row(row: TableRow) -> list[Entry]:
    """Return the entries of a row; remarks name hyperparameters only where they differ within a model and task."""
    remarks = [
        "" if row["seeds"] else "no finished run",
        f"{row['seeds']} of {row['most_seeds']} seeds" if 0 < row["seeds"] < row["most_seeds"] else "",
        *(f"{row[status]} {status}" if row[status] else "" for status in ("collapsed", "failed", "pruned")),
        f"best of {row['configurations']}" if row["configurations"] > 1 else "",
        _describe_unequal_tuning(row),
        f"differs from Base in {row['differs_from_base']}" if row["differs_from_base"] else "",
        "" if row["has_common_settings"] else row["hyperparameters"],
    ]
    number_texts = [
        format_mean_and_std(row["paper_mean"], row["paper_std"]),
        format_number(row["minus_paper"], "+.2f"),
        format_number(row["minus_base"], "+.2f"),
        format_number(row["pairs"], "d"),
        format_p_value(row["p_t_test"]),
        format_p_value(row["p_sign_flip"]),
    ]
    mean_and_std = format_mean_and_std(row["mean"], row["std"], f".{count_decimals(row['std'])}f")
    return [
        Entry(f"{row['task']}, {row['metric']}" if row["metric"] else row["task"]),
        Entry(row["method"]),
        Entry(format_number(row["lambda"], "g"), number=True),
        Entry(format_number(row["zeta"], "g"), number=True),
        Entry(_mark_collapsed(mean_and_std, row), bold=row["best"], number=True),
        Entry(str(row["seeds"]), number=True),
        Entry(row["chosen_on"] or EMPTY_CELL),
        *numeric_entries(number_texts),
        Entry("; ".join(filter(None, remarks))),
    ]


def _describe_unequal_tuning(row: TableRow) -> str:
    num_configurations, num_base_configurations = row["configurations"], row["base_configurations"]
    is_unequal = num_configurations and num_base_configurations and num_configurations != num_base_configurations
    return f"Base is the best of {num_base_configurations}" if is_unequal else ""


def build_table2_sheet(cells: Sequence[Cell], all_runs: pd.DataFrame) -> Sheet:
    """Return Table 2: the best lambda and zeta of I-STAR by model and task, compared with the paper's."""
    rows: list[dict[str, Any]] = []
    istar_cells = [cell for cell in cells if cell.family == "istar" and cell.seeds]
    for _, model_cells in groupby(istar_cells, key=lambda cell: cell.model):
        task_rows = [
            _build_table2_row(cell, num_pairs_tried=len(collect_tried_pairs(all_runs, cell))) for cell in model_cells
        ]
        rows += [*task_rows, *_build_table2_average(task_rows)]
    return Sheet(
        name="table2",
        title="Table 2: best λ | ζ",
        caption="λ | ζ of I-STAR with the most seeds, then the largest validation set, then the best mean on the set "
        "on which they were chosen (the reported validation set itself or held-out training data), and the number of "
        "pairs tried. Paper: Table 2, searched over λ in -5, -3, -1, 1, 3, 5 and ζ in 0.2, 0.4, 0.6, 0.8. An average "
        "is over the tasks of the model that have a pair; the paper's average is over the same tasks.",
        header=("task", "λ | ζ", "seeds", "mean, percent", "pairs tried", "paper", "agreement", "chosen on"),
        rows_by_group=group_rows_by_model(rows, _format_table2_row),
        # With dtype object, the counts remain integers although they are missing for averages.
        frame=pd.DataFrame(rows, dtype=object).drop(columns="all_collapsed", errors="ignore"),
        descriptive=("seeds", "pairs tried", "chosen on"),
    )


def _mark_collapsed(text: str, row: TableRow) -> str:
    return f"{text} (collapsed)" if row["all_collapsed"] else text


def collect_tried_pairs(all_runs: pd.DataFrame, cell: Cell) -> set[tuple[float, float]]:
    """Return every (lambda, zeta) of a finished candidate run of the cell's task, model and family."""
    runs = all_runs[all_runs["candidate"] & all_runs["usable"] & (all_runs["family"] == cell.family)]
    runs = runs[(runs["model"] == cell.model) & (runs["task"] == cell.task)]
    return {(float(run["reg.lambda"]), float(run["reg.zeta"])) for run in row_dicts(runs)}


def _build_table2_row(cell: Cell, num_pairs_tried: int) -> dict[str, Any]:
    paper_lambda, paper_zeta = paper.look_up_tuned_penalty(*_get_names_in_paper(cell)) or (None, None)
    metric = cell.metrics[0] if cell.metrics else ""
    return {
        "model": cell.model,
        "task": cell.task,
        "metric": metric,
        "split": "validation",
        "lambda": _finite_or_none(cell.first_run.get("reg.lambda")),
        "zeta": _finite_or_none(cell.first_run.get("reg.zeta")),
        "seeds": len(cell.seeds),
        "mean": cell.mean_and_std(metric).mean,
        "all_collapsed": are_all_collapsed(cell.runs),
        "tried": num_pairs_tried,
        "chosen_on": cell.selection_set,
        "paper_lambda": paper_lambda,
        "paper_zeta": paper_zeta,
    }


def _build_table2_average(rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    rows = [row for row in rows if row["lambda"] is not None and row["zeta"] is not None]
    if len(rows) < 2:
        return []
    keys = ("lambda", "zeta", "paper_lambda", "paper_zeta")
    values_by_key = {key: [row[key] for row in rows] for key in keys}
    averages = {key: None if None in values else fmean(values) for key, values in values_by_key.items()}
    fields_of_tasks = dict.fromkeys(("metric", "split", "seeds", "mean", "tried", "chosen_on"))
    task = f"average of {len(rows)} tasks"
    return [{"model": rows[0]["model"], "task": task, **fields_of_tasks, "all_collapsed": False, **averages}]


def _format_table2_row(row: TableRow) -> list[Entry]:
    best_pair, published_pair = (
        EMPTY_CELL
        if row[lambda_key] is None or row[zeta_key] is None
        else f"{row[lambda_key]:.3g} | {row[zeta_key]:.3g}"
        for lambda_key, zeta_key in (("lambda", "zeta"), ("paper_lambda", "paper_zeta"))
    )
    has_both_pairs = EMPTY_CELL not in (best_pair, published_pair)
    agreement = ("same" if best_pair == published_pair else "differs") if has_both_pairs else EMPTY_CELL
    seeds, num_tried = (EMPTY_CELL if row[key] is None else str(row[key]) for key in ("seeds", "tried"))
    mean_text = _mark_collapsed(format_number(row["mean"], ".2f"), row)
    number_texts = [best_pair, seeds, mean_text, num_tried, published_pair]
    text_entries = [Entry(agreement), Entry(row["chosen_on"] or EMPTY_CELL)]
    return [Entry(row["task"]), *numeric_entries(number_texts), *text_entries]


def build_cost_sheet(all_runs: pd.DataFrame, shrinkage_seconds_by_folder: Mapping[str, Sequence[float]]) -> Sheet:
    """Return the table of the run times of finished runs by model, task and method family.

    `shrinkage_seconds_by_folder` has the seconds of each estimation of the shrinkage covariance Sigma_S by run folder.
    """
    finished_runs = all_runs[all_runs["usable"] & all_runs["seconds"].notna()]
    finished_runs = finished_runs.assign(
        method=finished_runs["family"].replace(paper.FAMILIES),
        seconds=finished_runs["seconds"].astype(float),
        shrinkage=[math.fsum(shrinkage_seconds_by_folder.get(folder, ())) for folder in finished_runs["folder"]],
    )
    runs_by_method = finished_runs.groupby(["model", "task", "method"], as_index=False)
    costs_by_method = runs_by_method.agg(
        runs=("seconds", "size"),
        seconds_mean=("seconds", "mean"),
        seconds_std=("seconds", "std"),
        seconds_sum=("seconds", "sum"),
        shrinkage_seconds_mean=("shrinkage", "mean"),
    )
    shrinkage_share = costs_by_method["shrinkage_seconds_mean"] / costs_by_method["seconds_mean"]
    costs_by_method["shrinkage_share"] = shrinkage_share.fillna(0.0)
    # The total of a method with a single row is in that row.
    totals = [
        f"{method} {format_duration(rows['seconds_sum'].sum())}"
        for method, rows in costs_by_method.groupby("method", sort=False)
        if len(rows) > 1
    ]
    return Sheet(
        name="cost",
        title="Cost",
        caption="Seconds per finished run (of the process that finished it), mean ± standard deviation; Σ_S: seconds "
        "per run for the shrinkage covariance, and its share. The runs do not record their machine: compare only runs "
        "that ran on the same one.",
        header=("task", "method", "runs", "seconds a run", "duration in all", "Σ_S seconds a run", "Σ_S share"),
        rows_by_group=group_rows_by_model(row_dicts(costs_by_method), _format_cost_row),
        frame=costs_by_method,
        notes=(f"All rows of a method together: {', '.join(totals)}.",) if totals else (),
    )


def _format_cost_row(row: TableRow) -> list[Entry]:
    has_shrinkage = row["shrinkage_seconds_mean"] > 0
    number_texts = (
        str(row["runs"]),
        format_mean_and_std(row["seconds_mean"], row["seconds_std"], ".0f"),
        format_duration(row["seconds_sum"]),
        f"{row['shrinkage_seconds_mean']:.1f}" if has_shrinkage else EMPTY_CELL,
        f"{100 * row['shrinkage_share']:.1f} %" if has_shrinkage else EMPTY_CELL,
    )
    return [Entry(row["task"]), Entry(row["method"]), *numeric_entries(number_texts)]


def build_excluded_runs_sheet(all_runs: pd.DataFrame, read_errors: Mapping[str, str], root: str) -> Sheet:
    """Return the table of the runs excluded from all other tables, and of the folders that could not be read.

    `read_errors` has the error messages by folder. The table names folders relative to `root`.
    """
    columns = ("folder", "what", "method", "why")
    rows = []
    for run in row_dicts(all_runs[~all_runs["usable"]].astype(object)):
        kind = run["status"]
        if kind == "finished":
            kind = "repeated" if run["repeated"] else "without a value"
        error = run["error"] if isinstance(run["error"], str) else ""
        reason = error or _REASON_BY_KIND.get(kind, "")
        rows.append((_make_path_relative(run["folder"], root), kind, run["method"], reason))
    for folder, error in read_errors.items():
        # The row names the folder, so that the message need not repeat it.
        rows.append((_make_path_relative(folder, root), "not read", "", error.replace(folder, "it")))
    return Sheet(
        name="left_out",
        title="Runs that do not count",
        caption="Failed, unfinished, pruned (stopped early by a search) and repeated runs, and folders that hold no "
        "run.",
        header=columns,
        rows_by_group={"": [[Entry(text) for text in row] for row in rows]},
        frame=pd.DataFrame(rows, columns=columns),
    )


_REASON_BY_KIND = {
    "unfinished": "no result yet; the same command resumes it",
    "pruned": "stopped early by a search; it never counts",
    "repeated": "the same configuration, data and seed as another run",
    "without a value": "its headline metric is no number",
}


def _finite_or_none(value: Any) -> float | None:
    return float(value) if is_finite(value) else None


def _make_path_relative(folder: str, root: str) -> str:
    return folder.removeprefix(root).lstrip("/") or folder
