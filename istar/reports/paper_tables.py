"""The report's tables, from cells: the paper's Tables 1 and 2, what runs cost, and which runs no table counts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from istar.pages.sheets import Entry, Sheet
from istar.reports import paper
from istar.reports.cells import Cell, describe, differing, is_candidate
from istar.reports.cells import rows as as_rows
from istar.reports.statistics import Paired, Spread, paired, spread

NONE = "-"


def table1(cells: Sequence[Cell]) -> Sheet:
    """Mean and deviation over seeds per model, task and method, beside the paper's and with a paired test."""
    rows = [row for group in _by_task(cells) for row in _table1_rows(group)]
    groups: dict[str, list[list[Entry]]] = {}
    common = _common(rows)
    for row in rows:
        groups.setdefault(row["model"], []).append(_table1_entries(row, common))
    return Sheet(
        "table1",
        "Table 1: performance",
        "Metric on the validation set in percent, mean ± standard deviation (ddof = 1) over seeds; the best mean per "
        "model and task is bold. Paper: Table 1 of Rudman and Eickhoff (2024), five seeds, development sets. "
        "Minus Base: mean difference from Base over the seeds that both have; p: two-sided, paired over these seeds.",
        ("task, metric", "method", "λ", "ζ", "mean ± std", "seeds", "paper", "minus\npaper", "minus\nBase", "pairs",
         "p,\nt-test", "p,\nsign-flip", "remarks"),
        groups,
        pd.DataFrame([{key: value for key, value in row.items() if key != "best"} for row in rows]),
        (f"All runs: {common}.",) if common else (),
        row_headers=2,
    )  # fmt: skip


def _common(rows: Iterable[Mapping[str, Any]]) -> str:
    """Hyperparameters that all rows share, which need not stand in each; else nothing."""
    told = {row["hyperparameters"] for row in rows} - {""}
    return told.pop() if len(told) == 1 else ""


def _by_task(cells: Iterable[Cell]) -> list[list[Cell]]:
    return [list(group) for _, group in groupby(cells, key=lambda cell: (cell.model, cell.task))]


def _table1_rows(group: Sequence[Cell]) -> list[dict[str, Any]]:
    metrics = max((cell.metrics for cell in group), key=len, default=[])
    base = next(cell for cell in group if cell.family == "base")
    rows = []
    for metric in metrics or [""]:
        own = [_table1_row(cell, base, metric) for cell in group]
        means = [round(row["mean"], 2) for row in own if row["mean"] is not None]
        for row in own:
            # As the eye sees it: equal to the two digits shown is equally good.
            row["best"] = row["mean"] is not None and round(row["mean"], 2) == max(means)
        rows += own
    return rows


def _table1_row(cell: Cell, base: Cell, metric: str) -> dict[str, Any]:
    has = metric in cell.metrics
    own = cell.spread(metric) if has else Spread(None, None, 0)
    theirs = paper.score(cell.model, cell.task, metric, cell.family)
    compared = None
    if cell.family != "base" and has:
        compared = paired(cell.by_seed(metric), base.by_seed(metric) if metric in base.metrics else {})
    first = _first(cell)
    return {
        "model": cell.model,
        "task": cell.task,
        "metric": metric,
        "split": "validation",
        "method": paper.FAMILIES[cell.family],
        "lambda": _number(first.get("reg.lambda")) if cell.family != "base" else None,
        "zeta": _number(first.get("reg.zeta")) if cell.family == "istar" else None,
        "mean": own.mean,
        "std": own.std,
        "seeds": own.count,
        "which_seeds": " ".join(map(str, cell.seeds)),
        "paper_mean": theirs.mean if theirs else None,
        "paper_std": theirs.std if theirs else None,
        "minus_paper": own.mean - theirs.mean if theirs and own.mean is not None else None,
        **_compared(compared),
        "collapsed": cell.collapsed,
        "failed": cell.failed,
        "pruned": cell.pruned,
        "configurations": cell.configurations,
        "hyperparameters": describe(first) if first else "",
        "differs_from_base": " ".join(differing(_first(base), first)) if compared and base.seeds else "",
    }


def _compared(result: Paired | None) -> dict[str, Any]:
    if result is None:
        return dict.fromkeys(("minus_base", "pairs", "p_t_test", "p_sign_flip", "no_test"))
    why = [test.why for test in (result.t_test, result.sign_flip) if test.why]
    return {
        "minus_base": result.difference,
        "pairs": result.pairs,
        "p_t_test": result.t_test.p,
        "p_sign_flip": result.sign_flip.p,
        "no_test": "; ".join(dict.fromkeys(why)) or None,
    }


