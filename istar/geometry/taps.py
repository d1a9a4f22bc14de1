"""Read a transformer's hidden states under names that are the same for all architectures."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from istar.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDINGS, FINAL_NORM = "embeddings", "final_norm"


class Taps:
    """Reads a model's hidden states by name: `embeddings`, `layer_1` to `layer_L`, and `final_norm` if there is one.

    transformers returns L + 1 hidden states. In some architectures (GPT-2, GPT-NeoX, OPT, Llama) the last one is the
    output of a final normalization; in others (BERT), whose layers normalize their own output, it is the output of the
    last layer. A forward pass of a single token tells which: the module outside the layers whose output equals the last
    hidden state is the final normalization, and the input of that module is the output of the last layer.

    The model has no head and is in eval mode.

    Attributes:
        names: names of the taps, from the input to the output.
        norm: the final normalization, or None.

    Raises:
        UserError: if the model does not return one hidden state per layer.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = model
        # The last module of OPT-350m is a projection to the width of the embeddings, whose output is no tap.
        self._last_module = _find_last_module(model)
        self.norm = self._last_module if "norm" in type(self._last_module).__name__.lower() else None
        layers = [f"layer_{number}" for number in range(1, model.config.get_text_config().num_hidden_layers + 1)]
        self.names = [EMBEDDINGS, *layers, *([FINAL_NORM] if self.norm is not None else [])]

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the model on its inputs, and return the hidden states `(batch, tokens, d)` by tap."""
        last_inputs: list[Tensor] = []
        with ExitStack() as hooks:
            if self._last_module is not None:
                hook = self._last_module.register_forward_pre_hook(
                    lambda _, arguments: last_inputs.append(arguments[0])
                )
                hooks.enter_context(hook)
            *states, last_states = self._model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        # Without a module behind the layers, the last hidden states are the output of the last layer.
        states += last_inputs[-1:] or [last_states]
        states += [last_states] if self.norm is not None else []
        return dict(zip(self.names, states, strict=True))


@torch.no_grad()
def _find_last_module(model: "PreTrainedModel") -> nn.Module | None:
    """Return the module outside the layers whose output is the last hidden state, or None if that is a layer's output.

    Raises:
        UserError: if the model does not return one hidden state per layer.
    """
    in_layers = {part for module in model.modules() if isinstance(module, nn.ModuleList) for part in module.modules()}
    outputs: dict[nn.Module, Any] = {}
    with ExitStack() as hooks:
        for module in model.modules():
            if module not in in_layers and not list(module.children()):
                hook = module.register_forward_hook(lambda module, _, output: outputs.__setitem__(module, output))
                hooks.enter_context(hook)
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        mask = torch.ones_like(token)
        states = model(input_ids=token, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
    if states is None or len(states) != model.config.get_text_config().num_hidden_layers + 1:
        raise UserError(f"{type(model).__name__} does not return one hidden state per layer; choose another model")
    for module, output in outputs.items():
        is_last = isinstance(output, Tensor) and torch.equal(output, states[-1])
        # Dropout in eval mode returns its input, so that its output equals the state too.
        if is_last and not isinstance(module, nn.Dropout):
            return module
    return None
