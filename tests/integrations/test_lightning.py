"""The Lightning callback: gradients against the formula over micro-batches and processes, refreshes and logs."""

import copy
import csv
import io
import os
import random
import socket
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
import transformers as hf
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset

import istar
from istar.integrations.lightning import PenaltyCallback
from tests.integrations.builders import (
    CLOSE,
    SHAPE,
    SPECIAL_IDS,
    WEIGHT,
    ZETA,
    collate,
    compute_gradients,
    compute_penalty,
    make_classifier,
    make_examples,
    make_settings,
    task_loss_and_points,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]
BATCH_SIZE = 2


class Classifier(L.LightningModule):
    """Records the gradients of its first optimizer step, its batches and the random numbers of its training."""

    def __init__(self, model: nn.Module, penalty: PenaltyCallback, rate: float = 0.1) -> None:
        super().__init__()
        self.model = model
        self.penalty = penalty
        self.rate = rate
        self.gradients: dict[str, Tensor] = {}
        self.draws: list[Any] = []
        self.batches: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.batches.append(batch)
        self.draws.append((batch["input_ids"].tolist(), torch.rand(1).item(), random.random(), np.random.rand()))
        return self.model(**batch).loss + self.penalty.loss()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        named = self.model.named_parameters()
        if not self.gradients:
            self.gradients = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def make_callback(sync: bool = True, zeta: float = ZETA, **settings: Any) -> PenaltyCallback:
    options = {name: settings.pop(name) for name in ("model", "loader", "modules") if name in settings}
    return PenaltyCallback(istar.IStar(WEIGHT, zeta, sync=sync), make_settings(**settings), **options)


def make_trainer(callback: PenaltyCallback, *other_callbacks: L.Callback, **settings: Any) -> L.Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return L.Trainer(callbacks=[callback, *other_callbacks], **(defaults | settings))


def make_loader(rows: list[dict[str, Tensor]], **settings: Any) -> DataLoader:
    return DataLoader(rows, BATCH_SIZE, collate_fn=collate, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "accumulation", "is_checkpointed"), [("bert", 1, True), ("gpt2", 4, False), ("llama", 2, True)]
)
def test_the_gradient_is_that_of_the_mean_over_micro_batches(name, accumulation, is_checkpointed):
    rows = make_examples("classification", BATCH_SIZE * accumulation)
    model, expected_model = make_classifier(name), make_classifier(name)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    callback = make_callback()
    module = Classifier(model, callback)
    make_trainer(callback, max_steps=1, accumulate_grad_batches=accumulation, precision="64-true").fit(
        module, make_loader(rows)
    )

    covariance = callback.penalty.shrinkage_covariance
    _, all_points = task_loss_and_points(expected_model, collate(rows))
    assert_close(covariance.double(), torch.cov(all_points.T), rtol=1e-5, atol=1e-7)
    losses = []
    for start in range(0, len(rows), BATCH_SIZE):
        task_loss, points = task_loss_and_points(expected_model, collate(rows[start : start + BATCH_SIZE]))
        losses.append(task_loss + compute_penalty(points, covariance))
    expected = compute_gradients(expected_model, torch.stack(losses).mean())
    assert_close(module.gradients, expected, **CLOSE)


def run_in_process(rank: int, world: int, port: int, folder: Path, sync: bool, accumulation: int) -> None:
    """Train in one of the processes, which Lightning finds started, and save the outcome."""
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rows = make_examples("classification", BATCH_SIZE * accumulation * world)
    settings = {"devices": world, "strategy": DDPStrategy(process_group_backend="gloo"), "precision": "64-true"}
    settings |= {"accumulate_grad_batches": accumulation}
    callback = make_callback(sync)
    module = Classifier(make_classifier("bert"), callback)
    first_trainer = make_trainer(callback, max_steps=1, **settings)
    first_trainer.fit(module, make_loader(rows))
    first_trainer.save_checkpoint(folder / "saved.ckpt")
    outcome = {"gradients": module.gradients, "covariance": callback.penalty.shrinkage_covariance}
    outcome["batches"] = module.batches
    resumed_callback = make_callback(sync, refresh=None)
    resumed_trainer = make_trainer(
        resumed_callback, max_steps=1, **(settings | {"strategy": DDPStrategy(process_group_backend="gloo")})
    )
    resumed_trainer.fit(
        Classifier(make_classifier("bert"), resumed_callback), make_loader(rows), ckpt_path=folder / "saved.ckpt"
    )
    outcome["restored"] = resumed_callback.penalty.shrinkage_covariance
    torch.save(outcome, folder / f"{rank}.pt")


