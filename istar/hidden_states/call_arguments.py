"""The arguments of nested calls, such as those of a head and its base model, that decide which tokens are points."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from istar.regularizers.points import mask_fits

Arguments = Mapping[str, Any]
"""The arguments of a call by name."""


def read_argument_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments that a module's `forward` takes by position."""
    positional_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters
    return [name for name, parameter in parameters.items() if parameter.kind in positional_kinds]


def name_arguments(names: Sequence[str], args: tuple[Any, ...], kwargs: Arguments) -> dict[str, Any]:
    """Return all arguments of a call by name; `names` is the result of `read_argument_names`."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def find_argument(calls: Sequence[Arguments], name: str) -> Any:
    """Return an argument of shape `(batch, tokens)`, such as the mask, from the innermost call that has it.

    `calls` are the arguments of the base model's call, and of the calls around it from the innermost on. A call without
    the argument, or with another shape than the base model's input, is skipped if a call around it is better: some
    heads do not pass the mask on. A call for other token ids is skipped, too, as in a module that calls the model
    first for queries and then for documents. If the argument has the right shape in no call, it is the innermost.
    """
    own_ids = calls[0].get("input_ids")
    inputs = calls[0].get("inputs_embeds") if own_ids is None else own_ids
    # transformers 5.24 calls the argument `cache`.
    has_cache = any(call.get(cache) is not None for call in calls for cache in ("cache", "past_key_values"))
    innermost = None
    for call in calls:
        value = call.get(name)
        if value is None or not _have_equal_ids(call.get("input_ids"), own_ids):
            continue
        if isinstance(value, Tensor) and isinstance(inputs, Tensor):
            # Cached positions, as with prefix tuning, are in the mask but have no hidden states.
            value = value[..., -inputs.shape[1] :] if has_cache else value
            # Heads for multiple choice flatten `(batch, choices, tokens)`.
            flat_value = value.flatten(0, 1) if value.dim() == 3 and call is not calls[0] else value
            if mask_fits(flat_value, (*inputs.shape[:2], 0)):
                return flat_value
        innermost = value if innermost is None else innermost
    return innermost


def _have_equal_ids(ids: Any, other_ids: Any) -> bool:
    """Return whether two calls have the same token ids, perhaps in other shapes, or one of them has none."""
    if ids is other_ids or not (isinstance(ids, Tensor) and isinstance(other_ids, Tensor)):
        return True
    ids, other_ids = ids.flatten().to(other_ids.device), other_ids.flatten()
    return len(ids) == len(other_ids) and bool((ids == other_ids).all())
