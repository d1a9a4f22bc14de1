"""What a pass over a corpus accumulates: its settings, and the statistics of all layers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from istar.geometry.collect.layers import Layer, LayerSettings, MeasureSet
from istar.geometry.collect.sample import Sample
from istar.measures import Accumulator, NeighbourMeasures, ScaleDimension
from istar.measures.catalogue import MEASURES_WITH_ERROR

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from istar.texts.corpus import Documents

MAX_GROUP_BYTES = 2**30
"""Maximum bytes of the scatter matrices of all groups and layers; above it, covariance measures get no error."""
_BYTES_OF_SCATTER = 8 + 4
"""Bytes for each number of a scatter matrix: the accumulated one in float64, and the recent one in float32."""

SpecialTokens = Literal["include", "exclude"]
"""Whether statistics include the hidden states of special tokens; see `MeasureSettings`."""


@dataclass(frozen=True)
class MeasureSettings:
    """Settings of `istar measure`, for a pass over a corpus."""

    length: int  # maximum number of tokens of a block, including special tokens
    # Maximum number of tokens of a batch, with padding; see `corpus.split_into_batches` for the default.
    batch_tokens: int | None = None
    sample: int = 5_000  # maximum number of token types to keep for TwoNN, with one occurrence of each
    seed: int = 0  # seed of that sample, and of the order of the documents
    # A source is read until the statistics have at least this number of its tokens; None reads all of it.
    limit: int | None = None
    shuffle_buffer: int = 0  # number of documents to draw the next one from, see `corpus.shuffle_documents`; 0: none
    intra: bool = True  # whether to compute IntraSim; its sums may need gigabytes, see `GroupedPoints`
    documents: "Documents" = "separate"  # whether the model sees each document alone; see `corpus.Blocks`
    # Whether the statistics include the hidden states of special tokens and separators, which the model always sees.
    special_tokens: SpecialTokens = "exclude"
    measures: MeasureSet = "basic"  # `all` adds the measures that take the most time
    # Number of groups of documents for standard errors; 0 computes none. Document i, counted from 0, is in group
    # i mod `groups`. Of packed documents, each run of `corpus.RUN_LENGTH` consecutive blocks counts as one document.
    groups: int = 10

    def make_layer_settings(self, dim: int, num_layers: int) -> LayerSettings:
        """Return the settings of each layer's accumulators for a model with `num_layers` layers of width `dim`."""
        return LayerSettings(
            measures=self.measures,
            num_groups=self.groups,
            scatter_by_group=self.groups * num_layers * dim**2 * _BYTES_OF_SCATTER <= MAX_GROUP_BYTES,
        )

    def describe_missing_errors(self, dim: int, num_layers: int) -> str | None:
        """Return which measures of this model get no standard errors, and why; None if all get the usual ones."""
        if self.make_layer_settings(dim, num_layers).scatter_by_group:
            return None
        names = ", ".join(name for name, needs in MEASURES_WITH_ERROR.items() if needs == "covariance")
        return (
            f"{names} get no standard errors, because the sums of {self.groups} groups would take more than "
            f"{MAX_GROUP_BYTES / 2**30:g} GiB; choose fewer --groups"
        )


class CorpusStatistics(Accumulator):
    """Accumulates all measures of all hidden states over a source.

    `config` is the text config of the measured model. `origins` contains, for each hidden state by name, a point near
    its mean, `(d,)`, on its layer's device. `sample` keeps one occurrence of each of a random sample of token types.
    """

    def __init__(self, config: "PretrainedConfig", settings: MeasureSettings, origins: Mapping[str, Tensor]) -> None:
        vocabulary_size = config.vocab_size if settings.intra else 0
        layer_settings = settings.make_layer_settings(config.hidden_size, len(origins))
        self.layers = {tap: Layer(vocabulary_size, origin, layer_settings) for tap, origin in origins.items()}
        self._has_all_measures = settings.measures == "all"
        devices = {tap: origin.device for tap, origin in origins.items()}
        self.sample = Sample(devices, min(settings.sample, config.vocab_size), settings.seed)

    def compute_measures(
        self,
        spectra: Mapping[str, Mapping[str, Tensor]] | None = None,
        replicates: Mapping[str, Mapping[str, list[float]]] | None = None,
    ) -> dict[str, dict[str, float]]:
        """Compute all measures, by hidden state and name. A sample of size 0 leaves out the measures that need it.

        `spectra` and `replicates` are results of `Layer.compute_spectra` and `Layer.compute_replicates` by state; None
        computes them.
        """
        measures_by_tap = {
            tap: layer.compute_measures(spectra[tap] if spectra else None, replicates[tap] if replicates else None)
            for tap, layer in self.layers.items()
        }
        if self.sample.size:
            for tap, measures in measures_by_tap.items():
                measures["two_nn"], measures["two_nn_error"] = self.sample.estimate_two_nn(tap)
                if self._has_all_measures:
                    measures |= self.sample.compute_cosines(tap) | self.sample.compute_neighbour_measures(tap)
                if self.layers[tap].is_constant:  # distances and z-scores are rounding errors
                    names = {"two_nn", "two_nn_error", "sample_inter_sim_standardized", "uniformity"}
                    names.update(NeighbourMeasures._fields)
                    measures |= dict.fromkeys(measures.keys() & names, math.nan)
        return measures_by_tap

    def estimate_gride(self) -> dict[str, list[ScaleDimension]]:
        """Estimate the intrinsic dimension by state and scale; empty without a sample, or with the basic measures."""
        taps = self.layers if self.sample.size and self._has_all_measures else ()
        return {tap: [] if self.layers[tap].is_constant else self.sample.estimate_gride(tap) for tap in taps}
