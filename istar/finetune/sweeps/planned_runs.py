"""Lists the runs of a sweep for its plan, before any of them is executed."""

from typing import Any

from rich.console import Console

from istar.errors import UserError, mask_secrets
from istar.finetune.sweeps.sweep import SweepRequest, SweepRuns, list_runs
from istar.finetune.sweeps.trials import replace_seed
from istar.records.plan_entries import PlannedRun, Repetitions


def describe_sweep(request: SweepRequest, console: Console) -> dict[str, Any]:
    """Compose the runs of a sweep, and return the fields of its plan (`istar.reports.plan_file.Plan`) as a dictionary.

    The runs of a search are not known beforehand, so its list of runs is empty.

    Raises:
        UserError: if the data or the model of a run cannot be loaded, or a run cannot be used.
    """
    runs = list_runs(request, console)
    is_search = request.settings.search == "optuna"
    if is_search:
        runs.compose_sample_config()  # refuses data that cannot be loaded
    if failed_entries := runs.state.entries_with("failed"):
        raise UserError(f"{failed_entries[0].error} (a plan identifies its runs by their data and models)")
    return {
        "overrides_by_grid": {
            grid: [mask_secrets(override.input_line or "") for override in space.values()]
            for grid, space in runs.space_by_grid.items()
        },
        "trials": request.settings.trials if is_search else None,
        "seeds_of_best": list(request.settings.seeds),
        "runs": [
            PlannedRun(name=entry.name, task=entry.task, model=entry.model, method=entry.method, seed=entry.seed)
            for entry in runs.state.entries
        ],
        "repetitions": _list_repetitions(runs),
    }


def _list_repetitions(runs: SweepRuns) -> list[Repetitions]:
    """List for each group of runs the names of all runs with which `sweep.seeds` may repeat the best one."""
    repetitions_by_group: dict[tuple[str, ...], Repetitions] = {}
    for entry in runs.state.entries:
        for seed in runs.request.settings.seeds:
            config = runs.compose_config(replace_seed(tuple(entry.overrides), seed))
            name = runs.run_folders.find(config).name
            if name in runs.entry_by_name:
                continue
            task, model, method, grid = group = runs.selection_group(entry)
            new_group = Repetitions(task=task, model=model, method=method, grid=grid, seeds=[], names=[])
            repetitions = repetitions_by_group.setdefault(group, new_group)
            repetitions["seeds"] = sorted({*repetitions["seeds"], seed})
            repetitions["names"] = sorted({*repetitions["names"], name})
    return list(repetitions_by_group.values())
