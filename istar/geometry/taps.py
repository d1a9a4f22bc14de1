"""Named places in a transformer where hidden states are read, the same for all architectures."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from istar.errors import UserError

EMBEDDINGS, FINAL_NORM = "embeddings", "final_norm"


class Taps:
    """Reads a model's hidden states by name: `embeddings`, `layer_1` to `layer_L`, and `final_norm` where there is one.

    transformers gives L + 1 states, the last of which is behind the final normalization in some architectures (GPT-2,
    GPT-NeoX, OPT, Llama) and there is none in others (BERT and its kind normalize within each layer). Which it is
    shows one run on a single token: the module outside the layers whose output is the last state is the final
    normalization, and its input is the last layer's own output.

    Args:
        model: without a head, in eval mode.

    Attributes:
        names: of the taps, from the input on.
        norm: the final normalization, or None.

    Raises:
        UserError: if the model does not give its hidden states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # OPT-350m has a projection to the embedding's width in its place, whose output is no hidden state.
        self._last = _behind_the_layers(model)
        self.norm = self._last if "norm" in type(self._last).__name__.lower() else None
        layers = [f"layer_{number}" for number in range(1, _layers(model) + 1)]
        self.names = [EMBEDDINGS, *layers, *([FINAL_NORM] if self.norm is not None else [])]

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The states `(batch, tokens, d)` of each tap.

        Args:
            inputs: of the model, on its device.
        """
        with _recording(self._last) as before:
            *states, last = self._model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        states += before[-1:] or [last]
        states += [last] if self.norm is not None else []
        return dict(zip(self.names, states, strict=True))


def _layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


@torch.no_grad()
def _behind_the_layers(model: PreTrainedModel) -> nn.Module | None:
    """The module, outside of the lists of layers, whose output is the last hidden state; None for the last layer."""
    inside = {part for module in model.modules() if isinstance(module, nn.ModuleList) for part in module.modules()}
    outputs: dict[nn.Module, Any] = {}
    outside = [module for module in model.modules() if module not in inside and not list(module.children())]
    handles = [
        module.register_forward_hook(lambda module, _, output: outputs.__setitem__(module, output))
        for module in outside
    ]
    try:
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        mask = torch.ones_like(token)
        states = model(input_ids=token, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
    finally:
        for handle in handles:
            handle.remove()
    if states is None or len(states) != _layers(model) + 1:
        raise UserError(f"{type(model).__name__} does not give one hidden state for each of its layers")
    found = [module for module, output in outputs.items() if _is(output, states[-1])]
    # Dropout hands on what it gets.
    return next((module for module in found if not isinstance(module, nn.Dropout)), None)


def _is(output: Any, state: Tensor) -> bool:
    return isinstance(output, Tensor) and output.shape == state.shape and torch.equal(output, state)


@contextmanager
def _recording(module: nn.Module | None) -> Iterator[list[Tensor]]:
    """What goes into a module while the block runs."""
    seen: list[Tensor] = []
    if module is None:
        yield seen
        return
    handle = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()
