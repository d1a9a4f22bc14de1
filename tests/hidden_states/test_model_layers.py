"""The layers that names and patterns mean, and the final norm of a model with a head."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from istar import CosReg, attach
from istar.errors import UserError
from istar.hidden_states.model_layers import find_layers_in_call, name_modules, select_modules


class Tower(nn.Module):
    """Blocks of two layers each, and an unused head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(11))
        self.head = nn.Linear(4, 2)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            points = block(points)
        return points


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (["blocks.*"], [f"blocks.{index}" for index in range(11)]),  # 10 after 9, as in the model
        (["blocks.*.1"], [f"blocks.{index}.1" for index in range(11)]),
        (["head", "blocks.1*"], ["head", "blocks.1", "blocks.10"]),
        ("*", ["blocks", "head"]),
    ],
)
def test_a_star_stands_for_one_part_of_a_name(wanted: Any, expected: list[str]) -> None:
    model = Tower()
    assert select_modules(model, wanted) == [model.get_submodule(name) for name in expected]


def test_a_point_is_no_wildcard() -> None:
    with pytest.raises(UserError, match=r"no module of Tower is named head\.; did you mean head"):
        select_modules(Tower(), ["head."])


def test_wrappers_of_torch_add_nothing_to_a_name() -> None:
    model = Tower()
    assert list(name_modules(torch.compile(model, backend="eager"))) == list(dict(model.named_modules()))
    assert list(name_modules(nn.Sequential(model)))[:2] == ["", "0"]


def test_a_penalty_takes_the_same_patterns() -> None:
    torch.manual_seed(0)
    model, points, losses = Tower(), torch.randn(5, 3, 4), []
    for modules in (["blocks.*"], list(model.blocks)):
        with attach(model, CosReg(1.0, layers="all"), modules=modules) as attached:
            model(points)
            losses.append(attached.loss())
            assert attached.num_layers == 11
    assert torch.equal(*losses)
    with pytest.raises(UserError, match="no module of Tower is named block"):
        attach(model, CosReg(1.0), modules=["block.*"])


@pytest.mark.parametrize("head", [hf.BertForMaskedLM, hf.BertForSequenceClassification])
def test_a_norm_inside_of_a_head_is_not_the_final_norm(head: type) -> None:
    """The head of a masked language model is a dense layer and a norm, and gets what a final norm would get."""
    sizes: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    model = head(hf.BertConfig(**sizes, num_hidden_layers=2, vocab_size=20))
    layers = find_layers_in_call(model, lambda: model(input_ids=torch.arange(10)[None]))
    assert (layers.base_model, layers.modules, layers.norm) == (model.bert, tuple(model.bert.encoder.layer), None)


def test_a_model_that_a_call_runs_twice_is_refused() -> None:
    model = hf.ViTModel(hf.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                                     image_size=8, patch_size=4))  # fmt: skip
    images = torch.randn(2, 3, 8, 8)
    with pytest.raises(UserError, match="ViTModel was called 2 times for a batch; expected one call"):
        find_layers_in_call(model, lambda: [model(images), model(images)])
