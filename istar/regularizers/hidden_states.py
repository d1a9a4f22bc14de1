"""Reads the hidden states of a model while it computes them, by forward hooks.

A hook on each layer sees exactly what `output_hidden_states=True` returns, without keeping all states until the end of
the pass. Models that do not declare their layers are asked for `output_hidden_states=True`.

With layerdrop (OPT), layers keep their numbers in every pass: a layer that is skipped has no state; layer L is the
state behind the final norm, which stands for the output of the last layer that ran. If none ran, there is no state. So
`layers="all"` is always what `output_hidden_states=True` returns behind the embeddings.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.regularizers.model_layers import find_layers, name_layers
from istar.regularizers.points import ALL_TOKENS, Layers, Tokens, layer_numbers

Summarize = Callable[[Tensor, Tokens], Any]


class HiddenStateReader:
    """Applies a function to the hidden states of the chosen layers in every forward pass of a model.

    Args:
        model: a transformers model, bare or with a head, also inside of PEFT, DDP or any other module; with `modules`,
            any module at all.
        layers: see `istar.regularizers.points.select_layers`.
        summarize: called with each hidden state `(batch, tokens, d)` and the tokens that count in the pass.
        is_active: called at the beginning of each pass; whether to read that pass. A pass that is not read and has no
            gradients leaves the summaries of the pass before it; any other replaces or drops them.
        modules: those whose outputs (or whose first output, of a tuple) are the hidden states of layers 1 to L.

    Attributes:
        base_model: the module whose passes are read; see `ModelLayers`.
        num_chosen: number of layers chosen.

    Raises:
        UserError: if the model cannot be read; and in a forward pass, if the hidden states are not what the model
            declares.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        summarize: Summarize,
        is_active: Callable[[], bool],
        modules: Sequence[nn.Module] | None = None,
    ) -> None:
        self._layers = find_layers(model) if modules is None else name_layers(model, modules)
        self._chosen = set(layer_numbers(self._layers.num_layers, layers))
        if modules is not None and 0 in self._chosen:
            raise UserError("layer 0, the embeddings, is not among the given modules; choose layers from 1 on")
        self.base_model = self._layers.base_model
        self.num_chosen = len(self._chosen)
        self._summarize = summarize
        self._is_active = is_active
        self._mask_position = _position_of("attention_mask", self.base_model)
        self._summaries: list[Any] | None = None
        self._forget_pass()
        self._handles = [
            self.base_model.register_forward_pre_hook(self._begin_pass, with_kwargs=True),
            *(
                module.register_forward_hook(self._layer_hook(position), with_kwargs=True)
                for position, module in enumerate(self._layers.modules)
            ),
            self.base_model.register_forward_hook(self._end_pass, always_call=True),
        ]

    def take(self) -> list[Any]:
        """The summaries of the chosen layers of the latest pass, in the model's order; they are handed out once.

        Raises:
            UserError: if no pass has been read since the last call.
        """
        if self._summaries is None:
            raise UserError(
                "no forward pass was read since the last loss: call the model first, with gradients enabled; a model "
                "that was compiled and called before attach() never calls the hooks"
            )
        summaries, self._summaries = self._summaries, None
        return summaries

    def discard(self) -> None:
        """Drop the summaries of the latest pass, if there are any."""
        self._summaries = None

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _forget_pass(self) -> None:
        """Drop what was read of the pass under way."""
        self._is_reading = False
        self._tokens = ALL_TOKENS
        self._numbers_called: list[int] = []
        # Chosen layers: their numbers with summaries, or with hidden states that are summarized at the end of the pass.
        self._read: list[tuple[int, Any]] = []
        self._waiting: list[tuple[int, Tensor]] = []

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._forget_pass()
        self._is_reading = self._is_active()
        if self._is_reading or torch.is_grad_enabled():
            # A pass without gradients leaves the summaries of the pass before it: metrics may come before the loss.
            self._summaries = None
        if not self._is_reading:
            return None
        mask = kwargs.get("attention_mask")
        if mask is None and len(args) > self._mask_position:
            mask = args[self._mask_position]
        self._tokens = Tokens(mask)
        if self._layers.modules:
            return None
        return args, {**kwargs, "output_hidden_states": True, "return_dict": True}

    def _layer_hook(self, position: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # Also called when gradient checkpointing computes a layer again, which is no new pass.
            if not self._is_reading:
                return
            number = len(self._numbers_called) + 1 if self._layers.is_shared else position + 1
            states: list[tuple[int, Tensor]] = []
            if not self._numbers_called and 0 in self._chosen:
                states.append((0, args[0] if args else kwargs["hidden_states"]))
            if number in self._chosen and not (self._layers.ends_with_norm and number == self._layers.num_layers):
                states.append((number, output[0] if isinstance(output, tuple) else output))
            self._numbers_called.append(number)
            if self._has_to_wait(module):
                self._waiting += states
            else:
                self._read += self._summarized(states)

        return hook

    def _has_to_wait(self, module: nn.Module) -> bool:
        """Whether a layer's hidden state must not be summarized before the end of the pass.

        What a hook computes within a checkpointed region would have to be computed again with that region; whether a
        named module is in one is not known. With layerdrop, any layer may turn out to be the last.
        """
        is_checkpointed = getattr(module, "gradient_checkpointing", False) and module.training
        return not self._layers.is_transformers or is_checkpointed or self._layers.may_skip()

    def _end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # A pass that failed has no output.
        if self._is_reading and output is not None:
            if self._layers.modules:
                self._check_calls()
            else:
                self._waiting = self._returned_hidden_states(output)
            if self._layers.ends_with_norm and self._numbers_called:
                self._replace_last(output[0])
            read = sorted(self._read + self._summarized(self._waiting), key=lambda layer: layer[0])
            self._summaries = [summary for _, summary in read]
        self._forget_pass()

    def _replace_last(self, last_hidden_state: Tensor) -> None:
        """Let the state behind the final norm, which is layer L, stand for the output of the last layer that ran."""
        replaced = self._numbers_called[-1]
        self._read = [layer for layer in self._read if layer[0] != replaced]
        self._waiting = [layer for layer in self._waiting if layer[0] != replaced]
        if self._layers.num_layers in self._chosen:
            self._waiting.append((self._layers.num_layers, last_hidden_state))

    def _summarized(self, states: list[tuple[int, Tensor]]) -> list[tuple[int, Any]]:
        return [(number, self._summarize(state, self._tokens)) for number, state in states]

    def _check_calls(self) -> None:
        """Refuse a pass whose layers did not all call their hooks."""
        calls, num_layers = self._numbers_called, self._layers.num_layers
        if self._layers.is_transformers:
            is_complete = len(calls) == num_layers or self._layers.may_skip()
        else:
            is_complete = len(set(calls)) == num_layers
        if not is_complete:
            raise UserError(
                f"{type(self.base_model).__name__} called {len(calls)} layers; expected a call of all {num_layers}: "
                "attach before anything is compiled, or name the layers with modules=[...]"
            )

    def _returned_hidden_states(self, output: Any) -> list[tuple[int, Tensor]]:
        """The chosen ones of the hidden states that a model was asked for."""
        states, expected = getattr(output, "hidden_states", None), self._layers.num_layers + 1
        if states is None or len(states) != expected:
            count = "no" if states is None else len(states)
            raise UserError(
                f"{type(self.base_model).__name__} returned {count} hidden states; expected {expected}: name the "
                "modules whose outputs are the hidden states with attach(model, penalty, modules=[...])"
            )
        return [(number, states[number]) for number in sorted(self._chosen)]


def _position_of(name: str, module: nn.Module) -> int:
    """Position of an argument of the module's `forward`, or one that no call reaches."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index(name) if name in names else len(names) + 1
