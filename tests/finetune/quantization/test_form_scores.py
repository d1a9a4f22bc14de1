"""`istar quantize` on tiny runs, checked against torch's fake quantization, plain numpy and SciPy."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

from istar.cli.main import main
from istar.errors import UserError
from istar.finetune.quantization import form_scores
from istar.finetune.quantization.form_scores import SavedModel, calibrate_input_ranges, score_model
from istar.finetune.quantization.linear_layers import Form, encoder_linears, forward_observed
from istar.finetune.runs.run import run
from istar.finetune.training.data import build_evaluation_loader
from istar.finetune.training.module import inputs_without_labels, token_mask
from istar.inputs import pretrained
from istar.records import results
from istar.records.config import Config, ModelConfig
from istar.records.task_specs import TASKS
from tests.conftest import SMALL
from tests.finetune.quantization.test_linear_layers import quantize_with_torch
from tests.finetune.runs.artifacts import table

LABELS = ("entailment", "neutral", "contradiction")


@pytest.fixture(scope="module")
def run_folders(composed: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train a run of classification and one of regression; return their folders by task."""
    root = tmp_path_factory.mktemp("quantized_runs")
    folders = {}
    for task in ("demo", "demo_regression"):
        record = run(composed(*SMALL, f"task={task}", "reg=none", f"run.root={root}", "optim.lr=0.003"))
        folders[task] = root / record.name
    return folders


@pytest.fixture(scope="module")
def saved_models(run_folders: dict[str, Path]) -> dict[str, SavedModel]:
    return {
        task: form_scores.load_saved_model(path, results.read_result(path), 8, 0) for task, path in run_folders.items()
    }


def compute_logits(saved: SavedModel, model: Any) -> np.ndarray:
    """Return the logits of the validation rows in their order, in batches of another size than the command's."""
    batches = build_evaluation_loader(saved.validation, saved.collate, 5, range(len(saved.validation)))
    with torch.no_grad():
        return torch.cat([model(**inputs_without_labels(batch)).logits for batch in batches]).double().numpy()


@pytest.mark.parametrize("task", [pytest.param("demo", marks=pytest.mark.slow), "demo_regression"])
def test_scores_are_those_of_torch_quantization(
    run_folders: dict[str, Path], saved_models: dict[str, SavedModel], task: str
) -> None:
    saved, form = saved_models[task], Form(4, 4)
    largest = calibrate_input_ranges(saved, encoder_linears(saved.model))
    labels = np.array(saved.evaluator.examples["label"])

    def score(model: Any) -> float:
        logits = compute_logits(saved, model)
        if task == "demo":
            return float(100 * np.mean(logits.argmax(1) == labels))
        return float(100 * scipy.stats.pearsonr(logits[:, 0], labels).statistic)

    scores = score_model(saved, [form])
    record = results.read_result(run_folders[task])
    assert scores["metric"] == record.headline["metric"]
    assert scores["float32"] == pytest.approx(100 * record.headline["value"], abs=1e-4)
    assert scores["float32"] == pytest.approx(score(saved.model), abs=0.01)
    assert scores["w4a4"] == pytest.approx(score(quantize_with_torch(saved.model, form, largest)), abs=0.2)
    assert scores["w4a4_drop"] == pytest.approx(scores["float32"] - scores["w4a4"])


def test_the_calibration_is_a_sample_of_training_examples(
    run_folders: dict[str, Path], saved_models: dict[str, SavedModel]
) -> None:
    """Each row passes in a separate batch, so without padding; the validation data have other ranges."""
    saved, folder = saved_models["demo"], run_folders["demo"]
    layers = encoder_linears(saved.model)
    largest_by_part: dict[str, dict[str, float]] = {"calibration": {}, "validation": {}}
    for part, largest_by_layer in largest_by_part.items():
        for row in getattr(saved, part):
            batch = saved.collate([row])

            def observe(name: str, points: torch.Tensor, largest: dict[str, float] = largest_by_layer) -> None:
                largest[name] = max(largest.get(name, 0.0), points.abs().max().item())

            with torch.no_grad():
                forward_observed(saved.model, layers, inputs_without_labels(batch), token_mask(batch), observe)
    ranges = {name: value.item() for name, value in calibrate_input_ranges(saved, layers).items()}
    assert ranges == pytest.approx(largest_by_part["calibration"], rel=1e-5)
    assert ranges != pytest.approx(largest_by_part["validation"], rel=1e-3)
    all_rows = form_scores.load_saved_model(folder, results.read_result(folder), 32, 0).calibration
    training_texts = [tuple(row["input_ids"].tolist()) for row in all_rows]
    sampled_texts = [tuple(row["input_ids"].tolist()) for row in saved.calibration]
    assert len(training_texts) == 32
    assert len(sampled_texts) == 8
    assert set(sampled_texts) <= set(training_texts)
    assert sampled_texts != training_texts[:8]


