"""`istar quantize` on tiny runs, checked against torch's fake quantization, plain numpy and SciPy."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

from istar import results
from istar.cli.main import main
from istar.config import Config
from istar.quantization import form_tables, quantize, saved_runs
from istar.quantization.form_scores import (
    apply_checked_control,
    calibrate_input_ranges,
    evaluate_model,
    measure_activation_geometry,
    score_model,
)
from istar.quantization.linear_layers import Form, encoder_linears, forward_observed
from istar.quantization.torch_int8 import TorchInt8
from istar.reports import cells
from istar.reports.run_frame import Runs, record_to_row
from istar.runs.run import run
from istar.tasks.loading import load_splits, sample_examples
from istar.training.data import build_evaluation_loader
from istar.training.module import inputs_without_labels, token_mask
from tests.conftest import SMALL
from tests.quantization.test_linear_layers import faked
from tests.reports import synthetic

FORMS = "w8a8,w3a3,int8"


@pytest.fixture(scope="module")
def runs(composed: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base and I-STAR with two seeds each, on the demo task."""
    root = tmp_path_factory.mktemp("quantized_runs")
    for method in (("reg=none",), ("reg=istar", "reg.lambda=-1")):
        for seed in (1, 2):
            run(composed(*SMALL, "task=demo", *method, f"seed={seed}", f"run.root={root}", "optim.lr=0.003"))
    return root


@pytest.fixture(scope="module")
def folder(runs: Path) -> Path:
    """The folder of a run without a penalty."""
    return min(path for path in runs.glob("demo-tiny-none-*") if (path / results.RESULT).exists())


@pytest.fixture(scope="module")
def loaded(folder: Path) -> saved_runs.LoadedModel:
    return saved_runs.load_model_and_data(
        saved_runs.saved_model_of_run(folder, results.read(folder)), num_calibration=8, seed=0
    )


def test_float32_is_the_score_of_the_training(folder: Path, loaded: saved_runs.LoadedModel) -> None:
    recorded = results.read(folder).metrics
    for name, value in evaluate_model(loaded, loaded.model).metrics.items():
        assert value == pytest.approx(recorded[name], abs=1e-12)


def test_a_form_has_the_score_of_torch_quantization(loaded: saved_runs.LoadedModel) -> None:
    form = Form(4, 4)
    layers = encoder_linears(loaded.model)
    largest = calibrate_input_ranges(loaded, layers)
    model: Any = faked(loaded.model, form, largest)
    batches = build_evaluation_loader(loaded.validation, loaded.collate, 5, range(len(loaded.validation)))
    with torch.no_grad():
        classes = [model(**inputs_without_labels(batch)).logits.argmax(1) for batch in batches]
    labels = np.array(loaded.evaluator.examples["label"])
    scores = score_model(loaded, [form])
    assert scores.forms == {"w4a4": pytest.approx(np.mean(torch.cat(classes).numpy() == labels))}
    assert scores.metric == "accuracy"


def test_ranges_are_those_of_a_sample_of_training_examples(folder: Path, loaded: saved_runs.LoadedModel) -> None:
    record = results.read(folder)
    train = sample_examples(
        load_splits(loaded.evaluator.spec, None, ["train"])["train"], record.config["task"]["limit_train"]
    )
    assert len(loaded.calibration) == 8
    tokenizer = saved_runs.models.load_tokenizer(saved_runs.saved_model_of_run(folder, record).config.model)
    texts = [tuple(tokenizer(example["sentence1"], example["sentence2"])["input_ids"]) for example in train]
    chosen = [tuple(loaded.calibration[number]["input_ids"].tolist()) for number in range(8)]
    assert set(chosen) <= set(texts)
    assert chosen != texts[:8]


def test_ranges_are_those_of_the_calibration_rows(loaded: saved_runs.LoadedModel) -> None:
    """Each row is passed alone, so without padding; the validation data have other ranges."""
    layers = encoder_linears(loaded.model)
    largest: dict[str, dict[str, float]] = {"calibration": {}, "validation": {}}
    for part, by_layer in largest.items():
        rows = getattr(loaded, part)
        for number in range(len(rows)):
            batch = loaded.collate([rows[number]])

            def observe(name: str, points: torch.Tensor, by_layer: dict[str, float] = by_layer) -> None:
                by_layer[name] = max(by_layer.get(name, 0.0), points.abs().max().item())

            with torch.no_grad():
                forward_observed(loaded.model, layers, inputs_without_labels(batch), token_mask(batch), observe)
    ranges = {name: value.item() for name, value in calibrate_input_ranges(loaded, layers).items()}
    assert ranges == pytest.approx(largest["calibration"], rel=1e-5)
    assert ranges != pytest.approx(largest["validation"], rel=1e-3)


