r"""IsoScore\* of a run's final model on the validation data, with Sigma_S of training data."""

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch

from istar.measures import Moments, isoscore_star
from istar.regularizers.shrinkage import NUM_POINTS, to_covariance
from istar.tasks.features import Rows
from istar.training.data import Collate, evaluation_loader, first_with_tokens, longest_first
from istar.training.layer_isotropy import union_of_layers
from istar.training.module import FineTuner, token_mask
from istar.training.validation_geometry import forward_passes


def isoscore_star_of_layers(
    trainer: L.Trainer,
    module: FineTuner,
    validation: Rows,
    train: Rows,
    collate: Collate,
    batch_size: int,
    zeta: float,
    seed: int,
    num_points: int = NUM_POINTS,
) -> dict[str, Any]:
    r"""Compute IsoScore\*, as in Figures 3 and 6 of *Stable Anisotropic Regularization*, of each layer and their union.

    The score is the IsoScore of :math:`(1 - \zeta) \operatorname{Cov}(X) + \zeta \Sigma_S` (Algorithm 1). For the union
    of layers 1 to L, X has the states of all tokens of all validation rows, and Sigma_S is the covariance of the union
    over training rows, as `istar.shrinkage_covariance` computes it. For a single layer, X and Sigma_S are those of this
    layer over the same rows; the paper does not say which Sigma_S its Figure 6 uses. Padding does not count.

    Two passes, over the validation rows and over the training rows that Sigma_S needs, run on this process alone, in
    eval mode and on the trainer's device in its precision; statistics are float32 or wider. The model and the global
    random state do not change.

    Args:
        trainer: names the device and the precision.
        module: the model.
        validation: rows with the points X.
        train: rows from which those of Sigma_S are chosen at random.
        collate: makes a batch of rows.
        batch_size: rows per forward pass.
        zeta: weight of Sigma_S in [0, 1].
        seed: seed of the choice of training rows.
        num_points: number of points of Sigma_S, counted over the union of layers 1 to L. All rows are used if they have
            fewer points, and the last row counts as a whole.

    Returns:
        A dictionary with `zeta`; `num_points`, the number of points of the union that Sigma_S is computed from;
        `union`, the score of layers 1 to L together; and `layers`, the score of each layer by its number as a string,
        where 0 is the embedding output. Scores are in [0, 1].

    Raises:
        UserError: if the states of a layer are all equal.
        NonFiniteError: if hidden states are not finite.
    """
    with forward_passes(trainer, module):
        states = _moments(module, validation, longest_first(validation), collate, batch_size)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        rows = first_with_tokens(train, order, math.ceil(num_points / (len(states) - 1)))
        training_states = _moments(module, train, rows, collate, batch_size)
    training_union = union_of_layers(training_states)
    scores = [
        isoscore_star(points, to_covariance(training_points), zeta).item()
        for points, training_points in zip(
            [union_of_layers(states), *states], [training_union, *training_states], strict=True
        )
    ]
    return {
        "zeta": zeta,
        "num_points": int(training_union.count),
        "union": scores[0],
        "layers": {str(number): score for number, score in enumerate(scores[1:])},
    }


def _moments(module: FineTuner, rows: Rows, order: Sequence[int], collate: Collate, batch_size: int) -> list[Moments]:
    """Return the moments of each layer's states over the tokens of the rows in `order`, embedding output first."""
    layers: list[Moments] = []
    for batch in evaluation_loader(rows, collate, batch_size, order):
        batch = module.transfer_batch_to_device(batch, module.device, 0)
        states, mask = module.hidden_states(batch), token_mask(batch)
        layers = layers or [Moments(state.shape[-1], state.device) for state in states]
        for layer, state in zip(layers, states, strict=True):
            layer.update(state, mask)
    return layers
