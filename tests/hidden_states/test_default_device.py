"""Penalties are computed on the device of their points, whatever torch's default device is.

The device `meta` stands for a GPU: tensors on it and on the CPU do not mix.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import istar
from istar import regularizers
from istar.hidden_states import EmbeddingPenalty, PenaltySettings, attach, attach_with_settings
from istar.hidden_states.model_layers import make_trial_ids
from istar.regularizers import Points, SetPoint
from tests.hidden_states.builders import bert

WIDTH = 6
STATES = [torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
PENALTIES = [
    name
    for name in regularizers.__all__
    if inspect.isclass(getattr(regularizers, name))
    and issubclass(getattr(regularizers, name), istar.Penalty)
    and not inspect.isabstract(getattr(regularizers, name))
]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, options) for name in PENALTIES for options in ({}, {"set_point": SetPoint("keep", batches=3)})),
    ("IStar", {"zeta": 0, "estimator": "unbiased"}),
    *(("IStar", options) for options in ({"zeta": "auto"}, {"compute": "bf16"})),
    ("Spectrum", {"decay": "exponential"}),
]


def on_meta(is_on_meta: bool) -> Any:
    return torch.device("meta" if is_on_meta else "cpu")


def make_penalty(name: str, **options: Any) -> Any:
    penalty = getattr(regularizers, name)(1.0, **options)
    if penalty.needs_shrinkage_covariance:
        penalty.shrinkage_covariance = torch.eye(WIDTH, device="cpu")
    return penalty


def compute_losses(penalty: Any) -> list[Tensor]:
    """Return losses, gradients and states of some passes, of which the last ones follow a reset."""
    results: list[Tensor] = []
    for step in range(4):
        states = [state.detach().clone().requires_grad_() for state in STATES]
        if step == 2:
            # Points that are all equal have no score, which is counted.
            states = [torch.ones_like(state).requires_grad_() for state in states]
        loss = penalty(states, MASK)
        loss.backward()
        results += [loss, *(state.grad for state in states if state.grad is not None), penalty.undefined.total]
        results += penalty.state_dict().values()
        if step == 2:
            penalty.reset(keep_shrinkage_covariance=True)
            penalty.load_state_dict(penalty.state_dict())
    return results


@pytest.mark.filterwarnings("ignore:the points of a micro-batch have no")
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_penalty_is_computed_on_the_device_of_its_points(name: str, options: dict[str, Any]) -> None:
    results = []
    for is_on_meta in (False, True):
        with on_meta(is_on_meta):
            results.append(compute_losses(make_penalty(name, **options)))
    assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


def build_tower() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("sample", [None, 0.5])
def test_an_attached_penalty_is_computed_on_the_device_of_its_model(name: str, sample: float | None) -> None:
    results = []
    for is_on_meta in (False, True):
        model, points = build_tower(), STATES[0]
        with on_meta(is_on_meta):
            penalty = make_penalty(name, layers="all")
            settings = PenaltySettings(sample=sample)
            with attach_with_settings(model, penalty, settings, modules=[model[0], model[2]]) as attached:
                attached.refresh([points, points + 1])
                for step in range(2):
                    attached.set_weight(step, 2)
                    output = model(points)
                    loss = output.square().mean() + attached.loss()
                    loss.backward()
                state = attached.state_dict()
                penalty.reset()
                if penalty.needs_shrinkage_covariance:
                    penalty.shrinkage_covariance = None
                attached.load_state_dict(state)
                results.append([loss, *(weight.grad for weight in model.parameters()), *attached.state_dict().values()])
    assert_close(results[1], results[0], rtol=0, atol=0)


def test_rows_of_an_embedding_matrix_are_sampled_on_any_device() -> None:
    model, losses = bert(), []
    for is_on_meta in (False, True):
        with on_meta(is_on_meta):
            settings = PenaltySettings(target="input_embeddings", rows=9)
            losses.append(EmbeddingPenalty(model, istar.CosReg(1.0), settings).loss())
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    "points", [Points(name, special_ids=(3,)) for name in ("content", "first", "last")] + [Points(max_norm_ratio=1.5)]
)
def test_points_are_chosen_on_the_device_of_the_model(points: Points) -> None:
    ids, results = torch.arange(20).view(4, 5) % 7, []
    for is_on_meta in (False, True):
        model = Model()
        with on_meta(is_on_meta), attach(model, istar.CosReg(1.0), modules=[model.layer], points=points) as attached:
            model(ids, MASK)
            results.append(attached.loss())
    assert torch.equal(*results)


class Model(nn.Module):
    """A model that creates no tensors in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.layer = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layer(self.embeddings(input_ids))


def test_the_tokens_of_a_trial_are_on_the_cpu() -> None:
    model = bert().bert
    with torch.device("meta"):
        assert make_trial_ids(model).device.type == "cpu"
