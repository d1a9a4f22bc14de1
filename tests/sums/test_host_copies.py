"""Copies of several tensors at once."""

import pytest
import torch

from istar.sums.host_copies import copy_integers


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_have_the_values_and_shapes(device: str) -> None:
    tensors = [torch.arange(6).view(2, 3), torch.tensor([], dtype=torch.int64), torch.arange(8).view(2, 4)[:, ::2]]
    copies = copy_integers(tensors, torch.device(device))
    assert [copy.tolist() for copy in copies] == [tensor.tolist() for tensor in tensors]
    assert {(copy.device.type, copy.dtype) for copy in copies} == {(device, torch.int64)}
    assert copies[0].is_contiguous()
