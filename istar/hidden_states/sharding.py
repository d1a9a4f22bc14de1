"""Whether FSDP2 shards a module or a tensor.

The classes are looked up among the loaded modules, because importing them takes half as long as importing torch.
Nothing is sharded before they are loaded.
"""

import sys
from typing import Any

from torch import nn


def is_sharded_module(module: Any) -> bool:
    """Return whether `fully_shard` was called with a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def reshard(model: nn.Module) -> None:
    """Give all modules that FSDP2 shards their sharded parameters back.

    A pass without a backward pass leaves the root module with its whole parameters. An optimizer that is made then
    would update those, and the training would go wrong in silence.
    """
    for module in model.modules():
        if is_sharded_module(module):
            module.reshard()  # type: ignore[operator]


def is_sharded_tensor(tensor: Any) -> bool:
    """Return whether each process has only a part of a tensor."""
    sharded_tensors = sys.modules.get("torch.distributed.tensor")
    return sharded_tensors is not None and isinstance(tensor, sharded_tensors.DTensor)
