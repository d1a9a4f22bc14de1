"""Detection of the modules that compute a model's hidden states."""

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
        base_model: the module whose forward pass computes all hidden states: a transformers model without its head, or
            any model that the caller passed together with its layer modules.
        modules: modules whose outputs are the hidden states, in the model's order. Empty if the model declares none, so
            that it must be called with `output_hidden_states=True`.
        num_layers: L, the number of hidden states after the embedding output.
        ends_with_norm: whether the last hidden state is the output of the final norm instead of that of the last layer.
        is_transformers: whether the base model is a transformers model.
    """

    base_model: nn.Module
    modules: tuple[nn.Module, ...]
    num_layers: int
    ends_with_norm: bool
    is_transformers: bool

    @property
    def is_shared(self) -> bool:
        """Whether one module computes several layers, as in ALBERT."""
        return 0 < len(self.modules) < self.num_layers


def find_layers(model: nn.Module) -> ModelLayers:
    """Return the layers that a transformers model declares. The model may be inside of another module.

    Raises:
        UserError: as `find_base_model`.
    """
    base_model = find_base_model(model)
    modules = declared_layers(base_model)
    config: Any = base_model.config
    num_layers = max(int(config.get_text_config().num_hidden_layers), len(modules))
    ends_with_norm = len(modules) > 0 and getattr(config, "tie_last_hidden_states", None) is not False
    return ModelLayers(base_model, tuple(modules), num_layers, ends_with_norm, is_transformers=True)


def layers_from_modules(model: nn.Module, modules: Sequence[nn.Module]) -> ModelLayers:
    """Return the given modules of any model as its layers 1 to L; raise `UserError` if a module is given twice."""
    if len(set(modules)) < len(modules):
        raise UserError("a module is named twice among the given modules; its outputs would count twice")
    # Unwrap DDP, because its `forward` does not name the arguments of the model, such as `attention_mask`.
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    return ModelLayers(unwrapped, tuple(modules), len(modules), ends_with_norm=False, is_transformers=False)


def find_head_model(model: nn.Module) -> nn.Module:
    """Return the outermost transformers model within a module, with its head if it has one.

    Raises:
        UserError: if there is no transformers model, or it is inside of `nn.DataParallel`.
    """
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise UserError("nn.DataParallel runs copies of the model, which hooks cannot follow; use DDP")
        # All classes of transformers models have this attribute.
        if hasattr(type(module), "base_model_prefix"):
            return module
    raise UserError(
        f"there is no transformers model in {type(model).__name__}; name the modules whose outputs are the hidden "
        "states: attach(model, penalty, modules=[...])"
    )


def find_base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model within a module, without its head.

    If transformers models are nested, like the decoder inside OPT's model, the innermost one is returned.

    Raises:
        UserError: if there is no transformers model, or it is an encoder-decoder or inside of `nn.DataParallel`.
    """
    head_model: Any = find_head_model(model)
    base_model: nn.Module = head_model.base_model
    while True:
        nested_models = [child for child in base_model.children() if hasattr(type(child), "base_model_prefix")]
        if len(nested_models) != 1:
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
    """Return the modules that a transformers model declares as the source of its hidden states, or an empty list."""
    # The declaration is a class of modules, or an `OutputRecorder` of transformers. The recorder names such a class and
    # the index of one of its outputs (`index`), and may restrict it to modules of a certain name (`layer_name`).
    declaration = getattr(base_model, "can_record_outputs", {}).get("hidden_states")
    layer_class = getattr(declaration, "target_class", declaration)
    is_first_output = getattr(declaration, "index", 0) == 0
    includes_all_modules = getattr(declaration, "layer_name", None) is None
    if not isinstance(layer_class, type) or not is_first_output or not includes_all_modules:
        return []
    # Only text models are certain to return the output of the final norm as the last hidden state.
    if base_model.main_input_name != "input_ids":
        return []
    return [module for module in base_model.modules() if isinstance(module, layer_class)]
