"""The readings of a run's monitor, compared with measures of the hidden states, and the end after a collapse."""

import copy
import csv
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import istar
from istar.errors import UserError
from istar.finetune.config import Config, MonitorConfig
from istar.finetune.execute.run import run
from istar.finetune.tasks.loading import sample_examples
from istar.finetune.training.watching import WatchTraining, make_alarms
from istar.monitoring.alarms import DEFAULT_ALARMS
from istar.runs.tasks import TASKS
from tests.finetune.tasks.builders import load_splits
from tests.finetune.training.conftest import compute_measures_naively
from tests.jobs import Start

Build = Callable[..., Config]
STATES = ("embeddings", "layer_1", "layer_2")
MEASURES = ["isoscore", "inter_sim", "effective_rank", "participation_ratio", "average_norm"]


def read_metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_probe_rows(folder: Path) -> list[dict[str, str]]:
    return [row for row in read_metrics(folder) if row["probe/layer_1/isoscore"]]


@torch.no_grad()
def compute_hidden_states(model_folder: Path, examples: list[int]) -> list[np.ndarray]:
    """Return the hidden states of demo's validation examples by layer, computed example by example."""
    model = AutoModelForSequenceClassification.from_pretrained(model_folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    spec = TASKS["demo"]
    sample = sample_examples(load_splits(spec, None, ["validation"])["validation"], 16).select(examples)
    layers: list[list[np.ndarray]] = [[] for _ in STATES]
    for example in sample:
        inputs = tokenizer(*(example[name] for name in spec.text_columns), return_tensors="pt")
        for parts, state in zip(layers, model(**inputs, output_hidden_states=True).hidden_states, strict=True):
            parts.append(state[0].numpy())
    return [np.concatenate(parts) for parts in layers]


def choose_sample(num_rows: int, num_examples: int) -> list[int]:
    data: Any = SimpleNamespace(validation=[range(num_rows)])
    return WatchTraining(MonitorConfig(every=1, probe_examples=num_examples), data).sample


def test_the_sample_is_fixed_and_drawn_from_the_whole_set() -> None:
    sample = choose_sample(1_000, 64)
    assert sample == choose_sample(1_000, 64) == sorted(set(sample))
    assert len(sample) == 64
    assert sample[0] < 100
    assert sample[-1] > 900
    assert choose_sample(5, 64) == [0, 1, 2, 3, 4]


def test_a_run_with_a_probe(small: Build) -> None:
    """Six steps with dropout: measured before training, after every fourth step and at the end."""
    config = small("reg=none", "task.limit_train=48", "data.eval_batch_size=3", "monitor.every=4",
                   "monitor.probe_examples=7", f"monitor.measures=[{','.join(MEASURES)}]",
                   "trainer.keep_models=4")  # fmt: skip
    folder = Path(config.run.root) / run(config).name
    rows = read_probe_rows(folder)
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "0"), ("0", "4"), ("0", "6")]
    assert [row["step"] for row in read_metrics(folder) if row["geometry/layer_1/isoscore"]] == ["0", "4"]
    for row in rows:
        layers = compute_hidden_states(folder / "models" / f"step-{row['step']}", choose_sample(16, 7))
        for state, points in zip(STATES, layers, strict=True):
            for name, value in compute_measures_naively(points, MEASURES).items():
                # The run is float32; rounding errors have directions without variance, to which the rank is sensitive.
                rel = 1e-3 if name == "effective_rank" else 1e-4
                assert float(row[f"probe/{state}/{name}"]) == pytest.approx(value, rel=rel), (state, name)
    with (folder / "geometry_over_steps.csv").open(newline="") as file:
        readings = [(row["source"], row["step"], row["layer"]) for row in csv.DictReader(file)]
    sources = [("probe", "0"), ("training", "0"), ("probe", "4"), ("training", "4"), ("probe", "6")]
    assert readings == [(*source, state) for source in sources for state in STATES]
    assert (folder / "geometry_over_steps.png").read_bytes().startswith(b"\x89PNG")


