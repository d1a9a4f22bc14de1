"""Affine maps of points that are fitted once and applied to any points: centering, all-but-the-top and whitening."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from istar.errors import NonFiniteError, OptionError, UserError, check_at_least
from istar.files.writing import atomic_write
from istar.measures import numerics
from istar.measures.matrix_forms import fix_signs
from istar.measures.moments import Moments
from istar.measures.postprocess import count_top_components, remove_directions
from istar.vectors.clouds import check_finite_rows, cloud_in_memory, is_frame
from istar.vectors.vector_files import PointSource, explain_file_errors, open_clouds

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

_PointsT = TypeVar("_PointsT", Tensor, "np.ndarray[Any, Any]", "pd.DataFrame")


@dataclass(eq=False)
class Transform(ABC):
    r"""An affine map :math:`x \mapsto (x - \mu) W` that is fitted to points and applied to these or other points.

    Base of `Centering`, `AllButTheTop` and `Whitening`; `Transform.load` opens a file of any of them.

    Attributes:
        mean: :math:`\mu`, `(d,)`, float64 on the CPU; None before `fit`.
        matrix: W, `(d, k)`, float64 on the CPU; None for the identity.
    """

    mean: Tensor | None = field(default=None, init=False, repr=False)
    matrix: Tensor | None = field(default=None, init=False, repr=False)
    keeps_axes: ClassVar[bool] = True
    """Whether column i of the result still belongs to dimension i, so that data frames keep their column names."""

    @torch.no_grad()
    def fit(self, points: PointSource) -> Self:
        """Fit the map to points and return it. One pass reads them in blocks and sums them in float64 (float32 on MPS).

        Args:
            points: one cloud, `(n, d)`: a tensor, an array, a data frame, a list of rows or a file of vectors, such as
                `"vectors.npy"` or `"vectors.parquet:column"`.

        Raises:
            UserError: for several clouds, points of another shape or dtype, fewer than 4, or not finite, and if the
                settings do not fit the points.
        """
        clouds = open_clouds(points)
        if len(clouds) != 1:
            names = ", ".join(cloud.name for cloud in clouds)
            raise UserError(f"there are {len(clouds)} clouds, {names}; expected one")
        [cloud] = clouds
        moments = Moments(cloud.dim, cloud.read_spread_rows(1).device)
        for block in cloud.read_blocks(cloud.block_length):
            moments.update(block.to(moments.mean.dtype))
        if not (moments.mean.isfinite().all() and moments.scatter.isfinite().all()):
            check_finite_rows(cloud)
            raise NonFiniteError(f"{cloud.name}: squares of the numbers are too large; expected smaller numbers")
        self.matrix = self._compute_matrix(moments)
        self.mean = moments.mean.double().cpu()
        return self

    @abstractmethod
    def _compute_matrix(self, moments: Moments) -> Tensor | None:
        """Return W, float64 on the CPU."""

    @torch.no_grad()
    def transform(self, points: _PointsT) -> _PointsT:
        """Return the mapped points, `(n, k)`, computed in float64 (float32 on MPS) and rounded once.

        Args:
            points: a tensor, an array or a data frame, `(n, d)` with any n. The result is of the same kind and dtype, a
                tensor on the same device and without a graph, a data frame with the same index. Its columns have the
                same names, or numbers after `Whitening`.

        Raises:
            UserError: before `fit`, and for another width or dtype. Rows that are not finite stay so, and do not matter
                to the others.
        """
        mean, matrix = self._get_mean(), self.matrix
        cloud = cloud_in_memory("points", points)
        if cloud.dim != len(mean):
            raise UserError(f"points have the width {cloud.dim}; expected {len(mean)}, the width of the fitted points")
        row = cloud.read_spread_rows(1)
        dtype, length = numerics.accumulation_dtype(row.device), cloud.block_length
        mean, matrix = mean.to(row.device, dtype), None if matrix is None else matrix.to(row.device, dtype)
        mapped: Any = row.new_empty(len(points), cloud.dim if matrix is None else matrix.shape[1])
        with numerics.full_precision(row.device):
            for block, mapped_block in zip(cloud.read_blocks(length), mapped.split(length), strict=True):
                centered = block.to(dtype) - mean
                mapped_block.copy_(centered if matrix is None else centered @ matrix)
        if isinstance(points, Tensor):
            return mapped
        if not is_frame(points):
            return mapped.numpy()
        frame: Any = points
        return type(frame)(mapped.numpy(), index=frame.index, columns=frame.columns if self.keeps_axes else None)

    def save(self, path: str | Path) -> None:
        """Write the map and its settings to a .safetensors file, which replaces an existing one atomically.

        Raises:
            UserError: before `fit`.
            OSError: if the file cannot be written.
        """
        from safetensors.torch import save

        tensors = {"mean": self._get_mean()}
        if self.matrix is not None:
            tensors["matrix"] = self.matrix.contiguous()
        settings = {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.init}
        content = save(tensors, {"transform": type(self).__name__, "settings": json.dumps(settings)})
        with atomic_write(Path(path)) as file:
            file.write(content)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the transform of a file that `save` wrote. `Transform.load` opens all kinds, other classes their own.

        Raises:
            UserError: for a file of another kind, a foreign, damaged or missing file.
        """
        path = Path(path)
        with explain_file_errors(path):
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            kinds: dict[str | None, Any] = {kind.__name__: kind for kind in Transform.__subclasses__()}
            kind = kinds.get(metadata.get("transform"))
            if kind is None:
                raise UserError(f"{path} has no transform; expected a file that Transform.save has written")
            if not issubclass(kind, cls):
                raise UserError(f"{path} has a transform of the kind {kind.__name__}; expected {cls.__name__}")
            transform: Self = kind(**json.loads(metadata["settings"]))
            transform.mean, transform.matrix = tensors["mean"], tensors.get("matrix")
        return transform

    def _get_mean(self) -> Tensor:
        if self.mean is None:
            raise UserError(f"{type(self).__name__} is not fitted; call fit first")
        return self.mean