def test_the_activations_are_those_of_the_linear_layers(saved_models: dict[str, SavedModel]) -> None:
    saved = saved_models["demo"]
    layers = encoder_linears(saved.model)
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    states = []
    with torch.no_grad():
        for row in saved.validation:
            batch = saved.collate([row])
            arguments = {**inputs_without_labels(batch), "output_hidden_states": True}
            output = forward_observed(
                saved.model, layers, arguments, token_mask(batch), lambda name, rows: inputs[name].append(rows)
            )
            states.append(output.hidden_states[-1][0])
    points = {name: torch.cat(rows).double().numpy() for name, rows in inputs.items()}
    measured = form_scores.measure_activations(saved, layers)
    kurtosis = [scipy.stats.kurtosis(rows, axis=1).mean() for rows in points.values()]
    assert measured["kurtosis"] == pytest.approx(np.mean(kurtosis), rel=1e-4)
    assert measured["largest_activation"] == pytest.approx(max(abs(rows).max() for rows in points.values()), rel=1e-5)
    eigenvalues = np.linalg.eigvalsh(np.cov(torch.cat(states).double().numpy().T))
    ratio = eigenvalues.sum() ** 2 / (eigenvalues**2).sum()
    assert measured["isoscore"] == pytest.approx((ratio - 1) / (len(eigenvalues) - 1), rel=1e-4)


def test_a_diverged_model_is_named(saved_models: dict[str, SavedModel]) -> None:
    model: Any = saved_models["demo"].model
    bias = model.classifier.bias
    value = bias.detach().clone()
    with torch.no_grad():
        bias.fill_(float("nan"))
    try:
        with pytest.raises(UserError, match="the model has diverged"):
            score_model(saved_models["demo"], [Form(8, 8)])
    finally:
        with torch.no_grad():
            bias.copy_(value)


def test_other_data_than_those_of_the_run_are_refused(run_folders: dict[str, Path]) -> None:
    record = results.read_result(run_folders["demo"])
    changed_record = results.RunRecord(**{**vars(record), "data": {**record.data, "fingerprint": "0"}})
    with pytest.raises(UserError, match="--data-dir"):
        form_scores.load_saved_model(run_folders["demo"], changed_record, 4, 0)


