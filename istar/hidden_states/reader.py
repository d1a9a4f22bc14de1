"""The reader of a model's hidden states, by forward hooks.

The states are `embeddings`, the input of the first layer; `layer_1` to `layer_L`, the outputs of the layers; and
`final_norm`, the output of a norm after the last layer, if there is one. If the caller names modules, the states are
the outputs of these modules, under their names. The hooks only keep references; all else happens at the end of a pass.
In measurements of batches, states are copied, because a later part of a model may change them in place.

Layerdrop (OPT) skips random layers. The other layers keep their numbers, and skipped layers lack a state.
"""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.hidden_states import model_layers
from istar.hidden_states.call_arguments import Arguments, find_argument, read_argument_names, request_states
from istar.hidden_states.model_modes import forget_compiled_code
from istar.regularizers.points import ALL_POINTS, Layers, Points, PointSample, Tokens, layer_numbers

Summarize = Callable[[Sequence[Tensor], Tokens], list[Any]]
"""Reduces hidden states `(batch, tokens, d)` and the tokens that count to summaries, not necessarily one a layer."""


@dataclass
class _Pass:
    """A forward pass that is being read: the states so far, with their numbers, and the layers that were called."""

    tokens: Tokens
    has_gradients: bool
    may_skip: bool
    states: list[tuple[int, Tensor]] = field(default_factory=list)
    called_layers: list[int] = field(default_factory=list)
    # Numbers of the layers that ran without gradients, as inside a reentrant checkpoint.
    layers_without_gradients: set[int] = field(default_factory=set)
    output: Any = None  # of the base model


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
        reason = "a penalty of istar reads hidden states outside of the graph: compile with fullgraph=False"
        _UncompiledHook.__call__ = torch.compiler.disable(call, reason=reason)  # type: ignore[method-assign]


def choose_penalized_states(layers: model_layers.ModelLayers, selected: Layers) -> list[int]:
    """Return the numbers of the states that a penalty on the selected layers reads, ascending.

    The published code penalizes the hidden states that transformers returns. The last of these is the output of the
    model, after the final norm. A penalty therefore reads `final_norm` instead of `layer_L`; without a norm, both are
    equal. If layerdrop skips layer L, `final_norm` replaces the last layer that runs.
    """
    numbers = layer_numbers(layers.num_layers, selected)
    if layers.ends_with_output and numbers[-1] == layers.num_layers:
        numbers[-1] = layers.num_layers + 1
    return numbers


