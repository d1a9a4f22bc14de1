"""Dropout of another probability: a placebo for penalties on hidden states."""

from torch import nn

from istar.errors import UserError


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set the probability of all dropout modules of a model, also of those in its attention and its head.

    Raises:
        UserError: if the model has no dropout modules, as Llama has none.
    """
    modules = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    if not modules:
        raise UserError(f"reg=dropout: {type(model).__name__} has no dropout modules; choose another penalty")
    for module in modules:
        module.p = probability
