r"""The score from pairs of points of different sentences, as a differentiable function of the hidden states of layers.

It is `istar.measures.isoscore_by_sentence` of the union of the layers: the points of a sentence are its tokens in all
layers. Let :math:`X_s` be the points of sentence s about the mean of all points. The score is a function of the number
of points, the sum :math:`m_s` and the scatter :math:`G_s = X_s^T X_s` of each sentence.

The gradient is computed in two steps, as in `istar.regularizers.istar`. An autograd function computes all
:math:`m_s` and :math:`G_s`; with the incoming gradients :math:`g_s` and :math:`H_s`, the gradient with respect to a
point is :math:`g_s + (H_s + H_s^T)(x - \bar x)`. Both passes are batched matrix products, with as many operations as
the scatter matrix of all points. The rest are ordinary autograd operations on s matrices `(d, d)`, so that the
memory is O(s d^2) beyond the hidden states.

>>> import torch
>>> from istar.regularizers import IStar
>>> penalty = IStar(weight=1.0, zeta=0, estimator="unbiased_by_sentence")
>>> hidden_states = [torch.randn(8, 5, 16) for _ in range(3)]  # 8 sentences of 5 tokens
>>> loss = penalty(hidden_states, attention_mask=torch.ones(8, 5))
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import UserError
from istar.measures.accumulator import sum_over_processes
from istar.measures.numerics import accumulation_dtype, full_precision, is_rounding
from istar.measures.sentences import SentenceMoments, SentenceSums
from istar.regularizers.estimators import Estimate, Estimator
from istar.regularizers.points import Tokens, check_same_width

MIN_SENTENCES = 4
"""Fewest sentences that have a score: its estimate uses points of four different ones."""


class SentencePoints(NamedTuple):
    """The hidden state of a layer and the sentences of its points.

    Layers of the same forward pass share one tensor `sentences`. Sentences of different passes are always distinct.
    """

    rows: Tensor
    """Hidden state `(n, d)` with n = batch x tokens."""
    indices: Tensor | None
    """Rows that are points, ascending; None if all are."""
    sentences: Tensor
    """Index of the sentence of each row, `(n,)`, ascending from 0 without gaps over the points of the pass."""


class _Layout(NamedTuple):
    """Where the points of a layer are in a block `(num_sentences * max_length, d)` that is padded with zeros."""

    indices: Tensor | None
    """Rows of the hidden state that are points; None if all are."""
    positions: Tensor
    """Row of the block for each point."""
    num_sentences: int
    """Number of sentences of the forward pass."""
    max_length: int
    """Number of points of the longest sentence."""
    counts: Tensor
    """Number of points of each sentence, `(num_sentences,)`."""


class SentenceEstimator(Estimator):
    """IsoScore from pairs of points of different sentences, without bias if the sentences are independent.

    A sentence is a row of the batch, or each document that is packed into it; see
    `istar.regularizers.points.document_starts`. Fewer than `MIN_SENTENCES` with points have no score.
    """

    measure = "isoscore_by_sentence"
    min_sequences = MIN_SENTENCES
    may_exceed_1 = True

    def summarize(
        self, hidden_states: Sequence[Tensor], indices: Sequence[Tensor | None], tokens: Tokens
    ) -> list[SentencePoints]:
        """Return the points of each hidden state `(batch, tokens, d)` with their sentences.

        Raises:
            UserError: for hidden states of another shape, which have no sentences.
        """
        layers = []
        for state, rows in zip(hidden_states, indices, strict=True):
            if state.dim() != 3:
                raise UserError(
                    "the score by sentence needs the tokens of sentences; expected hidden states (batch, tokens, d), "
                    f"not {tuple(state.shape)}"
                )
            layers.append(SentencePoints(state.flatten(0, 1), rows, tokens.documents_of(state)))
        return layers

    def estimate(
        self,
        summaries: Sequence[SentencePoints],
        shrinkage: Tensor | None,
        sync: bool,
        group: dist.ProcessGroup | None,
    ) -> Estimate:
        """Estimate the score of the union of the layers."""
        moments = sentence_moments(summaries, sync, group)
        score = score_or_nan(moments).to(torch.promote_types(summaries[0].rows.dtype, torch.float32))
        sums = [moments.total, moments.scatter, moments.totals_scatter, moments.scattered_totals]
        sums += [moments.weighted_totals, moments.trace_weighted_totals, moments.scalars]
        return Estimate(score, moments.counts[0], tuple(sums))


def sentence_moments(
    layers: Sequence[SentencePoints], sync: bool = False, group: dist.ProcessGroup | None = None
) -> SentenceMoments:
    """Return the sums over the sentences of the union of at least one layer, about the mean of all points.

    Differentiable, any number of times. The scatter matrices are float32, or float64 for float64 points; sums over
    sentences are float64 (float32 on MPS).

    Args:
        layers: results of `SentenceEstimator.summarize`, of one or several passes.
        sync: merge the sums of the processes of `group`, which have different sentences. Two all-reduces sum
            2 d^2 + 5 d + 13 numbers.

    Raises:
        UserError: if the layers have different dimensions, or fewer than 2.
    """
    check_same_width(layer.rows.shape[1] for layer in layers)
    device, width = layers[0].rows.device, layers[0].rows.shape[1]
    with full_precision(device):
        mean = _compute_mean(layers, sync, group)
        moments = SentenceMoments(width, mean, device)
        for pass_layers in _group_by_pass(layers):
            moments.add(_sum_sentences(pass_layers, mean))
    return moments.all_reduce(group) if sync else moments


def score_or_nan(moments: SentenceMoments) -> Tensor:
    """Return the score, 0-d; NaN for fewer than `MIN_SENTENCES` sentences with points, and for equal points."""
    squared_means = moments.counts[0] * moments.origin.square().sum()
    has_no_score = (moments.sentences < MIN_SENTENCES) | is_rounding(moments.scalars[4], squared_means)
    return torch.where(has_no_score, torch.nan, moments.unchecked_score())


def _compute_mean(layers: Sequence[SentencePoints], sync: bool, group: dist.ProcessGroup | None) -> Tensor:
    dtype = accumulation_dtype(layers[0].rows.device)
    sums = [torch.sum(_select_rows(layer.rows, layer.indices), 0, dtype=dtype) for layer in layers]
    num_points = sum(len(layer.rows) if layer.indices is None else len(layer.indices) for layer in layers)
    packed = torch.cat([torch.stack(sums).sum(0), sums[0].new_full((1,), num_points)])
    packed = sum_over_processes(packed, group) if sync else packed
    return packed[:-1] / packed[-1].clamp(min=1)


def _group_by_pass(layers: Sequence[SentencePoints]) -> list[list[SentencePoints]]:
    passes: dict[int, list[SentencePoints]] = {}
    for layer in layers:
        passes.setdefault(id(layer.sentences), []).append(layer)
    return list(passes.values())


def _sum_sentences(layers: Sequence[SentencePoints], mean: Tensor) -> SentenceSums:
    layouts: list[_Layout] = []
    for index, layer in enumerate(layers):
        # Layers that share the indices of their points share a layout.
        has_same_points = index > 0 and layer.indices is layers[index - 1].indices
        layouts.append(layouts[-1] if has_same_points else _make_layout(layer))
    totals, scatters = _TotalsAndScatters.apply(mean, layouts, *(layer.rows for layer in layers))
    return SentenceSums(
        torch.stack([layout.counts for layout in layouts]).sum(0).to(mean),
        totals.to(mean),
        # Not a matrix product, because its backward pass would run outside of `full_precision`.
        scattered=(scatters * totals[:, None]).sum(2).to(mean),
        squares=scatters.square().sum((1, 2)).to(mean),
        traces=scatters.diagonal(dim1=1, dim2=2).sum(1).to(mean),
        scatter=scatters.sum(0).to(mean),
    )


def _make_layout(layer: SentencePoints) -> _Layout:
    sentence_indices = _select_rows(layer.sentences, layer.indices)
    num_sentences = int(layer.sentences.max()) + 1 if len(layer.sentences) else 0
    counts = sentence_indices.new_zeros(num_sentences).index_add(0, sentence_indices, torch.ones_like(sentence_indices))
    max_length = int(counts.max()) if num_sentences else 0
    # The points of a sentence follow each other; count them from the first point of their sentence.
    sentence_starts = (counts.cumsum(0) - counts)[sentence_indices]
    positions_in_sentence = torch.arange(len(sentence_indices), device=sentence_indices.device) - sentence_starts
    positions = sentence_indices * max_length + positions_in_sentence
    return _Layout(layer.indices, positions, num_sentences, max_length, counts)


def _select_rows(rows: Tensor, indices: Tensor | None) -> Tensor:
    return rows if indices is None else rows.index_select(0, indices)


class _TotalsAndScatters(torch.autograd.Function):
    """Compute the sums `(s, d)` and the scatter matrices `(s, d, d)` of the points of each sentence about a mean."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, layouts: Sequence[_Layout], *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums and the scatter matrices of the union of layers, from their rows and layouts."""
        dtype = torch.promote_types(rows[0].dtype, torch.float32)
        num_sentences, dim = layouts[0].num_sentences, len(mean)
        totals = torch.zeros(num_sentences, dim, dtype=dtype, device=mean.device)
        scatters = torch.zeros(num_sentences, dim, dim, dtype=dtype, device=mean.device)
        with full_precision(mean.device):
            for layer_indices in _split_layers(layouts, dim):
                points = torch.cat([_pad_sentences(rows[i], mean, layouts[i]) for i in layer_indices], 1)
                totals += points.sum(1)
                scatters.baddbmm_(points.mT, points)
        ctx.save_for_backward(mean, *rows)
        ctx.layouts = layouts
        return totals, scatters

    @staticmethod
    def backward(ctx: Any, grad_totals: Tensor, grad_scatters: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the mean and of the rows of each layer."""
        mean, *rows = ctx.saved_tensors
        symmetric_grad = grad_scatters + grad_scatters.mT
        grad_mean = torch.zeros_like(mean)
        gradients: list[Tensor | None] = []
        with full_precision(mean.device):
            for layer_indices in _split_layers(ctx.layouts, len(mean)):
                layouts = [ctx.layouts[i] for i in layer_indices]
                points = torch.cat([_pad_sentences(rows[i], mean, ctx.layouts[i]) for i in layer_indices], 1)
                point_gradients = points @ symmetric_grad + grad_totals[:, None]
                gradients_by_layer = point_gradients.split([layout.max_length for layout in layouts], 1)
                for i, layout, point_gradient in zip(layer_indices, layouts, gradients_by_layer, strict=True):
                    gradient = point_gradient.flatten(0, 1).index_select(0, layout.positions)
                    grad_mean = grad_mean - gradient.sum(0, dtype=mean.dtype)
                    gradient = gradient.to(rows[i].dtype)
                    if layout.indices is not None:
                        gradient = gradient.new_zeros(rows[i].shape).index_copy(0, layout.indices, gradient)
                    gradients.append(gradient)
        return grad_mean, None, *gradients


def _split_layers(layouts: Sequence[_Layout], dim: int) -> Iterator[Sequence[int]]:
    """Yield the indices of layers in parts, so that a sentence has at most about `dim` points in the layers of a part.

    The layers of a part are multiplied in one product. Each product reads or writes all scatter matrices, so that few
    large products are faster, but a copy of all layers at once would take too much memory.
    """
    layers_per_part = max(1, dim // max([1, *(layout.max_length for layout in layouts)]))
    for start in range(0, len(layouts), layers_per_part):
        yield range(start, min(start + layers_per_part, len(layouts)))


def _pad_sentences(rows: Tensor, mean: Tensor, layout: _Layout) -> Tensor:
    """Return `(sentences, max_length, d)`, float32 or wider; shorter sentences are padded with zeros."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    points = _select_rows(rows, layout.indices).to(dtype) - mean.to(dtype)
    block = points.new_zeros(layout.num_sentences * layout.max_length, rows.shape[1])
    return block.index_copy(0, layout.positions, points).view(layout.num_sentences, layout.max_length, rows.shape[1])
