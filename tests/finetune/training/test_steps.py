"""Training with Lightning has the same losses as training loops written by hand."""

import lightning as L
import pytest
import torch
from transformers import get_scheduler

from istar.errors import UserError
from istar.finetune.tasks.features import FeatureRows
from istar.finetune.training.module import count_warmup_steps, scale_learning_rate
from istar.finetune.training.optimizers import make_parameter_groups
from istar.finetune.training.refresh import ShrinkageCovariance
from istar.regularizers import CosReg, IStar
from tests.oracles import algorithm_1

STEPS = 8


def train_by_hand(setting, batches, accumulate=1, compute_loss=None, lr=1e-3, clip=1.0):
    """Train with AdamW, with weight decay on matrices only, and return the loss of each micro-batch."""
    model = setting.module().model
    decayed = [p for n, p in model.named_parameters() if "LayerNorm" not in n and not n.endswith("bias")]
    undecayed = [p for n, p in model.named_parameters() if "LayerNorm" in n or n.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": undecayed, "weight_decay": 0.0}], lr=lr
    )
    losses = []
    for batch_number, batch in enumerate(batches, 1):
        inputs = {name: value for name, value in batch.items() if name != "feature_id"}
        outputs = model(**inputs, output_hidden_states=True)
        loss = outputs.loss if compute_loss is None else compute_loss(outputs, inputs)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if batch_number % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def read_first_batches(setting, count=STEPS):
    return [batch for batch, _ in zip(setting.data().train_dataloader(), range(count), strict=False)]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_steps_without_a_penalty_equal_a_plain_loop(setting, harness, accumulate):
    module, recorder = setting.module(), harness.Losses()
    L.seed_everything(5, verbose=False)
    harness.trainer(recorder, limit_train_batches=STEPS, accumulate_grad_batches=accumulate, gradient_clip_val=1.0).fit(
        module, datamodule=setting.data()
    )

    batches = read_first_batches(setting)
    L.seed_everything(5, verbose=False)
    losses = train_by_hand(setting, batches, accumulate)

    assert len(recorder.values) == STEPS
    torch.testing.assert_close(recorder.values, losses, rtol=0, atol=1e-5)


def test_steps_of_the_paper_code_preset_equal_algorithm_1_by_hand(setting, harness):
    """The reference includes padding, stacks all states, and differentiates through the SVD with autograd."""
    weight, zeta = -1.0, 0.4
    regularizer = IStar(weight, zeta, include_padding=True, sync=False)
    module, recorder = setting.module(regularizer), harness.Losses()
    callback = ShrinkageCovariance(module.penalty, FeatureRows(setting.train), setting.collate, 16, seed=3)
    sample = callback.sample_examples(epoch=0)
    L.seed_everything(5, verbose=False)
    harness.trainer(recorder, callback, limit_train_batches=STEPS, gradient_clip_val=1.0).fit(
        module, datamodule=setting.data()
    )

    shrinkage_covariance = compute_stacked_covariance(setting, sample)
    torch.testing.assert_close(regularizer.shrinkage_covariance.double(), shrinkage_covariance, rtol=1e-5, atol=1e-7)

    def compute_loss(outputs, inputs):
        points = torch.stack(outputs.hidden_states[1:]).flatten(0, 2)
        return outputs.loss + weight * (1 - algorithm_1(points, shrinkage_covariance.float(), zeta))

    batches = read_first_batches(setting)
    L.seed_everything(5, verbose=False)
    losses = train_by_hand(setting, batches, compute_loss=compute_loss)
    torch.testing.assert_close(recorder.values, losses, rtol=0, atol=1e-5)


@torch.no_grad()
def compute_stacked_covariance(setting, sample):
    """Return torch.cov of all hidden states at once, with padding and without dropout."""
    model = setting.module().model.eval()
    points = []
    for start in range(0, len(sample), 16):
        batch = setting.collate([setting.train[row] for row in sample[start : start + 16]])
        inputs = {name: value for name, value in batch.items() if name not in ("feature_id", "labels")}
        states = model(**inputs, output_hidden_states=True).hidden_states
        points.append(torch.stack(states[1:]).flatten(0, 2))
    return torch.cov(torch.cat(points).double().T)


