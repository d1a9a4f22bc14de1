"""How the benchmarks compare contenders, and a short version of `python -m benchmarks.finetune`."""

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom

from benchmarks import common, finetune, geometry, step, sweep, waiting
from istar.finetune.execute.finished_runs import read_finished_run
from istar.finetune.execute.identify import identify
from istar.reports.run_frame import read_runs
from istar.runs.record import GEOMETRY, write_result
from tests.finished_runs import make_finished_record

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


def test_the_ranks_of_the_interval_are_quantiles_of_the_binomial_distribution() -> None:
    for n in (*range(6, 30), 119):
        # The usual table of ranks: the largest k with P(B <= k - 1) <= 0.025.
        rank = max(k for k in range(1, n) if binom.cdf(k - 1, n, 0.5) <= 0.025)
        shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()
        assert common.median_interval(shuffled) == (rank - 1, n - rank)


def test_fewer_than_six_rounds_have_no_interval_and_the_table_says_so() -> None:
    assert common.median_interval([1, 2, 3, 4, 5]) is None
    values = {"new": [2.0, 9.0, 4.0, 6.0, 5.0], "old": [1.0, 3.0, 4.0, 1.0, 1.0]}
    assert common.paired_ratio(values, "new", "old") == "3.000 (1.000 to 6.000)"
    assert "the lowest and the highest" in common.ratio_note(5)
    assert "its 95% confidence interval" in common.ratio_note(6)
    assert "single round" in common.ratio_note(1)


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


def test_the_warm_up_round_is_not_counted() -> None:
    clock_times = iter([0.0, 100.0, 0.0, 1.0, 0.0, 2.0])
    seconds = common.time_in_rotation({"a": lambda: None}, 2, torch.device("cpu"), lambda: next(clock_times))
    assert seconds == {"a": [1.0, 2.0]}


def test_emulated_bfloat16_is_noted_with_its_factor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "measure_bfloat16_ratio", {"cpu": 53.2, "cuda": 0.5}.__getitem__)
    common.note_emulated_bfloat16("cuda")
    assert capsys.readouterr().out == ""
    common.note_emulated_bfloat16("cpu")
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert "53 times as long in bfloat16 as in float32" in output


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_number_of_rounds_is_a_positive_integer(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected a positive integer, not '{text}'"):
        common.positive_int(text)


def test_the_peak_of_each_call_on_a_gpu_starts_at_a_reset_after_its_preparation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: len(events) * 2**20)
    calls = {name: lambda name=name: events.append(name) for name in "ab"}
    preparations = {"b": lambda: events.append("prepare b")}
    assert common.measure_gpu_peaks_mb(calls, torch.device("cuda"), preparations) == {"a": 2.0, "b": 5.0}
    assert events == ["reset", "a", "prepare b", "reset", "b"]


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


def test_the_decoder_of_1b_has_the_parameters_of_pythia() -> None:
    with torch.device("meta"):
        model = common.SHAPES["pythia-1b-8x512"].make_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_011_781_632


def test_a_compiled_step_is_not_for_trainer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["step", "--compile", "--only", "istar, bf16", "PenaltyTrainer, istar, bf16"])
    with pytest.raises(SystemExit):
        step.main()
    assert "--compile is not for PenaltyTrainer, istar, bf16" in capsys.readouterr().err


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