def _table1_entries(row: Mapping[str, Any], common: str) -> list[Entry]:
    return [
        Entry(f"{row['task']}, {row['metric']}" if row["metric"] else row["task"]),
        Entry(row["method"]),
        Entry(shown(row["lambda"], "g"), number=True),
        Entry(shown(row["zeta"], "g"), number=True),
        Entry(plus_minus(row["mean"], row["std"]), bold=row["best"], number=True),
        Entry(str(row["seeds"]), number=True),
        Entry(plus_minus(row["paper_mean"], row["paper_std"]), number=True),
        Entry(shown(row["minus_paper"], "+.2f"), number=True),
        Entry(shown(row["minus_base"], "+.2f"), number=True),
        Entry(shown(row["pairs"], "d"), number=True),
        Entry(probability(row["p_t_test"]), number=True),
        Entry(probability(row["p_sign_flip"]), number=True),
        Entry(_remarks(row, common)),
    ]


def _remarks(row: Mapping[str, Any], common: str) -> str:
    parts = [] if row["seeds"] else ["no finished run"]
    parts += [f"{row[what]} {what}" for what in ("collapsed", "failed", "pruned") if row[what]]
    parts += [f"best of {row['configurations']}"] if row["configurations"] > 1 else []
    parts += [row["no_test"]] if row["no_test"] else []
    parts += [f"differs from Base in {row['differs_from_base']}"] if row["differs_from_base"] else []
    parts += [row["hyperparameters"]] if row["hyperparameters"] not in ("", common) else []
    return "; ".join(parts)


def table2(cells: Sequence[Cell], frame: pd.DataFrame) -> Sheet:
    """The lambda and zeta that Table 1 shows for I-STAR, beside the paper's."""
    rows = [_table2_row(cell, tried_pairs(frame, cell)) for cell in cells if cell.family == "istar"]
    groups: dict[str, list[list[Entry]]] = {}
    for row in rows:
        own, theirs = _pair(row["lambda"], row["zeta"]), _pair(row["paper_lambda"], row["paper_zeta"])
        same = NONE if NONE in (own, theirs) else "same" if own == theirs else "differs"
        texts = [own, str(row["seeds"]), shown(row["mean"], ".2f"), str(row["tried"]), theirs]
        entries = [Entry(row["task"]), *(Entry(text, number=True) for text in texts), Entry(same)]
        groups.setdefault(row["model"], []).append(entries)
    return Sheet(
        "table2",
        "Table 2: best λ | ζ",
        "λ | ζ of I-STAR with the most seeds, among these with the best mean on the validation set, out of so many "
        "pairs tried. Paper: Table 2, searched over λ in -5, -3, -1, 1, 3, 5 and ζ in 0.2, 0.4, 0.6, 0.8.",
        ("task", "λ | ζ", "seeds", "mean, percent", "pairs tried", "paper", "agreement"),
        groups,
        pd.DataFrame(rows),
    )


def tried_pairs(frame: pd.DataFrame, cell: Cell) -> set[tuple[float, float]]:
    """Every lambda and zeta with which a run of the cell's task, model and method has finished."""
    own = frame[is_candidate(frame) & frame["usable"] & (frame["family"] == cell.family)]
    own = own[(own["model"] == cell.model) & (own["task"] == cell.task)]
    return {(float(run["reg.lambda"]), float(run["reg.zeta"])) for run in as_rows(own)}


def _table2_row(cell: Cell, tried: set[tuple[float, float]]) -> dict[str, Any]:
    first = _first(cell)
    theirs = paper.tuned(cell.model, cell.task)
    metric = cell.metrics[0] if cell.metrics else ""
    return {
        "model": cell.model,
        "task": cell.task,
        "metric": metric,
        "split": "validation",
        "lambda": _number(first.get("reg.lambda")),
        "zeta": _number(first.get("reg.zeta")),
        "seeds": len(cell.seeds),
        "mean": cell.spread(metric).mean if metric else None,
        "tried": len(tried),
        "paper_lambda": theirs.weight if theirs else None,
        "paper_zeta": theirs.zeta if theirs else None,
    }


def costs(frame: pd.DataFrame, refreshes: Mapping[str, Sequence[float]]) -> Sheet:
    """Seconds of finished runs by model, task and method family.

    Args:
        frame: as `cells.prepare` gives it.
        refreshes: seconds of each refresh of Sigma_S, by the run's folder.
    """
    done = frame[frame["usable"] & frame["seconds"].notna()]
    rows = [
        _cost_row(str(model), str(task), str(name), group, refreshes)
        for (model, task, name), group in done.groupby(["model", "task", "family"])
    ]
    groups: dict[str, list[list[Entry]]] = {}
    for row in rows:
        groups.setdefault(row["model"], []).append(_cost_entries(row))
    sums = {name: math.fsum(row["seconds_sum"] for row in rows if row["method"] == name) for name in _methods(rows)}
    notes = tuple(f"{name}: {clock(seconds)} (hours:minutes) in all." for name, seconds in sums.items())
    return Sheet(
        "cost",
        "Cost",
        "Seconds per finished run (of the process that finished it), mean ± standard deviation; Σ_S: seconds per run "
        "for the shrinkage covariance, and its share. The runs do not say which machine they ran on: compare only "
        "what ran side by side.",
        ("task", "method", "runs", "seconds a run", "hours:minutes in all", "Σ_S seconds a run", "Σ_S share"),
        groups,
        pd.DataFrame(rows),
        notes,
    )


