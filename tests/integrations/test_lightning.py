"""The Lightning callback: gradients against the formula, over micro-batches and processes; what it leaves alone."""

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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

import istar
from istar.integrations.lightning import PenaltyCallback
from tests.integrations.naive import (
    CLOSE,
    WEIGHT,
    ZETA,
    classifier,
    collate,
    gradients,
    make_examples,
    penalty_of,
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
    """Keeps the gradients of its first optimizer step and what its training draws at random."""

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
            self.gradients = {name: each.grad.clone() for name, each in named if each.grad is not None}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def penalty_callback(sync: bool = True, zeta: float = ZETA, **settings: Any) -> PenaltyCallback:
    return PenaltyCallback(istar.IStar(WEIGHT, zeta, sync=sync), **settings)


def trainer(callback: PenaltyCallback, *others: L.Callback, **settings: Any) -> L.Trainer:
    chosen = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return L.Trainer(callbacks=[callback, *others], **(chosen | settings))


def loader(rows: list[dict[str, Tensor]], **settings: Any) -> DataLoader:
    return DataLoader(rows, BATCH_SIZE, collate_fn=collate, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "accumulation", "is_checkpointed"),
    [
        ("bert", 1, True), ("bert", 8, False), ("albert", 2, False), ("distilbert", 4, True), ("distilbert", 1, False),
        ("gpt2", 2, True), ("gpt2", 8, False), ("llama", 4, True), ("llama", 1, False),
    ],
)  # fmt: skip
def test_the_gradient_is_that_of_the_mean_over_micro_batches(name, accumulation, is_checkpointed):
    rows = make_examples("classification", BATCH_SIZE * accumulation)
    model, expected_model = classifier(name), classifier(name)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    callback = penalty_callback()
    module = Classifier(model, callback)
    trainer(callback, max_steps=1, accumulate_grad_batches=accumulation, precision="64-true").fit(module, loader(rows))

    covariance = callback.penalty.shrinkage_covariance
    _, all_points = task_loss_and_points(expected_model, collate(rows))
    assert_close(covariance.double(), torch.cov(all_points.T), rtol=1e-5, atol=1e-7)
    losses = []
    for first in range(0, len(rows), BATCH_SIZE):
        task_loss, points = task_loss_and_points(expected_model, collate(rows[first : first + BATCH_SIZE]))
        losses.append(task_loss + penalty_of(points, covariance))
    expected = gradients(expected_model, torch.stack(losses).mean())
    assert_close(module.gradients, expected, **CLOSE)


def run_in_process(rank: int, world: int, port: int, folder: Path, sync: bool, accumulation: int) -> None:
    """One of the processes that Lightning finds started."""
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rows = make_examples("classification", BATCH_SIZE * accumulation * world)
    settings = {"devices": world, "strategy": DDPStrategy(process_group_backend="gloo"), "precision": "64-true"}
    settings |= {"accumulate_grad_batches": accumulation}
    callback = penalty_callback(sync)
    module = Classifier(classifier("bert"), callback)
    first = trainer(callback, max_steps=1, **settings)
    first.fit(module, loader(rows))
    first.save_checkpoint(folder / "saved.ckpt")
    outcome = {"gradients": module.gradients, "covariance": callback.penalty.shrinkage_covariance}
    outcome["batches"] = module.batches
    resumed = penalty_callback(sync, refresh=None)
    again = trainer(resumed, max_steps=1, **(settings | {"strategy": DDPStrategy(process_group_backend="gloo")}))
    again.fit(Classifier(classifier("bert"), resumed), loader(rows), ckpt_path=folder / "saved.ckpt")
    outcome["restored"] = resumed.penalty.shrinkage_covariance
    torch.save(outcome, folder / f"{rank}.pt")


def outcomes_of_processes(world: int, folder: Path, sync: bool, accumulation: int) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(run_in_process, (world, port, folder, sync, accumulation), world, start_method="fork")
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize(("world", "sync", "accumulation"), [(2, True, 2), (2, False, 2), (4, True, 1)])
def test_over_processes_the_gradient_is_that_of_one_cloud_or_of_the_mean_of_their_clouds(
    tmp_path, world, sync, accumulation
):
    outcomes = outcomes_of_processes(world, tmp_path, sync, accumulation)

    model = classifier("bert")
    losses = []
    for step in range(accumulation):
        # Lightning deals the rows out, in an order of its own.
        parts = [task_loss_and_points(model, outcome["batches"][step]) for outcome in outcomes]
        clouds = [torch.cat([points for _, points in parts])] * world if sync else [points for _, points in parts]
        for (task_loss, _), cloud, outcome in zip(parts, clouds, outcomes, strict=True):
            losses.append(task_loss + penalty_of(cloud, outcome["covariance"]))
    expected = gradients(model, torch.stack(losses).mean())
    for outcome in outcomes:
        assert_close(outcome["gradients"], expected, **CLOSE)
        # Each process gets from the checkpoint the matrix that it had.
        assert_close(outcome["restored"], outcome["covariance"], rtol=0, atol=0)
    assert torch.equal(outcomes[0]["covariance"], outcomes[1]["covariance"]) == sync


