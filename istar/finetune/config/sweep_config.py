"""The settings of a sweep."""

import re
from dataclasses import dataclass, field
from typing import Any

from istar.errors import UserError, check_at_least, check_one_of


@dataclass
class SweepConfig:
    """Settings of a sweep (`-m`) in addition to the lists of values on the command line. They are not part of a run."""

    name: str = "sweep"
    """Prefix of the name of the sweep's folder in `<run.root>/sweeps`, and of its W&B group."""
    jobs: int = 1
    """Number of concurrent runs on this machine; the GPUs are divided among them."""
    fork: bool = True
    """Fork the runs on this machine from a process that has loaded the libraries, which saves seconds for each run.
    With false, and on other systems than Linux, each run starts in a new Python interpreter."""
    fail_fast: bool = False
    """Stop all other runs when a run fails."""
    dry_run: bool = False
    """Print the planned runs and their estimated cost without running them, like `--dry-run`."""
    grids: Any = None
    """Named grids, each with lists of values by config key. None uses only the grid of the command line."""
    only: list[str] = field(default_factory=list)
    """Names of the grids to run; an empty list runs all."""
    seeds: list[int] = field(default_factory=list)
    """Seeds for repeating the best run of each task, model, method and grid, after all other runs."""
    search: str = "grid"
    """grid runs all combinations; optuna runs `trials` of them, chosen by the results of earlier trials."""
    trials: int = 20
    """Number of Optuna trials, not counting failed ones. Each has a different run; the search ends when all runs of the
    search space have been tried."""
    sampler: str = "tpe"
    """Optuna sampler: tpe or random."""
    sampler_seed: int = 0
    """Seed of the Optuna sampler."""
    pruner: str = "none"
    """Optuna pruner: none, median, or asha (successive halving). It compares the headline metric after every epoch."""
    storage: str | None = None
    """Optuna storage that commands may share, a database URL or `journal:///<path>`. None means a SQLite file in the
    sweep's folder. A password belongs in a variable, as other users can read arguments: `'${oc.env:STORAGE}'`."""
    trial: str | None = None
    """ID of the search trial that this run belongs to. Set by the sweep; do not set it by hand."""

    def __post_init__(self) -> None:
        check_at_least(1, "sweep.jobs", self.jobs)
        check_at_least(1, "sweep.trials", self.trials)
        check_one_of("sweep.search", self.search, ("grid", "optuna"))
        check_one_of("sweep.sampler", self.sampler, ("tpe", "random"))
        check_one_of("sweep.pruner", self.pruner, ("none", "median", "asha"))
        if not re.fullmatch(r"[\w.-]+", self.name) or self.name.startswith("."):
            raise UserError(f"sweep.name={self.name!r} is not a folder name; expected letters, digits, '.', '_', '-'")
        grids = {} if self.grids is None else self.grids
        if not isinstance(grids, dict) or not all(isinstance(grid, dict) for grid in grids.values()):
            raise UserError(f"sweep.grids={grids} does not map names to grids, e.g. {{base: {{reg: none}}}}")
        if not isinstance(self.only, list) or not all(isinstance(name, str) for name in self.only):
            raise UserError(f"sweep.only={self.only} is not a list of names of grids, e.g. [base]")
        for name in self.only:
            check_one_of("sweep.only", name, tuple(grids))
        if not isinstance(self.seeds, list) or not all(type(seed) is int and 0 <= seed < 2**32 for seed in self.seeds):
            raise UserError(f"sweep.seeds={self.seeds} are not whole numbers in [0, 2^32), e.g. [1,2,3,4,5]")
