"""The settings of a pass over texts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from istar.sums.source_sums import SumSettings

if TYPE_CHECKING:
    from istar.texts.corpus import Documents

SpecialTokens = Literal["include", "exclude"]
"""Whether statistics include the hidden states of special tokens; see `MeasureSettings`."""


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
