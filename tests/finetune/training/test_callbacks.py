"""The callbacks that compute the shrinkage covariance and the isotropy per layer, and record the epochs."""

import logging
from dataclasses import replace
from typing import ClassVar

import lightning as L
import pytest
import torch

from istar.errors import UserError
from istar.finetune.config import TrainerConfig
from istar.finetune.tasks.evaluation import Evaluation
from istar.finetune.tasks.features import FeatureRows
from istar.finetune.training.history import History
from istar.finetune.training.refresh import ShrinkageCovariance
from istar.finetune.training.trainer import build_trainer
from istar.finetune.training.validation_isoscore import ValidationIsoScore
from istar.hidden_states import attach
from istar.hidden_states.attached_penalty import NUM_POINTS
from istar.measures import isoscore
from istar.regularizers import IStar, Points
from tests.finetune.execute.faults import warnings_in
from tests.finetune.training.conftest import compute_states_by_example
from tests.oracles import algorithm_1


def make_shrinkage_callback(setting, module, num_points=2_000, batch_size=16, seed=3):
    module.penalty.settings = replace(module.penalty.settings, num_points=num_points)
    return ShrinkageCovariance(module.penalty, FeatureRows(setting.train), setting.collate, batch_size, seed)


@pytest.mark.parametrize("layers", ["all", "last", [0, 2]])
def test_the_covariance_is_that_of_the_sample_without_padding(setting, harness, layers):
    module = setting.module(IStar(-1.0, 0.4, layers=layers))
    callback = make_shrinkage_callback(setting, module)
    layer_ids = {"all": [1, 2], "last": [2]}.get(str(layers), layers)
    sample = callback.sample_examples(epoch=0)
    states_by_example = compute_states_by_example(setting, module, [setting.train[row] for row in sample])
    points = torch.cat(
        [hidden_states[layer].flatten(0, 1) for hidden_states in states_by_example for layer in layer_ids]
    )
    trainer = harness.trainer(callback)
    trainer.strategy.connect(module)
    assert callback.refresh(trainer, sample) == len(points)
    covariance = module.penalty.penalty.shrinkage_covariance
    torch.testing.assert_close(covariance.double(), torch.cov(points.double().T), rtol=1e-4, atol=1e-6)


def test_the_sample_holds_the_points_asked_for_and_no_example_more(setting):
    example_lengths = torch.tensor(setting.train["length"][:])
    for num_layers, layers in ((1, "last"), (2, "all"), (3, "with_embeddings")):
        module = setting.module(IStar(-1.0, 0.4, layers=layers))
        sample = make_shrinkage_callback(setting, module, num_points=3_000).sample_examples(epoch=0)
        num_points = int(example_lengths[sample].sum()) * num_layers
        assert 3_000 <= num_points < 3_000 + int(example_lengths.max()) * num_layers
        assert len(set(sample)) == len(sample)


def test_the_sample_is_a_function_of_seed_epoch_and_step(setting):
    module, places = setting.module(IStar(-1.0, 0.4)), [(0, 0), (1, 0), (0, 4), (1, 4), (1, 5)]

    def draw(seed, epoch, step):
        return sorted(make_shrinkage_callback(setting, module, seed=seed).sample_examples(epoch, step))

    samples = [draw(seed, *place) for seed in (1, 2**32 - 1) for place in places]
    assert samples[:5] == [draw(1, *place) for place in places]
    assert all(a != b for i, a in enumerate(samples) for b in samples[i + 1 :])


def test_fewer_points_than_asked_for_are_all_used_and_said_once(setting, caplog):
    callback = make_shrinkage_callback(setting, setting.module(IStar(-1.0, 0.4)), num_points=10**9)
    with caplog.at_level(logging.WARNING):
        for epoch in range(3):
            assert len(callback.sample_examples(epoch)) == len(setting.train)
    assert len(warnings_in(caplog)) == 1
    assert "fewer than reg.num_points=1000000000" in caplog.text


def test_data_that_cannot_fill_the_default_is_no_reason_to_warn(setting, caplog):
    callback = make_shrinkage_callback(setting, setting.module(IStar(-1.0, 0.4)), num_points=NUM_POINTS)
    with caplog.at_level(logging.INFO):
        callback.sample_examples(epoch=0)
    assert warnings_in(caplog) == []
    assert "points (tokens x layers) of the training data, fewer than reg.num_points=250000" in caplog.text