def test_a_checkpoint_of_several_processes_is_refused_by_another_number_of_them():
    state = {"shrinkage_covariance": torch.eye(3)}
    with pytest.raises(istar.UserError, match="each of 2 processes; expected 1"):
        penalty_callback(sync=False).load_state_dict({"penalties": [state, state]})


def test_a_resumed_training_ends_as_one_that_was_not_interrupted(tmp_path):
    # Two steps an epoch and a refresh every three: at the second epoch's beginning Sigma_S has to be the saved one.
    rows = make_examples("classification", 2 * BATCH_SIZE)

    def fit(epochs: int, ckpt_path: Path | None = None) -> nn.Module:
        callback = penalty_callback(refresh=3, momentum=0.5, weight_schedule=lambda step: -0.1 * step)
        checkpoint = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        module = Classifier(classifier("gpt2"), callback)
        trainer(callback, checkpoint, max_epochs=epochs, enable_checkpointing=True).fit(
            module, loader(rows), ckpt_path=ckpt_path
        )
        return module.model

    uninterrupted = fit(3)
    resumed = fit(3, tmp_path / "epoch=0.ckpt")
    assert_close(resumed.state_dict(), uninterrupted.state_dict(), rtol=0, atol=0)
    assert not torch.equal(resumed.score.weight, classifier("gpt2").score.weight)


def test_sampled_rows_of_an_embedding_matrix_resume_exactly(tmp_path):
    rows = make_examples("classification", 2 * BATCH_SIZE)

    def fit(epochs: int, ckpt_path: Path | None = None) -> nn.Module:
        callback = PenaltyCallback(istar.CosReg(WEIGHT), target="input_embeddings", rows=9, seed=4)
        module = Classifier(classifier("gpt2"), callback)
        own = trainer(callback, max_epochs=epochs)
        own.fit(module, loader(rows), ckpt_path=ckpt_path)
        own.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        assert own.callback_metrics["train/points"] == 9
        return module.model

    fit(1)
    assert_close(fit(3, tmp_path / "1.ckpt").state_dict(), fit(3).state_dict(), rtol=0, atol=0)


def test_points_left_out_and_lambda_are_logged():
    callback = PenaltyCallback(
        istar.CosReg(WEIGHT, "all"), points=istar.Points(max_norm_ratio=1.000001),
        weight_schedule=lambda step: istar.weight_at(step, 4, WEIGHT, "warmup", warmup=0.5),
    )  # fmt: skip
    fitting = trainer(callback, max_epochs=1)
    fitting.fit(Classifier(classifier("bert"), callback), loader(make_examples("classification", 2 * BATCH_SIZE)))
    metrics = fitting.callback_metrics
    assert metrics["train/lambda"] == pytest.approx(WEIGHT / 2)
    assert metrics["train/points_left_out"] > 0


class Masked:
    """A collate function that draws random numbers."""

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        random.random(), np.random.rand(), torch.rand(1)
        return collate(rows)


@pytest.mark.parametrize("refresh", ["epoch", 2])
@pytest.mark.parametrize("kind", ["global generator", "own generator", "persistent workers"])
def test_batches_and_random_numbers_are_the_same_with_and_without_refresh(kind, refresh):
    def draws(zeta: float) -> list[Any]:
        L.seed_everything(3, verbose=False)
        settings: dict[str, Any] = {
            "global generator": {},
            "own generator": {"generator": torch.Generator().manual_seed(5)},
            "persistent workers": {"num_workers": 1, "persistent_workers": True},
        }[kind]
        batches = DataLoader(make_examples("classification", 8), 2, shuffle=True, collate_fn=Masked(), **settings)  # type: ignore[arg-type]
        callback = penalty_callback(zeta=zeta, refresh=refresh, num_points=30)
        module = Classifier(classifier("bert"), callback)
        trainer(callback, max_epochs=2).fit(module, batches)
        assert (callback.penalty.shrinkage_covariance is None) == (zeta == 0)
        return module.draws

    with_refresh = draws(ZETA)
    assert len(with_refresh) == 8
    assert with_refresh == draws(0)


