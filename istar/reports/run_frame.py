"""All runs below a folder as a frame to compute with: one row a run, whatever became of it."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from istar.errors import UserError, shorten
from istar.files import atomic_write
from istar.reports.run_tables import method
from istar.results import CONFIG, RESULT, RunRecord, read

_SET_ASIDE = re.compile(r"\.old-\d+$")
_NO_RUNS = ("multirun", "sweeps")


@dataclass(frozen=True)
class Runs:
    """What was found.

    Attributes:
        frame: a row for each run: `folder`, `name`, `status` (finished, failed, unfinished), `task`, `model`, `method`,
            `seed`, `metric`, `value` (the headline metric on the validation set, a fraction), `epoch`, `constant` (what
            a constant prediction earns), `collapsed`, `isoscore_before`, `isoscore_after`, `seconds`,
            `skipped_steps`, `error`, `fingerprint` (of the data), each metric as `validation.<name>`, and each key of
            the config under its name on the command line.
        troubles: why a folder is none of them, by its path.
        records: the runs whole, by their folder, where they were asked for.
    """

    frame: pd.DataFrame
    troubles: dict[str, str]
    records: dict[str, RunRecord] = field(default_factory=dict)


def load_runs(root: Path, keep_records: bool = False) -> Runs:
    """Read every run below a folder; folders that were set aside by `run.overwrite=true` do not count.

    Args:
        root: as `run.root`; runs may lie in folders of folders.
        keep_records: also keep what is no figure of a row: epochs, layers. Some 50 kB a run.

    Raises:
        UserError: if there is no such folder.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; name the one that holds the runs, as run.root does")
    rows: list[dict[str, Any]] = []
    troubles: dict[str, str] = {}
    records: dict[str, RunRecord] = {}
    for folder in _folders(root):
        try:
            record = _record(folder)
            rows.append({"folder": str(folder), **row(record)})
            if keep_records:
                records[str(folder)] = record
        except UserError as error:
            troubles[str(folder)] = str(error)
        except (KeyError, TypeError, AttributeError) as error:
            troubles[str(folder)] = f"{folder} holds no config of a run: {shorten(repr(error))}"
    known = [Path(name) for name in (*(found["folder"] for found in rows), *troubles)]
    accounted_for = {folder for run in known for folder in (run, *run.parents)}
    for folder in _children(root):
        if folder not in accounted_for:
            troubles[str(folder)] = f"{folder} holds no run"
    return Runs(pd.DataFrame(rows, columns=None if rows else ["folder", *_COLUMNS]), troubles, records)


def row(record: RunRecord) -> dict[str, Any]:
    """A run as a row of `Runs.frame`."""
    config, headline = record.config, record.headline
    before, after = (record.isotropy.get(when, {}).get("union") for when in ("before", "after"))
    values = (
        record.name,
        record.status,
        config["task"]["name"],
        Path(config["model"]["name"]).name,
        method(record),
        config["seed"],
        headline.get("metric"),
        headline.get("value"),
        headline.get("epoch"),
        record.baseline.get(headline.get("metric", "")),
        any(record.collapsed.values()) if record.collapsed else None,
        before,
        after,
        record.timing.get("total"),
        record.skipped_steps,
        record.error,
        record.data.get("fingerprint"),
    )
    metrics = {f"validation.{name}": value for name, value in record.metrics.items()}
    keys = {
        f"{group}.{key}": value
        for group, settings in config.items()
        if isinstance(settings, dict)
        for key, value in settings.items()
    }
    return {**dict(zip(_COLUMNS, values, strict=True)), **metrics, **keys}


_COLUMNS = (
    "name", "status", "task", "model", "method", "seed", "metric", "value", "epoch", "constant", "collapsed",
    "isoscore_before", "isoscore_after", "seconds", "skipped_steps", "error", "fingerprint",
)  # fmt: skip


def export(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as CSV, Parquet or JSON (a list of objects), by the suffix.

    Raises:
        UserError: for another suffix, or a file that cannot be written.
    """
    # Lists and values of several types, as reg.layers has them, are told as text.
    frame = frame.map(lambda value: str(value) if isinstance(value, list | dict) else value)
    mixed = [name for name in frame if frame[name].map(type).nunique() > 1 and frame[name].dtype == object]
    for name in mixed:
        frame[name] = frame[name].map(lambda value: None if pd.isna(value) else str(value))
    writers = {
        ".csv": lambda file: frame.to_csv(file, index=False),
        ".parquet": lambda file: frame.to_parquet(file, index=False),
        ".json": lambda file: frame.to_json(file, orient="records", indent=2),
    }
    if path.suffix not in writers:
        raise UserError(f"{path}: the suffix decides the format; expected one of {', '.join(writers)}")
    try:
        with atomic_write(path) as file:
            writers[path.suffix](file)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {shorten(error)}") from error


def _record(folder: Path) -> RunRecord:
    if (folder / RESULT).exists():
        return read(folder)
    try:
        config = yaml.load((folder / CONFIG).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read: {shorten(error)}") from error
    return RunRecord(folder.name, "unfinished", config)


# The loader written in C where there is one: ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _folders(root: Path) -> Iterator[Path]:
    """Folders that are, or once were to be, a run; nothing below them is looked at."""
    for name, folders, files in os.walk(root):
        if RESULT in files or CONFIG in files:
            folders.clear()
            yield Path(name)
        folders[:] = sorted(folder for folder in folders if _is_looked_at(folder))


def _children(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and _is_looked_at(path.name))


def _is_looked_at(name: str) -> bool:
    return not name.startswith(".") and name not in _NO_RUNS and not _SET_ASIDE.search(name)
