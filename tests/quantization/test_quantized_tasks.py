"""`istar quantize` on all kinds of tasks and on adapters, and what it recomputes when files have changed."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from istar.cli.main import main
from istar.finetune.runs.run import run
from istar.finetune.training.data import build_evaluation_loader
from istar.finetune.training.module import inputs_without_labels
from istar.inputs import pretrained
from istar.quantization import saved_runs
from istar.quantization.form_scores import calibrate_input_ranges, score_model
from istar.quantization.linear_layers import Form, encoder_linears
from istar.records import results
from istar.records.config import Config, ModelConfig
from istar.records.task_specs import TASKS
from tests.conftest import SMALL
from tests.finetune.runs.artifacts import table
from tests.quantization.test_linear_layers import quantize_with_torch

LABELS = ("entailment", "neutral", "contradiction")


def save_random_model(folder: Path, task: str) -> Path:
    """Save a random tiny BERT with a head for a task."""
    spec, config = TASKS[task], ModelConfig(name="tiny", pretrained=False)
    tokenizer = pretrained.load_tokenizer(config)
    torch.manual_seed(0)
    model = pretrained.load_model(config, spec, pretrained.load_config(config, spec, tokenizer), tokenizer)
    with torch.no_grad():
        for weight in model.parameters():
            # Predictions then differ between texts.
            weight.mul_(10 if weight.dim() == 2 else 1)
    pretrained.save(model, tokenizer, folder)
    return folder


def make_mnli_lines(num_lines: int, get_label: Callable[[int], str]) -> list[str]:
    """Return lines of an MNLI file; `get_label` returns the label of an index."""
    texts = [
        f"{index}|the lamp {index} is {('old', 'new', 'red')[index % 3]} .|a lamp is new ."
        for index in range(num_lines)
    ]
    return ["index|sentence1|sentence2|gold_label", *(f"{text}|{get_label(index)}" for index, text in enumerate(texts))]


def write_mnli(root: Path, get_matched_label: Callable[[int], str]) -> Path:
    """Write MNLI files with chosen labels in the matched set and all labels in the other sets; returns the root."""
    folder = root / "MNLI"
    table(folder, "train.tsv", *make_mnli_lines(12, lambda index: LABELS[index % 3]))
    table(folder, "dev_matched.tsv", *make_mnli_lines(10, get_matched_label))
    table(folder, "dev_mismatched.tsv", *make_mnli_lines(8, lambda index: LABELS[index % 3]))
    return root


def quantize(*arguments: str | Path) -> list[dict[str, str]]:
    """Run the command and return the rows of its table of models."""
    assert main(["quantize", *map(str, arguments)]) == 0
    out = Path(arguments[arguments.index("--out") + 1])
    with (out / "tables" / "runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_changed_data_file_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The matched set of MNLI gives the score, and scores are kept only for the data they were computed on."""
    model, data = save_random_model(tmp_path / "model", "mnli"), write_mnli(tmp_path / "data", lambda index: LABELS[0])
    command = (model, "--task", "mnli", "--data-dir", data, "--forms", "w8a8", "--out", tmp_path / "out")
    shares = []
    for label in LABELS:
        write_mnli(data, lambda index, label=label: label)
        [row] = quantize(*command)
        assert "1 of 1" in capsys.readouterr().err
        assert row["metric"] == "accuracy"
        shares.append(float(row["float32"]))
    # Each text is counted under the one label that the model predicts.
    assert sum(shares) == pytest.approx(100)
    quantize(*command)
    assert "1 of 1" not in capsys.readouterr().err
    # Training data calibrate the scales, so scores are recomputed when they change.
    table(data / "MNLI", "train.tsv", *make_mnli_lines(13, lambda index: LABELS[index % 3]))
    quantize(*command)
    assert "1 of 1" in capsys.readouterr().err


