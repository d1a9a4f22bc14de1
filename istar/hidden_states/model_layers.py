"""Detection of the modules that compute a model's hidden states.

Most models of text declare their layers. The others are tried on a few tokens, and models of images and sound on a
batch of the caller: a module is a layer if the model returns its output as a hidden state. Mamba and RWKV, for example,
return the outputs of all layers and then of the final norm, but no embeddings.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from istar.errors import UserError, check_type, did_you_mean, shorten
from istar.hidden_states.call_arguments import find_wrapped, read_argument_names, request_states
from istar.hidden_states.model_modes import eval_mode, preserve_rng_states, uncompiled
from istar.hidden_states.offloading import find_input_device, hold_weights
from istar.hidden_states.sharding import is_sharded_module, reshard
from istar.measures.norms import norm_parameters

_TRIAL_TOKENS = 5
"""Number of tokens of a trial. It is odd, so that a layer is recognized if its input is padded to full windows."""


@dataclass(frozen=True)
class ModelLayers:
    """The modules that compute a model's hidden states.

    Attributes:
        base_model: the module that computes all hidden states in its forward pass: a transformers model without its
            head, or any model that the caller passed together with its layer modules.
        modules: modules that output the hidden states, in the model's order. If empty, no module returns them
            unchanged, and the model must be called with `output_hidden_states=True`.
        names: names of the states by number; see `name_states`. Modules from the caller have their own names, from 1.
        num_layers: L, the number of layers.
        ends_with_output: whether the last hidden state that the model returns equals its first output, which comes from
            the final norm, or from layer L if there is no norm.
        is_transformers: whether the base model is a transformers model.
        returns_embeddings: whether the first returned hidden state is the embedding output.
        norm: the final norm, if `find_layers_in_call` found one; otherwise None.
    """

    base_model: nn.Module
    modules: tuple[nn.Module, ...]
    names: Mapping[int, str]
    num_layers: int
    ends_with_output: bool
    is_transformers: bool = True
    returns_embeddings: bool = True
    norm: nn.Module | None = None

    @property
    def is_shared(self) -> bool:
        """Whether one module computes several layers, as in ALBERT."""
        return 0 < len(self.modules) < self.num_layers


class Call(NamedTuple):
    """A call of a module in a trial."""

    module: nn.Module
    input: Tensor | None  # first argument, if it is a tensor
    output: Tensor | None  # output or its first element, if it is a tensor


class TrialPass(NamedTuple):
    """Result of a model for a few tokens or a batch of the caller."""

    states: tuple[Tensor, ...]  # hidden states that the model returns, usually `(batch, places, d)` each
    last_state: Tensor  # first output of the model
    calls: list[Call]  # calls of blocks, and of all modules outside of lists of blocks, ordered by their end


def find_layers(model: nn.Module) -> ModelLayers:
    """Return the layers of a transformers model, which may be inside another module.

    A text model that does not declare its layers is tried on a few tokens.

    Raises:
        UserError: as `find_base_model` and `run_trial`, or if the model does not return the states of all layers.
    """
    base_model = find_base_model(model)
    modules = declared_layers(base_model)
    config: Any = base_model.config
    num_layers = max(int(getattr(config.get_text_config(), "num_hidden_layers", 0)), len(modules))
    if not modules and _reads_text(base_model):
        return _find_layers_by_trial(base_model, run_trial(base_model, model), num_layers)
    if 0 < len(modules) < num_layers:
        # A module may compute several layers, as in ALBERT, or the config may count an encoder's layers, as for BART.
        num_layers = len(run_trial(base_model, model).states) - 1
    ends_with_output = len(modules) > 0 and getattr(config, "tie_last_hidden_states", None) is not False
    return ModelLayers(base_model, tuple(modules), name_states(num_layers), num_layers, ends_with_output)


@torch.no_grad()
def find_layers_in_call(model: nn.Module, call: Callable[[], object]) -> ModelLayers:
    """Return the layers and the final norm of a transformers model of any modality, from one pass.

    `call` runs the model, or a module around it, on inputs of the caller. The layers are the blocks of one list whose
    outputs are the hidden states that the model returns. The final norm is the first norm outside of such lists that
    takes the output of the last block: models of images return their last hidden state before the norm.

    Raises:
        UserError: as `find_base_model`, if the model is not called once or returns no hidden states, or if no modules
            output them.
    """
    head_model, base_model = find_head_model(model), find_base_model(model)
    trial = _watch_call(base_model, head_model, call)
    config: Any = base_model.config
    num_layers = int(getattr(config.get_text_config(), "num_hidden_layers", 0))
    layers = _find_layers_by_trial(base_model, trial, num_layers)
    last_output = next((call.output for call in reversed(trial.calls) if call.module in layers.modules), None)
    first_calls = {call.module: call for call in reversed(trial.calls)}

    def is_final(call: Call) -> bool:
        if last_output is None:  # without modules for layers, only the output of the norm is known
            return _are_equal(call.output, trial.last_state)
        # Heads of masked language models end with a norm after a dense layer. BLIP also normalizes a pooled state.
        can_be_read = next(call.module.children(), None) is None and first_calls[call.module] is call
        return can_be_read and last_output.dim() == 3 and _are_equal(call.input, last_output)

    return replace(layers, norm=_find_norm(head_model, trial, is_final))


def _find_layers_by_trial(base_model: nn.Module, trial: TrialPass, num_layers: int) -> ModelLayers:
    """Return the layers of a base model that does not declare them; the config says that there are `num_layers`."""
    states, last_state, calls = trial
    lists = [module for module in base_model.modules() if isinstance(module, nn.ModuleList)]
    ends_with_output = _are_equal(states[-1], last_state)
    for blocks in lists:
        block_calls = [call for call in calls if call.module in set(blocks)]
        if len(block_calls) == len(states) - 1:
            outputs = [call.output for call in block_calls]
            starts_with_layer = ends_with_output and all(map(_are_equal, outputs, states))
            starts_with_input = _are_equal(block_calls[0].input, states[0])
            # The last state may be the output of a norm after the last layer.
            ends_known = ends_with_output or _are_equal(outputs[-1], states[-1])
            if starts_with_layer or (
                starts_with_input and ends_known and all(map(_are_equal, outputs[:-1], states[1:]))
            ):
                called = tuple(dict.fromkeys(call.module for call in block_calls))
                names = name_states(len(outputs))
                return ModelLayers(
                    base_model, called, names, len(outputs), ends_with_output, True, not starts_with_layer
                )
    # No module returns these states unchanged: XLNet, for example, orders the dimensions differently.
    in_lists = {block for blocks in lists for block in blocks}
    starts_with_layer = any(
        call.output is not None and torch.isin(states[0], call.output.to(states[0].device)).all()
        for call in calls
        if call.module in in_lists
    )
    if starts_with_layer or not ends_with_output or len(states) != num_layers + 1:
        raise UserError(
            f"{type(base_model).__name__} returns {len(states)} hidden states; expected the embeddings and the outputs "
            f"of {num_layers} layers: choose another model, or name the layers with modules=[...]"
        )
    return ModelLayers(base_model, (), name_states(num_layers), num_layers, ends_with_output=True)


def name_states(num_layers: int) -> dict[int, str]:
    """Return the names of the states of a transformers model by number; the norm's output has number L + 1."""
    layers = {number: f"layer_{number}" for number in range(1, num_layers + 1)}
    return {0: "embeddings", **layers, num_layers + 1: "final_norm"}


