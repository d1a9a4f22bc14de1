"""FSDP2: each process holds a part of every weight, of its gradient and of the optimizer's states.

torch's modules are imported within the functions, because they take as long to import as a third of torch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

from istar.errors import UserError
from istar.hidden_states.model_layers import find_layers
from istar.hidden_states.sharding import is_sharded_module


class ShardingStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2; checkpoints are single files with all weights and states, written by rank 0.

    Attributes:
        precision: precision of the layers; see `shard`. Lightning's own precision is `32-true`.
    """

    def __init__(self, precision: str) -> None:
        super().__init__(save_distributed_checkpoint=False)
        self.precision = precision


def shard(model: nn.Module, precision: str) -> None:
    """Shard a model over all processes, layer by layer, with `torch.distributed.fsdp.fully_shard`.

    Before a layer is computed, its weights are gathered, and afterwards they are freed. With the precision
    `bf16-mixed`, weights are gathered, and layers computed, in bfloat16; gradients are summed in float32. The weights
    and the optimizer's states stay in float32. Raises a `UserError` if no module computes the layers of the model, so
    that there is nothing to shard.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layers = find_layers(model).modules
    if not layers:
        raise UserError(f"trainer.strategy=fsdp: no modules of {type(model).__name__} return its layers; use ddp")
    is_mixed = precision == "bf16-mixed"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_mixed else MixedPrecisionPolicy()
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def gather_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Return all weights of a sharded model by name on rank 0, on the CPU, and {} on the others.

    All processes call this together. For a model that is not sharded, return None.
    """
    if not is_sharded_module(model):
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights: dict[str, Tensor] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )  # type: ignore[assignment]
    return weights


def scatter_weights(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights by name into a module that contains a sharded model; every process has all of them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(module, dict(weights), options=StateDictOptions(full_state_dict=True))
