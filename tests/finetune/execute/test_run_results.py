"""The files that a run writes agree with each other and with the saved model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

from istar.finetune.config.schema import to_dict
from istar.finetune.execute.run import run
from istar.finetune.execute.run_summary import build_run_table
from istar.finetune.tasks.loading import sample_examples
from istar.finetune.tasks.metrics import compute
from istar.finetune.tasks.squad import best_answer
from istar.finetune.training.module import FineTuner
from istar.runs.record import read_result
from istar.runs.tasks import TASKS
from istar.texts import demo
from tests.finetune.execute.artifacts import DEMOS, Build, folders_in, logged, place, rows_of


@pytest.mark.parametrize(("task", "reg"), [*((task, "istar") for task in DEMOS), ("demo", "none")])
def test_what_a_run_leaves(cached_run: Callable[..., Any], task: str, reg: str) -> None:
    config, record, folder = cached_run(f"task={task}", f"reg={reg}")
    spec = TASKS[task]
    assert folders_in(folder) == [
        ".istar", "checkpoints", "config.yaml", "geometry.json", "isotropy.png", "key.json", "metrics.csv", "model",
        "predictions.jsonl", "result.json",
    ]  # fmt: skip
    assert record == read_result(folder)
    assert record.status == "finished"
    assert record.error is None
    assert record.config == to_dict(config)
    assert yaml.safe_load((folder / "config.yaml").read_text()) == record.config

    # The headline is the first of the best epochs, and everything else is of that epoch.
    values = [epoch["metrics"][spec.headline] for epoch in record.epochs]
    assert [epoch["epoch"] for epoch in record.epochs] == [1, 2]
    assert [epoch["step"] for epoch in record.epochs] == [6, 12]
    best = values.index(max(values))
    assert record.headline == {"metric": spec.headline, "value": max(values), "epoch": best + 1}
    assert record.metrics == record.epochs[best]["metrics"]
    assert record.isotropy["after"] == record.epochs[best]["isotropy"]
    assert list(record.isotropy["before"]) == ["0", "1", "2", "union"]
    scores = [*record.isotropy["before"].values(), *record.isotropy["after"].values()]
    assert all(0 < score < 1 for score in scores)
    assert record.isotropy["before"] != record.isotropy["after"]
    assert record.data["train"] == 48
    assert record.data["validation"] == {"validation": 24}
    assert len(record.key.data) >= 16
    assert record.key.model == "tiny@main"
    assert record.timing["total"] >= record.timing["fit"] > 0
    assert len(record.timing["shrinkage"]) == (2 if reg == "istar" else 0)


@pytest.mark.parametrize("task", DEMOS)
def test_predictions_are_the_validation_set_in_its_order(cached_run: Callable[..., Any], task: str) -> None:
    _, record, folder = cached_run(f"task={task}", "reg=istar")
    spec = TASKS[task]
    examples = sample_examples(demo.generate(task, "validation"), 24)
    rows = rows_of(folder / "predictions.jsonl")
    assert [row["id"] for row in rows] == examples["id" if spec.kind == "span" else "row"][:]
    labels = [row["label"] for row in rows]
    predictions: list[Any] = [row["prediction"] for row in rows]
    if spec.kind == "classification":
        assert labels == [spec.labels[label] for label in examples["label"]]
        for row in rows:
            assert sum(row["scores"]) == pytest.approx(1)
            assert row["prediction"] == spec.labels[row["scores"].index(max(row["scores"]))]
        labels = [spec.labels.index(label) for label in labels]
        predictions = [spec.labels.index(prediction) for prediction in predictions]
    elif spec.kind == "regression":
        assert labels == examples["label"][:]
    else:
        assert labels == [answer["text"] for answer in examples["answers"]]
        assert all(row["prediction"] in context for row, context in zip(rows, examples["context"], strict=True))
    # The metrics of the record are those of the predictions in the file.
    recomputed_metrics = compute(spec.metrics, predictions, labels)
    assert {name: record.metrics[name] for name in recomputed_metrics} == pytest.approx(recomputed_metrics)


@pytest.mark.parametrize("reg", ["none", "istar", pytest.param("cosreg", marks=pytest.mark.slow)])
def test_logged_keys(cached_run: Callable[..., Any], reg: str) -> None:
    _, record, folder = cached_run("task=demo", f"reg={reg}")
    columns = logged(folder)
    expected = {"train/loss", "train/task_loss", "train/lr", "train/grad_norm", "val/accuracy", "val/f1", "val/loss"}
    expected |= {"train/tokens_per_second"}
    expected |= {"isotropy/isoscore", *(f"isotropy/{state}/isoscore" for state in ("embeddings", "layer_1", "layer_2"))}
    if reg != "none":
        expected |= {"train/penalty", "train/points"}
    if reg == "istar":
        expected |= {"train/isoscore_star", "shrinkage/points", "shrinkage/seconds"}
    if reg == "cosreg":
        expected |= {"train/average_cosine"}
    assert set(columns) == expected | {"step", "epoch"}
    assert len(columns["train/loss"]) == 12
    if reg == "none":
        assert "train/penalty" not in columns
        assert columns["train/loss"] == columns["train/task_loss"]
    else:
        sums = [a + b for a, b in zip(columns["train/task_loss"], columns["train/penalty"], strict=True)]
        assert columns["train/loss"] == pytest.approx(sums, rel=1e-5)
    # Before training and after each epoch.
    assert columns["isotropy/isoscore"] == pytest.approx(
        [record.isotropy["before"]["union"], *(epoch["isotropy"]["union"] for epoch in record.epochs)], rel=1e-5
    )


def test_istar_logs_its_penalty_and_an_estimated_zeta(cached_run: Callable[..., Any]) -> None:
    columns = logged(cached_run("task=demo", "reg=istar", "reg.lambda=3", "reg.zeta=auto")[2])
    expected = [3 * (1 - score) for score in columns["train/isoscore_star"]]
    assert columns["train/penalty"] == pytest.approx(expected, rel=1e-5)
    zetas = columns["train/zeta"]
    assert len(zetas) == len(columns["train/loss"])
    assert all(0 < zeta <= 1 for zeta in zetas)
    assert len(set(zetas)) > 1


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_batches_without_a_score_add_nothing_and_are_counted(cached_run: Callable[..., Any], accumulate: int) -> None:
    """The second of two micro-batches has one example, and so one point."""
    settings = ["reg.points=first", "reg.layers=last", "reg.zeta=0", "task.limit_train=9", "data.batch_size=8"]
    settings += [f"trainer.accumulate_grad_batches={accumulate}", "trainer.log_every_n_steps=1"]
    with pytest.warns(UserWarning, match="have no isoscore, because they are too few or all equal"):
        _, record, folder = cached_run("task=demo", "reg=istar", *settings)
    assert record.status == "finished"
    steps = pd.read_csv(folder / "metrics.csv")
    steps = steps[steps["train/loss"].notna()]
    assert len(steps) == 4 // accumulate
    undefined = steps["train/undefined"].fillna(0).tolist()
    assert undefined == ([1, 2] if accumulate == 2 else [0, 1, 1, 2])
    if accumulate == 2:
        # The penalty is a mean of two micro-batches, and the score is that of the first.
        assert steps["train/penalty"].tolist() == pytest.approx(((steps["train/isoscore"] - 1) / 2).tolist())
    else:
        assert steps["train/isoscore"].isna().tolist() == [False, True, False, True]
        assert (steps["train/penalty"] == 0).tolist() == [False, True, False, True]


# ---- the saved model


@pytest.mark.parametrize("task", ["demo", "demo_regression"])
def test_the_saved_model_says_what_the_predictions_say(cached_run: Callable[..., Any], task: str) -> None:
    _, _, folder = cached_run(f"task={task}", "reg=istar")
    spec = TASKS[task]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert model.dtype == torch.float32
    assert list(model.config.id2label.values()) == list(spec.labels or ["score"])
    assert model.config.label2id == {name: index for index, name in model.config.id2label.items()}
    examples = sample_examples(demo.generate(task, "validation"), 24)
    for index, row in enumerate(rows_of(folder / "predictions.jsonl")):
        texts = [examples[index][column] for column in spec.text_columns]
        with torch.no_grad():
            logits = model(**tokenizer(*texts, return_tensors="pt")).logits[0]
        if spec.kind == "classification":
            assert logits.softmax(0).tolist() == pytest.approx(row["scores"], abs=1e-5)
            assert model.config.id2label[int(logits.argmax())] == row["prediction"]
        else:
            assert logits.item() == pytest.approx(row["prediction"], abs=1e-4)


def test_the_saved_span_model_says_what_the_predictions_say(cached_run: Callable[..., Any]) -> None:
    _, _, folder = cached_run("task=demo_span", "reg=istar")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForQuestionAnswering.from_pretrained(folder / "model")
    examples = sample_examples(demo.generate("demo_span", "validation"), 24)
    agreements = []
    for example, row in zip(examples, rows_of(folder / "predictions.jsonl"), strict=False):
        encoded = tokenizer(
            example["question"], example["context"], truncation="only_second", max_length=64, stride=21,
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        windows = []
        for window, ids in enumerate(encoded["input_ids"]):
            inputs = {key: torch.tensor([encoded[key][window]]) for key in ("token_type_ids", "attention_mask")}
            with torch.no_grad():
                output = model(torch.tensor([ids]), **inputs)
            offsets = torch.tensor(encoded["offset_mapping"][window])
            offsets[[part != 1 for part in encoded.sequence_ids(window)]] = -1
            windows.append((output.start_logits[0].numpy(), output.end_logits[0].numpy(), offsets.numpy()))
        agreements.append(best_answer(example["context"], windows) == row["prediction"])
    # At most one answer may differ, because of a tie within rounding.
    assert len(agreements) == 24
    assert sum(agreements) >= 23


@pytest.mark.parametrize("reg", ["none", "istar"])
def test_checkpoints_open_without_pickled_code(cached_run: Callable[..., Any], reg: str) -> None:
    _, record, folder = cached_run("task=demo", f"reg={reg}")
    names = [f"best-epoch-{record.headline['epoch']}.ckpt", "step-12.ckpt"]
    assert folders_in(folder / "checkpoints") == names
    best, last = (torch.load(folder / "checkpoints" / name, weights_only=True) for name in names)
    assert "optimizer_states" not in best
    assert last["optimizer_states"]
    assert best["epoch"] + 1 == record.headline["epoch"]
    assert last["epoch"] + 1 == len(record.epochs)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(best["state_dict"][f"model.{name}"], value, rtol=0, atol=0)
    shrinkage = [state for key, state in last["callbacks"].items() if "ShrinkageCovariance" in key]
    if reg == "istar":
        assert len(shrinkage) == 1
        covariance = last["penalty"]["process0.penalty.shrinkage_covariance"]
        assert covariance.shape == (model.config.hidden_size,) * 2
        torch.testing.assert_close(covariance, covariance.T)
        assert covariance.trace() > 0
    else:
        assert not shrinkage


def test_the_best_epoch_is_kept_when_it_is_not_the_last(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """No epoch learns. The second flips the signs of the head's weights; the third sets them to 0 and is never best.

    The bias of 1 in the third epoch absorbs the steps of 1e-12, so that all predictions are equal. In the first two
    epochs it is 0: added to scores of 0.001, it would cost them the digits that the comparison needs.
    """
    original_hook = FineTuner.on_train_epoch_start

    def scale_head(self: FineTuner) -> None:
        original_hook(self)
        with torch.no_grad():
            self.model.classifier.weight.mul_((1, -1, 0)[self.current_epoch])  # type: ignore[union-attr, operator]
            self.model.classifier.bias.fill_((0, 0, 1)[self.current_epoch])  # type: ignore[union-attr, operator]

    monkeypatch.setattr(FineTuner, "on_train_epoch_start", scale_head)
    config = small("task=demo_regression", "reg=none", "trainer.max_epochs=3", "optim.lr=1e-12")
    record = run(config)
    values = [epoch["metrics"]["pearson"] for epoch in record.epochs]
    assert values[0] == pytest.approx(-values[1], rel=1e-4)
    assert values[2] == 0
    assert record.headline["value"] == max(values) > 0
    folder = place(config, record)
    rows = rows_of(folder / "predictions.jsonl")
    recomputed_metrics = compute(("pearson",), [row["prediction"] for row in rows], [row["label"] for row in rows])
    assert recomputed_metrics["pearson"] == pytest.approx(max(values))
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    # The weights of the last epoch are only as large as its steps of 1e-12.
    assert model.classifier.weight.abs().max() > 1e-3


def test_held_out_data_choose_and_the_validation_set_is_reported(cached_run: Callable[..., Any]) -> None:
    data_overrides = ("task.limit_train=64", "task.limit_validation=16", "task.validation_fraction=0.25")
    training_overrides = ("trainer.max_epochs=4", "trainer.accumulate_grad_batches=1", "reg=none", "seed=1")
    _, record, folder = cached_run("task=demo_regression", *data_overrides, *training_overrides)
    validation_scores = [epoch["metrics"]["pearson"] for epoch in record.epochs]
    held_out_scores = [epoch["metrics"]["pearson_held_out"] for epoch in record.epochs]
    best_index = held_out_scores.index(max(held_out_scores))
    # The two sets prefer different epochs.
    assert best_index != validation_scores.index(max(validation_scores))
    assert record.headline == {"metric": "pearson", "value": validation_scores[best_index], "epoch": best_index + 1}
    assert record.selection == {"set": "held_out", "metric": "pearson_held_out", "value": held_out_scores[best_index]}
    assert record.selection_value == held_out_scores[best_index]
    assert (record.data["train"], record.data["validation"]) == (48, {"validation": 16, "held_out": 16})
    # The saved predictions are those of the chosen epoch.
    predictions = rows_of(folder / "predictions_held_out.jsonl")
    values, labels = ([row[key] for row in predictions] for key in ("prediction", "label"))
    assert np.corrcoef(values, labels)[0, 1] == pytest.approx(held_out_scores[best_index], abs=1e-6)
    assert "The epoch was chosen by pearson_held_out" in build_run_table(record).caption


def test_the_demo_baseline(cached_run: Callable[..., Any]) -> None:
    _, record, folder = cached_run("task=demo", "reg=istar")
    train = sample_examples(demo.generate("demo", "train"), 48)["label"][:]
    majority = int(sum(train) * 2 > len(train))
    rows = rows_of(folder / "predictions.jsonl")
    accuracy = sum(int(row["label"] == "agree") == majority for row in rows) / 24
    assert record.baseline["accuracy"] == pytest.approx(accuracy)
    assert record.collapsed["validation"] == (len({row["prediction"] for row in rows}) == 1)
    assert record.selection == {"set": "validation", "metric": "accuracy", "value": record.headline["value"]}
    assert cached_run("task=demo_span", "reg=istar")[1].baseline == {}
