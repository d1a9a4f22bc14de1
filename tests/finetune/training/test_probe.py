"""The probe's measures, compared with measures of hidden states, and the error for a finished run without them."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from istar.errors import NonFiniteError, UserError
from istar.finetune.config import Config
from istar.finetune.execute.run import run
from istar.finetune.tasks.features import FeatureRows
from istar.finetune.tasks.loading import sample_examples
from istar.finetune.training.layer_geometry import GeometryProbe
from istar.finetune.training.module import FineTuner
from istar.runs.tasks import TASKS
from tests.finetune.tasks.builders import load_splits
from tests.finetune.training.conftest import compute_measures_naively
from tests.jobs import Start

Build = Callable[..., Config]
LAYERS = range(3)


def read_geometry_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["geometry/layer_0/isoscore"]]


@torch.no_grad()
def compute_hidden_states(model_folder: Path, examples: list[int]) -> list[np.ndarray]:
    """Return the hidden states of demo's validation examples by layer, computed example by example."""
    model = AutoModelForSequenceClassification.from_pretrained(model_folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    spec = TASKS["demo"]
    sample = sample_examples(load_splits(spec, None, ["validation"])["validation"], 16).select(examples)
    layers: list[list[np.ndarray]] = [[] for _ in LAYERS]
    for example in sample:
        inputs = tokenizer(*(example[name] for name in spec.text_columns), return_tensors="pt")
        for parts, state in zip(layers, model(**inputs, output_hidden_states=True).hidden_states, strict=True):
            parts.append(state[0].numpy())
    return [np.concatenate(parts) for parts in layers]


def make_probe(rows: Any, num_examples: int) -> GeometryProbe:
    """Return a probe of some rows, with a sample of this size."""
    return GeometryProbe(rows, lambda batch: batch, 16, every_n_steps=1, num_examples=num_examples)


def test_the_sample_is_fixed_and_drawn_from_the_whole_set() -> None:
    sample = make_probe(range(1_000), 64).sample
    assert sample == make_probe(range(1_000), 64).sample == sorted(set(sample))
    assert len(sample) == 64
    assert sample[0] < 100
    assert sample[-1] > 900
    assert make_probe(range(5), 64).sample == [0, 1, 2, 3, 4]


def test_every_measure_of_every_layer(small: Build) -> None:
    """Six steps with dropout: measured before training, after every fourth step and at the end."""
    config = small("reg=none", "task.limit_train=48", "data.eval_batch_size=3", "trainer.measure_every_n_steps=4",
                   "trainer.measure_examples=7", "trainer.keep_models=4")  # fmt: skip
    folder = Path(config.run.root) / run(config).name
    rows = read_geometry_rows(folder)
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "0"), ("0", "4"), ("0", "6")]
    for row in rows:
        states = compute_hidden_states(folder / "models" / f"step-{row['step']}", make_probe(range(16), 7).sample)
        for layer, points in enumerate(states):
            names = ("isoscore", "inter_sim", "effective_rank", "mean_kurtosis", "average_norm")
            expected = compute_measures_naively(points, names)
            for name, value in expected.items():
                # The run is float32; rounding errors have directions without variance, to which the rank is sensitive.
                rel = 1e-3 if name == "effective_rank" else 1e-4
                assert float(row[f"geometry/layer_{layer}/{name}"]) == pytest.approx(value, rel=rel), (layer, name)
    assert (folder / "geometry_over_steps.png").is_file()
    assert not [name for name in rows[0] if name.startswith("geometry/layer_3")]


def test_modes_and_random_state_are_restored(setting, harness) -> None:
    module = setting.module()
    embeddings = module.model.bert.embeddings.eval()
    modes = [submodule.training for submodule in module.modules()]
    probe = GeometryProbe(FeatureRows(setting.validation), setting.collate, 16, every_n_steps=1, num_examples=8)
    trainer = harness.trainer(probe)
    trainer.strategy.connect(module)
    random_state = torch.get_rng_state()
    probe.on_train_start(trainer, module)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [submodule.training for submodule in module.modules()] == modes
    assert not embeddings.training


def test_hidden_states_that_are_not_finite_are_reported_with_their_step(small: Build, monkeypatch) -> None:
    original = FineTuner.hidden_states
    monkeypatch.setattr(
        FineTuner,
        "hidden_states",
        lambda self, batch: {layer: state * torch.nan for layer, state in original(self, batch).items()},
    )
    with pytest.raises(NonFiniteError, match="geometry after step 0: "):
        run(small("reg=none", "trainer.measure_every_n_steps=1"))


@pytest.mark.parametrize("override", ["trainer.measure_every_n_steps=0", "trainer.measure_examples=0"])
def test_refusals(small: Build, override: str) -> None:
    with pytest.raises(UserError, match="too small"):
        small(override)


@pytest.mark.slow
def test_two_processes_measure_once_what_one_measures(tmp_path: Path, start: Start) -> None:
    arguments = ("reg=none", "trainer.measure_every_n_steps=2", "trainer.keep_models=log", "task.limit_train=24",
                 "task.limit_validation=9", "trainer.max_epochs=1", "trainer.accelerator=cpu",
                 "trainer.progress_bar=false")  # fmt: skip
    settings = (
        ("one", "trainer.devices=1", "data.batch_size=8"),
        ("two", "trainer.devices=2", "trainer.strategy=ddp", "data.batch_size=4"),
    )
    jobs = [start(tmp_path / name, *arguments, *options) for name, *options in settings]
    single_folder, ddp_folder = (next((job.folder / "runs").glob("demo-*")) for job in jobs if job.wait().well())
    single_rows, ddp_rows = read_geometry_rows(single_folder), read_geometry_rows(ddp_folder)
    assert [row["step"] for row in single_rows] == [row["step"] for row in ddp_rows] == ["0", "2", "3"]
    for name in single_rows[0]:
        if name.startswith("geometry/layer"):
            # Before training both have the same weights.
            assert float(single_rows[0][name]) == pytest.approx(float(ddp_rows[0][name]), rel=1e-6), name
    for folder in (single_folder, ddp_folder):
        assert sorted(path.name for path in (folder / "models").iterdir()) == [f"step-{n}" for n in range(4)]
