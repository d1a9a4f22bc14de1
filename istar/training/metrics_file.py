"""The logger behind `metrics.csv`: whole at any time, and continued exactly when a run is resumed."""

import csv
import io
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from istar.files import write_text

_SECONDS_BETWEEN_WRITES = 5.0


class MetricsFile(Logger):
    """Writes what is logged to a CSV file, one row a call, always the whole file at once.

    Args:
        path: of the file. Its columns are all names logged so far, `epoch` and `step` first.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._rows: list[dict[str, float]] = []
        self._written = -float("inf")

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._rows.append({"step": step or 0, **{name: float(value) for name, value in metrics.items()}})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: `config.yaml` has them."""

    @rank_zero_only
    def save(self) -> None:
        """Called by Lightning whenever something was logged; writes every few seconds."""
        if time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES:
            self.write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._rows:
            self.write()

    def write(self) -> None:
        """Write now."""
        columns = list(dict.fromkeys(["epoch", "step", *(name for row in self._rows for name in row)]))
        text = io.StringIO()
        table = csv.DictWriter(text, columns, lineterminator="\n")
        table.writeheader()
        table.writerows({**row, "epoch": int(row.get("epoch", 0))} for row in self._rows)
        write_text(self.path, text.getvalue())
        self._written = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """The rows, for a checkpoint."""
        return {"rows": list(self._rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the rows of a checkpoint; what was logged after it will be logged again."""
        self._rows = list(state_dict["rows"])
