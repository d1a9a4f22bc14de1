"""Forward hooks that read a model's hidden states while the model computes them.

A hook on each layer reads the same tensors as `output_hidden_states=True` returns, but they can be freed before the end
of the pass. Transformers models that do not declare their layers are called with `output_hidden_states=True` instead.

Layerdrop (OPT) skips random layers. The other layers keep their numbers, and a skipped layer has no hidden state. The
output of the final norm is hidden state L, and replaces the output of the last layer that ran; if no layer ran, there
is no hidden state. `layers="all"` therefore always selects what `output_hidden_states=True` returns after the
embedding output.
"""

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.regularizers.model_layers import find_head_model, find_layers, layers_from_modules
from istar.regularizers.points import ALL_POINTS, ALL_TOKENS, Layers, Points, Tokens, layer_numbers

Summarize = Callable[[Tensor, Tokens], Any]
"""Function that reduces a hidden state `(batch, tokens, d)` and the tokens that count to a summary."""


class HiddenStateReader:
    """Applies a function to the hidden states of the selected layers in each forward pass of a model.

    Args:
        model: a transformers model, bare, with a head, or inside of another module such as a PEFT or DDP wrapper. With
            `modules`, any module.
        layers: see `istar.regularizers.points.select_layers`.
        summarize: function of a hidden state `(batch, tokens, d)` and the tokens that count in the pass.
        is_active: function that is called at the beginning of each pass and returns whether to read the pass. If a pass
            is not read and has no gradients, the summaries of the previous pass are kept; otherwise they are dropped.
        modules: modules whose outputs, or the first elements of whose outputs, are the hidden states of layers 1 to L.
        points: which tokens count. Labels are read from the call of the model with its head.
        needs_labels: give the labels to `summarize` also if `points` do not need them.

    Attributes:
        base_model: the module whose forward passes are read; see `ModelLayers`.
        head_model: the module whose forward pass takes labels: the transformers model with its head, or `base_model`.
        num_selected: number of selected layers.
        num_left_out: number of points of the latest pass that `points.max_norm_ratio` left out.

    Raises:
        UserError: if the model's hidden states cannot be read. In a forward pass, if the model did not compute the
            hidden states that it declares.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        summarize: Summarize,
        is_active: Callable[[], bool],
        modules: Sequence[nn.Module] | None = None,
        points: Points = ALL_POINTS,
        needs_labels: bool = False,
    ) -> None:
        self._layers = find_layers(model) if modules is None else layers_from_modules(model, modules)
        self._selected = set(layer_numbers(self._layers.num_layers, layers))
        if modules is not None and 0 in self._selected:
            raise UserError("layer 0, the embeddings, is not among the given modules; choose layers from 1 on")
        self.base_model = self._layers.base_model
        self.head_model = find_head_model(model) if modules is None else self.base_model
        self.num_selected = len(self._selected)
        self.num_left_out = 0
        self._points = points
        self._needs_labels = needs_labels or points.need_labels
        self._predicts_next = _is_causal_language_model(self.head_model)
        self._summarize = summarize
        self._is_active = is_active
        self._argument_names = _read_argument_names(self.base_model)
        self._summaries: list[Any] | None = None
        self._labels: Tensor | None = None
        self._reset_pass()
        self._handles = [
            *self._register_label_hooks(model),
            self.base_model.register_forward_pre_hook(self._begin_pass, with_kwargs=True),
            *(
                module.register_forward_hook(self._make_layer_hook(module_index), with_kwargs=True)
                for module_index, module in enumerate(self._layers.modules)
            ),
            self.base_model.register_forward_hook(self._end_pass, always_call=True),
        ]

    def take(self) -> list[Any]:
        """Return the summaries of the latest pass, in the order of the layers, and forget them.

        Raises `UserError` if no pass was read since the last call.
        """
        if self._summaries is None:
            raise UserError(
                "no forward pass was read since the last loss: call the model first, with gradients enabled; a model "
                "that was compiled and called before attach() never calls the hooks"
            )
        summaries, self._summaries = self._summaries, None
        return summaries

    def discard(self) -> None:
        """Forget the summaries of the latest pass, if there are any."""
        self._summaries = None

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _reset_pass(self) -> None:
        """Reset everything that is recorded during a single pass."""
        self._is_reading = False
        self._tokens = ALL_TOKENS
        self._called_layers: list[int] = []
        # Layer numbers with summaries, and with hidden states that are summarized at the end of the pass.
        self._layer_summaries: list[tuple[int, Any]] = []
        self._deferred_states: list[tuple[int, Tensor]] = []

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a pass, as a pre-hook of the base model: choose the tokens, and request hidden states if necessary.

        Returns the changed arguments of the call if hidden states are requested, otherwise None.
        """
        self._reset_pass()
        self._is_reading = self._is_active()
        if self._is_reading or torch.is_grad_enabled():
            # A pass without gradients, for example for a metric, may come between the training pass and its loss.
            self._summaries = None
        if not self._is_reading:
            return None
        arguments = {**dict(zip(self._argument_names, args, strict=False)), **kwargs}
        mask = arguments.get("attention_mask")
        position_ids = arguments.get("position_ids")
        if self._points.are_all:
            self._tokens = Tokens(mask, labels=self._labels, position_ids=position_ids)
        else:
            input_ids = arguments.get("input_ids")
            self._tokens = Tokens(mask, self._points, input_ids, self._labels, position_ids, self._predicts_next)
        if self._layers.modules:
            return None
        return args, {**kwargs, "output_hidden_states": True, "return_dict": True}

    def _register_label_hooks(self, model: nn.Module) -> list[Any]:
        """Register hooks that store the labels of a call while it runs, if they are needed; return their handles.

        The hooks are on the model, the head model and all modules between the two, because PEFT's wrappers call
        `forward` of the module that they hold, which skips the hooks of that module.
        """
        if not self._needs_labels:
            return []

        def store_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Store the labels of the call, if it has any."""
            labels = {**dict(zip(_read_argument_names(module), args, strict=False)), **kwargs}.get("labels")
            self._labels = self._labels if labels is None else labels

        def clear_labels(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            """Forget the labels at the end of the call, even if it failed."""
            self._labels = None

        enclosing_modules = [
            module for module in model.modules() if any(child is self.head_model for child in module.modules())
        ]
        return [
            handle
            for module in enclosing_modules
            for handle in (
                module.register_forward_pre_hook(store_labels, with_kwargs=True),
                module.register_forward_hook(clear_labels, always_call=True),
            )
        ]

    def _make_layer_hook(self, module_index: int) -> Callable[..., None]:
        """Return the forward hook for the module with this index in the list of layer modules."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            """Summarize the selected hidden states that this call of the module reads and returns."""
            # Gradient checkpointing calls layers again in the backward pass, where nothing is to be read.
            if not self._is_reading:
                return
            layer_number = len(self._called_layers) + 1 if self._layers.is_shared else module_index + 1
            states: list[tuple[int, Tensor]] = []
            # The input of the first layer is hidden state 0, the embedding output.
            if not self._called_layers and 0 in self._selected:
                states.append((0, args[0] if args else kwargs["hidden_states"]))
            # Hidden state L is the output of the final norm, if there is one, which `_end_pass` reads.
            if layer_number in self._selected and not (
                self._layers.ends_with_norm and layer_number == self._layers.num_layers
            ):
                states.append((layer_number, output[0] if isinstance(output, tuple) else output))
            self._called_layers.append(layer_number)
            if self._must_summarize_later(module):
                self._deferred_states += states
            else:
                self._layer_summaries += self._summarize_states(states)

        return hook

    def _must_summarize_later(self, module: nn.Module) -> bool:
        """Return whether the hidden state of a layer must be summarized at the end of the pass, not in its hook.

        Gradient checkpointing would compute a summary again together with the layer. For modules that the caller named,
        it is unknown whether they are checkpointed. With layerdrop, any layer may be the last one that runs.
        """
        is_checkpointed = getattr(module, "gradient_checkpointing", False) and module.training
        return not self._layers.is_transformers or is_checkpointed or self._layers.may_skip()

    def _end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End a pass, as a forward hook of the base model: summarize the remaining states, and store all summaries."""
        # The output is None if the pass failed.
        if self._is_reading and output is not None:
            if self._layers.modules:
                self._check_all_layers_called()
            else:
                self._deferred_states = self._select_returned_states(output)
            if self._layers.ends_with_norm and self._called_layers:
                self._replace_last_state(output[0])
            numbered_summaries = self._layer_summaries + self._summarize_states(self._deferred_states)
            self._summaries = [summary for _, summary in sorted(numbered_summaries, key=itemgetter(0))]
            self.num_left_out = self._tokens.num_left_out
        self._reset_pass()

    def _replace_last_state(self, last_hidden_state: Tensor) -> None:
        """Replace the output of the last layer that ran with the output of the final norm, which is hidden state L."""
        last_called = self._called_layers[-1]
        self._layer_summaries = [(layer, summary) for layer, summary in self._layer_summaries if layer != last_called]
        self._deferred_states = [(layer, state) for layer, state in self._deferred_states if layer != last_called]
        if self._layers.num_layers in self._selected:
            self._deferred_states.append((self._layers.num_layers, last_hidden_state))

    def _summarize_states(self, states: list[tuple[int, Tensor]]) -> list[tuple[int, Any]]:
        """Return the summaries of hidden states, with their layer numbers."""
        return [(layer, self._summarize(state, self._tokens)) for layer, state in states]

    def _check_all_layers_called(self) -> None:
        """Raise `UserError` unless all layers called their hooks, except those that layerdrop skipped."""
        called_layers, num_layers = self._called_layers, self._layers.num_layers
        if self._layers.is_transformers:
            is_complete = len(called_layers) == num_layers or self._layers.may_skip()
        else:
            is_complete = len(set(called_layers)) == num_layers
        if not is_complete:
            raise UserError(
                f"{type(self.base_model).__name__} called {len(called_layers)} layers; expected a call of all "
                f"{num_layers}: attach before anything is compiled, or name the layers with modules=[...]"
            )

    def _select_returned_states(self, output: Any) -> list[tuple[int, Tensor]]:
        """Return the selected hidden states from the output of a model with `output_hidden_states=True`."""
        states, num_expected = getattr(output, "hidden_states", None), self._layers.num_layers + 1
        if states is None or len(states) != num_expected:
            num_returned = "no" if states is None else len(states)
            raise UserError(
                f"{type(self.base_model).__name__} returned {num_returned} hidden states; expected {num_expected}: "
                "name the modules whose outputs are the hidden states with attach(model, penalty, modules=[...])"
            )
        return [(number, states[number]) for number in sorted(self._selected)]


def _read_argument_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward pass that can be given by position."""
    positional_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters
    return [name for name, parameter in parameters.items() if parameter.kind in positional_kinds]


def _is_causal_language_model(model: nn.Module) -> bool:
    """Return whether a model is a causal language model, whose output at a token predicts the next label."""
    can_generate = getattr(model, "can_generate", None)
    return can_generate is not None and bool(can_generate())
