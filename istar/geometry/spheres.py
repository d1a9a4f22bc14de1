"""Toy example of two spheres, one around the origin and one away from it, that shows how the measures differ."""

from dataclasses import dataclass

import numpy as np
import torch

from istar.measures import average_cosine, isoscore, partition_isotropy

POINTS, SHIFT, _SEED = 500, 2.0, 0


@dataclass(frozen=True)
class Sphere:
    """Points uniformly distributed on a unit sphere in three dimensions, and their measures."""

    name: str
    x: tuple[float, ...]  # first coordinate of each point
    y: tuple[float, ...]  # second coordinate of each point
    inter_sim: float  # average cosine of all pairs of points
    isoscore: float
    partition_as_computed: float  # I(W) with the eigenvectors' signs as computed
    partition_both: float  # I(W) over both signs of each eigenvector


def spheres() -> tuple[Sphere, Sphere]:
    """Return a sphere around the origin, and the same points moved along the first axis."""
    # Each point has an opposite one, so that the mean is exactly the origin.
    half = np.random.Generator(np.random.Philox(_SEED)).standard_normal((POINTS // 2, 3))
    half /= np.linalg.norm(half, axis=1, keepdims=True)
    centered = torch.from_numpy(np.concatenate([half, -half]))
    return _measure("centered", centered), _measure("off-centre", centered + torch.tensor([SHIFT, 0, 0]))


def _measure(name: str, points: torch.Tensor) -> Sphere:
    """Return the points and their measures as a sphere of the figure."""
    x, y, _ = points.T.tolist()
    return Sphere(
        name,
        tuple(x),
        tuple(y),
        average_cosine(points).item(),
        isoscore(points).item(),
        partition_isotropy(points, "as_computed").value,
        partition_isotropy(points, "both").value,
    )
