"""Whole runs in this process: what they leave, that they can be trusted, and what they refuse."""

import csv
import io
import json
import logging
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

from istar import results
from istar.config import Config
from istar.config.schema import to_dict
from istar.errors import UserError
from istar.models import tiny
from istar.results import RunRecord
from istar.runs import run as run_module
from istar.runs.run import run
from istar.runs.store import load_examples, run_folder
from istar.tasks import demo
from istar.tasks.loading import load_splits
from istar.tasks.metrics import compute
from istar.tasks.specs import TASKS
from istar.tasks.squad import best_answer
from istar.training import FineTuner

Build = Callable[..., Config]
DEMOS = ("demo", "demo_sentence", "demo_regression", "demo_span")
REGS = ("none", "istar", "cosreg")


def place(config: Config, record: RunRecord) -> Path:
    return Path(config.run.root) / record.name


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def logged(folder: Path) -> dict[str, list[float]]:
    """Each column of metrics.csv without its gaps."""
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in table if row[key]] for key in table[0]}


def everything_measured(record: RunRecord) -> list[Any]:
    return [record.headline, record.metrics, record.baseline, record.isotropy, record.epochs, record.collapsed]


def folders_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".locks") if root.exists() else []


@pytest.fixture(scope="module")
def done(composed: Build, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Config, RunRecord, Path]]:
    """Runs that several tests look at and none changes; each is trained once."""
    known: dict[tuple[str, ...], tuple[Config, RunRecord, Path]] = {}

    def get(*overrides: str) -> tuple[Config, RunRecord, Path]:
        if overrides not in known:
            config = composed(
                "task.limit_train=48",
                "task.limit_validation=24",
                "data.batch_size=8",
                "data.eval_batch_size=5",
                "trainer.max_epochs=2",
                "trainer.log_every_n_steps=1",
                "trainer.progress_bar=false",
                "trainer.accelerator=cpu",
                f"run.root={tmp_path_factory.mktemp('done')}",
                *overrides,
            )
            record = run(config)
            known[overrides] = (config, record, place(config, record))
        return known[overrides]

    return get


# ---- what a run leaves


@pytest.mark.parametrize("reg", REGS)
@pytest.mark.parametrize("task", DEMOS)
def test_what_a_run_leaves(done: Callable[..., Any], task: str, reg: str) -> None:
    config, record, folder = done(f"task={task}", f"reg={reg}")
    spec = TASKS[task]
    assert folders_in(folder) == [
        "checkpoints", "config.yaml", "geometry.json", "metrics.csv", "model", "predictions.jsonl", "result.json",
    ]  # fmt: skip
    assert record == results.read(folder)
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
    assert len(record.data["fingerprint"]) >= 16
    assert record.timing["total"] >= record.timing["fit"] > 0
    assert len(record.timing["shrinkage"]) == (2 if reg == "istar" else 0)


@pytest.mark.parametrize("task", DEMOS)
def test_predictions_are_the_validation_set_in_its_order(done: Callable[..., Any], task: str) -> None:
    _, record, folder = done(f"task={task}", "reg=istar")
    spec = TASKS[task]
    examples = demo.generate(task, "validation").select(range(24))
    rows = rows_of(folder / "predictions.jsonl")
    wanted = examples["id"][:] if spec.kind == "span" else list(range(24))
    assert [row["id"] for row in rows] == wanted
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
    # The metrics of the record are those of the file.
    again = compute(spec.metrics, predictions, labels)
    assert {name: record.metrics[name] for name in again} == pytest.approx(again)


