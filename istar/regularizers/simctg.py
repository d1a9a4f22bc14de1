r"""The contrastive loss of SimCTG between the tokens of a sequence.

*A Contrastive Framework for Neural Text Generation* (Su et al., NeurIPS 2022), equation (2). With the cosine s of the
hidden states h of a sequence x,

.. math::
    \lambda \frac{1}{|x| (|x| - 1)} \sum_i \sum_{j \ne i} \max\bigl(0, \rho - s(h_i, h_i) + s(h_i, h_j)\bigr).

For several sequences, this is the sum over all of them divided by the number of all pairs, as in the published code, so
that long sequences count more. The union of several layers is averaged in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from istar.errors import OptionError, UserError
from istar.measures.numerics import full_precision
from istar.regularizers.base import Penalty, Terms
from istar.regularizers.points import Tokens, unit_points


@dataclass(eq=False, repr=False)
class SimCtg(Penalty):
    """The contrastive loss of SimCTG (Su et al., 2022) between the tokens of a sequence.

    A pair consists of points of one sequence and layer; a row of the batch is a sequence, even if it packs several
    documents. Pairs are summed layer by layer and over processes, so that nothing is gathered. Memory grows with the
    square of the length of the sequences. The value, in [0, margin + 1], is a mean over pairs: it depends on
    neither the scale of the hidden states nor the size of the batch. The paper adds it to the loss with the weight 1. A
    zero vector has the cosine 0 with all tokens, itself included.

    The score is the unweighted penalty.

    Raises:
        OptionError: for a margin outside of [-1, 1].
        UserError: in a forward pass, for points without sequences, such as the rows of an embedding matrix. Points
            without pairs, such as the last token of each sequence, have no score.
    """

    margin: float = 0.5
    """Cosines of different tokens above 1 - margin are penalized; from -1 to 1 (the paper's rho)."""

    reference = "su2022contrastive"
    measure = "contrastive_loss"
    score_range = (0.0, 2.0)
    min_points_per_sequence = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.margin <= 1:
            raise OptionError(f"margin={self.margin:g}; expected a number from -1 to 1")

    def summarize_layer(self, hidden_state: Tensor, tokens: Tokens) -> Tensor:
        """Return the sum over the pairs of each sequence, and the number of pairs and of points, `(3,)`.

        The hidden state of the layer is `(batch, tokens, d)`.
        """
        if hidden_state.dim() != 3:
            shape = tuple(hidden_state.shape)
            raise UserError(f"SimCTG compares the tokens of sequences; expected (batch, tokens, d), not {shape}")
        indices = tokens.indices_of(hidden_state)
        is_point = torch.ones(hidden_state.shape[:2], dtype=torch.bool, device=hidden_state.device)
        if indices is not None:
            is_point = torch.zeros_like(is_point).flatten().index_fill(0, indices, True).view_as(is_point)
        with full_precision(hidden_state.device):
            # Tokens that are not points may be NaN, so they are set to 0.
            units = unit_points(hidden_state.masked_fill(~is_point[..., None], 0), None)
            cosines = units @ units.mT
        hinges = (self.margin - cosines.diagonal(dim1=1, dim2=2)[..., None] + cosines).clamp(min=0)
        is_pair = is_point[:, :, None] & is_point[:, None, :]
        is_pair = is_pair & ~torch.eye(is_point.shape[1], dtype=torch.bool, device=is_point.device)
        # A point that is not finite makes the sum NaN even without pairs.
        total = (hinges * is_pair).sum()
        return torch.stack([total, is_pair.sum().to(total), is_point.sum().to(total)])

    def score(self, summaries: Sequence[Tensor]) -> Terms:
        sums = self.sum_over_layers(summaries)
        total, num_pairs, num_points = sums
        # Without pairs, 0 / 0 gives NaN.
        value = total / num_pairs
        return Terms(value, value, num_points, sums=(sums,))
