"""The names of the states that a reader returns, for modules that are not of transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.hidden_states.reader import HiddenStateReader


class Tower(nn.Module):
    """Layers without a name for their states; the second one returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)])

    def forward(self, points: Tensor) -> Any:
        states, _ = self.blocks[1](self.blocks[0](self.stem(points)).tanh())
        return self.head(states)


def test_any_modules_are_read_under_their_names_and_only_when_called():
    model, points = Tower(), torch.randn(3, 5, 4)
    reader = HiddenStateReader(model, modules=[model.stem, *model.blocks])
    assert reader.names == ("stem", "blocks.0", "blocks.1")
    output, states = reader.call(model, points)
    stem = model.stem(points)
    expected = [stem, model.blocks[0](stem), model.blocks[1](model.blocks[0](stem).tanh())[0]]
    assert list(states) == list(reader.names)
    assert all(torch.equal(*pair) for pair in zip(states.values(), expected, strict=True))
    assert torch.equal(output, model.head(expected[-1]))
    # A pass outside of `call` is not read.
    model(points)
    with pytest.raises(UserError, match="no forward pass was read"):
        reader.take()
    reader.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