def layers_from_modules(model: nn.Module, wanted: Sequence[str | nn.Module]) -> ModelLayers:
    """Return the wanted modules of any model as its layers 1 to L; see `select_modules`.

    Raises:
        UserError: for a module that is repeated, never called or not part of the model, or a name or pattern without a
            module.
    """
    module_names = {module: name for name, module in name_modules(model).items()}
    modules = select_modules(model, wanted)
    for module in modules:
        if module not in module_names:
            raise UserError(
                f"a {type(module).__name__} of modules is not part of {type(model).__name__}; expected its modules, or "
                "their names"
            )
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise UserError(
                f"a {type(module).__name__} is not called and has no outputs; name its modules, such as "
                f'"{module_names[module]}.*"'
            )
    if len(set(modules)) < len(modules):
        raise UserError("a module is named twice among the given modules; its outputs would count twice")
    # Unwrap DDP, because its `forward` does not name the arguments of the model, such as `attention_mask`.
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    # The model itself has the name "".
    names = {number: module_names[module] or type(module).__name__ for number, module in enumerate(modules, start=1)}
    return ModelLayers(unwrapped, tuple(modules), names, len(modules), ends_with_output=False, is_transformers=False)


def select_modules(model: nn.Module, wanted: Sequence[str | nn.Module]) -> list[nn.Module]:
    """Return the modules that are wanted of a model: modules as they are, and those with a name or a pattern.

    In a pattern, `*` stands for a part of a dotted name: "blocks.*" are the children of `blocks`, in their order.

    >>> [type(module).__name__ for module in select_modules(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["*"])]
    ['Linear', 'ReLU']

    Raises:
        UserError: without a module of a name or pattern, or without any module.
    """
    named_modules = name_modules(model)
    modules: list[nn.Module] = []
    for item in [wanted] if isinstance(wanted, str) or not isinstance(wanted, Iterable) else wanted:
        if isinstance(item, nn.Module):
            modules.append(item)
            continue
        check_type("one of modules", item, str, '"blocks.*", or a module')
        pattern = re.compile(re.escape(item).replace(r"\*", "[^.]*"))
        found = [module for name, module in named_modules.items() if name and pattern.fullmatch(name)]
        if not found:
            known = [*dict.fromkeys(re.sub(r"(?<=\.)\d+", "*", name) for name in named_modules), *named_modules]
            raise UserError(
                f"no module of {type(model).__name__} is named {item}{did_you_mean(item, known)}; expected a "
                'name of model.named_modules(), or a pattern such as "blocks.*"'
            )
        modules += found
    if not modules:
        raise UserError("modules is empty; expected names or modules whose outputs are the hidden states")
    return modules


