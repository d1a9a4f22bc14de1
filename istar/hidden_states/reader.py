"""Forward hooks that read a model's hidden states while the model computes them.

A hook on each layer reads the same tensors that `output_hidden_states=True` returns, but they can be freed before the
end of the pass. Transformers models that do not declare their layers are called with `output_hidden_states=True`
instead.

Layerdrop (OPT) skips random layers. The other layers keep their numbers, and skipped layers lack a hidden state. The
output of the final norm is hidden state L, and replaces the output of the last layer that ran; if no layer ran, it is
not read. `layers="all"` therefore always selects what `output_hidden_states=True` returns after the embedding output.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.hidden_states.call_arguments import Arguments, find_argument, read_argument_names
from istar.hidden_states.model_layers import find_head_model, find_layers, layers_from_modules
from istar.measures.batch_moments import layers_per_block
from istar.regularizers.points import ALL_POINTS, Layers, Points, PointSample, Tokens, layer_numbers

Summarize = Callable[[Sequence[Tensor], Tokens], list[Any]]
"""Reduces hidden states `(batch, tokens, d)` and the tokens that count to summaries, not necessarily one a layer."""


@dataclass
class _Pass:
    """A forward pass that is being read.

    `states` and `deferred_states` are the hidden states that are not summarized yet, with their layer numbers. The
    former are summarized when they fill a block, see `layers_per_block`, the latter at the end of the pass. With
    `is_deferred`, all states are.
    """

    tokens: Tokens
    has_gradients: bool
    may_skip: bool
    is_deferred: bool
    called_layers: list[int] = field(default_factory=list)
    summaries: list[Any] = field(default_factory=list)
    states: list[tuple[int, Tensor]] = field(default_factory=list)
    deferred_states: list[tuple[int, Tensor]] = field(default_factory=list)
    # Numbers of the layers that ran without gradients, as inside a reentrant checkpoint.
    layers_without_gradients: set[int] = field(default_factory=set)


@dataclass
class _UncompiledHook:
    """A hook that torch.compile calls without compiling it. It is copied and pickled together with the reader."""

    hook: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(*args, **kwargs)


def _load_compiler_option() -> None:
    """Keep torch.compile out of `_UncompiledHook`, if the compiler is loaded, as by transformers' models."""
    call: Any = _UncompiledHook.__call__
    if "torch._dynamo" in sys.modules and not hasattr(call, "__wrapped__"):
        reason = "an attached penalty of istar reads hidden states outside of the graph: compile with fullgraph=False"
        _UncompiledHook.__call__ = torch.compiler.disable(call, reason=reason)  # type: ignore[method-assign]


