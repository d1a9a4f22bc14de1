r"""IsoScore\* of a run's final model on the validation data, with the shrinkage covariance of training data."""

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch

from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.training.data import Collate, build_evaluation_loader, select_rows_with_tokens, sort_longest_first
from istar.finetune.training.layer_isotropy import merge_layers
from istar.finetune.training.module import FineTuner, token_mask
from istar.finetune.training.validation_geometry import inference_context
from istar.hidden_states.shrinkage import NUM_POINTS, to_covariance
from istar.measures import Moments, isoscore_star


def compute_isoscore_star_by_layer(
    trainer: L.Trainer,
    module: FineTuner,
    validation: TokenizedRows,
    train: TokenizedRows,
    collate: Collate,
    batch_size: int,
    zeta: float,
    seed: int,
    num_points: int = NUM_POINTS,
) -> dict[str, Any]:
    r"""Compute IsoScore\* of each layer and their union, as in Figures 3 and 6 of *Stable Anisotropic Regularization*.

    The score is the IsoScore of :math:`(1 - \zeta) \operatorname{Cov}(X) + \zeta \Sigma_S` (Algorithm 1 of the paper).
    For the union of layers 1 to L, X contains the states of all tokens of the validation rows, and the shrinkage
    covariance Sigma_S is that of the same layers on training rows. For a single layer, X and Sigma_S are those of this
    layer on the same rows; the paper does not say which Sigma_S its Figure 6 uses. Padding does not count.

    The forward passes run on this process alone, in eval mode, on the trainer's device and in its precision. Statistics
    are float32 or wider. The model and the global random state do not change.

    Args:
        trainer: determines the device and the precision.
        module: module with the model.
        validation: rows with the points X.
        train: rows from which those for Sigma_S are sampled.
        collate: turns rows into a padded batch.
        batch_size: rows per forward pass.
        zeta: weight of Sigma_S in [0, 1].
        seed: seed of the sample of training rows.
        num_points: minimum number of points for Sigma_S, counted over the union of layers 1 to L. All rows are used if
            they have fewer points.

    Returns:
        A dictionary with `zeta`; `num_points`, the number of points from which Sigma_S of the union is computed;
        `union`, the score of layers 1 to L together; and `layers`, the score of each layer by its number as a string
        (0 is the embedding output). Scores are in [0, 1].

    Raises:
        UserError: if the states of a layer are all equal.
        NonFiniteError: if hidden states are not finite.
    """
    with inference_context(trainer, module):
        moments_by_layer = _accumulate_moments(module, validation, sort_longest_first(validation), collate, batch_size)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        rows = select_rows_with_tokens(train, order, math.ceil(num_points / (len(moments_by_layer) - 1)))
        training_moments_by_layer = _accumulate_moments(module, train, rows, collate, batch_size)
    training_union_moments = merge_layers(training_moments_by_layer)
    scores = [
        isoscore_star(moments, to_covariance(shrinkage_moments), zeta).item()
        for moments, shrinkage_moments in zip(
            [merge_layers(moments_by_layer), *moments_by_layer],
            [training_union_moments, *training_moments_by_layer],
            strict=True,
        )
    ]
    return {
        "zeta": zeta,
        "num_points": int(training_union_moments.count),
        "union": scores[0],
        "layers": {str(layer): score for layer, score in enumerate(scores[1:])},
    }


def _accumulate_moments(
    module: FineTuner, rows: TokenizedRows, order: Sequence[int], collate: Collate, batch_size: int
) -> list[Moments]:
    """Return the moments of each layer's states over the tokens of the rows in `order`, embedding output first."""
    moments_by_layer: list[Moments] = []
    for batch in build_evaluation_loader(rows, collate, batch_size, order):
        batch = module.transfer_batch_to_device(batch, module.device, 0)
        states_by_layer, mask = module.hidden_states(batch), token_mask(batch)
        moments_by_layer = moments_by_layer or [Moments(states.shape[-1], states.device) for states in states_by_layer]
        for moments, states in zip(moments_by_layer, states_by_layer, strict=True):
            moments.update(states, mask)
    return moments_by_layer
