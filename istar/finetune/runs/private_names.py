"""The private names of other libraries that runs and sweeps need, because no public name does the same.

`pyproject.toml` caps the versions of these libraries, and `tests/finetune/runs/test_private_names.py` checks the names.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna


def is_compile_error(error: Exception) -> bool:
    """Return whether `torch.compile` raised the error; torch has no public base class of its compile errors."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def load_trial(study: "optuna.Study", trial_number: int) -> "optuna.trial.Trial":
    """Load a started trial by its number so that it can be resumed; Optuna's public trials can only be read."""
    import optuna

    frozen_trial = study.get_trials(deepcopy=False)[trial_number]
    return optuna.trial.Trial(study, frozen_trial._trial_id)