@pytest.mark.parametrize("reg", REGS)
def test_logged_keys(done: Callable[..., Any], reg: str) -> None:
    _, record, folder = done("task=demo", f"reg={reg}")
    columns = logged(folder)
    wanted = {"train/loss", "train/task_loss", "train/lr", "train/grad_norm", "val/accuracy", "val/f1", "val/loss"}
    wanted |= {"isotropy/isoscore_star", *(f"isotropy/layer_{layer}/isoscore_star" for layer in range(3))}
    if reg == "istar":
        wanted |= {"train/penalty", "train/isoscore_star", "shrinkage/points", "shrinkage/seconds"}
    assert wanted <= set(columns)
    if reg != "none":
        wanted |= {"train/points"}
    assert {key for key in columns if key.startswith("train/")} <= wanted | {"train/penalty", "train/mean_cosine"} | {
        key for key in columns if "cos" in key
    }
    assert len(columns["train/loss"]) == 12
    if reg == "none":
        assert "train/penalty" not in columns
        assert columns["train/loss"] == columns["train/task_loss"]
    else:
        sums = [a + b for a, b in zip(columns["train/task_loss"], columns["train/penalty"], strict=True)]
        assert columns["train/loss"] == pytest.approx(sums, rel=1e-5)
    # Before training and after each epoch.
    assert columns["isotropy/isoscore_star"] == pytest.approx(
        [record.isotropy["before"]["union"], *(epoch["isotropy"]["union"] for epoch in record.epochs)], rel=1e-5
    )


def test_istar_logs_lambda_times_one_minus_isoscore(done: Callable[..., Any]) -> None:
    _, _, folder = done("task=demo", "reg=istar", "reg.lambda=3")
    columns = logged(folder)
    expected = [3 * (1 - score) for score in columns["train/isoscore_star"]]
    assert columns["train/penalty"] == pytest.approx(expected, rel=1e-5)


def test_zeta_is_logged_where_it_is_estimated(done: Callable[..., Any]) -> None:
    _, _, folder = done("task=demo", "reg=istar", "reg.zeta=auto")
    zetas = logged(folder)["train/zeta"]
    assert len(zetas) == len(logged(folder)["train/loss"])
    assert all(0 < zeta <= 1 for zeta in zetas)
    assert len(set(zetas)) > 1
    _, _, given = done("task=demo", "reg=istar", "reg.lambda=3")
    assert "train/zeta" not in logged(given)


# ---- the saved model


@pytest.mark.parametrize("task", ["demo", "demo_sentence", "demo_regression"])
def test_the_saved_model_says_what_the_predictions_say(done: Callable[..., Any], task: str) -> None:
    _, _, folder = done(f"task={task}", "reg=istar")
    spec = TASKS[task]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert model.dtype == torch.float32
    assert list(model.config.id2label.values()) == list(spec.labels or ["score"])
    assert model.config.label2id == {name: number for number, name in model.config.id2label.items()}
    examples = demo.generate(task, "validation")
    for number, row in enumerate(rows_of(folder / "predictions.jsonl")):
        texts = [examples[number][column] for column in spec.text_columns]
        with torch.no_grad():
            logits = model(**tokenizer(*texts, return_tensors="pt")).logits[0]
        if spec.kind == "classification":
            assert logits.softmax(0).tolist() == pytest.approx(row["scores"], abs=1e-5)
            assert model.config.id2label[int(logits.argmax())] == row["prediction"]
        else:
            assert logits.item() == pytest.approx(row["prediction"], abs=1e-4)


