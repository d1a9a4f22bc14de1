"""A model that is compiled after the penalty was attached, and other compiled models."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification, GPTNeoXConfig, GPTNeoXForCausalLM

import istar
from istar.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the compiler
NUM_LAYERS, WIDTH = 3, 8
SIZES = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 50}
IDS = torch.arange(36).view(4, 9) + 5
MASK = (torch.arange(9) < torch.tensor([[9], [7], [5], [2]])).long()


@pytest.fixture
def counter() -> Iterator[CompileCounterWithBackend]:
    """A backend that traces forward and backward pass, and counts the graphs."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("eager")
    torch._dynamo.reset()


def make_encoder() -> nn.Module:
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    # Otherwise, the first pass sets it, and the second one is compiled anew.
    options = {"problem_type": "single_label_classification"} | dropout
    return BertForSequenceClassification(BertConfig(num_hidden_layers=NUM_LAYERS, **SIZES, **options)).double()


def make_decoder() -> nn.Module:
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(GPTNeoXConfig(num_hidden_layers=NUM_LAYERS, **SIZES)).double()


def make_inputs(model: nn.Module, length: int, is_padded: bool) -> dict[str, Tensor]:
    ids = IDS[:, :length]
    labels = ids if isinstance(model, GPTNeoXForCausalLM) else torch.tensor([0, 1, 0, 1])
    return {"input_ids": ids, "labels": labels} | ({"attention_mask": MASK[:, :length]} if is_padded else {})


def attach(model: nn.Module, **options: Any) -> Any:
    penalty = istar.IStar(-1.0, 0.3, **options)
    penalty.shrinkage_covariance = torch.diag(torch.linspace(1, 2, WIDTH, dtype=torch.float64))
    return istar.attach(model, penalty)


def compute_gradients(model: nn.Module, attached: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss + attached.loss()
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize(
    ("make_model", "is_padded"),
    [
        (make_encoder, True),
        pytest.param(make_encoder, False, marks=pytest.mark.slow),
        pytest.param(make_decoder, True, marks=pytest.mark.slow),
        pytest.param(make_decoder, False, marks=pytest.mark.slow),
    ],
)
def test_model_and_penalty_are_one_graph_for_all_lengths_and_weights(
    make_model: Any, is_padded: bool, counter: CompileCounterWithBackend
) -> None:
    """As without a penalty, the second length compiles a graph for all others."""
    eager, compiled = make_model().train(), make_model().train()
    attached_to_eager, attached = attach(eager), attach(compiled)
    compiled.compile(backend=counter, fullgraph=True)
    for step, length in enumerate((9, 9, 8, 7, 6, 9)):
        attached.penalty.weight = attached_to_eager.penalty.weight = -1.0 - step
        inputs = make_inputs(compiled, length, is_padded)
        expected = compute_gradients(eager, attached_to_eager, inputs)
        assert_close(compute_gradients(compiled, attached, inputs), expected, rtol=1e-9, atol=1e-12)
        assert attached.penalty.last.points == attached_to_eager.penalty.last.points
    assert counter.frame_count == 2


def test_points_that_are_not_finite_are_not_hidden(counter: CompileCounterWithBackend) -> None:
    model = make_encoder()
    attached = attach(model)
    model.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.bias[0] = torch.inf
    assert compute_gradients(model, attached, make_inputs(model, 9, True))[0].isnan()


def test_what_padding_contains_changes_nothing(counter: CompileCounterWithBackend) -> None:
    model = make_encoder()
    attached = attach(model)
    model.compile(backend=counter, fullgraph=True)
    inputs = make_inputs(model, 9, True)
    expected = compute_gradients(model, attached, inputs)
    other = {**inputs, "input_ids": torch.where(MASK == 1, IDS, 49)}
    assert_close(compute_gradients(model, attached, other), expected, rtol=1e-9, atol=1e-12)


def test_a_penalty_with_other_points_ends_the_graph(counter: CompileCounterWithBackend) -> None:
    model = make_encoder()
    with istar.attach(model, istar.CosReg(1.0)) as attached:
        eager = compute_gradients(model, attached, make_inputs(model, 9, True))
        model.compile(backend=counter)
        compiled = compute_gradients(model, attached, make_inputs(model, 9, True))
        assert_close(compiled, eager, rtol=1e-9, atol=1e-12)
        assert counter.frame_count == 2  # the encoder, and the classifier after the penalty
        model.compile(backend=counter, fullgraph=True)
        message = "penalty of istar reads hidden states outside of the graph: compile with fullgraph=False"
        with pytest.raises(RuntimeError, match=message):
            model(**make_inputs(model, 8, True))


def test_code_that_was_compiled_without_the_penalty_is_not_used_again(counter: CompileCounterWithBackend) -> None:
    """Torch does not compile anew for the hooks of another model of the class."""
    plain, penalized = make_encoder(), make_encoder()
    inputs = make_inputs(plain, 9, True)
    plain.compile(backend=counter)
    plain(**inputs)
    attached = attach(penalized)
    expected = compute_gradients(penalized, attached, inputs)
    penalized.compile(backend=counter)
    assert_close(compute_gradients(penalized, attached, inputs), expected, rtol=1e-9, atol=1e-12)
    plain(**inputs)
    with pytest.raises(UserError, match="uses the code of another one of its class") as error:
        compute_gradients(penalized, attached, inputs)
    assert "\n" not in str(error.value)


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
