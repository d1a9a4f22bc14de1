"""Geometry of a run's final model on the validation data: mean activation and intrinsic dimension of each layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures import Moments, two_nn
from istar.models import is_decoder
from istar.regularizers.shrinkage import eval_mode
from istar.tasks.features import Rows
from istar.training.data import Collate, evaluation_loader, longest_first
from istar.training.module import FineTuner, token_mask

MAX_EXAMPLES = 1_000
"""Maximum number of validation rows that are used."""


def geometry(trainer: L.Trainer, module: FineTuner, rows: Rows, collate: Collate, batch_size: int) -> dict[str, Any]:
    """Measure the hidden states of the first `MAX_EXAMPLES` rows of a validation set.

    The forward pass runs on this process alone, in eval mode and on the trainer's device in its precision; statistics
    are float32 or wider. The model and the global random state do not change.

    Returns:
        A dictionary with `examples` and `tokens`, the number of examples and of tokens without padding;
        `mean_activation`, the mean of the last layer over the tokens, d numbers; and `two_nn`, the intrinsic dimension
        of one state of each distinct text, one value per layer starting with the embedding output: the state of the
        first token ([CLS]) of an encoder, and of the last token of a decoder, which alone has seen the whole text. A
        value is None if the states are too few or all equal.

        The points are texts, so that the rule of `istar.geometry.sample.Sample`, one occurrence of each token type,
        does not apply: the first tokens of an encoder are all of one type. In the first layers of a decoder, however,
        the states of texts that end in the same token are nearly equal, and the estimate of these layers describes how
        such copies differ.

    Raises:
        NonFiniteError: if hidden states are not finite.
    """
    moments = Moments(module.model.config.hidden_size, trainer.strategy.root_device)
    text_states: list[tuple[Tensor, ...]] = []
    order = [row for row in longest_first(rows) if row < MAX_EXAMPLES]
    with forward_passes(trainer, module):
        for batch in evaluation_loader(rows, collate, batch_size, order):
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            mask = token_mask(batch)
            states = module.hidden_states(batch)
            moments.update(states[-1], mask)
            examples = torch.arange(len(mask), device=mask.device)
            positions = last_tokens(mask) if is_decoder(module.model.config) else first_tokens(mask)
            text_states.append(tuple(state[examples, positions].cpu() for state in states))
    # TwoNN needs distinct points: the states of equal texts in different batches differ by rounding only.
    texts = {rows[number]["input_ids"].tobytes(): position for position, number in enumerate(order)}
    distinct = list(texts.values())
    return {
        "examples": len(order),
        "tokens": int(moments.count),
        "mean_activation": moments.mean.tolist(),
        "two_nn": [_dimension(torch.cat(layer)[distinct]) for layer in zip(*text_states, strict=True)],
    }


@contextmanager
def forward_passes(trainer: L.Trainer, module: FineTuner) -> Iterator[None]:
    """Run forward passes in eval mode without gradients, on the trainer's device and in its precision.

    At the end, the module is moved back to its device, and all its parts have the mode that they had.
    """
    device = module.device
    module.to(trainer.strategy.root_device)  # Lightning moves the module to the CPU after training.
    try:
        with eval_mode(module), torch.inference_mode(), trainer.precision_plugin.val_step_context():
            yield
    finally:
        module.to(device)


def first_tokens(mask: Tensor) -> Tensor:
    """Return the position of the first token of each text that is not padding, `(batch,)`."""
    return mask.long().argmax(1)


def last_tokens(mask: Tensor) -> Tensor:
    """Return the position of the last token of each text that is not padding, `(batch,)`."""
    return mask.shape[1] - 1 - mask.long().flip(1).argmax(1)


def _dimension(states: Tensor) -> float | None:
    """Return the TwoNN dimension of states of shape `(n, d)`; None if they are too few, or equal up to rounding.

    The embedding outputs of [CLS], for example, are equal for all texts.
    """
    mean = states.double().mean(0)
    spread = (states.double() - mean).norm(dim=1).max()
    if spread <= 4 * torch.finfo(states.dtype).eps * mean.norm():
        return None
    try:
        return two_nn(states)
    except NonFiniteError:
        raise
    except UserError:
        return None