def name_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name; torch's wrappers, such as DDP or a compiled module, add no prefix."""
    check_type("model", model, nn.Module, "torch.nn.Linear(2, 2)")
    wrapped = find_wrapped(model, ("torch.",))
    return dict(model.named_modules()) if wrapped is None else name_modules(wrapped)


def find_head_model(model: nn.Module) -> nn.Module:
    """Return the outermost transformers model within a module, with its head if it has one.

    Raises:
        UserError: without a transformers model, with several that are not inside one another, or if it is inside of
            `nn.DataParallel`.
    """
    check_type("model", model, nn.Module, "AutoModel.from_pretrained(name)")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UserError("nn.DataParallel runs copies of the model, which hooks cannot follow; use DDP")
    # All classes of transformers models have this attribute.
    model_by_name = {
        name: module for name, module in model.named_modules() if hasattr(type(module), "base_model_prefix")
    }
    nested = {part for module in model_by_name.values() for part in module.modules() if part is not module}
    names = [name for name, module in model_by_name.items() if module not in nested]
    if not names:
        raise UserError(
            f"there is no transformers model in {type(model).__name__}; name the modules whose outputs are the hidden "
            "states: modules=[...]"
        )
    if len(names) > 1:
        raise UserError(
            f"{type(model).__name__} has {len(names)} transformers models, {', '.join(names)}; expected 1: choose "
            f"one of them, for example model.{names[0]}"
        )
    return model_by_name[names[0]]


