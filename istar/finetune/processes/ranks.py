"""The processes of a run: their number, the rank of each, and the launcher that has started them."""

import os
from collections.abc import Mapping
from importlib.util import find_spec

from istar.errors import UserError
from istar.finetune.config import TrainerConfig

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


def processes_to_start(settings: TrainerConfig) -> int:
    """Return the number of processes that a run needs on this machine; 1 means that the current process is enough.

    Raises a `UserError` if an external launcher has started a different number, or Lightning refuses the settings.
    """
    if has_external_launcher():
        _check_process_count(settings)
        return 1
    if settings.devices in (1, "1") and settings.num_nodes == 1:
        return 1
    # A process with these variables, or with MPI, may have been started by hand, by LSF or by mpirun.
    if not {"LOCAL_RANK", "LSB_JOBID"} & os.environ.keys() and find_spec("mpi4py") is None:
        _check_rendezvous(settings)
        # Asking Lightning takes seconds; only the hardware or a scheduler makes it necessary.
        if isinstance(settings.devices, int) and settings.devices > 0:
            return settings.devices
    from istar.finetune.training import trainer

    return trainer.count_processes_to_start(trainer.build_bare_trainer(settings))


def _check_process_count(settings: TrainerConfig) -> None:
    num_started = os.environ.get("WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_STEP_NUM_TASKS")
    num_expected = settings.devices * settings.num_nodes if isinstance(settings.devices, int) else -1
    if num_expected > 0 and str(num_expected) != num_started:
        raise UserError(
            f"{num_started} processes have been started, but trainer.devices={settings.devices} on trainer.num_nodes="
            f"{settings.num_nodes} are {num_expected}; devices counts the processes of one node"
        )


def _check_rendezvous(settings: TrainerConfig) -> None:
    """Raise a `UserError` if a run on several nodes lacks the environment variables that connect the nodes."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
    if settings.num_nodes > 1 and missing:
        raise UserError(
            f"trainer.num_nodes={settings.num_nodes} needs {', '.join(missing)} in the environment of train.py on every"
            " node, or torchrun or srun, which set them"
        )
