"""A penalty that records the hidden states that it receives, and a naive penalty on the outputs of a model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from istar.hidden_states import attach
from istar.regularizers import IStar
from istar.regularizers.points import Tokens
from tests.oracles import algorithm_1, stack

WEIGHT, ZETA = -0.7, 0.3
WIDTH = 16


class Recording(IStar):
    """I-STAR that keeps the hidden states that it receives."""

    def __init__(self, layers: Any = "all") -> None:
        super().__init__(WEIGHT, ZETA, layers=layers)
        self.shrinkage_covariance = sigma()
        self.received: list[Tensor] = []

    def summarize(self, hidden_states: Sequence[Tensor], tokens: Tokens) -> list[Any]:
        self.received += hidden_states
        return super().summarize(hidden_states, tokens)


def sigma() -> Tensor:
    """Return the shrinkage covariance of the tests, `(WIDTH, WIDTH)`, in float64."""
    points = torch.randn(5 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.cov((points * torch.linspace(1, 2, WIDTH)).T)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every parameter that the loss depends on, by the parameter's name."""
    named_parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameter_gradients = torch.autograd.grad(loss, [parameter for _, parameter in named_parameters], allow_unused=True)
    return {
        name: gradient
        for (name, _), gradient in zip(named_parameters, parameter_gradients, strict=True)
        if gradient is not None
    }


def seeded_pass(model: nn.Module, inputs: dict[str, Tensor], seed: int, **arguments: Any) -> Any:
    torch.manual_seed(seed)  # of dropout and layerdrop
    return model(**inputs, **arguments)


def naive_loss(outputs: Any, states: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return the penalty on all real tokens of these hidden states, plus the model's own loss if it has one."""
    score = algorithm_1(stack(states, mask), sigma(), ZETA, torch.linalg.eigvalsh)
    return WEIGHT * (1 - score) + (outputs.loss if "loss" in outputs else 0)


def received(model: nn.Module, inputs: dict[str, Tensor], layers: Any, seed: int) -> list[Tensor]:
    """Return the hidden states that a penalty on these layers receives in a forward pass."""
    penalty = Recording(layers)
    with attach(model, penalty):
        seeded_pass(model, inputs, seed)
    return penalty.received


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
