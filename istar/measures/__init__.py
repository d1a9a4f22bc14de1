"""Measures of the geometry of point clouds, as pure functions and as accumulators for streams of batches.

This package depends on torch only.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from istar.measures.accumulator import Accumulator
    from istar.measures.activations import (
        Activation,
        MassiveActivations,
        MassiveActivationsSummary,
        TokenKurtosis,
        TokenKurtosisSummary,
        token_kurtosis,
    )
    from istar.measures.alignment import cka, cka_with_error
    from istar.measures.catalogue import Measure, find_measure
    from istar.measures.classes import ClassIsotropy, ClassMoments, class_isotropy
    from istar.measures.contributions import (
        CosineContributions,
        cosine_without_dimensions,
        standardized_cosine,
    )
    from istar.measures.cosine import AverageCosine, IntraSim, adjusted_intra_sim, average_cosine, intra_sim
    from istar.measures.dimension import Dimension, ScaleDimension, gride, gride_scales, two_nn, two_nn_with_error
    from istar.measures.dimension_moments import DimensionMoments, outlier_dimensions
    from istar.measures.isoscores import (
        isoscore,
        isoscore_from_covariance,
        isoscore_star,
        isoscore_unbiased,
        shrink,
        shrinkage_intensity,
    )
    from istar.measures.jackknife import ValueWithError, jackknife_error
    from istar.measures.moments import FourthMoments, Moments
    from istar.measures.norms import LayerNormSummary, Norms, NormSummary, layer_norm_summary, norm_summary
    from istar.measures.partition import PartitionIsotropy, partition_isotropy
    from istar.measures.point_groups import GroupedPoints, GroupSummary, log2_bin_range, log2_bins
    from istar.measures.postprocess import all_but_the_top, centered, scaled_centered
    from istar.measures.spectrum import (
        PowerLaw,
        alpha_req,
        effective_rank,
        nesum,
        participation_ratio,
        rank_me,
        singular_values,
        top_share,
        variance_shares,
    )

__all__ = [
    "Accumulator",
    "Activation",
    "AverageCosine",
    "ClassIsotropy",
    "ClassMoments",
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
    "NormSummary",
    "Norms",
    "PartitionIsotropy",
    "PowerLaw",
    "ScaleDimension",
    "TokenKurtosis",
    "TokenKurtosisSummary",
    "ValueWithError",
    "adjusted_intra_sim",
    "all_but_the_top",
    "alpha_req",
    "average_cosine",
    "centered",
    "cka",
    "cka_with_error",
    "class_isotropy",
    "cosine_without_dimensions",
    "effective_rank",
    "find_measure",
    "gride",
    "gride_scales",
    "intra_sim",
    "isoscore",
    "isoscore_from_covariance",
    "isoscore_star",
    "isoscore_unbiased",
    "jackknife_error",
    "layer_norm_summary",
    "log2_bin_range",
    "log2_bins",
    "nesum",
    "norm_summary",
    "outlier_dimensions",
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
