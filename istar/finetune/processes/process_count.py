"""The number of processes that a run needs on this machine."""

import os
from importlib.util import find_spec

from istar.errors import UserError
from istar.finetune.config import TrainerConfig
from istar.finetune.processes.ranks import has_external_launcher


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