class Batches(L.Callback):
    """Keeps the batches of a training."""

    def __init__(self) -> None:
        self.batches: list[dict[str, torch.Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)


def test_readings_of_the_training_are_of_all_micro_batches_of_a_step(setting: Any, harness: Any) -> None:
    """Without dropout, and with steps that are too small to change the states."""
    module, data, batches = setting.module(lr=1e-12), setting.data(), Batches()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in module.modules()]
    watch = WatchTraining(MonitorConfig(every=2, measures=MEASURES, probe_examples=None), data)
    trainer = harness.trainer(batches, watch, limit_train_batches=6, accumulate_grad_batches=2)
    trainer.fit(module, datamodule=data)
    readings = watch.monitor.readings
    assert [(reading.step, reading.source) for reading in readings] == [(0, "training"), (2, "training")]
    assert [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in module.modules()] == hooks
    model = copy.deepcopy(setting.model).eval()
    for reading, micro_batches in zip(readings, (batches.batches[:2], batches.batches[4:]), strict=True):
        points: dict[str, list[np.ndarray]] = {state: [] for state in STATES}
        for batch in micro_batches:
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
            states = model(**inputs, output_hidden_states=True).hidden_states
            for state, values in zip(STATES, states, strict=True):
                points[state].append(values[batch["attention_mask"].bool()].detach().double().numpy())
        for state in STATES:
            expected = compute_measures_naively(np.concatenate(points[state]), MEASURES)
            assert reading.values[state]["sequences"] == 16
            assert {name: reading.values[state][name] for name in MEASURES} == pytest.approx(expected, rel=1e-3)


def test_modes_and_random_state_are_restored(setting: Any, harness: Any) -> None:
    module, data = setting.module(), setting.data()
    embeddings = module.model.bert.embeddings.eval()
    modes = [submodule.training for submodule in module.modules()]
    watch = WatchTraining(MonitorConfig(every=1, probe_examples=8), data)
    trainer = harness.trainer(watch)
    trainer.strategy.connect(module)
    random_state = torch.get_rng_state()
    watch.setup(trainer, module, "fit")
    watch.on_train_start(trainer, module)
    assert watch.monitor.readings[0].source == "probe"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [submodule.training for submodule in module.modules()] == modes
    assert not embeddings.training


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ((), [(1, 2)]),
        # Lightning alone would end this training without a validation.
        (("trainer.check_val_every_n_epoch=3",), [(1, 2)]),
        (("trainer.check_val_every_n_epoch=null", "trainer.val_check_interval=1"), [(1, 1), (1, 2)]),
        (("monitor.every=3", "data.batch_size=16"), [(1, 2), (2, 4)]),  # a reading in the middle of the third epoch
    ],
)
def test_a_collapse_ends_the_training(small: Build, caplog: Any, settings: tuple[str, ...], steps: list[Any]) -> None:
    """Every InterSim is above -1, so that the second reading is the last one."""
    config = small("reg=none", "trainer.max_epochs=4", "monitor.every=1", "monitor.stop_at_inter_sim=-1",
                   "monitor.readings=2", *settings)  # fmt: skip
    record = run(config)
    assert record.status == "finished"
    assert [(entry["epoch"], entry["step"]) for entry in record.epochs] == steps
    [message] = [line for line in caplog.messages if "collapsed" in line]
    assert message.startswith(f"step {config.monitor.every}: embeddings may have collapsed: inter_sim was ")
    assert message.endswith("; the training ends")


def test_alarms() -> None:
    assert make_alarms(MonitorConfig(every=1, action=None)) == []
    stops = make_alarms(MonitorConfig(every=1, action="stop", readings=5))
    assert [(alarm.measure, alarm.readings, alarm.action) for alarm in stops] == [
        (alarm.measure, 5, "stop") for alarm in DEFAULT_ALARMS
    ]
    *warnings, last = make_alarms(MonitorConfig(every=1, measures=["inter_sim"], stop_at_inter_sim=0.9))
    assert [alarm.measure for alarm in warnings] == ["inter_sim"]
    assert not any(alarm.action == "stop" for alarm in warnings)
    assert last == istar.Alarm("inter_sim", above=0.9, readings=3, action="stop")


