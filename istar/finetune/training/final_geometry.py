"""Geometry of a run's final model on the validation data: mean activation, intrinsic dimension and IsoScore*."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor
from transformers import PretrainedConfig

from istar.errors import NonFiniteError, UserError
from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.training.data import Collate, build_evaluation_loader, select_rows_with_tokens, sort_longest_first
from istar.finetune.training.module import FineTuner, token_mask
from istar.hidden_states.model_modes import eval_mode
from istar.hidden_states.sharding import is_sharded_module
from istar.hidden_states.shrinkage import NUM_POINTS, to_covariance
from istar.measures import Moments, isoscore_star, two_nn
from istar.models.architectures import is_decoder

T = TypeVar("T")
Sums = TypeVar("Sums", bound=Any)
MAX_TWO_NN_EXAMPLES = 1_000
"""Maximum number of validation rows with states that are kept for TwoNN, which compares each with all others."""


@dataclass(frozen=True)
class EvaluationPasses:
    """Runs a trainer's model over tokenized rows in eval mode and without gradients.

    The passes run on the trainer's device and in its precision, on this process alone unless the model is sharded.
    """

    trainer: L.Trainer
    module: FineTuner
    collate: Collate
    batch_size: int

    def iterate(self, rows: TokenizedRows, order: Sequence[int]) -> Iterator[tuple[Tensor, dict[str, Tensor], Tensor]]:
        """Yield row indices, hidden states by layer (see `FineTuner`) and token mask of batches of rows in an order.

        Between two batches and at the end, all parts of the module have their previous mode and device.
        """
        module, previous_device = self.module, self.module.device
        is_sharded = is_sharded_module(module.model)  # then all processes read the same rows together
        batches = build_evaluation_loader(rows, self.collate, self.batch_size, order)
        if not is_sharded:
            module.to(self.trainer.strategy.root_device)  # Lightning moves the module to the CPU after training.
        try:
            for row_indices, batch in zip(torch.tensor(order).split(self.batch_size), batches, strict=True):
                batch = module.transfer_batch_to_device(batch, module.device, 0)
                with eval_mode(module), torch.no_grad(), self.trainer.precision_plugin.val_step_context():
                    states_by_layer = module.hidden_states(batch)
                yield row_indices, states_by_layer, token_mask(batch)
        finally:
            if not is_sharded:
                module.to(previous_device)

    def sum_layers(self, rows: TokenizedRows, order: Sequence[int], sums_class: type[Sums]) -> dict[str, Sums]:
        """Return the sums over the tokens of rows in an order, by layer."""
        sums: dict[str, Sums] = {}
        for _, states_by_layer, mask in self.iterate(rows, order):
            add_layers(sums, states_by_layer, mask, sums_class)
        return sums


def add_layers(sums: dict[str, Sums], states_by_layer: Mapping[str, Tensor], mask: Tensor, sums_class: Any) -> None:
    """Add the tokens of a batch to the sums of each layer, which are created if they are missing."""
    for layer, states in states_by_layer.items():
        if layer not in sums:
            sums[layer] = sums_class(states.shape[-1], states.device)
        sums[layer].update(states, mask)


def list_layers(by_layer: Mapping[str, T]) -> list[T]:
    """Return the values of layers 0 (the embeddings) to L, without the state after the final norm."""
    return [value for layer, value in by_layer.items() if layer.isdigit()]


def measure_validation_geometry(passes: EvaluationPasses, rows: TokenizedRows) -> dict[str, Any]:
    """Measure mean activation and intrinsic dimension of the hidden states of a validation set.

    Statistics are float32 or wider. The model and the global random state do not change.

    Returns:
        A dictionary with the numbers of `examples` and of `tokens` without padding; `mean_activation`, the mean of the
        last layer's states over the tokens, d numbers; and `two_nn`, the TwoNN intrinsic dimension of each layer,
        starting with the embedding output, on the first `MAX_TWO_NN_EXAMPLES` examples, or None if there are too few
        states or all are equal. Each distinct text is one point: the state of the first token ([CLS]) of an encoder, or
        of the last token of a decoder, which alone has seen the whole text. In the first layers of a decoder, the
        states of texts that end in the same token are nearly equal, and the dimension describes how such copies differ.

    Raises a `NonFiniteError` if hidden states are not finite.
    """
    config = passes.module.model.config
    moments = Moments(config.hidden_size, passes.trainer.strategy.root_device)
    order = sort_longest_first(rows)
    two_nn_order = [row_index for row_index in order if row_index < MAX_TWO_NN_EXAMPLES]
    two_nn_states_of_batches: list[tuple[Tensor, ...]] = []
    for row_indices, states_by_layer, mask in passes.iterate(rows, order):
        layers = list_layers(states_by_layer)
        moments.update(layers[-1], mask)
        # Indices of TwoNN's examples within the batch, and the token position of each.
        batch_indices = (row_indices < MAX_TWO_NN_EXAMPLES).nonzero().squeeze(1).to(mask.device)
        positions = find_summary_positions(config, mask)[batch_indices]
        two_nn_states_of_batches.append(tuple(states[batch_indices, positions].cpu() for states in layers))
    # TwoNN needs distinct points: the states of equal texts in different batches differ by rounding only.
    index_by_text = {rows[row_index]["input_ids"].tobytes(): index for index, row_index in enumerate(two_nn_order)}
    distinct_indices = list(index_by_text.values())
    return {
        "examples": len(order),
        "tokens": int(moments.count),
        "mean_activation": moments.mean.tolist(),
        "two_nn": [
            _estimate_dimension(torch.cat(states_of_layer)[distinct_indices])
            for states_of_layer in zip(*two_nn_states_of_batches, strict=True)
        ],
    }


def compute_isoscore_star_by_layer(
    passes: EvaluationPasses,
    validation: TokenizedRows,
    train: TokenizedRows,
    zeta: float,
    seed: int,
    num_points: int = NUM_POINTS,
) -> dict[str, Any]:
    r"""Compute IsoScore\* of each layer and their union, as in Figures 3 and 6 of *Stable Anisotropic Regularization*.

    The score is the IsoScore of :math:`(1 - \zeta) \operatorname{Cov}(X) + \zeta \Sigma_S` (Algorithm 1 of the paper).
    For the union of layers 1 to L, X contains the states of all tokens of the validation rows, and the shrinkage
    covariance Sigma_S is computed from the same layers on training rows. For a single layer, both come from this layer
    on the same rows; the paper does not say which Sigma_S its Figure 6 uses. Padding does not count.

    Args:
        zeta: weight of Sigma_S in [0, 1].
        seed: seed of the sample of training rows.
        num_points: minimum number of points for Sigma_S, counted over the union; all rows are used if they have fewer.

    Returns:
        A dictionary with `zeta`; `num_points`, the number of points in Sigma_S of the union; `union`, the score of
        layers 1 to L together; and `layers`, the score of each layer by its number as a string (0 is the embedding
        output). Scores are in [0, 1]; None for states that are all equal.

    Raises a `NonFiniteError` if hidden states are not finite.
    """

    def accumulate(rows: TokenizedRows, order: Sequence[int]) -> list[Moments]:
        """Return the moments of layers 1 to L together, and of each layer from the embedding output on."""
        layers = list_layers(passes.sum_layers(rows, order, Moments))
        return [unite_layers(layers), *layers]

    union_and_layers = accumulate(validation, sort_longest_first(validation))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    num_tokens = math.ceil(num_points / (len(union_and_layers) - 2))
    training_moments = accumulate(train, select_rows_with_tokens(train, order, num_tokens))

    def compute_score(moments: Moments, shrinkage_moments: Moments) -> float | None:
        return call_or_none(lambda: isoscore_star(moments, to_covariance(shrinkage_moments), zeta))

    union_score, *layer_scores = map(compute_score, union_and_layers, training_moments)
    return {
        "zeta": zeta,
        "num_points": int(training_moments[0].count),
        "union": union_score,
        "layers": {str(layer): score for layer, score in enumerate(layer_scores)},
    }


def unite_layers(layers: Sequence[Moments]) -> Moments:
    """Return the moments of the union of layers 1 to L; `layers` starts with the embedding output, which is left out.

    Raises a `UserError` if the layers have different widths.
    """
    union = Moments(layers[0].dim, layers[0].scatter.device)
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


def _estimate_dimension(states: Tensor) -> float | None:
    mean = states.double().mean(0)
    spread = (states.double() - mean).norm(dim=1).max()
    # States that differ by at most four rounding errors count as equal, as do the embedding outputs of [CLS].
    if spread <= 4 * torch.finfo(states.dtype).eps * mean.norm():
        return None
    return call_or_none(lambda: two_nn(states))


def call_or_none(measure: Callable[[], float | Tensor]) -> float | None:
    """Return the value of a measure, or None if it is undefined and raises a `UserError`."""
    try:
        return float(measure())
    except NonFiniteError:
        raise
    except UserError:
        return None
