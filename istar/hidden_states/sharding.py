"""Whether FSDP2 shards a module or a tensor.

The classes are looked up among the loaded modules, because importing them takes half as long as importing torch.
Nothing is sharded before they are loaded.
"""

import sys
from typing import Any


def is_sharded_module(module: Any) -> bool:
    """Return whether `fully_shard` was called with a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_sharded_tensor(tensor: Any) -> bool:
    """Return whether each process has only a part of a tensor."""
    sharded_tensors = sys.modules.get("torch.distributed.tensor")
    return sharded_tensors is not None and isinstance(tensor, sharded_tensors.DTensor)
