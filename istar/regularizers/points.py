"""Selection of the layers and of the tokens whose hidden states a penalty uses."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from istar.errors import UserError
from istar.measures.moments import mask_to_indices

Layers = str | Sequence[int]

NAMED_LAYERS = ("all", "last", "with_embeddings")


def select_layers(hidden_states: Sequence[Tensor], layers: Layers = "all") -> list[Tensor]:
    """Return the hidden states of the selected layers, in the model's order and without copying.

    Args:
        hidden_states: L + 1 tensors `(batch, tokens, d)`: the embedding output and the output of each of L layers.
        layers: `all` (the outputs of all layers), `last`, `with_embeddings` (all and the embedding output), or a list
            of layer numbers, where 0 is the embedding output, 1 to L are the layers, and negative numbers count from
            the last layer.

    Raises:
        UserError: for an unknown name, or a number of a layer that does not exist.
    """
    if len(hidden_states) < 2:
        raise UserError(
            f"{len(hidden_states)} hidden states were given; expected the embedding output and one per layer"
        )
    return [hidden_states[number] for number in layer_numbers(len(hidden_states) - 1, layers)]


def layer_numbers(num_layers: int, layers: Layers) -> list[int]:
    """Convert `layers`, see `select_layers`, to ascending layer numbers from 0 to L in a model of L layers."""
    if isinstance(layers, str):
        named = {
            "all": list(range(1, num_layers + 1)),
            "last": [num_layers],
            "with_embeddings": list(range(num_layers + 1)),
        }
        if layers not in named:
            raise UserError(f"layers={layers!r}; expected one of {', '.join(NAMED_LAYERS)} or a list of layer numbers")
        return named[layers]
    selected = set()
    for number in layers:
        if not -num_layers - 1 <= number <= num_layers:
            raise UserError(
                f"layer {number} does not exist; expected 0 (embeddings) to {num_layers}, the last layer, or -1 and "
                "less to count from the last"
            )
        selected.add(number % (num_layers + 1))
    if not selected:
        raise UserError("layers is an empty list; name at least one layer, or use reg=none")
    return sorted(selected)


class Tokens:
    """The tokens of a pass that count as points: those with 1 in the mask `(batch, tokens)`, or all if None."""

    def __init__(self, attention_mask: Any = None) -> None:
        self.attention_mask = attention_mask

    @cached_property
    def indices(self) -> Tensor | None:
        """Row indices of the tokens in a hidden state flattened to `(n, d)`; None if all count. Computed once."""
        return mask_to_indices(self.attention_mask)

    def check(self, hidden_state: Tensor) -> None:
        """Raise `UserError` unless a hidden state is floating and `(batch, tokens, d)` for a mask `(batch, tokens)`."""
        if not hidden_state.is_floating_point():
            raise UserError(f"hidden states are {hidden_state.dtype}; expected a floating dtype")
        shape = tuple(hidden_state.shape)
        mask = self.attention_mask
        if mask is not None and not isinstance(mask, Tensor):
            raise UserError(
                f"the attention mask is a {type(mask).__name__}; expected a tensor of shape {shape[:-1]}, 1 for each "
                "token that counts"
            )
        if mask is not None and tuple(mask.shape) != shape[:-1]:
            raise UserError(
                f"the attention mask has shape {tuple(mask.shape)} and the hidden states have shape {shape}; "
                f"expected a mask of shape {shape[:-1]}, 1 for each token that counts"
            )


ALL_TOKENS = Tokens()
