"""In every precision of the model, the penalty and Sigma_S are computed from its hidden states in float32 or wider."""

import copy
import logging

import lightning as L
import pytest
import torch
from torch.testing import assert_close

from istar.finetune.config import TrainerConfig
from istar.finetune.execute import precision as precision_module
from istar.finetune.execute.identify import resolve_config
from istar.finetune.tasks.features import FeatureRows
from istar.finetune.training.refresh import ShrinkageCovariance
from istar.finetune.training.validation_isoscore import ValidationIsoScore
from istar.regularizers import CosReg, IStar
from tests.oracles import algorithm_1, cosreg

PRECISIONS = [
    ("cpu", "32-true"),
    ("cpu", "bf16-mixed"),
    pytest.param("cuda", "bf16-mixed", marks=pytest.mark.gpu),
    pytest.param("cuda", "16-mixed", marks=pytest.mark.gpu),
]
STEPS = 3


class PenaltyRecorder:
    """Records the hidden states, the mask and the terms of each forward pass of a penalty."""

    def __init__(self, penalty):
        self.passes = []
        self._states, self._mask = [], None
        summarize, combine = penalty.summarize, penalty.combine

        def recording_summarize(states, tokens):
            self._states += [state.detach() for state in states]
            self._mask = tokens.attention_mask
            return summarize(states, tokens)

        def recording_combine(summaries):
            loss = combine(summaries)
            self.passes.append((self._states, self._mask, penalty.last))
            self._states = []
            return loss

        object.__setattr__(penalty, "summarize", recording_summarize)
        object.__setattr__(penalty, "combine", recording_combine)


def train(setting, harness, module, device, precision, *callbacks):
    losses = harness.Losses()
    L.seed_everything(5, verbose=False)
    trainer = harness.trainer(
        *callbacks, losses, accelerator=device, precision=precision, limit_train_batches=STEPS, gradient_clip_val=1.0
    )
    trainer.fit(module, datamodule=setting.data())
    return module, losses.values


def select_real_tokens(states, mask):
    return torch.cat([state[mask.bool()] for state in states]).double().cpu()


@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
@pytest.mark.parametrize("penalty", [IStar(-1.0, 0.4), CosReg(1.0)], ids=["istar", "cosreg"])
def test_the_score_is_that_of_the_states_in_full(setting, harness, penalty, device, precision):
    penalty = copy.deepcopy(penalty)
    recorder, module, callbacks = PenaltyRecorder(penalty), setting.module(penalty), []
    if penalty.needs_shrinkage_covariance:
        callbacks = [ShrinkageCovariance(module.penalty, FeatureRows(setting.train), setting.collate, 16, seed=3)]
    train(setting, harness, module, device, precision, *callbacks)
    assert len(recorder.passes) == STEPS
    for states, mask, terms in recorder.passes:
        assert terms.value.dtype == terms.score.dtype == torch.float32
        points = select_real_tokens(states, mask)
        if penalty.needs_shrinkage_covariance:
            assert penalty.shrinkage_covariance.dtype == torch.float32
            expected = algorithm_1(points, penalty.shrinkage_covariance.double().cpu(), 0.4)
        else:
            expected = cosreg(points)
        assert_close(terms.score.double().cpu(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("device", "precision"), PRECISIONS[1:])
@pytest.mark.parametrize("regularizer", [None, IStar(-1.0, 0.0), CosReg(1.0)], ids=["none", "istar", "cosreg"])
def test_training_differs_by_the_models_own_rounding(setting, harness, regularizer, device, precision):
    """Dropout is off, because each device draws its own masks."""
    for module in setting.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p, module.original_p = 0.0, module.p
    try:
        _, expected_losses = train(setting, harness, setting.module(regularizer), "cpu", "32-true")
        module, losses = train(setting, harness, setting.module(regularizer), device, precision)
    finally:
        for dropout in setting.model.modules():
            if isinstance(dropout, torch.nn.Dropout):
                dropout.p = dropout.original_p
    assert all(parameter.dtype == torch.float32 for parameter in module.model.parameters())
    tolerance = {"bf16-mixed": 2e-2, "16-mixed": 2e-3}[precision]
    assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
@pytest.mark.parametrize("regularizer", [IStar(-1.0, 0.4), CosReg(1.0)], ids=["istar", "cosreg"])
def test_states_of_large_mean_and_scale(setting, harness, regularizer, device, precision):
    """One layer has means 30 times its standard deviation; the last has a deviation of 1e4 (1e3 in half precision)."""
    penalty = copy.deepcopy(regularizer)
    recorder = PenaltyRecorder(penalty)
    module = setting.module(penalty)
    callbacks = []
    if isinstance(penalty, IStar):
        callbacks = [ShrinkageCovariance(module.penalty, FeatureRows(setting.train), setting.collate, 16, seed=3)]
    first_norm, last_norm = (module.model.base_model.encoder.layer[layer].output.LayerNorm for layer in (0, 1))
    with torch.no_grad():
        first_norm.bias.fill_(30.0)
        last_norm.weight.fill_(1e3 if precision == "16-mixed" else 1e4)
        module.model.base_model.pooler.dense.weight.mul_(1e-4)
    isotropy = ValidationIsoScore()
    trainer = harness.trainer(
        *callbacks, isotropy, accelerator=device, precision=precision, limit_train_batches=STEPS, limit_val_batches=1.0,
        gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, datamodule=setting.data())
    assert len(recorder.passes) == STEPS
    assert all(terms.value.isfinite() for _, _, terms in recorder.passes)
    assert all(parameter.isfinite().all() for parameter in module.model.parameters())
    assert all(0 <= score <= 1 for score in isotropy.scores.values())


@pytest.mark.parametrize(("instruction", "expected"), [("avx512_bf16", "bf16-mixed"), ("avx2", "32-true")])
def test_auto_chooses_what_the_processor_has_instructions_for(composed, monkeypatch, instruction, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instruction: True}, raising=False)
    config = resolve_config(composed("trainer.precision=auto", "trainer.accelerator=cpu", "reg=istar"))
    assert config.trainer.precision == expected
    # The dtype of the penalty follows, as if the precision had been named.
    assert config == composed(f"trainer.precision={expected}", "trainer.accelerator=cpu", "reg=istar")


@pytest.mark.parametrize(("has_bfloat16", "expected"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_auto_on_a_gpu(monkeypatch, has_bfloat16, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert precision_module.choose_precision(TrainerConfig(precision="auto")).precision == expected


@pytest.mark.parametrize(("capabilities", "num_warnings"), [({"avx2": True}, 1), ({"amx_bf16": True}, 0)])
def test_emulated_bfloat16_is_warned_of_once(monkeypatch, caplog, capabilities, num_warnings):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    precision_module._warn_about_emulation.cache_clear()
    with caplog.at_level(logging.WARNING, logger="istar"):
        for _ in range(2):
            settings = TrainerConfig(precision="bf16-mixed", accelerator="cpu")
            assert precision_module.choose_precision(settings) == settings
    assert ["trainer.precision=auto" in message for message in caplog.messages] == [True] * num_warnings
