"""Measures of one layer of a stack."""

from torch import Tensor

from istar.sums.layers import Layer
from istar.sums.stack_measures import compute_measures, compute_replicates, compute_spectra


def decompose_layer(layer: Layer) -> dict[str, Tensor]:
    """Return the singular values of a layer by form."""
    return compute_spectra(layer.sums)[layer.state]


def replicate_layer(layer: Layer) -> dict[str, list[float]]:
    """Return the jackknife replicates of a layer."""
    return compute_replicates(layer.sums)[layer.state]


def measure_layer(layer: Layer) -> dict[str, float]:
    """Return the measures of a layer."""
    sums = layer.sums
    return compute_measures(sums, compute_spectra(sums), compute_replicates(sums))[layer.state]
