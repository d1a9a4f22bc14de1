"""A program of a user, which mypy checks with all that `mypy --strict` asks; see pyproject.toml."""

import torch
from torch import Tensor, nn

import istar
from istar.measures import IntraSim, Moments, isoscore_star, two_nn_with_error
from istar.regularizers import CosReg


def train(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    penalty = istar.IStar(weight=-1.0, zeta=0.4, set_point=istar.SetPoint(0.1, side="below"))
    settings = istar.PenaltySettings(points=istar.Points("content", special_ids=(0, 1)))
    with istar.attach_with_settings(model, penalty, settings) as attached:
        num_points: int = attached.refresh(batches, num_points=1000)
        for batch in batches:
            loss: Tensor = model(**batch).loss + attached.loss()
            loss.backward()  # type: ignore[no-untyped-call]
        terms: dict[str, float | Tensor] = dict(attached.terms())
    try:
        score: Tensor = istar.isoscore(torch.randn(num_points, 8))
    except istar.UserError as error:
        print(error, terms)
        return 0.0
    return float(score)


def measure(batches: list[Tensor]) -> tuple[float, float]:
    moments = Moments(8)
    for batch in batches:
        moments.update(batch)
    sims = IntraSim(types=10, dim=8).update(batches[0], torch.zeros(len(batches[0]), dtype=torch.long))
    star: Tensor = isoscore_star(batches[0], moments.covariance(), zeta=0.8)
    estimate = two_nn_with_error(batches[0])
    whitened: Tensor = istar.Whitening(dimensions=2).fit(batches[0]).transform(batches[0])
    print(whitened, sims, CosReg(weight=1.0)([batches[0][None], batches[0][None]]))
    return float(star), float(estimate.value)
