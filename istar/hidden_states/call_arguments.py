"""The arguments of nested calls, as of a head and its base model, that decide which tokens are points."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from istar.regularizers.points import mask_fits

Arguments = Mapping[str, Any]  # of a call, by name


def read_argument_names(module: nn.Module) -> list[str]:
    """Return the names of a module's positional arguments; wrappers of torch and PEFT take their module's arguments."""
    names = _read_own_argument_names(module)
    wrapped = find_wrapped(module, ("torch.", "peft."))
    return names if wrapped is None else read_argument_names(wrapped)


def find_wrapped(module: nn.Module, libraries: tuple[str, ...]) -> nn.Module | None:
    """Return the only module inside a wrapper of one of the libraries, such as DDP; None if it is not a wrapper."""
    children = list(module.children())
    is_wrapper = type(module).__module__.startswith(libraries) and len(children) == 1
    return children[0] if is_wrapper and not _read_own_argument_names(module) else None


def _read_own_argument_names(module: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]


def request_states(names: Sequence[str], args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """Return arguments of a call with which a transformers model also returns its hidden states.

    `names` are the names of the model's positional arguments; see `read_argument_names`.
    """
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return args[len(names) :], {**named, "output_hidden_states": True, "return_dict": True}


def find_argument(calls: Sequence[Arguments], name: str) -> Any:
    """Return an argument `(batch, tokens)`, such as the mask, from the first of the calls where it fits the input.

    The first call is the base model's, and the others are those around it. A call for other token ids does not count,
    as in a module that calls the model for queries and for documents. If the argument fits in no call, the first is
    returned, or None.
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
            # A pass does not compute states of cached positions. Heads for multiple choice flatten their inputs.
            value = value[..., -inputs.shape[1] :] if has_cache else value
            flat_value = value.flatten(0, 1) if value.dim() == 3 else value
            if mask_fits(flat_value, (*inputs.shape[:2], 0)):
                return flat_value
        innermost = value if innermost is None else innermost
    return innermost


def _have_equal_ids(ids: Any, other_ids: Any) -> bool:
    if ids is other_ids or not (isinstance(ids, Tensor) and isinstance(other_ids, Tensor)):
        return True
    return ids.numel() == other_ids.numel() and bool((ids.flatten().to(other_ids.device) == other_ids.flatten()).all())


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch, which may be nested mappings, tuples and lists, with a function of each of its tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [map_tensors(value, function) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
