"""geometry.json, compared with a loop over single examples, and the state that the measurement must not change."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, GPT2Config

from istar.errors import NonFiniteError
from istar.finetune.execute.run import run
from istar.finetune.tasks.features import FeatureRows
from istar.finetune.training import final_geometry as geometry_module
from istar.finetune.training.final_geometry import EvaluationPasses, find_summary_positions, measure_validation_geometry
from tests import oracles
from tests.finetune.training.conftest import stack_states_by_example


def measure(setting, harness, module, batch_size=16, features=None, collate=None, seed=3, **settings):
    validation = FeatureRows(setting.validation if features is None else features)
    passes = EvaluationPasses(harness.trainer(**settings), module, collate or setting.collate, batch_size)
    return measure_validation_geometry(passes, validation, FeatureRows(setting.train), zeta=None, seed=seed)


def make_module_with_distinct_states(setting, scale=4.0):
    """Return a module whose first-token states differ; with initial weights, those of all texts are nearly equal."""
    module = setting.module()
    with torch.no_grad():
        for name, parameter in module.model.named_parameters():
            if "attention" in name and name.endswith("weight") and parameter.dim() == 2:
                parameter.mul_(scale)
    return module


def test_it_is_what_a_loop_over_the_texts_finds(setting, harness):
    module = make_module_with_distinct_states(setting)
    states = list(stack_states_by_example(setting, module, setting.validation))
    geometry = measure(setting, harness, module, 7)
    assert list(geometry) == ["examples", "tokens", "mean_activation", "two_nn"]
    assert geometry["examples"] == 40
    assert geometry["tokens"] == sum(state.shape[1] for state in states) == sum(setting.validation["length"])
    expected_mean = np.concatenate([state[-1] for state in states]).mean(axis=0)
    np.testing.assert_allclose(geometry["mean_activation"], expected_mean, rtol=1e-4, atol=1e-6)
    assert geometry["two_nn"][0] is None
    for layer in (1, 2):
        first_token_states = np.stack([state[layer, 0] for state in states])
        assert len(np.unique(first_token_states.round(3), axis=0)) == 40
        assert geometry["two_nn"][layer] == pytest.approx(oracles.two_nn(first_token_states), rel=1e-3)
    assert geometry["two_nn"][1] != geometry["two_nn"][2]


def pad_left(collate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that collates rows as `collate` does, with the padding before the tokens instead of after."""

    def collate_left_padded(rows: Any) -> dict[str, Any]:
        batch = collate(rows)
        shifts = (batch["attention_mask"] == 0).sum(1).tolist()
        length = batch["attention_mask"].shape[1]
        shifted = {
            name: torch.stack([row.roll(shift) for row, shift in zip(value, shifts, strict=True)])
            for name, value in batch.items()
            if value.dim() == 2 and value.shape[1] == length
        }
        # Position ids count from the first real token, as in models that support padding on the left.
        positions = (shifted["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return {**batch, **shifted, "position_ids": positions}

    return collate_left_padded


def test_the_first_token_is_the_first_that_is_none_of_the_padding(setting, harness):
    module = make_module_with_distinct_states(setting)
    right_padded = measure(setting, harness, module, 8)
    left_padded = measure(setting, harness, module, 8, collate=pad_left(setting.collate))
    assert left_padded["tokens"] == right_padded["tokens"]
    assert left_padded["two_nn"] == [None, *(pytest.approx(value, rel=1e-3) for value in right_padded["two_nn"][1:])]
    assert left_padded["mean_activation"] == pytest.approx(right_padded["mean_activation"], rel=1e-3, abs=1e-5)


def test_the_dimension_is_that_of_random_texts_and_the_mean_that_of_all(setting, harness, monkeypatch):
    module = make_module_with_distinct_states(setting)
    of_all = measure(setting, harness, module)
    monkeypatch.setattr(geometry_module, "MAX_TWO_NN_EXAMPLES", 12)
    states = list(stack_states_by_example(setting, module, setting.validation))
    for seed in (3, 4):
        # The texts with the smallest numbers, of which each is a function of the seed and of the row.
        random_numbers = [np.random.Generator(np.random.Philox(key=[seed, row])).random() for row in range(40)]
        sampled_rows = np.argsort(random_numbers)[:12]
        expected = [oracles.two_nn(np.stack([states[row][layer, 0] for row in sampled_rows])) for layer in (1, 2)]
        geometry = measure(setting, harness, module, 7, seed=seed)
        assert geometry["two_nn"] == [None, *(pytest.approx(value, rel=1e-3) for value in expected)]
        assert geometry["two_nn"][1] != pytest.approx(of_all["two_nn"][1], rel=0.01)
        assert (geometry["examples"], geometry["tokens"]) == (40, sum(setting.validation["length"]))
        assert geometry["mean_activation"] == pytest.approx(of_all["mean_activation"], rel=1e-4, abs=1e-6)
        # With the padding on the left, the first tokens of a batch have different positions.
        left_padded = measure(setting, harness, module, 7, collate=pad_left(setting.collate), seed=seed)
        assert left_padded["two_nn"][1:] == pytest.approx(expected, rel=1e-3)


def test_equal_texts_are_one_point_and_all_their_tokens(setting, harness, monkeypatch):
    """States of equal texts differ by rounding between batches, and must not count as nearest neighbours."""
    module, all_rows, generator = (
        make_module_with_distinct_states(setting),
        list(range(40)),
        torch.Generator().manual_seed(0),
    )
    distinct_geometry, original = measure(setting, harness, module), module.hidden_states

    def add_noise(batch):
        states = original(batch)
        return {
            layer: state * (1 + 1e-6 * torch.randn(state.shape, generator=generator)) for layer, state in states.items()
        }

    monkeypatch.setattr(module, "hidden_states", add_noise)
    repeated_geometry = measure(
        setting, harness, module, features=setting.validation.select([*all_rows, *all_rows[:9]])
    )
    assert repeated_geometry["two_nn"][1:] == pytest.approx(distinct_geometry["two_nn"][1:], rel=1e-3)
    assert repeated_geometry["examples"] == 49
    assert repeated_geometry["tokens"] == distinct_geometry["tokens"] + sum(setting.validation["length"][:9])
    assert repeated_geometry["mean_activation"] != pytest.approx(distinct_geometry["mean_activation"], rel=1e-4)


def test_too_few_texts_have_a_mean_and_no_dimension(setting, harness):
    geometry = measure(
        setting, harness, make_module_with_distinct_states(setting), features=setting.validation.select(range(2))
    )
    assert geometry["two_nn"] == [None, None, None]
    assert len(geometry["mean_activation"]) == setting.model.config.hidden_size


def test_states_that_are_not_finite_are_told(setting, harness):
    module = setting.module()
    module.model.bert.encoder.layer[0].output.dense.weight.data.fill_(math.nan)
    with pytest.raises(NonFiniteError):
        measure(setting, harness, module)


def test_the_forward_pass_is_in_the_trainers_precision(setting, harness):
    module = make_module_with_distinct_states(setting)
    exact = measure(setting, harness, module)["mean_activation"]
    coarse = measure(setting, harness, module, precision="bf16-mixed")["mean_activation"]
    assert coarse != exact
    assert coarse == pytest.approx(exact, abs=0.1)


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_model_modes_and_random_numbers_alone(setting, harness, training):
    module = setting.module().train(training)
    weights_before = {name: value.clone() for name, value in module.state_dict().items()}
    random_states = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = measure(setting, harness, module)
    assert first == measure(setting, harness, module)
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert (np.random.get_state()[1] == random_states[1]).all()
    assert all(torch.equal(value, weights_before[name]) for name, value in module.state_dict().items())
    assert module.training == module.model.training == training
    assert not torch.is_inference_mode_enabled()
    assert all(parameter.requires_grad for parameter in module.parameters())


def find_run_folder(config: Any) -> Path:
    [folder] = [path for path in Path(config.run.root).iterdir() if path.name != ".locks"]
    return folder


def test_a_run_measures_its_best_weights(small: Callable[..., Any]) -> None:
    """The measured weights are those of the best epoch, which the run saves, not those of the last one."""
    from transformers import AutoModelForSequenceClassification

    config = small("trainer.max_epochs=4", "reg=none", "optim.lr=0.02", "run.isotropy_zeta=0", "run.geometry=true")
    record = run(config)
    assert record.headline["epoch"] < 4
    folder = find_run_folder(config)
    geometry = json.loads((folder / "geometry.json").read_text())
    assert geometry["examples"] == 16
    assert geometry["tokens"] == record.isotropy["points"]
    assert len(geometry["two_nn"]) == 3
    saved_model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    last_state_dict = torch.load(folder / "checkpoints" / "step-16.ckpt", weights_only=True)["state_dict"]
    assert not torch.equal(last_state_dict["model.bert.embeddings.word_embeddings.weight"],
                           saved_model.get_input_embeddings().weight)  # fmt: skip
    assert geometry["mean_activation"] == pytest.approx(
        compute_mean_activation(saved_model, folder, config), rel=1e-4, abs=1e-5
    )
    # Without shrinkage, IsoScore* is the IsoScore of the best epoch.
    isoscore_star = geometry["isoscore_star"]
    scores = {**isoscore_star["layers"], "union": isoscore_star["union"]}
    assert scores == pytest.approx(record.isotropy["after"], rel=1e-4)


def compute_mean_activation(model: Any, folder: Path, config: Any) -> list[float]:
    from transformers import AutoTokenizer

    from istar.finetune.tasks.loading import sample_examples
    from istar.texts import demo

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = sample_examples(demo.generate("demo", "validation"), 16)
    first_column, second_column = (
        column for column in rows.column_names if column.startswith(("sentence", "text", "premise", "hyp"))
    )
    states = []
    with torch.inference_mode():
        for row in rows:
            inputs = tokenizer(row[first_column], row[second_column], return_tensors="pt")
            states.append(model(**inputs, output_hidden_states=True).hidden_states[-1][0])
    return torch.cat(states).double().mean(0).tolist()


def test_first_and_last_tokens_wherever_the_padding_is() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 0]])
    assert find_summary_positions(BertConfig(), mask).tolist() == [0, 2, 0, 1]
    assert find_summary_positions(GPT2Config(), mask).tolist() == [2, 3, 3, 1]
