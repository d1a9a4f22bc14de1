"""Geometry of a run's final model on the validation data: mean activation and intrinsic dimension of each layer."""

from typing import Any

import lightning as L
import torch
from datasets import Dataset
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures import Moments, two_nn
from istar.regularizers.shrinkage import eval_mode
from istar.training.data import Collate, evaluation_loader, longest_first
from istar.training.module import FineTuner

MAX_EXAMPLES = 1_000
"""Maximum number of validation features that are used."""


def geometry(
    trainer: L.Trainer, module: FineTuner, features: Dataset, collate: Collate, batch_size: int
) -> dict[str, Any]:
    """Measure the hidden states of the first `MAX_EXAMPLES` features of a validation set.

    The forward pass runs on this process alone, in eval mode and on the trainer's device in its precision; statistics
    are float32 or wider. The model and the global random state do not change.

    Returns:
        A dictionary with `examples` and `tokens`, the number of examples and of tokens without padding;
        `mean_activation`, the mean of the last layer over the tokens, d numbers; and `two_nn`, the intrinsic dimension
        of the first-token ([CLS]) states of the distinct texts, one value per layer starting with the embedding output.
        A value is None if the states are too few or all equal.

    Raises:
        NonFiniteError: if hidden states are not finite.
    """
    features = features.select(range(min(MAX_EXAMPLES, len(features))))
    moments = Moments(module.model.config.hidden_size, trainer.strategy.root_device)
    first_tokens: list[tuple[Tensor, ...]] = []
    order = longest_first(features)
    device = module.device
    module.to(trainer.strategy.root_device)  # Lightning moves the module to the CPU after training.
    with eval_mode(module), torch.inference_mode(), trainer.precision_plugin.val_step_context():
        for batch in evaluation_loader(features, collate, batch_size, order):
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            mask = batch["attention_mask"]
            states = module.hidden_states(batch)
            moments.update(states[-1], mask)
            # With padding on the left, the first token is not at position 0.
            rows, positions = torch.arange(len(mask), device=mask.device), mask.argmax(1)
            first_tokens.append(tuple(state[rows, positions].cpu() for state in states))
    module.to(device)
    # TwoNN needs distinct points: the states of equal texts in different batches differ by rounding only.
    texts = features["input_ids"][:]
    distinct = list({tuple(texts[number]): position for position, number in enumerate(order)}.values())
    return {
        "examples": len(features),
        "tokens": int(moments.count),
        "mean_activation": moments.mean.tolist(),
        "two_nn": [_dimension(torch.cat(layer)[distinct]) for layer in zip(*first_tokens, strict=True)],
    }


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