def test_lambda_0_is_bit_equal_to_no_regularizer(setting, harness):
    weights = []
    for penalty in (None, IStar(0.0, 0.4), CosReg(0.0)):
        module = setting.module(penalty)
        L.seed_everything(5, verbose=False)
        harness.trainer(limit_train_batches=3).fit(module, datamodule=setting.data())
        weights.append(module.model.state_dict())
    for name, value in weights[0].items():
        assert all(torch.equal(value, others[name]) for others in weights[1:]), name


def test_lambda_0_never_asks_for_the_penalty(setting, harness, monkeypatch):
    """0 x NaN is NaN: skipping is not the same as multiplying."""
    regularizer = IStar(0.0, 0.4)
    monkeypatch.setattr(regularizer, "summarize", lambda *_: pytest.fail("asked"))
    harness.trainer(limit_train_batches=1).fit(setting.module(regularizer), datamodule=setting.data())


@pytest.mark.parametrize("weight", [-10.0, 10.0])
def test_negative_lambda_lowers_and_positive_lambda_raises_the_score_of_the_batch(setting, harness, weight):
    scores = []

    class ScoreRecorder(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            scores.append(pl_module.step_metrics["train/isoscore"])

    regularizer = IStar(weight, 0.0)
    harness.trainer(ScoreRecorder(), log_every_n_steps=1, limit_train_batches=12).fit(
        setting.module(regularizer), datamodule=setting.data()
    )
    assert (scores[-1] - scores[0]) * weight / 10 > 0.02


def test_dropout_is_on_in_training_steps(setting, harness):
    training_modes = []

    class ModeRecorder(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            training_modes.append(all(module.training for module in pl_module.modules()))

    module = setting.module(IStar(-1.0, 0.4))
    callback = ShrinkageCovariance(module.penalty, FeatureRows(setting.train), setting.collate, 16, seed=0)
    harness.trainer(ModeRecorder(), callback, limit_train_batches=3).fit(module, datamodule=setting.data())
    assert training_modes == [True] * 3


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0.5, [0.0, 0.5, 1.0, 1.0]),
        ("linear", 0.0, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 0.5, [0.0, 0.5, 1.0, 0.5]),
        # A number of steps rather than a fraction.
        ("linear", 3.0, [0.0, 1 / 3, 2 / 3, 1.0]),
    ],
)
def test_schedules(setting, harness, schedule, warmup, expected):
    rates = []

    class RateRecorder(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            rates.append(pl_module.step_metrics["train/lr"])

    module = setting.module(lr=1.0, schedule=schedule, warmup=warmup)
    harness.trainer(RateRecorder(), limit_train_batches=4, log_every_n_steps=1).fit(module, datamodule=setting.data())
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_are_those_of_transformers(schedule):
    name = "constant_with_warmup" if schedule == "constant" else schedule
    for num_warmup_steps, num_steps in [(0, 1), (0, 7), (3, 7), (7, 7)]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        [expected] = get_scheduler(name, optimizer, num_warmup_steps, num_steps).lr_lambdas
        for step in range(num_steps + 2):
            assert scale_learning_rate(schedule, num_warmup_steps, num_steps, step) == expected(step)


def test_a_warmup_longer_than_the_training_is_refused():
    assert (count_warmup_steps(1.0, 8), count_warmup_steps(0.25, 8), count_warmup_steps(8.0, 8)) == (8, 2, 8)
    with pytest.raises(UserError, match=r"optim\.warmup=9: the training has only 8 optimizer steps"):
        count_warmup_steps(9.0, 8)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped_by_the_algorithm_that_was_chosen(setting, harness, algorithm):
    largest_entries, norms = [], []

    class GradientRecorder(L.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if gradients:
                largest_entries.append(max(gradient.abs().max().item() for gradient in gradients))
                norms.append(torch.nn.utils.get_total_norm(gradients).item())

    harness.trainer(
        GradientRecorder(), limit_train_batches=3, gradient_clip_val=1e-3, gradient_clip_algorithm=algorithm
    ).fit(setting.module(), datamodule=setting.data())
    if algorithm == "value":
        assert largest_entries == pytest.approx([1e-3] * len(largest_entries))
        assert min(norms) > 1e-3
    else:
        assert norms == pytest.approx([1e-3] * len(norms), rel=1e-3)
    assert len(norms) >= 2


def test_logged_figures_are_means_over_the_micro_batches_of_a_step(setting, harness):
    recorder, logged = harness.Losses(), []

    class MetricRecorder(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if (batch_idx + 1) % 4 == 0:
                logged.append(pl_module.step_metrics)

    harness.trainer(
        recorder, MetricRecorder(), limit_train_batches=8, accumulate_grad_batches=4, log_every_n_steps=1
    ).fit(setting.module(IStar(-1.0, 0.0)), datamodule=setting.data())
    means = [sum(recorder.values[start : start + 4]) / 4 for start in (0, 4)]
    assert [metrics["train/loss"] for metrics in logged] == pytest.approx(means, rel=1e-5)
    for metrics in logged:
        assert metrics["train/loss"] == pytest.approx(metrics["train/task_loss"] + metrics["train/penalty"], rel=1e-5)
        assert metrics["train/penalty"] == pytest.approx(-(1 - metrics["train/isoscore"]), rel=1e-5)
    tokens = [int(batch["attention_mask"].sum()) for batch in read_first_batches(setting, 8)]
    points = [2 * sum(tokens[start : start + 4]) / 4 for start in (0, 4)]
    assert [metrics["train/points"] for metrics in logged] == pytest.approx(points)


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_micro_batch_whose_layers_are_all_skipped_is_not_in_the_mean_of_the_penalty(setting, harness, skipped):
    module, steps = setting.module(IStar(-1.0, 0.0)), []
    terms = module.penalty.terms

    def leave_out(task_loss):
        steps.append(terms(task_loss))
        return {"task_loss": task_loss.detach()} if len(steps) - 1 == skipped else steps[-1]

    module.penalty.terms = leave_out
    harness.trainer(limit_train_batches=3, accumulate_grad_batches=3, log_every_n_steps=1).fit(
        module, datamodule=setting.data()
    )
    for name in ("task_loss", "penalty", "isoscore"):
        values = [float(step[name]) for number, step in enumerate(steps) if name == "task_loss" or number != skipped]
        assert module.step_metrics[f"train/{name}"] == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_the_validation_loss_is_the_mean_over_all_examples(setting, harness):
    """The batches have 16, 16 and 8 examples, so that a mean over batches would differ."""
    module = setting.module()
    [logged] = harness.trainer(limit_val_batches=1.0).validate(module, datamodule=setting.data(), verbose=False)
    module.model.eval()
    losses = []
    for row in setting.validation:
        batch = setting.collate([row])
        del batch["feature_id"]
        with torch.no_grad():
            losses.append(module.model(**batch).loss.item())
    assert logged["val/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_biases_and_layer_norms_are_not_decayed(setting):
    names = {id(parameter): name for name, parameter in setting.model.named_parameters()}
    decayed, undecayed = make_parameter_groups(list(setting.model.parameters()), 0.01)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.01, 0.0)
    undecayed_names = {names[id(parameter)] for parameter in undecayed["params"]}
    assert undecayed_names == {name for name in names.values() if "LayerNorm" in name or name.endswith("bias")}
    assert len(decayed["params"]) + len(undecayed["params"]) == len(names)


@pytest.mark.parametrize("max_steps", [3, 8])
def test_a_training_that_ends_before_max_steps_says_so(setting, harness, caplog, max_steps):
    """An epoch has 5 steps; in other libraries, the number of steps replaces the number of epochs."""
    module = setting.module()
    module.max_steps = max_steps
    with caplog.at_level("WARNING", logger="istar"):
        harness.trainer(max_epochs=1).fit(module, datamodule=setting.data(batch_size=40))
    lines = [record.message for record in caplog.records if "the training ends after" in record.message]
    assert bool(lines) == (max_steps == 8)
    for line in lines:
        assert line.startswith("the training ends after 5 of trainer.max_steps=8 steps, because trainer.max_epochs=1 ")