@dataclass(eq=False)
class Centering(Transform):
    r"""Subtracts the mean of the fitted points, :math:`x \mapsto x - \mu`.

    On the fitted points, it equals `istar.measures.centered`.

    >>> Centering().fit([[0.0, 1.0], [2.0, 1.0], [0.0, 3.0], [2.0, 3.0]]).transform(torch.tensor([[5.0, 5.0]]))
    tensor([[4., 3.]])
    """

    def _compute_matrix(self, moments: Moments) -> None:
        return None


@dataclass(eq=False)
class AllButTheTop(Transform):
    r"""Subtracts the mean of the fitted points, and removes their first principal directions :math:`u_j`.

    The map is :math:`x \mapsto (x - \mu)(I - \sum_{j=1}^D u_j u_j^T)` (Mu and Viswanath, *All-but-the-Top*, ICLR 2018;
    *Too Much in Common*, equations 9 to 11). The width stays d, and the removed directions have no variance. On the
    fitted points, it equals `istar.measures.all_but_the_top`.

    Args:
        components: D, from 0 (centering) to d; ceil(d / 100) by default, as in both papers.

    >>> fitted = AllButTheTop(1).fit([[-3.0, 0.0], [3.0, 0.0], [0.0, -1.0], [0.0, 1.0]])
    >>> fitted.transform(torch.tensor([[7.0, 5.0]]))
    tensor([[0., 5.]])
    """

    components: int | None = None

    def __post_init__(self) -> None:
        check_at_least(0, "components", self.components)

    def _compute_matrix(self, moments: Moments) -> Tensor:
        num_removed = count_top_components(moments.dim, self.components)
        _, axes = _find_principal_axes(moments)
        return remove_directions(torch.eye(moments.dim, dtype=axes.dtype, device=axes.device), axes[:, :num_removed])


@dataclass(eq=False)
class Whitening(Transform):
    r"""Rotates to the principal axes of the fitted points, and scales each axis to variance 1.

    The map is :math:`x \mapsto (x - \mu) U \Lambda^{-1/2}`, with the eigenvectors U and eigenvalues :math:`\Lambda` of
    the covariance (divisor n - 1), in descending order (Su et al., *Whitening Sentence Representations for Better
    Semantics and Faster Retrieval*, 2021). The fitted points then have the identity as covariance. The width of the
    result is the number of axes that are kept.

    Args:
        dimensions: number of axes to keep, the first ones; None for all.
        epsilon: an axis is dropped if its variance is at most `epsilon` times the largest. In fewer points than
            dimensions, and along linear dependences, there are axes of variance 0.

    `fit` raises a `UserError` if fewer axes than `dimensions` are left, or all points are equal.

    >>> fitted = Whitening().fit([[-3.0, 0.0], [3.0, 0.0], [0.0, -1.0], [0.0, 1.0]])
    >>> fitted.transform(torch.tensor([[6.0, 0.0]])).square().round()
    tensor([[6., 0.]])
    """

    dimensions: int | None = None
    epsilon: float = 1e-6
    keeps_axes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_at_least(1, "dimensions", self.dimensions)
        if not 0 <= self.epsilon < 1:
            raise OptionError(f"epsilon={self.epsilon:g}; expected a number from 0 to below 1")

    def _compute_matrix(self, moments: Moments) -> Tensor:
        variances, axes = _find_principal_axes(moments)
        if numerics.is_rounding(variances.sum(), moments.mean.square().sum().cpu(), float(moments.epsilon)):
            raise UserError("all points are equal; expected points with a variance")
        num_axes = int((variances > self.epsilon * variances[0]).sum())
        if self.dimensions is not None and self.dimensions > num_axes:
            raise UserError(
                f"dimensions={self.dimensions}, but {num_axes} axes of {moments.dim} have a variance above "
                f"epsilon={self.epsilon:g} of the largest; expected at most {num_axes}"
            )
        num_kept = self.dimensions or num_axes
        return axes[:, :num_kept] / variances[:num_kept].sqrt()


def _find_principal_axes(moments: Moments) -> tuple[Tensor, Tensor]:
    """Return the variances `(d,)`, descending, and axes `(d, d)`, a column each, float64 on the CPU."""
    variances, axes = torch.linalg.eigh(moments.covariance().double().cpu())
    return variances.flip(0), fix_signs(axes.flip(1))
