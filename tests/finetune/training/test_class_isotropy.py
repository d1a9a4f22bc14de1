"""Isotropy within and between classes of the validation set, against a loop over single texts."""

import copy

import numpy as np
import pytest
import torch
import transformers as hf

from istar.errors import NonFiniteError
from istar.finetune.training import FineTuner, History, ValidationGeometry
from istar.finetune.training.layer_geometry import compute_class_scores
from istar.measures import ClassMoments
from istar.records.config import AdamWConfig
from tests.oracles import steps_6_to_9


def compute_expected_scores(states: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the scores within and between the classes of states `(n, d)`."""
    within = sum(
        np.cov(states[labels == label].T, ddof=0) * (labels == label).sum() for label in np.unique(labels)
    ) / len(states)
    between = np.cov(states.T, ddof=0) - within
    scores = [float(steps_6_to_9(torch.linalg.svdvals(torch.from_numpy(matrix)))) for matrix in (within, between)]
    share = float(np.trace(between) / np.trace(within + between))
    return {"within": scores[0], "between": scores[1], "between_share": share}


@torch.no_grad()
def compute_token_states(setting, module, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the states at one position of each text, `(layers, n, d)`, computed text by text, and the labels."""
    model = copy.deepcopy(module.model).eval()
    states = []
    for row in setting.validation:
        batch = setting.collate([row])
        inputs = {name: value for name, value in batch.items() if name not in ("feature_id", "labels")}
        hidden_states = model(**inputs, output_hidden_states=True).hidden_states
        states.append(torch.stack([layer[0, position] for layer in hidden_states]))
    return torch.stack(states, 1).double().numpy(), np.array(setting.validation["labels"])


def run_validation(setting, harness, module, eval_batch_size=16) -> ValidationGeometry:
    callback, data = ValidationGeometry(has_classes=True), setting.data()
    data.config.eval_batch_size = eval_batch_size
    harness.trainer(callback, limit_val_batches=1.0).validate(module, datamodule=data, verbose=False)
    return callback


def enlarge_attention_weights(model):
    """Enlarge the attention weights, so that the first tokens of different texts differ; return the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn" in name or "attention" in name:
                parameter.mul_(4)
    return model


def test_an_encoder_is_measured_at_its_first_tokens(setting, harness):
    module = setting.module()
    enlarge_attention_weights(module.model)
    states, labels = compute_token_states(setting, module, 0)
    scores = run_validation(setting, harness, module, eval_batch_size=7).class_scores
    assert list(scores) == ["0", "1", "2"]
    assert scores["0"] == {"within": None, "between": None, "between_share": None}
    for layer in (1, 2):
        assert scores[str(layer)] == pytest.approx(compute_expected_scores(states[layer], labels), rel=1e-3, abs=1e-6)


def test_a_decoder_is_measured_at_its_last_tokens(setting, harness):
    vocab_size = setting.model.config.vocab_size
    config = hf.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=vocab_size, n_positions=64, num_labels=2, pad_token_id=0,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = enlarge_attention_weights(hf.GPT2ForSequenceClassification(config))
    module = FineTuner(model, None, AdamWConfig(), setting.evaluators)
    states, labels = compute_token_states(setting, module, -1)
    scores = run_validation(setting, harness, module).class_scores
    assert scores["1"] == pytest.approx(compute_expected_scores(states[1], labels), rel=1e-3, abs=1e-6)


def test_the_history_keeps_the_scores_of_each_epoch(setting, harness):
    module, callback = setting.module(), ValidationGeometry(has_classes=True)
    history = History("accuracy", callback)
    trainer = harness.trainer(callback, history, max_epochs=2, limit_train_batches=2, limit_val_batches=1.0)
    trainer.validate(module, datamodule=setting.data(), verbose=False)
    initial_scores = callback.class_scores
    trainer.fit(module, datamodule=setting.data())
    assert history.before_training["class_isotropy"] == initial_scores
    first, second = (entry["class_isotropy"] for entry in history.epochs)
    assert initial_scores != first != second == callback.class_scores


def test_a_score_that_is_not_defined_is_none():
    points = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    scores = compute_class_scores(ClassMoments.of(points, torch.zeros(6).long()))
    assert scores["between"] is None
    assert scores["between_share"] == 0
    assert scores["within"] is not None
    scores = compute_class_scores(ClassMoments.of(points, torch.arange(6)))
    assert (scores["within"], scores["between_share"]) == (None, 1)
    nearly_equal_points = 1 + 1e-8 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert set(compute_class_scores(ClassMoments.of(nearly_equal_points, torch.arange(6) % 2)).values()) == {None}
    with pytest.raises(NonFiniteError):
        compute_class_scores(ClassMoments.of(points / 0, torch.arange(6) % 2))
