"""A small encoder and a small decoder with inputs, and the comparison of an attached penalty with the naive one."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close

from istar.hidden_states import attach
from istar.regularizers import IStar
from tests.penalties import WEIGHT, WIDTH, ZETA, Recording, assert_equal, gradients, naive_loss, seeded_pass, sigma

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
    "vocab_size": 40, "initializer_range": 0.2, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
IDS = (torch.arange(3, 21).reshape(3, 6) * 7 % 37 + 3) * MASK
UNLABELLED = {"input_ids": IDS, "attention_mask": MASK}
INPUTS = {**UNLABELLED, "labels": torch.tensor([0, 1, 1])}


def bert(**settings: Any) -> hf.PreTrainedModel:
    """Return an encoder with dropout and a head for `INPUTS`."""
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**SHAPE, **settings)).double().train()


def llama(**settings: Any) -> hf.PreTrainedModel:
    """Return a decoder with a final norm."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SHAPE, num_key_value_heads=1, bos_token_id=1, eos_token_id=2, **settings)
    return hf.LlamaForCausalLM(config).double().train()


def make_istar(layers: Any = "all", **arguments: Any) -> IStar:
    penalty = IStar(WEIGHT, ZETA, layers=layers, **arguments)
    penalty.shrinkage_covariance = sigma()
    return penalty


def check_states_and_gradients(
    model: nn.Module, inputs: dict[str, Tensor], layers: str = "all", seed: int = 1, called: nn.Module | None = None
) -> list[Tensor]:
    """Compare states, loss and the gradient of every parameter with the naive ones. Return all states of the model."""
    outputs = seeded_pass(model, inputs, seed, output_hidden_states=True)
    all_states = outputs.hidden_states
    states = all_states[int(layers == "all") :]
    # Prompt tuning puts virtual tokens, which count, in front of the text.
    mask = inputs["attention_mask"]
    mask = nn.functional.pad(mask, (states[0].shape[1] - mask.shape[1], 0), value=1)
    loss = naive_loss(outputs, states, mask)
    expected = [loss.detach(), gradients(model, loss)]
    penalty = Recording(layers)
    with attach(model, penalty) as watch:
        outputs = seeded_pass(model if called is None else called, inputs, seed)
        loss = watch.loss() + (outputs.loss if "loss" in outputs else 0)
        actual = [loss.detach(), gradients(model, loss)]
    assert_equal(penalty.received, states)
    assert_close(actual, expected, **CLOSE)
    assert penalty.last is not None
    assert penalty.last.points == mask.sum() * len(states)
    assert len(actual[1]) > 0
    return list(all_states)