def test_the_activations_are_those_of_the_linear_layers(loaded: saved_runs.LoadedModel) -> None:
    layers = encoder_linears(loaded.model)
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    states = []
    with torch.no_grad():
        for number in range(len(loaded.validation)):
            batch = loaded.collate([loaded.validation[number]])
            arguments = {**inputs_without_labels(batch), "output_hidden_states": True}
            output = forward_observed(
                loaded.model, layers, arguments, token_mask(batch), lambda name, rows: inputs[name].append(rows)
            )
            states.append(output.hidden_states[-1][0])
    points = {name: torch.cat(rows).double().numpy() for name, rows in inputs.items()}
    measured = measure_activation_geometry(loaded, layers)
    kurtosis = [scipy.stats.kurtosis(rows, axis=1).mean() for rows in points.values()]
    assert measured.kurtosis == pytest.approx(np.mean(kurtosis), rel=1e-4)
    assert measured.largest == pytest.approx(max(abs(rows).max() for rows in points.values()), rel=1e-5)
    eigenvalues = np.linalg.eigvalsh(np.cov(torch.cat(states).double().numpy().T))
    ratio = eigenvalues.sum() ** 2 / (eigenvalues**2).sum()
    assert measured.isoscore == pytest.approx((ratio - 1) / (len(eigenvalues) - 1), rel=1e-4)


@pytest.mark.parametrize("control", ["rotate", "outlier"])
def test_a_control_changes_no_float32_score(loaded: saved_runs.LoadedModel, control: Any) -> None:
    changed = apply_checked_control(loaded, control, 128.0, seed=0)
    before, after = score_model(loaded, [Form(8, 8)]), score_model(changed, [Form(8, 8), TorchInt8()])
    assert after.floating == before.floating
    assert after.activations.isoscore == pytest.approx(before.activations.isoscore, rel=1e-3)
    if control == "outlier":
        assert after.activations.largest > 2 * before.activations.largest
        assert after.activations.kurtosis > before.activations.kurtosis
    assert set(after.forms) == {"w8a8", "int8"}


