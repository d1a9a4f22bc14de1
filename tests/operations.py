"""Counts of the operations of torch, for tests of what does not depend on the machine."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

UNCOUNTED = frozenset(
    {
        *("view", "t", "transpose", "expand", "as_strided", "unsqueeze", "squeeze", "permute", "select", "slice"),
        *("detach", "alias", "_unsafe_view", "unbind", "split", "split_with_sizes", "diagonal", "lift_fresh"),
        *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_reshape_alias", "set_"),
        *("resize_", "is_same_size", "promote_types", "_local_scalar_dense"),
    }
)
"""Views, allocations, questions about dtypes, and what is counted as a synchronization alone."""
_SYNCHRONIZING = frozenset(
    {
        *("_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select", "equal"),
        *("bincount", "is_nonzero"),
    }
)


class CountedOperations(TorchDispatchMode):
    """Counts dispatched operations by name, and those for which the host would wait for a GPU.

    `Tensor.tolist` is not dispatched on a CPU. A test may add its calls to `synchronizations`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.synchronizations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_", "_index_put_impl_") else ()
        is_boolean = any(index is not None and index.dtype == torch.bool for index in indices)
        self.counts[name] += name not in UNCOUNTED
        self.synchronizations += name in _SYNCHRONIZING or is_boolean
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """The number of operations."""
        return self.counts.total()
