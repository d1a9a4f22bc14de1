"""Read a transformer's hidden states under names that are the same for all architectures."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from istar.geometry.collect.measures_file import EMBEDDINGS, FINAL_NORM
from istar.hidden_states.model_layers import find_final_norm, find_layers, make_trial_ids, run_trial
from istar.hidden_states.offloading import find_input_device
from istar.measures.numerics import full_precision
from istar.texts.corpus import Block, pad_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Taps:
    """Reads a model's hidden states by name: `embeddings`, `layer_1` to `layer_L`, and `final_norm` if there is one.

    A penalty on hidden states reads the same layers, see `find_layers`. In some architectures (GPT-2, GPT-NeoX, OPT,
    Llama) the output of the last layer is normalized; in others (BERT) the layers normalize their own output. A forward
    pass of a few tokens tells which.

    The model must be without a head and in eval mode. `names` are the taps from the input to the output; `norm` is the
    final normalization, or None. Inputs go to `device`. Each hidden state is on the device of its layer, or on the CPU
    if the layer is offloaded; `devices` has the devices of the latest call.

    Raises a `UserError` if the model does not return one hidden state per layer and token.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._layers = find_layers(model)
        self._model: Any = self._layers.base_model
        self.norm = find_final_norm(self._model, run_trial(self._model, self._model))
        layers = [f"layer_{number}" for number in range(1, self._layers.num_layers + 1)]
        self.names = [EMBEDDINGS, *layers, *([FINAL_NORM] if self.norm is not None else [])]
        self.device, self.devices = find_input_device(self._model), dict[str, torch.device]()
        modules = self._layers.modules
        sources = [modules[0], *modules, *filter(None, [self.norm])] if modules and not self._layers.is_shared else []
        # Layers are offloaded where their device is full, so that their statistics have no place there either.
        are_offloaded = (any(weight.is_meta for weight in source.parameters()) for source in sources)
        self._offloaded = [tap for tap, is_away in zip(self.names, are_offloaded, strict=False) if is_away]

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
        named_states = dict(zip(self.names, states, strict=True))
        named_states |= {name: named_states[name].cpu() for name in self._offloaded}
        self.devices = {name: state.device for name, state in named_states.items()}
        return named_states

    def see_padding(self, padding_id: int) -> bool:
        """Return whether a text's hidden states depend on padding after it, despite the attention mask.

        They do in models without an attention mask, such as FNet, and in models that convolve over padding.
        """
        from istar.models.attention import are_close

        token_ids = make_trial_ids(self._model)
        padded_ids = torch.cat([token_ids, torch.full_like(token_ids, padding_id)])
        mask = torch.cat([torch.ones_like(token_ids), torch.zeros_like(token_ids)])
        length, device = len(token_ids), self.device
        states_alone, states_padded = (
            self({"input_ids": padded_ids[None, :end].to(device), "attention_mask": mask[None, :end].to(device)})
            for end in (length, 2 * length)
        )
        return not all(are_close(states_padded[tap][:, :length], states) for tap, states in states_alone.items())


class BlockReader:
    """Runs a model on batches of blocks, and returns the hidden states of the tokens that the statistics include.

    The model must be without a head, in eval mode, and on its device. `has_special_tokens` says whether the statistics
    include special tokens. `forward_seconds` is the time of all forward passes. `advance` is called with the number of
    included tokens after each batch.
    """

    def __init__(self, model: "PreTrainedModel", pad_id: int, has_special_tokens: bool) -> None:
        self.taps, self.forward_seconds = Taps(model), 0.0
        self.advance: Callable[[int], object] = lambda num_tokens: None
        self._device, self._pad_id, self._has_special_tokens = self.taps.device, pad_id, has_special_tokens

    def make_inputs(self, blocks: Sequence[Block]) -> tuple[dict[str, Tensor], Tensor]:
        """Return a batch as inputs of the model, and the mask `(blocks, tokens)` of included tokens, on the CPU."""
        inputs = pad_batch([block.tokens for block in blocks], self._pad_id)
        is_included = inputs["attention_mask"].bool()
        if not self._has_special_tokens:
            is_text = ~torch.tensor(list(chain.from_iterable(block.is_special for block in blocks)), device="cpu")
            is_included = is_included.masked_scatter(is_included, is_text)
        return inputs, is_included

    def compute_states(
        self, inputs: Sequence[Mapping[str, Tensor]], masks: Sequence[Tensor], rows: Tensor
    ) -> dict[str, Tensor]:
        """Return the hidden states of the included tokens, `(n, d)` by tap, for batches from `make_inputs`.

        `rows` is the row of each included token in the result, `(n,)`: the numbers from 0 to n - 1 in any order.
        """
        num_tokens = len(rows)
        points: dict[str, Tensor] = {}
        rows_by_batch = rows.split([int(mask.sum()) for mask in masks])
        with full_precision(self._device), torch.inference_mode():
            for batch_inputs, mask, batch_rows in zip(inputs, masks, rows_by_batch, strict=True):
                device_inputs = {name: values.to(self._device) for name, values in batch_inputs.items()}
                start = self._read_synchronized_time()
                states = self.taps(device_inputs)
                self.forward_seconds += self._read_synchronized_time() - start
                # The states of all other tokens share a last row, which is left out of the result.
                all_rows = torch.full_like(mask, num_tokens, dtype=torch.int64).masked_scatter_(mask, batch_rows)
                all_rows = all_rows.flatten().to(self._device)
                for tap, tap_states in states.items():
                    if tap not in points:
                        points[tap] = tap_states.new_empty(num_tokens + 1, tap_states.shape[-1])
                    points[tap].index_copy_(0, all_rows.to(tap_states.device), tap_states.flatten(0, 1))
                self.advance(len(batch_rows))
        return {tap: tap_points[:num_tokens] for tap, tap_points in points.items()}

    def _read_synchronized_time(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()
