"""A model that is compiled after the penalty was attached."""

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import istar


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_the_hooks_are_not_compiled_again_for_each_layer(caplog: pytest.LogCaptureFixture) -> None:
    """A compiler that meets ten versions of a hook gives up and executes the model as it is."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 50}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=10, **sizes, **dropout)).train()
    attached = istar.attach(model, istar.IStar(weight=-1.0, zeta=0))
    inputs = {"input_ids": torch.randint(5, 50, (4, 9)), "labels": torch.tensor([0, 1, 0, 1])}

    def compute_gradients() -> list[Tensor]:
        model.zero_grad()
        (model(**inputs).loss + attached.loss()).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = compute_gradients()
    model.compile(backend="eager")
    for _ in range(2):
        assert all(map(torch.equal, compute_gradients(), expected))
    assert "recompile_limit" not in caplog.text
