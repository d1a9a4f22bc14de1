"""How the benchmarks compare contenders, and a short version of `python -m benchmarks.finetune`."""

import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks import common, finetune, geometry, vectors, waiting
from benchmarks.alarms import __main__ as alarms
from benchmarks.alarms.rates import FirstAlarm, find_first_alarms, read_runs

# ---- rotation and paired ratios


@pytest.mark.parametrize("n", [6, 7, 8, 12, 14])
def test_the_interval_covers_the_median_in_95_percent_of_all_samples_and_is_the_narrowest_one(n: int) -> None:
    interval = common.median_interval(range(1, n + 1))
    assert interval is not None
    low, high = (int(rank) for rank in interval)
    assert low + high == n + 1

    def coverage(rank: int) -> float:
        # All equally likely patterns of values below and above the median; the interval misses it where the
        # rank-th smallest value is above it or the rank-th largest below.
        patterns = itertools.product((False, True), repeat=n)
        return sum(rank <= sum(is_below) <= n - rank for is_below in patterns) / 2**n

    assert coverage(low) >= 0.95 > coverage(low + 1)


def test_a_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_the_medians() -> None:
    # The machine is ten times slower in half of the rounds; only pairs show that `new` takes twice as long.
    values = {"new": [2.0, 20.0, 2.2, 22.0, 1.8, 18.0, 2.0], "old": [1.0, 10.0, 1.0, 10.0, 1.0, 10.0, 1.0]}
    assert common.paired_ratio(values, "new", "old") == "2.000 (1.800 to 2.200)"
    assert common.paired_ratio(values, "old", "old") == "1"


def test_each_round_starts_with_the_next_contender() -> None:
    order: list[str] = []
    calls = {name: lambda round_number, name=name: order.append(f"{name}{round_number}") for name in "abc"}
    results_by_name = common.run_in_rotation(calls, 4)
    assert order == ["a1", "b1", "c1", "b2", "c2", "a2", "c3", "a3", "b3", "a4", "b4", "c4"]
    assert {name: len(values) for name, values in results_by_name.items()} == {"a": 4, "b": 4, "c": 4}


# ---- benchmarks.step and benchmarks.geometry


def test_a_decoder_predicts_the_tokens_of_its_batch_that_are_not_padding() -> None:
    shape = common.SHAPES["tiny-decoder"]
    inputs = common.random_batch(shape, torch.device("cpu"), real_share=0.5)
    is_real = inputs["attention_mask"].bool()
    assert torch.equal(inputs["labels"][is_real], inputs["input_ids"][is_real])
    assert (inputs["labels"][~is_real] == -100).all()
    assert (~is_real).any()
    loss = shape.make_model()(**inputs).loss
    assert loss.item() == pytest.approx(math.log(50_304), rel=0.05)


@pytest.mark.parametrize("model", [[], ["--decoder", "--dtype", "bf16"]])
def test_measuring_is_compared_with_the_forward_pass_of_an_encoder_or_a_decoder(
    model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--layers", "1", "--width", "32", "--vocabulary", "300", "--tokens", "400", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["geometry", "--device", "cpu", *size, *model])
    geometry.main()
    output = capsys.readouterr().out
    assert f"{'decoder' if model else 'encoder'} of 1 layers of 32, {'bf16' if model else 'float32'}, cpu" in output
    assert "istar measure" in output


# ---- benchmarks.vectors


def test_a_cloud_and_its_neighbours_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vectors, "CASES", (vectors.Case(2_000, 8, "basic", 2),))
    monkeypatch.setattr("sys.argv", ["vectors", "--share", "0.1", "--rounds", "1"])
    vectors.main()
    output = capsys.readouterr().out
    assert "load of the machine" in output
    for row in ("200 x 8", "10 nearest neighbours of 1,000 x 384", vectors.PEER):
        assert row in output


# ---- benchmarks.finetune


