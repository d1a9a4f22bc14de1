"""The penalty and the switches of the training have the effects that the config documents."""

import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from istar.finetune.execute.assemble import assemble
from istar.finetune.execute.identify import KeyMaker, identify
from istar.finetune.execute.prepare import prepare
from istar.finetune.execute.run import run
from istar.finetune.tasks import metrics
from istar.finetune.tasks.loading import sample_examples
from istar.texts import demo
from tests.finetune.execute.artifacts import TINY, Build, everything_measured, logged, place, rows_of, rte
from tests.finished_runs import make_key

WITHOUT_GEOMETRY = ("run.geometry=false", "run.isotropy_zeta=null")


# `test_steps` has the same for single steps, and the sign of lambda.
@pytest.mark.slow
@pytest.mark.parametrize("reg", ["istar", "cosreg"])
def test_lambda_0_is_no_regularizer(cached_run: Callable[..., Any], reg: str) -> None:
    _, base, base_folder = cached_run("task=demo", "reg=none")
    _, zero_lambda, zero_lambda_folder = cached_run("task=demo", f"reg={reg}", "reg.lambda=0")
    assert everything_measured(zero_lambda) == everything_measured(base)
    assert rows_of(zero_lambda_folder / "predictions.jsonl") == rows_of(base_folder / "predictions.jsonl")
    assert logged(zero_lambda_folder)["train/loss"] == logged(base_folder)["train/loss"]


def test_the_placebos_are_weight_decay_and_dropout(small: Build) -> None:
    def build(*overrides: str) -> tuple[float, set[float], str]:
        """Return the weight decay and the probabilities of dropout with which a run would train, and its method."""
        config = small(*overrides)
        module = assemble(prepare(identify(config)), None).module
        dropouts = {layer.p for layer in module.model.modules() if isinstance(layer, torch.nn.Dropout)}
        return module.optim.weight_decay, dropouts, make_key(config).label

    decay, dropouts, _ = build("reg=none", "optim.weight_decay=0.1")
    assert (decay, dropouts) == (0.1, {0.1})
    assert build("reg=weight_decay", "reg.lambda=0.5") == (0.5, dropouts, "weight decay λ=0.5")
    assert build("reg=dropout", "reg.lambda=0.4", "optim.weight_decay=0.1")[:2] == (0.1, {0.4})


def test_accumulation_makes_steps_of_several_batches(cached_run: Callable[..., Any]) -> None:
    """Six batches an epoch are steps of four and two batches; the first of the four steps is warm-up."""
    overrides = ("optim.lr=0.001", "optim.schedule=cosine", "optim.warmup=0.25", *WITHOUT_GEOMETRY)
    _, record, folder = cached_run("task=demo", "reg=none", "trainer.accumulate_grad_batches=4", *overrides)
    assert [epoch["step"] for epoch in record.epochs] == [2, 4]
    assert len(logged(folder)["train/loss"]) == 4
    # `test_steps` checks the schedules; the logged learning rate is that of the step.
    cosine_factors = [0, *(0.5 * (1 + math.cos(math.pi * k / 3)) for k in range(3))]
    assert logged(folder)["train/lr"] == pytest.approx([0.001 * factor for factor in cosine_factors])


def test_early_stopping(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without learning no epoch is better than the first, so training stops after the third."""
    settings = ("reg=none", "task.limit_train=8", "trainer.max_epochs=9", "trainer.early_stopping=2")
    record = run(small(*settings, "optim.lr=1e-12"))
    assert [epoch["epoch"] for epoch in record.epochs] == [1, 2, 3]
    assert record.headline["epoch"] == 1


def test_early_stopping_goes_by_the_highest_metric(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch is better than all before it, so training goes on to the last one, which is the best."""
    epoch_counter = itertools.count()
    monkeypatch.setattr(metrics, "compute", lambda *_: {"accuracy": next(epoch_counter) / 100, "f1": 0.5})
    record = run(small("reg=none", "task.limit_train=8", "trainer.max_epochs=4", "trainer.early_stopping=1"))
    assert [epoch["epoch"] for epoch in record.epochs] == [1, 2, 3, 4]
    assert record.headline["epoch"] == 4


@pytest.mark.parametrize("task", [pytest.param("demo", marks=pytest.mark.slow), "demo_span"])
def test_fast_dev_run(small: Build, task: str) -> None:
    """A run trains on one batch and validates on one batch, even if there are more."""
    config = small(f"task={task}", "trainer.fast_dev_run=true", "data.eval_batch_size=5", "reg=istar")
    record = run(config)
    folder = place(config, record)
    assert record.status == "finished"
    assert len(record.epochs) == 1
    assert record.epochs[0]["step"] == 1
    assert not (folder / "checkpoints").exists()
    rows = rows_of(folder / "predictions.jsonl")
    assert 0 < len(rows) <= 5
    assert record.data["validation"] == {"validation": len(rows)}


def test_fast_dev_run_predicts_one_batch_of_a_test_set(small: Build, tmp_path: Path) -> None:
    data = rte(tmp_path / "glue_data")
    overrides = ("trainer.fast_dev_run=true", "data.eval_batch_size=3", "task.submission=true")
    config = small(*TINY, "task=rte", f"task.data_dir={data}", *overrides)
    assert [len(rows) for rows in prepare(identify(config)).data.test] == [3]


@pytest.mark.slow
def test_without_checkpoints_the_last_epoch_is_the_result(small: Build) -> None:
    config = small("trainer.checkpoints=false", "trainer.max_epochs=2", "reg=none", "task=demo_regression")
    record = run(config)
    folder = place(config, record)
    assert not (folder / "checkpoints").exists()
    assert record.headline["epoch"] == 2
    assert record.metrics == record.epochs[1]["metrics"]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    example = sample_examples(demo.generate("demo_regression", "validation"), config.task.limit_validation)[0]
    with torch.no_grad():
        prediction = model(**tokenizer(example["sentence1"], example["sentence2"], return_tensors="pt")).logits.item()
    assert prediction == pytest.approx(rows_of(folder / "predictions.jsonl")[0]["prediction"], abs=1e-4)


def test_a_model_of_the_user(small: Build, cached_run: Callable[..., Any], tmp_path: Path) -> None:
    """A run starts from the model that another run has saved; with a changed weight it is another run."""
    model_folder = shutil.copytree(cached_run("task=demo", "reg=none")[2] / "model", tmp_path / "model")
    second_config = small("model=auto", f"model.name={model_folder}", "reg=cosreg", "run.geometry=false")
    name = run(second_config).name
    assert name.endswith(KeyMaker().make(second_config).hash)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder)
    with torch.no_grad():
        model.base_model.embeddings.word_embeddings.weight[10, 0] += 1
    model.save_pretrained(model_folder)
    assert not name.endswith(KeyMaker().make(second_config).hash)