def test_a_control_that_changes_the_outputs_is_refused(
    loaded: saved_runs.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would be in an architecture whose values pass through a function that is not linear, such as queries."""
    monkeypatch.setattr(
        "istar.quantization.controls._VALUE_AND_OUTPUT_SUFFIXES", (("attention.self.query", "attention.output.dense"),)
    )
    with pytest.raises(quantize.UserError, match="changes the logits of BertForSequenceClassification"):
        apply_checked_control(loaded, "outlier", 128.0, seed=0)


def test_settings_that_have_no_effect_do_not_count() -> None:
    forms = quantize.parse_schemes("w8a8,int8")
    assert (
        quantize.QuantizationSettings(forms).identity()
        == quantize.QuantizationSettings(forms, outlier_factor=2.0).identity()
    )
    assert (
        quantize.QuantizationSettings(forms).identity()
        != quantize.QuantizationSettings(forms, control="rotate").identity()
    )
    other = quantize.parse_schemes("w8a8,int8", activations="token")
    assert quantize.QuantizationSettings(forms).identity() != quantize.QuantizationSettings(other).identity()


def test_the_command(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["quantize", str(runs), "--forms", FORMS, "--calibration", "8", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "4 of 4" in printed.err
    # In 80 columns, each row says method and form.
    for method in ("Base", "I-STAR"):
        for form in FORMS.split(","):
            assert re.search(rf"│ {method}[^│]*│ {form} *│", printed.out)
    assert "Nothing can be concluded" in printed.out or "No difference" in printed.out
    with (out / "tables" / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(line["method"].split()[0], line["seed"]) for line in rows] == [
        ("Base", "1"), ("Base", "2"), ("I-STAR", "1"), ("I-STAR", "2")
    ]  # fmt: skip
    for line in rows:
        record = results.read(Path(line["folder"]))
        assert float(line["float32"]) == pytest.approx(100 * record.metrics["accuracy"])
        assert float(line["recorded"]) == pytest.approx(float(line["float32"]))
        assert float(line["w3a3_drop"]) == pytest.approx(float(line["float32"]) - float(line["w3a3"]))
    with (out / "tables" / "methods.csv").open(newline="") as file:
        methods = list(csv.DictReader(file))
    assert [line["form"] for line in methods] == ["w8a8", "w3a3", "int8"] * 2
    assert methods[0]["method"] == "Base"
    page = (out / "index.html").read_text()
    assert "istar quantize" in page
    assert "Drop and geometry" in page
    assert (out / "tables" / "methods.md").is_file()
    assert (out / "figures" / "drops-tiny.svg").is_file()

    # Nothing is computed again, unless a setting changes.
    before = (out / quantize.SCORES_FILE).read_text()
    assert main(command) == 0
    assert "of 4" not in capsys.readouterr().err
    assert (out / quantize.SCORES_FILE).read_text() == before
    assert main([*command, "--activations", "token"]) == 0
    assert "4 of 4" in capsys.readouterr().err
    assert len(json.loads((out / quantize.SCORES_FILE).read_text())["entries"]) == 8


def test_an_interrupted_command_goes_on(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, load, seen = tmp_path / "out", saved_runs.load_model_and_data, []

    def stop_at_third(subject: saved_runs.SavedModel, *arguments: Any) -> saved_runs.LoadedModel:
        seen.append(subject.name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return load(subject, *arguments)

    monkeypatch.setattr(saved_runs, "load_model_and_data", stop_at_third)
    command = ["quantize", str(runs), "--forms", "w8a8", "--calibration", "4", "--out", str(out)]
    with pytest.raises(KeyboardInterrupt):
        main(command)
    assert main(command) == 0
    assert len(seen) == 5
    assert len(set(seen)) == 4


def test_a_single_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, model = tmp_path / "out", folder / "model"
    common = ["quantize", str(model), "--out", str(out), "--forms", "w8a8", "--calibration", "4"]
    assert main([*common, "--task", "demo"]) == 0
    with (out / "tables" / "runs.csv").open(newline="") as file:
        [line] = csv.DictReader(file)
    assert 0 <= float(line["w8a8"]) <= 100
    printed = capsys.readouterr().out
    assert re.search(rf"│ w8a8 *│ *{float(line['w8a8']):.2f}│", printed)
    assert "Of the float32 model: IsoScore" in printed
    assert not (out / "tables" / "methods.csv").exists()
    capsys.readouterr()
    for options, message in {
        (): "--task is missing",
        ("--task", "demo_regression"): "has no head for task demo_regression: its labels are disagree, agree",
        ("--task", "demo_span"): "expected BertForQuestionAnswering",
        ("--task", "rtee"): "did you mean rte?",
        ("--task", "mlm"): "expected a task of classification",
    }.items():
        assert main([*common, *options]) == 2
        assert message in capsys.readouterr().err
    assert main(["quantize", str(model), str(folder), "--task", "demo"]) == 2
    assert "name one model" in capsys.readouterr().err


def test_a_damaged_run_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "runs" / folder.name)
    damaged = shutil.copytree(folder, tmp_path / "runs" / "damaged")
    (damaged / results.RESULT).write_text("{")
    runs = saved_runs.read_runs([tmp_path / "runs"])
    assert list(runs.frame["name"]) == [results.read(folder).name]
    assert list(runs.read_errors) == [str(damaged)]


def test_wrong_folders(runs: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("mine")
    for arguments, message in {
        (str(tmp_path / "none"),): "is not a folder",
        (str(empty),): "holds no runs of train.py",
        (str(runs), "--task", "rte"): "--task is for a single model",
        (str(runs), "--out", str(empty)): "holds notes.txt",
        (str(runs), "--forms", "w8a8,w8a8"): "expected different ones",
        (str(runs), "--forms", "w1a8"): "from 2 to 16",
        (str(runs), "--forms", "int4"): "'int4' is no form",
        (str(runs), "--calibration", "0"): "--calibration 0 is too small",
        (str(runs), "--outlier-factor", "2"): "is for --control outlier",
        (str(runs), "--control", "outlier", "--outlier-factor", "0"): "--outlier-factor 0 is out of range",
    }.items():
        out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
        assert main(["quantize", *arguments, *out]) == 2
        assert message in capsys.readouterr().err


def test_other_data_than_those_of_the_run_are_refused(folder: Path) -> None:
    record = results.read(folder)
    other = results.RunRecord(**{**vars(record), "data": {**record.data, "fingerprint": "0"}})
    with pytest.raises(quantize.UserError, match="--data-dir"):
        saved_runs.load_model_and_data(saved_runs.saved_model_of_run(folder, other), 4, 0)


def synthetic_rows(drops: dict[str, dict[int, float]]) -> quantize.QuantizedScores:
    """Rows of runs on RTE with given drops from 60% in one form."""
    penalties = {"Base": synthetic.BASE, "I-STAR": synthetic.istar(-1.0), "CosReg": synthetic.cosreg()}
    records = {
        f"{name}-{seed}": synthetic.record("rte", "mine", penalties[name], seed, 0.6)
        for name, by_seed in drops.items()
        for seed in by_seed
    }
    frame = pd.DataFrame([{"folder": path, **record_to_row(record)} for path, record in records.items()])
    table = cells.add_selection_columns(Runs(frame, {}, records))
    values = [drop for by_seed in drops.values() for drop in by_seed.values()]
    scores = [
        {
            "metric": "accuracy", "recorded": 0.55, "floating": 0.6, "forms": {"w4a4": 0.6 - drop / 100},
            "collapsed": {"w4a4": False},
            "activations": {"kurtosis": 2.0 + drop, "largest": 5.0 - drop, "isoscore": 0.1 * number},
        }
        for number, drop in enumerate(values)
    ]  # fmt: skip
    rows = [
        {**columns, **quantize.make_table_row(values)}
        for columns, values in zip(cells.row_dicts(table), scores, strict=True)
    ]
    return quantize.QuantizedScores(pd.DataFrame(rows), ("w4a4",), {}, "")


DROPS = {
    "Base": {1: 4.0, 2: 5.5, 3: 3.5, 4: 6.0, 5: 4.5},
    "I-STAR": {1: 1.0, 2: 2.0, 3: 1.2, 4: 2.1, 5: 1.4},
    "CosReg": {1: 4.5, 2: 5.0, 3: 3.8, 4: 5.5, 5: 5.0},
}


def test_methods_are_compared_by_their_drops() -> None:
    compared, corrected = form_tables.compare_methods(synthetic_rows(DROPS))
    by_method = {row.method.split()[0]: row for row in compared}
    assert list(by_method) == ["Base", "CosReg", "I-STAR"]
    p = {
        name: scipy.stats.ttest_rel(list(DROPS[name].values()), list(DROPS["Base"].values())).pvalue
        for name in ("I-STAR", "CosReg")
    }
    # Holm by hand: the smaller p-value counts twice, the other one at least as much.
    first, second = sorted(p, key=lambda name: p[name])
    expected = {first: min(1, 2 * p[first]), second: max(min(1, 2 * p[first]), p[second])}
    assert corrected.tests == 2
    assert by_method["Base"].comparison_with_base is None
    for name in p:
        versus = by_method[name].comparison_with_base
        assert versus is not None
        assert versus.p_value == pytest.approx(expected[name], rel=1e-9)
        difference = np.subtract(list(DROPS[name].values()), list(DROPS["Base"].values()))
        assert versus.difference == pytest.approx(difference.mean())
        margin = scipy.stats.t.ppf(0.975, 4) * scipy.stats.sem(difference)
        assert versus.interval == pytest.approx((difference.mean() - margin, difference.mean() + margin))
        values = np.array(list(DROPS[name].values()))
        margin = scipy.stats.t.ppf(0.975, 4) * scipy.stats.sem(values)
        assert by_method[name].drop_interval == pytest.approx((values.mean() - margin, values.mean() + margin))
    # A smaller drop is better.
    sentences = form_tables.write_conclusions(compared)
    assert "better than Base on rte (accuracy lost with w4a4) by 3.16" in sentences[1]
    assert sentences[0].startswith("No difference between CosReg")


def test_the_drop_and_the_geometry() -> None:
    quantized = synthetic_rows(DROPS)
    frame = form_tables.build_correlation_sheet(quantized).frame.set_index("measure")
    drops = [drop for by_seed in DROPS.values() for drop in by_seed.values()]
    assert frame.loc["kurtosis", "spearman"] == pytest.approx(1)
    assert frame.loc["largest_activation", "spearman"] == pytest.approx(-1)
    assert frame.loc["isoscore", "spearman"] == pytest.approx(scipy.stats.spearmanr(range(15), drops).statistic)
    few = form_tables.build_correlation_sheet(synthetic_rows({"Base": {1: 1.0, 2: 2.0}})).frame
    assert set(few["note"]) == {"needs 4 runs"}


def test_a_method_without_base_has_no_comparison() -> None:
    compared, corrected = form_tables.compare_methods(synthetic_rows({"I-STAR": DROPS["I-STAR"]}))
    assert [row.comparison_with_base for row in compared] == [None]
    assert corrected.tests == 0


@pytest.mark.parametrize(
    ("changes", "folder", "reason"),
    [
        ({"status": "failed"}, "x", "the run is failed"),
        ({"task": "mlm"}, "x", "language models are not supported"),
        ({"usable": False}, "x", "same configuration and seed"),
        ({}, "x", "has saved no model"),
    ],
)
def test_reasons_to_leave_a_run_out(changes: dict[str, Any], folder: str, reason: str) -> None:
    values = {"status": "finished", "task": "rte", "usable": True, "folder": folder, **changes}
    assert reason in saved_runs.get_exclusion_reason(values)