def test_the_saved_span_model_says_what_the_predictions_say(done: Callable[..., Any]) -> None:
    _, _, folder = done("task=demo_span", "reg=istar")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForQuestionAnswering.from_pretrained(folder / "model")
    examples = demo.generate("demo_span", "validation")
    agreeing = []
    for example, row in zip(examples, rows_of(folder / "predictions.jsonl"), strict=False):
        encoded = tokenizer(
            example["question"],
            example["context"],
            truncation="only_second",
            max_length=64,
            stride=21,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        windows = []
        for window, ids in enumerate(encoded["input_ids"]):
            inputs = {key: torch.tensor([encoded[key][window]]) for key in ("token_type_ids", "attention_mask")}
            with torch.no_grad():
                output = model(torch.tensor([ids]), **inputs)
            offsets = torch.tensor(encoded["offset_mapping"][window])
            offsets[[part != 1 for part in encoded.sequence_ids(window)]] = -1
            windows.append((output.start_logits[0].numpy(), output.end_logits[0].numpy(), offsets.numpy()))
        agreeing.append(best_answer(example["context"], windows) == row["prediction"])
    # Ties within rounding may fall either way, once.
    assert len(agreeing) == 24
    assert sum(agreeing) >= 23


@pytest.mark.parametrize("reg", REGS)
def test_checkpoints_open_without_pickled_code(done: Callable[..., Any], reg: str) -> None:
    _, record, folder = done("task=demo", f"reg={reg}")
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
        covariance = shrinkage[0]["penalties"][0]["shrinkage_covariance"]
        assert covariance.shape == (model.config.hidden_size,) * 2
        torch.testing.assert_close(covariance, covariance.T)
        assert covariance.trace() > 0
    else:
        assert not shrinkage


def test_the_best_epoch_is_kept_when_it_is_not_the_last(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """No epoch learns; the second turns the head's sign and the third silences it, so the third is never the best."""
    original = FineTuner.on_train_epoch_start

    def turn(self: FineTuner) -> None:
        original(self)
        with torch.no_grad():
            self.model.classifier.weight.mul_((1, -1, 0)[self.current_epoch])  # type: ignore[union-attr, operator]
            self.model.classifier.bias.fill_(1)  # type: ignore[union-attr, operator]

    monkeypatch.setattr(FineTuner, "on_train_epoch_start", turn)
    config = small("task=demo_regression", "reg=none", "trainer.max_epochs=3", "optim.lr=1e-12")
    record = run(config)
    values = [epoch["metrics"]["pearson"] for epoch in record.epochs]
    assert values[0] == pytest.approx(-values[1], rel=1e-4)
    assert values[2] == 0
    assert record.headline["value"] == max(values) > 0
    folder = place(config, record)
    rows = rows_of(folder / "predictions.jsonl")
    from_file = compute(("pearson",), [row["prediction"] for row in rows], [row["label"] for row in rows])
    assert from_file["pearson"] == pytest.approx(max(values))
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert model.classifier.weight.abs().max() > 0


# ---- a run is a value


def test_the_same_call_returns_the_finished_run(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    first = run(config)
    before = {path: path.stat().st_mtime_ns for path in Path(config.run.root).rglob("*")}
    # No model is loaded and nothing is trained.
    monkeypatch.setattr(run_module, "_assemble", None)
    console = Console(width=120, file=io.StringIO())
    second = run(small("logger=csv", "trainer.log_every_n_steps=5", "data.num_workers=0"), console)
    assert second == first
    assert {path: path.stat().st_mtime_ns for path in Path(config.run.root).rglob("*")} == before
    assert "run.overwrite=true" in console.file.getvalue()  # type: ignore[attr-defined]


def test_ctrl_c_is_the_callers_again_when_a_run_is_done(small: Build) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    run(small())
    assert {number: signal.getsignal(number) for number in before} == before


def test_overwrite_keeps_the_old_folder(small: Build, caplog: pytest.LogCaptureFixture) -> None:
    config = small()
    record = run(config)
    (place(config, record) / "notes.txt").write_text("mine")
    again = run(small("run.overwrite=true"))
    assert everything_measured(again) == everything_measured(record)
    assert folders_in(Path(config.run.root)) == [record.name, f"{record.name}.old-1"]
    assert (Path(config.run.root) / f"{record.name}.old-1" / "notes.txt").read_text() == "mine"
    assert not (place(config, record) / "notes.txt").exists()
    assert "it is kept as" in caplog.text
    run(small("run.overwrite=true"))
    assert f"{record.name}.old-2" in folders_in(Path(config.run.root))


def test_a_finished_run_without_what_is_asked_for_is_not_passed_off(small: Build) -> None:
    record = run(small("run.save_model=false"))
    config = small()
    assert "model" not in folders_in(place(config, record))
    with pytest.raises(UserError, match=r"without model/; run\.overwrite=true"):
        run(config)
    assert run(small("run.save_model=false")) == record


def test_checkpoints_do_change_the_run(small: Build) -> None:
    """Without them the last epoch is the result rather than the best one: not the same run."""
    with_them, without = run(small()), run(small("trainer.checkpoints=false"))
    assert with_them.name != without.name


@pytest.mark.parametrize("task", ["demo", "demo_span"])
def test_the_seed_decides_everything(small: Build, tmp_path: Path, task: str) -> None:
    def predictions(*overrides: str) -> tuple[list[Any], list[Any]]:
        config = small(f"task={task}", "reg=istar", "trainer.max_epochs=2", *overrides)
        record = run(config)
        return everything_measured(record), rows_of(place(config, record) / "predictions.jsonl")

    first = predictions()
    torch.rand(3)
    second = predictions(f"run.root={tmp_path / 'elsewhere'}", f"data.cache_dir={tmp_path / 'cache'}")
    assert first == second
    other = predictions("seed=43")
    assert other[0][3]["before"] != first[0][3]["before"]
    assert other[1] != first[1] or task == "demo_span"


def test_the_evaluation_batch_matters_only_to_rounding(done: Callable[..., Any]) -> None:
    _, one, _ = done("task=demo", "reg=istar")
    _, two, _ = done("task=demo", "reg=istar", "data.eval_batch_size=24")
    # They change the rounding of the shrinkage covariance, and its padding where that counts.
    assert one.name != two.name
    assert two.metrics == pytest.approx(one.metrics, rel=1e-4)
    assert two.isotropy["after"] == pytest.approx(one.isotropy["after"], rel=1e-3)


# ---- the penalty


@pytest.mark.parametrize("reg", ["istar", "cosreg"])
def test_lambda_0_is_no_regularizer(done: Callable[..., Any], reg: str) -> None:
    _, plain, plain_folder = done("task=demo", "reg=none")
    _, zero, zero_folder = done("task=demo", f"reg={reg}", "reg.lambda=0")
    assert everything_measured(zero) == everything_measured(plain)
    assert rows_of(zero_folder / "predictions.jsonl") == rows_of(plain_folder / "predictions.jsonl")
    assert logged(zero_folder)["train/loss"] == logged(plain_folder)["train/loss"]


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


# ---- collapse and baselines


def table(folder: Path, name: str, *lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(line.replace("|", "\t") + "\n" for line in lines), encoding="utf-8")


def rte(folder: Path, train: int = 32, validation: int = 12, positive: Callable[[int], bool] | None = None) -> Path:
    """RTE's own files; by default every other pair is an entailment."""
    is_positive = positive or (lambda number: number % 2 == 0)

    def line(split: str, number: int) -> str:
        label = "entailment" if is_positive(number) else "not_entailment"
        return f"{number}|the {split} lamp number {number} is old .|a lamp is old .|{label}"

    table(folder / "RTE", "train.tsv", "index|sentence1|sentence2|label", *(line("train", n) for n in range(train)))
    table(folder / "RTE", "dev.tsv", "index|sentence1|sentence2|label", *(line("dev", n) for n in range(validation)))
    tests = (f"{n}|some lamp number {n} is old .|a lamp is old ." for n in range(7))
    table(folder / "RTE", "test.tsv", "index|sentence1|sentence2", *tests)
    return folder


TINY = ("model=tiny",)


def test_collapse_is_flagged_and_the_baseline_is_the_majority(small: Build, tmp_path: Path) -> None:
    """Training pairs are nearly all entailments, and a third of the validation pairs are."""
    data = tmp_path / "glue_data"
    rte(data, train=64, positive=lambda number: number % 16 != 0)
    rte(tmp_path / "other", validation=12, positive=lambda number: number % 3 == 0)
    (data / "RTE" / "dev.tsv").write_bytes((tmp_path / "other" / "RTE" / "dev.tsv").read_bytes())
    config = small(*TINY, "task=rte", f"task.data_dir={data}", "task.limit_train=64", "reg=none", "optim.lr=5e-3")
    record = run(config)
    predicted = {row["prediction"] for row in rows_of(place(config, record) / "predictions.jsonl")}
    assert predicted == {"entailment"}
    assert record.collapsed == {"validation": True}
    assert record.baseline == {"accuracy": pytest.approx(1 / 3)}
    assert record.headline["value"] == pytest.approx(1 / 3)


def test_the_demo_baseline(done: Callable[..., Any]) -> None:
    _, record, folder = done("task=demo", "reg=istar")
    train = demo.generate("demo", "train").select(range(48))["label"][:]
    majority = int(sum(train) * 2 > len(train))
    golds = [int(row["label"] == "agree") for row in rows_of(folder / "predictions.jsonl")]
    assert record.baseline["accuracy"] == pytest.approx(sum(gold == majority for gold in golds) / 24)
    assert record.collapsed["validation"] == (
        len({row["prediction"] for row in rows_of(folder / "predictions.jsonl")}) == 1
    )
    assert done("task=demo_span", "reg=istar")[1].baseline == {}


# ---- benchmarks' own files


def test_mnli_has_two_validation_sets(small: Build, tmp_path: Path) -> None:
    labels = ("entailment", "neutral", "contradiction")
    head = "index|sentence1|sentence2|gold_label"

    def lines(what: str, count: int) -> list[str]:
        return [head, *(f"{n}|{what} lamp {n} is old .|a lamp is new .|{labels[n % 3]}" for n in range(count))]

    folder = tmp_path / "glue_data" / "MNLI"
    table(folder, "train.tsv", *lines("the", 32))
    table(folder, "dev_matched.tsv", *lines("this", 9))
    table(folder, "dev_mismatched.tsv", *lines("that", 13))
    table(folder, "test_matched.tsv", "index|sentence1|sentence2", *(f"{n}|my lamp {n} .|old ." for n in range(5)))
    table(folder, "test_mismatched.tsv", "index|sentence1|sentence2", *(f"{n}|your lamp {n} .|old ." for n in range(6)))
    config = small(
        *TINY, "task=mnli", f"task.data_dir={tmp_path / 'glue_data'}", "data.eval_batch_size=4", "task.submission=true",
        "trainer.max_epochs=2",
    )  # fmt: skip
    record = run(config)
    result = place(config, record)
    assert {"accuracy", "accuracy_mismatched"} <= set(record.metrics)
    assert record.headline["metric"] == "accuracy"
    assert record.collapsed.keys() == {"validation_matched", "validation_mismatched"}
    assert record.data["validation"] == {"validation_matched": 9, "validation_mismatched": 13}
    for name, metric, count in (("", "accuracy", 9), ("_mismatched", "accuracy_mismatched", 13)):
        rows = rows_of(result / f"predictions{name}.jsonl")
        assert [row["id"] for row in rows] == list(range(count))
        assert [row["label"] for row in rows] == [labels[n % 3] for n in range(count)]
        right = sum(row["prediction"] == row["label"] for row in rows)
        assert record.metrics[metric] == pytest.approx(right / count)
    assert {"val/accuracy", "val/accuracy_mismatched"} <= set(logged(result))
    assert len((result / "submission" / "MNLI-m.tsv").read_text().splitlines()) == 6
    assert len((result / "submission" / "MNLI-mm.tsv").read_text().splitlines()) == 7


def test_submission(small: Build, tmp_path: Path) -> None:
    data = rte(tmp_path / "glue_data")
    config = small(*TINY, "task=rte", f"task.data_dir={data}", "task.submission=true", "data.eval_batch_size=3")
    record = run(config)
    lines = (place(config, record) / "submission" / "RTE.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in lines[1:]] == [str(number) for number in range(7)]
    assert {line.split("\t")[1] for line in lines[1:]} <= {"entailment", "not_entailment"}
    # They are the saved model's own.
    tokenizer = AutoTokenizer.from_pretrained(place(config, record) / "model")
    model = AutoModelForSequenceClassification.from_pretrained(place(config, record) / "model")
    tests = load_splits(TASKS["rte"], data, ["test"])["test"]
    for line, row in zip(lines[1:], tests, strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(row["sentence1"], row["sentence2"], return_tensors="pt")).logits[0]
        if abs(float(logits[0] - logits[1])) > 1e-4:
            assert line.split("\t")[1] == model.config.id2label[int(logits.argmax())]


def test_a_submission_asked_for_later_is_not_forgotten(small: Build, tmp_path: Path) -> None:
    more = (*TINY, "task=rte", f"task.data_dir={rte(tmp_path / 'glue_data')}")
    run(small(*more))
    with pytest.raises(UserError, match=r"without submission/; run\.overwrite=true"):
        run(small(*more, "task.submission=true"))


def test_the_place_of_the_data_does_not_count_but_its_content_does(small: Build, tmp_path: Path) -> None:
    first, copy = rte(tmp_path / "first"), rte(tmp_path / "copy")
    other = rte(tmp_path / "other", positive=lambda number: number % 2 == 1)
    records = [run(small(*TINY, "task=rte", f"task.data_dir={place}")) for place in (first, copy, other)]
    assert records[0].name == records[1].name != records[2].name


def test_overlap_is_counted_and_told(small: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = rte(tmp_path / "glue_data")
    lines = (data / "RTE" / "train.tsv").read_text().splitlines()
    with (data / "RTE" / "dev.tsv").open("a") as file:
        file.write("\n".join(lines[1:4]) + "\n")
    with caplog.at_level(logging.WARNING):
        record = run(small(*TINY, "task=rte", f"task.data_dir={data}"))
    assert record.data["overlap"] == {"validation": 3}
    assert "3 of the 15 examples of validation are also in the training data" in caplog.text
    caplog.clear()
    assert run(small()).data["overlap"] == {"validation": 0}
    assert "are also in the training data" not in caplog.text


# ---- switches


def test_early_stopping(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without learning no epoch is better than the first: the third is the last."""
    config = small("reg=none", "trainer.max_epochs=9", "trainer.early_stopping=2", "optim.lr=1e-12")
    record = run(config)
    assert [epoch["epoch"] for epoch in record.epochs] == [1, 2, 3]
    assert record.headline["epoch"] == 1


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
    first = demo.generate("demo_regression", "validation")[0]
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


# ---- what goes wrong


def test_a_failing_training_is_told_and_goes_on(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FineTuner.training_step

    def fail(self: FineTuner, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 3:
            raise RuntimeError("out of\nluck")
        return original(self, batch, batch_idx)

    config = small("trainer.max_epochs=2", "trainer.checkpoint_every_n_steps=1")
    monkeypatch.setattr(FineTuner, "training_step", fail)
    with pytest.raises(RuntimeError, match="luck"):
        run(config)
    monkeypatch.undo()
    [name] = folders_in(Path(config.run.root))
    folder = Path(config.run.root) / name
    record = results.read(folder)
    assert record.status == "failed"
    assert record.error == "out of luck"
    assert record.config == to_dict(config)
    assert folders_in(folder / "checkpoints") == ["step-2.ckpt", "step-3.ckpt"]
    assert not {"model", ".model", "predictions.jsonl", "geometry.json"} & set(folders_in(folder))
    again = run(config)
    assert again.status == "finished"
    assert folders_in(Path(config.run.root)) == [again.name] == [name]
    assert results.read(folder).status == "finished"


def test_a_model_that_diverges_is_not_a_finished_run(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FineTuner.on_train_epoch_start

    def break_it(self: FineTuner) -> None:
        original(self)
        with torch.no_grad():
            self.model.classifier.weight.fill_(math.nan)  # type: ignore[union-attr, operator]

    monkeypatch.setattr(FineTuner, "on_train_epoch_start", break_it)
    config = small("reg=none")
    with pytest.raises(Exception, match=r"diverged|finite|nan|NaN"):
        run(config)
    [name] = folders_in(Path(config.run.root))
    assert results.read(Path(config.run.root) / name).status == "failed"
    assert not (Path(config.run.root) / name / "model").exists()


REFUSED = [
    (["task.name=rtee"], "did you mean rte?"),
    (["task.submission=true"], "no submission file"),
    (["task.data_dir=/nowhere"], "task.data_dir=/nowhere does not exist"),
    (["model=auto", "model.name=/nowhere"], "there is no such folder"),
    (["reg.layers=[7]"], "layer 7 does not exist"),
    (["task.max_length=4"], "max_length=4 is too short"),
    (["trainer.precision=16-mixed", "trainer.accelerator=cpu"], "needs a CUDA device"),
    (["trainer.accelerator=foo"], "refuses its settings"),
    (["trainer.devices=0"], "refuses its settings"),
    (["trainer.devices=abc"], "refuses its settings"),
    (["trainer.num_nodes=0"], "refuses its settings"),
    (["trainer.devices=2", "trainer.strategy=ddp"], "needs more processes than this one"),
    (["logger=wandb", "trainer.accelerator=foo"], "refuses its settings"),
]


@pytest.mark.parametrize(("overrides", "told"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_refused_before_anything_is_written(small: Build, overrides: list[str], told: str) -> None:
    config = small(*overrides)
    with pytest.raises(UserError) as caught:
        run(config)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert folders_in(Path(config.run.root)) == []


def test_labels_that_are_none_of_the_tasks(small: Build, tmp_path: Path) -> None:
    data = rte(tmp_path / "glue_data")
    with (data / "RTE" / "dev.tsv").open("a") as file:
        file.write("9\ta lamp .\ta lamp .\tmaybe\n")
    config = small(*TINY, "task=rte", f"task.data_dir={data}")
    with pytest.raises(UserError, match="maybe"):
        run(config)
    assert folders_in(Path(config.run.root)) == []


def test_a_foreign_result_is_not_overwritten(small: Build) -> None:
    config = small()
    record = run(config)
    path = place(config, record) / results.RESULT
    path.write_text("{}")
    with pytest.raises(UserError, match="is not a result that istar wrote"):
        run(config)
    assert path.read_text() == "{}"


def test_limits_beyond_the_data(small: Build) -> None:
    config = small("task.limit_train=null", "task.limit_validation=100000", "trainer.fast_dev_run=true")
    record = run(config)
    assert record.data["train"] == demo.SIZES["train"]


def test_devices_count_for_the_name_by_their_number(small: Build) -> None:
    settings = [small(f"trainer.devices={devices}") for devices in ("1", "auto", "'1'")]
    names = {run_folder(config, "data", "model").name for config in settings}
    assert len(names) == 1
    assert run_folder(small("trainer.devices=2"), "data", "model").name not in names


def test_examples_are_the_first_ones(small: Build) -> None:
    config = small("task.limit_train=3", "task.limit_validation=2")
    examples = load_examples(TASKS["demo"], config.task)
    assert isinstance(examples.train, Dataset)
    assert examples.train[:] == demo.generate("demo", "train")[:3]
    assert [split[:] for split in examples.validation] == [demo.generate("demo", "validation")[:2]]
    assert examples.test == []


def test_nothing_is_left_in_the_logging_of_the_host(small: Build) -> None:
    levels = [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")]
    run(small())
    assert [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")] == levels
    assert len(tiny.tokenizer(demo.vocabulary())) > 0
