"""A Lightning logger that writes `metrics.csv` atomically and continues it exactly when a run is resumed."""

import csv
import io
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from istar.files.writing import escape_cell, write_text

_SECONDS_BETWEEN_WRITES = 5.0


class MetricsFile(Logger):
    """Write logged metrics to a CSV file, one row per call.

    The columns are `epoch`, `step` and the names of all metrics logged so far. Each write replaces the file at `path`
    atomically, because a new metric adds a column to all rows.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._rows: list[dict[str, float]] = []
        self._last_written_at = -float("inf")

    @property
    def name(self) -> str:
        """Name of the folder that contains the file."""
        return self.path.parent.name

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @property
    def rows(self) -> list[dict[str, float]]:
        """Rows logged so far: the step and the values by name of each call of `log_metrics`."""
        return list(self._rows)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row with these metrics. The file is written later."""
        self._rows.append({"step": step or 0, **{name: float(value) for name, value in metrics.items()}})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `config.yaml` already stores the hyperparameters."""

    @rank_zero_only
    def save(self) -> None:
        """Write the file unless it was written within the last few seconds. Lightning calls this after every log."""
        if time.monotonic() - self._last_written_at > _SECONDS_BETWEEN_WRITES:
            self.write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the file if anything was logged."""
        if self._rows:
            self.write()

    def write(self) -> None:
        """Write all rows to the file now."""
        columns = list(dict.fromkeys(["epoch", "step", *(name for row in self._rows for name in row)]))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writerow({name: escape_cell(name) for name in columns})
        writer.writerows({**row, "epoch": int(row.get("epoch", 0))} for row in self._rows)
        write_text(self.path, text.getvalue())
        self._last_written_at = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self._rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace all rows by those of a checkpoint. The resumed training logs the later rows again."""
        self._rows = list(state_dict["rows"])
