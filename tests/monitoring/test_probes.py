"""The choice of points of a probe."""

import torch
from transformers import BertConfig, BertModel

from istar import Monitor


def test_a_probe_has_the_same_points_at_all_steps() -> None:
    """A model that does not change has the same measures, although only some of the tokens are measured."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    batch = {"input_ids": torch.randint(50, (8, 20))}
    monitor = Monitor(model, every=1, points=40)
    before = monitor.measure([batch])
    model(**batch)
    training = monitor.step()
    after = monitor.measure([batch])
    assert training is not None
    assert (before.step, after.step) == (0, 1)
    assert before.values["layer_1"]["points"] == 40
    assert after.values == before.values
    assert training.values["embeddings"]["inter_sim"] != before.values["embeddings"]["inter_sim"]
