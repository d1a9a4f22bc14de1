"""Whatever precision the model computes in, the penalty and Sigma_S are those of its hidden states in full."""

import lightning as L
import pytest
import torch
from torch.testing import assert_close

from istar.regularizers import CosReg, IStar
from istar.training import LayerIsotropy, ShrinkageCovariance
from tests.oracles import algorithm_1

PRECISIONS = [
    ("cpu", "32-true"),
    ("cpu", "bf16-mixed"),
    pytest.param("cuda", "bf16-mixed", marks=pytest.mark.gpu),
    pytest.param("cuda", "16-mixed", marks=pytest.mark.gpu),
]
STEPS = 6


class Watched:
    """A regularizer that keeps what it was given and what it said."""

    def __init__(self, regularizer):
        self.seen = []
        original = regularizer.begin

        def begin(index):
            return WatchedPass(original(index), index, self.seen)

        regularizer.begin = begin


class WatchedPass:
    def __init__(self, original, index, seen):
        self.original, self.index, self.seen, self.states = original, index, seen, []

    def add(self, state):
        self.states.append(state.detach())
        return self.original.add(state)

    def penalty(self):
        said = self.original.penalty()
        self.seen.append((self.states, self.index, said))
        return said


def trained(setting, harness, regularizer, device, precision, *callbacks):
    module = setting.module(regularizer)
    losses = harness.Losses()
    L.seed_everything(5, verbose=False)
    trainer = harness.trainer(
        *callbacks, losses, accelerator=device, precision=precision, limit_train_batches=STEPS, gradient_clip_val=1.0
    )
    trainer.fit(module, datamodule=setting.data())
    return module, losses.values


def real_tokens(states, index):
    points = [state.flatten(0, 1) for state in states]
    return torch.cat([rows if index is None else rows[index] for rows in points]).double().cpu()


@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
def test_istar_is_the_score_of_the_states_in_full(setting, harness, device, precision):
    regularizer = IStar(-1.0, 0.4)
    watched = Watched(regularizer)
    refresh = ShrinkageCovariance(regularizer, setting.train, setting.collate, 2_000, 16, seed=3, progress_bar=False)
    trained(setting, harness, regularizer, device, precision, refresh)
    shrinkage = regularizer.shrinkage_covariance
    assert shrinkage.dtype == torch.float32
    assert len(watched.seen) == STEPS
    for states, index, said in watched.seen:
        assert said.value.dtype == said.measure.dtype == torch.float32
        expected = algorithm_1(real_tokens(states, index), shrinkage.double().cpu(), 0.4)
        assert_close(said.measure.double().cpu(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
def test_cosreg_is_the_average_cosine_of_the_states_in_full(setting, harness, device, precision):
    regularizer = CosReg(1.0)
    watched = Watched(regularizer)
    trained(setting, harness, regularizer, device, precision)
    for states, index, said in watched.seen:
        points = torch.nn.functional.normalize(real_tokens(states, index), dim=1)
        cosines = points @ points.T
        expected = (cosines.sum() - cosines.trace()) / len(points) ** 2
        assert_close(said.measure.double().cpu(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
@pytest.mark.parametrize("regularizer", [None, IStar(-1.0, 0.0), CosReg(1.0)], ids=["none", "istar", "cosreg"])
def test_training_differs_by_the_models_own_rounding(setting, harness, regularizer, device, precision):
    """Without dropout, which each device draws for itself."""
    for module in setting.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p, module.was = 0.0, module.p
    try:
        _, expected = trained(setting, harness, regularizer, "cpu", "32-true")
        module, losses = trained(setting, harness, regularizer, device, precision)
    finally:
        for dropout in setting.model.modules():
            if isinstance(dropout, torch.nn.Dropout):
                dropout.p = dropout.was
    assert all(parameter.dtype == torch.float32 for parameter in module.model.parameters())
    tolerance = {"32-true": 1e-5, "bf16-mixed": 2e-2, "16-mixed": 2e-3}[precision]
    assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
@pytest.mark.parametrize("regularizer", [IStar(-1.0, 0.4), CosReg(1.0)], ids=["istar", "cosreg"])
def test_states_of_large_mean_and_scale(setting, harness, regularizer, device, precision):
    """A last layer with means 30 times the deviation, and one whose deviation is 1e4 (in half precision: 1e3)."""
    watched = Watched(regularizer)
    callbacks = []
    if isinstance(regularizer, IStar):
        callbacks = [
            ShrinkageCovariance(regularizer, setting.train, setting.collate, 2_000, 16, seed=3, progress_bar=False)
        ]
    module = setting.module(regularizer)
    first, last = (module.model.base_model.encoder.layer[number].output.LayerNorm for number in (0, 1))
    with torch.no_grad():
        first.bias.fill_(30.0)
        last.weight.fill_(1e3 if precision == "16-mixed" else 1e4)
        module.model.base_model.pooler.dense.weight.mul_(1e-4)
    isotropy = LayerIsotropy()
    trainer = harness.trainer(
        *callbacks, isotropy, accelerator=device, precision=precision, limit_train_batches=STEPS, limit_val_batches=1.0,
        gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, datamodule=setting.data())
    assert len(watched.seen) == STEPS
    assert all(said.value.isfinite() for _, _, said in watched.seen)
    assert all(parameter.isfinite().all() for parameter in module.model.parameters())
    assert all(0 <= score <= 1 for score in isotropy.scores.values())
