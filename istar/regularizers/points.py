"""Which points a penalty sees: the layers chosen, the padding left out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from istar.errors import UserError

Layers = str | Sequence[int]

NAMED_LAYERS = ("all", "last", "with_embeddings")


def select_layers(hidden_states: Sequence[Tensor], layers: Layers = "all") -> list[Tensor]:
    """The hidden states of the layers asked for, in the model's order and without copying.

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


def check_hidden_states(hidden_states: Sequence[Tensor], attention_mask: Tensor | None) -> None:
    """Refuse what is not one cloud of points: once flattened, an ill-shaped mask would pick wrong tokens."""
    if len(hidden_states) == 0:
        raise UserError("no hidden states were given; expected at least one layer")
    dim = hidden_states[0].shape[-1]
    for hidden_state in hidden_states:
        shape = tuple(hidden_state.shape)
        if not hidden_state.is_floating_point():
            raise UserError(f"hidden states are {hidden_state.dtype}; expected a floating dtype")
        if shape[-1] != dim:
            raise UserError(f"layers have {dim} and {shape[-1]} dimensions; expected the same in all")
        if hidden_state.shape != hidden_states[0].shape:
            raise UserError(f"layers have shapes {tuple(hidden_states[0].shape)} and {shape}; expected the same in all")
        if attention_mask is not None and tuple(attention_mask.shape) != shape[:-1]:
            raise UserError(
                f"the attention mask has shape {tuple(attention_mask.shape)}; expected {shape[:-1]} for "
                f"hidden states of shape {shape}"
            )


def token_index(attention_mask: Tensor | None) -> Tensor | None:
    """Row numbers of the real tokens in hidden states flattened to `(batch * tokens, d)`; None for all of them.

    Computed once a step and shared by all layers: gathering costs less than multiplying padding by zero.
    """
    if attention_mask is None:
        return None
    index = attention_mask.reshape(-1).nonzero().squeeze(-1)
    return None if index.numel() == attention_mask.numel() else index


def gather_points(hidden_state: Tensor, index: Tensor | None) -> Tensor:
    """`(n, d)` points of one layer in float32 or its own wider dtype."""
    points = hidden_state.reshape(-1, hidden_state.shape[-1])
    if index is not None:
        points = points.index_select(0, index)
    return points.to(torch.promote_types(points.dtype, torch.float32))