# ---- benchmarks.sweep


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Replace the execution of commands in a benchmark of sweeps by 3 seconds each; returns the list of commands."""
    executed: list[tuple[str, ...]] = []

    def run_command(*arguments: str) -> float:
        executed.append(arguments)
        return 3.0

    monkeypatch.setattr(sweep, "run_command", run_command)
    return executed


def is_measured(command: tuple[str, ...]) -> bool:
    return "trainer.fast_dev_run=true" not in command


def test_throughput_executes_the_same_runs_by_the_sweep_and_by_the_loop_in_rotation(
    commands: list[tuple[str, ...]], tmp_path: Path
) -> None:
    options = sweep.make_parser().parse_args(["--trials", "3", "--rounds", "2", "--train", "reg=none"])
    sweep.measure_throughput(options, tmp_path)
    kinds, folders = [], set()
    for command in filter(is_measured, commands):
        assert "reg=none" in command
        kinds.append("sweep" if "-m" in command else "loop")
        [seed] = [argument for argument in command if argument.startswith("seed=")]
        [folder] = [argument for argument in command if argument.startswith("run.root=")]
        assert seed in (["seed=range(1,4)"] if "-m" in command else ["seed=1", "seed=2", "seed=3"])
        folders.add((folder, seed))
    assert kinds == ["sweep", "loop", "loop", "loop", "loop", "loop", "loop", "sweep"]
    # A run in the folder of an earlier round would be skipped instead of executed.
    assert len(folders) == len(kinds)


def test_finished_runs_are_finished_for_a_sweep(commands: list[tuple[str, ...]], tmp_path: Path) -> None:
    template = tmp_path / "template" / "demo-template"
    write_result(make_finished_record("demo-template", sweep.compose_config()), template)
    (template / GEOMETRY).write_text("[]")
    sweep.write_finished_runs(2, tmp_path)
    for seed in (1, 2):
        config = sweep.compose_config(f"run.root={tmp_path / 'runs'}", f"seed={seed}")
        record = read_finished_run(identify(config).folder, config)
        assert record is not None
        assert record.config["seed"] == seed


def test_skipping_is_compared_at_the_same_number_of_runs(
    commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sweep, "write_finished_runs", lambda count, folder: None)
    options = sweep.make_parser().parse_args(["--done", "7", "--many", "30", "--rounds", "1"])
    table = sweep.measure_skip(options, tmp_path)
    seeds = [argument for command in commands for argument in command if argument.startswith("seed=")]
    # Each contender once, after the warm-up with the larger number of runs.
    assert (seeds[0], sorted(seeds[1:])) == ("seed=range(1,31)", ["seed=range(1,31)", *["seed=range(1,8)"] * 2])
    names, *_, ratios = ([str(cell) for cell in column.cells] for column in table.columns)
    assert dict(zip(names, ratios, strict=True)) == {
        "istar, 7 finished runs": "1.000",
        "Hydra's sweeper, 7 calls of an empty function": "1",
        "istar, 30 finished runs": "",
    }


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


def test_the_order_rotates_by_seed_and_rates_are_compared_by_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []
    rates = {"istar": [10.0, 300.0, 50.0], "grouped": [10.0, 100.0, 10.0]}

    def train_in_new_process(
        name: str, options: Any, folder: str, seed: int, rehearsal: bool = False
    ) -> dict[str, float]:
        if rehearsal:
            return {}
        order.append((seed, name))
        return {"rate": rates[name][seed - 1], "first": 1.0, "process": 2.0, "metric": 0.5}

    monkeypatch.setattr(finetune, "train_in_new_process", train_in_new_process)
    assert finetune.main(["--seeds", "3", "--contenders", "istar", "grouped"]) == 0
    assert order == [(1, "istar"), (1, "grouped"), (2, "grouped"), (2, "istar"), (3, "istar"), (3, "grouped")]
    # The ratio of the medians would be 5.
    assert "3.000 (1.000 to 5.000)" in capsys.readouterr().out


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


def test_a_number_of_steps_that_does_not_fit_the_epochs_is_an_error(clock: finetune.Clock) -> None:
    clock.epochs = 1
    with pytest.raises(SystemExit, match="4 batches and 4 steps; expected 2"):
        clock.measurements()


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


def test_waiting_for_a_report_is_compared_at_the_same_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_finished: list[int] = []

    def time_process(contender: waiting.Contender, round_number: int) -> waiting.Duration:
        command = contender.command(round_number)
        folder = next(Path(part) for part in command if Path(part).name == "runs-6")
        num_finished.append(read_runs(folder).frame["status"].eq("finished").sum())
        return waiting.Duration(*((8.0, 6.0) if "report" in command else (4.0, 2.0)))

    monkeypatch.setattr(waiting, "time_process", time_process)
    monkeypatch.setattr("sys.argv", ["waiting", "--only", "report", "--runs", "6", "--rounds", "2"])
    waiting.main()
    output = capsys.readouterr().out
    assert num_finished == [6] * 6
    assert "2.000 (2.000 to 2.000)" in output  # wall seconds
    assert "3.000 (3.000 to 3.000)" in output  # CPU seconds
