"""Measures of the geometry of point clouds, as pure functions and as accumulators for streams of batches.

This package depends on torch only.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from istar.measures.accumulator import *
    from istar.measures.activations import *
    from istar.measures.catalogue import *
    from istar.measures.classes import *
    from istar.measures.contributions import *
    from istar.measures.cosine import *
    from istar.measures.dimension import *
    from istar.measures.dimension_moments import *
    from istar.measures.isoscores import *
    from istar.measures.jackknife import *
    from istar.measures.kernel_alignment import *
    from istar.measures.moments import *
    from istar.measures.neighbours import *
    from istar.measures.norms import *
    from istar.measures.partition import *
    from istar.measures.point_groups import *
    from istar.measures.postprocess import *
    from istar.measures.spectrum import *
    from istar.measures.unit_sphere import *

__all__ = [
    "Accumulator",
    "Activation",
    "AverageCosine",
    "ClassIsotropy",
    "CosineContributions",
    "Dimension",
    "DimensionMoments",
    "FourthMoments",
    "GroupSummary",
    "GroupedPoints",
    "IntraSim",
    "LayerNormSummary",
    "MassiveActivations",
    "MassiveActivationsSummary",
    "Measure",
    "Moments",
    "NeighbourMeasures",
    "Neighbours",
    "NormSummary",
    "Norms",
    "PartitionIsotropy",
    "PowerLaw",
    "ScaleDimension",
    "TokenKurtosis",
    "TokenKurtosisSummary",
    "ValueWithError",
    "adjusted_intra_sim",
    "alignment",
    "all_but_the_top",
    "alpha_req",
    "average_cosine",
    "centered",
    "cka",
    "cka_with_error",
    "class_isotropy",
    "cosine_without_dimensions",
    "count_dimensions",
    "effective_rank",
    "find_measure",
    "find_neighbours",
    "gride",
    "gride_scales",
    "intra_sim",
    "isoscore",
    "isoscore_from_covariance",
    "isoscore_star",
    "isoscore_unbiased",
    "jackknife_bias_correction",
    "jackknife_error",
    "layer_norm_summary",
    "log2_bin_range",
    "log2_bins",
    "neighbour_measures",
    "nesum",
    "norm_summary",
    "outlier_dimensions",
    "outlier_severity",
    "participation_ratio",
    "partition_isotropy",
    "rank_me",
    "scaled_centered",
    "shrink",
    "shrinkage_intensity",
    "singular_values",
    "standardized_cosine",
    "token_kurtosis",
    "top_share",
    "two_nn",
    "two_nn_with_error",
    "uniformity",
    "variance_shares",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because torch takes seconds, and the catalogue does without it."""
    if name in __all__:
        for module in pkgutil.iter_modules(__path__):
            contents = vars(importlib.import_module(f"{__name__}.{module.name}"))
            if name in contents:
                return contents[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
