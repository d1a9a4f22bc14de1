"""The private names of other libraries exist in the installed versions."""

import optuna
import torch
from torch._dynamo.exc import InternalTorchDynamoError

from istar.finetune.runs import private_names


def test_a_compile_error_is_recognized() -> None:
    assert private_names.is_compile_error(InternalTorchDynamoError("out of luck"))
    assert not private_names.is_compile_error(RuntimeError("out of luck"))
    assert not private_names.is_compile_error(torch.OutOfMemoryError("out of luck"))


def test_a_started_trial_can_be_resumed() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    suggested = study.ask().suggest_float("x", 0, 1)
    trial = private_names.load_trial(study, 0)
    assert (trial.number, trial.params) == (0, {"x": suggested})
    study.tell(0, 1.0)
    assert study.best_trial.number == 0
