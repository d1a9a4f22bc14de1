"""Runs a model on batches of blocks, and returns the hidden states of their tokens by name."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from istar.hidden_states.model_layers import make_trial_ids
from istar.hidden_states.model_modes import uncompiled
from istar.hidden_states.offloading import find_input_device
from istar.hidden_states.reader import HiddenStateReader
from istar.measures.numerics import full_precision
from istar.texts.corpus import Block, pad_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BlockReader(HiddenStateReader):
    """Reads the hidden states of a model, which must be without a head, in eval mode, and on its devices.

    `pad_id` fills up batches, and `has_special_tokens` says whether the statistics include special tokens.

    Attributes:
        device: device that inputs go to.
        devices: device of each hidden state in the latest call: of its layer, or the CPU if the layer is offloaded.
        forward_seconds: time of all forward passes of `compute_states`.
        advance: called with the number of included tokens after each batch.

    Raises a `UserError` if the model does not return one hidden state per layer and token.
    """

    def __init__(self, model: "PreTrainedModel", pad_id: int = 0, has_special_tokens: bool = False) -> None:
        super().__init__(model)
        self.device, self.devices = find_input_device(self.base_model), dict[str, torch.device]()
        layers = self.layers
        modules = [] if layers.is_shared else [*layers.modules[:1], *layers.modules, *filter(None, [self.norm])]
        # Layers are offloaded where their device is full, so that their statistics have no place there either.
        are_offloaded = (any(weight.is_meta for weight in module.parameters()) for module in modules)
        self._offloaded = [name for name, is_away in zip(self.names, are_offloaded, strict=False) if is_away]
        self._pad_id, self._has_special_tokens = pad_id, has_special_tokens
        self.forward_seconds = 0.0
        self.advance: Callable[[int], object] = lambda num_tokens: None

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the model on its inputs, and return the hidden states `(batch, tokens, d)` by name."""
        options = {"output_hidden_states": False, "use_cache": False}
        with uncompiled():
            _, states = self.call(self.base_model, **inputs, **options)
        states |= {name: states[name].cpu() for name in self._offloaded}
        self.devices = {name: state.device for name, state in states.items()}
        return states

    def sees_padding(self) -> bool:
        """Return whether a text's hidden states depend on padding after it, despite the attention mask.

        They do in models without an attention mask, such as FNet, and in models that convolve over padding.
        """
        from istar.models.attention import are_close

        token_ids = make_trial_ids(self.base_model)
        padded_ids = torch.cat([token_ids, torch.full_like(token_ids, self._pad_id)])
        mask = torch.cat([torch.ones_like(token_ids), torch.zeros_like(token_ids)])
        length, device = len(token_ids), self.device
        states_alone, states_padded = (
            self({"input_ids": padded_ids[None, :end].to(device), "attention_mask": mask[None, :end].to(device)})
            for end in (length, 2 * length)
        )
        return not all(are_close(states_padded[name][:, :length], states) for name, states in states_alone.items())

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
        """Return the hidden states of the included tokens, `(n, d)` by name, for batches from `make_inputs`.

        `rows` is the row of each included token in the result, `(n,)`: the numbers from 0 to n - 1 in any order.
        """
        num_tokens = len(rows)
        points: dict[str, Tensor] = {}
        rows_by_batch = rows.split([int(mask.sum()) for mask in masks])
        with full_precision(self.device), torch.inference_mode():
            for batch_inputs, mask, batch_rows in zip(inputs, masks, rows_by_batch, strict=True):
                device_inputs = {name: values.to(self.device) for name, values in batch_inputs.items()}
                start = self._read_synchronized_time()
                states = self(device_inputs)
                self.forward_seconds += self._read_synchronized_time() - start
                # The states of all other tokens share a last row, which is left out of the result.
                all_rows = torch.full_like(mask, num_tokens, dtype=torch.int64).masked_scatter_(mask, batch_rows)
                all_rows = all_rows.flatten().to(self.device)
                for name, state in states.items():
                    if name not in points:
                        points[name] = state.new_empty(num_tokens + 1, state.shape[-1])
                    points[name].index_copy_(0, all_rows.to(state.device), state.flatten(0, 1))
                self.advance(len(batch_rows))
        return {name: state_points[:num_tokens] for name, state_points in points.items()}

    def _read_synchronized_time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()
