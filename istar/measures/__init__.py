"""Measures of the geometry of point clouds: pure functions, and accumulators that stream and merge.

Needs torch alone: no Lightning, no transformers, no Hydra.
"""

from istar.measures.cosine import AverageCosine, IntraSim, average_cosine, intra_sim
from istar.measures.dimension import two_nn
from istar.measures.isoscore import isoscore, isoscore_from_covariance, isoscore_star, shrink
from istar.measures.moments import Moments
from istar.measures.partition import PartitionIsotropy, partition_isotropy

__all__ = [
    "AverageCosine",
    "IntraSim",
    "Moments",
    "PartitionIsotropy",
    "average_cosine",
    "intra_sim",
    "isoscore",
    "isoscore_from_covariance",
    "isoscore_star",
    "partition_isotropy",
    "shrink",
    "two_nn",
]
