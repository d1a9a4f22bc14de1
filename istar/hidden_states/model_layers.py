"""Detection of the modules that compute a model's hidden states.

Most models of transformers declare their layers. The others are tried on a few tokens: a module is a layer if the model
returns its output as a hidden state. Mamba and RWKV, for example, return the outputs of all layers and then of the
final norm, but no embeddings.
"""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from istar.errors import UserError, shorten
from istar.hidden_states.offloading import find_input_device, hold_weights
from istar.hidden_states.sharding import is_sharded_module
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
    """

    base_model: nn.Module
    modules: tuple[nn.Module, ...]
    names: Mapping[int, str]
    num_layers: int
    ends_with_output: bool
    is_transformers: bool = True
    returns_embeddings: bool = True

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
    """Result of a model for a few tokens."""

    states: tuple[Tensor, ...]  # hidden states that the model returns, `(1, tokens, d)` each
    last_state: Tensor  # first output of the model
    calls: list[Call]  # calls of all modules, ordered by their end


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


def _find_layers_by_trial(base_model: nn.Module, trial: TrialPass, num_layers: int) -> ModelLayers:
    """Return the layers of a base model that does not declare them; the config says that there are `num_layers`."""
    states, last_state, calls = trial
    lists = [module for module in base_model.modules() if isinstance(module, nn.ModuleList)]
    ends_with_output = _are_equal(states[-1], last_state)
    for blocks in lists if ends_with_output else ():
        block_calls = [call for call in calls if call.module in set(blocks)]
        if len(block_calls) == len(states) - 1:
            outputs = [call.output for call in block_calls]
            starts_with_layer = all(map(_are_equal, outputs, states))
            starts_with_input = _are_equal(block_calls[0].input, states[0])
            # The last state may be the output of a norm after the last layer.
            if starts_with_layer or (starts_with_input and all(map(_are_equal, outputs[:-1], states[1:]))):
                called = tuple(dict.fromkeys(call.module for call in block_calls))
                names = name_states(len(outputs))
                return ModelLayers(base_model, called, names, len(outputs), True, True, not starts_with_layer)
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


def layers_from_modules(model: nn.Module, modules: Sequence[nn.Module]) -> ModelLayers:
    """Return the given modules of any model as its layers 1 to L; raise `UserError` for a repeated module."""
    if len(set(modules)) < len(modules):
        raise UserError("a module is named twice among the given modules; its outputs would count twice")
    # Unwrap DDP, because its `forward` does not name the arguments of the model, such as `attention_mask`.
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    module_names = {module: name for name, module in unwrapped.named_modules()}
    names = {number: module_names.get(module, f"module_{number}") for number, module in enumerate(modules, start=1)}
    return ModelLayers(unwrapped, tuple(modules), names, len(modules), ends_with_output=False, is_transformers=False)


def find_head_model(model: nn.Module) -> nn.Module:
    """Return the outermost transformers model within a module, with its head if it has one.

    Raises:
        UserError: without a transformers model, with several that are not inside one another, or if it is inside of
            `nn.DataParallel`.
    """
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
            "states: attach(model, penalty, modules=[...])"
        )
    if len(names) > 1:
        raise UserError(
            f"{type(model).__name__} has {len(names)} transformers models, {', '.join(names)}; expected 1: attach to "
            f"one of them, for example attach(model.{names[0]}, penalty)"
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
        nested_models = [child for child in base_model.children() if hasattr(type(child), "base_model_prefix")]
        if len(nested_models) != 1 or (_reads_text(base_model) and not _reads_text(nested_models[0])):
            break
        base_model = nested_models[0]
    is_encoder_decoder = getattr(base_model.config, "is_encoder_decoder", False)
    if is_encoder_decoder and hasattr(base_model, "encoder") and hasattr(base_model, "decoder"):
        raise UserError(
            f"{type(head_model).__name__} is an encoder-decoder, which has two stacks of hidden states; attach to one "
            "of them, for example attach(model.get_encoder(), penalty)"
        )
    return base_model


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
def run_trial(base_model: nn.Module, model: nn.Module) -> TrialPass:
    """Run a base model on a few tokens in eval mode; training modes and random numbers stay unchanged.

    `model` is the base model or contains it. If it is sharded, it is called instead of the base model.

    Raises:
        UserError: if the model cannot be called with token ids alone, or does not return one state per token and layer.
    """
    name, device = type(base_model).__name__, find_input_device(base_model)
    if not _reads_text(base_model) or device.type == "meta":
        raise UserError(f"{name} cannot be tried on token ids; expected a model of text that has weights")
    # The base model's own hooks, such as another penalty's, must not see the trial.
    call: Any = model if model is not base_model and is_sharded_module(model) else base_model.forward
    calls: list[Call] = []

    def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        output = output[0] if isinstance(output, tuple) and output else output
        calls.append(Call(module, *(value if isinstance(value, Tensor) else None for value in (first, output))))

    token_ids = make_trial_ids(base_model)[None].to(device)
    options = {"output_hidden_states": True, "return_dict": True, "use_cache": False}
    with preserve_rng_states(device), eval_mode(base_model), ExitStack() as hooks:
        for module in base_model.modules():
            hooks.enter_context(module.register_forward_hook(record_call, with_kwargs=True))
        try:
            output = call(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **options)
            shapes = {tuple(state.shape[:-1]) for state in output.hidden_states}
        except Exception as error:  # the types depend on the architecture
            raise UserError(f"{name} cannot be tried on token ids: {shorten(error)}") from error
    if shapes != {tuple(token_ids.shape)}:
        raise UserError(
            f"{name} returns hidden states of {shorten(sorted(shapes))} vectors for {_TRIAL_TOKENS} tokens; expected "
            "one vector for each token: choose another model"
        )
    return TrialPass(output.hidden_states, output[0], calls)


def find_final_norm(base_model: nn.Module) -> nn.Module | None:
    """Return the norm outside the layers that outputs the last hidden state, or None; raise as `run_trial`."""
    trial = run_trial(base_model, base_model)
    lists = (module for module in base_model.modules() if isinstance(module, nn.ModuleList))
    in_layers = {part for module in lists for part in module.modules()}
    for module, _, output in trial.calls:
        if module in in_layers or not _are_equal(output, trial.last_state):
            continue
        # OPT-350m ends with a projection to the width of the embeddings, not a norm.
        with hold_weights(module):
            if norm_parameters(module, trial.last_state.shape[-1]) is not None:
                return module
    return None


def make_trial_ids(base_model: Any) -> Tensor:
    """Return the ids of a few tokens that are not padding."""
    padding_id = getattr(base_model.config.get_text_config(), "pad_token_id", None)
    return torch.tensor([id_ for id_ in range(_TRIAL_TOKENS + 1) if id_ != padding_id][:_TRIAL_TOKENS], device="cpu")


def _are_equal(tensor: Tensor | None, state: Tensor) -> bool:
    return tensor is not None and tensor.shape == state.shape and torch.equal(tensor.to(state.device), state)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch all modules to eval mode, and restore the mode of each module at the end."""
    training_modules = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True


@contextmanager
def preserve_rng_states(device: torch.device) -> Iterator[None]:
    """Restore the states of the global generators of `random`, numpy and torch at the end of the context.

    Loaders and collators may draw from them.
    """
    python_state = random.getstate()
    # If numpy is not imported, its generator cannot have been used.
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    # On CPUs, fork_rng ignores the device type, which only has to exist.
    devices, device_type = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    with torch.random.fork_rng(devices, device_type=device_type):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
