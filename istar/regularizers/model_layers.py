"""Where a model's hidden states come from: what transformers models declare, or the modules that the caller names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from istar.errors import UserError


@dataclass(frozen=True)
class ModelLayers:
    """The modules that compute a model's hidden states.

    Attributes:
        base_model: the module whose forward passes compute all hidden states: a transformers model without its head,
            or the model that the caller gave.
        modules: those whose outputs are the hidden states, in the model's order. None at all if the model has to be
            asked for them with `output_hidden_states=True`.
        num_layers: L, the number of hidden states behind the embeddings.
        ends_with_norm: whether the last hidden state is that behind the final norm, instead of the last layer's output.
        is_transformers: whether the model is one of transformers.
    """

    base_model: nn.Module
    modules: tuple[nn.Module, ...]
    num_layers: int
    ends_with_norm: bool
    is_transformers: bool

    @property
    def is_shared(self) -> bool:
        """Whether the same modules are called for several layers, as ALBERT's are."""
        return 0 < len(self.modules) < self.num_layers

    def may_skip(self) -> bool:
        """Whether layerdrop may skip layers in the present mode."""
        droppers: list[Any] = [module for module in self.base_model.modules() if hasattr(module, "layerdrop")]
        return any(module.training and module.layerdrop > 0 for module in droppers)


def find_layers(model: nn.Module) -> ModelLayers:
    """The layers of the transformers model within a module, as it declares them.

    Raises:
        UserError: if there is none, or if it is an encoder-decoder or replicated by `nn.DataParallel`.
    """
    base_model = find_base_model(model)
    modules = declared_layers(base_model)
    config: Any = base_model.config
    num_layers = max(int(config.get_text_config().num_hidden_layers), len(modules))
    ends_with_norm = len(modules) > 0 and getattr(config, "tie_last_hidden_states", None) is not False
    return ModelLayers(base_model, tuple(modules), num_layers, ends_with_norm, is_transformers=True)


def name_layers(model: nn.Module, modules: Sequence[nn.Module]) -> ModelLayers:
    """The modules of any model that the caller names, as layers 1 to L.

    Raises:
        UserError: if a module is named twice.
    """
    if len(set(modules)) < len(modules):
        raise UserError("a module is named twice among the given modules; its outputs would count twice")
    # DDP's `forward` does not name the arguments of the model within it.
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    return ModelLayers(unwrapped, tuple(modules), len(modules), ends_with_norm=False, is_transformers=False)


def find_base_model(model: nn.Module) -> nn.Module:
    """The outermost transformers model within a module, without its head: the one that its head calls.

    Raises:
        UserError: as `find_layers`.
    """
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise UserError("nn.DataParallel runs copies of the model, which hooks cannot follow; use DDP")
        if hasattr(type(module), "base_model_prefix"):
            base_model = module.base_model
            break
    else:
        raise UserError(
            f"there is no transformers model in {type(model).__name__}; name the modules whose outputs are the hidden "
            "states: attach(model, penalty, modules=[...])"
        )
    assert isinstance(base_model, nn.Module)
    base_model = _innermost(base_model)
    is_encoder_decoder = getattr(base_model.config, "is_encoder_decoder", False)
    if is_encoder_decoder and hasattr(base_model, "encoder") and hasattr(base_model, "decoder"):
        raise UserError(
            f"{type(module).__name__} is an encoder-decoder, whose two stacks have hidden states of their own; attach "
            "to one of them, for example attach(model.get_encoder(), penalty)"
        )
    return base_model


def _innermost(base_model: nn.Module) -> nn.Module:
    """The only transformers model within a base model, if there is one: OPT's head calls that one, its decoder."""
    models = [module for module in base_model.children() if hasattr(type(module), "base_model_prefix")]
    return _innermost(models[0]) if len(models) == 1 else base_model


def declared_layers(base_model: nn.Module) -> list[nn.Module]:
    """The layers that a transformers model declares as the source of its hidden states; none if it declares none."""
    declared = getattr(base_model, "can_record_outputs", {}).get("hidden_states")
    layer_class = getattr(declared, "target_class", declared)
    is_plain = getattr(declared, "index", 0) == 0 and getattr(declared, "layer_name", None) is None
    # Only models of text always return the normalized state as the last one.
    if not isinstance(layer_class, type) or not is_plain or base_model.main_input_name != "input_ids":
        return []
    return [module for module in base_model.modules() if isinstance(module, layer_class)]
