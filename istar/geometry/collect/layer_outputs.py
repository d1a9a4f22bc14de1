"""Read a transformer's hidden states under names that are the same for all architectures."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from istar.hidden_states.model_layers import find_final_norm, find_layers, make_trial_ids, run_trial
from istar.inputs.attention import are_close

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDINGS, FINAL_NORM = "embeddings", "final_norm"


class Taps:
    """Reads a model's hidden states by name: `embeddings`, `layer_1` to `layer_L`, and `final_norm` if there is one.

    The layers are those that a penalty on hidden states reads, see `find_layers`. In some architectures (GPT-2,
    GPT-NeoX, OPT, Llama) the output of the last layer is normalized; in others (BERT) the layers normalize their own
    output. A forward pass of a few tokens tells which.

    The model has no head and is in eval mode.

    Attributes:
        names: names of the taps, from the input to the output.
        norm: the final normalization, or None.

    Raises:
        UserError: if the model does not return one hidden state per layer and token.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._layers = find_layers(model)
        self._model: Any = self._layers.base_model
        self.norm = find_final_norm(self._model, run_trial(self._model, self._model))
        layers = [f"layer_{number}" for number in range(1, self._layers.num_layers + 1)]
        self.names = [EMBEDDINGS, *layers, *([FINAL_NORM] if self.norm is not None else [])]

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the model on its inputs, and return the hidden states `(batch, tokens, d)` by tap."""
        states: list[Tensor] = []
        norm_inputs: list[Tensor] = []

        def record_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            """Record the output of a layer, after the input of the first one."""
            if not states:
                states.append(args[0] if args else kwargs["hidden_states"])
            states.append(output[0] if isinstance(output, tuple) else output)

        with ExitStack() as hooks:
            for module in self._layers.modules:
                hooks.enter_context(module.register_forward_hook(record_layer, with_kwargs=True))
            if self.norm is not None:
                hook = self.norm.register_forward_pre_hook(lambda _, args: norm_inputs.append(args[0]))
                hooks.enter_context(hook)
            needs_states = not self._layers.modules
            output = self._model(**inputs, output_hidden_states=needs_states, use_cache=False)
        if needs_states:
            # Without a norm, the last hidden state is the output of the last layer.
            states = [*output.hidden_states[:-1], *(norm_inputs or output.hidden_states[-1:])]
        states += [output[0]] if self.norm is not None else []
        return dict(zip(self.names, states, strict=True))

    def see_padding(self, padding_id: int) -> bool:
        """Return whether the hidden states of a text depend on padding after it, despite the attention mask.

        They do in models without an attention mask, such as FNet, and in those that convolve over padding.
        """
        token_ids = make_trial_ids(self._model)
        padded_ids = torch.cat([token_ids, torch.full_like(token_ids, padding_id)])
        mask = torch.cat([torch.ones_like(token_ids), torch.zeros_like(token_ids)])
        length, device = len(token_ids), self._model.device
        states_alone, states_padded = (
            self({"input_ids": padded_ids[None, :end].to(device), "attention_mask": mask[None, :end].to(device)})
            for end in (length, 2 * length)
        )
        return not all(are_close(states_padded[tap][:, :length], states) for tap, states in states_alone.items())
