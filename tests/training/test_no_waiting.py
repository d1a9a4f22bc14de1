"""Between two logged steps nothing asks a device for a figure: the host runs ahead and prepares what comes next."""

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from istar.errors import NonFiniteError, UserError
from istar.regularizers import CosReg, IStar
from istar.training import lagging
from istar.training import module as module_of_tuner
from istar.training.lagging import LAG
from istar.training.trainer import build_trainer

ANSWERS = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose", "aten::nonzero",
    "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::bincount",
}  # fmt: skip
"""What a host can go on with only when the device has come so far."""


class Asked(TorchDispatchMode):
    """Which of these were called, whoever did."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in ANSWERS or _is_index_by_mask(function, args):
            self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def _is_index_by_mask(function, args):
    if not function._schema.name.startswith("aten::index"):
        return False
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


class Watch(L.Callback):
    """From the start of one batch to the end of a later one."""

    def __init__(self, first, last):
        self.first, self.last, self.asked = first, last, Asked()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.first:
            self.asked.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.last:
            self.asked.__exit__(None, None, None)


def lagging_as_on_a_device(monkeypatch):
    """What a step left is looked at `LAG` steps later, as it is where the device works for itself."""
    monkeypatch.setattr(lagging.Lagging, "_lag", lambda self: LAG)


@pytest.fixture
def attention_without_a_question(setting, monkeypatch):
    """transformers asks whether there is any padding, to save the mask; here every text has some."""
    monkeypatch.setattr("transformers.masking_utils._ignore_bidirectional_mask_sdpa", lambda *_, **__: False)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_step_waits(setting, harness, monkeypatch, attention_without_a_question, accumulate, precision):
    lagging_as_on_a_device(monkeypatch)
    watch = Watch(2, 15)
    trainer = harness.trainer(
        watch, limit_train_batches=20, accumulate_grad_batches=accumulate, gradient_clip_val=1.0, precision=precision,
        log_every_n_steps=20 // accumulate,
    )  # fmt: skip
    trainer.fit(setting.module(), datamodule=setting.data())
    assert watch.asked.names == []


@pytest.mark.parametrize("regularizer", [IStar(-1.0, 0.0), CosReg(1.0)], ids=["istar", "cosreg"])
def test_no_step_with_a_penalty_waits(setting, harness, monkeypatch, attention_without_a_question, regularizer):
    lagging_as_on_a_device(monkeypatch)
    # The tokens are counted on the host, where the mask is.
    monkeypatch.setattr(module_of_tuner, "token_index", unwatched(module_of_tuner.token_index))
    watch = Watch(2, 15)
    trainer = harness.trainer(watch, limit_train_batches=18, gradient_clip_val=1.0, log_every_n_steps=18)
    trainer.fit(setting.module(regularizer), datamodule=setting.data())
    assert watch.asked.names == []


def unwatched(function):
    def call(*arguments):
        with torch.utils._python_dispatch._disable_current_modes():
            return function(*arguments)

    return call


def test_the_watch_sees_a_question(setting, harness):
    class Asks(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            bool(next(pl_module.parameters()).grad.isfinite().all())

    watch = Watch(1, 2)
    harness.trainer(watch, Asks(), limit_train_batches=4).fit(setting.module(), datamodule=setting.data())
    assert "aten::_local_scalar_dense" in {*watch.asked.names} or "aten::is_nonzero" in {*watch.asked.names}


class Poison(L.Callback):
    """NaN in one parameter's gradient of one step, or of all steps from one on."""

    def __init__(self, step, until=None):
        self.steps = range(step, (until or step) + 1)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step + 1 in self.steps:
            next(pl_module.parameters()).grad.fill_(torch.nan)


class Weights(L.Callback):
    """Of each step: the weights behind it, and the optimizer's count of steps."""

    def __init__(self):
        self.values, self.counts = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.values.append(torch.nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone())
        [states] = [optimizer.state for optimizer in trainer.optimizers]
        self.counts.append({int(state["step"]) for state in states.values()})


def test_a_late_host_stops_with_the_weights_of_the_step_before(setting, harness, monkeypatch):
    lagging_as_on_a_device(monkeypatch)
    weights = Weights()
    trainer = harness.trainer(Poison(5), weights, limit_train_batches=25, gradient_clip_val=1.0)
    with pytest.raises(NonFiniteError, match=r"^step 5: the norm of the gradient is nan$"):
        trainer.fit(setting.module(), datamodule=setting.data())
    # The steps behind it had finite gradients, and were made all the same.
    assert len(weights.values) == 5 + LAG - 1
    assert all(torch.equal(after, weights.values[3]) for after in weights.values[3:])
    assert weights.counts[-1] == {4}
    assert not torch.equal(weights.values[2], weights.values[3])


def test_a_training_behind_one_that_stopped_starts_afresh(setting, harness, monkeypatch):
    lagging_as_on_a_device(monkeypatch)
    module, weights = setting.module(), Weights()
    with pytest.raises(NonFiniteError):
        harness.trainer(Poison(2), limit_train_batches=4, accumulate_grad_batches=2).fit(
            module, datamodule=setting.data()
        )
    harness.trainer(weights, limit_train_batches=2).fit(module, datamodule=setting.data())
    assert not torch.equal(weights.values[0], weights.values[1])


