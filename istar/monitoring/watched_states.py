"""Hooks that give the states of the user's training passes to a receiver, also from compiled models.

In eager mode the hooks exist only while the next optimizer step is to be read. `torch.compile` must find them when it
traces the model: they then put an operator into the graph, which looks at run time whether the pass is to be read. The
graph is the same for each step. It has no number of a layer, so that layers that are compiled one by one share a graph;
the operator counts the calls instead.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.hidden_states.call_arguments import find_wrapped, read_argument_names
from istar.hidden_states.model_layers import find_final_norm, find_layers, layers_from_modules
from istar.hidden_states.model_modes import uncompiled
from istar.hidden_states.reader import find_state
from istar.runs.names import POOLED

_MASK, _BEGIN, _POSITIONS, _INPUT, _OUTPUT, _NORM, _END = range(7)
"""Events of a pass: what a hook or the operator reports. A pass begins with its mask, or without one."""


class PassArguments(NamedTuple):
    """What a model was called with."""

    number: int  # of the pass since the last optimizer step
    attention_mask: Tensor | None
    position_ids: Tensor | None


Receive = Callable[[str, Tensor, PassArguments], None]
"""Function of the name of a state, the state and the arguments of its pass."""

_watchers: WeakValueDictionary[int, "StateWatcher"] = WeakValueDictionary()
_ids = itertools.count()
_LIBRARY = torch.library.Library("istar", "DEF")
# The operator would be left out of a graph if it did not change an argument: the flag, which nobody reads.
_LIBRARY.define("watch(Tensor value, Tensor(a!) flag, int watcher, int event) -> ()")


def _watch(value: Tensor, flag: Tensor, watcher: int, event: int) -> None:
    if watcher in _watchers:
        _watchers[watcher].receive_from_graph(event, value)


_LIBRARY.impl("watch", _watch, "CompositeExplicitAutograd")
torch.library.register_fake("istar::watch", lambda value, flag, watcher, event: None, lib=_LIBRARY)


class StateWatcher:
    """Watches the states of a model's passes with gradients.

    Args:
        model: a transformers model of text, bare or inside of other modules, also compiled. With `modules`, any module.
        receive: called with each state of a pass that is read, without its graph. Must not raise.
        modules: names, patterns or modules, see `istar.hidden_states.model_layers.select_modules`. In a compiled model
            they must be in the order of their calls.
        receive_gradient: called with the name and the gradient of each state of a pass that is read, in eager mode.

    Attributes:
        base_model: the module whose calls are passes.
        names: names of the states, from the input to the output. `pooled` is the last one for models that may return
            sentence embeddings.
        is_armed: whether passes are read.
        reads_without_gradients: whether passes without gradients are read, too, as those of a probe.
        is_compiled: whether a compiled graph with the operator has run. The hooks then stay.
        num_passes: number of passes with gradients since `arm`, if it was armed.
        failure: why a pass could not be read; "" if all could.

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
        self._may_skip_layers = any("layerdrop" in vars(module) for module in self.base_model.modules())
        self.is_armed = self.is_compiled = self.reads_without_gradients = False
        self.num_passes, self.failure = 0, ""
        self._open_calls: list[int] = []  # places in the chain of the modules that are being called
        self._pass: PassArguments | None = None
        self._seen: set[str] = set()
        self._num_layers_called = 0
        self._flag = torch.zeros(1, device="cpu")
        self._id = next(_ids)
        _watchers[self._id] = self
        self._handles: list[Any] = []
        self._register()

    def arm(self, is_due: bool, keeps_hooks: bool = False) -> None:
        """Read the passes from now on, or stop reading; in eager mode, register or remove the hooks.

        With `keeps_hooks`, hooks stay until the next call, so that a model that is compiled after this one has them.
        """
        self._end_pass()
        self.num_passes, self.failure, self.is_armed = 0, "", is_due
        if is_due and not self._handles:
            self._register()
        elif not (is_due or keeps_hooks or self.is_compiled):
            self.remove()

    @contextmanager
    def watch_probe(self) -> Iterator[None]:
        """Read all passes within the context, also without gradients and of compiled models."""
        previous = self.is_armed, self.num_passes, self.failure
        self.arm(True)
        self.reads_without_gradients = True
        try:
            with uncompiled():
                yield
        finally:
            self.reads_without_gradients = False
            failure = self.failure
            self.arm(previous[0])
            self.num_passes, self.failure = previous[1], previous[2] or failure

    def close(self) -> None:
        """Remove the hooks, and ignore the operators of compiled graphs."""
        self.is_armed = self.is_compiled = False
        self.remove()
        _watchers.pop(self._id, None)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, to which the hooks of a copied model belong: it reads nothing."""
        idle: dict[str, Any] = {"is_armed": False, "is_compiled": False, "_pass": None, "_handles": [], "_id": -1}
        return {"names": self.names, "_flag": self._flag, **idle}

    def _register(self) -> None:
        handles = self._handles
        for place, module in enumerate(self._chain):
            begin = partial(self._begin_call, place, read_argument_names(module))
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        modules = self._layers.modules
        if 0 in self._layers.names:
            handles.append(modules[0].register_forward_pre_hook(self._read_input, with_kwargs=True))
        handles += [
            module.register_forward_hook(partial(self._read_output, number))
            for number, module in enumerate(modules, start=1)
        ]
        if self._norm is not None:
            handles.append(self._norm.register_forward_hook(self._read_norm))
        handles += [
            module.register_forward_hook(partial(self._end_call, place)) for place, module in enumerate(self._chain)
        ]

    # torch.compile traces the hooks with the model. What they read of the watcher while it does becomes a constant.
    def _report(self, event: int, value: Tensor) -> None:
        torch.ops.istar.watch(value.detach(), self._flag, self._id, event)

    def _begin_call(
        self, place: int, names: Sequence[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not (torch.compiler.is_compiling() or self.is_armed):
            return
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if args and isinstance(args[0], Mapping):  # the features of sentence-transformers
            arguments = {**args[0], **arguments}
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        if not torch.compiler.is_compiling():
            self._open_call(place, mask, positions, torch.is_grad_enabled())
        elif torch.is_grad_enabled():
            if isinstance(mask, Tensor):
                self._report(_MASK, mask)
            else:
                self._report(_BEGIN, self._flag)
            if isinstance(positions, Tensor):
                self._report(_POSITIONS, positions)

    def _read_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self._report(_INPUT, args[0] if args else kwargs["hidden_states"])
        elif self._pass is not None:
            self._take(self.names[0], args[0] if args else kwargs["hidden_states"])

    def _read_output(self, number: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self._report(_OUTPUT, find_state(output))
        elif self._pass is not None:
            self._num_layers_called += 1
            number = self._num_layers_called if self._layers.is_shared else number
            self._take(self._layers.names[number], find_state(output))

    def _read_norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self._report(_NORM, find_state(output))
        elif self._pass is not None:
            self._take(self._layers.names[self._layers.num_layers + 1], find_state(output))

    def _end_call(self, place: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self._report(_END, self._flag)
        elif self.is_armed:
            if isinstance(output, Mapping) and "sentence_embedding" in output:
                self._take(POOLED, output["sentence_embedding"])
            self._close_call(place)

    def receive_from_graph(self, event: int, value: Tensor) -> None:
        """Handle an event of the operator. The first one keeps the hooks in the model, as later graphs need them."""
        self.is_compiled = True
        if not self.is_armed:
            return
        if event in (_MASK, _BEGIN):
            place = self._open_calls[-1] + 1 if self._open_calls else 0
            self._open_call(place, value if event == _MASK else None, None, has_gradients=True)
        elif event == _END:
            self._check_number_of_layers()
            self._close_call(self._open_calls[-1] if self._open_calls else 0)
        elif self._pass is None:
            return
        elif event == _POSITIONS:
            self._pass = self._pass._replace(position_ids=value)
        elif event == _NORM:
            self._take(self._layers.names[self._layers.num_layers + 1], value)
        else:
            self._num_layers_called += event == _OUTPUT
            number = self._num_layers_called if event == _OUTPUT else 0
            if number <= self._layers.num_layers:
                self._take(self._layers.names[number], value)

    def _open_call(self, place: int, mask: Any, positions: Any, has_gradients: bool) -> None:
        """Begin the call of a module of the chain, and a pass with the outermost one."""
        # A call that failed has not ended.
        self._open_calls = [opened for opened in self._open_calls if opened < place]
        if not self._open_calls:
            self._end_pass()
            if has_gradients or self.reads_without_gradients:
                self._pass = PassArguments(self.num_passes, None, None)
                self.num_passes += 1
        self._open_calls.append(place)
        if self._pass is not None and self._pass.attention_mask is None:
            mask, positions = (value if isinstance(value, Tensor) else None for value in (mask, positions))
            self._pass = PassArguments(self._pass.number, mask, positions)

    def _close_call(self, place: int) -> None:
        self._open_calls = [opened for opened in self._open_calls if opened < place]
        if not self._open_calls:
            self._end_pass()

    def _end_pass(self) -> None:
        self._open_calls, self._pass, self._seen, self._num_layers_called = [], None, set(), 0

    def _take(self, name: str, state: Any) -> None:
        """Give a state to the receiver. Only the first one of a name counts: checkpoints call layers again."""
        if self._pass is None or name in self._seen:
            return
        self._seen.add(name)
        if not isinstance(state, Tensor) or not state.is_floating_point():
            kind = f"tensor of {state.dtype}" if isinstance(state, Tensor) else type(state).__name__
            self.failure = f"{name} returns a {kind}; expected a floating tensor, or one first in a tuple"
            return
        if self._receive_gradient is not None and state.requires_grad:
            state.register_hook(partial(self._receive_gradient, name))
        self._receive(name, state.detach(), self._pass)

    def _check_number_of_layers(self) -> None:
        if self._pass is not None and self._num_layers_called not in (0, self._layers.num_layers):
            self.failure = (
                f"a compiled pass called {self._num_layers_called} of {self._layers.num_layers} layers, so that their "
                "numbers are unknown; expected a call of each: train without layerdrop, or without torch.compile"
            )


def _find_callers(model: nn.Module, base_model: nn.Module) -> list[nn.Module]:
    """Return the modules whose calls are passes of the base model, from the outermost one to the base model.

    sentence-transformers and PEFT call the base model's `forward`, which skips its hooks. The heads of transformers do
    not, and torch's wrappers, such as a compiled module, call what they wrap.
    """
    outer = [module for module in model.modules() if any(part is base_model for part in module.modules())]
    wrappers = [
        module
        for module in outer
        if module is not base_model
        and not _is_transformers_model(module)
        and not type(module).__module__.startswith("torch.")
    ]
    return [*wrappers, base_model]


def _is_transformers_model(module: nn.Module) -> bool:
    return hasattr(type(module), "base_model_prefix")