def test_it_is_refreshed_before_training_and_in_every_epoch(setting, harness):
    covariances = []

    class CovarianceRecorder(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            covariances.append(pl_module.penalty.penalty.shrinkage_covariance.clone())

    module = setting.module(IStar(-1.0, 0.4))
    callback = make_shrinkage_callback(setting, module)
    harness.trainer(callback, CovarianceRecorder(), max_epochs=3, limit_train_batches=2).fit(
        module, datamodule=setting.data()
    )
    assert len(callback.seconds) == 3
    assert torch.equal(covariances[0], covariances[1])
    assert not torch.equal(covariances[1], covariances[2])
    assert not torch.equal(covariances[3], covariances[4])


def test_it_is_refreshed_every_n_steps_besides_and_once_for_each(setting, harness):
    """Epochs have three steps. Sigma_S is refreshed at steps 0, 3 and 6, where epochs begin, and at 2, 4, 6 and 8."""
    covariances, accumulate = [], 2

    class CovarianceRecorder(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            covariances.append(pl_module.penalty.penalty.shrinkage_covariance.clone())

    module = setting.module(IStar(-1.0, 0.4))
    callback = make_shrinkage_callback(setting, module)
    module.penalty.settings = replace(module.penalty.settings, refresh_every_n_steps=2)
    settings = {"limit_train_batches": 3 * accumulate, "accumulate_grad_batches": accumulate}
    harness.trainer(callback, CovarianceRecorder(), max_epochs=3, **settings).fit(module, datamodule=setting.data())
    refresh_steps = [
        i // accumulate for i in range(1, len(covariances)) if not torch.equal(covariances[i], covariances[i - 1])
    ]
    assert refresh_steps == [2, 3, 4, 6, 8]
    assert len(callback.seconds) == 6


def test_sigma_s_of_a_part_of_the_tokens_takes_batches_until_it_has_the_points(setting, harness):
    special_ids = (2, 3)
    module = setting.module(IStar(-1.0, 0.4))
    module.penalty = attach(module.model, module.penalty.penalty, points=Points("content", special_ids=special_ids))
    callback = make_shrinkage_callback(setting, module, num_points=600, batch_size=4)
    example_order = callback.sample_examples(epoch=0)
    assert sorted(example_order) == list(range(len(setting.train)))
    points, num_read = [], 0
    while 2 * len(points) < 600:
        for row in example_order[num_read : num_read + 4]:
            hidden_states = next(compute_states_by_example(setting, module, [setting.train[row]]))
            content_positions = [
                position for position, token in enumerate(setting.train[row]["input_ids"]) if token not in special_ids
            ]
            points += [
                torch.stack([layer_states[0, position] for layer_states in hidden_states[1:]])
                for position in content_positions
            ]
        num_read += 4
    assert any(token in special_ids for token in setting.train[example_order[0]]["input_ids"])
    trainer = harness.trainer(callback)
    trainer.strategy.connect(module)
    assert callback.refresh(trainer, example_order) == 2 * len(points)
    covariance = module.penalty.penalty.shrinkage_covariance
    torch.testing.assert_close(covariance.double(), torch.cov(torch.cat(points).double().T), rtol=1e-4, atol=1e-6)


def test_a_refresh_changes_neither_random_numbers_nor_weights_nor_modes(setting, harness):
    module = setting.module(IStar(-1.0, 0.4))
    callback = make_shrinkage_callback(setting, module)
    trainer = harness.trainer(callback)
    trainer.strategy.connect(module)
    weights_before = {name: value.clone() for name, value in module.state_dict().items()}
    random_state = torch.get_rng_state()
    callback.refresh(trainer, callback.sample_examples(0))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, weights_before[name]) for name, value in module.state_dict().items())
    assert module.training
    assert module.model.training