@pytest.mark.slow
def test_the_demo_task(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    options = ["--limit-train", "64", "--limit-validation", "16", "--epochs", "2", "--max-length", "64"]
    assert finetune.main(options) == 0
    output = capsys.readouterr().out
    assert "demo, float32, batches of 32, epochs: 2, runs of each: 1" in output
    for contender in ("istar", "Trainer, padded to 64 (run_glue)", "Trainer, grouped by length"):
        assert contender in output


@pytest.fixture
def clock() -> finetune.Clock:
    """A clock of 20 examples in batches of 10 that is not connected to a model."""
    clock = finetune.Clock.__new__(finetune.Clock)
    clock.epochs, clock.examples, clock.batch_size, clock.steps, clock.process_start = 2, 20, 10, 2, 90.0
    clock.batch_starts, clock.step_ends = [100.0, 105.0, 200.0, 201.0], [104.0, 106.0, 201.0, 202.0]
    return clock


def test_examples_per_second_leave_out_validations_and_the_first_step(clock: finetune.Clock) -> None:
    measurements = clock.measurements()
    # 10 examples in 2 seconds after the first step, 20 in 2 seconds after a long validation.
    assert measurements["rate"] == pytest.approx(30 / 4)
    assert measurements["first"] == 14.0


# ---- benchmarks.waiting


def test_a_process_is_timed_and_its_end_is_checked() -> None:
    python = (sys.executable, "-S", "-c")
    wall, cpu = waiting.time_process(waiting.Contender(lambda _: [*python, "print('done')"], "", output="done"), 0)
    assert wall > 0
    assert cpu > 0
    printed = waiting.Contender(lambda i: [*python, f"print({i} + 0.5)"], "", prints_ms=True)
    assert waiting.time_process(printed, 7).wall == 7.5
    waiting.time_process(waiting.Contender(lambda _: [*python, "import sys; sys.exit(2)"], "", exit_code=2), 0)
    for wrong in (
        waiting.Contender(lambda _: [*python, "import sys; sys.exit(2)"], ""),
        waiting.Contender(lambda _: [*python, "print('done')"], "", output="first step"),
    ):
        with pytest.raises(SystemExit, match="ended with exit status"):
            waiting.time_process(wrong, 0)


# ---- benchmarks.alarms


def make_readings(inter_sims: Sequence[float], ratios: Sequence[float], state: str = "last") -> pd.DataFrame:
    """Return the readings of one state every 10 steps, as a monitor saves them."""
    steps = range(0, 10 * len(inter_sims), 10)
    return pd.DataFrame({"step": steps, "layer": state, "inter_sim": inter_sims, "participation_ratio": ratios})


def test_the_alarms_of_a_saved_training_are_those_of_the_monitor() -> None:
    hidden = make_readings([0.5, 0.9, 0.96, 0.97, 0.98, 0.98], [10.0, 3.0, 1.45, 1.3, 1.4, 1.4], "hidden")
    last = make_readings([0.5, 0.9, 0.96, 0.97, 0.98, 0.98], [30.0] * 6)
    readings = pd.concat([hidden, last]).sort_values("step", kind="stable")
    expected = [FirstAlarm("inter_sim", 40, "last"), FirstAlarm("participation_ratio", 40, "hidden")]
    assert find_first_alarms(readings, 10) == expected
    assert find_first_alarms(last.assign(inter_sim=[0.5, 0.9, 0.96, 0.97, 0.94, 0.98]), 10) == []


def test_a_longer_cadence_skips_readings() -> None:
    cosines = [0.5, *[0.99] * 12, 0.5, 0.99, 0.99]
    readings = make_readings(cosines, [9.0] * len(cosines))
    assert find_first_alarms(readings, 10)[0].step == 30
    assert find_first_alarms(readings, 50)[0].step == 150


def test_a_training_is_measured_and_judged_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--folder", str(tmp_path), "--only", "regression", "--seeds", "1"]
    for _ in range(2):
        assert alarms.main(["train", *arguments]) == 0
    assert len((tmp_path / "outcomes.csv").read_text().splitlines()) == 2
    runs = read_runs(tmp_path)
    assert [(run.kind, run.seed, run.group, run.outcome) for run in runs] == [
        ("regression", 1000, "healthy", "healthy")
    ]
    assert alarms.main(["count", "--folder", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "healthy, every=50: alarms in" in output
    assert "of 1 runs, " in output