class HiddenStateReader:
    """Reads the hidden states of a model's forward passes.

    `call` returns the states of a pass by name. With `summarize`, the reader applies this function to the states of
    each pass for which `is_active` returns True, and `take` returns the summaries.

    Args:
        model: a transformers model, bare, with a head, or inside of another module such as a PEFT or DDP wrapper. With
            `modules`, any module.
        layers: the layers of a penalty, see `istar.regularizers.points.select_layers` and `choose_penalized_states`.
            None reads all states. The model is then tried on a few tokens, to find its final norm.
        summarize: function of hidden states, `(batch, tokens, d)` each, and the pass's tokens that count; None keeps
            the states.
        is_active: called at the beginning of each pass; returns whether to read it. A new pass drops the summaries of
            the previous one, unless it is not read and runs without gradients.
        modules: modules that return the hidden states of layers 1 to L, see `find_state`; or names or patterns, see
            `model_layers.select_modules`.
        call: runs the model once on inputs of the caller. The layers and the final norm of a transformers model of any
            modality are found in this pass, instead of one on a few tokens.
        points: which tokens count. The mask and whatever else this depends on are read from the call of the base model
            or, if it lacks them, from the calls of the modules around it, such as its head.
        include_padding: count padding as points, too.
        draw_sample: called at the beginning of each pass that is read; returns the part of its points that counts.
        is_traceable: whether `summarize` and the choice of tokens can be part of a graph of torch.compile; otherwise
            the graph ends with the base model.

    Attributes:
        layers: the modules that compute the states.
        base_model: the module with the forward passes to read; see `ModelLayers`.
        head_model: the module that takes labels: the transformers model with its head, or `base_model`.
        names: names of the states, from the input to the output.
        norm: the final norm if all states of a transformers model are read, and it has one; otherwise None.
        num_left_out: number of points of the latest pass that `points.max_norm_ratio` left out.
        batch: arguments of the current batch by name, such as a mask, which are used if the calls lack them.

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
        layers: Layers | None = None,
        summarize: Summarize | None = None,
        is_active: Callable[[], bool] = lambda: False,
        *,
        modules: Sequence[str | nn.Module] | None = None,
        call: Callable[[], object] | None = None,
        points: Points = ALL_POINTS,
        include_padding: bool = False,
        draw_sample: Callable[[], PointSample | None] = lambda: None,
        is_traceable: bool = False,
    ) -> None:
        if modules is not None:
            self.layers = model_layers.layers_from_modules(model, modules)
        elif call is not None:
            self.layers = model_layers.find_layers_in_call(model, call)
        else:
            self.layers = model_layers.find_layers(model)
        self.base_model = self.layers.base_model
        self.head_model = model_layers.find_head_model(model) if modules is None else self.base_model
        self.norm = self.layers.norm
        if layers is None and modules is None and call is None:
            self.norm = model_layers.find_final_norm(self.base_model, model)
        self._replaces_last = layers is not None and self.layers.ends_with_output
        if layers is None:
            has_norm = self.norm is not None
            numbers = [number for number in self.layers.names if number <= self.layers.num_layers or has_norm]
        else:
            numbers = choose_penalized_states(self.layers, layers)
        if modules is not None and 0 in numbers:
            raise UserError("layer 0, the embeddings, is not among the given modules; choose layers from 1 on")
        self._selected = set(numbers)
        self.names = tuple(self.layers.names[number] for number in numbers)
        self._copies_states = summarize is None and (modules, call) != (None, None)
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
        self._num_unused = 0  # training passes in a row with summaries that were not taken
        # Set here, because a compiled hook would otherwise be compiled anew in the second pass.
        self._pass, self._calls = None, {}
        _load_compiler_option()
        self._handles: list[Any] = [
            module.register_forward_hook(partial(self._read_layer, module_index), with_kwargs=True)
            for module_index, module in enumerate(self.layers.modules)
        ]
        # Without summaries, all hooks can be compiled with the model, as in a training without a penalty.
        if summarize is not None:
            forget_compiled_code()
            make_hook: Any = (lambda hook: hook) if is_traceable else _UncompiledHook
            self._handles += self._register_call_hooks(model, make_hook)
            begin_pass, end_pass = make_hook(self._begin_pass), make_hook(self._end_pass)
            self._handles.append(self.base_model.register_forward_pre_hook(begin_pass, with_kwargs=True))
            self._handles.append(self.base_model.register_forward_hook(end_pass, always_call=True))
            return
        self._handles.append(self.base_model.register_forward_hook(self._keep_output))
        if self.layers.norm is not None:
            self._handles.append(self.layers.norm.register_forward_hook(self._read_norm_output))
        if not self.layers.modules:
            request_states = _UncompiledHook(self._request_states)
            self._handles.append(self.base_model.register_forward_pre_hook(request_states, with_kwargs=True))
            if self.norm is not None:
                self._handles.append(self.norm.register_forward_pre_hook(self._read_norm_input))

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        """Call the model, or a module that calls it once; return the output and the states by name.

        The states are `(batch, tokens, d)` each, from the input to the output. The reader must be without `summarize`.

        Raises:
            UserError: if a layer was not called, or a module of the caller several times.
        """
        current = self._pass = self._make_pass(Tokens())
        try:
            output = module(*args, **kwargs)
        finally:
            self._pass = None
        self._check_calls_of_modules(current)
        return output, {self.layers.names[number]: state for number, state in self._sort_states(current)}

    def take(self) -> list[Any]:
        """Return the summaries of the latest pass, in the order of the layers, and forget them.

        Raises `UserError` unless a pass was read since the last call.
        """
        if self._summaries is None:
            raise UserError(
                "no forward pass was read since the last loss: call the model first, with gradients enabled; a model "
                "inside a reentrant checkpoint computes without them, and a compiled model uses the code of another "
                "one of its class that was compiled without a penalty: compile that one in another process"
            )
        summaries, self._summaries = self._summaries, None
        self._num_unused = 0
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
        if is_active and not torch.compiler.is_compiling() and module.training:
            self._warn_if_unused()
        if is_active or torch.is_grad_enabled():
            # A pass without gradients, for example for a metric, may come between the training pass and its loss.
            self._summaries = None
        if not is_active:
            return None
        self._pass = self._make_pass(self._find_tokens())
        return None if self.layers.modules else self._request_states(module, args, kwargs)

    def _warn_if_unused(self) -> None:
        """Warn at the second training pass in a row whose summaries are still there when the next one begins."""
        # A checkpoint of the whole model repeats its pass after the loss was computed.
        if self._summaries is not None and not _are_saved_tensors_hooked():
            self._num_unused += 1
            if self._num_unused == 2:
                message = "the penalties of two training passes in a row were not used: add attached.loss() to the loss"
                warnings.warn(f"{message} of each pass, or set penalty.weight = 0", UserWarning, stacklevel=2)

    def _make_pass(self, tokens: Tokens) -> _Pass:
        may_skip = any(module.training and module.layerdrop > 0 for module in self._modules_with_layerdrop)
        return _Pass(tokens, torch.is_grad_enabled(), may_skip)

    def _request_states(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return arguments with which the model also returns its hidden states; None if the pass is not read."""
        if self._pass is None:
            return None
        return request_states(read_argument_names(module), args, kwargs)

    def _find_tokens(self) -> Tokens:
        calls = self._list_calls()
        mask = None if self._include_padding else find_argument(calls, "attention_mask")
        labels = next((call["labels"] for call in calls if call.get("labels") is not None), None)
        input_ids, position_ids = find_argument(calls, "input_ids"), find_argument(calls, "position_ids")
        tokens = Tokens(mask, self._points, input_ids, labels, position_ids, self._predicts_next)
        tokens.sample = self._draw_sample()
        tokens.prepare()
        return tokens

    def _register_call_hooks(self, model: nn.Module, make_hook: Any) -> list[Any]:
        handles: list[Any] = []
        for module in (part for part in model.modules() if self.base_model in part.modules()):
            begin_call = make_hook(partial(self._begin_call, read_argument_names(module)))
            handles.append(module.register_forward_pre_hook(begin_call, with_kwargs=True))
            handles.append(module.register_forward_hook(make_hook(self._end_call), always_call=True))
        return handles

    def _begin_call(self, names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls = {**self._calls, module: {**dict(zip(names, args, strict=False)), **kwargs}}

    def _end_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._calls = {caller: call for caller, call in self._calls.items() if caller is not module}

    def _list_calls(self) -> list[Arguments]:
        calls = self._calls
        if not torch.compiler.is_compiling() and _are_saved_tensors_hooked():
            # A checkpoint repeats its calls in the backward pass, when the calls around it have ended.
            caller, call = next(iter(calls.items()))
            is_repeated = [*map(id, call.values())] == [*map(id, self._checkpointed_calls.get(caller, {}).values())]
            self._checkpointed_calls = calls = {**self._checkpointed_calls, **calls} if is_repeated else calls
        return [*reversed([*calls.values()]), self.batch]

    # torch.compile traces the next three hooks with the model.
    def _read_layer(
        self, module_index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        current = self._pass
        # Activation checkpointing calls layers again in the backward pass, which is not read.
        if current is None:
            return
        layer_number = len(current.called_layers) + 1 if self.layers.is_shared else module_index + 1
        if not current.called_layers and 0 in self._selected:
            self._add_state(current, 0, args[0] if args else kwargs["hidden_states"])
        if layer_number in self._selected:
            self._add_state(current, layer_number, find_state(output))
        current.called_layers.append(layer_number)
        if current.has_gradients and not torch.is_grad_enabled():
            current.layers_without_gradients.add(layer_number)

    def _read_norm_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._pass is not None:
            self._add_state(self._pass, self.layers.num_layers, args[0])

    def _read_norm_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        number = self.layers.num_layers + 1
        if self._pass is not None and number not in dict(self._pass.states):
            self._add_state(self._pass, number, find_state(output))

    def _add_state(self, current: _Pass, number: int, state: Any) -> None:
        if self._copies_states:
            if not isinstance(state, Tensor):
                name = self.layers.names[number]
                raise UserError(f"{name} returns a {type(state).__name__}; expected a tensor, or one first in a tuple")
            state = state.clone()
        current.states.append((number, state))

    def _keep_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._pass is not None:
            self._pass.output = output

    def _end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        current, self._pass = self._pass, None
        # The output is None if the pass failed.
        if current is None or output is None or self._summarize is None:
            return
        current.output = output
        states = [state for _, state in self._sort_states(current)]
        self._summaries = self._summarize(states, current.tokens) if states else []
        self.num_left_out = current.tokens.num_left_out

    def _sort_states(self, current: _Pass) -> list[tuple[int, Tensor]]:
        called_layers, last_number = current.called_layers, self.layers.num_layers + 1
        if self.layers.modules:
            self._check_all_layers_called(current)
        else:
            current.states += self._select_returned_states(current)
        if self._replaces_last and called_layers:
            current.states = [(number, state) for number, state in current.states if number != called_layers[-1]]
        # If layerdrop skipped all layers, the output belongs to none of them.
        has_output = last_number in self._selected and self.layers.norm is None
        if has_output and (called_layers or not self.layers.modules):
            current.states.append((last_number, current.output[0]))
        _check_have_gradients(current.states, current.layers_without_gradients)
        return sorted(current.states, key=itemgetter(0))

    def _check_calls_of_modules(self, current: _Pass) -> None:
        """Raise a `UserError` unless each module of the caller was called once."""
        for number, name in self.layers.names.items() if not self.layers.is_transformers else ():
            num_calls = current.called_layers.count(number)
            if num_calls != 1:
                raise UserError(
                    f"{name} was called {num_calls} times in a pass; expected one call: leave it out of modules=[...]"
                )

    def _check_all_layers_called(self, current: _Pass) -> None:
        called_layers, num_layers = current.called_layers, self.layers.num_layers
        # A module of a user may be called several times in a pass.
        num_called = len(called_layers if self.layers.is_transformers else set(called_layers))
        if num_called != num_layers and not current.may_skip:
            raise UserError(
                f"{type(self.base_model).__name__} called {len(called_layers)} layers; expected a call of all "
                f"{num_layers}: attach before anything is compiled, or name the layers with modules=[...]"
            )

    def _select_returned_states(self, current: _Pass) -> list[tuple[int, Tensor]]:
        """Return the selected states from the model's output, except one that was read at the input of the norm."""
        states, num_expected = getattr(current.output, "hidden_states", None), self.layers.num_layers + 1
        if states is None or len(states) != num_expected:
            num_returned = "no" if states is None else len(states)
            raise UserError(
                f"{type(self.base_model).__name__} returned {num_returned} hidden states; expected {num_expected}: "
                "name the modules whose outputs are the hidden states with modules=[...]"
            )
        first = next((number for number, state in enumerate(states) if state.requires_grad), None)
        if first is not None:
            current.layers_without_gradients = set(range(first, num_expected + 1))
        numbers = self._selected - {number for number, _ in current.states}
        return [(number, state) for number, state in enumerate(states) if number in numbers]


def find_state(output: Any) -> Any:
    """Return the hidden state in a module's output: a tensor, the first one of a tuple, or its `last_hidden_state`."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("last_hidden_state")
    values = output if isinstance(output, Sequence) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def _are_saved_tensors_hooked() -> bool:
    """Return whether hooks change what autograd saves, as inside a non-reentrant checkpoint."""
    try:
        # Torch refuses this context where there are such hooks.
        with torch.autograd.graph.disable_saved_tensors_hooks("istar saves nothing here"):
            return False
    except RuntimeError:
        return True


def _check_have_gradients(states: list[tuple[int, Tensor]], layers: set[int]) -> None:
    """Raise a `UserError` for a state without a gradient; a reentrant checkpoint gives one only to its output."""
    for layer, state in states:
        if layer in layers and not state.requires_grad:
            raise UserError(
                f"hidden state {layer} was computed without gradients, as inside a reentrant checkpoint of several "
                "layers: set use_reentrant=False, checkpoint each layer by itself, or choose other layers"
            )


def _is_causal_language_model(model: nn.Module) -> bool:
    can_generate = getattr(model, "can_generate", None)
    return can_generate is not None and bool(can_generate())