def test_the_command(run_folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is named twice counts once, and those without a model or a readable record are left out."""
    demo, regression = run_folders.values()
    without_model = tmp_path / "runs" / "without-model"
    shutil.copytree(demo, without_model, ignore=shutil.ignore_patterns("model"))
    damaged = shutil.copytree(demo, tmp_path / "runs" / "damaged")
    (damaged / results.RESULT).write_text("{")
    out = tmp_path / "out"
    folders = [str(folder) for folder in (demo, demo.parent, tmp_path / "runs")]
    assert main(["quantize", *folders, "--forms", "w8a8,w3a3", "--calibration", "4", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert f"left out: {without_model}: the run has saved no model" in captured.err
    assert "━" not in captured.err  # bars are for terminals
    assert "Base" in captured.out
    scores = pd.read_csv(out / "quantization.csv")
    assert list(scores["folder"]) == [str(demo), str(regression)]
    for row, folder in zip(scores.to_dict("records"), (demo, regression), strict=True):
        record = results.read_result(folder)
        assert row["recorded"] == pytest.approx(100 * record.headline["value"])
        assert row["float32"] == pytest.approx(row["recorded"], abs=1e-4)
        assert row["w3a3_drop"] == pytest.approx(row["float32"] - row["w3a3"])
        assert row["constant"] == record.collapsed["validation"]
    assert r"\toprule" in (out / "quantization.tex").read_text()


def test_wrong_arguments(run_folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(run_folders["demo"].parent)
    (tmp_path / "empty").mkdir()
    for arguments, message in {
        (str(tmp_path / "none"),): "is not a folder",
        (str(tmp_path / "empty"),): "holds no runs of train.py",
        (runs, "--forms", "w8a8,w8a8"): "expected different ones",
        (runs, "--forms", "w1a8"): "from 2 to 16",
        (runs, "--forms", "int4"): "'int4' is not a form",
        (runs, "--calibration", "0"): "--calibration 0 is too small",
        (runs, "--data-dir", runs): "--data-dir is for runs of one task",
    }.items():
        assert main(["quantize", *arguments, "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "task", "value", "reason"),
    [
        ("failed", "rte", 0.5, "the run is failed"),
        ("finished", "mlm", 0.5, "language models are not supported"),
        ("finished", "rte", float("nan"), "not finite"),
        ("finished", "rte", 0.5, "has saved no model"),
    ],
)
def test_reasons_to_leave_a_run_out(tmp_path: Path, status: str, task: str, value: float, reason: str) -> None:
    record = results.RunRecord("x", status, {"task": {"name": task}}, headline={"value": value})
    assert reason in form_scores.explain_exclusion(tmp_path, record)


def test_the_table_has_mean_and_deviation_of_each_configuration() -> None:
    drops = {"a": [1.0, 2.0, 4.5], "b": [-0.001]}
    rows = [
        {
            "task": "rte", "model": "tiny", "method": "Base", "configuration": name, "metric": "accuracy",
            "constant": index == 0, "float32": 60.0 + index, "w8a8_drop": drop,
        }
        for name, values in drops.items()
        for index, drop in enumerate(values)
    ]  # fmt: skip
    summary = form_scores.summarize_configurations(pd.DataFrame(rows), [Form(8, 8)])
    assert list(summary["w8a8"]) == [f"2.50 ± {np.std(drops['a'], ddof=1):.2f}", "0.00"]
    assert list(summary["seeds"]) == ["3", "1"]
    assert list(summary["constant"]) == ["1", "1"]
    assert r"61.00 $\pm$ 1.00" in form_scores.format_latex(summary)


def save_random_model(folder: Path) -> Path:
    """Save a random tiny BERT with a head for the demo task, the predictions of which differ between texts."""
    spec, config = TASKS["demo"], ModelConfig(name="tiny", pretrained=False)
    tokenizer = pretrained.load_tokenizer(config)
    torch.manual_seed(0)
    model = pretrained.load_model(config, spec, pretrained.load_config(config, spec, tokenizer), tokenizer)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10 if weight.dim() == 2 else 1)
    pretrained.save(model, tokenizer, folder)
    return folder


def write_mnli(root: Path) -> Path:
    """Write MNLI files whose matched and mismatched sets have different labels; return the root."""
    for name, num_rows, num_labels in (("train", 12, 3), ("dev_matched", 10, 2), ("dev_mismatched", 8, 3)):
        lines = [f"{i}|the lamp {i} is {('old', 'new', 'red')[i % 3]} .|a lamp is new .|{LABELS[i % num_labels]}"
                 for i in range(num_rows)]  # fmt: skip
        table(root / "MNLI", f"{name}.tsv", "index|sentence1|sentence2|gold_label", *lines)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["span", "matched", "adapters"])
def test_kinds_of_runs_have_the_score_of_their_training(
    composed: Callable[..., Config], tmp_path: Path, kind: str
) -> None:
    """Question answering with windows, the matched set of MNLI, and adapters, which are merged into their base."""
    options = ["optim.lr=0.003", "data.eval_batch_size=7"]
    if kind == "span":
        options += ["task=demo_span"]
    elif kind == "matched":
        options += ["task=mnli", "model=tiny", f"task.data_dir={write_mnli(tmp_path / 'data')}"]
    else:
        pytest.importorskip("peft")
        options += ["task=demo", "model=auto", f"model.name={save_random_model(tmp_path / 'base')}", "model.lora=true"]
    record = run(composed(*SMALL, *options, "reg=none", "task.submission=false", f"run.root={tmp_path / 'runs'}"))
    folder = tmp_path / "runs" / record.name
    assert (folder / "model" / "adapter_config.json").is_file() == (kind == "adapters")
    scores = score_model(form_scores.load_saved_model(folder, record, 8, 0), [Form(16, 16), Form(3, 3)])
    assert scores["float32"] == pytest.approx(100 * record.headline["value"])
    assert scores["w16a16"] == pytest.approx(scores["float32"], abs=2)
    if kind == "matched":
        assert record.metrics["accuracy"] != record.metrics["accuracy_mismatched"]
