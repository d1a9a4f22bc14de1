"""The short version of `python -m benchmarks.finetune`."""

import pytest

from benchmarks import finetune


@pytest.mark.slow
def test_the_demo_task(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    options = ["--limit-train", "64", "--limit-validation", "16", "--epochs", "2", "--max-length", "64"]
    assert finetune.main(options) == 0
    printed = capsys.readouterr().out
    assert "demo, float32, batches of 32, epochs: 2, runs of each: 1" in printed
    for contender in ("istar", "Trainer, padded to 64 (run_glue)", "Trainer, grouped by length"):
        assert contender in printed


def test_examples_per_second_leave_out_validations_and_the_first_step() -> None:
    clock = finetune.Clock.__new__(finetune.Clock)
    clock.epochs, clock.examples, clock.batch_size, clock.steps, clock.started = 2, 20, 10, 2, 90.0
    clock.begun, clock.stepped = [100.0, 105.0, 200.0, 201.0], [104.0, 106.0, 201.0, 202.0]
    figures = clock.figures()
    # 10 examples in 2 seconds behind the first step, 20 in 2 seconds behind a long validation.
    assert figures["rate"] == pytest.approx(30 / 4)
    assert figures["first"] == 14.0


def test_a_count_that_is_not_that_of_the_epochs_is_no_figure() -> None:
    clock = finetune.Clock.__new__(finetune.Clock)
    clock.epochs, clock.examples, clock.batch_size, clock.steps, clock.started = 1, 20, 10, 2, 0.0
    clock.begun, clock.stepped = [1.0], [2.0]
    with pytest.raises(SystemExit, match="1 batches and 1 steps; expected 2"):
        clock.figures()