def find_base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model within a module, without its head.

    If models are nested, like the decoder inside OPT's model, the innermost is returned, unless only the outer one
    reads text, as in GIT.

    Raises:
        UserError: as `find_head_model`, or if the model is an encoder-decoder.
    """
    head_model: Any = find_head_model(model)
    base_model: Any = head_model.base_model
    has_head = head_model.get_output_embeddings() is not None
    if base_model is head_model and has_head and not head_model.config.is_encoder_decoder:
        base_model = head_model.get_decoder()  # classes of Llama4 have another name for it than they declare
    while True:
        nested_models = _nested_models(base_model)
        if len(nested_models) != 1:
            break
        [nested_model] = nested_models.values()
        if _reads_text(base_model) and not _reads_text(nested_model):
            break
        base_model = nested_model
    is_encoder_decoder = getattr(base_model.config, "is_encoder_decoder", False)
    if is_encoder_decoder and hasattr(base_model, "encoder") and hasattr(base_model, "decoder"):
        raise UserError(
            f"{type(head_model).__name__} is an encoder-decoder, which has two stacks of hidden states; choose one of "
            "them, for example model.get_encoder()"
        )
    return base_model


def _nested_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module that are transformers models, by name."""
    return {name: child for name, child in model.named_children() if hasattr(type(child), "base_model_prefix")}


def declared_layers(base_model: nn.Module) -> list[nn.Module]:
    """Return the modules declared as the source of a transformers model's hidden states, or an empty list."""
    # The declaration is a class of modules, or an `OutputRecorder` of transformers, which names such a class and may
    # restrict it to one of its outputs (`index`) or to modules of a certain name (`layer_name`).
    declaration = getattr(base_model, "can_record_outputs", {}).get("hidden_states")
    layer_class = getattr(declaration, "target_class", declaration)
    is_restricted = getattr(declaration, "index", 0) != 0 or getattr(declaration, "layer_name", None) is not None
    # Only text models are certain to return the output of the final norm as the last hidden state.
    if not isinstance(layer_class, type) or is_restricted or not _reads_text(base_model):
        return []
    return [module for module in base_model.modules() if isinstance(module, layer_class)]


def _reads_text(base_model: nn.Module) -> bool:
    return base_model.main_input_name == "input_ids"


@torch.no_grad()
def run_trial(base_model: nn.Module, model: nn.Module, needs_states: bool = True) -> TrialPass:
    """Run a base model on a few tokens in eval mode; training modes and random numbers stay unchanged.

    `model` is the base model or contains it. If it is sharded, it is called instead of the base model. If
    `needs_states` is False, the hidden states are not requested, and the result has none.

    Raises:
        UserError: if the model cannot be called with token ids alone, or does not return one state per token and layer.
    """
    name, device = type(base_model).__name__, find_input_device(base_model)
    if not _reads_text(base_model) or device.type == "meta":
        raise UserError(f"{name} cannot be tried on token ids; expected a model of text that has weights")
    token_ids = make_trial_ids(base_model)[None].to(device)

    def call() -> None:
        # The base model's own hooks, such as another penalty's, must not see the trial.
        called: Any = model if model is not base_model and is_sharded_module(model) else base_model.forward
        called(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), use_cache=False)

    try:
        trial = _watch_call(base_model, base_model, call, needs_states)
    except Exception as error:  # the types depend on the architecture
        raise UserError(f"{name} cannot be tried on token ids: {shorten(error)}") from error
    finally:
        reshard(model)
    shapes = {tuple(state.shape[:-1]) for state in trial.states}
    if needs_states and shapes != {tuple(token_ids.shape)}:
        raise UserError(
            f"{name} returns hidden states of {shorten(sorted(shapes))} vectors for {_TRIAL_TOKENS} tokens; expected "
            "one vector for each token: choose another model"
        )
    return trial


