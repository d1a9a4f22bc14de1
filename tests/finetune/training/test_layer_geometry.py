"""The monitored measures, compared with measures of the hidden states, and the rule that stops the training."""

import copy
import csv
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from istar.errors import UserError
from istar.finetune.config import AdamWConfig, Config
from istar.finetune.execute.run import run
from istar.finetune.tasks.loading import sample_examples
from istar.finetune.training.layer_geometry import ValidationGeometry
from istar.finetune.training.module import FineTuner
from istar.geometry.collect.layer_outputs import BlockReader
from istar.measures import isoscore
from istar.models import tiny
from istar.runs.record import read_result
from istar.runs.tasks import TASKS
from istar.texts import demo
from tests.finetune.tasks.builders import load_splits
from tests.finetune.training.conftest import compute_measures_naively
from tests.jobs import Start

Build = Callable[..., Config]


def read_column(folder: Path, column: str) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]


def get_run_folder(config: Config, name: str) -> Path:
    return Path(config.run.root) / name


def test_every_figure_and_no_other_training(small: Build, tmp_path: Path) -> None:
    config = small("trainer.monitor_isotropy=true", "reg=none")
    record = run(config)
    folder = get_run_folder(config, record.name)
    # The monitored training is the same one as without the measures.
    plain_config = small(f"run.root={tmp_path / 'plain'}", "reg=none")
    plain_folder = get_run_folder(plain_config, run(plain_config).name)
    assert plain_folder.name == folder.name
    assert (plain_folder / "model" / "model.safetensors").read_bytes() == (
        folder / "model" / "model.safetensors"
    ).read_bytes()
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    spec = TASKS["demo"]
    examples = sample_examples(load_splits(spec, None, ["validation"])["validation"], 16)
    layers: list[list[Any]] = [[] for _ in range(model.config.num_hidden_layers + 1)]
    for example in examples:
        inputs = tokenizer(*(example[name] for name in spec.text_columns), return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states
        for layer_parts, state in zip(layers, states, strict=True):
            layer_parts.append(state[0].double().numpy())
    inter_sims = []
    for layer, parts in enumerate(layers):
        names = ("inter_sim", "average_norm", "norm_ratio", "effective_rank", "participation_ratio")
        expected = compute_measures_naively(np.concatenate(parts), names)
        inter_sims.append(expected["inter_sim"])
        for name, value in expected.items():
            logged = read_column(folder, f"isotropy/layer_{layer}/{name}")
            # One validation before training and one after the only epoch.
            assert len(logged) == 2
            assert logged[-1] == pytest.approx(value, rel=2e-3), (layer, name)
    assert read_column(folder, "isotropy/inter_sim")[-1] == pytest.approx(np.mean(inter_sims[1:]), rel=1e-3)


def test_a_layer_without_variance_ends_no_run(small: Build, tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    model = BertModel(BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
    torch.nn.init.zeros_(model.encoder.layer[1].output.LayerNorm.weight)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    record = run(small("model=auto", f"model.name={tmp_path / 'model'}", "reg=none"))
    assert record.status == "finished"
    before = record.isotropy["before"]
    assert [layer for layer, score in before.items() if math.isnan(score)] == ["2"]
    assert not math.isnan(record.isotropy["after"]["2"])
    assert read_result(get_run_folder(small(), record.name)).isotropy["before"].keys() == before.keys()


def test_layers_of_gpt2_are_those_of_istar_measure(setting, harness) -> None:
    """Layer L is the output of the last layer, before the final norm, which transformers return after it."""
    vocab_size = setting.model.config.vocab_size
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=vocab_size, n_positions=64, pad_token_id=0,
                        bos_token_id=1, eos_token_id=1)  # fmt: skip
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(config).eval()
    with torch.no_grad():
        model.transformer.ln_f.weight.uniform_(0.1, 9.0)
    module = FineTuner(model, None, AdamWConfig(), setting.evaluators)
    batch = setting.collate(list(setting.validation)[:5])
    inputs = {name: values for name, values in batch.items() if name not in ("feature_id", "labels")}
    block_reader = BlockReader(copy.deepcopy(model.transformer))
    assert block_reader.names == ("embeddings", "layer_1", "layer_2", "final_norm")
    expected = block_reader(inputs)
    with torch.no_grad():
        states = module.hidden_states(batch)
    assert list(states) == ["0", "1", "2", "final_norm"]
    assert_close(list(states.values()), list(expected.values()), rtol=1e-5, atol=1e-6)
    geometry, data = ValidationGeometry(is_monitored=True), setting.data()
    trainer = harness.trainer(geometry, limit_val_batches=1.0)
    trainer.validate(module, datamodule=data, verbose=False)
    points, normed_points = [], []
    for row in setting.validation:
        row_inputs = {name: values for name, values in setting.collate([row]).items() if name in inputs}
        row_states = block_reader(row_inputs)
        points.append(row_states["layer_2"][0])
        normed_points.append(row_states["final_norm"][0])
    assert geometry.scores["2"] == pytest.approx(isoscore(torch.cat(points)).item(), rel=1e-4)
    # The state after the norm is logged, and is not a layer of the record.
    logged = trainer.callback_metrics
    expected_score = isoscore(torch.cat(normed_points)).item()
    assert logged["isotropy/final_norm/isoscore"].item() == pytest.approx(expected_score, rel=1e-4)
    assert list(geometry.scores) == ["0", "1", "2", "union"]


@pytest.mark.slow
def test_the_training_ends(small: Build) -> None:
    """A negative CosReg weight raises InterSim beyond the threshold during training."""
    settings = ("reg=cosreg", "reg.lambda=-5", "reg.layers=all", "trainer.max_epochs=8", "optim.lr=3e-3")
    full_config = small(*settings, "trainer.monitor_isotropy=true")
    full_record = run(full_config)
    inter_sims = read_column(get_run_folder(full_config, full_record.name), "isotropy/inter_sim")
    assert len(inter_sims) == 9
    assert inter_sims[0] < inter_sims[-1]
    threshold = (inter_sims[0] + max(inter_sims)) / 2
    is_above = [value >= threshold for value in inter_sims]
    stop_epoch = next(
        epoch for epoch in range(2, 9) if is_above[epoch] and is_above[epoch - 1] and not all(is_above[: epoch - 1])
    )
    stop_config = small(*settings, f"trainer.stop_at_inter_sim={threshold}")
    record = run(stop_config)
    assert len(record.epochs) == stop_epoch
    assert read_column(get_run_folder(stop_config, record.name), "isotropy/inter_sim") == inter_sims[: stop_epoch + 1]
    assert record.name != full_record.name


@pytest.mark.parametrize(
    ("course", "patience", "expected_stop"),
    [
        ([0.1, 0.6, 0.7], 2, 2),
        ([0.1, 0.6, 0.2, 0.7, 0.8], 2, 4),
        # Anisotropic from the start: no transition.
        ([0.6, 0.7, 0.8, 0.9], 2, None),
        ([0.6, 0.4, 0.6, 0.6], 2, 3),
        ([0.1, 0.5], 1, 1),
        ([0.1, 0.2, 0.3], 1, None),
    ],
)
def test_a_transition_is_to_last(course: list[float], patience: int, expected_stop: int | None) -> None:
    monitor = ValidationGeometry(stop_at=0.5, patience=patience)
    actual_stop = None
    for validation, value in enumerate(course):
        state = SimpleNamespace(fn="validate" if validation == 0 else "fit")
        trainer: Any = SimpleNamespace(sanity_checking=False, state=state, should_stop=False)
        # A monitor with restored state must act like the original.
        monitor_state = monitor.state_dict()
        monitor = ValidationGeometry(stop_at=0.5, patience=patience)
        monitor.inter_sim = value
        monitor.load_state_dict(monitor_state)
        monitor.on_validation_end(trainer, None)  # type: ignore[arg-type]
        if trainer.should_stop and actual_stop is None:
            actual_stop = validation
    assert actual_stop == expected_stop


@pytest.mark.parametrize(
    ("override", "message"),
    [("trainer.stop_at_inter_sim=2", "not an average cosine"), ("trainer.inter_sim_patience=0", "too small")],
)
def test_refusals(small: Build, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(override)


@pytest.mark.slow
def test_two_processes_see_what_one_sees(tmp_path: Path, start: Start) -> None:
    arguments = ("reg=none", "trainer.monitor_isotropy=true", "task.limit_train=16", "task.limit_validation=9",
                 "data.batch_size=4", "trainer.max_epochs=1", "trainer.accelerator=cpu",
                 "trainer.progress_bar=false")  # fmt: skip
    jobs = [
        start(tmp_path / name, *arguments, f"trainer.devices={devices}", f"trainer.strategy={strategy}")
        for name, devices, strategy in (("one", 1, "auto"), ("two", 2, "ddp"))
    ]
    single_folder, ddp_folder = (next((job.folder / "runs").glob("demo-*")) for job in jobs if job.wait().well())
    for layer in range(3):
        for name in ("inter_sim", "average_norm", "norm_ratio", "effective_rank", "participation_ratio"):
            column = f"isotropy/layer_{layer}/{name}"
            # Before training both have the same weights. In directions without variance, the singular value is the
            # square root of a rounding error.
            rel = 1e-3 if name == "effective_rank" else 1e-5
            assert read_column(single_folder, column)[0] == pytest.approx(
                read_column(ddp_folder, column)[0], rel=rel
            ), column