def test_sigma_s_is_refreshed_before_each_epoch_or_every_so_many_steps():
    class Changes(L.Callback):
        """The optimizer steps before which there is a new Sigma_S."""

        def __init__(self, penalty: istar.IStar) -> None:
            self.penalty = penalty
            self.latest: Tensor | None = None
            self.steps: list[int] = []

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if self.penalty.shrinkage_covariance is not self.latest:
                self.latest = self.penalty.shrinkage_covariance
                self.steps.append(trainer.global_step)

    def steps(refresh: Any, weight: float = WEIGHT) -> list[int]:
        callback = PenaltyCallback(istar.IStar(weight, ZETA), refresh=refresh)
        changes = Changes(callback.penalty)
        module = Classifier(classifier("bert"), callback)
        trainer(callback, changes, max_epochs=2, accumulate_grad_batches=2).fit(
            module, loader(make_examples("classification", 12))
        )
        return changes.steps

    assert steps("epoch") == [0, 3]
    assert steps(2) == [0, 2, 4]
    # With lambda 0 the matrix has no use.
    assert steps("epoch", weight=0.0) == []


def test_the_refresh_runs_in_the_precision_of_the_trainer():
    dtypes = []

    class Watched(Classifier):
        def on_fit_start(self) -> None:
            linear = self.model.bert.encoder.layer[0].intermediate.dense
            linear.register_forward_hook(
                lambda module, args, output: dtypes.append((torch.is_grad_enabled(), output.dtype))
            )

    callback = penalty_callback()
    trainer(callback, max_steps=1, precision="bf16-mixed").fit(
        Watched(classifier("bert").float(), callback), loader(make_examples("classification", BATCH_SIZE))
    )
    assert dtypes == [(False, torch.bfloat16), (True, torch.bfloat16)]


def test_the_weighted_penalty_its_score_and_the_points_are_logged_and_validation_adds_nothing():
    class Validated(Classifier):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.model(**batch).loss + self.penalty.loss())

    rows = make_examples("classification", BATCH_SIZE)
    callback = penalty_callback()
    fitted = trainer(callback, max_epochs=1, precision="64-true")
    fitted.fit(Validated(classifier("bert"), callback, rate=0.0), loader(rows), loader(rows))
    logged = fitted.callback_metrics
    task_loss, points = task_loss_and_points(classifier("bert"), collate(rows))
    expected = penalty_of(points, callback.penalty.shrinkage_covariance)
    assert_close(logged["train/penalty"].double(), expected, rtol=1e-6, atol=0)
    assert_close(logged["train/isoscore_star"].double(), 1 - expected / WEIGHT, rtol=1e-6, atol=0)
    assert logged["train/points"] == len(points)
    assert_close(logged["val_loss"].double(), task_loss, rtol=1e-6, atol=0)


def test_with_lambda_0_the_training_is_bit_for_bit_the_same_as_without_a_penalty():
    class Plain(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss

    def parameters(kind: type[Classifier]) -> dict[str, Tensor]:
        callback = PenaltyCallback(istar.IStar(0.0, ZETA))
        module = kind(classifier("bert"), callback)
        trainer(callback, max_epochs=2).fit(module, loader(make_examples("classification", 8)))
        return module.model.state_dict()

    assert_close(parameters(Classifier), parameters(Plain), rtol=0, atol=0)


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

    callback = penalty_callback(model="layers", modules=lambda module: [module.layers[1], module.layers[3]])
    trainer(callback, max_steps=1).fit(Tower(callback), DataLoader(torch.randn(12, 5), 12))  # type: ignore[arg-type]
    assert callback.penalty.last.points == 24
    assert callback.penalty.shrinkage_covariance.shape == (7, 7)


def test_mistakes_are_refused_in_one_line():
    rows = loader(make_examples("classification", 2))

    class Forgetful(Classifier):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss

    callback = penalty_callback()
    with pytest.raises(istar.UserError, match="training_step did not call loss"):
        trainer(callback, max_steps=1).fit(Forgetful(classifier("bert"), callback), rows)
    # What was attached is off the model, also after an error.
    with pytest.raises(istar.UserError, match="attached to no model"):
        callback.loss()
    callback = penalty_callback(model="encoder")
    with pytest.raises(istar.UserError, match="Classifier has no module 'encoder'"):
        trainer(callback, max_steps=1).fit(Classifier(classifier("bert"), callback), rows)
    callback = penalty_callback()
    with pytest.raises(istar.UserError, match="several train dataloaders"):
        trainer(callback, max_steps=1).fit(Classifier(classifier("bert"), callback), {"a": rows, "b": rows})
    for refresh in ("step", 0, 1.5):
        with pytest.raises(istar.UserError, match="expected 'epoch', a number of optimizer steps, or None"):
            penalty_callback(refresh=refresh)
