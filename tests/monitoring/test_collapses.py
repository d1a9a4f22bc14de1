"""The default alarms in small trainings: a collapse sets them off, and its healthy twin does not."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import istar

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function of the encodings of two views of the same topics."""


def attract(first: Tensor, second: Tensor) -> Tensor:
    return 1 - functional.cosine_similarity(first, second).mean()


def contrast(first: Tensor, second: Tensor) -> Tensor:
    cosines = functional.normalize(first, dim=-1) @ functional.normalize(second, dim=-1).T
    return functional.cross_entropy(10 * cosines, torch.arange(len(cosines)))


def bring_near(first: Tensor, second: Tensor) -> Tensor:
    return functional.mse_loss(first, second)


def bring_near_and_keep_variance(first: Tensor, second: Tensor) -> Tensor:
    deviations = torch.stack([(states.var(0) + 1e-4).sqrt() for states in (first, second)])
    return bring_near(first, second) + functional.relu(1 - deviations).mean()


def contrast_with_istar(weight: float) -> Loss:
    penalty = istar.IStar(weight=weight, zeta=0)
    return lambda first, second: contrast(first, second) + penalty([torch.cat([first, second])[None]] * 2)


def train(loss: Loss) -> tuple[list[str], Tensor]:
    """Train an encoder of noisy views of topics; return the warnings, and the encodings of all topics."""
    torch.manual_seed(0)
    topics = torch.randn(64, 16)
    encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=5e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with istar.Monitor(encoder, every=10, modules=["0", "2"], optimizer=optimizer):
            for _ in range(121):
                first, second = (encoder(topics + 0.5 * torch.randn(64, 16)) for _ in range(2))
                optimizer.zero_grad()
                loss(first, second).backward()
                optimizer.step()
    with torch.no_grad():
        return [str(warning.message) for warning in caught], encoder(topics).double()


def measure_spread(points: Tensor) -> float:
    """Return the deviation of unit vectors, 1 if their directions are uniform and 0 if they are all the same."""
    return float(functional.normalize(points, dim=-1).std(0).mean()) * points.shape[1] ** 0.5


def measure_share_of_other_directions(points: Tensor) -> float:
    """Return the share of the variance outside of the first principal direction."""
    variances = torch.linalg.svdvals(points - points.mean(0)).square()
    return float(1 - variances[0] / variances.sum())


@pytest.mark.parametrize(
    ("collapsing", "healthy", "measure", "measure_rest"),
    [
        (attract, contrast, "inter_sim", measure_spread),
        (bring_near, bring_near_and_keep_variance, "inter_sim", measure_spread),
        (contrast_with_istar(-100), contrast_with_istar(1), "participation_ratio", measure_share_of_other_directions),
    ],
    ids=["without negatives", "without a variance term", "strong negative penalty"],
)
def test_a_collapse_sets_off_a_default_alarm_and_its_healthy_twin_does_not(
    collapsing: Loss, healthy: Loss, measure: str, measure_rest: Callable[[Tensor], float]
) -> None:
    messages, points = train(collapsing)
    assert measure_rest(points) < 0.1
    assert messages
    assert f": 2 may have collapsed: {measure} was " in messages[0]
    messages, points = train(healthy)
    assert measure_rest(points) > 0.8
    assert messages == []
