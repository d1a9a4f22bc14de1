"""Models that FSDP2 shards stay sharded after passes without a backward pass, in two real gloo processes."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import istar
from istar.hidden_states.reader import HiddenStateReader
from tests.forks import process_group, run_in_processes
from tests.hidden_states.builders import INPUTS, bert


def read_states(model: Any) -> None:
    """Find the final norm by a trial."""
    HiddenStateReader(model).remove()


def refresh(model: Any) -> None:
    """Compute Sigma_S, as before the first step of a training."""
    with istar.attach(model, istar.IStar(-1.0, zeta=0.5)) as attached:
        attached.refresh([INPUTS], num_points=10)


def probe(model: Any) -> None:
    with istar.Monitor(model) as monitor:
        monitor.measure([INPUTS])


PASSES = {"trial": read_states, "refresh": refresh, "probe": probe}


def train_after(rank: int, store: str, name: str) -> None:
    """Make the optimizer after a pass, take a step, and compare with one process."""
    with process_group(rank, 2, store):
        model: Any = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        alone = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        for layer in model.bert.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
        PASSES[name](model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for trained in (model, alone):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            trained(**INPUTS).loss.backward()
            optimizer.step()
        for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PASSES)
def test_an_optimizer_that_is_made_after_a_pass_trains_the_model(tmp_path, name):
    run_in_processes(train_after, (str(tmp_path / "store"), name), 2)
