"""Taps, checked against the outputs of the model's blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from istar.geometry.collect.layer_outputs import Taps
from tests.architectures import MODELS


@pytest.mark.parametrize("architecture", MODELS)
def test_states_equal_the_outputs_of_the_blocks(architecture: str) -> None:
    make_model, blocks_name, norm_name = MODELS[architecture]
    torch.manual_seed(0)
    model = make_model().eval()
    for parameter in model.parameters():
        # Freshly initialized normalizations scale by 1 and shift by 0, which could hide a wrong tap.
        parameter.data += 0.05 * torch.randn_like(parameter)
    inputs = {"input_ids": torch.randint(2, 50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    outputs: list[Tensor] = []

    def record_output(module: nn.Module, arguments: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    handles = [block.register_forward_hook(record_output) for block in model.get_submodule(blocks_name)]  # type: ignore[union-attr]
    with torch.no_grad():
        last_hidden_state = model(**inputs).last_hidden_state
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        # With `output_hidden_states`, transformers registers permanent hooks of its own.
        model(**inputs, output_hidden_states=True)
    num_hooks_before = count_hooks(model)
    taps = Taps(model)
    states = taps(inputs)
    layers = [f"layer_{number}" for number in (1, 2, 3)]
    assert list(states) == taps.names == ["embeddings", *layers, *(["final_norm"] if norm_name else [])]
    assert len(outputs) == 3
    for layer, output in zip(layers, outputs, strict=True):
        assert torch.equal(states[layer], output), layer
    if norm_name:
        assert taps.norm is model.get_submodule(norm_name)
        assert torch.equal(states["final_norm"], last_hidden_state)
        assert not torch.allclose(states["final_norm"], states["layer_3"], atol=1e-3)
    elif architecture != "opt_350m":
        assert torch.equal(states["layer_3"], last_hidden_state)
    assert {tuple(state.shape) for state in states.values()} == {(2, 7, 32)}
    # The hooks of `Taps` are removed.
    assert count_hooks(model) == num_hooks_before


def count_hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
