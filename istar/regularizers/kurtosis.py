r"""The kurtosis penalty, :math:`|\lambda| (K - t)^2`, with :math:`K = E((x - \mu) / \sigma)^4`.

*Robust Quantization: One Model to Rule Them All* (Shkolnik et al., NeurIPS 2020), equations (11) and (12). The paper
applies it to the weights of each layer, to make them easy to quantize: a uniform distribution has the kurtosis 1.8, a
normal one 3, and values with outliers far more. Here x are the activations: all coordinates of all points are one
sample, with one mean and one variance.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from istar.measures.accumulator import sum_over_processes
from istar.measures.numerics import accumulation_dtype, is_rounding
from istar.regularizers.base import Penalty, SetPoint, Terms

UNIFORM = SetPoint(1.8)
"""The target of Shkolnik et al. (2020), the kurtosis of a uniform distribution."""


@dataclass(eq=False, repr=False)
class Kurtosis(Penalty):
    """The squared deviation of the kurtosis of the hidden states from a target (Shkolnik et al., 2020).

    The coordinates of the selected layers form one sample. The paper takes the mean of the penalties of its layers
    instead; the two agree for one layer, which is the default. The kurtosis depends neither on the scale nor, except
    for the sampling error, on the number of points or dimensions, so that a published lambda carries over for one
    layer. It is above 1, and not defined if all coordinates are equal. As in the paper, 3 is not subtracted, and bias
    is not corrected.

    The target is 1.8 by default. Without a set-point, the penalty is lambda times the kurtosis.
    """

    _: KW_ONLY
    set_point: SetPoint | None = UNIFORM

    reference = "shkolnik2020robust"
    measure = "kurtosis"
    score_range = (1.0, math.inf)
    min_points = 1

    def summarize_points(self, points: Tensor, indices: Tensor | None) -> tuple[Tensor, torch.dtype]:
        """Return six sums in float64 (float32 on MPS), `(6,)`, and the dtype of the penalty.

        They are the number of points, the number of coordinates, the mean of the coordinates, and the sums of the
        second, third and fourth powers of their deviations from the mean.
        """
        points = points if indices is None else points.index_select(0, indices)
        points = points.to(torch.promote_types(points.dtype, torch.float32))
        dtype = accumulation_dtype(points.device)
        sizes = torch.tensor([len(points), points.numel()], dtype=dtype, device=points.device)
        mean = points.sum(dtype=dtype) / sizes[1].clamp(min=1)
        deviations = points - mean.to(points.dtype)
        power_sums = [deviations.pow(power).sum(dtype=dtype) for power in (2, 3, 4)]
        return torch.stack([*sizes, mean, *power_sums]), points.dtype

    def score(self, summaries: Sequence[tuple[Tensor, torch.dtype]]) -> Terms:
        layer_summaries = torch.stack([layer_sums for layer_sums, _ in summaries], 1)
        # Each of these tensors has one number for each layer.
        point_counts, coordinate_counts, means, second, third, fourth = layer_summaries
        totals = torch.stack([point_counts.sum(), coordinate_counts.sum(), (coordinate_counts * means).sum()])
        totals = sum_over_processes(totals, self.group) if self.sync else totals
        num_points, num_coordinates, coordinate_sum = totals
        # Sums of powers of the deviations from the common mean, by the binomial formula.
        mean = coordinate_sum / num_coordinates.clamp(min=1)
        shift = means - mean
        power_sums = torch.stack(
            [
                (second + coordinate_counts * shift**2).sum(),
                (fourth + 4 * shift * third + 6 * shift**2 * second + coordinate_counts * shift**4).sum(),
            ]
        )
        power_sums = sum_over_processes(power_sums, self.group) if self.sync else power_sums
        square_sum, fourth_power_sum = power_sums
        # Without variance, 0 / 0 gives NaN.
        square_sum = square_sum.masked_fill(is_rounding(square_sum, num_coordinates * mean.square()), torch.nan)
        value = (num_coordinates * fourth_power_sum / square_sum.square()).to(summaries[0][1])
        return Terms(value, value, num_points, sums=(power_sums,))