def test_a_warning_is_logged_and_the_training_goes_on(setting: Any, harness: Any, caplog: Any) -> None:
    module, data = setting.module(), setting.data()
    for name, parameter in module.model.named_parameters():
        if "layer.1.output" in name:
            torch.nn.init.zeros_(parameter)  # all states of the last layer are equal, and have no gradient
    watch = WatchTraining(MonitorConfig(every=1, readings=1, probe_examples=None), data)
    with caplog.at_level(logging.WARNING):
        trainer = harness.trainer(watch, limit_train_batches=3)
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == 3
    first, second = (line for line in caplog.messages if "collapsed" in line)
    assert first.startswith("step 0: layer_2 may have collapsed: inter_sim was nan")
    assert second.startswith("step 0: layer_2 may have collapsed: participation_ratio was nan")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("monitor.every=0", "monitor.every=0 is too small"),
        ("monitor.probe_examples=0", "too small"),
        ("monitor.readings=0", "too small"),
        ("monitor.points=1", "too small"),
        ("monitor.action=ignore", "monitor.action=ignore is not known; expected one of warn, stop"),
        ("monitor.every=5 monitor.stop_at_inter_sim=2", "not an average cosine"),
        ("monitor.stop_at_inter_sim=0.5", r"stop_at_inter_sim=0\.5 stops nothing without readings; set monitor\.every"),
        ("monitor.action=stop", r"monitor\.action=stop stops nothing without readings"),
        ("monitor.measures=[intersim]", r"monitor\.measures=intersim.*did you mean inter_sim"),
        ("monitor.measures=inter_sim", "not a list"),
        ("monitor.every=5 monitor.stop_at_inter_sim=0.5 monitor.measures=[isoscore]", "needs inter_sim among"),
        ("trainer.measure_every_n_steps=5", "no such key"),
    ],
)
def test_refusals(small: Build, overrides: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(*overrides.split())


def test_a_process_without_examples_is_refused(setting: Any) -> None:
    """With FSDP, it would leave the others waiting."""
    watch = WatchTraining(MonitorConfig(every=1, probe_examples=3), setting.data())
    trainer: Any = SimpleNamespace(world_size=4)
    with pytest.raises(UserError, match=r"monitor\.probe_examples=3 is less than one for each of 4 processes"):
        watch.setup(trainer, setting.module(), "fit")
    trainer.world_size = 3
    watch.setup(trainer, setting.module(), "fit")


@pytest.mark.slow
def test_two_processes_measure_together_what_one_measures(tmp_path: Path, start: Start) -> None:
    arguments = ("reg=none", "monitor.every=2", "monitor.measures=[isoscore,inter_sim]", "trainer.keep_models=log",
                 "task.limit_train=24", "task.limit_validation=9", "trainer.max_epochs=1", "trainer.accelerator=cpu",
                 "trainer.progress_bar=false")  # fmt: skip
    settings = (
        ("one", "trainer.devices=1", "data.batch_size=8"),
        ("two", "trainer.devices=2", "trainer.strategy=ddp", "data.batch_size=4"),
    )
    jobs = [start(tmp_path / name, *arguments, *options) for name, *options in settings]
    single_folder, ddp_folder = (next((job.folder / "runs").glob("demo-*")) for job in jobs if job.wait().well())
    single_rows, ddp_rows = read_probe_rows(single_folder), read_probe_rows(ddp_folder)
    assert [row["step"] for row in single_rows] == [row["step"] for row in ddp_rows] == ["0", "2", "3"]
    for name in single_rows[0]:
        if name.startswith("probe/"):
            # Before training both have the same weights.
            assert float(single_rows[0][name]) == pytest.approx(float(ddp_rows[0][name]), rel=1e-5), name
    for folder in (single_folder, ddp_folder):
        assert [row["step"] for row in read_metrics(folder) if row["geometry/layer_1/isoscore"]] == ["0", "2"]
        assert sorted(path.name for path in (folder / "models").iterdir()) == [f"step-{n}" for n in range(4)]
