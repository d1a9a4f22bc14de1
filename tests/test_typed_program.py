import torch
from transformers import BertConfig, BertForSequenceClassification

from tests.typed_program import measure, train


def test_the_typed_program_runs() -> None:
    config = BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20,
    )  # fmt: skip
    ids = torch.arange(2, 18).view(2, 8)
    batches = [{"input_ids": ids, "labels": torch.tensor([0, 1])}]
    assert 0 < train(BertForSequenceClassification(config), batches) <= 1
    star, dimension = measure([torch.randn(64, 8), torch.randn(64, 8)])
    assert 0 < star <= 1
    assert dimension > 1
