"""The rank of a process in its run, and the launcher that started the processes of the run."""

import os
from collections.abc import Mapping

RANK_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE",
                  "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
"""Environment variables that give a process its rank and the address of rank 0."""
RANK_VARIABLE_ORDER = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Environment variables that Lightning reads the rank from on import, in this order."""


def find_rank(environment: Mapping[str, str]) -> int:
    """Return the rank of a process with these environment variables, as Lightning determines it on import."""
    return next((int(environment[name]) for name in RANK_VARIABLE_ORDER if name in environment), 0)


def has_external_launcher() -> bool:
    """Return whether torchrun or srun has started this process as one of several.

    Only srun sets the variables of a job step. `SLURM_NTASKS` and `SLURM_PROCID` do not show this, because a script
    under sbatch has them, too, and runs as a single process.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def fix_slurm_detection() -> None:
    """Change the `SLURM_*` variables so that Lightning detects srun if, and only if, srun has started several tasks.

    Lightning reads `SLURM_NTASKS`, the number of tasks that the job requested with or without srun, and ignores SLURM
    in jobs named like an interactive salloc job.
    """
    num_tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if num_tasks == "1":
        os.environ.pop("SLURM_NTASKS", None)
    else:
        os.environ["SLURM_NTASKS"] = num_tasks
        # Lightning refuses a job without --ntasks-per-node.
        tasks_per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", num_tasks)
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", tasks_per_node.partition("(")[0])
        os.environ.pop("SLURM_JOB_NAME", None)
