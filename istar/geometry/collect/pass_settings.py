"""The settings of a pass over a source."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from istar.geometry.collect.layers import LayerSettings, MeasureSet
from istar.measures.catalogue import MEASURES_WITH_ERROR

if TYPE_CHECKING:
    from istar.texts.corpus import Documents

SpecialTokens = Literal["include", "exclude"]
"""Whether statistics include the hidden states of special tokens; see `MeasureSettings`."""
MAX_GROUP_BYTES = 2**30
"""Maximum bytes of the scatter matrices of all groups and layers; above it, covariance measures get no error."""
_BYTES_OF_SCATTER = 8 + 4
"""Bytes for each number of a scatter matrix: the accumulated one in float64, and the recent one in float32."""


@dataclass(frozen=True, kw_only=True)
class SumSettings:
    """Settings of the sums over any source."""

    measures: MeasureSet = "basic"  # `all` adds the measures that take the most time
    # Number of groups of examples for standard errors; 0 computes none. Example i, counted from 0, is in group
    # i mod `groups`.
    groups: int = 10
    sample: int = 5_000  # maximum number of points for measures of pairs; 0 leaves these measures out
    seed: int = 0  # seed of the sample
    # Most tokens of a text, rows of a cloud or of a state that are read, or few more, as batches are read whole. None
    # reads all.
    limit: int | None = None

    def make_layer_settings(self, dims: Iterable[int], has_positions: bool = True) -> LayerSettings:
        """Return the settings of the accumulators of states of the given widths."""
        scatter_bytes = self.groups * sum(dim**2 for dim in dims) * _BYTES_OF_SCATTER
        return LayerSettings(
            measures=self.measures,
            num_groups=self.groups,
            scatter_by_group=scatter_bytes <= MAX_GROUP_BYTES,
            has_positions=has_positions,
        )

    def describe_missing_errors(self, dims: Iterable[int]) -> str | None:
        """Return which measures of states of these widths get no standard errors, and why; None if all get them."""
        if self.make_layer_settings(dims).scatter_by_group:
            return None
        names = ", ".join(name for name, needs in MEASURES_WITH_ERROR.items() if needs == "covariance")
        return (
            f"{names} get no standard errors, because the sums of {self.groups} groups would take more than "
            f"{MAX_GROUP_BYTES / 2**30:g} GiB; choose fewer groups"
        )


@dataclass(frozen=True)
class MeasureSettings(SumSettings):
    """Settings of `istar measure`, for a pass over texts.

    An example is a document. Of packed documents, each run of `corpus.RUN_LENGTH` consecutive blocks counts as one. The
    sample has one occurrence of each of a random choice of token types, and its seed decides the order of documents.
    """

    length: int  # maximum number of tokens of a block, including special tokens
    # Maximum number of tokens of a batch, with padding; see `corpus.split_into_batches` for the default.
    batch_tokens: int | None = None
    shuffle_buffer: int = 0  # number of documents to draw the next one from, see `corpus.shuffle_documents`; 0: none
    intra: bool = True  # whether to compute IntraSim; its sums may need gigabytes, see `GroupedPoints`
    documents: "Documents" = "separate"  # whether the model sees each document alone; see `corpus.Blocks`
    # Whether the statistics include the hidden states of special tokens and separators, which the model always sees.
    special_tokens: SpecialTokens = "exclude"
