"""`istar quantize`: finished runs in float32 and in low-bit forms, as a frame of runs and a table of configurations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape
from rich.table import Table

from istar.errors import UserError
from istar.finetune.quantization.form_scores import explain_exclusion, load_saved_model, score_model
from istar.finetune.quantization.linear_layers import Form
from istar.records.identity import configuration_hash, label_method
from istar.records.metric_names import displayed
from istar.records.results import RunRecord

CAPTION = (
    "Headline metric on the validation set (percent, except losses) in float32, and what each form loses of it; over "
    "seeds: mean ± standard deviation. Constant: runs whose predictions were constant at the end of training, so that "
    "they have nothing to lose."
)
_TEXT_COLUMNS = ("task", "model", "method")


@dataclass(frozen=True)
class QuantizationSettings:
    """The forms in which each model is scored.

    Attributes:
        forms: the forms, with different names.
        calibration: number of training examples for static scales.
        seed: random seed for the choice of these examples.
        data_dir: folder of the task's data, if it is not where the runs had it.
    """

    forms: tuple[Form, ...]
    calibration: int = 256
    seed: int = 0
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        """Raise a `UserError` if two forms have the same name."""
        names = [form.name for form in self.forms]
        if len(set(names)) < len(names):
            raise UserError(f"the forms are {', '.join(names)}; expected different ones")


def score_runs(
    records: Mapping[Path, RunRecord], settings: QuantizationSettings, report: Callable[[str], object]
) -> pd.DataFrame:
    """Score the models of finished runs, and return one row for each.

    Args:
        records: the record of each run by its folder. Of runs with the same name, the first one counts.
        settings: the forms.
        report: called with a line on the progress, or on a run that is left out.

    Returns:
        The columns `name`, `folder`, `task`, `model`, `method`, `configuration` (equal for runs that differ only in the
        seed), `seed`, `recorded` (the score at the end of training, in its precision), `constant` (whether the
        predictions were constant then), and those of `score_model`.

    Raises:
        UserError: if no run can be scored, or the model or the data of a run cannot be loaded.
    """
    record_by_folder: dict[Path, RunRecord] = {}
    for folder, record in records.items():
        if reason := explain_exclusion(folder, record):
            report(f"left out: {folder}: {reason}")
        elif record.name not in {other.name for other in record_by_folder.values()}:
            record_by_folder[folder] = record
    if not record_by_folder:
        raise UserError("no run can be quantized; expected finished runs with run.save_model=true")
    tasks = {record.config["task"]["name"] for record in record_by_folder.values()}
    if settings.data_dir is not None and len(tasks) > 1:
        raise UserError("--data-dir is for runs of one task, but these have several; call istar quantize for each task")
    rows = []
    for position, (folder, record) in enumerate(record_by_folder.items(), 1):
        report(f"{position} of {len(record_by_folder)}: {record.name}")
        saved = load_saved_model(folder, record, settings.calibration, settings.seed, settings.data_dir)
        rows.append(_describe_run(folder, record) | score_model(saved, settings.forms))
    return pd.DataFrame(rows).sort_values(["task", "model", "method", "seed"], kind="stable", ignore_index=True)


def _describe_run(folder: Path, record: RunRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "folder": str(folder),
        "task": record.config["task"]["name"],
        "model": Path(record.config["model"]["name"]).name,
        "method": label_method(record.config),
        "configuration": configuration_hash(record.config, record.data.get("fingerprint", "")),
        "seed": record.config["seed"],
        "recorded": displayed(record.headline["metric"], record.headline["value"]),
        "constant": any(record.collapsed.values()),
    }


def summarize_configurations(scores: pd.DataFrame, forms: Sequence[Form]) -> pd.DataFrame:
    """Return a table with formatted cells: for each configuration, its float32 score and the drop in each form.

    Args:
        scores: result of `score_runs`.
        forms: the forms.
    """
    rows = []
    for _, runs in scores.groupby("configuration", sort=False):
        first_run = runs.iloc[0]
        rows.append({
            "task": f"{first_run['task']}, {first_run['metric']}",
            "model": first_run["model"],
            "method": first_run["method"],
            "seeds": str(len(runs)),
            "constant": str(runs["constant"].sum()),
            "float32": _format_mean_and_std(runs["float32"]),
            **{form.name: _format_mean_and_std(runs[f"{form.name}_drop"]) for form in forms},
        })  # fmt: skip
    return pd.DataFrame(rows)


def _format_mean_and_std(values: pd.Series) -> str:
    # A mean of -0.001 is printed as 0.00.
    mean = f"{round(values.mean(), 2) + 0.0:.2f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std():.2f}"


def build_terminal_table(summary: pd.DataFrame) -> Table:
    """Return the result of `summarize_configurations` as a table; a task or model that all rows share is its title."""
    shared_columns = [column for column in ("task", "model") if summary[column].nunique() == 1]
    title = " · ".join(summary[column].iloc[0] for column in shared_columns)
    table = Table(title=escape(title), title_justify="left", caption=CAPTION, caption_justify="left")
    shown = summary.drop(columns=shared_columns)
    for column in shown:
        table.add_column(str(column), justify="left" if column in _TEXT_COLUMNS else "right")
    for row in shown.itertuples(index=False):
        table.add_row(*map(escape, row))
    return table


def format_latex(summary: pd.DataFrame) -> str:
    """Return the result of `summarize_configurations` as a LaTeX table, for the package booktabs."""
    column_format = "".join("l" if column in _TEXT_COLUMNS else "r" for column in summary)
    table = str(summary.to_latex(index=False, escape=True, column_format=column_format, caption=CAPTION))
    for symbol, command in {"±": "pm", "λ": "lambda", "ζ": "zeta"}.items():
        table = table.replace(symbol, rf"$\{command}$")
    return table
