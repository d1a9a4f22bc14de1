"""Two spheres that tell the measures apart: the same cloud about the origin, and away from it."""

from dataclasses import dataclass

import numpy as np
import torch

from istar.measures import average_cosine, isoscore, partition_isotropy

POINTS, SHIFT, _SEED = 500, 2.0, 0


@dataclass(frozen=True)
class Sphere:
    """A cloud of points evenly on a unit sphere in three dimensions, and what the measures say of it.

    Attributes:
        name: where it is.
        x: first coordinate of each point. y: the second one.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    inter_sim: float
    isoscore: float
    partition_as_computed: float
    partition_both: float


def spheres() -> tuple[Sphere, Sphere]:
    """The centered one, and the same points moved along the first axis."""
    # Opposite points, so that the mean of the first is the origin itself.
    half = np.random.Generator(np.random.Philox(_SEED)).standard_normal((POINTS // 2, 3))
    half /= np.linalg.norm(half, axis=1, keepdims=True)
    centered = torch.from_numpy(np.concatenate([half, -half]))
    return _measured("centered", centered), _measured("off-centre", centered + torch.tensor([SHIFT, 0, 0]))


def _measured(name: str, points: torch.Tensor) -> Sphere:
    return Sphere(
        name,
        tuple(points[:, 0].tolist()),
        tuple(points[:, 1].tolist()),
        average_cosine(points).item(),
        isoscore(points).item(),
        partition_isotropy(points, "as_computed").value,
        partition_isotropy(points, "both").value,
    )
