"""Tokens per second: the number of tokens, in one process and in two, and the estimate of the remaining time."""

import os
from types import SimpleNamespace

import lightning as L
import torch
import torch.distributed as dist

from istar.finetune.training import token_rate
from istar.finetune.training.module import token_mask
from istar.finetune.training.token_rate import (
    TOKENS_PER_SECOND_KEY,
    TokenRate,
    TrainingProgressBar,
    estimate_remaining_seconds,
)
from tests.finetune.training.conftest import trainer
from tests.forks import run_in_processes


class Clock:
    """Advances by one second with every reading."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        self.seconds += 1
        return self.seconds


class TokenCounter(L.Callback):
    """Counts the tokens of each micro-batch."""

    def __init__(self):
        self.values = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.values.append(sum(int(row.sum()) for row in batch["attention_mask"]))


def record_logged_rates(monkeypatch):
    rates = []
    monkeypatch.setattr(
        token_rate,
        "log_immediately",
        lambda trainer, metrics: rates.append((trainer.global_step, metrics[TOKENS_PER_SECOND_KEY])),
    )
    return rates


def test_tokens_without_padding():
    ids = torch.zeros(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert token_mask({"input_ids": ids, "attention_mask": mask}).sum().item() == 4
    assert token_mask({"input_ids": ids}).sum().item() == 8
    # A mask between tokens, as of packed documents, does not mark padding.
    assert token_mask({"input_ids": ids, "attention_mask": torch.ones(2, 1, 4, 4)}).sum().item() == 8


def test_rates_are_tokens_over_seconds(setting, monkeypatch):
    """Two steps of two micro-batches lie between two rows. The clock advances at its readings only: start, row, row."""
    rates, counter = record_logged_rates(monkeypatch), TokenCounter()
    monkeypatch.setattr(token_rate, "time", Clock())
    rate = TokenRate(max_steps=5)
    lightning_trainer = trainer(counter, rate, accumulate_grad_batches=2, log_every_n_steps=2, max_steps=8)
    lightning_trainer.fit(setting.module(), setting.data(batch_size=8))
    assert rates == [(1, sum(counter.values[:4])), (3, sum(counter.values[4:8])), (5, sum(counter.values[8:12])),
                     (7, sum(counter.values[12:16]))]  # fmt: skip


def test_validations_take_no_time(setting, monkeypatch):
    rates, counter, clock = record_logged_rates(monkeypatch), TokenCounter(), Clock()
    monkeypatch.setattr(token_rate, "time", clock)

    class SlowValidation(L.Callback):
        def on_validation_batch_end(self, *arguments):
            clock.seconds += 1_000

    settings = {"limit_val_batches": 1.0, "val_check_interval": 1}
    lightning_trainer = trainer(counter, TokenRate(), SlowValidation(), log_every_n_steps=2, max_steps=4, **settings)
    lightning_trainer.fit(setting.module(), setting.data(batch_size=8))
    # One validation precedes the first row and two lie between the rows; each reads the clock at its start and end.
    assert rates[0] == (1, sum(counter.values[:2]) / 2)
    assert rates[1] == (3, sum(counter.values[2:4]) / 3)


def write_rate_of_two_batches(rank, folder):
    """Write the rate of a step of two micro-batches with 3 + 5 tokens on rank 0 and 4 + 6 on rank 1, in a second."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    token_rate.time = Clock()
    logger = SimpleNamespace(log_metrics=lambda metrics, step: torch.save(metrics, f"{folder}/{rank}.pt"))
    mock_trainer = SimpleNamespace(
        global_step=0, current_epoch=0, log_every_n_steps=1, estimated_stepping_batches=1, loggers=[logger]
    )
    rate = TokenRate()
    rate.on_train_start(mock_trainer, None)
    for num_tokens in (3, 5):
        mask = (torch.arange(10) < num_tokens + rank).long()[None]
        rate.on_train_batch_start(mock_trainer, None, {"input_ids": mask, "attention_mask": mask}, 0)
    rate.on_before_optimizer_step(mock_trainer, None, None)
    dist.barrier()
    # Skip the interpreter's shutdown, in which the remains of a process group may abort.
    os._exit(0)


def test_two_processes_count_together(tmp_path):
    run_in_processes(write_rate_of_two_batches, (str(tmp_path),), 2)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == {"epoch": 0, TOKENS_PER_SECOND_KEY: 18.0}


def test_time_to_go(setting, monkeypatch):
    """After two of ten steps the clock has been read three times: at the start, at the first batch and now."""
    assert estimate_remaining_seconds(elapsed_seconds=30, completed_steps=3, remaining_steps=4) == 40
    monkeypatch.setattr(token_rate, "time", Clock())
    rate = TokenRate(max_steps=10)
    shown_metrics = []

    class ProgressRecorder(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *arguments):
            shown_metrics.append(TrainingProgressBar(rate).get_metrics(trainer, pl_module))

    trainer(rate, ProgressRecorder(), log_every_n_steps=2, max_steps=3).fit(
        setting.module(), setting.data(batch_size=8)
    )
    assert "to go" not in shown_metrics[0]
    # Lightning's own limit of three steps is lower than that of the callback: one step, at one second a step.
    assert (rate.remaining_time, shown_metrics[1]["to go"]) == ("0:00:01", "0:00:01")
    assert shown_metrics[1]["tokens/s"] == f"{rate.tokens_per_second:,.0f}"
