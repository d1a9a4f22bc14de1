"""Geometry of a run's final model on the validation data: mean activation, intrinsic dimension and IsoScore*."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import PretrainedConfig

from istar.errors import NonFiniteError, UserError
from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.training.data import Collate, build_evaluation_loader, select_rows_with_tokens, sort_longest_first
from istar.finetune.training.module import FineTuner, on_training_device, token_mask
from istar.hidden_states.model_modes import eval_mode
from istar.hidden_states.shrinkage import NUM_POINTS, to_covariance
from istar.measures import FourthMoments, Moments, isoscore_star, two_nn
from istar.measures.numerics import mean_row
from istar.models.architectures import is_decoder
from istar.sums.rows import Rows
from istar.sums.sample import Sample
from istar.sums.source_sums import SourceSums, SumSettings

MAX_TWO_NN_EXAMPLES = 1_000
"""Maximum number of texts for TwoNN, which compares each with all others."""


@dataclass(frozen=True)
class EvaluationPasses:
    """Runs a trainer's model over tokenized rows in eval mode and without gradients.

    The passes use the trainer's device and precision. They run on this process alone; if the model is sharded, all
    processes read the same rows together.
    """

    trainer: L.Trainer
    module: FineTuner
    collate: Collate
    batch_size: int

    def iterate(self, rows: TokenizedRows, order: Sequence[int]) -> Iterator[tuple[Tensor, dict[str, Tensor], Tensor]]:
        """Yield the row indices, the hidden states by layer and the token mask of each batch of rows.

        The layers are named as in `FineTuner`. The module is in its previous mode between two batches, and on its
        previous device after the last one.
        """
        module = self.module
        batches = build_evaluation_loader(rows, self.collate, self.batch_size, order)
        with on_training_device(self.trainer, module):
            for row_indices, batch in zip(torch.tensor(order).split(self.batch_size), batches, strict=True):
                batch = module.transfer_batch_to_device(batch, module.device, 0)
                with eval_mode(module), torch.no_grad(), self.trainer.precision_plugin.val_step_context():
                    states_by_layer = module.hidden_states(batch)
                yield row_indices, states_by_layer, token_mask(batch)


def measure_validation_geometry(
    passes: EvaluationPasses, validation: TokenizedRows, train: TokenizedRows, zeta: float | None, seed: int
) -> dict[str, Any]:
    r"""Measure mean activation, intrinsic dimension and IsoScore\* of the hidden states of a validation set.

    This takes one pass over the validation rows, and with `zeta` another one over a sample of training rows: as many
    as have `NUM_POINTS` points in layers 1 to L together, or all. The model and the global random state do not change.

    Args:
        zeta: weight of Sigma_S in [0, 1]; None leaves out IsoScore\*.
        seed: seed of the sample of texts for TwoNN, and of the sample of training rows.

    Returns:
        A dictionary with
        - `examples` and `tokens`: their numbers, without padding.
        - `mean_activation`: the mean of the last layer's states over the tokens, d numbers.
        - `two_nn`: the TwoNN intrinsic dimension of each layer, starting with the embedding output, of at most
          `MAX_TWO_NN_EXAMPLES` texts (see `sum_states`); None if the texts are too few, or their states equal. In the
          first layers of a decoder, it describes how the nearly equal states of texts with the same last token differ.
        - `isoscore_star`, with `zeta`: the result of `compute_isoscore_star`.

    Raises a `NonFiniteError` if hidden states are not finite.
    """
    order = sort_longest_first(validation)
    layers, texts = sum_states(passes, validation, order, MAX_TWO_NN_EXAMPLES, seed)
    geometry = {
        "examples": len(order),
        "tokens": int(layers[-1].count),
        "mean_activation": layers[-1].mean.tolist(),
        "two_nn": [
            None if texts.is_constant(layer) else call_or_none(partial(two_nn, texts.get_points(layer)))
            for layer in texts.states
        ],
    }
    if zeta is not None:
        training_order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        num_tokens = math.ceil(NUM_POINTS / (len(layers) - 1))
        training_layers, _ = sum_states(passes, train, select_rows_with_tokens(train, training_order, num_tokens))
        geometry["isoscore_star"] = compute_isoscore_star(layers, training_layers, zeta)
    return geometry


def sum_states(
    passes: EvaluationPasses, rows: TokenizedRows, order: Sequence[int], num_texts: int = 0, seed: int = 0
) -> tuple[list[FourthMoments], Sample]:
    """Compute the moments of the hidden states of rows, and sample the texts of the rows.

    Returns:
        The moments over all tokens by layer, starting with the embedding output; and a sample of at most `num_texts`
        distinct texts. A text has one point in each layer: the state of the first token ([CLS]) of an encoder, or of
        the last token of a decoder, which alone has seen the whole text. Equal texts are one point, because their
        states in different batches differ by rounding only.
    """
    sums: SourceSums | None = None
    for row_indices, states_by_layer, mask in passes.iterate(rows, order):
        layers = {layer: states for layer, states in states_by_layer.items() if layer.isdigit()}
        token_indices = mask.flatten().nonzero().squeeze(1)
        tokens = {layer: states.flatten(0, 1)[token_indices] for layer, states in layers.items()}
        if sums is None:
            origins = {layer: mean_row(points) for layer, points in tokens.items()}
            sums = SourceSums(SumSettings(groups=0, sample=0), origins, has_positions=False)
            texts = Sample({layer: origin.device for layer, origin in origins.items()}, num_texts, seed)
        sums.update(tokens, Rows.of(torch.zeros(len(token_indices), dtype=torch.int64, device="cpu")), [], [])
        if num_texts:
            text_hashes = [hash(rows[index]["input_ids"].tobytes()) for index in row_indices.tolist()]
            batch_indices = torch.arange(len(mask), device=mask.device)
            positions = find_summary_positions(passes.module.model.config, mask)
            text_states = {layer: states[batch_indices, positions] for layer, states in layers.items()}
            texts.update(row_indices.tolist(), [1] * len(mask), torch.tensor(text_hashes, device="cpu"), text_states)
    assert sums is not None
    return [layer_sums.moments for layer_sums in sums.layers.values()], texts


def compute_isoscore_star(layers: Sequence[Moments], training_layers: Sequence[Moments], zeta: float) -> dict[str, Any]:
    r"""Compute IsoScore\* of each layer and their union, as in Figures 3 and 6 of *Stable Anisotropic Regularization*.

    The score is the IsoScore of :math:`(1 - \zeta) \operatorname{Cov}(X) + \zeta \Sigma_S` (Algorithm 1 of the paper).
    For the union of layers 1 to L, X contains the states of all tokens of the validation rows, and the shrinkage
    covariance Sigma_S is computed from the same layers on training rows. For a single layer, both come from this layer
    on the same rows; the paper does not say which Sigma_S its Figure 6 uses. Padding does not count.

    Returns:
        A dictionary with `zeta`; `num_points`, the number of points in Sigma_S of the union; `union`, the score of
        layers 1 to L together; and `layers`, the score of each layer by its number as a string (0 is the embedding
        output). Scores are in [0, 1], or None if all states are equal.
    """

    def compute_score(moments: Moments, shrinkage_moments: Moments) -> float | None:
        return call_or_none(lambda: isoscore_star(moments, to_covariance(shrinkage_moments), zeta))

    union = unite_layers(layers)
    training_union = unite_layers(training_layers)
    return {
        "zeta": zeta,
        "num_points": int(training_union.count),
        "union": compute_score(union, training_union),
        "layers": {str(layer): score for layer, score in enumerate(map(compute_score, layers, training_layers))},
    }


def unite_layers(layers: Sequence[Moments]) -> Moments:
    """Return the moments of layers 1 to L together. `layers` starts with layer 0, which is left out.

    Raises a `UserError` if the layers have different widths.
    """
    union = type(layers[0])(layers[0].dim, layers[0].scatter.device)
    for moments in layers[1:]:
        union.merge(moments)
    return union


def find_summary_positions(config: PretrainedConfig, mask: Tensor) -> Tensor:
    """Return the position of the token that a head reads for each text, `(batch,)`, from the mask `(batch, tokens)`.

    It is the first token ([CLS]) for an encoder, and the last one for a decoder. The mask is 0 for padding.
    """
    if is_decoder(config):
        return mask.shape[1] - 1 - mask.long().flip(1).argmax(1)
    return mask.long().argmax(1)


def call_or_none(measure: Callable[[], float | Tensor]) -> float | None:
    """Return the value of a measure, or None if it is undefined and raises a `UserError`."""
    try:
        return float(measure())
    except NonFiniteError:
        raise
    except UserError:
        return None
