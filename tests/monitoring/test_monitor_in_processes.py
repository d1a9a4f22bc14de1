"""Real gloo processes read together what one process reads; processes without passes or with errors take part."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import istar
from istar.monitoring import stacked_measures
from tests.forks import process_group, run_in_processes
from tests.monitoring.builders import MEASURES, make_batches, make_bert

STEPS = 3


def split(batch: dict[str, torch.Tensor], rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    return {name: values[rank::num_ranks] for name, values in batch.items()}


def train_alone(model: Any, batches: list[dict[str, torch.Tensor]]) -> istar.Monitor:
    monitor = istar.Monitor(model, every=2, measures=MEASURES, points=10_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
    return monitor


def check_equal(readings: list[Any], expected: list[Any]) -> None:
    assert [reading.step for reading in readings] == [reading.step for reading in expected]
    for reading, alone in zip(readings, expected, strict=True):
        assert list(reading.values) == list(alone.values)
        for state, values in reading.values.items():
            for name, value in alone.values[state].items():
                # The norms after a LayerNorm are nearly equal, so that their error is a rounding error.
                absolute = 1e-6 if name.startswith("average_norm") else 1e-9
                assert values[name] == pytest.approx(value, rel=1e-6, abs=absolute), (reading.step, state, name)


def watch_in_parallel(rank: int, num_ranks: int, store: str, way: str) -> None:
    """Train with the examples of each batch divided among the processes, and compare with one process."""
    batches = list(make_batches(STEPS, batch_size=8))
    expected = train_alone(make_bert(), batches).readings
    with process_group(rank, num_ranks, store):
        model: Any = make_bert()
        if way == "DDP, watched before":
            monitor = istar.Monitor(model, every=2, measures=MEASURES, points=10_000)
        called = model
        if way.startswith("DDP"):
            called = DistributedDataParallel(model)
        elif way == "FSDP2":
            for layer in model.bert.encoder.layer:
                fully_shard(layer)
            fully_shard(model)
        if way != "DDP, watched before":
            monitor = istar.Monitor(called, every=2, measures=MEASURES, points=10_000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            called(**split(batch, rank, num_ranks)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
        check_equal(monitor.readings, expected)


@pytest.mark.parametrize(
    ("num_ranks", "way"),
    [(2, "DDP, watched before"), (2, "DDP"), (2, "FSDP2"), pytest.param(4, "DDP", marks=pytest.mark.slow)],
)
def test_processes_read_what_one_process_reads(tmp_path, num_ranks, way):
    run_in_processes(watch_in_parallel, (num_ranks, str(tmp_path / "store"), way), num_ranks)


def watch_unevenly(rank: int, store: str) -> None:
    """Step 0: the second process calls no model. Step 1: its hook fails. Step 2: the first process calls no model."""
    batches = list(make_batches(STEPS))
    alone = make_bert()
    expected = istar.Monitor(alone, every=1, measures=MEASURES, points=10_000)
    for batch in batches:
        alone(**batch).loss.backward()
        expected.step()
    # A stack of states depends on their points, of which the processes have different numbers.
    stacked_measures._MAX_STACK_BYTES = 4_000
    with process_group(rank, 2, store):
        model = make_bert()
        monitor = istar.Monitor(model, every=1, measures=MEASURES, points=10_000)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step, batch in enumerate(batches):
                if (rank, step) not in ((1, 0), (0, 2)):
                    model(**batch).loss.backward()
                if (rank, step) == (1, 1):
                    monitor._watcher.failure = "the hook failed"
                assert monitor.step() is not None
        assert [str(warning.message) for warning in caught if "nothing was read" in str(warning.message)] == []
        check_equal(monitor.readings, expected.readings)


def test_processes_without_a_pass_or_with_an_error_take_part(tmp_path: Path):
    run_in_processes(watch_unevenly, (str(tmp_path / "store"),), 2)


def share_the_points(rank: int, store: str) -> None:
    with process_group(rank, 2, store):
        [batch] = make_batches(1, batch_size=8)
        model = make_bert()
        monitor = istar.Monitor(model, points=20)
        model(**split(batch, rank, 2)).loss.backward()
        reading = monitor.step()
        assert reading is not None
        assert {values["points"] for values in reading.values.values()} == {20}
        everywhere = [None, None]
        dist.all_gather_object(everywhere, reading.values)
        assert everywhere[0] == everywhere[1]


def test_processes_share_the_points_and_have_the_same_values(tmp_path):
    run_in_processes(share_the_points, (str(tmp_path / "store"),), 2)
