"""Geometry of a run's final model on the validation data: mean activation and intrinsic dimension of each layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.training.data import Collate, build_evaluation_loader, sort_longest_first
from istar.finetune.training.module import FineTuner, token_mask
from istar.hidden_states.undisturbed import eval_mode
from istar.inputs.architectures import is_decoder
from istar.measures import Moments, two_nn

MAX_TWO_NN_EXAMPLES = 1_000
"""Maximum number of validation rows whose states are kept for TwoNN, which compares each with all others."""


def measure_validation_geometry(
    trainer: L.Trainer, module: FineTuner, rows: TokenizedRows, collate: Collate, batch_size: int
) -> dict[str, Any]:
    """Measure mean activation and intrinsic dimension of the hidden states of a validation set.

    The forward passes run on this process alone, in eval mode, on the trainer's device and in its precision. Statistics
    are float32 or wider. The model and the global random state do not change.

    Returns:
        A dictionary with the numbers of `examples` and of `tokens` without padding; `mean_activation`, the mean of the
        last layer's states over the tokens, d numbers; and `two_nn`, the TwoNN intrinsic dimension of each layer,
        starting with the embedding output, on the first `MAX_TWO_NN_EXAMPLES` examples, or None if there are too few
        states or all are equal. Each distinct text is one point: the state of the first token ([CLS]) of an encoder, or
        of the last token of a decoder, which alone has seen the whole text. In the first layers of a decoder, the
        states of texts that end in the same token are nearly equal, and the dimension describes how such copies differ.

    Raises:
        NonFiniteError: if hidden states are not finite.
    """
    moments = Moments(module.model.config.hidden_size, trainer.strategy.root_device)
    order = sort_longest_first(rows)
    two_nn_order = [row_index for row_index in order if row_index < MAX_TWO_NN_EXAMPLES]
    two_nn_states_of_batches: list[tuple[Tensor, ...]] = []
    find_positions = last_token_positions if is_decoder(module.model.config) else first_token_positions
    batches = build_evaluation_loader(rows, collate, batch_size, order)
    with inference_context(trainer, module):
        for row_indices, batch in zip(torch.tensor(order).split(batch_size), batches, strict=True):
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            mask = token_mask(batch)
            states_by_layer = module.hidden_states(batch)
            moments.update(states_by_layer[-1], mask)
            # Indices of the examples of TwoNN within the batch, and the position of the token of each.
            batch_indices = (row_indices < MAX_TWO_NN_EXAMPLES).nonzero().squeeze(1).to(mask.device)
            positions = find_positions(mask)[batch_indices]
            two_nn_states_of_batches.append(tuple(states[batch_indices, positions].cpu() for states in states_by_layer))
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


@contextmanager
def inference_context(trainer: L.Trainer, module: FineTuner) -> Iterator[None]:
    """Within the `with` block, run a module in eval mode, without gradients, on the trainer's device, in its precision.

    Afterwards, the module is moved back to its previous device, and all its parts have their previous mode.
    """
    previous_device = module.device
    module.to(trainer.strategy.root_device)  # Lightning moves the module to the CPU after training.
    try:
        with eval_mode(module), torch.inference_mode(), trainer.precision_plugin.val_step_context():
            yield
    finally:
        module.to(previous_device)


def first_token_positions(mask: Tensor) -> Tensor:
    """Return the position of each text's first token, `(batch,)`, from its mask `(batch, tokens)`, 0 for padding."""
    return mask.long().argmax(1)


def last_token_positions(mask: Tensor) -> Tensor:
    """Return the position of each text's last token, `(batch,)`, from its mask `(batch, tokens)`, 0 for padding."""
    return mask.shape[1] - 1 - mask.long().flip(1).argmax(1)


def _estimate_dimension(states: Tensor) -> float | None:
    """Return the TwoNN dimension of states `(n, d)`, or None if they are too few, or equal up to rounding.

    The embedding outputs of [CLS], for example, are equal for all texts.
    """
    mean = states.double().mean(0)
    spread = (states.double() - mean).norm(dim=1).max()
    # States that differ by at most four rounding errors count as equal.
    if spread <= 4 * torch.finfo(states.dtype).eps * mean.norm():
        return None
    try:
        return two_nn(states)
    except NonFiniteError:
        raise
    except UserError:
        return None
