"""A model that is compiled after the penalty was attached."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification

import istar


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_the_encoder_stays_one_graph(caplog: pytest.LogCaptureFixture) -> None:
    """A summary between two layers would split the graph, and hooks compiled apart would reach the compiler's limit."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 50}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=10, **sizes, **dropout)).train().double()
    attached = istar.attach(model, istar.IStar(weight=-1.0, zeta=0))
    inputs = {"input_ids": torch.randint(5, 50, (4, 9)), "labels": torch.tensor([0, 1, 0, 1])}
    graphs = []

    def compute_gradients() -> list[Tensor]:
        model.zero_grad()
        (model(**inputs).loss + attached.loss()).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def compile_nothing(graph: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    expected = compute_gradients()
    model.compile(backend=compile_nothing)
    for _ in range(2):
        assert_close(compute_gradients(), expected, rtol=1e-9, atol=1e-12)
    assert len(graphs) == 2  # the encoder, and the classifier after the penalty
    assert "recompile_limit" not in caplog.text


@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_a_model_that_must_be_one_graph_says_what_to_do() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 50}
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=1, **sizes))
    with istar.attach(model, istar.CosReg(1.0)):
        message = "penalty of istar reads hidden states outside of the graph: compile with fullgraph=False"
        with pytest.raises(RuntimeError, match=message):
            torch.compile(model, fullgraph=True, backend="eager")(input_ids=torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore")  # those of the compiler
@pytest.mark.parametrize("penalty", [istar.CosReg(1.0), istar.SimCtg(1.0), istar.IStar(1.0, zeta=0)])
def test_a_compiled_penalty_has_the_values_and_gradients_of_the_eager_one(penalty: istar.Penalty) -> None:
    torch.manual_seed(0)
    hidden_states = [torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = torch.ones(3, 5)
    results = []
    for call in (penalty, torch.compile(penalty, backend="aot_eager")):
        loss = call(hidden_states, mask)
        results.append([loss, penalty.last.points, *torch.autograd.grad(loss, hidden_states[-1:])])
    assert_close(results[1], results[0], rtol=1e-12, atol=1e-15)
