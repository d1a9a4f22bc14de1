"""Hidden states taken in as the model computes them, against those that it hands out behind its forward pass."""

import copy

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

from istar.regularizers import CosReg, IStar
from istar.training.taps import Taps, find_taps, forward_with_penalty, forward_with_states
from tests.architectures import MODELS, SHAPE

MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
INDEX = MASK.flatten().nonzero().squeeze(1)
INPUTS = {"input_ids": torch.arange(2, 20).reshape(3, 6), "attention_mask": MASK}
LABELS = torch.tensor([0, 1, 1])


def seeded(model, call):
    torch.manual_seed(1)  # of dropout
    return call(model)


def bert(**settings):
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**SHAPE, **settings)).double().train()


def regularizer(layers="all", kind=IStar):
    if kind is CosReg:
        return CosReg(0.7, layers)
    made = IStar(-0.7, 0.3, layers)
    made.shrinkage_covariance = torch.eye(32, dtype=torch.float64)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_hands_over_the_states_that_it_would_give(name):
    torch.manual_seed(0)
    model = MODELS[name][0]().train()
    taps = find_taps(model, INPUTS)
    assert taps is not None
    assert model.training
    expected = seeded(model, lambda model: model(**INPUTS, output_hidden_states=True))
    seen = []

    def receive(state):
        seen.append(state)
        return state

    layers = sorted(taps.numbers)
    outputs = seeded(model, lambda model: forward_with_states(model, INPUTS, receive, layers, taps))
    assert layers[-3:] == [1, 2, 3]
    assert all(torch.equal(*pair) for pair in zip(seen, expected.hidden_states[-len(seen) :], strict=True))
    assert torch.equal(outputs[0], expected[0])
    assert outputs.hidden_states is None


@pytest.mark.parametrize("name", MODELS)
def test_the_model_goes_on_with_what_is_returned(name):
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    taps = find_taps(model, INPUTS)
    plain = model(**INPUTS)[0]
    for layer in taps.numbers:
        with taps.handing(lambda state: state + torch.randn(state.shape[-1]), [layer]):
            changed = model(**INPUTS)[0]
        assert not torch.allclose(plain, changed, atol=1e-3)
    assert torch.equal(model(**INPUTS)[0], plain), "no hook is left"


@pytest.mark.usefixtures("road")
@pytest.mark.parametrize("kind", [IStar, CosReg])
@pytest.mark.parametrize("layers", ["all", "last", "with_embeddings", [0, 2]])
@pytest.mark.parametrize("frozen", [False, True])
def test_loss_and_gradients_are_those_of_the_states_handed_out(layers, frozen, kind):
    model = bert()
    if frozen:
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].requires_grad_(False)
    results = []
    for taps in (find_taps(model, INPUTS), None):
        model.zero_grad()
        torch.manual_seed(1)
        inputs = INPUTS | {"labels": LABELS}
        outputs, penalty = forward_with_penalty(model, inputs, regularizer(layers, kind), INDEX, taps)
        (outputs.loss + penalty.value).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        results.append([outputs.loss.detach(), penalty.value.detach(), *gradients])
    assert_close(results[0], results[1], rtol=1e-10, atol=1e-14)
    torch.manual_seed(1)
    states = model(**INPUTS, output_hidden_states=True).hidden_states
    assert_close(results[0][1], regularizer(layers, kind).penalty(states, MASK).value, rtol=1e-12, atol=0)


def test_a_model_that_computes_its_layers_twice_is_asked_for_its_states():
    model = bert()
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    assert find_taps(model, INPUTS) is None
    outputs, penalty = forward_with_penalty(model, INPUTS | {"labels": LABELS}, regularizer(), INDEX, None)
    (outputs.loss + penalty.value).backward()
    assert model.bert.encoder.layer[0].output.dense.weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_model_is_asked_for_its_states():
    model = bert()
    model.compile()
    assert find_taps(model, INPUTS) is None


def test_an_embedding_output_that_no_module_returns_is_asked_for():
    torch.manual_seed(0)
    model = MODELS["opt"][0]()
    taps = find_taps(model, INPUTS)
    assert 0 not in taps.numbers
    seen = []
    forward_with_states(model.eval(), INPUTS, seen.append, "with_embeddings", taps)
    expected = model(**INPUTS, output_hidden_states=True).hidden_states
    assert all(torch.equal(*pair) for pair in zip(seen, expected, strict=True))


def test_states_that_no_module_returns_are_not_taken_in():
    class Scaled(hf.BertForSequenceClassification):
        def forward(self, **inputs):
            outputs = super().forward(**inputs)
            if outputs.hidden_states is not None:
                outputs.hidden_states = tuple(2 * state for state in outputs.hidden_states)
            return outputs

    assert find_taps(Scaled(hf.BertConfig(**SHAPE)), INPUTS) is None


def test_modules_keep_their_modes():
    model = bert()
    model.bert.encoder.layer[1].eval()
    before = [module.training for module in model.modules()]
    find_taps(model, INPUTS)
    assert [module.training for module in model.modules()] == before


def test_a_forward_pass_that_fails_leaves_no_hook():
    model = bert()
    taps = find_taps(model, INPUTS)

    def fail(state):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), taps.handing(fail, [1]):
        model(**INPUTS)
    assert model(**INPUTS).logits.isfinite().all()


def test_a_copy_of_the_taps_is_of_the_copy_of_the_model():
    model = bert()
    copied, taps = copy.deepcopy((model, find_taps(model, INPUTS)))
    assert isinstance(taps, Taps)
    assert set(taps.modules) <= set(copied.modules())
