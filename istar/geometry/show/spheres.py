"""Toy example of two spheres, one around the origin and one away from it, that shows how the measures differ."""

from dataclasses import dataclass

import numpy as np
import torch

from istar.measures import average_cosine, isoscore, partition_isotropy

NUM_POINTS, SHIFT, _SEED = 500, 2.0, 0


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


def make_spheres() -> tuple[Sphere, Sphere]:
    """Return a sphere around the origin, and the same points moved by `SHIFT` along the first axis."""
    return _measure_sphere("centered", _sample_sphere(0.0)), _measure_sphere("off-centre", _sample_sphere(SHIFT))


def _sample_sphere(shift: float) -> torch.Tensor:
    """Return random points `(NUM_POINTS, 3)` on a unit sphere whose center is at `shift` on the first axis."""
    # Each point has an opposite one, so that the mean is exactly the origin.
    half_of_points = np.random.Generator(np.random.Philox(_SEED)).standard_normal((NUM_POINTS // 2, 3))
    half_of_points /= np.linalg.norm(half_of_points, axis=1, keepdims=True)
    return torch.from_numpy(np.concatenate([half_of_points, -half_of_points])) + torch.tensor([shift, 0, 0])


def _measure_sphere(name: str, points: torch.Tensor) -> Sphere:
    """Measure points `(n, 3)`, and return them with their measures."""
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