def test_regression_has_the_correlation_of_torch_quantization(tmp_path: Path) -> None:
    folder, task = save_random_model(tmp_path / "model", "demo_regression"), "demo_regression"
    loaded = saved_runs.load_model_and_data(
        saved_runs.saved_model_for_task(folder, task, None), num_calibration=8, seed=0
    )
    form = Form(6, 6)
    expected = {}
    labels = np.array(loaded.evaluator.examples["label"])
    quantized = quantize_with_torch(loaded.model, form, calibrate_input_ranges(loaded, encoder_linears(loaded.model)))
    for name, model in {"float32": loaded.model, "w6a6": quantized}.items():
        module: Any = model
        batches = build_evaluation_loader(loaded.validation, loaded.collate, 16, range(len(loaded.validation)))
        with torch.no_grad():
            values = torch.cat([module(**inputs_without_labels(batch)).logits[:, 0] for batch in batches])
        expected[name] = scipy.stats.pearsonr(values.double().numpy(), labels).statistic
    scores = score_model(loaded, [form])
    assert scores.metric == "pearson"
    assert scores.floating == pytest.approx(expected["float32"], abs=1e-6)
    assert scores.forms["w6a6"] == pytest.approx(expected["w6a6"], abs=1e-3)
    [row] = quantize(
        folder, "--task", task, "--forms", "w6a6,int8", "--calibration", "8", "--out", tmp_path / "out"
    )  # fmt: skip
    assert float(row["float32"]) == pytest.approx(100 * expected["float32"], abs=1e-4)
    assert float(row["w6a6_drop"]) == pytest.approx(100 * (expected["float32"] - expected["w6a6"]), abs=0.2)
    assert -100 <= float(row["int8"]) <= 100


@pytest.mark.slow
def test_a_run_of_question_answering(composed: Callable[..., Config], tmp_path: Path) -> None:
    options = (*SMALL, "task=demo_span", "reg=none", "optim.lr=0.003", "data.eval_batch_size=7")
    record = run(composed(*options, f"run.root={tmp_path / 'runs'}"))
    forms = ("--forms", "w16a16,w3a3,int8", "--calibration", "8")
    [row] = quantize(tmp_path / "runs", *forms, "--out", tmp_path / "out")
    assert row["metric"] == "f1"
    assert float(row["float32"]) == pytest.approx(100 * record.metrics["f1"])
    assert float(row["w16a16"]) == pytest.approx(float(row["float32"]), abs=2)
    for form in ("w3a3", "int8"):
        assert float(row[f"{form}_drop"]) == pytest.approx(float(row["float32"]) - float(row[form]))


@pytest.mark.slow
def test_a_run_on_mnli_has_the_score_of_the_matched_set(composed: Callable[..., Config], tmp_path: Path) -> None:
    data = write_mnli(tmp_path / "data", lambda index: LABELS[index % 2])
    options = (*SMALL, "task=mnli", "model=tiny", f"task.data_dir={data}", "reg=none", "task.submission=false")
    record = run(composed(*options, f"run.root={tmp_path / 'runs'}"))
    assert {"accuracy", "accuracy_mismatched"} <= set(record.metrics)
    assert record.metrics["accuracy"] != record.metrics["accuracy_mismatched"]
    [row] = quantize(tmp_path / "runs", "--forms", "w8a8", "--calibration", "4", "--out", tmp_path / "out")
    assert float(row["float32"]) == pytest.approx(100 * record.metrics["accuracy"])


@pytest.mark.slow
def test_a_run_with_adapters(
    composed: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The adapters are merged into their base, whose weights belong to what identifies the model."""
    pytest.importorskip("peft")
    base = save_random_model(tmp_path / "base", "demo")
    options = (*SMALL, "task=demo", "model=auto", f"model.name={base}", "model.lora=true", "reg=none")
    record = run(composed(*options, "optim.lr=0.01", f"run.root={tmp_path / 'runs'}"))
    [folder] = [path.parent for path in (tmp_path / "runs").glob(f"*/{results.RESULT}")]
    assert (folder / "model" / "adapter_config.json").is_file()
    command = ("--forms", "w8a8", "--calibration", "4", "--out", tmp_path / "out")
    [row] = quantize(folder, *command)
    assert float(row["float32"]) == pytest.approx(100 * record.metrics["accuracy"])
    single_command = ("--task", "demo", "--forms", "w16a16", "--calibration", "4", "--out", tmp_path / "single")
    [row] = quantize(folder / "model", *single_command)
    assert float(row["w16a16"]) == pytest.approx(float(row["float32"]), abs=2)
    capsys.readouterr()
    quantize(folder, *command)
    assert "1 of 1" not in capsys.readouterr().err
    config = ModelConfig(name=str(base))
    tokenizer = pretrained.load_tokenizer(config)
    model = pretrained.load_encoder(config, tokenizer, torch.float32)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    pretrained.save(model, tokenizer, base)
    quantize(folder, *command)
    assert "1 of 1" in capsys.readouterr().err
