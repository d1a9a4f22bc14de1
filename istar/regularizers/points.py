"""Which hidden states a penalty sees: the layers chosen, and a mask that fits them."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from istar.errors import UserError
from istar.measures.moments import counted_rows

Layers = str | Sequence[int]

NAMED_LAYERS = ("all", "last", "with_embeddings")


def select_layers(hidden_states: Sequence[Tensor], layers: Layers = "all") -> list[Tensor]:
    """The hidden states of the chosen layers, in the model's order and without copying.

    Args:
        hidden_states: embedding output, then one `(batch, tokens, d)` per transformer layer: L + 1 tensors.
        layers: `all` (the outputs of all transformer layers), `last`, `with_embeddings`, or numbers: 0 is the
            embedding output, 1 to L the layers, negative ones count from the last.

    Raises:
        UserError: for names and numbers that the model does not have.
    """
    if len(hidden_states) < 2:
        raise UserError(
            f"{len(hidden_states)} hidden states were given; expected the embedding output and one per layer"
        )
    return [hidden_states[number] for number in layer_numbers(len(hidden_states) - 1, layers)]


def layer_numbers(num_layers: int, layers: Layers) -> list[int]:
    """The numbers, 0 to L, that `layers` names in a model of L layers; see `select_layers`."""
    if isinstance(layers, str):
        named = {
            "all": list(range(1, num_layers + 1)),
            "last": [num_layers],
            "with_embeddings": list(range(num_layers + 1)),
        }
        if layers not in named:
            raise UserError(f"layers={layers!r}; expected one of {', '.join(NAMED_LAYERS)} or a list of layer numbers")
        return named[layers]
    chosen = set()
    for number in layers:
        if not -num_layers - 1 <= number <= num_layers:
            raise UserError(
                f"layer {number} does not exist; expected 0 (embeddings) to {num_layers}, the last layer, or -1 and "
                "less to count from the last"
            )
        chosen.add(number % (num_layers + 1))
    if not chosen:
        raise UserError("layers is an empty list; name at least one layer, or use reg=none")
    return sorted(chosen)


class Tokens:
    """The tokens of a forward pass that count as points.

    Args:
        attention_mask: `(batch, tokens)`, 1 for tokens and 0 for padding; None counts all tokens.
    """

    def __init__(self, attention_mask: Any = None) -> None:
        self.attention_mask = attention_mask

    @cached_property
    def rows(self) -> Tensor | None:
        """Row numbers of these tokens in a hidden state flattened to `(n, d)`; None if all count. Computed once."""
        return counted_rows(self.attention_mask)

    def check(self, hidden_state: Tensor) -> None:
        """Refuse a hidden state whose tokens are not those of the mask.

        Raises:
            UserError: for a dtype that is not floating, or a mask that is not a tensor `(batch, tokens)` for
                `(batch, tokens, d)`.
        """
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
