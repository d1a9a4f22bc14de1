"""IsoScore* in geometry.json, compared with NumPy on the states of single examples."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from istar.errors import UserError
from istar.finetune.execute.run import run
from istar.finetune.tasks.features import FeatureRows
from istar.finetune.training import final_geometry
from istar.finetune.training.final_geometry import EvaluationPasses, measure_validation_geometry
from tests.finetune.training.conftest import stack_states_by_example
from tests.finetune.training.test_final_geometry import find_run_folder
from tests.oracles import algorithm_1


def measure(setting, harness, module, batch_size=16, train=None, zeta=0.2, seed=3):
    validation, train = FeatureRows(setting.validation), FeatureRows(setting.train if train is None else train)
    passes = EvaluationPasses(harness.trainer(), module, setting.collate, batch_size)
    return measure_validation_geometry(passes, validation, train, zeta, seed)["isoscore_star"]


def compute_points_by_layer(setting, module, rows) -> dict[str, np.ndarray]:
    """Return the states of all tokens by layer, and of layers 1 to L together under `union`, in float64."""
    layers = np.concatenate(list(stack_states_by_example(setting, module, rows)), axis=1)
    return {**{str(index): layer for index, layer in enumerate(layers)}, "union": np.concatenate(layers[1:])}


def compute_expected_isoscore_star(points: np.ndarray, training_points: np.ndarray, zeta: float) -> float:
    """Return IsoScore* by the steps of Algorithm 1, with Sigma_S of the training points."""
    return algorithm_1(torch.from_numpy(points), torch.from_numpy(np.cov(training_points.T)), zeta).item()


def test_sigma_is_of_the_union_and_of_the_layer(setting, harness):
    module, zeta = setting.module(), 0.9
    # With fewer rows to train on, Sigma_S and the covariance of the validation points differ.
    training_rows = setting.train.select(range(30))
    validation_points = compute_points_by_layer(setting, module, setting.validation)
    training_points = compute_points_by_layer(setting, module, training_rows)
    isoscore_star = measure(setting, harness, module, 7, training_rows, zeta)
    assert isoscore_star["zeta"] == zeta
    assert isoscore_star["num_points"] == len(training_points["union"])
    assert list(isoscore_star["layers"]) == ["0", "1", "2"]
    for name, value in {**isoscore_star["layers"], "union": isoscore_star["union"]}.items():
        assert value == pytest.approx(
            compute_expected_isoscore_star(validation_points[name], training_points[name], zeta), rel=1e-4
        ), name
        assert value != pytest.approx(
            compute_expected_isoscore_star(validation_points[name], training_points[name], 0.0), rel=1e-3
        ), name


def test_a_layer_without_variance_has_no_score_and_the_others_stay(setting, harness):
    expected, module = measure(setting, harness, setting.module()), setting.module()
    with torch.no_grad():
        norm = module.model.base_model.encoder.layer[-1].output.LayerNorm
        norm.weight.zero_()
        norm.bias.fill_(0.3)
    isoscore_star = measure(setting, harness, module)
    assert isoscore_star["layers"] == {**expected["layers"], "2": None}
    assert 0 < isoscore_star["union"] < 1


def test_each_row_is_read_once(setting, harness, monkeypatch):
    module = setting.module()
    original, row_ids = module.hidden_states, []

    def record_rows(batch):
        row_ids.extend(batch["feature_id"].tolist())
        return original(batch)

    monkeypatch.setattr(module, "hidden_states", record_rows)
    measure(setting, harness, module)
    assert sorted(row_ids[:40]) == list(range(40))
    assert sorted(row_ids[40:]) == list(range(len(setting.train)))


def test_sigma_has_the_points_of_a_random_sample(setting, harness, monkeypatch):
    module, longest = setting.module(), max(setting.train["length"])
    assert measure(setting, harness, module)["num_points"] == 2 * sum(setting.train["length"])
    monkeypatch.setattr(final_geometry, "NUM_POINTS", 2_000)
    sampled = measure(setting, harness, module)
    assert 2_000 <= sampled["num_points"] < 2_000 + 2 * longest
    assert measure(setting, harness, module) == sampled
    assert measure(setting, harness, module, seed=4)["union"] != sampled["union"]


def read_geometry(config: Any) -> dict[str, Any]:
    return json.loads((find_run_folder(config) / "geometry.json").read_text())


@pytest.mark.slow
def test_a_language_model_is_measured_on_the_tokens_of_isotropy_after(small: Callable[..., Any]) -> None:
    """`test_a_run_measures_its_best_weights` has the same for a classifier."""
    settings = ("task=clm", "model=small_decoder", "task.max_length=16", "reg=none")
    config = small(*settings, "run.isotropy_zeta=0", "run.geometry=true")
    record = run(config)
    isoscore_star = read_geometry(config)["isoscore_star"]
    scores = {**isoscore_star["layers"], "union": isoscore_star["union"]}
    assert scores == pytest.approx(record.isotropy["after"], rel=1e-4)


def test_geometry_is_no_part_of_the_name_and_a_finished_run_may_lack_isoscore_star(small: Callable[..., Any]) -> None:
    overrides = ("trainer.fast_dev_run=true", "data.eval_batch_size=6", "run.geometry=true")
    config = small(*overrides, "run.isotropy_zeta=0.2")
    record = run(config)
    # A trial of one batch measures this batch and does not read the training data.
    assert read_geometry(config)["examples"] == 6
    assert "isoscore_star" not in read_geometry(config)
    for override in ("run.isotropy_zeta=0.2", "run.geometry=false"):
        assert run(small(*overrides, override)) == record


@pytest.mark.parametrize("value", ["-0.1", "1.5", "nan"])
def test_zeta_is_a_share(small: Callable[..., Any], value: str) -> None:
    with pytest.raises(UserError, match=r"^run\.isotropy_zeta=.*; expected a number from 0 .* to 1"):
        small(f"run.isotropy_zeta={value}")
