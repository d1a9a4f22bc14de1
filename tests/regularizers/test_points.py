import pytest
import torch

from istar.errors import UserError
from istar.regularizers import layer_numbers, select_layers

STATES = tuple(torch.full((2, 3, 4), float(i)) for i in range(4))  # embeddings and three layers


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ("all", [1, 2, 3]),
        ("last", [3]),
        ("with_embeddings", [0, 1, 2, 3]),
        ([2], [2]),
        ([3, 1], [1, 3]),
        ((0, 3), [0, 3]),
        ([-1], [3]),
        ([-4, -1], [0, 3]),
        ([1, 1, -3, 2], [1, 2]),
    ],
)
def test_layers_are_those_named_once_each_in_order_and_not_copied(layers, numbers):
    assert layer_numbers(3, layers) == numbers
    selected_states = select_layers(STATES, layers)
    assert [state.data_ptr() for state in selected_states] == [STATES[index].data_ptr() for index in numbers]


def test_all_layers_is_the_default():
    assert [state[0, 0, 0].item() for state in select_layers(STATES)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("states", "layers", "message"),
    [
        (STATES, "first", "layers=first is not known"),
        (STATES, [4], "layer 4 does not exist; expected 0 .* to 3"),
        (STATES, [1, -5], "layer -5 does not exist"),
        (STATES, [], r"layers=\[\] is neither"),
        (STATES[:1], "all", "1 hidden states were given; expected the embedding output and one per layer"),
        ((), "last", "0 hidden states were given"),
        (STATES[3], "last", r"are a Tensor; expected a sequence .* such as outputs.hidden_states"),
        ({"hidden_states": STATES}, "all", "are a dict; expected a sequence"),
        ([state.numpy() for state in STATES], "all", "a hidden state: expected a tensor instead of a ndarray"),
        ((STATES[3], STATES[3][:, 0]), "last", r"have shapes \(2, 3, 4\), \(2, 4\); expected \(batch, tokens, d\)"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused_in_one_line(states, layers, message):
    with pytest.raises(UserError, match=message) as error:
        select_layers(states, layers)
    assert "\n" not in str(error.value)
