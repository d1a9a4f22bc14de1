"""Hooks that read the hidden states of a model's training passes, in eager mode and in compiled models.

In eager mode, the hooks exist only during the optimizer steps that are read. `torch.compile` traces the hooks with the
model: they put the operator `istar::watch` into the graph, which checks in each pass whether it is to be read. Layers
that are compiled one by one share a graph. The graph therefore contains no layer number, and the operator counts calls.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from istar.errors import UserError, shorten
from istar.hidden_states.call_arguments import find_wrapped, read_argument_names
from istar.hidden_states.model_layers import find_final_norm, find_layers, layers_from_modules
from istar.hidden_states.model_modes import forget_compiled_code, uncompiled
from istar.hidden_states.reader import find_state
from istar.runs.names import POOLED

_MASK, _BEGIN, _POSITIONS, _INPUT, _OUTPUT, _NORM, _END = range(7)
"""Events that the operator reports: the beginning of a call with a mask or without one, its positions, and so on."""


class PassArguments(NamedTuple):
    """Number and arguments of a forward pass."""

    number: int  # counted from 0 since the last optimizer step
    attention_mask: Tensor | None
    position_ids: Tensor | None


Receive = Callable[[str, Tensor, PassArguments], None]
"""Called with the name of a state, the state, and the arguments of its pass."""

_watchers: WeakValueDictionary[int, "StateWatcher"] = WeakValueDictionary()
_ids = itertools.count()
_LIBRARY = torch.library.Library("istar", "DEF")
# The compiler removes an operator that changes none of its arguments, so this one declares that it changes `flag`.
_LIBRARY.define("watch(Tensor value, Tensor(a!) flag, int watcher, int event) -> ()")


def _watch(value: Tensor, flag: Tensor, watcher: int, event: int) -> None:
    if watcher in _watchers:
        _watchers[watcher].receive_from_graph(event, value)


_LIBRARY.impl("watch", _watch, "CompositeExplicitAutograd")
torch.library.register_fake("istar::watch", lambda value, flag, watcher, event: None, lib=_LIBRARY)


class StateWatcher:
    """Reads the states of a model in passes with gradients, while it is armed.

    Args:
        model: a transformers model of text, bare or inside other modules, also compiled. With `modules`, any module.
        receive: called with each state, detached from the autograd graph. Its errors are caught, see `failure`.
        modules: names, patterns or modules, see `istar.hidden_states.model_layers.select_modules`. In a compiled model
            they must be in the order of their calls.
        receive_gradient: called with the name and the gradient of each state, in eager mode.

    Attributes:
        base_model: the module whose calls are passes.
        names: names of the states, from the input to the output. `pooled` is the last one for models that may return
            sentence embeddings.
        num_passes: number of passes that were read since `arm`.
        failure: why a pass since `arm` could not be read; "" if all could.

    Raises:
        UserError: if the states cannot be found.
    """

    def __init__(
        self,
        model: nn.Module,
        receive: Receive,
        modules: Sequence[str | nn.Module] | None = None,
        receive_gradient: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        forget_compiled_code()
        layers = find_layers(model) if modules is None else layers_from_modules(model, modules)
        if not layers.modules:
            raise UserError(
                f"{type(layers.base_model).__name__} has no modules that output its hidden states; name others whose "
                "outputs are to be watched: modules=[...]"
            )
        self._receive, self._receive_gradient = receive, receive_gradient
        self._layers = layers
        self._norm = find_final_norm(layers.base_model, model, needs_states=False) if modules is None else None
        numbers = [number for number in layers.names if number <= layers.num_layers or self._norm is not None]
        self.base_model = find_wrapped(layers.base_model, ("torch.",)) or layers.base_model
        self._chain = _find_callers(model, self.base_model)
        self.names = [layers.names[number] for number in numbers]
        if any(not _is_transformers_model(module) for module in self._chain) and modules is None:
            self.names.append(POOLED)
        self._is_armed = False
        self._reads_without_gradients = False
        self._has_run_compiled = False  # the hooks then stay, because later graphs need them, too
        self.num_passes, self.failure = 0, ""
        self._open_calls: list[int] = []  # indices in the chain of the modules that are being called
        self._pass: PassArguments | None = None
        self._seen: set[str] = set()
        self._num_layers_called = 0
        self._flag = torch.zeros(1, device="cpu")
        self._id = next(_ids)
        _watchers[self._id] = self
        self._handles: list[Any] = []

    def arm(self, is_due: bool, keeps_hooks: bool = False) -> None:
        """Start or stop reading passes; in eager mode, register or remove the hooks.

        With `keeps_hooks`, the hooks stay until the next call, for a model that is compiled before it.
        """
        self._end_pass()
        self.num_passes, self.failure, self._is_armed = 0, "", is_due
        if is_due and not self._handles:
            self._register()
        elif not (is_due or keeps_hooks or self._has_run_compiled):
            self._remove()

    @contextmanager
    def watch_probe(self) -> Iterator[None]:
        """Return a context that reads all passes, also without gradients; compiled models run in eager mode."""
        was_armed, num_passes, previous_failure = self._is_armed, self.num_passes, self.failure
        self.arm(True)
        self._reads_without_gradients = True
        try:
            with uncompiled():
                yield
        finally:
            self._reads_without_gradients = False
            self.arm(was_armed)
            self.num_passes, self.failure = num_passes, previous_failure

    def close(self) -> None:
        """Remove the hooks, and ignore the operators of compiled graphs."""
        self._is_armed = self._has_run_compiled = False
        self._remove()
        _watchers.pop(self._id, None)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, to which the hooks of a copied model belong: it reads nothing."""
        idle: dict[str, Any] = {"_is_armed": False, "_pass": None, "_handles": [], "_id": -1}
        return {"names": self.names, "_flag": self._flag, **idle}

    def _register(self) -> None:
        modules, add = self._layers.modules, self._handles.append
        for index, module in enumerate(self._chain):
            begin = partial(self._begin_call, index, read_argument_names(module))
            add(module.register_forward_pre_hook(begin, with_kwargs=True))
        if 0 in self._layers.names:
            add(modules[0].register_forward_pre_hook(self._read_input, with_kwargs=True))
        for number, module in enumerate(modules, start=1):
            add(module.register_forward_hook(partial(self._read_output, _OUTPUT, number)))
        if self._norm is not None:
            add(self._norm.register_forward_hook(partial(self._read_output, _NORM, self._layers.num_layers + 1)))
        for index, module in enumerate(self._chain):
            add(module.register_forward_hook(partial(self._end_call, index)))

    # The hooks. torch.compile traces them with the model, and turns what they read of the watcher into constants.
    def _begin_call(
        self, index: int, names: Sequence[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not (torch.compiler.is_compiling() or self._is_armed):
            return
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if args and isinstance(args[0], Mapping):  # the features of sentence-transformers
            arguments = {**args[0], **arguments}
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        if not torch.compiler.is_compiling():
            self._open_call(index, mask, positions, torch.is_grad_enabled())
            return
        if isinstance(mask, Tensor):
            self._add_operator(_MASK, mask)
        else:
            self._add_operator(_BEGIN, self._flag)
        if isinstance(positions, Tensor):
            self._add_operator(_POSITIONS, positions)

    def _read_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = args[0] if args else kwargs.get("hidden_states")
        if torch.compiler.is_compiling():
            self._add_operator(_INPUT, state)
        else:
            self._take(self.names[0], state)

    def _read_output(self, event: int, number: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():  # the number would give each layer a graph
            self._add_operator(event, find_state(output))
        elif self._pass is not None:
            self._num_layers_called += event == _OUTPUT
            if event == _OUTPUT and self._layers.is_shared:
                number = self._num_layers_called
            self._take(self._layers.names[number], find_state(output))

    def _end_call(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            self._add_operator(_END, self._flag)
        elif self._is_armed:
            if isinstance(output, Mapping) and "sentence_embedding" in output:
                self._take(POOLED, output["sentence_embedding"])
            self._close_call(index)

    def _add_operator(self, event: int, value: Any) -> None:
        """Put the operator into the graph that is being traced, unless the graph is for passes without gradients."""
        if torch.is_grad_enabled():
            torch.ops.istar.watch(value.detach(), self._flag, self._id, event)

    def receive_from_graph(self, event: int, value: Tensor) -> None:
        """Handle an event that the operator of a compiled graph reports."""
        self._has_run_compiled = True
        if not self._is_armed:
            return
        if event in (_MASK, _BEGIN):
            index = self._open_calls[-1] + 1 if self._open_calls else 0
            self._open_call(index, value if event == _MASK else None, None, has_gradients=True)
        elif event == _END:
            self._check_number_of_layers()
            self._close_call(self._open_calls[-1] if self._open_calls else 0)
        elif self._pass is None:
            return
        elif event == _POSITIONS:
            self._pass = self._pass._replace(position_ids=value)
        elif event == _INPUT:
            self._take(self.names[0], value)
        elif event == _NORM:
            self._take(self._layers.names[self._layers.num_layers + 1], value)
        else:
            self._num_layers_called += 1
            if self._num_layers_called <= self._layers.num_layers:
                self._take(self._layers.names[self._num_layers_called], value)

    def _open_call(self, index: int, mask: Any, positions: Any, has_gradients: bool) -> None:
        """Begin the call of a module of the chain. The call of the outermost module begins a pass."""
        self._close_call(index)  # a call that raised an error is still open
        if not self._open_calls and (has_gradients or self._reads_without_gradients):
            self._pass = PassArguments(self.num_passes, None, None)
            self.num_passes += 1
        self._open_calls.append(index)
        if self._pass is not None and self._pass.attention_mask is None:
            mask, positions = (value if isinstance(value, Tensor) else None for value in (mask, positions))
            self._pass = PassArguments(self._pass.number, mask, positions)

    def _close_call(self, index: int) -> None:
        self._open_calls = [opened for opened in self._open_calls if opened < index]
        if not self._open_calls:
            self._end_pass()

    def _end_pass(self) -> None:
        self._open_calls, self._pass, self._seen, self._num_layers_called = [], None, set(), 0

    def _take(self, name: str, state: Any) -> None:
        """Give a state to the receiver, unless its name was seen before: gradient checkpointing calls layers again."""
        if self._pass is None or name in self._seen:
            return
        self._seen.add(name)
        if not isinstance(state, Tensor) or not state.is_floating_point():
            kind = f"tensor of {state.dtype}" if isinstance(state, Tensor) else type(state).__name__
            self.failure = f"{name} returns a {kind}; expected a floating tensor, or one first in a tuple"
            return
        if self._receive_gradient is not None and state.requires_grad:
            state.register_hook(partial(self._receive_gradient, name))
        try:
            self._receive(name, state.detach(), self._pass)
        except Exception as error:  # a training must not stop because it is watched
            self.failure = self.failure or shorten(error) or type(error).__name__

    def _check_number_of_layers(self) -> None:
        if self._pass is not None and self._num_layers_called not in (0, self._layers.num_layers):
            self.failure = (
                f"a compiled pass called {self._num_layers_called} of {self._layers.num_layers} layers, so that their "
                "numbers are unknown; expected a call of each: train without layerdrop, or without torch.compile"
            )


def _find_callers(model: nn.Module, base_model: nn.Module) -> list[nn.Module]:
    """Return the modules that get hooks at the beginning and the end of a pass, from the outermost to the base model.

    sentence-transformers and PEFT call the base model's `forward`, which skips its hooks. The heads of transformers and
    torch's wrappers, such as a compiled module, call the module itself.
    """
    wrappers = [
        module
        for module in model.modules()
        if module is not base_model
        and any(part is base_model for part in module.modules())
        and not _is_transformers_model(module)
        and not type(module).__module__.startswith("torch.")
    ]
    return [*wrappers, base_model]


def _is_transformers_model(module: nn.Module) -> bool:
    return hasattr(type(module), "base_model_prefix")
