"""What a run's last weights make of the validation texts: mean activation, and intrinsic dimension of each layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures import Moments, two_nn
from istar.training.data import Collate, evaluation_loader, longest_first
from istar.training.module import FineTuner

EXAMPLES = 1_000
"""Features looked at, at most."""


def geometry(
    trainer: L.Trainer, module: FineTuner, features: Dataset, collate: Collate, batch_size: int
) -> dict[str, Any]:
    """Figures of one forward pass, on this process alone, over the first features of a validation set.

    In eval mode and in the trainer's precision, with statistics in float32 or better. Changes neither the model nor
    the global random numbers.

    Args:
        trainer: whose device and precision to use.
        module: the model, with the weights that count.
        features: tokenized validation data; the first `EXAMPLES` are used.
        collate: rows to a padded batch.
        batch_size: examples per forward pass.

    Returns:
        `examples` and `tokens` (without padding) that were looked at; `mean_activation`, d numbers: the last layer's
        mean over these tokens; `two_nn`: the intrinsic dimension of each layer's first-token ([CLS]) states, one for
        each distinct text, 0 being the embedding output; None where they are too few or all alike.

    Raises:
        NonFiniteError: if hidden states are not finite.
    """
    features = features.select(range(min(EXAMPLES, len(features))))
    last = Moments(module.model.config.hidden_size, trainer.strategy.root_device)
    firsts: list[tuple[Tensor, ...]] = []
    order = longest_first(features)
    with _ready(trainer, module):
        for batch in evaluation_loader(features, collate, batch_size, order):
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            mask = batch["attention_mask"]
            states = module.hidden_states(batch)
            last.update(states[-1], mask)
            # Some tokenizers pad on the left.
            rows, places = torch.arange(len(mask), device=mask.device), mask.argmax(1)
            firsts.append(tuple(state[rows, places].cpu() for state in states))
    distinct = _distinct(features, order)
    return {
        "examples": len(features),
        "tokens": int(last.count),
        "mean_activation": last.mean.tolist(),
        "two_nn": [_dimension(torch.cat(layer)[distinct]) for layer in zip(*firsts, strict=True)],
    }


@contextmanager
def _ready(trainer: L.Trainer, module: FineTuner) -> Iterator[None]:
    """In eval mode, without gradients, on the trainer's device: after the training Lightning leaves it on the CPU."""
    device, training = module.device, module.training
    module.to(trainer.strategy.root_device).eval()
    try:
        with torch.inference_mode(), trainer.precision_plugin.val_step_context():
            yield
    finally:
        module.to(device).train(training)


def _distinct(features: Dataset, order: Sequence[int]) -> list[int]:
    """Places in the order of one example of each text.

    The states of equal texts differ by rounding where they stand in different batches, and would be near neighbours.
    """
    texts = features["input_ids"][:]
    return list({tuple(texts[number]): place for place, number in enumerate(order)}.values())


def _dimension(states: Tensor) -> float | None:
    """TwoNN, unless the states are equal but for rounding, as those of the embedding of [CLS] are."""
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
