"""The papers' formulas, written step by step and slowly, as references for the package's own implementations.

Nothing here uses the package or its formulas. Everything computes in the dtype of its input.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from sklearn.decomposition import PCA
from torch import Tensor


def algorithm_1(
    points: Tensor,
    shrinkage_covariance: Tensor | None = None,
    zeta: float = 0.0,
    spectrum: Callable[[Tensor], Tensor] = torch.linalg.svdvals,
) -> Tensor:
    """IsoScore* of points `(n, d)`, steps 3 to 9; differentiable where the cloud is not exactly isotropic."""
    covariance = torch.cov(points.T)
    if shrinkage_covariance is not None:
        covariance = (1 - zeta) * covariance + zeta * shrinkage_covariance
    return steps_6_to_9(spectrum(covariance))


def steps_6_to_9(eigenvalues: Tensor) -> Tensor:
    """IsoScore* of the eigenvalues of a covariance, steps 6 to 9 of `algorithm_1`."""
    d = eigenvalues.shape[0]
    normalized = math.sqrt(d) * eigenvalues / torch.linalg.vector_norm(eigenvalues)
    defect = torch.linalg.vector_norm(normalized - 1) / math.sqrt(2 * (d - math.sqrt(d)))
    phi = (d - defect**2 * (d - math.sqrt(d))) ** 2 / d**2
    return (d * phi - 1) / (d - 1)


def algorithm_2(points: np.ndarray) -> float:
    """IsoScore of points `(n, d)`, n > d: reorient by PCA, then the defect of the variances."""
    reoriented = PCA(svd_solver="full").fit_transform(points)
    diagonal = np.diag(np.cov(reoriented, rowvar=False))
    d = diagonal.size
    normalized = np.sqrt(d) * diagonal / np.linalg.norm(diagonal)
    defect = np.linalg.norm(normalized - np.ones(d)) / np.sqrt(2 * (d - np.sqrt(d)))
    phi = (d - defect**2 * (d - np.sqrt(d))) ** 2 / d**2
    return float((d * phi - 1) / (d - 1))


def unbiased_squares(points: Tensor) -> tuple[Tensor, Tensor]:
    """tr(S^2) and tr(S)^2 of the distribution behind points `(n, d)`: means over all quadruples of distinct points.

    E ((x1 - x2)^T (x3 - x4))^2 = 4 tr(S^2) and E ||x1 - x2||^2 ||x3 - x4||^2 = 4 tr(S)^2.
    """
    n = len(points)
    differences = points[:, None] - points[None]
    products = torch.einsum("ijd,kld->ijkl", differences, differences)
    indices = torch.arange(n)
    i, j, k, m = torch.meshgrid(indices, indices, indices, indices, indexing="ij")
    distinct = (i != j) & (i != k) & (i != m) & (j != k) & (j != m) & (k != m)
    squares = differences.square().sum(-1)
    square_products = squares[:, :, None, None] * squares[None, None]
    return products[distinct].square().mean() / 4, square_products[distinct].mean() / 4


def unbiased_isoscore(points: Tensor) -> Tensor:
    """The closed form with `unbiased_squares`; differentiable."""
    squared_norm, squared_trace = unbiased_squares(points)
    return (squared_trace / squared_norm - 1) / (points.shape[1] - 1)


def shrinkage_intensity(points: np.ndarray, target: np.ndarray) -> float:
    """Schaefer and Strimmer (2005), Table 2 with a fixed target for all entries, one by one."""
    n, d = points.shape
    deviations = points - points.mean(0)
    covariance = np.cov(points, rowvar=False)
    variances = 0.0
    for i in range(d):
        for j in range(d):
            products = deviations[:, i] * deviations[:, j]
            variances += n / (n - 1) ** 3 * float(((products - products.mean()) ** 2).sum())
    return float(min(1.0, max(0.0, variances / ((covariance - target) ** 2).sum())))


def third_and_fourth(points: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Sums of w ||x - m||^2 (x - m) and w ||x - m||^4, in two passes, point by point."""
    deviations = points - np.average(points, axis=0, weights=weights)
    third, fourth = np.zeros(points.shape[1]), 0.0
    for weight, deviation in zip(weights, deviations, strict=True):
        square = float(deviation @ deviation)
        third += weight * square * deviation
        fourth += float(weight) * square**2
    return third, fourth


