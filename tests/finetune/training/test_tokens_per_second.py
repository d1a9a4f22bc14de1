"""The logged tokens per second: the number of tokens, and the time; `test_processes.py` has several processes."""

import lightning as L
import torch

from istar.finetune.training import module
from istar.finetune.training.module import token_mask
from tests.finetune.training.conftest import trainer


class Clock:
    """Advances by one second with every reading."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        self.seconds += 1
        return self.seconds


class Rates(L.Callback):
    """Records the tokens of each micro-batch, and the rate of each logged step with the number of the step."""

    def __init__(self):
        self.num_tokens, self.by_step = [], {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.num_tokens.append(sum(int(row.sum()) for row in batch["attention_mask"]))

    def on_train_batch_end(self, trainer, pl_module, *arguments):
        if trainer.global_step and trainer.global_step % trainer.log_every_n_steps == 0:
            self.by_step[trainer.global_step] = pl_module.step_metrics["train/tokens_per_second"]


def test_tokens_without_padding():
    ids = torch.zeros(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert token_mask({"input_ids": ids, "attention_mask": mask}).sum().item() == 4
    assert token_mask({"input_ids": ids}).sum().item() == 8
    # A mask between tokens, as of packed documents, does not mark padding.
    assert token_mask({"input_ids": ids, "attention_mask": torch.ones(2, 1, 4, 4)}).sum().item() == 8


def test_rates_are_tokens_over_seconds(setting, monkeypatch):
    """Two steps of two micro-batches lie between two rows. The clock advances at its readings only: start, row, row."""
    rates = Rates()
    monkeypatch.setattr(module, "time", Clock())
    trainer(rates, accumulate_grad_batches=2, log_every_n_steps=2, max_steps=6).fit(
        setting.module(), setting.data(batch_size=8)
    )
    assert rates.by_step == {step: sum(rates.num_tokens[2 * step - 4 : 2 * step]) for step in (2, 4, 6)}


def test_validations_take_no_time(setting, monkeypatch):
    """A validation takes place after every second step, and a row is logged after every third."""
    rates, clock = Rates(), Clock()
    monkeypatch.setattr(module, "time", clock)

    class SlowValidation(L.Callback):
        def on_validation_batch_end(self, *arguments):
            clock.seconds += 1_000

    settings = {"limit_val_batches": 1.0, "val_check_interval": 2}
    trainer(rates, SlowValidation(), log_every_n_steps=3, max_steps=6, **settings).fit(
        setting.module(), setting.data(batch_size=8)
    )
    # The time and the tokens of a row begin after the latest validation, which follows steps 2 and 4.
    assert rates.by_step == {3: rates.num_tokens[2], 6: sum(rates.num_tokens[4:6])}
