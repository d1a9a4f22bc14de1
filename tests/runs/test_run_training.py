"""The penalty and the switches of the training do what the config says."""

import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from istar.models import tiny
from istar.reports.run_tables import get_method_label
from istar.runs.run import run
from istar.tasks import demo, metrics
from istar.tasks.loading import sample_examples
from tests.runs.artifacts import DEMOS, TINY, Build, everything_measured, folders_in, logged, place, rows_of, rte


@pytest.mark.parametrize("reg", ["istar", "cosreg"])
def test_lambda_0_is_no_regularizer(done: Callable[..., Any], reg: str) -> None:
    _, plain, plain_folder = done("task=demo", "reg=none")
    _, zero, zero_folder = done("task=demo", f"reg={reg}", "reg.lambda=0")
    assert everything_measured(zero) == everything_measured(plain)
    assert rows_of(zero_folder / "predictions.jsonl") == rows_of(plain_folder / "predictions.jsonl")
    assert logged(zero_folder)["train/loss"] == logged(plain_folder)["train/loss"]


def test_the_placebos_are_weight_decay_and_dropout(done: Callable[..., Any]) -> None:
    more = ("task=demo", "optim.lr=3e-3")
    _, plain, plain_folder = done(*more, "reg=none")
    _, decayed, _ = done(*more, "reg=none", "optim.weight_decay=0.5")
    _, placebo, placebo_folder = done(*more, "reg=weight_decay", "reg.lambda=0.5")
    assert everything_measured(placebo) == everything_measured(decayed) != everything_measured(plain)
    assert get_method_label(placebo) == "weight decay λ=0.5"
    # The model's own probability is 0.1 everywhere.
    _, same, same_folder = done(*more, "reg=dropout", "reg.lambda=0.1")
    _, stronger, _ = done(*more, "reg=dropout", "reg.lambda=0.4")
    assert everything_measured(same) == everything_measured(plain) != everything_measured(stronger)
    assert logged(same_folder)["train/loss"] == logged(plain_folder)["train/loss"]
    assert logged(placebo_folder)["train/loss"] != logged(plain_folder)["train/loss"]


def test_the_sign_of_lambda(done: Callable[..., Any]) -> None:
    more = ("task=demo", "trainer.accumulate_grad_batches=1", "optim.lr=3e-3", "trainer.checkpoints=false")
    _, plain, _ = done(*more, "reg=none")
    _, lowered, _ = done(*more, "reg=istar", "reg.lambda=-10", "reg.zeta=0.2")
    _, raised, _ = done(*more, "reg=istar", "reg.lambda=10", "reg.zeta=0.2")
    assert lowered.isotropy["before"] == plain.isotropy["before"] == raised.isotropy["before"]
    scores = [record.isotropy["after"]["union"] for record in (lowered, plain, raised)]
    assert scores[0] < 0.8 * scores[1]
    assert scores[2] > 1.2 * scores[1]


def test_accumulation_makes_steps_of_several_batches(done: Callable[..., Any]) -> None:
    _, record, folder = done("task=demo", "reg=none", "trainer.accumulate_grad_batches=4")
    # 6 batches an epoch: 4 and 2.
    assert [epoch["step"] for epoch in record.epochs] == [2, 4]
    assert len(logged(folder)["train/loss"]) == 4


def test_half_precision(done: Callable[..., Any]) -> None:
    _, full, _ = done("task=demo", "reg=istar")
    _, half, folder = done("task=demo", "reg=istar", "trainer.precision=bf16-mixed")
    assert half.name != full.name
    assert half.status == "finished"
    assert half.isotropy["before"] == pytest.approx(full.isotropy["before"], rel=0.05)
    assert half.isotropy["before"] != full.isotropy["before"]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert model.dtype == torch.float32
    assert all(math.isfinite(loss) for loss in logged(folder)["train/loss"])


