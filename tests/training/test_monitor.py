"""The monitored measures against measures of the hidden states, and the rule that stops the training."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from istar.config import Config
from istar.errors import UserError
from istar.runs.run import run
from istar.tasks.loading import load_splits, sample_examples
from istar.tasks.specs import TASKS
from istar.training.monitor import IsotropyMonitor
from tests.jobs import Start, starting

Build = Callable[..., Config]


def rows(folder: Path, column: str) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]


def folder_of(config: Config, name: str) -> Path:
    return Path(config.run.root) / name


def test_every_figure(small: Build) -> None:
    config = small("trainer.monitor_isotropy=true", "reg=none")
    record = run(config)
    folder = folder_of(config, record.name)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    spec = TASKS["demo"]
    rows_of = sample_examples(load_splits(spec, None, ["validation"])["validation"], 16)
    layers: list[list[Any]] = [[] for _ in range(model.config.num_hidden_layers + 1)]
    for example in rows_of:
        inputs = tokenizer(*(example[name] for name in spec.text_columns), return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states
        for kept, state in zip(layers, states, strict=True):
            kept.append(state[0].double().numpy())
    inter_sims = []
    for number, parts in enumerate(layers):
        points = np.concatenate(parts)
        unit = points / np.linalg.norm(points, axis=1, keepdims=True)
        cosines, n = unit @ unit.T, len(points)
        eigenvalues = np.linalg.eigvalsh(np.cov(points.T))
        singular = np.sqrt(eigenvalues.clip(min=0))
        shares = singular[singular > 0] / singular.sum()
        norms = np.linalg.norm(points, axis=1)
        expected = {
            "inter_sim": (cosines.sum() - n) / (n * (n - 1)),
            "average_norm": norms.mean(),
            "norm_ratio": np.linalg.norm(points.mean(0)) / norms.mean(),
            "effective_rank": np.exp(-(shares * np.log(shares)).sum()),
            "participation_ratio": eigenvalues.sum() ** 2 / (eigenvalues**2).sum(),
        }
        inter_sims.append(expected["inter_sim"])
        for name, value in expected.items():
            logged = rows(folder, f"isotropy/layer_{number}/{name}")
            # One validation before training and one after the only epoch.
            assert len(logged) == 2
            assert logged[-1] == pytest.approx(value, rel=2e-3), (number, name)
    assert rows(folder, "isotropy/inter_sim")[-1] == pytest.approx(np.mean(inter_sims[1:]), rel=1e-3)


def test_watching_changes_nothing(small: Build, tmp_path: Path) -> None:
    plain = small(f"run.root={tmp_path / 'plain'}")
    watched = small(f"run.root={tmp_path / 'watched'}", "trainer.monitor_isotropy=true")
    names = [run(config).name for config in (plain, watched)]
    assert names[0] == names[1]
    one, other = (folder_of(config, names[0]) / "model" / "model.safetensors" for config in (plain, watched))
    assert one.read_bytes() == other.read_bytes()


def test_the_training_ends(small: Build) -> None:
    """A negative CosReg weight raises InterSim beyond the threshold during training."""
    many = ("reg=cosreg", "reg.lambda=-5", "reg.layers=all", "trainer.max_epochs=8", "optim.lr=3e-3")
    whole = small(*many, "trainer.monitor_isotropy=true")
    course = rows(folder_of(whole, run(whole).name), "isotropy/inter_sim")
    assert len(course) == 9
    assert course[0] < course[-1]
    mark = (course[0] + max(course)) / 2
    above = [value >= mark for value in course]
    end = next(at for at in range(2, 9) if above[at] and above[at - 1] and not all(above[: at - 1]))
    stopping = small(*many, f"trainer.stop_at_inter_sim={mark}")
    record = run(stopping)
    assert len(record.epochs) == end
    assert rows(folder_of(stopping, record.name), "isotropy/inter_sim") == course[: end + 1]
    assert record.name != run(whole).name


@pytest.mark.parametrize(
    ("course", "patience", "stops"),
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
def test_a_transition_is_to_last(course: list[float], patience: int, stops: int | None) -> None:
    monitor = IsotropyMonitor(0.5, patience)
    stopped = None
    for number, value in enumerate(course):
        state = SimpleNamespace(fn="validate" if number == 0 else "fit")
        trainer: Any = SimpleNamespace(sanity_checking=False, state=state, should_stop=False)
        monitor.measures = [{"inter_sim": 9.0}, {"inter_sim": value}]
        # A monitor with restored state must act like the original.
        kept = monitor.state_dict()
        monitor = IsotropyMonitor(0.5, patience)
        monitor.measures = [{"inter_sim": 9.0}, {"inter_sim": value}]
        monitor.load_state_dict(kept)
        monitor.on_validation_end(trainer, None)  # type: ignore[arg-type]
        if trainer.should_stop and stopped is None:
            stopped = number
    assert stopped == stops


@pytest.mark.parametrize(
    ("override", "message"),
    [("trainer.stop_at_inter_sim=2", "not an average cosine"), ("trainer.inter_sim_patience=0", "too small")],
)
def test_refusals(small: Build, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(override)


@pytest.fixture
def start(own_cache: Path) -> Iterator[Start]:
    with starting(own_cache) as start:
        yield start


def test_two_processes_see_what_one_sees(tmp_path: Path, start: Start) -> None:
    arguments = ("reg=none", "trainer.monitor_isotropy=true", "task.limit_train=16", "task.limit_validation=9",
                 "data.batch_size=4", "trainer.max_epochs=1", "trainer.accelerator=cpu",
                 "trainer.progress_bar=false")  # fmt: skip
    jobs = [
        start(tmp_path / name, *arguments, f"trainer.devices={devices}", f"trainer.strategy={strategy}")
        for name, devices, strategy in (("one", 1, "auto"), ("two", 2, "ddp"))
    ]
    one, two = (next((job.folder / "runs").glob("demo-*")) for job in jobs if job.wait().well())
    for layer in range(3):
        for name in ("inter_sim", "average_norm", "norm_ratio", "effective_rank", "participation_ratio"):
            column = f"isotropy/layer_{layer}/{name}"
            # Before training, when both have the same weights. Directions without variance have the root of rounding.
            rel = 1e-3 if name == "effective_rank" else 1e-5
            assert rows(one, column)[0] == pytest.approx(rows(two, column)[0], rel=rel), column
