"""`istar quantize` on tiny runs, checked against torch's fake quantization, plain numpy and SciPy."""

import csv
import json
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

from istar.cli.main import main
from istar.drawing import page_folder as folder
from istar.finetune.runs.run import run
from istar.finetune.tasks.loading import load_splits, sample_examples
from istar.finetune.training.data import build_evaluation_loader
from istar.finetune.training.module import inputs_without_labels, token_mask
from istar.quantization import form_figures, form_tables, quantize, saved_runs
from istar.quantization.form_scores import (
    apply_checked_control,
    calibrate_input_ranges,
    evaluate_model,
    measure_activation_geometry,
    score_model,
)
from istar.quantization.linear_layers import Form, encoder_linears, forward_observed
from istar.quantization.torch_int8 import TorchInt8
from istar.records import results
from istar.records.config import Config
from istar.reports import configurations
from istar.reports.run_frame import Runs, record_to_row
from tests.conftest import SMALL
from tests.quantization.test_linear_layers import quantize_with_torch
from tests.reports import synthetic

FORMS = "w8a8,w3a3,int8"


@pytest.fixture(scope="module")
def runs_folder(composed: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train Base and I-STAR with two seeds each on the demo task; returns the folder of the runs."""
    root = tmp_path_factory.mktemp("quantized_runs")
    for method in (("reg=none",), ("reg=istar", "reg.lambda=-1")):
        for seed in (1, 2):
            run(composed(*SMALL, "task=demo", *method, f"seed={seed}", f"run.root={root}", "optim.lr=0.003"))
    return root


@pytest.fixture(scope="module")
def run_folder(runs_folder: Path) -> Path:
    """Return the folder of a run without a penalty."""
    return min(path for path in runs_folder.glob("demo-tiny-none-*") if (path / results.RESULT).exists())


@pytest.fixture(scope="module")
def loaded_model(run_folder: Path) -> saved_runs.LoadedModel:
    return saved_runs.load_model_and_data(
        saved_runs.saved_model_of_run(run_folder, results.read(run_folder)), num_calibration=8, seed=0
    )


def test_float32_is_the_score_of_the_training(run_folder: Path, loaded_model: saved_runs.LoadedModel) -> None:
    recorded = results.read(run_folder).metrics
    for name, value in evaluate_model(loaded_model, loaded_model.model).metrics.items():
        assert value == pytest.approx(recorded[name], abs=1e-12)


def test_a_form_has_the_score_of_torch_quantization(loaded_model: saved_runs.LoadedModel) -> None:
    form = Form(4, 4)
    layers = encoder_linears(loaded_model.model)
    largest = calibrate_input_ranges(loaded_model, layers)
    model: Any = quantize_with_torch(loaded_model.model, form, largest)
    batches = build_evaluation_loader(
        loaded_model.validation, loaded_model.collate, 5, range(len(loaded_model.validation))
    )
    with torch.no_grad():
        classes = [model(**inputs_without_labels(batch)).logits.argmax(1) for batch in batches]
    labels = np.array(loaded_model.evaluator.examples["label"])
    scores = score_model(loaded_model, [form])
    assert scores.forms == {"w4a4": pytest.approx(np.mean(torch.cat(classes).numpy() == labels))}
    assert scores.metric == "accuracy"


def test_ranges_are_those_of_a_sample_of_training_examples(
    run_folder: Path, loaded_model: saved_runs.LoadedModel
) -> None:
    record = results.read(run_folder)
    train = sample_examples(
        load_splits(loaded_model.evaluator.spec, None, ["train"])["train"], record.config["task"]["limit_train"]
    )
    assert len(loaded_model.calibration) == 8
    tokenizer = saved_runs.pretrained.load_tokenizer(saved_runs.saved_model_of_run(run_folder, record).config.model)
    training_texts = [tuple(tokenizer(example["sentence1"], example["sentence2"])["input_ids"]) for example in train]
    calibration_texts = [tuple(loaded_model.calibration[index]["input_ids"].tolist()) for index in range(8)]
    assert set(calibration_texts) <= set(training_texts)
    assert calibration_texts != training_texts[:8]


def test_ranges_are_those_of_the_calibration_rows(loaded_model: saved_runs.LoadedModel) -> None:
    """Each row passes in a batch of its own, so without padding; the validation data have other ranges."""
    layers = encoder_linears(loaded_model.model)
    largest_by_part: dict[str, dict[str, float]] = {"calibration": {}, "validation": {}}
    for part, by_layer in largest_by_part.items():
        rows = getattr(loaded_model, part)
        for index in range(len(rows)):
            batch = loaded_model.collate([rows[index]])

            def observe(name: str, points: torch.Tensor, by_layer: dict[str, float] = by_layer) -> None:
                by_layer[name] = max(by_layer.get(name, 0.0), points.abs().max().item())

            with torch.no_grad():
                forward_observed(loaded_model.model, layers, inputs_without_labels(batch), token_mask(batch), observe)
    ranges = {name: value.item() for name, value in calibrate_input_ranges(loaded_model, layers).items()}
    assert ranges == pytest.approx(largest_by_part["calibration"], rel=1e-5)
    assert ranges != pytest.approx(largest_by_part["validation"], rel=1e-3)


def test_the_activations_are_those_of_the_linear_layers(loaded_model: saved_runs.LoadedModel) -> None:
    layers = encoder_linears(loaded_model.model)
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    states = []
    with torch.no_grad():
        for index in range(len(loaded_model.validation)):
            batch = loaded_model.collate([loaded_model.validation[index]])
            arguments = {**inputs_without_labels(batch), "output_hidden_states": True}
            output = forward_observed(
                loaded_model.model, layers, arguments, token_mask(batch), lambda name, rows: inputs[name].append(rows)
            )
            states.append(output.hidden_states[-1][0])
    points = {name: torch.cat(rows).double().numpy() for name, rows in inputs.items()}
    measured = measure_activation_geometry(loaded_model, layers)
    kurtosis = [scipy.stats.kurtosis(rows, axis=1).mean() for rows in points.values()]
    assert measured.kurtosis == pytest.approx(np.mean(kurtosis), rel=1e-4)
    assert measured.largest == pytest.approx(max(abs(rows).max() for rows in points.values()), rel=1e-5)
    eigenvalues = np.linalg.eigvalsh(np.cov(torch.cat(states).double().numpy().T))
    ratio = eigenvalues.sum() ** 2 / (eigenvalues**2).sum()
    assert measured.isoscore == pytest.approx((ratio - 1) / (len(eigenvalues) - 1), rel=1e-4)


@pytest.mark.parametrize("control", ["rotate", "outlier"])
def test_a_control_changes_no_float32_score(loaded_model: saved_runs.LoadedModel, control: Any) -> None:
    controlled_model = apply_checked_control(loaded_model, control, 128.0, seed=0)
    scores_before, scores_after = (
        score_model(loaded_model, [Form(8, 8)]),
        score_model(controlled_model, [Form(8, 8), TorchInt8()]),
    )
    assert scores_after.floating == scores_before.floating
    assert scores_after.activations.isoscore == pytest.approx(scores_before.activations.isoscore, rel=1e-3)
    if control == "outlier":
        assert scores_after.activations.largest > 2 * scores_before.activations.largest
        assert scores_after.activations.kurtosis > scores_before.activations.kurtosis
    assert set(scores_after.forms) == {"w8a8", "int8"}


def test_a_control_that_changes_the_outputs_is_refused(
    loaded_model: saved_runs.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs change if the scaled layer is followed by a nonlinear function, as queries are."""
    monkeypatch.setattr(
        "istar.quantization.equivalent_models._VALUE_AND_OUTPUT_SUFFIXES",
        (("attention.self.query", "attention.output.dense"),),
    )
    with pytest.raises(quantize.UserError, match="changes the logits of BertForSequenceClassification"):
        apply_checked_control(loaded_model, "outlier", 128.0, seed=0)


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
    token_forms = quantize.parse_schemes("w8a8,int8", activations="token")
    assert quantize.QuantizationSettings(forms).identity() != quantize.QuantizationSettings(token_forms).identity()


def test_the_command(runs_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["quantize", str(runs_folder), "--forms", FORMS, "--calibration", "8", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "4 of 4" in printed.err
    # In 80 columns, each row has the method and the form.
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

    # Scores are computed again only if a setting changes.
    scores_before = (out / quantize.SCORES_FILE).read_text()
    assert main(command) == 0
    assert "of 4" not in capsys.readouterr().err
    assert (out / quantize.SCORES_FILE).read_text() == scores_before
    assert main([*command, "--activations", "token"]) == 0
    assert "4 of 4" in capsys.readouterr().err
    assert len(json.loads((out / quantize.SCORES_FILE).read_text())["entries"]) == 8


def test_an_interrupted_command_goes_on(
    runs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, load_model_and_data, loaded_names = tmp_path / "out", saved_runs.load_model_and_data, []

    def stop_at_third(subject: saved_runs.SavedModel, *arguments: Any) -> saved_runs.LoadedModel:
        loaded_names.append(subject.name)
        if len(loaded_names) == 3:
            raise KeyboardInterrupt
        return load_model_and_data(subject, *arguments)

    monkeypatch.setattr(saved_runs, "load_model_and_data", stop_at_third)
    command = ["quantize", str(runs_folder), "--forms", "w8a8", "--calibration", "4", "--out", str(out)]
    with pytest.raises(KeyboardInterrupt):
        main(command)
    assert main(command) == 0
    assert len(loaded_names) == 5
    assert len(set(loaded_names)) == 4


def test_a_single_model(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, model = tmp_path / "out", run_folder / "model"
    command = ["quantize", str(model), "--out", str(out), "--forms", "w8a8", "--calibration", "4"]
    assert main([*command, "--task", "demo"]) == 0
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
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err
    assert main(["quantize", str(model), str(run_folder), "--task", "demo"]) == 2
    assert "name one model" in capsys.readouterr().err


def test_a_damaged_run_is_named(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "runs" / run_folder.name)
    damaged_folder = shutil.copytree(run_folder, tmp_path / "runs" / "damaged")
    (damaged_folder / results.RESULT).write_text("{")
    runs = saved_runs.read_runs([tmp_path / "runs"], tmp_path / "out")
    assert list(runs.frame["name"]) == [results.read(run_folder).name]
    assert list(runs.read_errors) == [str(damaged_folder)]


def test_wrong_folders(runs_folder: Path, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    for folder_path in (empty, foreign):
        folder_path.mkdir()
    (foreign / "index.html").write_text("mine")
    for arguments, message in {
        (str(tmp_path / "none"),): "is not a folder",
        (str(empty),): "holds no runs of train.py",
        (str(runs_folder), "--task", "rte"): "--task is for a single model",
        (str(runs_folder), "--out", str(foreign)): "holds index.html",
        (str(runs_folder), "--forms", "w8a8,w8a8"): "expected different ones",
        (str(runs_folder), "--forms", "w1a8"): "from 2 to 16",
        (str(runs_folder), "--forms", "int4"): "'int4' is no form",
        (str(runs_folder), "--calibration", "0"): "--calibration 0 is too small",
        (str(runs_folder), "--outlier-factor", "2"): "is for --control outlier",
        (str(runs_folder), "--control", "outlier", "--outlier-factor", "0"): "--outlier-factor 0 is out of range",
    }.items():
        out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
        assert main(["quantize", *arguments, *out]) == 2
        assert message in capsys.readouterr().err


def test_other_data_than_those_of_the_run_are_refused(run_folder: Path) -> None:
    record = results.read(run_folder)
    changed_record = results.RunRecord(**{**vars(record), "data": {**record.data, "fingerprint": "0"}})
    with pytest.raises(quantize.UserError, match="--data-dir"):
        saved_runs.load_model_and_data(saved_runs.saved_model_of_run(run_folder, changed_record), 4, 0)


def make_synthetic_scores(
    drops: dict[str, dict[int, float]], constant_runs: Collection[str] = ()
) -> quantize.QuantizedScores:
    """Return the scores of runs on RTE, where one form loses the given drops from 60%.

    The runs named in `constant_runs`, such as `I-STAR-3` for seed 3, had collapsed at the end of training.
    """
    penalties = {"Base": synthetic.BASE, "I-STAR": synthetic.istar(-1.0), "CosReg": synthetic.cosreg()}
    records = {
        f"{name}-{seed}": synthetic.record(
            "rte", "mine", penalties[name], seed, 0.6,
            changes={"collapsed": {"validation": f"{name}-{seed}" in constant_runs}},
        )
        for name, by_seed in drops.items()
        for seed in by_seed
    }  # fmt: skip
    frame = pd.DataFrame([{"folder": path, **record_to_row(record)} for path, record in records.items()])
    table = configurations.add_selection_columns(Runs(frame, {}, records))
    values = [drop for by_seed in drops.values() for drop in by_seed.values()]
    scores = [
        {
            "metric": "accuracy", "recorded": 0.55, "floating": 0.6, "forms": {"w4a4": 0.6 - drop / 100},
            "collapsed": {"w4a4": False},
            "activations": {"kurtosis": 2.0 + drop, "largest": 5.0 - drop, "isoscore": 0.1 * index},
        }
        for index, drop in enumerate(values)
    ]  # fmt: skip
    rows = [
        {**columns, **quantize.make_table_row(values)}
        for columns, values in zip(configurations.row_dicts(table), scores, strict=True)
    ]
    return quantize.QuantizedScores(pd.DataFrame(rows), ("w4a4",), {}, "")


DROPS = {
    "Base": {1: 4.0, 2: 5.5, 3: 3.5, 4: 6.0, 5: 4.5},
    "I-STAR": {1: 1.0, 2: 2.0, 3: 1.2, 4: 2.1, 5: 1.4},
    "CosReg": {1: 4.5, 2: 5.0, 3: 3.8, 4: 5.5, 5: 5.0},
}


def test_methods_are_compared_by_their_drops() -> None:
    rows, corrected = form_tables.compare_methods(make_synthetic_scores(DROPS))
    by_method = {row.method.split()[0]: row for row in rows}
    assert list(by_method) == ["Base", "CosReg", "I-STAR"]
    p_values = {
        name: scipy.stats.ttest_rel(list(DROPS[name].values()), list(DROPS["Base"].values())).pvalue
        for name in ("I-STAR", "CosReg")
    }
    # Holm by hand: the smaller p-value counts twice, the other one at least as much.
    smaller, larger = sorted(p_values, key=lambda name: p_values[name])
    expected = {smaller: min(1, 2 * p_values[smaller]), larger: max(min(1, 2 * p_values[smaller]), p_values[larger])}
    assert corrected.tests == 2
    assert by_method["Base"].comparison_with_base is None
    for name in p_values:
        comparison = by_method[name].comparison_with_base
        assert comparison is not None
        assert comparison.p_value == pytest.approx(expected[name], rel=1e-9)
        differences = np.subtract(list(DROPS[name].values()), list(DROPS["Base"].values()))
        assert comparison.difference == pytest.approx(differences.mean())
        margin = scipy.stats.t.ppf(0.975, 4) * scipy.stats.sem(differences)
        assert comparison.interval == pytest.approx((differences.mean() - margin, differences.mean() + margin))
        method_drops = np.array(list(DROPS[name].values()))
        margin = scipy.stats.t.ppf(0.975, 4) * scipy.stats.sem(method_drops)
        assert by_method[name].drop_interval == pytest.approx(
            (method_drops.mean() - margin, method_drops.mean() + margin)
        )
    sentences = form_tables.write_conclusions(rows)
    assert "loses less than Base on rte (accuracy, w4a4) by 3.16" in sentences[1]
    assert "to lose" not in sentences[1]
    assert sentences[0].startswith("No difference between CosReg")


def test_the_drop_and_the_geometry() -> None:
    quantized = make_synthetic_scores(DROPS)
    frame = form_tables.build_correlation_sheet(quantized).frame.set_index("measure")
    drops = [drop for by_seed in DROPS.values() for drop in by_seed.values()]
    assert frame.loc["kurtosis", "spearman"] == pytest.approx(1)
    assert frame.loc["largest_activation", "spearman"] == pytest.approx(-1)
    assert frame.loc["isoscore", "spearman"] == pytest.approx(scipy.stats.spearmanr(range(15), drops).statistic)
    frame_of_two_runs = form_tables.build_correlation_sheet(make_synthetic_scores({"Base": {1: 1.0, 2: 2.0}})).frame
    assert set(frame_of_two_runs["note"]) == {"needs 4 runs"}


def test_runs_that_were_constant_before_have_nothing_to_lose() -> None:
    drops = {**DROPS, "I-STAR": {**DROPS["I-STAR"], 2: 0.0, 4: 0.0}}
    constant_runs = ("I-STAR-2", "I-STAR-4")
    quantized = make_synthetic_scores(drops, constant_runs)
    comparisons, adjusted = form_tables.compare_methods(quantized)
    by_method = {row.method.split()[0]: row for row in comparisons}
    assert {name: row.constant_seeds for name, row in by_method.items()} == {"Base": (), "CosReg": (), "I-STAR": (2, 4)}
    istar_comparison = by_method["I-STAR"].comparison_with_base
    assert istar_comparison is not None
    assert istar_comparison.p_value is not None
    # The drop is significantly smaller, but the report does not call that better.
    assert istar_comparison.p_value < 0.05
    sentence = form_tables.write_conclusions(comparisons)[1]
    assert sentence.startswith("Nothing can be concluded about I-STAR")
    assert "2 of 5 runs of I-STAR λ=-1 ζ=0.4 predict a constant without quantization" in sentence
    frame = form_tables.build_methods_sheet(comparisons, adjusted).frame.set_index("method")
    assert dict(frame["constant"]) == {row.method: len(row.constant_seeds) for row in comparisons}
    assert frame.loc[by_method["I-STAR"].method, "verdict"] == "no conclusion"
    # The correlations are those of the runs that can lose something.
    correlation = form_tables.build_correlation_sheet(quantized).frame.set_index("measure").loc["kurtosis"]
    assert correlation["runs"] == 13
    [panel] = form_figures.make_drop_by_measure_plot(quantized, "kurtosis").panels
    assert [len(line.x) for line in panel.lines] == [13]
    all_constant = make_synthetic_scores({"Base": {1: 0.0, 2: 0.0}}, ("Base-1", "Base-2"))
    assert not folder.render_pictures(form_figures.make_drop_by_measure_plot(all_constant, "kurtosis"))

    base_is_constant, _ = form_tables.compare_methods(make_synthetic_scores(DROPS, ("Base-1",)))
    sentences = form_tables.write_conclusions(base_is_constant)
    assert len(sentences) == 2
    assert all("1 of 5 runs of Base predict" in sentence for sentence in sentences)


def test_a_small_drop_from_a_low_score_is_explained() -> None:
    quantized = make_synthetic_scores(DROPS)
    is_istar = quantized.rows["method"].str.startswith("I-STAR")
    base_score = quantized.rows.loc[~is_istar, "float32"].mean()
    quantized.rows.loc[is_istar, "float32"] = base_score - 20
    comparisons, adjusted = form_tables.compare_methods(quantized)
    sentence = form_tables.write_conclusions(comparisons)[1]
    assert "loses less than Base" in sentence
    expected = f"float32 score is {base_score - 20:.2f} on average, and that of Base {base_score:.2f}"
    assert f"It also has less to lose: its {expected}." in sentence
    methods = form_tables.build_methods_sheet(comparisons, adjusted).frame
    assert list(methods["verdict"]) == ["", "no difference found", "smaller"]

    # The other way round, a method from above has more to lose.
    rows = quantized.rows
    rows.loc[is_istar, "float32"] = base_score + 20
    rows.loc[is_istar, "w4a4_drop"] += 20
    comparisons, _ = form_tables.compare_methods(quantized)
    sentence = form_tables.write_conclusions(comparisons)[1]
    assert "loses more than Base" in sentence
    assert "It also has more to lose" in sentence
    # A higher score that loses less needs no explanation.
    rows.loc[is_istar, "w4a4_drop"] -= 20
    comparisons, _ = form_tables.compare_methods(quantized)
    assert form_tables.write_conclusions(comparisons)[1].endswith("5 seeds).")
    # Nor does a smaller drop from a lower loss, because losses have no limit.
    rows.loc[is_istar, "float32"] = base_score - 20
    comparisons, _ = form_tables.compare_methods(replace(quantized, rows=rows.assign(metric="loss")))
    assert form_tables.write_conclusions(comparisons)[1].endswith("5 seeds).")


def test_methods_without_common_seeds_have_no_conclusion() -> None:
    other_seeds = {seed + 5: drop for seed, drop in DROPS["I-STAR"].items()}
    comparisons, _ = form_tables.compare_methods(make_synthetic_scores({"Base": DROPS["Base"], "I-STAR": other_seeds}))
    [sentence] = form_tables.write_conclusions(comparisons)
    assert sentence.startswith("Nothing can be concluded about I-STAR")
    assert "no seed in common" in sentence


def test_a_method_without_base_has_no_comparison() -> None:
    rows, corrected = form_tables.compare_methods(make_synthetic_scores({"I-STAR": DROPS["I-STAR"]}))
    assert [row.comparison_with_base for row in rows] == [None]
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