class HiddenStateReader:
    """Applies a function to the hidden states of the selected layers in each forward pass of a model.

    Args:
        model: a transformers model, bare, with a head, or inside of another module such as a PEFT or DDP wrapper. With
            `modules`, any module.
        layers: see `istar.regularizers.points.select_layers`.
        summarize: function of hidden states, `(batch, tokens, d)` each, and the pass's tokens that count.
        is_active: called at the beginning of each pass; returns whether to read it. A new pass drops the summaries of
            the previous one, unless it is not read and runs without gradients.
        modules: modules that return the hidden states of layers 1 to L, as their output or its first element.
        points: which tokens count. The mask and whatever else this depends on are read from the call of the base model
            or, if it lacks them, from the calls of the modules around it, such as its head.
        include_padding: count padding as points, too.
        draw_sample: called at the beginning of each pass that is read; returns the part of its points that counts.

    Attributes:
        base_model: the module with the forward passes to read; see `ModelLayers`.
        head_model: the module that takes labels: the transformers model with its head, or `base_model`.
        num_selected: number of selected layers.
        num_left_out: number of points of the latest pass that `points.max_norm_ratio` left out.
        batch: what the next calls may lack, such as a mask that the called module does not take, by argument.

    Raises:
        UserError: if the model's hidden states cannot be read. In a forward pass, if the model did not compute its
            declared hidden states.
    """

    # A copy of the model has hooks of an empty reader; see `__getstate__`.
    _is_active: Callable[[], bool] = staticmethod(lambda: False)
    _pass: _Pass | None = None
    # Arguments of the calls in progress by module, the outermost first, and of the latest pass inside a checkpoint.
    _calls: Mapping[nn.Module, Arguments] = MappingProxyType({})
    _checkpointed_calls: Mapping[nn.Module, Arguments] = MappingProxyType({})

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        summarize: Summarize,
        is_active: Callable[[], bool],
        *,
        modules: Sequence[nn.Module] | None = None,
        points: Points = ALL_POINTS,
        include_padding: bool = False,
        draw_sample: Callable[[], PointSample | None] = lambda: None,
    ) -> None:
        self._layers = find_layers(model) if modules is None else layers_from_modules(model, modules)
        self._selected = set(layer_numbers(self._layers.num_layers, layers))
        if modules is not None and 0 in self._selected:
            raise UserError("layer 0, the embeddings, is not among the given modules; choose layers from 1 on")
        self.base_model = self._layers.base_model
        self.head_model = find_head_model(model) if modules is None else self.base_model
        self.num_selected = len(self._selected)
        self.num_left_out = 0
        self.batch: Arguments = {}
        self._points = points
        self._include_padding = include_padding
        self._predicts_next = _is_causal_language_model(self.head_model)
        self._summarize = summarize
        self._is_active = is_active
        self._draw_sample = draw_sample
        self._modules_with_layerdrop: list[Any] = [
            module for module in self.base_model.modules() if "layerdrop" in vars(module)
        ]
        self._summaries: list[Any] | None = None
        _load_compiler_option()
        self._handles = [
            *self._register_call_hooks(model),
            self.base_model.register_forward_pre_hook(_UncompiledHook(self._begin_pass), with_kwargs=True),
            *(
                module.register_forward_hook(partial(self._read_layer, module_index), with_kwargs=True)
                for module_index, module in enumerate(self._layers.modules)
            ),
            self.base_model.register_forward_hook(_UncompiledHook(self._end_pass), always_call=True),
        ]

    def take(self) -> list[Any]:
        """Return the summaries of the latest pass, in the order of the layers, and forget them.

        Raises `UserError` unless a pass was read since the last call.
        """
        if self._summaries is None:
            raise UserError(
                "no forward pass was read since the last loss: call the model first, with gradients enabled; a model "
                "inside a reentrant checkpoint computes without them, and a model that was compiled and called before "
                "attach() never calls the hooks"
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

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copied model must not drag along the penalty. `HiddenStatePenalty` restores the hooks."""
        return {}

    def copied_state(self) -> dict[str, Any]:
        """Return the attributes for the reader of a copied penalty: all but what belongs to a pass."""
        return {**self.__dict__, "_summaries": None, "_pass": None, "_calls": {}, "_checkpointed_calls": {}}

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the changed arguments of the call if hidden states are requested, otherwise None."""
        self._pass = None
        is_active = self._is_active()
        if is_active or torch.is_grad_enabled():
            # A pass without gradients, for example for a metric, may come between the training pass and its loss.
            self._summaries = None
        if not is_active:
            return None
        calls = self._list_calls()
        mask = None if self._include_padding else find_argument(calls, "attention_mask")
        labels = next((call["labels"] for call in calls if call.get("labels") is not None), None)
        input_ids, position_ids = find_argument(calls, "input_ids"), find_argument(calls, "position_ids")
        tokens = Tokens(mask, self._points, input_ids, labels, position_ids, self._predicts_next)
        tokens.sample = self._draw_sample()
        may_skip = any(module.training and module.layerdrop > 0 for module in self._modules_with_layerdrop)
        # With layerdrop, any layer may be the last one that runs. Modules that are not of transformers may be followed
        # by operations in place.
        self._pass = _Pass(tokens, torch.is_grad_enabled(), may_skip, may_skip or not self._layers.is_transformers)
        if self._layers.modules:
            return None
        return args[len(read_argument_names(module)) :], {**calls[0], "output_hidden_states": True, "return_dict": True}

    def _register_call_hooks(self, model: nn.Module) -> list[Any]:
        """Register hooks that store the arguments of the base model and all modules around it while they run."""
        handles: list[Any] = []
        for module in (part for part in model.modules() if self.base_model in part.modules()):
            begin_call = _UncompiledHook(partial(self._begin_call, read_argument_names(module)))
            handles.append(module.register_forward_pre_hook(begin_call, with_kwargs=True))
            handles.append(module.register_forward_hook(_UncompiledHook(self._end_call), always_call=True))
        return handles

    def _begin_call(self, names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls = {**self._calls, module: {**dict(zip(names, args, strict=False)), **kwargs}}

    def _end_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._calls = {caller: call for caller, call in self._calls.items() if caller is not module}

    def _list_calls(self) -> list[Arguments]:
        """Return the arguments of the base model's call, and of the calls around it from the innermost on."""
        calls = self._calls
        if _are_saved_tensors_hooked():
            # A checkpoint repeats its calls in the backward pass, when the calls around it have ended.
            caller, call = next(iter(calls.items()))
            is_repeated = [*map(id, call.values())] == [*map(id, self._checkpointed_calls.get(caller, {}).values())]
            self._checkpointed_calls = calls = {**self._checkpointed_calls, **calls} if is_repeated else calls
        return [*reversed([*calls.values()]), self.batch]

    def _read_layer(
        self, module_index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        current = self._pass
        # Activation checkpointing calls layers again in the backward pass, which is not read.
        if current is None:
            return
        layer_number = len(current.called_layers) + 1 if self._layers.is_shared else module_index + 1
        states: list[tuple[int, Tensor]] = []
        # The input of the first layer is hidden state 0, the embedding output.
        if not current.called_layers and 0 in self._selected:
            states.append((0, args[0] if args else kwargs["hidden_states"]))
        # Hidden state L is the output of the final norm, if any; `_end_pass` reads it.
        if layer_number in self._selected and not (
            self._layers.ends_with_norm and layer_number == self._layers.num_layers
        ):
            states.append((layer_number, output[0] if isinstance(output, tuple) else output))
        current.called_layers.append(layer_number)
        is_without_gradients = current.has_gradients and not torch.is_grad_enabled()
        if is_without_gradients:
            current.layers_without_gradients.add(layer_number)
        # torch.compile traces this hook with the model. The summary, which it cannot trace, would split the graph.
        is_deferred = torch.compiler.is_compiling() or current.is_deferred or is_without_gradients
        # A summary inside a checkpoint would have no gradient, or be recomputed.
        if is_deferred or (current.has_gradients and _are_saved_tensors_hooked()):
            current.deferred_states.extend(states)
            return
        for layer, state in states:
            current.states.append((layer, state))
            current.tokens.prepare(state)
            if len(current.states) >= layers_per_block(state):
                self._summarize_states(current)

    def _end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        current, self._pass = self._pass, None
        # The output is None if the pass failed.
        if current is None or output is None:
            return
        current.states += current.deferred_states
        if self._layers.modules:
            self._check_all_layers_called(current)
        else:
            current.states = self._select_returned_states(output)
        if self._layers.ends_with_norm and current.called_layers:
            self._replace_last_state(current, output[0])
        _check_have_gradients(current.states, current.layers_without_gradients)
        self._summarize_states(current)
        self._summaries = current.summaries
        self.num_left_out = current.tokens.num_left_out

    def _replace_last_state(self, current: _Pass, last_hidden_state: Tensor) -> None:
        last_called = current.called_layers[-1]
        current.states = [(layer, state) for layer, state in current.states if layer != last_called]
        if self._layers.num_layers in self._selected:
            current.states.append((self._layers.num_layers, last_hidden_state))
            current.layers_without_gradients.discard(self._layers.num_layers)

    def _summarize_states(self, current: _Pass) -> None:
        states = [state for _, state in sorted(current.states, key=itemgetter(0))]
        current.summaries += self._summarize(states, current.tokens) if states else []
        current.states = []

    def _check_all_layers_called(self, current: _Pass) -> None:
        called_layers, num_layers = current.called_layers, self._layers.num_layers
        if self._layers.is_transformers:
            is_complete = len(called_layers) == num_layers or current.may_skip
        else:
            is_complete = len(set(called_layers)) == num_layers
        if not is_complete:
            raise UserError(
                f"{type(self.base_model).__name__} called {len(called_layers)} layers; expected a call of all "
                f"{num_layers}: attach before anything is compiled, or name the layers with modules=[...]"
            )

    def _select_returned_states(self, output: Any) -> list[tuple[int, Tensor]]:
        states, num_expected = getattr(output, "hidden_states", None), self._layers.num_layers + 1
        if states is None or len(states) != num_expected:
            num_returned = "no" if states is None else len(states)
            raise UserError(
                f"{type(self.base_model).__name__} returned {num_returned} hidden states; expected {num_expected}: "
                "name the modules whose outputs are the hidden states with attach(model, penalty, modules=[...])"
            )
        numbered_states = list(enumerate(states))
        first = next((number for number, state in numbered_states if state.requires_grad), num_expected)
        numbered_states = [(number, states[number]) for number in sorted(self._selected)]
        _check_have_gradients(numbered_states, set(range(first, num_expected)))
        return numbered_states


def _are_saved_tensors_hooked() -> bool:
    """Return whether hooks change what autograd saves, as inside a non-reentrant checkpoint."""
    try:
        # Torch refuses this context where there are such hooks.
        with torch.autograd.graph.disable_saved_tensors_hooks("istar saves nothing here"):
            return False
    except RuntimeError:
        return True


def _check_have_gradients(states: list[tuple[int, Tensor]], layers: set[int]) -> None:
    """A reentrant checkpoint gives a gradient only to what it returns, which is the last layer inside of it."""
    for layer, state in states:
        if layer in layers and not state.requires_grad:
            raise UserError(
                f"hidden state {layer} was computed without gradients, as inside a reentrant checkpoint of several "
                "layers: set use_reentrant=False, checkpoint each layer by itself, or choose other layers"
            )


def _is_causal_language_model(model: nn.Module) -> bool:
    can_generate = getattr(model, "can_generate", None)
    return can_generate is not None and bool(can_generate())
