"""What closes a multirun: the table and the picture that compare its runs."""

from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console

from istar.errors import UserError
from istar.reports import figures, tables
from istar.results import RunRecord


class CompareRuns(Callback):
    """Gathers the runs of a `-m` call; at its end prints and writes `comparison.md`, `.png` and `.svg`.

    Where a run has failed, the call ends with exit code 1, behind all others.
    """

    def __init__(self) -> None:
        self.records: list[RunRecord] = []
        self.failed: list[str] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if job_return.status == JobStatus.COMPLETED and isinstance(job_return.return_value, RunRecord):
            self.records.append(job_return.return_value)
        if job_return.status == JobStatus.COMPLETED and isinstance(job_return.return_value, UserError):
            self.failed.append(f"{' '.join(job_return.overrides or ())}: {job_return.return_value}")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        console = Console()
        if self.records:
            self._compare(config, console)
        if self.failed:
            total = len(self.failed) + len(self.records)
            console.print(f"{len(self.failed)} of {total} runs failed; the same command runs them again:")
            for told in self.failed:
                console.print(f"  {told}", highlight=False, soft_wrap=True, markup=False)
            # Passes by Hydra, which would turn an exception into a warning.
            raise SystemExit(1)

    def _compare(self, config: DictConfig, console: Console) -> None:
        folder = Path(config.hydra.sweep.dir)
        tables.write_markdown(self.records, folder / "comparison.md")
        for suffix in ("png", "svg"):
            figures.comparison(self.records, folder / f"comparison.{suffix}")
        console.print(tables.comparison(self.records))
        console.print(f"{folder / 'comparison.png'} and .svg, .md", highlight=False, soft_wrap=True)
