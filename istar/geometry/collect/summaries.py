"""Summaries of the sums over a source, as `measures.json` has them."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from istar.geometry.collect.item_labels import Labels
from istar.geometry.collect.mean_states import Examples
from istar.geometry.collect.measures_file import Measurements
from istar.measures import MassiveActivationsSummary
from istar.measures.matrix_forms import round_digits
from istar.sums.layers import Layer
from istar.sums.source_sums import SourceSums

NameToken = Callable[[int], str]
"""Returns the text of a token by its id."""
_INTEGER_COLUMNS = ("first", "last", "points")
"""Columns of `Layer.summarize_by_position` and `Layer.summarize_by_frequency` with whole numbers."""


def summarize_source(statistics: SourceSums, name_token: NameToken = str) -> dict[str, Any]:
    """Return a source's `SOURCE_FIELDS` by the name of the hidden state, its `token_counts`, and its `examples`.

    The counts, `(vocabulary,)`, are None without IntraSim, which counts the tokens. The examples are the results of
    `ExampleSums.compute`. The result shares no memory with the statistics.
    """
    layers = statistics.layers
    types = next(iter(layers.values())).types
    spectra, replicates = statistics.compute_spectra(), statistics.compute_replicates()
    massive = {tap: layer.find_massive_activations() for tap, layer in layers.items()}
    by_frequency = {} if types is None else {tap: layer.summarize_by_frequency() for tap, layer in layers.items()}
    gride = statistics.estimate_gride()
    return {
        "sources": statistics.compute_measures(spectra, replicates),
        "spectra": {
            tap: {form: round_digits(values.tolist()) for form, values in forms.items()}
            for tap, forms in spectra.items()
        },
        "norms": {tap: trim_norm_histogram(layer) for tap, layer in layers.items()},
        "extremes": {tap: find_extreme_dimensions(layer) for tap, layer in layers.items()},
        "by_position": {
            tap: _round_columns(layer.summarize_by_position()) for tap, layer in layers.items() if layer.positions
        },
        "by_frequency": {tap: _round_columns(columns) for tap, columns in by_frequency.items()},
        "massive": {
            tap: describe_activations(summary, name_token) for tap, summary in massive.items() if summary is not None
        },
        "gride": {tap: [scale._asdict() for scale in scales] for tap, scales in gride.items()},
        "replicates": {
            tap: {name: round_digits(values, 12) for name, values in columns.items()}
            for tap, columns in replicates.items()
        },
        "token_counts": None if types is None else types.count.clone(),
        "examples": {tap: sums.compute() for tap, sums in statistics.examples.items()},
    }


def _round_columns(columns: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: values if name in _INTEGER_COLUMNS else round_digits(values) for name, values in columns.items()}


def describe_activations(summary: MassiveActivationsSummary, name_token: NameToken) -> list[dict[str, Any]]:
    """Return the largest massive activations, each with its ratio to the median and the text of its token."""
    return [
        {
            **activation._asdict(),
            "ratio": abs(activation.value) / summary.median if summary.median else math.inf,
            "text": name_token(activation.token),
        }
        for activation in summary.top
    ]


def trim_norm_histogram(layer: Layer) -> dict[str, list[float]]:
    """Return the `edges` and `counts` of the histogram of a layer's norms, without the empty bins at either end.

    `outside` has the numbers of norms below and above the layer's histogram.
    """
    norms = layer.norms.compute()
    nonempty = np.flatnonzero(norms.histogram)
    first_bin, end_bin = (int(nonempty[0]), int(nonempty[-1]) + 1) if len(nonempty) else (0, 0)
    return {
        "edges": round_digits(norms.edges[first_bin : end_bin + 1]),
        "counts": list(norms.histogram[first_bin:end_bin]),
        "outside": [norms.below, norms.above],
    }


def find_extreme_dimensions(layer: Layer) -> list[dict[str, float]]:
    """Return the three dimensions of a layer with means farthest from zero, the farthest first.

    Each has its index `dimension`, its `mean`, its standard `deviation`, `mean_by_typical_deviation` (the mean divided
    by the median deviation of all dimensions) and `variance_share` (its share of the summed variance).
    """
    dimensions = layer.dimensions
    mean, deviation = dimensions.mean, dimensions.deviation()
    typical_deviation = deviation.quantile(0.5)
    mean_by_typical_deviation = mean / torch.where(typical_deviation > 0, typical_deviation, math.nan)
    variance_share = deviation.square() / deviation.square().sum()
    return [
        {
            "dimension": dimension,
            "mean": mean[dimension].item(),
            "deviation": deviation[dimension].item(),
            "mean_by_typical_deviation": mean_by_typical_deviation[dimension].item(),
            "variance_share": variance_share[dimension].item(),
        }
        for dimension in mean.abs().argsort(descending=True, stable=True)[:3].tolist()
    ]


class Collected(NamedTuple):
    """What was measured."""

    measurements: Measurements
    examples: Examples | None = None  # None if no examples were kept


def join_examples(sums_by_source: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]], labels: Labels) -> Examples:
    """Return the examples of all sources together, without those that lack points.

    `sums_by_source` has the `examples` of `summarize_source` by what identifies the source. An example's id is the
    source and its label, or else its index there.
    """
    ids: list[str] = []
    groups: list[str] = []
    means: dict[str, list[Tensor]] = {}
    for source, sums_by_state in sums_by_source.items():
        counts, _ = next(iter(sums_by_state.values()))
        kept = counts.nonzero().squeeze(1)
        ids += [f"{source}:{labels.ids[index] if labels.ids else index}" for index in kept.tolist()]
        groups += map(str, labels.find_groups(kept).tolist())
        for state, (_, state_means) in sums_by_state.items():
            means.setdefault(state, []).append(state_means[kept])
    return Examples(tuple(ids), tuple(groups), {state: torch.cat(parts) for state, parts in means.items()})