@pytest.mark.parametrize("until", ["checkpoint", "epoch"])
def test_nothing_is_kept_before_the_host_knows(setting, harness, monkeypatch, tmp_path, until):
    lagging_as_on_a_device(monkeypatch)

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if until == "checkpoint" and batch_idx == 5:
                trainer.save_checkpoint(tmp_path / "kept.ckpt")

    trainer = harness.trainer(Poison(5), Saves(), limit_train_batches=8, limit_val_batches=0)
    with pytest.raises(NonFiniteError, match=r"^step 5: "):
        trainer.fit(setting.module(), datamodule=setting.data())
    assert not list(tmp_path.iterdir())


def test_a_validation_comes_behind_what_the_host_knows(setting, harness, monkeypatch):
    lagging_as_on_a_device(monkeypatch)
    module = setting.module()
    monkeypatch.setattr(module, "validation_step", lambda *_: pytest.fail("validated"))
    trainer = harness.trainer(Poison(5), limit_train_batches=8, limit_val_batches=1)
    with pytest.raises(NonFiniteError, match=r"^step 5: "):
        trainer.fit(module, datamodule=setting.data())


def test_a_late_host_counts_all_skipped_steps(setting, harness, monkeypatch, caplog):
    lagging_as_on_a_device(monkeypatch)
    weights, module = Weights(), setting.module(skip_nonfinite=True)
    harness.trainer(Poison(3, 4), weights, limit_train_batches=6).fit(module, datamodule=setting.data())
    assert module.guard.skipped == 2
    assert torch.equal(weights.values[1], weights.values[3])
    assert not torch.equal(weights.values[3], weights.values[4])
    assert weights.counts == [{1}, {2}, {2}, {2}, {3}, {4}]
    assert "step 3 is skipped" in caplog.text
    assert "step 4 is skipped" in caplog.text


def half(device="cpu"):
    """Lightning's float16, which it offers on CUDA alone, here with a scaler for the CPU."""
    return MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=2.0**10))


def test_float16_is_clipped_by_the_unscaled_norm(setting, harness):
    """Fused optimizers unscale gradients by themselves, but behind the clipping."""
    norms = []
    for settings in ({}, {"plugins": [half()]}):

        class Norms(L.Callback):
            def on_train_batch_end(self, trainer, *_):
                norms.append(trainer.callback_metrics["train/grad_norm"].item())

        torch.manual_seed(0)
        module = setting.module()
        for dropout in module.modules():
            if isinstance(dropout, torch.nn.Dropout):
                dropout.p = 0.0
        harness.trainer(Norms(), limit_train_batches=3, gradient_clip_val=0.5, log_every_n_steps=1, **settings).fit(
            module, datamodule=setting.data()
        )
    assert norms[3:] == pytest.approx(norms[:3], rel=2e-2)


def test_overflow_of_float16_is_the_scalers_and_a_loss_that_is_not_finite_is_not(setting, harness, monkeypatch):
    lagging_as_on_a_device(monkeypatch)
    weights = Weights()
    harness.trainer(Poison(2), weights, limit_train_batches=4, plugins=[half()]).fit(
        setting.module(), datamodule=setting.data()
    )
    assert torch.equal(weights.values[0], weights.values[1])
    assert not torch.equal(weights.values[1], weights.values[2])

    weights, module = Weights(), setting.module()
    original = module.guard.see
    monkeypatch.setattr(
        module.guard, "see", lambda name, value: original(name, value * (torch.nan if module.global_step == 1 else 1))
    )
    with pytest.raises(NonFiniteError, match=r"^step 2: the task loss is nan$"):
        harness.trainer(weights, limit_train_batches=4, plugins=[half()]).fit(module, datamodule=setting.data())
    assert all(torch.equal(after, weights.values[0]) for after in weights.values)


def test_an_optimizer_that_cannot_leave_out_a_step_is_refused(setting, harness, monkeypatch):
    module = setting.module()
    monkeypatch.setattr(module, "configure_optimizers", lambda: torch.optim.AdamW(module.parameters(), fused=False))
    with pytest.raises(UserError, match="AdamW without fused=True cannot leave out"):
        harness.trainer(limit_train_batches=1).fit(module, datamodule=setting.data())


def test_a_device_without_fused_adamw_is_told():
    weight = torch.nn.Parameter(torch.zeros(1, device="meta"))
    weight.grad = torch.zeros(1, device="meta")
    with pytest.raises(RuntimeError, match="fused=True"):
        torch.optim.AdamW([weight], fused=True).step()


def test_lightning_asks_no_process_about_signals(small, tmp_path):
    """With several of them it would do so at every batch, and read the answer from the device."""
    trainer = build_trainer(small().trainer, "accuracy", tmp_path, [], None)
    assert trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor() is None
