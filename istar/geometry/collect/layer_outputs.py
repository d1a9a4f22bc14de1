"""Runs a model on batches of blocks, and returns the hidden states of their tokens by name."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from istar.hidden_states.model_layers import make_trial_ids
from istar.hidden_states.model_modes import uncompiled
from istar.hidden_states.offloading import find_input_device
from istar.hidden_states.reader import HiddenStateReader
from istar.measures.numerics import full_precision
from istar.sums.host_copies import copy_integers
from istar.texts.corpus import Block, PaddedBatch, pad_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BlockReader(HiddenStateReader):
    """Reads the hidden states of a model, which must be without a head, in eval mode, and on its devices.

    `pad_id` fills up batches, and `has_special_tokens` says whether the statistics include special tokens.

    Attributes:
        device: device that inputs go to.
        devices: device of each hidden state in the latest call: of its layer, or the CPU if the layer is offloaded.
        forward_seconds: time of the forward passes of `compute_states` that `add_forward_seconds` has added.

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
        self._passes: list[tuple[Any, Any]] = []  # what `_mark_time` returns before and after each pass

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

    def make_batch(self, blocks: Sequence[Block]) -> PaddedBatch:
        """Return blocks as a batch for `compute_states`."""
        return pad_batch(blocks, self._pad_id, self._has_special_tokens)

    def compute_states(self, batches: Sequence[PaddedBatch], rows: Tensor) -> dict[str, Tensor]:
        """Return the hidden states of the included tokens, `(n, d)` by name.

        `rows` is the row of each included token in the result, `(n,)`: the numbers from 0 to n - 1 in any order.
        """
        num_tokens = len(rows)
        inputs: list[Tensor] = []
        rows_by_batch = rows.split([int(batch.is_included.sum()) for batch in batches])
        for batch, batch_rows in zip(batches, rows_by_batch, strict=True):
            # The states of all other tokens share a last row, which is left out of the result.
            all_rows = torch.full_like(batch.input_ids, num_tokens).masked_scatter_(batch.is_included, batch_rows)
            inputs += [batch.input_ids, batch.attention_mask, all_rows.flatten()]
        tensors = iter(copy_integers(inputs, self.device))
        points: dict[str, Tensor] = {}
        self._passes = []
        with full_precision(self.device), torch.inference_mode():
            for input_ids, attention_mask, all_rows in zip(tensors, tensors, tensors, strict=True):
                start = self._mark_time()
                states = self({"input_ids": input_ids, "attention_mask": attention_mask})
                self._passes.append((start, self._mark_time()))
                for name, state in states.items():
                    if name not in points:
                        points[name] = state.new_empty(num_tokens + 1, state.shape[-1])
                    points[name].index_copy_(0, all_rows.to(state.device), state.flatten(0, 1))
        return {name: state_points[:num_tokens] for name, state_points in points.items()}

    def add_forward_seconds(self) -> None:
        """Add the time of the latest `compute_states`; a GPU must have ended its forward passes, or the host waits."""
        for start, end in self._passes:
            if self.device.type == "cuda":
                end.synchronize()
                self.forward_seconds += start.elapsed_time(end) / 1_000
            else:
                self.forward_seconds += end - start

    def _mark_time(self) -> Any:
        """Return the time, or of a GPU an event, for which the host does not wait."""
        if self.device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
