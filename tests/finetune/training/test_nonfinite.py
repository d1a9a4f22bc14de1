"""A NaN or infinite loss or gradient stops the run before it reaches the weights, or the step is skipped."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from istar.errors import NonFiniteError, UserError
from istar.finetune.config import Config
from istar.finetune.execute.run import run
from istar.finetune.training import module as module_of_tuner
from istar.finetune.training.module import FineTuner
from istar.regularizers import CosReg, IStar
from istar.runs.record import read_result

Build = Callable[..., Config]
ACCUMULATE = 2


def break_step(module: FineTuner, step: int, cause: str) -> FineTuner:
    """Make the second micro-batch of an optimizer step (counted from 1) not finite, and return the module."""
    original = module.training_step

    def training_step(batch, batch_idx):
        hooks = []
        if batch_idx == step * ACCUMULATE - 1:
            if cause == "task loss":
                hooks.append(module.model.register_forward_hook(lambda *arguments: make_loss_nan(arguments[-1])))
            elif cause == "hidden states":
                layer = module.model.base_model.encoder.layer[0]
                hooks.append(layer.register_forward_hook(lambda _, __, output: output * torch.nan))
        try:
            loss = original(batch, batch_idx)
        finally:
            for hook in hooks:
                hook.remove()
        if cause == "gradient" and batch_idx == step * ACCUMULATE - 1:
            # The added term is finite, but its derivative is infinite.
            loss = loss + (module.model.classifier.bias.sum() * 0).sqrt()
        return loss

    def make_loss_nan(outputs):
        outputs.loss = outputs.loss * torch.nan
        return outputs

    module.training_step = training_step
    return module


def train(setting, harness, module, **settings):
    torch.manual_seed(0)
    trainer = harness.trainer(
        accumulate_grad_batches=ACCUMULATE, gradient_clip_val=1.0, limit_train_batches=8, **settings
    )
    trainer.fit(module, datamodule=setting.data())
    return trainer


@pytest.mark.parametrize(
    ("cause", "regularizer", "message"),
    [
        ("task loss", None, "step 3: the task loss is nan"),
        ("gradient", CosReg(1.0), "step 3: the norm of the gradient is (nan|inf)"),
    ],
)
def test_a_step_that_breaks_stops_before_the_weights(setting, harness, cause, regularizer, message):
    module = break_step(setting.module(regularizer), 3, cause)
    with pytest.raises(NonFiniteError, match=f"^{message}$"):
        train(setting, harness, module)
    expected_module = setting.module(regularizer)
    torch.manual_seed(0)
    harness.trainer(accumulate_grad_batches=ACCUMULATE, gradient_clip_val=1.0, limit_train_batches=4).fit(
        expected_module, datamodule=setting.data()
    )
    for name, value in module.model.state_dict().items():
        assert_close(value, expected_module.model.state_dict()[name], rtol=0, atol=0)


@pytest.mark.parametrize("regularizer", [IStar(-1.0, 0.0), CosReg(1.0, layers="all")], ids=["istar", "cosreg"])
def test_a_penalty_that_breaks_is_told_as_such(setting, harness, regularizer):
    penalty = copy.deepcopy(regularizer)
    original = penalty.combine
    module = setting.module(penalty)

    def combine(summaries):
        loss, factor = original(summaries), torch.nan if module.global_step == 1 else 1
        penalty.last = penalty.last._replace(value=penalty.last.value * factor)
        return loss * factor

    object.__setattr__(penalty, "combine", combine)
    with pytest.raises(NonFiniteError, match=r"^step 2: the penalty is nan$"):
        train(setting, harness, module)


@pytest.mark.parametrize("cause", ["task loss", "hidden states", "gradient"])
def test_a_skipped_step_leaves_no_trace(setting, harness, cause, caplog):
    """A skipped step changes no parameters, not even by weight decay, and the next step does."""
    module = setting.module(IStar(-1.0, 0.0), skip_nonfinite=True)
    batch_weights = []
    module.on_train_batch_end = lambda *_: batch_weights.append(copy.deepcopy(module.model.state_dict()))
    with caplog.at_level(logging.WARNING, logger="istar"):
        train(setting, harness, break_step(module, 3, cause))
    before_skip, after_skip, after_next_step = (batch_weights[step * ACCUMULATE - 1] for step in (2, 3, 4))
    assert all(torch.equal(before_skip[name], after_skip[name]) for name in before_skip)
    assert not all(torch.equal(after_skip[name], after_next_step[name]) for name in before_skip)
    assert all(value.isfinite().all() for value in batch_weights[-1].values())
    assert module.step_guard.num_skipped == 1
    assert "step 3 is skipped" in caplog.text


def test_the_run_says_what_broke_what_is_kept_and_what_helps(small: Build, monkeypatch: pytest.MonkeyPatch):
    original = FineTuner.training_step
    monkeypatch.setattr(
        FineTuner,
        "training_step",
        lambda self, *batch: original(self, *batch) * (torch.nan if self.global_step == 5 else 1),
    )
    config = small("trainer.max_epochs=2", "reg=none")
    with pytest.raises(NonFiniteError) as caught:
        run(config)
    message = str(caught.value)
    assert message.startswith("step 6: the norm of the gradient is nan; the last good state is ")
    assert "step-4.ckpt; lower optim.lr" in message
    [folder] = Path(config.run.root).glob("demo-*")
    assert read_result(folder).status == "failed"
    assert read_result(folder).error == message

    # The same command with `skip` resumes the run from the last good state.
    record = run(small("trainer.max_epochs=2", "reg=none", "trainer.nonfinite=skip"))
    assert record.name == folder.name
    assert record.status == "finished"
    assert record.skipped_steps == 1
    assert read_result(folder).skipped_steps == 1


def test_stop_does_not_go_on_with_a_run_that_has_skipped_steps(small: Build, monkeypatch: pytest.MonkeyPatch):
    overrides = ("trainer.max_epochs=2", "reg=none")
    original = FineTuner.training_step

    def training_step(self, *batch):
        if self.global_step == 6:
            raise RuntimeError("stopped after the first epoch")
        return original(self, *batch) * (torch.nan if self.global_step == 2 else 1)

    monkeypatch.setattr(FineTuner, "training_step", training_step)
    with pytest.raises(RuntimeError, match="after the first epoch"):
        run(small(*overrides, "trainer.nonfinite=skip"))
    with pytest.raises(UserError, match=r"has skipped 1 steps; trainer\.nonfinite=skip goes on"):
        run(small(*overrides))


@pytest.mark.parametrize(
    ("num_finite", "policy", "message"),
    [
        (0, "stop", r"^validation after step 0: task demo: .*; there is no checkpoint yet; the model is so "
                    r"before training; try trainer\.precision=32-true and model\.load_in=float32$"),
        (2, "stop", r"^validation after step 4: task demo: .*; the last good state is .*; lower optim\.lr or "
                    r"reg\.lambda, or skip such steps with trainer\.nonfinite=skip$"),
        (2, "skip", r"^validation after step 4: .*; lower optim\.lr or reg\.lambda$"),
    ],
)  # fmt: skip
def test_logits_that_are_not_finite_end_a_run_in_one_line(
    small: Build, monkeypatch: pytest.MonkeyPatch, num_finite: int, policy: str, message: str
) -> None:
    """Two batches of logits make a validation."""
    original, num_calls = module_of_tuner.logits_by_feature, 0

    def break_logits(batch, outputs):
        nonlocal num_calls
        num_calls += 1
        scale = 1 if num_calls <= num_finite else float("nan")
        return {row: logits * scale for row, logits in original(batch, outputs).items()}

    monkeypatch.setattr(module_of_tuner, "logits_by_feature", break_logits)
    overrides = (
        "reg=none",
        "data.eval_batch_size=8",
        f"trainer.nonfinite={policy}",
        "trainer.checkpoint_every_n_steps=2",
    )
    with pytest.raises(NonFiniteError, match=message) as error:
        run(small(*overrides, f"trainer.nonfinite={policy}"))
    assert "\n" not in str(error.value)
