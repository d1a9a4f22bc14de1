"""The time of forward passes, on a CPU and by the events of a GPU."""

import time

import pytest
import torch
import transformers as hf

from istar.geometry.collect.layer_outputs import BlockReader
from istar.texts.corpus import Block


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_forward_passes_are_timed_and_what_is_between_them_is_not(device: str) -> None:
    config = hf.BertConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    reader = BlockReader(hf.BertModel(config).eval().to(device))
    batches, rows = [reader.make_batch([Block([5] * 64, bytes(64))] * 8)] * 3, torch.arange(3 * 8 * 64)
    start = time.perf_counter()
    for _ in range(2):
        states = reader.compute_states(batches, rows)
        time.sleep(0.5)
        reader.add_forward_seconds()
    assert 0 < reader.forward_seconds < time.perf_counter() - start - 1
    assert {state.device.type for state in states.values()} == {device}
    # A pass that is not added, such as one over the beginning of a text, does not count later.
    before = reader.forward_seconds
    reader.compute_states([batches[0]] * 50, torch.arange(50 * 8 * 64))
    reader.compute_states([], torch.arange(0))
    reader.add_forward_seconds()
    assert reader.forward_seconds == before
