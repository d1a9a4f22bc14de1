"""Where a model's hidden states come about, so that a penalty can take them in as they do.

A model that is asked for its hidden states keeps all of them until its forward pass is over. Hooks on the modules that
make them keep nothing, and what the hooks return is what the next layer computes with.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from istar.regularizers import Penalty, Regularizer, layer_numbers, select_layers
from istar.regularizers.points import Layers


@dataclass(frozen=True)
class Taps:
    """The modules whose outputs are the hidden states, and which call of them gives which state.

    Attributes:
        modules: each once.
        numbers: for each call of one of them in a forward pass, in their order, the number of the state: 0 is the
            embedding output, which some models make outside of modules, 1 to L are the layers.
        num_layers: L.
    """

    modules: tuple[nn.Module, ...]
    numbers: tuple[int, ...]
    num_layers: int

    @contextmanager
    def handing(self, receive: Callable[[Tensor], Tensor], layers: Collection[int]) -> Iterator[None]:
        """In one forward pass within the block, give the states of layers to `receive` and go on with what it returns.

        Args:
            receive: from a state to one that takes its place.
            layers: numbers of states.
        """
        numbers = iter(self.numbers)

        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            if next(numbers) not in layers:
                return None
            received = receive(_state(output))
            return (received, *output[1:]) if isinstance(output, tuple) else received

        handles = [module.register_forward_hook(hook) for module in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def forward_with_penalty(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    regularizer: Regularizer,
    index: Tensor | None,
    taps: Taps | None,
) -> tuple[Any, Penalty]:
    """The model's outputs and the penalty on its hidden states; nothing makes the host wait for a device.

    Args:
        model: to train.
        inputs: of the model, labels included.
        regularizer: its layers and padding rule say which points count.
        index: of the real tokens, see `istar.regularizers.points.token_index`.
        taps: of the model; None asks it for its hidden states instead.

    Returns:
        The outputs, and the penalty; NaN where the points have none.
    """
    started = regularizer.begin(None if regularizer.include_padding else index)
    outputs = forward_with_states(model, inputs, started.add, regularizer.layers, taps)
    return outputs, started.penalty()


def forward_with_states(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    receive: Callable[[Tensor], Tensor],
    layers: Layers,
    taps: Taps | None,
) -> Any:
    """The model's outputs; on the way `receive` is given the hidden states of the layers, in their order.

    Args: as in `forward_with_penalty`; with taps the model goes on with what `receive` returns.
    """
    if taps is not None and set(chosen := layer_numbers(taps.num_layers, layers)) <= set(taps.numbers):
        with taps.handing(receive, chosen):
            return model(**inputs)
    outputs = model(**inputs, output_hidden_states=True)
    for state in select_layers(outputs.hidden_states, layers):
        receive(state)
    return outputs


@torch.no_grad()
def find_taps(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Taps | None:
    """Watch one forward pass, in eval mode: which module's output is which hidden state, at the same place in memory.

    Args:
        model: that gives L + 1 hidden states.
        inputs: of the model, as small as they can be.

    Returns:
        None where hooks would not see the states or could not change them: some layer's is no module's output, or
        modules are called again in backward (gradient checkpointing) or not called as they are (compiled).
    """
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if checkpointing or model._compiled_call_impl is not None:
        return None
    calls: list[tuple[nn.Module, Tensor]] = []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        state = _state(output)
        if isinstance(state, Tensor):
            calls.append((module, state))

    handles = [module.register_forward_hook(record) for module in model.modules()]
    training = [module for module in model.modules() if module.training]
    try:
        states = model.eval()(**inputs, output_hidden_states=True).hidden_states
    finally:
        for module in training:
            module.training = True
        for handle in handles:
            handle.remove()
    number_of = {_place(state): number for number, state in enumerate(states)}
    # The outermost module that returns a state: dropout, which does nothing in eval mode, may be the last within it.
    outermost = {number_of[_place(state)]: module for module, state in calls if _place(state) in number_of}
    modules = tuple(dict.fromkeys(outermost.values()))
    seen = [number_of.get(_place(state)) for module, state in calls if module in modules]
    numbers = tuple(number for number in seen if number is not None)
    whole = len(numbers) == len(seen) and set(numbers) >= set(range(1, len(states))) and len(set(numbers)) == len(seen)
    return Taps(modules, numbers, len(states) - 1) if whole else None


def _place(state: Tensor) -> tuple[int, torch.Size]:
    """What tells tensors that are alive together apart; some models hand out another view of what a module returned."""
    return state.data_ptr(), state.shape


def _state(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output