def cosreg(points: Tensor) -> Tensor:
    """Equation (1) for points `(M, d)`: cosines of all pairs i != j over M^2; 0 with a zero vector."""
    total = points.new_zeros(())
    for i in range(len(points)):
        for j in range(len(points)):
            if i != j and points[i].any() and points[j].any():
                total = total + points[i] @ points[j] / (points[i].norm() * points[j].norm())
    return total / len(points) ** 2


def stack(hidden_states: Sequence[Tensor], attention_mask: Tensor | None = None) -> Tensor:
    """All real tokens of all layers, `(n, d)`, as the paper's union of X_l."""
    dim = hidden_states[0].shape[-1]
    if attention_mask is None:
        return torch.cat([hidden_state.reshape(-1, dim) for hidden_state in hidden_states])
    return torch.cat([hidden_state[attention_mask.bool()] for hidden_state in hidden_states])


def streamed_about_the_origin(batches: Sequence[Tensor]) -> Tensor:
    """Covariance as E[x x^T] - E[x] E[x]^T, summed in the points' dtype: inexact if the mean is large."""
    n = sum(len(batch) for batch in batches)
    mean, second_moment = batches[0].new_zeros(()), batches[0].new_zeros(())
    for batch in batches:
        mean = mean + batch.sum(0) / n
        second_moment = second_moment + batch.T @ batch / n
    return (second_moment - torch.outer(mean, mean)) * (n / (n - 1))


def two_nn(points: np.ndarray, discard: float = 0.1) -> float:
    """Facco et al. (2017), steps 1 to 5, for points `(n, d)` without duplicates."""
    ratios = []
    for i, point in enumerate(points):
        distances = sorted(math.dist(point, other) for j, other in enumerate(points) if j != i)
        ratios.append(distances[1] / distances[0])
    n = len(ratios)
    smallest_ratios = sorted(ratios)[: int(n * (1 - discard))]
    x = np.log(smallest_ratios)
    y = np.array([-math.log(1 - (i + 1) / n) for i in range(len(smallest_ratios))])
    return float(np.linalg.lstsq(x[:, None], y, rcond=None)[0][0])


def mean_pair_cosine(points: np.ndarray) -> float:
    """Equation 5 of *Anisotropy is Not Inherent to Transformers*: every pair of points `(n, d)` by itself."""
    cosines = [
        float(np.dot(x, y)) / (math.sqrt(np.dot(x, x)) * math.sqrt(np.dot(y, y)))
        for i, x in enumerate(points)
        for j, y in enumerate(points)
        if i != j
    ]
    return math.fsum(cosines) / len(cosines)


def partition_values(embeddings: np.ndarray, directions: np.ndarray) -> list[float]:
    """Z(c) for each column c of `directions`, term by term."""
    return [math.fsum(math.exp(float(np.dot(c, w))) for w in embeddings) for c in directions.T]


def entropy_rank(values: Sequence[float]) -> float:
    """Roy and Vetterli (2007), definition 1, with 0 log 0 = 0."""
    total = math.fsum(values)
    return math.exp(-math.fsum(v / total * math.log(v / total) for v in values if v > 0))


def top_removed(embeddings: np.ndarray, components: int, centered_in_the_sum: bool) -> np.ndarray:
    """All-but-the-top, row by row and component by component, with sklearn's PCA."""
    mean = embeddings.mean(0)
    directions = PCA(n_components=components, svd_solver="full").fit(embeddings).components_
    rows = []
    for row in embeddings:
        projected = row - mean if centered_in_the_sum else row
        rows.append(row - mean - sum(np.dot(u, projected) * u for u in directions))
    return np.array(rows)


def scaled_centering(embeddings: np.ndarray) -> np.ndarray:
    """*Too Much in Common*, section 5.2, row by row; no row is zero."""
    norms = [math.sqrt(np.dot(row, row)) for row in embeddings]
    mean = sum(row / norm for row, norm in zip(embeddings, norms, strict=True)) / len(embeddings)
    return np.array([row - norm * mean for row, norm in zip(embeddings, norms, strict=True)])