def test_the_covariance_is_part_of_the_checkpoint_and_comes_back(setting, harness, tmp_path):
    module = setting.module(IStar(-1.0, 0.4))
    callback = make_shrinkage_callback(setting, module)
    trainer = harness.trainer(callback, limit_train_batches=2, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(module, datamodule=setting.data())
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    checkpoint = torch.load(tmp_path / "state.ckpt", weights_only=True)
    resumed_module = setting.module(IStar(-1.0, 0.4))
    resumed_module.on_load_checkpoint(checkpoint)
    assert torch.equal(resumed_module.penalty.penalty.shrinkage_covariance, module.penalty.penalty.shrinkage_covariance)


def test_layer_isotropy_is_that_of_all_tokens_whatever_the_batches(setting, harness):
    module = setting.module()
    states_by_example = list(compute_states_by_example(setting, module, list(setting.validation)))
    points_by_layer = [
        torch.cat([hidden_states[layer][0] for hidden_states in states_by_example]).double() for layer in range(3)
    ]

    isotropy = ValidationIsoScore()
    data = setting.data()
    data.config.eval_batch_size = 7
    harness.trainer(isotropy, limit_val_batches=1.0).validate(module, datamodule=data, verbose=False)

    for layer, points in enumerate(points_by_layer):
        assert isotropy.scores[str(layer)] == pytest.approx(algorithm_1(points).item(), abs=1e-5)
    assert isotropy.scores["union"] == pytest.approx(isoscore(torch.cat(points_by_layer[1:])).item(), abs=1e-5)
    assert isotropy.num_points == sum(setting.validation["length"])


def test_a_model_that_has_diverged_is_one_line(setting, harness):
    module = setting.module()
    module.model.bert.encoder.layer[0].output.dense.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match=r"^validation after step 0: .* not finite"):
        harness.trainer(ValidationIsoScore(), limit_val_batches=1.0).validate(
            module, datamodule=setting.data(), verbose=False
        )


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("accuracy", [0.5, 0.75, 0.75, 0.25], 2),
        ("loss", [0.5, 0.25, 0.25, 0.75], 2),
        ("perplexity_held_out", [9.0, 8.0, 7.0, 8.0], 3),
    ],
)
def test_history_and_early_stopping_follow_the_direction_of_the_metric(setting, metric, values, best, tmp_path):
    """The best of equal epochs is the first."""
    stopping = build_trainer(TrainerConfig(early_stopping=2, accelerator="cpu"), metric, tmp_path, [], None)
    mode = "max" if metric == "accuracy" else "min"
    assert (stopping.early_stopping_callback.monitor, stopping.early_stopping_callback.mode) == (f"val/{metric}", mode)

    class Trainer:
        callback_metrics: ClassVar = {}
        global_step = 0

        class state:  # noqa: N801
            fn = "fit"

    geometry = ValidationIsoScore()
    for keep_best, expected in ((True, best), (False, 4)):
        history, module, trainer = History(metric, geometry, keep_best), setting.module(), Trainer()
        for epoch, value in enumerate(values):
            trainer.current_epoch = epoch
            module.metrics = {metric: value}
            module.evaluations = {"": Evaluation({metric: value}, [{"id": epoch}], False)}
            history.on_validation_end(trainer, module)
        assert history.best_epoch == expected
        assert history.best_evaluations[""].predictions == [{"id": expected - 1}]
        assert [entry["epoch"] for entry in history.epochs] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"val_check_interval": 0.7}, [2, 4]),
        ({"val_check_interval": 3}, [3, 4]),
        ({"max_epochs": 2, "val_check_interval": 3}, [3, 7, 8]),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2}, [8, 12]),
        ({"max_epochs": 3, "check_val_every_n_epoch": 4}, [12]),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2, "max_steps": 3}, [3]),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2, "max_steps": 8}, [8]),
        ({"max_epochs": 2, "check_val_every_n_epoch": None, "val_check_interval": 3}, [3, 6, 8]),
        ({"max_epochs": 2, "val_check_interval": 3, "lightning": {"min_epochs": 2}}, [3, 7, 8]),
    ],
)
def test_a_validation_follows_the_last_step(setting, tmp_path, settings, steps):
    """An epoch has four batches, which are steps."""
    geometry = ValidationIsoScore()
    history = History("accuracy", geometry)
    options = TrainerConfig(
        accelerator="cpu", accumulate_grad_batches=1, limit_train_batches=4, **({"max_epochs": 1} | settings)
    )
    trainer = build_trainer(options, "accuracy", tmp_path, [geometry, history], None)
    trainer.fit(setting.module(), datamodule=setting.data())
    assert [entry["step"] for entry in history.epochs] == steps