def _watch_call(
    base_model: nn.Module, watched_model: nn.Module, call: Callable[[], object], needs_states: bool = True
) -> TrialPass:
    """Run `call` in eval mode; return the states of the base model, and the calls within the watched model."""
    name, device = type(base_model).__name__, find_input_device(base_model)
    with (
        preserve_rng_states(device), eval_mode(watched_model), uncompiled(),
        _record_calls(watched_model) as calls, _record_outputs(base_model, needs_states) as outputs,
        warnings.catch_warnings(),
    ):  # fmt: skip
        # Reentrant checkpoints say this, as the trial needs no gradients.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        call()
    if len(outputs) != 1:
        raise UserError(
            f"{name} was called {len(outputs)} times for a batch; expected one call: name the layers with modules=[...]"
        )
    if not needs_states:
        return TrialPass((), outputs[0][0], calls)
    states = getattr(outputs[0], "hidden_states", None)
    if not states or not all(isinstance(state, Tensor) for state in states):
        parts = "".join(f"model.{part} or " for part in _nested_models(base_model))
        raise UserError(
            f"{name} returns no hidden states; measure {parts}another part of it that does, or name the modules whose "
            "outputs are the hidden states: modules=[...]"
        )
    return TrialPass(states, outputs[0][0], calls)


@contextmanager
def _record_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Record the calls of blocks in lists, and of modules outside of lists, which are all that a trial looks at."""
    calls: list[Call] = []

    def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        output = output[0] if isinstance(output, tuple) and output else output
        calls.append(Call(module, *(value if isinstance(value, Tensor) else None for value in (first, output))))

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = {block for modules in lists for block in modules}
    in_blocks = {part for block in blocks for part in block.modules()} - blocks
    with ExitStack() as hooks:
        for module in model.modules():
            if module not in in_blocks:
                hooks.enter_context(module.register_forward_hook(record_call, with_kwargs=True))
        yield calls


@contextmanager
def _record_outputs(base_model: Any, needs_states: bool) -> Iterator[list[Any]]:
    """Record the outputs of each call of a base model, with its hidden states if they are needed.

    PEFT and sentence-transformers call `forward` itself, which skips hooks.
    """
    outputs: list[Any] = []
    forward, names = base_model.forward, read_argument_names(base_model)
    has_own_forward = "forward" in vars(base_model)  # as with the hooks of accelerate

    @functools.wraps(forward)
    def record_output(*args: Any, **kwargs: Any) -> Any:
        other_args, named = request_states(names, args, kwargs) if needs_states else (args, kwargs)
        outputs.append(forward(*other_args, **named))
        return outputs[-1]

    base_model.forward = record_output
    try:
        yield outputs
    finally:
        if has_own_forward:
            base_model.forward = forward
        else:
            del base_model.forward


def find_final_norm(base_model: nn.Module, model: nn.Module, needs_states: bool = True) -> nn.Module | None:
    """Return the norm outside the layers that outputs the last hidden state, or None; the arguments are `run_trial`'s.

    Without `needs_states`, it is not checked that the model returns a state for each token and layer, and transformers
    does not add its own hooks, which it keeps in models that were asked for their hidden states.
    """
    trial = run_trial(base_model, model, needs_states)
    return _find_norm(base_model, trial, lambda call: _are_equal(call.output, trial.last_state))


def _find_norm(model: nn.Module, trial: TrialPass, is_final: Callable[[Call], bool]) -> nn.Module | None:
    """Return the first norm outside the layers with a call that is final."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    in_layers = {part for module in lists for part in module.modules()}
    for call in trial.calls:
        if call.module in in_layers or call.output is None or not is_final(call):
            continue
        # OPT-350m ends with a projection to the width of the embeddings, not a norm.
        with hold_weights(call.module):
            if norm_parameters(call.module, call.output.shape[-1]) is not None:
                return call.module
    return None


def make_trial_ids(base_model: Any) -> Tensor:
    """Return the ids of a few tokens that are not padding."""
    padding_id = getattr(base_model.config.get_text_config(), "pad_token_id", None)
    return torch.tensor([id_ for id_ in range(_TRIAL_TOKENS + 1) if id_ != padding_id][:_TRIAL_TOKENS], device="cpu")


def _are_equal(tensor: Tensor | None, state: Tensor) -> bool:
    if tensor is None or (tensor.shape, tensor.dtype) != (state.shape, state.dtype):
        return False
    return torch.allclose(tensor.to(state.device), state, rtol=0, atol=0, equal_nan=True)
