"""A pass without gradients between a pass and its loss, and the random numbers after a refresh."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import istar


@pytest.fixture
def model():
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=20, n_positions=16, bos_token_id=0, eos_token_id=0)
    )


def test_a_pass_without_gradients_does_not_replace_the_pass_before_it(model):
    model.eval()
    batch, other_batch = {"input_ids": torch.arange(12).view(2, 6)}, {"input_ids": torch.arange(8).view(1, 8)}
    with istar.attach(model, istar.IStar(1.0, 0.0)) as watch:
        model(**batch)
        expected = watch.loss()
        model(**batch)
        with torch.no_grad():
            model(**other_batch)
        assert torch.equal(watch.loss(), expected)
        model(**batch)
        model(**other_batch)
        assert not torch.equal(watch.loss(), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_refresh_leaves_the_random_numbers_of_a_shuffling_loader_as_they_were(model, workers):
    loader = DataLoader(
        [{"input_ids": torch.randint(20, (6,))} for _ in range(8)], batch_size=2, shuffle=True, num_workers=workers
    )
    with istar.attach(model, istar.IStar(1.0, 0.5)) as watch:
        generator_states = torch.get_rng_state(), np.random.get_state()[1].copy()
        watch.refresh(loader, num_points=30)
        assert torch.equal(torch.get_rng_state(), generator_states[0])
        assert (np.random.get_state()[1] == generator_states[1]).all()