def test_learning_rates(done: Callable[..., Any]) -> None:
    def rates(*overrides: str) -> list[float]:
        more = ("task=demo", "reg=none", "trainer.accumulate_grad_batches=1", "optim.lr=0.001", "trainer.max_epochs=2")
        return logged(done(*more, *overrides)[2])["train/lr"]

    # 12 steps; a quarter of them, 3, are warm-up. What is logged is the rate that the step uses.
    rise = [0, 1 / 3, 2 / 3]
    assert rates() == pytest.approx([0.001] * 12)
    assert rates("optim.warmup=0.25") == pytest.approx([0.001 * s for s in [*rise, *[1.0] * 9]])
    linear = [*rise, *((9 - k) / 9 for k in range(9))]
    assert rates("optim.schedule=linear", "optim.warmup=0.25") == pytest.approx([0.001 * s for s in linear])
    cosine = [*rise, *(0.5 * (1 + math.cos(math.pi * k / 9)) for k in range(9))]
    assert rates("optim.schedule=cosine", "optim.warmup=0.25") == pytest.approx([0.001 * s for s in cosine])
    plain = [(12 - k) / 12 for k in range(12)]
    assert rates("optim.schedule=linear") == pytest.approx([0.001 * s for s in plain])


def test_early_stopping(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without learning no epoch is better than the first: the third is the last."""
    config = small("reg=none", "trainer.max_epochs=9", "trainer.early_stopping=2", "optim.lr=1e-12")
    record = run(config)
    assert [epoch["epoch"] for epoch in record.epochs] == [1, 2, 3]
    assert record.headline["epoch"] == 1


def test_early_stopping_and_the_best_epoch_go_by_the_highest_metric(
    small: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each epoch is better than all before it: training goes on to the last, which is the best."""
    rising = itertools.count()
    monkeypatch.setattr(metrics, "compute", lambda *_: {"accuracy": next(rising) / 100, "f1": 0.5})
    record = run(small("reg=none", "trainer.max_epochs=4", "trainer.early_stopping=1"))
    assert [epoch["epoch"] for epoch in record.epochs] == [1, 2, 3, 4]
    assert record.headline["epoch"] == 4


@pytest.mark.parametrize("task", DEMOS)
def test_fast_dev_run(small: Build, task: str) -> None:
    """One batch of everything, also where there are more."""
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


def test_fast_dev_run_writes_a_submission_too(small: Build, tmp_path: Path) -> None:
    data = rte(tmp_path / "glue_data")
    config = small(
        *TINY, "task=rte", f"task.data_dir={data}", "trainer.fast_dev_run=true", "data.eval_batch_size=3",
        "task.submission=true",
    )  # fmt: skip
    record = run(config)
    assert len((place(config, record) / "submission" / "RTE.tsv").read_text().splitlines()) == 4


def test_without_checkpoints_the_last_epoch_is_the_result(small: Build) -> None:
    config = small("trainer.checkpoints=false", "trainer.max_epochs=3", "reg=none", "task=demo_regression")
    record = run(config)
    folder = place(config, record)
    assert not (folder / "checkpoints").exists()
    assert record.headline["epoch"] == 3
    assert record.metrics == record.epochs[2]["metrics"]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    first = sample_examples(demo.generate("demo_regression", "validation"), config.task.limit_validation)[0]
    with torch.no_grad():
        said = model(**tokenizer(first["sentence1"], first["sentence2"], return_tensors="pt")).logits.item()
    assert said == pytest.approx(rows_of(folder / "predictions.jsonl")[0]["prediction"], abs=1e-4)


def test_a_model_of_the_user(small: Build, tmp_path: Path) -> None:
    """What one run saved, another starts from; a changed weight is another run."""
    config = small()
    saved = place(config, run(config)) / "model"
    names = []
    for _ in range(2):
        more = small("model=auto", f"model.name={saved}", "reg=cosreg", "task=demo_sentence")
        record = run(more)
        names.append(record.name)
        model = AutoModelForSequenceClassification.from_pretrained(saved)
        with torch.no_grad():
            model.base_model.embeddings.word_embeddings.weight[10, 0] += 1
        model.save_pretrained(saved)
    assert names[0] != names[1]


def test_wandb_offline(small: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    folders = []
    for seed in (1, 2):
        config = small("logger=wandb", f"seed={seed}", "reg=none")
        folder = place(config, run(config))
        assert wandb.run is None
        offline = list((folder / "wandb").glob("offline-run-*"))
        assert len(offline) == 1
        written = list(offline[0].glob("run-*.wandb"))
        assert len(written) == 1
        assert written[0].stat().st_size > 0
        assert (folder / "metrics.csv").exists()
        folders.append(written[0].name)
    assert folders[0] != folders[1]
    assert folders_in(tmp_path) == ["runs"]


def test_nothing_is_left_in_the_logging_of_the_host(small: Build) -> None:
    levels = [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")]
    run(small())
    assert [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")] == levels
    assert len(tiny.make_tokenizer(demo.vocabulary())) > 0
