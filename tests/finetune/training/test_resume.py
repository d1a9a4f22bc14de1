"""A run that is interrupted at any point and resumed has bit for bit the results of an uninterrupted run."""

import csv
import json
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from istar.errors import UserError
from istar.files import writing
from istar.files.outputs import run_output
from istar.finetune.config import Config, MonitorConfig
from istar.finetune.execute import recording
from istar.finetune.execute.run import run
from istar.finetune.training.checkpoints import AtomicCheckpointIO, read_checkpoint
from istar.finetune.training.kept_models import KeptModels
from istar.finetune.training.module import FineTuner
from istar.finetune.training.refresh import ShrinkageCovariance
from istar.finetune.training.watching import WatchTraining
from istar.hidden_states.attached_penalty import weight_at
from istar.models import pretrained
from istar.monitoring.monitor import Monitor
from istar.reports.run_frame import read_runs
from istar.runs.record import CONFIG, read_result, read_start_time
from tests.outcomes import assert_same, only_run, outcome

Build = Callable[..., Config]
SETTINGS = (
    "task.limit_train=20", "trainer.max_epochs=2", "trainer.accumulate_grad_batches=2", "data.batch_size=4",
    "optim.schedule=linear", "optim.warmup=0.2", "trainer.early_stopping=2", "trainer.checkpoint_every_n_steps=2",
    "run.geometry=true",
)  # fmt: skip
"""An epoch has five micro-batches and three steps. Checkpoints are written every two steps and after epochs."""


class Interruption(BaseException):
    """Simulates a kill: it is not an Exception, so that no handler catches it."""