def _methods(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _cost_row(
    model: str, task: str, name: str, group: pd.DataFrame, refreshes: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    each = spread([float(seconds) for seconds in group["seconds"]])
    refreshing = [math.fsum(refreshes.get(folder, ())) for folder in group["folder"]]
    total = math.fsum(group["seconds"])
    return {
        "model": model,
        "task": task,
        "method": paper.FAMILIES.get(name, name),
        "runs": each.count,
        "seconds_mean": each.mean,
        "seconds_std": each.std,
        "seconds_sum": total,
        "shrinkage_seconds_mean": math.fsum(refreshing) / len(refreshing),
        "shrinkage_share": math.fsum(refreshing) / total if total else 0.0,
    }


def _cost_entries(row: Mapping[str, Any]) -> list[Entry]:
    refreshes = row["shrinkage_seconds_mean"] > 0
    numbers = (
        str(row["runs"]),
        plus_minus(row["seconds_mean"], row["seconds_std"], ".0f"),
        clock(row["seconds_sum"]),
        f"{row['shrinkage_seconds_mean']:.1f}" if refreshes else NONE,
        f"{100 * row['shrinkage_share']:.1f} %" if refreshes else NONE,
    )
    return [Entry(row["task"]), Entry(row["method"]), *(Entry(number, number=True) for number in numbers)]


def left_out(frame: pd.DataFrame, troubles: Mapping[str, str], root: str) -> Sheet:
    """Runs that no table counts: failed, unfinished, pruned, repeated, without a value; and folders that are no run."""
    rows = [
        {"folder": _below(run["folder"], root), "what": _what(run), "method": run["method"], "why": _why(run)}
        for run in as_rows(frame[~frame["usable"]].astype(object))
    ]
    rows += [
        {"folder": _below(folder, root), "what": "not read", "method": "", "why": why.replace(folder, "it")}
        for folder, why in troubles.items()
    ]
    return Sheet(
        "left_out",
        "Runs that do not count",
        "Failed, unfinished, pruned (stopped early by a search) and repeated runs, and folders that hold no run.",
        ("folder", "what", "method", "why"),
        {"": [[Entry(row[key]) for key in ("folder", "what", "method", "why")] for row in rows]},
        pd.DataFrame(rows, columns=["folder", "what", "method", "why"]),
    )


def _what(run: Mapping[str, Any]) -> str:
    if run["status"] != "finished":
        return str(run["status"])
    return "repeated" if run["repeated"] else "without a value"


def _why(run: Mapping[str, Any]) -> str:
    reasons = {
        "unfinished": "no result yet; its command, sent again, goes on",
        "pruned": "stopped early by a search; it never counts",
        "repeated": "the same configuration, data and seed as another run",
        "without a value": "its headline metric is no number",
    }
    return run["error"] if isinstance(run["error"], str) and run["error"] else reasons.get(_what(run), "")


def plus_minus(mean: float | None, std: float | None, form: str = ".2f") -> str:
    """`62.53 ± 0.70`; without a deviation the mean alone."""
    if mean is None:
        return NONE
    return format(mean, form) if std is None else f"{mean:{form}} ± {std:{form}}"


def probability(p: float | None) -> str:
    """Four digits, or what is below them."""
    return NONE if p is None else "<0.001" if p < 0.001 else f"{p:.4f}"


def shown(value: float | None, form: str) -> str:
    """A number, or a dash for none; a zero has no minus."""
    if value is None:
        return NONE
    text = format(value, form)
    return text.replace("-", "+", 1) if text.startswith("-0") and not text.strip("-0.") and "+" in form else text


def clock(seconds: float) -> str:
    """Hours and minutes: 3725 -> 1:02."""
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d}"


def _pair(weight: float | None, zeta: float | None) -> str:
    return NONE if weight is None or zeta is None else f"{weight:g} | {zeta:g}"


def _first(cell: Cell) -> dict[str, Any]:
    return {} if cell.runs is None else as_rows(cell.runs.head(1))[0]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _below(folder: str, root: str) -> str:
    return folder.removeprefix(root).lstrip("/") or folder
