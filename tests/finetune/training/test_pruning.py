"""Runs of a search, which its pruner ends or continues by the values of earlier trials."""

from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from istar.finetune.config import Config, SweepConfig
from istar.finetune.execute.run import run
from istar.finetune.sweeps.study import Study
from istar.finetune.sweeps.trials import make_search_spaces
from istar.runs.record import read_result

EPOCHS = 2


@pytest.mark.parametrize(
    ("pruner", "trials", "value", "epochs"),
    [
        ("median", 6, 1.0, 1),
        pytest.param("median", 6, 0.0, EPOCHS, marks=pytest.mark.slow),
        pytest.param("asha", 1, 1.0, 1, marks=pytest.mark.slow),
        pytest.param("none", 6, 1.0, EPOCHS, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_pruned_after_an_epoch_that_is_worse_than_others(
    tmp_path: Path, small: Callable[..., Config], pruner: str, trials: int, value: float, epochs: int
) -> None:
    """All earlier trials have the same value after every epoch: the best possible one, or the worst."""
    folder = tmp_path / "search"
    folder.mkdir()
    settings = SweepConfig(search="optuna", trials=20, pruner=pruner)
    study = Study(settings, make_search_spaces(["optim.lr=interval(0,1)"], {}, {}, []), folder, " ".join)
    optuna_study = optuna.load_study(
        study_name=study.name,
        storage=study.storage,
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    )
    for _ in range(trials):
        trial = optuna_study.ask()
        for epoch in range(1, EPOCHS):
            trial.report(value, epoch)
            trial.should_prune()  # successive halving records in it which trials it has compared
        optuna_study.tell(trial, value)
    requested_trial = study.ask()
    assert requested_trial is not None

    record = run(small("reg=none", f"trainer.max_epochs={EPOCHS}"), trial=study.trial_address(requested_trial[0]))

    assert record.status == ("finished" if epochs == EPOCHS else "pruned")
    assert len(record.epochs) == epochs
    [result] = Path(small().run.root).glob("demo-*/result.json")
    assert read_result(result.parent) == record
    # After the last epoch there is nothing to decide, so that no value is reported.
    accuracies = [entry["metrics"]["accuracy"] for entry in record.epochs]
    assert 0 < accuracies[0] < 1
    reported = dict(enumerate(accuracies[: EPOCHS - 1], start=1))
    assert optuna_study.trials[requested_trial[0]].intermediate_values == reported
    study.tell(requested_trial[0], record)
    stored_trial = optuna_study.trials[requested_trial[0]]
    assert stored_trial.state.name == ("COMPLETE" if epochs == EPOCHS else "PRUNED")
    assert stored_trial.value == (max(accuracies) if epochs == EPOCHS else accuracies[0])
    study.close()