@pytest.fixture(scope="module")
def checkpoint_paths() -> Iterator[list[Path]]:
    """Return the list of all checkpoints that the runs of this module have written, in order."""
    original, paths = AtomicCheckpointIO.save_checkpoint, []

    def save(self: AtomicCheckpointIO, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        paths.append(Path(path))
        original(self, checkpoint, path, storage_options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AtomicCheckpointIO, "save_checkpoint", save)
        yield paths


@pytest.fixture(scope="module")
def run_uninterrupted(
    composed: Build, checkpoint_paths: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return a function that gives the folder of an uninterrupted run with some overrides."""
    folders: dict[tuple[str, ...], Path] = {}

    def get_folder(*overrides: str) -> Path:
        if overrides not in folders:
            config = composed(*SMALL, *SETTINGS, f"run.root={tmp_path_factory.mktemp('undisturbed')}", *overrides)
            run(config)
            folders[overrides] = only_run(Path(config.run.root))
        return folders[overrides]

    return get_folder


SMALL = ("task.limit_validation=16", "trainer.log_every_n_steps=1", "trainer.progress_bar=false",
         "trainer.accelerator=cpu", "run.isotropy_zeta=null")  # fmt: skip


@pytest.fixture
def run_interrupted(small: Build, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`run_interrupted(owner, name, count, *overrides)` stops a run at a function's count-th call and resumes it."""

    def run_twice(owner: Any, name: str, count: int, *overrides: str, config: Config | None = None) -> Path:
        config = config or small(*SETTINGS, *overrides)
        calls = 0
        original = getattr(owner, name)

        def interrupt_at_count(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                raise Interruption(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, interrupt_at_count)
        with pytest.raises(Interruption):
            run(config)
        monkeypatch.setattr(owner, name, original)
        run(config)
        return only_run(Path(config.run.root))

    return run_twice


def test_a_resumed_run_began_when_it_was_first_started(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("trainer.max_epochs=1", "trainer.checkpoint_every_n_steps=1", "task.limit_train=12", "reg=none")
    config, calls = small(*SETTINGS, *overrides), 0
    original = FineTuner.training_step

    def interrupt_at_third_call(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Interruption
        return original(*arguments)

    test_start = datetime.now(UTC).replace(microsecond=0)
    monkeypatch.setattr(FineTuner, "training_step", interrupt_at_third_call)
    with pytest.raises(Interruption):
        run(config)
    monkeypatch.setattr(FineTuner, "training_step", original)
    [folder] = Path(config.run.root).glob("demo-*")
    start_time = read_start_time(folder)
    assert test_start <= datetime.fromisoformat(start_time) <= datetime.now(UTC)
    assert read_start_time(folder.parent) is None
    # Pretend that the run began in 2020.
    path = folder / CONFIG
    text = path.read_text().replace(start_time, "2020-01-01T00:00:00+00:00", 1)
    run_output(folder).write({CONFIG: text.encode()})
    [unfinished_start_time] = read_runs(folder.parent).frame["began"]
    assert unfinished_start_time == run(config).timing["began"] == "2020-01-01T00:00:00+00:00"
    [finished_start_time] = read_runs(folder.parent).frame["began"]
    assert finished_start_time == unfinished_start_time


INTERRUPTIONS = [
    pytest.param(FineTuner, "training_step", 9, id="second epoch, behind a checkpoint"),
    pytest.param(FineTuner, "training_step", 7, id="mid-epoch, on a checkpoint", marks=pytest.mark.slow),
    pytest.param(FineTuner, "training_step", 5, id="last batch of an epoch", marks=pytest.mark.slow),
    pytest.param(FineTuner, "training_step", 10, id="last batch of all", marks=pytest.mark.slow),
    pytest.param(FineTuner, "validation_step", 1, id="validation before training", marks=pytest.mark.slow),
    pytest.param(FineTuner, "validation_step", 3, id="validation of the second epoch", marks=pytest.mark.slow),
    pytest.param(FineTuner, "on_validation_epoch_end", 2, id="scoring", marks=pytest.mark.slow),
    pytest.param(ShrinkageCovariance, "refresh", 1, id="first refresh", marks=pytest.mark.slow),
    pytest.param(ShrinkageCovariance, "refresh", 2, id="second refresh", marks=pytest.mark.slow),
    pytest.param(AtomicCheckpointIO, "save_checkpoint", 1, id="first checkpoint", marks=pytest.mark.slow),
    pytest.param(AtomicCheckpointIO, "save_checkpoint", 2, id="best weights", marks=pytest.mark.slow),
    pytest.param(AtomicCheckpointIO, "save_checkpoint", 3, id="checkpoint behind an epoch", marks=pytest.mark.slow),
    pytest.param(writing, "_sync_folder", 6, id="a checkpoint written, not its rows", marks=pytest.mark.slow),
    pytest.param(pretrained, "save", 1, id="saving the model", marks=pytest.mark.slow),
    pytest.param(recording, "write_predictions", 1, id="writing predictions", marks=pytest.mark.slow),
    pytest.param(recording, "write_result", 1, id="writing the result", marks=pytest.mark.slow),
    pytest.param(recording, "remove_old_checkpoints", 1, id="tidying up", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("owner", "name", "count"), INTERRUPTIONS)
def test_a_broken_run_goes_on_exactly(run_interrupted, run_uninterrupted, owner, name, count):
    assert_same(run_interrupted(owner, name, count), run_uninterrupted())


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("data.num_workers=2",), marks=pytest.mark.slow),
        pytest.param(("task=demo_span",), marks=pytest.mark.slow),
        pytest.param(("reg=cosreg", "reg.target=input_embeddings", "reg.rows=40"), marks=pytest.mark.slow),
        pytest.param(("reg=cosreg", "reg.lambda=100", "reg.target_score=keep"), marks=pytest.mark.slow),
        pytest.param(("reg=sigreg", "reg.lambda=0.01"), marks=pytest.mark.slow),
        pytest.param(("reg=none",), marks=pytest.mark.slow),
        pytest.param(("reg=cosreg",), marks=pytest.mark.slow),
        pytest.param(("trainer.precision=bf16-mixed",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_whatever_the_settings(run_interrupted, run_uninterrupted, overrides):
    """The run is interrupted in the second epoch, after a checkpoint within it; `INTERRUPTIONS` has other places."""
    assert_same(run_interrupted(FineTuner, "training_step", 9, *overrides), run_uninterrupted(*overrides))


@pytest.mark.parametrize(
    "optimizer",
    [
        ("optim=sgd",),
        ("optim=adafactor",),
        ("optim=muon",),
        ("optim=coupled_adam",),
        ("optim=torch", "optim.name=NAdam"),
        *(
            pytest.param(("optim=torch", f"optim.name={name}"), marks=pytest.mark.slow)
            for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop")
        ),
        pytest.param(("optim=torch", "optim.name=Rprop", "optim.weight_decay=0"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_every_optimizer_goes_on_exactly(run_interrupted, run_uninterrupted, optimizer):
    """An epoch of four steps is interrupted in the fourth, behind a checkpoint of the second."""
    overrides = (*optimizer, "reg=none", "task.limit_train=16", "data.batch_size=2", "trainer.max_epochs=1")
    folder = run_uninterrupted(*overrides)
    assert_same(run_interrupted(FineTuner, "training_step", 7, *overrides), folder)


def test_between_two_refreshes_and_on_a_schedule(run_interrupted, run_uninterrupted):
    """Steps 2 and 4 refresh within an epoch; the run breaks in step 5, behind a checkpoint with Sigma_S of step 4.

    The checkpoint also has the score of the first loss, which the penalty keeps.
    """
    overrides = (
        "reg.refresh_every_n_steps=2", "reg.schedule=cosine", "trainer.checkpoint_every_n_steps=1",
        "reg.points=content", "reg.max_norm_ratio=1.000001", "reg.sample=0.5", "reg.target_score=keep",
    )  # fmt: skip
    folder = run_uninterrupted(*overrides)
    assert_same(run_interrupted(FineTuner, "training_step", 10, *overrides), folder)
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    weights = [float(row["train/lambda"]) for row in rows if row["train/lambda"]]
    assert weights == pytest.approx([weight_at(step, 6, 0.2, "cosine", 0.0) for step in range(6)], rel=1e-9)
    left_out_counts = [row["train/points_left_out"] for row in rows if row["train/loss"]]
    # The norms of a new model are nearly equal.
    assert all(float(count) >= 0 for count in left_out_counts)
    assert float(left_out_counts[-1]) > 0
    # Sigma_S is refreshed every epoch and every two steps, and only once where both coincide.
    assert [row["step"] for row in rows if row["shrinkage/points"]] == ["0", "2", "3", "4"]


MID_EPOCH = (
    "task.limit_train=44", "trainer.val_check_interval=4", "trainer.max_steps=6", "trainer.limit_train_batches=10",
    "trainer.limit_val_batches=2", "data.eval_batch_size=4", "trainer.early_stopping=null",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8, 11])
def test_validations_within_an_epoch(run_interrupted, run_uninterrupted, count):
    assert_same(run_interrupted(FineTuner, "training_step", count, *MID_EPOCH), run_uninterrupted(*MID_EPOCH))


ACROSS_EPOCHS = (
    "trainer.check_val_every_n_epoch=null", "trainer.val_check_interval=4", "trainer.max_steps=5",
    "trainer.early_stopping=null", "trainer.checkpoint_every_n_steps=1", "optim.schedule=cosine", "optim.warmup=2",
)  # fmt: skip
"""An epoch has five micro-batches and three steps. Validations take place every four micro-batches of all epochs."""


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 7])
def test_validations_and_checkpoints_across_epochs(run_interrupted, run_uninterrupted, count):
    folder = run_uninterrupted(*ACROSS_EPOCHS)
    steps = [(entry["epoch"], entry["step"]) for entry in read_result(folder).epochs]
    assert steps == [(1, 2), (2, 4), (2, 5)]
    assert_same(run_interrupted(FineTuner, "training_step", count, *ACROSS_EPOCHS), folder)


def test_predictions_are_stored_once_with_the_best_weights(run_uninterrupted):
    folder = run_uninterrupted()
    best_epoch = read_checkpoint(next((folder / "checkpoints").glob("step-*.ckpt")))["callbacks"]["History"]["best"]
    predictions = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    stored = read_checkpoint(folder / "checkpoints" / f"best-epoch-{best_epoch}.ckpt")["evaluations"][""]["predictions"]
    assert stored == predictions
    assert len(predictions) == 16
    for path in (folder / "checkpoints").glob("step-*.ckpt"):
        with zipfile.ZipFile(path) as archive:
            [data] = [name for name in archive.namelist() if name.endswith("data.pkl")]
            assert b"prediction" not in archive.read(data)


@pytest.mark.parametrize(
    ("interval", "steps"),
    [
        pytest.param(4, [2, 4, 6], id="within", marks=pytest.mark.slow),
        pytest.param(100, [6], id="never", marks=pytest.mark.slow),
        pytest.param(10, [6], id="on the last batch", marks=pytest.mark.slow),
    ],
)
def test_a_validation_follows_the_last_step(run_uninterrupted, interval, steps):
    """Two epochs of five micro-batches and three steps."""
    settings = ("trainer.check_val_every_n_epoch=null", "trainer.early_stopping=null")
    overrides = (f"trainer.val_check_interval={interval}", *settings)
    assert [entry["step"] for entry in read_result(run_uninterrupted(*overrides)).epochs] == steps


EVERY_SECOND_EPOCH = ("trainer.check_val_every_n_epoch=2", "trainer.max_epochs=3")


@pytest.mark.parametrize(
    ("interval", "owner", "name", "count"),
    [
        # After an epoch without a validation.
        (EVERY_SECOND_EPOCH, FineTuner, "training_step", 6),
        pytest.param(EVERY_SECOND_EPOCH, FineTuner, "training_step", 15, marks=pytest.mark.slow),
        pytest.param(EVERY_SECOND_EPOCH, pretrained, "save", 1, marks=pytest.mark.slow),
        *(
            pytest.param((f"trainer.{interval}",), owner, name, count, marks=pytest.mark.slow)
            for interval in ("check_val_every_n_epoch=4", "val_check_interval=0.7", "val_check_interval=4")
            for owner, name, count in ((FineTuner, "training_step", 10), (pretrained, "save", 1))
        ),
        pytest.param(
            ("trainer.check_val_every_n_epoch=2", "trainer.max_steps=2"), pretrained, "save", 1, marks=pytest.mark.slow
        ),
    ],
)
def test_a_last_validation_outside_of_the_interval(run_interrupted, run_uninterrupted, interval, owner, name, count):
    overrides = (*interval, "trainer.early_stopping=null", "reg=none")
    assert_same(run_interrupted(owner, name, count, *overrides), run_uninterrupted(*overrides))


OBSERVED = ("trainer.keep_models=log", "monitor.every=2", "monitor.probe_examples=6")


@pytest.mark.parametrize(
    ("owner", "name", "count"),
    [
        pytest.param(pretrained, "save", 4, id="model of step 4"),
        pytest.param(Monitor, "measure", 4, id="probe of step 6, behind the last checkpoint"),
        pytest.param(FineTuner, "training_step", 9, id="step 5, which is read"),
        pytest.param(pretrained, "save", 5, id="last model, behind the last checkpoint"),
        pytest.param(Monitor, "measure", 3, id="probe of step 4"),
    ],
)
@pytest.mark.slow
def test_kept_models_and_readings_are_neither_lost_nor_doubled(run_interrupted, run_uninterrupted, owner, name, count):
    folder, undisturbed = run_interrupted(owner, name, count, *OBSERVED), run_uninterrupted(*OBSERVED)
    assert_same(folder, undisturbed)
    readings = "geometry_over_steps.csv"
    assert (folder / readings).read_bytes() == (undisturbed / readings).read_bytes()
    assert sorted(path.name for path in (folder / "models").iterdir()) == [f"step-{n}" for n in (0, 1, 2, 4, 6)]
    assert read_steps(folder, "probe/layer_1/inter_sim") == ["0", "2", "4", "6"]
    assert read_steps(folder, "geometry/layer_1/inter_sim") == ["0", "2", "4"]


def test_observing_does_not_change_the_training(run_uninterrupted):
    """With dropout, whose masks come from the global random generator."""
    observed, unobserved = (outcome(run_uninterrupted(*overrides)) for overrides in (OBSERVED, ()))
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("geometry/", "probe/"))}
        for row in observed["metrics.csv"]
        if not (row["geometry/layer_1/inter_sim"] or row["probe/layer_1/inter_sim"])
    ]
    assert rows == unobserved["metrics.csv"]
    for part in ("model", "predictions", "geometry.json"):
        assert observed[part] == unobserved[part]
    assert observed["result.json"]["name"] == unobserved["result.json"]["name"]


def read_steps(folder, column):
    with (folder / "metrics.csv").open(newline="") as file:
        return [row["step"] for row in csv.DictReader(file) if row[column]]


def make_watch(**settings: Any) -> WatchTraining:
    watch = WatchTraining(MonitorConfig(**settings), SimpleNamespace(validation=[range(9)]))  # type: ignore[arg-type]
    watch.monitor = SimpleNamespace(state_dict=dict)  # type: ignore[assignment]
    return watch


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (None, KeptModels(Path("models"), "log", None), r"trainer\.keep_models=null, not log.*=null goes on with it"),
        (KeptModels(Path("models"), 3, None), KeptModels(Path("models"), "log", None), r"keep_models=3, not log"),
        (None, make_watch(every=2), r"watched with monitor\.every=null; the same settings go on with it"),
        (make_watch(every=3), make_watch(every=2), r"every=3 monitor\.points=4096 monitor\.measures=\[\] monitor\.pr"),
        (make_watch(every=3), make_watch(every=3, measures=["isoscore"]), r"monitor\.every=3 "),
    ],
)
def test_an_interrupted_run_cannot_be_observed_from_its_middle(before, after, message):
    states = {} if before is None else {before.state_key: before.state_dict()}
    with pytest.raises(UserError, match=message):
        after.on_load_checkpoint(None, None, {"callbacks": states})
    after.on_load_checkpoint(None, None, {"callbacks": {after.state_key: after.state_dict()}})


def test_arguments_of_lightning_trainer(run_uninterrupted):
    """Ten batches, five steps, an epoch; a validation of eight examples every four batches and after the last step."""
    folder = run_uninterrupted(*MID_EPOCH)
    record = read_result(folder)
    steps = [(entry["epoch"], entry["step"]) for entry in record.epochs]
    assert steps == [(1, 2), (1, 4), (2, 6)]
    assert record.data["validation"] == {"validation": 8}
    best = max(record.epochs, key=lambda entry: entry["metrics"]["accuracy"])
    assert record.headline["value"] == best["metrics"]["accuracy"]
    assert (folder / "checkpoints" / f"best-epoch-{record.epochs.index(best) + 1}.ckpt").is_file()


@pytest.mark.parametrize(
    ("interval", "steps"),
    [
        pytest.param(("n_steps=null", "n_minutes=null"), [3, 6], marks=pytest.mark.slow),
        ((), [2, 3, 4, 6]),
        pytest.param(("n_steps=null", "n_minutes=1e-9"), list(range(1, 7)), marks=pytest.mark.slow),
    ],
)
def test_when_checkpoints_are_written(run_uninterrupted, checkpoint_paths, interval, steps):
    """After every epoch of three steps, and at the intervals in the settings, of which `SETTINGS` has one."""
    folder = run_uninterrupted(*(f"trainer.checkpoint_every_{setting}" for setting in interval))
    names = [path.name for path in checkpoint_paths if path.is_relative_to(folder)]
    assert [name for name in names if name.startswith("step")] == [f"step-{step}.ckpt" for step in steps]


def test_a_run_that_has_collapsed_stays_stopped(run_interrupted, run_uninterrupted):
    """It stops in the middle of the first epoch, and is interrupted before its model is saved."""
    overrides = ("monitor.every=1", "monitor.stop_at_inter_sim=-1", "monitor.readings=2", "reg=none")
    folder = run_interrupted(pretrained, "save", 1, *overrides)
    assert [entry["step"] for entry in read_result(folder).epochs] == [2]
    assert_same(folder, run_uninterrupted(*overrides))


@pytest.mark.slow
def test_a_run_that_had_stopped_early_stays_stopped(run_interrupted, run_uninterrupted):
    overrides = ("trainer.early_stopping=1", "trainer.max_epochs=6", "optim.lr=1e-9", "task.limit_train=8", "reg=none")
    folder = run_interrupted(pretrained, "save", 1, *overrides)
    assert len(read_result(folder).epochs) == 2
    assert_same(folder, run_uninterrupted(*overrides))
