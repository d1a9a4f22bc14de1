"""What closes a multirun: the table and the picture that compare its runs."""

from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console

from istar.reports import figures, tables
from istar.results import RunRecord


class CompareRuns(Callback):
    """Gathers the runs of a `-m` call; at its end prints and writes `comparison.md`, `.png` and `.svg`."""

    def __init__(self) -> None:
        self.records: list[RunRecord] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if job_return.status == JobStatus.COMPLETED and isinstance(job_return.return_value, RunRecord):
            self.records.append(job_return.return_value)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if not self.records:
            return
        folder = Path(config.hydra.sweep.dir)
        tables.write_markdown(self.records, folder / "comparison.md")
        for suffix in ("png", "svg"):
            figures.comparison(self.records, folder / f"comparison.{suffix}")
        console = Console()
        console.print(tables.comparison(self.records))
        console.print(f"{folder / 'comparison.png'} and .svg, .md", highlight=False, soft_wrap=True)