def run_processes(world: int, folder: Path, sync: bool, accumulation: int) -> list[dict[str, Any]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.start_processes(run_in_process, (world, port, folder, sync, accumulation), world, start_method="fork")
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("sync", [True, False])
def test_over_processes_the_gradient_is_that_of_one_cloud_or_of_the_mean_of_their_clouds(tmp_path, sync):
    world, accumulation = 2, 2
    outcomes = run_processes(world, tmp_path, sync, accumulation)

    model = make_classifier("bert")
    losses = []
    for step in range(accumulation):
        # Lightning decides which process gets which rows.
        parts = [task_loss_and_points(model, outcome["batches"][step]) for outcome in outcomes]
        clouds = [torch.cat([points for _, points in parts])] * world if sync else [points for _, points in parts]
        for (task_loss, _), cloud, outcome in zip(parts, clouds, outcomes, strict=True):
            losses.append(task_loss + compute_penalty(cloud, outcome["covariance"]))
    expected = compute_gradients(model, torch.stack(losses).mean())
    for outcome in outcomes:
        assert_close(outcome["gradients"], expected, **CLOSE)
        # Each process restores its matrix from the checkpoint.
        assert_close(outcome["restored"], outcome["covariance"], rtol=0, atol=0)
    assert torch.equal(outcomes[0]["covariance"], outcomes[1]["covariance"]) == sync


def test_a_checkpoint_of_several_processes_is_refused_by_another_number_of_them():
    names = (f"process{rank}.penalty.shrinkage_covariance" for rank in range(2))
    attached = istar.attach(make_classifier("bert"), istar.IStar(WEIGHT, ZETA, sync=False))
    with pytest.raises(istar.UserError, match="each of 2 processes; expected 1"):
        attached.load_state_dict({name: torch.eye(3) for name in names})


def test_a_resumed_training_ends_as_one_that_was_not_interrupted(tmp_path):
    # An epoch has two steps and Sigma_S is refreshed every three: the second epoch must begin with the saved matrix.
    rows = make_examples("classification", 2 * BATCH_SIZE)

    def train_model(epochs: int, ckpt_path: Path | None = None) -> nn.Module:
        callback = make_callback(refresh=3, momentum=0.5, schedule=lambda step, _: -0.1 * step)
        checkpoint = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        module = Classifier(make_classifier("gpt2"), callback)
        make_trainer(callback, checkpoint, max_epochs=epochs, enable_checkpointing=True).fit(
            module, make_loader(rows), ckpt_path=ckpt_path
        )
        return module.model

    uninterrupted = train_model(3)
    resumed = train_model(3, tmp_path / "epoch=0.ckpt")
    assert_close(resumed.state_dict(), uninterrupted.state_dict(), rtol=0, atol=0)
    assert not torch.equal(resumed.score.weight, make_classifier("gpt2").score.weight)


def test_two_callbacks_have_their_own_logs_and_states(tmp_path):
    class TwicePenalized(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + second.loss()

    first = make_callback()
    second = PenaltyCallback(istar.IStar(1.0, ZETA, layers="last"), suffix="_last")
    rows = make_examples("classification", BATCH_SIZE)
    trainer = make_trainer(first, second, max_epochs=1, precision="64-true")
    trainer.fit(TwicePenalized(make_classifier("bert"), first), make_loader(rows))
    metrics, [task_loss, _] = trainer.callback_metrics, task_loss_and_points(make_classifier("bert"), collate(rows))
    assert metrics["train/points"] == 2 * metrics["train/points_last"]
    assert metrics["train/penalty_last"] == second.penalty.last.value
    for name in ("train/task_loss", "train/task_loss_last"):
        assert_close(metrics[name].double(), task_loss, rtol=1e-6, atol=0)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    states = torch.load(tmp_path / "saved.ckpt", weights_only=False)["callbacks"]
    for key, callback in (("PenaltyCallback", first), ("PenaltyCallback_last", second)):
        covariance = states[key]["process0.penalty.shrinkage_covariance"]
        assert torch.equal(covariance, callback.penalty.shrinkage_covariance)
    with pytest.raises(RuntimeError, match="Found more than one stateful callback of type `PenaltyCallback`"):
        make_trainer(make_callback(), make_callback())


def test_points_left_out_and_lambda_are_logged():
    callback = PenaltyCallback(
        istar.CosReg(WEIGHT, layers="all"),
        make_settings(points=istar.Points(max_norm_ratio=1.000001), schedule="warmup", warmup=1.0),
    )  # fmt: skip
    losses = []

    class LossRecorder(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            losses.append(super().training_step(batch, batch_idx))
            return losses[-1]

    trainer = make_trainer(callback, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(
        LossRecorder(make_classifier("bert"), callback), make_loader(make_examples("classification", 4 * BATCH_SIZE))
    )
    metrics = trainer.callback_metrics
    assert_close((metrics["train/task_loss"] + metrics["train/penalty"]).double(), losses[-1].detach(), **CLOSE)
    assert metrics["train/lambda"] == pytest.approx(WEIGHT / 2)
    assert metrics["train/points_left_out"] > 0


class RandomCollator:
    """A collate function that draws random numbers."""

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        random.random(), np.random.rand(), torch.rand(1)
        return collate(rows)


@pytest.mark.parametrize(
    ("kind", "refresh"),
    [
        ("global generator", "epoch"),
        ("own generator", 2),
        pytest.param("persistent workers", 2, marks=pytest.mark.slow),
    ],
)
def test_batches_and_random_numbers_are_the_same_with_and_without_refresh(kind, refresh):
    def train_and_read_draws(zeta: float) -> list[Any]:
        L.seed_everything(3, verbose=False)
        settings: dict[str, Any] = {
            "global generator": {},
            "own generator": {"generator": torch.Generator().manual_seed(5)},
            "persistent workers": {"num_workers": 1, "persistent_workers": True},
        }[kind]
        batches = DataLoader(  # type: ignore[arg-type]
            make_examples("classification", 8), 2, shuffle=True, collate_fn=RandomCollator(), **settings
        )
        callback = make_callback(zeta=zeta, refresh=refresh, num_points=30)
        module = Classifier(make_classifier("bert"), callback)
        make_trainer(callback, max_epochs=2).fit(module, batches)
        assert (callback.penalty.shrinkage_covariance is None) == (zeta == 0)
        return module.draws

    with_refresh = train_and_read_draws(ZETA)
    assert len(with_refresh) == 8
    assert with_refresh == train_and_read_draws(0)


def test_sigma_s_is_refreshed_before_each_epoch_or_every_so_many_steps():
    class RefreshRecorder(L.Callback):
        """Records the optimizer steps before which there is a new Sigma_S."""

        def __init__(self, penalty: istar.IStar) -> None:
            self.penalty = penalty
            self.latest: Tensor | None = None
            self.steps: list[int] = []

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if self.penalty.shrinkage_covariance is not self.latest:
                self.latest = self.penalty.shrinkage_covariance
                self.steps.append(trainer.global_step)

    def find_refresh_steps(refresh: Any, weight: float = WEIGHT) -> list[int]:
        callback = PenaltyCallback(istar.IStar(weight, ZETA), make_settings(refresh))
        recorder = RefreshRecorder(callback.penalty)
        module = Classifier(make_classifier("bert"), callback)
        make_trainer(callback, recorder, max_epochs=2, accumulate_grad_batches=2).fit(
            module, make_loader(make_examples("classification", 12))
        )
        return recorder.steps

    assert find_refresh_steps("epoch") == [0, 3]
    assert find_refresh_steps(2) == [0, 2, 3, 4]
    # With lambda 0 the matrix has no use.
    assert find_refresh_steps("epoch", weight=0.0) == []


class Manual(Classifier):
    """Trains by manual optimization: `num_optimizers` step in every `step_every`-th batch."""

    automatic_optimization = False

    def __init__(self, penalty: PenaltyCallback, num_optimizers: int, step_every: int) -> None:
        super().__init__(make_classifier("bert"), penalty)
        self.num_optimizers, self.step_every = num_optimizers, step_every
        self.weights: list[float] = []
        self.refreshes: list[bool] = []
        self.latest: Tensor | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        penalty = self.penalty.penalty
        self.weights.append(penalty.weight)
        self.refreshes.append(penalty.shrinkage_covariance is not self.latest)
        self.latest = penalty.shrinkage_covariance
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % self.step_every == 0:
            for optimizer in [self.optimizers()] if self.num_optimizers == 1 else self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [torch.optim.SGD([weight], lr=0.01) for weight in list(self.parameters())[: self.num_optimizers]]


class WithoutLength(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(make_examples("classification", 8 * BATCH_SIZE))


@pytest.mark.parametrize(
    ("optimizers", "step_every", "settings", "fractions"),
    [
        (2, 1, {"max_epochs": 1}, [0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8]),
        (1, 4, {"max_epochs": 1}, [0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8]),
        (2, 1, {"max_epochs": 2, "limit_train_batches": 2}, [0, 1 / 4, 2 / 4, 3 / 4]),
        (1, 1, {"max_epochs": -1, "max_steps": 4}, [0, 1 / 4, 2 / 4, 3 / 4]),
        (2, 1, {"max_epochs": 1, "max_steps": 8}, [0, 1 / 4, 2 / 4, 3 / 4]),
        (2, 1, {"max_epochs": 1, "max_steps": 99}, [0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8]),
    ],
)
def test_manual_optimization_counts_batches(optimizers, step_every, settings, fractions):
    callback = make_callback(schedule="linear", refresh=3)
    module = Manual(callback, optimizers, step_every)
    make_trainer(callback, **settings).fit(module, make_loader(make_examples("classification", 8 * BATCH_SIZE)))
    assert module.weights == pytest.approx([WEIGHT * (1 - fraction) for fraction in fractions])
    epoch = settings.get("limit_train_batches", 8)
    is_refreshed = [batch % 3 == 0 or batch % epoch == 0 for batch in range(len(fractions))]
    assert module.refreshes == is_refreshed


def test_the_count_of_batches_of_manual_optimization_resumes(tmp_path):
    def train_model(epochs: int, ckpt_path: Path | None = None) -> list[float]:
        callback = make_callback(schedule=lambda batch, num_batches: -0.1 * batch)
        module = Manual(callback, num_optimizers=2, step_every=1)
        trainer = make_trainer(callback, max_epochs=epochs)
        trainer.fit(module, make_loader(make_examples("classification", 3 * BATCH_SIZE)), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module.weights

    assert train_model(1) + train_model(2, tmp_path / "1.ckpt") == pytest.approx([-0.1 * batch for batch in range(6)])


@pytest.mark.parametrize("settings", [{"max_epochs": 1, "max_steps": 99}, {"max_epochs": 9, "max_steps": 4}])
def test_a_schedule_is_told_the_same_length_in_each_step(settings):
    calls = []
    callback = make_callback(schedule=lambda step, num_steps: calls.append((step, num_steps)) or WEIGHT)
    module = Classifier(make_classifier("bert"), callback)
    make_trainer(callback, **settings).fit(module, make_loader(make_examples("classification", 4 * BATCH_SIZE)))
    assert calls == [(step, 4) for step in range(4)]


def test_the_accumulation_may_change_between_epochs():
    callback, weights = make_callback(schedule="linear"), []

    class WeightRecorder(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            weights.append(callback.penalty.weight)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(callback, GradientAccumulationScheduler({0: 1, 1: 2}), max_epochs=2)
    trainer.fit(
        WeightRecorder(make_classifier("bert"), callback), make_loader(make_examples("classification", 4 * BATCH_SIZE))
    )
    assert weights == pytest.approx([WEIGHT * (1 - step / 6) for step in (0, 1, 2, 3, 4, 4, 5, 5)])


@pytest.mark.parametrize("is_manual", [False, True])
def test_a_schedule_needs_the_length_of_training(is_manual):
    loader = DataLoader(WithoutLength(), BATCH_SIZE, collate_fn=collate)  # type: ignore[arg-type]

    def fit(**settings: Any) -> float:
        callback = make_callback(schedule="linear")
        module = Manual(callback, 1, 1) if is_manual else Classifier(make_classifier("bert"), callback)
        trainer = make_trainer(callback, **settings)
        trainer.fit(module, loader)
        return float(trainer.callback_metrics["train/lambda"])

    assert fit(max_steps=5) == pytest.approx(WEIGHT / 5)
    assert fit(max_steps=4, max_epochs=1) == pytest.approx(WEIGHT / 4)
    for settings in ({"max_epochs": 2}, {"max_epochs": -1}):
        with pytest.raises(istar.UserError, match=r"needs the length of the training; .*Trainer\(max_steps=") as error:
            fit(**settings)
        assert "\n" not in str(error.value)


def test_the_refresh_runs_in_the_precision_of_the_trainer():
    dtypes = []

    class DtypeRecorder(Classifier):
        def on_fit_start(self) -> None:
            linear = self.model.bert.encoder.layer[0].intermediate.dense
            linear.register_forward_hook(
                lambda module, args, output: dtypes.append((torch.is_grad_enabled(), output.dtype))
            )

    callback = make_callback()
    make_trainer(callback, max_steps=1, precision="bf16-mixed").fit(
        DtypeRecorder(make_classifier("bert").float(), callback),
        make_loader(make_examples("classification", BATCH_SIZE)),
    )
    assert dtypes == [(False, torch.bfloat16), (True, torch.bfloat16)]


def test_the_weighted_penalty_its_score_and_the_points_are_logged_and_validation_adds_nothing():
    class Validated(Classifier):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.model(**batch).loss + self.penalty.loss())

    rows = make_examples("classification", BATCH_SIZE)
    callback = make_callback()
    trainer = make_trainer(callback, max_epochs=1, precision="64-true")
    trainer.fit(Validated(make_classifier("bert"), callback, rate=0.0), make_loader(rows), make_loader(rows))
    metrics = trainer.callback_metrics
    task_loss, points = task_loss_and_points(make_classifier("bert"), collate(rows))
    expected = compute_penalty(points, callback.penalty.shrinkage_covariance)
    assert_close(metrics["train/penalty"].double(), expected, rtol=1e-6, atol=0)
    assert_close(metrics["train/isoscore_star"].double(), 1 - expected / WEIGHT, rtol=1e-6, atol=0)
    assert metrics["train/points"] == len(points)
    assert_close(metrics["train/task_loss"].double(), task_loss, rtol=1e-6, atol=0)
    assert_close(metrics["val_loss"].double(), task_loss, rtol=1e-6, atol=0)


def test_a_batch_without_a_score_adds_nothing_and_is_logged():
    callback = PenaltyCallback(istar.IStar(1.0, 0.0, layers="last"), make_settings(points=istar.Points("first")))
    module = Classifier(make_classifier("bert"), callback)
    trainer = make_trainer(callback, max_epochs=2, precision="64-true")
    with pytest.warns(UserWarning, match="have no isoscore, because they are too few or all equal"):
        trainer.fit(module, make_loader(make_examples("classification", 2 * BATCH_SIZE + 1)))
    assert trainer.callback_metrics["train/undefined"] == 2
    assert trainer.callback_metrics["train/penalty"] == 0
    assert all(parameter.isfinite().all() for parameter in module.parameters())


class Tuned(Classifier):
    """A module with a learning rate and a batch size that Lightning's tuner may change."""

    def __init__(self, model: Any, penalty: PenaltyCallback) -> None:
        super().__init__(model, penalty)
        self.lr = 0.1
        self.batch_size = 2

    def train_dataloader(self) -> DataLoader:
        return DataLoader(make_examples("classification", 8), self.batch_size, collate_fn=collate)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


TUNING = {
    "learning rate": lambda tuner, module: tuner.lr_find(module, num_training=4),
    "batch size": lambda tuner, module: tuner.scale_batch_size(module, max_trials=2, steps_per_trial=1),
}


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.parametrize("what", ["learning rate", pytest.param("batch size", marks=pytest.mark.slow)])
def test_the_tuner_which_takes_the_callbacks_away_is_told_what_to_do(what, tmp_path):
    def tune(callback: PenaltyCallback) -> Tuned:
        module = Tuned(make_classifier("bert"), callback)
        trainer = make_trainer(callback, max_epochs=1, precision="64-true", default_root_dir=tmp_path)
        TUNING[what](Tuner(trainer), module)
        callback.penalty.weight = WEIGHT
        trainer.fit(module)
        return module

    with pytest.raises(istar.UserError, match=r"run without callbacks: set penalty\.weight = 0 for them$"):
        tune(make_callback())
    callback = make_callback()
    callback.penalty.weight = 0.0
    assert tune(callback).gradients
    assert callback.penalty.last.points > 0


def test_a_new_training_begins_like_the_first_and_one_that_goes_on_continues(tmp_path):
    def fit(trainer: L.Trainer) -> tuple[Tensor, Tensor]:
        trainer.fit(Classifier(make_classifier("bert"), callback), make_loader(make_examples("classification", 8)))
        penalty = callback.penalty
        return penalty.kept_score.clone(), penalty.shrinkage_covariance.clone()

    penalty = istar.IStar(WEIGHT, ZETA, set_point=istar.SetPoint("keep"))
    callback = PenaltyCallback(penalty, make_settings(momentum=0.5))
    first_trainer = make_trainer(callback, max_epochs=1, precision="64-true")
    first = fit(first_trainer)
    penalty.kept_score = penalty.kept_score + 1
    assert_close(fit(make_trainer(callback, max_epochs=1, precision="64-true")), first, rtol=0, atol=0)
    penalty.kept_score = penalty.kept_score + 1
    first_trainer.fit_loop.max_epochs = 2
    assert fit(first_trainer)[0] == first[0] + 1
    # A checkpoint of a training without the penalty has no state of it.
    loader = make_loader(make_examples("classification", 8))
    plain = make_callback()
    plain.penalty.weight = 0.0
    trainer = make_trainer(plain, max_epochs=1, precision="64-true")
    trainer.fit(Classifier(make_classifier("bert"), plain, rate=0.0), loader)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    checkpoint = torch.load(tmp_path / "plain.ckpt", weights_only=False)
    torch.save(checkpoint | {"callbacks": {}}, tmp_path / "plain.ckpt")
    resumed = make_trainer(callback, max_epochs=2, precision="64-true")
    resumed.fit(Classifier(make_classifier("bert"), callback), loader, ckpt_path=tmp_path / "plain.ckpt")
    assert_close(penalty.kept_score, first[0], rtol=1e-6, atol=0)


def test_with_lambda_0_the_training_is_bit_for_bit_the_same_as_without_a_penalty():
    class WithoutPenalty(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss

    def train_and_read_parameters(module_class: type[Classifier]) -> dict[str, Tensor]:
        callback = PenaltyCallback(istar.IStar(0.0, ZETA))
        module = module_class(make_classifier("bert"), callback)
        make_trainer(callback, max_epochs=2).fit(module, make_loader(make_examples("classification", 8)))
        return module.model.state_dict()

    assert_close(train_and_read_parameters(Classifier), train_and_read_parameters(WithoutPenalty), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Attribute 'penalty' is an instance of `nn.Module`")
@pytest.mark.parametrize("is_callback", [True, False], ids=["callback", "penalty"])
def test_a_penalty_among_the_saved_hyperparameters(tmp_path, is_callback):
    class Saving(L.LightningModule):
        def __init__(self, penalty: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = make_classifier("bert")
            self.watch = penalty if is_callback else istar.attach(self.model, penalty)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss + self.watch.loss()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(module: Saving, callback: L.Callback, folder: Path, **arguments: Any) -> dict[str, Any]:
        trainer = make_trainer(callback, max_steps=2, precision="64-true")
        trainer.fit(module, make_loader(make_examples("classification", 2 * BATCH_SIZE)), **arguments)
        trainer.save_checkpoint(folder / "saved.ckpt")
        return torch.load(folder / "saved.ckpt", weights_only=False)

    def callback_of(module: Saving) -> L.Callback:
        return module.watch if is_callback else L.Callback()

    penalty = istar.IStar(WEIGHT, 0)
    module = Saving(PenaltyCallback(penalty) if is_callback else penalty)
    saved = train(module, callback_of(module), tmp_path)
    hyperparameters = io.BytesIO()
    torch.save(saved["hyper_parameters"], hyperparameters)
    assert hyperparameters.tell() < 10_000, "the model is saved twice"
    again = Saving.load_from_checkpoint(tmp_path / "saved.ckpt", weights_only=False)
    assert_close(again.model.state_dict(), module.model.state_dict())
    # Deep copies and loaded modules train on as the original does.
    outcomes = [train(each, callback_of(each), tmp_path) for each in (copy.deepcopy(module), module, again)]
    for outcome in outcomes[1:]:
        assert_close(outcome["state_dict"], outcomes[0]["state_dict"], rtol=0, atol=0)
    assert not torch.equal(
        outcomes[0]["state_dict"]["model.classifier.bias"], saved["state_dict"]["model.classifier.bias"]
    )


def test_any_module_can_be_penalized_by_naming_its_layers():
    class Tower(L.LightningModule):
        def __init__(self, penalty: PenaltyCallback) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh())
            self.penalty = penalty

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layers(batch).square().mean() + self.penalty.loss()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = make_callback(model="layers", modules=lambda module: [module.layers[1], module.layers[3]])
    make_trainer(callback, max_steps=1).fit(Tower(callback), DataLoader(torch.randn(12, 5), 12))  # type: ignore[arg-type]
    assert callback.penalty.last.points == 24
    assert callback.penalty.shrinkage_covariance.shape == (7, 7)


@pytest.mark.parametrize("is_skipped", [True, False])
def test_a_batch_without_a_penalty_does_not_log_that_of_the_batch_before(tmp_path: Path, is_skipped: bool) -> None:
    """Layerdrop skips all layers, or lambda is 0."""
    config = {**SHAPE, **SPECIAL_IDS, "ffn_dim": 16, "word_embed_proj_dim": 12}
    model: Any = hf.OPTForSequenceClassification(hf.OPTConfig(**config)).train()

    class Skipping(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if is_skipped:
                self.model.model.decoder.layerdrop = 1.0 - batch_idx % 2
            else:
                callback.penalty.weight = float(batch_idx % 2)
            return super().training_step(batch, batch_idx)

    callback, logger = make_callback(zeta=0.0), CSVLogger(tmp_path)
    rows = make_loader(make_examples("classification", 6))
    make_trainer(callback, max_epochs=1, logger=logger).fit(Skipping(model, callback), rows)
    with Path(logger.log_dir, "metrics.csv").open() as file:
        logged = list(csv.DictReader(file))
    for name in ("penalty", "isoscore", "points"):
        assert [row[f"train/{name}"] in ("", "nan") for row in logged] == [True, False, True], name
    assert all(float(row["train/task_loss"]) > 0 for row in logged)


def test_mistakes_are_refused_in_one_line():
    rows = make_loader(make_examples("classification", 2))

    class Forgetful(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss

    callback = make_callback()
    with pytest.raises(istar.UserError, match="training_step did not call loss"):
        make_trainer(callback, max_steps=1).fit(Forgetful(make_classifier("bert"), callback), rows)
    # The hooks are removed from the model also after an error.
    with pytest.raises(istar.UserError, match="attached to no model"):
        callback.loss()
    callback = make_callback(model="encoder")
    with pytest.raises(istar.UserError, match=r"Classifier\.encoder was not found"):
        make_trainer(callback, max_steps=1).fit(Classifier(make_classifier("bert"), callback), rows)
    callback = make_callback()
    with pytest.raises(istar.UserError, match="several train dataloaders"):
        make_trainer(callback, max_steps=1).fit(Classifier(make_classifier("bert"), callback), {"a": rows, "b": rows})
